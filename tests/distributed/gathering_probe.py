"""Trains one small bf16 model on two gloo ranks with gathers of many bucket sizes, each delivered as late as allowed.

`python -m tests.distributed.gathering_probe` answers with what each size gave; one group of ranks runs them all.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_blackmamba import model as modelling
from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.engine.parts.gathering import UngatheredParameter
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.step.optimizer import Trainable, make_trainable
from megatron_blackmamba.training.step.step import Batch, Step
from tests.runtime.ranks import fork_ranks, import_once

STEPS = 3
SMALL = [
    *("model.pattern='ME*-'", "model.hidden_size=32", "model.expert_hidden_size=16", "model.mlp_hidden_size=16"),
    *("model.vocab_size=64", "model.experts=2", "model.state_size=4", "model.attention.heads=2"),
    *("data.sequence_length=16", "training.global_batch=4", "training.micro_batch=2", "training.precision=bf16"),
    *("optimizer.learning_rate=0.01", "optimizer.weight_decay=0.1"),
    "optimizer.clip=0",  # the order in which the norm is summed depends on the buckets
]
OTHERS = {
    "softmax": ["model.router.kind=softmax", "model.tie_embeddings=false"],
    "recompute": ["training.recompute=layers"],
    "two_micro_batches": ["training.global_batch=8"],
}


class LateGather:
    """The handle of a gather whose result arrives when someone waits for it, and not before."""

    def __init__(self, handle, buffers, stale):
        handle.wait()
        self.arrived = [(buffer, buffer.clone()) for buffer in buffers]
        for buffer, old in zip(buffers, stale, strict=True):
            buffer.copy_(old)

    def wait(self):
        for buffer, new in self.arrived:
            buffer.copy_(new)


def deliver_late() -> None:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start = Group.start_param_sync

    def start_late(self, force_sync=False):
        buffers = [bucket.param_data for bucket in self.buckets]
        stale = [buffer.clone() for buffer in buffers]
        start(self, force_sync)
        if self.param_gather_handle is not None:
            self.param_gather_handle = LateGather(self.param_gather_handle, buffers, stale)

    Group.start_param_sync = start_late


def build(place: world.World, *overrides: str) -> tuple[RunConfig, Trainable]:
    config = load("tiny", [*SMALL, *overrides])
    return config, make_trainable(config, modelling.build(config, place), place)


def batches(config: RunConfig, rank: int) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(rank)
    shape = (config.training.micro_batch, config.data.sequence_length)
    while True:
        tokens_BS = torch.randint(config.model.vocab_size, shape, generator=random)
        yield {
            "tokens": tokens_BS,
            "labels": tokens_BS.roll(-1, 1),
            "loss_mask": torch.ones(shape),
            "source_ids": torch.zeros(shape[0], dtype=torch.int64),
            "sample_ids": torch.arange(shape[0]),
        }


def train(place: world.World, *overrides: str) -> dict:
    """Losses, a digest of the weights, and the parameters that are the first of a bucket in the forward pass."""
    config, trainable = build(place, *overrides)
    step, stream = Step(config, place, trainable, sources=1), batches(config, place.rank)
    losses = []
    for _ in range(STEPS):
        losses.append(step.gradients(stream).loss)
        step.update()
    trainable.settle()
    digest = hashlib.sha256()
    for parameter in trainable.model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return {"losses": losses, "weights": digest.hexdigest(), "first": sorted(first_of_buckets(trainable))}


def first_of_buckets(trainable: Trainable) -> set[str]:
    names = {parameter: name for name, parameter in trainable.model.named_parameters()}
    return {names[bucket.params_list[-1]] for buffer in buffers_of(trainable) for bucket in buffer.buckets}


def buffers_of(trainable: Trainable) -> list:
    return [*trainable.reduced.buffers, *trainable.reduced.expert_parallel_buffers]


def sizes_that_begin_a_bucket(place: world.World) -> list[int]:
    """Bucket sizes of which each makes another parameter the first of the last bucket."""
    _, trainable = build(place, "training.overlap=false")
    return sorted({end for buffer in buffers_of(trainable) for _, end, *_ in buffer.param_index_map.values()})


def refused(place: world.World, spoil) -> str:
    """Return the error of the first forward pass after `spoil(first mixer)`."""
    config, trainable = build(place, "training.overlap=true")
    spoil(trainable.model.decoder.layers[0].mixer)
    try:
        Step(config, place, trainable, sources=1).gradients(batches(config, place.rank))
    except UngatheredParameter as error:
        return str(error)
    return ""


def add_a_module_that_nobody_calls(mixer) -> None:
    mixer.dt_proj.forward = lambda dt, weight=mixer.dt_proj.weight, bias=mixer.dt_proj.bias: (dt @ weight.t(), bias)
    mixer.dt_proj.__class__ = type("Direct", (type(mixer.dt_proj),), {"__call__": lambda self, dt: self.forward(dt)})


def read_a_weight_first(mixer) -> None:
    mixer.register_forward_pre_hook(lambda *_: mixer.conv1d.weight.sum() and None)


def read_the_data_first(mixer) -> None:
    mixer.register_forward_pre_hook(lambda *_: mixer.conv1d.weight.data.sum() and None)


def look_at_the_data(mixer) -> None:
    mixer.register_forward_pre_hook(lambda *_: isinstance(mixer.conv1d.weight.data, torch.nn.Parameter) or None)


SPOILED = (add_a_module_that_nobody_calls, read_a_weight_first, read_the_data_first, look_at_the_data)


def body(folder: Path) -> None:
    place = world.start(load("tiny").parallel)
    deliver_late()
    seen = {"names": [name for name, _ in build(place)[1].model.named_parameters()]}
    seen["apart"] = {name: train(place, "training.overlap=false", *more) for name, more in OTHERS.items()}
    seen["apart"]["plain"] = train(place, "training.overlap=false")
    seen["sizes"] = {
        size: train(place, "training.overlap=true", f"training.bucket_size={size}")
        for size in sizes_that_begin_a_bucket(place)
    }
    seen["each"] = {
        name: train(place, "training.overlap=true", "training.bucket_size=1", *more) for name, more in OTHERS.items()
    }
    seen["refused"] = {spoil.__name__: refused(place, spoil) for spoil in SPOILED}
    (folder / f"{place.rank}.json").write_text(json.dumps(seen))
    world.shutdown()


def main() -> None:
    torch.set_num_threads(1)
    import_once()
    with tempfile.TemporaryDirectory() as folder:
        answers = fork_ranks(2, lambda: body(Path(folder)))
        problems = [answer.get("trace") or answer["error"] for answer in answers if "error" in answer]
        ranks = [] if problems else [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
    print(json.dumps({"problems": problems, "ranks": ranks}))


if __name__ == "__main__":
    main()
