"""Cards of what the project claims: one file a claim in docs/cards, and the table of them in README.

    python -m scripts.cards check      refuse a card that is incomplete, old, or says what its page does not say
    python -m scripts.cards changes    list what has changed in the code that a card is about since its commit
    python -m scripts.cards write      write the table into README

A card is `verified` by a run of its command, `calculated` by it, or `unverified`. The first two name machine, date and
commit, and end after VALID_DAYS: then the command runs again, or the card says `unverified`.
"""

import argparse
import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pydantic
import yaml

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "docs" / "cards"
VALID_DAYS = 180
BEGIN, END = "<!-- cards: written by python -m scripts.cards write -->", "<!-- end of cards -->"
STATUS = ("verified", "calculated", "unverified")


class Card(pydantic.BaseModel, extra="forbid"):
    claim: str
    status: Literal["verified", "calculated", "unverified"]
    command: str
    page: str
    """The page that says more, and has the figures."""
    machine: str = ""
    date: datetime.date | None = None
    commit: str = ""
    covers: list[str] = []
    """The files and folders whose change may change the claim."""
    figures: list[str] = []
    """Text that the page has."""

    def problems(self, root: Path, today: datetime.date) -> list[str]:
        """Return why the card cannot be believed."""
        page, lacking = root / self.page, [name for name in ("machine", "date", "commit") if not getattr(self, name)]
        if self.status != "unverified" and lacking:
            return [f"{self.status} without {', '.join(lacking)}"]
        if not page.is_file():
            return [f"no page {self.page}"]
        if missing := missing_program(self.command, root):
            return [f"its command names {missing}, which is gone"]
        if gone := [path for path in self.covers if not (root / path).exists()]:
            return [f"it covers {', '.join(gone)}, which is gone"]
        if self.status != "unverified" and not self.covers:
            return ["it does not say which code it covers"]
        text = " ".join(page.read_text().split())
        found = [f"{self.page} does not say {figure!r}" for figure in self.figures if figure not in text]
        if self.date and (today - self.date).days > VALID_DAYS:
            found.append(f"{self.status} on {self.date}, more than {VALID_DAYS} days ago: run it again")
        return found

    def changes(self, root: Path) -> str:
        """Return what has changed since its commit in what it covers; "" for nothing."""
        command = ["git", "diff", "--shortstat", self.commit, "HEAD", "--", *self.covers]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def missing_program(command: str, root: Path) -> str | None:
    """Return the module or file of this project that a command names and that does not exist."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        module = words[2].replace(".", "/")
        if words[2] == "pytest":
            return next((word for word in words[3:] if not (root / word.partition("::")[0]).exists()), None)
        return None if (root / f"{module}.py").is_file() or (root / module / "__main__.py").is_file() else words[2]
    return words[0] if "/" in words[0] and not (root / words[0]).is_file() else None


def read(folder: Path) -> dict[str, Card]:
    """Return the cards of a folder by their names."""
    return {path.stem: Card(**yaml.safe_load(path.read_text())) for path in sorted(folder.glob("*.yaml"))}


def table(cards: dict[str, Card]) -> str:
    """Return the table of README, what is verified first."""
    lines = ["| claim | status | on |", "|---|---|---|"]
    for name, card in sorted(cards.items(), key=lambda item: STATUS.index(item[1].status)):
        mark = f"**{card.status}**" if card.status == "unverified" else card.status
        where = f"{card.machine}, {card.date}" if card.machine else "what to run"
        lines.append(f"| {card.claim} | {mark} | [{where}](docs/cards/{name}.yaml) |")
    return "\n".join(lines)


def with_table(text: str, cards: dict[str, Card]) -> str:
    """Return a page whose marked part is the table."""
    return re.sub(
        rf"{re.escape(BEGIN)}.*{re.escape(END)}", f"{BEGIN}\n\n{table(cards)}\n\n{END}", text, flags=re.DOTALL
    )


def check(root: Path, today: datetime.date) -> list[str]:
    """Return a line for each thing that is wrong."""
    cards = read(root / "docs" / "cards")
    found = [
        f"docs/cards/{name}.yaml: {problem}" for name, card in cards.items() for problem in card.problems(root, today)
    ]
    readme = (root / "README.md").read_text()
    return found + (
        ["README.md: another table: python -m scripts.cards write"] if with_table(readme, cards) != readme else []
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["check", "changes", "write"])
    verb = parser.parse_args(words).verb
    if verb == "changes":
        for name, card in read(CARDS).items():
            if card.status != "unverified":
                print(f"{name}: {card.changes(ROOT) or 'nothing'} since {card.commit} ({card.date})")
        return 0
    if verb == "write":
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(), read(CARDS)))
    problems = check(ROOT, datetime.date.today())
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
