"""The stages of the quickstart, each through a package's public functions; the files it leaves let it be skipped."""

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.run_folder import Inside, RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far, read_metrics
from megatron_blackmamba.quickstart.corpus import SOURCES, gather

VOCABULARY = 4096
NAME = "quickstart"
MINUTES = 4.0
SPEED_STEPS = 8
IN_STEPS = 0.92
"""Fraction of the training time that steps take; processes that start, validation and checkpoints take the rest."""
REPLAN_AFTER = 0.1
"""Fraction of the planned steps after which their number is checked, and corrected if it is wrong."""
CHECKED_FROM = 1.0
"""Minutes of training from which it is checked; with fewer, starting again costs more than it corrects."""
CLOSE = 1.1
"""Largest ratio of measured and planned steps that needs no correction."""
PROMPTS = ("def __init__(self", "The Python language", "Permission is hereby granted")


class QuickstartError(ValueError):
    """A stage that cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Quickstart:
    """The folder of a quickstart, its training time, and its number of processes."""

    folder: Path
    minutes: float
    processes: int

    @property
    def duration(self) -> str:
        return f"{self.minutes:g} minute{'s' * (self.minutes != 1)}"

    @property
    def seconds_of_steps(self) -> float:
        return 60 * self.minutes * IN_STEPS

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / NAME)

    corpus = Inside("corpus", "folder")
    tokens = Inside("tokens", "folder")
    mixture = Inside("mixture.yaml", "folder")
    config = Inside("run.yaml", "folder")
    pace = Inside("pace.json", "folder")
    export = Inside("huggingface", "folder")

    def composed(self) -> RunConfig:
        return load(self.config)


def begin(folder: Path, minutes: float | None) -> Quickstart:
    """Return the settings of a new folder, or the saved settings of an earlier call."""
    record = folder / "settings.json"
    if record.is_file():
        settings = json.loads(record.read_bytes())
        if minutes not in (None, settings["minutes"]):
            raise QuickstartError(
                f"{folder} was begun with --minutes {settings['minutes']:g}: leave --minutes out to go on,"
                " add --fresh to start over, or name another --folder"
            )
    else:
        settings = {"minutes": minutes or MINUTES, "processes": usable_processes()}
        atomic.write_json(record, settings)
    return Quickstart(folder, **settings)


def usable_processes() -> int:
    """Return 2 with two GPUs, or with two cores and no GPU, else 1; every GPU runs one process."""
    import torch

    gpus = torch.cuda.device_count()
    return min(2, gpus or usable_cores())


@dataclass(frozen=True)
class Stage:
    title: str
    command: Callable[[Quickstart], str]
    """What a user would type for it."""
    work: Callable[[Quickstart], str]
    """Does it, or finds it done; returns what there is to say."""


def collect(q: Quickstart) -> str:
    record = q.corpus / "counts.json"
    if not record.is_file():
        atomic.write_json(record, gather(q.corpus))
    counts = json.loads(record.read_bytes())
    return "\n".join(f"{s.what}: {counts[s.name][0]:,} documents, {counts[s.name][1] / 1e6:.1f} MB" for s in SOURCES)


def tokenize(q: Quickstart) -> str:
    from megatron_blackmamba.data_tools.bpe import train_or_reuse
    from megatron_blackmamba.data_tools.readers import ReadOptions
    from megatron_blackmamba.data_tools.rejects import Tolerance
    from megatron_blackmamba.data_tools.sources import find_sources
    from megatron_blackmamba.data_tools.tokenization import TokenizeOptions
    from megatron_blackmamba.data_tools.tokenization import tokenize as make_shards

    inputs = find_sources([str(q.corpus / source.name / "train.jsonl") for source in SOURCES], None, None).sources
    read = ReadOptions(fields=("text",))
    tokenizer = train_or_reuse(inputs, q.tokens, read, Tolerance.parse("0"), VOCABULARY, train_bytes=1 << 30)
    documents = tokens = 0
    for source in SOURCES:
        for part in ("train", "held_out"):
            options = TokenizeOptions(tokenizer=str(tokenizer), quiet=True)
            made = make_shards([q.corpus / source.name / f"{part}.jsonl"], q.tokens / source.name / part, options)
            documents, tokens = documents + made.documents, tokens + made.tokens
    return f"a byte-level BPE of {VOCABULARY:,} tokens; {documents:,} documents are {tokens:,} tokens, none lost"


def mix(q: Quickstart) -> str:
    from megatron_blackmamba.data_tools.mixture import plan_mixture, verify_mixture
    from megatron_blackmamba.formats.mixture import Mixture

    if not q.mixture.is_file():
        sources = [
            {
                "name": source.name,
                "shards": f"tokens/{source.name}/train",
                "validation": f"tokens/{source.name}/held_out",
                "weight": source.weight,
            }
            for source in SOURCES
        ]
        atomic.write_text(q.mixture, yaml.safe_dump({"sources": sources}, sort_keys=False))
    mixture = Mixture.read(str(q.mixture))
    planned = plan_mixture(mixture)
    shares = ", ".join(f"{s.name} {s.probability:.1%}" for s in planned.sources)
    return "\n".join([shares, *verify_mixture(mixture)])


def measure(q: Quickstart) -> str:
    """Time a few steps, and size the run so that training takes the minutes it may."""
    if not q.config.is_file():
        settings = {
            "include": [os.path.relpath(_shipped("run/quickstart"), q.folder)],
            "name": NAME,
            "folder": str(q.folder.resolve()),
            "parallel": {"expert": q.processes},
            "data": {"kind": "mixture", "mixture": str(q.mixture.resolve())},
        }
        trial, tried = q.folder / "trial.yaml", RunFolder(q.folder / "trial")
        shutil.rmtree(tried.root, ignore_errors=True)  # of a call that was stopped here
        atomic.write_text(trial, yaml.safe_dump(settings, sort_keys=False))
        quiet = [
            f"training.stop_after_steps={SPEED_STEPS}",
            "name=trial",
            "checkpoint.every=0",
            "logging.tensorboard=false",
        ]
        _train(load([trial], quiet), [str(trial), *quiet], q.processes, silent=True)
        seconds = statistics.median(record["speed/step_seconds"] for record in list(read_metrics(tried.metrics))[2:])
        run = load([trial])
        steps = max(20, round(q.seconds_of_steps / seconds))
        shutil.rmtree(tried.root)
        trial.unlink()
        settings["training"] = {"tokens": steps * run.tokens_per_step}
        atomic.write_text(q.config, yaml.safe_dump(settings, sort_keys=False))
    run = q.composed()
    return f"{run.steps:,} steps of {run.tokens_per_step:,} tokens fit into {q.duration} on {_processes(q)}"


def train(q: Quickstart) -> str:
    while not q.run.done.is_file():
        pace = Pace(q)
        try:
            _train(q.composed(), [str(q.config)], q.processes, asks_to_stop=pace.is_wrong)
        except KeyboardInterrupt:
            if not pace.steps:
                raise
            print(pace.correct())
    records = list(read_metrics(q.run.metrics))
    last = records[-1]
    from megatron_blackmamba.training.metrics import metric_of

    by_source = metric_of("validation/loss/*")
    validation = next(filter(None, (by_source.of(record) for record in reversed(records))), {})
    losses = ", ".join(f"{name} {loss:.2f}" for name, loss in validation.items())
    return f"{last['consumed_tokens']:,} tokens, loss {last['loss']:.2f}; validation loss: {losses or 'too early'}"


class Pace:
    """The speed of the first steps, compared once with what was measured before training."""

    def __init__(self, q: Quickstart) -> None:
        self.q = q
        self.steps = 0
        """Number of steps that fit, if that differs from the plan; 0 until then."""
        self._checked = q.minutes < CHECKED_FROM or q.pace.is_file()
        self._next_look = 0.0

    def is_wrong(self) -> bool:
        """Return True once the first steps show that the planned number takes too long or too short a time."""
        if self._checked or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + 1
        planned = self.q.composed().steps
        seconds = [record["speed/step_seconds"] for record in metrics_so_far(self.q.run.metrics)]
        if len(seconds) < max(SPEED_STEPS, REPLAN_AFTER * planned):
            return False
        self._checked = True
        fit = len(seconds) + max(0, round((self.q.seconds_of_steps - sum(seconds)) / statistics.fmean(seconds)))
        if not 1 / CLOSE <= fit / planned <= CLOSE:
            self.steps = fit
        else:
            atomic.write_json(self.q.pace, {"planned": planned, "steps": planned})
        return bool(self.steps)

    def correct(self) -> str:
        """Change the number of steps to what fits; return what to tell the user."""
        planned, settings = self.q.composed(), yaml.safe_load(self.q.config.read_text(encoding="utf-8"))
        settings["training"]["tokens"] = self.steps * planned.tokens_per_step
        settings["resume"] = {"allow": ["training.tokens"]}
        atomic.write_text(self.q.config, yaml.safe_dump(settings, sort_keys=False))
        atomic.write_json(self.q.pace, {"planned": planned.steps, "steps": self.steps})
        how = "slower" if self.steps < planned.steps else "faster"
        return (
            f"steps are {how} than measured: {self.steps:,} instead of {planned.steps:,}"
            f" fit into {self.q.duration}; training resumes"
        )


def export(q: Quickstart) -> str:
    from megatron_blackmamba.interchange import convert, witness
    from megatron_blackmamba.interchange.open import open_model

    record = q.folder / "parity.json"
    if not record.is_file():
        model = open_model(q.run.root)  # an export without a record is one that transformers did not load
        compared = witness.check(model, q.export) if q.export.is_dir() else convert.to_hf(model, q.export)
        atomic.write_text(record, json.dumps(str(compared)))
    return json.loads(record.read_bytes())


def sample(q: Quickstart) -> str:
    record = q.folder / "samples.json"
    if not record.is_file():
        from megatron_blackmamba.inference import Sampling, load

        model = load(q.export)
        sampling = Sampling(temperature=0.7, top_p=0.9, seed=1)
        texts = {p: model.generate(p, max_new_tokens=90, sampling=sampling) for p in PROMPTS}
        atomic.write_json(record, texts)
    texts = json.loads(record.read_bytes())
    return "What it was given⟩ and what it wrote:\n\n" + "\n\n".join(
        f"{prompt}⟩{text}" for prompt, text in texts.items()
    )


def report(q: Quickstart) -> str:
    from megatron_blackmamba.report import write_report

    path = write_report(q.run.root, samples=json.loads((q.folder / "samples.json").read_bytes()))
    return f"open {path} in a browser"


STAGES = (
    Stage("Gather text from this machine", lambda q: f"head -c 300 {q.corpus}/*/train.jsonl", collect),
    Stage(
        "Train a tokenizer, make token shards",
        lambda q: (
            f"blackmamba data tokenize {q.corpus}/code/train.jsonl {q.tokens}/code/train"
            f" --tokenizer {q.tokens}/tokenizer.json  # and so the other sources"
        ),
        tokenize,
    ),
    Stage("Mix the sources by weight", lambda q: f"blackmamba data mixture {q.mixture}", mix),
    Stage("Measure this machine", lambda q: f"blackmamba plan {q.config}", measure),
    Stage("Train", lambda q: f"blackmamba train {q.config} --nproc {q.processes}", train),
    Stage("Export to Hugging Face", lambda q: f"blackmamba export hf {q.run.root} {q.export}", export),
    Stage(
        "Write",
        lambda q: f"blackmamba generate {q.export} --prompt '{PROMPTS[0]}'",
        sample,
    ),
    Stage("Report", lambda q: f"blackmamba report {q.run.root}", report),
)


def _train(
    run: RunConfig,
    arguments: list[str],
    processes: int,
    silent: bool = False,
    asks_to_stop: Callable[[], bool] = bool,
) -> None:
    from megatron_blackmamba.training.launcher import INTERRUPTED, STOPPED_ON_REQUEST, launch_training

    with _muted() if silent else nullcontext():
        code = launch_training(run, arguments, processes, asks_to_stop=asks_to_stop)
    if code == STOPPED_ON_REQUEST:
        raise KeyboardInterrupt
    if code == INTERRUPTED:
        interrupts.say()
        raise SystemExit(code)
    if code:
        raise QuickstartError(f"training ended with code {code}; its log is {run.folder}/{run.name}/log.txt")


class _muted:
    """Discard the output of this process and its children."""

    def __enter__(self) -> None:
        self.kept, self.nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(self.nowhere, 1)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.kept, 1)
        os.close(self.kept)
        os.close(self.nowhere)


def _shipped(name: str) -> Path:
    from megatron_blackmamba.config import find

    return find(name).resolve()


def _processes(q: Quickstart) -> str:
    return "one process" if q.processes == 1 else f"{q.processes} processes that share the experts"
