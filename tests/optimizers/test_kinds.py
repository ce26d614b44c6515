"""An optimizer kind of one file goes the whole way; one that leaves a question open is refused."""

import pytest

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import ConfigError, load
from tests.optimizers.lion import Lion
from tests.runtime.ranks import run_script

pytestmark = pytest.mark.xdist_group("optimizer_kinds")  # its processes start once, not once a worker


@pytest.fixture(scope="module")
def went(tmp_path_factory):
    return run_script("tests.optimizers.kinds_probe", str(tmp_path_factory.mktemp("kinds")))


each_kind = pytest.mark.parametrize("kind", ["sgd", "lion"])


@each_kind
def test_kind_trains_and_resumes_exactly(went, kind):
    assert went[kind]["again"] == went[kind]["whole"]
    assert went[kind]["whole"][-1] < went[kind]["whole"][0]


def test_sgd_resumes_on_another_layout(went):
    assert went["sgd"]["resharded"] == pytest.approx(went["sgd"]["whole"], abs=1e-9)


@each_kind
def test_kind_is_planned_to_the_byte(went, kind):
    measured, planned = went[kind]["bytes"]
    assert measured == planned > 0


def test_registry_refuses_missing_answers_by_name():
    class Silent(optimizers.OptimizerKind):
        name = "silent"
        keys = ()

    with pytest.raises(TypeError, match="Silent does not define: state, sharding, megatron"):
        optimizers.register(Silent)


def test_registry_refuses_taken_names():
    class Second(Lion):
        name = "sgd"

    with pytest.raises(TypeError, match="'sgd' is taken by SGD"):
        optimizers.register(Second)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["optimizer.kind=lion"], "no such kind. Choose one of adamw, sgd"),
        (["optimizer.kind=muon"], "not supported: .*emerging_optimizers"),
        (["optimizer.kind=sgd"], "optimizer.kind=sgd needs optimizer.distributed=false"),
        (["optimizer.momentum=0.5"], "optimizer.kind=adamw does not read this key.*optimizer.kind=sgd"),
        (
            ["optimizer.kind=sgd", "optimizer.distributed=false", "optimizer.beta1=0.5"],
            "optimizer.beta1=0.5: optimizer.kind=sgd does not read this key. Remove it, or choose optimizer.kind=adamw",
        ),
    ],
)
def test_what_a_kind_cannot_do_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load("tiny", overrides)
