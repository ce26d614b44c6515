"""Train the same small run under many layouts on real gloo ranks, and record what every rank saw.

In float64 no rounding decides between two experts, so layouts agree to the last digits on every processor.

`python -m tests.distributed.layouts_probe FOLDER`: torch and megatron-core are loaded once, the ranks are forks.
"""

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_blackmamba import data, model
from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.layers import kind_of
from megatron_blackmamba.model.initialise import shards
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.step.feed import micro_batches
from megatron_blackmamba.training.step.learning_rates import Schedule
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.step import Batch, Step
from tests.layers.sizes import LETTERS, small
from tests.runtime.ranks import fork_ranks, import_once

SMALL = ["data.sequence_length=32", "training.global_batch=8", "training.micro_batch=2", "training.tokens=51200"]
TRANSFORMER = [
    "model.pattern=*-*-",
    "model.mlp_hidden_size=128",
    "model.attention.heads=4",
    "model.attention.kv_heads=2",
]
TRANSFORMER_MOE = ["model.pattern=*E*E", "model.attention.heads=4"]
MAMBA2 = ["model.pattern=SERE", "model.mamba2.head_dim=16", "model.mamba2.state_size=16", "model.mamba2.groups=2"]
MAMBA2 += ["model.mamba3.head_dim=16", "model.mamba3.state_size=16", "model.mamba3.groups=2"]
MIMO = [*MAMBA2, "model.pattern=RERE", "model.mamba3.rank=3", "model.mamba3.output_norm=true", "model.eod_reset=397"]
ALL = [*MAMBA2, *small(), f"model.pattern='{LETTERS}'", "model.eod_reset=397"]
PARALLEL = ["model.arrangement=parallel"]
CUTTABLE = "".join(letter for letter in LETTERS if kind_of(letter).cut is None)
CUT = [
    *MAMBA2,
    *small(CUTTABLE),
    f"model.pattern='{CUTTABLE}'",
    "model.attention.heads=4",
    "model.attention.kv_heads=2",
    "model.eod_reset=397",
]  # a letter that ends documents, so that some end where sequences are cut
DELTA = ["model.pattern=GEGE", "model.delta.head_dim=16", "model.delta.key_dim=8", "model.delta.key_heads=4"]
KDA = [*DELTA, "model.delta.variant=kda", "model.delta.decay_rank=6"]
DELTA += ["model.delta.variant=gdn2", "model.delta.negative_eigenvalues=true", "model.eod_reset=397"]
ZAYA = ["model.pattern=EMEE", "model.router.kind=zaya", "model.router.hidden_size=24", "model.residual_scaling=true"]
ZAYA += ["model.router.bias_update_rate=0.01", "model.eod_reset=397"]
SKIP = [*ZAYA, "model.router.skip=true"]
DECAY = ["optimizer.weight_decay=0.1"]  # so that decaying what should not be shows in every comparison
BF16 = ["training.precision=bf16", "training.global_batch=16", "data.sequence_length=64"]
FP8 = [*BF16, "kernels.linear=fp8"]
NARROW = [*BF16, "optimizer.gradients=bf16", "optimizer.moments=bf16"]
FP32 = ["training.precision=fp32"]
ROUTERS = {  # two experts a token, and one for all
    "sinkhorn": ["model.shared_expert_hidden_size=64"],
    "softmax": ["model.router.kind=softmax"],
    "softmax_sequence": ["model.router.kind=softmax", "model.router.aux_loss=0.5", "model.router.scope=sequence"],
    "softmax_groups": [
        "model.router.kind=softmax",
        "model.router.aux_loss=0.5",
        "model.router.groups=4",
        "model.router.group_top_k=2",
    ],
    "expert_bias_groups": [
        "model.router.kind=expert_bias",
        "model.router.bias_update_rate=0.02",
        "model.router.groups=4",
    ],
    "expert_bias": ["model.router.kind=expert_bias", "model.router.bias_update_rate=0.02"],
    "expert_choice": ["model.router.kind=expert_choice"],
}
ROUTER_LAYOUTS = {
    "solo": (1, []),
    "tp2_ep2": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "cp2_ep2": (2, ["parallel.context=2", "parallel.expert=2"]),
    "pp2_ep2": (4, ["parallel.pipeline=2", "parallel.expert=2", "training.recompute=layers"]),
}
STABLE = [*MAMBA2, "model.pattern=MESE", "model.mamba_norms=true", "model.z_loss=0.02", "model.router.z_loss=0.03"]
STABLE += ["model.logit_softcap=3", "model.multipliers.embedding=3", "model.mup.base_width=16"]
ATTENTIVE = [*TRANSFORMER_MOE, "model.attention.kv_heads=2", "model.attention.qk_norm=true", "model.z_loss=0.02"]
ATTENTIVE += ["model.router.kind=softmax", "model.router.z_loss=0.03", "model.multipliers.attention=0.3"]
ATTENTIVE += ["model.multipliers.residual=0.5", "model.mup.base_width=32"]
AHEAD = ["model.mtp.pattern=ME", "model.mtp.loss=0.5", "model.eod_reset=397"]
UNTIED = [*AHEAD, "model.pattern=M*EE", "model.attention.heads=4", "model.mtp.pattern=*E", "model.tie_embeddings=false"]
UNTIED += ["model.z_loss=0.02", "model.final_norm=rms"]
NEMOTRON = [  # no size is another one divided
    *MAMBA2,
    *(
        "model.pattern=SE*-",
        "model.mamba2.heads=6",
        "model.mamba2.time_step_min=0.02",
        "model.attention.heads=4",
        "model.attention.kv_heads=2",
    ),
    *("model.attention.head_dim=10", "model.attention.rotary=false", "model.mlp_hidden_size=80", "model.gated=false"),
    *("model.activation=relu2", "model.final_norm=rms", "model.tie_embeddings=false", "model.top_k=2"),
    *("model.router.kind=expert_bias", "model.router.scale=2.5", "model.router.bias=false"),
    "model.shared_expert_hidden_size=48",
]
LATENT = [*NEMOTRON, "model.pattern=SEEE", "model.latent_size=20", "model.eod_reset=397"]
MIXTRAL = [*TRANSFORMER_MOE, "model.final_norm=rms", "model.top_k=2", "model.router.kind=softmax"]
MIXTRAL += ["model.router.normalize=true", "model.router.bias=false", "model.activation=relu2"]
WHOLE = ["model.router.kind=softmax", "model.top_k=2", "model.router.aux_loss=0.5", "model.router.scope=data"]
FEW, MORE, TWENTY = 3, 4, 20
"""A wrong gradient shows in the norm of the first step, a wrong update in the loss of the second."""
LONG = ("dp2", "ep2", "pp2", "tp2", "zaya_solo", "zaya_pp2_ep2", "delta_solo", "delta_cp4", "delta_tp2_ep2")
LONG += ("latent_solo", "latent_pp2")
LONG_FAMILIES = ("zaya", "latent", "delta", "mamba2", "parallel", "transformer", "stable", "attentive", "ahead")
LONG_ROUTERS = ("solo", "cp2_ep2")

RUNS: dict[str, tuple[int, list[str]]] = {
    "solo": (1, []),
    "dp2": (2, []),
    "ep2": (2, ["parallel.expert=2"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "tp2": (2, ["parallel.tensor=2"]),
    "etp2": (2, ["parallel.tensor=2", "parallel.expert_tensor=2"]),
    "tp2_ep2": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "tp2_pp2": (4, ["parallel.tensor=2", "parallel.expert_tensor=2", "parallel.pipeline=2"]),
    "allgather": (2, ["parallel.expert=2", "kernels.dispatcher=allgather"]),
    "recompute": (2, ["parallel.expert=2", "training.recompute=layers"]),
    "bf16_solo": (1, BF16),
    "bf16_ep2": (2, [*BF16, "parallel.expert=2"]),
    "bf16_tp2": (2, [*BF16, "parallel.tensor=2"]),
    "fp8_solo": (1, FP8),
    "fp8_ep2": (2, [*FP8, "parallel.expert=2"]),
    "fp8_tp2": (2, [*FP8, "parallel.tensor=2"]),
    "narrow_solo": (1, NARROW),
    "narrow_ep2": (2, [*NARROW, "parallel.expert=2"]),
    "narrow_tp2": (2, [*NARROW, "parallel.tensor=2"]),
    "fp32_solo": (1, FP32),
    "fp32_ep2": (2, [*FP32, "parallel.expert=2"]),
    "fp32_cp2": (2, [*FP32, "parallel.context=2"]),
    "letters_cut_solo": (1, CUT),
    "letters_cut_cp2": (2, [*CUT, "parallel.context=2", "training.recompute=layers"]),
    "letters_cut_cp2_tp2": (4, [*CUT, "parallel.context=2", "parallel.tensor=2"]),
    "letters_solo": (1, ALL),
    "letters_tp2": (2, [*ALL, "parallel.tensor=2"]),
    "shipped_solo": (1, []),
    "shipped_dp2": (2, []),
    "mamba2_solo": (1, MAMBA2),
    "mamba2_ep2": (2, [*MAMBA2, "parallel.expert=2"]),
    "mamba2_tp2": (2, [*MAMBA2, "parallel.tensor=2"]),
    "mamba2_pp2": (2, [*MAMBA2, "parallel.pipeline=2", "training.recompute=layers"]),
    "delta_solo": (1, DELTA),
    "delta_cp2_tp2": (4, [*DELTA, "parallel.context=2", "parallel.tensor=2"]),
    "delta_cp4": (4, [*DELTA, "parallel.context=4", "training.recompute=layers"]),
    "delta_tp2_ep2": (4, [*DELTA, "parallel.tensor=2", "parallel.expert=2"]),
    "delta_pp2": (2, [*DELTA, "parallel.pipeline=2"]),
    "kda_solo": (1, KDA),
    "kda_cp2": (2, [*KDA, "parallel.context=2"]),
    "kda_tp2": (2, [*KDA, "parallel.tensor=2"]),
    "gdn_solo": (1, [*KDA, "model.delta.variant=gdn", "model.delta.decay_rank=null"]),
    "gdn_cp2_tp2": (
        4,
        [*KDA, "model.delta.variant=gdn", "model.delta.decay_rank=null", "parallel.context=2", "parallel.tensor=2"],
    ),
    "zaya_solo": (1, ZAYA),
    "zaya_tp2": (2, [*ZAYA, "parallel.tensor=2"]),
    "zaya_pp2": (2, [*ZAYA, "parallel.pipeline=2"]),
    "zaya_ep2": (2, [*ZAYA, "parallel.expert=2", "training.recompute=experts"]),
    "zaya_cp4": (4, [*ZAYA, "parallel.context=4"]),
    "zaya_tp2_ep2": (4, [*ZAYA, "parallel.tensor=2", "parallel.expert=2", "training.recompute=layers"]),
    "zaya_pp4": (4, [*ZAYA, "parallel.pipeline=4", "training.recompute=experts"]),
    "zaya_pp2_tp2": (4, [*ZAYA, "parallel.pipeline=2", "parallel.tensor=2", "training.recompute=layers"]),
    "zaya_pp2_ep2": (4, [*ZAYA, "parallel.pipeline=2", "parallel.expert=2"]),
    "zaya_cp2_pp2": (4, [*ZAYA, "parallel.context=2", "parallel.pipeline=2"]),
    "zaya_skip_solo": (1, SKIP),
    "zaya_skip_pp2_tp2": (4, [*SKIP, "parallel.pipeline=2", "parallel.tensor=2", "training.recompute=layers"]),
    "zaya_skip_tp2_ep2": (4, [*SKIP, "parallel.tensor=2", "parallel.expert=2"]),
    "zaya_skip_ep2": (2, [*SKIP, "parallel.expert=2", "kernels.dispatcher=allgather"]),
    "zaya_skip_etp2": (2, [*SKIP, "parallel.tensor=2", "parallel.expert_tensor=2"]),
    "zaya_skip_cp4": (4, [*SKIP, "parallel.context=4"]),
    "zaya_skip_cp2_pp2": (4, [*SKIP, "parallel.context=2", "parallel.pipeline=2", "training.recompute=experts"]),
    "zaya_parallel_solo": (1, [*ZAYA, *PARALLEL, "model.residual_scaling=false"]),
    "zaya_parallel_pp2": (2, [*ZAYA, *PARALLEL, "model.residual_scaling=false", "parallel.pipeline=2"]),
    "mimo_solo": (1, MIMO),
    "mimo_cp2_tp2": (4, [*MIMO, "parallel.context=2", "parallel.tensor=2"]),
    "mimo_pp2_ep2": (4, [*MIMO, "parallel.pipeline=2", "parallel.expert=2", "training.recompute=layers"]),
    "parallel_solo": (1, PARALLEL),
    "parallel_tp2": (2, [*PARALLEL, "parallel.tensor=2", "training.recompute=layers"]),
    "parallel_pp2": (2, [*PARALLEL, "parallel.pipeline=2", "training.recompute=experts"]),
    "transformer_solo": (1, TRANSFORMER),
    "transformer_tp2": (2, [*TRANSFORMER, "parallel.tensor=2"]),
    "transformer_moe_solo": (1, TRANSFORMER_MOE),
    "transformer_moe_ep2": (2, [*TRANSFORMER_MOE, "parallel.expert=2"]),
    "stable_solo": (1, STABLE),
    "stable_tp2": (2, [*STABLE, "parallel.tensor=2"]),
    "stable_pp2": (2, [*STABLE, "parallel.pipeline=2", "training.recompute=layers"]),
    "stable_ep2": (2, [*STABLE, "parallel.expert=2"]),
    "stable_cp2": (2, [*STABLE, "parallel.context=2"]),
    "whole_solo": (1, WHOLE),
    "whole_tp2_cp2": (4, [*WHOLE, "parallel.tensor=2", "parallel.context=2"]),
    "whole_pp2": (2, [*WHOLE, "parallel.pipeline=2", "training.recompute=layers"]),
    "whole_ep2": (2, [*WHOLE, "parallel.expert=2", "training.micro_batch=1"]),  # the same micro-batches, in two halves
    "ahead_solo": (1, AHEAD),
    "ahead_dp2": (2, AHEAD),
    "ahead_ep2": (2, [*AHEAD, "parallel.expert=2", "training.recompute=layers"]),
    "ahead_tp2": (2, [*AHEAD, "parallel.tensor=2"]),
    "ahead_norm_solo": (1, [*AHEAD, "model.mtp.reads=norm"]),
    "ahead_norm_tp2_ep2": (4, [*AHEAD, "model.mtp.reads=norm", "parallel.tensor=2", "parallel.expert=2"]),
    "ahead_pp2": (2, [*AHEAD, "parallel.pipeline=2"]),
    "ahead_pp4": (4, [*AHEAD, "parallel.pipeline=4", "training.recompute=layers"]),
    "ahead_cp2": (2, [*AHEAD, "parallel.context=2"]),
    "ahead_pp2_cp2": (4, [*AHEAD, "parallel.pipeline=2", "parallel.context=2"]),
    "ahead_pp2_ep2": (4, [*AHEAD, "parallel.pipeline=2", "parallel.expert=2"]),
    "ahead_norm_cp2_ep2": (2, [*AHEAD, "model.mtp.reads=norm", "parallel.context=2", "parallel.expert=2"]),
    "ahead_muon_solo": (1, [*UNTIED, "optimizer.kind=muon"]),
    "ahead_muon_pp2_cp2": (4, [*UNTIED, "optimizer.kind=muon", "parallel.pipeline=2", "parallel.context=2"]),
    "ahead_untied_solo": (1, UNTIED),
    "ahead_untied_pp2": (2, [*UNTIED, "parallel.pipeline=2"]),
    "ahead_untied_tp2_pp2": (4, [*UNTIED, "parallel.tensor=2", "parallel.pipeline=2"]),
    "ahead_untied_cp2_tp2": (4, [*UNTIED, "parallel.context=2", "parallel.tensor=2"]),
    "ahead_untied_pp2_cp2": (4, [*UNTIED, "parallel.pipeline=2", "parallel.context=2"]),
    "attentive_solo": (1, ATTENTIVE),
    "attentive_tp2_ep2": (4, [*ATTENTIVE, "parallel.tensor=2", "parallel.expert=2"]),
    "attentive_pp2": (2, [*ATTENTIVE, "parallel.pipeline=2"]),
    "nemotron_solo": (1, NEMOTRON),
    "nemotron_tp2_ep2": (4, [*NEMOTRON, "parallel.tensor=2", "parallel.expert=2"]),
    "nemotron_pp2": (4, [*NEMOTRON, "parallel.pipeline=2", "training.recompute=layers"]),
    "latent_solo": (1, LATENT),
    "latent_tp2": (2, [*LATENT, "parallel.tensor=2", "training.recompute=experts"]),
    "latent_ep2": (2, [*LATENT, "parallel.expert=2"]),
    "latent_etp2": (2, [*LATENT, "parallel.tensor=2", "parallel.expert_tensor=2"]),
    "latent_pp2": (4, [*LATENT, "parallel.pipeline=2", "training.recompute=layers"]),
    "latent_cp2": (2, [*LATENT, "parallel.context=2"]),
    "latent_tp2_ep2": (4, [*LATENT, "parallel.tensor=2", "parallel.expert=2"]),
    "latent_choice_solo": (1, [*LATENT, "model.router.kind=expert_choice", "model.router.scale=1"]),
    "latent_choice_ep2": (
        2,
        [*LATENT, "model.router.kind=expert_choice", "model.router.scale=1", "parallel.expert=2"],
    ),
    "mixtral_solo": (1, MIXTRAL),
    "mixtral_tp2": (2, [*MIXTRAL, "parallel.tensor=2"]),
    **{
        f"{router}_{layout}": (ranks, ["model.top_k=2", *settings, *overrides])
        for router, settings in ROUTERS.items()
        for layout, (ranks, overrides) in ROUTER_LAYOUTS.items()
    },
}


class Choices:
    """The experts of every token of the first step, as the bits of a number, by layer and sample."""

    def __init__(self, language_model: model.LanguageModel, part: int):
        self.part = part
        self.samples: list[list[int]] = []
        self.seen: list[tuple[str, int, list[list[int]]]] = []
        self.calls: dict[str, int] = {}
        self.hooks = [
            block.mixer.router.register_forward_hook(
                lambda router, _inputs, output, name=name: self.keep(name, router, output.chosen)
            )
            for name, block in language_model.decoder.layers.named_children()
            if hasattr(block.mixer, "router")
        ]

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.samples.append(batch["sample_ids"].tolist())
            yield batch

    def keep(self, layer: str, router: torch.nn.Module, chosen: torch.Tensor) -> None:
        if router.runs_twice and torch.is_grad_enabled():
            return
        call = self.calls[layer] = self.calls.get(layer, -1) + 1
        samples = len(self.samples[0])
        if chosen.dtype == torch.bool:
            bits_T = (chosen.long() << torch.arange(chosen.shape[1])).sum(dim=1)
        else:
            bits_T = (1 << chosen).sum(dim=1)
        chosen_BS = bits_T.view(-1, samples).t()
        self.seen.append((layer, call, chosen_BS.tolist()))

    def done(self) -> dict[tuple[str, int, int], list[int]]:
        for hook in self.hooks:
            hook.remove()
        return {
            (layer, sample, self.part): row
            for layer, call, rows in self.seen
            for sample, row in zip(self.samples[call], rows, strict=True)
        }


def steps_of(name: str) -> int:
    """Return how long a run is: some layouts 20 steps, each kind, arrangement and router 4, and more layouts 3."""
    if name == "solo":
        return 50
    if name.startswith(tuple(ROUTERS)):
        return MORE if name.endswith(LONG_ROUTERS) else FEW
    if name in LONG:
        return TWENTY
    return MORE if name.startswith(LONG_FAMILIES) else FEW


def describe(run: RunConfig, steps: int) -> dict:
    place = world.start(run.parallel)
    language_model = model.build(run, place)
    initial = _digests(language_model)
    trainable = make_trainable(run, language_model, place)
    plan = data.build(run.data, vocab_size=run.model.vocab_size, total_samples=run.steps * run.training.global_batch)
    step = Step(run, place, trainable, len(plan.source_names))
    schedule = Schedule(run, trainable.optimizer)
    batches = micro_batches(run, place, plan.train)
    choices = Choices(language_model, place.context_rank * run.parallel.tensor + place.tensor_rank)
    losses, norms, expert_tokens, z_losses, mtp_losses = [], [], [], [], []
    for number in range(steps):
        schedule.set(number * run.training.global_batch)
        found = step.gradients(choices.watch(batches) if number == 0 else batches)
        if number == 0:
            chosen = choices.done()
        losses.append(found.loss)
        expert_tokens.append(found.expert_tokens)
        z_losses.append(found.z_loss)
        mtp_losses.append(found.mtp_loss)
        norms.append(step.update().grad_norm)
    trainable.settle()
    log_sums = {
        layer: block.mixer.router.measured().get("z_loss", (0.0, 0.0))
        for layer, block in language_model.decoder.layers.named_children()
        if hasattr(block.mixer, "router")
    }
    digests = {"initial": initial, "final": _digests(language_model)}
    seen = _gather({**digests, "choices": chosen, "log_sums": log_sums})
    decay = [group["wd_mult"] for group in trainable.optimizer.param_groups]
    world.shutdown()
    return {
        "losses": losses,
        "norms": norms,
        "expert_tokens": expert_tokens,
        "z_losses": z_losses,
        "mtp_losses": mtp_losses,
        "log_sums": [rank["log_sums"] for rank in seen],
        "choices": _join_choices([rank["choices"] for rank in seen]),
        "initial": [rank["initial"] for rank in seen],
        "final": [rank["final"] for rank in seen],
        "wd_mult": decay,
    }


def _digests(language_model: model.LanguageModel) -> dict[tuple, str]:
    """A fingerprint of every shard this rank holds, by name, place and shape."""
    return {
        (s.key, tuple(s.global_offset), tuple(s.local_shape)): hashlib.sha256(
            s.data.detach().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for s in shards(language_model.sharded_state_dict())
    }


def _join_choices(ranks: list[dict[tuple[str, int, int], list[int]]]) -> dict[tuple[str, int], list[int]]:
    """Join whole sequences: context- and tensor-parallel ranks hold consecutive parts of each."""
    parts: dict[tuple[str, int], dict[int, list[int]]] = {}
    for rank in ranks:
        for (layer, sample, part), row in rank.items():
            parts.setdefault((layer, sample), {})[part] = row
    return {key: [expert for _, row in sorted(rows.items()) for expert in row] for key, rows in parts.items()}


def _gather(value: object) -> list:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    import_once()
    errors = {}
    for name in names or RUNS:
        ranks, overrides = RUNS[name]
        shipped = name.startswith("shipped")  # the config as it is, but for its precision
        changes = [] if shipped else [*SMALL, *DECAY, "training.overlap=true"]
        run = load("tiny", [*changes, "training.precision=fp64", "data.workers=0", *overrides])

        def body(run: RunConfig = run, name: str = name, steps: int = steps_of(name)) -> bool:
            seen = describe(run, steps)
            if int(os.environ.get("RANK", 0)) == 0:
                (folder / f"{name}.pickle").write_bytes(pickle.dumps(seen))
            return True

        answers = fork_ranks(ranks, body, alone=ranks == 1)
        problems = [answer.get("trace") or answer.get("error") for answer in answers if "error" in answer]
        if problems:
            errors[name] = problems[0]
    print(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
