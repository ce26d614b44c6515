"""Second derivatives: right, or refused. They must not lack terms silently."""

import pytest
import torch

from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
from megatron_blackmamba.ops.cross_entropy import cross_entropy
from megatron_blackmamba.ops.experts import grouped_experts
from megatron_blackmamba.ops.gated import gated
from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from megatron_blackmamba.ops.rms_norm import rms_norm
from megatron_blackmamba.ops.selective_scan import selective_scan
from megatron_blackmamba.ops.ssd import ssd
from tests.ops.calls import answers, arguments_of

OPS = {  # op -> an argument with a gradient
    selective_scan: "delta_BLI",
    causal_conv1d: "x_BLI",
    grouped_experts: "fc1_EGD",
    gated: "gate_up_TG",
    gated_rms_norm: "x",
    rms_norm: "x",
    cross_entropy: "logits_TV",
}


def gradient_of(op, **options):
    """The gradient of the sum of the outputs, to be differentiated again; the sum's own gradient depends on nothing."""
    leaf = arguments_of(op)[OPS[op]].requires_grad_()
    total = sum(answer.sum() for answer in answers(op, **{OPS[op]: leaf}, **options))
    return torch.autograd.grad(total, leaf, create_graph=True)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_kernels_refuse_second_derivatives(op):
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        gradient_of(op)


@pytest.mark.parametrize("op", [selective_scan, causal_conv1d], ids=lambda op: op.__name__)
def test_reference_has_second_derivatives(op):
    (gradient,) = gradient_of(op, backend="reference")
    assert gradient.requires_grad


def test_chunked_scans_refuse_them_too():
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        gradient_of(selective_scan, backend="chunked")
    x_BLHP, dt_BLH = torch.randn(1, 4, 2, 4, requires_grad=True), torch.rand(1, 4, 2)
    B_BLGN = torch.randn(1, 4, 1, 4)
    y = ssd(x_BLHP, dt_BLH, -torch.ones(2), B_BLGN, B_BLGN, backend="chunked")
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(y.sum(), x_BLHP, create_graph=True)
