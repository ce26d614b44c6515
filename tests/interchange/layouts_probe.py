"""Starts real ranks from an imported checkpoint under several layouts: what they answer, and what they save again.

`python -m tests.interchange.layouts_probe FOLDER`: FOLDER/ACTIVATION is a checkpoint written by the importer.
"""

import json
import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_blackmamba.checkpoint import CheckpointReader, SaveError, common, sharded
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.interchange import live
from megatron_blackmamba.model import LanguageModel, build
from megatron_blackmamba.runtime import world
from tests.runtime.ranks import fork_ranks, import_once

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

LAYOUTS = {
    "solo": {},
    "ep2": {"expert": 2},
    "tp2": {"tensor": 2, "expert_tensor": 2},
    "pp2": {"pipeline": 2},
}
TOKENS = [[5, 0, 17, 33, 9, 2, 8, 60, 41, 50, 7, 1], [11, 12, 13, 14, 3, 3, 3, 62, 40, 30, 20, 10]]


def run(folder: Path, activation: str, layout: str) -> bool:
    described = CheckpointReader(folder / activation).config
    config = RunConfig.model_validate(described.model_dump() | {"parallel": LAYOUTS[layout]})
    place = world.start(config.parallel)
    model = build(config, place).eval()
    state = dist_checkpointing.load(
        {"model": sharded.weights(model)}, str(folder / activation), strict=StrictHandling.RAISE_UNEXPECTED
    )
    model.load_state_dict(state["model"])
    if place.parallel.pipeline == 1:
        with torch.no_grad():
            logits_BSV = gather_from_tensor_model_parallel_region(model(torch.tensor(TOKENS)), group=place.groups.tp)
        if place.is_main:
            torch.save(logits_BSV, folder / f"{activation}_{layout}.pt")
    if activation == "silu":
        saved = folder / f"{layout}_saved"
        if place.is_main:
            saved.mkdir()
            common.write(saved, {})
        dist.barrier()
        weights, _ = save_preprocess({"model": sharded.weights(model)})
        write = sharded.begin_save(saved, place, weights)
        write.start()
        parts = [None] * place.size
        dist.all_gather_object(parts, write.wait())
        if place.is_main:
            write.write_table(parts)
        moves = []
        out = folder / f"{layout}_exported"
        live.export(model, place, out, lambda: moves.append(1), source="the model in training")
        assert len(moves) > 1
        if layout == "ep2":
            (folder / f"failures_{place.rank}.json").write_text(json.dumps(failing_exports(model, place, folder)))
    world.shutdown()
    return True


def failing_exports(model: LanguageModel, place: world.World, folder: Path) -> list:
    """Export again and again while one rank fails; return each error and what is on disk afterwards."""
    out, seen = folder / "live" / "step_1", []

    def export() -> None:
        problem = None
        try:
            live.export(model, place, out, source="the model in training")
        except SaveError as error:
            problem = str(error)
        dist.barrier()
        seen.append([problem, sorted(path.name for path in out.parent.iterdir())])
        dist.barrier()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    own = model.decoder.layers[1].mixer.experts.fc1.data
    export()
    (folder / "live" / f".step_{place.rank}.tmp").mkdir()  # as a killed job leaves it
    dist.barrier()
    if place.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    export()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = own.clone()
    if place.rank == 1:
        own[0, 0, 0, 0] = torch.nan
    export()
    own.copy_(kept)
    export()
    return seen


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    import_once()
    errors = {}
    for activation in ("silu", "gelu"):
        for layout, parallel in LAYOUTS.items():
            if activation == "gelu" and "pipeline" in parallel:
                continue
            ranks = 2 if parallel else 1
            answers = fork_ranks(ranks, lambda a=activation, n=layout: run(folder, a, n), alone=ranks == 1)
            problems = [answer.get("trace") or answer["error"] for answer in answers if "error" in answer]
            if problems:
                errors[f"{activation} {layout}"] = problems[0]
    print(json.dumps(errors))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
