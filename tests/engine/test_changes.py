import importlib.metadata
import re

import pytest
import torch

from megatron_blackmamba.engine import changes, checked
from tests.runtime.ranks import run_script

pytestmark = pytest.mark.xdist_group("patches")  # its processes start once, not once a worker

NO_CUDA = "Torch not compiled with CUDA enabled|requires CUDA|No CUDA GPUs|NVIDIA driver|re-initialize CUDA|CUDA driver"
WHAT_BREAKS = {
    "jit": "torch.compile was asked to compile",
    "tracer": "torch._dynamo was imported",
    "current-device": NO_CUDA,
    "synchronize": NO_CUDA,
    "streams": NO_CUDA,
    "device-literals": NO_CUDA,
    "loaded-shards": NO_CUDA,
    "tensor-cuda": NO_CUDA,
    "tensor-type": "Wrapped parameters must be one of torch.cuda.FloatTensor",
    "rng": NO_CUDA,
    "split-sizes": r"all_to_all_single\(\): incompatible function arguments",
    "uneven-parts": "invalid tensor size",
    "router-gemm": "te_general_gemm",
    "adam": "AssertionError",
    "clipping": "2 numbers read",
    "one-type": "a gradient norm of",
    "float64": "assign a gradient with dtype 'float'|rounded to fp32",
    "checkpoint-folder": "NotADirectoryError|FileExistsError",
    "stored-strides": "unexpected keyword argument 'strides'",
}
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA needs none of these changes")


@pytest.fixture(scope="module")
def probe():
    return run_script("tests.engine.change_probe")


def errors(ranks):
    return [rank["error"] for rank in ranks if "error" in rank]


@without_cuda
def test_all_together_train_save_and_resume(probe):
    assert [error for ranks in probe["complete"].values() for error in errors(ranks)] == []
    one, stages, experts = (
        [rank["answer"]["losses"] for rank in probe["complete"][name] if rank["answer"]["losses"]]
        for name in ("adam", "tensor-cuda", "streams")
    )
    assert one[0][1] < one[0][0]
    assert stages[0] == pytest.approx(one[0], abs=1e-2)  # fp32: a token may change experts
    assert experts[0] == pytest.approx(one[0], abs=1e-2)


@without_cuda
def test_clipping_gives_the_norm_and_scales_by_it(probe):
    (rank,) = probe["complete"]["clipping"]
    assert rank["answer"]["norm"] == 4.0
    assert rank["answer"]["clipped"] == pytest.approx([0.5, 0.5], rel=1e-6)


@without_cuda
@pytest.mark.parametrize("name", WHAT_BREAKS)
def test_every_change_on_import_is_necessary(probe, name):
    if name not in probe["needed"]:
        pytest.skip(f"this megatron-core does not need the change {name!r}")
    broken = errors(probe["without"][name])
    assert broken, f"without {name!r} everything still works: is the change needed?"
    assert re.search(WHAT_BREAKS[name], broken[0]), broken[0]


def test_every_change_on_import_is_tried():
    assert [change.name for change in changes.CHANGES if change.when == changes.IMPORT] == list(WHAT_BREAKS)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"fusion.*current-device"):
        changes.install(frozenset({"fusion"}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_changes_for_missing_libraries_leave_torch_on_cuda():
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "synchronize", "Stream", "Event")}
    tensor = torch.Tensor.cuda, torch.Tensor.type
    everywhere = {"one-type", "checkpoint-folder", "stored-strides"}
    assert set(changes.install()) <= {"router-gemm", "adam", "clipping"} | everywhere
    assert before == {name: getattr(torch.cuda, name) for name in before}
    assert (torch.Tensor.cuda, torch.Tensor.type) == tensor


def test_missing_private_name_is_refused_with_the_version():
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    version = re.escape(importlib.metadata.version("megatron-core"))
    writer = filesystem_async.FileSystemWriterAsync
    for attempt in (
        lambda: checked.replace(filesystem_async, "_gone", None),
        lambda: checked.private(filesystem_async, "_gone"),
        lambda: checked.require(filesystem_async, "_results_queue", "_gone"),
    ):
        with pytest.raises(
            checked.EngineError, match=rf"megatron-core {version} has no _gone in megatron\.core\.dist_"
        ):
            attempt()
    for owner in (writer, writer.__new__(writer)):
        with pytest.raises(checked.EngineError, match=r"filesystem_async\.FileSystemWriterAsync"):
            checked.replace(owner, "_gone", None)
    assert not hasattr(filesystem_async, "_gone") and not hasattr(writer, "_gone")
