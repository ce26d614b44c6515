"""The plan for people: tables on a terminal, plain text in a file."""

from rich.console import Console
from rich.table import Table

from megatron_blackmamba.plan import flops
from megatron_blackmamba.plan.estimate import Placed, Plan
from megatron_blackmamba.plan.memory import GIB
from megatron_blackmamba.plan.scaling import Row
from megatron_blackmamba.runtime import layout


def show(plan: Plan, console: Console) -> None:
    """Print everything the plan knows."""
    config = plan.config
    console.print(f"[bold]{config.name}[/bold]  {config.model.layers} layers {config.model.pattern}", highlight=False)
    console.print(_parameters(plan), _flops(plan), _training(plan))
    if plan.sources:
        console.print(_sources(plan))
    if plan.missing_data:
        console.print(f"Data not here yet: {plan.missing_data}", highlight=False)
    if plan.refused_data:
        console.print(f"Training would refuse the data: {plan.refused_data}", highlight=False)
    if plan.placed:
        _show_placed(plan, plan.placed, console)
    else:
        console.print("Add --nodes N (and --gpu) for memory, traffic and time on a cluster.", highlight=False)


def refusal(placed: Placed) -> str:
    """Return why the run cannot start like this, and what works; empty if it can."""
    if placed.refused:
        return "\n".join([*placed.refused, placed.advice])
    if placed.memory and not placed.fits:
        needed, there = placed.memory.total / GIB, f"{placed.gpu.memory_gib} GiB of {placed.gpu.name}"
        return (
            f"the fullest GPU needs {needed:.1f} GiB, more than the {there}: "
            f"`blackmamba plan ... {placed.options} --suggest` ranks the layouts that fit"
        )
    return ""


def _grid(title: str, *columns: str) -> Table:
    """Return an empty table whose first column has the title as its header."""
    table = Table(box=None, pad_edge=False, header_style="")
    for number, column in enumerate([f"[bold]{title}[/bold]", *columns]):
        table.add_column(f"{column}" if number == 0 else f"[dim]{column}[/dim]", justify="right" if number else "left")
    return table


def _parameters(plan: Plan) -> Table:
    table = _grid("\nParameters", "\nnumber", "\nshare")
    for kind, number in plan.parameters.by_kind.items():
        table.add_row(kind, f"{number:,}", f"{number / plan.parameters.total:.1%}")
    table.add_row("[bold]total[/bold]", f"[bold]{plan.parameters.total:,}[/bold]", "")
    table.add_row("forward (one token)", f"{plan.parameters.forward:,}", "")
    return table


def _flops(plan: Plan) -> Table:
    config = plan.config
    parts = flops.forward_by_part(config.model, config.data.sequence_length)
    tokens = config.steps * config.tokens_per_step
    total = flops.training(config.model, config.data.sequence_length)
    table = _grid("\nFLOPs", "\nforward, a token", "\nshare")
    for part, count in parts.items():
        table.add_row(part.replace("_", " "), f"{count / 1e6:,.2f} M", f"{count / sum(parts.values()):.1%}")
    table.add_row("training, a token", f"{total / 1e9:.3f} G", "")
    table.add_row("[bold]training, the run[/bold]", f"[bold]{total * tokens:.3g}[/bold]", "")
    if config.training.recompute != "none":
        table.add_row("recomputed, a token", f"{flops.recomputed(config) / 1e9:.3f} G", "")
    paper = flops.paper_formula(config.model, config.tokens_per_step)
    if paper:
        table.add_row("paper's formulas as printed", f"{3 * paper.printed * tokens:.3g}", "")
        table.add_row("paper's formulas, repaired", f"{3 * paper.repaired * tokens:.3g}", "")
    published = flops.published(config)
    if published:
        table.add_row("paper's table", f"{published:.2g}", "")
    return table


def _training(plan: Plan) -> Table:
    config = plan.config
    table = _grid("\nTraining", "")
    table.add_row("steps", f"{config.steps:,}")
    table.add_row("of them warm-up", f"{config.warmup_steps:,}")
    table.add_row("tokens", f"{config.steps * config.tokens_per_step:,}")
    table.add_row("tokens a step", f"{config.tokens_per_step:,} ({config.training.global_batch} sequences)")
    return table


def _sources(plan: Plan) -> Table:
    table = _grid("\nData", "\nprobability", "\ntokens", "\nepochs")
    for source in plan.sources:
        epochs = f"{source.epochs:.4f}" if source.epochs else "–"
        table.add_row(source.name, f"{source.probability:.6f}", f"{source.tokens / 1e9:,.3f} B", epochs)
    return table


def _show_placed(plan: Plan, placed: Placed, console: Console) -> None:
    config, parallel = plan.config, plan.config.parallel
    data = layout.data_parallel_size(parallel, placed.gpus)
    console.print(
        f"\n[bold]{placed.nodes} × {placed.gpus_per_node} {placed.gpu.name}[/bold]: data {data},"
        f" tensor {parallel.tensor}, pipeline {parallel.pipeline},"
        f"{f' context {parallel.context},' if parallel.context > 1 else ''} expert {parallel.expert},"
        f" expert tensor {parallel.expert_tensor}, micro-batch {config.training.micro_batch}",
        highlight=False,
    )
    nodes = ", ".join(map(str, placed.fitting_nodes)) or "none near"
    console.print(f"Nodes on which this layout works: {nodes}", highlight=False)
    if reason := layout.routing(config, placed.gpus):
        console.print(f"Note: {reason}", highlight=False, markup=False)
    if placed.memory:
        console.print(_memory(placed), _traffic(placed), _parts(placed), _time(plan, placed))
    if placed.strong_scaling:
        console.print(_scaling("Strong scaling: the same batch", placed.strong_scaling))
        console.print(_scaling("Weak scaling: the batch grows with the nodes", placed.weak_scaling))
    if placed.suggestions:
        console.print(_suggestions(plan, placed))


def _memory(placed: Placed) -> Table:
    assert placed.memory and placed.activations_by_recompute
    table = _grid(f"\nMemory of the fullest GPU (rank {placed.fullest_rank})", "\nGiB")
    for part, gib in placed.memory.in_gib().items():
        table.add_row(f"[bold]{part}[/bold]" if part == "total" else part, f"{gib:.2f}")
    verdict = "fits" if placed.fits else "[red]does not fit[/red]"
    table.add_row("of", f"{placed.gpu.memory_gib:.1f} ({verdict})")
    for how, size in placed.activations_by_recompute.items():
        table.add_row(f"activations with training.recompute={how}", f"{size / GIB:.2f}")
    return table


def _traffic(placed: Placed) -> Table:
    table = _grid("\nSent by one GPU in one step", "\nGB", "\nover", "\nranks", "\nms at full speed")
    for axis, flow in (placed.flows or {}).items():
        table.add_row(
            axis.replace("_", " "), f"{flow.gigabytes:.2f}", flow.link, str(flow.ranks), f"{1e3 * flow.seconds:.1f}"
        )
    return table


def _parts(placed: Placed) -> Table:
    assert placed.time
    table = _grid("\nA step at best (calculated; only the exchanges that nothing hides)", "\nms")
    for name, seconds in placed.time.parts.items():
        if seconds:
            table.add_row(name, f"{1e3 * seconds:.1f}")
    return table


def _time(plan: Plan, placed: Placed) -> Table:
    assert placed.goodput
    config, lost = plan.config, placed.goodput
    days = placed.seconds_per_step * config.steps / 86400
    how = "at best, calculated: a run is slower, give its own with --mfu" if placed.mfu_is_calculated else "given"
    table = _grid(f"\nTime at {placed.mfu:.1%} MFU ({how})", "")
    table.add_row("a step", f"{placed.seconds_per_step:.3f} s")
    table.add_row("tokens a second", f"{config.tokens_per_step / placed.seconds_per_step:,.0f}")
    table.add_row("the run", f"{days:.1f} days")
    table.add_row("GPU-hours", f"{days * 24 * placed.gpus:,.0f}")
    table.add_row(
        f"one failure every (at {lost.failures:g} per node and month)",
        f"{lost.seconds_between_failures / 86400:.1f} days",
    )
    table.add_row("lost per failure, with the restart", f"{lost.lost_per_failure / 60:.0f} min")
    table.add_row("goodput", f"{lost.share:.2%}")
    table.add_row("the run with failures", f"{days / lost.share:.1f} days")
    return table


def _scaling(title: str, rows: tuple[Row, ...]) -> Table:
    table = _grid(f"\n{title}", "\nsequences", "\ns a step at best", "\ntokens a second", "\nefficiency")
    for row in rows:
        nodes = f"{row.nodes} node{'s' if row.nodes > 1 else ''}"
        speed, efficiency = f"{row.tokens_per_second:,.0f}", f"{row.efficiency:.1%}"
        table.add_row(nodes, f"{row.global_batch:,}", f"{row.seconds_per_step:.3f}", speed, efficiency)
    return table


def _suggestions(plan: Plan, placed: Placed) -> Table:
    table = _grid("\nLayouts that fit, fastest at best first", "\nGiB", "\ns a step", "\ntokens a second", "\nwhy")
    for candidate in placed.suggestions:
        memory, seconds = f"{candidate.memory_gib:.1f}", f"{candidate.seconds_per_step:.3f}"
        speed = f"{candidate.tokens_per_second(plan.config):,.0f}"
        table.add_row(candidate.overrides(plan.config), memory, seconds, speed, candidate.time.described())
    return table
