"""Run `doctor --all-ranks` on three forked ranks, each a node of its own, and let something happen to one of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from megatron_blackmamba.launch import all_ranks, measures
from megatron_blackmamba.launch.thresholds import parse
from tests.runtime.ranks import fork_ranks

LENIENT = ["cpu_product=0.01", "cpu_pair=0.001"]  # on a busy machine, ranks differ for no reason
BRAKE = """
import os, select, signal, sys, time
print(flush=True)
for _ in range(15):
    os.kill(int(sys.argv[1]), signal.SIGSTOP); time.sleep(2)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    if select.select([sys.stdin], [], [], 0.005)[0]:
        break
"""


def different(verdict: Path) -> None:
    os.environ["NCCL_IB_TIMEOUT"] = "7"


def slow(verdict: Path) -> None:
    """Have this process stopped most of the time, as a throttled processor would."""
    measured = measures.matrix_products

    def slowly(device):
        command = [sys.executable, "-S", "-c", BRAKE, str(os.getpid())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as brake:
            assert brake.stdin and brake.stdout
            brake.stdout.readline()  # it runs
            try:
                return measured(device)
            finally:
                brake.stdin.close()  # it ends, and not while this process is stopped

    measures.matrix_products = slowly


def stopped(verdict: Path) -> None:
    """Stop this process in its first measurement, and have it killed once there is a verdict."""
    wait = f'for _ in $(seq 900); do [ -e "{verdict}" ] && break; sleep 0.1; done'
    subprocess.Popen(["bash", "-c", f"{wait}; kill -KILL {os.getpid()}"])
    measures.matrix_products = lambda device: os.kill(os.getpid(), signal.SIGSTOP)


def killed(verdict: Path) -> None:
    measures.matrix_products = lambda device: os._exit(9)


def absent(verdict: Path) -> None:
    os._exit(0)


CASES = {
    "different": (different, 60, [*LENIENT, "cpu_floor=1000000"]),
    "slow": (slow, 60, ["cpu_product=0.05", "cpu_pair=0.001"]),  # it runs 5 ms of every 2 s
    "stopped": (stopped, 8, LENIENT),
    "killed": (killed, 60, LENIENT),
    "absent": (absent, 20, LENIENT),
}


def run(folder: Path, name: str) -> dict:
    happens, limit, thresholds = CASES[name]
    unfit = folder / f"{name}.unfit"

    def rank() -> int:
        number = int(os.environ["RANK"])
        torch.set_num_threads(1)  # three ranks with several threads each would slow one another by chance
        os.environ["SLURMD_NODENAME"] = f"node{number}"
        if number == 2:
            happens(unfit)
        with open(folder / f"{name}.{number}", "w", buffering=1) as out, contextlib.redirect_stdout(out):
            return all_ranks.examine_all(parse(thresholds), limit, [], unfit)

    answers = fork_ranks(3, rank)
    said = (folder / f"{name}.0").read_text()
    return {"unfit": unfit.read_text().splitlines() if unfit.exists() else None, "said": said, "answers": answers}


def main(folder: Path) -> None:
    """Run the cases one after another, but for `absent`, which does nothing but wait: the others run meanwhile."""
    waiting = os.fork()
    if waiting == 0:
        (folder / "absent.json").write_text(json.dumps(run(folder, "absent")))
        os._exit(0)
    found = {name: run(folder, name) for name in CASES if name != "absent"}
    os.waitpid(waiting, 0)
    print(json.dumps(found | {"absent": json.loads((folder / "absent.json").read_text())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
