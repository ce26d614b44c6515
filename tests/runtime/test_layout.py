import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.runtime import layout
from megatron_blackmamba.runtime.layout import LayoutError


def refusal(run, processes, *overrides):
    with pytest.raises(ConfigError) as refused:  # what callers from Python know
        layout.check(load(run, overrides), processes)
    assert isinstance(refused.value, LayoutError)
    return str(refused.value)


@pytest.mark.parametrize(("run", "processes"), [("blackmamba_1.5b", 56), ("blackmamba_2.8b", 48), ("tiny", 1)])
def test_the_shipped_runs_work_as_they_are_documented(run, processes):
    layout.check(load(run), processes)


@pytest.mark.parametrize(("run", "batch"), [("blackmamba_1.5b", 1008), ("blackmamba_2.8b", 1056)])
def test_impossible_eight_nodes_are_refused_with_working_layouts(run, batch):
    message = refusal(run, 64)
    assert f"training.global_batch={batch} sequences cannot be divided by 64 data-parallel ranks" in message
    (named,) = re.findall(r"On 64 processes: (.*?)\.(?: |$)", message)
    for overrides in named.split("; or "):
        layout.check(load(run, overrides.split()), 64)


@pytest.mark.parametrize(
    ("processes", "overrides", "reason"),
    [
        (3, ["parallel.tensor=2"], "3 processes cannot be divided by parallel.tensor=2 × parallel.pipeline=1 = 2"),
        (2, ["parallel.expert=4"], "2 processes cannot be divided by parallel.expert=4"),
        (8, ["parallel.pipeline=8"], "4 layers cannot fill parallel.pipeline=8 stages"),
        (
            3,
            ["parallel.tensor=3", "parallel.expert_tensor=3", "data.sequence_length=129"],
            "tensor=3; 1, 2, 4, 8, 16, 32 or 64 could.",
        ),
        (2, ["model.expert_hidden_size=127", "parallel.expert_tensor=2"], "model.expert_hidden_size=127"),
        (3, ["parallel.context=2"], "parallel.pipeline=1 × parallel.context=2 = 2"),
        (3, ["parallel.context=3"], "cannot be divided by parallel.tensor=1 × parallel.context=3"),
        (256, ["parallel.context=256"], "data.sequence_length=128 leaves ranks without tokens: parallel.tensor=1"),
        (4, ["parallel.context=2", "training.global_batch=1", "training.micro_batch=1"], "/ parallel.context=2"),
        (2, ["training.micro_batch=16"], "training.micro_batch=16 does not divide the 8 sequences"),
        (2, ["training.micro_batch=16"], "/ 2); 1, 2, 4 or 8 would."),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(processes, overrides, reason):
    assert reason in refusal("tiny", processes, *overrides)


def test_uneven_experts_name_sizes_that_work():
    with pytest.raises(ValueError, match=r"parallel\.expert=6, only over 1, 2, 4, 8$"):
        load("tiny", ["parallel.expert=6"])


NARROW = ["training.precision=bf16", "optimizer.gradients=bf16", "training.micro_batch=1"]


def test_bf16_gradients_of_many_micro_batches_are_refused():
    layout.check(load("tiny", [*NARROW, "training.global_batch=32"]), 1)
    layout.check(load("tiny", [*NARROW, "training.global_batch=64"]), 2)
    layout.check(load("tiny", [*NARROW, "training.global_batch=64", "optimizer.gradients=fp32"]), 1)
    message = refusal("tiny", 1, *NARROW, "training.global_batch=64")
    assert "adds up more than 32 micro-batches, not 64" in message
    assert "On 1 process: training.micro_batch=2." in message


def test_attention_heads_must_split_over_the_tensor_ranks():
    heads = ['model.pattern="*-"', "model.mlp_hidden_size=128", "model.attention.heads=2", "parallel.tensor=4"]
    assert "model.attention.heads=2 cannot be divided by parallel.tensor=4" in refusal("tiny", 4, *heads)


def test_suggests_context_parallelism_only_for_long_sequences():
    short, long = (load("tiny", [f"data.sequence_length={length}"]) for length in (8192, 32768))
    assert {found.parallel.context for found in layout.working_layouts(short, 8)} == {1}
    assert {found.parallel.context for found in layout.working_layouts(long, 8)} == {1, 2, 4}


def test_experts_may_have_their_own_layout():
    for overrides in ([], ["parallel.expert=2"], ["parallel.expert_tensor=2"]):
        layout.check(load("tiny", ["parallel.tensor=2", *overrides]), 2)


def test_without_experts_no_expert_layout_is_needed():
    layout.check(load("tiny", ["model.pattern=MM", "parallel.tensor=2"]), 2)
    assert "has no layer with experts" in refusal("tiny", 2, "model.pattern=MM", "parallel.expert_tensor=2")


def test_names_process_counts_that_fit_the_layout():
    assert re.search(r"As it is, on .*\b4\b.* processes \(--nproc\)", refusal("tiny", 3, "parallel.expert=2"))


def test_says_what_to_change_without_a_near_layout():
    assert "another training.global_batch" in refusal(
        "tiny", 7, "parallel.tensor=8", "parallel.expert=8", "parallel.pipeline=2"
    )


@settings(deadline=None, max_examples=60)
@given(
    processes=st.integers(1, 96),
    batch=st.integers(1, 60),
    micro=st.integers(1, 4),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 3, 4]),
    expert=st.sampled_from([1, 2, 4, 8]),
)
def test_every_layout_it_proposes_passes_its_own_check(processes, batch, micro, tensor, pipeline, expert):
    config = load(
        "tiny",
        [
            f"training.global_batch={batch * micro}",
            f"training.micro_batch={micro}",
            f"parallel.tensor={tensor}",
            f"parallel.pipeline={pipeline}",
            f"parallel.expert={expert}",
        ],
    )
    for found in layout.nearest(config, processes, count=3):
        changed = config.model_copy(
            update={
                "parallel": found.parallel,
                "training": config.training.model_copy(update={"micro_batch": found.micro_batch}),
            }
        )
        assert layout.problems(changed, processes) == []
        assert layout.micro_batches(changed, processes) >= 1
    if not layout.problems(config, processes):
        assert layout.nearest(config, processes)[0].overrides(config) == ""


@pytest.mark.parametrize(
    ("processes", "overrides", "named"),
    [
        (2, ["model.router.scope=rank", "parallel.tensor=2"], "parallel.tensor"),
        (
            2,
            ["model.router.scope=rank", "model.pattern=SESE", "model.mamba2.head_dim=16", "parallel.context=2"],
            "rank",
        ),
        (2, ["model.router.scope=rank"], ""),
        (2, ["model.router.scope=data"], "data-parallel ranks"),
        (1, ["model.router.scope=data"], ""),
        (2, ["parallel.tensor=2"], ""),
        (2, ["model.router.scope=rank", "model.pattern=MMMM", "parallel.tensor=2"], ""),
    ],
)
def test_routing_that_depends_on_the_layout_is_named(processes, overrides, named):
    reason = layout.routing(load("tiny", overrides), processes)
    assert named in reason and bool(reason) == bool(named)
