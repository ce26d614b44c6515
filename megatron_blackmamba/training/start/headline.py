"""The first lines of a job: what it trains, on what, where it writes, and which settings may surprise."""

import os

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.plan import memory, parameters
from megatron_blackmamba.runtime import device

GIB = 2**30
MANY_TIMES = 2
"""A run whose step needs this many times the memory of the machine is told so; the estimate is rough."""


def lines(config: RunConfig, processes: int, counted: bool) -> list[str]:
    """Return the description of a run, and notes on it.

    counted: name the parameters too. They are counted in a pretended world, so no real one may exist.
    """
    data = f"data {config.data.mixture}" if config.data.kind == "mixture" else "synthetic data"
    precision = config.training.precision + (" with FP8 products" if config.kernels.linear == "fp8" else "")
    parts = [
        f"{config.training.tokens:,} tokens of {data}",
        f"{processes} {'process' if processes == 1 else 'processes'} in {precision}",
        f"writes to {RunFolder.of(config).root.absolute()}",
    ]
    if counted:
        count = parameters.count(config)
        sizes = f"{count.total / 1e6:,.1f}M parameters, {count.forward / 1e6:,.1f}M of them for each token"
        parts.insert(0, sizes)
    return [f"{config.name}: {'; '.join(parts)}", *(f"note: {note}" for note in _notes(config, processes))]


def _notes(config: RunConfig, processes: int) -> list[str]:
    notes = []
    if config.data.kind == "synthetic":
        notes.append("synthetic tokens come from a generator; data.mixture=FILE trains on text")
    elif not config.training.evaluate_every and any(
        s.validation for s in Mixture.read(config.data.mixture or "").sources
    ):
        notes.append("the mixture has validation text, which training.evaluate_every=0 never reads")
    if config.training.precision == "bf16" and not device.has_cuda():
        notes.append("small models learn more with training.precision=fp32, which may also be faster on CPUs")
    if not device.has_cuda():
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        needs = memory.beside_state(config, processes, "cpu")
        if needs > MANY_TIMES * has:
            notes.append(
                f"a step needs about {needs / GIB:,.0f} GiB and this machine has {has / GIB:,.0f} GiB: use a smaller"
                f" training.micro_batch (now {config.training.micro_batch}), or training.recompute=layers"
            )
    return notes
