"""Whole tokenization commands, each a process tree: ours, and Megatron-LM's tools/preprocess_data_fast.py."""

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_blackmamba.formats.shards import read_idx
from megatron_blackmamba.tokenizer import load_tokenizer

TOOL = "tools/preprocess_data_fast.py"
ONE_THREAD = {
    "RAYON_NUM_THREADS": "1",
    "FASTOKENS_BPE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Tool:
    """A command that tokenizes a file, and the prefix of the .bin and .idx that it writes."""

    name: str
    command: Callable[[Path, Path], list[str]]
    written: Callable[[Path], Path]
    environment: dict[str, str]


def compare_whole_tools(
    corpus: Path, tokenizer: Path, folder: Path, repeats: int, checkout: Path, python: str
) -> dict[str, Any]:
    """Run the commands in turns on the corpus and on its first line, which shows what starting costs."""
    tools = [ours("ours, whole command"), ours("the same, --no-shuffle", "--no-shuffle"), megatron(checkout, python)]
    one = folder / "one.jsonl"
    with open(corpus, "rb") as file:
        one.write_bytes(file.readline())
    started: dict[str, list[float]] = {tool.name: [] for tool in tools}
    took: dict[str, list[float]] = {tool.name: [] for tool in tools}
    model = tokenizer_folder(tokenizer, folder)
    for repeat in range(repeats):
        for tool in tools:
            print(tool.name, file=sys.stderr)
            for source, seconds in ((one, started), (corpus, took)):
                out = folder / f"{tool.name} {source.stem} {repeat}"
                out.mkdir()
                seconds[tool.name].append(cpu_seconds_of(tool, source, model, out))
    last = [tool.written(folder / f"{tool.name} {corpus.stem} {repeats - 1}") for tool in tools]
    tokens = read_idx(f"{last[0]}.idx").tokens
    rates = {
        tool.name: {
            "cpu_seconds": statistics.median(took[tool.name]),
            "cpu_seconds_to_start": statistics.median(started[tool.name]),
            "tokens_per_cpu_second": tokens
            / (statistics.median(took[tool.name]) - statistics.median(started[tool.name])),
        }
        for tool in tools
    }
    return {"tools": rates, "same_ids": same_files(*last[1:]), "megatron_lm": commit(checkout)}


def ours(name: str, *options: str) -> Tool:
    def command(source: Path, out: Path) -> list[str]:
        tokenize = [sys.executable, "-m", "megatron_blackmamba", "data", "tokenize", str(source), str(out)]
        return [*tokenize, "--tokenizer", str(out.parent / "model"), "--workers", "1", *options]

    return Tool(name, command, lambda out: out / "shard_00001", {})


def megatron(checkout: Path, python: str) -> Tool:
    """Return Megatron-LM's tool; its Python needs gigatoken, awkward and what megatron.training imports."""

    def command(source: Path, out: Path) -> list[str]:
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(out.parent / "model")]
        read_and_write = ["--input", str(source), "--output-prefix", str(out / "out"), "--append-eod"]
        return [python, str(checkout / TOOL), *read_and_write, *tokenizer, "--use-gigatoken"]

    environment = {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Tool("Megatron-LM, fast", command, lambda out: out / "out_text_document", environment)


def tokenizer_folder(tokenizer: Path, folder: Path) -> Path:
    """Return a folder in which transformers finds the tokenizer and its EOD."""
    model = folder / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    eod = load_tokenizer(tokenizer).eod_token
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def cpu_seconds_of(tool: Tool, source: Path, model: Path, out: Path) -> float:
    """Return the processor time of the process and all its descendants."""
    assert model.parent == out.parent
    before = _children()
    done = subprocess.run(
        tool.command(source, out), env={**os.environ, **ONE_THREAD, **tool.environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{tool.name} failed: {' '.join(done.args)}\n{done.stderr[-2000:]}")
    return _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def same_files(one: Path, other: Path) -> bool:
    """Return whether two tools wrote the same tokens and the same document ends."""
    return all(Path(f"{one}{end}").read_bytes() == Path(f"{other}{end}").read_bytes() for end in (".bin", ".idx"))


def commit(checkout: Path) -> str:
    """Return the commit of a git checkout, or "unknown"."""
    shown = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return shown.stdout.strip() or "unknown"


def table(result: dict[str, Any]) -> list[str]:
    lines = ["", f"{'whole commands':24}  Mtok/CPU-s  CPU-s  of which to start"]
    for name, row in result["tools"].items():
        rate, total, start = row["tokens_per_cpu_second"], row["cpu_seconds"], row["cpu_seconds_to_start"]
        lines.append(f"{name:24}  {rate / 1e6:10.2f}  {total:5.1f}  {start:16.1f}")
    same = "the same .bin and .idx" if result["same_ids"] else "DIFFERENT ids or document ends"
    return [*lines, f"Megatron-LM {result['megatron_lm'][:8]} and ours with --no-shuffle wrote {same}"]
