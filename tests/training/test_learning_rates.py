import math
import re
from types import SimpleNamespace

import pytest

from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.runtime import layout
from megatron_blackmamba.settings.optimizer import SHAPES
from megatron_blackmamba.training.step.learning_rates import Schedule, rate_change

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


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


SHARED = ("linear", "cosine", "sqrt", "exponential")
"""Shapes that megatron-core has too."""
OTHER_NAMES = {"wsd": "WSD", "sqrt": "minus_sqrt"}
"""megatron-core's names of shapes, where they differ from the config's."""


@pytest.mark.parametrize("warmup", ["optimizer.warmup_fraction=0.371", "optimizer.warmup_tokens=0"])
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", *(f"wsd {shape}" for shape in SHARED)])
def test_rate_equals_megatron_core_s_at_every_sample(decay, warmup):
    decay, _, shape = decay.partition(" ")
    overrides = [warmup, f"optimizer.decay={decay}", f"optimizer.decay_shape={shape or 'linear'}"]
    overrides += ["training.tokens=127577", "optimizer.learning_rate=0.00137", "optimizer.min_learning_rate=1.1e-5"]
    config = load("tiny", [*overrides, "optimizer.decay_fraction=0.731"])
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=0.0, max_lr=0.00137, min_lr=1.1e-5, lr_warmup_steps=config.warmup_samples,
        lr_decay_steps=config.samples, lr_decay_style=OTHER_NAMES.get(decay, decay),
        start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
        wsd_decay_steps=config.decay_samples, lr_wsd_decay_style=OTHER_NAMES.get(shape, shape),
    )  # fmt: skip
    assert config.samples == 997 and config.decay_samples % 2
    for sample in range(1, config.samples + 20):
        theirs.num_steps = sample
        assert config.learning_rate_at(sample) == theirs.get_lr({}), sample


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


LEFT = {
    "linear": lambda part: 1 - part,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
    "sqrt": lambda part: 1 - math.sqrt(part),
    "exponential": lambda part: 2 * 0.5**part - 1,
}


def test_every_shape_has_a_formula_of_its_own():
    assert LEFT.keys() == SHAPES.keys()


@pytest.mark.parametrize("shape", LEFT)
def test_wsd_is_constant_then_decays_in_its_shape(shape):
    """The tiny run has 3,200 samples, of which the last 800 decay here: 50 of its 200 steps."""
    plan, _ = schedule("optimizer.decay=wsd", f"optimizer.decay_tokens={800 * 128}", f"optimizer.decay_shape={shape}")
    assert rates(plan, range(10, 151)) == pytest.approx([3e-3] * 141, rel=1e-12)
    expected = [3e-4 + (3e-3 - 3e-4) * LEFT[shape]((step - 150) / 50) for step in range(151, 201)]
    assert rates(plan, range(151, 201)) == pytest.approx(expected, rel=1e-12)


def test_longer_wsd_run_has_same_rates_before_decay():
    keys = ("optimizer.decay=wsd", "optimizer.warmup_tokens=20480", "optimizer.decay_tokens=102400")
    usual, longer = schedule(*keys)[0], schedule(*keys, "training.steps=400")[0]
    assert rates(usual, range(1, 151)) == rates(longer, range(1, 151))
    assert rates(longer, [350, 400]) == pytest.approx([3e-3, 3e-4], rel=1e-12)


RAMP = "training.batch_ramp=[{batch: 4, until: 10240}, {batch: 8, until: 51200}]"


def walk(config):
    """Return the consumed samples before each step of a run, taking one step after another."""
    at = [0]
    while at[-1] < config.samples:
        at.append(at[-1] + config.batch_at(at[-1]))
    return at


@pytest.mark.parametrize("until", [10240, 10241, 10300])
@pytest.mark.parametrize("tokens", [400_000, 20_000, 5_000, 51_201])
def test_ramp_counts_the_steps_that_it_takes(until, tokens):
    """Borders that no batch ends at, and runs that end inside the ramp."""
    ramp = f"training.batch_ramp=[{{batch: 4, until: {until}}}, {{batch: 8, until: 51200}}]"
    config = load("tiny", [ramp, "training.micro_batch=2", f"training.tokens={tokens}"])
    before = walk(config)
    assert config.steps == len(before) - 1
    for step, consumed in enumerate(before):
        assert config.steps_left(consumed) == len(before) - 1 - step
        assert config.samples_left(consumed) == before[-1] - consumed


def test_ramp_leaves_the_curve_over_samples():
    config = load("tiny", [RAMP])
    plan = Schedule(config, SimpleNamespace(param_groups=[{}]))
    usual, _ = schedule()
    for consumed in walk(config)[:-1]:
        assert plan.set(consumed) == usual.config.learning_rate_at(consumed + config.batch_at(consumed))


def test_steps_of_a_ramp_are_those_it_takes():
    for steps in (1, 7, 20, 200):
        for until in (10240, 10241):
            ramp = f"training.batch_ramp=[{{batch: 4, until: {until}}}, {{batch: 8, until: 50K}}]"
            assert load("tiny", [ramp, f"training.steps={steps}"]).steps == steps


def test_ramp_that_no_rank_can_divide_names_nearest():
    config = load("tiny", ["training.batch_ramp=[{batch: 6, until: 1000}]", "training.micro_batch=2"])
    with pytest.raises(layout.LayoutError) as refused:
        layout.check(config, 4)
    wrong, works = str(refused.value).splitlines()
    assert wrong.startswith("training.batch_ramp: batch=6 sequences cannot be divided by 4") and "4 or 8 could" in wrong
    (suggested,) = re.findall(r"'(training\.batch_ramp=[^']*)' training\.micro_batch=1;", works)
    layout.check(load("tiny", [suggested, "training.micro_batch=1"]), 4)


def test_changed_length_is_same_place_on_the_curve():
    keys = ("optimizer.decay=linear", "training.tokens=102400")
    before, now = load("tiny", list(keys)), load("tiny", [*keys, "data.sequence_length=256"])
    assert rate_change(before, now, 20, 160) == []
    shorter = load("tiny", ["optimizer.decay=linear", "training.tokens=81920", "data.sequence_length=256"])
    assert len(rate_change(before, shorter, 20, 160)) == 1


def test_ramp_and_decay_that_overlap_are_refused():
    cases = {
        ("optimizer.decay=wsd", "optimizer.decay_tokens=409000"): "does not fit behind the warm-up of 20480",
        ("optimizer.warmup_tokens=409600",): "is not less than the run's training.tokens=409600",
        ("training.batch_ramp=[{batch: 6, until: 1000}]",): "training.batch_ramp: batch=6 is not a multiple of",
        ("training.batch_ramp=[{batch: 4, until: 90}, {batch: 8, until: 90}]",): "list stages in order",
    }
    for overrides, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            load("tiny", list(overrides))
