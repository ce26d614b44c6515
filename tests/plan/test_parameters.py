import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.plan import flops, parameters


@pytest.mark.parametrize(
    ("run", "total", "forward"),
    [("blackmamba_1.5b", 1_458_462_072, 343.69), ("blackmamba_2.8b", 2_783_213_584, 628.77)],
)
def test_the_papers_models_have_exactly_their_parameters(run, total, forward):
    counted = parameters.count(load(run))
    assert counted.total == total
    assert round(counted.forward / 1e6, 2) == forward
    assert sum(counted.by_kind.values()) == total


@pytest.mark.parametrize(
    "runs",
    [
        ["blackmamba_1.5b", "blackmamba2_1.5b", "mamba_343m", "transformer_340m", "transformer_moe_1.5b"],
        [
            *("quickstart", "quickstart_mamba2", "quickstart_mamba", "quickstart_transformer"),
            *("quickstart_transformer_moe", "quickstart_top2", "quickstart_shared_expert"),
        ],
    ],
    ids=["paper", "quickstart"],
)
def test_architectures_have_about_one_active_size(runs):
    forward = [parameters.count(load(run)).forward for run in runs]
    assert max(forward) / min(forward) < 1.07


def test_the_dense_baseline_has_no_idle_parameters():
    counted = parameters.count(load(["blackmamba_1.5b", "model/mamba_343m"], ["parallel.expert=1"]))
    assert counted.forward == counted.total
    assert round(counted.total / 1e6, 1) == 344.3
    assert set(counted.by_kind) == {"embedding", "norms", "mamba"}


def test_every_kind_of_layer_is_counted_by_hand():
    overrides = ['model.pattern="MS*-E"', "model.mlp_hidden_size=96", "model.tie_embeddings=false"]
    overrides += ["model.mamba2.head_dim=16", "model.mamba2.state_size=32", "model.mamba2.groups=2"]
    counted = parameters.count(load("tiny", overrides)).by_kind
    D, I, N, R, K, V, E, F = 64, 128, 16, 4, 4, 512, 8, 128
    assert counted == {
        "embedding": V * D,
        "mamba": D * 2 * I + I * (K + 1) + I * (R + 2 * N) + R * I + I + I * N + I + I * D,
        "mamba2": D * (2 * I + 128 + 8) + (I + 128) * (K + 1) + 3 * 8 + I + I * D,
        "attention": 4 * D * D,
        "mlp": 3 * D * 96,
        "router": E * D + E,
        "experts": 3 * D * F * E,
        "norms": 5 * D + 2 * D,
        "head": V * D,
    }


@pytest.mark.parametrize("run", ["blackmamba_1.5b", "blackmamba_2.8b"])
def test_matrix_products_cost_two_flops_a_forward_weight(run):
    config = load(run)
    model, parts = config.model, flops.forward_by_part(config.model, 2048)
    products = sum(parts[part] for part in ("mamba_projections", "convolution", "router", "experts", "head"))
    vectors = (
        model.pattern.count("M") * model.inner_size * (model.state_size + 3)
    )  # A_log; D, and the biases of conv and dt
    vectors += model.pattern.count("E") * model.experts + (model.layers + 2) * model.hidden_size
    assert products == 2 * (parameters.count(config).forward - vectors)


@pytest.mark.parametrize(
    ("run", "gflop", "ours", "repaired", "printed", "table"),
    [
        ("blackmamba_1.5b", 2.07, 6.21e20, 6.21e20, 2.31e21, 6.4e20),
        ("blackmamba_2.8b", 3.785, 1.135e21, 1.143e21, 4.52e21, 1.2e21),
    ],
)
def test_flops_beside_the_papers(run, gflop, ours, repaired, printed, table):
    config = load(run)
    per_token = flops.training(config.model, 2048)
    paper = flops.paper_formula(config.model, config.tokens_per_step)
    assert per_token / 1e9 == pytest.approx(gflop, rel=1e-3)
    assert per_token * 3e11 == pytest.approx(ours, rel=5e-3)
    assert 3 * 3e11 * paper.repaired == pytest.approx(repaired, rel=5e-3)
    assert 3 * 3e11 * paper.printed == pytest.approx(printed, rel=5e-3)
    assert flops.published(config) == table
    fewer = load(run, ["model.pattern=MEM"])
    assert flops.published(fewer) is None
    assert table == pytest.approx(3 * 3e11 * paper.repaired, rel=0.06)  # the repaired formulas explain the table


def test_paper_formula_covers_only_the_paper_models():
    config = load("tiny", ['model.pattern="*E"'])
    assert flops.paper_formula(config.model, 2048) is None
    assert flops.published(config) is None
    as_wide = load("blackmamba_1.5b", ["model.pattern=" + "SE" * 15])  # the paper's sizes, of layers it does not have
    assert flops.published(as_wide) is None
    assert flops.published(load("mamba_343m")) == 8.0e20


def test_extra_depth_costs_its_layers_and_another_head():
    config = load("tiny", ["model.mtp.pattern=ME"])
    model, alone, longer = config.model, load("tiny").model, load("tiny", ["model.pattern=MEMEME"]).model
    layers = flops.forward(longer, 128) - flops.forward(alone, 128)
    head = flops.forward_by_part(model, 128)["head"]
    assert flops.forward(model, 128) == flops.forward(alone, 128)
    assert flops.training(model, 128) == flops.training(alone, 128) + 3 * (layers + 2 * 2 * 64 * 64 + head)
    counts, before = parameters.count(config), parameters.count(load("tiny"))
    assert counts.forward == before.forward
    layer = counts.total - before.total - 3 * 64 - 2 * 64 * 64
    assert layer == parameters.count(load("tiny", ["model.pattern=MEMEME"])).total - before.total


def test_recomputing_layers_repeats_all_but_the_head():
    config = load("blackmamba_1.5b", ["training.recompute=layers"])
    parts = flops.forward_by_part(config.model, 2048)
    assert flops.recomputed(config) == sum(parts.values()) - parts["head"]
    assert flops.recomputed(load("blackmamba_1.5b")) == 0
