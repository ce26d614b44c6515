"""The order of tokens by expert in Triton's interpreter: that of a stable sort."""

import pytest
import torch

pytest.importorskip("triton")

pytestmark = pytest.mark.xdist_group("triton")


def orders(choice_P, experts, programs):
    from megatron_blackmamba.ops import order
    from megatron_blackmamba.ops.order import triton as triton_order

    triton_order.PROGRAMS, triton_order.TILE = programs, 64
    return order.order_of(choice_P, experts, backend="triton")


@pytest.mark.parametrize("programs", [1, 5, 24])
@pytest.mark.parametrize(("pairs", "experts"), [(1, 8), (97, 8), (64, 1), (150, 5), (90, 33)])
def test_pairs_are_in_stable_order(interpreted, pairs, experts, programs):
    choice_P = torch.randint(experts, (pairs,), generator=torch.Generator().manual_seed(pairs))
    choice_P[choice_P == experts // 3] = experts - 1  # an expert without a token
    order_P, place_P, pairs_E = interpreted(orders, choice_P, experts, programs)
    assert torch.equal(order_P, choice_P.argsort(stable=True))
    assert torch.equal(place_P, order_P.argsort())
    assert torch.equal(pairs_E, torch.bincount(choice_P, minlength=experts))
