"""The text of a suggested layout, and the estimated time by which layouts are ranked."""

from megatron_blackmamba.config import load
from megatron_blackmamba.plan import estimate, gpus, layouts, memory, times
from megatron_blackmamba.plan.layouts import Candidate
from megatron_blackmamba.plan.times import StepTime
from megatron_blackmamba.runtime.layout import Layout

H100 = gpus.KNOWN["h100"]
TIME = StepTime(computing=0.25, idle=0.0, update=0.125, waiting={"expert": 0.125})


def candidate(config, recompute="none"):
    return Candidate(Layout(config.parallel, config.training.micro_batch), recompute, 1.23456, TIME)


def test_overrides_name_only_what_changes():
    config = load("tiny")
    assert candidate(config).overrides(config) == "(as it is)"
    assert candidate(config, "layers").overrides(config) == "training.recompute=layers"
    wide = load("tiny", ["parallel.expert=2", "training.micro_batch=2"])
    words = candidate(wide, "experts").overrides(config).split()
    assert set(words) == {"parallel.expert=2", "training.micro_batch=2", "training.recompute=experts"}
    assert "recompute" not in candidate(wide, "experts").overrides(load("tiny", ["training.recompute=experts"]))


def test_json_has_layout_memory_and_time():
    config = load("tiny")
    assert candidate(config, "layers").as_json(config) == {
        "overrides": "training.recompute=layers",
        **config.parallel.model_dump(),
        "micro_batch": 4,
        "recompute": "layers",
        "memory_gib": 1.235,
        "global_batch": 16,
        "seconds_per_step": 0.5,
        "tokens_per_second": 16 * 128 / 0.5,
        "why": "computing 250 ms, update 125 ms, expert exchange 125 ms",
    }


def test_suggestions_prefer_no_exchange_and_large_micro_batches():
    config = load("blackmamba_1.5b")
    found = layouts.suggest(config, layouts.Cluster(56, 8, H100), count=6)
    best = found[0].layout
    assert (best.parallel.tensor, best.parallel.expert, best.micro_batch) == (1, 1, 18)
    assert "exchange" not in found[0].time.described()
    one_node = {c.layout.parallel.expert: c.time.total for c in found if c.layout.parallel.tensor == 1}
    assert one_node[1] < one_node[2]  # no all-to-all
    assert max(one_node.values()) < min(c.time.total for c in found if c.layout.parallel.tensor > 1)


def test_near_batches_keep_the_layout_and_are_fastest(monkeypatch):
    monkeypatch.setattr(times, "LAUNCHING_SECONDS", 0.0)  # micro-batches of 8 wait for their hosts a little
    config = load("blackmamba_1.5b")
    lower, upper = layouts.with_near_batches(config, layouts.Cluster(128, 8, H100))
    assert lower.overrides(config) == "training.global_batch=896 training.micro_batch=7"
    assert upper.overrides(config) == "training.global_batch=1024 training.micro_batch=8"
    (same,) = layouts.suggest(config, layouts.Cluster(128, 8, H100), count=1)
    assert upper.tokens_per_second(config) > 1.5 * same.tokens_per_second(config)
    assert layouts.with_near_batches(config, layouts.Cluster(56, 8, H100)) == []


def test_tensor_ranks_stay_inside_a_node():
    found = layouts.suggest(load("blackmamba_1.5b"), layouts.Cluster(128, 4, H100), count=20)
    assert max(candidate.layout.parallel.tensor for candidate in found) == 4


def test_experts_across_nodes_take_longer_than_within():
    config = load("blackmamba_1.5b", ["training.micro_batch=18"])
    state = memory.State(10**9, 2 * 10**9, 10**8)
    within, across = (layouts.time_of(config, layouts.Cluster(56, size, H100), state) for size in (8, 4))
    assert across.computing == within.computing
    assert across.waiting["expert"] > 3 * within.waiting["expert"]


def test_synthetic_sources_share_the_run():
    made = estimate.make_plan(load("tiny", ["data.synthetic.sources=4"]))
    assert [source.name for source in made.sources] == [f"synthetic_{i}" for i in range(4)]
    assert {(source.probability, source.tokens) for source in made.sources} == {(0.25, 102_400)}
