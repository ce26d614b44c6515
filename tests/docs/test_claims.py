"""Every figure that a page claims of a study is printed by the command that it names, from the committed points."""

import contextlib
import io
import json
import re
import statistics

import pytest

from megatron_blackmamba.report.confidence import half_interval
from megatron_blackmamba.study.commands import open_study, run
from megatron_blackmamba.study.options import HowToRun
from megatron_blackmamba.study.points import Evidence
from studies import recall
from studies.differences import decide, holm, p_value
from tests.docs.session import ROOT

DOCS = ROOT / "docs"
POINTS = {
    "trend": "trend",
    "trend_first": "trend",
    "trend_gpu": "trend_gpu",
    "confirm": "confirm",
    "mixers": "mixers",
    "muon": "muon",
}
"""File of points → its study."""
SOURCES = {
    "README.md": ["trend", "confirm", "mixers"],
    "trend.md": ["trend", "trend_first", "confirm"],
    "trend_gpu.md": ["trend_gpu"],
    "trend_router.md": ["trend", "confirm"],
    "confirm.md": ["trend", "confirm"],
    "mixers.md": ["mixers"],
    "muon.md": ["muon"],
}
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?: ± \d+\.\d+)?(?![\w.]|MB)")
"""A number with decimals, with its interval; none that is a size or a version."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return a function from the name of a file of points to what its command prints."""
    known = {}

    def look(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            how = HowToRun(points=DOCS / "studies" / f"{name}.json", page_only=True, tables=True)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                assert run(open_study(POINTS[name], folder), how)
            known[name] = said.getvalue()
        return known[name]

    return look


def claims(page):
    """Return the part of a page that claims something of a study, without code."""
    text = ((ROOT if page == "README.md" else DOCS) / page).read_text()
    if page == "README.md":
        text = text.split("## Result\n")[1].split("\n## ")[0]
    if page in ("mixers.md", "muon.md"):
        text = text.split("## The comparisons\n")[0]
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", SOURCES)
def test_figures_of_a_page_are_printed(page, printed):
    said = "\n".join(printed(name) for name in SOURCES[page])
    if page == "mixers.md":
        said += recall.table(json.loads(recall.POINTS.read_text()))
    known = {each for figure in FIGURE.findall(said) for each in (figure, figure.partition(" ±")[0])}
    assert sorted(set(FIGURE.findall(claims(page))) - known) == []


@pytest.mark.parametrize("page", ["trend.md", "trend_gpu.md", "trend_router.md"])
def test_rows_of_a_page_are_printed_whole(page, printed):
    said = {line for name in SOURCES[page] for line in printed(name).splitlines()}
    rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|") and FIGURE.search(line)]
    assert len(rows) > 10 and [row for row in rows if row not in said] == []


@pytest.mark.parametrize("page", [page for page in SOURCES if page != "README.md"])
def test_pages_name_the_command_that_prints(page):
    """Or they link the page of the study, which has it."""
    text = (DOCS / page).read_text()
    for name in SOURCES[page]:
        command = f"blackmamba study {POINTS[name]} --page --points docs/studies/{name}.json"
        assert command in text or f"({POINTS[name]}.md)" in text


@pytest.mark.parametrize("name", ["confirm", "mixers", "muon"])
def test_state_is_that_of_the_points(name, printed):
    """The page says how many points there are."""
    first = next(line for line in printed(name).splitlines() if "points are finished" in line)
    assert first.partition(" planned")[0] in " ".join((DOCS / f"{name}.md").read_text().split())


def test_recall_is_the_table_that_is_printed():
    points, page = json.loads(recall.POINTS.read_text()), " ".join((DOCS / "mixers.md").read_text().split())
    assert recall.table(points) in (DOCS / "mixers.md").read_text()
    more = []
    for distance in recall.DISTANCES[:2]:
        gains = [(p["variant"][0] == "m", recall.gained(p["rows"]["length:passkey"], *distance)) for p in points]
        most = max(gain for mamba, gain in gains if mamba)
        more.append(sum(gain > most for mamba, gain in gains if not mamba))
    assert f"Of its 18 models, {more[0]} gain more" in page and f"and {more[1]} from one up to 256" in page


@pytest.mark.parametrize("name, number", [("confirm", 2), ("muon", 3)])
def test_page_says_what_was_declared(name, number, printed):
    declared = [line for line in printed(name).splitlines() if line.startswith("Declared: ")]
    told = [line.removeprefix("Declared: ") for line in declared if "no conclusion" not in line]
    page = " ".join((DOCS / f"{name}.md").read_text().split())
    assert len(told) == number and all(line in page for line in told)


def test_mixers_are_corrected_for_their_number(tmp_path):
    study = open_study("mixers", tmp_path)
    points, declared = Evidence.read(DOCS / "studies" / "mixers.json", study).points, study.config.primary
    told = [one.differences for each in declared if len((one := decide(points, each)).losses) == len(each.seeds)]
    left = len(declared) - len(told)
    kept = sum(p < 0.05 for p in holm([*map(p_value, told), *[1.0] * left]))
    page = (DOCS / "mixers.md").read_text()
    assert f"Holm's for all {len(declared)}, {kept} of these {len(told)} differences" in page


def seeds_of(cell):
    return [float(value.replace("−", "-")) for value in re.findall(r"[−+]?\d+\.\d+", cell)]


def test_differences_of_earlier_study_follow_from_its_losses():
    """Its results were not kept, so the page's two tables must agree with each other."""
    text = (DOCS / "study.md").read_text()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]
    losses = {(r[0], r[1]): seeds_of(r[6])[1:] for r in rows if r[0] in ("small", "large") and len(r) == 9}
    assert len(losses) == 8
    pairs = [r for r in rows if " − " in r[0] and len(r) == 5]
    assert len(pairs) == 4
    for names, *cells in pairs:
        one, other = names.split(" − ")
        for size, by_seed, mean in (("small", *cells[:2]), ("large", *cells[2:])):
            found = [a - b for a, b in zip(losses[size, one], losses[size, other], strict=True)]
            assert seeds_of(by_seed) == pytest.approx(found, abs=0.0011)
            assert seeds_of(mean) == pytest.approx([statistics.fmean(found), half_interval(found)], abs=0.011)
