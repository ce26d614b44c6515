"""The moving average of the weights and the factors of parameter groups, against plain PyTorch and over layouts."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.checkpoint.manifest import CheckpointError
from megatron_blackmamba.config import ConfigError, ParallelConfig, load
from megatron_blackmamba.config.groups import group_of
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange import convert, hf, megatron, verification
from megatron_blackmamba.optimizers.base import NO_DECAY
from megatron_blackmamba.runtime import world
from tests.thorough import unless
from tests.training.runs import SMALL as SMALL_RUN
from tests.training.runs import events_of, losses, metrics
from tests.training.short_runs import Run
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("branches")
DECAY, STEPS = 0.9, 20
FACTORS = {"embedding": (0.5, 2.0), "norms": (2.0, 1.0), "router": (0.1, 0.5), "recurrence": (3.0, 1.0)}
FACTORS |= {"mixers": (0.7, 0.0), "experts": (1.5, 3.0)}
GROUPS = [
    *(f"optimizer.groups.{name}.learning_rate={rate}" for name, (rate, _) in FACTORS.items()),
    *(f"optimizer.groups.{name}.weight_decay={decay}" for name, (_, decay) in FACTORS.items() if decay != 1),
]
FP64 = [f"training.ema={DECAY}", "training.precision=fp64", "optimizer.weight_decay=0.1", *GROUPS]
ON_DISK = [
    *(
        *FP64,
        "data.sequence_length=32",
        "training.global_batch=4",
        "training.micro_batch=2",
        f"training.tokens={STEPS * 4 * 32}",
    ),
    *("training.evaluate_every=10", "training.evaluate_batches=1", "checkpoint.every=5", "model.pattern=MESE"),
    *("model.mamba2.head_dim=16", "model.mamba2.state_size=16", "model.mamba2.groups=2"),
]
LAYOUTS = {"alone": [], "data": [], "tensor": ["parallel.tensor=2"], "pipeline": ["parallel.pipeline=2"]}


@pytest.fixture(scope="module")
def place():
    yield world.start(ParallelConfig())
    world.shutdown()


def mean_of(run):
    return torch.cat([shard.mean.view(-1) for shard in sorted_shards(run)])


def sorted_shards(run):
    names = {weight: name for name, weight in run.trainable.model.named_parameters()}
    return sorted(run.trainable.ema.shards, key=lambda shard: names[shard.weight])


def plain_pytorch(run):
    """Return copies of the weights, torch's AdamW for them, and torch's average of them."""
    model, groups, settings = torch.nn.ParameterDict(), [], run.config.optimizer
    for name, weight in run.trainable.model.named_parameters():
        model[name.replace(".", "/")] = copied = torch.nn.Parameter(weight.detach().clone())
        rate, decay = FACTORS[group_of(name, run.config.model)]
        decay = 0.0 if getattr(weight, NO_DECAY, False) else decay * settings.weight_decay
        groups.append({"params": [copied], "factor": rate, "weight_decay": decay})
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(settings.beta1, settings.beta2), eps=settings.eps)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)  # begins with the weights
    return model, adam, averaged


def test_average_and_groups_equal_plain_pytorch(place, tmp_path):
    long = [*FP64, f"training.tokens={STEPS * 2 * 16}"]
    run = Run(place, tmp_path, "bf16", *long)
    model, adam, averaged = plain_pytorch(run)
    for _ in range(STEPS):
        run.train(1)
        rate = run.config.learning_rate_at(run.taken * run.config.training.global_batch)
        for group, weight in zip(adam.param_groups, run.trainable.model.parameters(), strict=True):
            group["lr"] = rate * group["factor"]
            group["params"][0].grad = weight.main_grad.clone().view_as(weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.config.optimizer.clip)
        adam.step()
        averaged.update_parameters(model)
    moved = 0.0
    for name, shard in zip(sorted(model), sorted_shards(run), strict=True):
        ours, theirs, mean = shard.updated, model[name].view(-1), averaged.module[name].view(-1)
        assert (ours - theirs).abs().max() < 1e-10 and (shard.mean - mean).abs().max() < 1e-10, name
        moved = max(moved, float((shard.mean - ours).abs().max()))
    assert moved > 1e-4


def test_bf16_average_is_that_of_the_fp32_weights(place, tmp_path):
    run = Run(place, tmp_path, "bf16", f"training.ema={DECAY}")
    expected = [shard.updated.clone() for shard in run.trainable.ema.shards]
    for _ in range(3):
        run.train(1)
        for mean, shard in zip(expected, run.trainable.ema.shards, strict=True):
            mean.lerp_(shard.updated, 1 - DECAY)
            assert shard.mean.dtype == torch.float32 and torch.equal(shard.mean, mean)


@pytest.mark.parametrize("kind", ["whole", "sgd", "bf16", "narrow"])
def test_average_resumes_exactly_with_every_optimizer(place, tmp_path, kind):
    averaging = f"training.ema={DECAY}"
    run = Run(place, tmp_path, kind, averaging).train(3)
    run.checkpoints.ema = run.trainable.ema
    run.checkpoints.save(3, {})
    run.checkpoints.finish(wait=True)
    resumed = Run(place, tmp_path, kind, averaging)
    resumed.checkpoints.ema = resumed.trainable.ema
    resumed.resumed()
    assert torch.equal(mean_of(resumed), mean_of(run)) and not torch.equal(mean_of(run), Run.weights(run))
    assert torch.equal(mean_of(resumed.train(2)), mean_of(run.train(2)))
    without = Run(place, tmp_path, kind).resumed().train(2)  # switched off: the same weights
    assert torch.equal(without.weights(), run.weights())


def test_average_switched_on_later_starts_from_the_weights(place, tmp_path):
    run = Run(place, tmp_path, "bf16").train(3)
    run.checkpoints.save(3, {})
    run.checkpoints.finish(wait=True)
    later = Run(place, tmp_path, "bf16", f"training.ema={DECAY}")
    later.checkpoints.ema = later.trainable.ema
    later.resumed()
    assert all(torch.equal(shard.mean, shard.updated) for shard in later.trainable.ema.shards)


def test_changed_groups_keep_state_and_act(place, tmp_path):
    run = Run(place, tmp_path, "bf16").train(3)
    run.checkpoints.save(3, {})
    run.checkpoints.finish(wait=True)
    same = Run(place, tmp_path, "bf16").resumed().train(1)
    grouped = Run(place, tmp_path, "bf16", "optimizer.groups.mixers.learning_rate=0").resumed()
    weights, others = (dict(each.trainable.model.named_parameters()) for each in (grouped, same))
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    grouped.train(1)
    of_mixers = {name for name in weights if group_of(name, grouped.config.model) == "mixers"}
    assert all(torch.equal(weights[name], (before if name in of_mixers else others)[name]) for name in weights)
    assert not all(torch.equal(weights[name], others[name]) for name in of_mixers)


@pytest.mark.parametrize(
    "setting, told",
    [
        ("optimizer.groups.nroms.learning_rate=2", "norms"),
        ("optimizer.groups.head.learning_rate=2", "no such parameters, only embedding, experts, mixers, norms"),
        ("optimizer.groups.norms.weight_decay=2", "norms have no weight decay"),
        ("checkpoint.export_ema=true", "needs averaged weights"),
    ],
)
def test_settings_without_effect_are_refused(setting, told):
    with pytest.raises(ConfigError, match=told):
        load("tiny", [setting])


@pytest.fixture(scope="module")
def on_disk(forks, tmp_path_factory):
    """Runs of 20 steps, by name: each is trained when a test first asks for its folder."""
    return OnDisk(forks, tmp_path_factory)


class OnDisk(dict):
    """Folder by layout, of a run without an average, and of one that is killed and twice resumed otherwise."""

    def __init__(self, forks, tmp_path_factory):
        self.forks, self.make = forks, tmp_path_factory.mktemp

    def __missing__(self, name):
        folder = self[name] = self.make(name)
        if name == "killed":
            now = ["checkpoint.asynchronous=false"]
            job = self.forks.run(folder, [*ON_DISK, *now, "parallel.tensor=2"], until=7)
            wait_until(lambda: steps_of(folder) == 7, job)
            job.kill()
            job.wait()
            job.go_on()
            for until, layout in ((12, []), (STEPS, ["parallel.expert=2"])):
                self.train(folder, [*layout, f"training.stop_after_steps={until}"])
        elif name == "unaveraged":
            self.train(folder, ["training.ema=0", "training.evaluate_every=0"])
        else:
            self.train(folder, LAYOUTS[name], ranks=1 if name == "alone" else 2)
        return folder

    def train(self, folder, overrides, ranks=2):
        job = self.forks.run(folder, [*ON_DISK, *overrides], ranks=ranks)
        assert set(job.wait()) == {0}, job.output()


def steps_of(folder):
    return len(losses(folder)) if RunFolder(folder / "run").metrics.exists() else 0


def saved(folder, ema=True):
    return dict(CheckpointReader(folder / "run", ema=ema).tensors())


@pytest.mark.parametrize("name", unless(["data"], ["data", "tensor", "pipeline", "killed"]))
def test_average_does_not_depend_on_the_layout(on_disk, name):
    alone, other = saved(on_disk["alone"]), saved(on_disk[name])
    assert alone.keys() == other.keys()
    assert max((alone[key] - other[key]).abs().max() for key in alone) < 1e-10
    weights = saved(on_disk["alone"], ema=False)
    assert max((alone[key] - weights[key]).abs().max() for key in alone) > 1e-4
    first, second = (
        [record["validation/ema_loss"] for record in metrics(on_disk[each])[9::10]] for each in ("alone", name)
    )
    assert first == pytest.approx(second, abs=1e-10)
    assert losses(on_disk["alone"]) == pytest.approx(losses(on_disk[name]), abs=1e-10)


def test_validating_the_average_leaves_training_alone(on_disk):
    """Bit for bit, although its weights stand in for those in training."""
    assert losses(on_disk["data"]) == losses(on_disk["unaveraged"])
    weights, other = saved(on_disk["data"], ema=False), saved(on_disk["unaveraged"], ema=False)
    assert all(torch.equal(weights[name], other[name]) for name in weights)


def test_run_without_an_average_says_so(on_disk):
    with pytest.raises(CheckpointError, match=r"step_00000020: has no averaged weights: .*training\.ema=0"):
        CheckpointReader(on_disk["unaveraged"] / "run", ema=True)


def test_learning_rates_of_groups_are_metrics(on_disk):
    record = metrics(on_disk["alone"])[5]
    assert record["learning_rate/router"] == pytest.approx(0.1 * record["learning_rate"])


def test_exports_hold_the_saved_average(forks, tmp_path):
    settings = ["training.ema=0.5", "training.precision=bf16", "checkpoint.every=2", "training.stop_after_steps=2"]
    live = ["checkpoint.export_every=2", "checkpoint.export_ema=true", "checkpoint.export_check=none"]
    job = forks.run(tmp_path, [*SMALL_RUN, *settings, *live])
    assert job.wait() == [0, 0], job.output()
    run, out = RunFolder(tmp_path / "run"), tmp_path / "out"
    convert.to_hf(megatron.read(run.root, ema=True), out, check="none", processes=2)
    means, weights = (dict(megatron.read(run.root, ema=ema).tensors()) for ema in (True, False))
    exported, beside = dict(hf.read(out).tensors()), dict(hf.read(run.export(2)).tensors())
    for name, mean in means.items():
        assert exported[name].dtype == torch.float32 and torch.equal(exported[name], mean), name
        assert torch.equal(beside[name], mean.to(beside[name].dtype)), name
    assert any(not torch.equal(beside[name], weights[name]) for name in weights)
    verification.verify(run.export(2), run.root, "none", ema=True)
    assert "moving average with decay rate 0.5" in (out / "README.md").read_text()
    assert not [event for event in events_of(tmp_path) if event.kind == "not_exported"]
