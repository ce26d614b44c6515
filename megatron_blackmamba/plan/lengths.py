"""The same model and GPUs with longer sequences: the fastest layout that fits, its memory, exchange and FLOPs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan import flops, layouts, traffic
from megatron_blackmamba.plan.layouts import Candidate, Cluster


@dataclass(frozen=True)
class Length:
    """One length of sequences, with about as many tokens in a step as the run has."""

    config: RunConfig
    """With this length, and a power of two of sequences in a step."""
    gpus: int
    candidate: Candidate | None
    """The fastest layout; None: none fits."""
    overrides: str = ""
    """Command-line overrides that change the run to this length and layout."""
    exchange: float = 0.0
    """GB that one GPU sends in a step for parallel.context."""

    @property
    def tokens(self) -> int:
        return self.config.data.sequence_length

    @property
    def flops(self) -> int:
        """Return the FLOPs of training on one token."""
        return flops.training(self.config.model, self.tokens)

    @property
    def said(self) -> str:
        """Return the answer in one sentence."""
        if self.candidate is None:
            return f"{self.tokens:,} tokens do not fit on {self.gpus} GPUs: plan for more nodes."
        return f"{self.tokens:,} tokens fit on {self.gpus} GPUs with {self.overrides}"

    def as_json(self) -> dict[str, Any]:
        layout = self.candidate and self.candidate.as_json(self.config)
        return {"tokens": self.tokens, "flops_per_token": self.flops, "exchange_gb": self.exchange, "layout": layout}


def for_lengths(config: RunConfig, cluster: Cluster, lengths: Sequence[int]) -> list[Length]:
    """Return a row for each length."""
    return [_of(config, cluster, length) for length in lengths]


def _of(run: RunConfig, cluster: Cluster, length: int) -> Length:
    config = _with_length(run, length)
    found = layouts.suggest(config, cluster, count=1)
    if not found:
        return Length(config, cluster.world_size, None)
    laid = layouts.with_layout(config, found[0].layout, found[0].recompute)
    flow = traffic.flows(laid, cluster.world_size, cluster.gpus_per_node, cluster.gpu).get("context")
    changed = replace(found[0], layout=replace(found[0].layout, global_batch=config.training.global_batch))
    words = [f"data.sequence_length={length}", changed.overrides(run)]
    words += ["training.batch_ramp=[]"] if run.training.batch_ramp else []
    return Length(config, cluster.world_size, changed, " ".join(words), flow.gigabytes if flow else 0.0)


def _with_length(config: RunConfig, length: int) -> RunConfig:
    batch = 2 ** max(0, round(math.log2(config.tokens_per_step / length)))
    training = config.training.model_copy(update={"global_batch": batch, "micro_batch": 1, "batch_ramp": []})
    return config.model_copy(
        update={"data": config.data.model_copy(update={"sequence_length": length}), "training": training}
    )
