"""Number formats: every op computes with every floating-point argument it accepts, and refuses the others by name."""

import inspect

import pytest
import torch

from megatron_blackmamba.ops.cross_entropy import cross_entropy
from megatron_blackmamba.ops.experts import grouped_experts, grouped_linear
from tests.ops.calls import OPS, answers, arguments_of

NOT_FLOATS = [torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn]
FLOATS = [torch.float16, torch.bfloat16, torch.float64]
INTEGERS = {"reset_BL", "tokens_E", "tokens_per_expert_E", "ends_E", "labels_T"}
EACH = [pytest.param(op, name, id=f"{op.__name__}-{name}") for op, (_, shapes) in OPS.items() for name in shapes]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_every_tensor_argument_is_tried(op):
    annotations = {name: str(p.annotation) for name, p in inspect.signature(op).parameters.items()}
    tensors = {name for name, what in annotations.items() if "Tensor" in what and "Callable" not in what}
    assert tensors - INTEGERS == set(OPS[op][1])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_default_dtype_changes_no_result(op):
    arguments, expected = arguments_of(op), answers(op)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = answers(op, **arguments)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("op, name", EACH)
def test_complex_numbers_and_integers_are_refused_by_name(op, name):
    spoken = name.rpartition("_")[0] if name.rpartition("_")[2].isupper() else name
    for dtype in NOT_FLOATS:
        with pytest.raises(ValueError, match=f"{op.__name__}: {spoken} is {str(dtype)[6:]}. Pass one of float32"):
            answers(op, **{name: arguments_of(op)[name].to(dtype)})


@pytest.mark.parametrize("op, name", EACH)
def test_mixed_precision_arguments_are_computed_or_refused(op, name):
    for dtype in FLOATS:
        try:
            found = answers(op, **{name: arguments_of(op)[name].to(dtype)})
        except ValueError as error:
            assert op in (grouped_experts, grouped_linear, cross_entropy), error
            continue
        for mine, expected in zip(found, answers(op), strict=True):
            assert torch.allclose(mine.double(), expected.double(), atol=3e-2, rtol=3e-2), (name, dtype)
