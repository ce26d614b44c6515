"""The Hugging Face export of a model in training: every rank writes tensors that it holds, to weight files of its own.

Nothing is gathered across pipeline stages, replicas or experts. Replicas share the tensors. Only a tensor that tensor
parallelism splits is put together, one at a time, inside its tensor-parallel group: safetensors files hold whole
tensors.

The folder is hidden until every rank has written its files. If one fails, all raise the same SaveError and the hidden
folder is removed.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.checkpoint import sharded
from megatron_blackmamba.checkpoint.agreement import SaveError, each, gathered, together
from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.interchange import hf, safetensors_io
from megatron_blackmamba.interchange.canonical import (
    Canonical,
    Entry,
    InterchangeError,
    finite,
    shapes,
    without_extra_depth,
)
from megatron_blackmamba.layers import stacks_of
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.model.initialise import shards
from megatron_blackmamba.runtime.world import World

REPLACED = ".old"
Offset = tuple[int, ...]
Piece = tuple[Offset, tuple[int, ...]]
"""Where a piece begins in the whole parameter, and its shape."""


@dataclass
class Held:
    """The pieces of one parameter that this rank holds."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    expert: bool
    pieces: list[tuple[Offset, Tensor]]

    @property
    def is_whole(self) -> bool:
        return sum(piece.numel() for _, piece in self.pieces) == torch.Size(self.shape).numel()


def export(
    model: LanguageModel, world: World, out: Path, moved: Callable[[], None] = lambda: None, **about: Any
) -> None:
    """Write the model to `out`, replacing an export of the same name. Every rank calls this; all fail together.

    moved: Called after each tensor and each file.
    about: The other fields of the Canonical, which rank 0 writes: source, tokenizer, eod_id, sequence_length and past.
    """
    described = without_extra_depth(model.config.described)
    mine = _tensors_to_write(model, world, moved)
    claims = gathered({name: tensor.dtype for name, tensor in mine.items()})
    whole = _announced(described, claims, mine, about)
    parts = [(rank, part) for rank, names in enumerate(_shares(claims)) for part in _parts(whole, names)]
    weights = hf.weight_files([part for _, part in parts])
    temporary = out.with_name(f".{out.name}.tmp")

    def prepare() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic.bring_back(out.parent, REPLACED)
        for left_over in out.parent.glob(".step_*"):
            if re.fullmatch(r"\.step_\d+\.(tmp|old)", left_over.name):  # this run's, not those of an `export hf`
                shutil.rmtree(left_over)
        free = shutil.disk_usage(out.parent).free
        if free < whole.bytes:
            needed = f"an export takes {whole.bytes / 1e9:.3g} GB"
            raise InterchangeError(f"{out.parent}: {free / 1e9:.3g} GB free, {needed}")
        temporary.mkdir()

    def write() -> None:
        for (rank, _), (name, entries) in zip(parts, weights.items(), strict=True):
            if rank == world.rank:
                safetensors_io.write(temporary / name, entries)
                moved()

    def publish() -> None:
        hf.write_index(temporary, weights, whole.bytes)
        hf.write_rest(whole, temporary)
        hf.read(temporary)  # every file is there, complete, and has the tensors that the index names
        atomic.sync_folder(temporary)
        # There is one of the same step if the run has gone back to it.
        with atomic.replaced(out, out.with_name(f".{out.name}{REPLACED}")):
            os.rename(temporary, out)
            atomic.sync_folder(out.parent)

    try:
        together(world, prepare, "prepare")
        each(world, write, "write")
        together(world, publish, "publish")
    except SaveError:
        if world.is_main:  # after every rank has ended its part
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _tensors_to_write(model: LanguageModel, world: World, moved: Callable[[], None]) -> dict[str, Tensor]:
    """Return the parameters that this rank should write, whole and in host memory."""
    groups, held, whole = world.groups, _held(model), shapes(without_extra_depth(model.config.described))
    layouts = _layouts(held, groups.tp, expert=False) | _layouts(held, groups.expt_tp, expert=True)
    mine: dict[str, Tensor] = {}
    for number, name in enumerate(whole):
        if name not in held:
            continue
        parameter = held[name]
        group, replicas = (groups.expt_tp, groups.expt_dp) if parameter.expert else (groups.tp, groups.dp_cp)
        if number % replicas.size() != replicas.rank():
            continue  # another replica writes it
        writes = number // replicas.size() % group.size() == group.rank()
        pieces = parameter.pieces if parameter.is_whole else _pieces_of_all(parameter, layouts[name], group)
        if writes:
            mine[name] = _joined(parameter.shape, pieces).reshape(whole[name]).to("cpu")
        moved()
    return mine


def _held(model: LanguageModel) -> dict[str, Held]:
    """Return what this rank holds of each parameter, by canonical name."""
    described = model.config.described
    held: dict[str, Held] = {}
    stacks, whole = stacks_of(described), shapes(described)
    for shard in shards(sharded.weights(model)):
        key, offset, data = shard.key, tuple(shard.global_offset), shard.data.detach()
        if key not in stacks:
            held.setdefault(key, Held(whole[key], False, [])).pieces.append((offset, data))
            continue
        for local, number in enumerate(range(offset[0], offset[0] + data.shape[0])):
            part = stacks[key].parts[number]
            own = held.setdefault(part, Held(tuple(stacks[key].shape[1:]), True, []))
            own.pieces.append((offset[1:], data[local]))
    return held


def _layouts(held: Mapping[str, Held], group: dist.ProcessGroup, expert: bool) -> dict[str, list[list[Piece]]]:
    """Return, for each split parameter, the offsets and shapes of the pieces of every rank of a group."""
    mine = {
        name: [(offset, tuple(piece.shape)) for offset, piece in parameter.pieces]
        for name, parameter in held.items()
        if parameter.expert == expert and not parameter.is_whole
    }
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return {name: [each[name] for each in everyone] for name in mine}


def _pieces_of_all(parameter: Held, layout: list[list[Piece]], group: dist.ProcessGroup) -> list[tuple[Offset, Tensor]]:
    """Return the pieces of a parameter from every rank of a group; all take part."""
    here = torch.cat([piece.reshape(-1) for _, piece in parameter.pieces])
    everywhere = [torch.empty_like(here) for _ in range(group.size())]
    dist.all_gather([flat.view(torch.uint8) for flat in everywhere], here.view(torch.uint8), group=group)
    found = []
    for flat, pieces in zip(everywhere, layout, strict=True):
        values = flat.split([torch.Size(shape).numel() for _, shape in pieces])
        found += [(offset, part.view(shape)) for (offset, shape), part in zip(pieces, values, strict=True)]
    return found


def _joined(shape: tuple[int, ...], pieces: list[tuple[Offset, Tensor]]) -> Tensor:
    """Return the parameter that consists of these pieces."""
    if len(pieces) == 1:
        return pieces[0][1]
    whole = torch.empty(shape, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
    for offset, piece in pieces:
        whole[tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))] = piece
    if sum(piece.numel() for _, piece in pieces) != whole.numel():
        raise RuntimeError("the ranks' pieces of a parameter do not make a whole one, which is a bug")
    return whole


def _shares(claims: Sequence[Mapping[str, torch.dtype]]) -> list[set[str]]:
    """Return the parameters that each rank writes: of several that could (of a tied embedding), the first one."""
    taken: set[str] = set()
    shares = []
    for claim in claims:
        shares.append(claim.keys() - taken)
        taken |= claim.keys()
    return shares


def _parts(whole: Canonical, names: set[str]) -> list[dict[str, Entry]]:
    """Return the contents of the weight files of a rank that writes `names`."""
    entries = {name: entry for name, entry in whole.entries.items() if name in names}
    return hf.weight_parts(entries) if entries else []


def _announced(
    described: ModelConfig, claims: Sequence[Mapping[str, torch.dtype]], mine: Mapping[str, Tensor], about: Any
) -> Canonical:
    """Return the whole model, of which this rank can load what it writes; raise SaveError if a part is missing."""
    dtypes = {name: dtype for claim in claims for name, dtype in claim.items()}
    entries = {
        name: Entry(shape, dtypes[name], partial(mine.__getitem__, name))
        for name, shape in shapes(described).items()
        if name in dtypes
    }
    try:
        return finite(Canonical(described, entries, **about))
    except InterchangeError as error:  # the same on every rank
        raise SaveError(str(error)) from None
