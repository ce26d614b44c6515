"""The reference for all implementations: the forward pass in float64, and tiny checkpoints to run it on."""

from tests.reference.checkpoint import Tiny, tiny, write_released
from tests.reference.forward import Trace, forward

__all__ = ["Tiny", "Trace", "forward", "tiny", "write_released"]
