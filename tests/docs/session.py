"""Type the blocks of a page into a shell, without waiting for imports: every `blackmamba` is forked from one process.

As a program this is that process: `python -m tests.docs.session SOCKET`.
"""

import contextlib
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.runtime.ranks import import_once

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHIM = """#!{python} -IS
import json, os, signal, socket, sys
signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
def forward(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
with socket.socket(socket.AF_UNIX) as there:
    there.connect({socket!r})
    ask = json.dumps({{"words": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ)}}).encode()
    socket.send_fds(there, [len(ask).to_bytes(4, "big")], [0, 1, 2])
    there.sendall(ask)
    pid = int.from_bytes(there.recv(4), "big")
    for number in signals:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    code = there.recv(16)
sys.exit(int(code) if code else 70)
"""
STEPS = 2
QUICK = "ONE_STEP"
"""Variable of a block whose runs take one step, and whose exports are compared without importing anything again."""
WHOLE = "WHOLE_RUNS"
"""Variable of a block whose runs are not shortened."""
PRELOADED = (
    *("torch.utils.tensorboard", "transformers.models.auto.modeling_auto", "pyarrow", "matplotlib.pyplot"),
    *("megatron_blackmamba.interchange.convert", "megatron_blackmamba.report"),
    *("megatron_blackmamba.inference.generator", "megatron_blackmamba.data_tools.tokenization"),
)


class Session:
    """Run shell and Python code in a folder, with a `blackmamba` on the PATH that starts at once.

    The processes that `--nproc` starts are such programs too, and those of the quickstart and of studies. A signal to
    such a program reaches the fork.
    """

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "socket"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("blackmamba", "run-python", "python"):
            shim = self.bin / name
            shim.write_text(SHIM.format(python=sys.executable, socket=str(self.socket)))
            shim.chmod(0o755)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD", "MASTER"))}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
        environment |= {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "huggingface")}
        self.environment = environment | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        self._log = open(folder / "server.txt", "w")  # noqa: SIM115 - for the life of the process
        words = [sys.executable, "-m", "tests.docs.session", str(self.socket)]
        self._process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=self._log, stderr=self._log)
        end = time.monotonic() + 300
        while not self.socket.exists():
            assert self._process.poll() is None and time.monotonic() < end, (folder / "server.txt").read_text()
            time.sleep(0.05)

    def run(self, code: str, folder: Path, language: str = "bash", **environment: str) -> subprocess.CompletedProcess:
        """Run a block with more environment variables, and return what it printed."""
        words = ["bash", "-euo", "pipefail", "-c", code]
        if language == "python":
            file = folder / ".block.py"
            file.write_text(code)
            words = [str(self.bin / "run-python"), str(file)]
        return subprocess.run(
            words,
            cwd=folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        )

    def command(self, *words: str | Path) -> list[str]:
        """Return what starts `blackmamba` with these words, given `environment`."""
        return [str(self.bin / "blackmamba"), *map(str, words)]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and code of the blocks that a reader is to run; the Python blocks of a page are one program."""
    found = BLOCK.findall(page.read_text())
    python = "".join(code for language, code in found if language == "python")
    shell = [(language, code) for language, code in found if language == "bash"]
    return [*shell, *([("python", python)] if python else [])]


def shortened(words: list[str]) -> list[str]:
    """Return a command with fewer steps, unless the block has its own ones."""
    if words[1:2] != ["train"] or WHOLE in os.environ:
        return words
    return [*words, f"training.stop_after_steps={1 if QUICK in os.environ else STEPS}"]


def _serve(path: str) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    import_once()
    from megatron_blackmamba import cli

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path + ".new")
        listening.listen(16)
        os.rename(path + ".new", path)
        while True:
            asking, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _answer(asking, cli)
            asking.close()


def _answer(asking: socket.socket, cli) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, descriptors, _, _ = socket.recv_fds(asking, 4, 3)
    size, ask = int.from_bytes(length, "big"), b""
    while len(ask) < size:
        ask += asking.recv(size - len(ask))
    question = json.loads(ask)
    asking.sendall(os.getpid().to_bytes(4, "big"))
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    code = 70
    try:
        os.environ.clear()
        os.environ.update(question["environment"])
        os.chdir(question["folder"])
        code = _run(question["words"], cli)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        asking.sendall(str(code).encode())
        os._exit(0)


def _run(words: list[str], cli) -> int:
    program = Path(words[0]).name
    forked = ("quickstart", "study", *(["export"] if QUICK in os.environ else []))
    if "--nproc" in words or (words[1:2] and words[1] in forked):
        sys.executable = str(Path(words[0]).with_name("run-python"))
    if words[1:3] == ["-m", "megatron_blackmamba"]:
        program, sys.argv = "blackmamba", words[2:]
    elif program == "blackmamba":
        sys.argv = shortened([program, *words[1:]])
    else:
        sys.argv = words[1:]
    try:
        if program == "blackmamba":
            cli.main()
        elif words[1] == "-c":
            exec(words[2], {"__name__": "__main__"})
        elif words[1] == "-m":
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1])
