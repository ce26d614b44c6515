"""Named patches that let megatron-core run where CUDA, or Transformer Engine and Apex, are missing.

megatron-core names CUDA in literals: `device="cuda"`, `torch.cuda.current_device()`, `"torch.cuda.FloatTensor"`.
Without CUDA each of these is answered by the CPU. `install()` applies what this machine needs, once; with CUDA only
the patches of checkpoints and those for a missing Transformer Engine or Apex remain. Call it before megatron-core is
imported: `model` and `data` do so in their `__init__`, and so do modules elsewhere that import neither first.
"""

import importlib
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from typing import Any
from unittest import mock

import torch

from megatron_blackmamba.runtime import device as here


class PatchError(ValueError):
    """A megatron-core that cannot be patched as this project needs it."""


@dataclass(frozen=True)
class Patch:
    """One change to megatron-core or to torch.cuda, with the reason for it."""

    name: str
    why: str
    needed: Callable[[], bool]
    apply: Callable[[], None]


PATCHES: list[Patch] = []
_applied: list[str] = []


def install(skip: frozenset[str] = frozenset()) -> list[str]:
    """Apply the patches this machine needs, except those in `skip`, once. Returns the names of those applied."""
    unknown = skip - {patch.name for patch in PATCHES}
    if unknown:
        raise ValueError(f"no patch named {sorted(unknown)}; there are: {', '.join(p.name for p in PATCHES)}")
    if not _applied:
        _quiet()
        for patch in PATCHES:
            if patch.name not in skip and patch.needed():
                patch.apply()
                _applied.append(patch.name)
    return list(_applied)


def _quiet() -> None:
    """Silence the start-up warnings of megatron-core and torch about missing libraries; `doctor` reports them."""
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (are|is) not installed")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # nvcc without a GPU, as on login nodes


def _without_cuda() -> bool:
    return not here.has_cuda()


def _without_fused_adam() -> bool:
    return importlib.import_module("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER


def _without_fused_norm() -> bool:
    return importlib.import_module("megatron.core.optimizer.clip_grads").l2_norm_impl.__name__.startswith("local")


def _without_te_gemm() -> bool:
    return not hasattr(importlib.import_module("megatron.core.transformer.moe.moe_utils"), "te_general_gemm")


def _everywhere() -> bool:
    return True


def require(owner: Any, *names: str) -> None:
    """Refuse a megatron-core that lacks private names which this project changes or calls."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        where = owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        version = metadata.version("megatron-core")  # 0.19's own version ends in the commit of this repository
        raise PatchError(
            f"megatron-core {version} has no {', '.join(missing)} in {where}, which checkpoints need. "
            "Install a version from 0.16.1 to 0.19 (`pip install 'megatron-core<0.20'`)"
        )


def _patch(name: str, why: str, needed: Callable[[], bool] = _without_cuda) -> Callable:
    def register(apply: Callable[[], None]) -> Callable[[], None]:
        PATCHES.append(Patch(name, why, needed, apply))
        return apply

    return register


def _megatron_modules() -> list[types.ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core") and module]


@_patch(
    "jit", "torch.compile of megatron-core's small functions needs a C++ compiler on a CPU, takes long, gains nothing"
)
def _no_jit() -> None:
    def as_it_is(function: Callable | None = None, **options: Any) -> Callable:
        return function if function is not None else as_it_is

    with mock.patch.object(torch, "compile", as_it_is):  # importing megatron-core already decorates
        jit = importlib.import_module("megatron.core.jit")
    jit.disable_jit_fuser()
    for module in _megatron_modules():
        for name, value in list(vars(module).items()):
            if callable(value) and hasattr(value, "_torchdynamo_orig_callable"):
                setattr(module, name, value._torchdynamo_orig_callable)


@_patch(
    "tracer",
    "torch's optimizers import torch._dynamo, 0.8 s of every start, to keep it from tracing them; nothing does",
)
def _no_tracer() -> None:
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        inner = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if inner is not None:
            inner.__dynamo_disable = inner  # where torch keeps what to call instead


@_patch("current-device", "every module asks torch.cuda.current_device() where to build its parameters")
def _current_device() -> None:
    torch.cuda.current_device = here.device
    torch.cuda.set_device = lambda device: None


@_patch("synchronize", "pipeline stages and checkpoint saves wait for the GPU; a CPU has nothing in flight")
def _synchronize() -> None:
    torch.cuda.synchronize = lambda device=None: None


class _Event:
    """An event on a device where everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    wait = record

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream(_Event):
    """A stream on a device that has one order of execution."""

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


@_patch("streams", "the MoE dispatchers copy on side streams and order them with events")
def _streams() -> None:
    the_stream = _Stream()
    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: the_stream
    torch.cuda.stream = lambda stream: nullcontext()


LITERAL_MODULES = (
    "distributed.param_and_grad_buffer",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "models.hybrid.hybrid_block",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "rerun_state_machine",
    "ssm.mamba_block",
    "tensor_parallel.data",
    "transformer.moe.moe_utils",
    "transformer.moe.token_dispatcher",
    "transformer.utils",
    "utils",
)
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


def _torch_without_cuda() -> types.ModuleType:
    """Return a copy of torch's namespace whose factories build `device="cuda"` on this process's device."""

    def redirect(factory: Callable) -> Callable:
        @wraps(factory)
        def build(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = here.device()
            return factory(*args, **kwargs)

        return build

    namespace = types.ModuleType("torch")
    vars(namespace).update(vars(torch))
    vars(namespace).update({name: redirect(getattr(torch, name)) for name in FACTORIES})
    return namespace


@_patch("device-literals", 'schedules, optimizers and clipping build tensors with device="cuda"')
def _device_literals() -> None:
    replacement = _torch_without_cuda()
    for name in LITERAL_MODULES:
        path = f"megatron.core.{name}"
        if _exists(path):
            importlib.import_module(path).torch = replacement


def _exists(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


@_patch("tensor-cuda", "checkpoint exchange and the embedding groups move tensors with .cuda()")
def _tensor_cuda() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


@_patch("tensor-type", 'optimizers accept a parameter by the name of its type, such as "torch.cuda.FloatTensor"')
def _tensor_type() -> None:
    type_of = torch.Tensor.type
    renamed = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}
    renamed["torch.DoubleTensor"] = "torch.cuda.FloatTensor"  # full precision; the patch `float64` keeps it

    @wraps(type_of)
    def type_on_this_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return renamed.get(answer, answer) if isinstance(answer, str) else answer

    torch.Tensor.type = type_on_this_device


@_patch("rng", "seeding, initialisation and recomputation fork the CUDA generator; here they fork the CPU's")
def _rng() -> None:
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=None, graph_safe=False: torch.set_rng_state(new_state)

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """A tracker that forks the CPU generator; megatron-core's own forks CUDA's, and warns when the CPU's moves."""

        @contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME):
            if name not in self.states_:
                raise KeyError(f"no random state named {name!r}; there are: {', '.join(self.states_)}")
            outside, outside_name = torch.get_rng_state(), self._current_state_name
            if outside_name != "default-rng":
                self.states_[outside_name] = outside
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                if outside_name != "default-rng":  # a fork inside this one may have moved it on
                    outside = self.states_[outside_name]
                torch.set_rng_state(outside)
                self._current_state_name = outside_name

    random.CudaRNGStatesTracker = CpuRNGStatesTracker


@_patch(
    "split-sizes",
    "the all-to-all dispatcher makes split sizes arrays only if they lie on a GPU; all_to_all refuses tensors",
)
def _split_sizes() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


@_patch("router-gemm", "0.16.1's router reads te_general_gemm, which only Transformer Engine defines", _without_te_gemm)
def _router_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


@_patch("adam", "the distributed optimizer resumes FusedAdam's state layout, not torch.optim's", _without_fused_adam)
def _adam() -> None:
    from megatron_blackmamba.runtime.adam import Adam

    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = Adam, False
    distrib_optimizer.Adam = Adam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


@_patch("clipping", "megatron-core's own gradient norm reads each parameter's norm on the host", _without_fused_norm)
def _clipping() -> None:
    """Clip all gradients with a few launches and a single wait, which is megatron-core's."""
    from megatron.core.optimizer import clip_grads

    def norm(_: Any, __: Any, tensors: list[list[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
        norms = torch._foreach_norm(tensors[0], 2, torch.float32)  # of bf16 gradients too
        return torch.linalg.vector_norm(torch.stack(norms)).view(1), None

    def scale(_: Any, __: Any, tensors: list[list[torch.Tensor]], factor: float) -> None:
        source, target = tensors
        if source is not target:
            torch._foreach_copy_(target, source)
        torch._foreach_mul_(target, factor)

    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = norm, scale


@_patch(
    "one-type",
    "the kernels of Transformer Engine and Apex read all tensors of a call as the first one's type",
    _everywhere,
)
def _one_type() -> None:
    """Call them once for each type: with gradients in bf16, those of fp32 weights would make the norm NaN."""
    from megatron.core.optimizer import clip_grads, optimizer

    for module in (clip_grads, optimizer):
        require(module, "multi_tensor_applier")
        module.multi_tensor_applier = _by_type(module.multi_tensor_applier)


def _by_type(apply: Callable[..., Any]) -> Callable[..., Any]:
    def each(kernel: Any, overflow: Any, columns: list[list[torch.Tensor]], *args: Any) -> Any:
        rows_of: dict[tuple[torch.dtype, ...], list[tuple[torch.Tensor, ...]]] = {}
        for row in zip(*columns, strict=True):
            rows_of.setdefault(tuple(x.dtype for x in row), []).append(row)
        answers = [apply(kernel, overflow, [*map(list, zip(*rows, strict=True))], *args) for rows in rows_of.values()]
        if len(answers) < 2 or not isinstance(answers[0], tuple):
            return answers[0] if answers else apply(kernel, overflow, columns, *args)
        return torch.linalg.vector_norm(torch.stack([norm.view(1) for norm, *_ in answers])).view(1), None

    return each


@_patch("float64", "optimizer, gradient norm, optimizer checkpoint and loss round a float64 model to fp32")
def _float64() -> None:
    from megatron_blackmamba.runtime import float64

    float64.apply()


@_patch(
    "checkpoint-folder",
    "torch makes a checkpoint's folder on every rank between two exchanges; if one rank cannot, the others wait for it",
    _everywhere,
)
def _checkpoint_folder() -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    require(FileSystemWriterAsync, "prepare_local_plan")
    FileSystemWriterAsync.prepare_local_plan = lambda writer, plan: plan  # rank 0 has made the folder


@_patch(
    "stored-strides",
    "from torch 2.15 on a checkpoint's metadata has strides, which megatron-core gives torch.empty as it loads",
    _everywhere,
)
def _stored_strides() -> None:
    strategy = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    namespace = types.ModuleType("torch")
    vars(namespace).update(vars(torch))

    def empty(*args: Any, strides: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs)

    vars(namespace)["empty"] = empty
    strategy.torch = namespace
