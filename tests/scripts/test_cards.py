"""What README says of the project's status is what the cards say, and each card can still be checked."""

import datetime
import subprocess

import pytest

from scripts import cards

TODAY = datetime.date(2026, 12, 1)
CARD = {
    "claim": "it works",
    "status": "verified",
    "command": "python -m pytest tests/test_it.py",
    "machine": "a laptop",
    "date": "2026-11-26",
    "commit": "abc",
    "covers": ["docs"],
    "figures": ["12 of 12"],
    "page": "docs/it.md",
}


def test_cards_agree_with_their_pages():
    assert cards.check(cards.ROOT, datetime.date.today()) == []


@pytest.fixture
def root(tmp_path):
    for name, text in {"docs/it.md": "12 of\n12 held", "tests/test_it.py": "", "README.md": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "change, problem",
    [
        ({}, None),
        ({"figures": ["13 of 13"]}, "does not say '13 of 13'"),
        ({"machine": ""}, "verified without machine"),
        ({"date": "2026-01-01"}, "run it again"),
        ({"command": "python -m pytest tests/gone.py"}, "names tests/gone.py"),
        ({"command": "python -m benchmarks.gone"}, "names benchmarks.gone"),
        ({"page": "docs/gone.md"}, "no page docs/gone.md"),
        ({"covers": ["docs", "gone"]}, "covers gone"),
        ({"covers": []}, "which code it covers"),
    ],
)
def test_a_card_that_nobody_can_check_is_refused(root, change, problem):
    found = cards.Card(**CARD | change).problems(root, TODAY)
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])


def test_changes_since_a_card_are_counted(root):
    def git(*words):
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *named, *words], cwd=root, check=True, capture_output=True, text=True).stdout

    git("init", "-q"), git("add", "."), git("commit", "-qm", "one")
    card = cards.Card(**CARD | {"commit": git("rev-parse", "HEAD").strip()})
    (root / "README.md").write_text("not covered")
    git("commit", "-qam", "two")
    assert card.changes(root) == ""
    (root / "docs" / "it.md").write_text("now 13")
    git("commit", "-qam", "three")
    assert card.changes(root).startswith("1 file changed")


def test_readme_with_another_table_is_refused(root):
    (root / "docs" / "cards").mkdir()
    (root / "docs" / "cards" / "it.yaml").write_text("\n".join(f"{key}: {value}" for key, value in CARD.items()))
    readme = root / "README.md"
    readme.write_text(f"{cards.BEGIN}{cards.END}")
    assert "another table" in cards.check(root, TODAY)[-1]
    readme.write_text(cards.with_table(readme.read_text(), cards.read(root / "docs" / "cards")))
    assert cards.check(root, TODAY) == [] and "| it works | verified |" in readme.read_text()
