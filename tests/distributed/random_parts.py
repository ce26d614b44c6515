"""Random sequences, cut over two and four ranks, give what one process gives: losses and all gradients, in float64.

    python -m tests.distributed.random_parts [--cases 1024] [--first 0]

Parts may be shorter than a convolution, and documents end at each place around a border. A case follows from its
number. The ranks start once. The last line is the summary as JSON.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from megatron_blackmamba.data.batches import BatchStream
from megatron_blackmamba.layers import unread_keys
from megatron_blackmamba.ops import attention
from megatron_blackmamba.runtime import world
from tests.layers.sizes import PASSING, small
from tests.runtime.ranks import fork_ranks, import_once

EOD, VOCABULARY = 0, 16
SMALL = ["model.hidden_size=16", f"model.vocab_size={VOCABULARY}", f"model.eod_reset={EOD}", "training.precision=fp64"]
SMALL += [*small(PASSING), "model.mamba3.state_size=4", "model.attention.kv_heads=2"]
FIRST = ("M", "S", "R", "G", "*", "MSR*G")
PATTERNS = (*FIRST, *(letter for letter in PASSING if letter not in FIRST))
"""A new letter comes last."""
VARIANTS = {
    "taps 2": ["model.conv_kernel=2"],
    "taps 4": ["model.conv_kernel=4", "model.attention.rotary=false"],
    "taps 7": ["model.conv_kernel=7", "model.attention.qk_norm=true"],
    "across": ["model.attention.across_documents=true"],
    "no documents": ["model.eod_reset=null", "model.delta.variant=gdn2"],
}
CONTEXTS = (2, 4)
CLOSENESS = 1e-10
Gradients = dict[str, Tensor]


class Case(NamedTuple):
    context: int
    pattern: str
    variant: str
    block: int
    """Queries of a block of attention."""
    tokens_BL: Tensor
    """With one token more, the last label."""

    def __str__(self) -> str:
        shape = tuple(self.tokens_BL[:, 1:].shape)
        return f"{self.pattern}, {self.variant}, context {self.context}, {shape}, blocks of {self.block}"


def case(number: int) -> Case:
    random = Random(number)
    context = random.choice(CONTEXTS)
    part = random.choice((1, 1, 2, 3, 5, 8, 9, 13, 21, 65))
    length, batch = part * context, random.randint(1, 3)
    tokens_BL = torch.randint(1, VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(number))
    for row in range(batch):
        tokens_BL[row, _ends(random, part, context)] = EOD
    block = random.choice((1, 3, 512))
    return Case(context, random.choice(PATTERNS), random.choice(list(VARIANTS)), block, tokens_BL)


def overrides(at: Case, context: int) -> list[str]:
    unread = unread_keys(at.pattern)  # a model refuses some of them
    read = [
        override
        for override in [*SMALL, *VARIANTS[at.variant]]
        if override.partition("=")[0].split(".")[1] not in unread
    ]
    return [*read, f"model.pattern={at.pattern}", f"parallel.context={context}"]


def _ends(random: Random, part: int, context: int) -> list[int]:
    """Draw where documents of one sequence end."""
    length = part * context
    borders = [part * random.randint(1, context - 1) + offset for offset in random.sample((-2, -1, 0, 1), 2)]
    choices: dict[str, Callable[[], list[int]]] = {
        "none": list,
        "all": lambda: list(range(length)),
        "one token": lambda: [end + more for end in borders for more in (0, 1)],
        "border": lambda: borders[: random.randint(1, 2)],
        "some": lambda: [t for t in range(length) if random.random() < 0.2],
    }
    found = choices[random.choice(list(choices))]()
    return [end for end in found if 0 <= end < length]


class Rows:
    """The sequences of a case as a dataset."""

    def __init__(self, tokens_BL: Tensor) -> None:
        self.tokens_BL = tokens_BL

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        whole = self.tokens_BL[row]
        return {"tokens": whole[:-1], "labels": whole[1:], "loss_mask": torch.ones(len(whole) - 1)}


def body(folder: Path, context: int, numbers: list[int]) -> bool:
    """Leave each case's losses and gradients; `context` 1 takes those of all contexts."""
    us = world.start(load("tiny", [f"parallel.context={context}"]).parallel)
    networks: dict[tuple[str, str], model.LanguageModel] = {}
    embedded: list[Tensor] = []
    found = {}
    for number in numbers:
        at = case(number)
        if context not in (1, at.context):
            continue
        key = (at.pattern, at.variant)
        if key not in networks:
            networks[key] = drawn(model.build(load("tiny", overrides(at, context)), us))
            networks[key].embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
        network, batch = networks[key], len(at.tokens_BL)
        part = (us.context_rank, context)
        stream = BatchStream(Rows(at.tokens_BL), global_batch=batch, micro_batch=batch, part=part, workers=0)
        attention.BLOCK = at.block
        found[number] = _taken(network, embedded, next(stream), at.tokens_BL.shape[1] - 1)
    torch.save(found, folder / f"{context}_{us.context_rank}.pt")
    world.shutdown()
    return True


def drawn(network: model.LanguageModel) -> model.LanguageModel:
    """Draw all weights anew, larger than in training: states then matter, and live for several tokens."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.4, generator=random)
    return network


def _taken(network: model.LanguageModel, embedded: list[Tensor], batch: dict[str, Tensor], length: int) -> Gradients:
    losses_BS = network(batch["tokens"], batch["labels"], batch.get("before"))
    weight_S = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    here = slice(0, length)
    if "before" in batch:
        S = losses_BS.shape[1]
        here = slice(dist.get_rank() * S, (dist.get_rank() + 1) * S)
    parameters = dict(network.named_parameters())
    stream_SBD = embedded.pop()
    gradients = torch.autograd.grad(
        (losses_BS * weight_S[here]).sum(), [stream_SBD, *parameters.values()], allow_unused=True
    )
    summed = {name: g for name, g in zip(parameters, gradients[1:], strict=True) if g is not None}
    return {"losses": losses_BS.detach(), "inputs": gradients[0].transpose(0, 1), **summed}


def compare(folder: Path, numbers: list[int]) -> dict:
    """Return the largest difference, and what differs."""
    alone = torch.load(folder / "1_0.pt")
    parts = {context: [torch.load(folder / f"{context}_{r}.pt") for r in range(context)] for context in CONTEXTS}
    furthest, problems = 0.0, []
    for number in numbers:
        at, whole = case(number), alone[number]
        ranks = [rank[number] for rank in parts[at.context]]
        distances = {name: _distance([rank[name] for rank in ranks], expected) for name, expected in whole.items()}
        furthest = max(furthest, *distances.values())
        if wrong := [name for name, distance in distances.items() if not distance < CLOSENESS]:
            problems.append(f"case {number} ({at}): {', '.join(wrong)}")
    return {"cases": len(numbers), "furthest": furthest, "problems": problems}


def _distance(parts: list[Tensor], whole: Tensor) -> float:
    """Return the largest difference of the parts in order, or of the sum of gradients of weights, from the whole."""
    joined = torch.cat(parts, dim=1) if parts[0].shape != whole.shape else torch.stack(parts).sum(0)
    return float((joined - whole).abs().max() / whole.abs().max().clamp_min(1e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1024)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import_once()
    numbers = list(range(options.first, options.first + options.cases))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for context in (1, *CONTEXTS):
            answers = fork_ranks(context, partial(body, folder, context, numbers), alone=context == 1)
            if failed := [answer.get("trace") or answer["error"] for answer in answers if "error" in answer]:
                print(json.dumps({"problems": failed}))
                return
        found = compare(folder, numbers)
    print("\n".join(found["problems"]) or f"{len(numbers)} cases agree")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
