"""A small real model and optimizer in this process, to save and load in milliseconds."""

import gc
import shutil

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime import world

SMALL = [
    *("model.pattern=ME", "model.hidden_size=32", "model.expert_hidden_size=32", "model.experts=2"),
    *("model.vocab_size=64", "name=run"),
]
STATE = {"progress": {"step": 7}, "guard": {}, "data": {}}


@pytest.fixture(scope="module")
def place():
    """A world of this process alone."""
    torch.set_num_threads(1)
    yield world.start(load("tiny").parallel)
    world.shutdown()
    gc.unfreeze()


@pytest.fixture(scope="module")
def trainable(place):
    from megatron_blackmamba.training.step.optimizer import make_trainable

    config = load("tiny", SMALL)
    made = make_trainable(config, model.build(config, place), place)
    made.optimizer.step()
    gc.freeze()  # as the training loop does; megatron-core collects garbage in every save
    return made


@pytest.fixture
def checkpoints(place, trainable, tmp_path):
    """Make the Checkpoints of a run in `tmp_path`, with overrides; what it says is appended to `.said`."""
    from megatron_blackmamba.checkpoint import Checkpoints

    def make(*overrides, folder=tmp_path):
        config = load("tiny", [*SMALL, f"folder={folder}", *overrides])
        said = []
        parts = config, place, trainable.model, trainable.optimizer
        made = Checkpoints(RunFolder(folder / "run"), *parts, lambda event: said.append(event.sentence))
        made.said = said
        return made

    return make


@pytest.fixture(scope="module")
def saved(place, trainable, tmp_path_factory):
    """A whole checkpoint of step 7."""
    from megatron_blackmamba.checkpoint import Checkpoints

    folder = tmp_path_factory.mktemp("saved")
    config = load("tiny", [*SMALL, f"folder={folder}"])
    run = RunFolder(folder / "run")
    made = Checkpoints(run, config, place, trainable.model, trainable.optimizer)
    made.save(7, {"config": config.model_dump(mode="json", by_alias=True), **STATE})
    assert made.finish(wait=True) == [7]
    return run


@pytest.fixture
def run(saved, tmp_path):
    """A copy of the run with the checkpoint of step 7."""
    shutil.copytree(saved.root, tmp_path / "run")
    return RunFolder(tmp_path / "run")
