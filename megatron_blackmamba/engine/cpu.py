"""megatron-core where CUDA is missing: the CPU answers what it asks of a GPU.

megatron-core names CUDA in literals: `device="cuda"`, `torch.cuda.current_device()`, `"torch.cuda.FloatTensor"`.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest import mock

import torch

from megatron_blackmamba.engine.checked import private, replace, require, torch_with


def uncompiled() -> None:
    def as_it_is(function: Callable | None = None, **options: Any) -> Callable:
        return function if function is not None else as_it_is

    with mock.patch.object(torch, "compile", as_it_is):  # importing megatron-core already decorates
        jit = importlib.import_module("megatron.core.jit")
    jit.disable_jit_fuser()
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core") and module]
    for module in loaded:
        for name, value in list(vars(module).items()):
            if callable(value) and hasattr(value, "_torchdynamo_orig_callable"):
                replace(module, name, value._torchdynamo_orig_callable)


def untraced() -> None:
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        inner = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if inner is not None:
            inner.__dynamo_disable = inner  # where torch keeps what to call instead


def current_device() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # runtime/device.py may place it elsewhere
    torch.cuda.set_device = lambda device: None


def synchronize() -> None:
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


def streams() -> None:
    the_stream = _Stream()
    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: the_stream
    torch.cuda.stream = lambda stream: nullcontext()


LITERAL_MODULES = (
    *("distributed.param_and_grad_buffer", "models.hybrid.hybrid_block", "pipeline_parallel.schedules"),
    *("dist_checkpointing.exchange_utils", "dist_checkpointing.strategies.state_dict_saver"),
    *("optimizer.clip_grads", "optimizer.grad_scaler", "optimizer.optimizer"),
    *("rerun_state_machine", "ssm.mamba_block", "tensor_parallel.data"),
    *("transformer.moe.moe_utils", "transformer.moe.token_dispatcher", "transformer.utils", "utils"),
)
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


def _torch_without_cuda() -> types.ModuleType:
    """Return a copy of torch's namespace whose factories build `device="cuda"` on this process's device."""

    def redirect(factory: Callable) -> Callable:
        @wraps(factory)
        def build(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = torch.cuda.current_device()
            return factory(*args, **kwargs)

        return build

    return torch_with(**{name: redirect(getattr(torch, name)) for name in FACTORIES})


def device_literals() -> None:
    replacement = _torch_without_cuda()
    for name in LITERAL_MODULES:
        path = f"megatron.core.{name}"
        if _exists(path) and hasattr(module := importlib.import_module(path), "torch"):
            replace(module, "torch", replacement)


def loaded_shards() -> None:
    """Build what an exchange of loaded shards receives on this process's device; its factory is a default argument."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    build = private(ShardedTensor, "init_data")

    def init_data(self: Any, device: Any, *args: Any, **kwargs: Any) -> None:
        build(self, torch.cuda.current_device() if str(device).startswith("cuda") else device, *args, **kwargs)

    replace(ShardedTensor, "init_data", init_data)


def _exists(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def tensor_cuda() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def tensor_type() -> None:
    type_of = torch.Tensor.type
    renamed = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}
    renamed["torch.DoubleTensor"] = "torch.cuda.FloatTensor"  # full precision; the change `float64` keeps it

    @wraps(type_of)
    def type_on_this_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return renamed.get(answer, answer) if isinstance(answer, str) else answer

    torch.Tensor.type = type_on_this_device


def random_states() -> None:
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)
    replace(random, "_get_cuda_rng_state", lambda *args, **options: torch.get_rng_state())
    replace(random, "_set_cuda_rng_state", lambda new_state, *args, **options: torch.set_rng_state(new_state))

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """A tracker that forks the CPU generator; megatron-core's own forks CUDA's, and warns when the CPU's moves."""

        @contextmanager
        def fork(self, name: str = private(random, "_MODEL_PARALLEL_RNG_TRACKER_NAME")):
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

    require(random.CudaRNGStatesTracker(), "states_", "_current_state_name")
    replace(random, "CudaRNGStatesTracker", CpuRNGStatesTracker)


def split_sizes() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        replace(module, "maybe_move_tensor_to_cpu", to_cpu)


def uneven_parts() -> None:
    """Pad the parts of ranks that hold unequally many tokens to the longest."""
    from megatron.core.tensor_parallel import mappings

    gather: Callable = private(mappings, "_gather_along_first_dim")
    scatter: Callable = private(mappings, "_reduce_scatter_along_first_dim")

    def padded(part: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(length - len(part), *part.shape[1:])])

    def gather_uneven(part: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or len({*sizes}) == 1:
            return gather(part, group, sizes, use_global_buffer)
        parts = gather(padded(part, max(sizes)), group).split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_uneven(whole: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or len({*sizes}) == 1:
            return scatter(whole, group, sizes, use_global_buffer)
        parts = torch.cat([padded(part, max(sizes)) for part in whole.split(list(sizes))])
        return scatter(parts, group)[: sizes[group.rank()]]

    replace(mappings, "_gather_along_first_dim", gather_uneven)
    replace(mappings, "_reduce_scatter_along_first_dim", scatter_uneven)
