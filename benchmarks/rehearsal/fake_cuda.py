"""Make PyTorch and Triton behave as on a machine with eight Hopper GPUs, without a GPU.

`become_gpu` changes this process for good: use one of its own. Import this module before anything imports torch.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if "torch" in sys.modules:
    raise ImportError("benchmarks.rehearsal.fake_cuda must be imported before torch")

ROOT = Path(__file__).resolve().parents[2]


def _load_guard() -> ctypes.CDLL:
    """Compile guard.cpp against this PyTorch's headers, once, and load it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch_folder = Path(spec.origin).parent
    source = Path(__file__).with_name("guard.cpp")
    stamp = f"{torch_folder.stat().st_mtime_ns:x}-{source.stat().st_mtime_ns:x}"
    library = ROOT / "build" / "rehearsal" / f"guard-{stamp}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        libraries = torch_folder / "lib"
        options = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{libraries}"]
        link = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
        subprocess.run(["g++", *options, str(source), "-o", str(partial), *link], check=True)
        partial.rename(library)  # several processes may compile at once
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled functions count operation by operation
_GUARD = _load_guard()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from benchmarks.rehearsal.record import LOG, VALUES, size_of, tensors_in  # noqa: E402

GPUS = 8
MEMORY_GIB = 80
NAME = "NVIDIA H100 80GB HBM3"
_pinned: set[int] = set()


def become_gpu() -> None:
    """Make this process answer as one that has GPUs."""
    _GUARD.install_guard()
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # nothing may reach a driver
    torch._subclasses.fake_tensor.init_gpu_context = _nothing
    _answer_for_cuda()
    _tell_devices_truly()
    _remember_pinned_memory()
    _stop_triton_before_launch()
    _stop_cuda_before_launch()
    torch.Tensor.record_stream = _nothing
    torch.nn.functional.rms_norm = _FusedRMSNorm.apply
    torch.nn.functional.scaled_dot_product_attention = _attend
    dist.all_gather_object = lambda found, mine, group=None: found.__setitem__(slice(None), [mine] * len(found))


def _nothing(*_: Any, **__: Any) -> None: ...


class Stream:
    """A stream or an event on which everything has already happened. Waiting for one is recorded."""

    device, cuda_stream = torch.device("cuda", 0), 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *_: object) -> "Stream":
        return Stream()

    def elapsed_time(self, _: object) -> float:
        return 1.0

    def synchronize(self) -> None:
        LOG.wait("synchronize")

    record = wait = wait_stream = wait_event = lambda self, *_: None


def _answer_for_cuda() -> None:
    facts = SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=MEMORY_GIB << 30, warp_size=32
    )
    state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)  # noqa: E731
    generator = SimpleNamespace(set_state=_nothing, get_state=state, graphsafe_set_state=_nothing, manual_seed=_nothing)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: GPUS,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: facts,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (MEMORY_GIB << 30, MEMORY_GIB << 30),
        "max_memory_allocated": lambda device=None: LOG.peak,
        "Stream": Stream,
        "Event": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "device_of": lambda tensor: nullcontext(),
        "_lazy_call": lambda function, **_: function(),
        "synchronize": lambda device=None: LOG.wait("torch.cuda.synchronize"),
        "get_rng_state": state,
        "default_generators": (generator,) * GPUS,  # which refuses a torch.device, as the real ones do
    }
    for name in ("set_device", "_lazy_init", "init", "empty_cache", "manual_seed", "set_rng_state"):
        answers[name] = lambda *_, **__: None  # one each: torch tells functions apart by identity
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random):
            setattr(module, name, answer)
    torch._C._cuda_getDevice = lambda: 0


def _tell_devices_truly() -> None:
    """Correct four properties in which fake tensors differ from tensors on a GPU."""
    type_of, data, tensor_of = torch.Tensor.type, torch._C.TensorBase.data, torch.tensor

    def type_on_gpu(self, *args, **kwargs):
        answer = type_of(self, *args, **kwargs)
        wrong = self.is_cuda and isinstance(answer, str) and "cuda" not in answer
        return answer.replace("torch.", "torch.cuda.") if wrong else answer

    def set_data(self, value):  # a fake tensor would keep its old device
        data.__set__(self, value)
        self.fake_device = value.fake_device

    def tensor(values, *args, **kwargs):
        """Read tensors within a list, as torch.tensor does below every dispatch mode: a wait for each."""
        inside = tensors_in(values)
        for x in inside:
            if x.is_cuda:
                LOG.wait("item")
        if inside:
            values = torch.utils._pytree.tree_map(lambda x: 1.0 if isinstance(x, torch.Tensor) else x, values)
        return tensor_of(values, *args, **kwargs)

    def data_ptr(self):  # fake tensors have none
        return 1024 * self.untyped_storage()._cdata + self.storage_offset() * self.element_size()

    torch.Tensor.type, FakeTensor.data, torch.tensor = type_on_gpu, property(data.__get__, set_data), tensor
    FakeTensor.data_ptr = data_ptr


def _remember_pinned_memory() -> None:
    def pin(self, device=None):
        copy = self.clone()
        copy._is_pinned_in_rehearsal = True
        return copy

    torch.Tensor.pin_memory = pin
    torch.Tensor.is_pinned = lambda self, device=None: getattr(self, "_is_pinned_in_rehearsal", False)


def _stop_triton_before_launch() -> None:
    """Record a launch where Triton would compile and run it: its caller has made the outputs already."""
    from triton.runtime.jit import JITFunction

    def run(self, *args, grid, warmup=False, **constants):
        name, tensors = self.fn.__name__, tensors_in(args)
        for tensor in tensors:
            if not tensor.is_cuda:
                LOG.note(f"{name} is given a tensor on {tensor.device}")
        if name == "place_pairs":  # choice, counts of programs, order, places, and the pairs of each expert
            VALUES.share(tensors[4], tensors[0].numel())
        LOG.launch(name, tensors, constants, tuple(grid(constants)) if callable(grid) else tuple(grid))

    JITFunction.run = run


def _stop_cuda_before_launch() -> None:
    """Record the launches of kernels that NVRTC would compile."""
    from megatron_blackmamba.ops import nvrtc

    def launch(source, kernel, structure, defines, grid, threads, shared_bytes, arguments):
        scanned = arguments.get("u")  # the scan's input comes first: its size is that of the work
        first = [] if scanned is None else [scanned]
        states = 16 * scanned.numel() if first else 0
        LOG.launch_cuda(kernel, [*first, *tensors_in(arguments)], grid, states)

    nvrtc.unavailable, nvrtc.launch = (lambda: None), launch


class _FusedRMSNorm(torch.autograd.Function):
    """F.rms_norm as a PyTorch with CUDA has it, one kernel forward; the build for CPUs decomposes it."""

    @staticmethod
    def forward(ctx, x, shape, weight=None, eps=None):
        y, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        ctx.save_for_backward(x, weight, scale)
        LOG.add("_fused_rms_norm", [y], moved=size_of(x) + size_of(y))
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, _ = ctx.saved_tensors
        LOG.add("_fused_rms_norm_backward", [x], moved=3 * size_of(x))
        return torch.empty_like(x), None, torch.empty_like(weight), None


def _attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return _FlashAttention.apply(query, key, value, 2 if is_causal else 1)


class _FlashAttention(torch.autograd.Function):
    """Attention as a PyTorch with CUDA computes it here, one kernel each way; the build for CPUs decomposes it."""

    @staticmethod
    def forward(ctx, query, key, value, parts):
        y, log_sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, y, log_sums)
        ctx.flops = 4.0 * query.numel() * key.shape[-2] / parts
        LOG.add("_flash_attention_forward", [y], moved=sum(map(size_of, (query, key, value, y))), flops=ctx.flops)
        return y

    @staticmethod
    def backward(ctx, dy):
        query, key, value, y, _ = ctx.saved_tensors
        moved = 2 * sum(map(size_of, (query, key, value, y)))
        LOG.add("_flash_attention_backward", [dy], moved=moved, flops=2.5 * ctx.flops, launches=3)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
