"""A run of the 1.5B model by `blackmamba train` itself: killed, resumed, exported, and loaded by transformers.

    python -m scripts.gpu_run FOLDER [--corpus corpus.tar.xz] [--seconds 300]

The run is killed (SIGKILL) some steps after its first checkpoint was written in the background. The resumed run repeats
these steps, and their losses must be the same, bit for bit. A second call with the same folder goes on. Without a
corpus the text is synthetic. Exit code 75: the time was too short. REHEARSE=1 takes the model `tiny`.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._common import table
from megatron_blackmamba.runtime.parent import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
BEHIND = 5
"""Steps after the first checkpoint at which the run is killed: those that are compared."""
BIG = [
    *("blackmamba_1.5b", "parallel.expert=1", "training.micro_batch=18", "training.global_batch=18"),
    *("training.steps=200", "checkpoint.every=100", "checkpoint.keep_last=1"),
]
SMALL = ["tiny", "training.precision=bf16", "training.tokens=204800", "checkpoint.every=10"]
SAVING_SECONDS = 20
"""A run that has no more time may save for so long."""
COMMON = ["training.evaluate_every=0", "logging.tensorboard=false", "name=run"]
LOAD = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
print(f"transformers {transformers.__version__} loads it and writes {tokens[0].tolist()}")
"""


class Late(Exception):
    """The time is over."""


class Drill:
    """The run in a folder, which ends when the time is over."""

    def __init__(self, folder: Path, words: list[str], until: float) -> None:
        self.folder, self.until = folder, until
        self.run, self.before = folder / "run", folder / "before.json"
        self.words = [sys.executable, "-m", "megatron_blackmamba", "train", *words, *COMMON, f"folder={folder}"]

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            list(words) or self.words,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )

    def finish(self, process: subprocess.Popen) -> None:
        """Wait until the process ends well."""
        try:
            if code := process.wait(max(0.0, self.until - time.monotonic())):
                sys.exit(f"gpu_run: exit code {code}")
        except subprocess.TimeoutExpired:
            raise Late from None
        finally:
            stop(process, signal.SIGTERM)

    def kill_after_a_save(self) -> None:
        """Train, kill the run some steps after its first checkpoint, and note what it had recorded."""
        process, saved = self.start(), None
        try:
            while process.poll() is None:
                if time.monotonic() > self.until:
                    raise Late
                seen = self.steps()
                if saved is None and (at := self.saved()):
                    saved = (at, max(seen, default=at))
                if saved and max(seen, default=0) >= saved[1] + BEHIND:
                    break
                time.sleep(0.02)
            else:
                sys.exit(f"gpu_run: the run ended before it could be killed, with exit code {process.returncode}")
        finally:
            stop(process, signal.SIGKILL)
        self.before.write_text(json.dumps({"saved": saved, "steps": self.steps()}))

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return the records of the run's steps so far; a line that is being written is left out."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return {record["step"]: record for record in map(json.loads, lines)}

    def saved(self) -> int | None:
        """Return the step of the first checkpoint that is on disk."""
        file = self.run / "events.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return next((event["step"] for event in map(json.loads, lines) if event["kind"] == "saved"), None)


def stop(process: subprocess.Popen, how: signal.Signals) -> None:
    """End the process and those that it started: SIGTERM lets it save."""
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(SAVING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def summary(before: dict[str, Any], steps: dict[int, dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the curve, and what the run costs: while nothing is saved, and while a checkpoint is written."""
    last, (saved, written) = max(steps), before["saved"]
    shown = sorted({1, *(last * part // 8 for part in range(1, 9))} & steps.keys())
    curve = [{"step": step, "loss": steps[step]["loss"], "busiest expert": _busiest(steps[step])} for step in shown]
    first = {int(step): record for step, record in before["steps"].items()}
    seconds = {step: record["speed/step_seconds"] for step, record in first.items() if "speed/step_seconds" in record}
    while_saving = [x for step, x in seconds.items() if saved < step <= written]
    alone = [x for step, x in seconds.items() if 2 < step <= saved]
    rates = [record["speed/mfu"] for step, record in steps.items() if step > 2 and record.get("speed/mfu")]
    costs = {
        "step, s": statistics.median(alone) if alone else None,
        "while saving, s": statistics.median(while_saving) if while_saving else None,
        "steps while saving": written - saved,
        "MFU": f"{statistics.median(rates):.1%}" if rates else None,
    }
    return curve, costs


def _busiest(record: dict[str, Any]) -> float | None:
    """Return the busiest expert of a layer over the mean, on average over the layers, where it was measured."""
    loads = [x for name, x in record.items() if name.startswith("experts/") and name.endswith("/max_over_mean")]
    return statistics.mean(loads) if loads else None


def differing(before: dict[str, Any], steps: dict[int, dict[str, Any]]) -> tuple[int, list[int]]:
    """Return how many steps were repeated after the checkpoint, and those whose loss is not the same, bit for bit."""
    repeated = {int(step): record["loss"] for step, record in before["steps"].items() if int(step) > before["saved"][0]}
    return len(repeated), [step for step, loss in repeated.items() if step not in steps or steps[step]["loss"] != loss]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, help="corpus.tar.xz, as scripts/gpu_study.sh takes it")
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    until, folder = time.monotonic() + options.seconds - SAVING_SECONDS, options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    words, data = list(SMALL if os.environ.get("REHEARSE") else BIG), ["data.kind=synthetic"]
    if options.corpus:
        unpacked = folder / "text"
        if not unpacked.exists():
            with tarfile.open(options.corpus) as archive:
                archive.extractall(folder / "text.part", filter="data")
            (folder / "text.part").rename(unpacked)
        data = ["data.kind=mixture", f"data.mixture={unpacked / 'corpus' / 'mixture.yaml'}"]
    drill = Drill(folder, [*words, *data], until)
    try:
        if not drill.before.exists():
            shutil.rmtree(drill.run, ignore_errors=True)  # a first half that was cut
            drill.kill_after_a_save()
        drill.finish(drill.start())
        before, steps = json.loads(drill.before.read_text()), drill.steps()
        curve, costs = summary(before, steps)
        print(f"{table(curve)}\n\n{table([costs])}\n", flush=True)
        count, wrong = differing(before, steps)
        print(f"killed and resumed: {count} steps repeated, {count - len(wrong)} with the same loss", flush=True)
        export = folder / "export"
        if not export.exists():
            words = [sys.executable, "-m", "megatron_blackmamba", "export", "hf", str(drill.run), str(export)]
            drill.finish(drill.start(*words))
        drill.finish(drill.start(sys.executable, "-c", LOAD, str(export)))
    except Late:
        print("out of time; the next call goes on", flush=True)
        return 75
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
