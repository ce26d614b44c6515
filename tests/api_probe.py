"""The Python API, used as a script would: `python -m tests.api_probe FOLDER` prints what each attempt gave, as JSON."""

import json
import signal
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch

from megatron_blackmamba import batches, build, load_config, save, train
from megatron_blackmamba.data import BatchStream
from megatron_blackmamba.training.guard import Verdict
from megatron_blackmamba.training.loop import Trainer


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


def mistakes(folder: Path) -> dict[str, str]:
    config = load_config("tiny")
    tokens_BS = torch.zeros(1, 4, dtype=torch.long)
    attempts: dict[str, Callable[[], object]] = {
        "a name instead of a config": lambda: build("tiny"),  # type: ignore[arg-type]
        "batches before the first": lambda: next(batches(config, start_sample=-3)),
        "another module": lambda: save(torch.nn.Linear(2, 2), folder / "linear"),  # type: ignore[arg-type]
        "one sequence without a batch": lambda: build(config)(tokens_BS[0]),
        "another precision": lambda: build(config).double()(tokens_BS),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (TypeError, ValueError) as error:
            told[name] = str(error)
    return told


PROBES: dict[str, Callable[[Path], object]] = {
    "random_numbers": random_numbers,
    "copied": lambda folder: copied(),
    "mistakes": mistakes,
    "left_by_failures": left_by_failures,
}


def main(folder: Path) -> dict[str, object]:
    return {name: probe(folder) for name, probe in PROBES.items()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
