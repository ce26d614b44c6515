"""The parts of the site that are generated; `make docs` builds all of it and refuses broken links."""

import re
from pathlib import Path

import pytest

from megatron_blackmamba.config import keys
from scripts.docs import picture, reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCES = {"engine_changes.md", "faults.md", "measured.md", "records.md", "versions.md"}
"""Tables of events, metrics, faults, figures and the like: what one looks up."""
LOOKED_UP = {
    "architecture.md",
    "cluster.md",
    "conversion.md",
    "data.md",
    "extending.md",
    "kernels.md",
    "model_options.md",
    "performance.md",
}
"""What is where in the code, worked examples in full, options and formats: each section is read alone."""


def test_pictures_are_those_that_the_script_draws():
    for path, content in picture.pictures().items():
        assert path.read_text() == content, f"python -m scripts.docs.picture draws another {path.name}"


def test_reference_has_every_config_key():
    assert set(re.findall(r"^\| `([\w.]+)` \|", reference.config_page(), re.MULTILINE)) == set(keys())


@pytest.mark.parametrize("command", ["train", "data tokenize", "export hf", "new"])
def test_reference_has_commands_with_their_options(command):
    page = reference.commands_page()
    assert f"## blackmamba {command}\n" in page
    assert "[dim]" not in page and "[/" not in page
    assert "| `--nproc` |" in page


def lines(path):
    return len(path.read_text().splitlines())


def test_readme_stays_short():
    assert lines(ROOT / "README.md") <= 180


def test_guides_are_read_in_one_sitting():
    """Tables of reference may be longer, and so may pages that a reader does not read from start to end."""
    pages = {path for path in DOCS.glob("*.md") if path.name not in REFERENCES | LOOKED_UP}
    assert {path.name: lines(path) for path in pages if lines(path) > 204} == {}


def in_the_menu():
    return set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def linked_from(page):
    return set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / page).read_text()))


def test_every_page_is_in_menu_or_notes():
    """The menu stays short: research and measurements are listed on one page of it."""
    notes = set(re.findall(r"^  /([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert in_the_menu() | notes == written | {"reference/commands.md", "reference/config.md"}
    assert len(in_the_menu()) <= 28 and notes <= linked_from("notes.md") and not notes & in_the_menu()


def test_index_lists_every_page_of_the_menu():
    assert linked_from("index.md") == {page for page in in_the_menu() if "/" not in page} - {"index.md"}


def test_guides_stay_short():
    """Notes and generated references do not count."""
    pages = [DOCS / page for page in in_the_menu() if (DOCS / page).is_file()]
    assert sum(len(page.read_text().split()) for page in pages) <= 40_000
