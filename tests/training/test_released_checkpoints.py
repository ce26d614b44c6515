"""Runs that a released version saved go on under this one: the same weights, the same config, the same losses.

`tests/checkpoint/released` has one checkpoint per release, of a small run after step 5. A JSON file has the release's
own results: a digest of each weight, and the losses of the next steps. `tests.checkpoint.release` writes both.
"""

import json
import tarfile

import pytest

from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.config import load
from tests.checkpoint.release import RELEASED, digests
from tests.training.runs import log, losses

pytestmark = pytest.mark.xdist_group("forks")
VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in RELEASED.glob("*.tar.xz"))


@pytest.fixture
def checkpoint(request, tmp_path):
    """The folder of a release's checkpoint, inside a run of its own."""
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    with tarfile.open(RELEASED / f"{request.param}.tar.xz") as archive:
        archive.extractall(folder)
    return folder / "step_00000005"


@pytest.fixture
def found(checkpoint, request):
    return json.loads((RELEASED / f"{request.node.callspec.params['checkpoint']}.json").read_text())


@pytest.mark.parametrize("checkpoint", VERSIONS, indirect=True)
def test_a_released_checkpoint_has_its_weights_and_config(checkpoint, found):
    reader = CheckpointReader(checkpoint)
    reader.verify()
    assert digests(checkpoint) == found["weights"]
    assert reader.config == load(checkpoint / "config.yaml")
    assert reader.config.model.pattern == "ME" and reader.config.optimizer.weight_decay == 0.1


@pytest.mark.parametrize("checkpoint", VERSIONS, indirect=True)
def test_released_run_resumes_with_equal_losses(forks, checkpoint, found, tmp_path):
    job = forks.run(tmp_path, ranks=1, config=str(checkpoint / "config.yaml"))
    assert job.wait() == [0], job.output()
    assert "resumes after step 5" in log(tmp_path)
    assert losses(tmp_path) == pytest.approx(found["losses_after"], abs=1e-4)
