"""Pieces of a micro-batch's gradients, each alone: which of them a CUDA graph cannot hold shows when each is captured.

Shapes: B batch, S sequence, L = S, D model, I inner channels, N state.
"""

from functools import cache

import torch

from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
from megatron_blackmamba.ops.selective_scan import selective_scan
from megatron_blackmamba.runtime import device

B, S, I, N = 2, 64, 128, 16


@cache
def draw(*shape, seed=0):
    """Return the same numbers for each call: copying them to the GPU would make the host wait."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device.device(), torch.bfloat16)


def leaf(*shape, seed=0):
    return draw(*shape, seed=seed).detach().requires_grad_()


def scan(model, batch):
    u, delta, z = (leaf(B, S, I, seed=seed) for seed in range(3))
    b, c = (leaf(B, S, N, seed=seed) for seed in (3, 4))
    A = -torch.ones(I, N, device=u.device)
    return selective_scan(u, delta, A, b, c, z_BLI=z, delta_softplus=True), (u, delta, b, c, z)


def convolution(model, batch):
    x, weight, bias = leaf(B, S, I), leaf(I, 4, seed=1), leaf(I, seed=2)
    return causal_conv1d(x, weight, bias), (x, weight, bias)


def embedding(model, batch):
    return model.embedded(batch["tokens"]), (model.embedding.word_embeddings.weight,)


def norm(model, batch):
    stream, branch = leaf(S, B, model.config.hidden_size), leaf(S, B, model.config.hidden_size, seed=1)
    block = model.decoder.layers.get_submodule("0")
    return block.norm(stream.float(), branch, and_stream=True)[0], (stream, branch, *block.norm.parameters())


def mixer(place):
    def piece(model, batch):
        x = leaf(S, B, model.config.hidden_size)
        block = model.decoder.layers.get_submodule(place)
        return block.mixer(x, model._layer_inputs(batch["tokens"])), (x, *block.mixer.parameters())

    return piece


def router(model, batch):
    x = leaf(S, B, model.config.hidden_size)
    found = model.decoder.layers.get_submodule("1").mixer.router
    return found(x, model._layer_inputs(batch["tokens"])).weights, (x, *found.parameters())


def loss(model, batch):
    x = leaf(S, B, model.config.hidden_size)
    return model._losses_of(x, batch["labels"], 0.0)[0], (x, model.embedding.word_embeddings.weight)


def whole(model, batch):
    return model(batch["tokens"], batch["labels"]), tuple(model.parameters())


PIECES = {
    "scan": scan,
    "convolution": convolution,
    "embedding": embedding,
    "norm": norm,
    "Mamba": mixer("0"),
    "router": router,
    "experts": mixer("1"),
    "loss": loss,
    "whole": whole,
}


def work_of(name, model, batch):
    """Return a function that computes a piece and its gradients, by number."""
    here = {key: batch[key].to(device.device()) for key in ("tokens", "labels")}

    def work():
        y, inputs = PIECES[name](model, here)
        gradients = torch.autograd.grad(y.float().square().mean(), inputs, allow_unused=True)
        return {str(number): x for number, x in enumerate((y.detach(), *gradients)) if x is not None}

    return work
