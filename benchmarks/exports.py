"""Seconds of a Hugging Face export by N processes: from a checkpoint, and by the ranks of a run in training.

    python -m benchmarks.exports [--model blackmamba_1.5b] [--processes 1 2] [--folder DIR] [--json]

Random bf16 weights, without the comparison of outputs. `export hf --nproc N` is timed as a command, which starts Python
and checks the checkpoint for damage. The ranks of a run (`checkpoint.export_every`) share the experts. Only the
export is timed, for which training waits. Needs disk for two copies and memory for about two.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.conversion import measure, random_model
from benchmarks.generation import machine
from megatron_blackmamba.config import load
from megatron_blackmamba.interchange import megatron
from megatron_blackmamba.runtime import ports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="blackmamba_1.5b")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where the files are made, for a while (default: the system's)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        print(json.dumps(be_rank(arguments.model, arguments.rank_of)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="exports_") as folder:
        result = run(Path(folder), arguments.model, arguments.processes)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['machine']}; {arguments.model}, bf16, {result['gigabytes']:.1f} GB of weights")
    for row in result["exports"]:
        print(f"{row['processes']} processes: {row['command']:30}{row['seconds']:8.1f} s")


def run(folder: Path, name: str, processes: list[int]) -> dict[str, Any]:
    model = random_model(load(name).model, torch.bfloat16)
    megatron.write(model, folder / "checkpoint")
    rows = []
    for number in processes:
        command = [sys.executable, "-m", "megatron_blackmamba", "export", "hf", "checkpoint", "out", "--no-verify"]
        seconds = measure([*command, "--nproc", str(number)], folder)["seconds"]
        rows.append({"command": "export hf --nproc", "processes": number, "seconds": seconds})
        shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "checkpoint")
    for number in processes:
        rows.append({"command": "the ranks of a run", "processes": number, "seconds": ranks(folder, name, number)})
        shutil.rmtree(folder / "live")
    return {"machine": machine(), "gigabytes": model.bytes / 1e9, "exports": rows}


def ranks(folder: Path, name: str, number: int) -> float:
    """Return the seconds of the slowest of `number` ranks."""
    common = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free_port())}
    command = [sys.executable, "-m", "benchmarks.exports", "--model", name, "--rank-of", str(folder)]
    started = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(number)
    ]
    answers = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a rank failed")
    return max(float(answer.splitlines()[-1]) for answer in answers)


def be_rank(name: str, folder: Path) -> float:
    """Build this rank's part of the model; return the seconds of its export."""
    from megatron_blackmamba.interchange import live
    from megatron_blackmamba.model import build
    from megatron_blackmamba.runtime import world

    size = int(os.environ["WORLD_SIZE"])
    config = load(name, [f"parallel.expert={size}", "training.precision=bf16"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    place = world.start(config.parallel)
    model = build(config, place)
    torch.distributed.barrier()
    begun = time.perf_counter()
    live.export(model, place, folder / "live" / "step_1", source="random weights")
    seconds = time.perf_counter() - begun
    world.shutdown()
    return seconds


if __name__ == "__main__":
    main()
