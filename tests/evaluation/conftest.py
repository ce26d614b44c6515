"""Tiny models with a tokenizer, and questions in the form of lm-eval's tasks."""

import json

import pytest
import torch

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange import hf, megatron
from megatron_blackmamba.interchange.canonical import in_memory, shapes
from megatron_blackmamba.layers import layers_of
from tests.reference.canonical import write_tokenizer

TEXT = "the state runs on through every layer, so a model reads once and answers; what then, they said"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def random_model(pattern, tokenizer, seed=0, **more):
    """A model of random weights, large enough for choices to differ."""
    config = ModelConfig(
        pattern=pattern, vocab_size=64, hidden_size=16, experts=4, expert_hidden_size=16, mlp_hidden_size=16,
        attention={"heads": 2}, **more,
    )  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    weights = {}
    layers = list(layers_of(pattern))
    for name, shape in shapes(config).items():
        parts = name.split(".")
        given = None
        if parts[1] == "layers" and parts[3] == "mixer":
            given = layers[int(parts[2])].initial(".".join(parts[4:]), shape, config, random)
        if given is None:
            given = torch.randn(shape, generator=random) * 0.5 + (1.0 if "norm.weight" in name else 0.0)
        weights[name] = given.contiguous()
    return in_memory(config, weights, tokenizer=tokenizer, sequence_length=64)


@pytest.fixture(scope="session")
def export(tmp_path_factory, tokenizer):
    """A function that writes a model with a pattern as a Hugging Face export, once."""
    made = {}

    def make(pattern="ME*-ME", **more):
        key = (pattern, *more.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("export") / "model"
            hf.write(random_model(pattern, tokenizer, **more), made[key])
        return made[key]

    return make


@pytest.fixture
def run(tmp_path, tokenizer):
    """A run with two checkpoints, kept for ever, of different weights."""
    from megatron_blackmamba.config import to_yaml

    folder = tmp_path / "run"
    for step in (1, 2):
        model = random_model("MEM", tokenizer, seed=step)
        path = folder / "checkpoints" / f"step_{step:08d}"
        megatron.write(model, path)
        manifest = path / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": step}))
    (folder / "checkpoints" / "latest").write_text("step_00000002\n")
    config = megatron.run_config(model)
    kept = config.checkpoint.model_copy(update={"keep_every": 1})
    (folder / "config.yaml").write_text(to_yaml(config.model_copy(update={"checkpoint": kept})))
    return folder


def sentence(i, length):
    words = TEXT.split()
    return " ".join(words[(i * 7 + j * (i % 5 + 1)) % len(words)] for j in range(length))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Twelve questions for each of three tasks, of different forms."""
    folder = tmp_path_factory.mktemp("data")
    piqa = [{"goal": sentence(i, 4 + i), "sol1": sentence(i + 1, 3), "sol2": sentence(i + 2, 1 + i % 4), "label": i % 2}
            for i in range(12)]  # fmt: skip
    winogrande = [{"sentence": f"{sentence(i, 5)} _ {sentence(i + 3, 2 + i % 3)}", "option1": "the", "option2": "they",
                   "answer": str(1 + i % 2)} for i in range(12)]  # fmt: skip
    lambada = [{"text": sentence(i, 3 + 2 * i)} for i in range(12)]
    for name, rows in (("piqa", piqa), ("winogrande", winogrande), ("lambada_openai_test", lambada)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder
