"""The Python API, used as a script would: `python -m tests.api_probe FOLDER` prints what each attempt gave, as JSON."""

import json
import signal
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from megatron_blackmamba import (
    batches,
    build,
    evaluate,
    export_hf,
    load,
    load_config,
    load_weights,
    save,
    train,
    update_routers,
)
from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.data import BatchStream
from megatron_blackmamba.training.loop import Trainer
from megatron_blackmamba.training.watch.guard import Verdict


def random_numbers(folder: Path) -> list[bool]:
    """Return whether building a model, or a run, leaves torch's random numbers alone."""
    run = load_config("tiny", ["training.steps=1", "checkpoint.every=0", f"folder={folder}"])
    same = []
    for between in (lambda: build(run), lambda: train(run)):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        between()
        same.append(torch.equal(torch.rand(3), expected))
    return same


def left_by_failures(folder: Path) -> dict[str, object]:
    """Return whether Ctrl-C works again after a run that failed early or late, and what the run still holds open."""

    class FailsEarly(Trainer):
        def open_batches(self) -> BatchStream:
            raise ValueError("no batches")

    class FailsLate(Trainer):
        def take_step(self) -> Verdict:
            raise ValueError("no step")

    run = load_config("tiny", ["training.steps=1", "checkpoint.every=0", f"folder={folder / 'failed'}"])
    before, told = signal.getsignal(signal.SIGINT), []
    for trainer in (FailsEarly, FailsLate):
        try:
            train(run, trainer)
        except ValueError as error:
            told.append(str(error))
    held = [str(file) for file in Path("/proc/self/fd").iterdir() if file.resolve().name == "lock"]
    return {"told": told, "interrupts": signal.getsignal(signal.SIGINT) == before, "held": held}


def copied() -> dict[str, object]:
    """A deep copy computes the same, has weights of its own and keeps the marks on them."""
    model = build(load_config("tiny")).eval()
    copy = deepcopy(model)
    tokens_BS = torch.arange(32).view(2, 16)
    same = torch.equal(model(tokens_BS), copy(tokens_BS))
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in copy.parameters()}
    name = "decoder.layers.0.mixer.A_log"
    marks = vars(model.get_parameter(name)) == vars(copy.get_parameter(name)) != {}
    return {"same": same, "shared": len(shared), "marks": marks}


def loaded(folder: Path) -> dict[str, object]:
    """Whether each form of stored weights comes back whole, and what is said of weights of another model."""
    own = load_config("tiny", ["training.seed=5"])
    first, run = build(own), folder / "loaded"
    expected = first.state_dict()
    save(first, folder / "saved")
    export_hf(first, folder / "exported")
    train(load_config("tiny", ["name=loaded", "training.steps=1", "training.seed=5", f"folder={folder}"]))
    same = {}
    for kind in ("saved", "exported"):
        model = build(load_config("tiny"))
        load_weights(model, folder / kind)
        same[kind] = _equal(model.state_dict(), expected)
    started = build(load_config("tiny", [f"start.from={folder / 'saved'}"]))
    same["start.from"] = _equal(started.state_dict(), expected)
    load_weights(started, run)
    stored = CheckpointReader(run)
    same["run"] = _equal(started.state_dict(), dict(stored.tensors())) and not _equal(started.state_dict(), expected)
    refused = []
    for attempt in (
        lambda: load_weights(build(load_config("tiny", ["model.experts=4"])), run),
        lambda: build(load_config("tiny", ["model.norm_eps=0.01", f"start.from={run}"])),
    ):
        try:
            attempt()
        except ValueError as error:
            refused.append(str(error).replace(str(folder), "FOLDER"))
    return {"same": same, "refused": refused}


def default_dtypes(folder: Path) -> dict[str, list[bool]]:
    """Whether weights, losses, decoding and training are the same under each default dtype of torch as under fp32."""
    tokens_BS = torch.arange(24).view(2, 12)

    def results(name: str) -> list[Tensor]:
        model = build(load_config("tiny"))
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        losses = model(tokens_BS, tokens_BS)
        losses.mean().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        save(model, folder / name)
        decoder = load(folder / name).decoder
        state = decoder.start(batch=2)
        logits = [decoder.read(state, tokens_BS), decoder.step(state, tokens_BS[:, 0])]
        train(load_config("tiny", [f"name={name}_run", "training.steps=2", f"folder={folder}"]))
        trained = [tensor for _, tensor in CheckpointReader(folder / f"{name}_run").tensors()]
        return [*weights, losses.detach(), *gradients, *logits, *trained]

    expected, same = results("float32"), {}
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found = results(str(dtype).removeprefix("torch."))
            kept = torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(torch.float32)
        equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        same[str(dtype)] = [kept, all(a.dtype == b.dtype for a, b in zip(expected, found, strict=True)), equal]
    return same


def expert_biases() -> dict[str, object]:
    """How far the biases of a loop move with the update, and what a loop without it is told."""
    config = load_config("tiny", ["model.router.kind=expert_bias", "model.router.bias_update_rate=0.1"])
    tokens_BS = torch.arange(32).view(2, 16)
    answer: dict[str, object] = {}
    for update in (True, False):
        model = build(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(4):
                model(tokens_BS, tokens_BS).mean().backward()
                optimizer.step()
                if update:
                    update_routers(model)
        biases = [value.abs().max().item() for name, value in model.named_buffers() if name.endswith("expert_bias")]
        mine = [str(warning.message) for warning in told if "expert" in str(warning.message)]
        answer[f"update={update}"] = {"moved": [bias > 0 for bias in biases], "told": mine}
    return answer


def tensors_alone(folder: Path) -> bool:
    """Return whether safetensors writes a model's state dict, and the model loads it back."""
    from safetensors.torch import load_file, save_file

    model = build(load_config("tiny", ["training.seed=3"]))
    save_file(model.state_dict(), folder / "model.safetensors")
    other = build(load_config("tiny"))
    other.load_state_dict(load_file(folder / "model.safetensors"))
    return _equal(other.state_dict(), model.state_dict())


def _equal(state: dict[str, object], expected: dict[str, object]) -> bool:
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return all(torch.equal(value, expected[name]) for name, value in tensors.items())  # type: ignore[arg-type]


def diverged() -> torch.nn.Module:
    model = build(load_config("tiny"))
    next(model.parameters()).data[0] = torch.nan
    return model


def mistakes(folder: Path) -> dict[str, str]:
    config = load_config("tiny")
    tokens_BS = torch.zeros(1, 4, dtype=torch.long)
    attempts: dict[str, Callable[[], object]] = {
        "a name instead of a config": lambda: build("tiny"),  # type: ignore[arg-type]
        "batches before the first": lambda: next(batches(config, start_sample=-3)),
        "divided models": lambda: build(load_config("tiny", ["parallel.tensor=2"])),
        "another module": lambda: save(torch.nn.Linear(2, 2), folder / "linear"),  # type: ignore[arg-type]
        "one sequence without a batch": lambda: build(config)(tokens_BS[0]),
        "another precision": lambda: build(config).double()(tokens_BS),
        "a graph of torch.jit": lambda: torch.jit.trace(build(config), (tokens_BS,)),
        "scores of a module": lambda: evaluate(build(config)),  # type: ignore[arg-type]
        "a run in a thread": lambda: ThreadPoolExecutor().submit(train, config).result(),
        "an unknown way to encode": lambda: evaluate(folder, encoding="apart"),
        "a model with NaN": lambda: save(diverged(), folder / "diverged"),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (TypeError, ValueError, RuntimeError) as error:
            told[name] = str(error)
    return told


PROBES: dict[str, Callable[[Path], object]] = {
    "random_numbers": random_numbers,
    "copied": lambda folder: copied(),
    "loaded": loaded,
    "default_dtypes": default_dtypes,
    "expert_biases": lambda folder: expert_biases(),
    "tensors_alone": tensors_alone,
    "mistakes": mistakes,
    "left_by_failures": left_by_failures,
}


def main(folder: Path) -> dict[str, object]:
    return {name: probe(folder) for name, probe in PROBES.items()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
