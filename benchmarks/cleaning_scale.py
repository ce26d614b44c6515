"""Time and memory of `data dedup` on a gigabyte of text that this machine holds.

    python -m benchmarks.cleaning_scale FOLDER... [--bytes 1e9] [--workers 2] [--keep FOLDER] [--json]

The text comes from sources, pages and plain text in the folders. Files are read in order of their names. Each is cut at
the ends of lines into documents of at most 20,000 characters. Repeated files and documents stay, as in a crawl. If the
folders hold too little, the documents are repeated with 30% of their words drawn from a seeded vocabulary.

- seconds: wall time of the command.
- cpu_seconds: CPU time of all its processes, sampled twice a second.
- peak_gb: largest total memory of these processes, sampled twice a second. Shared pages count once (PSS).
- disk_gb: largest size of its output folder, sampled every five seconds.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".html", ".js", ".h", ".hpp", ".c", ".cpp", ".cc")
LONGEST = 20_000
SHORTEST = 200
FILES = 16


def texts_of(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the documents of all text files in the folders."""
    for folder in folders:
        for root, subfolders, names in os.walk(folder):
            subfolders.sort()
            for name in sorted(names):
                if not name.endswith(SUFFIXES):
                    continue
                try:
                    text = Path(root, name).read_text()
                except (OSError, UnicodeDecodeError):
                    continue
                yield from _cut(text)


def _cut(text: str) -> Iterator[str]:
    while len(text) > LONGEST:
        end = text.rfind("\n", SHORTEST, LONGEST) + 1 or LONGEST
        yield text[:end]
        text = text[end:]
    if len(text) >= SHORTEST:
        yield text


def varied(texts: Sequence[str], seed: int) -> Iterator[str]:
    """Yield the texts again with 30% of their words replaced."""
    choose = random.Random(seed)
    vocabulary = sorted({word for text in texts[:: max(1, len(texts) // 500)] for word in text.split(" ")})
    for text in texts:
        words = text.split(" ")
        for place in choose.sample(range(len(words)), round(0.3 * len(words))):
            words[place] = choose.choice(vocabulary)
        yield " ".join(words)


def write_corpus(folders: Sequence[Path], out: Path, most_bytes: float) -> dict[str, float]:
    """Write documents into JSON-lines files until they hold `most_bytes` of text; return the amounts."""
    out.mkdir(parents=True)
    files = [open(out / f"{i:02d}.jsonl", "w") for i in range(FILES)]  # noqa: SIM115
    written = documents = found = 0
    firsts: list[str] = []

    def endless() -> Iterator[str]:
        nonlocal found
        for text in texts_of(folders):
            found += len(text.encode())
            if found < 100e6:
                firsts.append(text)
            yield text
        for seed in itertools.count(1):
            yield from varied(firsts, seed)

    for text in endless():
        files[documents % FILES].write(json.dumps({"text": text}) + "\n")
        written += len(text.encode())
        documents += 1
        if written >= most_bytes:
            break
    for file in files:
        file.close()
    return {"text_gb": written / 1e9, "documents": documents, "of_the_folders_gb": min(found, written) / 1e9}


def measured(command: Sequence[str], work: Path) -> dict[str, float]:
    """Run a command; return its wall time, CPU time, memory and disk use, with its children."""
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    cpu: dict[int, float] = {}
    peak = disk = 0.0
    for tick in itertools.count():
        try:
            process.wait(0.5)
            break
        except subprocess.TimeoutExpired:
            tree = list(_tree(process.pid))
            peak = max(peak, sum(map(_memory, tree)))
            cpu.update((pid, max(cpu.get(pid, 0.0), _cpu_seconds(pid))) for pid in tree)
            if tick % 10 == 0:
                disk = max(disk, sum(_size(path) for path in work.rglob("*")))
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}")
    return {
        "seconds": time.monotonic() - begun,
        "cpu_seconds": sum(cpu.values()),
        "peak_gb": peak / 1e9,
        "disk_gb": disk / 1e9,
    }


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(path).split():
            yield from _tree(int(child))


def _memory(pid: int) -> int:
    """Return the bytes of memory of a process; of a page shared by n processes, 1/n."""
    lines = _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _cpu_seconds(pid: int) -> float:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has just ended
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it has just been removed
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part-size", default="64MB")
    parser.add_argument("--keep", type=Path, help="folder for the text and the result; kept")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cleaning_") as temporary:
        folder = arguments.keep or Path(temporary)
        if (folder / "raw").exists():
            corpus = json.loads((folder / "corpus.json").read_text())
        else:
            corpus = write_corpus(arguments.folders, folder / "raw", arguments.bytes)
            (folder / "corpus.json").write_text(json.dumps(corpus))
        command = [sys.executable, "-m", "megatron_blackmamba", "data", "dedup", str(folder / "raw")]
        command += [str(folder / "clean"), "--workers", str(arguments.workers), "--part-size", arguments.part_size]
        cost = measured(command, folder / "clean")
        counts = json.loads((folder / "clean" / ".work" / "dedup" / "done.json").read_text())
    results = {**corpus, **counts, **cost}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for figure, value in results.items():
        print(f"{figure:20} {value:,.0f}" if value == int(value) else f"{figure:20} {value:,.3g}")


if __name__ == "__main__":
    main()
