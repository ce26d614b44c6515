"""The inputs of every mixer in addition to the hidden states."""

from dataclasses import dataclass

from torch import Tensor

from megatron_blackmamba.ops.attention import Documents


@dataclass
class LayerInputs:
    ids_BS: Tensor
    """Token ids of whole sequences, or of this rank's parts of them under `parallel.context`."""
    reset_BS: Tensor | None = None
    """True where a document begins, with model.eod_reset."""
    rotary: Tensor | None = None
    documents: Documents | None = None
    """The documents that attention stays within; None: it crosses them."""
    carried_SBR: Tensor | None = None
    """What the last router left for the next, of this rank's tokens; routers that `carried` says so write it."""
    keep_BL1: None = None
    """Training has no padding; decoding has 0 there."""
