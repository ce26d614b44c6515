"""The hash router and the last RMSNorm, in one model: layouts, decoding, transformers, plan and refusals."""

import json

import pytest
import torch

from megatron_blackmamba import norms, routers
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.interchange import hf, zyphra
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.plan.parameters import count
from tests.routers.options_probe import LAYOUTS, OPTIONS
from tests.runtime.ranks import fork_script
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("router_options")  # its processes start once, not once a worker


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return fork_script("tests.routers.options_probe", str(tmp_path_factory.mktemp("options")))


@thorough
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "solo"])
def test_every_layout_trains_alike(found, layout):
    assert found[layout] == pytest.approx(found["solo"], abs=1e-11)
    assert found["solo"][-1] < found["solo"][0] - 0.1


@thorough
def test_decoding_and_transformers_compute_the_logits_of_training(found):
    assert max(found["export"]["furthest"]) < 1e-5
    assert found["export"]["greedy"] and found["export"]["agrees"]


@thorough
def test_export_comes_back_without_router_weights(found):
    assert found["export"]["same_config"] and found["export"]["names"] == ["decoder.final_layernorm.weight"]


@thorough
def test_embeddings_in_place_of_ids_are_refused(found):
    assert "chooses experts by token ids, so it needs input_ids" in found["export"]["refused"][0]


@pytest.mark.parametrize("key, value", [("router.kind", "hash"), ("final_norm", "rms")])
def test_released_format_refuses_what_it_lacks_by_name(key, value):
    model = load("tiny", [f"model.{key}={value}"]).model
    with pytest.raises(InterchangeError, match=f"model.{key} is {value}; the released code"):
        zyphra.require_expressible(model, "here")


def test_unknown_norm_is_refused_by_name():
    names = ", ".join(kind.name for kind in norms.all_kinds())
    with pytest.raises(ConfigError, match=rf"model.final_norm=batch: no such kind. Choose one of {names}\."):
        load("tiny", ["model.final_norm=batch"])


def test_export_without_the_key_has_layer_norm(tmp_path):
    content = hf.to_json(load("tiny").model, 32, torch.float32)
    assert content.pop("final_norm") == "layer"
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert hf.read_config(tmp_path / "config.json")[0].final_norm == "layer"


def test_plan_counts_no_router():
    plain, hashed = load("tiny"), load("tiny", OPTIONS)
    model = plain.model
    layers = model.pattern.count("E")
    router = layers * model.experts * (model.hidden_size + 1)
    assert count(plain).total - count(hashed).total == router + model.hidden_size
    assert routers.kind_of("hash").flops(model) == 0


def test_hash_spreads_ids_and_names_distinct_experts():
    model = load("tiny", ["model.top_k=2", "model.router.kind=hash"]).model
    ids_T = torch.arange(50_000)
    choice_TK = routers.kind_of("hash").choose(torch.zeros(len(ids_T), 8), routers.Tokens(model, ids_T))
    assert (choice_TK[:, 0] != choice_TK[:, 1]).all()
    loads_E = choice_TK.flatten().bincount(minlength=8) / len(ids_T) * 4
    assert (loads_E - 1).abs().max() < 0.03
