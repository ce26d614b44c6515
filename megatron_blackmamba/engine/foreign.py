"""Private names of other packages that this project uses: who needs them, why, and what to do when one is gone.

`changes.py` has the names of megatron-core. A private name may vanish in any release. `tests/engine/test_foreign.py`
compares both lists with the code, so a new use needs an entry. `refuse_missing` looks for all of these names in the
installed packages before a run begins.
"""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_blackmamba.engine.changes import CHANGES
from megatron_blackmamba.version import installed


class ForeignNameError(ValueError):
    """An installed package lacks a private name without which training would fail later."""


@dataclass(frozen=True)
class Foreign:
    """Private names that one module of another package defines."""

    module: str
    """Where they are defined; a package for names that are compiled into it."""
    names: tuple[str, ...]
    used_by: str
    why: str
    instead: str
    """What takes their place when they are gone."""
    needed: bool = True
    """A run cannot do without; otherwise the code that uses them asks first."""

    @property
    def package(self) -> str:
        """Return the name of the installed distribution."""
        root = self.module.split(".")[0]
        return {"megatron": "megatron-core", "lm_eval": "lm-eval"}.get(root, root)


CHECKPOINT_NAMES = (
    "checkpoint/safety.py",
    "names that a checkpoint's metadata may contain; nothing calls them",
    "metadata with other names is refused: add those of the new release",
)
# fmt: off
FOREIGN = (
    Foreign("torch",
            ("_foreach_copy_", "_foreach_lerp_", "_foreach_mul_", "_foreach_norm", "_foreach_zero_", "_fused_adam_",
             "_fused_adamw_"),
            "engine/adam.py, engine/everywhere.py, engine/parts/accumulation.py, engine/parts/ema.py, "
            "model/language_model.py",
            "one call for many tensors: the update, the gradient norm and clipping",
            "torch.optim.AdamW(fused=True) and a loop over the tensors"),
    Foreign("torch", ("_scaled_mm", "_scaled_grouped_mm"),
            "ops/fp8/__init__.py", "products of 8-bit floats",
            "torch.nn.functional has public forms in newer releases; kernels.linear=fp8 is refused without",
            needed=False),
    Foreign("torch", ("_cdata",),
            "ops/causal_conv1d/halves.py", "whether two tensors share memory",
            "untyped_storage().data_ptr()"),
    Foreign("torch.cuda.memory", ("_cuda_endAllocateToPool", "_cuda_releasePool"),
            "training/step/graphs.py", "PyTorch until 2.13 keeps the memory of a CUDA graph whose capture fails",
            "nothing: newer releases free it; until then a failed capture costs its memory", needed=False),
    Foreign("torch._dynamo.eval_frame", ("_torchdynamo_orig_callable",),
            "engine/cpu.py", "the function below a compiled one, for the change `jit`",
            "leave out that change: megatron-core's small functions are compiled on CPUs", needed=False),
    Foreign("torch.distributed.distributed_c10d",
            ("_world", "_get_sequence_number_for_group", "_distributed_c10d", "_dump_fr_trace", "_dump_nccl_trace"),
            "runtime/hangs.py", "the report of a hang: which collective each rank is in",
            "the report names ranks and stacks only", needed=False),
    Foreign("torch.distributed.checkpoint.metadata", ("_MEM_FORMAT_ENCODING",), *CHECKPOINT_NAMES, needed=False),
    Foreign("torch.distributed.checkpoint.filesystem", ("_StorageInfo", "_StoragePrefix"),
            *CHECKPOINT_NAMES, needed=False),
    Foreign("torch.serialization", ("_get_layout",), *CHECKPOINT_NAMES, needed=False),
    Foreign("torch._utils", ("_rebuild_tensor_v2",), *CHECKPOINT_NAMES, needed=False),
    Foreign("torch._subclasses.fake_tensor", ("FakeTensorMode",),
            "interchange/torch_file.py", "list the tensors of a .bin file without reading them",
            "torch.load(mmap=True), which maps the file", needed=False),
    Foreign("torch.utils._pytree", ("tree_leaves",),
            "engine/parts/gathering.py", "the tensors among the arguments of a module",
            "optree, or a loop over tuples and dicts"),
    Foreign("lm_eval.tasks._yaml_loader", ("load_yaml",),
            "evaluation/tasks.py", "a task's definition without loading all of them, which takes seconds",
            "lm_eval.tasks.TaskManager", needed=False),
    Foreign("fasttext.FastText", ("_FastText",),
            "data_tools/recipes.py", "its load_model warns on the terminal",
            "fasttext.load_model", needed=False),
    Foreign("lm_eval.__main__", ("cli_evaluate",),
            "evaluation/__main__.py", "lm-eval's command line with our model registered",
            "the public console script lm-eval --include_path", needed=False),
    Foreign("transformers.modeling_utils",
            ("_is_hf_initialized", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
            "hf/modeling_blackmamba.py",
            "marks that from_pretrained reads: weights that are loaded, and modules that stay in fp32",
            "the check of every export finds wrong weights or precision", needed=False),
)
# fmt: on


def touched() -> Iterator[Foreign]:
    """Yield the names of megatron-core that the changes touch, and the private ones of other packages."""
    for change in CHANGES:
        for module, names in change.touches.items():
            where, needed = f"megatron.core.{module}", not change.optional
            yield Foreign(where, tuple(names.split()), change.file, change.why, change.instead, needed)
    yield from FOREIGN


def refuse_missing() -> None:
    """Refuse installed packages that lack a name which training needs, before anything is built."""
    for foreign in touched():
        if foreign.needed and (gone := missing(foreign)):
            raise ForeignNameError(
                f"{foreign.package} {installed(foreign.package)} has no {', '.join(gone)} ({foreign.module}), which"
                f" {foreign.used_by} needs: {foreign.why}. Install a tried version: `blackmamba doctor` names them"
            )


@cache
def missing(foreign: Foreign) -> tuple[str, ...]:
    """Return the names that an installed package lacks; a package that is not installed lacks none."""
    if installed(foreign.package) is None:
        return ()
    text = source_of(foreign.module)
    return tuple(
        name for name in foreign.names if not (re.search(rf"\b{name}\b", text) or is_compiled(foreign.module, name))
    )


def source_of(module: str) -> str:
    """Return the source of a module, without importing it: some import CUDA, or must be patched first."""
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    for place in spec.submodule_search_locations or () if spec else ():
        path = Path(place, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if parts and file.is_file():
                return file.read_text("utf-8", "replace")
    return ""


def is_compiled(module: str, name: str) -> bool:
    """Return whether torch, which training has imported anyway, has a name that no Python source defines."""
    if module.split(".")[0] != "torch":
        return False
    import torch

    c10d = getattr(torch._C, "_distributed_c10d", None)
    owners = (torch, torch.UntypedStorage, c10d, getattr(c10d, "ProcessGroup", None))
    return any(hasattr(owner, name) for owner in owners)


def report() -> Iterator[tuple[Foreign, tuple[str, ...]]]:
    """Yield the entries whose names the installed packages lack."""
    for foreign in touched():
        if gone := missing(foreign):
            yield foreign, gone
