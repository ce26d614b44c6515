"""Train a small model of each family and take it the whole way: out, into other programs, and back.

`python -m tests.interchange.native_matrix [FAMILY...]` prints the table of docs/measured.md. The columns of
llama.cpp and vLLM come from the Pythons that LLAMA_CPP_PYTHON and VLLM_PYTHON name.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from megatron_blackmamba.data_tools.bpe import train
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import convert, native
from megatron_blackmamba.interchange.open import open_model
from megatron_blackmamba.tokenizer import load_tokenizer
from tests.interchange import llama_cpp_probe, vllm_probe

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
RMS = ["model.final_norm=rms"]
HEADS = ["model.attention.heads=2", "model.attention.kv_heads=1"]
NEMOTRON_H = [
    *("model.mamba2.head_dim=16", "model.attention.rotary=false", "model.activation=relu2", "model.gated=false"),
    *("model.tie_embeddings=false", *HEADS, *RMS),
]
EXPERTS = ["model.top_k=2", "model.router.bias=false"]
FAMILIES = {
    "mamba": ["model.pattern=MMMM", *RMS],
    "mamba2": ["model.pattern=SSSS", "model.mamba2.head_dim=16", "model.mamba2.groups=2", *RMS],
    "nemotron_h": ["model.pattern=S*-S", "model.mlp_hidden_size=128", *NEMOTRON_H],
    "nemotron_h with experts": [
        *("model.pattern=SE*E", "model.router.kind=expert_bias", "model.shared_expert_hidden_size=96"),
        *(*NEMOTRON_H, *EXPERTS),
    ],
    "nemotron_h with latent experts": [
        *("model.pattern=SE*E", "model.router.kind=expert_bias", "model.shared_expert_hidden_size=96"),
        *("model.latent_size=32", *NEMOTRON_H, *EXPERTS),
    ],
    "llama": ["model.pattern=*-*-", "model.mlp_hidden_size=128", *HEADS, *RMS],
    "mixtral": [
        "model.pattern=*E*E",
        "model.router.kind=softmax",
        "model.router.normalize=true",
        *HEADS,
        *RMS,
        *EXPERTS,
    ],
    "granitemoehybrid": [
        *("model.pattern=SE*E", "model.mamba2.head_dim=16", "model.shared_expert_hidden_size=96"),
        *("model.router.kind=softmax", "model.router.normalize=true", *HEADS, *RMS, *EXPERTS),
        *("model.multipliers.embedding=12", "model.multipliers.residual=0.5", "model.multipliers.attention=0.0625"),
        "model.multipliers.logits=2",
    ],
}
COLUMNS = ("trained 20 steps, loss", "transformers: logits", "same greedy tokens", "imported again")
COLUMNS += ("llama.cpp: logits", "its same greedy tokens", "its tokens of text", "vLLM: same greedy tokens")
MORE = 64


def row(family: str, folder: Path) -> list[str]:
    """Return the cells of a family."""
    command = [sys.executable, "-m", "megatron_blackmamba", "train", "tiny", f"folder={folder}", "name=run"]
    command += ["training.steps=20", "training.evaluate_every=0", *FAMILIES[family]]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    losses = [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(train([TEXTS], 500))
    model = open_model(folder / "run", tokenizer)
    seen = convert.to_hf(model, folder / "out", as_native=True)
    assert seen is not None and not list((folder / "out").glob("*.py"))
    convert.to_checkpoint(native.read(folder / "out"), folder / "back", verify=False)
    back = open_model(folder / "back")
    equal = sum(torch.equal(tensor, back.entries[name].load()) for name, tensor in model.tensors())
    cells = [f"{losses[0]:.2f} → {losses[-1]:.2f}", f"{seen.largest_difference:.1e}"]
    cells += [f"{seen.same_written}/{seen.written}", f"{equal}/{len(model.entries)} tensors equal"]
    prompt = load_tokenizer(folder / "out").encode(TEXTS[0])[:MORE]
    logits, written = ours(folder / "out", prompt)
    known = os.environ
    cells += in_llama_cpp(folder, prompt, logits, written) if llama_cpp_probe.PYTHON in known else ["not run"] * 3
    return [*cells, in_vllm(folder / "out", prompt, written) if vllm_probe.PYTHON in known else "not run"]


@torch.no_grad()
def ours(export: Path, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Return the logits of a prompt, and the greedy tokens after it."""
    decoder = Decoder(pack(native.read(export), torch.float32))
    state = decoder.start(1)
    logits = decoder.read_all(state, torch.tensor([prompt]))
    written = [logits[:, -1].argmax(-1)]
    while len(written) < MORE:
        written.append(decoder.step(state, written[-1]).argmax(-1))
    return logits[0], torch.cat(written).tolist()


def in_llama_cpp(folder: Path, prompt: list[int], logits: torch.Tensor, written: list[int]) -> list[str]:
    """Return the cells of llama.cpp, which loads a GGUF file of the export."""
    convert.to_gguf(native.read(folder / "out"), folder / "model.gguf", precision="f32")
    found = llama_cpp_probe.ask(folder / "model.gguf", TEXTS, prompt, MORE)
    difference = (torch.tensor(found["logits"]) - logits).abs().max()
    expected = load_tokenizer(folder / "out").encode_each(TEXTS)
    equal = sum(len(ids) for ids, other in zip(expected, found["tokens"], strict=True) if ids == other)
    return [f"{difference:.1e}", same(written, found["greedy"]), f"{equal:,}/{sum(map(len, expected)):,}"]


def in_vllm(export: Path, prompt: list[int], written: list[int]) -> str:
    found = vllm_probe.ask(export, prompt, MORE)
    return found if isinstance(found, str) else same(written, found)


def same(ours: list[int], theirs: list[int]) -> str:
    return f"{sum(one == other for one, other in zip(ours, theirs, strict=True))}/{len(ours)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    torch.set_num_threads(1)
    print(f"| family | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for family in parser.parse_args().families:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            cells = row(family, Path(folder))
        print(f"| {family} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
