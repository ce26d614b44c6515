"""Files of strangers: values of other types and sizes, deep nesting. One line, in bounded time and memory."""

import json
import random
import time

import pytest
import torch
from transformers import AutoConfig

from megatron_blackmamba.interchange import files, hf, native
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.open import config_of_export
from megatron_blackmamba.tokenizer import TokenizerError, load_tokenizer
from tests.interchange.native_grid import ODD, SIZES, write_model
from tests.reference import tiny
from tests.reference.canonical import canonical, write_tokenizer

OTHERS = [
    None,
    [],
    {},
    "x",
    "9" * 5000,
    -1,
    0,
    1.5,
    True,
    10**9,
    10**30,
    float("nan"),
    [[]],
    [{}],
    {"a": []},
    [1] * 20_000,
]


def configs(model_type):
    if model_type == "blackmamba":
        return hf.to_json(canonical(tiny("silu", layers="r4as")).config, 128, torch.float32)
    if model_type == "state-spaces":
        return {
            "d_model": 24,
            "n_layer": 2,
            "vocab_size": 57,
            "ssm_cfg": {"layer": "Mamba2", "d_state": 6},
            "rms_norm": True,
        }
    return AutoConfig.for_model(model_type, **SIZES, **ODD[model_type]).to_dict()


@pytest.mark.parametrize("model_type", [*ODD, "blackmamba", "state-spaces"])
def test_values_of_other_types_are_refused_in_words(model_type, tmp_path):
    path, right, draw = tmp_path / "config.json", configs(model_type), random.Random(model_type)
    for key in right:
        for other in draw.sample(OTHERS, 6) if key not in ("num_hidden_layers", "n_layer") else OTHERS:
            path.write_text(json.dumps({**right, key: other}))
            begun = time.monotonic()
            try:
                config_of_export(tmp_path)
            except InterchangeError as error:
                assert str(path) in str(error) and len(str(error)) < 100_000
            assert time.monotonic() < begun + 20, (key, other)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a number of layers from 1 to 10,000"),
        ({"num_hidden_layers": 10**4, "num_local_experts": 60_000}, "describes 600,000,000 experts"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf; only whole numbers convert"),
    ],
)
def test_numbers_beyond_any_model_are_refused(changes, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs("mixtral") | changes))
    with pytest.raises(InterchangeError, match=told):
        native.read(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], "x", 3, {"a": 1}, {"a": ["x"]}, {"a": None}])
def test_an_index_of_other_types_is_refused(weight_map, tmp_path):
    folder = write_model("mamba", tmp_path / "model", vocab_size=40, hidden_size=24, num_hidden_layers=1)
    index = folder / hf.INDEX
    index.write_text(json.dumps({**json.loads(index.read_text()), "weight_map": weight_map}))
    with pytest.raises(InterchangeError, match=f"{index}: weight_map is not an object"):
        native.read(folder)


@pytest.mark.parametrize("name", ["config.json", hf.INDEX, "tokenizer.json"])
def test_json_nested_too_deeply_is_refused(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs("mamba")))
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises((InterchangeError, TokenizerError), match=f"{tmp_path / name}: not"):
        load_tokenizer(tmp_path) if name == "tokenizer.json" else native.read(tmp_path)


def test_a_token_far_beyond_the_others_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["added_tokens"][-1]["id"] = 4 * 10**9
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=f"{path}: the token '.*' has the id 4000000000; ids are at most 16777216"):
        load_tokenizer(path)


POINTER = "version 1\noid sha256:4d7a214614ab\nsize 12345\n"


@pytest.mark.parametrize(
    ("content", "told"), [(POINTER, "a pointer of Git LFS, not the weights"), ("<html>Denied</html>", "not a .* file")]
)
@pytest.mark.parametrize("name", [files.SAFETENSORS, files.TORCH])
def test_text_in_the_place_of_weights_is_named(tmp_path, name, content, told):
    (tmp_path / name).write_text(content)
    with pytest.raises(InterchangeError, match=f"{name}: {told}"):
        files.read(tmp_path, (name,))


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_tensors_without_plain_values_are_refused(tmp_path, tensor):
    torch.save({"a": tensor}, tmp_path / files.TORCH)
    with pytest.raises(InterchangeError, match="a is sparse or has no values"):
        files.read(tmp_path, (files.TORCH,))
