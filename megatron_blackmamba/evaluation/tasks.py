"""lm-eval's own task definitions, with the data from local files."""

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.evaluation.answers import Numbered, checked, is_known, refuse_wrong_answers
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.evaluations import PAPER

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

LENGTH = ("length:loss", "length:passkey", "length:recall")
"""Tasks of this package, which ask whether a model uses the length."""
NAMED = {"paper": PAPER, "length": LENGTH}
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
SPLITS = ("", "_test", "_validation", "_val", "_dev")


@dataclass(frozen=True)
class LoadedTask:
    """A task of lm-eval and the identity of its data."""

    task: "ConfigurableTask"
    sha256: str
    file: Path | None

    @property
    def name(self) -> str:
        return self.task.task_name

    @property
    def version(self) -> str:
        return str(self.task.VERSION)


def names_of(wanted: str) -> list[str]:
    """Return the tasks in a comma-separated list; `paper` stands for the paper's eight, `length` for LENGTH."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if not names:
        raise EvaluationError("--tasks is empty: name tasks of lm-eval, or `paper`")
    return list(dict.fromkeys(task for name in names for task in NAMED.get(name, (name,))))


def load_tasks(names: Sequence[str], data: Path | None, download: bool) -> list[LoadedTask]:
    """Return tasks with the files of a folder as their data; download what it lacks into it only if asked to."""
    if not download:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    elif data is not None:
        data.mkdir(parents=True, exist_ok=True)
    quiet()
    definitions = {name: _definition(name) for name in names}
    files = find_files(names, data)
    missing = [name for name, file in files.items() if file is None]
    if missing and not download:
        where = "no --data DIR given" if data is None else f"{data} has no file"
        raise EvaluationError(
            f"{where} for {', '.join(missing)}. Put TASK.jsonl, TASK.jsonl.gz or TASK.parquet into --data DIR,"
            " or let lm-eval download with --download"
        )
    for name, definition in definitions.items():
        if data is not None:
            _refuse_examples(name, definition)
    if missing:
        _refuse_without_network()
    found = []
    for name, file in files.items():
        if file is None and data is not None:
            file = _kept(_downloaded(name).task, data / f"{name}.jsonl.gz")
        found.append(_downloaded(name) if file is None else _local(name, definitions[name], file))
    return found


def _refuse_examples(name: str, definition: dict[str, Any]) -> None:
    """Refuse a file for a task with examples: lm-eval would take them from the questions, with their answers."""
    if definition.get("num_fewshot") and not (definition.get("fewshot_config") or {}).get("samples"):
        raise EvaluationError(
            f"{name} shows {definition['num_fewshot']} answered examples of its training data before each question, and"
            " a file of --data has the questions alone. Use --download without --data for it"
        )


def find_files(names: Sequence[str], data: Path | None) -> dict[str, Path | None]:
    """Return the data file of each task; None for a task without one."""
    return {name: None if data is None else _find(name, data) for name in names}


def quiet() -> None:
    """Have lm-eval and datasets print no progress of their own."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    lm_eval_is_installed()
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)


def lm_eval_is_installed() -> None:
    """Refuse to go on without lm-eval."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise EvaluationError("lm-eval, which defines the tasks, is not installed: pip install -e '.[eval]'") from None


@cache
def _index() -> dict[str, Any]:
    """Return all tasks that lm-eval defines; reading them takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager().task_index


@cache
def _near(name: str) -> dict[str, Any]:
    """Return the tasks in the folders that the task's name begins with, in which it most likely is."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.tasks.__path__[0])
    folders = [root / name, root / name.partition("_")[0], root / "super_glue" / name]
    found = [str(folder) for folder in folders if folder.is_dir()]
    return TaskManager(include_path=list(dict.fromkeys(found)), include_defaults=False).task_index if found else {}


def _definition(name: str) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = _near(name).get(name) or _index().get(name)
    if entry is None:
        close = get_close_matches(name, [*_index(), *NAMED], 3)
        hint = f" Did you mean {', '.join(close)}?" if close else " `lm_eval ls tasks` lists them."
        raise EvaluationError(f"lm-eval has no task {name!r}.{hint}")
    config = load_yaml(entry.yaml_path, resolve_func=True) if entry.yaml_path else {}
    if "output_type" not in config:
        raise EvaluationError(f"{name} is a group or a program in lm-eval, not a single task: name its tasks")
    if config["output_type"] not in ("multiple_choice", "loglikelihood", "loglikelihood_rolling"):
        raise EvaluationError(
            f"{name} is a {config['output_type']} task; evaluate scores likelihoods. Run it with"
            " `python -m megatron_blackmamba.evaluation --model blackmamba`"
        )
    return config


def _find(name: str, folder: Path) -> Path | None:
    if not folder.is_dir():
        raise EvaluationError(
            f"--data {folder}: no such folder (from {Path.cwd()}). It holds one file per task; to let lm-eval download"
            " the tasks instead, use --download"
        )
    places = (folder / f"{name}{split}{suffix}" for split in SPLITS for suffix in SUFFIXES)
    return next((path for path in places if path.is_file()), None)


def _local(name: str, definition: dict[str, Any], file: Path) -> LoadedTask:
    import datasets
    import pyarrow
    from lm_eval.api.task import ConfigurableTask

    try:
        content = file.read_bytes()
    except OSError as error:
        raise EvaluationError(f"{file}: cannot be read: {error.strerror}") from None
    rows = _documents(file, content)
    try:
        documents = datasets.Dataset.from_list(checked(name, rows))
    except (TypeError, OverflowError, pyarrow.ArrowException) as error:
        raise does_not_fit(name, str(file), error) from error
    config = {key: value for key, value in definition.items() if key not in ("tag", "group")}
    split = {"training_split": None, "validation_split": None, "test_split": "data", "fewshot_split": None}
    process = config.get("process_docs")
    if process is not None and _is_processed(process, documents):
        config["process_docs"] = None
    config |= split | {"dataset_kwargs": None, "custom_dataset": lambda **_: {"data": documents}}
    try:
        task = ConfigurableTask(config=config)
        if not is_known(name):
            places = [where for where, _ in rows] if config.get("process_docs") is None else None
            refuse_wrong_answers(task, places, str(file))
    except EvaluationError:
        raise
    except Exception as error:  # templates and functions of the task raise anything
        raise does_not_fit(name, str(file), error) from error
    return LoadedTask(task, hashlib.sha256(content).hexdigest(), file)


def does_not_fit(task: str, data: str, error: Exception) -> EvaluationError:
    """Return the error for data that lacks what a task reads."""
    said = str(error).splitlines()[0] if str(error) else ""
    return EvaluationError(
        f"{data}: a document does not fit the task {task} ({type(error).__name__}: {said})."
        " Use the fields of the data set that lm-eval names for it"
    )


def _is_processed(process: Any, documents: Any) -> bool:
    """Return whether the task's preprocessing does not apply: the file has what it would make."""
    try:
        process(documents.select(range(1)))
    except KeyError:
        return True
    return False


def _documents(file: Path, content: bytes) -> list[Numbered]:
    try:
        if file.suffix == ".parquet":
            import io

            import pyarrow.parquet

            table = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
            rows = [(f"{file}, record {number}", row) for number, row in enumerate(table, 1)]
        else:
            text = gzip.decompress(content) if file.suffix == ".gz" else content
            lines = [(f"{file}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
            rows = [(where, _document(where, line)) for where, line in lines if line.strip()]
    except EvaluationError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's errors are ValueErrors
        raise EvaluationError(f"{file}: cannot be read: {error}. Copy it again") from None
    if not rows:
        raise EvaluationError(f"{file}: has no document")
    return rows


def _document(where: str, line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{where}: not JSON: {error}. Copy it again") from None
    if not isinstance(document, dict):
        raise EvaluationError(f"{where}: not a JSON object")
    return document


def _kept(task: Any, file: Path) -> Path:
    """Write the documents of a downloaded task to a file, as they are in its data set, and return the file."""
    documents = task.dataset[task.config.test_split or task.config.validation_split]
    lines = [json.dumps(document, ensure_ascii=False, default=str) for document in documents]
    atomic.write_bytes(file, gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    return file


def _refuse_without_network() -> None:
    """Ask the hub once, since a download without network tries again for more than a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:  # reads what earlier downloads left in the cache
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # depends on the client
        raise EvaluationError(
            f"--download: {constants.ENDPOINT} does not answer ({type(error).__name__}: {error}). Download on a machine"
            " with network and copy the folder of --data. HF_HUB_OFFLINE=1 reads what is in the cache of this one"
        ) from None


def _downloaded(name: str) -> LoadedTask:
    from lm_eval.tasks import TaskManager

    try:
        task = TaskManager().load([name])["tasks"][name]
        refuse_wrong_answers(task, None, name)
    except EvaluationError:
        raise
    except Exception as error:  # the network, the hub and datasets raise anything
        said = str(error).splitlines()[0] if str(error) else ""
        raise EvaluationError(f"{name}: its data could not be downloaded: {type(error).__name__}: {said}") from None
    digest = hashlib.sha256()
    for document in task.eval_docs:
        digest.update(json.dumps(document, sort_keys=True, default=str).encode())
    return LoadedTask(task, digest.hexdigest(), None)
