import math
from types import SimpleNamespace

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.training.step.schedule import Schedule, rate_change


def schedule(*overrides):
    """The tiny run: 200 steps of 16 samples, warm-up over 10 of them, from 3e-3 down to 3e-4."""
    optimizer = SimpleNamespace(param_groups=[{"params": [], "wd_mult": 1.0}, {"params": [], "wd_mult": 0.0}])
    return Schedule(load("tiny", list(overrides)), optimizer), optimizer


def rates(schedule, steps):
    return [schedule.set(16 * (step - 1)) for step in steps]


def test_warm_up_is_linear_without_a_zero_rate():
    plan, _ = schedule()
    assert rates(plan, [1, 2, 5, 10]) == pytest.approx([3e-4, 6e-4, 1.5e-3, 3e-3], rel=1e-12)


def test_cosine_reaches_the_minimum_at_the_last_step():
    plan, _ = schedule()
    expected = [3e-4 + (3e-3 - 3e-4) * (1 + math.cos(math.pi * (step - 10) / 190)) / 2 for step in range(10, 201)]
    assert rates(plan, range(10, 201)) == pytest.approx(expected, rel=1e-12)
    assert rates(plan, [200, 201, 500]) == pytest.approx([3e-4] * 3, rel=1e-12)


def test_linear_and_constant_decays():
    assert rates(schedule("optimizer.decay=linear")[0], [105]) == pytest.approx([(3e-3 + 3e-4) / 2], rel=1e-12)
    assert rates(schedule("optimizer.decay=constant")[0], [105, 200]) == pytest.approx([3e-3] * 2, rel=1e-12)


def test_the_paper_s_run_at_its_own_numbers():
    config = load("blackmamba_1.5b")
    plan = Schedule(config, SimpleNamespace(param_groups=[{}]))
    highest = max(range(config.steps), key=lambda step: plan.set(1008 * step))
    assert highest == config.warmup_steps and plan.set(1008 * highest) == pytest.approx(2e-4, rel=1e-3)
    assert plan.set(1008 * (config.steps - 1)) == pytest.approx(2e-5, rel=1e-12)


@pytest.mark.parametrize("batch", [4, 12, 32, 400])
def test_global_batch_leaves_the_curve_over_samples(batch):
    usual, other = schedule()[0], schedule(f"training.global_batch={batch}")[0]
    ends = range(batch, 3200 + batch, batch)
    assert [other.set(end - batch) for end in ends] == [usual.set(end - 16) for end in ends]
    assert other.set(ends[-1] - batch) == pytest.approx(3e-4, rel=1e-12)


@pytest.mark.parametrize("tokens", [1, 128 * 50])
def test_very_short_run_has_a_schedule(tokens):
    shortest = schedule(f"training.tokens={tokens}", "optimizer.warmup_fraction=0.99")[0]
    assert shortest.set(48) == pytest.approx(3e-4, rel=1e-12)


def test_every_group_gets_its_rate_and_weight_decay():
    plan, optimizer = schedule("optimizer.weight_decay=0.1")
    rate = plan.set(0)
    assert [group["lr"] for group in optimizer.param_groups] == [rate, rate]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_rate_depends_only_on_samples():
    plan, _ = schedule()
    straight = rates(plan, range(1, 201))
    assert rates(schedule()[0], [150, 3, 77]) == [straight[149], straight[2], straight[76]]


def test_stretched_schedule_names_both_rates():
    before = load("tiny")
    longer = load("tiny", ["training.steps=230"])
    end = 3e-4 + (3e-3 - 3e-4) * (1 + math.cos(math.pi * (201 - 11.5) / 218.5)) / 2
    (line,) = rate_change(before, longer, 200, 3200)
    assert line == f"learning rate: {end:.3g} at step 201, where the schedule before the change has 0.0003"
    assert rate_change(before, load("tiny", ["training.global_batch=4"]), 200, 3200) == []
    constant = [load("tiny", ["optimizer.decay=constant", *more]) for more in ([], ["training.steps=230"])]
    assert rate_change(*constant, 200, 3200) == []
