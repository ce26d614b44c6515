"""Runs to rehearse: name -> number of ranks, config and overrides."""

from megatron_blackmamba.layers import all_kinds
from tests.rehearsal import Case

BLACKMAMBA = ["training.micro_batch=6", "model.pattern=ME"]
ONE = [*BLACKMAMBA, "parallel.expert=1", "training.global_batch=6"]
NARROW = ["optimizer.gradients=bf16", "optimizer.moments=bf16"]
EIGHT = [*BLACKMAMBA, "training.global_batch=96"]
HYBRID = ["model.pattern=M*", "model.attention.heads=12", "model.attention.kv_heads=4"]
ANY_KIND = ["model.mlp_hidden_size=3072", "model.attention.heads=9", "model.top_k=1", "training.global_batch=6"]

LAYOUTS = {
    "one_gpu": Case(1, "blackmamba_1.5b", [*ONE, "training.global_batch=12"]),
    "ep8": Case(8, "blackmamba_1.5b", EIGHT),
    "ep8_allgather": Case(8, "blackmamba_1.5b", [*EIGHT, "kernels.dispatcher=allgather"]),
    "tp2_ep4": Case(8, "blackmamba_1.5b", [*EIGHT, "parallel.tensor=2", "parallel.expert=4"]),
    "pp2": Case(2, "blackmamba_1.5b", [*ONE, "model.pattern=MEME", "training.global_batch=12", "parallel.pipeline=2"]),
    "recompute": Case(1, "blackmamba_1.5b", [*ONE, "training.recompute=layers", *NARROW]),
    "eod_reset": Case(1, "blackmamba_1.5b", [*ONE, "model.eod_reset=0", "kernels.scan_states=recompute"]),
    "hybrid_cp2": Case(2, "blackmamba_1.5b", [*ONE, *HYBRID, "parallel.context=2", "model.eod_reset=0"]),
    "fp8": Case(8, "blackmamba_1.5b", [*EIGHT, "kernels.linear=fp8"]),
    "softmax": Case(8, "blackmamba_1.5b", [*EIGHT, "model.router.kind=softmax"]),
    "fp32": Case(
        2,
        "blackmamba_1.5b",
        [*ONE, "training.precision=fp32", "optimizer.distributed=false", "training.global_batch=12"],
    ),
}
KINDS = {
    f"kind_{kind.name.replace(' ', '_')}": Case(
        1, "blackmamba_1.5b", [*ONE, f"model.pattern={kind.letter}{kind.letter}", *ANY_KIND]
    )
    for kind in all_kinds()
}
CASES = LAYOUTS | KINDS
