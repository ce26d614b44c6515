import json

import pytest
import torch

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.selective_scan import Inputs, costs
from megatron_blackmamba.ops.selective_scan import triton as scan
from megatron_blackmamba.ops.selective_scan.triton_tuning import (
    Plan,
    cache_folder,
    candidates,
    fastest,
    recall,
    remember,
    rule,
)

pytest.importorskip("triton")
KEY = ("a GPU", "3.6.0", 8, 2048, 2304, 16, "torch.bfloat16")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BLACKMAMBA_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"chunk": 62}, "steps must divide chunks"),
        ({"backward_steps": 5}, "steps must divide chunks"),
        ({"segment": 96}, "chunks must divide segments"),
        ({"keep": True, "backward_segment": 96}, "chunks must divide segments"),
        ({"keep": True, "backward_steps": 8}, "whole intervals of states"),
    ],
)
def test_plans_that_do_not_divide_are_refused(parts, reason):
    with pytest.raises(ValueError, match=reason):
        Plan(**parts)


def test_only_a_large_batch_runs_in_one_pass():
    assert rule(18, 2048, 2304).segments(2048) == 1
    alone = rule(1, 2048, 2304)
    assert 8 <= alone.segments(2048) <= 32
    assert alone.segment * alone.segments(2048) >= 2048


def test_kept_states_run_whole_only_in_large_batches():
    assert rule(118, 2048, 2304).backward_length(2048) == 2048
    assert rule(42, 2048, 2304).backward_length(2048) < 2048


@pytest.mark.parametrize("batch", [1, 14, 15, 42, 117, 118])
def test_plans_count_the_segments_of_the_rule(batch):
    plan, channels = rule(batch, 2048, 2304), batch * 2304
    assert (plan.segments(2048) > 1) == (channels < costs.FULL)
    assert (plan.backward_length(2048) < 2048) == (channels < costs.ONE_PASS)


@pytest.mark.parametrize("batch", [1, 3, 8, 64])
@pytest.mark.parametrize("length", [1, 63, 64, 256, 100_000])
@pytest.mark.parametrize("keep", [True, False])
def test_rule_and_candidates_are_valid_plans(batch, length, keep):
    plan = rule(batch, length, 2304, keep=keep)
    for candidate in candidates(plan, batch, length):  # a Plan refuses what does not fit together
        assert 1 <= candidate.group <= batch
        for segment in (candidate.segment, candidate.backward_segment):
            assert segment == 0 or segment < length


def test_fastest_candidate_is_cached():
    best = fastest(
        candidates(rule(8, 2048, 2304, keep=False), 8, 2048), lambda plan: abs(plan.chunk - 128) + abs(plan.steps - 8)
    )
    assert (best.chunk, best.steps) == (128, 8)
    assert recall(KEY) is None
    remember(KEY, best)
    assert recall(KEY) == best
    assert recall((*KEY[:-1], "torch.float32")) is None
    assert [file.suffix for file in cache_folder().iterdir()] == [".json"]  # no draft stays behind


@pytest.mark.parametrize("damage", ["", "{", '{"key": [], "plan": {}}', '{"key": 1}', '{"plan": {"chunk": 3}}'])
def test_a_damaged_memory_is_no_memory(damage):
    remember(KEY, Plan())
    (file,) = cache_folder().iterdir()
    file.write_text(damage)
    assert recall(KEY) is None


def test_plan_of_an_older_version_is_ignored():
    remember(KEY, Plan())
    (file,) = cache_folder().iterdir()
    entry = json.loads(file.read_text())
    entry["plan"]["colour"] = "blue"
    file.write_text(json.dumps(entry))
    assert recall(KEY) is None


# The calls that the Triton backends refuse, so that another backend runs them.

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def pretend_interpreted(monkeypatch):
    monkeypatch.setattr(backends, "interpreted", lambda: True)


@pytest.mark.parametrize(
    ("shape", "state", "dtype", "reason"),
    [
        ((1, 8, 4), 16, torch.bfloat16, None),
        ((8, 2048, 2304), 16, torch.bfloat16, None),
        ((1, 8, 4), 16, torch.float64, "float64"),
        ((1, 8, 4), 10, torch.float32, "not 10"),
        ((1, 0, 4), 16, torch.float32, "empty"),
        ((1, 1_000_000, 2304), 16, torch.bfloat16, None),
        ((1, 3_000_000, 4), 16, torch.bfloat16, "at most 2,097,120 tokens"),  # more chunks do not fit into one launch
        ((70_000, 1, 4), 16, torch.bfloat16, "at most 65,535 sequences"),
    ],
)
def test_the_scan_names_what_is_not_for_it(shape, state, dtype, reason):
    u, A = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[-1], state, device="meta")
    B = torch.empty(*shape[:2], state, dtype=dtype, device="meta")
    answer = backends.unsupported(scan, Inputs(u, u, A, B, B))
    assert answer is None if reason is None else reason in answer
