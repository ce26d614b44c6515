"""Training in plain PyTorch, in float64: a Mamba and an expert layer, Adam and a schedule, written from the docs alone.

It shares no code with what it judges. Routing is the softmax kind with one expert a token and no auxiliary loss.

Shapes: B batch, S sequence, D model, I inner, N state, R rank of dt, K taps, E experts.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
Weights = dict[str, Tensor]


def loss(w: Weights, windows: Tensor) -> Tensor:
    """Return the mean loss of the tokens of some windows, each its inputs and its last label."""
    embedding = w["embedding.word_embeddings.weight"]
    x_BSD = embedding[windows[:, :-1]]
    for layer in range(2):
        mixer = {
            name.split("mixer.")[1]: v for name, v in w.items() if name.startswith(f"decoder.layers.{layer}.mixer")
        }
        normed = x_BSD / (x_BSD.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w[f"decoder.layers.{layer}.norm.weight"]
        x_BSD = x_BSD + (_experts if layer else _mamba)(mixer, normed)
    final = F.layer_norm(
        x_BSD, x_BSD.shape[-1:], w["decoder.final_layernorm.weight"], w["decoder.final_layernorm.bias"], EPS
    )
    return F.cross_entropy((final @ embedding.T).flatten(0, 1), windows[:, 1:].flatten())


def _mamba(m: Weights, x_BSD: Tensor) -> Tensor:
    inner, N = m["A_log"].shape
    x_BSI, z_BSI = (x_BSD @ m["in_proj.weight"].T).split(inner, -1)
    taps = m["conv1d.weight"].shape[-1]
    padded = F.pad(x_BSI.transpose(1, 2), (taps - 1, 0))
    x_BSI = F.silu(F.conv1d(padded, m["conv1d.weight"], m["conv1d.bias"], groups=inner)).transpose(1, 2)
    rank = m["dt_proj.weight"].shape[1]
    dt_BSR, B_BSN, C_BSN = (x_BSI @ m["x_proj.weight"].T).split([rank, N, N], -1)
    delta_BSI = F.softplus(dt_BSR @ m["dt_proj.weight"].T + m["dt_proj.bias"])
    state, out = torch.zeros(len(x_BSD), inner, N, dtype=torch.float64), []
    for s in range(x_BSD.shape[1]):
        decay = torch.exp(-torch.exp(m["A_log"]) * delta_BSI[:, s, :, None])
        state = decay * state + (delta_BSI[:, s] * x_BSI[:, s])[..., None] * B_BSN[:, s, None]
        out.append((state * C_BSN[:, s, None]).sum(-1) + m["D"] * x_BSI[:, s])
    return (torch.stack(out, 1) * F.silu(z_BSI)) @ m["out_proj.weight"].T


def _experts(m: Weights, x_BSD: Tensor) -> Tensor:
    scores_BSE = (x_BSD @ m["router.weight"].T + m["router.bias"]).softmax(-1)
    best = scores_BSE.argmax(-1)
    out = torch.zeros_like(x_BSD)
    for expert, (fc1, fc2) in enumerate(zip(m["experts.fc1"], m["experts.fc2"], strict=True)):
        taken = best == expert
        x = x_BSD[taken]
        out[taken] = (F.silu(x @ fc1[0].T) * (x @ fc1[1].T)) @ fc2.T * scores_BSE[taken][:, expert, None]
    return out


def train(
    initial: Weights, batches: Sequence[Tensor], rates: Callable[[int], float], decay: float, clip: float
) -> tuple[list[float], Weights]:
    """Train on batches of windows with Adam; `rates` gives the learning rate of a step, from 1.

    Returns the loss of each step, and the weights after the last one.
    """
    weights = {name: value.double().clone().requires_grad_() for name, value in initial.items()}
    first, second = ({name: torch.zeros_like(value) for name, value in weights.items()} for _ in range(2))
    losses = []
    for step, windows in enumerate(batches, 1):
        found = loss(weights, windows)
        losses.append(found.item())
        gradients = dict(zip(weights, torch.autograd.grad(found, list(weights.values())), strict=True))
        norm = math.sqrt(sum(g.pow(2).sum().item() for g in gradients.values()))
        scale = min(1.0, clip / (norm + 1e-6))
        with torch.no_grad():
            for name, weight in weights.items():
                g = gradients[name] * scale
                first[name].mul_(0.9).add_(0.1 * g)
                second[name].mul_(0.95).add_(0.05 * g * g)
                if weight.dim() > 1 and not name.endswith("A_log"):
                    weight.mul_(1 - rates(step) * decay)
                mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.95**step)
                weight.sub_(rates(step) * mean / (square.sqrt() + 1e-8))
    return losses, {name: weight.detach() for name, weight in weights.items()}
