"""Judge what all ranks of a job measured: which node is slow, different or silent, and what is no node's fault."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from megatron_blackmamba.launch.thresholds import Thresholds


@dataclass
class Report:
    """The report of one rank: its node, its software, and its measurements."""

    rank: int
    node: str
    on_gpu: bool = False
    facts: dict[str, str] = field(default_factory=dict)
    """Name → value; must be the same on every node."""
    clock: float = 0.0
    """Seconds that its clock is ahead of rank 0's."""
    product: float | None = None
    """GFLOP/s."""
    pairs: dict[str, float] = field(default_factory=dict)
    """Partner node → GB/s each way."""
    all_reduce: float | None = None
    all_to_all: float | None = None

    @property
    def pair(self) -> float | None:
        """Return the bandwidth to the best partner: a slow partner says nothing about this rank."""
        return max(self.pairs.values(), default=None)


@dataclass
class Verdict:
    """Nodes to exclude with reasons, problems without a single node as their cause, and notes."""

    unfit: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.unfit and not self.problems

    def blame(self, node: str, reason: str) -> None:
        reasons = self.unfit.setdefault(node, [])
        if reason not in reasons:
            reasons.append(reason)

    def lines(self) -> list[str]:
        unfit = [f"unfit: {node}: {'; '.join(reasons)}" for node, reasons in sorted(self.unfit.items())]
        return [*unfit, *(f"problem: {each}" for each in self.problems), *(f"warning: {e}" for e in self.warnings)]


def judge(reports: list[Report], thresholds: Thresholds) -> Verdict:
    """Compare the ranks' reports; the nodes that deviate are unfit, unless they are the majority."""
    verdict = Verdict()
    _compare_facts(reports, verdict)
    _compare_clocks(reports, thresholds, verdict)
    on_gpus = all(report.on_gpu for report in reports)
    product = thresholds.product if on_gpus else thresholds.cpu_product
    pair = thresholds.pair if on_gpus else thresholds.cpu_pair
    _compare(reports, lambda report: report.product, product, "matrix products", "GFLOP/s", verdict)
    if len({report.node for report in reports}) > 2:  # of two nodes, both see the same link
        _compare(reports, lambda report: report.pair, pair, "bandwidth to its best partner", "GB/s", verdict)
    _look_at_floors(reports, thresholds, verdict)
    return _spare_the_majority(verdict, len({report.node for report in reports}))


def _compare_facts(reports: list[Report], verdict: Verdict) -> None:
    """Name the nodes that differ from most of the others; with no majority, those that differ from rank 0's node."""
    first = min(reports, key=lambda report: report.rank)
    for name in {name for report in reports for name in report.facts}:
        values = {(report.node, report.facts.get(name, "missing")) for report in reports}
        counted = Counter(value for _, value in values).most_common()
        usual = counted[0][0]
        if len(counted) > 1 and counted[0][1] == counted[1][1]:
            usual = first.facts.get(name, "missing")
        for node, value in sorted(values):
            if value != usual:
                verdict.blame(node, f"{name} is {value}, elsewhere {usual}")


def _compare_clocks(reports: list[Report], thresholds: Thresholds, verdict: Verdict) -> None:
    """Name the nodes whose clock is off the median of all nodes; of two nodes, off rank 0's."""
    clocks: dict[str, list[float]] = defaultdict(list)
    for report in sorted(reports, key=lambda report: report.rank):
        clocks[report.node].append(report.clock)
    medians = [median(each) for each in clocks.values()]  # rank 0's node comes first
    usual = median(medians) if len(medians) > 2 else medians[0]
    for node, each in clocks.items():
        ahead = median(each) - usual
        if abs(ahead) > thresholds.clock:
            how = "ahead" if ahead > 0 else "behind"
            verdict.blame(node, f"its clock is {abs(ahead):.1f} s {how}: look at its time service (chronyd, ntpd)")


def _compare(
    reports: list[Report],
    measured: Callable[[Report], float | None],
    least: float,
    what: str,
    unit: str,
    verdict: Verdict,
) -> None:
    """Name the ranks that reach less than `least` of the median of the ranks on other nodes."""
    for report in reports:
        rate = measured(report)
        others = [each for other in reports if other.node != report.node and (each := measured(other)) is not None]
        if rate is not None and others and rate < least * median(others):
            reason = f"rank {report.rank}: {what} {rate:.3g} {unit}, the others {median(others):.3g}"
            verdict.blame(report.node, reason)


def _look_at_floors(reports: list[Report], thresholds: Thresholds, verdict: Verdict) -> None:
    on_gpus = all(report.on_gpu for report in reports)
    floors = {
        "pair": (thresholds.pair_floor, "bandwidth between pairs of nodes"),
        "all_reduce": (thresholds.all_reduce_floor, "all-reduce over all ranks"),
        "all_to_all": (thresholds.all_to_all_floor, "all-to-all over all ranks"),
    }
    for name, (on_gpu, what) in floors.items():
        floor = on_gpu if on_gpus else thresholds.cpu_floor
        rates = [rate for report in reports if (rate := getattr(report, name)) is not None]
        if rates and median(rates) < floor:
            advice = "look for the network card in use (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, NCCL_IB_HCA)"
            verdict.warnings.append(
                f"the {what} is slow, {median(rates):.3g} GB/s, at least {floor:g} expected, and no single node is the"
                f" cause: {advice}"
            )


def _spare_the_majority(verdict: Verdict, nodes: int) -> Verdict:
    """Leave no node out where most of them deviate: it is not the nodes."""
    if len(verdict.unfit) * 2 > nodes:
        spared = [f"{node}: {'; '.join(reasons)}" for node, reasons in sorted(verdict.unfit.items())]
        verdict.problems.append("most nodes deviate, so no node is left out: " + " | ".join(spared))
        verdict.unfit = {}
    return verdict


@dataclass(frozen=True)
class Absent:
    """A rank that did not answer."""

    rank: int
    node: str
    why: str


def judge_silence(absent: list[Absent], ranks: int, nodes: int, head: str) -> Verdict:
    """Name the nodes of ranks that did not answer; where every other node is silent, suspect the head node."""
    verdict = Verdict()
    for each in absent:
        verdict.blame(each.node, f"rank {each.rank} {each.why}")
    if nodes > 2 and len(set(verdict.unfit) - {head}) == nodes - 1:
        why = f"no other node reached rank 0: {len(absent)} of {ranks} ranks did not answer"
        return Verdict(unfit={head: [why]})
    if not absent:
        verdict.problems.append("the check did not end in time, and every rank still answers. Check the network")
    return verdict
