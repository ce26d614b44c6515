"""Near-duplicates and evaluation items are found, listed, and removed; a killed run continues."""

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data_tools import cleaning, parts
from megatron_blackmamba.data_tools.evaluation_items import Item, read_items
from megatron_blackmamba.data_tools.evaluation_rows import choose_fields, row_of, texts_of
from megatron_blackmamba.data_tools.mixture import verify_mixture
from megatron_blackmamba.data_tools.options import CleaningOptions
from megatron_blackmamba.data_tools.origins import CleaningManifest
from megatron_blackmamba.data_tools.readers import ReadOptions
from megatron_blackmamba.data_tools.rejects import InputError, Tolerance
from megatron_blackmamba.data_tools.sources import find_sources
from megatron_blackmamba.data_tools.splitters import SpacedWords
from megatron_blackmamba.formats.evaluations import PAPER
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from megatron_blackmamba.formats.shards import ShardManifest
from tests.waiting import wait_until

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")

from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig

from benchmarks.cleaning import copies_found, items_found, plant_copies, plant_items, removed_records
from megatron_blackmamba.data_tools.signatures import MinHash, modulo_prime
from tests.thorough import thorough

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def documents():
    """Documents of 60 to 300 words, common words more often."""
    choose = random.Random(3)
    words = ["".join(choose.choices(LETTERS, k=choose.randint(2, 9))) for _ in range(4000)]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    return [" ".join(choose.choices(words, weights, k=choose.randint(60, 300))) for _ in range(300)]


def clean(verb, *arguments):
    done = CliRunner().invoke(app, ["data", verb, *map(str, arguments), "--workers", "1", "--json"])
    if done.exception:
        raise done.exception
    return json.loads(done.stdout)


def records_of(part):
    with zstandard.open(part, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def cut_of(detail):
    begin, end = detail.partition(":")[0].removeprefix("characters ").split("-")
    return int(begin), int(end)


def rows(out_dir):
    header, *lines = (line.split("\t") for line in (out_dir / "removed.tsv").read_text().splitlines())
    assert tuple(header) == parts.COLUMNS
    return lines


def test_planted_copies_are_removed(documents, tmp_path, run):
    corpus = plant_copies(documents, random.Random(0))
    out = tmp_path / "clean"
    counts = clean("dedup", corpus.write(tmp_path / "corpus.jsonl"), out)
    removed = removed_records(out)
    found = copies_found(corpus, removed)
    assert found["recall at 5%"] == 1 and found["recall at 10%"] >= 0.95 and found["precision"] >= 0.99, found
    assert counts["removed"] == len(removed) and counts["kept"] == len(corpus.texts) - len(removed)
    for file, record, reason, resembles, _ in rows(out):
        kept_file, _, kept = resembles.rpartition(":")
        assert (file, kept_file, reason) == ("corpus.jsonl", "corpus.jsonl", "near-duplicate")
        family = {corpus.origin[i] if corpus.origin[i] is not None else i for i in (int(record) - 1, int(kept) - 1)}
        assert len(family) == 1 and int(kept) - 1 not in removed
    assert run(out).documents == counts["kept"]


def test_signature_equals_datatroves(documents, tmp_path):
    config = MinhashConfig(n_grams=2, num_buckets=60, hashes_per_bucket=7, hash_config=HashConfig(precision=32))
    ours, theirs = (
        kind(str(tmp_path), config=config, language=SpacedWords()) for kind in (MinHash, MinhashDedupSignature)
    )
    for text in ("two words", "again and again and again", documents[0], " ".join(documents[:20])):
        shingles = theirs.get_shingles(text)
        assert ours.get_signature(shingles) == theirs.get_signature(shingles)


def test_modulo_prime_at_every_edge():
    prime = 2**61 - 1
    values = [0, 1, prime - 1, prime, prime + 1, 7 * prime, 8 * prime - 1, 8 * prime, 2**64 - 1]
    assert modulo_prime(np.array(values, np.uint64)).tolist() == [value % prime for value in values]


def test_planted_evaluation_items_are_removed(documents, tmp_path):
    choose = random.Random(5)
    own = ["".join(choose.choices(LETTERS, k=7)) for _ in range(300)]
    lengths = [4, 8, 11, 12, 30]
    records = [{"text": " ".join(choose.choices(own, k=length)) + "?"} for length in lengths for _ in range(4)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    items = read_items([str(tmp_path / "items.jsonl")])
    corpus = plant_items(documents, items, random.Random(0))
    out = tmp_path / "clean"
    clean("decontaminate", corpus.write(tmp_path / "corpus.jsonl"), out, "--against", tmp_path / "items.jsonl")
    found = items_found(corpus, removed_records(out))
    assert found["recall, verbatim"] == found["recall, re-cased"] == found["recall, re-spaced"] == 1, found
    assert found["removed without a planted item"] == 0
    names = {item.name: " ".join(item.texts) for item in items}
    kept = {record["record"]: record for part in out.glob("part_*") for record in records_of(part)}
    for _, record, reason, item, detail in rows(out):
        text, (begin, end) = corpus.texts[int(record) - 1], cut_of(detail)
        passage = re.search("⟦(.*)⟧", detail)[1].lower().split()
        assert {word.strip("?") for word in passage} <= set(names[item].lower().strip("?").split())
        assert passage[0] in text[begin:end].lower()
        if reason == "evaluation item":
            assert int(record) not in kept and (begin, end) == (0, len(text))
        else:
            pieces = (text[:begin].strip(), text[end:].strip())
            assert kept[int(record)]["text"] == "\n\n".join(piece for piece in pieces if piece)
            assert reason == "evaluation item, cut" and kept[int(record)]["cut"] == [[begin, end]]


def test_changed_evaluation_items_are_refused(tmp_path):
    corpus, items, out = tmp_path / "corpus.jsonl", tmp_path / "items.jsonl", tmp_path / "out"
    corpus.write_text('{"text": "red otter juggles seven lanterns"}\n{"text": "blue heron recites nine sonnets"}\n')
    items.write_text('{"text": "otter juggles seven lanterns"}\n')
    command = ["decontaminate", corpus, out, "--against", items]
    assert clean(*command)["removed"] == clean(*command)["removed"] == 1
    items.write_text('{"text": "heron recites nine sonnets"}\n')
    with pytest.raises(InputError, match=r"was made with other contents of items.jsonl: choose another folder"):
        clean(*command)


def test_every_input_format_is_read(tmp_path):
    import gzip

    text = " ".join(LETTERS) + " and so on until the end of it"
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text(text)
    with gzip.open(tmp_path / "in/b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": text.upper()}) + "\n" + json.dumps({"text": "quite another text"}) + "\n")
    assert clean("dedup", tmp_path / "in", tmp_path / "out")["removed"] == 1
    ((file, record, _, resembles, _),) = rows(tmp_path / "out")
    assert {f"{file}:{record}", resembles} == {"a.txt:1", "b.jsonl.gz:1"}
    with pytest.raises(InputError, match="was made with other n_grams: choose another folder"):
        clean("dedup", tmp_path / "in", tmp_path / "out", "--n-grams", "3")
    assert clean("dedup", tmp_path / "in", tmp_path / "out")["kept"] == 2


def test_output_in_object_storage_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="this writes to a local folder only"):
        clean("dedup", tmp_path / "a.jsonl", "s3://corpus/clean")


def test_a_bad_record_stops_the_work(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"body": "bad"}\n')
    with pytest.raises(
        InputError, match=r"a.jsonl, record 2: missing field .* and list them in removed.tsv: --max-bad"
    ):
        clean("dedup", tmp_path / "a.jsonl", tmp_path / "out")


@pytest.mark.parametrize("verb", ["dedup", "decontaminate"])
def test_skipped_records_are_listed(verb, tmp_path, run):
    lines = [*(json.dumps({"s": [{"text": text}]}) for text in ("one", "", "two", 3)), "", "{"]
    (tmp_path / "a.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "items.jsonl").write_text('{"text": "otter juggles seven lanterns"}\n')
    options = ["--field", "s[].text", "--max-bad", "2", "--part-size", "1KB"]
    options += ["--against", tmp_path / "items.jsonl"] if verb == "decontaminate" else []
    out = tmp_path / "clean"
    counts = clean(verb, tmp_path / "a.jsonl", out, *options)
    assert (counts["kept"], counts["removed"], counts["skipped"]) == (2, 0, 4)
    assert [row[:3] for row in rows(out)] == [
        ["a.jsonl", number, reason]
        for number, reason in (("4", "not a string"), ("5", "blank"), ("6", "invalid JSON"), ("2", "empty"))
    ]
    assert run(out).documents == 2
    said = CliRunner().invoke(app, ["data", verb, *map(str, (tmp_path / "a.jsonl", out, *options))]).stdout
    assert "kept 2 documents, removed 0, skipped 4 records without a text (removed.tsv lists them)" in said


def lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@thorough
def test_a_killed_run_continues(documents, tmp_path):
    (tmp_path / "in").mkdir()
    corpus = plant_copies(documents, random.Random(1))
    for number in range(8):
        lines = (json.dumps({"text": text}) + "\n" for text in corpus.texts[number::8])
        (tmp_path / f"in/{number}.jsonl").write_text("".join(lines))
    command = [sys.executable, "-m", "megatron_blackmamba", "data", "dedup", str(tmp_path / "in")]
    few = ["--part-size", "1KB", "--buckets", "4", "--hashes", "2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for stage in ("1_signatures", "6_documents"):
        process = subprocess.Popen([*command, str(killed), *few, "--workers", "2"], start_new_session=True)
        done = killed / cleaning.WORK / "dedup" / stage / "completions"
        while process.poll() is None and not (done.is_dir() and any(done.iterdir())):
            time.sleep(0.01)
        process.kill()
        process.wait()
        wait_until(lambda group=process.pid: not lives(group), seconds=300)
    for out in (killed, whole):
        clean("dedup", tmp_path / "in", out, *few)

    def content(out):
        return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    assert len(content(whole)) == 10 and content(killed) == content(whole)


def test_two_commands_never_share_a_folder(write_jsonl, tmp_path):
    corpus = write_jsonl("in.jsonl", ["some words", "others", "otter juggles seven lanterns"])
    lock = tmp_path / "out" / cleaning.WORK / "lock"
    lock.parent.mkdir(parents=True)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
    hold += "print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold, str(lock)], **pipes) as other:
        other.stdout.readline()
        for verb in (("dedup",), ("decontaminate", "--against", corpus)):
            with pytest.raises(InputError, match="another command works in this folder now"):
                clean(verb[0], corpus, tmp_path / "out", *verb[1:])
        other.stdin.close()
    assert clean("dedup", corpus, tmp_path / "out")["kept"] == 3


def test_a_full_disk_is_named(write_jsonl, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts.PartWriter, "run", full)
    with pytest.raises(InputError, match=r"out: No space left on device\. Once that is put right"):
        clean("dedup", write_jsonl("in.jsonl", ["some words"]), tmp_path / "out")


def test_items_without_enough_words_are_refused(write_jsonl, tmp_path):
    corpus, items = write_jsonl("in.jsonl", ["some words"]), write_jsonl("items.jsonl", ["a", "b c"])
    with pytest.raises(InputError, match="each of its 2 items has too little distinctive text"):
        clean("decontaminate", corpus, tmp_path / "out", "--against", items)


def test_cleaning_that_cannot_begin_is_refused(write_jsonl, tmp_path):
    corpus, out = write_jsonl("in.jsonl", ["some words"]), tmp_path / "out"
    with pytest.raises(InputError, match=r"standard input \(-\) can be read only once"):
        clean("dedup", "-", out)
    with pytest.raises(InputError, match="--n-grams, --buckets and --hashes are at least 1"):
        clean("dedup", corpus, out, "--buckets", "0")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match=r"empty\.jsonl: no item found"):
        clean("decontaminate", corpus, out, "--against", tmp_path / "empty.jsonl")
    (tmp_path / "items.txt").write_text("a question and its answer")
    with pytest.raises(InputError, match=r"items\.txt: evaluation items must be JSON Lines"):
        clean("decontaminate", corpus, out, "--against", tmp_path / "items.txt")


@pytest.mark.parametrize("change", ["size", "time"])
def test_files_that_change_meanwhile_are_refused(write_jsonl, tmp_path, change):
    corpus = write_jsonl("in.jsonl", ["one", "two"])
    planned = find_sources([str(corpus)]).sources
    if change == "size":
        corpus.write_text(corpus.read_text() * 2)
        os.utime(corpus, ns=(planned[0].modified_ns,) * 2)
    else:
        os.utime(corpus, ns=(planned[0].modified_ns + 1_000_000_000,) * 2)
    work = cleaning.Cleaning("dedup", [planned], tmp_path / "out", ReadOptions(), Tolerance(), CleaningOptions(), {})
    with pytest.raises(InputError, match="changed while this ran"):
        list(parts.RawDocuments(work, "1_documents", noted=False).run(None, 0, 1))


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    """A folder with raw files, their deduplicated parts in `clean`, and of these the decontaminated ones in `final`."""
    folder = tmp_path_factory.mktemp("cleaned")
    (folder / "raw").mkdir()
    for name in ("train", "val"):
        lines = (json.dumps({"text": f"{name} document {LETTERS[i:]} {i}"}) + "\n" for i in range(20))
        (folder / f"raw/{name}.jsonl").write_text("".join(lines))
    (folder / "items.jsonl").write_text('{"text": "otter juggles seven lanterns"}\n')
    clean("dedup", folder / "raw", folder / "clean", "--part-size", "1KB")
    clean("decontaminate", folder / "clean", folder / "final", "--against", folder / "items.jsonl", "--part-size", "1B")
    return folder


@pytest.fixture
def mixture(run, cleaned, tmp_path):
    """Return the mixture of training and validation shards made from these inputs."""

    def make(training, validation):
        for name, path in (("train", training), ("held_out", validation)):
            run(cleaned / path, out=name, seed=len(name))
        path = tmp_path / "mixture.yaml"
        path.write_text("sources: [{name: a, shards: train, validation: held_out}]")
        return Mixture.read(path)

    return make


@pytest.mark.parametrize(
    "training, validation, leak",
    [
        ("clean", "raw/val.jsonl", r"trains on val\.jsonl \(in part_00002\.jsonl\.zst\), which "),
        ("final", "raw/val.jsonl", r"trains on val\.jsonl \(in part_00002\.jsonl\.zst\), which "),
        ("raw", "final/part_00002.jsonl.zst", r"trains on val\.jsonl, which .*: make the training shards again"),
        ("final", "clean/part_00002.jsonl.zst", r"make the training shards again without it"),
    ],
)
def test_cleaning_does_not_hide_a_leak(mixture, training, validation, leak):
    with pytest.raises(MixtureError, match=leak):
        verify_mixture(mixture(training, validation))


def test_parts_of_other_raw_files_are_no_leak(mixture, tmp_path):
    assert verify_mixture(mixture("final/part_00001.jsonl.zst", "raw/val.jsonl"), 16)
    manifest = ShardManifest.read(tmp_path / "train/shard_00001.manifest.json")
    assert [raw.name for raw in manifest.sources[0].all_raw] == ["part_00001.jsonl.zst"] * 2 + ["train.jsonl"]


def test_raw_file_without_kept_documents_is_no_origin(cleaned, tmp_path):
    (tmp_path / "raw").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(cleaned / "raw/val.jsonl", tmp_path / "raw" / name)
        with open(tmp_path / "raw" / name, "a") as file:
            file.write("\n")
    clean("dedup", tmp_path / "raw", tmp_path / "out")
    (part,) = CleaningManifest.read(tmp_path / "out").parts
    assert (part.documents, len(part.origins)) == (20, 1)


def test_missing_and_changed_parts_are_named(cleaned, run, tmp_path):
    for name in ("raw", "clean"):
        shutil.copytree(cleaned / name, tmp_path / name)
    part, command = tmp_path / "clean/part_00002.jsonl.zst", ["dedup", tmp_path / "raw", tmp_path / "clean"]
    whole = part.read_bytes()
    changed = tmp_path / "clean/part_00001.jsonl.zst"
    assert len(run(tmp_path / "clean").shards) == 1
    part.unlink()
    for act in (lambda: clean(*command, "--part-size", "1KB"), lambda: run(tmp_path / "clean", out="other")):
        with pytest.raises(InputError, match=rf"{part}: is missing, though"):
            act()
    part.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=rf"{part}: has {len(whole) - 1} bytes, not {len(whole)}, though"):
        run(tmp_path / "clean", out="other")
    part.write_bytes(whole)
    changed.write_bytes(zstandard.compress(b'{"text": "another one"}\n'))
    with pytest.raises(InputError, match=rf"{changed}: is not what cleaning.manifest beside it describes"):
        run(changed, out="other")


def test_unfinished_cleaning_is_not_tokenized(cleaned, run, tmp_path):
    shutil.copytree(cleaned / "clean", tmp_path / "clean")
    (tmp_path / "clean/.work/dedup/done.json").unlink()
    with pytest.raises(InputError, match=r"clean: `blackmamba data dedup` has not finished here"):
        run(tmp_path / "clean")


@thorough
def test_tasks_of_lm_eval_are_items(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "who sings", "choices": ["a bird", "a stone"], "gold": 0}))
    (tmp_path / "singing.yaml").write_text(f"""
task: singing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{q}}}}"
doc_to_choice: choices
doc_to_target: gold
should_decontaminate: true
doc_to_decontamination_query: q
""")
    assert read_items(["singing"], str(tmp_path)) == [Item("singing:1", ("who sings a bird", "who sings"))]
    with pytest.raises(InputError, match="neither a file nor a task of lm-eval"):
        read_items(["no_such_task"], str(tmp_path))


@pytest.mark.parametrize(
    "record, texts",
    [
        ({"query": "He", "choices": ["runs", "flies"], "label": 1}, ("He flies", "He")),
        ({"ctx": "[header] How [title] He", "endings": ["[step] runs", "x"], "label": "0"}, ("How He runs", "How He")),
        (
            {"goal": "Cut", "sol1": "with a knife", "sol2": "with water", "label": "0"},
            ("Cut with a knife", "Cut", "Cut with a knife with water"),
        ),
        ({"sentence": "As _ sat", "option1": "he", "option2": "she", "answer": "2"}, ("As she sat", "As   sat")),
        ({"question": "Is it?", "passage": "It is.", "label": 1}, ("It is.", "Is it?")),
        (
            {"question": "Why", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"},
            ("Why b", "Why", "Why a b"),
        ),
        (
            {"question_stem": "Why", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"},
            ("Why a", "Why"),
        ),
        (
            {
                "question": {"stem": "Why", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]},
                "answerKey": "B",
            },
            ("Why b", "Why", "Why a b"),
        ),
        ({"question": "Why", "subject": "x", "choices": ["a", "b"], "answer": 1}, ("Why b", "Why", "Why a b")),
        ({"question": "Why", "subject": "x", "choices": ["a", "b"], "answer": "A"}, ("Why a", "Why", "Why a b")),
        ({"text": "All of it"}, ("All of it",)),
        ({"text": "All of it", "question": "Is it all?"}, ("All of it", "Is it all?")),
        ({"x": ["one", {"y": "two"}], "n": 3}, ("one", "two")),
    ],
)
def test_question_and_right_answer_are_looked_for(record, texts):
    rows = [row_of(record)]
    assert [*texts_of(rows, choose_fields(rows))] == [texts]


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"text": null}', "`text` is null, not a string"),
        ('{"passage": 3, "question": "Is it?", "answer": true}', "`passage` is 3, not a string"),
        ('{"sentence": "As _ sat", "option1": "he", "option2": "she", "answer": ""}', '`answer` is "", which names no'),
        ('{"goal": "Cut", "sol1": "a", "sol2": "b", "label": -1}', "`label` is -1, which names no answer"),
        ('{"goal": "Cut", "sol1": "a", "sol2": "b"}', "`label` is null, which names no answer"),
        ('{"sentence": "As _ sat", "option1": "he", "option2": "she"}', "`answer` is null, which names no answer"),
        ('{"ctx": "He", "endings": ["runs"], "label": ""}', '`label` is "", which names no answer'),
        ('{"ctx": "He", "endings": ["runs"]}', "`label` is null, which names no answer"),
        ('{"ctx": "He", "endings": "runs", "label": 0}', '`endings` is "runs", not a list'),
        (
            '{"question": "Why", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": ""}',
            '`answerKey` is "", which',
        ),
        ('{"question": "Why", "choices": ["a"], "answerKey": "A"}', "`choices` has no lists `text` and `label`"),
        (
            '{"question": "Why", "choices": {"text": ["a"], "label": ["A", "B"]}, "answerKey": "A"}',
            "`choices` has no lists `text` and `label` of one length",
        ),
        ('{"question": {"stem": "Why", "choices": ["a"]}, "answerKey": "A"}', "`question` has no list `choices` of"),
        ('{"question": {"choices": []}, "answerKey": "A"}', "`question_stem` is null, not a string"),
        ("[1]", "an evaluation item is a JSON object, not list"),
        ("text", "not JSON (Expecting value"),
    ],
)
def test_a_bad_item_is_named_with_its_line(line, reason, tmp_path):
    (tmp_path / "items.jsonl").write_text(f'{{"text": "good"}}\n\n{line}\n')
    with pytest.raises(InputError) as refused:
        read_items([str(tmp_path / "items.jsonl")])
    assert str(refused.value).startswith(f"{tmp_path}/items.jsonl, line 3: {reason}") and "\n" not in str(refused.value)


def test_truncated_items_are_refused_by_name(tmp_path):
    content = gzip.compress(b'{"text": "a question and its answer"}\n' * 9)
    (tmp_path / "items.jsonl.gz").write_bytes(content[:-9])
    with pytest.raises(InputError, match=r"items\.jsonl\.gz: truncated compression: the file ends inside .*\. Fetch"):
        read_items([str(tmp_path / "items.jsonl.gz")])


def test_the_paper_s_tasks_are_the_default():
    assert len(PAPER) == 8
    evaluation = Path(__file__).resolve().parents[2] / ".." / "shared" / "evaldata"
    if not evaluation.exists():
        pytest.skip("needs the evaluation data")
    assert len(read_items([str(evaluation)])) > 25_000


def test_without_datatrove_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(cleaning, "PipelineStep", object)
    with pytest.raises(InputError, match=r"pip install -e '.\[dedup\]'"):
        cleaning.require_datatrove()
