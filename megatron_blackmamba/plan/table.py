"""The plan for people: tables on a terminal, plain text in a file."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_blackmamba.console.units import duration
from megatron_blackmamba.formats.shards import token_dtype
from megatron_blackmamba.formats.source_schedule import repetition
from megatron_blackmamba.plan import flops, validation
from megatron_blackmamba.plan.estimate import Placed, Plan, storage_of
from megatron_blackmamba.plan.memory import GIB
from megatron_blackmamba.plan.scaling import Row
from megatron_blackmamba.runtime import layout

LONG_UPDATE = 0.03
"""The part of a step above which the time of an update is worth a remark."""
HIGH_WRITE_RATE = 200e6
"""Bytes a second of checkpoints that a shared file system may not have to spare. Above it, the plan says what helps."""


def show(plan: Plan, console: Console) -> None:
    """Print everything the plan knows."""
    config = plan.config
    console.print(Text(verdict(plan), style="bold"), soft_wrap=True)
    if plan.refused_data:
        console.print("Training would refuse the data, as the end says; --check prints only that", soft_wrap=True)
    if plan.missing_data:
        console.print(Text(f"Data not found: {plan.missing_data}"), soft_wrap=True)
    console.print(f"[bold]{config.name}[/bold]  {config.model.layers} layers {config.model.pattern}", highlight=False)
    console.print(_parameters(plan), _flops(plan), _training(plan), _storage(plan))
    if config.training.batch_ramp:
        console.print(_stages(plan))
    if plan.sources:
        console.print(_sources(plan))
    if plan.placed:
        _show_placed(plan, plan.placed, console)


def verdict(plan: Plan) -> str:
    """Return in a line whether the run fits, how much memory it needs and how long it takes."""
    name, placed = plan.config.name, plan.placed
    if placed is None:
        size = f"{_count(plan.parameters.total)} parameters, {_count(plan.tokens)} tokens"
        return f"{name}: {size}; add --nodes N (and --gpu) for memory, traffic and time on a cluster"
    where = f"{placed.gpus} {placed.gpu.name}"
    if placed.memory is None:
        return f"{name} cannot run on {where}: {placed.refused[0]}"
    memory = f"{placed.memory.total / GIB:.1f} of {placed.gpu.memory_gib:g} GiB on the fullest of {where}"
    if not placed.fits:
        return f"{name} does not fit: {memory}"
    how = "at best, calculated" if placed.mfu_is_calculated else f"at {placed.mfu:.1%} MFU"
    return f"{name} fits: {memory}; {duration(placed.seconds)} {how}"


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


def warnings(plan: Plan) -> list[str]:
    """Return what is probably not meant, although the run can start like this."""
    found = [repetition({source.name: source.epochs for source in plan.sources if source.max_epochs is None})]
    found += validation.notes(plan.config) if plan.sources else ()
    tensor = plan.placed and (plan.placed.flows or {}).get("tensor")
    if plan.placed and tensor and tensor.link == "network":
        found.append(
            f"parallel.tensor={tensor.ranks} crosses nodes, so every layer waits for the network. "
            f"Use a value that divides the {plan.placed.gpus_per_node} GPUs of a node."
        )
    if plan.placed and plan.placed.time and plan.placed.time.update > LONG_UPDATE * plan.placed.time.total:
        share = plan.placed.time.update / plan.placed.time.total
        found.append(
            f"the update takes {share:.1%} of a step: a larger training.global_batch, or more data-parallel ranks,"
            " make it a smaller part."
        )
    return [warning for warning in [*found, *_of_rate(plan)] if warning]


def _of_rate(plan: Plan) -> Iterator[str]:
    config, optimizer = plan.config, plan.config.optimizer
    if optimizer.min_learning_rate == optimizer.learning_rate and optimizer.decay != "constant":
        yield (
            f"optimizer.min_learning_rate is the learning rate itself, {optimizer.learning_rate:g}: it never decays, "
            "so set a smaller one."
        )
    if config.start.from_ is not None and not plan.begins.trunk and not config.warmup_steps:
        yield "start.from begins with a new optimizer at the full learning rate: set optimizer.warmup_tokens."


def _grid(title: str, *columns: str, rows: Iterable[tuple[str, ...]] = ()) -> Table:
    """Return a table whose first column has the title as its header."""
    table = Table(box=None, pad_edge=False, header_style="")
    for number, column in enumerate([f"[bold]{title}[/bold]", *columns]):
        table.add_column(f"{column}" if number == 0 else f"[dim]{column}[/dim]", justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _parameters(plan: Plan) -> Table:
    kinds = plan.parameters.by_kind.items()
    rows = [(kind, f"{number:,}", f"{number / plan.parameters.total:.1%}") for kind, number in kinds]
    table = _grid("\nParameters", "\nnumber", "\nshare", rows=rows)
    table.add_row("[bold]total[/bold]", f"[bold]{plan.parameters.total:,}[/bold]", "")
    table.add_row("active for a token", f"{plan.parameters.forward:,}", "")
    return table


def _flops(plan: Plan) -> Table:
    config = plan.config
    parts = flops.forward_by_part(config.model, config.data.sequence_length)
    tokens = plan.tokens
    total = flops.training(config.model, config.data.sequence_length)
    table = _grid("\nFLOPs", "\nforward, a token", "\nshare")
    for part, count in parts.items():
        table.add_row(part.replace("_", " "), f"{count / 1e6:,.2f} M", f"{count / sum(parts.values()):.1%}")
    if extra := flops.extra_depth(config.model, config.data.sequence_length):
        table.add_row("multi-token prediction, in training", f"{extra / 1e6:,.2f} M", "")
    table.add_row("training, a token", _count(total, "FLOPs"), "")
    table.add_row("[bold]training, the run[/bold]", f"[bold]{total * tokens:.3g}[/bold]", "")
    if config.training.recompute != "none":
        table.add_row("recomputed, a token", _count(flops.recomputed(config), "FLOPs"), "")
    paper, published = flops.paper_formula(config.model, config.tokens_per_step), flops.published(config)
    if paper and published:
        table.add_row("paper's formulas as printed", f"{3 * paper.printed * tokens:.3g}", "")
        table.add_row("paper's formulas, corrected", f"{3 * paper.repaired * tokens:.3g}", "")
        table.add_row("paper's table", f"{published:.2g}", "")
    return table


def _training(plan: Plan) -> Table:
    config, begins = plan.config, plan.begins
    table = _grid("\nTraining", "")
    if begins.trunk:
        table.add_row("branches from", f"{begins.trunk}, after step {begins.step:,}")
        table.add_row("consumed there", f"{begins.consumed_samples * config.data.sequence_length:,} tokens")
    table.add_row("steps", f"{plan.steps:,}")
    if begins.consumed_samples < config.warmup_samples:
        table.add_row("warm-up steps", f"{config.warmup_steps:,}")
    if config.optimizer.decay == "wsd":
        table.add_row("decay steps, at the end", f"{config.decay_steps:,} ({config.optimizer.decay_shape})")
    table.add_row("tokens", f"{plan.tokens:,}")
    table.add_row("tokens a step", f"{config.tokens_per_step:,} ({config.training.global_batch} sequences)")
    return table


def _stages(plan: Plan) -> Table:
    """Return the stages of a ramp, with their times if the run is placed."""
    table = _grid("\nBatches", "\nfrom step", "\nsteps", "\ntokens", "\ns a step", "\ntime")
    for stage in plan.stages:
        seconds = stage.seconds_per_step
        times = [f"{seconds:.3f}", duration(stage.steps * seconds)] if seconds else ["–", "–"]
        sizes = [f"{number:,}" for number in (stage.first, stage.steps, stage.tokens)]
        table.add_row(f"{stage.global_batch:,} sequences", *sizes, *times)
    return table


def _storage(plan: Plan) -> Table:
    config, needed = plan.config, storage_of(plan)
    table = _grid("\nDisk space", "")
    table.add_row("a checkpoint", _size(needed.checkpoint))
    table.add_row(
        f"checkpoints at the end: {needed.kept}, and one being written", f"[bold]{_size(needed.checkpoints)}[/bold]"
    )
    if needed.every:
        table.add_row("steps between checkpoints", f"{needed.every:,}")
    if plan.placed and plan.placed.seconds_per_step:
        step = plan.placed.seconds_per_step
        if needed.every:
            interval = needed.every * step
            table.add_row("one is written every", duration(interval))
            rate = needed.checkpoint / interval
            hint = "; a larger checkpoint.every lowers it" if rate > HIGH_WRITE_RATE else ""
            table.add_row("write rate, if it takes a whole interval", f"{rate / 1e6:,.1f} MB/s{hint}")
        if needed.read_per_step:
            table.add_row("tokens read by all ranks together", f"{needed.read_per_step / step / 1e6:,.1f} MB/s")
    if needed.corpus:
        dtype = token_dtype(config.model.vocab_size)
        table.add_row(
            f"the whole tokenized corpus ({dtype})",
            f"{needed.corpus / 1e12:,.2f} TB" if needed.corpus >= 1e11 else _size(needed.corpus),
        )
    return table


def _size(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"


def _count(number: float, unit: str = "") -> str:
    """Return a number in thousands, millions or billions."""
    for prefix, size in (("G" if unit else "B", 1e9), ("M", 1e6)):
        if number >= size / 10:
            return f"{number / size:,.3f} {prefix}"
    return f"{number:,.0f}"


def _sources(plan: Plan) -> Table:
    rows = (
        (s.name, f"{s.probability:.6f}", _count(s.tokens), f"{s.epochs:.4f}" if s.epochs else "–") for s in plan.sources
    )
    return _grid("\nData", "\nprobability", "\ntokens", "\nepochs", rows=rows)


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
    console.print(f"Nodes on which this layout works, memory aside: {nodes}", highlight=False)
    if reason := layout.routing(config, placed.gpus):
        console.print(f"Note: {reason}", highlight=False, markup=False)
    if placed.memory:
        console.print(_memory(placed), _traffic(placed), _parts(placed), _time(plan, placed))
    if placed.strong_scaling:
        console.print(_scaling("Strong scaling: the same batch", placed.strong_scaling))
        console.print(_scaling("Weak scaling: the batch grows with the nodes", placed.weak_scaling))
    if placed.suggestions:
        console.print(_suggestions(plan, placed))
    if placed.lengths:
        console.print(_lengths(placed))
        for length in placed.lengths:
            console.print(length.said, highlight=False, soft_wrap=True)  # to be copied


def _lengths(placed: Placed) -> Table:
    """Return for each length its fastest layout, and beside it what context parallelism exchanges."""
    columns = ("\nsequences a step", "\nGiB", "\ns a step", "GB sent by a GPU\nfor context", "FLOPs\na token")
    table = _grid("\nTokens of a sequence", *columns)
    for row in placed.lengths:
        found, batch = row.candidate, row.config.training.global_batch
        numbers = [f"{found.memory_gib:.1f}", f"{found.seconds_per_step:.2f}", f"{row.exchange:.2f}"] if found else []
        table.add_row(f"{row.tokens:,}", f"{batch}", *(numbers or "–––"), _count(row.flops, "FLOPs"))
    return table


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
    rows = (
        (axis.replace("_", " "), f"{flow.gigabytes:.2f}", flow.link, f"{flow.ranks}", f"{1e3 * flow.seconds:.1f}")
        for axis, flow in (placed.flows or {}).items()
    )
    return _grid("\nSent by one GPU in one step", "\nGB", "\nover", "\nranks", "\nms at full speed", rows=rows)


def _parts(placed: Placed) -> Table:
    assert placed.time
    rows = ((name, f"{1e3 * seconds:.1f}") for name, seconds in placed.time.parts.items() if seconds)
    return _grid("\nA step at best (calculated; only the exchanges that nothing hides)", "\nms", rows=rows)


def _time(plan: Plan, placed: Placed) -> Table:
    assert placed.goodput
    config, lost, seconds = plan.config, placed.goodput, placed.seconds
    how = "at best, calculated: a run is slower, give its own with --mfu" if placed.mfu_is_calculated else "given"
    rows = {
        "a step": f"{placed.seconds_per_step:.3f} s",
        "tokens a second": f"{config.tokens_per_step / placed.seconds_per_step:,.0f}",
        "the run": duration(seconds),
        "GPU-hours": f"{seconds / 3600 * placed.gpus:,.{0 if seconds > 3600 else 2}f}",
        f"one failure every (at {lost.failures:g} per node and month)": duration(lost.seconds_between_failures),
        "lost per failure, with the restart": f"{lost.lost_per_failure / 60:.0f} min",
        "goodput": f"{lost.share:.2%}",
        "the run with failures": duration(seconds / lost.share),
    }
    return _grid(f"\nTime at {placed.mfu:.1%} MFU ({how})", "", rows=rows.items())


def _scaling(title: str, rows: tuple[Row, ...]) -> Table:
    table = _grid(f"\n{title}", "\nsequences", "\ns a step at best", "\ntokens a second", "\nefficiency")
    for row in rows:
        nodes = f"{row.nodes} node{'s' if row.nodes > 1 else ''}"
        speed, efficiency = f"{row.tokens_per_second:,.0f}", f"{row.efficiency:.1%}"
        table.add_row(nodes, f"{row.global_batch:,}", f"{row.seconds_per_step:.3f}", speed, efficiency)
    return table


def _suggestions(plan: Plan, placed: Placed) -> Table:
    table = _grid("\nLayouts that fit, fastest at best first", "\nGiB", "\ns a step", "M tokens\na second", "\nwhy")
    for candidate in placed.suggestions:
        memory, seconds = f"{candidate.memory_gib:.1f}", f"{candidate.seconds_per_step:.3f}"
        speed = f"{candidate.tokens_per_second(plan.config) / 1e6:,.3f}"
        table.add_row(candidate.overrides(plan.config), memory, seconds, speed, candidate.time.described())
    words = [word for candidate in placed.suggestions for word in candidate.overrides(plan.config).split()]
    table.columns[0].min_width = max(map(len, words), default=None)  # to be copied, so never shortened
    return table
