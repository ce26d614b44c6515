"""Commands and links in README and docs are valid."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megatron_blackmamba.cli import app
from megatron_blackmamba.config import RunConfig, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDER = re.compile(r"…|\.\.\.| \| |[<>{]|(?<=[ =])[A-Z][A-Z_]*(?= |$)")
MISTAKE = re.compile(r"^\| `blackmamba .*", re.MULTILINE)  # made by test_errors.py
TAKES_A_RUN = {"config", "train", "plan", "launch"}
FROM_THE_READER = ("my_", "mine.yaml", "base.yaml", "mixture.yaml", "mix.yaml", "run.yaml", "RUN", "CONFIG")


def blocks(page):
    """The fenced blocks of a page, their continued lines joined."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()


def commands():
    for page in PAGES:
        text = MISTAKE.sub("", page.read_text()) if page.name == "troubleshooting.md" else page.read_text()
        inline = re.findall(r"`(blackmamba [^`]+)`", text)
        for line in [*blocks(page), *inline]:
            found = re.match(r"\s*(?:\$ )?(?:\w+=\S+ )*(?:srun (?:-\S+ )*)?(blackmamba .*)", line)
            if found and not PLACEHOLDER.search(found[1]):
                yield pytest.param(found[1], id=f"{page.name}: {found[1].split('#')[0].strip()[:70]}")


@pytest.mark.parametrize("line", list(commands()))
def test_a_command_is_understood(line):
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="blackmamba")
    while hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            return
        command = command.commands[words.pop(0)]
    if not words:  # the verb alone, named in a sentence
        return
    parsed = command.make_context(command.name, words, parent=context)
    if command.name in TAKES_A_RUN and parsed.params.get("configs"):
        arguments = parsed.params["configs"]
        files = [a for a in arguments if "=" not in a]
        if not any(file.startswith(FROM_THE_READER) for file in files):
            assert isinstance(load(files, [a for a in arguments if "=" in a]), RunConfig)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_a_page_points_to_exists(page):
    text = page.read_text()
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    named = re.findall(
        r"`((?:scripts|configs|docs|benchmarks|tests|data_tools|megatron_blackmamba|csrc)/[\w./-]+)`", text
    )
    words = [word for line in blocks(page) for word in line.split()]
    named += [word for word in words if word.startswith(("scripts/", "tests/", "examples/"))]
    missing = [path for path in linked if not (page.parent / path).exists()]
    missing += [path for path in named if not (ROOT / path).exists()]
    assert missing == []


def test_sinkhorn_iterations_study_prints_the_figures_shown():
    page = (ROOT / "docs" / "reproduction.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == printed, done.stderr


def programs():
    """Yield each `python -m …` of this repository, with the words that follow it."""
    pages = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"python -m ((?:benchmarks|tests|scripts)\.[\w.]+)([^`\n|]*)", pages)
    return sorted({(module, rest.partition("#")[0].strip()) for module, rest in found})


@pytest.mark.parametrize("module, words", programs())
def test_a_program_has_the_options_shown(module, words):
    file = (ROOT / module.replace(".", "/")).with_suffix(".py")
    text = "".join(path.read_text() for path in (file, ROOT / "benchmarks" / "_common.py"))
    assert set(re.findall(r"--[a-z][\w-]*", words)) <= set(re.findall(r'"(--[\w-]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_named_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for line in blocks(page) for word in re.findall(r"^make ([a-z-]+)", line)}
    assert named <= targets


@pytest.mark.parametrize(
    "typed, offered",
    [("qu", "quickstart"), ("train --np", "--nproc"), ("train blackmamba_1", "blackmamba_1.5b"),
     ("plan tiny parallel.exp", "parallel.expert="), ("export h", "hf")],
)  # fmt: skip
def test_shell_completes_verbs_options_shipped_runs_and_keys(typed, offered):
    words = ["blackmamba", *typed.split()]
    asked = {"_BLACKMAMBA_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    program = Path(sys.executable).parent / "blackmamba"
    done = subprocess.run([program], env={**os.environ, **asked}, capture_output=True, text=True)
    assert offered in done.stdout.splitlines()
