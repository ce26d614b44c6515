"""A rank that trains one layout after another, as files ask it to, in process groups of its own for each."""

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from megatron_blackmamba import data, model
from megatron_blackmamba.config import load
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.model.initialise import shards
from megatron_blackmamba.runtime import world
from megatron_blackmamba.runtime.watchdog import Watchdog
from megatron_blackmamba.training.step.feed import micro_batches
from megatron_blackmamba.training.step.learning_rates import Schedule
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.step import Step
from megatron_blackmamba.training.watch.ranks import Ranks
from megatron_blackmamba.training.watch.replicas import Replicas
from tests.gpu import nccl_faults
from tests.gpu.nccl_cases import FAMILIES

POLL_SECONDS = 0.01
LEAST_STEPS = 2
"""Steps after the first, in which nothing overlaps yet, that a layout takes even where it is slow."""


def serve(folder: Path, rank: int) -> None:
    """Answer the requests in the folder, until a file `end` is there or a request fails."""
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    number = 0
    (folder / f"ready-{rank}").touch()
    while True:
        request = folder / f"request-{number}.json"
        while not request.exists():
            if (folder / "end").exists():
                return
            time.sleep(POLL_SECONDS)
        words = json.loads(request.read_text())
        if rank < words["ranks"]:
            answer = _answer(folder, rank, words)
            atomic.write_text(folder / f"answer-{number}-{rank}.json", json.dumps(answer))
            if "error" in answer:  # its process groups are in an unknown state
                sys.exit(1)
        number += 1


def _answer(folder: Path, rank: int, words: dict[str, Any]) -> dict[str, Any]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": words["ranks"], "LOCAL_WORLD_SIZE": words["ranks"]}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(words["port"]))
    try:
        logs = folder / f"logs-{words['port']}"
        with Watchdog(words["hang_seconds"], rank, words["ranks"], logs) as watchdog:
            return {"variants": _train_all(words, watchdog)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000], "trace": traceback.format_exc()[-3000:]}


def _train_all(words: dict[str, Any], watchdog: Watchdog) -> list[dict[str, Any]]:
    began = time.monotonic()
    watchdog.alive("joining the others")
    watchdog.begin()
    settings = [*FAMILIES[words["family"]], *words["overrides"]]
    place = world.start(load("tiny", settings).parallel, world.PATIENCE)
    joined = time.monotonic() - began
    found = []
    for variant in words["variants"]:
        with nccl_faults.planted(words["fault"], place.rank):
            found.append(_train(place, settings, variant, words, watchdog) | {"joined": joined})
        gc.collect()
    watchdog.alive("leaving")
    world.shutdown()
    return found


def _train(
    place: world.World, settings: list[str], variant: dict[str, Any], words: dict[str, Any], watchdog: Watchdog
) -> dict[str, Any]:
    """Train, and return what this rank saw of it."""
    run = load("tiny", [*settings, *variant["overrides"]])
    watchdog.alive(f"building a model in {run.training.precision}")
    began = time.monotonic()
    language_model = model.build(run, place)
    if variant["nudged"]:
        nudge(language_model)
    trainable = make_trainable(run, language_model, place)
    plan = data.build(run.data, vocab_size=run.model.vocab_size, total_samples=run.steps * run.training.global_batch)
    step, schedule = Step(run, place, trainable, len(plan.source_names)), Schedule(run, trainable.optimizer)
    batches = micro_batches(run, place, plan.train)
    replicas = Replicas(place, language_model, Ranks.of_run())
    seen: dict[str, Any] = {"losses": [], "norms": [], "routed": [], "seconds": []}
    for number in range(words["steps"]):
        watchdog.alive(f"step {number + 1} in {run.training.precision}")
        began_step = time.monotonic()
        schedule.set(number * run.training.global_batch)
        found = step.gradients(batches)
        seen["losses"].append(found.loss)
        seen["routed"].append(found.expert_tokens)
        seen["norms"].append(step.update().grad_norm)
        seen["seconds"].append(time.monotonic() - began_step)
        if number >= LEAST_STEPS and place.any_rank(sum(seen["seconds"][1:]) > words["seconds"]):
            break
    watchdog.alive("comparing replicas")
    trainable.settle()
    held = Counter(piece for pieces in world.gathered(_pieces(language_model)) for piece in pieces)
    seen["differing"] = replicas.differing() if place.size > 1 else None
    seen["replicated"] = sum(count > 1 for count in held.values())
    seen["took"] = time.monotonic() - began
    return seen


def _pieces(language_model: model.LanguageModel) -> list[str]:
    return [f"{s.key} {tuple(s.global_offset)}" for s in shards(language_model.sharded_state_dict())]


def nudge(language_model: model.LanguageModel) -> None:
    """Round the output of every layer otherwise: each number moves to a neighbour, or stays, at random."""
    for number, block in enumerate(language_model.decoder.layers.children()):
        random = torch.Generator().manual_seed(number)

        def moved(block: Any, inputs: Any, output: Any, random: torch.Generator = random) -> Any:
            residual, branch = output
            unit = torch.finfo(branch.dtype).eps / 2
            signs = torch.randint(-1, 2, branch.shape, generator=random).to(branch.device)
            return residual, (branch.double() * (1 + unit * signs)).to(branch.dtype)

        block.register_forward_hook(moved)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Path(sys.argv[1]), int(sys.argv[2]))
