"""Which tokens may be drawn, and how often; transformers' own filters are the reference."""

import pytest
import torch
from transformers.generation import logits_process

from megatron_blackmamba.inference.sampling import GenerationError, Sampler, Sampling, allowed, drawn, next_tokens

VOCABULARY = 50


def logits(rows=6, seed=0):
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probabilities(logits_BV, sampling):
    weights_BV, order_BV, _ = allowed(logits_BV, sampling, VOCABULARY)
    return torch.zeros_like(weights_BV).scatter(1, order_BV, weights_BV / weights_BV.sum(dim=-1, keepdim=True))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 1},
        {"top_k": 500},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_filters_agree_with_transformers(options, temperature):
    expected = logits() / temperature
    if "top_k" in options:
        expected = logits_process.TopKLogitsWarper(options["top_k"])(None, expected)
    if "top_p" in options:
        expected = logits_process.TopPLogitsWarper(options["top_p"])(None, expected)
    if "min_p" in options:
        expected = logits_process.MinPLogitsWarper(options["min_p"])(None, expected)
    got = probabilities(logits(), Sampling(temperature=temperature, **options))
    torch.testing.assert_close(got, expected.softmax(dim=-1))


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, 0.5),
        ({"top_p": 0.6}, 0.9),
        ({"top_p": 0.999}, 0.0),
        ({"min_p": 0.02}, 0.9),
        ({"top_k": 40}, 0.9),
        ({"top_k": 40, "top_p": 0.5, "min_p": 0.1}, 0.9),
        ({"top_k": 3000, "top_p": 0.9}, 0.0),
        ({"top_k": 600, "temperature": 8.0}, 0.5),
        ({"top_k": 600, "top_p": 0.3, "temperature": 8.0}, 0.9),
        ({"temperature": 30.0}, 0.0),
        ({"temperature": 1e-320}, 0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("digits", [0, 5])
def test_few_logits_give_what_all_give(options, known, digits):
    random = torch.Generator().manual_seed(1)
    rows_BV = (4 * torch.randn(200, 4000, generator=random)).round(decimals=digits)  # no digits: many are equal
    uniform_B1 = torch.rand(200, 1, generator=random, dtype=torch.float64)
    sampling = Sampling(**{"temperature": 1.0} | options)
    head_B, known_B = drawn(rows_BV, uniform_B1, sampling, 500)
    all_B, of_all_B = drawn(rows_BV, uniform_B1, sampling, 4000)
    assert torch.equal(head_B[known_B], all_B[known_B]) and bool(of_all_B.all())
    assert digits == 0 or known_B.float().mean() >= known


@pytest.mark.parametrize("likeliest", [False, True])
def test_rows_drawn_together_are_drawn_as_alone(likeliest):
    options = [{"temperature": 1.0}, {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
    options += [{"temperature": 1.0, "repetition_penalty": 1.3}, {"temperature": 1.0, "repetition_penalty": 1.3}]
    here_BV = logits(len(options) + 1)
    here_BV[-1, 3] = torch.nan

    def samplers():
        every = enumerate([*options, {"temperature": 1.0}])
        return [Sampler(Sampling(**each), [[row]], VOCABULARY, here_BV.device) for row, each in every]

    best = [*here_BV[:-1].argmax(dim=-1).tolist(), -1] if likeliest else None
    alone = [int(each(row_V[None])) for each, row_V in zip(samplers()[:-1], here_BV, strict=False)]
    assert next_tokens(samplers(), here_BV, best) == [*alone, -1]


def test_draws_follow_the_probabilities():
    rows = 20_000
    sampling = Sampling(temperature=1.0, top_k=4)
    row_V = torch.log(torch.tensor([0.4, 0.05, 0.3, 0.15, 0.1]))
    prompts = [[number] for number in range(rows)]
    drawn = Sampler(sampling, prompts, rows, row_V.device)(row_V.repeat(rows, 1))
    shares = torch.bincount(drawn, minlength=5) / rows
    torch.testing.assert_close(shares, torch.tensor([0.4, 0, 0.3, 0.15, 0.1]) / 0.95, atol=0.012, rtol=0)


def test_repetition_penalty_agrees_with_transformers():
    prompts = [[1, 2, 2], [3, 4, 5]]
    sampler = Sampler(Sampling(repetition_penalty=1.7), prompts, VOCABULARY, torch.device("cpu"))
    said = torch.tensor(prompts)
    for step in range(5):
        here = logits(2, seed=step)
        expected = logits_process.RepetitionPenaltyLogitsProcessor(1.7)(said, here.float()).argmax(dim=-1)
        assert torch.equal(sampler(here), expected)
        said = torch.cat((said, expected[:, None]), dim=1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
    ],
    ids=str,
)
def test_impossible_sampling_is_refused(options):
    with pytest.raises(GenerationError, match=next(iter(options))):
        Sampling(**options)


def test_logits_of_nan_are_refused():
    with pytest.raises(GenerationError, match="not finite"):
        Sampler(Sampling(), [[1]], VOCABULARY, torch.device("cpu"))(torch.full((1, VOCABULARY), torch.nan))


@pytest.mark.parametrize("option", ["temperature", "top_p", "min_p", "repetition_penalty", "top_k", "seed"])
@pytest.mark.parametrize("value", [5e-324, 1e-320, 1e-300, 1e-40, 1.0, 1e40, 1.7e308, 10**400], ids=str)
def test_no_accepted_option_breaks_the_draw(option, value):
    if (option in ("top_k", "seed")) is not isinstance(value, int):
        return
    options = {"temperature": 0.8, option: value}
    try:
        sampling = Sampling(**options)
    except GenerationError:
        return
    rows_BV = torch.stack([logits(1)[0], torch.zeros(VOCABULARY).double(), -logits(1)[0]]).float()
    sampler = Sampler(sampling, [[1, 2], [3], list(range(VOCABULARY))], VOCABULARY, rows_BV.device)
    for _ in range(3):
        assert all(0 <= token < VOCABULARY for token in sampler(rows_BV).tolist())
    weights_BV, *_ = allowed(rows_BV, sampling, VOCABULARY)
    assert torch.isfinite(weights_BV).all()


def test_coldest_temperature_takes_the_likeliest():
    rows_BV = logits()
    weights_BV, order_BV, _ = allowed(rows_BV, Sampling(temperature=5e-324), VOCABULARY)
    assert torch.equal(order_BV[:, 0], rows_BV.argmax(dim=-1))
    assert weights_BV.count_nonzero(dim=-1).tolist() == [1] * len(rows_BV)
