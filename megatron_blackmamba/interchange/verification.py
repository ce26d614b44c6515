"""Verify that an export still equals the model that it was made from."""

from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.interchange import hf, parity, witness
from megatron_blackmamba.interchange.canonical import (
    Canonical,
    InterchangeError,
    cast,
    finite,
    main_depth,
    tokenizer_of,
)
from megatron_blackmamba.interchange.hub import local_folder
from megatron_blackmamba.interchange.json_config import ends_in, read_json
from megatron_blackmamba.interchange.observation import Comparison
from megatron_blackmamba.interchange.open import open_model

CONFIG = "config.json"
OF_THE_PATTERN = ("num_layers", "mamba_moe_layers")
"""What function_of says of the layers, which model.pattern says shorter."""


@dataclass(frozen=True)
class Verification:
    """The result of a verification; `notes` lists differences that do not change the outputs for given tokens."""

    export: str
    source: str
    comparison: Comparison | None
    notes: list[str]


def verify(export: Path, against: Path | None = None, check: witness.Check = "full", ema: bool = False) -> Verification:
    """Compare an export with its source, or with itself read by our modules; refuse one that differs, by name.

    The installed transformers runs the code in the folder. Released files have no code: ours runs them.

    ema: The source is the averaged weights of `against`.
    """
    theirs = finite(open_model(export, verify=True))
    ours = theirs if against is None else finite(open_model(against, verify=True, ema=ema))
    folder = local_folder(export)
    if against is not None:
        _same_config(ours, theirs)
        ours = cast(ours if theirs.config.mtp.pattern else main_depth(ours), None, like=theirs)
        parity.same_weights(ours, theirs)
    if "model_type" not in read_json(folder / CONFIG):
        comparison = parity.check(ours, theirs)
    elif check == "none":
        comparison = None
    else:
        witness.require_memory(theirs, check)
        comparison = witness.check(theirs, folder, check)
    return Verification(str(export), ours.source, comparison, _notes(ours, theirs, folder))


def _same_config(ours: Canonical, theirs: Canonical) -> None:
    mine, its = ({"pattern": each.config.pattern} | hf.function_of(each.config) for each in (ours, theirs))
    fields = [name for name in mine | its if mine.get(name) != its.get(name)]
    if "pattern" in fields:
        fields = [name for name in fields if name not in OF_THE_PATTERN]
    if fields:
        told = "; ".join(f"model.{name} is {its.get(name)}, not {mine.get(name)}" for name in fields)
        raise InterchangeError(f"{theirs.source}: not the model of {ours.source}: {told}")


def _notes(ours: Canonical, theirs: Canonical, export: Path) -> list[str]:
    notes = []
    mine, its = ours.tokenizer, theirs.tokenizer
    if mine is not None and its is not None and mine.read_bytes() != its.read_bytes():
        notes.append(f"{its} differs from {mine}")
    if mine is not None and (export / CONFIG).is_file() and "model_type" in read_json(export / CONFIG):
        notes += _generation_notes(ours, theirs, export)
    return notes + _code_notes(ours, export)


def _code_notes(model: Canonical, export: Path) -> list[str]:
    """Return what differs from the code files of this version: transformers runs all that the folder has."""
    notes, files = [], hf.modeling_files(model.config) if hf.code_files(export) else {}
    for name, ours in files.items():
        file = export / name
        if not file.is_file():
            notes.append(f"{file} is missing: blackmamba export refresh {export}")
        elif file.read_bytes() != ours.encode():
            notes.append(f"{file} is not this version's: blackmamba export refresh {export}")
    others = sorted(path for path in export.rglob("*.py") if path.name not in files)
    return notes + [f"{path} is code of somebody else. Read it before you load the export" for path in others]


def _generation_notes(ours: Canonical, theirs: Canonical, export: Path) -> list[str]:
    """Return what makes transformers read, write or end texts otherwise than the source's tokenizer says."""
    tokenizer = tokenizer_of(ours)
    if tokenizer is None:
        return []
    if theirs.tokenizer is None:
        return [f"{export} has no tokenizer.json; {ours.source} has one"]
    notes = []
    for path in (export / CONFIG, export / "generation_config.json"):
        if path.is_file() and tokenizer.eod_id not in (ends := ends_in(path)):
            named = ", ".join(map(str, ends))
            notes.append(f"{path}: eos_token_id is {named}, but a document ends with {tokenizer.eod_id}")
    generation = export / "generation_config.json"
    written = {*hf.SPECIAL_IDS, "_from_model_config", "transformers_version"}
    more = sorted(read_json(generation).keys() - written) if generation.is_file() else []
    return [*notes, f"{generation}: sets {', '.join(more)} too, which change how texts are written"] if more else notes
