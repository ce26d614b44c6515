"""Kill ranks, launchers, checkpoint writers and a node of one run under a real Slurm; compare its losses.

    python -m tests.slurm.storm --kills 20

It needs Slurm, root and a minute for two kills, so it is not part of `make test`. It exits with 1 unless the losses are
bit-equal to an undisturbed run, and at least three quarters of the kills were recovered inside the allocation.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from megatron_blackmamba.formats.run_folder import RunFolder
from tests.slurm.cluster import ENDED, Cluster, missing_programs
from tests.slurm.runs import kill, launchers, log_of, losses, newest, ranks, train_alone, tries, writers

CONFIG = ("parallel.expert=2", "training.tokens=1e9", "checkpoint.every=10")
OPTIONS = ("--nodes", "2", "--gpus-per-node", "0", "--cpus-per-process", "1", "--time", "120", "--json")
LIMIT_SECONDS = 600
"""A wait that takes longer has failed."""


class Storm:
    """One run and what happens to it."""

    def __init__(self, slurm: Cluster, folder: Path, seed: int) -> None:
        self.slurm, self.folder, self.dice = slurm, folder, random.Random(seed)
        command = [sys.executable, "-m", "megatron_blackmamba", "launch", "tiny", *CONFIG, *OPTIONS]
        answer = json.loads(slurm.run(*command, cwd=folder, timeout=LIMIT_SECONDS).stdout)
        self.run, self.job = RunFolder(Path(answer["run"])), answer["jobs"][0]
        self.survived: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def kills(self, count: int) -> None:
        kinds = ["launcher"] * (count // 5) + ["writer"] * (count // 5) + ["node"] * (count >= 10)
        kinds += ["rank"] * (count - len(kinds))
        self.dice.shuffle(kinds)
        for number, kind in enumerate(kinds, 1):
            self.until_trained(new_checkpoint=number % 3 != 0)
            restarts, before, saved = self.restarts(), tries(self.run, self.job), newest(self.run)
            self.strike(kind)
            # A run outlives its checkpoint writer: it saves again.
            went_on = lambda before=before, saved=saved, kind=kind: (
                tries(self.run, self.job) > before or (kind == "writer" and newest(self.run) > saved)
            )
            self.wait(went_on, f"no new try after the {kind}")
            here = self.restarts() == restarts
            (self.survived if here else self.left)[kind] += 1
            where = "in place" if here else "through the queue"
            print(
                f"{time.strftime('%T')} kill {number}: a {kind}, step {len(losses(self.run))}; resumed {where}",
                flush=True,
            )
        self.until_trained(new_checkpoint=True)
        self.slurm.run("scancel", self.job)
        self.slurm.wait(self.job, log_of(self.run, self.job))

    def until_trained(self, new_checkpoint: bool) -> None:
        """Wait until the run has taken new steps, and saved a new checkpoint if asked to."""
        saved, taken = newest(self.run), len(losses(self.run))
        self.wait(
            lambda: newest(self.run) > saved if new_checkpoint else len(losses(self.run)) > taken, "the run is stuck"
        )
        time.sleep(self.dice.random())

    def strike(self, kind: str) -> None:
        if kind == "node":
            nodes = self.slurm.run(
                "scontrol", "show", "hostnames", self.slurm.show(self.job)["NodeList"]
            ).stdout.split()
            self.slurm.kill_node(nodes[-1])
            return
        find = {
            "rank": lambda: ranks(self.slurm, self.job, self.dice.randrange(2)),
            "launcher": lambda: launchers(self.slurm, self.job),
            "writer": lambda: writers(self.slurm, self.job)[:1],
        }[kind]
        self.wait(lambda: kill(find()), f"no {kind} to kill")

    def restarts(self) -> int:
        return int(self.slurm.show(self.job)["Restarts"])

    def wait(self, until, otherwise: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        polls = 0
        while not until():
            polls += 1
            ended = polls % 100 == 0 and self.slurm.show(self.job)["JobState"] in ENDED
            if ended or time.monotonic() > deadline:
                raise SystemExit(f"{otherwise}\n{log_of(self.run, self.job).read_text()}")
            time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="Number of kills (default 20).")
    parser.add_argument("--seed", type=int, default=0, help="Order and moments of the kills (default 0).")
    options = parser.parse_args()
    if missing := missing_programs():
        raise SystemExit(f"{', '.join(missing)} not found. apt-get install --no-install-recommends slurm-wlm munge")
    begun = time.monotonic()
    with Cluster() as slurm, tempfile.TemporaryDirectory() as folder:
        storm = Storm(slurm, Path(folder), options.seed)
        storm.kills(options.kills)
        stormy = losses(storm.run)
        alone = train_alone(slurm, Path(folder), *CONFIG, f"training.stop_after_steps={len(stormy)}")
    equal, here = stormy == alone, storm.survived.total()
    print(
        f"{options.kills} kills in {time.monotonic() - begun:.0f} s: {here} survived in place {dict(storm.survived)},"
    )
    print(f"the others through the queue {dict(storm.left)}. {len(stormy)} losses bit-equal to the run alone: {equal}")
    return int(not equal or 4 * here < 3 * options.kills)


if __name__ == "__main__":
    sys.exit(main())
