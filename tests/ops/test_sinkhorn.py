import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_blackmamba.ops.sinkhorn import (
    LOAD_BOUND,
    MOST_ITERATIONS,
    available_backends,
    load_imbalance,
    sinkhorn_choice,
)
from tests.ops.implementations import CPP, ISAS, implementation


@pytest.fixture(params=["reference", *CPP])
def backend(request):
    with implementation(request.param) as name:
        yield name


def trained_router_logits(tokens=4096, experts=8, std=1.0, seed=0):
    """Logits as a trained router gives them: some experts are liked by everyone, as strongly as tokens differ."""
    g = torch.Generator().manual_seed(seed)
    liked_E = torch.randn(experts, generator=g)
    return std * (torch.randn(tokens, experts, generator=g) + liked_E)


def exact_choice(logits_TE, iterations, temperature=2.0, start="balanced", top_k=1):
    """The definition, in the log domain and float64: slow, and right for any logits."""
    X = logits_TE.double() * temperature
    column = -torch.logsumexp(X, 0) if start == "balanced" else torch.zeros_like(X[0])
    for _ in range(iterations):
        row = -torch.logsumexp(X + column, 1, keepdim=True)
        column = -torch.logsumexp(X + row, 0)
    return (X + column).topk(top_k, 1).indices if top_k > 1 else (X + column).argmax(1)


@pytest.mark.parametrize("start", ["balanced", "uniform"])
@pytest.mark.parametrize("std", [0.1, 1.0, 4.0, 1e2, 1e4])
@pytest.mark.parametrize("iterations", [0, 1, 3, 9, 64])
def test_agrees_with_the_definition_at_any_logit_scale(std, iterations, start, backend):
    logits = trained_router_logits(std=std)
    choice = sinkhorn_choice(logits, iterations=iterations, start=start, backend=backend)
    agreement = (choice == exact_choice(logits, iterations, start=start)).float().mean()
    assert agreement > 0.999  # float32 may break a tie the other way


@pytest.mark.parametrize(
    ("tokens", "experts", "temperature"), [(1, 8, 2.0), (17, 3, 2.0), (513, 1, 0.5), (1100, 40, 0.5), (4095, 256, 1.0)]
)
def test_agrees_with_the_definition_whatever_the_shape(tokens, experts, temperature, backend):
    logits = trained_router_logits(tokens, experts)
    for start in ("balanced", "uniform"):
        choice = sinkhorn_choice(logits, iterations=2, temperature=temperature, start=start, backend=backend)
        if tokens > 1 or start == "uniform":  # one token alone, balanced, likes all experts alike
            assert (choice == exact_choice(logits, 2, temperature, start)).float().mean() > 0.999


@pytest.mark.parametrize("start", ["balanced", "uniform"])
@pytest.mark.parametrize(("top_k", "std", "iterations"), [(2, 1.0, 1), (3, 4.0, 3), (8, 1.0, 2), (2, 0.1, 9)])
def test_several_experts_are_the_largest_of_the_plan(top_k, std, iterations, start, backend):
    logits, tokens_E = trained_router_logits(std=std), torch.zeros(8, dtype=torch.int64)
    how = {"top_k": top_k, "iterations": iterations, "start": start, "backend": backend}
    choice = sinkhorn_choice(logits, tokens_E=tokens_E, **how).sort(1).values
    expected = exact_choice(logits, iterations, start=start, top_k=top_k).sort(1).values
    assert choice.shape == (4096, top_k)
    assert (choice == expected).all(1).float().mean() > 0.999
    assert torch.equal(tokens_E, torch.bincount(choice.flatten(), minlength=8))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("start", ["balanced", "uniform"])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_choice_is_largest_sum_of_logit_and_bias(temperature, start, top_k, backend):
    logits, bias_E = trained_router_logits(), torch.full((8,), 3.0)
    how = {"top_k": top_k, "iterations": 2, "temperature": temperature, "start": start, "backend": backend}
    choice_TK = sinkhorn_choice(logits, bias_E=bias_E, **how).view(4096, top_k)
    assert bias_E.mean() == pytest.approx(3)  # added to what was there, around zero
    agree = (choice_TK.sort(1).values == (logits + bias_E).topk(top_k, 1).indices.sort(1).values).all(1)
    assert agree.float().mean() > 0.999
    before = bias_E.clone()
    sinkhorn_choice(logits, bias_E=bias_E, **how)
    torch.testing.assert_close(bias_E, 2 * before - 3)


@pytest.mark.parametrize("std", [0.68, 1.0, 2.0])
def test_two_experts_a_token_are_balanced(std):
    logits = trained_router_logits(tokens=16384, std=std)
    assert load_imbalance(sinkhorn_choice(logits, top_k=2), 8) < 1.3
    with pytest.raises(ValueError, match="a token chose expert 7, and the 4 start at 0"):
        load_imbalance(torch.tensor([0, 7]), 4)
    assert load_imbalance(logits.topk(2, dim=1).indices.flatten(), 8) > 1.7


@pytest.mark.parametrize("start", ["balanced", "uniform"])
@pytest.mark.parametrize("top_k, shape", [(1, (0,)), (2, (0, 2))])
def test_no_tokens_are_no_choices(backend, start, top_k, shape):
    bias_E = torch.zeros(8)
    options = {"top_k": top_k, "start": start, "bias_E": bias_E, "backend": backend}
    assert sinkhorn_choice(torch.zeros(0, 8), iterations=3, **options).shape == shape
    assert not bias_E.any()


@pytest.mark.parametrize("tokens", [4096, 1003, 5])
@pytest.mark.parametrize("iterations", [0, 1])
def test_expert_counts_accumulate(iterations, tokens, backend):
    tokens_E = torch.arange(8)
    choice = sinkhorn_choice(trained_router_logits(tokens), iterations=iterations, tokens_E=tokens_E, backend=backend)
    assert torch.equal(tokens_E, torch.arange(8) + choice.bincount(minlength=8))


def test_logits_laid_out_otherwise_are_chosen_alike(backend):
    logits = trained_router_logits()
    choice = sinkhorn_choice(logits, backend=backend)
    assert torch.equal(sinkhorn_choice(logits.t().contiguous().t(), backend=backend), choice)


def test_nan_logits_still_choose_existing_experts(backend):
    logits = trained_router_logits(100)
    logits[3, 2], logits[50] = float("inf"), float("nan")
    choice = sinkhorn_choice(logits, backend=backend)
    assert choice.min() >= 0 and choice.max() < 8


@pytest.mark.parametrize("backend", ["reference", *CPP[-1:]])
def test_very_many_iterations_stay_where_they_converged(backend):
    """Left alone the offsets sink by log(T / E) each time, and take their own last digits with them."""
    logits = trained_router_logits()
    with implementation(backend) as name:
        choice = sinkhorn_choice(logits, iterations=20_000, backend=name)
    assert (choice == exact_choice(logits, 100)).float().mean() > 0.999


@pytest.mark.parametrize("iterations", [1, 5, 64])
def test_two_distant_logit_values_match_float64(iterations, backend):
    likes = torch.rand(4096, 8, generator=torch.Generator().manual_seed(1)) < torch.linspace(0.05, 0.9, 8)
    logits = likes * 2e4 - 1e4
    choice = sinkhorn_choice(logits, iterations=iterations, backend=backend)
    assert (choice == exact_choice(logits, iterations)).float().mean() > 0.999
    assert likes[likes.any(1), choice[likes.any(1)]].all()  # no token goes to an expert 2e4 below its best


@pytest.mark.parametrize(
    ("std", "iterations", "limit"),
    [(0.68, 1, 1.05), (1.0, 1, 1.05), (2.0, 1, 1.3), (4.0, 64, 1.05), (16.0, 64, 1.1)],
)
def test_load_is_balanced_where_plain_argmax_is_not(std, iterations, limit):
    logits = trained_router_logits(tokens=16384, std=std)
    assert load_imbalance(logits.argmax(1), 8) > 1.5
    assert load_imbalance(sinkhorn_choice(logits, iterations=iterations), 8) <= limit


def needed(logits_TE, start="balanced", temperature=2.0):
    """Return by definition how many iterations "auto" takes."""
    X = logits_TE.double() * temperature
    plan = X - X.logsumexp(0) if start == "balanced" else X
    for number in range(MOST_ITERATIONS):
        rows = plan.log_softmax(1)
        load_E = rows.exp().sum(0)
        if number and load_E.max() <= LOAD_BOUND * load_E.mean():
            return number
        plan = rows - load_E.log()
    return MOST_ITERATIONS


AUTO = [(0.68, 1), (4.0, 5), (8.0, 11), (100.0, MOST_ITERATIONS)]
"""Standard deviations of logits, and the iterations that they need."""


@pytest.mark.parametrize("start", ["balanced", "uniform"])
@pytest.mark.parametrize(("std", "iterations"), AUTO)
def test_auto_iterates_until_the_load_is_bounded(std, iterations, start, backend):
    logits = trained_router_logits(tokens=4096, std=std)
    assert start == "uniform" or needed(logits) == iterations
    how, bias_E = {"start": start, "backend": backend}, torch.zeros(8)
    iterations = needed(logits, start)
    choice = sinkhorn_choice(logits, iterations="auto", bias_E=bias_E, **how)
    assert torch.equal(choice, sinkhorn_choice(logits, iterations=iterations, **how))
    assert ((logits + bias_E).argmax(1) == choice).float().mean() > 0.998
    if iterations < MOST_ITERATIONS:
        assert load_imbalance(choice, 8) <= LOAD_BOUND + 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_computed_in_at_least_fp32(dtype):
    logits = trained_router_logits().to(dtype)
    choice = sinkhorn_choice(logits, iterations=3)
    assert (choice == exact_choice(logits, 3)).float().mean() > 0.998


def test_float64_logits_are_compared_in_float64():
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)  # equal in fp32
    assert sinkhorn_choice(logits, iterations=0, start="uniform").item() == 1


def test_logits_are_unchanged_without_gradient():
    logits = trained_router_logits(tokens=64, experts=4).requires_grad_()
    before = logits.detach().clone()
    choice = sinkhorn_choice(logits.double(), temperature=1.0)
    assert not choice.requires_grad and torch.equal(logits, before)


def logits_for(backend):
    """Return float64 logits for the reference, which then agrees exactly; in fp32 a near-tie may break either way."""
    return trained_router_logits(tokens=1024).to(torch.float64 if backend == "reference" else torch.float32)


def _choose_half(rank, store_file, results):
    dist.init_process_group("gloo", store=dist.FileStore(store_file, 2), rank=rank, world_size=2)
    for (backend, iterations, start, top_k), expected in results.items():
        half, how = logits_for(backend).chunk(2)[rank], {"iterations": iterations, "start": start, "top_k": top_k}
        choice = sinkhorn_choice(half, group=dist.group.WORLD, backend=backend, **how)
        if top_k > 1:
            choice, expected = choice.sort(1).values, expected.sort(1).values
        agreement = (choice == expected.chunk(2)[rank]).float().mean()
        assert agreement == 1 if backend == "reference" else agreement > 0.995, (backend, iterations, start)
        one_has_all = logits_for(backend)[: 1024 * (1 - rank)]  # and the other takes part in the sums
        choice = sinkhorn_choice(one_has_all, group=dist.group.WORLD, backend=backend, **how)
        if top_k > 1:
            choice = choice.sort(1).values
        assert torch.equal(choice, expected[: len(choice)])
    dist.destroy_process_group()


def test_two_ranks_choose_as_one_rank_does(tmp_path):
    cases = [
        (backend, *case)
        for backend in (["cpp"] if ISAS else []) + ["reference"]
        for case in [
            (0, "balanced", 1),
            (1, "balanced", 1),
            (2, "uniform", 1),
            (9, "balanced", 1),
            (1, "balanced", 2),
            ("auto", "balanced", 1),
        ]
    ]
    expected = {
        (backend, n, start, top_k): sinkhorn_choice(
            logits_for(backend), iterations=n, start=start, top_k=top_k, backend=backend
        )
        for backend, n, start, top_k in cases
    }
    alone = sinkhorn_choice(logits_for("cpu").chunk(2)[0])
    assert (alone == expected[cases[1]].chunk(2)[0]).float().mean() < 0.995  # else the exchange would prove nothing
    mp.spawn(_choose_half, args=(str(tmp_path / "store"), expected), nprocs=2)


def test_wrong_calls_are_refused_by_name():
    with pytest.raises(ValueError, match="warm"):
        sinkhorn_choice(torch.zeros(2, 2), start="warm")
    with pytest.raises(ValueError, match="fast"):
        sinkhorn_choice(torch.zeros(2, 2), backend="fast")
    for top_k in (3, 0, 1.0):
        with pytest.raises(ValueError, match=f"top_k must be a whole number from 1 to .*, 2; not {top_k}"):
            sinkhorn_choice(torch.zeros(2, 2), top_k=top_k)
    for iterations in (-1, 2.5):
        with pytest.raises(ValueError, match=f"iterations must be a whole number from 0 on, not {iterations}"):
            sinkhorn_choice(torch.zeros(2, 2), iterations=iterations)
    for temperature in (0.0, -2.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature must be finite and above 0, not {temperature}"):
            sinkhorn_choice(torch.zeros(2, 2), temperature=temperature)
    with pytest.raises(ValueError, match=r"logits has shape .* Pass 2 dimensions"):
        sinkhorn_choice(torch.zeros(2))
    with pytest.raises(ValueError, match="int32"):
        sinkhorn_choice(torch.zeros(2, 2), tokens_E=torch.zeros(2, dtype=torch.int32))
    assert available_backends()["reference"] is None
