"""The first lines of a job: what it trains, on what, where it writes, and which settings may surprise."""

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.model import lookahead
from megatron_blackmamba.plan import validation
from megatron_blackmamba.plan.parameters import Parameters
from megatron_blackmamba.runtime import device
from megatron_blackmamba.training.start import fit

SYNTHETIC = "synthetic tokens come from a generator; data.mixture=FILE trains on text"


def lines(config: RunConfig, processes: int, count: Parameters | None) -> list[str]:
    """Return the description of a run, and notes on it; refuse one that looks ahead, or cannot fit into this machine.

    count: Of the whole model, if it could be counted.
    """
    data = f"data {config.data.mixture}" if config.data.kind == "mixture" else "synthetic data"
    precision = config.training.precision + (" with FP8 products" if config.kernels.linear == "fp8" else "")
    parts = [
        f"{config.training.tokens:,} tokens of {data}",
        f"{processes} {'process' if processes == 1 else 'processes'} in {precision}",
        f"writes to {RunFolder.of(config).root.absolute()}",
    ]
    notes = _notes(config) + lookahead.refuse(config)
    if count:
        sizes = f"{count.total / 1e6:,.1f}M parameters, {count.forward / 1e6:,.1f}M of them for each token"
        parts.insert(0, sizes)
        if not device.has_cuda():
            notes += fit.notes(config, processes, fit.processes_here(), count.total)
    return [f"{config.name}: {'; '.join(parts)}", *(f"note: {note}" for note in notes)]


def _notes(config: RunConfig) -> list[str]:
    notes = []
    if config.data.kind == "synthetic":
        notes.append(SYNTHETIC)
    notes += validation.notes(config)
    if config.training.precision == "bf16" and not device.has_cuda():
        notes.append("small models learn more with training.precision=fp32, which may also be faster on CPUs")
    return notes
