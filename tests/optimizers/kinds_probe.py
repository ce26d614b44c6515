"""Runs under optimizer kinds: trained, stopped, resumed on the same and on another layout, and planned.

`python -m tests.optimizers.kinds_probe FOLDER`: imports once, forks the ranks, and prints what they found as JSON.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import load
from megatron_blackmamba.plan import memory
from tests.optimizers.lion import Lion
from tests.plan.memory_probe import measure
from tests.runtime.ranks import fork_ranks, import_once

STEPS = 6
RUN = ["model.pattern=ME", "data.sequence_length=32", "training.global_batch=8", "training.micro_batch=4"]
RUN += [f"training.tokens={STEPS * 8 * 32}", "checkpoint.every=3", "training.precision=fp64"]
RUN += ["optimizer.min_learning_rate=0", "logging.tensorboard=false"]
HALF = "training.stop_after_steps=3"
OTHER = "parallel.tensor=2"
LONG = 20
HALFWAY = "training.stop_after_steps=10"
MUON = ["optimizer.kind=muon", "optimizer.learning_rate=0.01", "training.bucket_size=4000"]
MUON += [f"training.tokens={LONG * 8 * 32}", "checkpoint.every=5", "optimizer.qk_clip=0.05", "training.router_every=1"]
EVERY_LAYER = ['model.pattern="MES*-E"', "model.mlp_hidden_size=96", "model.attention.heads=4"]
EVERY_LAYER += ["model.attention.kv_heads=2", "model.mamba2.head_dim=16", "model.mamba2.groups=2"]
EVERY_LAYER += ["model.shared_expert_hidden_size=64", "optimizer.weight_decay=0.1"]
KINDS = {
    "sgd": ["optimizer.kind=sgd", "optimizer.learning_rate=0.3", "optimizer.distributed=false"],
    "lion": ["optimizer.kind=lion", "optimizer.learning_rate=1e-3", "optimizer.distributed=false"],
    "muon": [*MUON, *EVERY_LAYER],
}
LAYOUTS = {
    "dp2": (2, []),
    "ep2": (2, ["parallel.expert=2"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "tp2": (2, ["parallel.tensor=2"]),
    "etp2": (2, ["parallel.tensor=2", "parallel.expert_tensor=2"]),
    "tp2_ep2": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "tp2_dp2": (4, ["parallel.tensor=2", "parallel.expert_tensor=2"]),
}
CHANGED = [("tp2", 5), ("ep2", 10), ("dp2", 15), ("pp2", LONG)]
"""Layouts of one run, each with the step at which it stops."""
CUT = ['model.pattern="ME*S"', "model.eod_reset=397"]  # a letter that ends documents, some where sequences are cut
KILLED = ["checkpoint.asynchronous=false"]  # so that step 10 is on disk when the process dies
WIDER = ["training.bucket_size=1000000"]  # ranks own other ranges of the weights


def trained(folder: Path, name: str, *overrides: str, killed_at: int | None = None) -> None:
    from megatron_blackmamba.training.loop import Trainer, train

    class Mortal(Trainer):
        def take_step(self):
            if self.progress.step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().take_step()

    train(load("tiny", [*RUN, f"folder={folder}", f"name={name}", *overrides]), Mortal)


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def logits(folder: Path, name: str) -> list[float]:
    """Return the largest logit of the only attention layer, by step."""
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["attention/3/largest_logit"] for line in lines]


def resumed_at(folder: Path, name: str) -> list[int]:
    """Return the steps from which a run went on."""
    lines = (folder / name / "events.jsonl").read_text().splitlines()
    return [event["step"] for event in map(json.loads, lines) if event["kind"] == "resumed"]


def held(kind: str) -> dict[str, list[int]]:
    """Bytes of the optimizer's state as measured and as planned."""
    overrides = [*RUN, "training.precision=fp32", *KINDS[kind]]
    measured = fork_ranks(1, partial(measure, overrides))[0]
    assert "error" not in measured, measured
    return {"bytes": [measured["answer"]["optimizer"], memory.state_of(load("tiny", overrides), 1, 0).optimizer]}


def main(folder: Path) -> dict:
    import_once()
    optimizers.register(Lion)
    found = {}
    for kind, how in KINDS.items():
        jobs = [(1, "whole", []), (1, "again", [HALF]), (1, "again", [])]
        if kind == "sgd":
            jobs += [(2, "resharded", [OTHER, HALF]), (1, "resharded", [])]
        if kind == "muon":
            jobs[1] = (1, "again", [HALFWAY])
            jobs += [(ranks, layout, overrides) for layout, (ranks, overrides) in LAYOUTS.items()]
            for layout, stop in CHANGED:
                ranks, overrides = LAYOUTS[layout]
                jobs += [(ranks, "changed", [*overrides, f"training.stop_after_steps={stop}"])]
            jobs += [(1, "uncut", CUT), (2, "cp2", [*CUT, "parallel.context=2"])]
            jobs += [(2, "cut", [*CUT, "parallel.context=2", HALFWAY]), (1, "cut", CUT)]
            jobs += [(2, "killed", [*KILLED, *WIDER])]
            doomed = partial(trained, folder, "muon_killed", *how, *KILLED, OTHER, killed_at=13)
            dead = fork_ranks(2, doomed)
            assert any("died with status 9" in rank.get("error", "") for rank in dead), dead
        for ranks, name, overrides in jobs:
            answers = fork_ranks(ranks, partial(trained, folder, f"{kind}_{name}", *how, *overrides))
            assert not any("error" in answer for answer in answers), answers
        found[kind] = {name: losses(folder, f"{kind}_{name}") for _, name, _ in jobs} | held(kind)
    found["muon"]["logits"] = [logits(folder, f"muon_{name}") for name in ("whole", "tp2", "dp2", "pp2")]
    found["muon"]["resumed at"] = resumed_at(folder, "muon_killed")
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
