"""One token of a few sequences through a whole block, norm and residual included: C++ on CPUs, Triton on GPUs.

At batch 1 a block lasts as long as memory takes to deliver its weights, if little else happens between two matrices.
What a backend lacks is done layer by layer (`inference/decoder.py`).

Shapes: B sequences, D model, I inner, V vocabulary, O out.
"""

from typing import Any, Protocol

from torch import Tensor

from megatron_blackmamba.ops import backends

BACKENDS = ("triton", "cpp")  # best first, each where it applies


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS) | {"pytorch": None}


def why_not(weight: Tensor) -> str | None:
    """Return why blocks of such weights cannot run here, or None."""
    refusals = [backends.refusal(__name__, name, weight) for name in BACKENDS]
    return None if None in refusals else refusals[-1]


class Step(Protocol):
    """A block, ready to run."""

    restarts: bool
    """Whether it forgets a sequence whose last token is the end of a document, where the model does."""

    def __call__(self, *moving_B: Tensor, threads: int | None = None, last_B: Tensor | None = None) -> None:
        """Take the residual stream `[B, D]`, and what the block remembers, one token further, in place.

        last_B: the last token of each sequence, for a block that restarts.
        """
        ...


def mamba_step(**layer: Any) -> Step:
    """Compute residual_BD += out_proj(scan(convolution(in_proj(norm(residual))))); update window_BWI and state_BIN.

    Window and state have the layout of `causal_conv1d_step` and `selective_scan_step`. The rows of in_proj are [x | z];
    the rows of x_proj are [dt | B | C].

    layer: The arguments of `cpp.mamba_step`. eod: token after which a sequence restarts, for a step that `restarts`.
    """
    return backends.choose(__name__, BACKENDS, "auto", layer["in_proj"]).mamba_step(**layer)


def mamba2_step(**layer: Any) -> Step | None:
    """Compute residual_BD += out_proj(gated_rms_norm(ssd(convolution(in_proj(norm(residual)))))).

    Update window_BWQ and state_BHPN, which have the layout of `causal_conv1d_step` and `ssd_step`. The rows of in_proj
    are [z | x | B | C | dt]. On CPUs only.

    layer: The arguments of `cpp.mamba2_step`.
    """
    kernel = _kernel("mamba2_step", layer["in_proj"])
    return kernel and kernel(**layer)


def experts_step(**layer: Any) -> Step:
    """Compute residual_BD += sigmoid(its router logit) * expert(norm(residual)), with the expert of the largest logit.

    Only the weights of the chosen expert are read. The experts have the layout of `grouped_experts`.

    layer: The arguments of `cpp.experts_step`. choice_bias_E: added to the logits for the choice alone; with
        bias_on_scores, to their sigmoids.
    """
    return backends.choose(__name__, BACKENDS, "auto", layer["fc1_EGD"]).experts_step(**layer)


def mlp_step(**layer: Any) -> Step | None:
    """Compute residual_BD += mlp(norm(residual)) of a gated MLP, where there is a kernel for it.

    layer: The arguments of `triton.mlp_step`.
    """
    kernel = _kernel("mlp_step", layer["fc1_GD"])
    return kernel and kernel(**layer)


def embedded(tokens: Tensor, embedding_VD: Tensor, multiplier: float) -> Tensor | None:
    """Return the embeddings of any tokens in fp32, times a factor, if there is a kernel for that."""
    kernel = _kernel("embedded", embedding_VD)
    return kernel and kernel(tokens, embedding_VD, multiplier)


def product(x_BI: Tensor, weight_OI: Tensor) -> Tensor | None:
    """Return x @ weight.T of a few vectors in fp32, if there is a kernel for that which does not round the result."""
    kernel = _kernel("product", weight_OI)
    return kernel and kernel(x_BI, weight_OI)


def likeliest(logits_BV: Tensor) -> Tensor | None:
    """Return the token with the largest logit of each sequence, if there is a kernel; -1 where one is not finite."""
    kernel = _kernel("likeliest", logits_BV)
    return kernel and kernel(logits_BV)


def _kernel(function: str, weight: Tensor) -> Any:
    """Return a function of the backend for such weights, or None if it has no such function."""
    for name in BACKENDS:
        if backend := backends.find(__name__, name, weight):
            return getattr(backend, function, None)
    return None
