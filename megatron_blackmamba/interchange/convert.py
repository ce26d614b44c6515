"""Whole conversions: read, write beside the target, compare, and only then give the target its name."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_blackmamba.formats.atomic import atomic_file
from megatron_blackmamba.interchange import hf, megatron, native, parallel, parity, witness, zyphra
from megatron_blackmamba.interchange.canonical import (
    Canonical,
    InterchangeError,
    as_fp32,
    cast,
    finite,
    main_depth,
    watched,
)
from megatron_blackmamba.interchange.folder import new_folder, take_over
from megatron_blackmamba.interchange.native import llama_cpp
from megatron_blackmamba.interchange.observation import Comparison

Watch = Callable[[int], None]


def ignore(_: int) -> None:
    """Ignore all progress."""


def to_hf(
    model: Canonical,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    check: witness.Check = "full",
    shard_bytes: int = hf.SHARD_BYTES,
    processes: int = 1,
    watch: Watch = ignore,
    as_native: bool = False,
    overwrite: bool = False,
) -> Comparison | None:
    """Write a Hugging Face folder to `out`; weights are rounded to `dtype`, if given, and otherwise copied exactly.

    as_native: Write a model that transformers itself has, without code.
    overwrite: Replace what an earlier conversion wrote to `out`, once the new folder has passed the check.
    check: How much the installed transformers then loads. A new folder that fails stays, and is marked.
    processes: Number of processes that write weights, each to its own files.
    """
    form: Any = native if as_native else hf
    model = native.held(model) if as_native else main_depth(model)
    if as_native:
        native.architecture_of(model.config, model.source)
    witness.require_memory(model, check)
    model = cast(model, dtype)
    more: dict[str, Any] = {}
    if processes > 1:
        shard_bytes = min(shard_bytes, -(-model.bytes // processes))
        more["write_files"] = partial(
            parallel.write_files,
            source=model.source,
            ema=model.ema,
            dtype=dtype,
            as_native=as_native,
            processes=processes,
            watch=watch,
        )
    with new_folder(out, overwrite) as folder:
        form.write(watched(finite(model), watch), folder, shard_bytes=shard_bytes, **more)
        if check != "none":
            parity.same_weights(model, named(form.read(folder), out))
            if overwrite and Path(out).exists():
                try:
                    return witness.compared(model, folder, check, Path(out))
                except witness.WitnessError as error:
                    raise witness.WitnessError(f"{out}: {error}. What was there stays") from None
    return None if check == "none" else witness.check(model, out, check)


def to_gguf(
    model: Canonical,
    out: Path,
    *,
    precision: llama_cpp.Precision = "bf16",
    watch: Watch = ignore,
) -> None:
    """Write the file that llama.cpp and Ollama load; refuse a model or a tokenizer that they do not run."""
    if Path(out).exists():
        raise InterchangeError(f"{out}: already there; name a file that does not exist")
    take_over(Path(os.path.abspath(out)))
    with atomic_file(out) as file:
        llama_cpp.write(watched(finite(main_depth(model)), watch), Path(file.name), precision, Path(out).stem)


def to_zyphra(
    model: Canonical,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    watch: Watch = ignore,
) -> Comparison | None:
    """Write the released files to `out`; refuse what the format cannot express, or warn (`zyphra.warning_about`)."""
    model = main_depth(cast(model, dtype))
    with new_folder(out) as folder:
        zyphra.write(watched(finite(model), watch), folder)
        return parity.check(model, named(zyphra.read(folder), out)) if verify else None


def to_checkpoint(
    model: Canonical,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    watch: Watch = ignore,
    original: Path | None = None,
    overwrite: bool = False,
) -> Comparison | None:
    """Write a checkpoint to `out`, for `start.from`; weights are rounded to `dtype`, if given.

    Otherwise they are copied exactly, and those in fp16 become fp32 without loss.

    original: The folder that the model was read from, for transformers to run if it has a class for it.
    overwrite: Replace what an earlier conversion wrote to `out`.
    """
    converted = cast(replace(model, entries=as_fp32(model.entries, torch.float16)), dtype)
    with new_folder(out, overwrite) as folder:
        megatron.write(watched(finite(converted), watch), folder)
        if not verify:
            return None
        back = named(megatron.read(folder), out)
        try:
            if original is None or not native.in_transformers(original):
                raise witness.NoWitnessError("transformers does not read these files by itself")
            parity.same_weights(back, converted)
            return witness.check_import(replace(model, config=back.config) if dtype else back, original)
        except witness.NoWitnessError as reason:
            comparison = parity.check(back, converted)
            return replace(comparison, reader=f"{comparison.reader}, since {reason}") if original else comparison


def named(model: Canonical, source: Path) -> Canonical:
    """Return the same model under the user's name for it, instead of its temporary path."""
    return replace(model, source=str(source))
