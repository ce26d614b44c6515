"""Mamba-3's recurrence beside its definition in float64, and beside mamba's own reference where that is at hand."""

import itertools
import math
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.mamba3 import Memory, Rates, mamba3, mamba3_step
from megatron_blackmamba.ops.ssd import chunked
from tests.ops.implementations import PROPERTY, assert_close
from tests.ops.test_selective_scan import resets
from tests.reference.training import mamba3_recurrence, pairs_turned

FLOOR = 0.2  # high, so that it counts
UPSTREAM = os.environ.get("MAMBA_SSM_SOURCE")
"""A clone of state-spaces/mamba, from e9594ce on."""


def problem(B=2, L=150, H=6, P=5, G=2, N=8, reset=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (B, L, H, P), "dt": (B, L, H), "A_of_token": (B, L, H), "trap": (B, L, H), "angle": (B, L, N // 4)}
    shapes |= {"B": (B, L, G, N), "C": (B, L, G, N), "B_bias": (H, N), "C_bias": (H, N), "D": (H,), "dt_bias": (H,)}
    tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    tensors["A_of_token"] *= 3
    return tensors, resets(reset, B, L, g)


def rates_of(leaves):
    raw = (leaves[name] for name in ("dt", "A_of_token", "trap", "angle"))
    return Rates.of(*raw, leaves["dt_bias"], FLOOR)


def ours(leaves, reset, memory):
    given = (leaves[name] for name in ("B", "C", "B_bias", "C_bias", "D"))
    return mamba3(leaves["x"], rates_of(leaves), *given, memory=memory, reset_BL=reset)


def defined(leaves, reset, memory):
    dt = torch.log1p((leaves["dt"] + leaves["dt_bias"]).exp())
    A = leaves["A_of_token"]
    decay = torch.where(A > 0, 1 + A, 1 / (1 - A)).clamp_min(FLOOR)
    own, angle = 1 / (1 + (-leaves["trap"]).exp()), math.pi * torch.tanh(leaves["angle"])[:, :, None]
    given = (leaves[name] for name in ("B", "C", "B_bias", "C_bias", "D"))
    return mamba3_recurrence(leaves["x"], dt, -decay * dt, own, angle, *given, memory, reset)


def values_and_gradients(function, tensors, reset, dtype, with_memory):
    leaves = {key: tensor.to(dtype).clone().requires_grad_() for key, tensor in tensors.items()}
    (B, _, H, P), N, S = leaves["x"].shape, leaves["B"].shape[-1], leaves["angle"].shape[-1]
    g = torch.Generator().manual_seed(1)
    start = [torch.randn(B, H, *shape, generator=g).to(dtype) for shape in ((S,), (P, N), (N,), (P,))]
    start = [part.requires_grad_() for part in start] if with_memory else [torch.zeros_like(part) for part in start]
    y, (angle, state, b, x) = function(leaves, reset, Memory(*start))
    # Turned back by the sum of angles, which begins anew with a document in the definition alone.
    state, b = pairs_turned(state, -angle[:, :, None]), pairs_turned(b, -angle)
    weights = [torch.randn(part.shape, generator=g).to(dtype) for part in (y, state, b, x)]
    torch.autograd.backward((y, state, b, x), weights)
    leaves |= dict(zip(Memory._fields, start, strict=True)) if with_memory else {}
    gradients = {f"gradient of {key}": leaf.grad for key, leaf in leaves.items()}
    return {"y": y.detach(), "state": state.detach(), "last B": b.detach(), **gradients}


@PROPERTY
@given(
    B=st.integers(1, 3),
    L=st.one_of(st.just(1), st.integers(1, 70)),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    P=st.integers(1, 9),
    N=st.sampled_from([4, 6, 10]),
    reset=st.sampled_from([None, "first", "last", "some", "all"]),
    with_memory=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_the_definition_in_values_and_gradients(B, L, groups, P, N, reset, with_memory, seed):
    tensors, reset_BL = problem(B, L, groups[0], P, groups[1], N, reset, seed)
    exact = values_and_gradients(defined, tensors, reset_BL, torch.float64, with_memory)
    assert_close(values_and_gradients(ours, tensors, reset_BL, torch.float64, with_memory), exact, tolerance=1e-10)


def test_several_segments_agree_with_the_definition(monkeypatch):
    monkeypatch.setitem(chunked.DECAYS, "cpu", 1)  # one chunk a segment
    tensors, reset = problem(L=3 * chunked.CHUNK + 5, reset="some")
    exact = values_and_gradients(defined, tensors, reset, torch.float64, True)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
        assert_close(values_and_gradients(ours, tensors, reset, dtype, True), exact, tolerance=tolerance)


def test_token_by_token_equals_all_at_once():
    tensors, _ = problem(L=20)
    shapes = ((2,), (5, 8), (8,), (5,))
    random = torch.Generator().manual_seed(2)
    start = Memory(*(torch.randn(2, 6, *shape, generator=random) for shape in shapes))
    y_BLHP, after = ours(tensors, None, Memory(*(part.clone() for part in start)))
    given, rates, found = [tensors[name] for name in ("B_bias", "C_bias", "D")], rates_of(tensors), []
    for t in range(20):
        of_token = Rates(*(part[:, t] for part in rates))
        found.append(mamba3_step(start, tensors["x"][:, t], of_token, tensors["B"][:, t], tensors["C"][:, t], *given))
    turns = (start.angle_BHS - after.angle_BHS).remainder(2 * math.pi)
    assert torch.minimum(turns, 2 * math.pi - turns).max() < 1e-4
    torch.testing.assert_close(torch.stack(found, 1), y_BLHP, atol=1e-4, rtol=1e-4)
    for one, many in zip(start[1:], after[1:], strict=True):
        torch.testing.assert_close(one, many, atol=1e-4, rtol=1e-4)


def upstream(exact):
    """mamba's own reference, from the file of its tests; its kernels, which need CUDA, are left out."""
    for name in (
        "",
        ".ops",
        ".ops.triton",
        ".ops.triton.mamba3",
        *(f".ops.triton.mamba3.mamba3_siso_{n}" for n in KERNELS),
    ):
        sys.modules.setdefault(f"mamba_ssm{name}", ModuleType("kernels")).__dict__.update(
            dict.fromkeys(("mamba3_siso_combined", "mamba3_siso_step"))
        )
    sys.modules.setdefault("triton", ModuleType("triton"))
    text = (Path(UPSTREAM) / "tests/ops/triton/test_mamba3_siso.py").read_text()
    if exact:  # it rounds to fp32 here and there
        text = text.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    found = ModuleType("upstream")
    exec(compile(text, "upstream", "exec"), found.__dict__)
    return found


KERNELS = ("combined", "step")
GRID = itertools.product((1, 2, 63, 64, 65, 131), ((1, 4), (2, 4), (4, 4)), ((16, 8), (128, 64)), (False, True))


@pytest.mark.skipif(not UPSTREAM, reason="MAMBA_SSM_SOURCE names no clone of state-spaces/mamba")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_agrees_with_mambas_own_reference(dtype, tolerance):
    theirs = upstream(dtype == torch.float64)
    for L, (G, H), (N, P), with_states in GRID:
        torch.manual_seed(L)
        made = theirs.create_mamba3_siso_inputs(2, L, H, G, N, P, dtype, "cpu", True, False, True)
        states = [part.detach().to(dtype) * with_states for part in made.pop("Input_States")]
        i = {key: part.detach().to(dtype).requires_grad_() for key, part in made.items() if part is not None}
        arguments = [i[key] for key in ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D")]
        y, after = theirs.mamba3_siso_fwd_ref(*arguments, None, tuple(states), dtype=dtype)
        own, dt = torch.sigmoid(i["Trap"]) * i["DT"], i["DT"].transpose(1, 2)
        rates = Rates(i["ADT"].transpose(1, 2), own.transpose(1, 2), dt - own.transpose(1, 2),
                      math.pi * torch.tanh(i["Angles"]) * dt[..., None])  # fmt: skip
        found, memory = mamba3(i["V"], rates, i["K"], i["Q"], i["K_bias"], i["Q_bias"], i["D"], memory=Memory(*states))
        pairs = {"y": (found, y)} | {str(n): (memory[n], after[n]) for n in (1, 2, 3)}
        weights = [torch.randn_like(y), *(torch.randn_like(part) for part in after[1:])]
        gradients = [torch.autograd.grad(outputs, arguments, weights, retain_graph=True)
                     for outputs in ((found, *memory[1:]), (y, *after[1:]))]  # fmt: skip
        pairs |= {f"gradient {n}": pair for n, pair in enumerate(zip(*gradients, strict=True))}
        for name, (a, b) in pairs.items():
            assert (a - b).abs().max() <= tolerance * max(1, b.abs().max()), (L, G, H, N, P, with_states, name)
