"""ZAYA1's router and residual scaling: as in transformers, in decoding, in exports, and with users' own loops."""

from fractions import Fraction

import pytest
import torch

from megatron_blackmamba import model, update_routers
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import hf, megatron
from megatron_blackmamba.interchange.canonical import shapes
from megatron_blackmamba.interchange.zyphra import require_expressible
from megatron_blackmamba.layers import kind_of
from megatron_blackmamba.model.inputs import LayerInputs
from tests.training.short_runs import Run

ROUTER = ["model.router.kind=zaya", "model.router.hidden_size=16", "training.precision=fp32"]
MODEL = [*ROUTER, "model.pattern=MEE", "model.residual_scaling=true"]
EXPERTS, R, D = 8, 16, 64


def moved(module, seed=1):
    """Move norms off 1 and biases off 0, those of experts too."""
    random = torch.Generator().manual_seed(seed)
    state = module.state_dict(keep_vars=True).items()
    with torch.no_grad():
        for name, tensor in state:
            if isinstance(tensor, torch.nn.Parameter) or name.endswith("expert_bias"):
                tensor += (0.02 if name.endswith("expert_bias") else 0.2) * torch.randn(tensor.shape, generator=random)
    return module


def random_ids(*shape):
    return torch.randint(512, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("skips", [False, True])
def test_routers_and_experts_compute_as_in_transformers(skips, build):
    """Two layers: the second reads the first's state. Their expert that skips is ours, or one without weights."""
    pytest.importorskip("transformers.models.zaya", reason="this version of transformers has no ZAYA1")
    from transformers import ZayaConfig
    from transformers.models.zaya.modeling_zaya import ZayaSparseMoeBlock

    sizes = {"hidden_size": D, "moe_intermediate_size": 32, "num_experts": EXPERTS - 1, "router_hidden_size": R}
    config = ZayaConfig(**sizes, num_hidden_layers=2, head_dim=8)
    config._experts_implementation = "eager"
    random = torch.Generator().manual_seed(5)
    words = ["model.pattern=EE", "model.expert_hidden_size=32", "model.router.bias=false"]
    words += [f"model.experts={EXPERTS - 1}", "model.router.skip=true"] if skips else []
    ours = build(*ROUTER, *words).eval()
    x_SBD, inputs, state = torch.randn(20, 2, D, generator=random), LayerInputs(None), None
    for layer in range(2):
        theirs = ZayaSparseMoeBlock(config, layer)
        with torch.no_grad():
            for name, weight in (*theirs.named_parameters(), ("biases", theirs.gate.balancing_biases)):
                scale = 0.05 if weight.dim() == 1 else 1.5 * weight.shape[-1] ** -0.5
                mean = 1.0 if name.endswith(("norm.weight", "scale")) else 0.0
                weight.copy_(mean + scale * torch.randn(weight.shape, generator=random))
        mixer = ours.decoder.layers[layer].mixer
        mixer.load_state_dict(mixer.state_dict() | named(theirs, EXPERTS - skips))
        expected_BSD, state = theirs(x_SBD.transpose(0, 1).contiguous(), state)
        found_SBD = mixer(x_SBD, inputs)
        torch.testing.assert_close(found_SBD.transpose(0, 1), expected_BSD, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(inputs.carried_SBR.transpose(0, 1), state, atol=1e-5, rtol=1e-5)
        assert mixer.router.tokens_E.count_nonzero() > 2 and mixer.router.tokens_E[-1] > 0


def named(theirs, experts):
    """Return the weights of their layer under our names; an expert that they have not computes nothing."""
    gate, mlp = theirs.gate, theirs.gate.router_mlp
    found = {"down": gate.down_proj.weight, "down_bias": gate.down_proj.bias, "norm": mlp.norm.weight}
    found |= {"first": mlp.fc1.weight, "first_bias": mlp.fc1.bias, "second": mlp.fc2.weight}
    found |= {"second_bias": mlp.fc2.bias, "weight": mlp.out_proj.weight, "expert_bias": gate.balancing_biases}
    found["carry"] = getattr(gate, "router_states_scale", torch.ones(R))
    fc1, fc2 = theirs.experts.gate_up_proj, theirs.experts.down_proj
    fc1, fc2 = (torch.cat([weight, torch.zeros_like(weight[:1])])[:experts] for weight in (fc1, fc2))
    return {f"router.{name}": weight for name, weight in found.items()} | {
        "experts.fc1": fc1.view(experts, 2, -1, D),
        "experts.fc2": fc2,
    }


def test_residual_scaling_computes_as_in_transformers(build):
    pytest.importorskip("transformers.models.zaya", reason="this version of transformers has no ZAYA1")
    from transformers.models.zaya.modeling_zaya import ZayaResidualScaling

    theirs = moved(ZayaResidualScaling(D))
    block = build(*MODEL).decoder.layers[0]
    with torch.no_grad():
        for ours, name in ((block.stream, "residual"), (block.output, "hidden_states")):
            ours.scale.copy_(getattr(theirs, f"{name}_scale"))
            ours.bias.copy_(getattr(theirs, f"{name}_bias"))
    x_SBD, inputs = torch.randn(20, 2, D), LayerInputs(None)
    expected_SBD = theirs(block.mixer(block.norm(x_SBD), inputs), x_SBD)
    torch.testing.assert_close(sum(block(x_SBD, None, inputs)), expected_SBD, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("words", [[], ["model.router.skip=true"], ["model.router.skip=true", "model.top_k=2"]])
def test_decoder_and_transformers_write_the_same_text(words, build, tmp_path):
    from transformers import AutoModelForCausalLM

    network = moved(build(*MODEL, *words)).eval()
    tokens_BL = random_ids(2, 9)
    canonical = megatron.of_module(network)
    hf.write(canonical, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    decoder = Decoder(pack(hf.read(tmp_path), torch.float32))
    state = decoder.start(2)
    logits_BV, choices = decoder.read(state, tokens_BL), []
    written_BL = tokens_BL
    for _ in range(12):
        forward_BLV = network(written_BL)
        torch.testing.assert_close(logits_BV, forward_BLV[:, -1].detach(), atol=2e-5, rtol=2e-5)
        new_B = logits_BV.argmax(-1)
        written_BL = torch.cat([written_BL, new_B[:, None]], 1)
        logits_BV = decoder.step(state, new_B, choices)
    assert any(bool((choice == EXPERTS).any()) for choice in choices) == bool(words)
    assert len(choices) == 12 * 2  # watching the choice does not pass the state on twice
    theirs_BL = theirs.generate(tokens_BL, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(theirs_BL, written_BL)
    assert all(torch.equal(weight, canonical.entries[name].load()) for name, weight in hf.read(tmp_path).tensors())


def test_recomputation_changes_no_gradient(build):
    ids_BS, found = random_ids(2, 16), []
    for how in ("none", "experts", "layers"):
        words = ["training.precision=fp64", "model.router.skip=true", f"training.recompute={how}"]
        network = moved(build(*MODEL, *words)).train()
        network(ids_BS, ids_BS).mean().backward()
        found.append([weight.grad for weight in network.parameters()])
    for other in found[1:]:
        assert all(torch.allclose(a, b, atol=1e-14, rtol=1e-10) for a, b in zip(found[0], other, strict=True))


def test_each_router_reads_the_one_before(build):
    network = moved(build(*MODEL, "training.precision=fp64"))
    ids_BS = random_ids(2, 16)
    network.train()(ids_BS, ids_BS).mean().backward()
    first, second = (network.decoder.layers[i].mixer.router.carry.grad for i in (1, 2))
    assert not first.any() and second.abs().min() > 0


def test_bias_evens_out_loads_in_own_loops(build):
    network = moved(build(*MODEL, "model.router.bias_update_rate=0.01"), seed=3).train()
    router, shares = network.decoder.layers[1].mixer.router, []
    for _ in range(60):
        network(random_ids(4, 64))
        shares.append(float(router.gathered.max() / router.gathered.sum()))
        update_routers(network)
    assert shares[0] > 2.5 / EXPERTS and sum(shares[-5:]) / 5 < 1.5 / EXPERTS
    assert router.bias_steps.tolist() == [60] * EXPERTS


@pytest.mark.parametrize(
    "words, said",
    [
        (["model.arrangement=parallel", "model.pattern=ME"], "it needs model.arrangement=sequential"),
        (["model.mtp.pattern=M"], "the extra depth of model.mtp.pattern has none"),
        (
            ["model.router.kind=expert_bias", "model.router.skip=true", "model.router.hidden_size=256"],
            "skip=True: model",
        ),
        (["model.router.normalize=true"], "model.router.kind=zaya does not read this key"),
        (["model.router.kind=softmax"], "model.router.hidden_size=16: model.router.kind=softmax does not read"),
    ],
)
def test_what_contradicts_is_refused_before_a_run(words, said):
    with pytest.raises(ConfigError, match=said):
        load("tiny", [*MODEL, *words])


def test_released_format_says_what_it_lacks():
    scaled = load("tiny", ["model.residual_scaling=true"]).model
    with pytest.raises(ValueError, match=r"model\.residual_scaling is true"):
        require_expressible(scaled, "here")
    with pytest.raises(ValueError, match=r"model\.router\.kind is zaya"):
        require_expressible(load("tiny", [*ROUTER, "model.router.skip=true"]).model, "here")


def test_plan_counts_the_router_and_the_wider_stream(build):
    from megatron_blackmamba.plan.activations import Activations
    from megatron_blackmamba.routers import kind_of

    run = load("tiny", MODEL)
    router = build(*MODEL).decoder.layers[1].mixer.router
    matrices = sum(weight.numel() for weight in router.parameters() if weight.dim() > 1)
    assert kind_of("zaya").flops(run.model) == 2 * matrices
    sizes = Activations(run, "cuda")
    assert sizes.sent() - sizes.residual() == 4 * R * sizes.sizes.here
    assert model.stack.between_stages(run.model, [(5, 2, D)]) == [(5, 2, D + R)]


def test_plan_counts_no_expert_for_skipping():
    plain, skipping = (load("tiny", [*MODEL, f"model.router.skip={skip}"]) for skip in ("false", "true"))
    experts = [kind_of("E").costs.flops(run.model, 32)["experts"] for run in (plain, skipping)]
    assert experts[1] == experts[0] * EXPERTS // (EXPERTS + 1)
    assert kind_of("E").parts(skipping.model)["experts"] == Fraction(1, EXPERTS + 1)
    assert shapes(skipping.model)["decoder.layers.1.mixer.router.weight"] == (EXPERTS + 1, R)


def test_share_of_skipped_choices_is_measured(build):
    network = moved(build(*MODEL, "model.router.skip=true")).train()
    router = network.decoder.layers[1].mixer.router
    network(random_ids(4, 64))
    counts_E = network.take_expert_tokens()[1]
    skipped, chosen = router.measured()["skipped"]
    assert chosen == 4 * 64 == skipped + int(counts_E.sum()) and len(counts_E) == EXPERTS and 0 < skipped < chosen
    assert router.measured()["skipped"] == (0, 0)


def test_balanced_validation_leaves_the_counts_of_training(place, tmp_path):
    run = Run(place, tmp_path, "bf16", *ROUTER[:2], "model.router.skip=true").train(1)
    router = run.trainable.model.decoder.layers[1].mixer.router
    before = {name: buffer.clone() for name, buffer in router.named_buffers()}
    assert before["skipped"][1] > 0
    run.step.evaluate(run.batches(), routed_as_trained=True)
    assert all(torch.equal(buffer, before[name]) for name, buffer in router.named_buffers())
