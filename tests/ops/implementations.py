"""Helpers for tests of the ops: all implementations that this machine can run, and comparison with float64."""

import contextlib
import os
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from megatron_blackmamba.ops import library

torch.set_num_threads(1)

ISAS = () if library.unavailable() else library.runnable_isas()
CPP = [
    pytest.param(
        f"cpp-{isa}", marks=pytest.mark.skipif(isa not in ISAS, reason=f"the C++ kernels for {isa} do not run here")
    )
    for isa in library.ISAS
]
PROPERTY = settings(deadline=None, max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))


@contextlib.contextmanager
def implementation(name: str):
    """Yield the backend of `chunked`, `cpp-avx2` and so on, with that instruction set in force."""
    backend, _, isa = name.partition("-")
    with mock.patch.dict(os.environ, {"BLACKMAMBA_ISA": isa} if isa else {}):
        yield backend


def values_and_gradients(function, grad_y: torch.Tensor, **inputs: torch.Tensor | None) -> dict:
    """Return what the function makes of the inputs, and the gradient of each that is there."""
    leaves = {name: x if x is None else x.detach().clone().requires_grad_() for name, x in inputs.items()}
    y = function(*leaves.values())
    y.backward(grad_y.to(y.dtype))
    return {"y": y.detach()} | {f"gradient of {name}": x.grad for name, x in leaves.items() if x is not None}


def assert_close(actual: dict, expected: dict, tolerance: float) -> None:
    """Each tensor is within `tolerance` of what is expected, relative to its largest entry or, as inputs are, to 1."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, name
        error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1.0)
        assert error <= tolerance, f"{name} is off by {error:.1e} of its largest entry"
