"""Best learning rate by width, with width transfer (model.mup) and without, on text of this machine.

    python -m benchmarks.width_transfer FOLDER [a.b=c ...] [--widths 32 64 128] [--seeds 1 2 3] [--steps 100]
        [--rates 0.004 0.008 ...]

Every width, learning rate and seed is one short run of `MEME`, whose learning rate rises over 10 steps and falls to 0.
FOLDER gets the corpus and `runs.jsonl`, a line for each run; the same command goes on with the runs that are missing.
The tables have the mean loss over the last 10 steps, on text that the run has not seen before, as mean over the seeds.
They also name the best learning rate of each width: the lowest point of a parabola through the three best means, in
log2 of the rate.

One process on CPUs, in fp32. Runs of the second width and those above transfer from the first.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import _common
from benchmarks._trainer import a_run

RATES = tuple(0.001 * 2**k for k in range(2, 7))
VOCABULARY, MEGABYTES, LENGTH, BATCH, LAST = 512, 4, 128, 8, 10
FIXED = (f"model.vocab_size={VOCABULARY}", "model.pattern=MEME", "model.experts=4", "training.precision=fp32")
FIXED += (f"data.sequence_length={LENGTH}", f"training.global_batch={BATCH}", f"training.micro_batch={BATCH}")
FIXED += ("optimizer.decay=linear", "optimizer.min_learning_rate=0", "data.kind=mixture", "data.workers=0")
Key = tuple[bool, int, float, int]
"""With transfer or without, width, learning rate and seed of a run."""


def main() -> None:
    parser = _common.arguments(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("set", nargs="*", help="keys of the config")
    parser.add_argument("--widths", type=int, nargs="+", default=(32, 64, 128))
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mixture = _corpus(options.folder)
    record = options.folder / "runs.jsonl"
    losses = dict(_read(record))
    for key in _keys(options):
        if key[:2] == (False, options.widths[0]):
            losses[key] = losses[(True, *key[1:])]  # the base model is the same
        if key not in losses:
            losses[key] = final_loss([*options.set, f"data.mixture={mixture}"], key, options.widths[0], options.steps)
            with record.open("a") as file:
                file.write(json.dumps([*key, losses[key]]) + "\n")
    tables = {
        "with width transfer" if transfers else "without": table(losses, transfers, options)
        for transfers in (True, False)
    }
    _common.show({"machine": _common.machine("megatron-core"), "tables": tables}, options.json)


def final_loss(settings: list[str], key: Key, base: int, steps: int) -> float:
    """Return the mean loss of a run's last steps; infinite if it diverged."""
    transfers, width, rate, seed = key
    shape = [f"model.hidden_size={width}", f"model.expert_hidden_size={2 * width}", f"training.seed={seed}"]
    shape += [f"model.mup.base_width={base if transfers else 'null'}", f"data.seed={seed}"]
    length = [f"training.steps={steps}", f"optimizer.warmup_tokens={10 * BATCH * LENGTH}"]
    with a_run(settings, *FIXED, *shape, *length, f"optimizer.learning_rate={rate}") as (_, _, start):
        trainer, found = start(name="run"), []
        for step in range(steps):
            trainer.schedule.set(step * BATCH)
            found.append(trainer.step.gradients(trainer.batches).loss)
            trainer.step.update()
    loss = _mean(found[-LAST:])
    return loss if math.isfinite(loss) else math.inf


def table(losses: dict[Key, float], transfers: bool, options: Any) -> list[dict[str, Any]]:
    """Return a row for each width."""
    rows = []
    for width in options.widths:
        means, best_of_seeds = {}, []
        for rate in options.rates:
            means[rate] = _mean([losses[transfers, width, rate, seed] for seed in options.seeds])
        for seed in options.seeds:
            best_of_seeds.append(best({rate: losses[transfers, width, rate, seed] for rate in options.rates}))
        row: dict[str, Any] = {"width": width} | {f"{rate:g}": f"{mean:.3f}" for rate, mean in means.items()}
        row["best rate"] = f"{best(means):.4f}"
        rows.append(row | {"of each seed": " ".join(f"{rate:.4f}" for rate in best_of_seeds)})
    return rows


def best(losses: dict[float, float]) -> float:
    """Return the lowest point of the parabola through the best rate and its neighbours, in log2 of the rate."""
    rates = sorted(losses)
    place = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if not 0 < place < len(rates) - 1:
        return rates[place]
    x = [math.log2(rate) for rate in rates[place - 1 : place + 2]]
    a, b, c = (losses[rate] for rate in rates[place - 1 : place + 2])
    left, right = (b - a) / (x[1] - x[0]), (c - b) / (x[2] - x[1])
    curvature = (right - left) / (x[2] - x[0])
    return 2 ** ((x[0] + x[1]) / 2 - left / (2 * curvature))


def _keys(options: Any) -> Iterator[Key]:
    for seed in options.seeds:
        for width in options.widths:
            for rate in options.rates:
                yield from ((transfers, width, rate, seed) for transfers in (True, False))


def _read(record: Path) -> Iterator[tuple[Key, float]]:
    for line in record.read_text().splitlines() if record.exists() else ():
        transfers, width, rate, seed, loss = json.loads(line)
        yield (transfers, width, rate, seed), loss


def _corpus(folder: Path) -> Path:
    from megatron_blackmamba.study import corpus

    return corpus.build(folder / "corpus", MEGABYTES, VOCABULARY)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
