"""How many steps a run has, whatever happens to its global batch on the way."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.config import load

BATCHES = st.integers(1, 64)


def run_of(tokens, batch, *more):
    sizes = [f"training.tokens={tokens}", f"training.global_batch={batch}", "training.micro_batch=1"]
    return load("tiny", [*sizes, *more])  # 128 tokens a sample


def test_run_ends_with_the_batch_reaching_its_tokens():
    assert [run_of(tokens, 16).steps for tokens in (1, 2048, 2049, 40960)] == [1, 1, 2, 20]


@given(st.integers(1, 200_000), BATCHES, BATCHES, st.integers(0, 30))
def test_changed_batch_trains_every_token_once(tokens, before, after, steps):
    taken = min(steps, run_of(tokens, before).steps)
    config, consumed = run_of(tokens, after), taken * before
    end = config.last_step(taken, consumed)
    trained = consumed + (end - taken) * after
    assert trained * 128 >= tokens
    assert end == taken or (trained - after) * 128 < tokens
    for step in range(taken, end + 1):  # wherever it is stopped and started again
        assert config.last_step(step, consumed + (step - taken) * after) == end


def test_job_never_ends_after_its_run():
    assert run_of(40960, 32, "training.stop_after_steps=12").last_step(10, 160) == 12
    assert run_of(40960, 32, "training.stop_after_steps=50").last_step(10, 160) == 15


def test_run_past_its_tokens_has_nothing_left():
    assert run_of(1024, 16).last_step(10, 160) == 10
