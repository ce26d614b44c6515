"""What a layer of attention costs, for plans."""

from megatron_blackmamba.costs import FP32, Sizes, Work, kept_by_norms
from megatron_blackmamba.layers.attention.kind import head_dim, key_value_rows, kv_heads, query_rows
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.settings import ModelConfig


class AttentionCost(Cost):
    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        D, queries = model.hidden_size, query_rows(model)
        return {
            "attention_projections": 2 * D * (2 * queries + 2 * key_value_rows(model)),
            "attention_scores": 4 * queries * (sequence + 1) // 2,
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        They are the input, the projected queries, keys and values, the rotated queries and keys, the output and its
        log-sums, and the tables of the rotation. Norms keep their inputs, queries and keys, and a number for each head.
        Context parallelism keeps the keys and values of whole sequences instead of a part's projections, as long as
        what attends is not these themselves.
        """
        model, heads = at.model, at.model.attention.heads
        D, KV, rotates = query_rows(model) // at.tensor, key_value_rows(model) // at.tensor, model.attention.rotary
        kept = at.width * (3 if rotates else 2) * (D + KV) + FP32 * heads // at.tensor
        if at.context > 1:
            projections = 0 if rotates or model.attention.qk_norm else 2 * KV
            kept = at.width * (2 * D + 2 * at.context * KV + projections)
        if model.attention.qk_norm:
            normed = heads + kv_heads(model)
            kept += kept_by_norms(at, D * normed // heads) + FP32 * normed // at.tensor
        tables = 4 * at.width * at.sequence // at.context * head_dim(model) if rotates else 0
        return at.width * at.here * model.hidden_size + at.whole * kept + tables

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream is gathered, scattered, and gathered again for the weight gradient.

        In each forward pass the ranks of a context group gather keys and values; backward they scatter the sums of
        their gradients.
        """
        joined = at.context * at.whole * at.width * 2 * key_value_rows(at.model) / at.tensor
        return {"tensor": (2 * passes + 1) * at.stream, "context": passes * joined}

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Add what the last rank of a context group computes beyond the mean, as its queries see the most keys.

        Blocks of queries compute their scores again in the backward pass. `qk_clip` computes the scores once
        more, and passes over them three times.
        """
        forward, backward = super().work(at)
        scores = self.flops(at.model, at.sequence)["attention_scores"] * at.here
        if at.clips:
            products, channels = scores * (1 - 1 / (2 * at.context)), head_dim(at.model)
            forward = [*forward, Work(flops=products), Work(moved=3 * at.width * products / (2 * channels))]
        if at.context == 1:
            return forward, backward
        more = scores * (1 - 1 / at.context)
        return [*forward, Work(flops=more)], [*backward, Work(flops=2 * more), Work(flops=scores + more)]
