"""Branches of a run, with a schedule of three parts, growing batches and other data, from their first step to the last.

The trunk grows its batch while it warms up, and is constant up to step 10. The branch leaves it after step 8, reads
another mixture, lets its batch grow once more and decays over its last steps.
"""

import json
import math
import re
import shutil
from itertools import accumulate

import pytest
import torch
from typer.testing import CliRunner

from megatron_blackmamba import cli
from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.config import ConfigError, load, to_saved, to_yaml
from megatron_blackmamba.data import build
from megatron_blackmamba.formats import branches
from megatron_blackmamba.formats.events import Branched, Resumed
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.plan.estimate import make_plan, storage_of
from megatron_blackmamba.report.comparison_figures import read_all, trunks
from megatron_blackmamba.report.history import read_history
from megatron_blackmamba.report.overview import overviews
from megatron_blackmamba.report.page import loss as drawn_loss
from megatron_blackmamba.trace.documents import Tracer
from megatron_blackmamba.trace.steps import TraceError
from megatron_blackmamba.training.anneal import arguments_of
from megatron_blackmamba.training.branch import beginning, find_branch
from megatron_blackmamba.training.step.progress import Progress
from tests.data.corpus import write_mixture, write_shard
from tests.reference.schedules import train
from tests.runtime.ranks import fork_script
from tests.thorough import thorough
from tests.training.runs import events_of, losses, metrics
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("branches")

LENGTH, AT = 16, 8
CLIP, DECAY = 0.5, 0.1
MODEL = [
    *("model.pattern=ME", "model.hidden_size=16", "model.expert_hidden_size=16", "model.experts=4"),
    *("model.router.kind=softmax", "model.router.aux_loss=0", "model.vocab_size=320", "training.precision=fp64"),
]
COMMON = [
    *(*MODEL, f"data.sequence_length={LENGTH}", "training.micro_batch=2", "training.evaluate_every=0"),
    *("optimizer.decay=wsd", f"optimizer.warmup_tokens={12 * LENGTH}", "optimizer.learning_rate=1e-2"),
    *("optimizer.min_learning_rate=1e-3", f"optimizer.weight_decay={DECAY}", f"optimizer.clip={CLIP}"),
    *("checkpoint.every=4", "checkpoint.keep_last=9", "parallel.expert=1"),
]
BATCHES = [4] * 4 + [8] * 10 + [16] * 6
"""Of the trunk up to step 8 and of the branch."""
ENDS = list(accumulate(BATCHES))
TRUNK_SAMPLES, SAMPLES, DECAYING = 80, ENDS[-1], 112
"""Samples of the trunk, of trunk and branch together, and of the branch's decay, which begins after step 12."""
STEPS = len(BATCHES)
TRUNK = [
    f"training.batch_ramp=[{{batch: 4, until: {16 * LENGTH}}}]",
    *("training.global_batch=8", f"training.tokens={TRUNK_SAMPLES * LENGTH}", f"optimizer.decay_tokens={16 * LENGTH}"),
]
BRANCH = [
    f"training.batch_ramp=[{{batch: 4, until: {16 * LENGTH}}}, {{batch: 8, until: {96 * LENGTH}}}]",
    *("training.global_batch=16", f"training.tokens={SAMPLES * LENGTH}", "optimizer.decay_shape=sqrt"),
    f"optimizer.decay_tokens={DECAYING * LENGTH}",
]


@pytest.fixture(scope="module")
def mixtures(raw):
    """The trunk's mixture, and one of the same sources with other weights."""
    for name, weights in (("trunk", (1, 1)), ("better", (0.2, 3))):
        sources = [
            {"name": source, "shards": f"../tokens/{source}", "weight": weight}
            for source, weight in zip(("web", "code"), weights, strict=True)
        ]
        (raw / name).mkdir()
        write_mixture(raw / name, sources)
    return raw


def run(forks, folder, mixture, *overrides, ranks=1, **how):
    job = forks.run(
        folder, [*COMMON, f"data.mixture={mixture}", *overrides], ranks=ranks, **{"trainer": "Recording", **how}
    )
    if "until" not in how:
        assert job.wait() == [0] * ranks, job.output()
    return job


@pytest.fixture(scope="module")
def trunk(forks, mixtures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trunk")
    run(forks, folder, mixtures / "trunk/mixture.yaml", *TRUNK)
    return folder


@pytest.fixture(scope="module")
def branch(forks, mixtures, trunk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("branch")
    run(forks, folder, mixtures / "better/mixture.yaml", *BRANCH, f"start.branch={trunk}/run@{AT}")
    return folder


def read_by(folder, steps):
    """Return the samples and windows of each step in the order of the samples."""
    found = []
    for step in steps:
        rows = torch.cat([torch.load(path) for path in sorted((folder / "run").glob(f"read_{step}_*.pt"))])
        rows = rows[rows[:, 0].argsort()]
        found.append((rows[:, 0].tolist(), rows[:, 1:]))
    return found


@pytest.fixture(scope="module")
def read(trunk, branch):
    return read_by(trunk, range(1, AT + 1)) + read_by(branch, range(AT + 1, STEPS + 1))


def rate(step):
    """The learning rate of a step, from the docs: linear to 1e-2, constant, then 1 - sqrt down to 1e-3."""
    end = ENDS[step - 1]
    if end <= 12:
        return 1e-2 * end / 12
    part = max(0.0, (end - (SAMPLES - DECAYING)) / DECAYING)
    return 1e-3 + 9e-3 * (1 - math.sqrt(part))


def weights(folder, step):
    return dict(CheckpointReader(RunFolder(folder / "run").checkpoint(step)).tensors())


def test_ramp_decay_and_branch_equal_plain_pytorch(trunk, branch, read, tmp_path):
    """Losses and final weights within 1e-10 over 20 steps, from the initial weights on."""
    assert [len(samples) for samples, _ in read] == BATCHES
    initial = fork_script("tests.training.initial_weights", str(tmp_path / "initial.pt"), *MODEL)
    assert initial == {}
    expected, final = train(torch.load(tmp_path / "initial.pt"), [w for _, w in read], rate, DECAY, CLIP)
    found = losses(trunk)[:AT] + losses(branch)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-10
    ours = weights(branch, STEPS)
    assert ours.keys() == final.keys()
    for name, value in final.items():
        assert (ours[name] - value).abs().max() < 1e-10, name
    assert [record["learning_rate"] for record in metrics(branch)] == pytest.approx(
        [rate(step) for step in range(AT + 1, STEPS + 1)], rel=1e-12
    )


def test_branch_reads_nothing_again_that_its_trunk_read(read):
    windows = [tuple(window) for _, rows in read for window in rows.tolist()]
    assert len(windows) == len(set(windows)) == SAMPLES
    assert [sample for samples, _ in read for sample in samples] == list(range(SAMPLES))


def test_unchanged_branch_continues_the_trunk_bit_for_bit(forks, mixtures, trunk, tmp_path):
    run(forks, tmp_path, mixtures / "trunk/mixture.yaml", *TRUNK, f"start.branch={trunk}/run@4")
    assert losses(tmp_path) == losses(trunk)[4:]
    ours, theirs = weights(tmp_path, 12), weights(trunk, 12)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    (begun,) = events_of(tmp_path, Branched)
    assert begun.processes and begun.device and begun.parameters
    assert (begun.step, begun.sample, begun.steps_left, begun.changes) == (4, 16, 8, [])


def killed(forks, folder, mixture, overrides, places, then=lambda: None):
    """Run to the end with `kill -9` after each of these steps, which are taken but not all saved.

    then: Is called before the last start.
    """
    for step in places:
        job = run(forks, folder, mixture, *overrides, until=step)
        wait_until(lambda step=step: [r["step"] for r in metrics(folder)][-1:] == [step], job)
        job.kill()
        assert job.wait() == [137], job.output()
        job.go_on()
    then()
    run(forks, folder, mixture, *overrides)


@thorough
def test_kills_in_warmup_ramp_decay_and_first_step(forks, mixtures, trunk, branch, tmp_path):
    """The trunk keeps the branch's checkpoint, though it keeps only its last one, until the branch has its own."""
    ours, other = tmp_path / "trunk", tmp_path / "branch"
    trunk_run = RunFolder(ours / "run")
    few, better = ["checkpoint.keep_last=1"], mixtures / "better/mixture.yaml"
    first = [*TRUNK, *few, "checkpoint.every=2", f"training.stop_after_steps={AT}"]
    killed(forks, ours, mixtures / "trunk/mixture.yaml", first, [1, 3])  # in the warm-up and the ramp, not saved
    begun = [*BRANCH, "checkpoint.every=6", "checkpoint.asynchronous=false", f"start.branch={ours}/run"]
    job = run(forks, other, better, *begun, until=AT + 1)
    wait_until(lambda: len(metrics(other)) == 1, job)
    job.kill()  # after its first step, which is not saved
    assert job.wait() == [137]
    job.go_on()
    run(forks, ours, mixtures / "trunk/mixture.yaml", *TRUNK, *few, "checkpoint.every=2")
    kept = sorted(path.name for path in trunk_run.checkpoints.glob("step_*"))
    assert kept == ["step_00000008", "step_00000012"] and branches.needed_steps(trunk_run) == {AT}
    begun[-1] = f"start.branch={ours}/run@{AT}"
    away = tmp_path / "away"  # the second kill is in the decay, after a save: it needs no trunk any more
    killed(forks, other, better, begun, [AT + 2, 14], then=lambda: ours.rename(away))
    away.rename(ours)
    assert losses(ours) == losses(trunk) and losses(other) == losses(branch)
    assert [record["step"] for record in metrics(other)] == list(range(AT + 1, STEPS + 1))
    assert len(events_of(other, Branched)) == 3 and [each.step for each in events_of(other, Resumed)] == [12]
    assert all(torch.equal(weights(other, STEPS)[name], value) for name, value in weights(branch, STEPS).items())
    assert branches.needed_steps(trunk_run) == set()


def test_trace_answers_for_the_trunk_too(trunk, branch, read):
    tracer = Tracer(branch / "run")
    for step, (samples, windows) in enumerate(read, 1):
        assert tracer.steps.samples_of(step) == samples
        for sample, window in zip(samples, windows.tolist(), strict=True):
            assert [token for piece in tracer.pieces(sample) for token in piece.ids.tolist()] == window
            assert tracer.steps.step_of(sample) == step
    for step in (2, 15):
        piece = next(tracer.pieces(read[step - 1][0][0]))
        readings = tracer.readings(piece.origin.source, piece.origin.record)
        assert step in [reading.step for reading in readings]


def test_plan_of_a_branch_counts_what_is_left(trunk, branch, mixtures, tmp_path):
    mixture, place = f"data.mixture={mixtures}/better/mixture.yaml", [f"folder={tmp_path}", "name=new"]
    config = load("tiny", [*COMMON, mixture, *BRANCH, f"start.branch={trunk}/run@{AT}", *place])
    made = make_plan(config, begins=beginning(config))
    assert (made.steps, made.tokens) == (STEPS - AT, (SAMPLES - ENDS[AT - 1]) * LENGTH)
    assert [(stage.global_batch, stage.first, stage.steps) for stage in made.stages] == [(8, 9, 6), (16, 15, 6)]
    assert config.decay_steps == 8 and storage_of(made).kept == 3  # steps 12, 16 and 20
    took = json.loads((branch / "run/data_plan.json").read_text())["planned"]["sources"]
    for source in made.sources:
        assert (source.tokens + source.tokens_before) == took[source.name]["samples"] * LENGTH
        assert source.epochs == pytest.approx(took[source.name]["epochs"])
    assert list(tmp_path.iterdir()) == []
    shown = CliRunner().invoke(cli.app, ["plan", f"{branch}/run/config.yaml", *place, f"start.branch={trunk}/run@{AT}"])
    assert "after step 8" in shown.output and "768 tokens" in shown.output, shown.output


@pytest.fixture(scope="module")
def longer(forks, mixtures, trunk, tmp_path_factory):
    """A branch with sequences of twice the length, after a trunk of 48 samples."""
    folder = tmp_path_factory.mktemp("longer")
    more = [f"data.sequence_length={2 * LENGTH}", f"training.tokens={(48 + 32) * LENGTH}", "start.reread=true"]
    run(forks, folder, mixtures / "trunk/mixture.yaml", *TRUNK, *more, f"start.branch={trunk}/run@{AT}")
    return folder


def test_longer_sequences_are_traced_and_counted_in_tokens(trunk, longer):
    records, tracer = metrics(longer), Tracer(longer / "run")
    assert [record["consumed_tokens"] for record in records] == [(48 + 16 * n) * LENGTH for n in (1, 2)]
    assert [tracer.steps.samples_of(step) for step in (9, 10)] == [list(range(8)), list(range(8, 16))]
    for step, (samples, windows) in zip((9, 10), read_by(longer, (9, 10)), strict=True):
        assert tracer.steps.samples_of(step) == samples
        assert [t for piece in tracer.pieces(samples[0]) for t in piece.ids.tolist()] == windows[0].tolist()
    with pytest.raises(TraceError, match=rf"after step 8.*data trace {trunk}/run --step 3"):
        tracer.steps.samples_of(3)
    piece = next(Tracer(trunk / "run").pieces(5))
    readings = tracer.readings(piece.origin.source, piece.origin.record)
    assert (str(trunk / "run"), 2, 5) in [(each.run, each.step, each.sample) for each in readings]
    steps = [each.step for each in readings if each.run]
    assert all(step <= AT for step in steps)


def tokens_read(folder, steps):
    """Return shard, document and place of each token that a run has read in some steps."""
    tracer, found = Tracer(folder / "run"), []
    for sample in (sample for step in steps for sample in tracer.steps.samples_of(step)):
        pieces = list(tracer.pieces(sample))
        held = [(p.shard.prefix, p.document, p.first_token + i) for p in pieces for i in range(len(p.ids))]
        found += held[:-1]  # the last one is a label only
    return found


def test_shorter_sequences_read_what_the_trunk_has_not(forks, mixtures, trunk, tmp_path):
    """Down to half the length, and from there with other weights: no token twice in 48, 16 and 8 samples of 16."""
    short = [*TRUNK, f"data.sequence_length={LENGTH // 2}", "training.batch_ramp=[]"]
    mixture = mixtures / "trunk/mixture.yaml"
    half = [*short, f"training.tokens={64 * LENGTH}", f"start.branch={trunk}/run@{AT}"]
    run(forks, tmp_path / "a", mixture, *half)
    again = [*short, f"training.tokens={72 * LENGTH}", f"start.branch={tmp_path}/a/run@12"]
    run(forks, tmp_path / "b", mixtures / "better/mixture.yaml", *again)
    read = tokens_read(trunk, range(1, AT + 1)) + tokens_read(tmp_path / "a", range(AT + 1, 13))
    read += tokens_read(tmp_path / "b", range(13, 15))
    assert len(read) == len(set(read)) == 72 * LENGTH
    piece = next(Tracer(tmp_path / "b/run").pieces(32))
    readings = Tracer(tmp_path / "b/run").readings(piece.origin.source, piece.origin.record)
    assert (13, 32) in [(each.step, each.sample) for each in readings]


def test_longer_sequences_say_what_they_read_again(trunk, longer, mixtures, tmp_path):
    (begun,) = events_of(longer, Branched)
    (said,) = (change for change in begun.changes if "read again" in change)
    before = set(tokens_read(trunk, range(1, AT + 1)))
    twice = sum(token in before for token in tokens_read(longer, (9, 10)))
    stated = sum(int(tokens) for tokens in re.findall(r"(\d+) of", said))
    assert 0 < twice < 4 * stated and stated < 4 * twice, said  # tests/data/test_order.py compares more tokens
    mixture, length = f"data.mixture={mixtures}/trunk/mixture.yaml", f"data.sequence_length={2 * LENGTH}"
    words = [*COMMON, *TRUNK, mixture, length, f"training.tokens={80 * LENGTH}", f"folder={tmp_path}"]
    config = load("tiny", [*words, f"start.branch={trunk}/run@{AT}"])
    assert "start.reread=true" in make_plan(config, begins=beginning(config)).refused_data
    config = load(
        "tiny", [*words, f"training.tokens={96 * LENGTH}", f"start.branch={longer}/run@10"]
    )  # goes on as it did
    assert make_plan(config, begins=beginning(config)).refused_data is None
    branch, how = find_branch(config), {"vocab_size": 320, "total_samples": 24}
    branch.refuse_reread(config, build(config.data, mixture=branch.mixture(config), **how))


def test_tables_and_charts_show_the_trunk_once(trunk, branch, longer, tmp_path):
    for name, folder in (("a_branch", branch), ("longer", longer), ("trunk", trunk)):
        (tmp_path / name).symlink_to(folder / "run")
    found = {one.name: one for one in overviews(tmp_path)}
    assert list(found) == ["trunk", "a_branch", "longer"]
    assert [(one.depth, one.trunk, one.branched_at) for one in found.values()] == [
        (0, None, None),
        *[(1, "trunk", AT)] * 2,
    ]
    shown = CliRunner().invoke(cli.app, ["runs", str(tmp_path)]).stdout
    assert "\ntrunk " in shown and "\n└ a_branch " in shown
    two = read_all([branch / "run", longer / "run"])
    (above,) = trunks(two)
    assert (above.history.steps, above.history.folder.root) == (AT, trunk / "run")
    assert trunks(read_all([trunk / "run", branch / "run"])) == []
    assert two[0].along("tokens", two[0].tokens.step)[0] == ENDS[AT] * LENGTH
    hours = above.along("hours", above.tokens.step[-1:])[0]
    assert two[0].along("hours", two[0].tokens.step)[0] > hours > 0
    assert (
        two[0].averaged_loss("tokens", ENDS[3] * LENGTH)[0] == losses(trunk)[3]
    )  # before the branch: the trunk's loss
    chart = drawn_loss(read_history(branch / "run")).html()
    assert chart.count('class="line c0 thin"') == 1 and 'class="mark branch"' in chart and "trunk run" in chart


def test_branch_of_a_branch_names_both_trunks(forks, mixtures, trunk, branch, tmp_path):
    run(forks, tmp_path, mixtures / "trunk/mixture.yaml", *BRANCH, f"start.branch={branch}/run@16")
    chain = [(trunk.run.root, trunk.step) for trunk in branches.trunks_of(RunFolder(tmp_path / "run"))]
    assert chain == [(branch / "run", 16), (trunk / "run", AT)]
    tracer = Tracer(tmp_path / "run")
    assert [len(tracer.steps.samples_of(step)) for step in range(1, STEPS + 1)] == BATCHES
    assert [each.steps for each in read_history(tmp_path / "run").trunks] == [8, 8]


def refused(forks, folder, trunk, mixture, *overrides):
    """Return the message of a branch that is refused, which leaves nothing in its folder or the trunk's."""
    before = sorted(path for path in trunk.rglob("*"))
    job = forks.run(folder, [*COMMON, f"data.mixture={mixture}", *BRANCH, f"start.branch={trunk}/run@{AT}", *overrides],
                    ranks=1)  # fmt: skip
    (code,) = job.wait()
    assert code == 1, job.output()
    assert sorted(path for path in trunk.rglob("*")) == before and not (folder / "run").exists()
    error = job.output().strip().splitlines()[-1]
    assert re.match(r"megatron_blackmamba\.[\w.]+: ", error), error  # a refusal: one line for the command line
    return error


@pytest.mark.parametrize(
    "overrides, told",
    [
        (["start.branch=nowhere@8"], "nowhere"),
        (["start.branch={trunk}/run@7"], "has no checkpoint of step 7; it has those of steps 4, 8, 12"),
        (["data.sequence_length=32"], r"read again .*: about \d+ of \d+ tokens of web.*start\.reread=true"),
        (["model.hidden_size=32"], r"model\.hidden_size=16 there, and 32 here"),
        (["optimizer.kind=sgd", "optimizer.distributed=false"], r"optimizer\.distributed=True there"),
        (["training.tokens=768", "optimizer.decay_tokens=16"], "has consumed 768 tokens there.*above 768"),
    ],
)
def test_branch_that_does_not_fit_is_refused(forks, mixtures, trunk, tmp_path, overrides, told):
    given = [override.format(trunk=trunk) for override in overrides]
    assert re.search(told, refused(forks, tmp_path, trunk, mixtures / "better/mixture.yaml", *given))


def test_damaged_trunk_and_other_tokenizer_are_refused(forks, mixtures, trunk, tmp_path):
    shutil.copytree(trunk, tmp_path / "damaged")
    shutil.rmtree(tmp_path / "damaged/run/branches", ignore_errors=True)
    weights = next((tmp_path / "damaged/run/checkpoints/step_00000008").glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    error = refused(forks, tmp_path / "a", tmp_path / "damaged", mixtures / "better/mixture.yaml")
    assert weights.name in error
    write_shard(tmp_path / "other/shard", 0, 300, tokenizer="b" * 64, vocab=320)
    other = write_mixture(tmp_path / "other", [{"name": "other", "shards": "shard"}])
    assert "tokenizer" in refused(forks, tmp_path / "b", trunk, other)


@pytest.mark.parametrize(
    ("lowest", "more", "first"),
    [("1.2345641e-4", [], 1.2345641e-4), ("1e-4", [], 1e-4), ("0", ["optimizer.learning_rate=1e-3"], 1e-3)],
)
def test_a_decayed_trunk_is_annealed_from_its_rate(tmp_path, lowest, more, first):
    config, *overrides = arguments_of(decayed(tmp_path, lowest), "128", more)
    assert load(config, overrides).optimizer.learning_rate == first


def test_nothing_is_left_to_decay_from_zero(tmp_path):
    with pytest.raises(ConfigError, match=r"its learning rate is 0 at step 10.*Branch from an earlier checkpoint"):
        arguments_of(decayed(tmp_path, "0"), "128", [])


def decayed(folder, lowest):
    """Return a run that has reached its lowest learning rate, as far as a plan of a branch reads it."""
    overrides = [f"folder={folder}", "name=run", f"optimizer.min_learning_rate={lowest}"]
    config = load("tiny", [*overrides, "data.sequence_length=16", "training.global_batch=4", "training.tokens=640"])
    run = RunFolder.of(config)
    checkpoint = run.checkpoint(10)
    checkpoint.mkdir(parents=True)
    progress = Progress(10, 40, 40).state()
    (checkpoint / "manifest.json").touch()
    (checkpoint / "state.json").write_text(json.dumps({"config": to_saved(config), "progress": progress}))
    run.latest.write_text(f"{checkpoint.name}\n")
    run.config.write_text(to_yaml(config))
    return run.root


def test_anneal_is_a_branch_that_only_decays(trunk, mixtures, tmp_path):
    words = ["anneal", str(trunk / "run"), "--step", str(AT), "--tokens", "2048", "--name", "annealed", "--dry-run"]
    done = CliRunner().invoke(cli.app, [*words, "--mixture", str(mixtures / "better/mixture.yaml")])
    assert done.exit_code == 0, done.output
    command, launch = done.stdout.splitlines()
    assert command.startswith("blackmamba train ") and launch.startswith("blackmamba launch ")
    config, *overrides = command.split()[2:]
    annealed = load(config, overrides)
    assert annealed.start.branch == f"{trunk}/run@{AT}" and annealed.data.mixture == str(
        mixtures / "better/mixture.yaml"
    )
    assert annealed.samples - annealed.decay_samples == 48 and annealed.training.tokens == 48 * LENGTH + 2048
    assert not (trunk / "annealed").exists()
