"""The command line `blackmamba <verb>`. Every verb imports its dependencies when it runs, so --help is instant."""

import io
import os
import shlex
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
import typer.core

from megatron_blackmamba.cli.errors import in_words, may_pass
from megatron_blackmamba.cli.hints import hint
from megatron_blackmamba.config.arguments import ConfigArgument, Configs, complete_config, compose
from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.options import taking
from megatron_blackmamba.console.progress import working
from megatron_blackmamba.data_tools import commands as data_commands
from megatron_blackmamba.evaluation.verb import evaluate, keep_bias
from megatron_blackmamba.inference import commands as inference_commands
from megatron_blackmamba.interchange import commands as interchange_commands
from megatron_blackmamba.launch.job import JobRequest
from megatron_blackmamba.plan.goodput import FAILURES, RESTART_MINUTES
from megatron_blackmamba.registry import import_extensions
from megatron_blackmamba.runtime.exits import BAD_INPUT, INTERRUPTED, RESTARTS
from megatron_blackmamba.runtime.failure import SAID, say_once
from megatron_blackmamba.study.verb import study
from megatron_blackmamba.trace import commands as trace_commands
from megatron_blackmamba.training.anneal import anneal
from megatron_blackmamba.training.verb import train

SECTIONS = {
    "Start": ("quickstart", "new", "config"),
    "Data": ("data",),
    "Train": ("plan", "doctor", "train", "anneal", "launch"),
    "Compare": ("runs", "report", "compare", "evaluate", "study"),
    "Use": ("generate", "chat", "average", "keep-bias", "export", "import", "verify"),
}
"""The commands in the order of a user's work, as --help shows them."""


EXTRAS = {"chat": "megatron_blackmamba.serving"}
"""Commands of packages that need an extra and that no other package imports: each is a function in `commands.py`."""


class Commands(typer.core.TyperGroup):
    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        found = {name: section for section, names in SECTIONS.items() for name in names if name in self.commands}
        for name, section in found.items():
            self.commands[name].rich_help_panel = section  # type: ignore[attr-defined]
        return list(found)


app = typer.Typer(
    cls=Commands,
    name="blackmamba",
    help="Pretrain, plan, export and run BlackMamba models (Mamba + mixture of experts) on megatron-core.",
    epilog="Start with [bold]blackmamba quickstart[/bold], or check this machine with [bold]blackmamba doctor[/bold].",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _version(wanted: bool) -> None:
    if wanted:
        from megatron_blackmamba.version import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def config(
    configs: Annotated[list[str] | None, ConfigArgument] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of run files, for editors.")] = False,
) -> None:
    """Print the complete config of a run, or the JSON Schema of run files.

    [dim]blackmamba config blackmamba_1.5b parallel.tensor=2[/dim]

    [dim]blackmamba config --schema > run.schema.json[/dim]
    """
    import json

    from megatron_blackmamba.config import to_yaml
    from megatron_blackmamba.config.schema import run_file_schema

    if schema:
        print(json.dumps(run_file_schema(), indent=2))
    else:
        print(to_yaml(compose(configs or [])), end="")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the run; the file is NAME.yaml.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="Keys to change.")] = None,
    source: Annotated[
        str, typer.Option("--from", metavar="CONFIG", help="Run to begin with.", autocompletion=complete_config)
    ] = "quickstart",
) -> None:
    """Write a run file to edit, in which every key is explained.

    [dim]blackmamba new mine --from quickstart data.mixture=mixture.yaml[/dim]
    """
    from megatron_blackmamba.config.describe import write_new

    file = Path(f"{name}.yaml")
    write_new(name, source, changes or [], file)
    print(f"{file}: edit it, then run blackmamba train {shlex.quote(str(file))}")


@app.command()
def plan(
    configs: Configs,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per node, one process each.")] = 8,
    gpu: Annotated[str, typer.Option(help="GPU type: h100, h200, a100, a100-40gb, or a YAML file.")] = "h100",
    mfu: Annotated[str | None, typer.Option(help="Model FLOPs utilisation, or a run that measured it.")] = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Rank the layouts that fit these nodes.")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="Add weak and strong scaling over nodes.")] = False,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Propose a layout for sequences of this many tokens; repeatable.")
    ] = None,
    failures: Annotated[float, typer.Option(min=0.001, help="Failures per node and month.")] = FAILURES,
    restart: Annotated[float, typer.Option(min=0, help="Minutes from a failure to the next step.")] = RESTART_MINUTES,
    check: Annotated[
        bool, typer.Option("--check", help="Only check that the run works and fits (exit code 0 or 2).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Estimate parameters, FLOPs and epochs of a run; with --nodes also memory, traffic and time. Needs no GPU.

    [dim]blackmamba plan blackmamba_1.5b --nodes 7[/dim]

    [dim]blackmamba plan blackmamba_2.8b --nodes 8 --gpu h200 --suggest[/dim]

    [dim]blackmamba plan blackmamba_1.5b --nodes 1 --length 262144[/dim]
    """
    import json

    from rich.console import Console

    from megatron_blackmamba.formats.mixture import MixtureError
    from megatron_blackmamba.model import lookahead
    from megatron_blackmamba.plan import estimate, gpus, measured, table
    from megatron_blackmamba.runtime.layout import LayoutError

    if nodes is None and (check or suggest or scaling or length or mfu is not None):
        raise typer.BadParameter("--check, --suggest, --scaling, --length and --mfu need --nodes N")
    used = None if mfu is None else measured.mfu(mfu)
    known = gpus.find(gpu)
    asked = (
        None
        if nodes is None
        else estimate.Asked(
            nodes, gpus_per_node, known, used, suggest, scaling, tuple(length or ()), failures, restart, gpu
        )
    )
    run, begins = compose(configs), None
    with working("planning"):
        if run.start.branch:
            from megatron_blackmamba.training.branch import beginning

            begins = beginning(run)
        made = estimate.make_plan(run, asked, begins)
    from megatron_blackmamba.interchange import native

    if as_json:
        print(json.dumps(estimate.as_json(made) | {"exports_as": native.described(run.model)}, indent=2))
    elif not check:
        table.show(made, Console())
        print(f"Exports as {native.described(run.model)}")
    for warning in [*table.warnings(made), *lookahead.refuse(run)]:
        print(f"blackmamba: warning: {warning}", file=sys.stderr)
    if made.placed and (made.placed.refused or check):
        trouble = table.refusal(made.placed)
        if trouble:
            raise LayoutError(trouble)
    if made.refused_data:
        raise MixtureError(f"training would refuse the data: {made.refused_data}")


@app.command()
def doctor(
    configs: Annotated[list[str] | None, ConfigArgument] = None,
    folder: Annotated[Path, typer.Option(help="Folder of future runs; its disk is measured.")] = Path("runs"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the checks of a job's preflight; takes seconds.")
    ] = False,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Compare all ranks of a job, under srun.")] = False,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs expected.", show_default="any")] = None,
    threshold: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Change a limit, for example disk=20; repeatable.")
    ] = None,
    limit: Annotated[float, typer.Option(min=5, help="Time limit of --all-ranks in seconds.")] = 240,
    unfit: Annotated[Path | None, typer.Option(help="With --all-ranks: file for the names of unfit nodes.")] = None,
    as_json: Json = False,
) -> None:
    """Check this machine, or all ranks of a job. Exit code 1 if a run would fail.

    With CONFIG, also check that two checkpoints of the run fit on the disk.

    [dim]blackmamba doctor[/dim]

    [dim]blackmamba doctor --quick --gpus 8 --folder /scratch/runs[/dim]

    [dim]srun blackmamba doctor blackmamba_1.5b --all-ranks[/dim]
    """
    from megatron_blackmamba.launch.doctor import examine, run_on_all_ranks, show
    from megatron_blackmamba.launch.thresholds import parse

    if all_ranks and (quick or as_json or gpus is not None):
        raise typer.BadParameter("--all-ranks does not go with --quick, --gpus and --json")
    if unfit and not all_ranks:
        raise typer.BadParameter("--unfit needs --all-ranks")
    thresholds, run = parse(threshold or ()), compose(configs) if configs else None
    if all_ranks:
        raise typer.Exit(run_on_all_ranks(folder, run, thresholds, limit, unfit))
    with working("examining this machine"):
        examination = examine(folder, quick=quick, gpus=gpus, thresholds=thresholds, config=run)
    show(examination, as_json=as_json)
    raise typer.Exit(1 if examination.problems else 0)


@app.command()
@taking(JobRequest)
def launch(
    configs: Configs,
    options: JobRequest,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script; write and submit nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a training job to Slurm, with a copy of code and config. The job resumes itself until the run ends.

    [dim]blackmamba launch blackmamba_1.5b data.mixture=mixture.yaml --nodes 7 --partition gpu --dry-run[/dim]

    [dim]blackmamba launch my_run.yaml --nodes 2 --time 4:00:00 --chain 3[/dim]
    """
    import json

    from megatron_blackmamba.launch.submit import announce, job_body, prepare, submit

    run = compose(configs, to_train=True)
    with working("planning the job"):
        done = prepare(run, options) if dry_run else submit(run, options)
    for warning in done.warnings:
        print(f"blackmamba: warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(done.to_json(), indent=2))
    elif dry_run:
        print(done.script, end="")
        if done.verdict:
            print(f"blackmamba: {done.verdict}", file=sys.stderr)
        print(f"blackmamba: time limit {done.limit}. What the job does is in {job_body()}.", file=sys.stderr)
        if done.missing_data:
            print(f"blackmamba: it cannot be submitted yet: {done.missing_data}", file=sys.stderr)
    else:
        print(announce(done))
    if done.missing_data:
        raise typer.Exit(BAD_INPUT)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or training.")],
    out: Annotated[Path | None, typer.Option(help="Output file.", show_default="RUN/report.html")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write the main charts as PNG files into this folder.")] = None,
) -> None:
    """Write one self-contained page about a run: loss, mixture, experts, speed, interruptions, config.

    [dim]blackmamba report runs/tiny[/dim]

    [dim]blackmamba report runs/blackmamba_1.5b --out 1.5b.html --png pictures[/dim]
    """
    with working("writing the page"):
        from megatron_blackmamba.report import write_report

        page = write_report(run, out=out, pictures=png)
    print(page)


@data_commands.app.command("report")
def corpus_report(
    paths: Annotated[list[str], typer.Argument(metavar="MIXTURE|SHARD...", help="Mixture files, or shards.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("corpus.html"),
    sample: Annotated[int, typer.Option(min=1, help="Random documents of each source that are read as text.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the random documents.")] = 0,
    against: Annotated[
        list[str] | None, typer.Option(metavar="TASK|FILE", help="Evaluation items to look for; repeat for more.")
    ] = None,
    most_tokens: Annotated[
        str, typer.Option(metavar="COUNT", help="Tokens of each source that are compared for near-copies.")
    ] = "200M",
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", "-t", help="Tokenizer, if a folder of shards has no tokenizer.json.")
    ] = None,
) -> None:
    """Write a page about a corpus: sources, lengths, languages, near-copies, evaluation items, documents to read.

    [dim]blackmamba data report mixture.yaml[/dim]

    [dim]blackmamba data report tokens/pile tokens/pg19 --against my_test.jsonl --out pile.html[/dim]
    """
    from megatron_blackmamba.data_tools.corpus_figures import measure
    from megatron_blackmamba.data_tools.mixture import parse_count
    from megatron_blackmamba.formats import atomic
    from megatron_blackmamba.report.corpus import render

    corpus = measure(
        paths,
        sample=sample,
        seed=seed,
        most_tokens=parse_count(most_tokens),
        against=against or (),
        tokenizer=tokenizer,
    )
    atomic.write_text(out, render(corpus, paths, tokenizer))
    print(out)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs: state, step, tokens, losses, speed, time left, evaluations.

    A narrow terminal shows fewer columns: first the scores go, then tokens, validation, tokens/s, loss, to go and step.

    [dim]blackmamba runs[/dim]

    [dim]blackmamba runs studies/paper/runs --json[/dim]
    """
    from megatron_blackmamba.report import overview

    found = overview.overviews(folder)
    if as_json:
        print(overview.to_json(found))
    elif found:
        overview.show(found, overview.console())
    else:
        print(f"{folder}: no runs yet")


@app.command()
def compare(
    run: Annotated[list[Path], typer.Argument(help="Folders of two or more runs; the first is the baseline.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file.", show_default="compare.html beside the first run")
    ] = None,
) -> None:
    """Compare runs: configs, losses at equal tokens and equal FLOPs, speed, memory, scores with paired tests.

    Training losses are means over the last 2% of the steps. A run of less than 1,000 steps uses 20, but at most 10%.

    [dim]blackmamba compare runs/quickstart runs/quickstart_mamba[/dim]
    """
    with working("starting"):
        from rich.console import Console

        from megatron_blackmamba.report.comparison_page import compare as compare_runs

    print(compare_runs(run, out, Console()))


@app.command()
def quickstart(
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Training time in minutes.", show_default="4, or as in the first call"),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")] = False,
) -> None:
    """Run the whole pipeline here: text, tokens, mixture, training, Hugging Face export, a sample, a report.

    Every stage prints the command for it. Stop with Ctrl-C at any time; the same command resumes.

    [dim]blackmamba quickstart[/dim]

    [dim]blackmamba quickstart --minutes 20 --fresh[/dim]
    """
    from megatron_blackmamba.quickstart import quickstart as run_quickstart

    run_quickstart(folder, minutes, fresh)


app.command()(train)
app.command()(anneal)
app.command()(inference_commands.generate)
for _name, _package in EXTRAS.items():
    if find_spec(_package):
        app.command(_name)(getattr(import_module(f"{_package}.commands"), _name))
app.command()(interchange_commands.verify)
app.command()(interchange_commands.average)
data_commands.app.command()(trace_commands.trace)
app.command()(evaluate)
app.command()(keep_bias)
app.command()(study)
app.add_typer(data_commands.app, name="data")
app.add_typer(interchange_commands.export_app, name="export")
app.add_typer(interchange_commands.import_app, name="import")


def main() -> None:
    """Run the command line; an error that the user can fix ends with one message and exit code 2, not a traceback."""
    import logging

    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # "?" for what a locale lacks, such as "−"
    # torch warns about a CUDA toolkit without a GPU, once per process; `blackmamba doctor` reports it instead.
    # megatron-core 0.19 warns of how it is called when a model is built, also for a plan.
    for name in ("torch.utils.cpp_extension", "megatron.core"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import_extensions()
        app()
    except KeyboardInterrupt:  # in a process that does not watch for it
        interrupts.say()
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as ended:
        meant = hint(sys.argv[1:], typer.main.get_command(app)) if ended.code == BAD_INPUT else None
        if meant:
            print(f"blackmamba: {meant}", file=sys.stderr)
        raise
    except Exception as error:
        message = in_words(error)
        if message is None or os.environ.get("BLACKMAMBA_TRACEBACK"):
            raise
        code = 1 if may_pass(error) else BAD_INPUT  # a launcher tries again after 1
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
        if rank not in (None, "0") and SAID not in os.environ:
            time.sleep(3)  # ranks refuse alike: the first one says why, and its launcher ends the others
        say_once(message, lambda: print(f"blackmamba: {message}", file=sys.stderr, flush=True))
        if rank is not None:
            os._exit(code)  # other ranks may wait for this one, so skip any clean-up that involves them
        raise SystemExit(code) from None


if __name__ == "__main__":
    main()
