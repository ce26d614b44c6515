import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.cross_entropy import cross_entropy, cross_entropy_and_log_sum, why_not
from tests.ops.implementations import CPP, PROPERTY, assert_close, implementation


def values_and_gradients(function, logits, labels, grad_loss):
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf * 1.0, labels)  # the gradient takes the place of what is not a leaf
    loss.backward(grad_loss.to(loss.dtype))
    return {"loss": loss.detach(), "gradient": leaf.grad}


@pytest.mark.parametrize("name", CPP)
@PROPERTY
@given(
    tokens=st.sampled_from([1, 8, 21]),
    V=st.integers(1, 70),
    scale=st.sampled_from([1.0, 100.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64_in_values_and_gradients(name, tokens, V, scale, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, V, generator=g) * scale).to(dtype)
    labels, grad_loss = torch.randint(V, (tokens,), generator=g), torch.rand(tokens, generator=g)
    exact = lambda x, y: F.cross_entropy(x, y, reduction="none")
    expected = values_and_gradients(exact, logits.double(), labels, grad_loss)
    with implementation(name):
        actual = values_and_gradients(cross_entropy, logits, labels, grad_loss)
    assert actual["loss"].dtype == torch.float32 and actual["gradient"].dtype == dtype
    error = (actual["loss"].double() - expected["loss"]).abs().max() / scale
    assert error <= 2e-6
    assert_close({"gradient": actual["gradient"]}, {"gradient": expected["gradient"]},
                 tolerance=2e-6 * scale if dtype == torch.float32 else 1e-2)  # fmt: skip


@pytest.mark.parametrize("name", CPP)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_so(name, bad):
    """A guard looks at the loss and at the norm of the gradients: neither may look healthy."""
    logits = torch.randn(2, 37)
    logits[1, 7] = bad
    with implementation(name):
        found = values_and_gradients(cross_entropy, logits, torch.tensor([3, 4]), torch.ones(2))
    assert found["loss"].isfinite().tolist() == [True, False]
    assert found["gradient"][0].isfinite().all() and not found["gradient"][1].isfinite().all()


@pytest.mark.parametrize("name", CPP[:1])
def test_wrong_labels_and_a_second_backward_are_refused(name):
    logits = torch.randn(2, 9, requires_grad=True)
    with implementation(name):
        with pytest.raises(IndexError, match="labels from 3 to 9, where the vocabulary has 9 entries"):
            cross_entropy(logits, torch.tensor([3, 9]))
        loss = cross_entropy(logits * 1.0, torch.tensor([3, 8])).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward runs only once"):
            loss.backward()
    assert why_not(torch.randn(2, 9).double())


def test_labels_of_another_type_are_refused():
    with pytest.raises(ValueError, match=r"labels are torch\.int32\. Pass int64"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("name", CPP)
def test_gradient_has_that_of_the_z_loss(name):
    g = torch.Generator().manual_seed(0)
    logits, labels, grad = torch.randn(21, 37, generator=g) * 3, torch.arange(21), torch.rand(21, generator=g)
    exact = logits.double().requires_grad_()
    log_sum = exact.logsumexp(-1)
    loss = F.cross_entropy(exact, labels, reduction="none")
    ((loss + 0.1 * log_sum**2) * grad).sum().backward()
    with implementation(name):
        leaf = logits.clone().requires_grad_()
        found, found_sum = cross_entropy_and_log_sum(leaf * 1.0, labels, z_loss=0.1)
        found.backward(grad)
    assert not found_sum.requires_grad
    assert_close(
        {"loss": found.detach(), "log_sum": found_sum, "gradient": leaf.grad},
        {"loss": loss.detach(), "log_sum": log_sum.detach(), "gradient": exact.grad},
        tolerance=5e-6,
    )
