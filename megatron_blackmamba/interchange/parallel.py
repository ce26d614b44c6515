"""Weight files written by several processes: each opens the source itself and reads only the tensors of its files."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.interchange import hf, native, safetensors_io
from megatron_blackmamba.interchange.canonical import InterchangeError, cast, finite, watched
from megatron_blackmamba.interchange.open import open_model

Task = Sequence[tuple[Path, list[str]]]
"""Files, and the names of the tensors in each."""


def write_files(
    files: safetensors_io.Files,
    source: str,
    dtype: torch.dtype | None,
    processes: int,
    watch: Callable[[int], None],
    ema: bool = False,
    as_native: bool = False,
) -> None:
    """Write safetensors files of a source's weights, spread over processes.

    dtype: Round the weights to it; None copies them exactly.
    ema: Write the averaged weights of a checkpoint.
    as_native: Write the tensors of a model of transformers.
    """
    names = [(path, list(entries)) for path, entries in files.items()]
    context = interrupts.spawn_context()
    running: dict[Connection, multiprocessing.process.BaseProcess] = {}
    threads = max(1, usable_cores() // processes)
    try:
        for number in range(min(processes, len(names))):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, source, dtype, names[number::processes], threads, ema, as_native)
            process = context.Process(target=_write, args=arguments, daemon=True)
            process.start()
            theirs.close()
            running[ours] = process
        while running:
            for pipe in wait(list(running)):
                _receive(pipe, running, watch)  # type: ignore[arg-type]
    finally:
        for pipe, other in running.items():
            other.kill()
            other.join()
            pipe.close()


def _receive(
    pipe: Connection, running: dict[Connection, "multiprocessing.process.BaseProcess"], watch: Callable
) -> None:
    """Handle one message: the bytes of a tensor that was read, an error, or None at the end."""
    try:
        message = pipe.recv()
    except EOFError:
        running[pipe].join()
        raise InterchangeError(
            f"a process that writes weights ended with exit code {running[pipe].exitcode}. If memory is short, use a "
            "smaller --nproc"
        ) from None
    if isinstance(message, Exception):
        raise message
    if message is None:
        running.pop(pipe).join()
        pipe.close()
    else:
        watch(message)


def _write(
    pipe: Connection, source: str, dtype: torch.dtype | None, task: Task, threads: int, ema: bool, as_native: bool
) -> None:
    torch.set_num_threads(threads)
    try:
        model = watched(finite(cast(open_model(Path(source), ema=ema), dtype)), pipe.send)
        entries = (native if as_native else hf).in_file(model)
        for path, names in task:
            safetensors_io.write(path, {name: entries[name] for name in names})
        pipe.send(None)
    except (OSError, ValueError) as error:
        pipe.send(error)
