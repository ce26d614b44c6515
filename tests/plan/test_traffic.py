"""Bytes that a GPU sends in a step, worked out by hand for one layout with every kind of parallelism."""

import pytest
import torch.distributed as dist

from megatron_blackmamba.config import load
from megatron_blackmamba.plan import gpus, memory, traffic
from megatron_blackmamba.runtime import world

H100 = gpus.KNOWN["h100"]
STATE = memory.State(weights=2_000, gradients=4_000, optimizer=0, expert_weights=1_200, expert_gradients=2_400)
LAYOUT = ["parallel.tensor=2", "parallel.pipeline=3", "parallel.expert=4", "parallel.expert_tensor=2"]
D, TOKENS, BF16, FP32 = 1152, 2048, 2, 4
BATCHES = 1008 // 8  # 48 GPUs are 8 data-parallel groups of 2 × 3; micro-batches of one sequence
STREAM = TOKENS * D * BF16  # the hidden states of a micro-batch
SUMMED = TOKENS * (72 + 2 * 16) * BF16  # dt, B and C of one Mamba layer
HERE = TOKENS // 2  # tokens of a rank under sequence parallelism


def flows(*overrides, gpus_per_node=8, world_size=48, state=STATE, gpu=H100):
    config = load("blackmamba_1.5b", [*LAYOUT, "training.micro_batch=1", *overrides])
    return traffic.flows(config, world_size, gpus_per_node, gpu, state)


def test_each_axis_sends_what_its_collectives_move():
    sent = {axis: round(flow.gigabytes * 1e9) for axis, flow in flows().items()}
    mamba = 5 * STREAM + 4 * SUMMED  # gather and scatter twice, one gather more; all-reduces send everything twice
    assert sent == {
        "tensor": (5 * mamba + 3 * STREAM) * BATCHES // 2,  # 5 Mamba layers a stage, and the head
        "expert": 5 * 4 * HERE * (D * BF16 + FP32) * BATCHES * 3 // 4,  # there and back, twice
        "expert_tensor": 5 * 4 * 2 * HERE * D * BF16 * BATCHES // 2,
        "pipeline": 2 * HERE * D * FP32 * BATCHES,
        "data": (800 + 1_600) * 7 // 8,
        "expert_data": (1_200 + 2_400) * 1 // 2,  # 16 GPUs of a stage, and 8 different parts of experts
    }


def test_recomputed_layers_communicate_a_third_time():
    sent = {axis: round(flow.gigabytes * 1e9) for axis, flow in flows("training.recompute=layers").items()}
    assert sent["tensor"] == (5 * (7 * STREAM + 6 * SUMMED) + 3 * STREAM) * BATCHES // 2
    assert sent["expert"] == 5 * 6 * HERE * (D * BF16 + FP32) * BATCHES * 3 // 4
    assert sent["pipeline"] == round(flows()["pipeline"].gigabytes * 1e9)


def test_cut_sequences_gather_states_and_convolution_inputs():
    cut = ["parallel.tensor=1", "parallel.expert_tensor=1", "parallel.context=4", "training.recompute=layers"]
    sent = {axis: round(flow.gigabytes * 1e9) for axis, flow in flows(*cut).items()}
    batches, I, N = 1008 // (48 // (3 * 4)), 2304, 16
    forward, backward = I * (3 * BF16 + 2 * N * FP32), I * (3 * BF16 + N * FP32)  # of each of 5 layers, to 3 ranks
    assert sent["context"] == 5 * 3 * (2 * forward + backward) * batches
    assert sent["data"] == (800 + 1_600) * 15 // 16  # 4 groups with other sequences, 4 parts of each
    assert sent["expert_data"] == (1_200 + 2_400) * 3 // 4
    assert sent["expert"] == round(flows(*cut, "parallel.context=1")["expert"].gigabytes * 1e9)  # more steps of less


def test_cut_sequences_gather_keys_and_values():
    cut = ["parallel.tensor=1", "parallel.expert_tensor=1", "parallel.context=4", f"model.pattern={'*E' * 15}"]
    sent = round(flows(*cut, "model.attention.heads=12", "model.attention.kv_heads=4")["context"].gigabytes * 1e9)
    batches, channels = 1008 // (48 // (3 * 4)), 4 * 1152 // 12
    assert sent == 5 * 2 * 2 * channels * BF16 * TOKENS * 3 // 4 * batches  # there, and the sums of gradients back


def test_cut_sequences_of_mamba2_gather_states():
    cut = ["parallel.tensor=1", "parallel.expert_tensor=1", "parallel.context=4", f"model.pattern={'SE' * 15}"]
    sent = round(flows(*cut)["context"].gigabytes * 1e9)
    batches, I, N, H = 1008 // (48 // (3 * 4)), 2304, 128, 36
    window_and_state = 3 * (I + 2 * N) * BF16 + I * N * FP32
    assert sent == 5 * 3 * (2 * window_and_state + H * FP32) * batches


def test_plain_optimizer_all_reduces_its_gradients():
    plain = flows("optimizer.distributed=false", "training.precision=fp32")
    assert plain["data"].gigabytes * 1e9 == pytest.approx(2 * 1_600 * 7 / 8)
    assert plain["expert_data"].gigabytes * 1e9 == pytest.approx(2 * 2_400 / 2)


def test_axes_of_one_rank_send_nothing():
    one = ["parallel.tensor=1", "parallel.expert_tensor=1", "parallel.expert=1", "parallel.pipeline=1"]
    alone = flows(*one, world_size=16, state=memory.State(weights=2_000, gradients=4_000, optimizer=0))
    assert set(alone) == {"data"}
    assert set(flows(state=None)) == {"tensor", "expert", "expert_tensor", "pipeline"}


def test_time_follows_the_slowest_link_of_an_axis():
    links = {axis: (flow.link, flow.ranks) for axis, flow in flows().items()}
    assert links == {
        "tensor": ("nvlink", 2),
        "expert": ("nvlink", 4),
        "expert_tensor": ("nvlink", 2),
        "pipeline": ("network", 3),
        "data": ("network", 8),
        "expert_data": ("network", 2),
    }
    assert flows(gpus_per_node=4)["expert"].link == "network"  # 4 ranks that are 2 apart
    for axis, flow in flows().items():
        speed = H100.nvlink_gb_s if flow.link == "nvlink" else H100.network_gb_s
        cards = 4 if axis == "data" else 1  # of 8 GPUs of a node, 4 are of one group, and its ring uses all their cards
        assert flow.seconds == pytest.approx(flow.gigabytes / (cards * speed))


def test_each_expert_gradient_crosses_on_one_card():
    """By hand: 184.4 M dense and 159.25 M expert weights of a GPU, 2 + 4 bytes each, over 7 nodes."""
    config = load("blackmamba_1.5b")
    with world.fake(config.parallel, 56, 0) as us:
        assert dist.get_process_group_ranks(us.groups.expt_dp) == [0, 8, 16, 24, 32, 40, 48]
    sent = traffic.flows(config, 56, 8, H100, memory.state_of(config, 56, 0))
    dense, expert = sent["data"], sent["expert_data"]
    assert (dense.gigabytes, expert.gigabytes) == pytest.approx((1.087, 0.819), abs=0.002)
    assert dense.seconds == pytest.approx(1.087 / 400, rel=0.002)  # 8 cards of a node carry each ring
    assert expert.seconds == pytest.approx(0.819 / 50, rel=0.002)  # a GPU's own card carries it
    assert (expert.link, expert.ranks) == ("network", 7)


def test_all_to_all_sends_only_part_over_network():
    wide = flows(gpus_per_node=4)["expert"]  # 4 ranks, 2 apart: 2 in each node
    assert wide.seconds == pytest.approx(wide.gigabytes / H100.network_gb_s * 2 / 3)
    slow_inside = H100.model_copy(update={"nvlink_gb_s": 10.0})
    inside = flows(gpus_per_node=4, gpu=slow_inside)["expert"]
    assert inside.seconds == pytest.approx(inside.gigabytes / 10.0 * 1 / 3)


def test_collectives_are_counted_by_layer_and_pass():
    calls = {axis: round(flow.calls) for axis, flow in flows().items()}
    layers, passes = 5, 2  # of each kind on a stage of three
    assert calls["expert"] == calls["expert_tensor"] == layers * passes * 2 * BATCHES
    assert calls["tensor"] == (layers * passes * 2 + 3) * BATCHES  # and the head
    assert calls["pipeline"] == 2 * BATCHES
    assert calls["data"] == 0


def test_tokens_go_to_each_of_their_experts():
    plain, twice = flows(), flows("model.top_k=2")
    for axis, times in {"expert": 2, "expert_tensor": 2, "tensor": 1}.items():
        assert twice[axis].gigabytes == pytest.approx(times * plain[axis].gigabytes)


def test_latent_experts_exchange_their_width_alone():
    plain, latent = flows(), flows(f"model.latent_size={D // 4}")
    weights = plain["expert"].gigabytes * FP32 / (D * BF16 + FP32)
    assert latent["expert"].gigabytes == pytest.approx((plain["expert"].gigabytes - weights) / 4 + weights)
    assert latent["expert_tensor"].gigabytes == pytest.approx(plain["expert_tensor"].gigabytes / 4)
    assert latent["tensor"].gigabytes == plain["tensor"].gigabytes


def test_shared_experts_and_expert_choice_add_tensor_traffic():
    plain = flows()["tensor"].gigabytes
    shared = flows("model.shared_expert_hidden_size=1024")["tensor"].gigabytes
    assert round((shared - plain) * 1e9) == 5 * 5 * STREAM * BATCHES // 2  # as a dense MLP in each of 5 layers
    chosen = flows("model.router.kind=expert_choice")["tensor"].gigabytes
    assert round((chosen - plain) * 1e9) == 5 * TOKENS * 8 * FP32 * BATCHES // 2  # all scores, gathered once
