"""Run a script in Megatron-Bridge's loop without a GPU: `python -m tests.megatron_lm.bridge_on_cpu RECORD SCRIPT …`.

What it places on CUDA lands on the CPU, one device is claimed, and what it imports of Transformer Engine, which cannot
be installed without CUDA, is empty. RECORD gets the batches.
"""

import builtins
import runpy
import sys
import types
from functools import partial
from pathlib import Path

import torch

from megatron_blackmamba.engine import changes
from tests.megatron_lm.on_cpu import OnCpu as Factories


class OnCpu(Factories):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class Empty(type):
    """A class with empty classes inside, whatever they are called."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


def without_transformer_engine():
    """Give Megatron-Bridge, and nothing else, a Transformer Engine with nothing in it."""
    real = builtins.__import__

    def imported(name, globals=None, locals=None, fromlist=(), level=0):
        if name.partition(".")[0] == "transformer_engine" and (globals or {})["__name__"].startswith("megatron.bridge"):
            return Empty("transformer_engine", (), {})
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = imported


def main(record: Path, words: list[str]) -> None:
    changes.install()
    without_transformer_engine()
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.memory_stats = dict
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)
    from megatron.bridge.training import initialize, setup

    initialize.compile_helpers = lambda: None
    setup.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    sys.argv = words
    with OnCpu():
        script = types.SimpleNamespace(**runpy.run_path(words[0]))
        step = script.forward_step

        def recorded(batches, model):
            batch = next(batches)
            torch.save([batch["tokens"], batch["labels"]], record / f"{len(list(record.iterdir())):04}.pt")
            return step(iter([batch]), model)

        script.main.__globals__["forward_step"] = recorded
        script.main(words[1:])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
