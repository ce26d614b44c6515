"""Checkpoints do not care which layout wrote them: weights, optimizer and position go on under any other."""

import pytest
import torch

from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange import convert, hf, megatron
from tests.distributed.resharding_probe import STEPS_EACH, legs
from tests.runtime.ranks import fork_script
from tests.thorough import selected, thorough

pytestmark = pytest.mark.xdist_group("resharding")


CLOSENESS = {"fp64": 1e-10, "bf16": 2e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resharding")


@pytest.fixture(scope="module")
def runs(request, folder):
    precisions = {*selected(request, "precision"), *(["bf16"] if selected(request, "leg") else [])}
    return fork_script("tests.distributed.resharding_probe", str(folder), *precisions)


@pytest.mark.parametrize("precision", ["fp64", pytest.param("bf16", marks=thorough)])
def test_resharded_run_matches_undisturbed_run(runs, precision):
    seen = runs[precision]
    assert seen["errors"] == []
    assert len(seen["carried"]) == len(seen["alone"]) == STEPS_EACH * len(legs(precision)) >= 10
    assert seen["alone"][-1] < seen["alone"][0] - 0.3
    alone, carried = seen["validation"]
    assert len(alone) == len(legs(precision))
    for a, b in ((seen["alone"], seen["carried"]), (alone, carried)):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < CLOSENESS[precision]


@thorough
@pytest.mark.parametrize("leg", range(1, len(legs("bf16")) + 1))
def test_export_in_training_equals_that_of_checkpoint(runs, folder, tmp_path, leg):
    run = RunFolder(folder / "bf16" / "carried")
    assert runs["bf16"]["errors"] == []
    live, saved = run.export(leg * STEPS_EACH), tmp_path / "export"
    convert.to_hf(megatron.read(run.checkpoint(leg * STEPS_EACH)), saved, check="none")
    for (name, tensor), (other, copy) in zip(hf.read(live).tensors(), hf.read(saved).tensors(), strict=True):
        assert name == other and tensor.dtype == copy.dtype and torch.equal(tensor, copy), name
    assert rest(live) == rest(saved)
    weights = len(list(live.glob("*.safetensors")))
    assert weights == legs("bf16")[leg - 1][0] and (live / hf.INDEX).exists() == (weights > 1)


def rest(export):
    """All files but the weights."""
    return {path.name: path.read_bytes() for path in export.iterdir() if ".safetensors" not in path.name}
