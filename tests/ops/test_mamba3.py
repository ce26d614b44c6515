"""Mamba-3's recurrence beside its definition in float64, and beside mamba's own reference where that is at hand."""

import itertools
import math
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.mamba3 import Memory, Rates, gated, mamba3, mamba3_step
from megatron_blackmamba.ops.ssd import chunked
from tests.ops.implementations import PROPERTY, assert_close
from tests.ops.test_selective_scan import resets
from tests.reference.training import mamba3_recurrence, pairs_turned

FLOOR = 0.2  # high, so that it counts
UPSTREAM = os.environ.get("MAMBA_SSM_SOURCE")
"""A clone of state-spaces/mamba, from e9594ce on."""


def problem(B=2, L=150, H=6, P=5, G=2, N=8, reset=None, seed=0, R=1):
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (B, L, H, P), "dt": (B, L, H), "A_of_token": (B, L, H), "trap": (B, L, H), "angle": (B, L, N // 4)}
    shapes |= {"B": (B, L, R, G, N), "C": (B, L, R, G, N), "B_bias": (H, R, N), "C_bias": (H, R, N)}
    shapes |= {"D": (H,), "dt_bias": (H,), **({"mix": (H, R, P)} if R > 1 else {})}
    tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    tensors["A_of_token"] *= 3
    return tensors, resets(reset, B, L, g)


def rates_of(leaves):
    raw = (leaves[name] for name in ("dt", "A_of_token", "trap", "angle"))
    return Rates.of(*raw, leaves["dt_bias"], FLOOR)


def ours(leaves, reset, memory):
    given = (leaves[name] for name in ("B", "C", "B_bias", "C_bias", "D"))
    return mamba3(leaves["x"], rates_of(leaves), *given, mix_HRP=leaves.get("mix"), memory=memory, reset_BL=reset)


def defined(leaves, reset, memory):
    dt = torch.log1p((leaves["dt"] + leaves["dt_bias"]).exp())
    A = leaves["A_of_token"]
    decay = torch.where(A > 0, 1 + A, 1 / (1 - A)).clamp_min(FLOOR)
    own, angle = 1 / (1 + (-leaves["trap"]).exp()), math.pi * torch.tanh(leaves["angle"])[:, :, None]
    given = [leaves[name] for name in ("B", "C", "B_bias", "C_bias", "D")]
    mix = leaves.get("mix", torch.ones(1, 1, 1, dtype=dt.dtype).expand(dt.shape[2], 1, 1))
    y, after = mamba3_recurrence(leaves["x"], dt, -decay * dt, own, angle, *given, mix, memory, reset)
    return y if "mix" in leaves else y.squeeze(2), after


def values_and_gradients(function, tensors, reset, dtype, with_memory):
    leaves = {key: tensor.to(dtype).clone().requires_grad_() for key, tensor in tensors.items()}
    (B, _, H, P), (R, _, N), S = leaves["x"].shape, leaves["B"].shape[2:], leaves["angle"].shape[-1]
    g = torch.Generator().manual_seed(1)
    start = [torch.randn(B, H, *shape, generator=g).to(dtype) for shape in ((S,), (P, N), (R, N), (P,))]
    start = [part.requires_grad_() for part in start] if with_memory else [torch.zeros_like(part) for part in start]
    y, (angle, state, b, x) = function(leaves, reset, Memory(*start))
    # Turned back by the sum of angles, which begins anew with a document in the definition alone.
    state, b = pairs_turned(state, -angle[:, :, None]), pairs_turned(b, -angle[:, :, None])
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
    R=st.sampled_from([1, 2, 3]),
)
def test_agrees_with_the_definition_in_values_and_gradients(B, L, groups, P, N, reset, with_memory, seed, R):
    tensors, reset_BL = problem(B, L, groups[0], P, groups[1], N, reset, seed, R)
    exact = values_and_gradients(defined, tensors, reset_BL, torch.float64, with_memory)
    assert_close(values_and_gradients(ours, tensors, reset_BL, torch.float64, with_memory), exact, tolerance=1e-10)


@pytest.mark.parametrize("R", [1, 4])
def test_several_segments_agree_with_the_definition(R, monkeypatch):
    monkeypatch.setitem(chunked.DECAYS, "cpu", 1)  # one chunk a segment
    tensors, reset = problem(L=3 * chunked.CHUNK // R + 5, reset="some", R=R)
    exact = values_and_gradients(defined, tensors, reset, torch.float64, True)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
        assert_close(values_and_gradients(ours, tensors, reset, dtype, True), exact, tolerance=tolerance)


@pytest.mark.parametrize("R", [1, 3])
def test_token_by_token_equals_all_at_once(R):
    tensors, _ = problem(L=20, R=R)
    shapes = ((2,), (5, 8), (R, 8), (5,))
    random = torch.Generator().manual_seed(2)
    start = Memory(*(torch.randn(2, 6, *shape, generator=random) for shape in shapes))
    y_BLHP, after = ours(tensors, None, Memory(*(part.clone() for part in start)))
    given, rates, found = [tensors.get(name) for name in ("B_bias", "C_bias", "D", "mix")], rates_of(tensors), []
    for t in range(20):
        of_token = Rates(*(part[:, t] for part in rates))
        found.append(mamba3_step(start, tensors["x"][:, t], of_token, tensors["B"][:, t], tensors["C"][:, t], *given))
    turns = (start.angle_BHS - after.angle_BHS).remainder(2 * math.pi)
    assert torch.minimum(turns, 2 * math.pi - turns).max() < 1e-4
    torch.testing.assert_close(torch.stack(found, 1), y_BLHP, atol=1e-4, rtol=1e-4)
    for one, many in zip(start[1:], after[1:], strict=True):
        torch.testing.assert_close(one, many, atol=1e-4, rtol=1e-4)


def upstream(file, exact):
    """mamba's own reference, from a file of its tests; its kernels, which need CUDA, are left out."""
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
    text = (Path(UPSTREAM) / "tests/ops" / file).read_text()
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
    theirs = upstream("triton/test_mamba3_siso.py", dtype == torch.float64)
    for L, (G, H), (N, P), with_states in GRID:
        torch.manual_seed(L)
        made = theirs.create_mamba3_siso_inputs(2, L, H, G, N, P, dtype, "cpu", True, False, True)
        angle, state, last_B, last_x = (part.detach().to(dtype) * with_states for part in made.pop("Input_States"))
        i = {key: part.detach().to(dtype).requires_grad_() for key, part in made.items() if part is not None}
        arguments = [i[key] for key in ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D")]
        y, after = theirs.mamba3_siso_fwd_ref(*arguments, None, (angle, state, last_B, last_x), dtype=dtype)
        own, dt = torch.sigmoid(i["Trap"]) * i["DT"], i["DT"].transpose(1, 2)
        rates = Rates(i["ADT"].transpose(1, 2), own.transpose(1, 2), dt - own.transpose(1, 2),
                      math.pi * torch.tanh(i["Angles"]) * dt[..., None])  # fmt: skip
        rows = (i["K"].unsqueeze(2), i["Q"].unsqueeze(2), i["K_bias"].unsqueeze(1), i["Q_bias"].unsqueeze(1))
        last = Memory(angle, state, last_B.unsqueeze(2), last_x)
        found, memory = mamba3(i["V"], rates, *rows, i["D"], memory=last)
        memory = memory._replace(B_BHRN=memory.B_BHRN.squeeze(2))
        pairs = {"y": (found, y)} | {str(n): (memory[n], after[n]) for n in (1, 2, 3)}
        weights = [torch.randn_like(y), *(torch.randn_like(part) for part in after[1:])]
        gradients = [torch.autograd.grad(outputs, arguments, weights, retain_graph=True)
                     for outputs in ((found, *memory[1:]), (y, *after[1:]))]  # fmt: skip
        pairs |= {f"gradient {n}": pair for n, pair in enumerate(zip(*gradients, strict=True))}
        for name, (a, b) in pairs.items():
            assert (a - b).abs().max() <= tolerance * max(1, b.abs().max()), (L, G, H, N, P, with_states, name)


RANKS = itertools.product((1, 2, 17, 65), ((1, 4), (2, 4)), ((16, 8), (64, 32)), (2, 4), (False, True))


@pytest.mark.skipif(not UPSTREAM, reason="MAMBA_SSM_SOURCE names no clone of state-spaces/mamba")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_several_inputs_agree_with_mambas_own_reference(dtype, tolerance):
    theirs = upstream("tilelang/test_mamba3_mimo.py", dtype == torch.float64)
    for L, (G, H), (N, P), R, with_norm in RANKS:
        sizes = {"mimo_rank": R, "nheads_qk": G, "nheads": H, "headdim_qk": N, "headdim_v": P}
        made = theirs.make_smoke_inputs(batch=2, seqlen=L, **sizes, device="cpu", dtype=torch.float64, seed=L)
        i = {key: x.detach().to(dtype).requires_grad_() for key, x in made.items() if isinstance(x, torch.Tensor)}
        weight = torch.randn(H, P, dtype=dtype).requires_grad_()
        given = [i[key] for key in ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles")]
        given += [i[key] for key in ("MIMO_V", "MIMO_Out", "D", "Z", "MIMO_Z")]
        out, (_, state, last_B, _) = theirs.mamba3_MIMO_step_ref(
            *given, fused_norm=with_norm, outproj_norm_weight=weight if with_norm else None
        )
        dt, own = i["DT"].transpose(1, 2), (torch.sigmoid(i["Trap"]) * i["DT"]).transpose(1, 2)
        turn = math.pi * torch.tanh(i["Angles"]) * dt[..., None]
        zeros = [x.new_zeros(2, H, *shape) for x, shape in ((weight, (N // 4,)), (weight, (P, N)))]
        start = Memory(*zeros, weight.new_zeros(2, H, R, N), weight.new_zeros(2, H, P))
        y, memory = mamba3(
            i["V"], Rates(i["ADT"].transpose(1, 2), own, dt - own, turn), i["K"], i["Q"], i["K_bias"], i["Q_bias"],
            i["D"], mix_HRP=i["MIMO_V"], memory=start,
        )  # fmt: skip
        y = F.rms_norm(y, (P,), None, 1e-5) * weight if with_norm else y
        found = gated(y, i["Z"].flatten(2), i["MIMO_Z"], i["MIMO_Out"]).unflatten(2, (H, P))
        pairs = {"y": (found, out), "state": (memory[1], state), "B": (memory[2], last_B)}
        weights = [torch.randn_like(b) for _, b in pairs.values()]
        wanted = [*given, weight] if with_norm else given
        gradients = [
            torch.autograd.grad([pair[k] for pair in pairs.values()], wanted, weights, retain_graph=True)
            for k in (0, 1)
        ]
        pairs |= {f"gradient {n}": pair for n, pair in enumerate(zip(*gradients, strict=True))}
        for name, (a, b) in pairs.items():
            assert (a - b).abs().max() <= tolerance * max(1, b.abs().max()), (L, G, H, N, P, R, with_norm, name)
