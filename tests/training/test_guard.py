import json
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.settings import GuardConfig
from megatron_blackmamba.training.watch.guard import Action, Guard


def judged(guard, loss, norm=1.0):
    return guard.settle(guard.look(loss), loss, norm)


def guard_that_saw(losses, **config):
    guard = Guard(GuardConfig(**config))
    for loss in losses:
        judged(guard, loss)
    return guard


STEADY = [2.0 + 0.01 * math.sin(i) for i in range(40)]


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_non_finite_step_is_skipped_with_its_reason(loss, norm):
    verdict = judged(guard_that_saw(STEADY), loss, norm)
    assert verdict.action is Action.SKIP
    assert ("loss" if not math.isfinite(loss) else "gradient norm") in verdict.reason


def test_only_consecutive_bad_steps_stop_the_run():
    guard = guard_that_saw(STEADY, max_bad_steps=3)
    actions = [judged(guard, loss).action for loss in (math.nan, math.nan, 2.0, math.nan, math.nan, math.nan)]
    assert [action.value for action in actions] == ["skip", "skip", "apply", "skip", "skip", "stop"]


@pytest.mark.parametrize("spike, action", [("warn", Action.APPLY), ("skip", Action.SKIP), ("rewind", Action.REWIND)])
def test_a_spike_is_met_as_configured_and_named(spike, action):
    verdict = judged(guard_that_saw(STEADY, spike=spike), 3.0)
    assert verdict.action is action
    assert "3.0" in verdict.reason and "2.0" in verdict.reason


def test_noise_drift_and_falling_losses_are_no_spikes():
    guard = guard_that_saw([], spike="skip")
    curve = [6.0 * 0.98**i + 0.05 * math.sin(7 * i) for i in range(200)]
    assert all(judged(guard, loss).action is Action.APPLY for loss in curve)
    assert judged(guard, curve[-1] - 3).action is Action.APPLY  # a sudden fall is no spike either


def noise(seed, steps):
    random = Random(seed)
    return [random.gauss(0, 0.02) for _ in range(steps)]


def verdicts(losses, **config):
    guard = Guard(GuardConfig(**config))
    return [judged(guard, loss) for loss in losses]


@pytest.mark.parametrize("spike", ["warn", "skip", "rewind"])
@pytest.mark.parametrize("shift", [0.15, 0.3, 5.0])
def test_lasting_rise_costs_a_few_steps_then_passes(spike, shift):
    seen = verdicts([2 + (step >= 200) * shift + x for step, x in enumerate(noise(0, 1000))], spike=spike)
    named = [step for step, verdict in enumerate(seen) if verdict.reason]
    assert named[0] >= 200 and named[-1] < 230 and len(named) <= 10
    assert "a new level" in seen[named[-1]].reason
    lost = [step for step, verdict in enumerate(seen) if verdict.action is not Action.APPLY]
    assert lost == ([] if spike == "warn" else named)


@pytest.mark.parametrize("shift", [0.06, 0.08, 0.1, 0.12])
def test_rise_at_the_spike_limit_becomes_usual(shift):
    seen = verdicts([2 + (step >= 200) * shift + x for step, x in enumerate(noise(1, 1000))], spike="skip")
    skipped = [step for step, verdict in enumerate(seen) if verdict.action is Action.SKIP]
    assert len(skipped) < 40 and all(step < 400 for step in skipped)


def test_single_spike_costs_only_its_step():
    losses = [2 + x for x in noise(2, 500)]
    for step in range(100, 500, 40):
        losses[step] += 1
    seen = verdicts(losses, spike="skip")
    assert [step for step, verdict in enumerate(seen) if verdict.reason] == list(range(100, 500, 40))


def test_spikes_between_good_steps_never_make_new_level():
    seen = verdicts([9.0 if step > 50 and step % 3 else 2 + x for step, x in enumerate(noise(3, 500))], spike="skip")
    assert sum(verdict.action is Action.SKIP for verdict in seen) == sum(step % 3 > 0 for step in range(51, 500))


@pytest.mark.parametrize("slope", [1e-4, 1e-3, 0.1])
def test_a_loss_that_drifts_up_is_followed(slope):
    seen = verdicts([2 + slope * step + 0.01 * math.sin(7 * step) for step in range(500)], spike="skip")
    assert all(verdict.action is Action.APPLY for verdict in seen)


@pytest.mark.parametrize("step", range(5, 120, 23))
def test_spike_during_a_steep_fall_costs_one_step(step):
    losses = [4 + 7 * 0.97**i + x for i, x in enumerate(noise(4, 300))]
    losses[step] = 60.0
    seen = verdicts(losses, spike="skip")
    assert [i for i, verdict in enumerate(seen) if verdict.action is not Action.APPLY] == [step] * (step >= 8)


@given(
    st.lists(st.floats(0, 100), max_size=150),
    st.sampled_from(["off", "warn", "skip", "rewind"]),
    st.integers(2, 6),
    st.integers(8, 32),
)
def test_finite_losses_never_end_a_run(losses, spike, most, window):
    in_a_row = 0
    for verdict in verdicts(losses, spike=spike, max_spikes=most, spike_window=window, max_bad_steps=1):
        assert verdict.action is not Action.STOP
        in_a_row = 0 if verdict.action is Action.APPLY else in_a_row + 1
        assert in_a_row <= most


def test_only_non_finite_steps_count_towards_giving_up():
    guard = guard_that_saw(STEADY, spike="skip", max_bad_steps=2)
    actions = [judged(guard, loss).action.value for loss in (9.0, math.nan, 9.0, math.nan, math.nan)]
    assert actions == ["skip", "skip", "skip", "skip", "stop"]


def test_guard_saved_before_spikes_were_counted_is_restored():
    guard = Guard(GuardConfig(spike="skip"))
    guard.restore({"losses": STEADY, "bad_in_a_row": 0, "skipped": 3})
    assert judged(guard, 9.0).action is Action.SKIP


def test_loss_is_judged_before_and_remembered_after_update():
    guard = guard_that_saw(STEADY, spike="skip")
    before = guard.state()
    assert guard.look(9.0).action is Action.SKIP and guard.look(math.nan).action is Action.SKIP
    assert guard.state() == before


@given(st.lists(st.one_of(st.floats(1, 8), st.just(math.nan)), max_size=80), st.integers(0, 80))
def test_guard_restored_from_json_judges_the_same(losses, cut):
    config = GuardConfig(spike="skip", spike_window=16, max_bad_steps=4)
    steady, stopped = Guard(config), Guard(config)
    for i, loss in enumerate(losses):
        if i == cut:
            state = json.loads(json.dumps(stopped.state()))
            stopped = Guard(config)
            stopped.restore(state)
        assert judged(steady, loss) == judged(stopped, loss)


@pytest.mark.parametrize("spike, action", [("off", "skip"), ("warn", "skip"), ("skip", "skip"), ("rewind", "rewind")])
@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (2.0, math.inf)])
def test_rewind_answers_steps_that_are_not_finite_too(spike, action, loss, norm):
    guard = guard_that_saw(STEADY, spike=spike, max_bad_steps=2)
    assert judged(guard, loss, norm).action.value == action
    assert judged(guard, loss, norm).action is Action.STOP


@pytest.mark.parametrize("spike, action", [("off", "stop"), ("warn", "stop"), ("skip", "stop"), ("rewind", "rewind")])
def test_replicas_that_differ_stop_or_rewind(spike, action):
    guard = guard_that_saw(STEADY, spike=spike)
    before = guard.state()
    verdict = guard.replicas_differ("rank 1 in norm.weight")
    assert verdict.action.value == action and "rank 1 in norm.weight" in verdict.reason
    assert guard.state() == before


def test_the_window_slides():
    old, new = [6.0, 6.1] * 20, [2.0, 2.1] * 4
    assert judged(guard_that_saw(old + new, spike="skip", spike_window=8), 4.0).action is Action.SKIP
    assert judged(guard_that_saw(old + new, spike="skip", spike_window=48), 4.0).action is Action.APPLY


def test_eight_losses_are_enough_to_judge_by():
    assert judged(guard_that_saw([2.0] * 7, spike="skip"), 50.0).action is Action.APPLY
    assert judged(guard_that_saw([2.0] * 8, spike="skip"), 50.0).action is Action.SKIP


def test_a_spike_begins_where_the_deviations_say():
    window = [2.0, 2.1, 1.9, 2.2, 1.8, 2.1, 1.9, 2.0]  # median 2.0, median deviation 0.1
    guard = guard_that_saw(window, spike="skip", spike_deviations=8)
    assert guard.look(2.79).action is Action.APPLY
    assert guard.look(2.81).action is Action.SKIP
    assert guard_that_saw(window, spike="skip", spike_deviations=4).look(2.5).action is Action.SKIP


def test_flat_curve_has_a_minimum_deviation():
    guard = guard_that_saw([2.0] * 8, spike="skip", spike_deviations=8)
    assert guard.look(2.015).action is Action.APPLY
    assert guard.look(2.017).action is Action.SKIP


def test_nan_does_not_end_a_row_of_spikes():
    guard = guard_that_saw(STEADY, spike="skip", max_spikes=3)
    verdicts = [judged(guard, loss) for loss in (5.0, 5.0, math.nan, 5.0, 5.0)]
    assert [verdict.action.value for verdict in verdicts] == ["skip", "skip", "skip", "skip", "apply"]
    assert ["new level" in (verdict.reason or "") for verdict in verdicts] == [False, False, False, True, False]


def test_spikes_become_the_level_exactly_at_max_spikes():
    guard = guard_that_saw(STEADY, spike="skip", max_spikes=3)
    verdicts = [judged(guard, 9.0) for _ in range(3)]
    assert ["a new level" in verdict.reason for verdict in verdicts] == [False, False, True]
    assert not guard.losses and guard.spikes_in_a_row == 0


def test_spikes_counted_before_a_checkpoint_count_after_it():
    guard = guard_that_saw(STEADY, spike="skip", max_spikes=2)
    judged(guard, 9.0)
    resumed = Guard(GuardConfig(spike="skip", max_spikes=2))
    resumed.restore(guard.state())
    assert "a new level" in judged(resumed, 9.0).reason


def test_disabled_guard_still_refuses_non_finite_values():
    guard = guard_that_saw(STEADY, spike="off")
    assert judged(guard, 1e6).action is Action.APPLY
    assert judged(guard, math.nan).action is Action.SKIP


def test_a_bad_step_is_remembered_by_no_median():
    guard = guard_that_saw(STEADY)
    judged(guard, 2.0, math.nan)
    judged(guard, math.inf)
    assert list(guard.losses) == STEADY
