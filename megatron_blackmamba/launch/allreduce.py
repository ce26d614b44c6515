"""Do processes on this machine reach each other? An all-reduce between them says so, and how fast."""

import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_blackmamba.console import interrupts

TIMEOUT_S = 90.0


class AllReduceError(RuntimeError):
    """The processes could not sum a vector together; the message is what the first of them said."""


def time_all_reduce(processes: int, *, on_gpus: bool, mebibytes: int = 16, repeats: int = 5) -> float:
    """Sum a vector over fresh local processes, check the sum, and return the seconds of the fastest repeat."""
    context = interrupts.spawn_context()
    with tempfile.TemporaryDirectory() as folder, interrupts.unfinished(folder):
        pipes, workers = [], []
        for rank in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, processes, f"file://{folder}/store", on_gpus, mebibytes, repeats, sender)
            worker = context.Process(target=_take_part, args=arguments, daemon=True)
            worker.start()
            sender.close()
            pipes.append(receiver)
            workers.append(worker)
        try:
            return max(_answers(pipes))
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _answers(pipes: list[Connection]) -> list[float]:
    """Return the seconds of every rank, or raise the first failure of any rank."""
    waiting = list(pipes)
    seconds: list[float] = []
    deadline = time.monotonic() + TIMEOUT_S
    while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AllReduceError(f"no answer from {len(waiting)} of {len(pipes)} processes in {TIMEOUT_S:.0f} s")
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            waiting.remove(pipe)
            answer: Any
            try:
                answer = pipe.recv()
            except EOFError:
                answer = "a process died without a word (killed for memory?)"
            if isinstance(answer, str):
                raise AllReduceError(answer)
            seconds.append(answer)
    return seconds


def _take_part(rank: int, world: int, store: str, on_gpus: bool, mebibytes: int, repeats: int, out: Connection) -> None:
    try:
        out.send(_fastest(rank, world, store, on_gpus, mebibytes, repeats))
    except Exception as error:
        out.send(f"rank {rank}: {type(error).__name__}: {error}")


def _fastest(rank: int, world: int, store: str, on_gpus: bool, mebibytes: int, repeats: int) -> float:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("nccl" if on_gpus else "gloo", store, timeout, rank=rank, world_size=world)
    best = float("inf")
    for _ in range(repeats):
        vector = torch.full((mebibytes * 2**18,), float(rank + 1), device=device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(vector)
        low, high = vector.aminmax()  # waits for the device
        best = min(best, time.perf_counter() - start)
        expected = world * (world + 1) / 2
        if not low == high == expected:
            raise ValueError(f"the sum should be {expected:.0f} everywhere, it runs from {low} to {high}")
    dist.destroy_process_group()
    return best
