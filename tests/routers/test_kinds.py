"""A router kind of one file goes the whole way, and so does state that a router keeps."""

import re
from pathlib import Path

import pytest
import torch

from megatron_blackmamba import routers
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import megatron
from megatron_blackmamba.model import remind_of_update, update_routers
from megatron_blackmamba.registry import KindError
from megatron_blackmamba.routers import Cannot, Use
from tests.routers.levelled.kind import Levelled
from tests.routers.unbalanced import Unbalanced
from tests.runtime.ranks import fork_script

pytestmark = pytest.mark.xdist_group("routers")  # its processes start once, not once a worker


@pytest.fixture
def registered():
    """Register a kind until the test ends."""
    names = []

    def register(kind):
        routers.register(kind)
        names.append(kind.name)

    yield register
    for name in names:
        routers.unregister(name)


@pytest.fixture(scope="module")
def went(tmp_path_factory):
    return fork_script("tests.routers.routers_probe", str(tmp_path_factory.mktemp("routers")))


def test_new_router_trains_alike_under_tensor_parallelism(went):
    assert went["losses"]["unbalanced_tp2"] == pytest.approx(went["losses"]["unbalanced_fp64"], abs=1e-10)
    assert went["losses"]["unbalanced"][-1] < went["losses"]["unbalanced"][0]


def test_new_router_exports_and_decodes(went):
    assert went["exported"]["agrees"] and went["exported"]["kind"] == "unbalanced"
    assert went["exported"]["furthest"] < 1e-4


def test_router_with_state_trains_alike_under_tensor_parallelism(went):
    assert went["losses"]["levelled_tp2"] == pytest.approx(went["losses"]["levelled"], abs=1e-10)


@pytest.mark.parametrize("top_k", [1, 2])  # of one expert C++ computes a whole block, if the router is plain
def test_router_with_state_writes_the_text_of_training(top_k, registered, build):
    registered(Levelled)
    words = ["model.router.kind=levelled", "model.pattern=MEE", f"model.top_k={top_k}", "training.precision=fp32"]
    network = build(*words)
    random = torch.Generator().manual_seed(0)
    for name, tensor in network.state_dict().items():
        if name.endswith(("router.gain", "router.load")):
            tensor += torch.randn(tensor.shape, generator=random)
    decoder = Decoder(pack(megatron.of_module(network), torch.float32))
    state, written_BL = decoder.start(2), torch.randint(512, (2, 9), generator=random)
    logits_BV = decoder.read(state, written_BL)
    for _ in range(12):
        expected_BV = network.train()(written_BL)[:, -1].detach()
        torch.testing.assert_close(logits_BV, expected_BV, atol=2e-5, rtol=2e-5)
        new_B = logits_BV.argmax(-1)
        assert torch.equal(new_B, expected_BV.argmax(-1))
        written_BL = torch.cat([written_BL, new_B[:, None]], 1)
        logits_BV = decoder.step(state, new_B)


def test_own_loops_begin_whole_batches_anew(build):
    network = build("model.router.kind=softmax", "model.router.scope=data", "model.router.aux_loss=0.01").train()
    ids_BS = torch.arange(64).view(2, 32)
    network(ids_BS, ids_BS).mean().backward()
    counts = [router.ga_steps for router in network.modules() if hasattr(router, "ga_steps")]
    assert counts and all(counts)
    update_routers(network)
    assert not any(counts)


def test_own_loops_move_every_state(registered, build):
    registered(Levelled)
    network = build("model.router.kind=levelled", "model.pattern=ME").train()
    remind_of_update(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    load_E = network.decoder.layers[1].mixer.router.load
    ids_BS = torch.arange(64).view(2, 32)

    def step():
        network(ids_BS, ids_BS).mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
        update_routers(network)
    assert load_E.sum() == pytest.approx(1 - 0.9**3) and load_E.std() > 0
    step()
    with pytest.warns(UserWarning, match=r"what the routers keep .load. is not updated: call update_routers"):
        step()


def test_expert_bias_resumes_exactly(went):
    assert went["losses"]["bias_again"] == went["losses"]["bias"]
    assert went["biases_again"] == went["biases"]
    assert len(went["biases"]) == 2 and all(any(bias) for bias in went["biases"])


def test_expert_bias_resumes_on_other_layouts(went):
    assert went["losses"]["bias_resharded"] == pytest.approx(went["losses"]["bias_fp64"], abs=1e-9)


def test_quantile_bias_resumes_on_other_layouts(went):
    assert went["losses"]["quantile_resharded"] == pytest.approx(went["losses"]["quantile"], abs=1e-9)


def test_plan_bias_changes_inference_alone_on_every_layout(went):
    assert went["losses"]["plan_bias"] == went["losses"]["plain"]
    one, many, plain = (went["last"][name] for name in ("plan_bias", "plan_bias_resharded", "plain"))
    assert went["losses"]["plan_bias_resharded"] == pytest.approx(went["losses"]["plan_bias"], abs=1e-9)
    for name in ("validation/loss", "experts/1/router/bias_range"):
        assert one[name] > 0 and many[name] == pytest.approx(one[name], abs=1e-7)
    assert one["validation/loss"] != plain["validation/loss"]


def test_weights_of_sinkhorn_go_on_under_sinkhorn_bias(went):
    losses, plain = went["losses"]["taken_over"], went["losses"]["plain"]
    assert losses[0] < plain[0] and losses[-1] < plain[-1]
    assert went["last"]["taken_over"]["experts/1/router/bias_range"] > 0


def test_z_losses_are_metrics_under_every_layout(went):
    one, many = went["last"]["bias_fp64"], went["last"]["bias_resharded"]
    names = {name for name in one if name.endswith("z_loss")}
    assert names == {"z_loss", "experts/1/router/z_loss", "experts/3/router/z_loss"}
    for name in names:
        assert one[name] > 1 and many[name] == pytest.approx(one[name], abs=1e-9)
    assert not any(name.endswith("z_loss") for name in went["last"]["bias"])


def test_routers_measure_themselves_on_every_pipeline_stage(went):
    for layer, bias in zip((1, 3), went["biases"], strict=True):
        assert went["last"]["bias"][f"experts/{layer}/router/bias_range"] == pytest.approx(max(bias) - min(bias))
        assert 0 < went["last"]["choice"][f"experts/{layer}/router/unrouted"] < 0.5


def test_balanced_validation_is_not_counted_as_training(went):
    plain, validated = (went["last"][name] for name in ("choice", "choice_validated"))
    assert any("balanced" in name for name in validated.keys() - plain.keys())
    unrouted = [name for name in plain if name.endswith("unrouted")]
    assert unrouted and all(validated[name] == plain[name] for name in unrouted)


def test_registry_refuses_missing_answers_by_name():
    class Silent(routers.RouterKind):
        name = "silent"
        keys = ()

    with pytest.raises(KindError, match="Silent does not define: depends_on, layouts, use, choose"):
        routers.register(Silent)


def test_own_weights_without_their_logits_are_refused():
    silent = {"name": "silent", "inside": lambda self, model: {"gain": (model.experts,)}}
    for module in (Unbalanced.module, Levelled.module):
        with pytest.raises(KindError, match=r"Silent does not define: logits \(it defines inside\)"):
            routers.register(type("Silent", (Unbalanced,), silent | {"module": module}))


@pytest.mark.parametrize(
    "answers, missing",
    [
        ({"state": ("load",)}, "module .the default keeps and measures no load"),
        ({"metrics": {"margin": "m"}}, "module .the default keeps and measures no margin"),
        ({"metrics": {"unrouted": "u"}}, "module .the default keeps and measures no unrouted"),
        ({"every_token_gets_k": False}, 'metrics."unrouted"'),
    ],
)
def test_answers_that_default_module_cannot_keep_are_refused(answers, missing):
    with pytest.raises(KindError, match=f"Loaded does not define: {missing}"):
        routers.register(type("Loaded", (Unbalanced,), {"name": "loaded"} | answers))


def test_a_bias_without_its_state_is_refused(registered):
    registered(
        type("Biased", (Unbalanced,), {"name": "biased", "use": lambda self, model: Use("sigmoid", biased=True)})
    )
    with pytest.raises(
        ConfigError, match="the router kind biased uses a bias: its state and module must have expert_bias"
    ):
        load("tiny", ["model.router.kind=biased"])


@pytest.mark.parametrize("kind", ["unbalanced", "choosy", "sinkhorn", "expert_choice"])
def test_the_tokens_of_each_expert_are_counted(kind, registered, build):
    def choose(self, logits_TE, at):
        return logits_TE > logits_TE.mean()

    registered(Unbalanced)
    few = {"every_token_gets_k": False, "metrics": {"unrouted": "Share of tokens without an expert"}}
    registered(type("Choosy", (Unbalanced,), {"name": "choosy", "choose": choose, **few}))
    model = build("model.pattern=E", "model.top_k=2", f"model.router.kind={kind}")
    router = model.decoder.layers[0].mixer.router
    _, chosen_TE = router.train()(torch.randn(6, 4, 64)).as_map()
    assert router.tokens_E.tolist() == chosen_TE.sum(0).tolist() and chosen_TE.any()


@pytest.mark.parametrize(
    "choose, said",
    [
        (lambda kind, x, at: x.topk(1).indices, r"returned torch.int64 \(24, 1\), expected torch.int64 \(24, 2\)"),
        (lambda kind, x, at: x.topk(2).indices.int(), r"returned torch.int32 \(24, 2\), expected torch.int64"),
        (lambda kind, x, at: x > 0, r"returned torch.bool \(24, 8\), .* Set every_token_gets_k = False if"),
        (lambda kind, x, at: x.topk(1).indices.expand(-1, 2), "names an expert twice for one token"),
    ],
)
def test_a_wrong_choice_is_refused_by_name(choose, said, registered, build):
    registered(type("Wrong", (Unbalanced,), {"name": "wrong", "choose": choose}))
    model = build("model.pattern=E", "model.top_k=2", "model.experts=8", "model.router.kind=wrong")
    with pytest.raises(KindError, match=f"Wrong.choose {said}"):
        model.decoder.layers[0].mixer.router.train()(torch.randn(6, 4, 64))


def test_a_key_that_no_section_has_is_refused(registered):
    registered(type("Noisy", (Unbalanced,), {"name": "noisy", "keys": ("noise",)}))
    for overrides in ([], ["model.router.noise=2"]):
        with pytest.raises(KindError, match=r"Noisy.keys names 'noise', but the config has no key model.router.noise"):
            load("tiny", overrides)


@pytest.mark.parametrize(
    "answers",
    [
        {"selecting": lambda self, logits_TE, at: -logits_TE},
        {"logits": Levelled.logits, "inside": Levelled.inside},
        {"state": ("load",), "module": Levelled.module},
    ],
)
def test_what_modeling_files_lack_is_not_exported(answers, registered):
    registered(type("Own", (Unbalanced,), {"name": "own"} | answers))
    with pytest.raises(ConfigError, match=r"cannot export this model: the modeling files have no class for .*=own"):
        load("tiny", ["model.router.kind=own", "checkpoint.export_every=5"])


def test_registry_refuses_taken_names():
    class Second(Unbalanced):
        name = "sinkhorn"

    with pytest.raises(KindError, match="'sinkhorn' is taken by Sinkhorn of "):
        routers.register(Second)


def test_faults_page_names_routers_that_balance_micro_batches():
    page = Path(__file__).parents[2] / "docs" / "faults.md"
    (row,) = (line for line in page.read_text().splitlines() if "`training.micro_batch`:" in line)
    named = row.partition("`training.micro_batch`:")[2].partition(" balance ")[0]
    assert set(re.findall("`(.+?)`", named)) == {k.name for k in routers.all_kinds() if k.balances_micro_batches}


SCOPES = pytest.mark.parametrize(("scope", "named"), [("rank", "parallel.tensor"), ("data", "data-parallel ranks")])


@SCOPES
def test_scopes_that_depend_on_the_layout_say_so(scope, named):
    answer = routers.kind_of("sinkhorn").layouts(load("tiny", [f"model.router.scope={scope}"]).model)
    assert isinstance(answer, Cannot) and named in answer.reason
    assert routers.kind_of("sinkhorn").layouts(load("tiny").model) is True


@SCOPES
def test_expert_choice_refuses_scopes_that_depend_on_layouts(scope, named):
    with pytest.raises(ConfigError, match=rf"scope={scope} .*{named}.* Expert choice needs model.router.scope=tensor"):
        load("tiny", ["model.router.kind=expert_choice", f"model.router.scope={scope}"])
    model = load("tiny", ["model.router.kind=expert_choice"]).model
    assert routers.kind_of("expert_choice").layouts(model) is True
