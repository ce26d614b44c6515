"""GGUF files: read back with the package gguf, and run by llama.cpp itself.

For the latter, LLAMA_CPP_PYTHON names a Python with llama-cpp-python.
"""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import convert, native
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.native import llama_cpp_tokens as words
from megatron_blackmamba.tokenizer import load_tokenizer
from tests.interchange.llama_cpp_probe import PYTHON, ask
from tests.interchange.native_grid import ODD, SIZES, tensors, write_model

gguf = pytest.importorskip("gguf")

ROOT = Path(__file__).parents[2]
CORPUS = [path.read_text() for path in (*sorted(ROOT.glob("docs/*.md")), Path(__file__))]
NO_BOUND = {"time_step_min": 1e-30}
RUNS_THERE = {
    "mamba": {**ODD["mamba"], "expand": 2},
    "nemotron_h": {**ODD["nemotron_h"], **NO_BOUND, "hybrid_override_pattern": "ME*E"},
    "dense_nemotron_h": {**ODD["nemotron_h"], **NO_BOUND, "hybrid_override_pattern": "M*-"},
}
"""Keys of the odd models with which llama.cpp runs them."""
RUNS_THERE["dense_granitemoehybrid"] = {**ODD["granitemoehybrid"], "num_local_experts": 0}
RUNS_THERE["dense_granitemoehybrid"]["position_embedding_type"] = "rope"
MODELS = [*ODD, "dense_nemotron_h", "dense_granitemoehybrid"]
EXACT = ("_norm.weight", "ssm_a", "ssm_d", "ssm_conv1d.weight", "ffn_gate_inp.weight")
EOD = "<|endoftext|>"


def trained(pattern=None, *, digits=False, ignore_merges=False, normalizer=None) -> Tokenizer:
    """Train a byte-level BPE on this project's documentation."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[EOD, "<|padding|>"], **options)
    tokenizer.train_from_iterator(CORPUS[:5], trainer)
    tokenizer.add_tokens(["    ", "<tab>"])  # not special: texts that spell them become them
    return tokenizer


PATTERNS = {
    "gpt-2": {},
    "starcoder": {"digits": True},
    "qwen2": {"pattern": words.SINCE_GPT_4.replace("DIGITS", r"\p{N}")},
    "smaug-bpe": {"pattern": words.SINCE_GPT_4.replace("DIGITS", r"\p{N}{1,3}")},
    "llama-bpe": {"pattern": words.SINCE_GPT_4.replace("DIGITS", r"\p{N}{1,3}"), "ignore_merges": True},
}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tokenizer.json"
    trained().save(str(path))
    return path


@pytest.fixture(scope="module", params=MODELS)
def source(request, tokenizer_file, tmp_path_factory):
    model_type = request.param.removeprefix("dense_")
    keys = {**SIZES, **RUNS_THERE.get(request.param, ODD[model_type]), "vocab_size": 340}
    folder = write_model(model_type, tmp_path_factory.mktemp("model") / request.param, **keys)
    return replace(native.read(folder), tokenizer=tokenizer_file)


@pytest.fixture(scope="module")
def file(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "model.gguf"
    convert.to_gguf(source, path, precision="f32")
    return path


def test_file_holds_every_tensor_under_llama_cpp_names(source, file):
    reader, theirs = gguf.GGUFReader(file), tensors(Path(source.source))
    architecture = reader.fields["general.architecture"].contents()
    held = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    known = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = reader.fields[f"{architecture}.block_count"].contents()
    allowed = {gguf.TENSOR_NAMES[key].format(bid=i) for key in gguf.MODEL_TENSORS[known] for i in range(layers)}
    assert {name.removesuffix(".weight").removesuffix(".bias") for name in held} <= allowed
    assert sum(value.numel() for value in held.values()) == source.parameters
    for name, value in theirs.items():
        if name.endswith(("embeddings.weight", "embed_tokens.weight")):
            assert torch.equal(held["token_embd.weight"], value)
        if name.endswith("layers.0.mixer.A_log"):
            torch.testing.assert_close(held["blk.0.ssm_a"].flatten(), -value.exp().flatten())
        if name.endswith("layers.0.self_attn.k_proj.weight"):  # channels c and c + 4 turn together: neighbours there
            rows = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
            assert torch.equal(held["blk.0.attn_k.weight"], value[torch.cat([rows, rows + 8])])
        if "layers.1." in name and name.endswith(("experts.3.w2.weight", "experts.3.down_proj.weight")):
            assert torch.equal(held["blk.1.ffn_down_exps.weight"][3], value)


SIZES_THERE = {
    "vocab_size": ("vocab_size",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim", "attention_head_dim"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon"),
    "rope.freq_base": ("rope_theta",),
    "expert_count": ("num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "ssm.conv_kernel": ("conv_kernel", "mamba_d_conv"),
    "ssm.state_size": ("state_size", "ssm_state_size", "mamba_d_state"),
    "ssm.group_count": ("n_groups", "mamba_n_groups"),
}
"""Keys of a GGUF file behind the architecture, and the names in config.json of families."""


def test_metadata_name_the_sizes_of_the_model(source, file):
    reader, content = gguf.GGUFReader(file), json.loads((Path(source.source) / "config.json").read_text())
    prefix = reader.fields["general.architecture"].contents() + "."
    held = {name.removeprefix(prefix): field.contents() for name, field in reader.fields.items() if prefix in name}
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    known = {key.removeprefix("{arch}.") for group in groups for key in vars(group).values() if isinstance(key, str)}
    assert held.keys() <= known
    compared = {key: name for key, names in SIZES_THERE.items() for name in names if key in held and name in content}
    for key, name in compared.items():
        value = max(held[key]) if isinstance(held[key], list) else held[key]  # a layer of another kind has 0
        assert value == pytest.approx(content[name]), f"{prefix}{key} is not {name}"
    assert len(compared) >= 4


@pytest.mark.parametrize(("precision", "error"), [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 2**-7)])
def test_only_large_matrices_are_rounded(source, file, precision, error, tmp_path):
    convert.to_gguf(source, tmp_path / "model.gguf", precision=precision)
    exact = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(file).tensors}
    types = set()
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        found = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        expected = exact[tensor.name]
        if expected.ndim == 1 or tensor.name.endswith(EXACT):
            assert tensor.tensor_type.name == "F32" and torch.equal(found, expected)
        else:
            types.add(tensor.tensor_type.name)
            assert (found - expected).abs().max() <= error * expected.abs().max()
    assert types <= {precision.upper(), "F16"}  # f16 where a row is no multiple of q8_0's blocks


def test_nan_is_named_and_leaves_no_file(source, tmp_path):
    name = "decoder.layers.0.norm.weight"
    bad = replace(source.entries[name], load=lambda: source.entries[name].load() * torch.nan)
    with pytest.raises(InterchangeError, match=f"{name} holds NaN"):
        convert.to_gguf(replace(source, entries={**source.entries, name: bad}), tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model_type", "keys", "told"),
    [
        ("mamba", {"expand": 3}, r"llama\.cpp does not run it: model\.expand=3: set 2"),
        ("nemotron_h", {"hybrid_override_pattern": "M*-E", **NO_BOUND}, r"model\.pattern=S\*-E: use - or E, not both"),
        ("nemotron_h", {"hybrid_override_pattern": "M*E"}, r"model\.mamba2\.time_step_min=0\.001: only 0 runs there"),
    ],
)
def test_command_refuses_by_key_what_llama_cpp_lacks(model_type, keys, told, tokenizer_file, tmp_path):
    folder = write_model(model_type, tmp_path / "model", **{**SIZES, **ODD[model_type], **keys, "vocab_size": 340})
    command = ["export", "gguf", str(folder), str(tmp_path / "out.gguf")]
    failed = CliRunner().invoke(app, [*command, "--tokenizer", str(tokenizer_file)])
    with pytest.raises(InterchangeError, match=told):
        raise failed.exception
    assert not (tmp_path / "out.gguf").exists()


def test_command_writes_a_file_once(tokenizer_file, tmp_path):
    folder = write_model("llama", tmp_path / "model", **{**SIZES, **ODD["llama"], "vocab_size": 340})
    command = ["export", "gguf", str(folder), str(tmp_path / "small.gguf"), "--type", "q8_0"]
    for more, told in [([], "Name one with --tokenizer"), (["--tokenizer", str(tokenizer_file)], None)]:
        done = CliRunner().invoke(app, command + more)
        assert told is None or told in str(done.exception)
    assert done.exit_code == 0 and "not compared with the source" in done.output
    fields = gguf.GGUFReader(tmp_path / "small.gguf").fields
    found = [fields[f"general.{key}"].contents() for key in ("architecture", "name", "file_type")]
    assert found == ["llama", "small", gguf.LlamaFileType.MOSTLY_Q8_0]
    again = CliRunner().invoke(app, [*command, "--tokenizer", str(tokenizer_file)])
    assert "small.gguf: already there" in str(again.exception)


@pytest.mark.parametrize("name", PATTERNS)
def test_pre_tokenizers_have_their_names_there(name, tmp_path):
    trained(**PATTERNS[name]).save(str(tmp_path / "tokenizer.json"))
    found = words.vocabulary(load_tokenizer(tmp_path / "tokenizer.json"), 340)
    assert (found.pre, found.tokens[0], found.tokens[339]) == (name, EOD, "[PAD339]")
    assert (found.types[0], found.types[2], found.types[339]) == (words.CONTROL, words.NORMAL, words.UNUSED)
    assert found.types[found.tokens.index("<tab>")] == words.USER_DEFINED


def changed(**model):
    return lambda data: data["model"].update(model)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (changed(ignore_merges=True), "its pre_tokenizer .*ByteLevel.* is not one that llama.cpp has"),
        (lambda data: data["pre_tokenizer"].update(add_prefix_space=True), "is not one that llama.cpp has"),
        (lambda data: data.update(pre_tokenizer=None), "its pre_tokenizer null is not one"),
        (lambda data: data.update(normalizer={"type": "Lowercase"}), 'its normalizer is {"type": "Lowercase"}'),
        (lambda data: data["added_tokens"][1].update(rstrip=True), "its token '<|padding|>' has rstrip"),
        (changed(byte_fallback=True), "model.byte_fallback is True"),
    ],
)
def test_tokenizer_that_llama_cpp_lacks_is_refused(change, told, tokenizer_file, tmp_path):
    data = json.loads(tokenizer_file.read_text())
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(InterchangeError) as refused:
        words.vocabulary(load_tokenizer(tmp_path / "tokenizer.json"), 340)
    assert re.search(told, str(refused.value))


def test_normalization_is_warned_of(tmp_path):
    trained(normalizer=normalizers.NFC()).save(str(tmp_path / "tokenizer.json"))
    warning = words.vocabulary(load_tokenizer(tmp_path / "tokenizer.json"), 340).warning
    assert warning is not None and "normalizes text to NFC, which llama.cpp does not" in warning


needs_llama_cpp = pytest.mark.skipif(
    PYTHON not in os.environ, reason="LLAMA_CPP_PYTHON names no Python with llama-cpp-python"
)


@needs_llama_cpp
@torch.no_grad()
def test_llama_cpp_computes_and_writes_as_our_decoder(source, file):
    prompt = [i * 37 % 330 for i in range(40)]
    found = ask(file, prompt=prompt, more=64)
    decoder = Decoder(pack(source, torch.float32))
    state = decoder.start(1)
    logits = decoder.read_all(state, torch.tensor([prompt]))
    torch.testing.assert_close(torch.tensor(found["logits"]), logits[0], atol=1e-3, rtol=0)
    written = [logits[:, -1].argmax(-1)]
    while len(written) < 64:
        written.append(decoder.step(state, written[-1]).argmax(-1))
    assert torch.cat(written).tolist() == found["greedy"]


@needs_llama_cpp
@pytest.mark.parametrize("name", PATTERNS)
def test_llama_cpp_tokenizes_a_real_corpus_equally(name, tmp_path):
    file = tmp_path / "tokenizer.json"
    trained(**PATTERNS[name]).save(str(file))
    model = write_model("llama", tmp_path / "model", **{**SIZES, **ODD["llama"], "vocab_size": 340})
    convert.to_gguf(replace(native.read(model), tokenizer=file), tmp_path / "model.gguf")
    texts = [*CORPUS, "a  b\n\n  c\t<tab> don't I'LL 1234567 naïve 中文 🚀\r\n", f"plain {EOD} text", " ", "\n"]
    assert ask(tmp_path / "model.gguf", texts)["tokens"] == load_tokenizer(file).encode_each(texts)
