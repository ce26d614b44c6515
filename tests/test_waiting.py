import subprocess
import sys

import pytest

from tests.waiting import Command, wait_until


def python(code, *arguments):
    return subprocess.Popen([sys.executable, "-S", "-c", code, *map(str, arguments)])


def test_wait_ends_with_the_job_and_shows_its_output():
    with pytest.raises(AssertionError, match="what it said"):
        wait_until(lambda: False, Command(python(""), lambda: "what it said"))


def test_what_a_job_did_before_its_end_counts(tmp_path):
    process = python("import sys; open(sys.argv[1], 'w')", tmp_path / "file")
    process.wait()
    seen = iter((False, True))
    wait_until(lambda: next(seen), Command(process))
    wait_until((tmp_path / "file").exists, Command(process))
