import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.config.run import GuardConfig
from megatron_blackmamba.training.guard import Action, Guard


def judged(guard, loss, norm=1.0):
    return guard.settle(guard.look(loss), loss, norm)


def guard_that_saw(losses, **config):
    guard = Guard(GuardConfig(**config))
    for loss in losses:
        judged(guard, loss)
    return guard


STEADY = [2.0 + 0.01 * math.sin(i) for i in range(40)]


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_a_step_that_is_not_finite_is_skipped_and_says_what_was_not(loss, norm):
    verdict = judged(guard_that_saw(STEADY), loss, norm)
    assert verdict.action is Action.SKIP
    assert ("loss" if not math.isfinite(loss) else "gradient norm") in verdict.reason


def test_bad_steps_in_a_row_stop_the_run_and_good_ones_between_them_do_not():
    guard = guard_that_saw(STEADY, max_bad_steps=3)
    actions = [judged(guard, loss).action for loss in (math.nan, math.nan, 2.0, math.nan, math.nan, math.nan)]
    assert [action.value for action in actions] == ["skip", "skip", "apply", "skip", "skip", "stop"]
    assert guard.skipped == 5


@pytest.mark.parametrize("spike, action", [("warn", Action.APPLY), ("skip", Action.SKIP), ("rewind", Action.REWIND)])
def test_a_spike_is_met_as_configured_and_named(spike, action):
    verdict = judged(guard_that_saw(STEADY, spike=spike), 3.0)
    assert verdict.action is action
    assert "3.0" in verdict.reason and "2.0" in verdict.reason


def test_noise_slow_drift_and_falling_losses_are_no_spikes():
    guard = guard_that_saw([], spike="skip")
    curve = [6.0 * 0.98**i + 0.05 * math.sin(7 * i) for i in range(200)]
    assert all(judged(guard, loss).action is Action.APPLY for loss in curve)
    assert judged(guard, curve[-1] - 3).action is Action.APPLY  # a fall is none either


def test_a_flat_curve_does_not_make_rounding_a_spike():
    assert judged(guard_that_saw([2.0] * 50, spike="skip"), 2.0001).action is Action.APPLY


def test_without_history_nothing_is_a_spike():
    assert judged(guard_that_saw([2.0] * 3, spike="skip"), 50.0).action is Action.APPLY


def test_skipped_losses_do_not_move_the_median_they_are_judged_by():
    guard = guard_that_saw(STEADY, spike="skip", spike_window=8, max_bad_steps=100)
    assert all(judged(guard, 9.0).action is Action.SKIP for _ in range(30))


def test_a_loss_is_looked_at_before_the_update_and_remembered_only_after():
    guard = guard_that_saw(STEADY, spike="skip")
    before = guard.state()
    assert guard.look(9.0).action is Action.SKIP and guard.look(math.nan).action is Action.SKIP
    assert guard.state() == before


@given(st.lists(st.one_of(st.floats(1, 8), st.just(math.nan)), max_size=80), st.integers(0, 80))
def test_a_guard_restored_from_json_judges_as_the_one_that_never_stopped(losses, cut):
    config = GuardConfig(spike="skip", spike_window=16, max_bad_steps=4)
    steady, stopped = Guard(config), Guard(config)
    for i, loss in enumerate(losses):
        if i == cut:
            state = json.loads(json.dumps(stopped.state()))
            stopped = Guard(config)
            stopped.restore(state)
        assert judged(steady, loss) == judged(stopped, loss)
