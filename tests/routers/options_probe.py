"""A hash router with a last RMSNorm: trained in float64 under several layouts, exported, loaded and decoded.

`python -m tests.routers.options_probe FOLDER`: imports once, forks the ranks, and prints what they found as JSON.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from megatron_blackmamba.config import load
from tests.routers.routers_probe import recorded, trained
from tests.runtime.ranks import fork_ranks, import_once

OPTIONS = ["model.router.kind=hash", "model.final_norm=rms", "training.tokens=768", "data.workers=0"]
FP64 = "training.precision=fp64"
LAYOUTS = {
    "solo": (1, []),
    "tp2_ep2": (2, ["parallel.tensor=2", "parallel.expert=2"]),
    "tp2_allgather": (2, ["parallel.tensor=2", "parallel.expert=2", "kernels.dispatcher=allgather"]),
    "pp2": (2, ["parallel.pipeline=2", "training.recompute=layers"]),
    "cp2": (2, ["parallel.context=2"]),
}


def exported(folder: Path) -> dict:
    """Compare training's logits with decoding and transformers, and import the export."""
    from transformers import AutoModelForCausalLM

    from megatron_blackmamba import model as network
    from megatron_blackmamba.inference import Decoder
    from megatron_blackmamba.inference.weights import pack
    from megatron_blackmamba.interchange import convert, hf, megatron, parity, zyphra
    from megatron_blackmamba.interchange.canonical import InterchangeError
    from megatron_blackmamba.runtime import world

    trained(folder, "fp32", OPTIONS)
    model, out = megatron.read(folder / "fp32"), folder / "hf"
    convert.to_hf(model, out, check="none")
    again = hf.read(out)
    ids_BL = torch.randint(512, (2, 12), generator=torch.Generator().manual_seed(1))
    with world.fake(load("tiny").parallel, world_size=1, where="cpu") as alone, torch.no_grad():
        built = network.build(load("tiny", ["model.pattern=MEME", "model.top_k=2", *OPTIONS]), alone).eval()
        from megatron_blackmamba.api import load_weights

        load_weights(built, folder / "fp32")
        here = built(ids_BL)
    decoder = Decoder(pack(again, torch.float32))
    state = decoder.start(2)
    stepped = torch.stack([decoder.step(state, ids_B) for ids_B in ids_BL.unbind(1)], dim=1)
    read = decoder.read_all(decoder.start(2), ids_BL)
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(ids_BL).logits
        greedy = theirs.generate(ids_BL, max_new_tokens=8, do_sample=False, eos_token_id=-1)[:, 12:]
    state, tokens = decoder.start(2), []
    last = decoder.read(state, ids_BL)
    for _ in range(8):
        tokens.append(last.argmax(-1))
        last = decoder.step(state, tokens[-1])
    refused = []
    try:
        theirs(inputs_embeds=torch.zeros(1, 3, 64))
    except ValueError as error:
        refused.append(str(error))
    try:
        zyphra.require_expressible(again.config, "here")
    except InterchangeError as error:
        refused.append(str(error))
    return {
        "agrees": parity.check(model, again, out).agrees,
        "same_config": again.config.model_dump() == model.config.model_copy(update={"dt_rank": 4}).model_dump(),
        "furthest": [float((each - here).abs().max()) for each in (stepped, read, logits)],
        "greedy": torch.equal(greedy, torch.stack(tokens, dim=1)),
        "names": [name for name in again.entries if "router" in name or "final" in name],
        "refused": refused,
    }


def main(folder: Path) -> dict:
    torch.set_num_threads(1)
    import_once()
    for name, (ranks, overrides) in LAYOUTS.items():
        answers = fork_ranks(ranks, partial(trained, folder, name, [*OPTIONS, FP64, *overrides]))
        assert not any("error" in answer for answer in answers), (name, answers)
    answer = fork_ranks(1, partial(exported, folder))[0]
    assert "error" not in answer, answer
    return {name: [line["loss"] for line in recorded(folder, name)] for name in LAYOUTS} | {"export": answer["answer"]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
