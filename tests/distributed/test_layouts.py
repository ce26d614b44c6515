"""The same run under every kind of parallelism: one model, one loss curve, whatever the layout."""

import pickle

import pytest

from tests.distributed.layouts_probe import RUNS
from tests.runtime.ranks import run_script

pytestmark = pytest.mark.xdist_group("layouts")

EXACT = [name for name in RUNS if not name.endswith("solo") and not name.startswith("bf16")]
ROUNDED = [name for name in RUNS if name.startswith("bf16") and not name.endswith("solo")]


def alone(name: str) -> str:
    """The run of one process that a layout is compared with."""
    family = next((f for f in ("bf16", "transformer_moe", "transformer") if name.startswith(f)), "")
    return f"{family}_solo".lstrip("_")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    errors = run_script("tests.distributed.layouts_probe", str(folder), timeout=580)
    assert errors == {}
    return {name: pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in RUNS}


def furthest(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", EXACT)
def test_fifty_steps_follow_the_losses_and_gradient_norms_of_one_process(runs, name):
    assert furthest(runs[name]["losses"], runs[alone(name)]["losses"]) < 1e-5
    assert furthest(runs[name]["norms"], runs[alone(name)]["norms"]) < 1e-4


@pytest.mark.parametrize("name", ROUNDED)
def test_in_bf16_the_losses_stay_close(runs, name):
    assert furthest(runs[name]["losses"], runs[alone(name)]["losses"]) < 2e-2


@pytest.mark.parametrize("name", EXACT)
def test_every_token_of_the_first_step_goes_to_the_same_expert(runs, name):
    assert runs[name]["choices"] == runs[alone(name)]["choices"]
    assert runs[name]["expert_tokens"][0] == runs[alone(name)]["expert_tokens"][0]


@pytest.mark.parametrize("name", list(RUNS))
def test_ranks_that_hold_the_same_shard_hold_the_same_bits(runs, name):
    for moment in ("initial", "final"):
        seen: dict = {}
        for shards_of_rank in runs[name][moment]:
            for shard, digest in shards_of_rank.items():
                assert seen.setdefault(shard, digest) == digest, f"{moment}: replicas of {shard} differ"


def test_training_learns_and_uses_every_expert(runs):
    assert runs["solo"]["losses"][-1] < runs["solo"]["losses"][0] - 2
    tokens = 8 * 32
    for layer in (1, 3):
        counts = runs["solo"]["expert_tokens"][0][layer]
        assert sum(counts) == tokens
        assert min(counts) > 0
    assert runs["solo"]["expert_tokens"][0][0] == [0] * 8  # a Mamba layer has no experts


def test_weights_really_moved(runs):
    initial, final = runs["solo"]["initial"][0], runs["solo"]["final"][0]
    assert initial.keys() == final.keys()
    assert all(initial[shard] != final[shard] for shard in initial)
