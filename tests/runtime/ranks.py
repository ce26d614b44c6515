"""Real ranks for tests: one process loads torch and megatron-core once and forks as many ranks as asked, with gloo."""

import contextlib
import faulthandler
import functools
import importlib
import json
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron_blackmamba.runtime.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
IMPORTED_LATE = (
    "megatron_blackmamba.training.loop",
    "torch._dynamo",  # the first step of an optimizer does
    "megatron.core.transformer.moe.experts",
    "megatron.core.transformer.transformer_block",
    "megatron_blackmamba.ops.causal_conv1d.cpp",
    "megatron_blackmamba.ops.selective_scan.cpp",
    "megatron_blackmamba.ops.sinkhorn.cpp",
)
"""Modules that training imports, some of them where it first needs them."""


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's traces in it."""
    traces = ("SLURM_", "TORCHELASTIC_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    clean = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(traces)}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | more


def run_script(module: str, *arguments: str) -> dict:
    """Run a module of the tests in a clean process; its last line of output is its answer as JSON."""

    def to_the_end(out: str, err: str) -> int:
        command = [sys.executable, "-m", module, *arguments]
        with open(out, "a") as stdout, open(err, "a") as stderr:  # a stray child may hold them open
            process = subprocess.Popen(
                command, env=environment(), cwd=ROOT, stdout=stdout, stderr=stderr, start_new_session=True
            )
        try:
            return process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    return _answer(" ".join([module, *arguments]), to_the_end)


def fork_script(module: str, *arguments: str) -> dict:
    """Run a module as `run_script` does, in a process that is forked after the imports instead of a clean one."""
    return _answer(" ".join([module, *arguments]), lambda out, err: _warm().run(module, arguments, out, err))


@functools.cache
def _warm():
    from tests.runtime.warm import Warm

    return Warm()


def _answer(what: str, to_the_end: Callable[[str, str], int]) -> dict:
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        code = to_the_end(out.name, err.name)
        assert code == 0, f"{what} failed with exit code {code}:\n{err.read()[-6000:]}"
        return json.loads(out.read().splitlines()[-1])


def import_once() -> None:
    """Do what every rank that trains would otherwise do after the fork: import, and look for foreign names.

    Garbage collection leaves all of it alone: looking through it would cost time in every fork.
    """
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    importlib.import_module("megatron_blackmamba.engine.foreign").refuse_missing()
    importlib.import_module("megatron_blackmamba.runtime.process").freeze_gc()


def fork_ranks(count: int, body: Callable[[], object], seconds: int = 900, alone: bool = False) -> list[dict]:
    """Run `body` in `count` forked ranks, as torchrun would start them (or alone); each one's answer or its error."""
    port, children = free_port(), []
    for rank in range(count):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            _be_rank({} if alone else _as_torchrun(rank, count, port), body, write_end, seconds)
        os.close(write_end)
        children.append((child, read_end))
    answers = []
    for child, read_end in children:
        _, status = os.waitpid(child, 0)
        os.set_blocking(read_end, False)  # a helper process of the rank may still hold the other end
        with os.fdopen(read_end) as stream:
            said = stream.read()
        answers.append(json.loads(said) if said else {"error": f"rank died with status {status}"})
    return answers


def _as_torchrun(rank: int, count: int, port: int) -> dict[str, str]:
    ranks = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    return {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _be_rank(launcher: dict[str, str], body: Callable[[], object], write_end: int, seconds: int) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    os.environ.update(launcher)
    try:
        answer = {"answer": body()}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:3000], "trace": traceback.format_exc()[-3000:]}
    os.write(write_end, json.dumps(answer).encode())  # less than a pipe holds
    multiprocessing.util._exit_function()
    os._exit(0)


def run(code, *arguments):
    """Run code in a Python process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
