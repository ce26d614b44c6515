"""A byte-level BPE tokenizer trained on the inputs themselves, for small runs.

Beside tokenizer.json lies a record of the request: the size asked for, the inputs and how they are read. The same
request uses the tokenizer again.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron_blackmamba.data_tools.batches import ReadOptions
from megatron_blackmamba.data_tools.object_storage import TRAINED
from megatron_blackmamba.data_tools.progress import listed, short
from megatron_blackmamba.data_tools.readers import Reader
from megatron_blackmamba.data_tools.rejects import InputError, RejectLog, Tolerance
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.data_tools.streams import STDIN
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.shards import MANIFEST_SUFFIX
from megatron_blackmamba.tokenizer import load_tokenizer

EOD_TOKEN = "<|endoftext|>"
_BYTES_AND_EOD = 257


def train_or_reuse(
    sources: Sequence[Source],
    out_dir: Path,
    read: ReadOptions,
    tolerance: Tolerance,
    vocab_size: int,
    train_bytes: int,
    say: Callable[[str], None] = lambda _: None,
    overwrite: bool = False,
) -> Path:
    """Return the path of tokenizer.json in `out_dir`: that of an earlier call for the same, or trained now.

    Another request trains anew with `overwrite`, or if no shards lie in the folder; otherwise it is refused.
    """
    path = out_dir / "tokenizer.json"
    if vocab_size < _BYTES_AND_EOD:
        raise InputError(f"--train-tokenizer {vocab_size}: at least {_BYTES_AND_EOD}, every byte and {EOD_TOKEN}")
    request = _request(sources, read, vocab_size, train_bytes)
    if any(source.path == STDIN for source in sources):
        raise InputError("--train-tokenizer reads its input twice, which standard input does not allow. Give files")
    if path.exists():
        difference = _difference(path, request, sample(sources, read, tolerance, train_bytes))
        if difference is None:
            say(f"{path}: trained earlier, used again ({load_tokenizer(path).vocab_size} tokens)")
            return path
        if not overwrite and any(out_dir.rglob(f"*{MANIFEST_SUFFIX}")):
            raise InputError(
                f"{path}: {difference}. Use it as it is with --tokenizer {path}, choose another folder, or train "
                "another one with --overwrite"
            )
        say(f"{path}: {difference}, so it is replaced")
    say(f"training a tokenizer of {vocab_size} tokens on up to {short(train_bytes)} characters of the inputs")
    text = _Digest(sample(sources, read, tolerance, train_bytes))
    content = train(text, vocab_size)
    if not text.characters:
        raise InputError(f"--train-tokenizer: there is no text in {listed([s.path for s in sources])}")
    (out_dir / TRAINED).unlink(missing_ok=True)  # never the record of another tokenizer
    atomic.write_bytes(path, content)
    tokenizer = load_tokenizer(path)
    made = {"tokenizer_sha256": tokenizer.sha256, "text_sha256": text.hexdigest()}
    atomic.write_json(out_dir / TRAINED, {**request, **made})
    say(f"{path}: trained, {tokenizer.vocab_size} tokens")
    if tokenizer.vocab_size < vocab_size:
        say(
            f"{path}: only {tokenizer.vocab_size} of {vocab_size} tokens, because the inputs have too little text for"
            f" more. Set model.vocab_size={tokenizer.vocab_size}, or add text"
        )
    return path


def _request(sources: Sequence[Source], read: ReadOptions, vocab_size: int, train_bytes: int) -> dict[str, Any]:
    """Return what decides the tokenizer, as JSON has it."""
    inputs = [[source.name, source.format, source.bytes, source.modified_ns] for source in sources]
    options = {**asdict(read), "fields": list(read.fields)}
    return {"vocab_size": vocab_size, "train_bytes": train_bytes, "read": options, "inputs": inputs}


def _difference(path: Path, request: dict[str, Any], texts: Iterable[list[str]]) -> str | None:
    """Return why an existing tokenizer is not the one that a request would train; None if it is."""
    tokenizer = load_tokenizer(path)
    record = path.with_name(TRAINED)
    made = json.loads(record.read_bytes()) if record.exists() else {}
    if made.get("tokenizer_sha256") != tokenizer.sha256:
        if not made and tokenizer.vocab_size == request["vocab_size"]:
            return None  # of an earlier version, which kept no record
        size = f"has {tokenizer.vocab_size} tokens, --train-tokenizer asks for {request['vocab_size']}"
        return f"{size}, and there is no record of its training"
    for key, what in (("vocab_size", "--train-tokenizer"), ("train_bytes", "--train-bytes")):
        if made[key] != request[key]:
            return f"was trained with {what} {made[key]}, not {request[key]}"
    for key, value in request["read"].items():
        if made["read"].get(key) != value:
            return f"was trained with {key} = {made['read'].get(key)!r}, not {value!r}"
    if made["inputs"] == request["inputs"] or made["text_sha256"] == _Digest(texts).hexdigest():
        return None
    before, now = (listed([name for name, *_ in inputs]) for inputs in (made["inputs"], request["inputs"]))
    return f"was trained on {before}, " + ("whose text has changed" if before == now else f"not on {now}")


class _Digest:
    """Batches of texts, with the hash and the number of characters of those that were taken."""

    def __init__(self, batches: Iterable[list[str]]) -> None:
        self.batches, self.hash, self.characters = batches, hashlib.sha256(), 0

    def __iter__(self) -> Iterator[list[str]]:
        for texts in self.batches:
            for text in texts:
                self.hash.update(text.encode(errors="surrogatepass") + b"\xff")  # a byte that no text has
                self.characters += len(text)
            yield texts

    def hexdigest(self) -> str:
        """Return the hash of all texts, after taking those that are left."""
        for _ in self:
            pass
        return self.hash.hexdigest()


def train(texts: Iterable[list[str]], vocab_size: int) -> bytes:
    """Train a byte-level BPE, which encodes any text without loss, and return its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer.to_str(pretty=True).encode()


def sample(sources: Sequence[Source], read: ReadOptions, tolerance: Tolerance, train_bytes: int) -> Iterator[list[str]]:
    """Yield the beginning of every file, in proportion to its size, `train_bytes` of text in total."""
    total = sum(source.bytes for source in sources)
    for source in sources:
        log = RejectLog(tolerance)  # of this file alone: its shard, which counts them all, is checked later
        budget = max(1, train_bytes * source.bytes // max(1, total))
        reader = Reader(source.path, source.format, read, partial(log.add, source.name, source.path))
        for batch in reader.batches():
            yield batch.texts
            budget -= sum(len(text) for text in batch.texts)
            if budget <= 0:
                break
