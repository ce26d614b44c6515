"""Config changes on resume: each key's rule (settings/rules.py) allows a change, refuses it or asks for its name.

Keys that may change freely decide how numbers are computed, watched and saved, not which numbers. data.mixture is a
path: its content is compared on its own. start.from is read only when a run starts. A router may balance other tokens
in another micro-batch or layout, which the log then says.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_blackmamba import layers, routers
from megatron_blackmamba.checkpoint.manifest import CheckpointError, step_in_name
from megatron_blackmamba.checkpoint.reading import find_checkpoint, read_state, saved_config
from megatron_blackmamba.config import ModelConfig, RunConfig, extensions
from megatron_blackmamba.config.checks import problem_of_model
from megatron_blackmamba.config.load import section_of
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange.canonical import shapes
from megatron_blackmamba.interchange.hf import function_of
from megatron_blackmamba.settings import Section
from megatron_blackmamba.settings.rules import SAME, Rule

WHOLE = "optimizer.groups."
"""Fixed too with optimizer.distributed=false: megatron-core's plain optimizer saves its groups as a list."""


class ResumeError(ValueError):
    """A run that must not go on as asked; the message says what changed and what to do."""


def refuse_changes(saved: Mapping[str, Any], config: RunConfig, step: int) -> list[str]:
    """Raise ResumeError unless `config` may continue the run that was saved with config `saved`.

    Returns one line for each change that was allowed by name, that changes the routing, or that `data trace` needs.
    """
    changes = list(differences(saved, config.model_dump(mode="json", by_alias=True)))
    whole = not config.optimizer.distributed
    fixed = [
        change for change in changes if rule_of(change[0]).resume == "fixed" or (whole and change[0].startswith(WHOLE))
    ]
    if fixed:
        raise ResumeError(
            f"the checkpoint of step {step} was made with\n{_listed(fixed)}\n"
            "resume.allow cannot permit this. Restore the old value, or start another run (name=...); with"
            " start.from=CHECKPOINT it starts from these weights if their shapes fit."
        )
    named = [change for change in changes if rule_of(change[0]).resume == "by name"]
    refused = [change for change in named if not under(change[0], _prefixes(config.resume.allow))]
    if refused:
        keys = ", ".join(change[0] for change in refused)
        raise ResumeError(
            f"the checkpoint of step {step} was made with\n{_listed(refused)}\n{_in_steps(saved, config, keys)}"
            "To continue as before, restore the old value, on the command line or in the run's file."
            f" To continue with the new value, allow it: 'resume.allow=[{keys}]'."
        )
    told = [(change, "") for change in named]
    for change in changes:
        if change[0] == "training.micro_batch" or change[0].startswith("parallel."):  # what a rank read: trace/ranks.py
            told.append((change, _changes_routing(change[0], config.model)))
    return [f"{key}: {shown(new)} from step {step + 1} on, {shown(old)} before{why}" for (key, old, new), why in told]


def edited_modules(saved: Mapping[str, str], here: Mapping[str, str], step: int) -> list[str]:
    """Return a line for each module of BLACKMAMBA_IMPORT whose code is another than the checkpoint was trained with."""
    return [f"{name} has changed since step {step}" for name, code in here.items() if saved.get(name, code) != code]


def _in_steps(saved: Mapping[str, Any], config: RunConfig, keys: str) -> str:
    """Return a line with the lengths in steps, as they may have been typed, if the length changed."""
    if "training.tokens" not in keys:
        return ""
    batch = saved["training"]["global_batch"] * saved["data"]["sequence_length"]
    tokens = saved["training"]["tokens"]
    if not isinstance(tokens, int):
        return ""
    before = -(-tokens // batch)
    return f"These are training.steps={before}, and now training.steps={config.steps}.\n"


def _changes_routing(key: str, model: ModelConfig) -> str:
    """Return why a key that may change freely sends tokens to other experts; nothing if it does not."""
    if not layers.routes(model.pattern):
        return ""
    router = routers.kind_of(model.router.kind)
    if key == "training.micro_batch" and router.balances_micro_batches and model.router.scope != "sequence":
        return "; the router balances each micro-batch, so the routing changes slightly"
    layouts = router.layouts(model)
    if key.startswith("parallel.") and isinstance(layouts, routers.Cannot):
        return f"; {layouts.reason}"
    return ""


def refuse_continuation(config: RunConfig) -> None:
    """Raise ResumeError if this config may not continue the run's newest checkpoint, before a job is queued for it."""
    run = RunFolder.of(config)
    if not run.latest.is_file():
        return
    try:
        folder = find_checkpoint(run.root)
        saved = saved_config(folder, read_state(folder))
    except CheckpointError:  # training may find an older one, or says what is wrong
        return
    refuse_changes(saved.model_dump(mode="json", by_alias=True), config, step_in_name(folder) or 0)


def refuse_start(config: RunConfig, *, resumes: bool = True) -> None:
    """Raise ResumeError if the weights of start.from do not fit the model of a new run, or compute something else.

    resumes: Whether a run with a checkpoint continues there, and so does not read start.from.
    """
    source = config.start.from_
    if source is None or (resumes and RunFolder.of(config).latest.is_file()):
        return
    folder = find_checkpoint(source)
    saved = saved_config(folder, read_state(folder)).model
    changes, fits = other_function(saved, config.model)
    if fits:
        changes = [change for change in changes if not under(change[0], _prefixes(config.resume.allow))]
    if not changes:
        return
    theirs = " ".join(f"{key}={old}" for key, old, _ in changes)
    ours = " ".join(f"{key}={new}" for key, _, new in changes)
    keys = ", ".join(key for key, _, _ in changes)
    other = f"allow other outputs of these weights: 'resume.allow=[{keys}]'" if fits else "leave start.from out"
    raise ResumeError(
        f"start.from={source}: its weights have {theirs}, and this run has {ours}. Use {theirs}, or {other}."
    )


def other_function(saved: ModelConfig, model: ModelConfig) -> tuple[list[tuple[str, Any, Any]], bool]:
    """Return why `model` computes something else with weights of `saved`, as (key, old, new), and whether they fit."""
    changes = list(differences(saved.model_dump(mode="json"), model.model_dump(mode="json"), "model."))
    if _weights(saved) != _weights(model):
        return changes, False
    if _computes_the_same(saved, model):  # several keys may say together what others say there
        return [], True
    return [change for change in changes if _changes_function(model, *change[:2])], True


def _weights(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all that is learned; what routers keep beside may be new."""
    return {name: shape for name, shape in shapes(model).items() if not name.endswith(routers.states())}


def refuse_start_tokenizer(config: RunConfig, current: Mapping[str, Any]) -> None:
    """Raise ResumeError if the weights of start.from know other token ids than the data (as DataPlan.record)."""
    source, now = config.start.from_, current.get("tokenizer")
    if source is None or now is None or "data.mixture" in config.resume.allow:
        return
    folder = find_checkpoint(source)
    own = folder / "tokenizer.json"
    before = (read_state(folder).get("data") or {}).get("tokenizer")
    if not before and own.is_file():  # an imported model has no record of its data
        before = {"name": own.name, "sha256": hashlib.sha256(own.read_bytes()).hexdigest()}
    if before and before["sha256"] != now["sha256"]:
        file = next((path for path in (Path(source) / own.name, own) if path.is_file()), "TOKENIZER")
        raise ResumeError(
            f"start.from={source}: its weights are of the tokenizer {_named(before)}, and this data is of"
            f" {_named(now)}. Tokenize the text with the first one (blackmamba data tokenize TEXT tokens/NAME"
            f" --tokenizer {file}), and name these shards in data.mixture. To train on token ids that mean something"
            " else to these weights, allow it: 'resume.allow=[data.mixture]'."
        )


def _changes_function(model: ModelConfig, key: str, old: Any) -> bool:
    """Return whether the same weights compute something else with the old value of a key."""
    content = model.model_dump()
    *sections, last = key.removeprefix("model.").split(".")
    section = content
    for name in sections:
        section = section.setdefault(name, {})  # the model may lack a section of extensions
    section[last] = old
    try:
        return not _computes_the_same(ModelConfig.model_validate(content), model)
    except ValidationError:  # the old value needs others that changed too
        return True


def _computes_the_same(saved: ModelConfig, model: ModelConfig) -> bool:
    return problem_of_model(saved) is None and function_of(saved) == function_of(model)


def refuse_tokenizer(saved: Mapping[str, Any], current: Mapping[str, Any], step: int) -> None:
    """Raise ResumeError if the data is now of another tokenizer than the checkpoint's (both as DataPlan.record)."""
    before, now = ((record.get("tokenizer") or {}) for record in (saved, current))
    if before.get("sha256") != now.get("sha256"):
        raise ResumeError(
            f"the checkpoint of step {step} was made with data of the tokenizer {_named(before)}, and this data is of"
            f" {_named(now)}: a model cannot change its tokenizer. Name data of the first one in data.mixture."
        )


@cache
def rules(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, Rule | None]:
    """Return the rule of every key of a run."""
    found: dict[str, Rule | None] = {}
    for name, field in section.model_fields.items():
        key, inner = f"{prefix}{field.alias or name}", section_of(field.annotation)
        if inner is not None:
            found |= rules(inner, f"{key}.")
        else:
            found[key] = next((each for each in field.metadata if isinstance(each, Rule)), section.rule)
    return found


def rule_of(key: str) -> Rule:
    """Return the rule of a key, or of the section that holds it; a key that no run has decides nothing."""
    found = dict(rules())
    for name, section in extensions.sections():
        found |= rules(section, f"{name}.")
    while key and not found.get(key):
        key = key.rpartition(".")[0]
    return found.get(key) or SAME


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield key, old and new value of what differs between two configs."""
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", before, after


def under(key: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a key is one of these, or lies in a section that is: `optimizer.` names a whole section."""
    return any(key.startswith(prefix) if prefix.endswith(".") else key == prefix for prefix in prefixes)


def _prefixes(names: list[str]) -> tuple[str, ...]:
    """Return prefixes for the allowed names: `optimizer` allows its section, `optimizer.learning_rate` one key."""
    return (*names, *(f"{name}." for name in names))


def _listed(changes: list[tuple[str, Any, Any]]) -> str:
    return ";\n".join(f"  {key}={shown(old)}, and now it is {shown(new)}" for key, old, new in changes) + "."


def shown(value: Any) -> str:
    """Return the value of a key for people."""
    return "nothing" if value is None else str(value)


def _named(tokenizer: Mapping[str, Any]) -> str:
    return f"{tokenizer['name']} (sha256 {tokenizer['sha256'][:12]}…)" if tokenizer else "none"
