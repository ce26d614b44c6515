"""Memory and time of every conversion, each in a process of its own, on random weights of a real shape.

    python -m benchmarks.conversion [--model blackmamba_2.8b] [--dtype bf16] [--nproc N] [--folder DIR] [--no-verify]
        [--json]
    python -m benchmarks.conversion --native [--folder DIR] [--json]

Goes round: released files → checkpoint → Hugging Face → checkpoint → released files, each with its final comparison.
Peak memory is the process's own (ru_maxrss), mapped files included. With `--nproc`, which is for `export hf`, it is the
memory of the largest process. Needs disk for three copies.

`--native` takes a Mamba-2 of 2.7 billion parameters in bf16 from transformers' files to a checkpoint, back, and to
llama.cpp. It compares no outputs, and needs disk for two copies.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.generation import machine
from megatron_blackmamba.config import ModelConfig, load
from megatron_blackmamba.data_tools.bpe import train
from megatron_blackmamba.interchange import native, zyphra
from megatron_blackmamba.interchange.canonical import Canonical, Entry, kept_in_fp32, shapes

VERBS = (
    ("import zyphra", "released", "checkpoint"),
    ("export hf", "checkpoint", "hf"),
    ("import hf", "hf", "checkpoint_again"),
    ("export zyphra", "checkpoint_again", "released_again"),
)


MAMBA2 = [
    *("model.hidden_size=2560", "model.vocab_size=50288", "model.mamba2.groups=1", "model.final_norm=rms"),
    "model.pattern=" + "S" * 64,
]
NATIVE_VERBS = (
    ("import hf", "transformers", "checkpoint", "--no-verify", "--tokenizer", "tokenizer.json"),
    ("export hf", "checkpoint", "again", "--native", "--check", "none"),
    ("export gguf", "checkpoint", "model.gguf", "--type", "q8_0"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="blackmamba_2.8b")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the files are made, for a while (default: the system's)")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--native", action="store_true")
    arguments = parser.parse_args()
    if arguments.native:
        arguments.model, arguments.dtype = "a Mamba-2", "bf16"
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="conversion_") as folder:
        if arguments.native:
            result = run_native(Path(folder))
        else:
            config, verify = load(arguments.model).model, not arguments.no_verify
            result = run(Path(folder), config, arguments.dtype, verify, arguments.nproc)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['machine']}; {arguments.model}, {arguments.dtype}, {result['gigabytes']:.1f} GB of weights")
    for row in result["conversions"]:
        times = f"{row['seconds']:8.0f} s{row['cpu_seconds']:8.0f} CPU s"
        print(f"{row['verb']:15}{times}{row['peak_gigabytes']:8.2f} GB   {row['parity']}")


def run(folder: Path, config: ModelConfig, precision: str, verify: bool, nproc: int = 1) -> dict[str, Any]:
    model = random_model(config, {"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    zyphra.write(model, folder / "released")
    rows = []
    for verb, source, target in VERBS:
        command = [sys.executable, "-m", "megatron_blackmamba", *verb.split(), source, target]
        if verb == "import zyphra":
            command += ["--activation", config.activation]
        if verb == "export hf":
            command += ["--nproc", str(nproc)]
        rows.append(measure([*command, *([] if verify else ["--no-verify"])], folder) | {"verb": verb})
        if source not in ("released",):
            shutil.rmtree(folder / source)
    return {"machine": machine(), "gigabytes": model.bytes / 1e9, "conversions": rows}


def run_native(folder: Path) -> dict[str, Any]:
    model = random_model(load("mamba_343m", MAMBA2).model, torch.bfloat16)
    native.write(model, folder / "transformers")
    (folder / "tokenizer.json").write_bytes(train([[__doc__ or ""]], 300))
    rows = []
    for verb, source, target, *more in NATIVE_VERBS:
        command = [sys.executable, "-m", "megatron_blackmamba", *verb.split(), source, target, *more]
        rows.append(measure(command, folder) | {"verb": verb})
        if source == "transformers" or target == "again":
            shutil.rmtree(folder / ("again" if target == "again" else source))
    return {"machine": machine(), "gigabytes": model.bytes / 1e9, "conversions": rows}


def measure(command: list[str], folder: Path) -> dict[str, Any]:
    """Run it under a small process that waits for it alone, since the kernel reports the largest child of all."""
    watch = "import json, resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=sys.stderr); "
    watch += "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    watch += "print(done.returncode, used.ru_maxrss, round(used.ru_utime + used.ru_stime))"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", watch, *command], cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    code, kilobytes, cpu = map(int, done.stdout.split())
    if code:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    compared = [line for line in done.stderr.splitlines() if "compared with" in line]
    found = {"seconds": seconds, "cpu_seconds": cpu, "peak_gigabytes": kilobytes * 1024 / 1e9}
    return {**found, "parity": compared[-1]}


def random_model(config: ModelConfig, dtype: torch.dtype) -> Canonical:
    """Weights of the scale that training starts from, drawn when they are read, the same each time."""

    def entry(name: str, shape: tuple[int, ...], seed: int) -> Entry:
        kept = torch.float32 if name.endswith(kept_in_fp32(config)) else dtype

        def draw() -> Tensor:
            noise = torch.empty(shape).normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
            if name.endswith("A_log"):
                noise += torch.log(torch.arange(1.0, shape[-1] + 1))
            elif name.endswith(("norm.weight", "layernorm.weight", ".D")):
                noise += 1
            elif name.endswith("dt_proj.bias"):
                noise -= 4
            return noise.to(kept)

        return Entry(shape, kept, draw)

    entries = {name: entry(name, shape, i) for i, (name, shape) in enumerate(shapes(config).items())}
    return Canonical(config, entries, "random weights")


if __name__ == "__main__":
    main()
