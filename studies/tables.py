"""The tables of a study with trunks and branches, for its page and, as Markdown, for other documents."""

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from megatron_blackmamba.report.charts import short
from megatron_blackmamba.report.confidence import mean_of, side_of
from megatron_blackmamba.study.corpus import SOURCES
from megatron_blackmamba.study.grids import LARGEST, best_rates
from megatron_blackmamba.study.points import Evidence, Point, chosen, unique
from megatron_blackmamba.study.table import Table
from studies import differences, fits, fresh, frontier
from studies.routing import MEANING

TUNED = ", each at its best learning rate"
LITTLE = 0.01
"""Nats per token below which the gain of a rule of inference has vanished."""


def every(
    evidence: Evidence, subjects: Sequence[str], parts: Mapping[str, Sequence[tuple[str, str]]]
) -> Iterator[Table]:
    """Yield all tables with rows; subjects are the variants that are compared with every other."""
    tuned, plain = (fits.with_next_size(p) for p in (fits.at_best_rates(evidence.points), evidence.plain))
    chose_nothing = fresh.at_fresh_seeds(evidence.points)
    found = [rates(evidence.points), fresh.ranked(chose_nothing), fresh.parts(chose_nothing, parts)]
    found += [compared(chose_nothing, subject, fresh.WHERE) for subject in subjects]
    found += [frontier.table(evidence.points, subject) for subject in subjects]
    for points, where in ((tuned, TUNED), (plain, "")):
        found += [compared(points, subject, where) for subject in subjects]
        found += [turns(points, subjects, where), tests(points, subjects, where)]
        found += [equal_losses(points, subjects, where), rules(points, where)]
    found += [others(plain, evidence.first), changes(evidence.points), routers(plain)]
    found += [generation(evidence), all_points(evidence.plain), *best_values(evidence.points)]
    yield from (table for table in [*found, corpus(evidence)] if table.rows)


def rates(points: Sequence[Point]) -> Table:
    """Show the learning rates tried, and the best."""
    rows = [
        [variant, size, ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in best.losses.items())]
        + [f"{best.lowest:g}" + " (edge)" * best.at_edge]
        for (variant, size), best in best_rates(points).items()
    ]
    words = (
        f"Mean loss over the {LARGEST} largest budgets and the seeds that have all rates. Edge: it is the smallest"
        " or largest one tried, and a better one may lie beyond."
    )
    return Table("Learning rates", words, ("variant", "size", "rate: mean loss", "best"), rows)


def compared(points: Sequence[Point], first: str, where: str = "") -> Table:
    """Show a variant's loss, and its difference from those that have two seeds."""
    rows, names = [], [each for each in unique(points, "variant") if each != first and _seeds(points, each) > 1]
    for size in unique(points, "size"):
        found = {other: {d.budget: d for d in fits.differences(points, first, other, size)} for other in names}
        for budget in sorted({budget for each in found.values() for budget in each}):
            at = chosen(points, variant=first, size=size, budget=budget)
            one = [size, short(budget), f"{at[0].flops:.1e}", f"{at[0].tokens / at[0].parameters:.1f}", str(len(at))]
            less = [_difference(found[other].get(budget), len(at)) for other in names]
            rows.append([*one, f"{statistics.fmean(p.loss for p in at):.3f}", *less])
    columns = ("size", "budget", "FLOPs", "tokens per parameter", "seeds", first, *(f"− {other}" for other in names))
    words = (
        "Mean loss in nats per token, and its difference from other variants at equal FLOPs, with the 95% interval over"
        " the seeds. A number in brackets says how many seeds a difference over fewer has."
    )
    return Table(f"Differences of {first}{where}", words, columns, rows)


def _seeds(points: Sequence[Point], variant: str) -> int:
    return len(unique(chosen(points, variant=variant), "seed"))


def _difference(found: fits.Difference | None, seeds: int) -> str:
    if found is None:
        return "–"
    number = len(found.values)
    said = mean_of(found.values, "+") if number > 2 else f"{found.mean:+.3f}"
    return said + (f" ({number})" if number < seeds else "")


def turns(points: Sequence[Point], subjects: Sequence[str], where: str = "") -> Table:
    """Show the tokens per parameter at which the sign of a difference turns for good."""
    rows = []
    for first, other, size in _pairs(points, subjects):
        if cross := fits.crossing(points, first, other, size):
            seeds = ", ".join(f"{turn:.1f}" for turn in cross.by_seed.values())
            named = ((cross.never, "worse"), (cross.always, "better"))
            whole = [f"{number} {word} without" for number, word in named if number]
            mean = f"{'from' if cross.better_after else 'up to'} {cross.mean:.1f}" if cross.by_seed else "–"
            band = f" ({cross.interval})" if cross.interval else ""
            rows.append([f"{first} − {other}", size, ", ".join([*([seeds] if seeds else []), *whole]), mean + band])
    words = (
        "Tokens per parameter of the first variant. Better from or up to: the geometric mean of the seeds that turn,"
        " and its 95% interval if all do. Without: seeds without such a turn, worse or better at their largest budget."
    )
    return Table(f"Turns{where}", words, ("comparison", "size", "each seed", "better"), rows)


def _pairs(points: Sequence[Point], subjects: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return subject, other variant of two seeds and size, each pair once."""
    found: list[tuple[str, str, str]] = []
    for size in unique(points, "size"):
        here = [each for each in unique(chosen(points, size=size), "variant") if _seeds(points, each) > 1]
        for first in (each for each in subjects if each in here):
            found += [(first, o, size) for o in here if o != first and (o, first, size) not in found]
    return found


def tests(points: Sequence[Point], subjects: Sequence[str], where: str = "") -> Table:
    """Show a test for each comparison that three seeds have."""
    rows = [
        [f"{one.first} − {one.other}", one.size, mean_of([*one.by_seed.values()], "+"), _each(one.by_seed, "+.3f")]
        + [f"{one.p:.2g}", f"{one.adjusted:.2g}"]
        for one in differences.comparisons(points, _pairs(points, subjects))
    ]
    words = (
        f"A seed's mean difference over its budgets of at least {differences.TESTED_FROM:g} tokens per parameter,"
        " and Student's t over the seeds. The last column allows for the number of tests (Holm)."
    )
    return Table(f"Tests{where}", words, ("comparison", "size", "mean", "by seed", "p", "p, adjusted"), rows)


def equal_losses(points: Sequence[Point], subjects: Sequence[str], where: str = "") -> Table:
    """Show what other variants must spend for the same loss."""
    rows = []
    for first, other, size in _pairs(points, subjects):
        for equal in differences.equal_losses(points, first, other, size):
            at, each = equal.difference, _each(equal.by_seed, ".2f", equal.bounds)
            rows.append([first, other, size, short(at.budget), f"{at.per_parameter:.1f}", equal.described, each])
    words = (
        "FLOPs of the other variant over those of the first, at which its curve reaches the same loss, with the 95%"
        " interval over the seeds. Above 1, it needs more. Nothing is extrapolated: > marks a seed whose curve ends"
        " above the loss."
    )
    columns = ("variant", "other", "size", "budget", "tokens per parameter", "FLOPs for the same loss", "by seed")
    return Table(f"Equal losses{where}", words, columns, rows)


def others(points: Sequence[Point], first: str) -> Table:
    """Show the variants of one seed at their largest budget."""
    rows = []
    for variant in (each for each in unique(points, "variant") if each != first and _seeds(points, each) == 1):
        for size in unique(chosen(points, variant=variant), "size"):
            if found := fits.differences(points, variant, first, size):
                rows.append([variant, size, short(found[-1].budget), f"{found[-1].mean:+.3f}"])
    columns = ("variant", "size", "budget", f"loss less that of {first}")
    return Table("Variants of one seed", "At equal FLOPs and the rate of the study.", columns, rows)


def changes(points: Sequence[Point]) -> Table:
    """Show what the changes of grids give, seed by seed."""
    plain = {(p.variant, p.size, p.seed, p.budget): p.loss for p in points if p.plain}
    alike: dict[tuple[str, str, str, int], list[Point]] = {}
    for point in (p for p in points if not p.plain):
        said = ", ".join(f"{key}={value}" for key, value in point.changed.items())
        alike.setdefault((point.variant, point.size, said, point.budget), []).append(point)
    rows = []
    for (variant, size, said, budget), at in alike.items():
        before = [plain.get((variant, size, p.seed, budget)) for p in at]
        less = [p.loss - loss for p, loss in zip(at, before, strict=True) if loss is not None]
        seeds = ", ".join(str(p.seed) for p in at)
        loss = f"{statistics.fmean(p.loss for p in at):.3f}"
        rows.append([variant, size, short(budget), said, seeds, loss, mean_of(less, "+") if less else "–"])
    columns = ("variant", "size", "budget", "changes", "seeds", "loss", "less that without changes")
    return Table("Grids", "Means over the seeds; differences are taken seed by seed.", columns, rows)


def rules(points: Sequence[Point], where: str = "") -> Table:
    """Show the loss of the same weights under three rules of inference."""
    rows = []
    for size in unique(points, "size"):
        for variant in unique(points, "variant"):
            some = [p for p in chosen(points, variant=variant, size=size) if "plain" in p.router]
            for budget in sorted(unique(some, "budget")):
                at = [p.router for p in chosen(some, budget=budget)]
                less = [[each["plain"] - each[rule] for each in at] for rule in ("loss", "balanced")]
                rows.append([variant, size, short(budget), str(len(at)), *(mean_of(each, "+") for each in less)])
                rows[-1].append(_stays(less[0]))
    words = (
        "What the choice of the largest logit loses against the router's own rule, which is that rule's gain, and"
        f" against balanced experts. The gain stays where its 95% interval lies above {LITTLE:g}, and vanishes below."
    )
    columns = ("variant", "size", "budget", "seeds", "largest logit − own rule", "largest logit − balanced", "the gain")
    return Table(f"Rules of inference on the same weights{where}", words, columns, rows)


def _stays(gains: Sequence[float]) -> str:
    return {1: "stays", 0: "open", -1: "vanishes"}[side_of(gains, LITTLE)]


def routers(points: Sequence[Point]) -> Table:
    """Show what the routers do, where that has been measured."""
    rows = [
        [p.variant, p.size, short(p.budget), str(p.seed)]
        + [f"{p.router[name]:.3f}" if name in p.router else "–" for name in MEANING]
        for p in points
        if p.router
    ]
    words = " ".join(f"{name}: {meaning}." for name, meaning in MEANING.items())
    return Table("Routers", words, ("variant", "size", "budget", "seed", *MEANING), rows)


def generation(evidence: Evidence) -> Table:
    """Show what a generated token costs beside the loss."""
    rows = []
    for one in evidence.generation:
        some = chosen(evidence.plain, variant=one["group"], size=one["size"])
        if some and (last := max(p.budget for p in some)):
            loss = statistics.fmean(p.loss for p in some if p.budget == last)
            times = f"{min(one['milliseconds']):.2f} to {max(one['milliseconds']):.2f}"
            state = " to ".join(f"{size:,}" for size in dict.fromkeys((one["bytes"][0], one["bytes"][-1])))
            rows.append(
                [one["group"], one["size"], short(last), f"{loss:.3f}", times, state, short(some[0].parameters)]
                + [short(some[0].active)]
            )
    lengths = evidence.generation[0]["lengths"] if evidence.generation else (0, 0)
    words = (
        f"Milliseconds for a token, after {lengths[0]} to {lengths[-1]} tokens, of one sequence in fp32 on the machine"
        " that wrote this, and bytes of the state. Parameters must be held in memory; only active ones are read."
    )
    columns = (
        *("variant", "size", "largest budget", "its loss", "ms per token", "bytes of state", "parameters", "active"),
    )
    return Table("Generation", words, columns, rows)


def all_points(points: Sequence[Point]) -> Table:
    """Show the mean over the seeds of each variant, size and budget."""
    rows = []
    for size in unique(points, "size"):
        for budget in sorted({p.budget for p in points if p.size == size}):
            for variant in unique(points, "variant"):
                if at := chosen(points, variant=variant, size=size, budget=budget):
                    rows.append(_row(at))
    columns = (
        *("variant", "size", "budget", "seeds", "parameters", "active", "tokens per parameter", "FLOPs", "loss"),
        *("bits per byte", "unseen set", "busiest expert in training", "repeated tokens"),
    )
    words = "Means over the seeds. Losses are in nats per token. Equal budgets are equal training FLOPs."
    return Table("Points", words, columns, rows)


def _row(at: Sequence[Point]) -> list[str]:
    one = at[0]
    busiest = [p.busiest for p in at if p.busiest is not None]
    sets = [*one.validation]
    return [
        one.variant,
        one.size,
        short(one.budget),
        ", ".join(str(p.seed) for p in at),
        short(one.parameters),
        short(one.active),
        f"{one.tokens / one.parameters:.2f}",
        f"{one.flops:.2e}",
        mean_of([p.loss for p in at]),
        " / ".join(f"{name} {statistics.fmean(p.bits_per_byte[name] for p in at):.3f}" for name in sets),
        _unseen(at),
        f"{statistics.fmean(busiest):.2f}" if busiest else "–",
        short(one.repeated),
    ]


def _unseen(at: Sequence[Point]) -> str:
    names = [name for name in at[0].validation if name not in SOURCES]
    return " / ".join(f"{name} {statistics.fmean(p.validation[name] for p in at):.3f}" for name in names) or "–"


def best_values(points: Sequence[Point]) -> Iterator[Table]:
    """Yield a table for each key of a grid: what its values give, and the best one as a function of compute."""
    for key in dict.fromkeys(key for point in points for key in point.changed):
        best, rows = fits.best_values(points, key), []
        for each in best:
            tried = ", ".join(f"{value:g}: {loss:.3f}" for value, loss in each.tried.losses.items())
            where = f"{each.value:.2g}" + (" (edge of the grid)" if each.tried.at_edge else "")
            cost = "–" if each.twice is None else f"{each.twice:+.3f}"
            rows.append([each.variant, each.size, f"{each.flops:.1e}", tried, where, f"{each.loss:.3f}", cost])
        columns = ("variant", "size", "FLOPs", "loss at each value", "best value", "its loss", "cost of twice or half")
        yield Table(key, " ".join(_over_flops(best)), columns, rows)


def _over_flops(best: Sequence[fits.Best]) -> Iterator[str]:
    for variant, size in dict.fromkeys((each.variant, each.size) for each in best):
        own = [each for each in best if (each.variant, each.size) == (variant, size)]
        if (slope := fits.over_flops(own)) is not None:
            yield f"{variant}, size {size}: the best value follows FLOPs^{slope:.2f} over {len(own)} budgets."


def corpus(evidence: Evidence) -> Table:
    """Show the documents of each source."""
    rows = [
        [source, part, f"{counts['documents']:,}", f"{counts['bytes'] / 1e6:.1f} MB", f"{counts.get('tokens', 0):,}"]
        for source, parts in evidence.corpus.items()
        for part, counts in parts.items()
        if part in ("train", "validation")
    ]
    return Table(
        "Corpus", "What remained after deduplication.", ("source", "part", "documents", "bytes", "tokens"), rows
    )


def _each(by_seed: Mapping[int, float], how: str, bounds: Collection[int] = ()) -> str:
    return ", ".join(f"{seed}: {'> ' if seed in bounds else ''}{value:{how}}" for seed, value in by_seed.items())
