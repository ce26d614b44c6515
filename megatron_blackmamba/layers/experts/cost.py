"""The cost of a layer of experts, for plans."""

from megatron_blackmamba import routers
from megatron_blackmamba.costs import FP32, INT64, SMALL_KERNELS, Sizes, Work
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.experts.kind import computed, sizes
from megatron_blackmamba.layers.mlp import kind as mlp
from megatron_blackmamba.settings import ModelConfig


class ExpertsCost(Cost):
    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        D, _, W, F = sizes(model)
        each = 2 * mlp.products(model)
        more = {"shared_expert": each * D * size} if (size := model.shared_expert_hidden_size) else {}
        more |= {"latent": 2 * 2 * D * W} if model.latent_size else {}
        router = routers.kind_of(model.router.kind).flops(model)
        return {"router": router, "experts": int(computed(model) * each * W * F), **more}

    def kept(self, at: Sizes) -> int:
        """Add up the router; the experts' input, gate and up, and product; and the shared expert, which is an MLP.

        Of the latent projections, the first reads what the router keeps.
        """
        _, _, W, hidden = sizes(at.model)
        F = hidden // at.expert_tensor
        expert = at.width * self._kept_by_expert(at.model, W, F) + FP32 + INT64
        shared = 0
        if at.model.shared_expert_hidden_size:
            shared = at.width * mlp.kept(at.model) * at.model.shared_expert_hidden_size // at.tensor
        router = routers.kind_of(at.model.router.kind).kept(at)
        latent = at.width * W if at.model.latent_size else 0
        return at.here * (router + latent) + at.routed * expert + at.whole * shared

    def _kept_by_expert(self, model: ModelConfig, W: int, F: int) -> int:
        """Return the numbers kept for a token: the kernels compute the activation again, plain PyTorch keeps parts."""
        if model.gated and model.activation in ("silu", "gelu"):
            return W + 3 * F
        return 2 * W + (5 if model.gated else 2) * F  # the weight meets the output

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic of the tokens to their experts and back, one copy per expert.

        If ranks share an expert, its tokens are gathered and its outputs summed. A shared expert is a dense MLP.
        """
        _, _, W, _ = sizes(at.model)
        tokens = at.here * at.model.top_k
        moved = {
            "expert": 2 * passes * tokens * (W * at.width + FP32),
            "expert_tensor": 2 * passes * at.routed * W * at.width,
            "tensor": (2 * passes + 1) * at.stream if at.model.shared_expert_hidden_size else 0.0,
        }
        for axis, volume in routers.kind_of(at.model.router.kind).traffic(at, passes).items():
            moved[axis] += volume
        return moved

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count router, sorting of the tokens, products and gate as the kernels for GPUs do them."""
        D, _, W, hidden = sizes(at.model)
        F = hidden // at.expert_tensor
        stream, sorted_tokens = at.width * D * at.here, at.width * W * at.here * at.model.top_k
        rows = at.width * at.routed
        router = Work(stream, routers.kind_of(at.model.router.kind).flops(at.model) * at.here)
        G = F * (mlp.products(at.model) - 1)
        products = [Work(rows * (W + G), 2 * W * G * at.routed), Work(rows * (F + W), 2 * W * F * at.routed)]
        if at.model.latent_size:
            products += 2 * [Work(at.width * (D + W) * at.here, 2 * D * W * at.here)]
        shared = []
        if size := at.model.shared_expert_hidden_size:
            width = at.width * at.whole * size // at.tensor
            shared = [Work(3 * width, 2 * mlp.products(at.model) * D * size * at.here)]
        forward = [router, *products, *shared, Work(3 * F * rows), Work(2 * sorted_tokens), Work(2 * sorted_tokens)]
        backward = [router, router, *products, *products, *shared, *shared, Work(5 * F * rows)]
        backward += [Work(2 * sorted_tokens), Work(2 * sorted_tokens), Work(3 * stream)]
        small = [Work(launches=kernels) for kernels in SMALL_KERNELS]
        return [*forward, small[0]], [*backward, small[1]]

    def paper_flops(self, model: ModelConfig, tokens: int) -> tuple[float, float] | None:
        if model.top_k > 1 or model.shared_expert_hidden_size or model.latent_size or not model.gated:
            return None
        D, E, _, _ = sizes(model)
        return D * E * (16 * D + 2), 16 * D * D + 2 * D * E
