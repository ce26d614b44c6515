"""The decisions of the GPU step benchmark that can be tested without a GPU."""

import json
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from benchmarks import _common, experts, mixture_scale
from benchmarks._parts import REST, Breakdown, part_of
from benchmarks.cleaning_scale import FILES, LONGEST, write_corpus
from benchmarks.gpu_step import most_sequences
from megatron_blackmamba import model
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.formats.shards import Shard
from megatron_blackmamba.ops import matvec
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


class Profile:
    """Events as the profiler gives them: operations, launches and kernels, one after another."""

    def __init__(self):
        self.events = []

    def add(self, name, took, parent=None, device_type=DeviceType.CPU, **fields):
        number = len(self.events) + 1
        defaults = {"id": number, "sequence_nr": -1, "scope": 0, "activity_type": "cpu_op", "linked_correlation_id": 0}
        times = SimpleNamespace(start=number, end=number + took, elapsed_us=lambda: took)
        flags = {"is_async": False, "is_user_annotation": False}
        everything = defaults | flags | fields
        self.events.append(
            SimpleNamespace(name=name, cpu_parent=parent, device_type=device_type, time_range=times, **everything)
        )
        return self.events[-1]

    def operation(self, name, parent=None, sequence=-1, scope=0, lasts=100):
        return self.add(name, lasts, parent, sequence_nr=sequence, scope=scope)

    def kernel(self, name, took, operation=None):
        """Launch a kernel; without an operation nothing but the time tells where."""
        launch = self.add("cuLaunchKernelEx", 1, activity_type="cuda_driver", id=1000 + len(self.events))
        linked = operation.id if operation else 0
        self.add(
            name, took, device_type=DeviceType.CUDA, activity_type="kernel", id=launch.id, linked_correlation_id=linked
        )


def test_backward_kernels_count_for_their_part():
    made = Profile()
    rest = made.operation(f"part: {REST}")
    router = made.operation("part: router", rest)
    made.kernel("gemm", 1000, made.operation("aten::mm", router, sequence=7))
    mamba = made.operation("part: Mamba", rest)
    made.kernel("forward", 3000, made.operation("_Scan", mamba, sequence=8))
    engine = made.operation("autograd::engine::evaluate_function: MmBackward0", rest, sequence=7)
    backward = made.operation("MmBackward0", engine, sequence=7, scope=1)
    made.kernel("gemm", 2000, made.operation("aten::mm", backward))
    scan_back = made.operation("_ScanBackward", rest, sequence=8, scope=1)
    made.kernel("reduce", 500, made.operation("aten::sum", scan_back))
    accumulate = made.operation("torch::autograd::AccumulateGrad", rest, scope=1)
    made.kernel("add", 250, made.operation("aten::add_", accumulate))
    made.kernel("adam", 750, made.operation("aten::_fused_adamw_", made.operation("part: optimizer")))

    found = Breakdown(made.events, 1, 10.0, on_gpu=True)
    assert {part: ms for part, (ms, _) in found.parts.items()} == {
        "router": 3.0,
        "selective scan": 3.5,
        "adding up gradients": 0.25,
        "optimizer": 0.75,
    }
    assert found.parts["router"][1] == 3.0  # all of it matrix products
    assert found.rows()[-1]["ms"] == 2.5  # of 10, nothing ran
    assert [kernel["kernel"] for kernel in found.kernels][:2] == ["gemm", "forward"]


def test_kernels_outside_operations_belong_to_their_part():
    made = Profile()
    rest = made.operation(f"part: {REST}", lasts=8)
    router = made.operation("part: router", rest, lasts=5)
    made.operation("aten::empty", router, lasts=1)  # over before the launch
    made.kernel("_find_offsets", 1000)
    made.add("part: router", 5000, device_type=DeviceType.CUDA, is_user_annotation=True, activity_type="")
    made.operation("part: optimizer", lasts=9)
    made.kernel("adam_update", 2000)
    found = Breakdown(made.events, 1, 10.0, on_gpu=True)
    assert {part: ms for part, (ms, _) in found.parts.items()} == {"router": 1.0, "optimizer": 2.0}
    assert found.rows()[-1]["ms"] == 7.0
    assert [kernel["kernel"] for kernel in found.kernels] == ["adam_update", "_find_offsets"]


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


def test_little_text_is_varied_to_the_size(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.py").write_text("x = 1  # a line\n" * 3000)
    (tmp_path / "in/b.bin").write_text("not text\n" * 100)
    corpus = write_corpus([tmp_path / "in"], tmp_path / "out", 100_000)
    files = sorted((tmp_path / "out").iterdir())
    texts = [json.loads(line)["text"] for file in files for line in file.open()]
    assert len(files) == FILES and len(texts) == corpus["documents"]
    assert sum(map(len, texts)) >= 100_000 and max(map(len, texts[:3])) <= LONGEST
    assert "".join(texts[:3]) == "x = 1  # a line\n" * 3000 and len(set(texts)) > 3
    assert not any("not text" in text for text in texts)


def test_measuring_begins_once_process_has_all_its_memory(monkeypatch):
    made = []
    peaks = [100, 180, 200, 200, 200]  # the second round still finds no place for one call: it is not the one to time
    monkeypatch.setattr(_common, "_peak_of_memory", lambda: peaks[len(made) // 2])
    _common.settle([lambda: made.append("short"), lambda: made.append("long")])
    assert made == ["short", "long"] * 3


def test_growing_process_is_measured_after_a_limit(monkeypatch):
    made = []
    monkeypatch.setattr(_common, "_peak_of_memory", lambda: 2 ** len(made))
    _common.settle([lambda: made.append("call")], rounds=4)
    assert len(made) == 4


@pytest.fixture
def asked_anew():
    """Ask about the processor's instructions anew, whatever an earlier test was answered; later tests do so too."""
    matvec.bf16_products.cache_clear()
    yield
    matvec.bf16_products.cache_clear()


def test_bf16_is_left_out_without_instructions(asked_anew, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert experts.dtypes("cpu") == ["float32"]
    assert experts.dtypes("cuda") == ["float32", "bfloat16"]
    monkeypatch.setattr(experts, "bf16_products", lambda: True)
    assert experts.dtypes("cpu") == ["float32", "bfloat16"]


# The files that benchmarks.mixture_scale reads.


def test_cold_shard_holds_ids_of_its_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture_scale, "COLD_TOKENS", 10**5)
    mixture_scale.write_cold(tmp_path)
    shard = Shard.open(tmp_path / "a/shard_00001")
    ids = shard.document(shard.manifest.documents - 1)
    assert 0 < ids.max() < mixture_scale.VOCABULARY
