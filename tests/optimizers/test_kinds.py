"""An optimizer kind of one file goes the whole way; one that leaves a question open is refused."""

import pytest

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.registry import KindError
from tests.optimizers.kinds_probe import KINDS, LAYOUTS, LONG
from tests.optimizers.lion import Lion
from tests.runtime.ranks import fork_script
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("optimizer_kinds")  # its processes start once, not once a worker


@pytest.fixture(scope="module")
def went(tmp_path_factory):
    return fork_script("tests.optimizers.kinds_probe", str(tmp_path_factory.mktemp("kinds")))


each_kind = pytest.mark.parametrize("kind", KINDS)


@thorough
@each_kind
def test_kind_trains_and_resumes_exactly(went, kind):
    assert went[kind]["again"] == went[kind]["whole"]
    assert went[kind]["whole"][-1] < went[kind]["whole"][0]


@thorough
def test_sgd_resumes_on_another_layout(went):
    assert went["sgd"]["resharded"] == pytest.approx(went["sgd"]["whole"], abs=1e-9)


@thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_is_the_same_under_layout(went, layout):
    assert len(went["muon"][layout]) == LONG
    assert went["muon"][layout] == pytest.approx(went["muon"]["whole"], abs=1e-10)


@thorough
def test_largest_logits_are_those_of_all_ranks(went):
    whole, *others = went["muon"]["logits"]
    assert sum(logit > 0.05 for logit in whole) > 15  # most updates have shrunk queries
    assert all(logits == pytest.approx(whole, abs=1e-10) for logits in others)


@thorough
def test_muon_resumes_on_every_layout(went):
    assert went["muon"]["changed"] == pytest.approx(went["muon"]["whole"], abs=1e-10)


@thorough
def test_muon_goes_on_after_a_kill(went):
    assert went["muon"]["resumed at"] == [10]
    assert went["muon"]["killed"] == pytest.approx(went["muon"]["whole"], abs=1e-10)


@thorough
@pytest.mark.parametrize("run", ["cp2", "cut"])
def test_muon_is_the_same_with_sequences_cut(went, run):
    assert went["muon"][run] == pytest.approx(went["muon"]["uncut"], abs=1e-10)


@thorough
@each_kind
def test_kind_is_planned_to_the_byte(went, kind):
    measured, planned = went[kind]["bytes"]
    assert measured == planned > 0


def test_registry_refuses_missing_answers_by_name():
    class Silent(optimizers.OptimizerKind):
        name = "silent"
        keys = ()

    with pytest.raises(KindError, match="Silent does not define: state, sharding, megatron"):
        optimizers.register(Silent)


def test_registry_refuses_taken_names():
    class Second(Lion):
        name = "sgd"

    with pytest.raises(KindError, match="'sgd' is taken by SGD"):
        optimizers.register(Second)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["optimizer.kind=lion"], "no such kind. Choose one of adamw, muon, sgd"),
        (
            ["optimizer.kind=muon", "optimizer.distributed=false"],
            "optimizer.kind=muon needs optimizer.distributed=true",
        ),
        (["optimizer.kind=sgd"], "optimizer.kind=sgd needs optimizer.distributed=false"),
        (["optimizer.momentum=0.5"], "optimizer.kind=adamw does not read this key.*optimizer.kind=muon or sgd"),
        (
            ["optimizer.kind=sgd", "optimizer.distributed=false", "optimizer.beta1=0.5"],
            "optimizer.beta1=0.5: optimizer.kind=sgd does not read this key. Remove it, or choose optimizer.kind=adamw",
        ),
    ],
)
def test_what_a_kind_cannot_do_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load("tiny", overrides)
