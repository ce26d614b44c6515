"""Deduplication removes only what resembles a kept document, keeps the best copy, and knows its limits beforehand."""

import json
import random
import resource
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")

from benchmarks.cleaning import Words
from benchmarks.dedup_scale import write_corpus
from megatron_blackmamba.data_tools import dedup_estimate, deduplication, parts, sorted_runs
from megatron_blackmamba.data_tools.batches import ReadOptions
from megatron_blackmamba.data_tools.cleaning import READ, Cleaning
from megatron_blackmamba.data_tools.near_pairs import BAND, HEADS, WINDOW, propose
from megatron_blackmamba.data_tools.options import DedupOptions
from megatron_blackmamba.data_tools.rejects import InputError, Tolerance
from megatron_blackmamba.data_tools.shingles import Shingler, jaccard
from megatron_blackmamba.data_tools.sorted_runs import KEYS, ranges, read_range, write_run
from megatron_blackmamba.data_tools.sources import find_sources
from megatron_blackmamba.data_tools.splitters import SpacedWords
from megatron_blackmamba.formats import leftovers
from tests.data_tools import copies
from tests.data_tools.copies import judged, without_origin
from tests.thorough import thorough

ROOT = Path(__file__).resolve().parents[2]
KEYED = np.dtype([("key", "<u8"), ("value", "<u4")])


@pytest.fixture
def words():
    return Words(random.Random(0), 4000)


def dedup(*arguments):
    done = CliRunner().invoke(app, ["data", "dedup", *map(str, arguments)])
    if done.exception:
        raise done.exception
    return done.stdout


def rows(out_dir):
    return [line.split("\t") for line in (out_dir / "removed.tsv").read_text().splitlines()[1:]]


def kept(out_dir):
    """Return the kept texts, each with its number."""
    from datatrove.pipeline.readers import JsonlReader

    found = JsonlReader(str(out_dir), glob_pattern="*.jsonl.zst").run()
    return Counter(document.text for document in found)


def edited(text, every, offset=0):
    return " ".join(f"new{place}" if place % every == offset else word for place, word in enumerate(text.split()))


def test_pages_with_common_navigation_are_kept(words, tmp_path):
    navigation = words.lines(150)
    corpus = without_origin([f"{navigation}\n{words.lines(150)}" for _ in range(300)])
    assert judged(corpus, copies.dedup(corpus.write(tmp_path / "a.jsonl"), tmp_path))["removed"] == 0


def test_copies_are_found_and_resemble_the_kept_one(words, tmp_path):
    corpus = copies.copies(words, random.Random(2), each=40)
    found = judged(corpus, copies.dedup(corpus.write(tmp_path / "a.jsonl"), tmp_path))
    assert found["found at 0%"] == found["found at 1%"] == 1
    assert found["found at 5%"] >= 0.95 and found["found at 10%"] >= 0.9
    assert found["J < 0.5"] == 0
    for _, _, reason, resembles, detail in rows(tmp_path / "out"):
        assert reason == "near-duplicate" and resembles.startswith("a.jsonl:")
        assert float(detail.removeprefix("similarity ")) >= 0.6


def test_similar_documents_do_not_chain(words, write_jsonl, tmp_path):
    """Each text shares four fifths with its neighbours, and nothing with the ends."""
    stream = words.take(900)
    chain = [" ".join(stream[start : start + 300]) for start in range(0, 600, 40)]
    dedup(write_jsonl("a.jsonl", chain), tmp_path / "out")
    removed = {
        int(record) - 1: int(resembles.rpartition(":")[2]) - 1 for _, record, _, resembles, _ in rows(tmp_path / "out")
    }
    assert 3 <= len(removed) < len(chain) - 3
    assert not set(removed.values()) & removed.keys()
    assert all(abs(gone - place) <= 2 for gone, place in removed.items())


def test_longest_copy_is_kept(words, write_jsonl, tmp_path):
    texts = [" ".join(words.take(200)) for _ in range(20)]
    cut = [text.rsplit(" ", 40)[0] for text in texts]
    dedup(write_jsonl("a.jsonl", [*cut, *texts]), tmp_path / "out")
    assert kept(tmp_path / "out") == Counter(texts)


@thorough
def test_preferred_file_is_kept_among_equally_long_copies(words, write_jsonl, tmp_path):
    text = " ".join(words.take(100))
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        write_jsonl(f"in/{name}", [text])
    for first in "abc":
        dedup(tmp_path / "in", tmp_path / first, "--prefer", f"{first}.jsonl")
        assert {resembles for *_, resembles, _ in rows(tmp_path / first)} == {f"{first}.jsonl:1"}


@thorough
def test_kept_set_depends_on_no_order_or_parts(words, write_jsonl, tmp_path):
    texts = [" ".join(words.take(words.choose.randint(30, 120))) for _ in range(60)]
    texts += [copy for text in texts for copy in (text, edited(text, 12), edited(text, 10, 3), text.upper())]
    sets = []
    for number, (files, workers, part) in enumerate(((9, 1, "1KB"), (9, 2, "1GB"), (4, 2, "1KB"), (1, 1, "1GB"))):
        random.Random(number).shuffle(texts)
        for file in range(files):
            write_jsonl(f"{number}/{file}.jsonl", texts[file::files])
        inputs = sorted((tmp_path / str(number)).iterdir(), reverse=bool(number % 2))
        out = tmp_path / f"out{number}"
        dedup(*inputs, out, "--workers", workers, "--part-size", part, "--buckets", "20", "--hashes", "5")
        sets.append(kept(out))
    assert 60 <= sum(sets[0].values()) < 120
    assert all(other == sets[0] for other in sets)


def test_tables_of_different_numbers_are_kept(write_jsonl, tmp_path):
    choose = random.Random(0)
    tables = [
        "\n".join(" ".join(str(choose.randrange(10_000)) for _ in range(8)) for _ in range(20)) for _ in range(50)
    ]
    dedup(write_jsonl("a.jsonl", tables), tmp_path / "out")
    assert rows(tmp_path / "out") == []


@pytest.mark.parametrize(
    "letters, length",
    [
        ("天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏閏餘成歲律呂調陽雲騰致雨露結為霜", 1),
        ("กขคงจฉชซญดตถทธนบปผฝพฟภมยรลวสหอาเแโใไ", 4),
    ],
    ids=["Chinese", "Thai"],
)
def test_languages_without_spaces_are_compared_by_characters(words, letters, length, write_jsonl, tmp_path):
    choose = random.Random(1)
    lexicon = ["".join(choose.choices(letters, k=length)) for _ in range(800)]

    def text():
        return "".join(choose.choices(lexicon, k=240 // length))

    def with_edits(text, share):
        places = set(choose.sample(range(len(text)), round(share * len(text))))
        return "".join(choose.choice(letters) if place in places else one for place, one in enumerate(text))

    texts = [text() for _ in range(40)]
    copies = [with_edits(text, 0.02) for text in texts[:20]]
    english = [" ".join(words.take(80)) for _ in range(20)]  # a mixed corpus
    dedup(write_jsonl("a.jsonl", [*texts, *english, *copies, *english]), tmp_path / "out")
    gone = {int(row[1]) - 1 for row in rows(tmp_path / "out")}
    pairs = [(place, 60 + place) for place in range(20)]
    assert sum(one in gone or two in gone for one, two in pairs) >= 19
    assert not gone & set(range(20, 40)) and len(gone & {*range(40, 60), *range(80, 100)}) == 20


@pytest.mark.parametrize("language", ["zho", "tha", "xx"])
@pytest.mark.parametrize("verb", ["dedup", "decontaminate"])
def test_language_without_splitter_is_refused_in_one_line(verb, language, write_jsonl, tmp_path):
    try:
        from datatrove.utils.word_tokenizers import load_word_tokenizer

        load_word_tokenizer(language).word_tokenize("a text")
    except Exception:
        pass
    else:
        pytest.skip("its splitter is installed")
    with pytest.raises(InputError, match=rf"^--language {language}: [^\n]+ leave (it out|out --language)$"):
        CliRunner().invoke(
            app,
            ["data", verb, str(write_jsonl("a.jsonl", ["a"])), str(tmp_path / "out"), "--language", language],
            catch_exceptions=False,
        )
    assert not (tmp_path / "out").exists()


def test_too_many_removals_stop_before_documents_are_written(words, write_jsonl, tmp_path):
    texts = [" ".join(words.take(50)) for _ in range(10)]
    corpus, out = write_jsonl("a.jsonl", [*texts, *texts[:6]]), tmp_path / "out"
    with pytest.raises(InputError, match=r"--at-most 0\.3: 6 of 16 documents \(37\.5%\) are near-duplicates"):
        dedup(corpus, out, "--at-most", "0.3")
    assert [path.name for path in out.iterdir()] == [".work"]
    dedup(corpus, out, "--at-most", "0.4")
    assert len(rows(out)) == 6


OTHERS = [("--prefer", "b*"), ("--boilerplate", "5")]
SETTINGS = [("--similarity", "0.8"), *(pytest.param(each, marks=thorough) for each in OTHERS)]


@pytest.mark.parametrize("option", SETTINGS)
def test_other_settings_are_refused(option, write_jsonl, tmp_path):
    corpus = write_jsonl("a.jsonl", ["one text", "another text"])
    dedup(corpus, tmp_path / "out")
    with pytest.raises(InputError, match=f"was made with other {option[0][2:]}: choose another folder"):
        dedup(corpus, tmp_path / "out", *option)


def test_a_resume_cuts_and_reads_inputs_alike(words, write_jsonl, tmp_path):
    for name, count in (("a", 3), ("b", 3), ("c", 3), ("d", 1)):
        write_jsonl(f"in/{name}.jsonl", [" ".join(words.take(60)) for _ in range(count)])
    sizes = [path.stat().st_size for path in sorted((tmp_path / "in").iterdir())]
    inputs = (tmp_path / "in", tmp_path / "out")
    dedup(*inputs, "--part-size", sum(sizes[:2]) + 10)  # two parts, as three files and one would be
    with pytest.raises(InputError, match=r"was made with other files in each part \(--part-size\): choose"):
        dedup(*inputs, "--part-size", sum(sizes[:3]) + 10)
    with pytest.raises(InputError, match=r"was made with other formats \(--format\): choose"):
        dedup(*inputs, "--part-size", sum(sizes[:2]) + 10, "--format", "text", "--match", "*.jsonl")
    settings = tmp_path / "out/.work/dedup/settings.json"
    older = {key: value for key, value in json.loads(settings.read_bytes()).items() if "(--" not in key}
    settings.write_text(json.dumps(older))
    dedup(*inputs, "--part-size", sum(sizes[:2]) + 10)


def test_leftovers_of_a_kill_change_nothing(words, write_jsonl, tmp_path, monkeypatch):
    header = words.lines(100)
    pages = [f"{header}\n{words.lines(20)}" for _ in range(12)]
    corpus = write_jsonl("a.jsonl", pages)
    dedup(corpus, tmp_path / "whole", "--boilerplate", "20")
    write_records = sorted_runs.write_records

    def killed_before(path, records):
        write_records(path, records)
        if path.parent.name == "lines":
            shutil.copy(path, leftovers.beside(path))

    monkeypatch.setattr(sorted_runs, "write_records", killed_before)
    dedup(corpus, tmp_path / "killed", "--boilerplate", "20")
    assert len(rows(tmp_path / "whole")) == 11 and rows(tmp_path / "killed") == rows(tmp_path / "whole")


@pytest.mark.parametrize("option", ["--similarity 0", "--similarity 1.1", "--at-most 2", "--boilerplate 1"])
def test_settings_out_of_bounds_are_refused(option, write_jsonl, tmp_path):
    with pytest.raises(InputError, match=f"^{option.split()[0]} .*: give a"):
        dedup(write_jsonl("a.jsonl", ["one text"]), tmp_path / "out", *option.split())
    assert not (tmp_path / "out").exists()


@thorough
def test_repeated_lines_can_be_left_out(words, write_jsonl, tmp_path):
    navigation = words.lines(270)
    pages = [f"{navigation}\n{words.lines(60)}" for _ in range(40)]
    corpus = write_jsonl("a.jsonl", pages)
    said = dedup(corpus, tmp_path / "with")
    assert len(rows(tmp_path / "with")) > 30
    assert "warning: 1 of the largest clusters are suspicious" in said and "set --boilerplate 20" in said
    said = dedup(corpus, tmp_path / "without", "--boilerplate", "20")
    assert rows(tmp_path / "without") == [] and "warning" not in said


def test_report_names_the_least_similar_pair(words, write_jsonl, tmp_path):
    text = " ".join(words.take(200))
    corpus = write_jsonl("a.jsonl", [text, text + " and", edited(text, 20), edited(text, 20, 5)])
    said = dedup(corpus, tmp_path / "out")
    (cluster,) = json.loads((tmp_path / "out/.work/dedup/clusters.json").read_text())["largest"]
    assert cluster["documents"] == 4 and set(cluster["least similar pair"]) == {"a.jsonl:3", "a.jsonl:4"}
    assert f"has similarity {cluster['similarity']:.2f}" in said and not cluster["suspicious"]


@thorough
def test_many_parts_need_few_open_files(words, tmp_path):
    texts = [" ".join(words.take(20)) for _ in range(100)]
    (tmp_path / "in").mkdir()
    for number in range(130):
        (tmp_path / f"in/{number}.txt").write_text(texts[number % 100])

    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    command = [sys.executable, "-m", "megatron_blackmamba", "data", "dedup", tmp_path / "in", tmp_path / "out"]
    command += ["--workers", "1", "--part-size", "1B", "--buckets", "2", "--hashes", "2"]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kept 100 documents, removed 30" in done.stdout
    assert "documents in 130 parts: about" in done.stdout


def test_too_few_open_files_are_refused_at_start(write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(InputError, match="ulimit -n 64: this needs 128 open files"):
        dedup(write_jsonl("a.jsonl", ["one text"]), tmp_path / "out")


def test_too_little_disk_is_refused_at_the_start(write_jsonl, tmp_path, monkeypatch):
    import shutil

    corpus = write_jsonl("a.jsonl", ["some text"] * 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(InputError, match=r"out: 0\.0 MB are free, and about 0\.\d MB are needed"):
        dedup(corpus, tmp_path / "out")


def test_large_group_gives_bounded_pairs():
    group = np.zeros(1000, BAND)
    group["key"], group["id"], group["size"] = 7, np.arange(1000), 100
    assert len(propose(group, 0.6)) <= 1000 * (WINDOW + HEADS)
    group["size"] = np.geomspace(1e3, 4e9, 1000)
    assert len(propose(group, 0.99)) == 0  # no two are of nearly one size


def test_similarity_is_exact_below_sketch_and_close_above():
    choose = np.random.RandomState(0)
    shingles = np.unique(choose.randint(0, 1 << 32, 9000, dtype=np.uint32))
    choose.shuffle(shingles)
    for most, bound in ((100_000, 1e-12), (1024, 0.05)):
        for common in (0, 3000, 6000):
            one, two = shingles[:6000], shingles[6000 - common : 9000 - common if common < 3000 else 12000 - common]
            exact = len(np.intersect1d(one, two)) / len(np.union1d(one, two))
            assert jaccard(np.sort(one)[:most], np.sort(two)[:most], most) == pytest.approx(exact, abs=bound)
    assert jaccard(shingles[:0], shingles[:0], 1024) == 0


def test_ranges_of_runs_cover_each_record_once(tmp_path):
    choose = np.random.RandomState(0)
    paths = [tmp_path / str(number) for number in range(5)]
    for path in paths:
        records = np.zeros(choose.randint(0, 500), KEYED)
        records["key"] = choose.randint(0, 50, len(records)) * (KEYS // 51)
        write_run(path, records)
    whole = read_range(paths, KEYED)
    cut = list(ranges(paths, KEYED, 100))
    pieces = [read_range(paths, KEYED, first, end) for first, end in cut]
    assert len(cut) > 5 and max(map(len, pieces)) < 250
    assert Counter(np.concatenate(pieces)["key"].tolist()) == Counter(whole["key"].tolist())


def test_korean_and_english_keep_their_words():
    shingler = Shingler(2, SpacedWords())
    assert len(shingler("세 단어 문장")) == len(shingler("of three words")) == 2
    assert len(shingler("漢字四つの文")) == 4


def test_equal_long_words_are_copies(write_jsonl, tmp_path):
    choose = random.Random(3)
    genes = ["".join(choose.choices("ACGT", k=5000)) for _ in range(2)]
    corpus = write_jsonl("a.jsonl", [genes[0], genes[0].lower(), genes[1], "short", "short", genes[0]])
    dedup(corpus, tmp_path / "out")
    assert sum(kept(tmp_path / "out").values()) == 4 and len(rows(tmp_path / "out")) == 2


def test_parts_and_pieces_find_the_same_copies(words, tmp_path, monkeypatch):
    """A large corpus has several parts, and several ranges of keys; here both are small."""
    whole = copies.copies(words, random.Random(4), each=20).write(tmp_path / "all.jsonl")
    lines = whole.read_text().splitlines(keepends=True)
    (tmp_path / "raw").mkdir()
    for number in range(3):
        (tmp_path / f"raw/{number}.jsonl").write_text("".join(lines[number::3]))
    dedup(tmp_path / "raw", tmp_path / "whole", "--workers", "1")
    monkeypatch.setattr(dedup_estimate, "RANGE_BYTES", 1500)
    dedup(tmp_path / "raw", tmp_path / "pieces", "--part-size", "1KB", "--workers", "1")
    assert len([*(tmp_path / "pieces").glob("part_*")]) == 3
    assert len([*(tmp_path / "pieces/.work/dedup/2_copies/completions").iterdir()]) > 2
    assert rows(tmp_path / "pieces") == rows(tmp_path / "whole") != []


def test_report_counts_members_close_to_the_threshold(words, write_jsonl, tmp_path):
    """Every 18th word replaced gives a similarity of 0.78, every 40th 0.89; 0.7 is asked for."""
    text = " ".join(words.take(200))
    copies = [edited(text, 18), edited(text, 40), edited(text, 40, 5)]
    dedup(write_jsonl("a.jsonl", [f"{text} and so on", *copies]), tmp_path / "out", "--similarity", "0.7")
    (cluster,) = json.loads((tmp_path / "out/.work/dedup/clusters.json").read_text())["largest"]
    assert (cluster["documents"], cluster["close to the threshold"]) == (4, 0.333)


@pytest.mark.parametrize(("close", "others", "suspicious"), [(10, 9, True), (9, 10, False), (18, 0, False)])
def test_large_clusters_of_weak_copies_are_suspicious(close, others, suspicious, words, write_jsonl, tmp_path):
    """Twenty documents, half of the removed ones close to the threshold."""
    text = " ".join(words.take(200))
    copies = [f"{edited(text, 18)} {place}" for place in range(close)]
    copies += [f"{edited(text, 40)} {place}" for place in range(others)]
    said = dedup(write_jsonl("a.jsonl", [f"{text} and so on", *copies]), tmp_path / "out", "--similarity", "0.7")
    (cluster,) = json.loads((tmp_path / "out/.work/dedup/clusters.json").read_text())["largest"]
    assert (cluster["documents"], cluster["suspicious"]) == (close + others + 1, suspicious)
    assert ("warning: 1 of the largest clusters are suspicious" in said) == suspicious


def test_estimate_is_near_the_measured_cost(tmp_path):
    """docs/cleaning.md has what 4,000,000 documents of this corpus took."""
    write_corpus(tmp_path / "a.jsonl", 2000, words=60, seed=0)
    parts = [find_sources([str(tmp_path / "a.jsonl")]).sources]
    task = Cleaning("dedup", parts, tmp_path / "out", ReadOptions(), Tolerance(), DedupOptions(), {})
    estimate = dedup_estimate.Estimate.of(task, DedupOptions())
    assert estimate.documents == pytest.approx(2000, rel=0.01)
    assert estimate.cpu_seconds / 2000 == pytest.approx((813.5 + 99.2 + 19.1 + 62.0) / 4e6, rel=0.15)
    assert estimate.disk / 2000 == pytest.approx(8.02e9 / 4e6, rel=0.1)
    assert estimate.check(tmp_path, memory_gb=1) == []
    for large, message in (({"disk": 10**18}, "1000000.0 TB"), ({"files": 10**18}, "more files"), ({}, "--memory 1$")):
        with pytest.raises(InputError, match=message):
            replace(estimate, **large).check(tmp_path / "out", memory_gb=0.1)


def test_progress_goes_by_bytes_read(write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_TELL_EVERY", 0.0)
    small, large = write_jsonl("a.jsonl", ["short"]), write_jsonl("b.jsonl", ["a long text " * 90])
    sources = find_sources([str(small), str(large)]).sources
    cleaning = Cleaning(
        "dedup", [[each] for each in sources], tmp_path / "out", ReadOptions(), Tolerance(), DedupOptions(), {}
    )
    stages = deduplication.stages(cleaning, DedupOptions(), dedup_estimate.Estimate.of(cleaning, DedupOptions()))
    signatures, read = stages[0], small.stat().st_size / (small.stat().st_size + large.stat().st_size)
    shares = [cleaning.share(stages)]
    for rank in range(2):
        next(parts.RawDocuments(cleaning, "1_signatures", noted=False).run(None, rank, 2))
        shares.append(cleaning.share(stages))
    whole = signatures.cost / sum(stage.cost for stage in stages)
    assert shares == pytest.approx([0.0, read * whole, whole])
    (signatures.folder / "completions").mkdir()
    (signatures.folder / "completions" / "00000").touch()
    (signatures.folder / READ / "00001").unlink()
    assert cleaning.share(stages) == pytest.approx(read * whole)
