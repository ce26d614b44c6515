"""Check conversions with another tool: another process loads a folder of transformers with the installed version.

The folder is an export, or the source of an import. That process compares nothing. It returns logits, experts and, of
an export, eight greedy tokens a prompt, written with its cache. Our megatron-core modules then read the same tokens:
all logits must agree, and each greedy token must be our best.

Shapes: B batch, S sequence, N written tokens, V vocabulary, K experts of a token.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_blackmamba.formats import leftovers
from megatron_blackmamba.formats.atomic import write_text
from megatron_blackmamba.interchange import hf, native, parity, through_megatron
from megatron_blackmamba.interchange.canonical import Canonical, shapes, tokenizer_of
from megatron_blackmamba.interchange.observation import Comparison, Observation, Router, compare
from megatron_blackmamba.layers import layers_of

Check = Literal["full", "short", "none"]
"""How much transformers loads: the whole model, its first layers of each kind, or nothing."""
MARK = "CHECK_FAILED.txt"
"""In the folder of an export that transformers could not load, or that answered otherwise."""
REFRESH = "Give the folder the installed package's code: blackmamba export refresh"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "1",  # no __pycache__ in the export
}


class WitnessError(parity.ParityError):
    """The installed transformers does not load a folder, or its answers are others than ours."""


class NoWitnessError(WitnessError):
    """The installed transformers cannot load a folder, whatever is in it; the message says why."""


@dataclass(frozen=True)
class Answer:
    """The answer of transformers."""

    version: str
    tokens_BS: Tensor
    """The prompts, and the tokens written behind each."""
    observation: Observation
    steps_BNV: Tensor | None
    """The logits from which each of the N tokens was chosen, computed with the cache; None: nothing was written."""
    text: list[int] | None
    """Token ids of the probe text, if the folder has a tokenizer."""


def require_memory(model: Canonical, check: Check) -> None:
    """Refuse a check of a whole model that does not fit into the free memory."""
    needed, free = 4 * model.parameters * 1.1, psutil.virtual_memory().available
    if check == "full" and needed > free:
        raise WitnessError(
            f"{model.source}: checking the whole export takes {needed / 1e9:.3g} GB of memory, and "
            f"{free / 1e9:.3g} GB are free. Check its first layers alone: --check short"
        )


def check(model: Canonical, export: Path, how: Check = "full") -> Comparison:
    """Compare a model with its export, loaded by the installed transformers; mark an export that fails."""
    mark = export / MARK
    try:
        comparison = compared(model, export, how, export)
    except WitnessError as error:
        write_text(mark, f"{error}\n\n{getattr(error, 'traceback', '')}")
        advice = f" {REFRESH} {export}" if hf.code_files(export) else ""
        raise WitnessError(f"{export}: {error}. The folder stays, marked by {MARK}.{advice}") from None
    mark.unlink(missing_ok=True)
    return comparison


def compared(model: Canonical, folder: Path, how: Check, out: Path) -> Comparison:
    """Compare a model with a folder, loaded by the installed transformers under the name of `out`."""
    with leftovers.scratch("blackmamba-check") as temporary:
        loaded = temporary / "export" / os.path.basename(os.path.abspath(out))
        loaded.parent.mkdir()
        if how == "short":
            form: Any = native if native.is_native(folder) else hf
            model = first_layers(model, form)
            form.write(model, loaded)
            for file in (*hf.code_files(folder), *folder.glob("tokenizer*.json")):
                shutil.copyfile(file, loaded / file.name)
        else:
            loaded.symlink_to(folder.resolve())
        try:
            comparison = _compared(model, ask(loaded, model, temporary))
            if not comparison.agrees:
                raise WitnessError(f"its weights are those of {model.source}, its outputs are not: {comparison}")
        except WitnessError as error:
            error.args = (str(error).replace(str(loaded), str(out)),)
            raise
    return comparison


def check_import(model: Canonical, source: Path) -> Comparison:
    """Compare a model with the folder that it was read from, run by transformers' own class, not by code in there."""
    try:
        require_memory(model, "full")
    except WitnessError:
        raise NoWitnessError("the whole model does not fit into the free memory") from None
    with leftovers.scratch("blackmamba-check") as temporary:
        try:
            comparison = _compared(replace(model, tokenizer=None), ask(source, model, temporary, own=True))
        except NoWitnessError:
            raise
        except WitnessError as error:
            raise WitnessError(f"{source}: {error}. --no-verify imports it without this comparison") from None
    if not comparison.agrees:
        raise WitnessError(f"{source}: this package computes something else than its own class: {comparison}")
    return comparison


def ask(folder: Path, model: Canonical, scratch: Path, own: bool = False) -> Answer:
    """Return the answer of the installed transformers to the probe tokens of a model.

    own: It only reads them, by a class of its own.
    """
    question, destination = scratch / "question.safetensors", scratch / "answer.safetensors"
    tokenizer = tokenizer_of(model)
    text = parity.TEXT.encode() if tokenizer is not None and not own else b""
    save_file({"prompts": parity.probe_tokens(model), "text": torch.tensor(list(text), dtype=torch.uint8)}, question)
    module = "megatron_blackmamba.interchange.transformers_process"
    done = subprocess.run(
        [sys.executable, "-m", module, os.path.abspath(folder), str(question), str(destination), *(["own"] * own)],
        env=os.environ | ENVIRONMENT | {"HF_MODULES_CACHE": str(scratch / "modules")},
        capture_output=True,
        text=True,
        errors="replace",
    )
    told = _last_line(done.stdout)
    version = told.get("version", "(not installed)")
    if own and "version" not in told:
        raise NoWitnessError("transformers is not installed")
    if "no_class" in told:
        raise NoWitnessError(f"transformers {version} has no class for {told['no_class']}")
    if done.returncode or "error" in told:
        reason = told.get("error") or f"its process ended with code {done.returncode}: {_last_words(done.stderr)}"
        error = WitnessError(f"transformers {version} does not run {'it' if own else 'this export'}: {reason}")
        error.traceback = done.stderr  # type: ignore[attr-defined]
        raise error
    found = load_file(destination)
    choices = [found[name] for name in sorted((n for n in found if n.startswith("choices.")), key=_number)]
    routed = [i for i, kind in enumerate(layers_of(model.config.pattern)) if kind.routed]
    if native.is_native(folder):
        routed = []  # those do not tell their experts
    routers = [_router(layer, choice) for layer, choice in zip(routed, choices, strict=True)]
    written = found["text"].tolist() if "text" in found else None
    return Answer(version, found["tokens"], Observation(found["logits"], routers), found.get("steps"), written)


def first_layers(model: Canonical, form: Any = hf) -> Canonical:
    """Return the shortest beginning of a model, in layers of the form, that has a layer of each of its kinds."""
    pattern = model.config.pattern
    length = max(pattern.index(letter) for letter in set(pattern)) + 1
    if form is native:
        length += -length % native.architecture_of(model.config, model.source).per_layer
    elif model.config.arrangement == "parallel":
        length += length % 2
    config = model.config.model_copy(update={"pattern": pattern[:length]})
    return replace(model, config=config, entries={name: model.entries[name] for name in shapes(config)})


def _compared(model: Canonical, answer: Answer) -> Comparison:
    tokenizer = tokenizer_of(model)
    if tokenizer is not None and answer.text != tokenizer.encode(parity.TEXT):
        raise WitnessError(f"transformers {answer.version} tokenizes a text otherwise than {model.tokenizer}")
    expected = through_megatron.observe(model, answer.tokens_BS)
    comparison = compare(expected, answer.observation, answer.steps_BNV)
    return replace(comparison, reader=f"transformers {answer.version}")


def _router(layer: int, choice: Tensor) -> Router:
    choice_BSK = choice if choice.dim() == 3 else choice[..., None]
    return Router(layer, choice_BSK.sort(dim=-1).values, torch.full(choice_BSK.shape[:2], torch.inf))


def _last_line(output: str) -> dict[str, str]:
    lines = output.strip().splitlines()
    try:
        told = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _last_words(stderr: str) -> str:
    return (stderr.strip().splitlines() or ["no message"])[-1]


def _number(name: str) -> int:
    return int(name.rsplit(".", 1)[1])
