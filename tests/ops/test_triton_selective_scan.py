"""The Triton scan, interpreted, against the definition in float64: values and every gradient."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from megatron_blackmamba.ops.selective_scan import Inputs, reference
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("triton")
EVERYTHING = frozenset({"gate", "skip", "bias", "softplus", "start", "reset"})
PLAN = {"steps": 4, "chunk": 8, "backward_steps": 4}
KEPT = PLAN | {"keep": True, "group": 3}


def problem(batch, length, inner, state, features=EVERYTHING, dtype=torch.float32, seed=0):
    """Inputs as a Mamba layer gives them, with time steps between 0.01 and 1 and some long memories."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    decay = -torch.arange(1, state + 1) * torch.exp(0.3 * normal(inner, state))
    decay[0] = -1e-3
    delta = normal(batch, length, inner, dtype=dtype)
    return {
        "u": normal(batch, length, inner, dtype=dtype),
        "delta": delta if "softplus" in features else 0.1 * delta.abs(),
        "A": decay,
        "B": normal(batch, length, state, dtype=dtype),
        "C": normal(batch, length, state, dtype=dtype),
        "D": normal(inner) if "skip" in features else None,
        "z": normal(batch, length, inner, dtype=dtype) if "gate" in features else None,
        "bias": normal(inner) - 2 if "bias" in features else None,
        "softplus": "softplus" in features,
        "start": normal(batch, inner, state) if "start" in features else None,
        "reset": torch.rand(batch, length, generator=g) < 0.2 if "reset" in features else None,
    }


def results(scan, inputs, plan=None, dtype=None):
    """y, the final state and the gradient of every input, for fixed random gradients of both outputs."""
    given = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.to(dtype or value.dtype).detach().clone().requires_grad_()
        given[name] = value
    y, end = scan(Inputs(*given.values()), **({} if plan is None else {"plan": plan}))
    g = torch.Generator().manual_seed(1)
    dy, dend = (torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in (y, end))
    torch.autograd.backward((y, end), (dy, dend))
    grads = {f"d{name}": x.grad for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    return {"y": y.detach(), "end": end.detach(), **grads}


def triton_results(inputs, plan):
    from megatron_blackmamba.ops.selective_scan.triton import scan
    from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan

    return results(scan, inputs, Plan(**plan))


class Neighbours:
    """A stand-in for the other parts: it returns given values and records its arguments."""

    def __init__(self, start, grad_end):
        self.answers, self.told = (start, grad_end), {}

    def start(self, decay, added):
        self.told |= {"decay": decay, "added": added}
        return self.answers[0].mT.contiguous()

    def grad_end(self, grad_start, sequences):
        self.told.setdefault("grad_start", []).append(grad_start)
        return self.answers[1][sequences].mT.contiguous()


def chained_results(inputs, grad_end, plan):
    """As `results`, with start and gradient of the end as a chain gives them; and what the chain was told."""
    from megatron_blackmamba.ops.selective_scan.triton import scan
    from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan

    chain = Neighbours(inputs["start"], grad_end)

    def chained(given):
        y, end = scan(given._replace(initial_state_BIN=None), plan=Plan(**plan), chain=chain)
        return y, end.detach().requires_grad_()

    return results(chained, inputs), chain.told | {"grad_start": torch.cat(chain.told["grad_start"])}


def assert_close(actual, exact, tolerance):
    assert actual.keys() == exact.keys()
    for name in exact:
        scale = exact[name].abs().max().clamp_min(1e-6)
        error = ((actual[name].double() - exact[name]).abs().max() / scale).item()
        assert error < tolerance, f"{name} is off by {error:.1e} of its largest entry"


@pytest.mark.parametrize(
    "features",
    [
        EVERYTHING,
        EVERYTHING - {"gate"},
        EVERYTHING - {"skip", "start"},
        EVERYTHING - {"bias", "reset"},
        EVERYTHING - {"softplus", "bias"},
        frozenset(),
    ],
    ids=lambda features: "+".join(sorted(features)) or "nothing",
)
@pytest.mark.parametrize("plan", [PLAN, KEPT], ids=["recomputed", "kept"])
def test_every_feature_matches_the_reference_with_gradients(interpreted, features, plan):
    inputs = problem(2, 9, 5, 16, features)
    exact = results(reference.scan, inputs, dtype=torch.float64)
    assert_close(interpreted(triton_results, inputs, plan), exact, 2e-6)


@thorough
@pytest.mark.parametrize("changes", [{"backward_segment": 8}, {"backward_steps": 2}, {"steps": 8, "segment": 8}])
def test_kept_states_agree_however_they_are_divided(interpreted, changes):
    inputs = problem(2, 19, 33, 4)
    exact = results(reference.scan, inputs, dtype=torch.float64)
    assert_close(interpreted(triton_results, inputs, KEPT | changes), exact, 2e-6)


@pytest.mark.parametrize("length", [1, 8, 13])
@pytest.mark.parametrize("inner", [32, 37])
def test_full_and_partial_blocks_agree(interpreted, length, inner):
    inputs = problem(1, length, inner, 4)
    exact = results(reference.scan, inputs, dtype=torch.float64)
    assert_close(interpreted(triton_results, inputs, PLAN), exact, 2e-6)


@pytest.mark.parametrize("features", [EVERYTHING, EVERYTHING - {"start", "reset"}], ids=["reset", "no-reset"])
def test_parallel_segments_match_one_pass(interpreted, features):
    inputs = problem(1, 19, 6, 8, features)
    exact = results(reference.scan, inputs, dtype=torch.float64)
    assert_close(interpreted(triton_results, inputs, PLAN | {"segment": 8}), exact, 2e-6)


@thorough
@pytest.mark.parametrize("plan", [PLAN, KEPT], ids=["recomputed", "kept"])
def test_bfloat16_inputs_keep_a_float32_state(interpreted, plan):
    inputs = problem(1, 16, 32, 16, dtype=torch.bfloat16)
    actual = interpreted(triton_results, inputs, plan)
    assert actual["y"].dtype == actual["du"].dtype == actual["dz"].dtype == torch.bfloat16
    assert_close(actual, results(reference.scan, inputs, dtype=torch.float64), 8e-3)
    assert actual["end"].dtype == torch.float32
    assert_close({"end": actual["end"]}, {"end": reference_end(inputs)}, 2e-6)


def reference_end(inputs):
    return results(reference.scan, inputs, dtype=torch.float64)["end"]


def test_grouped_backward_is_bitwise_equal(interpreted):
    inputs = problem(3, 5, 4, 4)
    together = interpreted(triton_results, inputs, PLAN | {"group": 3})
    apart = interpreted(triton_results, inputs, PLAN | {"group": 2})
    for name in ("y", "du", "ddelta", "dz", "dB", "dC", "dstart"):
        assert torch.equal(together[name], apart[name]), name
    assert_close(apart, {name: value.double() for name, value in together.items()}, 1e-6)


def results_of_log(inputs):
    from megatron_blackmamba.ops.selective_scan.triton import scan

    return results(partial(scan, log_A=True), inputs | {"A": (-inputs["A"]).log()}, None)


def test_takes_the_logarithm_of_decays(interpreted):
    inputs = problem(3, 21, 36, 8)
    exact = results(reference.scan, inputs, dtype=torch.float64)
    exact["dA"] *= inputs["A"].double()  # the gradient of the logarithm
    assert_close(interpreted(results_of_log, inputs), exact, 3e-6)


def test_strided_gate_is_read_in_place(interpreted):
    inputs = problem(1, 8, 32, 4)
    wide = torch.cat((torch.zeros_like(inputs["z"]), inputs["z"]), dim=-1)
    exact = results(reference.scan, inputs, dtype=torch.float64)
    assert_close(interpreted(strided_results, inputs, wide, PLAN), {"y": exact["y"], "end": exact["end"]}, 2e-6)


def strided_results(inputs, wide, plan):
    from megatron_blackmamba.ops.selective_scan.triton import scan
    from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan

    _, z = wide.chunk(2, dim=-1)
    y, end = scan(Inputs(*inputs.values())._replace(z_BLI=z), plan=Plan(**plan))
    return {"y": y, "end": end}


def sequence_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def test_sequence_first_layout_is_preserved(interpreted):
    inputs = problem(2, 9, 37, 4)
    exact = results(reference.scan, inputs, dtype=torch.float64)
    inputs |= {name: sequence_first(inputs[name]) for name in ("u", "delta", "B", "C", "z")}
    actual = interpreted(triton_results, inputs, PLAN)
    assert_close(actual, exact, 2e-6)
    for name in ("y", "du", "ddelta", "dz"):
        assert actual[name].stride() == inputs["u"].stride(), name


def test_extreme_time_steps_neither_overflow_nor_vanish(interpreted):
    inputs = problem(1, 8, 4, 4, EVERYTHING - {"reset"})
    inputs["delta"][0, :, 0], inputs["delta"][0, :, 1], inputs["delta"][0, :, 2] = 60.0, -60.0, -16.0
    exact = results(reference.scan, inputs, dtype=torch.float64)
    actual = interpreted(triton_results, inputs, PLAN)
    assert_close(actual, exact, 2e-6)
    tiny = exact["ddelta"][0, :, 2]  # of a time step of 1e-8: relative accuracy is asked here too
    assert ((actual["ddelta"][0, :, 2].double() - tiny).abs() < 1e-4 * tiny.abs().max()).all()


@thorough
@pytest.mark.parametrize(("segment", "keep"), [(0, True), (8, False)], ids=["one pass, kept", "segments, recomputed"])
def test_a_chain_of_parts_replaces_start_and_end(interpreted, segment, keep):
    inputs = problem(3, 21, 5, 4)
    exact = results(reference.scan, inputs, dtype=torch.float64)
    g = torch.Generator().manual_seed(1)
    grad_end = [torch.randn(exact[name].shape, generator=g, dtype=torch.float64) for name in ("y", "end")][1]
    plan = {**PLAN, "segment": segment, "group": 2, "keep": keep, "backward_segment": segment}
    actual, told = interpreted(chained_results, inputs, grad_end.float(), plan)
    start_gradient = exact.pop("dstart")
    assert_close({name: actual[name] for name in exact}, exact, 3e-6)
    decay, added, grad_start = (told[name].mT.double() for name in ("decay", "added", "grad_start"))
    whole = {"end": decay * inputs["start"].double() + added, "start": grad_start + decay * grad_end}
    assert_close(whole, {"end": exact["end"], "start": start_gradient}, 3e-6)
