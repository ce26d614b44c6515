"""The verbs of `blackmamba data`, as the command line has them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_blackmamba.console.options import taking
from megatron_blackmamba.data_tools.cleaning_commands import decontaminate, dedup, filter_
from megatron_blackmamba.data_tools.options import TokenizeOptions, sharding
from megatron_blackmamba.data_tools.progress import counted, listed, short

if TYPE_CHECKING:
    from megatron_blackmamba.data_tools.tokenization import Summary

app = typer.Typer(
    name="data",
    help="Prepare data: tokenize raw corpora into shards, and combine shards into a mixture.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT... OUT_DIR", help="Files or folders (tokenize: - is standard input); last, the output folder."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
@taking(TokenizeOptions)
def tokenize(
    paths: Paths,
    options: TokenizeOptions,
    dry_run: Annotated[bool, sharding("--dry-run", help="Print the shards and their files; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Tokenize raw text into shards that Megatron reads. An interrupted call resumes when repeated.

    [dim]blackmamba data tokenize pile/train tokens/pile --preset pile --tokenizer EleutherAI/gpt-neox-20b[/dim]

    [dim]blackmamba data tokenize notes.jsonl tokens/notes --train-tokenizer 8192 --field title --field body[/dim]
    """
    from megatron_blackmamba.data_tools.hold_out import SIDES
    from megatron_blackmamba.data_tools.rejects import InputError
    from megatron_blackmamba.data_tools.sources import printable
    from megatron_blackmamba.data_tools.tokenization import plan
    from megatron_blackmamba.data_tools.tokenization import tokenize as run

    if len(paths) < 2:
        raise InputError(f"{paths[0]}: name at least one input and, last, the folder for the shards")
    *inputs, out_dir = paths
    if Path(out_dir).is_file():
        raise InputError(f"{out_dir}: the last argument is the folder for the shards, and this is a file")
    if dry_run:
        for side in SIDES if options.hold_out else (None,):
            for job in plan(inputs, Path(out_dir, side or ""), replace(options, side=side)).mine:
                names = listed([source.path for source in job.sources])
                print(f"{job.prefix}  {counted(len(job.sources), 'file')}, {job.input_bytes / 1e6:.1f} MB: {names}")
        return
    summary = run(inputs, out_dir, replace(options, quiet=as_json))
    if as_json:
        shards = [
            {"shard": m.shard, "tokens": m.tokens, "documents": m.documents, "bin_sha256": m.bin_sha256}
            for m in (made.manifest for made in summary.shards)
        ]
        counts = {"tokens": summary.tokens, "documents": summary.documents, "rejected": summary.rejected}
        not_taken = [printable(path) for path in summary.not_taken]
        print(json.dumps({**counts, "written": len(summary.written), "not_taken": not_taken, "shards": shards}))
        return
    print(_sentence(summary))


@app.command()
def corpora(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Corpora, or one mixture. Default: list all.")
    ] = None,
    raw: Annotated[str, typer.Option(help="Folder of the downloads.")] = "/raw",
    tokens: Annotated[str, typer.Option(help="Folder of the token shards.")] = "/tokens",
    tokenizer: Annotated[str, typer.Option("--tokenizer", "-t", help="The tokenizer to use.")] = "20B_tokenizer.json",
    rate: Annotated[str, typer.Option(metavar="SIZE", help="Speed of the download in a second.")] = "100MB",
    cores: Annotated[int, typer.Option(min=1, help="Cores that tokenize a corpus.")] = 16,
    slurm: Annotated[str | None, typer.Option(metavar="PARTITION", help="Print Slurm jobs for this partition.")] = None,
    download: Annotated[bool, typer.Option("--download/--no-download", help="Print the downloads too.")] = True,
    as_json: Json = False,
) -> None:
    """Print the commands that download and tokenize published corpora, with the disk and time they take.

    What is printed for names is a shell script. Nothing is downloaded.

    [dim]blackmamba data corpora[/dim]

    [dim]blackmamba data corpora open_mix --raw /raw --tokens /tokens > prepare.sh[/dim]

    [dim]blackmamba data corpora open_mix --slurm cpu --cores 128 | bash -e[/dim]
    """
    from megatron_blackmamba.data_tools.corpora import CORPORA, NOT_HERE, Plan, chosen, described, script, table
    from megatron_blackmamba.data_tools.sources import parse_size

    plan = Plan(raw, tokens, tokenizer, parse_size(rate), cores, slurm, download)
    found, of_mixture = chosen(names) if names else (CORPORA, None)
    if as_json:
        print(json.dumps(described(found, plan), indent=2))
    elif names:
        print("\n".join(script(found, plan, of_mixture)))
    else:
        rows = list(table(plan))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
        print(f"\nNot downloaded here: the figures are the publishers', and those after ~ estimates. {NOT_HERE}")
        print("`blackmamba data corpora NAME` prints what to type.")


@app.command()
def mixture(
    name: Annotated[str, typer.Argument(metavar="MIXTURE", help="A mixture file, or a shipped name (paper_mix).")],
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Planned tokens, such as 300B or 300e9. Default: all available.")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 2048,
    as_json: Json = False,
) -> None:
    """Print probability, samples and epochs of every source for a planned number of tokens.

    [dim]blackmamba data mixture paper_mix --tokens 300e9[/dim]

    [dim]blackmamba data mixture mixture.yaml --json[/dim]
    """
    from dataclasses import asdict

    from megatron_blackmamba.data_tools.mixture import find_mixture, parse_count, plan_mixture, print_plan
    from megatron_blackmamba.formats.mixture import Mixture

    path = find_mixture(name)
    plan = plan_mixture(Mixture.read(path), None if tokens is None else parse_count(tokens), sequence_length)
    if as_json:
        print(json.dumps(asdict(plan), indent=2))
    else:
        print_plan(plan, path)
    plan.check()


@app.command()
def inspect(
    paths: Annotated[list[str], typer.Argument(metavar="SHARD...", help="Shards, or folders of them.")],
    document: Annotated[
        list[int] | None, typer.Option("--document", "-d", help="Document number, from 0; repeat for more.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of documents, without --document.")] = 3,
    seed: Annotated[int | None, typer.Option(help="Show random documents instead of the first ones.")] = None,
    chars: Annotated[int, typer.Option(min=0, help="Characters shown per document; 0 means all.")] = 500,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also show the token ids.")] = False,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="Show a histogram of document lengths per source instead.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", "-t", help="Tokenizer, if the folder of the shards has no tokenizer.json."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show documents of shards as text, each with the raw file and record it came from.

    [dim]blackmamba data inspect tokens/pile --count 5 --seed 0[/dim]

    [dim]blackmamba data inspect tokens/pile/shard_00003 --document 1234 --chars 0[/dim]
    """
    from megatron_blackmamba.data_tools.inspection import by_source, histogram, read_documents

    if lengths:
        measured = by_source(paths)
        lines = [line for each in measured for line in histogram(each)]
        print(json.dumps([each.described() for each in measured]) if as_json else "\n".join(lines))
        return
    found = read_documents(paths, numbers=document or (), count=count, seed=seed, tokenizer=tokenizer)
    for each in found:
        if as_json:
            shown = {"shard": str(each.shard.prefix), "document": each.number, "source": each.origin.source}
            print(json.dumps({**shown, "record": each.origin.record, "ids": each.ids.tolist(), "text": each.text}))
            continue
        total = each.shard.manifest.documents
        print(f"--- {each.shard.prefix}, document {each.number} of {total}: {len(each.ids)} tokens, from {each.origin}")
        if tokens:
            print(" ".join(map(str, each.ids.tolist())))
        print(each.text if not chars or len(each.text) <= chars else each.text[:chars] + " [...]")


@app.command()
def verify(
    paths: Annotated[
        list[str], typer.Argument(metavar="SHARD|MIXTURE...", help="Shards, folders of them, or mixture files.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Check sizes, counts and indices only, without reading tokens.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Number of shards read in parallel; 0 means one per core.")] = 0,
    as_json: Json = False,
) -> None:
    """Check shards against their manifests: sha256, counts, index, token range, an EOD after every document.

    For a mixture file, also check that its shards fit together.

    [dim]blackmamba data verify tokens/pile tokens/pg19[/dim]

    [dim]blackmamba data verify mixture.yaml --quick[/dim]
    """
    from megatron_blackmamba.console.cores import usable_cores
    from megatron_blackmamba.data_tools.mixture import read_mixtures, verify_mixture
    from megatron_blackmamba.data_tools.verification import verify as run
    from megatron_blackmamba.formats.mixture import Mixture, collect

    mixtures = read_mixtures(paths)
    shards = [path for path in paths if path not in mixtures]
    shards += [str(prefix) for prefixes in collect(Mixture.prefixes, mixtures.values()) for prefix in prefixes]
    verdicts = run(shards, quick=quick, cores=workers or usable_cores(), quiet=as_json)
    bad = [verdict for verdict in verdicts if verdict.problems]
    if as_json:
        print(json.dumps([{**vars(verdict), "prefix": str(verdict.prefix)} for verdict in verdicts]))
    else:
        for verdict in verdicts:
            counts = f"{counted(verdict.documents, 'document')}, {counted(verdict.tokens, 'token')}"
            print(f"{'BAD' if verdict.problems else 'ok '} {verdict.prefix}  {counts}")
            for problem in verdict.problems:
                print(f"    {problem}")
            for note in verdict.notes:
                print(f"    note: {note}")
        tokens = sum(verdict.tokens for verdict in verdicts)
        whole = f"{counted(len(verdicts), 'shard')}, {counted(tokens, 'token')}"
        print(f"{whole}: " + (f"{len(bad)} of them bad" if bad else "all sound"))
    if bad:
        raise typer.Exit(2)
    for path, mixture in mixtures.items():
        findings = verify_mixture(mixture, cores=None if quick else workers or usable_cores())
        if not as_json:
            print("\n".join(f"{path}: {finding}" for finding in findings))


@app.command()
def adopt(
    paths: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Shards made by another tool.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", "-t", help="The tokenizer of these shards.")],
    eod: Annotated[str | None, typer.Option(help="End-of-document token or id.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="uint16 or uint32, if the file does not say. Default: by the vocabulary size.")
    ] = None,
) -> None:
    """Check token files that another tool wrote, and write the manifest they lack.

    The files are a .bin with its .idx (Megatron), a .ds with its .ds.index (datatrove), or a .npy (dolma, OLMo).

    [dim]blackmamba data adopt old/pile_text_document --tokenizer EleutherAI/gpt-neox-20b[/dim]

    [dim]blackmamba data adopt fineweb/*.ds --tokenizer tokenizer.json[/dim]
    """
    from megatron_blackmamba.data_tools import foreign
    from megatron_blackmamba.data_tools.verification import adopt as run
    from megatron_blackmamba.data_tools.verification import documents_without_eod
    from megatron_blackmamba.formats.shards import shard_prefix
    from megatron_blackmamba.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer, eod=eod)
    for path in paths:
        if path.endswith(foreign.SUFFIXES):
            prefix, empty = foreign.expose(Path(path), loaded, dtype)
            manifest = run(prefix, loaded, made_from=Path(path), empty=empty)
            path = str(prefix)
        else:
            manifest = run(path, loaded)
        print(f"{path}: {counted(manifest.documents, 'document')}, {counted(manifest.tokens, 'token')}")
        open_ended = documents_without_eod(shard_prefix(path))
        if open_ended:
            print(f"    {open_ended:,} of them do not end with {loaded.eod_token}; they run into the next document")


def _sentence(summary: "Summary") -> str:
    from megatron_blackmamba.formats.remote import is_remote

    written, shards = len(summary.written), len(summary.shards)
    sizes = [counted(shards, "shard"), counted(summary.documents, "document"), counted(summary.tokens, "token")]
    lines = [f"{summary.out_dir}: {', '.join(sizes)}"]
    if written:
        rate = short(sum(manifest.tokens for manifest in summary.written) / max(summary.seconds, 1e-9))
        lines.append(f"written: {written}, in {summary.seconds:.1f} s ({rate} tokens/s)")
    if shards > written:
        verified = (
            "of the right sizes (`blackmamba data verify` reads them)" if is_remote(summary.out_dir) else "and verified"
        )
        lines.append(f"already complete, {verified}: {shards - written}")
    bad = ", ".join(f"{count:,} {reason}" for reason, count in summary.rejected.items())
    if bad:
        lines.append(f"skipped records, listed in the manifests: {bad}")
    if summary.copies:
        copy, original = summary.copies[0]
        lines.append(
            f"duplicate files, whose documents occur twice: {len(summary.copies)} (first: {copy} is {original})"
        )
    return "\n".join(lines)


for name, verb in (("filter", filter_), ("dedup", dedup), ("decontaminate", decontaminate)):
    app.command(name)(verb)
