"""The plan of a mixture for a number of tokens: probability, samples and epochs of every source."""

import bisect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.config.load import find, shipped
from megatron_blackmamba.data_tools.overlaps import check_shared_documents
from megatron_blackmamba.formats.mixture import (
    IncompleteError,
    Mixture,
    MixtureError,
    Source,
    check_together,
    collect,
    content_fingerprint,
)
from megatron_blackmamba.formats.reads import SourceEpochs
from megatron_blackmamba.formats.shards import MANIFEST_SUFFIX, Shard
from megatron_blackmamba.formats.source_schedule import Schedule, repetition

ALLOWED_DEVIATION = 2.0


@dataclass(frozen=True)
class SourcePlan:
    """One line of the table."""

    name: str
    tokens: int
    """What fixes the probability: stated in the file, or counted in the shards."""
    weight: float
    probability: float
    samples: int
    epochs: float
    max_epochs: float | None
    most_samples: int | None
    """What max_epochs allows."""
    shards: int | None
    shard_tokens: int | None
    """What the shards hold, and so what an epoch is; None where there are no shards yet."""
    before: int = 0
    """Samples that the trunk of a branch has read."""
    read: int = 0
    """Tokens that earlier runs with other sequence lengths have read."""
    read_again: float = 0.0
    """About how many of the tokens they have read in an unfinished epoch."""


@dataclass(frozen=True)
class MixturePlan:
    tokens: int
    sequence_length: int
    samples: int
    weighted_tokens: float
    """Sum of tokens × weight."""
    sources: list[SourcePlan]
    phases: list[dict[str, Any]]
    missing: dict[str, str]
    """Sources without shards here, and why; their epochs are of the tokens that the file states."""

    def check(self) -> None:
        """Raise MixtureError where training would: a source beyond its max_epochs, or below one sample."""
        for s in self.sources:
            if s.shard_tokens is not None and s.shard_tokens < self.sequence_length:
                raise MixtureError(
                    f"source {s.name!r}: its shards hold {s.shard_tokens} tokens, less than one sample of "
                    f"{self.sequence_length}: give it more data, leave it out, or train on shorter sequences"
                )
        beyond = [s for s in self.sources if s.most_samples is not None and s.samples > s.most_samples]
        if beyond:
            lines = [f"source {s.name!r}: {s.epochs:.4f} epochs, max_epochs is {s.max_epochs:g}" for s in beyond]
            raise MixtureError("\n".join(lines) + "\nlower its weight, plan fewer tokens, or raise max_epochs")


def plan_mixture(
    mixture: Mixture,
    tokens: int | None = None,
    sequence_length: int = 2048,
    *,
    run: RunConfig | None = None,
    first_sample: int = 0,
) -> MixturePlan:
    """Plan a mixture for `tokens` of the whole run; by default, as many as the sources have.

    Args:
        run: The run that will read the shards, which must fit its model.
        first_sample: The sample that a branch begins at: probabilities are those of the branch, samples and epochs
            those of the trunk and the branch.
    """
    missing: dict[str, str] = {}
    opened = collect(partial(_open_if_there, mixture, missing), mixture.sources)
    there = {s.name: both for s, both in zip(mixture.sources, opened, strict=True) if both is not None}
    fit: dict[str, Any] = {}
    if run is not None:
        fit = {"vocab_size": run.model.vocab_size, "eod_reset": run.model.eod_reset}
        fit["one_eod"] = run.data.mask_first_token
    check_together(there, **fit, max_overlap=mixture.max_overlap)
    held = [None if both is None else sum(shard.manifest.tokens for shard in both[0]) for both in opened]
    stated = [source.tokens or in_shards or 0 for source, in_shards in zip(mixture.sources, held, strict=True)]
    prints = [None if both is None else content_fingerprint(both[0]) for both in opened]
    known = [each for each in prints if each is not None]
    schedule = mixture.schedule(stated, sequence_length, known if len(known) == len(prints) else None)
    of = [
        SourceEpochs(in_shards or has, sequence_length, mixture.read_before.get(content or "", ()))
        for in_shards, has, content in zip(held, stated, prints, strict=True)
    ]
    if tokens is None:
        samples = _samples_of_all(schedule, mixture, of, sum(stated) // sequence_length)
    else:
        samples = -(-tokens // sequence_length)
    planned = tokens or samples * sequence_length
    counts, before = schedule.counts(samples), schedule.counts(first_sample)
    now = bisect.bisect_right(schedule.starts, first_sample) - 1
    lines = [
        SourcePlan(
            name=source.name,
            tokens=has,
            weight=source.weight,
            probability=float(probability),
            samples=count,
            before=earlier,
            read=epochs.tokens_before,
            read_again=epochs.read_again(count),
            epochs=epochs.epochs(count),
            max_epochs=source.max_epochs,
            most_samples=source.max_epochs and epochs.most_samples(source.max_epochs),
            shards=None if both is None else len(both[0]),
            shard_tokens=in_shards,
        )
        for source, both, in_shards, has, probability, count, earlier, epochs in zip(
            mixture.sources,
            opened,
            held,
            stated,
            schedule.blends[now].probabilities,
            counts,
            before,
            of,
            strict=True,
        )
    ]
    phases = [
        {
            "from_sample": start,
            "probabilities": {n: float(p) for n, p in zip(mixture.names, blend.probabilities, strict=True)},
        }
        for start, blend in zip(schedule.starts, schedule.blends, strict=True)
    ]
    weighted = float(sum(n * w for n, w in zip(stated, mixture.weights()[0], strict=True)))
    return MixturePlan(planned, sequence_length, samples, weighted, lines, phases, missing)


def _samples_of_all(schedule: Schedule, mixture: Mixture, of: Sequence[SourceEpochs], samples: int) -> int:
    """Return the number of samples of all sources: a little less where rounding alone would exceed a max_epochs."""
    most = [
        None if source.max_epochs is None else epochs.most_samples(source.max_epochs)
        for source, epochs in zip(mixture.sources, of, strict=True)
    ]

    def beyond(count: int) -> int:
        """Return the most samples of a source beyond its limit."""
        counts = zip(schedule.counts(count), most, strict=True)
        return max((given - limit for given, limit in counts if limit is not None), default=0)

    if 0 < beyond(samples) <= ALLOWED_DEVIATION:
        samples = bisect.bisect_left(range(samples), 1, key=beyond) - 1
    return max(1, samples)


def verify_mixture(mixture: Mixture, sequence_length: int = 2048, *, cores: int | None = None) -> list[str]:
    """Check that its shards fit together and its phases are in order; return findings, one line each.

    cores: for the search for validation documents in training shards, which reads all tokens; None skips it.
    """
    opened = mixture.open_all()
    check_together(opened, max_overlap=mixture.max_overlap)
    held = {name: sum(shard.manifest.tokens for shard in training) for name, (training, _) in opened.items()}
    findings = [f"{sum(len(t) + len(v) for t, v in opened.values())} shards of one tokenizer, no two the same"]
    findings += [
        f"source {s.name!r}: the file states {s.tokens:,} tokens, the shards hold {held[s.name]:,}"
        for s in mixture.sources
        if s.tokens and abs(s.tokens - held[s.name]) > 0.01 * s.tokens
    ]
    if cores is not None:
        findings += check_shared_documents(opened, mixture.max_overlap, cores)
    mixture.schedule(list(held.values()), sequence_length)  # refuses phases that are not in order
    return findings


def find_mixture(name: str) -> Path:
    """Return the file for a path or the name of a shipped mixture."""
    path = Path(name)
    if path.is_file():
        return path
    if name in shipped("data"):
        return find(f"data/{name}")
    what = "is a folder: name the mixture file" if path.is_dir() else "no such mixture file"
    raise MixtureError(f"{name}: {what}; shipped ones are {', '.join(shipped('data'))}")


def read_mixtures(paths: Iterable[str]) -> dict[str, Mixture]:
    """Read the mixtures among these paths: by suffix, by shipped name, or any file that is not part of a shard."""
    return {path: Mixture.read(find_mixture(path)) for path in paths if _is_mixture(path)}


def _is_mixture(path: str) -> bool:
    if path.endswith((".yaml", ".yml")):
        return True
    if path.endswith((MANIFEST_SUFFIX, ".bin", ".idx")) or Path(f"{path}{MANIFEST_SUFFIX}").exists():
        return False
    return Path(path).is_file() or (path in shipped("data") and not Path(path).exists())


def _open_if_there(mixture: Mixture, missing: dict[str, str], source: Source) -> tuple[list[Shard], list[Shard]] | None:
    try:
        return mixture.open_shards(source)
    except IncompleteError:
        raise
    except MixtureError as error:
        if source.tokens is None:
            raise MixtureError(f"{error}; to plan without shards, state the source's `tokens`") from None
        missing[source.name] = str(error)
        return None


def parse_count(text: str) -> int:
    """Parse a count such as 300e9, 300B, 1.5T or 2_000_000."""
    scale = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}.get(text[-1:].lower(), 1)
    try:
        count = round(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise MixtureError(f"{text!r} is not a number of tokens: write 300e9, 300B or 300000000000")
    return count


def print_plan(plan: MixturePlan, path: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{path.name}: {plan.tokens:,} tokens, {plan.samples:,} samples of {plan.sequence_length:,}",
    )
    columns = {
        "source": [s.name for s in plan.sources],
        "tokens": [_billions(s.tokens) for s in plan.sources],
        "weight": [f"{s.weight:g}" for s in plan.sources],
        "product": [_billions(s.tokens * s.weight) for s in plan.sources],
        "probability": [f"{s.probability:.6f}" for s in plan.sources],
        "samples": [f"{s.samples:,}" for s in plan.sources],
        "epochs": [f"{s.epochs:.5f}" for s in plan.sources],
    }
    footers = {"source": "all", "tokens": _billions(sum(s.tokens for s in plan.sources))}
    footers |= {"product": _billions(plan.weighted_tokens), "probability": "1", "samples": f"{plan.samples:,}"}
    if any(s.max_epochs is not None for s in plan.sources):
        columns["max"] = ["" if s.max_epochs is None else f"{s.max_epochs:g}" for s in plan.sources]
    for number, heading in enumerate(columns):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    table.add_section()
    table.add_row(*(footers.get(heading, "") for heading in columns))
    console = Console(width=None if sys.stdout.isatty() else 120)  # a file or a pipe has no width to keep to
    console.print(table)
    for phase in plan.phases[1:]:
        shares = ", ".join(f"{name} {p:.6f}" for name, p in phase["probabilities"].items())
        console.print(f"from sample {phase['from_sample']:,}: {shares}")
    for s in plan.sources:
        if s.shard_tokens is not None and s.shard_tokens != s.tokens:
            held = f"{s.name}: the file states {_billions(s.tokens)} tokens, its {s.shards} shards hold"
            console.print(f"{held} {_billions(s.shard_tokens)}: epochs are of those", highlight=False)
    if often := repetition({s.name: s.epochs for s in plan.sources if s.max_epochs is None}):
        console.print(f"Warning: {often}", highlight=False, soft_wrap=True)
    if plan.missing:
        reason = next(iter(plan.missing.values())).splitlines()[0]
        note = f"No shards here for {', '.join(plan.missing)}: epochs are of the tokens the file states. ({reason})"
        console.print(note, style="dim", highlight=False)


def _billions(tokens: float) -> str:
    return f"{tokens / 1e9:,.1f} B" if tokens >= 1e8 else f"{tokens:,.0f}"
