"""What commands show while they work: on a terminal, in a file, and as the documentation lists it."""

import io
import os
import re
import subprocess
import sys
import threading

import typer

from megatron_blackmamba import cli
from megatron_blackmamba.console import progress
from megatron_blackmamba.console.progress import Progress, State, working
from tests.cli.test_cli import commands
from tests.runtime.ranks import ROOT, environment
from tests.waiting import wait_until

PAGE = ROOT / "docs" / "troubleshooting.md"
SLOW = """
import sys, time
from megatron_blackmamba.console import progress
progress.SHOWN_AFTER_SECONDS = 0
with progress.working("planning"):
    time.sleep(1)
print("the result")
"""


def standard_error(monkeypatch):
    """Return a function that returns what was printed; capsys may lose what another thread prints meanwhile."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    return lambda: said.getvalue().splitlines()


def test_file_gets_part_done_and_the_time_left(monkeypatch):
    lines = standard_error(monkeypatch)
    state = [State(0.2, "piqa")]
    with Progress(lambda: state[0], every=0.02):
        wait_until(lambda: len(lines()) > 1, seconds=60)
        assert "left" not in "".join(lines())  # an earlier call did this part, in an unknown time
        state[0] = State(0.25, "piqa")
        wait_until(lambda: "left" in lines()[-1], seconds=60)
        state[0] = State(0.1, "boolq")  # the next task begins anew
        wait_until(lambda: lines()[-1].startswith(" 10.0%  boolq"), seconds=60)
    assert any(re.fullmatch(r" 25\.0%  piqa, \d+:\d\d:\d\d left", line) for line in lines())
    assert "left" not in lines()[-1]


def test_work_of_unknown_length_shows_its_duration(monkeypatch):
    lines = standard_error(monkeypatch)
    show = working("planning")
    show._every = 0.02
    with show:
        wait_until(lambda: len(lines()) > 1, seconds=60)
    assert re.fullmatch(r"planning, 0:00:\d\d", lines()[0])


def test_quick_work_shows_nothing(monkeypatch):
    lines = standard_error(monkeypatch)
    with working("planning"):
        pass
    with working("planning", quiet=True):
        threading.Event().wait(0.01)
    assert lines() == []


def test_a_terminal_shows_a_display_that_goes_away():
    ours, theirs = os.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", SLOW], stderr=theirs, stdout=subprocess.PIPE, env=environment(TERM="xterm"), cwd=ROOT
    )
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(1 << 16):
                shown += part
        except OSError:  # the other end is closed
            pass
    assert done.communicate()[0] == b"the result\n"
    assert b"planning, 0:00:0" in shown and shown.endswith(b"\x1b[2K")


def test_the_page_lists_what_every_command_shows():
    section = PAGE.read_text().partition("## What a command shows while it works")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    leaves = {" ".join(words) for words in commands(typer.main.get_command(cli.app)) if words}
    assert sorted(listed) == sorted(leaves - {"data", "export", "import"})
    assert progress.LOG_EVERY_SECONDS == 30 and "twice a minute" in section
