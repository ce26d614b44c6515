"""Runs under router kinds: trained, stopped, resumed on the same and on other layouts, exported and decoded.

`python -m tests.routers.routers_probe FOLDER`: imports once, forks the ranks, and prints what they found as JSON.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from megatron_blackmamba import routers
from megatron_blackmamba.config import load
from tests.routers.levelled.kind import Levelled
from tests.routers.unbalanced import Unbalanced
from tests.runtime.ranks import fork_ranks, import_once

STEPS = 6
PLAN_BIAS_RUNS = ("plan_bias", "plan_bias_resharded", "taken_over")
RUN = ["model.pattern=MEME", "data.sequence_length=32", "training.global_batch=8", "training.micro_batch=4"]
RUN += [f"training.tokens={STEPS * 8 * 32}", "checkpoint.every=3", "model.top_k=2", "training.router_every=1"]
RUN += ["logging.tensorboard=false", "training.evaluate_every=0"]
FP64 = ["training.precision=fp64"]
BIAS = ["model.router.kind=expert_bias", "model.router.bias_update_rate=0.05", "model.shared_expert_hidden_size=64"]
Z_LOSS = ["model.z_loss=0.01", "model.router.z_loss=0.01"]
CHOICE = ("model.router.kind=expert_choice", "parallel.pipeline=2")
UNBALANCED = ["model.router.kind=unbalanced"]
LEVELLED = ["model.router.kind=levelled", *FP64]
QUANTILE = ["model.router.kind=quantile", *FP64]
PLAN_BIAS = ["model.router.kind=sinkhorn_bias", *FP64, "training.micro_batch=2", "training.evaluate_every=6"]
HALF = "training.stop_after_steps=3"
JOBS = [
    ("bias", 1, [*BIAS]),
    ("bias_again", 1, [*BIAS, HALF]),
    ("bias_again", 1, [*BIAS]),
    ("bias_fp64", 1, [*BIAS, *FP64, *Z_LOSS]),
    ("bias_resharded", 4, [*BIAS, *FP64, *Z_LOSS, HALF, "parallel.tensor=2", "parallel.pipeline=2"]),
    ("bias_resharded", 2, [*BIAS, *FP64, *Z_LOSS, "parallel.expert=2"]),
    ("quantile", 1, [*QUANTILE]),
    ("quantile_resharded", 2, [*QUANTILE, HALF, "parallel.tensor=2"]),
    ("quantile_resharded", 2, [*QUANTILE, "parallel.expert=2"]),
    ("plan_bias", 1, [*PLAN_BIAS]),
    ("plan_bias_resharded", 2, [*PLAN_BIAS, HALF, "parallel.tensor=2"]),
    ("plan_bias_resharded", 2, [*PLAN_BIAS, "parallel.expert=2"]),
    ("plain", 1, [*PLAN_BIAS, "model.router.kind=sinkhorn"]),
    ("taken_over", 2, [*PLAN_BIAS, "parallel.tensor=2", "start.from=FOLDER/plain", "resume.allow=[model.router.kind]"]),
    ("choice", 2, [*CHOICE, HALF]),
    ("choice_validated", 2, [*CHOICE, HALF, "training.validate_balanced=true", "training.evaluate_every=3"]),
    ("unbalanced", 1, [*UNBALANCED]),
    ("unbalanced_fp64", 1, [*UNBALANCED, *FP64, HALF]),
    ("unbalanced_tp2", 2, [*UNBALANCED, *FP64, HALF, "parallel.tensor=2"]),
    ("levelled", 1, [*LEVELLED, HALF]),
    ("levelled_tp2", 2, [*LEVELLED, HALF, "parallel.tensor=2"]),
]


def trained(folder: Path, name: str, overrides: list[str]) -> None:
    from megatron_blackmamba.training.loop import train

    overrides = [override.replace("FOLDER", str(folder)) for override in overrides]
    train(load("tiny", [*RUN, f"folder={folder}", f"name={name}", *overrides]))


def recorded(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def biases(folder: Path, name: str) -> list[list[float]]:
    from megatron_blackmamba.interchange import megatron

    tensors = megatron.read(folder / name).tensors()
    return [weight.tolist() for key, weight in tensors if key.endswith("router.expert_bias")]


def exported(folder: Path) -> dict:
    """Export the unbalanced run and compare the decoder with the modeling files."""
    from megatron_blackmamba.inference import Decoder
    from megatron_blackmamba.inference.weights import pack
    from megatron_blackmamba.interchange import convert, hf, megatron, parity, through_hf

    convert.to_hf(megatron.read(folder / "unbalanced"), folder / "exported", check="none")
    model = hf.read(folder / "exported")
    comparison = parity.check(megatron.read(folder / "unbalanced"), model)
    tokens_BL = torch.randint(512, (2, 12), generator=torch.Generator().manual_seed(1))
    decoder = Decoder(pack(model, torch.float32))
    state = decoder.start(2)
    stepped = torch.stack([decoder.step(state, tokens_B) for tokens_B in tokens_BL.unbind(1)], dim=1)
    furthest = float((through_hf.observe(model, tokens_BL).logits_BSV - stepped).abs().max())
    return {"agrees": comparison.agrees, "furthest": furthest, "kind": model.config.router.kind}


def main(folder: Path) -> dict:
    routers.register(Unbalanced)
    routers.register(Levelled)
    torch.set_num_threads(1)
    import_once()
    for name, ranks, overrides in JOBS:
        answers = fork_ranks(ranks, partial(trained, folder, name, overrides))
        assert not any("error" in answer for answer in answers), (name, answers)
    names = dict.fromkeys(name for name, _, _ in JOBS)
    found = {"losses": {name: [line["loss"] for line in recorded(folder, name)] for name in names}}
    found["last"] = {
        name: recorded(folder, name)[-1]
        for name in ("bias", "bias_fp64", "bias_resharded", "choice", "choice_validated", "plain", *PLAN_BIAS_RUNS)
    }
    read = [partial(biases, folder, "bias"), partial(biases, folder, "bias_again"), partial(exported, folder)]
    for name, body in zip(("biases", "biases_again", "exported"), read, strict=True):
        answer = fork_ranks(1, body)[0]
        assert "error" not in answer, answer
        found[name] = answer["answer"]
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
