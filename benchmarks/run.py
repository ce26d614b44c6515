"""The CPU benchmarks one after the other, in under ten minutes on two cores, into benchmarks/RESULTS.md.

    make bench                        or: python -m benchmarks.run [--only sinkhorn experts] [--out FILE]

A benchmark that is not run, or does not come to its end, keeps the block it has there. What is on a GPU is measured by
scripts/gpu_check.sh; its part of the file is left as it is.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import machine
from megatron_blackmamba.formats import atomic

RESULTS = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- cpu: written by `make bench` -->", "<!-- cpu: end -->"
GPU = """## GPU

`scripts/gpu_check.sh` runs the GPU tests and benchmarks in one call; paste its summary here with the date, the GPU and
the versions.
"""


@dataclass(frozen=True)
class Benchmark:
    name: str
    what: str
    arguments: tuple[str, ...] = ()
    most_seconds: int = 240


CPU = (
    Benchmark("selective_scan", "the scan at the 1.5B model's shape", ("--repeats", "3"), 180),
    Benchmark("ssd", "the scan of Mamba-2 at the 1.5B model's width", ("--repeats", "3"), 120),
    Benchmark("mixers", "a layer of Mamba, Mamba-2 and Mamba-3 at the 1.5B model's width"),
    Benchmark("attention", "attention across documents and within them", ("--repeats", "3")),
    Benchmark("sinkhorn", "routing 16,384 tokens to 8 experts"),
    Benchmark("experts", "grouped experts"),
    Benchmark("train_step", "a step of the tiny model", ("--repeats", "20", "--scans")),
    Benchmark("step_length", "a step of the tiny model by length of the sequence"),
    Benchmark("long_sequences", "one sequence on one process and on two"),
    Benchmark("step_profile", "one Mamba and one MoE layer at the 1.5B shape, by operation",
              ("--pair", "blackmamba_340m_1.5b", "--steps", "3")),
    Benchmark("generation", "time per generated token, 6 of the 1.5B model's 30 layers",
              ("--layers", "6", "--lengths", "10", "500", "--repeats", "5"), 150),
    Benchmark("sampling", "the next token of 50,304 logits"),
    Benchmark("tokenization", "tokens per CPU-second", ("--megabytes", "6", "--repeats", "1"), 150),
    Benchmark("mixture_scale", "starting a 300B-token run", ("--documents", "3e6", "--repeats", "1"), 240),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[b.name for b in CPU], default=[b.name for b in CPU])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    begun = time.monotonic()
    printed = {benchmark.name: _run(benchmark) for benchmark in CPU if benchmark.name in options.only}
    failed = [name for name, section in printed.items() if section is None]
    sections = _sections(options.out) | {name: section for name, section in printed.items() if section}
    _write(options.out, "\n".join(sections[b.name] for b in CPU if b.name in sections))
    print(f"{options.out}: {len(printed) - len(failed)} benchmarks in {time.monotonic() - begun:.0f} s")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _run(benchmark: Benchmark) -> str | None:
    words = [f"benchmarks.{benchmark.name}", *benchmark.arguments]
    shown = f"python -m {' '.join(words)}"
    print(f"$ {shown}", flush=True)
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", *words],
            capture_output=True,
            text=True,
            timeout=benchmark.most_seconds,
            cwd=RESULTS.parents[1],
            env={**os.environ, "COLUMNS": "110"},
        )
    except subprocess.TimeoutExpired:
        print(f"  took more than {benchmark.most_seconds} s: given up", flush=True)
        return None
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
        return None
    print(done.stdout, flush=True)
    took = f"{time.monotonic() - begun:.0f} s, {time.strftime('%Y-%m-%d')}"
    return f"### {benchmark.name}: {benchmark.what}\n\n```\n$ {shown}\n{done.stdout.strip()}\n```\n\n{took}\n"


def _sections(path: Path) -> dict[str, str]:
    """The blocks the file has already, by the benchmark's name."""
    text = path.read_text() if path.is_file() else ""
    cpu = text.partition(BEGIN)[2].partition(END)[0]
    blocks = re.findall(r"^### .*?(?=^### |\Z)", cpu, flags=re.DOTALL | re.MULTILINE)
    return {block[4:].partition(":")[0]: block.rstrip() + "\n" for block in blocks}


def _write(path: Path, cpu: str) -> None:
    here = machine()
    where = f"{here['cpu']}, {here['cores']} cores; " + ", ".join(f"{k} {v}" for k, v in here["versions"].items())
    part = f"{BEGIN}\n\n## CPU, {here['date']}\n\n{where}\n\n{cpu}\n{END}\n"
    if path.is_file() and BEGIN in (text := path.read_text()):
        text = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n", lambda _: part, text, flags=re.DOTALL)
    else:
        text = f"# Results\n\nEvery block is what the command in its first line printed.\n\n{part}\n{GPU}"
    atomic.write_text(path, text)


if __name__ == "__main__":
    main()
