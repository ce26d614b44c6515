"""Layouts that train on one GPU with NCCL, the models they train, and how far rounding may take them from one process.

The bounds below were chosen before the first measurement on a GPU, from the same comparisons over gloo.
"""

from dataclasses import dataclass, field

from tests.distributed.layouts_probe import CUT, DECAY, SMALL

STEPS = 20
COMMON = [*SMALL, *DECAY, "data.workers=0", "training.micro_batch=4", "optimizer.warmup_fraction=0.25"]
FAMILIES = {
    "tiny": COMMON,
    "hybrid": [*COMMON, *CUT],
    "wide": [*COMMON, "training.global_batch=32"],
}
"""tiny: two Mamba and two expert layers. hybrid: every kind of layer, and documents that end. wide: for 8 replicas."""
PRECISIONS = ("bf16", "fp32")

FIRST_LOSS = {"fp32": 5e-6, "bf16": 2e-3}
"""Largest difference of the first step's loss. Layouts add up in another order, so each number may round otherwise."""
FIRST_NORM = {"fp32": 2e-5, "bf16": 5e-3}
"""Largest relative difference of the first step's gradient norm."""
LOSSES = {"fp32": 1e-3, "bf16": 5e-3}
"""Largest difference of the loss in any step: rounding may send tokens to other experts."""
UNTIL_REROUTED = {"fp32": 1e-5, "bf16": 5e-3}
"""The same before the first step in which an expert gets another number of tokens than with one process."""
REPRODUCED = 4
"""A difference may also be this many times what rounding layers' outputs otherwise does to one process."""


ALONE_SECONDS, VARIANT_SECONDS = 13, 3
"""One process with its twin, while kernels compile; building a model and comparing replicas."""
STEP_SECONDS = {"data": 0.07, "pipeline": 0.23, "expert": 0.33, "context": 0.73, "tensor": 0.73, "expert_tensor": 0.73}
"""A step of two ranks that take turns on an H100, by what their layout exchanges; context is assumed like tensor."""


@dataclass(frozen=True)
class Layout:
    """A number of ranks and the overrides that lay a model out over them."""

    name: str
    ranks: int
    overrides: list[str] = field(default_factory=list)
    family: str = "tiny"
    precisions: tuple[str, ...] = PRECISIONS


def _parallel(**sizes: int) -> list[str]:
    return [f"parallel.{name}={size}" for name, size in sizes.items()]


NO_SHARDS = ["optimizer.distributed=false"]
LAYOUTS = [
    Layout("dp2", 2),
    Layout("tp2", 2, _parallel(tensor=2)),
    Layout("ep2", 2, _parallel(expert=2)),
    Layout("pp2", 2, _parallel(pipeline=2)),
    Layout("hybrid_cp2", 2, _parallel(context=2), "hybrid"),
    Layout("tp2_ep2", 4, _parallel(tensor=2, expert=2)),
    Layout("hybrid_cp2_tp2", 4, _parallel(context=2, tensor=2), "hybrid"),
    Layout("pp2_ep2", 4, [*_parallel(pipeline=2, expert=2), "training.recompute=layers"]),
    Layout("hybrid_pp2_dp2", 4, _parallel(pipeline=2), "hybrid"),
    Layout("etp2_pp2", 4, _parallel(tensor=2, expert_tensor=2, pipeline=2)),
    Layout("hybrid_cp2_ep2_pp2", 8, _parallel(context=2, expert=2, pipeline=2), "hybrid"),
    Layout("wide_ep8", 8, _parallel(expert=8), "wide"),
    Layout("dp2_replicated", 2, NO_SHARDS, precisions=("fp32",)),
    Layout("hybrid_tp2", 2, _parallel(tensor=2), "hybrid"),
    Layout("ep2_allgather", 2, [*_parallel(expert=2), "kernels.dispatcher=allgather"]),
    Layout("ep2_recompute", 2, [*_parallel(expert=2), "training.recompute=layers"]),
    Layout("hybrid_cp4", 4, _parallel(context=4), "hybrid"),
    Layout("hybrid_cp2_dp2", 4, _parallel(context=2), "hybrid"),
    Layout("tp4", 4, _parallel(tensor=4)),
    Layout("pp4", 4, _parallel(pipeline=4)),
    Layout("tp2_pp2_ep2", 8, _parallel(tensor=2, pipeline=2, expert=2)),
    Layout("wide_dp8", 8, [], "wide"),
]
"""The most telling first, for time may run out."""


@dataclass(frozen=True)
class Variant:
    """How a layout is trained: in which precision, and whether ranks exchange while they compute."""

    precision: str
    overlap: bool = True
    nudged: bool = False
    """Whether the outputs of layers are rounded otherwise, on one process: what rounding alone may do."""

    @property
    def overrides(self) -> list[str]:
        buckets = ["training.bucket_size=5000"] if self.overlap else []  # several buckets, also of a small model
        return [f"training.precision={self.precision}", f"training.overlap={str(self.overlap).lower()}", *buckets]

    def __str__(self) -> str:
        return self.precision + ("" if self.overlap else " apart") + (" nudged" if self.nudged else "")


@dataclass(frozen=True)
class Task:
    """What a group of ranks does in one start: some variants of one layout."""

    layout: Layout
    variants: tuple[Variant, ...]

    @property
    def keys(self) -> list[str]:
        return [f"{self.layout.name} {variant}" for variant in self.variants]


def alone(family: str, precision: str) -> Task:
    """Return what layouts are compared with: one process, and the same with other roundings."""
    variants = tuple(Variant(precision, nudged=nudged) for nudged in (False, True))
    return Task(Layout(f"{family}_alone", 1, [], family), variants)


def tasks(layouts: list[Layout]) -> list[Task]:
    """Return everything to do, the most telling first: in fp32 every layout, and those again without overlap that
    overlap anything; then the same in bf16, whose rounding hides more."""
    todo, seen = [], set()
    for precision, overlap in (("fp32", True), ("fp32", False), ("bf16", True), ("bf16", False)):
        for layout in layouts:
            if precision not in layout.precisions or not (overlap or _reduces(layout)):
                continue
            if (layout.family, precision) not in seen:
                seen.add((layout.family, precision))
                todo.append(alone(layout.family, precision))
            todo.append(Task(layout, (Variant(precision, overlap),)))
    return todo


def seconds(task: Task, steps: int, limit: float) -> float:
    """Estimate the time of a task on one card, from the layouts that an H100 ran on 2026-11-26.

    limit: seconds after the first step and LEAST_STEPS more, after which a variant ends.
    """
    layout = task.layout
    if layout.ranks == 1:
        return ALONE_SECONDS
    words = [word.partition("=")[0].removeprefix("parallel.") for word in layout.overrides]
    step = max((STEP_SECONDS[word] for word in words if word in STEP_SECONDS), default=STEP_SECONDS["data"])
    step *= layout.ranks / 2
    return len(task.variants) * (VARIANT_SECONDS + step + min((steps - 1) * step, max(limit + step, 3 * step)))


def _reduces(layout: Layout) -> bool:
    """Return whether several ranks reduce gradients together, as only these overlap."""
    sizes = dict(word.removeprefix("parallel.").split("=") for word in layout.overrides if word.startswith("parallel."))
    return layout.ranks > int(sizes.get("tensor", 1)) * int(sizes.get("pipeline", 1))
