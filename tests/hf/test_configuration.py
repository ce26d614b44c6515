"""An export's configuration keeps what it was given, and derives or refuses the rest."""

import ast
from pathlib import Path

import pytest

from megatron_blackmamba import hf
from megatron_blackmamba.hf.configuration_blackmamba import BlackMambaConfig

GIVEN = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_layers": 2,
    "state_size": 8,
    "conv_dimension": 3,
    "expansion_factor": 3,
    "dt_rank": 5,
    "mamba_moe_layers": ["r", "mlp"],
    "ffn_hidden_size": 40,
    "max_sequence_length": 77,
    "activation": "gelu",
    "eod_reset": 3,
    "norm_eps": 1e-6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_theta": 500,
    "mlp_hidden_size": 80,
    "initializer_range": 0.01,
    "kernels": "torch",
    "use_cache": False,
    "bos_token_id": 4,
    "eos_token_id": 5,
    "pad_token_id": 6,
}


def test_every_argument_survives_the_file(tmp_path):
    config = BlackMambaConfig(**GIVEN)
    config.save_pretrained(tmp_path)
    again = BlackMambaConfig.from_pretrained(tmp_path)
    for name, value in GIVEN.items():
        assert getattr(config, name) == value, name
        assert getattr(again, name) == value, name


def test_what_is_left_out_is_derived():
    config = BlackMambaConfig(hidden_size=40, num_layers=3, num_attention_heads=4)
    assert config.dt_rank == 3  # 40 / 16, rounded up
    assert config.mamba_moe_layers == ["r", "8", "r"]
    assert config.num_key_value_heads == 4
    assert BlackMambaConfig(num_layers=2, mamba_moe_layers=["r", 4]).mamba_moe_layers == ["r", "4"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mamba_moe_layers": ["r"]}, "mamba_moe_layers has 1 entries, num_layers is 2"),
        ({"mamba_moe_layers": ["r", "0"]}, "not '0'"),
        ({"mamba_moe_layers": ["r", "2"], "num_experts_per_tok": 3}, "num_experts_per_tok must be 1 to 2, not 3"),
        ({"mlp_hidden_size": None}, "set mlp_hidden_size"),
        ({"mamba_moe_layers": ["mamba2", "mlp"], "mamba2_head_dim": 50}, "144 is not divisible by"),
        ({"mamba_moe_layers": ["attention", "mlp"], "num_attention_heads": 5}, "48 is not divisible by num_attention"),
        ({"arrangement": "circular"}, "arrangement must be .*, not 'circular'"),
        ({"activation": "relu"}, "activation must be .*, not 'relu'"),
        ({"router_scores": "sum"}, "router_scores must be .*, not 'sum'"),
        ({"router_kind": "softmax", "balance_in_training": True}, "trained with Sinkhorn, not 'softmax'"),
        ({"kernels": "cuda"}, "kernels must be .*, not 'cuda'"),
    ],
)
def test_contradictions_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        BlackMambaConfig(**GIVEN | changes)


def test_modeling_files_read_only_fields_there_are():
    """mypy cannot tell: transformers' configurations answer any name as far as it knows."""
    known, read = set(dir(BlackMambaConfig())), set()
    for path in Path(hf.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config"):
                read.add(node.attr)
    assert len(read) > 40
    assert read <= known, f"no field of the configuration: {read - known}"
