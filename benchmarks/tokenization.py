"""Tokens per CPU-second from one JSON Lines file to Megatron's .bin and .idx: ours and the usual alternatives.

    python -m benchmarks.tokenization --input FILE.jsonl --tokenizer FILE [--repeats 3] [--megabytes 64] [--words N]

Without --input, the text is this machine's own Python sources. All take turns, each in a fresh process on one core.
The time starts after the imports and a tokenizer warm-up, and ends with complete files on disk.

- ours: with all checks (source and output hashed, ids range-checked, a sample encoded again by the reference),
  documents shuffled, files synced to disk
- ours, in order: the same with --no-shuffle
- ours, held out: the same with --hold-out 0.1%, as `data corpora` prints it
- ours, each alone: the same without encoding short documents together, to show what that gains
- ours, encoding alone: only the call that encodes parsed texts
- encode_batch_fast: orjson, Hugging Face tokenizers in batches of 1000, files written by numpy
- tokenizers: json, Hugging Face tokenizers and megatron-core's IndexedDatasetBuilder, one document at a time
- classic: json, transformers' fast tokenizer and IndexedDatasetBuilder, one document at a time, as in Megatron's
  preprocess_data
- datatrove: its JsonlReader and DocumentTokenizer, if installed

With --megatron-lm FOLDER, a checkout of Megatron-LM, whole commands are compared too: `blackmamba data tokenize` and
Megatron-LM's tools/preprocess_data_fast.py, one worker each. All processes count, from start to end, and so do theirs
on the first document alone, which is subtracted from the rate. The .bin and .idx must be the same.
--megatron-python names a Python 3.12 that has what the tool imports: torch, transformers, gigatoken and awkward.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _whole_tools
from megatron_blackmamba.tokenizer import load_tokenizer

BASELINE = "classic"
Measured = tuple[int, float]  # tokens, CPU-seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="JSON lines with a field `text`")
    parser.add_argument("--tokenizer", help="a file or a Hugging Face name; without one, a BPE of 16,384 is trained")
    parser.add_argument("--megabytes", type=float, default=64, help="how much of the input is used")
    parser.add_argument("--words", type=int, help="cut the input into documents of this many words")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megatron-lm", type=Path, metavar="FOLDER", help="a checkout, to compare its fast tool")
    parser.add_argument("--megatron-python", default=sys.executable, help="the Python that runs it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(WAYS[arguments.measure](arguments.input, arguments.tokenizer, arguments.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="tokenization_") as folder:
        corpus = Path(folder) / "corpus.jsonl"
        documents = write_corpus(corpus, arguments.input, arguments.megabytes * 1e6, arguments.words)
        tokenizer = Path(folder) / "tokenizer.json"
        if arguments.tokenizer:
            load_tokenizer(arguments.tokenizer).save(tokenizer)
        else:
            tokenizer.write_bytes(trained_on(corpus))
        result = compare(corpus, tokenizer, Path(folder), arguments.repeats, arguments.ways)
        if arguments.megatron_lm:
            result["whole"] = _whole_tools.compare_whole_tools(
                corpus, tokenizer, Path(folder), arguments.repeats, arguments.megatron_lm, arguments.megatron_python
            )
        result["corpus"] = {"bytes": corpus.stat().st_size, "documents": documents}
    print(json.dumps(result, indent=2) if arguments.json else table(result))


def trained_on(corpus: Path) -> bytes:
    """A tokenizer.json made from the corpus itself: needs no network."""
    from megatron_blackmamba.data_tools import bpe
    from megatron_blackmamba.data_tools.readers import ReadOptions
    from megatron_blackmamba.data_tools.rejects import Tolerance
    from megatron_blackmamba.data_tools.sources import find_sources

    sources = find_sources([str(corpus)], None, None).sources
    return bpe.train(bpe.sample(sources, ReadOptions(fields=("text",)), Tolerance.parse("0"), 1 << 30), 16_384)


def compare(corpus: Path, tokenizer: Path, folder: Path, repeats: int, ways: list[str]) -> dict[str, Any]:
    measured: dict[str, list[Measured]] = {way: [] for way in ways if way != "datatrove" or find_spec("datatrove")}
    for _ in range(repeats):
        for way, runs in measured.items():
            print(way, file=sys.stderr)
            runs.append(in_a_fresh_process(way, corpus, tokenizer, folder))
    every = {way: [tokens / seconds for tokens, seconds in runs] for way, runs in measured.items()}
    rates = {way: statistics.median(runs) for way, runs in every.items()}
    return {
        "tokens": next(iter(measured.values()))[0][0],
        "tokens_per_cpu_second": rates,
        "range": {way: [min(runs), max(runs)] for way, runs in every.items()},
        "times_classic": {way: rate / rates[BASELINE] for way, rate in rates.items()} if BASELINE in rates else {},
        "absent": [way for way in ways if way not in measured],
        "repeats": repeats,
        "machine": machine(),
    }


def in_a_fresh_process(way: str, corpus: Path, tokenizer: Path, folder: Path) -> Measured:
    arguments = ["--measure", way, "--input", corpus, "--tokenizer", tokenizer]
    with tempfile.TemporaryDirectory(dir=folder) as out:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.tokenization", *map(str, arguments), "--folder", out],
            env={**os.environ, **_whole_tools.ONE_THREAD},
            stdout=subprocess.PIPE,
            check=True,
        )
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def cpu_seconds(work: Callable[[], int]) -> Measured:
    """Tokens that `work` returns, and what the processor spent on it in this process, all threads together."""
    start = time.process_time()
    tokens = work()
    return tokens, time.process_time() - start


def ours(corpus: Path, name: str, folder: Path, **options: Any) -> Measured:
    from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, plan
    from megatron_blackmamba.data_tools.workers import make_shards

    tokenizer = load_tokenizer(name)
    tokenizer.encode_batch(["warm"])
    assert tokenizer.vocab_size
    jobs = [
        job
        for side in (("train", "validation") if "hold_out" in options else (None,))
        for job in plan([str(corpus)], folder / str(side), TokenizeOptions(side=side, **options)).mine
    ]
    return cpu_seconds(lambda: sum(made.manifest.tokens for made in make_shards(jobs, tokenizer, cores=1, quiet=True)))


def ours_in_order(corpus: Path, name: str, folder: Path) -> Measured:
    return ours(corpus, name, folder, shuffle=False)


def ours_held_out(corpus: Path, name: str, folder: Path) -> Measured:
    return ours(corpus, name, folder, hold_out="0.1%")


def ours_each_alone(corpus: Path, name: str, folder: Path) -> Measured:
    from megatron_blackmamba import tokenizer

    tokenizer.SHORT_TEXT = 0
    return ours(corpus, name, folder)


def encoding_alone(corpus: Path, name: str, folder: Path) -> Measured:
    """Only the call that encodes parsed texts: an upper bound for any tool around it."""
    import orjson

    tokenizer = load_tokenizer(name)
    tokenizer.encode_batch(["warm"])
    batches = [[orjson.loads(line)["text"] for line in lines] for lines in batches_of_lines(corpus, 8192)]
    return cpu_seconds(lambda: sum(len(tokenizer.encode_batch(texts)[0]) + len(texts) for texts in batches if texts))


def encode_batch_fast(corpus: Path, name: str, folder: Path) -> Measured:
    import orjson
    import tokenizers

    from megatron_blackmamba.formats.shards import token_dtype, write_idx

    tokenizer = tokenizers.Tokenizer.from_file(name)
    tokenizer.encode_batch_fast(["warm"])
    eod, dtype = load_tokenizer(name).eod_id, token_dtype(tokenizer.get_vocab_size())

    def work() -> int:
        lengths = []
        with open(folder / "out.bin", "wb") as file:
            for lines in batches_of_lines(corpus, 1000):
                texts = [orjson.loads(line)["text"] for line in lines]
                for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                    ids = encoding.ids
                    ids.append(eod)
                    file.write(np.array(ids, dtype).tobytes())
                    lengths.append(len(ids))
        with open(folder / "out.idx", "wb") as file:
            write_idx(file, dtype, np.array(lengths))
        return sum(lengths)

    return cpu_seconds(work)


def one_document_at_a_time(encode: Callable[[str], list[int]], eod: int, corpus: Path, folder: Path) -> Measured:
    import torch

    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "out.bin"), dtype=DType.optimal_dtype(50277))
    encode("warm")

    def work() -> int:
        tokens = 0
        with open(corpus, encoding="utf-8") as file:
            for line in file:
                ids = encode(json.loads(line)["text"])
                ids.append(eod)
                builder.add_document(torch.IntTensor(ids), [len(ids)])
                tokens += len(ids)
        builder.finalize(str(folder / "out.idx"))
        return tokens

    return cpu_seconds(work)


def plain_tokenizers(corpus: Path, name: str, folder: Path) -> Measured:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(name)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return one_document_at_a_time(encode, load_tokenizer(name).eod_id, corpus, folder)


def classic(corpus: Path, name: str, folder: Path) -> Measured:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=name)

    def encode(text: str) -> list[int]:
        return tokenizer(text).input_ids

    return one_document_at_a_time(encode, load_tokenizer(name).eod_id, corpus, folder)


def datatrove(corpus: Path, name: str, folder: Path) -> Measured:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    eod = load_tokenizer(name).eod_token
    steps = [
        JsonlReader(str(corpus.parent), glob_pattern=corpus.name),
        DocumentTokenizer(str(folder / "out"), tokenizer_name_or_path=name, eos_token=eod, shuffle_documents=False),
    ]

    def work() -> int:
        LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=str(folder / "logs")).run()
        return sum(path.stat().st_size for path in (folder / "out").rglob("*.ds")) // 2

    return cpu_seconds(work)


WAYS: dict[str, Callable[[Path, str, Path], Measured]] = {
    "ours": ours,
    "ours, in order": ours_in_order,
    "ours, held out": ours_held_out,
    "ours, each alone": ours_each_alone,
    "ours, encoding alone": encoding_alone,
    "encode_batch_fast": encode_batch_fast,
    "tokenizers": plain_tokenizers,
    "classic": classic,
    "datatrove": datatrove,
}


def batches_of_lines(path: Path, count: int) -> Iterator[list[bytes]]:
    with open(path, "rb") as file:
        lines: list[bytes] = []
        for line in file:
            lines.append(line)
            if len(lines) == count:
                yield lines
                lines = []
        yield lines


def write_corpus(path: Path, given: Path | None, most: float, words: int | None) -> int:
    """Copy whole lines of the input, or gather this machine's Python sources; return how many documents."""
    documents, size = 0, 0
    with open(path, "wb") as file:
        lines = lines_of(given) if given else python_sources()
        for line in cut(lines, words) if words else lines:
            if size + len(line) > most:
                break
            file.write(line)
            documents, size = documents + 1, size + len(line)
    return documents


def cut(lines: Iterator[bytes], words: int) -> Iterator[bytes]:
    for line in lines:
        text = json.loads(line)["text"].split(" ")
        for start in range(0, len(text), words):
            if part := " ".join(text[start : start + words]):
                yield json.dumps({"text": part}).encode() + b"\n"


def lines_of(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def python_sources() -> Iterator[bytes]:
    for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if text := source.read_text(errors="replace"):  # an empty __init__.py is no document
            yield json.dumps({"text": text}).encode() + b"\n"


def machine() -> str:
    from benchmarks._common import cpu_model

    return f"{cpu_model()}, one core used of {os.cpu_count()}"


def table(result: dict[str, Any]) -> str:
    corpus = result["corpus"]
    lines = [
        f"{corpus['documents']:,} documents, {corpus['bytes'] / 1e6:.1f} MB, {result['tokens']:,} tokens; "
        f"median of {result['repeats']}; {result['machine']}",
        f"{'':20}  Mtok/CPU-s        range  times classic",
    ]
    for way, rate in result["tokens_per_cpu_second"].items():
        times = f"{result['times_classic'][way]:13.1f}" if way in result["times_classic"] else ""
        low, high = (f"{limit / 1e6:.2f}" for limit in result["range"][way])
        lines.append(f"{way:20}  {rate / 1e6:10.2f}  {low + '-' + high:>11}  {times}".rstrip())
    lines += [f"{way:20}  not installed" for way in result["absent"]]
    return "\n".join(lines + (_whole_tools.table(result["whole"]) if "whole" in result else []))


if __name__ == "__main__":
    main()
