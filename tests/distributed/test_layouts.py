"""The same run under every kind of parallelism: one model, one loss curve, whatever the layout.

The layouts are compared in float64. In fp32 a rounding difference may send a token to another expert, see `agreeing`.
"""

import pickle

import pytest

from tests.distributed.layouts_probe import ROUTERS, RUNS, steps_of
from tests.runtime.ranks import fork_script
from tests.thorough import selected, unless

pytestmark = pytest.mark.xdist_group("layouts")

LAYOUTS = [name for name in RUNS if not name.endswith("solo")]
EXACT = [name for name in LAYOUTS if not name.startswith(("bf16", "narrow", "fp8", "fp32"))]
EVERYDAY = (
    "dp2",
    "ep2",
    "pp2",
    "tp2",
    "tp2_ep2",
    "letters_cut_cp2_tp2",
    "letters_tp2",
    "mamba2_pp2",
    "mimo_cp2_tp2",
    "bf16_tp2",
    "delta_cp2_tp2",
)
EVERYDAY += ("zaya_pp2_tp2", "latent_tp2_ep2", "stable_ep2", "attentive_tp2_ep2", "nemotron_pp2")
EVERYDAY += ("zaya_skip_tp2_ep2", "whole_ep2", "softmax_sequence_cp2_ep2", "softmax_groups_tp2_ep2")
EVERYDAY += ("ahead_untied_pp2_cp2", "softmax_cp2_ep2", "expert_bias_tp2_ep2", "expert_choice_cp2_ep2")


def layouts(names):
    """Return the names as parameters of a test; `make test` takes one layout or two of each kind of model."""
    return unless(set(EVERYDAY) & set(names), names)


def alone(name: str) -> str:
    """The run of one process that a layout is compared with."""
    families = [each.removesuffix("_solo") for each in RUNS if each.endswith("_solo")]
    family = max((each for each in families if name.startswith(each)), key=len, default="")
    return f"{family}_solo".lstrip("_")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The runs that the selected tests look at."""
    folder = tmp_path_factory.mktemp("layouts")
    chosen = selected(request)
    needed = sorted({*chosen, *map(alone, chosen), "solo", "bf16_solo", "fp8_solo"})
    errors = fork_script("tests.distributed.layouts_probe", str(folder), *needed)
    assert errors == {}
    return {name: pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in needed}


def furthest(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def agreeing(a, b):
    """Steps until the first one in which an expert gets another number of tokens."""
    same = [x == y for x, y in zip(a["expert_tokens"], b["expert_tokens"], strict=True)]
    return same.index(False) if False in same else len(same)


@pytest.mark.parametrize("name", layouts(EXACT))
def test_float64_losses_match_one_process(runs, name):
    assert len(runs[name]["losses"]) == steps_of(name)
    steps = steps_of(name)
    assert furthest(runs[name]["losses"], runs[alone(name)]["losses"][:steps]) < 1e-10
    assert furthest(runs[name]["norms"], runs[alone(name)]["norms"][:steps]) < 1e-10


@pytest.mark.parametrize("name", layouts(EXACT))
def test_float64_routing_matches_one_process(runs, name):
    assert runs[name]["choices"] == runs[alone(name)]["choices"]
    assert runs[name]["expert_tokens"] == runs[alone(name)]["expert_tokens"][: steps_of(name)]


def mean_squares(run):
    """By layer the mean squared log-sum of a router's logits, over the tokens of all ranks."""
    sums: dict = {}
    for of_rank in run["log_sums"]:
        for layer, (squares, tokens) in of_rank.items():
            before = sums.get(layer, (0.0, 0.0))
            sums[layer] = before[0] + squares, before[1] + tokens
    return {layer: squares / tokens for layer, (squares, tokens) in sums.items()}


@pytest.mark.parametrize("name", layouts([name for name in EXACT if name.startswith(("stable", "attentive"))]))
def test_z_losses_match_one_process(runs, name):
    one, many = runs[alone(name)], runs[name]
    assert furthest(many["z_losses"], one["z_losses"]) < 1e-10
    squares, expected = mean_squares(many), mean_squares(one)
    assert squares.keys() == expected.keys() and len(squares) == 2
    assert furthest(squares.values(), expected.values()) < 1e-10


@pytest.mark.parametrize("name", layouts([name for name in EXACT if name.startswith("ahead")]))
def test_losses_of_the_extra_depth_match_one_process(runs, name):
    assert furthest(runs[name]["mtp_losses"], runs[alone(name)]["mtp_losses"]) < 1e-10


@pytest.mark.parametrize("name", layouts(["fp32_ep2", "fp32_cp2"]))
def test_fp32_losses_match_until_a_token_changes_experts(runs, name):
    one, many = runs["fp32_solo"], runs[name]
    until = agreeing(one, many)
    assert until > 0
    assert furthest(one["losses"][:until], many["losses"][:until]) < 1e-5
    assert furthest(one["losses"], many["losses"]) < 2e-2


def test_fp8_products_are_used(runs):
    assert furthest(runs["fp8_solo"]["losses"], runs["bf16_solo"]["losses"]) > 1e-4


@pytest.mark.parametrize("name", layouts(["bf16_ep2", "bf16_tp2", "narrow_ep2", "narrow_tp2", "fp8_ep2", "fp8_tp2"]))
def test_bf16_losses_stay_close(runs, name):
    assert furthest(runs[name]["losses"], runs[alone(name)]["losses"]) < 2e-2


@pytest.mark.parametrize("name", layouts([name for name, (ranks, _) in RUNS.items() if ranks > 1]))
def test_ranks_that_hold_same_shard_hold_same_bits(runs, name):
    for moment in ("initial", "final"):
        seen: dict = {}
        for shards_of_rank in runs[name][moment]:
            for shard, digest in shards_of_rank.items():
                assert seen.setdefault(shard, digest) == digest, f"{moment}: replicas of {shard} differ"
        assert len(seen) < sum(map(len, runs[name][moment])), f"{name} has no replica to compare"


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


@pytest.mark.parametrize("name", layouts([name for name in LAYOUTS if name.startswith("zaya_skip")]))
def test_some_tokens_skip_the_experts(runs, name):
    computed = [sum(of_step[layer]) for of_step in runs[name]["expert_tokens"] for layer in (0, 2, 3)]
    assert max(computed) > 8 * 32 * 0.8 and 0 < min(computed) < 8 * 32 * 0.95


@pytest.mark.parametrize("name", [f"{router}_solo" for router in ROUTERS])
def test_two_experts_compute_each_token(runs, name):
    tokens = 8 * 32
    for layer in (1, 3):
        assert sum(runs[name]["expert_tokens"][-1][layer]) == 2 * tokens
    balanced = runs["expert_choice_solo"]["expert_tokens"][0][1]
    assert min(balanced) == max(balanced) == 2 * tokens // 8
