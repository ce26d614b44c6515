"""The text of a suggested layout, and the estimated time by which layouts are ranked."""

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.plan import estimate, flops, gpus, layouts
from megatron_blackmamba.plan.layouts import Candidate
from megatron_blackmamba.plan.traffic import Flow
from megatron_blackmamba.runtime.layout import Layout

H100 = gpus.KNOWN["h100"]


def candidate(config, recompute="none"):
    return Candidate(Layout(config.parallel, config.training.micro_batch), recompute, 1.23456, 0.5)


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
        "seconds_per_step": 0.5,
    }


@pytest.mark.parametrize("overlap", [True, False])
def test_time_adds_idle_stages_and_exposed_traffic(overlap):
    pipeline = ["parallel.pipeline=2", "training.micro_batch=1", f"training.overlap={str(overlap).lower()}"]
    config = load("blackmamba_1.5b", [*pipeline, "training.recompute=layers"])
    work = flops.training(config.model, 2048) + flops.recomputed(config)
    computing = config.tokens_per_step * work / (16 * 989e12 * 0.5)
    stages = computing * (1 + 1 / 126)  # 8 data-parallel groups of 126 micro-batches; one waits at each end
    seconds = lambda flows: layouts._seconds(config, 16, H100, 0.5, flows)
    flow = lambda seconds: Flow(1.0, "nvlink", 2, seconds)
    assert flops.recomputed(config) > 0
    assert seconds({}) == pytest.approx(stages)
    assert seconds({"tensor": flow(2.0), "expert": flow(3.0)}) == pytest.approx(stages + 5)
    assert seconds({"data": flow(computing / 2)}) == pytest.approx(stages + (0 if overlap else computing / 2))
    assert seconds({"data": flow(3 * computing)}) == pytest.approx(stages + (2 if overlap else 3) * computing)


def test_synthetic_sources_share_the_run():
    made = estimate.make_plan(load("tiny", ["data.synthetic.sources=4"]))
    assert [source.name for source in made.sources] == [f"synthetic_{i}" for i in range(4)]
    assert {(source.probability, source.tokens) for source in made.sources} == {(0.25, 102_400)}
