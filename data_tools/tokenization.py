"""Raw files to token shards: plans the shards, spreads them over processes, skips what is finished.

`python -m megatron_blackmamba.data_tools` is `blackmamba data tokenize`.
"""

import os
import runpy
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import cast, get_args

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.console.progress import working
from megatron_blackmamba.data_tools.batches import ReadOptions
from megatron_blackmamba.data_tools.hold_out import SIDES, HoldOut, Side, hold_out_of
from megatron_blackmamba.data_tools.object_storage import RemoteFolder
from megatron_blackmamba.data_tools.options import TokenizeOptions
from megatron_blackmamba.data_tools.origins import CLEANING, WORK
from megatron_blackmamba.data_tools.progress import counted, listed
from megatron_blackmamba.data_tools.readers import Format
from megatron_blackmamba.data_tools.rejects import EMPTY, InputError, Tolerance, require_choice
from megatron_blackmamba.data_tools.shard_writer import ShardJob
from megatron_blackmamba.data_tools.sources import (
    PRESETS,
    SPLITS,
    NotTaken,
    Source,
    find_sources,
    parse_array,
    parse_size,
    plan_shards,
    split_of,
)
from megatron_blackmamba.data_tools.streams import STDIN, known_encoding
from megatron_blackmamba.data_tools.workers import Made, make_shards, refuse_other_settings
from megatron_blackmamba.formats.remote import is_remote
from megatron_blackmamba.formats.shards import MANIFEST_SUFFIX, ShardManifest, beside
from megatron_blackmamba.tokenizer import Backend, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Summary:
    """The result of one call."""

    out_dir: str | os.PathLike[str]
    shards: list[Made]
    seconds: float
    not_taken: list[Path | str]
    """Files in the input folders that were not read."""

    @property
    def documents(self) -> int:
        return sum(made.manifest.documents for made in self.shards)

    @property
    def tokens(self) -> int:
        return sum(made.manifest.tokens for made in self.shards)

    @property
    def written(self) -> list[ShardManifest]:
        return [made.manifest for made in self.shards if made.written]

    @property
    def copies(self) -> list[tuple[str, str]]:
        """Return pairs of byte-identical raw files: their documents are tokenized twice."""
        first: dict[str, str] = {}
        found: dict[tuple[str, str], None] = {}
        for source in (source for made in self.shards for source in made.manifest.sources if source.documents):
            other = first.setdefault(source.sha256, source.name)
            if other != source.name:
                found[source.name, other] = None  # once, though both sides of a split have it
        return [*found]

    @property
    def rejected(self) -> dict[str, int]:
        """Return the skipped records by reason; those that are no document count once, though both sides list them."""
        sides: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for manifest in (made.manifest for made in self.shards):
            sides[(manifest.options.get("hold_out") or {}).get("side", "")].update(manifest.rejected)
        empty = sum(side.pop(EMPTY, 0) for side in sides.values())
        return dict(reduce(or_, sides.values(), Counter({EMPTY: empty} if empty else {})))


@dataclass(frozen=True)
class Plan:
    """All shards of a corpus; `mine` lists the shards of this call."""

    jobs: list[ShardJob]
    mine: list[ShardJob]
    ignored: list[Path | str]


def plan(inputs: Sequence[str], out_dir: str | Path, options: TokenizeOptions) -> Plan:
    """Return the shards that these inputs make, by file names and sizes alone."""
    require_choice("--format", options.format, get_args(Format))
    require_choice("--split", options.split, (*SPLITS, "all"))
    require_choice("--backend", options.backend, get_args(Backend))
    require_choice("--preset", options.preset, PRESETS)
    if options.min_tokens and options.max_tokens and options.min_tokens > options.max_tokens:
        raise InputError(f"--min-tokens {options.min_tokens} is more than --max-tokens {options.max_tokens}: swap them")
    preset = PRESETS[options.preset] if options.preset else None
    format = cast("Format | None", options.format or (preset.format if preset else None))
    match = options.match or (preset.match if preset else None)
    split = options.split or ("train" if preset else "all")
    found = find_sources(
        inputs,
        format,
        match,
        apart=Path(out_dir).parent if options.side else out_dir,
        exclude=options.exclude,
        split=None if split == "all" else split,
    )
    if options.split is None and preset is None:
        _refuse_several_splits([source.path for source in found.sources])
    _refuse_idle_flags(options, {source.format for source in found.sources})
    fields = options.fields or ((preset.field,) if preset else ("text",))
    read = ReadOptions(fields, options.joiner, options.marker, known_encoding(options.encoding))
    tolerance = Tolerance.parse(options.max_bad)
    hold_out = _hold_out(options, found.sources)
    share = hold_out.share if hold_out and hold_out.side == "validation" else 1.0
    groups = plan_shards(found.sources, int(parse_size(options.shard_size) / share))
    not_taken = NotTaken.of(found.ignored)
    jobs = []
    for number, group in enumerate(groups, start=1):
        own = hold_out.of({source.name for source in group}) if hold_out else None
        plan = (number, len(groups), tuple(group), Path(out_dir))
        jobs.append(ShardJob(*plan, options, read, tolerance, not_taken, own))
    index, count = parse_array(options.array) if options.array else (0, 1)
    return Plan(jobs, jobs[index::count], found.ignored)


def tokenize(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], out_dir: str | Path, options: TokenizeOptions
) -> Summary:
    """Make every shard that is not there yet. Raises InputError where something has to be put right first.

    inputs: a file or folder, or several.
    """
    start = time.monotonic()
    inputs = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if options.hold_out is not None and options.side is None:
        return _both_sides(inputs, out_dir, options)
    remote = RemoteFolder.open(os.fspath(out_dir)) if is_remote(out_dir) else None
    shown, out_dir = out_dir, remote.folder if remote else Path(out_dir)
    _refuse_cleaning(out_dir)
    planned = plan([os.fspath(path) for path in inputs], out_dir, options)
    say = (lambda _: None) if options.quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    if planned.ignored:
        names = listed([str(path).rpartition("/")[2] for path in planned.ignored], 5)
        say(f"not taken for input: {counted(len(planned.ignored), 'file')} ({names})")
    splits = sorted({split_of(source.name) or "" for job in planned.jobs for source in job.sources} - {""})
    if len(splits) > 1 and options.split is None:
        say(f"the inputs hold files of several splits ({', '.join(splits)}): --split train takes only one")
    tokenizer = _tokenizer(planned, out_dir, options, say)
    surplus = _surplus(planned, Path(out_dir))
    if options.overwrite:
        _remove(surplus, remote)
    elif surplus:
        raise InputError(
            f"{surplus[0]} is there, but these inputs make {len(planned.jobs)} shards: other inputs or another "
            "--shard-size made it. Choose another folder, or --overwrite to remove it"
        )
    else:
        for job in planned.mine:
            refuse_other_settings(job, tokenizer)
        _refuse_other_tokenizer(planned, tokenizer)
    tokenizer.save(Path(out_dir) / "tokenizer.json")  # for training, decoding and export
    _refuse_cleaning(out_dir)  # which may have begun in the meantime
    if remote:
        remote.publish_tokenizer()
    cores = options.workers or usable_cores()
    with interrupts.advice("finished shards are kept, and the same command goes on from there"):
        shards = make_shards(
            planned.mine, tokenizer, cores=cores, overwrite=options.overwrite, quiet=options.quiet, remote=remote
        )
    if not any(made.manifest.documents for made in shards):
        _refuse_none(planned, out_dir, remote)
    return Summary(shown, shards, time.monotonic() - start, planned.ignored)


def _refuse_cleaning(out_dir: Path) -> None:
    """Refuse a folder in which `filter`, `dedup` or `decontaminate` work or have worked."""
    if (out_dir / WORK).exists() or (out_dir / CLEANING).exists():
        raise InputError(f"{out_dir}: holds cleaned text, or is about to: choose another folder for the shards")


def _refuse_none(planned: Plan, out_dir: Path, remote: RemoteFolder | None) -> None:
    """Refuse a choice of documents that no shard of the folder has; an array's other shards may have some."""
    others = [job for job in planned.jobs if job not in planned.mine]
    if not all(job.manifest_path.exists() and not ShardManifest.read(job.manifest_path).documents for job in others):
        return
    _remove([job.manifest_path for job in planned.jobs], remote)
    hold_out = planned.jobs[0].hold_out
    if hold_out:
        raise InputError(
            f"{out_dir}: no document for {hold_out.side}: the corpus is too small for this --hold-out."
            f" Take a {'larger' if hold_out.side == 'validation' else 'smaller'} share, with --overwrite"
        )
    raise InputError(
        f"{out_dir}: no document has as many tokens as --min-tokens and --max-tokens ask for. Choose other limits"
    )


def _both_sides(
    inputs: Sequence[str | os.PathLike[str]], out_dir: str | os.PathLike[str], options: TokenizeOptions
) -> Summary:
    """Make the shards of both sides of a split; a tokenizer is trained once."""
    start, made = time.monotonic(), []
    for side in SIDES:
        folder = os.path.join(out_dir, side)
        made.append(tokenize(inputs, folder, replace(options, side=side)))
        if options.train_tokenizer:
            tokenizer = os.path.join(folder, "tokenizer.json")
            options = replace(options, tokenizer=tokenizer, train_tokenizer=None)
    shards = [shard for each in made for shard in each.shards]
    return Summary(out_dir, shards, time.monotonic() - start, made[0].not_taken)


def _hold_out(options: TokenizeOptions, sources: Sequence[Source]) -> HoldOut | None:
    if options.hold_out is None:
        if options.clusters:
            raise InputError("--clusters is for --hold-out: give a share, such as --hold-out 1%, or leave it out")
        return None
    if any(source.path == STDIN for source in sources):
        raise InputError("--hold-out reads the inputs twice, and standard input (-) only once. Give files")
    files = {source.name for source in sources}
    return hold_out_of(options.hold_out, options.clusters, cast("Side", options.side or "train"), files)


def _tokenizer(planned: Plan, out_dir: str | Path, options: TokenizeOptions, say: Callable[[str], None]) -> Tokenizer:
    if (options.tokenizer is None) == (options.train_tokenizer is None):
        raise InputError(
            "name a tokenizer with --tokenizer (a tokenizer.json, a folder, a Hugging Face name such as "
            "EleutherAI/gpt-neox-20b), or have one trained on the inputs with --train-tokenizer 8192"
        )
    backend = cast("Backend", options.backend)
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer, eod=options.eod, backend=backend)
    from megatron_blackmamba.data_tools.bpe import train_or_reuse

    if options.array:
        raise InputError(
            "--train-tokenizer reads all inputs. Run it once without --array, or train first and give the array "
            f"--tokenizer {Path(out_dir) / 'tokenizer.json'}"
        )
    sources = [source for job in planned.jobs for source in job.sources]
    read, tolerance = planned.jobs[0].read, planned.jobs[0].tolerance
    size, most = options.train_tokenizer, parse_size(str(options.train_bytes))
    assert size is not None
    with working("training the tokenizer", quiet=options.quiet):
        path = train_or_reuse(sources, Path(out_dir), read, tolerance, size, most, say, options.overwrite)
    return load_tokenizer(path, eod=options.eod, backend=backend)


def _refuse_several_splits(paths: Sequence[str]) -> None:
    """Refuse a `datasets.DatasetDict` as a whole: its validation texts would become training texts."""
    by_dataset: dict[Path, set[str]] = {}
    for path in map(Path, paths):
        if (path.parent.parent / "dataset_dict.json").is_file():
            by_dataset.setdefault(path.parent.parent, set()).add(path.parent.name)
    for folder, splits in by_dataset.items():
        if len(splits) > 1:
            names = sorted(splits)
            raise InputError(
                f"{folder} is a DatasetDict with the splits {', '.join(names)}: choose one with --split"
                f" {'train' if 'train' in names else names[0]}, or take them together with --split all"
            )


def _refuse_idle_flags(options: TokenizeOptions, formats: set[Format]) -> None:
    """Refuse flags without effect: the user meant to change something."""
    if options.encoding is not None and not formats & {"text", "jsonl"}:
        raise InputError("--encoding is for text and JSON Lines, and there is none among the inputs: leave it out")
    if options.marker is not None and "text" not in formats:
        raise InputError(
            "--marker splits text files, and there is none among the inputs: leave it out, or --format text"
        )
    if options.fields and formats == {"text"}:
        raise InputError("--field chooses from records, and the inputs are plain text: leave it out, or --format jsonl")


def _refuse_other_tokenizer(planned: Plan, tokenizer: Tokenizer) -> None:
    """Refuse shards of other array tasks with another tokenizer: a folder has one tokenizer."""
    for job in planned.jobs:
        if job.manifest_path.exists():
            manifest = ShardManifest.read(job.manifest_path)
            if manifest.tokenizer_sha256 != tokenizer.sha256:
                raise InputError(
                    f"{job.prefix} was made with another tokenizer ({manifest.tokenizer}, sha256 "
                    f"{manifest.tokenizer_sha256[:12]}): choose another folder, or --overwrite"
                )


def _surplus(planned: Plan, out_dir: Path) -> list[Path]:
    expected = {job.manifest_path for job in planned.jobs}
    return [path for path in sorted(out_dir.glob(f"shard_*{MANIFEST_SUFFIX}")) if path not in expected]


def _remove(manifest_paths: Sequence[Path], remote: RemoteFolder | None) -> None:
    for path in manifest_paths:
        prefix = path.with_name(path.name.removesuffix(MANIFEST_SUFFIX))
        for file in (path, beside(prefix, ".bin"), beside(prefix, ".idx")):
            file.unlink(missing_ok=True)
        if remote:
            remote.remove(prefix)


if __name__ == "__main__":  # the name of this command in older versions
    runpy.run_module("megatron_blackmamba.data_tools", run_name="__main__")
