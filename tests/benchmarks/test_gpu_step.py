"""The decisions of the GPU step benchmark that can be tested without a GPU."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from benchmarks._parts import REST, Breakdown, part_of
from benchmarks.gpu_step import most_sequences
from megatron_blackmamba import model
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.runtime import world

GIB = 2**30


def memory(states, a_sequence, limit):
    """The peak of a step that takes so much and a bit more than a line says; None past the limit."""

    def peak_bytes(sequences):
        needed = states + int(a_sequence * sequences**1.03)
        return needed if needed <= limit else None

    return peak_bytes


@pytest.mark.parametrize("a_sequence", [GIB // 4, GIB, 3 * GIB, 25 * GIB])
def test_finds_the_largest_batch_that_fits(a_sequence):
    peak_bytes = memory(26 * GIB, a_sequence, 79 * GIB)
    found = most_sequences(peak_bytes, 79 * GIB)
    best = max(n for n in range(1, 1000) if peak_bytes(n) is not None)
    assert peak_bytes(found) is not None
    assert best * 0.8 - 1 <= found <= best


def test_model_that_does_not_fit_is_an_error():
    with pytest.raises(SystemExit, match="not even one"):
        most_sequences(memory(80 * GIB, GIB, 79 * GIB), 79 * GIB)


def event(name, parent=None, sequence=-1, scope=0, kernels=()):
    ran = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
    return SimpleNamespace(
        name=name, cpu_parent=parent, sequence_nr=sequence, scope=scope, kernels=ran, device_type=DeviceType.CPU
    )


def test_backward_kernels_count_for_their_part():
    rest = event(f"part: {REST}")
    router = event("part: router", rest)
    forward = event("aten::mm", router, sequence=7, kernels=[("gemm", 1000)])
    scan = event("_Scan", event("part: Mamba", rest), sequence=8, kernels=[("forward", 3000)])
    engine = event("autograd::engine::evaluate_function: MmBackward0", rest, sequence=7)
    backward = event("aten::mm", event("MmBackward0", engine, sequence=7, scope=1), kernels=[("gemm", 2000)])
    scan_back = event("aten::sum", event("_ScanBackward", rest, sequence=8, scope=1), kernels=[("reduce", 500)])
    added = event("aten::add_", event("torch::autograd::AccumulateGrad", rest, scope=1), kernels=[("add", 250)])
    adam = event("aten::_fused_adamw_", event("part: optimizer"), kernels=[("adam", 750)])

    found = Breakdown([rest, router, forward, scan, engine, backward, scan_back, added, adam], 1, 10.0, on_gpu=True)
    assert {part: ms for part, (ms, _) in found.parts.items()} == {
        "router": 3.0,
        "selective scan": 3.5,
        "adding up gradients": 0.25,
        "optimizer": 0.75,
    }
    assert found.parts["router"][1] == 3.0  # all of it matrix products
    assert found.rows()[-1]["ms"] == 2.5  # of 10, nothing ran
    assert [kernel["kernel"] for kernel in found.kernels][:2] == ["gemm", "forward"]


def test_every_model_part_is_found_by_class():
    """A renamed class would leave its time to the others without a word."""
    with world.fake(ParallelConfig(), world_size=1) as place:
        modules = dict(model.build(load("tiny"), place).named_modules())
    found = {name: part for name, module in modules.items() if (part := part_of(name, module))}
    assert found["embedding"] == found["output_layer"] == "embedding, head"
    assert {found["decoder.layers.0.mixer"], found["decoder.layers.1.mixer"]} == {
        "Mamba, but scan and convolution",
        "dispatch",
    }
    assert set(found.values()) >= {"router", "experts", "norms"}
    assert not any(".mixer.in_proj" in name for name in found)
