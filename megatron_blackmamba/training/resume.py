"""The rules for config changes on resume: FIXED keys may not change, BY_NAME keys only if allowed, FREE keys may.

Every config key is in one of the three groups; the table is in tests/training/test_resume.py.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_blackmamba.checkpoint.reading import find_checkpoint, read_state, saved_config
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange.canonical import shapes

FIXED = (
    *("model.", "data.kind", "data.sequence_length", "data.seed", "data.synthetic."),
    "data.mask_first_token",
    *("training.precision", "training.seed", "optimizer.distributed", "optimizer.kind"),
)
"""Another model, other data or other optimizer state: the checkpoint does not fit."""
BY_NAME = ("optimizer.", "training.tokens", "training.global_batch")
"""May change from here on, if resume.allow names them."""
FREE = (
    *(
        "name",
        "folder",
        "parallel.",
        "data.mixture",
        "data.workers",
        "data.verify_rate",
        "checkpoint.",
        "logging.",
        "kernels.",
        "start.",
        "resume.",
    ),
    *("training.micro_batch", "training.recompute"),
    *(
        "training.overlap",
        "training.bucket_size",
        "training.deterministic",
        "training.evaluate_every",
        "training.evaluate_batches",
        "training.validate_balanced",
    ),
    *("training.router_every", "training.stop_after_steps", "training.profile", "training.guard."),
)
"""May change at any time: they decide how numbers are computed, watched and saved, not which numbers.

data.mixture is a path: its content is compared on its own. start.from is read only when a run starts.
"""


class ResumeError(ValueError):
    """A run that must not go on as asked; the message says what changed and what to do."""


def refuse_changes(saved: Mapping[str, Any], config: RunConfig, step: int) -> list[str]:
    """Raise ResumeError unless `config` may continue the run that was saved with config `saved`.

    Returns one line for each change that was allowed by name.
    """
    changes = list(_differences(saved, config.model_dump(mode="json", by_alias=True)))
    fixed = [change for change in changes if _under(change[0], FIXED) and not _under(change[0], FREE)]
    if fixed:
        raise ResumeError(
            f"the checkpoint of step {step} was made with\n{_listed(fixed)}\n"
            "Restore the old value, or start another run (name=...) from these weights: start.from=CHECKPOINT."
        )
    named = [change for change in changes if _under(change[0], BY_NAME)]
    refused = [change for change in named if not _under(change[0], _prefixes(config.resume.allow))]
    if refused:
        keys = ", ".join(change[0] for change in refused)
        raise ResumeError(
            f"the checkpoint of step {step} was made with\n{_listed(refused)}\n"
            f"To continue with the new value, allow it: 'resume.allow=[{keys}]'."
        )
    return [f"{key}: {_shown(new)} from step {step + 1} on, {_shown(old)} before" for key, old, new in named]


def refuse_start(config: RunConfig) -> None:
    """Raise ResumeError if the weights of start.from do not fit the model of a new run."""
    source = config.start.from_
    if source is None or RunFolder(Path(config.folder) / config.name).latest.is_file():
        return  # a run that resumes does not read it
    folder = find_checkpoint(source)
    saved = saved_config(folder, read_state(folder)).model
    if shapes(saved) == shapes(config.model):
        return
    changes = list(_differences(saved.model_dump(mode="json"), config.model.model_dump(mode="json"), "model."))
    theirs = " ".join(f"{key}={old}" for key, old, _ in changes)
    ours = " ".join(f"{key}={new}" for key, _, new in changes)
    raise ResumeError(
        f"start.from={source}: its weights have {theirs}, and this run has {ours}."
        f" Use {theirs}, or leave start.from out."
    )


def refuse_tokenizer(saved: Mapping[str, Any], current: Mapping[str, Any], step: int) -> None:
    """Raise ResumeError if the data is now of another tokenizer than the checkpoint's (both as DataPlan.record)."""
    before, now = ((record.get("tokenizer") or {}) for record in (saved, current))
    if before.get("sha256") != now.get("sha256"):
        raise ResumeError(
            f"the checkpoint of step {step} was made with data of the tokenizer {_named(before)}, and this data is of"
            f" {_named(now)}: a model cannot change its tokenizer. Name data of the first one in data.mixture."
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", before, after


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key.startswith(prefix) if prefix.endswith(".") else key == prefix for prefix in prefixes)


def _prefixes(names: list[str]) -> tuple[str, ...]:
    """Return prefixes for the allowed names: `optimizer` allows its section, `optimizer.learning_rate` one key."""
    return (*names, *(f"{name}." for name in names))


def _listed(changes: list[tuple[str, Any, Any]]) -> str:
    return "\n".join(f"  {key}={_shown(old)}, and now it is {_shown(new)};" for key, old, new in changes)


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _named(tokenizer: Mapping[str, Any]) -> str:
    return f"{tokenizer['name']} (sha256 {tokenizer['sha256'][:12]}…)" if tokenizer else "none"
