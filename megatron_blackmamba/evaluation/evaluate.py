"""Score a model on tasks; finished tasks are saved at once and not repeated."""

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.checkpoint.reading import find_checkpoint
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.journal import Journal
from megatron_blackmamba.evaluation.length import LossByPosition, length_tasks
from megatron_blackmamba.evaluation.model import ScoredModel
from megatron_blackmamba.evaluation.options import Options
from megatron_blackmamba.evaluation.retrieval import Retrieval
from megatron_blackmamba.evaluation.scoring import VERSION
from megatron_blackmamba.evaluation.tasks import LENGTH, LoadedTask, does_not_fit, load_tasks, quiet
from megatron_blackmamba.evaluation.texts import TextFile, text_files
from megatron_blackmamba.formats.evaluations import Encoding, Evaluation, ScoringKey, TaskResult, claim, read_evaluation
from megatron_blackmamba.formats.remote import file_sha256
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange.open import existing_folder, open_model

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.json")
Task = LoadedTask | TextFile | LossByPosition | Retrieval
Progress = Callable[[str, int, int], None]
"""Told the task, the tokens scored and the tokens in all."""


@dataclass(frozen=True)
class Target:
    """The model to score, and where its scores go."""

    path: Path
    step: int | None
    out: Path
    run: Path | None
    """The run that it is a checkpoint of."""


def find_target(path: Path, out: Path | None = None, ema: bool = False) -> Target:
    """Return what a path names: a run's newest checkpoint, a checkpoint, an export or released files."""
    scores = Path("evaluations", *(["ema"] if ema else []), "scores.json")
    if not path.is_dir() or (path / "config.json").is_file():
        return Target(path, None, out or path / scores, None)
    folder = find_checkpoint(path)
    step = manifest.read(folder)["step"]
    run = folder.absolute().parents[1]
    if RunFolder(run).config.is_file() and folder.parent.name == RunFolder(run).checkpoints.name:
        return Target(folder, step, out or RunFolder(run).evaluation(step, ema), run)
    return Target(folder, step, out or folder / scores, None)


def evaluate(path: Path, options: Options, progress: Progress = lambda task, done, all: None) -> Evaluation:
    """Return the scores of a model; those that an earlier call finished are read from its file."""
    existing_folder(path)  # before the tasks and their data
    target = find_target(path, options.out, options.ema)
    with ExitStack() as stack:
        tasks = _tasks(options)  # refused before the claim leaves a trace
        renew = stack.enter_context(claim(target.run, target.step)) if target.run and target.step else lambda: None
        model = _open(target.path, options, any(isinstance(task, LoadedTask) for task in tasks))
        stack.callback(model.close)
        identity = identify(target.path, options.tokenizer, options.ema)
        found = _read(target)
        keys = [_key(identity, task, model, options) for task in tasks]
        if any(found.find(key) is None for key in keys):
            open_model(target.path, options.tokenizer, verify=True, ema=options.ema)
        for task, key in zip(tasks, keys, strict=True):
            if found.find(key) is None:

                def told(done: int, total: int, name: str = task.name) -> None:
                    renew()
                    progress(name, done, total)

                scored = _score(task, key, model, options.limit, target.out, told)
                found = _read(target).with_result(scored)
                found.write(target.out)
    return replace(found, results=tuple(result for key in keys if (result := found.find(key))))


def _tasks(options: Options) -> list[Task]:
    """Return the files of text, what is measured by length, and the tasks of lm-eval."""
    texts = text_files(options.text, options.context)
    of_length = [name for name in options.tasks if name in LENGTH]
    names = [name for name in options.tasks if name not in LENGTH]
    found: list[Task] = [*([] if of_length else texts), *length_tasks(of_length, texts, options.length)]
    if names:
        quiet()
        found += load_tasks(names, options.data, options.download)
    if not found:
        raise EvaluationError("nothing to score: name tasks (--tasks) or files of text (--text)")
    return found


def _open(path: Path, options: Options, for_lm_eval: bool) -> ScoredModel:
    how: dict[str, Any] = {name: getattr(options, name) for name in ("dtype", "device", "tokenizer", "nproc", "ema")}
    how["batch_tokens"] = options.batch_tokens
    if not for_lm_eval:
        return ScoredModel(path, **how)
    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    return BlackMambaLM(path, encoding=options.encoding, **how)


def identify(path: Path, tokenizer: Path | None = None, ema: bool = False) -> str:
    """Return a hash of the weights, averaged or not, and of the tokenizer if one was named."""
    digest = hashlib.sha256(b"ema" if ema else b"")
    if (path / manifest.NAME).is_file():
        digest.update((path / manifest.NAME).read_bytes())
    else:
        for file in sorted(file for pattern in WEIGHT_FILES for file in path.glob(pattern)):
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    if tokenizer is not None:
        digest.update(file_sha256(tokenizer).encode())
    return digest.hexdigest()


def _read(target: Target) -> Evaluation:
    if target.out.is_file():
        return replace(read_evaluation(target.out), model=str(target.path), step=target.step)
    return Evaluation(str(target.path), target.step)


def _key(identity: str, task: Task, model: ScoredModel, options: Options) -> ScoringKey:
    of_lm_eval = isinstance(task, LoadedTask)
    longest = model.max_length if isinstance(task, LoadedTask) else task.longest(model)
    return ScoringKey(
        model=identity,
        task=task.name,
        task_version=task.version if of_lm_eval else f"{task.version}, context {longest}",
        data=task.sha256,
        scorer=f"{VERSION}, lm-eval {version('lm_eval')}" if of_lm_eval else str(VERSION),
        precision=str(model.dtype).removeprefix("torch."),
        encoding=options.encoding.value if of_lm_eval else Encoding.joint.value,
        limit=options.limit,
        max_length=longest,
    )


def _score(
    task: Task,
    key: ScoringKey,
    model: ScoredModel,
    limit: int | None,
    out: Path,
    progress: Callable[[int, int], None],
) -> TaskResult:
    begun = time.perf_counter()
    name = task.name.replace("/", "_")
    with Journal(out.with_name(f".{out.stem}.{name}.partial"), key, progress) as journal:
        model.watcher = journal
        measure = partial(_of_lm_eval, task) if isinstance(task, LoadedTask) else task.measure
        found = measure(key, model, limit)
    return replace(found, seconds=round(time.perf_counter() - begun, 3))


def _of_lm_eval(task: LoadedTask, key: ScoringKey, model: Any, limit: int | None) -> TaskResult:
    from lm_eval.evaluator import evaluate as run_task

    # lm-eval's own standard errors are bootstrapped in forked processes; ours follow from the answers
    try:
        found: Any = run_task(model, {"tasks": {task.name: task.task}}, limit=limit, bootstrap_iters=0)
    except EvaluationError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, TemplateError) as error:
        raise does_not_fit(task.name, str(task.file or task.name), error) from error
    metrics = {
        name.removesuffix(",none"): float(value)
        for name, value in found["results"][task.name].items()
        if name.endswith(",none") and "_stderr" not in name and isinstance(value, int | float)
    }
    samples = sorted(found["samples"][task.name], key=lambda sample: sample["doc_id"])
    answers = {
        name: [float(sample[name]) for sample in samples]
        for name in metrics
        if all(isinstance(sample.get(name), int | float) for sample in samples)
    }
    return TaskResult(
        key=key,
        metrics=metrics,
        errors={name: deviation for name in answers if (deviation := _error(metrics[name], answers[name])) is not None},
        questions=len(samples),
        answers=answers,
        seconds=0.0,
        data_file=None if task.file is None else str(task.file),
    )


def _error(value: float, answers: Sequence[float]) -> float | None:
    """Return the standard error of a mean, or of a perplexity: exp of minus the mean log-likelihood."""
    if len(answers) < 2:
        return None
    of_mean = statistics.stdev(answers) / math.sqrt(len(answers))
    mean = statistics.fmean(answers)
    if math.isclose(value, mean, rel_tol=1e-6, abs_tol=1e-9):
        return of_mean
    if math.isclose(value, math.exp(-mean), rel_tol=1e-6):
        return value * of_mean
    return None


__all__ = ["EvaluationError", "Options", "evaluate", "find_target", "identify"]
