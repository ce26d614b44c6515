"""Options of `blackmamba data tokenize`, `filter`, `dedup` and `decontaminate`."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

reading = partial(typer.Option, rich_help_panel="Input")
encoding = partial(typer.Option, rich_help_panel="Tokenization")
sharding = partial(typer.Option, rich_help_panel="Shards")
running = partial(typer.Option, rich_help_panel="Where it runs")


def _unescape(text: str | None) -> str | None:
    """Replace `\\n` and `\\t`, as passed by a shell, by the characters."""
    return None if text is None else text.replace("\\n", "\n").replace("\\t", "\t")


@dataclass(frozen=True)
class InputOptions:
    """Options that select what is read from raw files."""

    format: Annotated[str | None, reading(help="jsonl, parquet, arrow or text. Default: by file name.")] = None
    fields: Annotated[
        tuple[str, ...],
        reading(
            "--field",
            help="Field with the text \\[text]: a.b goes down, a\\[].b through a list, a? is optional; repeat to join.",
        ),
    ] = ()
    match: Annotated[
        str | None,
        reading(help="Files to read in folders, such as '*.md|*.rst'; a pattern with a slash matches the path."),
    ] = None
    exclude: Annotated[
        tuple[str, ...],
        reading(metavar="PATTERN", help="Files to skip in folders, such as 'drafts/*'; repeat for more."),
    ] = ()
    encoding: Annotated[
        str | None, reading(help="Character encoding of text and JSON Lines, such as latin-1. Default: UTF-8.")
    ] = None
    max_bad: Annotated[
        str, reading(metavar="N|FRACTION", help="Bad records allowed per shard or part; they are skipped and listed.")
    ] = "0"


@dataclass(frozen=True)
class TokenizeOptions(InputOptions):
    """Everything `blackmamba data tokenize` can be told, the inputs and the output folder aside."""

    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", "-t", help="A tokenizer.json, a folder with one, or a Hugging Face name."),
    ] = None
    train_tokenizer: Annotated[
        int | None, typer.Option(metavar="SIZE", help="Train a byte-level BPE of SIZE tokens on the inputs instead.")
    ] = None
    preset: Annotated[
        str | None,
        reading(
            help="A published corpus, by its format, field and training files: pile, slimpajama, starcoder, pes2o, "
            "proofpile, pg19, fineweb, dclm, commonpile, nemotron-cc or finemath."
        ),
    ] = None
    joiner: Annotated[str, reading(help="Text between joined fields.", callback=_unescape, show_default=r"\n\n")] = (
        "\n\n"
    )
    marker: Annotated[
        str | None, reading(help="End of each document in text files. Default: end of file.", callback=_unescape)
    ] = None
    split: Annotated[
        str | None, reading(help="train, validation, test or all, by the path \\[train with --preset, else all].")
    ] = None
    eod: Annotated[str | None, encoding(help="End-of-document token or id, if the tokenizer does not define it.")] = (
        None
    )
    special_text: Annotated[
        bool, encoding("--special-text", help="Encode text such as <|endoftext|> as the special token.")
    ] = False
    backend: Annotated[str, encoding(help="Tokenizer library: auto, fastokens or tokenizers (Hugging Face).")] = "auto"
    train_bytes: Annotated[str, encoding(help="Amount of text for --train-tokenizer.")] = "1GB"
    shuffle: Annotated[bool, sharding(help="Shuffle the documents within each shard.")] = True
    seed: Annotated[int, sharding(help="Shuffle seed.")] = 0
    shard_size: Annotated[str, sharding(help="Input per shard; a larger file gets its own shard.")] = "4GB"
    workers: Annotated[int, sharding(min=0, help="Number of worker processes; 0 means one per core.")] = 0
    hold_out: Annotated[
        str | None,
        sharding(metavar="SHARE", help="Share of the documents for OUT_DIR/validation; others: OUT_DIR/train."),
    ] = None
    clusters: Annotated[
        str | None, sharding(metavar="FOLDER", help="Output of dedup: its near-copies stay on one side of --hold-out.")
    ] = None
    min_tokens: Annotated[int | None, sharding(min=1, help="Take only documents of at least this many tokens.")] = None
    max_tokens: Annotated[int | None, sharding(min=1, help="Take only documents of at most this many tokens.")] = None
    array: Annotated[str | None, sharding(metavar="INDEX/COUNT", help="Build only this part of the shards.")] = None
    overwrite: Annotated[bool, sharding("--overwrite", help="Rebuild existing shards.")] = False
    quiet: bool = False
    side: str | None = None
    """Of --hold-out: train or validation."""


@dataclass(frozen=True)
class CleaningOptions(InputOptions):
    """Options that `filter`, `dedup` and `decontaminate` share."""

    language: Annotated[
        str | None, reading(help="Language of datatrove's word splitter. Default: split at spaces.")
    ] = None
    part_size: Annotated[str, running(help="Input size of one part, read by one task.")] = "256MB"
    workers: Annotated[int, running(min=0, help="Number of parallel tasks; 0 means one per core.")] = 0
    slurm: Annotated[str | None, running(metavar="PARTITION", help="Run as Slurm arrays.")] = None
    time: Annotated[str, running(help="Time limit of a Slurm task.")] = "12:00:00"
    memory: Annotated[int, running(metavar="GB", help="Memory of a Slurm task.")] = 4


@dataclass(frozen=True)
class FilterOptions(CleaningOptions):
    """The options of `filter`, its recipe aside: what is counted and allowed, and where it runs."""

    sample: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Try the rules on N documents; write only a report.")
    ] = None
    at_most: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Stop if more than this share of documents would go.")
    ] = None
    by: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Field of the sources to count by. Default: by folder.")
    ] = None


@dataclass(frozen=True)
class DedupOptions(CleaningOptions):
    """The options of `dedup`: which documents are similar, and where it runs."""

    similarity: Annotated[
        float, typer.Option(help="Least Jaccard similarity of a removed document to the one that is kept.")
    ] = 0.6
    prefer: Annotated[
        tuple[str, ...],
        typer.Option(metavar="PATTERN", help="Files preferred among copies of one length; repeat, the best first."),
    ] = ()
    boilerplate: Annotated[
        int | None,
        typer.Option(metavar="N", help="Leave out lines that N or more documents contain. Default: none."),
    ] = None
    at_most: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Stop if more than this share of documents would go.")
    ] = None
    n_grams: Annotated[int, typer.Option(help="Words per n-gram.")] = 2
    buckets: Annotated[int, typer.Option(help="Number of MinHash groups; more find less similar duplicates.")] = 60
    hashes: Annotated[int, typer.Option(help="MinHashes per group; more are stricter.")] = 7


@dataclass(frozen=True)
class DecontaminationOptions(CleaningOptions):
    """The options of `decontaminate`: the evaluation items, and what becomes of documents that hold them."""

    mixture: Annotated[
        str | None,
        reading(metavar="NAME|FILE", help="Clean the folder INPUT/SOURCE of each source of a mixture, one by one."),
    ] = None
    against: Annotated[
        tuple[str, ...],
        typer.Option(metavar="TASK|FILE", help="lm-eval task or JSON lines; repeat for more \\[the paper's eight]."),
    ] = ()
    task_folder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder with lm-eval task definitions of your own.")
    ] = None
    item_fields: Annotated[
        tuple[str, ...],
        typer.Option(
            "--fields",
            metavar="[FILE=]FIELD,...",
            help="Fields of evaluation files, each a text to look for; a+b joins two.",
        ),
    ] = ()
    n_grams: Annotated[int, typer.Option(help="Number of consecutive words that make a match.")] = 12
    drop: Annotated[bool, typer.Option("--drop", help="Remove whole documents instead of cutting passages.")] = False
    margin: Annotated[int, typer.Option(min=0, help="Characters cut before and after a passage.")] = 200
