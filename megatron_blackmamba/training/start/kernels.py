"""The GPU kernels of a run. Training without them is refused: their replacements give the same results, slowly."""

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.events import Kernels
from megatron_blackmamba.ops import backends
from megatron_blackmamba.runtime.device import DeviceError


def refuse_lost(config: RunConfig) -> None:
    """Raise DeviceError where an operation loses its kernel, unless `kernels.if_missing` allows it."""
    if config.kernels.if_missing == "pytorch" or not (lost := backends.lost()):
        return
    why = "; ".join(dict.fromkeys(lost.values()))
    raise DeviceError(
        f"the GPU kernels of {', '.join(sorted(lost))} cannot run here: {why}."
        " `blackmamba doctor` says what to install. kernels.if_missing=pytorch trains without them, far slower."
    )


def in_use() -> Kernels | None:
    """Return the kernels that a GPU uses, with a warning if none of this project's can run."""
    return Kernels(in_use=backends.in_use(), problem=backends.why_no_triton() or "") if backends.has_gpu() else None
