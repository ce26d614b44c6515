"""Rehearse one training step of a run: the real trainer on fake CUDA tensors."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rehearsal import fake_cuda  # isort: skip  (before torch)

import numpy
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks._parts import part_of
from benchmarks.rehearsal.record import LOG, VALUES, Log, Place, Recorder
from megatron_blackmamba.config import RunConfig

HOUR = 3600.0


@dataclass(frozen=True)
class Rehearsed:
    """One step of one rank."""

    config: RunConfig
    ranks: int
    log: Log
    applied: list[str]
    """Patches that were installed."""
    micro_batches: int
    layers: dict[int, str]
    """Letters of the layers on this rank."""
    before: int
    """Bytes between steps."""

    @property
    def tokens(self) -> int:
        """Tokens that this rank reads in a step."""
        return self.micro_batches * self.config.training.micro_batch * self.config.data.sequence_length


def rehearse(config: RunConfig, ranks: int = 1) -> Rehearsed:
    """Take two steps and record the second, as the first of `ranks` ranks. Once in a process."""
    import torch.testing._internal.distributed.fake_pg as fake_pg

    if not torch.cuda.is_available():
        fake_cuda.become_gpu()
    warnings.simplefilter("ignore")
    from megatron_blackmamba.engine import changes
    from megatron_blackmamba.ops import backends
    from megatron_blackmamba.runtime import world
    from megatron_blackmamba.runtime.watchdog import Watchdog

    applied = changes.install()
    backends.trial = lambda smallest: None  # fake tensors have no values to try a kernel with
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=ranks)
    experts, top_k = config.model.experts, config.model.top_k
    LOG.share_of_mask = top_k / experts if experts else 1.0
    with ExitStack() as stack:
        stack.callback(world.shutdown)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Recorder())
        stack.enter_context(_known_values())
        here = world._lay_groups(config.parallel, world.Place(0, ranks, 0, "fake"))
        watchdog = stack.enter_context(Watchdog(HOUR, 0, 1, None))
        trainer = _trainer(_with_synthetic_data(config, folder), here, watchdog)
        stack.callback(trainer.batches.close)
        stack.callback(trainer.journal.close)  # before the folder is removed
        trainer.take_step()  # makes the optimizer's state
        LOG.on, LOG.peak, before = True, LOG.bytes, LOG.bytes
        trainer.take_step()
        LOG.on = False
        numbers = (int(name) for name, _ in trainer.trainable.model.decoder.layers.named_children())
        layers = {number: config.model.pattern[number] for number in numbers}
        return Rehearsed(config, ranks, LOG, applied, trainer.step.micro_batches(), layers, before)


def warm_up() -> None:
    """Import what a step needs, so that forks of this process share it."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    from megatron_blackmamba.training import loop  # noqa: F401


def _with_synthetic_data(config: RunConfig, folder: str) -> RunConfig:
    """Replace what a step does not depend on: files, and the CUDA graph, whose launches are counted one by one."""
    data = config.data.model_copy(update={"kind": "synthetic", "mixture": None})
    logging = config.logging.model_copy(update={"tensorboard": False})  # its thread creates files at any time
    kernels = config.kernels.model_copy(update={"cuda_graph": "off"})
    return config.model_copy(update={"data": data, "logging": logging, "kernels": kernels, "folder": Path(folder)})


def _trainer(config: RunConfig, here: Any, watchdog: Any) -> Any:
    from megatron_blackmamba.runtime.signals import StopRequest
    from megatron_blackmamba.training.loop import Trainer

    trainer = Trainer(config, here, StopRequest(()), watchdog)
    model, step = trainer.trainable.model, trainer.step
    for name, module in model.named_modules():
        _mark(name, module)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_cuda:
            LOG.odd[f"{name} is on the CPU"] += 1
    for name, parameter in model.named_parameters():
        LOG.layer_of_parameter[id(parameter)] = Place("adding up gradients", _layer_of(name))
    gradients, update = step.gradients, step.update
    step.gradients = _in_phase("forward", gradients)
    step.update = _in_phase("update", update)
    return trainer


def _in_phase(phase: str, call: Any) -> Any:
    def run(*args: Any) -> Any:
        LOG.phase = phase
        return call(*args)

    return run


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    after = parts[parts.index("layers") + 1 :] if "layers" in parts else []
    return int(after[0]) if after else None


def _mark(name: str, module: torch.nn.Module) -> None:
    """Have a module's operations belong to its part and layer."""
    part, layer = part_of(name, module), _layer_of(name)
    is_block = name.split(".")[-2:-1] == ["layers"]
    if part or is_block:
        place = Place(part or "residual stream", layer)
        module.register_forward_pre_hook(lambda *_: LOG.places.append(place))
        module.register_forward_hook(lambda *_: LOG.places.pop() and None)


@contextmanager
def _known_values() -> Iterator[None]:
    """Let `tolist` and `numpy` give known values, else zeros."""

    def numpy_of(self, *_, **__):
        known = VALUES.of(self)
        if known is None:
            return numpy.zeros(tuple(self.shape), dtype=float if self.is_floating_point() else int)
        with _disable_current_modes():
            return known.numpy()

    def tolist(self):
        if self.is_cuda:
            LOG.wait("tolist")
        return numpy_of(self).tolist()

    before = FakeTensor.numpy, FakeTensor.tolist
    FakeTensor.numpy, FakeTensor.tolist = numpy_of, tolist
    try:
        yield
    finally:
        FakeTensor.numpy, FakeTensor.tolist = before
