"""Near-duplicates: MinHash proposes pairs, their similarity is verified, and the better copy is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_blackmamba.data_tools.cleaning import Cleaning, Stage
from megatron_blackmamba.data_tools.dedup_estimate import Estimate, cost_of_signatures
from megatron_blackmamba.data_tools.kept_copies import Choose, DropCopies
from megatron_blackmamba.data_tools.near_pairs import Compare, Copies, Pairs
from megatron_blackmamba.data_tools.options import DedupOptions
from megatron_blackmamba.data_tools.parts import Listing, PartWriter, Row, read_notes, reading
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.signatures import Lines, RepeatedLines, Signatures, Store
from megatron_blackmamba.data_tools.splitters import words_of


def settings(options: DedupOptions) -> dict[str, Any]:
    """Return the options that decide what is removed, after checking them."""
    if options.n_grams < 1 or options.buckets < 1 or options.hashes < 1:
        raise InputError("--n-grams, --buckets and --hashes are at least 1")
    if not 0 < options.similarity <= 1:
        raise InputError(f"--similarity {options.similarity:g}: give a Jaccard similarity above 0 and up to 1")
    if options.at_most is not None and not 0 <= options.at_most <= 1:
        raise InputError(f"--at-most {options.at_most:g}: give a share of the documents between 0 and 1")
    if options.boilerplate is not None and options.boilerplate < 2:
        raise InputError(f"--boilerplate {options.boilerplate}: give a number of documents, at least 2")
    names = ("n_grams", "buckets", "hashes", "similarity", "boilerplate")
    return {**{name: getattr(options, name) for name in names}, "prefer": list(options.prefer)}


def stages(cleaning: Cleaning, options: DedupOptions, estimate: Estimate) -> list[Stage]:
    """Return all stages in order; each depends on the one before."""
    store = Store(cleaning.work, options)
    parts, words = len(cleaning.parts), words_of(options.language)
    made: list[Stage] = []

    def stage(name: str, tasks: int, *steps: Any) -> None:
        made.append(cleaning.stage(name, steps, tasks, made, cost=0.1))

    def read(name: str, *steps: Any, noted: bool = False, cost: float = 1.0) -> None:
        made.append(reading(cleaning, name, *steps, noted=noted, before=made, cost=cost))

    if options.boilerplate:
        read("0_lines", Lines(store))
        stage("0_repeated", estimate.pieces, RepeatedLines(store, options.boilerplate))
    read("1_signatures", Signatures(cleaning, store, words), cost=cost_of_signatures(options))
    stage("2_copies", estimate.pieces, Copies(store))
    stage("3_pairs", estimate.pair_tasks(options.buckets), Pairs(store, estimate.pieces))
    stage("4_similarities", parts, Compare(store))
    stage("5_choice", 1, Choose(cleaning, store))
    read("6_documents", DropCopies(cleaning, store), PartWriter(cleaning), noted=True)
    stage("7_removals", 1, Listing(cleaning, _rows, spent=store.spent))
    return made


def _rows(notes: Path) -> Iterator[Row]:
    for note in read_notes(notes, "removed"):
        yield note["file"], note["record"], "near-duplicate", note["kept"], f"similarity {note['similarity']:.3f}"


def described(report: dict[str, Any]) -> list[str]:
    """Return lines about the largest cluster, and a warning for suspicious ones."""
    if not report["largest"]:
        return []
    largest = report["largest"][0]
    one, two = largest["least similar pair"]
    lines = [
        f"clusters: {report['clusters']:,}; the largest has {largest['documents']:,} documents like {largest['kept']}; "
        f"its least similar pair, {one} and {two}, has similarity {largest['similarity']:.2f}"
    ]
    suspicious = [cluster for cluster in report["largest"] if cluster["suspicious"]]
    if suspicious:
        first = suspicious[0]
        lines.append(
            f"warning: {len(suspicious)} of the largest clusters are suspicious. The first, {first['documents']:,} "
            f"documents like {first['kept']}, holds {first['close to the threshold']:.0%} that hardly reach "
            "--similarity: they may share only boilerplate. Read some, then raise --similarity or set --boilerplate 20"
        )
    return lines
