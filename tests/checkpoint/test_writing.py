"""A writer process: what it reads, and its answer about its part of a save."""

import gc
import mmap
import multiprocessing
import os
import subprocess
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from megatron_blackmamba.checkpoint import writing
from megatron_blackmamba.checkpoint.writing import Part, Write, _written
from tests.waiting import wait_until

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def bucket(path, **tensors):
    items = [(SimpleNamespace(index=SimpleNamespace(fqn=name)), tensor) for name, tensor in tensors.items()]
    return str(path), None, ([], items)


def test_non_finite_weights_are_named_and_not_written(tmp_path):
    calls = []
    part = _written(calls.append, [bucket(tmp_path / "a", good=torch.ones(2), bad=torch.tensor([1.0, float("nan")]))])
    assert part.not_finite == "bad" and part.problem is None
    assert calls == [] and part.files == {}


def test_a_failing_write_names_file_and_cause(tmp_path):
    def write(*_, **__):
        raise OSError(28, "No space left on device")

    part = _written(write, [bucket(tmp_path / "a", good=torch.ones(2))])
    assert part.problem == "writing a: No space left on device"


class OnGpu(torch.Tensor):
    """Pretend to lie on a GPU: a copy for which the host does not wait lies in pinned memory, as PyTorch's does.

    Fork shares pinned memory, and a freed block is used again at once: here it is overwritten when it is freed.
    """

    copies = ()

    def to(self, device, non_blocking=False):
        values = self.as_subclass(torch.Tensor)
        copy = values.clone()
        if non_blocking:
            block = mmap.mmap(-1, values.nbytes)  # shared by fork
            copy = torch.frombuffer(block, dtype=values.dtype).copy_(values)
            weakref.finalize(copy, block.write, b"\x07" * len(block))
        OnGpu.copies = (*OnGpu.copies, weakref.ref(copy))
        return copy


@pytest.fixture
def started(place, tmp_path, monkeypatch):
    """Start a write whose writer waits for a word; return the write, that word and what the file then holds."""

    hold, go = os.pipe()

    def start(tensor):
        monkeypatch.setattr(writing, "die_with_parent", lambda parent: os.read(hold, 1))
        writer = FileSystemWriterAsync(str(tmp_path), thread_count=1)
        path = tmp_path / "shard"
        item = _create_write_items("weight", torch.ones(len(tensor)))[0]
        writer.write_buckets = [(str(path), "shard", ([], [(item, tensor)]))]
        write = Write(writer, None)
        write.start()

        def written():
            os.write(go, b"!")
            assert write.wait().problem is None
            return torch.load(path)

        return written

    OnGpu.copies = ()
    yield start
    os.write(go, b"!")


def test_only_transferred_bytes_are_moves_of_a_writer(monkeypatch):
    monkeypatch.setattr(writing, "POLL_SECONDS", 0)
    write, numbers, moves = Write(None, None), [5, 5, 7, 7, 9], []
    write._answer, theirs = multiprocessing.Pipe(duplex=False)
    write._process = SimpleNamespace(join=lambda: None, exitcode=0)

    def transferred():
        if len(numbers) == 1:
            theirs.send(Part())
        return numbers.pop(0)

    monkeypatch.setattr(write, "_transferred", transferred)
    write.wait(lambda: moves.append(1))
    assert len(moves) == 2


def test_transferred_bytes_of_a_process_are_counted():
    write = Write(None, None)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as write._process:
        write._process.stdin.write(bytes(10_000))
        write._process.stdin.flush()
        wait_until(lambda: write._transferred() >= 20_000)
        assert write._transferred() == write._transferred()  # it waits for more


def test_staged_memory_is_not_reused_while_written(started):
    written = started(torch.ones(4096).as_subclass(OnGpu))
    gc.collect()
    assert all(copy() is not None for copy in OnGpu.copies) and len(OnGpu.copies) == 1
    assert written().unique().tolist() == [1.0]
    gc.collect()
    assert OnGpu.copies[0]() is None  # the memory is given back once it is written


def test_memory_that_fork_shares_is_copied(started):
    tensor = torch.ones(4096).share_memory_()
    written = started(tensor)
    tensor.fill_(7)
    assert written().unique().tolist() == [1.0]
