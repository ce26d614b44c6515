"""What a kind declares of its weights' rows is what every layout and checkpoint does with them."""

import pytest

from megatron_blackmamba import layers, model
from megatron_blackmamba.config import ParallelConfig, load, mup
from megatron_blackmamba.layers.rows import Stack, by_columns, by_rows, whole
from megatron_blackmamba.runtime import world
from tests.layers.rows_probe import ALL, MODELS
from tests.runtime.ranks import fork_script

pytestmark = pytest.mark.xdist_group("new_kind")
LAYERS = [("plain", letter) for letter in ALL] + [("more", letter) for letter in "MSRG*-E"]
FUSED = by_rows(8, z=6, x=6, B=(4, 4), dt=2)


@pytest.fixture(scope="module")
def went(tmp_path_factory):
    legs = fork_script("tests.layers.rows_probe", str(tmp_path_factory.mktemp("rows")))
    assert [answer for leg in legs.values() for answer in leg if "error" in answer] == []
    return {leg: [answer["answer"] for answer in answers] for leg, answers in legs.items()}


def computed(went, leg, model, letter):
    return sum(rank[model]["squares"][letter] for rank in went[leg])


@pytest.mark.parametrize(("model", "letter"), LAYERS, ids=lambda word: word)
def test_resharded_layers_compute_the_same(went, model, letter):
    one, two, back = (computed(went, leg, model, letter) for leg in ("one", "two", "back"))
    assert one == back
    assert (two == pytest.approx(one, rel=1e-10)) == (letter != "U"), "a kind that hides its parts is caught here"


@pytest.mark.parametrize("model", MODELS)
def test_weights_return_from_two_ranks_bit_for_bit(went, model):
    assert went["back"][0][model]["other"] == []


def test_declared_rows_give_shapes_and_shares():
    assert FUSED.shape == (22, 8) and FUSED.share(2).shape == (11, 8)
    assert FUSED.share(2).rows == {"z": (3,), "x": (3,), "B": (2, 2), "dt": (1,)}
    assert FUSED.pieces == [6, 6, 4, 4, 2]
    assert by_columns(8, a=3, b=1).share(2).shape == (4, 4)
    assert whole(3, a=5).share(2).shape == (5, 3)


def test_groups_of_rows_are_never_cut():
    grouped = layers.kind_of("*").weights(load("tiny", ["model.attention.heads=4", "model.attention.kv_heads=2"]).model)
    qkv = grouped["linear_qkv.weight"]
    assert qkv.groups == 2 and qkv.share(2).groups == 1 and qkv.pieces == [128]
    assert [(name, rows.start) for name, rows in qkv.places()][:4] == [("q", 0), ("k", 32), ("v", 48), ("q", 64)]


def test_stacks_put_parts_on_their_own_axis():
    stack = Stack(by_rows(8, gate=6, up=6), tuple("abcd"))
    assert stack.shape == (4, 2, 6, 8) and stack.share(2, 3).shape == (2, 2, 2, 8)
    assert Stack(by_columns(6, out=8), tuple("ab")).share(1, 2).shape == (2, 8, 3)


@pytest.mark.parametrize(
    ("overrides", "weight", "parts"),
    [
        (["model.pattern=M"], "x_proj.weight", {"B", "C"}),
        (["model.pattern=M", "model.dt_rank=4"], "x_proj.weight", {"dt", "B", "C"}),
        (["model.pattern=S", "model.mamba2.head_dim=16"], "in_proj.weight", {"B", "C"}),
        (["model.pattern=R", "model.mamba3.head_dim=16"], "in_proj.weight", {"B", "C", "angle"}),
        (["model.pattern=E"], "router.weight", {"experts"}),
        (["model.pattern='*'", "model.attention.heads=4"], "linear_qkv.weight", set()),
    ],
)
def test_rows_that_do_not_grow_are_readouts(overrides, weight, parts):
    described = load("tiny", [*overrides, "model.mup.base_width=32"]).model
    kind = layers.kind_of(described.pattern)
    expected = [rows for part, rows in kind.weights(described)[weight].places() if part in parts]
    assert mup.readouts(kind, described)[weight] == expected


def test_parameters_lead_to_their_rows():
    config = load("tiny", ["model.pattern=ME"])
    with world.fake(ParallelConfig(), world_size=1) as alone:
        for name, parameter in model.build(config, alone).decoder.named_parameters():
            declared = layers.weight_of(f"decoder.{name}", config.model)
            assert (declared is None) == ("mixer" not in name)
            assert declared is None or parameter.declared == declared
