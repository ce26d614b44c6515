"""Recurrent decoding: `load` a model of any kind, then `generate`, `stream`, or work with its `Decoder` and `State`."""

from megatron_blackmamba.inference.decoder import Decoder, State
from megatron_blackmamba.inference.generator import Generator, load
from megatron_blackmamba.inference.sampling import Sampling

__all__ = ["Decoder", "Generator", "Sampling", "State", "load"]
