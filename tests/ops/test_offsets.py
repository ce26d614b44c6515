"""Offsets of tokens are 64-bit: kernels read and write right where token × stride passes 2^31."""

from unittest import mock

import pytest
import torch

from megatron_blackmamba.ops.causal_conv1d import Inputs as ConvInputs
from megatron_blackmamba.ops.causal_conv1d import reference as conv_reference
from megatron_blackmamba.ops.selective_scan import Inputs as ScanInputs
from megatron_blackmamba.ops.selective_scan import reference as scan_reference
from megatron_blackmamba.ops.ssd import Inputs as SsdInputs
from megatron_blackmamba.ops.ssd import reference as ssd_reference
from tests.ops.far import CHANNELS, STRIDE, TOKENS, Far
from tests.ops.implementations import CPP, assert_close, implementation

pytestmark = pytest.mark.xdist_group("triton")


def scan_inputs(far):
    g = torch.Generator().manual_seed(0)
    u, delta, z, dy = (far(torch.randn(1, TOKENS, CHANNELS, generator=g)) for _ in range(4))
    A = -torch.rand(CHANNELS, 4, generator=g)
    B, C = (torch.randn(1, TOKENS, 4, generator=g) for _ in range(2))
    return ScanInputs(u, delta, A, B, C, torch.ones(CHANNELS), z, torch.zeros(CHANNELS)), dy


def conv_inputs(far):
    g = torch.Generator().manual_seed(0)
    x, dy = (far(torch.randn(1, TOKENS, CHANNELS, generator=g)) for _ in range(2))
    return ConvInputs(x, torch.randn(CHANNELS, 4, generator=g), torch.randn(CHANNELS, generator=g)), dy


def ssd_inputs(far):
    g = torch.Generator().manual_seed(0)
    x, B, C, dy = (far(torch.randn(1, TOKENS, CHANNELS, generator=g)).unflatten(2, (2, -1)) for _ in range(4))
    return SsdInputs(x, torch.randn(1, TOKENS, 2, generator=g), -torch.rand(2, generator=g), B, C, torch.ones(2)), dy


def results(function, inputs, dy):
    given = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
    outputs = function(type(inputs)(*given))
    y = outputs[0] if isinstance(outputs, tuple) else outputs
    leaves = [x for x in given if isinstance(x, torch.Tensor)]
    found = {"y": y, **dict(enumerate(torch.autograd.grad(y, leaves, dy)))}
    return {str(name): x.detach().contiguous() for name, x in found.items()}


def far_results(operation, backend):
    """Return what a backend makes of inputs, and puts into outputs, whose tokens lie far apart."""
    if operation == "scan":
        from megatron_blackmamba.ops.selective_scan import cpp

        module, inputs, function = cpp, scan_inputs, cpp.scan
        if backend == "triton":
            from megatron_blackmamba.ops.selective_scan import gpu as module
            from megatron_blackmamba.ops.selective_scan.triton import scan as function
    elif operation == "ssd":
        from megatron_blackmamba.ops.ssd import triton as module

        inputs, function = ssd_inputs, module.scan
    else:
        from megatron_blackmamba.ops.causal_conv1d import cpp

        module, inputs = cpp, conv_inputs
        if backend == "triton":
            from megatron_blackmamba.ops.causal_conv1d import triton as module
        function = module.convolve
    far, near = Far(), module.empty_like_rows

    def like(x, dtype=None, channels=None):
        whole = x[:, :, :1].expand(-1, -1, CHANNELS) if channels == CHANNELS else x
        return far.like(whole, dtype) if whole.shape[2] == CHANNELS else near(x, dtype, channels)

    with mock.patch.object(module, "empty_like_rows", like):
        return results(function, *inputs(far.of))


def near_results(operation):
    if operation == "scan":
        return results(scan_reference.scan, *scan_inputs(torch.Tensor.double))
    if operation == "ssd":
        return results(ssd_reference.scan, *ssd_inputs(torch.Tensor.double))
    return results(conv_reference.convolve, *conv_inputs(torch.Tensor.double))


def test_the_last_tokens_lie_beyond_32_bits():
    assert (TOKENS - 1) * STRIDE > 2**31


@pytest.mark.parametrize("operation", ["scan", "conv", "ssd"])
def test_triton_kernels_reach_tokens_beyond_32_bits(interpreted, operation):
    assert_close(interpreted(far_results, operation, "triton"), near_results(operation), 1e-5)


@pytest.mark.parametrize("operation", ["scan", "conv"])
@pytest.mark.parametrize("name", CPP)
def test_cpp_kernels_reach_tokens_beyond_32_bits(name, operation):
    with implementation(name):
        assert_close(far_results(operation, "cpp"), near_results(operation), 1e-5)
