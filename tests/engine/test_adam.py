import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.engine.adam import Adam
from megatron_blackmamba.runtime.process import default_float32


def train(optimizer_class, steps=5, seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in [(3, 5), (7,), (1,)]]
    optimizer = optimizer_class([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}], **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return params, optimizer


@settings(deadline=None, max_examples=25)
@given(
    lr=st.floats(1e-5, 1e-1),
    decay=st.sampled_from([0.0, 0.1]),
    beta2=st.sampled_from([0.95, 0.999]),
    decoupled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_steps_like_torchs_adam(lr, decay, beta2, decoupled, seed):
    options = {"lr": lr, "weight_decay": decay, "betas": (0.9, beta2), "eps": 1e-8}
    ours, _ = train(Adam, seed=seed, adam_w_mode=decoupled, **options)
    theirs, _ = train(torch.optim.AdamW if decoupled else torch.optim.Adam, seed=seed, **options)
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, atol=2e-6, rtol=1e-5)


def test_update_does_not_depend_on_the_default_dtype():
    def after_step(number):
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float32))
        optimizer = Adam([weight], lr=0.1)
        optimizer.param_groups[0]["step"] = number - 1
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return weight.detach()

    expected = after_step(257)
    with default_float32():  # afterwards it is as before
        torch.set_default_dtype(torch.bfloat16)  # in which 257 is 256
        assert torch.equal(after_step(257), expected)


def test_step_is_per_group_and_moments_per_parameter():
    params, optimizer = train(Adam, steps=4, lr=1e-3)
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]
    assert all(set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq"} for p in params)


@pytest.mark.parametrize("moments", [None, torch.bfloat16])
def test_continues_from_its_state_without_a_difference(moments):
    through, _ = train(Adam, steps=6, lr=1e-2, moments=moments)
    params, first = train(Adam, steps=3, lr=1e-2, moments=moments)
    g = torch.Generator().manual_seed(0)
    for shape in [(3, 5), (7,), (1,)] * 4:  # what the first three steps drew
        torch.randn(shape, generator=g)
    second = Adam([{"params": params[:2]}, {"params": params[2:]}], lr=1.0, moments=moments)
    second.load_state_dict(first.state_dict())
    assert {state.dtype for p in params for state in second.state[p].values()} == {moments or torch.float32}
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        second.step()
    for a, b in zip(through, params, strict=True):
        assert torch.equal(a, b)


def test_missing_gradients_and_empty_groups_change_nothing():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Adam([{"params": [used, unused]}, {"params": []}])
    used.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert used[0] < 1
    assert "step" not in optimizer.param_groups[1]


def test_unknown_option_is_refused():
    with pytest.raises(TypeError, match="master_weights"):
        Adam([torch.nn.Parameter(torch.ones(1))], master_weights=True)


def test_features_it_lacks_are_refused():
    weights = [torch.nn.Parameter(torch.ones(2))]
    Adam(weights, capturable=False)
    with pytest.raises(TypeError, match="no capturable"):
        Adam(weights, capturable=True)


def moments_after(gradients, moments, **options):
    """Return both moments in fp32 after one update per gradient."""
    weight = torch.nn.Parameter(torch.randn(len(gradients[0]), generator=torch.Generator().manual_seed(1)))
    optimizer = Adam([weight], moments=moments, **options)
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    state = optimizer.state[weight]
    return [state[name].float() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_bf16_moments_follow_falling_gradients(beta2):
    """Rounding to nearest would keep the second moment of large gradients forever if beta2 is 0.999."""
    large = torch.randn(4096, generator=torch.Generator().manual_seed(2)) + 3
    gradients = [large] * 20 + [large * 0.1] * 400
    exact = moments_after([gradient.double() for gradient in gradients], None, betas=(0.9, beta2))
    narrow = moments_after(gradients, torch.bfloat16, betas=(0.9, beta2))
    for ours, theirs, deviation in zip(narrow, exact, (0.01, 0.05), strict=True):
        relative = ours / theirs - 1
        assert relative.mean().abs() < 2e-3  # no drift
        assert relative.std() < deviation


def test_bf16_moments_are_cut_anywhere_alike():
    """A rank that holds a part of a weight makes the same bits as one that holds all of it."""
    g = torch.Generator().manual_seed(3)
    start, gradients = torch.randn(64, generator=g), [torch.randn(64, generator=g) for _ in range(3)]
    parts = {}
    for sizes in ([64], [17, 47]):
        weights = [torch.nn.Parameter(part.clone()) for part in start.split(sizes)]
        optimizer = Adam(weights, lr=0.1, moments=torch.bfloat16)
        for gradient in gradients:
            for weight, part in zip(weights, gradient.split(sizes), strict=True):
                weight.grad = part.clone()
            optimizer.step()
        state = [torch.cat([optimizer.state[w][name] for w in weights]) for name in ("exp_avg", "exp_avg_sq")]
        parts[len(sizes)] = [torch.cat([w.detach() for w in weights]), *state]
    for whole, cut in zip(parts[1], parts[2], strict=True):
        assert torch.equal(whole, cut)
        assert whole.dtype == torch.float32 or whole.dtype == torch.bfloat16
