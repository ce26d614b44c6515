"""Layouts that the plan proposes for longer sequences of a hybrid."""

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.plan import gpus, memory, times
from megatron_blackmamba.plan.layouts import Cluster
from megatron_blackmamba.plan.lengths import for_lengths
from megatron_blackmamba.runtime import layout

CLUSTER = Cluster(8, 8, gpus.KNOWN["h100"])
HYBRID = ["model.pattern=MEMEME*EMEMEMEME*EMEMEMEME*EME", "model.attention.heads=12", "model.attention.kv_heads=4"]


@pytest.fixture(scope="module")
def rows():
    return for_lengths(load("blackmamba_1.5b", HYBRID), CLUSTER, [32768, 1048576, 2**25])


def test_proposed_layouts_work_and_fit(rows):
    for row in rows[:2]:
        config = load("blackmamba_1.5b", [*HYBRID, *row.overrides.split()])
        assert layout.problems(config, 8) == []
        tokens = config.tokens_per_step / load("blackmamba_1.5b").tokens_per_step  # the next power of two sequences
        assert 2**-0.5 <= tokens <= 2**0.5
        assert memory.fullest(config, 8)[0].total <= CLUSTER.memory
        assert row.said == f"{row.tokens:,} tokens fit on 8 GPUs with {row.overrides}"


def test_long_sequences_are_cut_and_exchange_keys(rows):
    short, long, _ = rows
    context = long.candidate.layout.parallel.context
    assert short.candidate.layout.parallel.context == 1 and short.exchange == 0
    assert context > 1
    heads = 2 * 4 * 96 * 2 / long.candidate.layout.parallel.tensor  # keys and values, bf16
    assert long.exchange * 1e9 > 3 * 2 * (context - 1) / context * 1048576 * heads  # gathered, and gradients scattered
    assert long.flops > 5 * short.flops


def test_a_middle_stage_may_be_the_slowest():
    words = [
        "model.pattern=MEME*EMEME",
        "model.attention.heads=12",
        "parallel.pipeline=5",
        "data.sequence_length=524288",
    ]
    config = load("blackmamba_1.5b", [*words, "training.global_batch=1", "training.micro_batch=1", "parallel.expert=1"])
    stages = [stage.total for stage in times.of_stages(config, CLUSTER.gpu)]
    assert stages.index(max(stages)) == 2
    assert times.of_step(config, 5, CLUSTER.gpu, {}, None).computing == pytest.approx(stages[2])


def test_too_long_sequences_are_said_not_to_fit(rows):
    assert rows[-1].said == "33,554,432 tokens do not fit on 8 GPUs: plan for more nodes."
