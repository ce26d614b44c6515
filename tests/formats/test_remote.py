"""URLs of object storage and their local copies, without a server."""

import queue
import signal
import subprocess
import sys
import threading

import pytest

from megatron_blackmamba.formats import remote
from megatron_blackmamba.formats.remote import RemoteError, cached


def test_a_process_that_is_waited_for_is_named(tmp_path, monkeypatch):
    """A stopped process keeps its locks."""
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(remote, "PATIENCE", 0.1)
    monkeypatch.setattr(remote, "print", lambda line, **_: said.put(line), raising=False)
    hold = "import sys, pathlib; from megatron_blackmamba.formats.remote import one_at_a_time\n"
    hold += "with one_at_a_time(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path / "web")]

    def wait():
        with remote.one_at_a_time(tmp_path / "web"):
            pass

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            assert f"waiting for process {holder.pid}, which fetches {tmp_path}/web" in said.get(timeout=60)
        finally:
            holder.send_signal(signal.SIGCONT)
            holder.stdin.close()
            waiting.join(60)
    assert not waiting.is_alive()


def test_scheme_without_library_says_what_to_install():
    with pytest.raises(RemoteError, match=r"nosuch://x/y: .* Use s3://, gs:// or hf://"):
        remote.file_system("nosuch://x/y")


@pytest.mark.parametrize("url", ["s3:///etc/x", "s3://bucket/../../x", "s3://.."])
def test_local_copies_stay_in_the_cache(url):
    with pytest.raises(RemoteError, match="names no object of a bucket"):
        cached(url)
