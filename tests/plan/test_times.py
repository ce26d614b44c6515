"""The time of a step at best, against figures worked out by hand."""

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.layers import Work, kind_of
from megatron_blackmamba.plan import estimate, gpus, memory, roofline, scaling, times
from megatron_blackmamba.plan.activations import sizes_of
from megatron_blackmamba.plan.goodput import goodput
from megatron_blackmamba.plan.traffic import Flow

GPU = gpus.Gpu(
    name="round", memory_gib=80, bf16_tflops=100, fp32_tflops=10, nvlink_gb_s=100, network_gb_s=10,
    memory_gb_s=1000, product_share=0.5, issue_t_s=10,
)  # fmt: skip
STATE = memory.State(weights=2 * 10**9, gradients=4 * 10**9, optimizer=12 * 10**9)


def of_step(*overrides, flows=None, ranks=1, state=STATE, run="blackmamba_1.5b"):
    return times.of_step(load(run, list(overrides)), ranks, GPU, flows or {}, state)


def flow(seconds, calls=0.0):
    return Flow(1.0, "nvlink", 2, seconds, calls)


def test_an_operation_takes_its_slowest_resource():
    assert roofline.seconds(Work(moved=2e12), GPU) == pytest.approx(2.0)
    assert roofline.seconds(Work(flops=1e14), GPU) == pytest.approx(2.0)  # at half of the peak
    assert roofline.seconds(Work(flops=1e13), GPU, "fp32") == pytest.approx(2.0)
    slow = GPU.model_copy(update={"fp8_tflops": 200, "fp8_share": 0.1})
    assert roofline.seconds(Work(flops=1e14), slow, "fp8") == pytest.approx(5.0)
    assert roofline.seconds(Work(flops=1e14), slow.model_copy(update={"fp8_share": None}), "fp8") == pytest.approx(1.0)
    assert roofline.seconds(Work(moved=1e12, slots=3e13), GPU) == pytest.approx(3.0)
    assert roofline.seconds(Work(launches=1000), GPU) == pytest.approx(2.5e-3)


SCANS = {  # issue slots per state and token of each kernel, and bytes per channel and token of the first
    # 18 blocks a sequence on 132 processors: six blocks, three, one; a pair of blocks shares its slots
    "full": (["training.micro_batch=42"], [6 / 5.727 * 12.6, 6 / 5.727 * 34.5], 5 * 2 + 2 * 16 / 4),
    "half full": (["training.micro_batch=18"], [3 / 2.4545 * 12.6, (2 * 34.5 + 46.4) / 2.4545], 5 * 2 + 2 * 16 / 4),
    "one block": (["training.micro_batch=6"], [17 / 0.8182, 46.4 / 0.8182], 5 * 2 + 2 * 16 / 4),
    "in segments": (["training.micro_batch=1"], [12.6, 13, 34.5, 16], 5 * 2 + 2 * 16 / 4),
    "in fp32": (["training.micro_batch=18", "training.precision=fp32"], [25, 65, 16], 5 * 4 + 4 * 16 / 4),
    "recomputed": (["training.micro_batch=8", "kernels.scan_states=recompute"], [25, 13, 68, 32], 4 * 2 + 4 * 16 / 64),
}


@pytest.mark.parametrize("case", SCANS)
def test_scan_of_a_mamba_layer_by_hand(case):
    overrides, slots, moved = SCANS[case]
    config = load("blackmamba_1.5b", overrides)
    forward, backward = kind_of("M").costs.work(sizes_of(config, "cuda"))
    cells, N = config.training.micro_batch * 2048 * 2304, 16
    scans = [work for work in forward + backward if work.slots]
    assert [work.slots for work in scans] == pytest.approx([each * N * cells for each in slots], rel=1e-3)
    assert scans[0].moved == pytest.approx(moved * cells)


@pytest.mark.parametrize(("ssd", "kernels"), [("auto", 6), ("triton", 6), ("chunked", 0)])
def test_plan_of_mamba2_knows_backend_of_its_scan(ssd, kernels):
    """Two kernels forward and four backward, by hand: 36 heads of 64 channels, 128 states, six sequences."""
    config = load("blackmamba2_1.5b", [f"kernels.ssd={ssd}", "training.micro_batch=6"])
    costs, sizes = kind_of("S").costs, sizes_of(config, "cuda")
    scans = [work for way in costs.work(sizes) for work in way if work.slots]
    assert len(scans) == kernels
    if kernels:
        tokens, x, state = 6 * 2048, 2 * 2304, 2 * 2304 * 128 / 64  # bytes of a token
        assert [work.moved / tokens for work in scans] == [
            *(x + state, 2 * x + state),
            *(x + state, x + state, 3 * x + 2 * state, 4 * x + 2 * state),
        ]
        assert sum(work.slots for work in scans) == pytest.approx((0.31 * 3 + 0.50 + 1.57 + 0.97) * tokens * 2304 * 128)


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_plan_of_delta_rule_knows_its_backend(variant):
    """Six kernels forward; backward the first five again, six for gradients, and sums of parts."""
    works = {}
    for backend in ("auto", "chunked", "triton"):
        overrides = ["model.pattern=GE", f"model.delta.variant={variant}", f"kernels.delta={backend}"]
        works[backend] = kind_of("G").costs.work(sizes_of(load("blackmamba_1.5b", overrides), "cuda"))
    assert works["auto"] == works["chunked"]
    assert [sum(work.slots > 0 for work in way) for way in works["triton"]] == [6, 11]
    moved = {name: sum(work.moved for way in ways for work in way) for name, ways in works.items()}
    assert moved["triton"] < 0.7 * moved["chunked"]


@pytest.mark.parametrize("letter", ["M", "E"])
def test_products_of_layer_are_those_of_its_flops(letter):
    config = load("blackmamba_1.5b", ["model.shared_expert_hidden_size=512"])
    forward, backward = kind_of(letter).costs.work(sizes_of(config, "cuda"))
    parts = kind_of(letter).costs.flops(config.model, 2048)
    products = sum(count for part, count in parts.items() if part not in ("scan", "convolution"))
    assert sum(work.flops for work in forward) == products * 18 * 2048
    assert sum(work.flops for work in backward) == 2 * products * 18 * 2048


def test_stages_wait_at_both_ends_of_the_pipeline():
    step = of_step("parallel.pipeline=3", "training.micro_batch=18", ranks=24, state=None)
    batches = 1008 // (8 * 18)
    assert step.idle == pytest.approx(2 * step.computing / batches)
    whole = of_step("training.micro_batch=18", ranks=8, state=None)
    assert whole.idle == 0
    assert step.computing > whole.computing / 3 * 1008 / 1008  # the stage with the head is the slowest


def test_recomputed_layers_run_forward_twice():
    config = load("blackmamba_1.5b")
    plain, again = (
        times.of_stages(
            config.model_copy(update={"training": config.training.model_copy(update={"recompute": how})}), GPU
        )[0]
        for how in ("none", "layers")
    )
    assert again.forward == plain.forward
    assert plain.backward < again.backward < plain.backward + plain.forward


def test_exchanges_of_layers_are_waited_for():
    step = of_step(flows={"expert": flow(2.0, calls=100), "tensor": flow(1.0)})
    assert step.waiting == pytest.approx({"expert": 2.0 + 100 * 20e-6, "tensor": 1.0})
    assert step.total == pytest.approx(step.computing + step.update + sum(step.waiting.values()))


def test_data_exchange_hides_behind_one_micro_batch():
    batch = times.of_stages(load("blackmamba_1.5b"), GPU)[0]
    short = of_step(flows={"data": flow(batch.forward / 2)})
    assert short.waiting == {}
    long = 9 * batch.backward  # two thirds reduce gradients, one third gathers weights
    exposed = of_step(flows={"data": flow(long)}).waiting["data"]
    assert exposed == pytest.approx(long - batch.backward - batch.forward)
    assert of_step("training.overlap=false", flows={"data": flow(long)}).waiting["data"] == long


def test_dense_and_expert_exchange_share_what_is_hidden():
    batch = times.of_stages(load("blackmamba_1.5b"), GPU)[0]
    both = {"data": flow(3 * batch.backward), "expert_data": flow(6 * batch.backward)}
    waiting = of_step(flows=both).waiting
    assert sum(waiting.values()) == pytest.approx(9 * batch.backward - batch.backward - batch.forward)
    assert waiting["expert_data"] == pytest.approx(2 * waiting["data"])


def test_update_moves_gradients_and_state():
    numbers = STATE.optimizer / 12
    assert of_step().update == pytest.approx((24 + 2.5 * 4) * numbers / 1e12)  # AdamW clips and casts
    whole = ["optimizer.kind=sgd", "optimizer.distributed=false", "training.precision=fp32"]
    assert of_step(*whole).update == pytest.approx((24 + 5 * 12) * numbers / 1e12)


def test_first_micro_batch_is_copied_and_others_added():
    config = load("blackmamba_1.5b", ["training.micro_batch=6", "training.global_batch=18"])
    seconds = times.of_micro_batches(config, 1, times.MicroBatch(1.0, 2.0), GPU, STATE)
    assert seconds == pytest.approx(3 * 3.0 + (1.5 + 2.5 + 2.5) * STATE.gradients / 1e12)


def test_mfu_counts_useful_flops_of_all_gpus():
    config = load("blackmamba_1.5b")
    step = times.StepTime(computing=1.5, idle=0.25, update=0.25, waiting={})
    assert step.mfu(config, 56, GPU) == pytest.approx(2_064_384 * 2.070033408e9 / (56 * 100e12 * 2.0))
    assert step.described() == "computing 1500 ms, idle stages 250 ms, update 250 ms"


def test_goodput_by_hand():
    lost = goodput(interval=600.0, nodes=10, failures=0.3, restart_minutes=5)
    assert lost.seconds_between_failures == 10 * 86400  # three a month
    assert lost.lost_per_failure == 300 + 300
    assert lost.share == pytest.approx(864_000 / 864_600)


@pytest.mark.parametrize("every", [0, 10**6])
def test_failure_without_a_checkpoint_costs_half_the_run(every):
    config = load("blackmamba_1.5b", [f"checkpoint.every={every}"])
    placed = estimate.make_plan(config, estimate.Asked(7, 8, GPU)).placed
    assert placed.goodput.lost_per_failure == pytest.approx(placed.seconds / 2 + 600)


def test_scaling_leaves_out_what_does_not_fit():
    config = load("blackmamba_2.8b", ["parallel.expert=1", "training.micro_batch=2"])
    gpu = gpus.find("a100-40gb")
    assert [row.nodes for row in scaling.strong(config, (1, 2, 3), 2, gpu)] == [2, 3]
    assert [row.nodes for row in scaling.weak(config, 6, 2, gpu)] == [2, 4, 8, 16, 32]


def test_weak_scaling_of_a_ramp_has_every_row():
    config = load("blackmamba_1.5b", ["training.global_batch=2016", "training.batch_ramp=[{batch: 1008, until: 10B}]"])
    assert [row.nodes for row in scaling.weak(config, 7, 8, GPU)] == [1, 2, 4, 8, 16, 32]


def test_scaling_compares_with_the_fewest_nodes():
    config = load("blackmamba_1.5b")
    strong = scaling.strong(config, (1, 3, 7), 8, GPU)
    assert [row.nodes for row in strong] == [1, 3, 7]
    for row in strong:
        assert row.tokens_per_second == pytest.approx(2_064_384 / row.seconds_per_step)
        assert row.efficiency == pytest.approx(strong[0].seconds_per_step / row.nodes / row.seconds_per_step)
    weak = scaling.weak(config, 7, 8, GPU)
    assert [(row.nodes, row.global_batch) for row in weak[:3]] == [(1, 144), (2, 288), (4, 576)]
    assert weak[1].efficiency == pytest.approx(weak[0].seconds_per_step / weak[1].seconds_per_step)


def test_a_plan_of_one_gpu_waits_for_nobody():
    config = load("blackmamba_1.5b", ["parallel.expert=1", "training.global_batch=18"])
    placed = estimate.make_plan(config, estimate.Asked(1, 1, GPU)).placed
    assert placed.time.waiting == {} and placed.time.idle == 0
