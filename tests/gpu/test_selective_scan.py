"""The compiled scan on a GPU, against the definition in float64, itself, and mamba-ssm."""

import pytest
import torch

from megatron_blackmamba.ops.selective_scan import Inputs, available_backends, reference, selective_scan

pytestmark = pytest.mark.gpu
GRADIENTS = ("u", "delta", "A", "B", "C", "D", "z", "bias", "start")


def problem(batch, length, inner, state=16, dtype=torch.float32, start=True, reset=True):
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=g, device="cuda").to(dtype)

    return {
        "u": normal(batch, length, inner, dtype=dtype),
        "delta": normal(batch, length, inner, dtype=dtype),
        "A": -torch.arange(1, state + 1, device="cuda") * torch.exp(0.3 * normal(inner, state)),
        "B": normal(batch, length, state, dtype=dtype),
        "C": normal(batch, length, state, dtype=dtype),
        "D": normal(inner),
        "z": normal(batch, length, 2 * inner, dtype=dtype)[..., inner:],
        "bias": normal(inner) - 4,
        "softplus": True,
        "start": normal(batch, inner, state) if start else None,
        "reset": torch.rand(batch, length, generator=g, device="cuda") < 0.01 if reset else None,
    }


def results(scan, inputs, dtype=None, **options):
    given = {
        name: x.detach().to(dtype or x.dtype).requires_grad_() if name in GRADIENTS and x is not None else x
        for name, x in inputs.items()
    }
    y, end = scan(Inputs(*given.values()), **options)
    g = torch.Generator("cuda").manual_seed(1)
    dy, dend = (torch.randn(x.shape, generator=g, device="cuda") for x in (y, end))
    dy, dend = dy.to(inputs["u"].dtype).to(y.dtype), dend.to(end.dtype)  # rounded for the reference too
    torch.autograd.backward((y, end), (dy, dend))
    grads = {f"d{name}": given[name].grad for name in GRADIENTS if given[name] is not None}
    return {"y": y.detach(), "end": end.detach(), **grads}


def assert_close(actual, exact, tolerance):
    for name in exact:
        error = ((actual[name].double() - exact[name]).norm() / exact[name].norm()).item()
        assert error < tolerance, f"{name} is off by {error:.1e}"


@pytest.fixture(scope="module")
def triton_scan():
    return pytest.importorskip("megatron_blackmamba.ops.selective_scan.triton").scan


@pytest.fixture(scope="module")
def cuda_scan():
    if why_not := available_backends()["cuda"]:
        pytest.skip(why_not)
    from megatron_blackmamba.ops.selective_scan import cuda

    return cuda.scan


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_logarithm_of_decays_is_read(backend):
    if why_not := available_backends()[backend]:
        pytest.skip(why_not)
    inputs = problem(2, 130, 256, dtype=torch.bfloat16)
    exact = results(reference.scan, inputs, torch.float64)
    exact["dA"] *= inputs["A"].double()  # the gradient of the logarithm
    log, options = inputs | {"A": (-inputs["A"]).log()}, {"log_A": True, "return_final_state": True, "backend": backend}

    def scan(given):
        u, delta, A, B, C, D, z, bias, _, start, reset = given
        more = {"z_BLI": z, "delta_bias_I": bias, "initial_state_BIN": start, "reset_BL": reset}
        return selective_scan(u, delta, A, B, C, D, **more, **options)

    assert_close(results(scan, log), exact, 1e-2)


LAYOUTS = {
    "as they come": lambda x: x,
    "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "odd strides": lambda x: torch.cat((x, x[..., :1]), -1)[..., :-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 512, 2304), {"channels": 1}),
        ((2, 512, 2304), {"channels": 2}),
        ((3, 130, 128), {"channels": 1, "segment": 64, "backward_segment": 64}),
        ((1, 333, 256), {"channels": 2, "segment": 128, "backward_segment": 0}),
        ((2, 3, 128), {}),
    ],
    ids=str,
)
def test_cuda_kernels_agree_with_the_definition(cuda_scan, shape, options, layout):
    from dataclasses import replace

    from megatron_blackmamba.ops.selective_scan import cuda

    inputs = problem(*shape, dtype=torch.bfloat16)
    inputs |= {name: LAYOUTS[layout](inputs[name]) for name in ("u", "delta", "z", "B", "C")}
    plan = replace(cuda.rule(*shape), **options)
    assert_close(results(cuda_scan, inputs, plan=plan), results(reference.scan, inputs, torch.float64), 6e-3)


@pytest.mark.parametrize("absent", ["z", "D", "bias", "start", "reset", "softplus"])
def test_cuda_kernels_do_without_optional_inputs(cuda_scan, absent):
    inputs = problem(2, 70, 128, dtype=torch.bfloat16)
    if absent == "softplus":
        inputs |= {"softplus": False, "delta": 0.1 * inputs["delta"].abs(), "bias": None}
    else:
        inputs[absent] = None
    assert_close(results(cuda_scan, inputs), results(reference.scan, inputs, torch.float64), 6e-3)


def test_cuda_gradients_repeat_bit_by_bit(cuda_scan):
    inputs = problem(4, 512, 2304, dtype=torch.bfloat16)
    once, again = results(cuda_scan, inputs), results(cuda_scan, inputs)
    for name in once:
        assert torch.equal(once[name], again[name]), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize(
    "shape", [(2, 512, 2304), (1, 333, 200), (3, 64, 96), (2, 130, 64, 8), (1, 100, 70, 32)], ids=str
)
def test_agrees_with_the_definition_in_value_and_gradient(triton_scan, shape, dtype, tolerance):
    inputs = problem(*shape, dtype=dtype)
    assert_close(results(triton_scan, inputs), results(reference.scan, inputs, torch.float64), tolerance)


@pytest.mark.parametrize("segment", [0, 64, 256])
@pytest.mark.parametrize("backward_steps", [2, 4])
def test_every_way_of_cutting_the_sequence_agrees(triton_scan, segment, backward_steps):
    from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan

    inputs = problem(2, 600, 160)
    plan = Plan(segment=segment, backward_steps=backward_steps)
    assert_close(results(triton_scan, inputs, plan=plan), results(reference.scan, inputs, torch.float64), 2e-5)


def test_paper_shape_matches_the_recurrence(triton_scan):
    inputs = problem(2, 2048, 2304, dtype=torch.bfloat16, start=False, reset=False)
    with torch.no_grad():
        y, end = triton_scan(Inputs(*inputs.values()))
        exact_y, exact_end = reference.scan(
            Inputs(*(x.double() if name in GRADIENTS and x is not None else x for name, x in inputs.items()))
        )
    assert (y.double() - exact_y).norm() < 4e-3 * exact_y.norm()
    assert (end.double() - exact_end).norm() < 1e-5 * exact_end.norm()


def test_gradients_repeat_bit_by_bit(triton_scan):
    inputs = problem(4, 512, 2304, dtype=torch.bfloat16)
    once, again = results(triton_scan, inputs), results(triton_scan, inputs)
    for name in once:
        assert torch.equal(once[name], again[name]), name


def test_agrees_with_mamba_ssm_where_that_is_installed(triton_scan):
    if why_not := available_backends()["mamba_ssm"]:
        pytest.skip(why_not)
    from megatron_blackmamba.ops.selective_scan import mamba_ssm

    inputs = problem(2, 1024, 2304, dtype=torch.bfloat16, start=False, reset=False)
    ours, theirs = (scan(Inputs(*inputs.values())) for scan in (triton_scan, mamba_ssm.scan))
    assert_close(dict(zip("yh", ours, strict=True)), {k: x.double() for k, x in zip("yh", theirs, strict=True)}, 6e-3)

    def gradients(scan):
        given = {n: x.detach().requires_grad_() if n in GRADIENTS and x is not None else x for n, x in inputs.items()}
        y, _ = scan(Inputs(*given.values()))
        y.backward(torch.ones_like(y))
        return {n: given[n].grad for n in GRADIENTS if given[n] is not None}

    exact = gradients(mamba_ssm.scan)
    assert_close(gradients(triton_scan), {n: x.double() for n, x in exact.items()}, 1e-2)


def test_auto_backend_on_gpu_supports_resets():
    inputs = problem(1, 64, 64, start=False)
    u, delta, A, B, C, D, z, bias, softplus, _, reset = inputs.values()
    auto = selective_scan(u, delta, A, B, C, D, z_BLI=z, delta_bias_I=bias, delta_softplus=softplus, reset_BL=reset)
    exact, _ = reference.scan(Inputs(*inputs.values()))
    assert (auto - exact).norm() < 1e-4 * exact.norm()
    assert available_backends()["triton"] is None


def test_tensors_on_cpu_take_a_backend_for_cpus():
    u, delta, A, B, C, *_ = (x.cpu() if torch.is_tensor(x) else x for x in problem(1, 16, 64).values())
    exact, _ = reference.scan(Inputs(u, delta, A, B, C, delta_softplus=True))
    assert (selective_scan(u, delta, A, B, C) - exact).norm() < 1e-4 * exact.norm()


def test_tuned_plan_gives_the_same_result(triton_scan, monkeypatch, tmp_path):
    from megatron_blackmamba.ops.selective_scan import triton_tuning

    monkeypatch.setenv("BLACKMAMBA_TRITON_TUNE", "1")
    monkeypatch.setenv("BLACKMAMBA_CACHE", str(tmp_path))
    monkeypatch.setattr(triton_tuning, "candidates", lambda plan, B, L: iter([plan, triton_tuning.Plan(segment=128)]))
    triton_tuning._plan_on.cache_clear()
    inputs = problem(1, 384, 64)
    tuned = results(triton_scan, inputs)
    assert len(list((tmp_path / "triton_plans").glob("*.json"))) == 1
    triton_tuning._plan_on.cache_clear()
    assert_close(tuned, {name: x.double() for name, x in results(triton_scan, inputs).items()}, 1e-5)
