"""`blackmamba doctor`: what this machine has, what a run would use, what is missing and how to get it."""

import json
import platform
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.launch import checkpoint_space, hardware, limits, software
from megatron_blackmamba.launch.findings import Examination, Finding
from megatron_blackmamba.launch.thresholds import Thresholds

COLOURS = {"ok": "default", "note": "dim", "warning": "yellow", "problem": "bold red"}


def examine(
    folder: str | Path,
    *,
    quick: bool,
    gpus: int | None = None,
    thresholds: Thresholds = Thresholds(),
    config: RunConfig | None = None,
) -> Examination:
    """Examine this host.

    Args:
        folder: Folder of the future run; its disk is measured.
        quick: Check only whether this node can take part in a run. Takes seconds; used by a job's preflight.
        gpus: Required number of GPUs. None: any number.
        config: Run whose checkpoints must fit on the disk.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core says at length what the table says in a line
        place = Path(folder).resolve()
        findings = list((_preflight if quick else _everything)(place, gpus, thresholds))
        if config is not None and _torch_works(findings):
            findings += checkpoint_space.judge(place, config, thresholds)
    return Examination(platform.node(), findings, _next_command(findings, quick))


def run_on_all_ranks(
    folder: Path, config: RunConfig | None, thresholds: Thresholds, limit: float, unfit_file: Path | None
) -> int:
    """Check all ranks of this job together; rank 0 also judges the disk's space. Returns the exit code."""
    from megatron_blackmamba.launch.all_ranks import examine_all
    from megatron_blackmamba.runtime.world import find_place

    problems: list[str] = []
    if config is not None and find_place().rank == 0:
        for each in checkpoint_space.judge(folder.resolve(), config, thresholds):
            said = f"{each.name}: {each.found}. {each.advice}"
            if each.status == "problem":
                problems.append(said)
            elif each.status == "warning":
                print(f"warning: {said}", flush=True)
    return examine_all(thresholds, limit, problems, unfit_file)


def show(examination: Examination, *, as_json: bool = False) -> None:
    """Print the table, or one JSON object."""
    if as_json:
        print(json.dumps(examination.to_json(), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=examination.host, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    part = ""
    for finding in examination.findings:
        mark = "" if finding.status in ("ok", "note") else f"{finding.status}: "
        found = f"[{COLOURS[finding.status]}]{mark}{_plain(finding.found)}[/]"
        advice = f" → {_plain(finding.advice)}" if finding.advice else ""
        table.add_row(finding.part if finding.part != part else "", _plain(finding.name), found + advice)
        part = finding.part
    console.print(table)
    console.print(f"\nNext: [bold]{_plain(examination.next_command)}[/]", highlight=False, soft_wrap=True)


def _preflight(folder: Path, gpus: int | None, thresholds: Thresholds) -> Iterator[Finding]:
    imports = list(software.imports())
    yield from imports
    yield from hardware.disk(folder, 16, thresholds.disk)
    yield from limits.open_files(thresholds.open_files)
    yield from limits.network_cards()
    if _torch_works(imports):
        count = hardware.gpu_count()
        yield from hardware.gpus(gpus)
        yield from hardware.shared_memory(count)
        yield from hardware.locked_memory()
        if count > 1:
            yield from hardware.all_reduce(count)


def _everything(folder: Path, gpus: int | None, thresholds: Thresholds) -> Iterator[Finding]:
    imports = list(software.imports())
    works = _torch_works(imports)
    count = hardware.gpu_count() if works else 0
    yield from software.interpreter()
    yield from imports
    yield from software.packages(count)
    yield from software.versions()
    yield from software.programs()
    if works:
        yield from software.foreign_names()
        yield from software.backends()
    yield from hardware.processors()
    yield from hardware.memory()
    yield from hardware.shared_memory(count)
    yield from hardware.locked_memory()
    yield from limits.open_files(thresholds.open_files)
    yield from limits.network_cards()
    if works:
        if count == 0:
            yield from hardware.matrix_products()
        yield from hardware.gpus(gpus)
        yield from hardware.all_reduce(count)
    yield from hardware.disk(folder, 256, thresholds.disk)


def _torch_works(imports: list[Finding]) -> bool:
    return not any(finding.name == "torch" and finding.status == "problem" for finding in imports)


def _next_command(findings: list[Finding], quick: bool) -> str:
    problem = next((finding for finding in findings if finding.status == "problem"), None)
    if problem:
        return f"fix the {problem.part}, {problem.name}: {problem.advice or problem.found}. Then the same command again"
    if quick:
        return "blackmamba train CONFIG..."
    if _slurm_answers():
        return "blackmamba launch blackmamba_1.5b --nodes 7 --dry-run"
    if any(finding.name == "GPU 0" for finding in findings):
        return "blackmamba plan blackmamba_1.5b --nodes 1"
    return "blackmamba quickstart"


def _slurm_answers() -> bool:
    """Return whether a Slurm controller answers; its programs may be installed without one."""
    try:
        return subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.split()))
