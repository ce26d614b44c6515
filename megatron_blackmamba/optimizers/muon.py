"""Muon: the momentum of each matrix is made orthogonal before it updates the matrix (Jordan 2024, arXiv 2502.16982).

megatron-core's Adam updates all that is no matrix of a product: embedding, head, vectors, convolutions and `A_log`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from megatron_blackmamba.optimizers.base import NO_DECAY, STACKED, Cannot, OptimizerKind

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING_OR_HEAD = "is_embedding_or_output_parameter"
"""The mark of megatron-core on these matrices."""
NEEDS = {"megatron-core": (0, 19), "emerging-optimizers": (0, 3)}
"""The oldest versions that this kind was run with; both need Python 3.12."""
SCALE = 0.2
"""Gives updates the size of Adam's, so that one learning rate serves both (arXiv 2502.16982, section 2.2)."""


class Muon(OptimizerKind):
    """`optimizer.kind: muon`, which is megatron-core's."""

    name = "muon"
    keys = ("momentum", "beta1", "beta2", "eps")
    state = ("momentum_buffer",)
    sharding = Cannot("megatron-core's distributed optimizer can only save the two moments of Adam")
    extends = "megatron_blackmamba.engine.parts.muon:register"

    def missing(self) -> str:
        lacking = [name for name, oldest in NEEDS.items() if _installed(name) < oldest]
        if not lacking:
            return ""
        here = ", ".join(f"{name} {'.'.join(map(str, _installed(name))) or 'none'}" for name in NEEDS)
        return (
            "megatron-core 0.19 and emerging-optimizers 0.3, which need Python 3.12 or newer;"
            f" here: {here}. In an environment of Python 3.12: pip install -e '.[muon]'"
        )

    def megatron(self, settings):
        return {
            "optimizer": "stacked_muon",
            "muon_momentum": settings.momentum,
            "muon_nesterov": True,
            "muon_tp_mode": "duplicated",  # of whole matrices: the same update under every layout
            "muon_fp32_matmul_prec": "highest",  # the default rounds to bf16
            "muon_extra_scale_factor": SCALE,
            "adam_beta1": settings.beta1,
            "adam_beta2": settings.beta2,
            "adam_eps": settings.eps,
        }

    def keeps(self, weight: Tensor) -> tuple[str, ...]:
        return self.state if orthogonalizes(weight) else ("exp_avg", "exp_avg_sq")


def orthogonalizes(weight: Tensor) -> bool:
    """Return whether Muon, not Adam, updates a weight."""
    if weight.dim() != 2:
        return getattr(weight, STACKED, False)
    return not getattr(weight, EMBEDDING_OR_HEAD, False) and not getattr(weight, NO_DECAY, False)


def _installed(package: str) -> tuple[int, ...]:
    """Return the first two numbers of an installed version, or none."""
    try:
        return tuple(int(number) for number in version(package).split(".")[:2])
    except PackageNotFoundError:
        return ()
