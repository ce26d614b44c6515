"""A record of one step, operation by operation: bytes, FLOPs, launches, waits of the host, and memory."""

import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from megatron_blackmamba.ops.delta import costs as delta_costs
from megatron_blackmamba.ops.selective_scan.costs import KEPT_SLOTS, SLOTS, cuda_slots
from megatron_blackmamba.ops.ssd.costs import SLOTS as SSD_SLOTS

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
COMPOSED = {
    "sort": 6,
    "argsort": 6,
    "cumsum": 2,
    "_grouped_mm": 2,
    "_scaled_grouped_mm": 2,
    "embedding_dense_backward": 6,
    "nonzero": 3,
}
"""Launches of operations that PyTorch composes of several kernels on a GPU."""
FOREACH = ("_foreach", "_fused_adam")
FOREACH_TENSORS = 24
"""Tensors that one launch of a _foreach operation takes, about."""
WRITES_ONLY = ("copy_", "fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "new_zeros", "new_full")
GATHERS = ("index_select", "embedding", "index", "gather")
CREATES = ("empty", "new_empty", "record_stream", "prim::")
SMALL = 4096
"""Numbers up to which fp64 is bookkeeping, and a tensor of integers may have known values."""
BYTES_A_WEIGHT = 4 + 2 * 4 + 4 * 4 + 2
"""Bytes that Adam moves: gradient, weight, two moments, and a copy in bf16. Its tensors are given by address."""
SAVED = {"NARROW_GRADIENTS": 2, "NARROW": 8}
"""Fewer bytes where they are in bf16, by the kernel's constant."""
WEIGHTS_A_PROGRAM = 16384
OVERWRITE = ("loss_and_gradient",)
"""Triton kernels that read their first tensor and write it."""
OURS = ("/megatron_blackmamba/", "/megatron/core/")
ALLOCATION = 512
"""Bytes to which PyTorch's allocator rounds up."""


class Place(NamedTuple):
    """The part of the model that an operation belongs to."""

    part: str
    layer: int | None = None


@dataclass(frozen=True)
class Op:
    """One operation on the GPU."""

    name: str
    place: Place
    phase: str
    moved: float
    """Bytes read and written."""
    flops: float
    slots: float
    """Issue slots of kernels that are bound by instructions."""
    launches: int
    dtype: str
    shape: tuple[int, ...]
    at: str
    sent: float = 0.0
    """Bytes handed to a collective."""

    @property
    def precision(self) -> str:
        """Return the precision whose peak bounds the products."""
        if not self.flops:
            return "bf16"
        return "fp8" if self.dtype.startswith("float8") else "fp32" if self.dtype == "float32" else "bf16"


class Launch(NamedTuple):
    """A Triton kernel's launch."""

    kernel: str
    grid: tuple[int, ...]
    signature: tuple[str, ...]


class Log:
    """The record of a process. It notes operations only while `on`, memory always."""

    def __init__(self) -> None:
        self.on, self.phase = False, "forward"
        self.places: list[Place] = []
        self.ops: list[Op] = []
        self.launches: Counter[Launch] = Counter()
        self.waits: Counter[str] = Counter()
        self.odd: Counter[str] = Counter()
        self.bytes = self.peak = 0
        self.share_of_mask = 1.0
        self.layer_of_parameter: dict[int, Place] = {}
        self._place_of_node: dict[int, Place] = {}
        self._alive: dict[int, int] = {}

    def wait(self, what: str) -> None:
        """Note that the host waits for the GPU."""
        if self.on:
            self.waits[f"{what}: {caller()}"] += 1

    def note(self, what: str) -> None:
        """Note what looks wrong on a GPU."""
        if self.on:
            self.odd[f"{what}: {caller()}"] += 1

    def phase_now(self) -> str:
        return "backward" if torch._C._current_autograd_node() is not None else self.phase

    def place(self) -> Place:
        """Return the module at work; in the backward pass the one whose forward pass made the node."""
        if self.places:
            self._place_of_node[torch._C._autograd._get_sequence_nr() - 1] = self.places[-1]
            return self.places[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return Place(self.phase)
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self.layer_of_parameter.get(id(variable), Place("adding up gradients"))
        return self._place_of_node.get(node._sequence_nr(), Place(node.name()))

    def born(self, tensor: torch.Tensor) -> None:
        """Count the memory behind a tensor until it is freed."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self._alive:
            return
        self._alive[key] = size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._died, key)

    def _died(self, key: int) -> None:
        self.bytes -= self._alive.pop(key)

    def add(self, name: str, shown: list[torch.Tensor], moved: float, **more: Any) -> None:
        """Note one operation."""
        if self.on:
            about = more | {"dtype": "", "shape": (), "at": caller()}
            if shown:
                about |= {"dtype": str(shown[0].dtype).removeprefix("torch."), "shape": tuple(shown[0].shape)}
            defaults = {"flops": 0.0, "slots": 0.0, "launches": 1}
            self.ops.append(Op(name, self.place(), self.phase_now(), moved, **(defaults | about)))

    def launch(self, kernel: str, tensors: list[torch.Tensor], constants: dict[str, Any], grid: tuple) -> None:
        """Note the launch of a Triton kernel."""
        if not self.on:
            return
        states = constants.get("N", 0) * tensors[0].numel() if tensors else 0
        moved = total(tensors) + (size_of(tensors[0]) if kernel in OVERWRITE else 0)
        if kernel == "adam_update":
            saved = sum(fewer for name, fewer in SAVED.items() if constants[name])
            moved += (BYTES_A_WEIGHT - saved) * WEIGHTS_A_PROGRAM * grid[0]
        issued = SSD_SLOTS | (KEPT_SLOTS if constants.get("KEPT") else SLOTS)
        slots = issued.get(kernel, 0) * states
        if kernel in delta_costs.INSTRUCTIONS:
            by_channel, token_heads = constants.get("BY_CHANNEL", False), tensors[0].numel() // tensors[0].shape[-1]
            wide = {name: constants[name] for name in ("K", "V") if name in constants}
            slots = delta_costs.slots(kernel, by_channel, token_heads, **wide)
        self.add(f"triton {kernel}", tensors, moved, slots=slots)
        signature = (*(str(t.dtype)[6:] for t in tensors), *(f"{k}={v}" for k, v in sorted(constants.items())))
        self.launches[Launch(kernel, grid, signature)] += 1

    def launch_cuda(self, kernel: str, tensors: list[torch.Tensor], grid: tuple, states: int) -> None:
        """Note the launch of a CUDA kernel, which keeps this many states a token."""
        slots = cuda_slots(kernel, grid[0] * grid[1]) * states if states else 0.0
        self.add(f"cuda {kernel}", tensors, total(tensors), slots=slots)


LOG = Log()


def caller() -> str:
    """Return the innermost function of the project, or else of megatron-core, as file.function."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in OURS):
            return f"{file.rpartition('/')[2].removesuffix('.py')}.{frame.f_code.co_name}"
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return node.name() if node is not None else found or "elsewhere"


def tensors_in(*trees: object) -> list[torch.Tensor]:
    """Return the tensors in lists, tuples and dictionaries, in order. PyTorch's `tree_leaves` is far slower."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            found += tensors_in(*tree)
        elif isinstance(tree, dict):
            found += tensors_in(*tree.values())
    return found


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes behind a tensor on the GPU; an expanded dimension takes none."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size() * tensor.is_cuda


def total(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of several tensors, each counted once."""
    return sum(size_of(t) for t in {(t.untyped_storage()._cdata, t.storage_offset()): t for t in tensors}.values())


class Values:
    """The values of small integer tensors that follow from equal load of all experts.

    Split sizes decide shapes, and fake tensors have no values. So the counts of a routing map are set to equal shares.
    What is computed from tensors with known values alone is computed on real tensors too.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._known.get(_Key.of(tensor))

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._known[_Key.of(tensor)] = value

    def follow(self, name: str, func: Any, args: tuple, kwargs: dict, out: object) -> None:
        """Compute on the known values what was computed on the fake tensors."""
        outs = tensors_in(out)
        if not outs or any(t.numel() > SMALL or t.is_floating_point() for t in outs):
            return
        ins = tensors_in(args, kwargs)
        with _disable_current_modes():
            if name == "sum" and ins[0].dtype == torch.bool and ins[0].dim() == 2 and self.of(ins[0]) is None:
                self.share(outs[0], ins[0].numel() * LOG.share_of_mask)
            elif name == "scatter_add_" and self.of(args[2]) is None:
                self.share(args[0], args[2].numel())
            elif ins and ins[0].numel() <= SMALL and all(self.of(t) is not None for t in ins):
                here = kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})
                real = func(*tree_map(self._value, args), **tree_map(self._value, here))
                for fake, value in zip(outs, tensors_in(real), strict=True):
                    self.set(fake, value)

    def gathered(self, name: str, args: tuple) -> None:
        """Let every rank send what this one does."""
        tensors = tensors_in(args)
        mine = self.of(tensors[1]) if len(tensors) == 2 else None
        if mine is None:
            return
        with _disable_current_modes():
            if "gather" in name:
                self.set(tensors[0], mine.flatten().repeat(tensors[0].numel() // mine.numel()).view(tensors[0].shape))
            elif "alltoall" in name:
                self.set(tensors[0], mine)

    def share(self, counts: torch.Tensor, whole: float) -> None:
        """Set counts to equal parts of a whole."""
        with _disable_current_modes():
            self.set(counts, torch.full(tuple(counts.shape), round(whole / counts.numel()), dtype=counts.dtype))

    def _value(self, x: object) -> object:
        return self.of(x) if isinstance(x, torch.Tensor) else x


class _Key:
    """A tensor compared by identity, alive as long as the tensor."""

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Key":
        key = getattr(tensor, "_rehearsal_key", None)
        if key is None:
            key = tensor._rehearsal_key = _Key()
        return key


VALUES = Values()


class Recorder(TorchDispatchMode):
    """Records what reaches the dispatcher, and answers for what has no value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            return self._read(args[0])
        self._look(name, args, kwargs)
        out = self._run(name, func, args, kwargs)
        for tensor in tensors_in(out):
            if tensor.is_cuda:
                LOG.born(tensor)
        if LOG.on:
            LOG.place()  # views make nodes too
            self._weigh(func, name, args, kwargs, out)
        return out

    def _run(self, name: str, func: Any, args: tuple, kwargs: dict) -> Any:
        if name.startswith("c10d::"):  # what the others send is there already
            VALUES.gathered(name, args)
            work = FakeWork().boxed()
            return (args[0], work) if len(func._schema.returns) == 2 else work
        if name == "masked_select":
            return args[0].new_empty(round(args[1].numel() * LOG.share_of_mask))
        out = func(*args, **kwargs)
        if name == "_to_copy" and kwargs.get("non_blocking") and args[0].is_cuda and not out.is_cuda:
            out._is_pinned_in_rehearsal = True  # PyTorch then copies to pinned memory
        VALUES.follow(name, func, args, kwargs, out)
        return out

    def _read(self, tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            LOG.wait("item")
        known = VALUES.of(tensor)
        if known is not None:
            with _disable_current_modes():
                return known.item()
        return False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _look(self, name: str, args: tuple, kwargs: dict) -> None:
        """Find what makes the host wait, and arithmetic that is slow on a GPU."""
        if name == "_to_copy" and kwargs.get("device") is not None:
            self._copied(args[0], torch.device(kwargs["device"]), kwargs.get("non_blocking", False))
        elif name == "copy_":
            self._copied(args[1], args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif name in ("nonzero", "masked_select", "_unique2", "equal") and args[0].is_cuda:
            LOG.wait(name)
        elif name in ("index", "index_put_", "index_put") and args[0].is_cuda:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks and not (len(args) > 2 and args[2].numel() == 1):  # with one value it is a masked_fill
                LOG.wait(f"{name} by a mask")
        if any(t.is_cuda and t.dtype == torch.float64 and t.numel() > SMALL for t in tensors_in(args, kwargs)):
            LOG.note(f"fp64 {name}")
        if name in PRODUCTS and args[0].is_cuda and args[0].dtype == torch.float32:
            LOG.note(f"fp32 {name}")

    def _copied(self, source: torch.Tensor, to: torch.device, non_blocking: bool) -> None:
        if source.device.type == to.type:
            return
        if to.type == "cpu":
            if not non_blocking:
                LOG.wait("copy to the host")
        elif not source.is_pinned():
            LOG.wait("copy from pageable memory")
        elif not non_blocking:
            LOG.wait("copy from pinned memory")

    def _weigh(self, func: Any, name: str, args: tuple, kwargs: dict, out: object) -> None:
        ins, outs = tensors_in(args, kwargs), tensors_in(out)
        if name.startswith(CREATES) or not any(t.is_cuda for t in [*ins, *outs]):
            return
        storages = {t.untyped_storage()._cdata for t in ins}
        if outs and not func._schema.is_mutable and all(t.untyped_storage()._cdata in storages for t in outs):
            return  # a view
        if name.startswith("c10d::"):
            LOG.add(name, ins, 0, launches=0, sent=total(ins[-1:]))
            return
        flops, launches = 0.0, COMPOSED.get(name, 1)
        if name in PRODUCTS:
            a, b = args[-2:] if name == "addmm" else args[:2]
            flops = 2.0 * a.numel() * b.shape[-1]
        elif name.startswith(FOREACH):
            launches = -(-len(args[0]) // FOREACH_TENSORS)
        shown = ins if name in PRODUCTS else outs or ins  # a product runs at the speed of what it reads
        LOG.add(name, shown, _moved(func, name, args, kwargs, out), flops=flops, launches=launches)


def _moved(func: Any, name: str, args: tuple, kwargs: dict, out: object) -> float:
    """Return the bytes that an operation reads and writes."""
    ins, outs = tensors_in(args, kwargs), tensors_in(out)
    if name in WRITES_ONLY:
        return total(outs) + (size_of(args[1]) if name == "copy_" else 0)
    if name in GATHERS:
        return 2 * total(outs)
    if name == "index_put_":
        return 3 * total(ins[1:])
    if name.startswith(FOREACH):
        return total(ins) + (3 if "adam" in name else "_foreach_norm" not in name) * total(args[0])
    if "out" in kwargs:
        return total(ins)
    return total(ins) + (size_of(args[0]) if func._schema.is_mutable else total(outs))
