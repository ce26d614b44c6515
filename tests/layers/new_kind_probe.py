"""A run whose layers are of a kind that the package does not have: trained, stopped, resumed, decoded, exported.

`python -m tests.layers.new_kind_probe FOLDER`: imports once, forks the ranks, and prints what they found as JSON.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_blackmamba import layers
from megatron_blackmamba.config import load
from megatron_blackmamba.interchange import megatron
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.plan import flops, memory, parameters
from megatron_blackmamba.plan.activations import Activations
from megatron_blackmamba.runtime import world
from tests.layers.fused import Fused
from tests.layers.running_mean.kind import RunningMean
from tests.runtime.ranks import fork_ranks, import_once

layers.register(RunningMean)
layers.register(Fused)
STEPS, EOD = 6, 3
RUN = ["model.pattern=MAEA", "data.sequence_length=32", "training.global_batch=8", "training.micro_batch=4"]
FP64 = ["training.precision=fp64"]  # layouts are compared in it: no rounding decides between two experts
FUSED = [*FP64, "model.pattern=FE"]
RUN += [f"training.tokens={STEPS * 8 * 32}", "checkpoint.every=3", "logging.tensorboard=false"]


def trained(folder: Path, name: str, *overrides: str) -> None:
    from megatron_blackmamba.training.loop import train

    train(load("tiny", [*RUN, f"folder={folder}", f"name={name}", *overrides]))


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def counted() -> list[int]:
    """FLOPs and bytes kept by one micro-batch, as torch sees them."""
    from megatron_blackmamba.model import build
    from tests.plan.memory_probe import kept_for_backward

    config = load("tiny", [*RUN, "model.pattern=AA"])
    model = build(config, world.start(config.parallel))
    tokens = torch.randint(config.model.vocab_size, (4, 32))
    kept = kept_for_backward(model, tokens)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    return [counter.get_total_flops(), kept]


def planned() -> list[int]:
    """The same by the plan, and the parameters of the new kind."""
    config = load("tiny", [*RUN, "model.pattern=AA"])
    kept = memory.kept(config, 0, "none", "cpu") + Activations(config, "cpu").logits()
    return [4 * 32 * flops.forward(config.model, 32), kept, parameters.count(config).by_kind["mean"]]


def decoded(folder: Path, eod_reset: int | None) -> float:
    """How far a token at a time and two pieces are from training's forward pass, in the logits of a checkpoint."""
    from megatron_blackmamba.inference import Decoder
    from megatron_blackmamba.inference.weights import pack
    from megatron_blackmamba.interchange import through_megatron

    model = megatron.read(folder / "solo")
    model = replace(model, config=model.config.model_copy(update={"eod_reset": eod_reset}))
    decoder = Decoder(pack(model, torch.float32))
    tokens_BL = torch.randint(512, (2, 12), generator=torch.Generator().manual_seed(1))
    tokens_BL[0, 4] = tokens_BL[1, 6] = tokens_BL[1, 9] = EOD
    state = decoder.start(2)
    stepped = torch.stack([decoder.step(state, tokens_B) for tokens_B in tokens_BL.unbind(1)], dim=1)
    whole = through_megatron.observe(model, tokens_BL).logits_BSV
    state = decoder.start(2)
    read = torch.cat([decoder.read_all(state, piece_BL) for piece_BL in tokens_BL.split(7, dim=1)], dim=1)
    return max(float((whole - stepped).abs().max()), float((whole - read).abs().max()))


def saved(folder: Path) -> bool:
    """Whether a checkpoint of a model in memory holds its weights."""
    from megatron_blackmamba import build, save

    model = build(load("tiny", RUN))
    save(model, folder / "saved")
    entries = megatron.read(folder / "saved").entries
    return torch.equal(entries["decoder.layers.1.mixer.gain"].load(), model.decoder.layers[1].mixer.gain)


def refused(folder: Path) -> str:
    from megatron_blackmamba import build, export_hf

    try:
        export_hf(build(load("tiny", [*RUN, "model.pattern=FE"])), folder / "refused")
    except InterchangeError as error:
        return str(error)
    return ""


def exported(folder: Path, eod_reset: int | None) -> float:
    """How far an export, in two pieces and padded, is from training's forward pass in the logits of a checkpoint."""
    from transformers import AutoModelForCausalLM

    from megatron_blackmamba.interchange import through_megatron
    from megatron_blackmamba.interchange.convert import to_hf

    model, out = megatron.read(folder / "solo"), folder / f"exported_{eod_reset}"
    model = replace(model, config=model.config.model_copy(update={"eod_reset": eod_reset}))
    to_hf(model, out)
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).float()
    tokens_BL = torch.randint(512, (2, 12), generator=torch.Generator().manual_seed(1))
    tokens_BL[0, 4] = tokens_BL[1, 6] = tokens_BL[1, 9] = EOD
    whole = through_megatron.observe(model, tokens_BL).logits_BSV
    padded_BL = torch.nn.functional.pad(tokens_BL, (2, 0))
    mask_BL = torch.nn.functional.pad(torch.ones_like(tokens_BL), (2, 0))
    with torch.no_grad():
        first = theirs(padded_BL[:, :9], attention_mask=mask_BL[:, :9], use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        second = theirs(tokens_BL[:, 7:], past_key_values=cache)
    return float((torch.cat((first.logits[:, 2:], second.logits), 1) - whole).abs().max())


def main(folder: Path) -> dict:
    import_once()
    jobs = {
        "solo": (1, lambda: trained(folder, "solo")),
        "solo_fp64": (1, lambda: trained(folder, "solo_fp64", *FP64)),
        "tp2_fp64": (2, lambda: trained(folder, "tp2_fp64", *FP64, "parallel.tensor=2")),
        "stopped": (1, lambda: trained(folder, "again", "training.stop_after_steps=3")),
        "resumed": (1, lambda: trained(folder, "again")),
        "fused": (1, lambda: trained(folder, "fused", *FUSED)),
        "fused_stopped": (1, lambda: trained(folder, "moved", *FUSED, "training.stop_after_steps=3")),
        "fused_moved": (2, lambda: trained(folder, "moved", *FUSED, "parallel.tensor=2")),
        "counted": (1, counted),
        "planned": (1, planned),
        "decoded": (1, lambda: [decoded(folder, None), decoded(folder, EOD)]),
        "saved": (1, lambda: saved(folder)),
        "refused": (1, lambda: refused(folder)),
        "exported": (1, lambda: [exported(folder, None), exported(folder, EOD)]),
    }
    answers = {name: fork_ranks(ranks, body)[0] for name, (ranks, body) in jobs.items()}
    names = ("solo", "again", "solo_fp64", "tp2_fp64", "fused", "moved")
    return answers | {"losses": {name: losses(folder, name) for name in names}}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
