"""Config keys that kinds outside the package bring along (tests/config/extension.py)."""

import json
import sys

import pytest
import torch
import yaml
from pydantic import BaseModel

from megatron_blackmamba import layers, norms, optimizers, routers
from megatron_blackmamba.config import ConfigError, from_saved, load, read_saved, to_saved, to_yaml
from megatron_blackmamba.config.describe import new_run
from megatron_blackmamba.hf.configuration_blackmamba import BlackMambaConfig
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.registry import KindError
from megatron_blackmamba.settings import RunConfig
from megatron_blackmamba.training.branch import may_differ
from megatron_blackmamba.training.start.resume import ResumeError, other_function, refuse_changes
from tests.model.conftest import build, place
from tests.routers.first_experts import FirstExperts

__all__ = ["build", "place"]

COUNT = "model.extensions.first_experts.count"
ROUTER = "model.router.kind=first_experts"
ALL = (ROUTER, "model.pattern=MEA", "model.final_norm=shifted_norm", "optimizer.kind=sharp_lion")
ALL += ("optimizer.distributed=false",)


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Register the kinds of the module; other modules of tests register some of the same names."""
    sys.modules.pop("tests.config.extension", None)
    import tests.config.extension  # noqa: F401

    yield
    layers.unregister("A")
    norms.unregister("shifted_norm")
    optimizers.unregister("sharp_lion")
    routers.unregister("first_experts")
    routers.unregister("scaled")


def test_config_has_the_keys_of_its_kinds_alone():
    assert load("tiny").model.extensions == {} == load("tiny").optimizer.extensions
    run = load("tiny", [*ALL, f"{COUNT}=4", "optimizer.extensions.sharp_lion.sharpness=2"])
    assert run.model.extensions == {
        "running_mean": {"window": 8, "note": "none"},
        "first_experts": {"count": 4},
        "shifted_norm": {"factor": 1.0},
    }
    assert run.optimizer.extensions == {"sharp_lion": {"sharpness": 2.0}}
    assert layers.kind_of("A").settings_in(run.model).window == 8
    assert run == from_saved(to_saved(run), "here")


def test_key_missing_from_saved_config_is_default():
    saved = to_saved(load("tiny", [ROUTER]))
    saved["model"]["extensions"] = {}
    assert from_saved(saved, "here") == load("tiny", [ROUTER])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{COUNT}=0"], rf"the command line: {COUNT}=0: input should be greater than 0"),
        ([f"{COUNT}=many"], rf"{COUNT}='many': input should be a valid integer"),
        ([f"{COUNT}=9"], "first_experts.count=9 is not between model.top_k and model.experts"),
        (["model.extensions.first_experts.cuont=1"], r"unknown key '.*\.cuont'; first_experts has: count"),
        (["model.extensions.first_expert.count=1"], r"first_expert: this run reads first_experts\. Correct the name"),
        (["optimizer.extensions.sharp_lion.sharpness=1"], "sharp_lion: this run has no such sections"),
        (["model.extensions.first_experts=3"], "first_experts=3: input should be a valid dictionary"),
        (["model.pattern=MEA", "model.extensions.running_mean.window=13"], "a window of 13"),
        (["resume.allow=[model.extensions.first_experts.total]"], "first_experts.total: unknown key"),
    ],
)
def test_wrong_keys_and_values_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load("tiny", [ROUTER, *overrides])


def test_settings_of_another_class_are_refused(monkeypatch):
    monkeypatch.setattr(FirstExperts, "settings", BaseModel)
    with pytest.raises(KindError, match=r"FirstExperts\.settings is no subclass of Section"):
        load("tiny")


def test_errors_name_the_file_that_set_the_key(tmp_path):
    content = {"include": "tiny", "model": {"router": {"kind": "first_experts"}, "extensions": {"none": {}}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"mine\.yaml: model\.extensions\.none: "):
        load(tmp_path / "mine.yaml")


def test_changed_keys_follow_their_rules():
    run, changed = (load("tiny", [*ALL, f"{COUNT}={count}"]) for count in (2, 3))
    before = run.model_dump(mode="json", by_alias=True)
    assert refuse_changes(before, run, 5) == []
    with pytest.raises(ResumeError, match=rf"{COUNT}=2, and now it is 3\.\nresume.allow cannot permit this"):
        refuse_changes(before, changed, 5)
    for key in ("model.extensions.running_mean.note", "optimizer.extensions.sharp_lion.sharpness"):
        with pytest.raises(ResumeError, match=rf"'resume\.allow=\[{key}\]'"):
            refuse_changes(before, load("tiny", [*ALL, f"{key}=2.5" if "sharp" in key else f"{key}=other"]), 5)
        allowed = [f"{key}=2.5" if "sharp" in key else f"{key}=other", f"resume.allow=[{key}]"]
        assert len(refuse_changes(before, load("tiny", [*ALL, *allowed]), 5)) == 1
    assert not may_differ(COUNT) and may_differ("optimizer.extensions.sharp_lion.sharpness")


@pytest.mark.parametrize(
    ("saved", "now"), [([ROUTER, f"{COUNT}=2"], [ROUTER, f"{COUNT}=3"]), ([], [ROUTER]), ([ROUTER], [])]
)
def test_weights_of_other_values_are_another_function(saved, now):
    changes, fits = other_function(load("tiny", saved).model, load("tiny", now).model)
    assert fits and any(COUNT.startswith(key) for key, _, _ in changes)
    load("tiny", [*now, f"resume.allow=[{changes[0][0]}]"])


def test_kinds_compute_with_their_values(build):
    x = torch.randn(4, 8)
    for factor in (1.0, 3.0):
        run = load("tiny", [*ALL, f"model.extensions.shifted_norm.factor={factor}"])
        norm = norms.kind_of("shifted_norm")
        shifted = norm.apply(x, (torch.ones(8), torch.zeros(8)), 0.0, *norm.own(run.model))
        assert torch.allclose(shifted, factor * torch.nn.functional.rms_norm(x, (8,)))
    for count in (2, 5):
        model = build("model.pattern=E", "model.experts=8", ROUTER, f"{COUNT}={count}")
        _, chosen_TE = model.decoder.layers[0].mixer.router.train()(torch.randn(60, 4, 64)).as_map()
        assert chosen_TE.any(0).tolist() == [expert < count for expert in range(8)]


def test_new_file_has_the_keys_that_were_given(tmp_path):
    text = new_run("mine", "tiny", [ROUTER, f"{COUNT}=3"], tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text(text)
    assert load(tmp_path / "mine.yaml").model.extensions == {"first_experts": {"count": 3}}


def test_config_without_its_module_is_read_for_records(tmp_path):
    run = load("tiny", [*ALL, f"{COUNT}=3"])
    (tmp_path / "config.yaml").write_text(to_yaml(run))
    routers.unregister("first_experts")
    try:
        assert read_saved(tmp_path / "config.yaml", known_kinds=False) == run
        with pytest.raises(ConfigError, match="first_experts: no such kind"):
            read_saved(tmp_path / "config.yaml")
    finally:
        routers.register(FirstExperts)
    assert RunConfig.model_validate_json(run.model_dump_json(by_alias=True)) == run


def test_export_keeps_the_values(tmp_path):
    run = load("tiny", ["model.router.kind=scaled", "model.extensions.scaled.scale=2"])
    fields = hf.to_json(run.model, 128, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model, _ = hf.read_config(tmp_path / "config.json")
    assert model.extensions == {"scaled": {"scale": 2.0}} and hf.function_of(model) == hf.function_of(run.model)
    assert "extensions" not in hf.to_json(load("tiny").model, 128, torch.float32)
    BlackMambaConfig.from_pretrained(tmp_path)  # the modeling files read the file too
