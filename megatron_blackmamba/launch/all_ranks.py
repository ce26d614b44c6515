"""`blackmamba doctor --all-ranks`: the preflight of a whole job, run by every rank as training will be.

Ranks talk through a key-value store on rank 0 and measure over the backend of training. Rank 0 reaches the verdict. A
thread of rank 0 does it without the others' help if a rank fails or does not answer, so the check always ends.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_blackmamba.launch import measures
from megatron_blackmamba.launch.thresholds import Thresholds
from megatron_blackmamba.launch.verdict import Absent, Report, Verdict, judge, judge_silence
from megatron_blackmamba.runtime import device, failure, world
from megatron_blackmamba.runtime.facts import facts
from megatron_blackmamba.runtime.ports import free_port
from megatron_blackmamba.runtime.world import Place

JOIN_PART = 0.4
"""Part of the time limit within which every rank must have reached rank 0."""
CONSEQUENCES_S = 3.0
"""Time that rank 0 waits for further failures after the first one."""
BEAT_S = 0.5
LEAVE_S = 10.0


class Meeting:
    """The store through which the ranks talk. Each thread opens its own: a waiting call blocks the others."""

    def __init__(self, place: Place, seconds: float) -> None:
        self.address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        self.place = place
        hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._server = self._connect(seconds, hosts)
        self.store = dist.PrefixStore("doctor", self._server)

    def _connect(self, seconds: float, hosts: bool = False) -> Any:
        patience = timedelta(seconds=seconds)
        return dist.TCPStore(*self.address, is_master=hosts, timeout=patience, wait_for_workers=False)

    def another(self, seconds: float) -> Any:
        return dist.PrefixStore("doctor", self._connect(seconds))


def examine_all(thresholds: Thresholds, limit: float, problems: list[str], unfit_file: Path | None) -> int:
    """Take part in the check of all ranks and return the exit code; rank 0 prints the verdict.

    Args:
        problems: Known problems of the whole job.
        unfit_file: File for the names of unfit nodes, one per line; written with the verdict.
    """
    place, deadline = world.find_place(), time.monotonic() + limit
    if place.launcher == "alone":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world.set_address(place)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    _end_after(limit + 10, f"rank {place.rank} on {node}: no verdict within {limit:.0f} s")
    try:
        meeting = Meeting(place, limit * JOIN_PART)
    except RuntimeError as error:
        address = "{}:{}".format(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        print(
            f"rank {place.rank} on {node} cannot reach rank 0 at {address}: {failure.first_line(error)}",
            file=sys.stderr,
        )
        return 1
    chair = Chair(meeting, place, deadline, thresholds, problems, unfit_file) if place.rank == 0 else None
    store = meeting.store
    _keep_saying_alive(meeting, place.rank, limit)
    try:
        return _take_part(place, node, meeting, chair, limit)
    except Exception as error:
        kind = "lost another rank" if failure._is_consequence(error) else "failed"
        store.set(f"error/{place.rank}", f"{kind}: {failure.first_line(error)}")
        if chair:
            chair.concluded.wait(limit)  # its thread names who failed
        print(f"rank {place.rank} on {node} {kind}: {failure.first_line(error)}", file=sys.stderr, flush=True)
        time.sleep(BEAT_S)
        os._exit(1)


def _take_part(place: Place, node: str, meeting: Meeting, chair: "Chair | None", limit: float) -> int:
    store, gpu = meeting.store, device.claim(place.local_rank, place.launcher).index
    report = Report(place.rank, node, gpu is not None, facts(gpu))
    store.set(f"here/{place.rank}", json.dumps({"node": node}))
    if chair:
        chair.gather("here", limit * JOIN_PART)
        store.set("clock", str(time.time()))
    store.wait(["clock"], timedelta(seconds=limit))
    report.clock = time.time() - float(store.get("clock"))

    backend = "nccl" if gpu is not None else "gloo"
    patience = timedelta(seconds=limit)
    store.set(f"at/{place.rank}", "joining the process group")
    groups = dist.PrefixStore("groups", meeting.another(limit))
    dist.init_process_group(backend, store=groups, rank=place.rank, world_size=place.size, timeout=patience)
    names = [json.loads(store.get(f"here/{rank}"))["node"] for rank in range(place.size)]
    ranks_of = {name: [rank for rank in range(place.size) if names[rank] == name] for name in dict.fromkeys(names)}
    at = lambda what: store.set(f"at/{place.rank}", what)  # noqa: E731
    again, attempt = True, 0
    while again:  # whom one measurement blames is measured a second time, and its better result counts
        measures.measure(report, list(ranks_of), ranks_of, device.device(), at)
        store.set(f"report/{attempt}/{place.rank}", json.dumps(asdict(report)))
        if chair:
            chair.decide(attempt)
        store.wait([f"again/{attempt}"], timedelta(seconds=limit))
        again, attempt = store.get(f"again/{attempt}") == b"yes", attempt + 1
    at("the end")
    store.set(f"end/{place.rank}", "")
    dist.destroy_process_group()
    return chair.conclude(chair.verdict) if chair else 0


class Chair:
    """Rank 0's part: it gathers, decides and reports; its thread ends a check that a rank holds up."""

    def __init__(
        self,
        meeting: Meeting,
        place: Place,
        deadline: float,
        thresholds: Thresholds,
        problems: list[str],
        unfit_file: Path | None,
    ) -> None:
        self.store, self.size, self.deadline = meeting.store, place.size, deadline
        self.thresholds, self.problems, self.unfit_file = thresholds, problems, unfit_file
        self.verdict, self.reports = Verdict(), list[Report]()
        self.concluded = threading.Event()
        self._one_at_a_time = threading.Lock()
        own = meeting.another(max(1.0, deadline - time.monotonic()))
        threading.Thread(target=self._oversee, args=(own,), daemon=True).start()

    def gather(self, key: str, seconds: float) -> list[Any]:
        """Return what every rank has set; if some have not within `seconds`, reach the verdict without them."""
        end = min(self.deadline, time.monotonic() + seconds)
        names = [f"{key}/{rank}" for rank in range(self.size)]
        while not self.store.check(names):
            if time.monotonic() > end:
                self._conclude_without_them(self.store, names)
            time.sleep(0.05)
        return [json.loads(self.store.get(name)) for name in names]

    def decide(self, attempt: int) -> None:
        """Judge the reports, and have all measure a second time before a node is left out."""
        left = self.deadline - time.monotonic()
        self.reports = [Report(**each) for each in self.gather(f"report/{attempt}", left)]
        self.verdict = judge(self.reports, self.thresholds)
        self.verdict.problems += self.problems
        measured = any("rank" in reason for reasons in self.verdict.unfit.values() for reason in reasons)
        self.store.set(f"again/{attempt}", "yes" if attempt == 0 and (measured or self.verdict.warnings) else "no")

    def conclude(self, verdict: Verdict) -> int:
        """Print the verdict and write the names of unfit nodes; returns the exit code."""
        with self._one_at_a_time:
            if self.concluded.is_set():
                return 1
            self.concluded.set()
            alone = ["one rank alone: start it with srun to compare nodes and measure links"] if self.size == 1 else []
            print("\n".join([*summary(self.reports), *verdict.lines(), *alone]), flush=True)
            if self.unfit_file:
                temporary = self.unfit_file.with_name(f".{self.unfit_file.name}.tmp")
                temporary.write_text("".join(f"{node}\n" for node in sorted(verdict.unfit)), encoding="utf-8")
                os.replace(temporary, self.unfit_file)
            self._let_them_leave()
            return 0 if verdict.healthy else 1

    def _let_them_leave(self) -> None:
        """Keep the store until the other ranks have read the decision; those that hang may miss it."""
        end = time.monotonic() + LEAVE_S
        names = [f"end/{rank}" for rank in range(self.size)]
        while time.monotonic() < end and self.reports and not self.store.check(names):
            time.sleep(0.05)

    def _oversee(self, store: Any) -> None:
        """Stop the check when the time is up, or soon after a rank has failed."""
        errors = [f"error/{rank}" for rank in range(self.size)]
        while not self.concluded.is_set():
            failed = any(store.check([name]) for name in errors)
            if failed or time.monotonic() > self.deadline:
                time.sleep(CONSEQUENCES_S if failed else 0.0)
                self._conclude_without_them(store, [])
            time.sleep(BEAT_S)

    def _conclude_without_them(self, store: Any, wanted: list[str]) -> None:
        code = self.conclude(_who_did_not_answer(store, self.size, wanted))
        os._exit(code or 1)


def _who_did_not_answer(store: Any, size: int, wanted: list[str]) -> Verdict:
    """Name ranks that never came, failed, no longer say that they are alive, or are behind the others."""

    def get(name: str, otherwise: str = "") -> str:
        return store.get(name).decode() if store.check([name]) else otherwise

    alive = [get(f"alive/{rank}") for rank in range(size)]
    time.sleep(6 * BEAT_S)
    expected = _slurm_nodes(size)
    here = [json.loads(get(f"here/{rank}", "{}")).get("node") for rank in range(size)]
    nodes = [name or expected[rank] for rank, name in enumerate(here)]
    at = [get(f"at/{rank}", "starting") for rank in range(size)]
    absent = []
    for rank in range(size):
        error = get(f"error/{rank}")
        if here[rank] is None:
            absent.append(Absent(rank, nodes[rank], "never reached rank 0: it did not start, or the network is broken"))
        elif error.startswith("failed"):
            absent.append(Absent(rank, nodes[rank], f"{error} (in {at[rank]})"))
        elif get(f"alive/{rank}") == alive[rank] and not error:
            absent.append(
                Absent(rank, nodes[rank], f"stopped answering in {at[rank]}: it is stopped, dead, or cut off")
            )
    if not absent and any(here):
        order = [*STAGES, "the end"]
        stages = [order.index(each) if each in order else -1 for each in at]
        absent = [
            Absent(rank, nodes[rank], f"did not get past {at[rank]}; others are in {order[max(stages)]}")
            for rank in range(size)
            if stages[rank] < max(stages)
        ]
    return judge_silence(absent, size, len(set(nodes)), nodes[0])


STAGES = ["joining the process group", "matrix products", "pairs of nodes", "all-reduce", "all-to-all", "the verdict"]


def summary(reports: list[Report]) -> list[str]:
    """Return a line a node: what its ranks measured at worst."""
    lines = []
    for node in dict.fromkeys(report.node for report in reports):
        ranks = [report for report in reports if report.node == node]

        def least(name: str, ranks: list[Report] = ranks) -> str:
            rates = [rate for report in ranks if (rate := getattr(report, name)) is not None]
            return f"{min(rates):.3g}" if rates else "-"

        products = f"products {least('product')} GFLOP/s"
        network = f"pairs {least('pair')}, all-reduce {least('all_reduce')}, all-to-all {least('all_to_all')} GB/s"
        counted = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
        lines.append(f"{node}: {counted}, {products}, {network}")
    return lines


def _keep_saying_alive(meeting: Meeting, rank: int, limit: float) -> None:
    store = meeting.another(limit)

    def say() -> None:
        try:
            for number in range(10**9):
                store.set(f"alive/{rank}", str(number))
                time.sleep(BEAT_S)
        except RuntimeError:
            pass  # rank 0 is gone, and with it the store

    threading.Thread(target=say, daemon=True).start()


def _end_after(seconds: float, message: str, end: Callable[[int], object] = os._exit) -> None:
    """Kill this process if it still runs after the time limit, whatever it waits for."""

    def wait() -> None:
        time.sleep(seconds)
        print(message, file=sys.stderr, flush=True)
        end(1)

    threading.Thread(target=wait, daemon=True).start()


def _slurm_nodes(size: int) -> list[str]:
    """Guess the node of every rank from Slurm's list: they are filled one after the other."""
    import subprocess

    listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=10)
        names = done.stdout.split() if listed else []
    except (OSError, subprocess.SubprocessError):
        names = []
    return [names[rank * len(names) // size] if names else f"the node of rank {rank}" for rank in range(size)]
