"""Measure the start-up of a 300-billion-token run: this project's mixture and megatron-core's, on the same files.

    python -m benchmarks.mixture_scale [--documents 10e6 30e6 100e6] [--repeats 3] [--folder DIR] [--json]

1. The paper's plan: the shipped mixture with 146,484,375 samples. Six sparse files have the sizes of the six sources
   (1.24 trillion tokens, one document per 1,035 tokens). Measures the time until the first batch, and memory.
2. Start-up time by number of documents: ten shards with realistic, log-normal document lengths, one epoch. The builders
   take turns, each in a fresh process. Time and memory count from after the imports. megatron-core's builder runs once
   without its cache, as for every new seed, length or blend, and once with it.
3. The deviation of the order from its weights at each of the 146,484,375 prefixes.
4. One random sample: warm in parts 1 and 2; cold from a file of 1 GB that is not in memory, with the bytes read from
   disk.

Our start-up time does not depend on the number of documents. megatron-core's builder is measured up to the largest size
that the machine can handle. Its time is extrapolated linearly to the 1.2 billion documents of the paper's sources.
Needs 4 GB of disk and 8 GB of memory.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_blackmamba.config import find
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.formats.shards import MANIFEST_SUFFIX, ShardManifest, beside, idx_bytes, write_idx
from megatron_blackmamba.formats.source_schedule import Blend, Schedule, _Node

SEQUENCE_LENGTH = 2048
PAPER_SAMPLES = 146_484_375
PAPER_TOKENS_PER_DOCUMENT = 1035  # 1.2 billion documents
SHARD_TOKENS = 10**9
HELD_OUT_TOKENS = 10**7
SHARDS_OF_SERIES = 10
BATCH = 8
READS = 500
COLD_TOKENS = 5 * 10**8
VOCABULARY = 50277


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=float, nargs="+", default=[10e6, 30e6, 100e6])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=float, default=PAPER_SAMPLES)
    parser.add_argument("--folder", type=Path, help="where the files are made, for a while (default: the system's)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_here(arguments.measure, arguments.folder, int(arguments.samples))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="mixture_scale_") as folder:
        result = run(Path(folder), [int(n) for n in arguments.documents], arguments.repeats, int(arguments.samples))
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


def run(folder: Path, documents: list[int], repeats: int, samples: int) -> dict[str, Any]:
    say(f"the paper's sources as sparse files in {folder}")
    shards = write_paper(folder / "paper")
    result: dict[str, Any] = {"machine": machine(), "samples": samples, "shards": shards}
    result["paper"] = [measure("ours", folder / "paper", samples) for _ in range(repeats)]
    result["series"] = {}
    for count in documents:
        say(f"{count:,} documents")
        target = folder / str(count)
        tokens = write_series(target, count)
        runs: dict[str, list] = {label: [] for label in ("ours", "megatron-core", "…from its cache")}
        for _ in range(repeats):
            for cache in (target / "a").glob("*/cache"):  # megatron-core leaves its indices in a folder beside a shard
                shutil.rmtree(cache)
            for label, kind in zip(runs, ("ours", "megatron", "megatron"), strict=True):
                runs[label].append(measure(kind, target, tokens // SEQUENCE_LENGTH))
        result["series"][count] = runs
        shutil.rmtree(target)
    say("a cold file")
    cold = folder / "cold"
    write_cold(cold)
    result["cold"] = {kind: [] for kind in BUILDERS}
    for _ in range(repeats):
        for kind in BUILDERS:
            forget(cold)
            result["cold"][kind].append(measure(f"{kind}_cold", cold, COLD_TOKENS // SEQUENCE_LENGTH))
    say("every prefix of the order")
    result["deviation"] = prefix_deviation(samples)
    return result


# ---- files


def write_paper(folder: Path) -> int:
    """Sparse shards of the paper's six sources, a held-out one in each; returns how many there are."""
    mixture = find("paper_mix").read_text().replace("${BLACKMAMBA_DATA}", str(folder))
    folder.mkdir(parents=True)
    (folder / "mixture.yaml").write_text(mixture)
    count = 0
    for source in Mixture.read(folder / "mixture.yaml").sources:
        whole, rest = divmod(source.tokens or 0, SHARD_TOKENS)
        shards = {f"{source.name}/shard_{number:05}": SHARD_TOKENS for number in range(1, whole + 1)}
        shards |= {f"{source.name}/shard_{whole + 1:05}": rest} if rest else {}
        shards |= {f"{place}/shard_00001": HELD_OUT_TOKENS for place in source.validation}
        for name, tokens in shards.items():
            documents = -(-tokens // PAPER_TOKENS_PER_DOCUMENT)
            prefix = folder / name
            prefix.parent.mkdir(parents=True, exist_ok=True)
            header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1)
            sparse(beside(prefix, ".idx"), idx_bytes(documents, documents), header)
            sparse(beside(prefix, ".bin"), 2 * tokens)
            write_manifest(prefix, tokens, documents)
        count += len(shards)
    return count


def write_series(folder: Path, documents: int) -> int:
    """Shards with real indices over sparse tokens; returns the tokens."""
    random = np.random.default_rng(0)
    total = 0
    (folder / "a").mkdir(parents=True)
    for number in range(1, SHARDS_OF_SERIES + 1):
        lengths = 1 + random.lognormal(6.3, 1.0, documents // SHARDS_OF_SERIES).astype(np.int32)
        prefix = folder / "a" / f"shard_{number:05}"
        with open(beside(prefix, ".idx"), "wb") as file:
            write_idx(file, np.dtype("uint16"), lengths)
        tokens = int(lengths.sum(dtype=np.int64))
        sparse(beside(prefix, ".bin"), 2 * tokens)
        write_manifest(prefix, tokens, len(lengths))
        total += tokens
    (folder / "mixture.yaml").write_text("sources: [{name: a, shards: a}]\n")
    return total


def write_cold(folder: Path) -> None:
    """A shard whose tokens lie on the disk."""
    random = np.random.default_rng(0)
    prefix = folder / "a/shard_00001"
    prefix.parent.mkdir(parents=True)
    with open(beside(prefix, ".idx"), "wb") as file:
        write_idx(file, np.dtype("uint16"), np.full(COLD_TOKENS // 1000, 1000))
    with open(beside(prefix, ".bin"), "wb") as file:
        for _ in range(10):
            file.write(random.integers(VOCABULARY, size=COLD_TOKENS // 10, dtype=np.uint16).tobytes())
        file.flush()
        os.fsync(file.fileno())
    write_manifest(prefix, COLD_TOKENS, COLD_TOKENS // 1000)
    (folder / "mixture.yaml").write_text("sources: [{name: a, shards: a}]\n")


def forget(folder: Path) -> None:
    """Drop the tokens from the page cache."""
    for path in folder.rglob("*.bin"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sparse(path: Path, size: int, beginning: bytes = b"") -> None:
    with open(path, "wb") as file:
        file.write(beginning)
        file.truncate(size)


def write_manifest(prefix: Path, tokens: int, documents: int) -> None:
    manifest = ShardManifest(
        documents=documents,
        tokens=tokens,
        dtype="uint16",
        bin_sha256=hashlib.sha256(str(prefix).encode()).hexdigest(),  # holes all look alike
        idx_sha256="",
        eod_id=0,
        tokenizer="none",
        tokenizer_sha256="",
        vocab_size=VOCABULARY,
        sources=[],
    )
    beside(prefix, MANIFEST_SUFFIX).write_text(manifest.model_dump_json())


# ---- what is measured, each in a process of its own


def measure(kind: str, folder: Path, samples: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.mixture_scale", "--measure", kind]
    command += ["--folder", str(folder), "--samples", str(samples)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return json.loads(done.stdout)


class Usage:
    """Wall-clock and CPU seconds, and the peak of memory, between its making and `until_now`."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current memory
        self.before = (time.perf_counter(), time.process_time(), status("status", "VmHWM"))
        self.after = self.before

    def until_now(self) -> "Usage":
        self.after = (time.perf_counter(), time.process_time(), status("status", "VmHWM"))
        return self

    def figures(self) -> dict[str, float]:
        wall, cpu, kilobytes = (b - a for a, b in zip(self.before, self.after, strict=True))
        return {
            "seconds": wall,
            "cpu_seconds": cpu,
            "bytes": 1024 * kilobytes,
            "process_bytes": 1024 * self.after[2],
        }


def ours(folder: Path, samples: int) -> tuple[Usage, Any]:
    """Build the training data and read a first batch; return the usage, and the data."""
    from megatron_blackmamba.data import BatchStream, build
    from megatron_blackmamba.settings import DataConfig

    config = DataConfig(kind="mixture", mixture=str(folder / "mixture.yaml"), sequence_length=SEQUENCE_LENGTH)
    usage = Usage()
    train = build(config, vocab_size=50304, total_samples=samples).train
    next(BatchStream(train, global_batch=BATCH, micro_batch=BATCH, workers=0))
    return usage.until_now(), train


def megatron(folder: Path, samples: int) -> tuple[Usage, Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    prefixes = sorted(str(path.with_suffix("")) for path in (folder / "a").glob("*.bin"))
    weights = [float(os.path.getsize(f"{prefix}.bin")) for prefix in prefixes]
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE_LENGTH,
        blend=(prefixes, weights),
        split="1,0,0",
        tokenizer=SimpleNamespace(eod=0, pad=1, vocab_size=VOCABULARY, unique_identifiers={}, special_tokens_dict={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    usage = Usage()
    sizes = [int(samples * 0.99), 0, 0]  # just below an epoch
    train = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    for k in range(BATCH):
        train[k]
    return usage.until_now(), train


BUILDERS = {"ours": ours, "megatron": megatron}
LABELS = {"ours": "ours", "megatron": "megatron-core"}
MEASURES = [kind + how for kind in BUILDERS for how in ("", "_cold")]


def measure_here(name: str, folder: Path, samples: int) -> dict[str, float]:
    usage, train = BUILDERS[name.removesuffix("_cold")](folder, samples)
    if name.endswith("_cold"):
        return time_cold_reads(train)
    return {**usage.figures(), **time_reads(train)}


def status(file: str, key: str) -> int:
    """A number from /proc/self."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key)))


def time_reads(train: Any) -> dict[str, float]:
    """Median microseconds of one random sample whose pages were read before."""
    places = np.random.default_rng(1).integers(0, len(train), READS).tolist()
    for k in places:
        train[k]
    times = []
    for k in places:
        start = time.perf_counter()
        train[k]
        times.append(time.perf_counter() - start)
    return {"read_us": statistics.median(times) * 1e6}


def time_cold_reads(train: Any) -> dict[str, float]:
    """Mean microseconds of one random sample that is not in memory, and the bytes the disk read for it."""
    places = np.random.default_rng(2).integers(0, len(train), READS).tolist()
    start, before = time.perf_counter(), status("io", "read_bytes")
    for k in places:
        train[k]
    seconds = time.perf_counter() - start
    return {"read_us": seconds / READS * 1e6, "disk_bytes": (status("io", "read_bytes") - before) / READS}


def prefix_deviation(samples: int, block: int = 2**20) -> dict[str, float]:
    """The farthest any source of the shipped mixture is from its share, over all prefixes; and the time that takes."""
    schedule = Mixture.read(find("paper_mix")).schedule([0] * 6, SEQUENCE_LENGTH)
    probabilities = [float(p) for p in schedule.blends[0].probabilities]
    start, worst = time.perf_counter(), 0.0
    given = np.zeros(len(probabilities), np.int64)
    for first in range(0, samples, block):
        source, _ = locate_range(schedule, first, min(first + block, samples))
        prefix = np.arange(first + 1, first + 1 + len(source))
        for number, probability in enumerate(probabilities):
            counts = given[number] + np.cumsum(source == number)
            worst = max(worst, float(np.abs(counts - probability * prefix).max()))
            given[number] = counts[-1]
    return {"samples": samples, "worst": worst, "seconds": time.perf_counter() - start}


def locate_range(schedule: Schedule, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources of samples first … end-1, and their indices within the sources, as `Schedule.locate`."""
    ends = [*schedule.starts[1:], end]
    phases = zip(schedule.blends, schedule._before, schedule.starts, ends, strict=True)
    parts = [
        (source, within + np.asarray(before)[source])
        for blend, before, start, stop in phases
        if max(first, start) < min(end, stop)
        for source, within in [_locate_many(blend, np.arange(max(first, start), min(end, stop)) - start)]
    ]
    return np.concatenate([source for source, _ in parts]), np.concatenate([within for _, within in parts])


def _locate_many(blend: Blend, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    source, within = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
    stack = [(blend._root, np.arange(len(samples)), samples.astype(np.uint64))]
    while stack:
        node, places, n = stack.pop()
        if isinstance(node, _Node):
            left = node.to_left(n)
            goes_left = node.to_left(n + np.uint64(1)) > left
            stack.append((node.left, places[goes_left], left[goes_left]))
            stack.append((node.right, places[~goes_left], (n - left)[~goes_left]))
        else:
            source[places], within[places] = node, n.astype(np.int64)
    return source, within


# ---- what is shown


def show(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=100)
    console.print(f"{result['machine']}; medians of interleaved repeats")
    paper = medians(result["paper"])
    console.print(
        f"The paper's plan, {result['samples']:,} samples over 6 sources in {result['shards']:,} shards: "
        f"first batch after {paper['seconds']:.2f} s ({paper['cpu_seconds']:.2f} s CPU), "
        f"{paper['bytes'] / 1e6:.0f} MB more memory, {paper['process_bytes'] / 1e9:.2f} GB with all that is imported; "
        f"a random sample, warm, {paper['read_us']:.0f} µs"
    )
    table = Table(box=box.SIMPLE_HEAD, title="one epoch of 10 shards, by documents")
    for heading in ("documents", "", "seconds", "CPU s", "memory, MB", "random sample, µs"):
        table.add_column(heading, justify="right" if heading else "left")
    for count, kinds in result["series"].items():
        for label, runs in kinds.items():
            m = medians(runs)
            table.add_row(
                f"{int(count):,}",
                label,
                f"{m['seconds']:.3f}",
                f"{m['cpu_seconds']:.3f}",
                f"{m['bytes'] / 1e6:,.1f}",
                f"{m['read_us']:.0f}",
            )
    console.print(table)
    if len(result["series"]) > 1:
        at_paper = extend(result["series"], 1.2e9)
        console.print(
            f"megatron-core extended along its slope to 1.2 billion documents: {at_paper['cpu_seconds']:.0f} CPU s, "
            f"{at_paper['bytes'] / 1e9:.1f} GB"
        )
    for kind, runs in result["cold"].items():
        m = medians(runs)
        console.print(
            f"A random sample from a file not in memory, {LABELS[kind]}: {m['read_us']:,.0f} µs, "
            f"{m['disk_bytes'] / 1e3:,.0f} kB read from the disk"
        )
    deviation = result["deviation"]
    console.print(
        f"Distance of the order from its weights at all {deviation['samples']:,} prefixes: at most "
        f"{deviation['worst']:.3f} samples (checked in {deviation['seconds']:.0f} s)"
    )


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def extend(series: dict[Any, dict[str, list]], documents: float) -> dict[str, float]:
    """Extrapolate megatron-core's cost to `documents`, on the line through the smallest and largest measurement."""
    few, many = min(series, key=int), max(series, key=int)
    low, high = medians(series[few]["megatron-core"]), medians(series[many]["megatron-core"])
    scale = (documents - int(few)) / (int(many) - int(few))
    return {key: low[key] + scale * (high[key] - low[key]) for key in low}


def machine() -> str:
    from benchmarks._common import cpu_model  # it imports torch, which the processes that are measured must not

    return f"{os.cpu_count()}-core CPU machine, {cpu_model()}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
