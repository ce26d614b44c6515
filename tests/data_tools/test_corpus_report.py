"""The page of a corpus: planted near-copies, items and languages are in it, and a browser draws it."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data_tools import near_copies, overlaps
from megatron_blackmamba.data_tools.corpus_figures import groups_of, measure, script_of
from megatron_blackmamba.data_tools.near_copies import SIMILARITY
from megatron_blackmamba.report.corpus import render
from tests.data_tools.test_filters import prose
from tests.pages import check_page
from tests.report.test_report import BROWSER, browse

ITEM = "which crimson otter juggles seven lanterns beneath the northern arches at noon <b>"


def edited(text):
    """Change one word in forty: the copy has a similarity of about 0.9."""
    words = text.split(" ")
    for place in range(20, len(words), 40):
        words[place] = "zebra"
    return " ".join(words)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer_file):
    """Write two sources and validation shards with 12 planted near-copies, and return the folder."""
    from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize

    folder = tmp_path_factory.mktemp("corpus") / ("a_long_name_without_a_space" * 4)  # which a phone has to break
    folder.mkdir()
    web = [prose(i) for i in range(60)]
    books = [prose(100 + i) for i in range(40)] + [edited(text) for text in web[:7]] + ["Сегодня идёт дождь. " * 9] * 3
    texts = {"web": web, "books": books, "held_out": [prose(300), *map(edited, web[20:25]), f"{prose(301)} {ITEM}"]}
    for name, documents in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        options = TokenizeOptions(tokenizer=str(tokenizer_file), workers=1, quiet=True)
        tokenize(folder / f"{name}.jsonl", folder / name, options)
    (folder / "items.jsonl").write_text(json.dumps({"question": ITEM}) + "\n")
    sources = "{name: web, shards: web, validation: held_out}, {name: books, shards: books}"
    (folder / "mixture.yaml").write_text(f"sources: [{sources}]")
    return folder


@pytest.fixture(scope="module")
def figures(corpus):
    return measure([str(corpus / "mixture.yaml")], against=[str(corpus / "items.jsonl")])


def test_planted_copies_are_counted(figures):
    copies = figures.copies
    assert copies.groups == ["web", "web (validation)", "books"]
    assert copies.compared == copies.documents == [60, 7, 50]
    assert copies.found.tolist() == [[0, 5, 7], [5, 0, 0], [7, 0, 3]]
    for (one, other), examples in copies.examples.items():
        assert one <= other and all(SIMILARITY <= similarity <= 1 for _, _, similarity in examples)
    assert sorted(map(len, copies.examples.values())) == [2, 3, 3]  # at most three pairs; books has two


def test_page_begins_with_what_is_wrong(figures):
    text = render(figures, [])
    said = re.findall(r'<p class="answer">(.*?)</p>', text)
    assert said == [
        "1 of 1 items of items.jsonl are in documents: 1 of web (validation).",
        "5 of 7 documents of web (validation) have a near-copy in web, which is trained on.",
        "7 of 50 documents of books have a near-copy in web, which is trained on.",
        "7 of 60 documents of web have a near-copy in books, which is trained on.",
    ]
    assert text.index("near-copy in web") < text.index("<table>") and "No source has" not in text


def test_items_and_scripts_are_counted(figures):
    (found,) = figures.contamination
    assert found.looked_for == 1 and dict(found.documents) == {"web (validation)": 1}
    books = figures.groups[2]
    assert books.languages.total() == 50 and books.languages.most_common()[-1][1] == 3
    assert [script_of(text) for text in ("abc", "Привет", "...")] == ["Latin", "Cyrillic", "No letters"]


def test_fewer_tokens_compare_fewer_documents(corpus, monkeypatch):
    paths = [str(corpus / name) for name in ("web", "books")]
    assert measure(paths, sample=5, most_tokens=1).copies.compared == [60, 50]  # a block is read whole
    monkeypatch.setattr(overlaps, "_BLOCK_TOKENS", 1)
    assert measure(paths, sample=5, most_tokens=1).copies.compared == [1, 1]
    assert [len(group.sample) for group in measure(paths, sample=5).groups] == [5, 5]


def test_counts_that_are_too_low_are_called_so(corpus, figures, monkeypatch):
    assert figures.copies.checked == figures.copies.proposed and "too low" not in render(figures, [])
    monkeypatch.setattr(near_copies, "MOST_PAIRS", 3)
    part = measure([str(corpus / "mixture.yaml")], sample=5)
    assert part.copies.found.sum() <= 6 < figures.copies.found.sum()
    assert f"of {figures.copies.proposed} candidate pairs, 3 were compared" in render(part, [])


def test_sides_of_a_hold_out_are_told_apart(corpus, tmp_path, run):
    run(corpus / "web.jsonl", hold_out="20%")
    assert [*groups_of([str(tmp_path / "out")])] == [f"{tmp_path}/out", f"{tmp_path}/out (validation)"]


def test_minhashes_find_pairs_at_the_threshold():
    choose = np.random.default_rng(1)
    found = 0
    for _ in range(200):
        shared, own = choose.integers(1 << 40, size=120, dtype=np.uint64), choose.integers(1 << 40, size=80)
        one, other = (np.concatenate([shared, half.astype(np.uint64)]) for half in np.split(own, 2))
        first = np.zeros(1, np.int64)
        hashes = [[near_copies._band(each, first, band) for band in near_copies._FACTORS] for each in (one, other)]
        found += any(a == b for a, b in zip(*hashes, strict=True))
    assert found >= 190


@pytest.fixture(scope="module")
def page(corpus):
    command = ["data", "report", str(corpus / "mixture.yaml"), "--against", str(corpus / "items.jsonl")]
    done = CliRunner().invoke(app, [*command, "--out", str(corpus / "page.html")])
    assert done.exit_code == 0, done.output
    return corpus / "page.html"


def test_the_page_is_whole_and_escaped(page):
    text = page.read_text()
    check_page(text)
    for expected in ("web (validation)", "60 of 60", "held_out.jsonl, record 6", "Evaluation items", "99% quantile"):
        assert expected in text
    assert "<b>" not in text.replace("<b></b>", "")


def test_many_paths_are_named_briefly(figures):
    """No line may be longer than a phone is wide: names break anywhere, except in tables, which scroll."""
    text = render(figures, [f"/data/tokens/web/shard_{number:05d}" for number in range(500)])
    assert max(map(len, re.findall(r"<h1>.*?</h1>|<title>.*?</title>|<footer>.*?</footer>", text))) < 300
    assert re.search(r"body\{[^}]*overflow-wrap:anywhere", text)
    assert "nowrap" not in re.sub(r"\.wide (th|td)[^}]*\}|\.u-[^}]*\}", "", text)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_draws_the_page_on_phones(page, tmp_path):
    probe = """{charts: [...document.querySelectorAll('figure')].map(each => each.getBoundingClientRect().width),
        wide: document.documentElement.scrollWidth, window: window.innerWidth}"""
    seen, console = browse(page, tmp_path, 500, probe)
    assert console == [] and len(seen["charts"]) == 2 and min(seen["charts"]) > 300
    assert seen["wide"] <= seen["window"]


def test_nothing_to_report_on_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["data", "report", str(tmp_path)])
    assert done.exit_code and "no" in str(done.exception) and not (tmp_path / "corpus.html").exists()
