"""Options for stability and width transfer: losses, weights and metrics of a run beside plain PyTorch, in float64."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.training.step.learning_rates import Schedule
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.step import Step
from tests.model.conftest import place
from tests.reference.training import Plain, Recipe
from tests.thorough import unless

__all__ = ["place"]
STEPS = 20
SMALL = ["training.precision=fp64", "data.sequence_length=16", "training.global_batch=4", "training.micro_batch=2"]
SMALL += ["model.hidden_size=32", "model.vocab_size=64", "model.expert_hidden_size=24", "model.experts=4"]
SMALL += ["model.mamba2.head_dim=16", "model.mamba2.state_size=6", "model.mamba2.groups=2", "model.state_size=8"]
SMALL += ["model.mamba3.head_dim=16", "model.mamba3.state_size=8", "model.mamba3.groups=2"]
SMALL += ["model.delta.head_dim=16", "model.delta.key_dim=6", "model.delta.key_heads=2"]
SMALL += ["model.attention.heads=4", "model.attention.kv_heads=2", "optimizer.weight_decay=0.1", "data.workers=0"]
NORMS = ["model.mamba_norms=true", "model.attention.qk_norm=true"]
LOSSES = ["model.z_loss=0.02", "model.router.z_loss=0.03"]
WIDTH = ["model.multipliers.embedding=3", "model.multipliers.residual=0.4", "model.multipliers.logits=1.5"]
WIDTH += ["model.multipliers.attention=0.2", "model.mup.base_width=8", "optimizer.groups.experts.learning_rate=0.5"]
MATRICES = ("in_proj", "x_proj", "out_proj", "linear_qkv", "linear_proj", "router")
MULTIPLIERS = {"embedding": 3.0, "residual": 0.4, "logits": 1.5 * 4, "attention": 0.2 / 4}
FACTORS = {f"{name}.weight": (1 / 4, 4.0) for name in MATRICES} | {"experts.fc1": (1 / 8, 4.0), "fc2": (1 / 8, 4.0)}
FACTORS |= {"latent_down.weight": (1 / 8, 4.0), "latent_up.weight": (1 / 8, 4.0)}
FACTORS["dt_proj.weight"] = 1 / 2, 2.0  # its rank is 2, and 1 in the base model
ZAYA = ["model.router.hidden_size=12", "model.router.bias_update_rate=0.03"]
BALANCE = ["model.router.aux_loss=0.5", "model.top_k=2", "optimizer.learning_rate=0.01"]
GROUPS = ["model.router.groups=4", "model.router.group_top_k=2"]
CASES = {
    "width": ("MS*E", "sinkhorn", WIDTH),
    "latent experts": ("*EE", "softmax", [*WIDTH, "model.router.aux_loss=0", "model.latent_size=12"]),
    "extra depth": ("MS*E", "sinkhorn", ["model.mtp.pattern=*SE", "model.mtp.loss=0.3", *LOSSES]),
    "extra depth behind the norm": ("ME", "sinkhorn", ["model.mtp.pattern=M", "model.mtp.reads=norm", *LOSSES]),
    "all, sinkhorn": ("MS*E", "sinkhorn", [*NORMS, *LOSSES, "model.logit_softcap=2.5"]),
    "all, softmax": ("MS*E", "softmax", [*NORMS, *LOSSES, "model.logit_softcap=2.5", "model.router.aux_loss=0"]),
    "losses alone": ("ME", "sinkhorn", LOSSES),
    "cap alone": ("M", "sinkhorn", ["model.logit_softcap=2.5"]),
    "nothing": ("MS*E", "sinkhorn", []),
    "Mamba-3": ("RE", "sinkhorn", []),
    "Mamba-3 with a norm behind it": ("R", "sinkhorn", ["model.mamba3.output_norm=true"]),
    "GDN": ("GE", "sinkhorn", []),
    "KDA": ("GE", "softmax", ["model.router.aux_loss=0", "model.delta.variant=kda", "model.delta.decay_rank=4"]),
    "GDN-2": ("GE", "sinkhorn", ["model.delta.variant=gdn2", "model.delta.negative_eigenvalues=true"]),
    "ZAYA1": ("EMEE", "zaya", ["model.residual_scaling=true", *ZAYA, "model.router.z_loss=0.03", "model.z_loss=0.02"]),
    "ZAYA1, a choice that skips": ("EME", "zaya", [*ZAYA, "model.router.skip=true", *LOSSES]),
    "ZAYA1, an extra depth": ("ME", "zaya", [*ZAYA, "model.mtp.pattern=EE", "model.mtp.loss=0.3", *LOSSES]),
    "balanced sequences": ("ME", "softmax", [*BALANCE, "model.router.scope=sequence"]),
    "a balanced batch": ("ME", "softmax", [*BALANCE, "model.router.scope=data"]),
    "groups of experts": ("ME", "softmax", [*BALANCE, "model.experts=8", *GROUPS]),
    "residual scaling alone": ("ME", "sinkhorn", ["model.residual_scaling=true", "model.multipliers.residual=0.4"]),
    "Mamba-3 with several inputs": ("RR", "sinkhorn", ["model.mamba3.output_norm=true", "model.mamba3.rank=3"]),
}


EVERYDAY = (
    "ZAYA1, a choice that skips",
    "balanced sequences",
    "a balanced batch",
    "groups of experts",
    "ZAYA1",
    "residual scaling alone",
    "width",
    "latent experts",
    "extra depth",
    "extra depth behind the norm",
    "all, sinkhorn",
    "all, softmax",
    "Mamba-3",
    "GDN-2",
)


@pytest.mark.parametrize("name", unless(EVERYDAY, CASES))
def test_twenty_steps_match_plain_pytorch(name, place):
    pattern, router, options = CASES[name]
    run = load("tiny", [*SMALL, f'model.pattern="{pattern}"', f"model.router.kind={router}", *options])
    trainable = make_trainable(run, model.build(run, place), place)
    step = Step(run, place, trainable, sources=1)
    _move_off_initial_values(trainable.model)
    weights = {name: weight.detach().clone() for name, weight in trainable.model.named_parameters()}
    with_losses = bool(run.model.z_loss)
    recipe = Recipe(
        *(pattern, run.model.mamba2.groups, run.model.attention.heads, run.model.attention.kv_heads, router),
        **(run.model.model_dump(include={"z_loss", "logit_softcap"})),
        router_z_loss=run.model.router.z_loss,
        extra=run.model.mtp.pattern or "",
        extra_loss=run.model.mtp.loss,
        extra_reads=run.model.mtp.reads,
        **({**MULTIPLIERS, "factors": FACTORS} if run.model.mup.base_width else {}),
    )
    if router == "softmax":
        recipe.aux_loss, recipe.scope = run.model.router.aux_loss, run.model.router.scope
    recipe.top_k, recipe.expert_groups = run.model.top_k, (run.model.router.groups, run.model.router.group_top_k)
    recipe.bias_rate, recipe.residual = run.model.router.bias_update_rate, run.model.multipliers.residual
    plain = Plain(recipe, weights)
    random = torch.Generator().manual_seed(0)
    schedule = Schedule(run, trainable.optimizer)
    for number in range(STEPS):
        recipe.rate = schedule.set(4 * number)
        batches = [_batch(random) for _ in range(2)]
        found = step.gradients(iter(batches))
        assert step.update().applied
        loss, squares, of_routers = plain.step(batches)
        assert found.loss == pytest.approx(loss, abs=1e-10)
        assert found.z_loss == (pytest.approx(squares, abs=1e-10) if with_losses else None)
        if run.model.mtp.pattern:
            extra, counted = (sum(each) for each in zip(*plain.seen_extra[-2:], strict=True))
            assert found.mtp_loss == pytest.approx(extra / counted, abs=1e-10)
        for layer, mean in of_routers.items():
            measured = trainable.model.decoder.layers[layer].mixer.router.measured()
            skipped, chosen = measured.pop("skipped", (0, 1))
            assert (skipped / chosen > 0.01) == run.model.router.skip
            assert measured.keys() - {"bias_range"} == ({"z_loss"} if with_losses else set())
            if with_losses:
                assert measured["z_loss"][0] / measured["z_loss"][1] == pytest.approx(mean, abs=1e-10)
    for layer, balance in plain.biases.items():
        bias_E = trainable.model.get_submodule(f"{layer}mixer.router").expert_bias
        assert bias_E.tolist() == pytest.approx(balance.bias, abs=1e-7) and max(balance.bias) > 0.02
    trainable.settle()
    furthest = {name: float((w - plain.weights[name]).abs().max()) for name, w in trainable.model.named_parameters()}
    assert max(furthest.values()) < 1e-10, furthest


def _batch(random: torch.Generator) -> dict[str, torch.Tensor]:
    ids_BS = torch.randint(64, (2, 17), generator=random)
    mask_BS = torch.ones(2, 16, dtype=torch.float64)
    mask_BS[:, 3] = 0  # counts neither in the loss nor in its z-loss
    numbers_B = torch.arange(2)
    rows = {"tokens": ids_BS[:, :-1].contiguous(), "labels": ids_BS[:, 1:].contiguous(), "loss_mask": mask_BS}
    return {**rows, "source_ids": torch.zeros_like(numbers_B), "sample_ids": numbers_B}


@torch.no_grad()
def _move_off_initial_values(network: torch.nn.Module) -> None:
    """Move norms off 1 and biases off 0, where a weight that is forgotten would not show."""
    random = torch.Generator().manual_seed(1)
    for weight in network.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=random).double()


def test_validation_has_no_z_loss(place):
    run = load("tiny", [*SMALL, "model.pattern=ME", *LOSSES])
    trainable = make_trainable(run, model.build(run, place), place)
    step = Step(run, place, trainable, sources=1)
    batches = [_batch(torch.Generator().manual_seed(2)) for _ in range(2)]
    evaluated = step.evaluate(iter(batches), routed_as_trained=True)
    trained = step.gradients(iter(batches))
    assert evaluated.z_loss is None and trained.z_loss is not None
    assert evaluated.loss == pytest.approx(trained.loss, abs=1e-12)
    squares, tokens = trainable.model.decoder.layers[1].mixer.router.measured()["z_loss"]
    assert squares > 0 and tokens == 2 * 2 * 16


@pytest.mark.parametrize("recompute", ["layers", "experts"])
def test_recomputation_counts_each_token_once(recompute, place):
    found = []
    for how in ("none", recompute):
        run = load("tiny", [*SMALL, "model.pattern=ME", *LOSSES, f"training.recompute={how}"])
        trainable = make_trainable(run, model.build(run, place), place)
        step = Step(run, place, trainable, sources=1)
        step.gradients(iter([_batch(torch.Generator().manual_seed(3)) for _ in range(2)]))
        found.append((step.update().grad_norm, trainable.model.decoder.layers[1].mixer.router.measured()["z_loss"]))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-12)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.attention.qk_norm=true"], r"model\.attention\.qk_norm: only attention layers \(\*\) have it.*MEME"),
        (["model.pattern=E", "model.mamba_norms=true"], r"model\.mamba_norms: only Mamba or Mamba-2 layers \(M, S\)"),
        (
            ["model.pattern=M", "model.router.z_loss=0.1"],
            r"model\.router\.z_loss: only mixture of experts layers \(E\)",
        ),
        (["model.pattern=M", "model.latent_size=8"], r"model\.latent_size: only mixture of experts layers \(E\)"),
        (
            ["model.router.kind=hash", "model.router.z_loss=1"],
            r"model\.router\.z_loss: the router kind hash has no logits",
        ),
        (["model.z_loss=-1"], r"model\.z_loss"),
        (["model.logit_softcap=0"], r"model\.logit_softcap"),
    ],
)
def test_options_without_layers_for_them_are_refused(overrides, told):
    with pytest.raises(ConfigError, match=told):
        load("tiny", overrides)
