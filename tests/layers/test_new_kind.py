"""A kind of layer in one file of its own goes the whole way; one that leaves a question open is refused."""

import pytest

from megatron_blackmamba import layers
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.inference.sampling import GenerationError
from megatron_blackmamba.inference.weights import decodings
from megatron_blackmamba.model import build
from megatron_blackmamba.registry import KindError
from megatron_blackmamba.runtime import world
from tests.layers.running_mean.kind import RunningMean
from tests.runtime.ranks import fork_script

pytestmark = pytest.mark.xdist_group("new_kind")  # its processes start once, not once a worker


@pytest.fixture(scope="module")
def went(tmp_path_factory):
    found = fork_script("tests.layers.new_kind_probe", str(tmp_path_factory.mktemp("new_kind")))
    for name, answer in found.items():
        assert "error" not in answer, (name, answer)
    return found


def test_new_kind_trains_alike_under_tensor_parallelism(went):
    assert went["losses"]["tp2_fp64"] == pytest.approx(went["losses"]["solo_fp64"], abs=1e-10)
    assert went["losses"]["solo"][-1] < went["losses"]["solo"][0]


def test_new_kind_resumes_exactly(went):
    assert went["losses"]["again"] == went["losses"]["solo"]


def test_fused_rows_resume_under_tensor_parallelism(went):
    """The mixer says nothing of checkpoints. Its rows were once loaded in another order, and it trained on."""
    assert went["losses"]["moved"] == pytest.approx(went["losses"]["fused"], abs=1e-10)
    assert len(went["losses"]["moved"]) == 6


def test_new_kind_is_saved_from_memory(went):
    assert went["saved"]["answer"] is True


def test_export_refuses_new_kind_by_name(went):
    assert "gated mean layers (F) have no class in the modeling files" in went["refused"]["answer"]


class Plain(layers.LayerKind):
    letter, name = "P", "plain"

    def weights(self, model):
        D = model.hidden_size
        return {"in_proj.weight": layers.by_rows(D, x=D, gate=2 * D), "out_proj.weight": layers.by_columns(D, out=D)}

    def between(self, x, gate, inputs):
        return x


def test_answers_of_a_kind_follow_from_its_weights():
    layers.register(Plain)
    try:
        model, kind = load("tiny", ["model.pattern=PE"]).model, layers.kind_of("P")
        assert [size for _, size, _ in kind.divisions(model)] == [64, 128, 64]
        assert kind.costs.flops(model, 32) == {"plain": 2 * 4 * 64 * 64}
        assert layers.obstacles(model) == ["plain layers (P) have no class in the modeling files"]
        with pytest.raises(GenerationError, match=r"plain layers \(P\) cannot generate.*: Plain has no `state` beside"):
            decodings(model)
    finally:
        layers.unregister("P")


class Uncuttable(Plain):
    letter, name, cut = "U", "uncuttable", None

    def state(self, model):
        return {"kept": (model.hidden_size,)}


def test_states_that_no_mixer_passes_are_not_cut():
    """Each rank would begin with an empty state, and the loss would differ in its fifth digit."""
    layers.register(Uncuttable)
    try:
        with pytest.raises(ConfigError, match=r"uncuttable layers .*: `between` hands its state to no rank"):
            load("tiny", ["model.pattern=UE", "parallel.context=2"])
    finally:
        layers.unregister("U")


class Unprojected(Plain):
    letter, name = "U", "unprojected"

    def weights(self, model):
        return {"in_proj.weight": layers.by_rows(model.hidden_size, x=model.hidden_size)}


def test_layers_without_projections_are_refused():
    layers.register(Unprojected)
    try:
        config = load("tiny", ["model.pattern=UE"])
        refused = pytest.raises(KindError, match=r"Unprojected\.weights lacks out_proj\.weight, and it names no mixer")
        with world.fake(config.parallel, world_size=1, where="cpu") as alone, refused:
            build(config, alone)
    finally:
        layers.unregister("U")


def test_registry_refuses_missing_answers_by_name():
    class Silent(layers.LayerKind):
        letter = "U"

    with pytest.raises(KindError, match="Silent does not define: name, weights, between, or mixer"):
        layers.register(Silent)


class SilentCost(layers.Cost):
    def flops(self, model, sequence):
        return {}


def test_costs_without_answers_are_refused_by_name():
    class Priceless(RunningMean):
        letter, cost = "Q", f"{__name__}:SilentCost"

    layers.register(Priceless)
    try:
        with pytest.raises(KindError, match="SilentCost does not define: kept"):
            load("tiny", ["model.pattern=Q"])
    finally:
        layers.unregister("Q")


def test_registry_refuses_taken_letters():
    class Second(RunningMean):
        letter = "M"

    with pytest.raises(KindError, match="'M' is taken by Mamba"):
        layers.register(Second)


def test_registry_refuses_letters_of_two_characters():
    class Long(RunningMean):
        letter = "AA"

    with pytest.raises(KindError, match=r"Long does not define: letter \(one character\)"):
        layers.register(Long)


def test_unknown_letters_name_the_known():
    with pytest.raises(ValueError, match=r"model.pattern=Z: no such kind. Choose one of .*E, .*M"):
        layers.kind_of("Z")
