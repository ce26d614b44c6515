"""Hybrids whose sequences are cut, with every other kind of parallelism, beside one process in float64.

    python -m tests.distributed.layout_grid [--steps 20] [--sample]

Losses, gradient norms and all gradients of every step must agree within 1e-10, where documents are masked and where
attention crosses them. It prints a table; the last line is the same as JSON. `--sample` takes a few layouts, as the
tests do.
"""

import argparse
import json
import os
import tempfile
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megatron_blackmamba import data, model
from megatron_blackmamba.config import load
from megatron_blackmamba.model.initialise import shards
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.step.feed import micro_batches
from megatron_blackmamba.training.step.learning_rates import Schedule
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.step import Step
from tests.distributed.layouts_probe import DECAY, MAMBA2, SMALL
from tests.runtime.ranks import fork_ranks, import_once

PATTERNS = ("M*ME", "*E", "S*SE")
CONTEXTS = (2, 4)
BESIDE = {"": [], "tensor=2": ["parallel.tensor=2"], "expert=2": ["parallel.expert=2"]}
BESIDE["pipeline=2"] = ["parallel.pipeline=2"]
DOCUMENTS = {"masked": "false", "crossed": "true"}
"""model.attention.across_documents."""
EOD = 397
"""A letter that ends documents, so that some end where sequences are cut."""
COMMON = [*SMALL, *DECAY, "training.precision=fp64", "data.workers=0", "optimizer.distributed=false"]
COMMON += [
    f"model.eod_reset={EOD}",
    "model.hidden_size=32",
    "model.expert_hidden_size=48",
    "model.attention.heads=4",
    "model.attention.kv_heads=2",
]
CLOSENESS = 1e-10
Case = tuple[str, str, int, str]
"""Pattern, documents, context, and what is beside it."""
CASES: list[Case] = list(product(PATTERNS, DOCUMENTS, CONTEXTS, BESIDE))
SAMPLE = {("M*ME", "crossed", 4, ""), ("M*ME", "masked", 2, "pipeline=2")}
SAMPLE |= {("S*SE", "masked", 2, "expert=2"), ("*E", "masked", 2, "tensor=2")}


def overrides(pattern: str, documents: str) -> list[str]:
    of_mamba2 = [key for key in MAMBA2 if key.startswith("model.mamba2.")] if "S" in pattern else []
    across = f"model.attention.across_documents={DOCUMENTS[documents]}"
    return [*COMMON, *of_mamba2, f"model.pattern={pattern}", across]


def train(folder: Path, name: str, words: list[str], steps: int) -> bool:
    """Take steps, and leave this rank's losses, norms and gradients in the folder."""
    run = load("tiny", words)
    place = world.start(run.parallel)
    language_model = model.build(run, place)
    trainable = make_trainable(run, language_model, place)
    plan = data.build(run.data, vocab_size=run.model.vocab_size, total_samples=run.steps * run.training.global_batch)
    step, schedule = Step(run, place, trainable, len(plan.source_names)), Schedule(run, trainable.optimizer)
    batches = micro_batches(run, place, plan.train)
    seen: dict[str, list] = {"losses": [], "norms": [], "gradients": []}
    for number in range(steps):
        schedule.set(number * run.training.global_batch)
        seen["losses"].append(step.gradients(batches).loss)
        seen["gradients"].append(_gradients(language_model))
        seen["norms"].append(step.update().grad_norm)
    torch.save(seen, folder / f"{name}_{os.environ.get('RANK', 0)}.pt")
    world.shutdown()
    return True


def _gradients(language_model: model.LanguageModel) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Return the name, the place in the whole, the whole shape and the gradient of each shard."""
    parameters = [parameter for parameter in language_model.parameters() if hasattr(parameter, "main_grad")]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    found = [
        (shard.key, tuple(shard.global_offset), tuple(shard.global_shape), shard.data.detach().clone())
        for shard in shards(language_model.sharded_state_dict())
        if shard.data.is_floating_point()
    ]
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return found


def differences(alone: dict, ranks: list[dict]) -> dict[str, float]:
    """Return the largest difference of losses, of norms, and of gradients, relative to a gradient's largest number."""
    worst = {
        name: max(abs(a - b) for a, b in zip(alone[name], ranks[0][name], strict=True)) for name in ("losses", "norms")
    }
    gradients = 0.0
    for step, shards_alone in enumerate(alone["gradients"]):
        whole: dict[str, Tensor] = {}
        for key, offset, shape, value in shards_alone:
            whole.setdefault(key, value.new_zeros(shape))[_place(offset, shape, value)] = value
        for rank in ranks:
            for key, offset, shape, value in rank["gradients"][step]:
                expected = whole[key][_place(offset, shape, value)].reshape(value.shape)
                scale = whole[key].abs().max().clamp_min(1e-6)
                gradients = max(gradients, float((value - expected).abs().max() / scale))
    return worst | {"gradients": gradients}


def _place(offset: tuple[int, ...], shape: tuple[int, ...], value: Tensor) -> tuple:
    """Return where a shard is; axes that only the whole has, as the number of an expert, come first."""
    sizes = [1] * (len(shape) - value.dim()) + list(value.shape)
    return tuple(slice(first, first + size) for first, size in zip(offset, sizes, strict=True))


def measure(folder: Path, cases: list[Case], steps: int) -> list[dict]:
    """Train each layout and return how far it is from one process, which trains each model once."""
    alone: dict[tuple[str, str], dict] = {}
    rows = []
    for pattern, documents, context, beside in cases:
        words = overrides(pattern, documents)
        if (pattern, documents) not in alone:
            _raise(fork_ranks(1, partial(train, folder, "alone", words, steps), alone=True))
            alone[pattern, documents] = torch.load(folder / "alone_0.pt")
        count = context * (2 if beside.startswith(("tensor", "pipeline")) else 1)
        layout = [*words, *BESIDE[beside], f"parallel.context={context}"]
        _raise(fork_ranks(count, partial(train, folder, "cut", layout, steps)))
        ranks = [torch.load(folder / f"cut_{rank}.pt") for rank in range(count)]
        row = {"pattern": pattern, "documents": documents, "context": context, "beside": beside or "nothing"}
        rows.append({**row, "ranks": count, **differences(alone[pattern, documents], ranks)})
        shown = (f"{value:.1e}" if isinstance(value, float) else f"{value}" for value in rows[-1].values())
        print("  ".join(f"{text:<10}" for text in shown), flush=True)
    return rows


def _raise(answers: list[dict]) -> None:
    for answer in answers:
        if "error" in answer:
            raise SystemExit(answer.get("trace") or answer["error"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sample", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch renames its collectives
    import_once()
    columns = ("pattern", "documents", "context", "beside", "ranks", "losses", "norms", "gradients")
    print("  ".join(f"{column:<10}" for column in columns), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), [case for case in CASES if not options.sample or case in SAMPLE], options.steps)
    furthest = max(max(row["losses"], row["norms"], row["gradients"]) for row in rows)
    print(f"{len(rows)} layouts, {options.steps} steps: the largest difference is {furthest:.1e}")
    print(json.dumps(rows))
    if not furthest < CLOSENESS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
