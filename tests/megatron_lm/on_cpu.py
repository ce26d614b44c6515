"""Run a script in Megatron-LM's loop without a GPU: `python -m tests.megatron_lm.on_cpu RECORD SCRIPT WORDS...`.

What Megatron-LM places on CUDA lands on the CPU, one device is claimed, nothing is compiled. RECORD gets the batches.
"""

import runpy
import sys
from functools import partial
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

import megatron_blackmamba.model  # noqa: F401  (changes megatron-core before it is imported)
from megatron_blackmamba.engine import changes


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def main(record: Path, words: list[str]) -> None:
    changes.install()
    from megatron.training import initialize, training

    initialize._compile_dependencies = lambda: None
    training.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    import pretrain_gpt

    read = pretrain_gpt.get_batch

    def recorded(*args, **kwargs):
        batch = read(*args, **kwargs)
        rank = torch.distributed.get_rank()
        torch.save([each.clone() for each in batch[:2]], record / f"{rank}_{len(list(record.glob(f'{rank}_*'))):04}.pt")
        return batch

    pretrain_gpt.get_batch = recorded
    sys.argv = words
    with OnCpu():
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
