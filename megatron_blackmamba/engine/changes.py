"""Every change to megatron-core, in the order in which it is applied.

A private name of megatron-core may vanish in any release, and so may a public one that is replaced. Each change names
what it touches: `foreign.refuse_missing` looks for these names before a run, `checked.replace` while it is applied.
This list must load where neither torch nor megatron-core does, so it names code instead of importing it.
"""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from megatron_blackmamba.engine.checked import TRIED

# The stages. Changes to model, wrapper and checkpoint are classes and functions, used there by their names.
IMPORT = "on import"
GROUPS = "while groups are laid"
MODEL = "to the model"
WRAPPER = "to the wrapper"
BUILDING = "while the optimizer is built"
OPTIMIZER = "to the optimizer"
SAVE = "to a checkpoint"
ASKED = "if a config asks"


def everywhere() -> bool:
    return True


def without_cuda() -> bool:
    return not importlib.import_module("torch").cuda.is_available()


def without_fused_adam() -> bool:
    return importlib.import_module("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER


def without_fused_norm() -> bool:
    return importlib.import_module("megatron.core.optimizer.clip_grads").l2_norm_impl.__name__.startswith("local")


def without_te_gemm() -> bool:
    return not hasattr(importlib.import_module("megatron.core.transformer.moe.moe_utils"), "te_general_gemm")


@dataclass(frozen=True)
class Change:
    """One change of megatron-core, or of torch for its sake."""

    name: str
    when: str
    place: str
    """The function or class, as "module:name" of this package."""
    needed: Callable[[], bool] = everywhere
    why: str = ""
    touches: dict[str, str] = field(default_factory=dict)
    """By module of megatron.core, the names that it replaces, overrides or calls and that a release may rename."""
    instead: str = "leave out the change"
    """What takes its place when such a name is gone."""
    versions: str = TRIED
    """The versions of megatron-core that need it."""
    differs: str = ""
    """What it does differently under another version."""
    test: str = "tests/engine/test_changes.py"
    """What fails without it."""
    optional: bool = False
    """Only some configs ask for it, and nothing else needs the names it touches."""

    @property
    def apply(self) -> Callable[..., Any]:
        return resolve_name(f"{__package__}.{self.place}")

    @property
    def file(self) -> str:
        return f"engine/{self.place.partition(':')[0].replace('.', '/')}.py"


DISTRIBUTED = "optimizer.distrib_optimizer"
OPTIMIZER_TEST = "tests/engine/test_optimizer.py"

# fmt: off
CHANGES = (
    Change("jit", IMPORT, "cpu:uncompiled", without_cuda,
           why="torch.compile of megatron-core's small functions needs a compiler on a CPU, takes long, gains nothing",
           touches={"jit": "disable_jit_fuser"}),
    Change("tracer", IMPORT, "cpu:untraced", without_cuda,
           why="torch's optimizers import torch._dynamo, 0.8 s of every start, so that it does not trace them"),
    Change("current-device", IMPORT, "cpu:current_device", without_cuda,
           why="every module asks torch.cuda.current_device() where to build its parameters"),
    Change("synchronize", IMPORT, "cpu:synchronize", without_cuda,
           why="pipeline stages and checkpoint saves wait for the GPU; a CPU has nothing in flight"),
    Change("streams", IMPORT, "cpu:streams", without_cuda,
           why="the MoE dispatchers copy on side streams and order them with events"),
    Change("device-literals", IMPORT, "cpu:device_literals", without_cuda,
           why='schedules, optimizers and clipping build tensors with device="cuda"',
           differs="modules of the list that a version lacks are left out"),
    Change("loaded-shards", IMPORT, "cpu:loaded_shards", without_cuda,
           why="replicas that share the reading of a checkpoint receive each other's shards in CUDA's memory",
           touches={"dist_checkpointing.mapping": "init_data"}),
    Change("tensor-cuda", IMPORT, "cpu:tensor_cuda", without_cuda,
           why="checkpoint exchange and the embedding groups move tensors with .cuda()"),
    Change("tensor-type", IMPORT, "cpu:tensor_type", without_cuda,
           why='optimizers accept a parameter by the name of its type, such as "torch.cuda.FloatTensor"'),
    Change("rng", IMPORT, "cpu:random_states", without_cuda,
           why="seeding, initialisation and recomputation fork the CUDA generator; here they fork the CPU's",
           touches={"tensor_parallel.random":
                        "_MODEL_PARALLEL_RNG_TRACKER_NAME _current_state_name _get_cuda_rng_state "
                        "_set_cuda_rng_state CudaRNGStatesTracker states_"},
           instead="the public names of the release, if it has a CPU generator"),
    Change("split-sizes", IMPORT, "cpu:split_sizes", without_cuda,
           why="the all-to-all dispatcher makes split sizes arrays only from a GPU's; all_to_all refuses tensors",
           touches={"transformer.moe.moe_utils": "maybe_move_tensor_to_cpu",
                    "transformer.moe.token_dispatcher": "maybe_move_tensor_to_cpu"}),
    Change("uneven-parts", IMPORT, "cpu:uneven_parts", without_cuda,
           why="with parallel.expert_tensor ranks gather unequally many tokens; gloo gathers equal parts alone",
           touches={"tensor_parallel.mappings": "_gather_along_first_dim _reduce_scatter_along_first_dim"},
           instead="parallel.expert with parallel.expert_tensor is refused on CPUs"),
    Change("router-gemm", IMPORT, "everywhere:router_gemm", without_te_gemm, versions="0.16.1",
           why="0.16.1's router reads te_general_gemm, which only Transformer Engine defines"),
    Change("adam", IMPORT, "everywhere:adam", without_fused_adam,
           why="the distributed optimizer resumes FusedAdam's state layout, not torch.optim's",
           touches={"optimizer": "Adam USING_PYTORCH_OPTIMIZER",
                    DISTRIBUTED: "Adam HAVE_APEX_OR_TE USING_TE_OPTIMIZER"}),
    Change("clipping", IMPORT, "everywhere:clipping", without_fused_norm,
           why="megatron-core's own gradient norm reads each parameter's norm on the host",
           touches={"optimizer.clip_grads": "l2_norm_impl multi_tensor_scale_impl"}),
    Change("one-type", IMPORT, "everywhere:one_type",
           why="the kernels of Transformer Engine and Apex read all tensors of a call as the first one's type",
           touches={"optimizer.clip_grads": "multi_tensor_applier",
                    "optimizer.optimizer": "multi_tensor_applier"}),
    Change("float64", IMPORT, "float64:apply", without_cuda,
           why="optimizer, optimizer checkpoint and loss round a float64 model to fp32",
           touches={DISTRIBUTED: "_copy_model_grads_to_main_grads _get_model_param_range_map load_state_dict",
                    "tensor_parallel.cross_entropy": "calculate_logits_max",
                    "transformer.moe.moe_utils":
                        "topk_routing_with_score_function compute_routing_scores_for_aux_loss",
                    "transformer.moe.router": "topk_routing_with_score_function compute_routing_scores_for_aux_loss"},
           instead="leave out the change: float64 runs are refused"),
    Change("checkpoint-folder", IMPORT, "everywhere:checkpoint_folder",
           why="torch makes a checkpoint's folder on every rank between two exchanges; if one cannot, all others wait",
           touches={"dist_checkpointing.strategies.filesystem_async": "prepare_local_plan"}),
    Change("stored-strides", IMPORT, "everywhere:stored_strides",
           why="from torch 2.15 on a checkpoint's metadata has strides, which torch.empty is given as it is loaded"),
    Change("shared-groups", GROUPS, "groups:shared_alone", without_cuda, test="tests/runtime/test_world.py",
           why="on CPUs a process alone has 17 groups with three threads each, which took 2.7% of a core",
           touches={"parallel_state": "create_group"}),
    Change("split-sizes-first", MODEL, "parts.layers:AllToAll", test="tests/rehearsal/test_step.py",
           why="where a router returns the experts of each token, nothing waits but for the split sizes",
           touches={"transformer.moe.token_dispatcher": "_maybe_dtoh_and_synchronize"},
           instead="copy the split sizes in dispatch_preprocess"),
    Change("accumulation", WRAPPER, "parts.accumulation:Accumulation", test="tests/engine/test_accumulation.py",
           why="gradient buffers are zeroed, added to and scaled in passes of their own, and exchanged with nobody",
           touches={"distributed.distributed_data_parallel":
                        "_make_backward_post_hook zero_grad_buffer start_grad_sync finish_grad_sync",
                    "distributed.param_and_grad_buffer":
                        "gradient_scaling_factor start_grad_sync finish_grad_sync start_param_sync"},
           instead="training on megatron-core's DistributedDataParallel, which makes more passes over memory"),
    Change("own-optimizer", BUILDING, "parts.optimizer:built_by_kind", test=OPTIMIZER_TEST,
           why="megatron-core builds only its own optimizers; a kind's own one takes the place of SGD",
           touches={"optimizer": "SGD"}),
    Change("bf16-adam", BUILDING, "parts.optimizer:bf16_by_our_adam", test=OPTIMIZER_TEST,
           why="other Adams round moments in bf16 to nearest, and gradients in bf16 are copied to fp32 for them",
           touches={"optimizer": "Adam", DISTRIBUTED: "Adam"}),
    Change("muon", BUILDING, "parts.muon:in_place_of_adam", test="tests/engine/test_muon.py",
           why="megatron-core's own Muon needs Python 3.12, fp32 and optimizer.distributed=false",
           touches={"optimizer": "Adam", DISTRIBUTED: "Adam"}),
    Change("loss-scale", OPTIMIZER, "parts.optimizer:forget_loss_scale", test=OPTIMIZER_TEST,
           why="the router's loss keeps the scale of the last optimizer in its class, in that one's shape",
           touches={"transformer.moe.moe_utils": "main_loss_backward_scale"}),
    Change("first-state", OPTIMIZER, "parts.optimizer:know_first_state", test=OPTIMIZER_TEST,
           why="megatron-core's SGD has no state before its first update, so a checkpoint cannot be loaded into it",
           touches={"optimizer.optimizer": "init_state_fn"}),
    Change("finite-norm", OPTIMIZER, "parts.optimizer:refuse_non_finite", test=OPTIMIZER_TEST,
           why="megatron-core clips by a norm even if it is NaN, knows fp32 alone, and exchanges it with nobody",
           differs="0.19 has `get_grads_for_grad_norm`, which it calls instead of `get_main_grads_for_grad_norm`",
           touches={"optimizer.optimizer": "get_grad_norm get_grad_stats_parallel_group"}),
    Change("state-order", OPTIMIZER, "parts.optimizer:number_as_stored", test=OPTIMIZER_TEST,
           why="the distributed optimizer stores a group's fp32 weights before bf16 ones, numbered as in the buffers",
           touches={DISTRIBUTED: "model_param_group_index_map model_fp32_groups model_float16_groups"}),
    Change("learning-rates", OPTIMIZER, "parts.optimizer:forget_rates", test=OPTIMIZER_TEST,
           why="learning rates are kept in every group, and from 0.17 on a checkpoint's groups are found by them"),
    Change("settings", OPTIMIZER, "parts.optimizer:keep_settings", test=OPTIMIZER_TEST,
           why="loading restores the checkpoint's betas and eps, but the config should decide them",
           touches={"optimizer.optimizer": "load_state_dict"}),
    Change("own-groups", OPTIMIZER, "parts.optimizer:know_groups", test=OPTIMIZER_TEST,
           why="the plain optimizer tells groups apart by few settings: equal ones get each other's moments",
           touches={"optimizer.optimizer": "_filter_and_reorder_param_groups load_state_dict"},
           instead="optimizer.distributed=false with optimizer.groups or µP is refused on resume"),
    Change("own-shards", OPTIMIZER, "parts.optimizer_shards:save_own_shards", test=OPTIMIZER_TEST,
           why="a save gathers the whole optimizer state on every data-parallel rank, in host memory",
           touches={DISTRIBUTED:
                        "_get_main_param_and_optimizer_states _set_main_param_and_optimizer_states "
                        "sharded_param_state_fully_reshardable load_parameter_state_from_fully_reshardable"},
           instead="leave out the change: megatron-core gathers the state on every rank"),
    Change("update-once", OPTIMIZER, "parts.update:leave_out_redundant_work", test="tests/engine/test_redundant.py",
           why="updated fp32 weights are copied onto themselves, and each optimizer of a chain gathers all weights",
           touches={DISTRIBUTED: "_copy_main_params_to_model_params _get_model_param_range_map",
                    "optimizer.optimizer": "step_with_ready_grads"},
           instead="leave out the change: the update is slower"),
    Change("fused-update", OPTIMIZER, "parts.update:fuse_update", test="tests/engine/test_fused_update.py",
           why="gradients are read and written to clip them, those in bf16 copied to fp32, all weights cast",
           touches={DISTRIBUTED:
                        "_copy_main_params_to_model_params _copy_model_grads_to_main_grads "
                        "_get_model_param_range_map",
                    "optimizer.optimizer": "get_grad_norm"},
           instead="leave out the change: the update is slower"),
    Change("gathered-in-time", OPTIMIZER, "parts.gathering:watch_first_forward",
           test="tests/distributed/test_gathering.py",
           why="a weight read before the overlapped gather delivers it is the last step's, and nothing fails",
           differs="under 0.19, asking for a weight's `data` is no read"),
    Change("own-writer", SAVE, "parts.saving:plan_save", test="tests/checkpoint/test_lifecycle.py",
           why="a rank that fails in a save leaves the others waiting, and writers survive the rank that started them",
           touches={"dist_checkpointing.strategies.filesystem_async": "_results_queue write_preloaded_data",
                    "dist_checkpointing.strategies.torch": "_get_save_and_finalize_callbacks"},
           instead="checkpoints by megatron-core's own writer, in the foreground",
           differs="from 0.17 on the writer has to be named"),
    Change("fp8-linear", ASKED, "parts.layers:multiply_by", optional=True, test="tests/distributed/test_layouts.py",
           why="tensor-parallel linears multiply in the weights' type; kernels.linear=fp8 replaces the product",
           touches={"tensor_parallel.layers": "_forward_impl"},
           instead="kernels.linear=fp8 is refused"),
)
# fmt: on

_applied: list[str] | None = None


def install(skip: frozenset[str] = frozenset()) -> list[str]:
    """Apply the changes on import that this machine needs, except those in `skip`, once; return their names."""
    global _applied
    if unknown := skip - {change.name for change in CHANGES}:
        raise ValueError(f"no change named {sorted(unknown)}; there are: {', '.join(c.name for c in CHANGES)}")
    if _applied is None:
        _applied = []
        _quiet()
        for change in _of(IMPORT, skip):
            change.apply()
            _applied.append(change.name)
    return list(_applied)


def apply(when: str, *args: Any, skip: frozenset[str] = frozenset()) -> None:
    """Apply the changes of a stage to what megatron-core has built."""
    for change in _of(when, skip):
        change.apply(*args)


@contextmanager
def during(when: str, *args: Any, skip: frozenset[str] = frozenset()) -> Iterator[None]:
    """Apply the changes of a stage for as long as megatron-core builds something."""
    with ExitStack() as stack:
        for change in _of(when, skip):
            stack.enter_context(change.apply(*args))
        yield


def _of(when: str, skip: frozenset[str]) -> Iterator[Change]:
    return (change for change in CHANGES if change.when == when and change.name not in skip and change.needed())


def _quiet() -> None:
    """Silence the start-up warnings of megatron-core and torch about missing libraries; `doctor` reports them."""
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (are|is) not installed")
    # 0.19's escape sequences, which Python 3.12 and later warn of when they compile it
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[/\\]megatron[/\\]core[/\\]")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # nvcc without a GPU, as on login nodes
