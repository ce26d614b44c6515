"""A byte-level BPE tokenizer trained on the inputs themselves, for small runs."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_blackmamba.data_tools.progress import short
from megatron_blackmamba.data_tools.readers import Reader, ReadOptions
from megatron_blackmamba.data_tools.rejects import InputError, RejectLog, Tolerance
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.data_tools.streams import STDIN
from megatron_blackmamba.formats import atomic
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
) -> Path:
    """Return the path of tokenizer.json in `out_dir`, trained now unless an earlier call made one of this size."""
    path = out_dir / "tokenizer.json"
    if vocab_size < _BYTES_AND_EOD:
        raise InputError(f"--train-tokenizer {vocab_size}: at least {_BYTES_AND_EOD}, every byte and {EOD_TOKEN}")
    if path.exists():
        there = load_tokenizer(path)
        if there.vocab_size > vocab_size:
            raise InputError(
                f"{path}: has {there.vocab_size} tokens, --train-tokenizer asks for {vocab_size}: "
                "choose another folder, or remove it with its shards"
            )
        say(f"{path}: trained earlier, used again ({there.vocab_size} tokens)")
        return path
    if any(source.path == STDIN for source in sources):
        raise InputError("--train-tokenizer reads its input twice, which standard input does not allow. Give files")
    say(f"training a tokenizer of {vocab_size} tokens on up to {short(train_bytes)} characters of the inputs")
    content = train(sources, read, tolerance, vocab_size, train_bytes)
    atomic.write_bytes(path, content)
    say(f"{path}: trained, {load_tokenizer(path).vocab_size} tokens")
    return path


def train(
    sources: Sequence[Source], read: ReadOptions, tolerance: Tolerance, vocab_size: int, train_bytes: int
) -> bytes:
    """Train a byte-level BPE, which encodes any text without loss, and return its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_sample(sources, read, tolerance, train_bytes), trainer=trainer)
    return tokenizer.to_str(pretty=True).encode()


def _sample(
    sources: Sequence[Source], read: ReadOptions, tolerance: Tolerance, train_bytes: int
) -> Iterator[list[str]]:
    """Yield the beginning of every file, in proportion to its size, `train_bytes` of text in total."""
    total = sum(source.bytes for source in sources)
    log = RejectLog(tolerance)
    for source in sources:
        budget = max(1, train_bytes * source.bytes // max(1, total))
        reader = Reader(source.path, source.format, read, lambda *bad, s=source: log.add(s.name, s.path, *bad))
        for batch in reader.batches():
            yield batch.texts
            budget -= sum(len(text) for text in batch.texts)
            if budget <= 0:
                break
