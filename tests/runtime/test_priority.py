"""A low priority that the kernel heeds: it often shares the processors between sessions, not processes."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron_blackmamba.runtime.parent import keep_priority

SAYS = "import os; print(os.nice(0), open('/proc/self/autogroup').read())"
pytestmark = pytest.mark.skipif(not os.access("/proc/self/autogroup", os.W_OK), reason="no sharing by session here")


@pytest.mark.parametrize("session", [True, False])
def test_a_session_keeps_the_priority_of_its_process(session):
    before = Path("/proc/self/autogroup").read_text()
    options = {"start_new_session": session, "preexec_fn": partial(_begin, 7), "capture_output": True, "text": True}
    said = subprocess.run([sys.executable, "-c", SAYS], check=True, **options).stdout
    lowered = os.nice(0) + 7
    assert said.startswith(f"{lowered} ")
    assert (f"nice {lowered}" in said) == session
    assert Path("/proc/self/autogroup").read_text() == before


def _begin(nice):
    os.nice(nice)
    keep_priority()
