"""Evaluation items are found in the forms in which they leak; numbers, licences and choices alone are none."""

import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data_tools.evaluation_items import Item, read_evaluations
from megatron_blackmamba.data_tools.origins import WORK, CleaningManifest
from megatron_blackmamba.data_tools.provenance import origin, places_of
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.words import information, normalize, spans, split_words
from megatron_blackmamba.formats import leftovers
from megatron_blackmamba.formats.shards import ShardManifest

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")

from megatron_blackmamba.data_tools.decontamination import REPORT, SHORTEST, cut_out, tasks_of
from megatron_blackmamba.data_tools.item_index import ItemIndex
from tests.data_tools.leaks import FORMS, generated, plant, recall
from tests.data_tools.test_cleaning import clean, lives
from tests.thorough import thorough
from tests.waiting import wait_until

GSM8K = {
    "question": "Janet's ducks lay 16 eggs per day. She eats 3 for breakfast and bakes 4 muffins for her friends. "
    "She sells the remainder at the market for 2 dollars. How much does she make every day?",
    "answer": "She sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs. She makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18\n"
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14",
}
MMLU = [
    {"question": "Which enzyme unwinds the helix ahead of a replication fork?", "subject": "virology", "answer": 1},
    {"question": "Which glacier carved the fjord beside Tromso harbour?", "subject": "virology", "answer": 3},
]
CHOICES = [
    "none of the above",
    "all of the above",
    "both A and B",
    "it cannot be determined from the information given",
]
LICENCE = "Permission is hereby granted, free of charge, to any person obtaining a copy of this software"
FILLER = " ".join(f"Paragraph {word} describes weather over distant mountain villages." for word in "abcdefghijklmnop")


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def kept(out):
    texts = {}
    for part in sorted(out.glob("part_*")):
        with zstandard.open(part, "rt", encoding="utf-8") as file:
            texts |= {record["record"]: record for record in map(json.loads, file)}
    return texts


def listed(out):
    with open(out / "removed.tsv", newline="") as file:
        return [*csv.DictReader(file, delimiter="\t")]


def found(items, *texts):
    index = ItemIndex([Item(f"task:{number}", (item,)) for number, item in enumerate(items)], 12)
    return [bool(index.find(split_words(normalize(text)))) for text in texts]


def number_tables(choose):
    """Tables, C arrays, CSVs and a list of years."""
    for _ in range(20):
        numbers = [str(choose.randint(0, 30)) for _ in range(200)]
        yield "\n".join(" | ".join(numbers[i : i + 10]) for i in range(0, 200, 10))
        yield "static const int values[] = {" + ", ".join(numbers) + "};"
        yield "\n".join(",".join(numbers[i : i + 4]) for i in range(0, 200, 4))
    yield "World Cups: " + ", ".join(str(year) for year in range(1930, 2027, 4))
    yield " ".join(map(str, range(1, 100)))


def test_tables_of_numbers_stay(tmp_path):
    items = write(tmp_path / "gsm8k.jsonl", [GSM8K])
    texts = [*number_tables(random.Random(0)), f"{FILLER} {GSM8K['question']} {FILLER}"]
    corpus = write(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    counts = clean("decontaminate", corpus, tmp_path / "out", "--against", items)
    assert (counts["removed"], {row["record"] for row in listed(tmp_path / "out")}) == (0, {str(len(texts))})


def test_other_numbers_make_another_question():
    other = GSM8K["question"].replace("16", "19").replace("3", "5").replace(" 4 ", " 7 ")
    assert found([GSM8K["question"][:80]], GSM8K["question"], other) == [True, False]


def test_choices_and_licences_are_no_items(tmp_path):
    mmlu = write(tmp_path / "mmlu.jsonl", [{**row, "choices": CHOICES} for row in MMLU])
    records = [
        {"body": f"{word} juggle lanterns beside a frozen harbour", "license": LICENCE}
        for word in ("Otters", "Herons", "Lynxes", "Voles")
    ]
    own = write(tmp_path / "own.jsonl", records)
    texts = [*(f"Choose: {choice}. {FILLER}" for choice in CHOICES), f"{LICENCE}, to deal in it.", MMLU[0]["question"]]
    corpus = write(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    counts = clean("decontaminate", corpus, tmp_path / "out", "--against", mmlu, "--against", own)
    assert [row["record"] for row in listed(tmp_path / "out")] == [str(len(texts))]
    tasks = {task["name"]: task for task in counts["tasks"]}
    assert tasks["mmlu.jsonl"]["fields"] == ["question + right answer", "question", "question + all answers"]
    assert tasks["own.jsonl"]["left_out"] == ["license (by its name)"]
    assert (tasks["mmlu.jsonl"]["items_found"], tasks["own.jsonl"]["items_found"]) == (1, 0)


def test_repeated_values_are_no_items(tmp_path):
    rows = [{"q": f"{word} otters juggle lanterns", "terms": LICENCE} for word in "abcdefghijklmnopqrst"]
    (evaluation,) = read_evaluations([str(write(tmp_path / "own.jsonl", rows))])
    assert evaluation.choice.taken == ["q"] and evaluation.choice.left_out == {"terms": "its values repeat"}


def test_text_does_not_hide_other_fields(tmp_path):
    rows = [{"text": "A passage of many words.", "question": "Which otter juggled seven lanterns yesterday?"}]
    (evaluation,) = read_evaluations([str(write(tmp_path / "own.jsonl", rows))])
    assert evaluation.items[0].texts == tuple(rows[0].values())


def test_fields_are_chosen_by_name(tmp_path):
    rows = [{"q": "who", "a": {"text": "otter"}, "note": "x"}, {"q": "what", "a": {"text": "heron"}}]
    path = write(tmp_path / "own.jsonl", rows)
    other = write(tmp_path / "other.jsonl", [{"z": "lynx"}])
    given = [str(path), str(other)]
    one, two = read_evaluations(given, fields=["own.jsonl=q+a.text,q,note?", "z"])
    assert one.items[0].texts == ("who otter", "who", "x") and two.items[0].texts == ("lynx",)
    for fields, message in (
        (["nothing"], r"own\.jsonl, line 1: missing field: no `nothing`; it has `q`, `a`, `note`\. Correct --fields"),
        (["none.jsonl=q"], r"--fields: none\.jsonl: is no file of --against"),
        ([","], "--fields ,: names no field"),
    ):
        with pytest.raises(InputError, match=message):
            read_evaluations([str(path)], fields=fields)


@pytest.mark.parametrize(
    "rows, message",
    [
        (
            [{"license": "MIT", "id": "a1"}],
            r"no usable field: `license` \(by its name\), `id` \(by its name\)\. Choose",
        ),
        ([{"label": 1}], "no usable field: no string in any row"),
        ([{"q": "who is it"}, {"q": "3 4 5 6 7"}], "each of its 2 items has too little distinctive text"),
    ],
)
def test_files_without_usable_fields_are_refused(tmp_path, rows, message):
    corpus, items = write(tmp_path / "in.jsonl", [{"text": "a"}]), write(tmp_path / "own.jsonl", rows)
    with pytest.raises(InputError, match=message) as refused:
        clean("decontaminate", corpus, tmp_path / "out", "--against", items)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


@thorough
def test_a_task_without_network_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")
    (tmp_path / "away.yaml").write_text(f"""
task: away
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/absent.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: q
doc_to_choice: choices
doc_to_target: gold
""")
    with pytest.raises(
        InputError, match=r"--against away: lm-eval cannot load the data \(\w+: .*\)\. Run this"
    ) as refused:
        read_evaluations(["away"], str(tmp_path))
    assert "\n" not in str(refused.value)


def test_items_are_found_in_their_leaked_forms():
    choose = random.Random(0)
    items = [*generated(12, choose)]
    rows = [Item(f"{item.task}:{number}", (item.plain, item.question)) for number, item in enumerate(items)]
    index = ItemIndex(rows, 12)
    texts, planted = plant(items, [FILLER * 2], choose)
    places = [index.find(split_words(normalize(text))) for text in texts]
    shares = recall(planted, lambda number, *_: bool(places[number]))["all"]
    assert all(shares[form] >= 0.95 for form in FORMS[:6]), shares
    assert shares["changed"] >= 0.6, shares
    assert not index.find(split_words(normalize(FILLER)))


def test_real_documents_lose_nothing_to_the_eight_tasks():
    folder = Path(__file__).resolve().parents[2] / ".." / "shared" / "evaldata"
    if not folder.exists():
        pytest.skip("needs the evaluation data")
    names = ("openbookqa_test", "piqa_validation", "arc_easy_test", "winogrande_validation")
    evaluations = read_evaluations([str(folder / f"{name}.jsonl.gz") for name in names])
    index = ItemIndex([item for evaluation in evaluations for item in evaluation.items], 12)
    from pydoc_data.topics import topics

    assert [name for name, text in topics.items() if index.find(split_words(normalize(text)))] == []


def test_missing_rare_word_is_no_match():
    item = "how do you deal with sudden seasickness nausea?"
    assert (
        found([item], item, "how do you deal with sudden people?", "deal with sudden seasickness")
        == [True] + [False] * 2
    )


def test_short_distinctive_items_are_found_whole():
    texts = ["## Lightning may ignite\nforests", "lightning may ignite grass"]
    assert found(["Lightning may ignite forests"], *texts) == [True, False]


def test_items_cut_by_the_beginning_are_found():
    item = "in the early morning sixteen otters juggled brass lanterns beneath viaducts"
    texts = [item.split(" ", first)[-1] for first in range(3)]
    assert found([item], *texts, *(f"{FILLER} {text}" for text in texts)) == [True] * 6


def test_letters_of_other_fonts_are_letters():
    assert normalize("𝐎𝐭𝐭𝐞𝐫 ℌ ™ Ｏ") == "otter h tm o"
    assert found(["Lightning may ignite forests"], "𝐋𝐢𝐠𝐡𝐭𝐧𝐢𝐧𝐠 𝐌𝐚𝐲 𝐈𝐠𝐧𝐢𝐭𝐞 𝐅𝐨𝐫𝐞𝐬𝐭𝐬") == [True]


def test_prompts_of_many_items_identify_none():
    prompt = "Read the following passage about otters carefully then answer every question below it in full: "
    items = [f"{prompt} {word} heron {word} lantern" for word in (f"zq{chr(97 + i)}x" for i in range(20))]
    assert found(items, f"{prompt} what do you know?", items[3]) == [False, True]


def test_spans_lead_to_the_original_words():
    text = "1. Ein Caf\u200be\u0301 “ﬁne” İstanbul\n12) naïve x\u00ady 12 ｆｕｌｌ 你好 straße"
    words = split_words(normalize(text))
    assert words == ["ein", "cafe", "fine", "istanbul", "naive", "xy", "12", "full", "你", "好", "strasse"]
    assert [text[begin:end] for begin, end in spans(text, words)] == (
        ["Ein", "Caf\u200be", "ﬁne", "İstanbul", "naïve", "x\u00ady", "12", "ｆｕｌｌ", "你", "好", "straße"]
    )


def test_information_is_that_of_distinct_words():
    assert information(["12", "1930"]) == 0
    assert information(["otter", "otter"]) == information(["otter"]) == 13 > information(["the"])


def test_cuts_have_margins_and_leave_no_scraps():
    text = " ".join(f"word{number:04}" for number in range(400))
    begin = text.index("word0150")
    left, cuts = cut_out(text, [(begin, begin + 8)], 100)
    ((first, last),) = cuts
    assert first <= begin - 100 and last >= begin + 108 and left == f"{text[:first].strip()}\n\n{text[last:].strip()}"
    assert all(re.fullmatch(r"word\d{4}", word) for word in left.split())
    near = begin + 8 + 200 + SHORTEST // 2
    assert len(cut_out(text, [(begin, begin + 8), (near, near + 8)], 100)[1]) == 1
    assert cut_out(text, [(150, 158)], 100)[1][0][0] == 0
    assert cut_out(text, [(len(text) - 150, len(text) - 140)], 0)[1][0][1] == len(text)
    assert cut_out(text[:400], [(150, 158)], 100) == ("", [(0, 400)])


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A folder with raw documents and the cut ones: a clean one, one with an item, a short one that is the item."""
    folder = tmp_path_factory.mktemp("cut")
    item = "Which otter juggled seven lanterns beside the frozen harbour yesterday?"
    items = [{"question": item}, {"question": "ab"}]
    write(folder / "own.jsonl", items)
    write(folder / "raw.jsonl", [{"text": text} for text in (FILLER, f"{FILLER} {item} {FILLER}", item)])
    counts = clean("decontaminate", folder / "raw.jsonl", folder / "out", "--against", folder / "own.jsonl")
    return folder, item, counts


def test_passages_are_cut_and_reported(cut):
    folder, item, counts = cut
    assert (counts["kept"], counts["removed"], counts["cut"]) == (2, 1, 1)
    (task,) = counts["tasks"]
    assert {key: task[key] for key in ("items", "looked_for", "too_short", "items_found", "passages", "documents")} == {
        "items": 2, "looked_for": 1, "too_short": 1, "items_found": 1, "passages": 2, "documents": 2,
    }  # fmt: skip
    record = kept(folder / "out")[2]
    ((begin, end),) = record["cut"]
    text = json.loads((folder / "raw.jsonl").read_text().splitlines()[1])["text"]
    assert item not in record["text"] and record["text"] == f"{text[:begin].strip()}\n\n{text[end:].strip()}"
    assert end - begin < len(item) + 500
    assert "cut" not in kept(folder / "out")[1]
    assert [part.cut for part in CleaningManifest.read(folder / "out").parts] == [1]
    assert [row["detail"].partition(":")[0] for row in listed(folder / "out")] == (
        [f"characters 0-{len(item)}", f"characters {begin}-{end}"]
    )
    assert f"⟦{item.removesuffix('?')}⟧" in (folder / "out" / REPORT).read_text()


def test_cut_documents_are_traced_to_their_record(cut, run, tmp_path):
    folder, _, _ = cut
    run(folder / "out")
    manifest = ShardManifest.read(tmp_path / "out/shard_00001.manifest.json")
    assert [raw.name for raw in manifest.sources[0].all_raw][-1:] == ["raw.jsonl"]
    for record in (1, 2):
        (place,) = places_of(manifest, manifest.sources[0], record)
        assert origin(manifest, place).record == record


def test_whole_documents_are_dropped_on_demand(cut, tmp_path):
    folder, _, _ = cut
    options = ["--against", folder / "own.jsonl", "--drop"]
    counts = clean("decontaminate", folder / "raw.jsonl", tmp_path / "out", *options)
    assert (counts["kept"], counts["removed"], counts["cut"]) == (1, 2, 0)
    with pytest.raises(InputError, match="was made with other drop: choose another folder"):
        clean("decontaminate", folder / "raw.jsonl", folder / "out", *options)


def test_items_and_fields_are_printed_before_the_run(cut, tmp_path):
    folder, _, _ = cut
    command = [sys.executable, "-m", "megatron_blackmamba", "data", "decontaminate", str(folder / "raw.jsonl")]
    done = subprocess.run(
        [*command, str(tmp_path / "out"), "--against", str(folder / "own.jsonl")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, header, row, *_ = done.stdout.splitlines()
    assert first == "looking for 1 evaluation items"
    assert header.split() == ["name", "items", "looked", "for", "too", "short", "fields"]
    assert row.split() == ["own.jsonl", "2", "1", "1", "question"]
    assert "kept 2 documents, removed 1, cut 1 passages" in done.stdout and REPORT in done.stdout


@pytest.fixture
def corpora(tmp_path):
    """A mixture of three sources, with a folder of raw files each, in which some documents hold an item."""
    item = "Which otter juggled seven lanterns beside the frozen harbour yesterday?"
    write(tmp_path / "own.jsonl", [{"question": item}])
    for number, name in enumerate(("web", "code", "papers")):
        (tmp_path / "raw" / name).mkdir(parents=True)
        for file in range(3):
            texts = [f"{FILLER} {item} {FILLER}"] * number + [FILLER] * 2
            write(tmp_path / "raw" / name / f"{file}.jsonl", [{"text": text} for text in texts])
    sources = ", ".join(f"{{name: {name}, shards: {name}}}" for name in ("web", "code", "papers"))
    (tmp_path / "mix.yaml").write_text(f"sources: [{sources}]\n")
    options = ["--mixture", tmp_path / "mix.yaml", "--against", tmp_path / "own.jsonl", "--part-size", "1KB"]
    return lambda out: ["decontaminate", tmp_path / "raw", tmp_path / out, *options]


def test_each_source_of_a_mixture_is_cleaned(corpora, tmp_path):
    found = clean(*corpora("out"))["corpora"]
    assert {name: (counts["kept"], counts["cut"]) for name, counts in found.items()} == {
        "web": (6, 0), "code": (9, 3), "papers": (12, 6),
    }  # fmt: skip
    assert all("juggled" not in record["text"] for record in kept(tmp_path / "out/papers").values())
    again = CliRunner().invoke(app, ["data", *map(str, corpora("out"))]).stdout.splitlines()
    assert [line.split() for line in again[-4:]] == [
        ["corpus", "kept", "removed", "cut", "items", "found", "passages"],
        ["web", "6", "0", "0", "0", "0"],
        ["code", "9", "0", "3", "1", "3"],
        ["papers", "12", "0", "6", "1", "6"],
    ]


def test_a_mixture_is_refused_before_any_work(corpora, tmp_path):
    write(tmp_path / "raw/papers/more.jsonl", [{"text": FILLER}])
    clean(*corpora("out"))
    write(tmp_path / "raw/papers/more.jsonl", [{"text": "another text"}])
    (tmp_path / "out/web/part_00001.jsonl.zst").unlink()
    with pytest.raises(InputError, match=r"out/papers: was made with other inputs"):
        clean(*corpora("out"))
    shutil.rmtree(tmp_path / "raw/code")
    with pytest.raises(InputError, match=r"no folder \S+raw/code\. Give each source of the mixture one"):
        clean(*corpora("new"))
    assert not (tmp_path / "new").exists()


@thorough
def test_a_killed_mixture_continues(corpora, tmp_path):
    command = [sys.executable, "-m", "megatron_blackmamba", "data", *map(str, corpora("killed")), "--workers", "1"]
    for source in ("web", "code"):
        process = subprocess.Popen(command, start_new_session=True)
        done = tmp_path / "killed" / source / WORK / "decontaminate/1_documents/completions"
        while process.poll() is None and not (done.is_dir() and any(done.iterdir())):
            time.sleep(0.01)
        assert process.poll() is None, "ended before it was killed"
        process.kill()
        process.wait()
        wait_until(lambda group=process.pid: not lives(group), seconds=300)
    assert not (tmp_path / "killed/papers/removed.tsv").exists()
    part = leftovers.beside(tmp_path / "killed/papers/part_00001.jsonl.zst")
    part.with_name(part.name.replace(f".{os.getpid()}-", f".{process.pid}-")).touch()  # as if killed while it wrote
    results = [clean(*corpora(out)) for out in ("killed", "whole")]

    def content(out):
        return {path.relative_to(out): path.read_bytes() for path in out.glob("*/*") if path.is_file()}

    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert len(content(tmp_path / "whole")) == 3 * (3 + 3)
    assert [list(each["corpora"]) for each in results] == [["web", "code", "papers"]] * 2


def test_files_of_equal_names_are_told_apart(tmp_path):
    files = []
    for folder, texts in (("a", [FILLER, LICENCE]), ("b", ["the cat", "is it"])):
        (tmp_path / folder).mkdir()
        files.append(str(write(tmp_path / folder / "test.jsonl", [{"item": text} for text in texts])))
    found = read_evaluations([*files, files[0]])
    assert [(each.name, len(each.items)) for each in found] == [(file, 2) for file in files]
    with pytest.raises(InputError, match=r"b/test\.jsonl: each of its 2 items has too little distinctive text"):
        tasks_of(found, ItemIndex([item for each in found for item in each.items], 12))


def test_other_questions_on_passages_are_not_boolq(tmp_path):
    row = {"passage": FILLER, "question": "Which otter juggled seven lanterns?", "options": ["the red one", "none"]}
    rows = [{**row, "answer": "A"}, {**row, "passage": None}]
    (race,) = read_evaluations([str(write(tmp_path / "race.jsonl", rows))])
    assert "options[]" in race.choice.taken and "the red one" in race.items[0].texts
    (placed,) = read_evaluations([str(write(tmp_path / "placed.jsonl", [{**row, "label": n} for n in range(3)]))])
    assert all("the red one" in item.texts for item in placed.items)
    (boolq,) = read_evaluations([str(write(tmp_path / "boolq.jsonl", [{**row, "answer": True}]))])
    assert boolq.choice.taken == ["passage", "question"]
