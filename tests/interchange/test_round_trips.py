"""The config of an export, imported again, is one from whose weights the same run may start."""

import pytest
import torch

from megatron_blackmamba.config import load
from megatron_blackmamba.formats.atomic import write_json
from megatron_blackmamba.interchange import hf, native
from megatron_blackmamba.training.start.resume import other_function
from tests.interchange.native_matrix import FAMILIES

WIDER = "model.mup.base_width=32"
CONFIGS = {
    "wider": [WIDER],
    "wider hybrid": [WIDER, "model.pattern=SE*-", "model.mamba2.head_dim=16", "model.mlp_hidden_size=96"],
    "wider heads": [WIDER, "model.pattern=M*", "model.multipliers.attention=0.3", "model.multipliers.logits=2"],
    "explicit heads": ["model.pattern=*-", "model.mlp_hidden_size=96", "model.attention.head_dim=6"],
    "unread keys": ["model.pattern=SS", "model.mamba2.head_dim=16", "model.state_size=8", "model.dt_rank=3"],
    "explicit Mamba-2 heads": ["model.pattern=SS", "model.mamba2.head_dim=16", "model.mamba2.heads=6"],
}


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS)
def test_weights_of_an_export_start_the_same_run(overrides, tmp_path):
    model = load("tiny", overrides).model
    write_json(tmp_path / "config.json", hf.to_json(model, 128, torch.float32))
    assert other_function(hf.read_config(tmp_path / "config.json")[0], model) == ([], True)


@pytest.mark.parametrize("more", [(), ("model.state_size=8", "model.expand=3", "model.conv_kernel=3")])
@pytest.mark.parametrize("overrides", FAMILIES.values(), ids=FAMILIES)
def test_weights_of_native_export_start_the_same_run(overrides, more, tmp_path):
    model = load("tiny", [*overrides, *more]).model
    architecture = native.architecture_of(model, "run")
    assert other_function(architecture.imported(architecture.exported(model), tmp_path), model) == ([], True)
