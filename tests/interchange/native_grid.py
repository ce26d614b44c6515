"""Compare models of other families with transformers' own at random odd sizes: logits and gradients in fp32.

`python -m tests.interchange.native_grid [TYPE...] [--count 10]` prints a line for each model, and the largest
differences. The tests take one model of each family from here.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

NORMS_GROUPS = Version(transformers.__version__) >= Version("5.23")
WHY_NOT_GROUPS = "transformers before 5.23 normalises the groups of Mamba-2 as one"
SIZES = {"vocab_size": 60, "hidden_size": 24}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 20}
MAMBA2 = {"mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 3, "ssm_state_size": 6, "chunk_size": 8}
EXPERTS = {"n_routed_experts": 5, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 14}
EXPERTS |= {"moe_latent_size": 16}
ODD: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 2, "state_size": 6, "time_step_rank": 5, "expand": 3, "tie_word_embeddings": False},
    "mamba2": {"num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 6, "chunk_size": 8},
    "nemotron_h": HEADS | MAMBA2 | EXPERTS | {"hybrid_override_pattern": "ME*-E", "routed_scaling_factor": 2.5},
    "llama": {**HEADS, "num_hidden_layers": 2, "tie_word_embeddings": True, "rope_theta": 500.0},
    "granitemoehybrid": {
        **{name: HEADS[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")},
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 5,
        "shared_intermediate_size": 14,
        "mamba_n_heads": 6,
        "mamba_d_head": 8,
        "mamba_n_groups": 3,
        "mamba_d_state": 6,
        "mamba_chunk_size": 8,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.5,
        "tie_word_embeddings": True,
    },
    "mixtral": {**HEADS, "num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 3},
}
"""Keys of each family at which no size equals another one by chance."""


def random_keys(model_type: str, seed: int) -> dict[str, Any]:
    """Return keys of a model of random sizes."""
    draw = random.Random(f"{model_type} {seed}")
    heads, groups = draw.choice([(4, 2), (6, 3), (5, 1), (3, 3)])
    eps = 10.0 ** -draw.randint(4, 6)
    keys: dict[str, Any] = {"vocab_size": draw.randint(40, 90), "hidden_size": 24 * draw.randint(1, 3)}
    attention = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 2 * draw.randint(2, 7)}
    attention["intermediate_size"] = draw.randint(5, 21)
    if model_type == "nemotron_h":
        keys |= {"mamba_num_heads": heads, "n_groups": groups, "mamba_head_dim": draw.randint(2, 9), "chunk_size": 8}
        keys |= {"ssm_state_size": draw.randint(2, 9), "n_routed_experts": draw.randint(3, 8)}
        keys |= {"moe_intermediate_size": draw.randint(5, 21), "moe_latent_size": draw.choice([None, 7, 40])}
        keys |= {"num_experts_per_tok": draw.randint(1, keys["n_routed_experts"])}
        keys |= {"moe_shared_expert_intermediate_size": draw.randint(3, 20), "layer_norm_epsilon": eps}
        keys |= {"routed_scaling_factor": draw.choice([1.0, 2.5]), "time_step_min": draw.choice([0.001, 0.1])}
        layers = draw.choices("ME*-", k=draw.randint(2, 6))
        return keys | attention | {"hybrid_override_pattern": "".join((*layers, "*"))}
    if model_type == "granitemoehybrid":
        kinds = [*draw.choices(["mamba", "attention"], k=draw.randint(0, 3)), "attention"]
        keys |= {"num_attention_heads": 4, "num_key_value_heads": draw.choice([1, 2, 4]), "layer_types": kinds}
        keys |= {"num_hidden_layers": len(kinds), "mamba_n_heads": 6, "mamba_n_groups": draw.choice([1, 3])}
        keys |= {"mamba_d_state": draw.randint(2, 9), "mamba_chunk_size": 8, "mamba_expand": draw.randint(1, 3)}
        keys |= {"num_local_experts": draw.choice([0, 3, 6]), "intermediate_size": draw.randint(5, 21)}
        keys |= {
            "shared_intermediate_size": draw.randint(3, 20),
            "position_embedding_type": draw.choice([None, "rope"]),
        }
        keys |= {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0, "rms_norm_eps": eps}
        return keys | {"attention_multiplier": draw.choice([0.2, 1.0]), "tie_word_embeddings": draw.random() < 0.5}
    keys |= {"num_hidden_layers": draw.randint(1, 4), "tie_word_embeddings": draw.random() < 0.5}
    if model_type.startswith("mamba"):
        keys |= {"conv_kernel": draw.randint(2, 5), "layer_norm_epsilon": eps, "expand": draw.randint(1, 3)}
        keys |= {"state_size": draw.randint(2, 21)}
        if model_type == "mamba":
            return keys | {"time_step_rank": draw.randint(1, 9)}
        heads = keys["expand"] * keys["hidden_size"] // 8
        return keys | {"num_heads": heads, "head_dim": 8, "n_groups": draw.choice([1, 3]), "chunk_size": 8}
    if model_type not in ("llama", "mixtral"):
        raise KeyError(f"random_keys has no sizes of {model_type}: add them")
    if model_type == "llama":  # which refuses sizes that heads do not divide
        attention |= {"num_attention_heads": 4, "num_key_value_heads": draw.choice([1, 2, 4])}
    else:
        keys |= {"num_local_experts": (experts := draw.randint(3, 8)), "num_experts_per_tok": draw.randint(1, experts)}
    return keys | attention | {"rms_norm_eps": eps, "rope_theta": float(draw.choice([100, 500000]))}


@torch.no_grad()
def write_model(model_type: str, folder: Path, **keys: Any) -> Path:
    """Write a random model of transformers; no parameter has a value that could be forgotten."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **(keys or {**SIZES, **ODD[model_type]}))
    model = AutoModelForCausalLM.from_config(config)
    state = {name: value + 0.1 * torch.randn_like(value) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state[next(name for name in state if "embed" in name)]
    model.load_state_dict(state)
    model.save_pretrained(folder, max_shard_size="10KB")
    return folder


def write_extra_depth(folder: Path, **keys: Any) -> Path:
    """Write a random Nemotron-H with the weights of multi-token prediction: the layers are those of another model."""
    index_file = write_model("nemotron_h", folder, **keys) / "model.safetensors.index.json"
    own = write_model(
        "nemotron_h", folder.with_name(f"{folder.name}_depth"), **keys | {"hybrid_override_pattern": "*E"}
    )
    layers = {name: value for name, value in tensors(own).items() if name.startswith("backbone.layers.")}
    depth = {name.replace("backbone.", "mtp."): value for name, value in layers.items()}
    drawn, D = torch.Generator().manual_seed(5), keys["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"layers.0.enorm": (D,), "layers.0.hnorm": (D,)}
    shapes |= {"layers.0.eh_proj": (D, 2 * D), "layers.1.final_layernorm": (D,)}
    depth |= {f"mtp.{name}.weight": torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
    save_file(depth, folder / "depth.safetensors", {"format": "pt"})
    index = json.loads(index_file.read_text())
    index["weight_map"] |= dict.fromkeys(depth, "depth.safetensors")
    index_file.write_text(json.dumps(index))
    return described(folder, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")


def described(folder: Path, **keys: Any) -> Path:
    """Add keys to a config.json, in which the layers of an extra depth then have no second name."""
    config = json.loads((folder / "config.json").read_text())
    del config["mtp_layers_block_type"]
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def differences(folder: Path) -> tuple[float, float]:
    """Return the largest difference of a logit and of a gradient, between transformers and our modules."""
    from transformers import AutoModelForCausalLM

    from megatron_blackmamba.config import ParallelConfig
    from megatron_blackmamba.interchange import megatron, native
    from megatron_blackmamba.interchange.canonical import in_memory
    from megatron_blackmamba.interchange.open import copy_into
    from megatron_blackmamba.model import build
    from megatron_blackmamba.runtime import world

    model = native.read(folder)
    ids = torch.randint(model.config.vocab_size, (2, 22), generator=torch.Generator().manual_seed(1))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    logits = theirs(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    folder_of_gradients = folder / "gradients"
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder_of_gradients)
    with world.fake(ParallelConfig(), world_size=1, where="cpu") as alone:
        ours = build(megatron.run_config(model), alone).eval()
        copy_into(ours, megatron.stacked(model), folder)
        found = ours(tokens)
        ours(tokens, labels).mean().backward()
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        gradients = {name: entry.load() for name, entry in megatron.of_module(ours).entries.items()}
    expected = tensors(folder_of_gradients)
    mine = native.in_file(in_memory(model.config, gradients))
    compared = [name for name in expected if not name.endswith("e_score_correction_bias")]
    return (
        float((found - logits).detach().abs().max()),
        max(float((mine[name].load() - expected[name]).abs().max()) for name in compared),
    )


def random_differences(model_type: str, seed: int, folder: Path) -> tuple[float, float]:
    """Return the differences of a random model; none for one expert a token, which import must refuse."""
    from megatron_blackmamba.interchange.canonical import InterchangeError

    keys = random_keys(model_type, seed)
    write_model(model_type, folder, **keys)
    try:
        return differences(folder)
    except InterchangeError as error:
        if keys.get("num_experts_per_tok") == 1 and (
            "num_experts_per_tok is 1" in str(error) or "top_k=1" in str(error)
        ):
            return 0.0, 0.0
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=list(ODD))
    parser.add_argument("--count", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    worst = (0.0, 0.0)
    for model_type in asked.types:
        for seed in range(asked.count):
            with tempfile.TemporaryDirectory() as folder:
                found = random_differences(model_type, seed, Path(folder))
            worst = max(worst[0], found[0]), max(worst[1], found[1])
            print(f"{model_type} {seed}: logits {found[0]:.1e}, gradients {found[1]:.1e}", flush=True)
    print(f"largest difference: logits {worst[0]:.1e}, gradients {worst[1]:.1e}")


if __name__ == "__main__":
    main()
