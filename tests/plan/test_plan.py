import io
import json
import re
from dataclasses import replace

import pytest
import torch.distributed as dist
import yaml
from rich.console import Console
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.data import DataError
from megatron_blackmamba.data import build as build_data
from megatron_blackmamba.formats.mixture import MixtureError
from megatron_blackmamba.model import build
from megatron_blackmamba.plan import advice, estimate, gpus, layouts, measured, memory, storage, table, traffic
from megatron_blackmamba.plan.estimate import Asked
from megatron_blackmamba.plan.layouts import Cluster
from megatron_blackmamba.runtime import layout, world
from tests.data.corpus import VOCAB, three_sources, write_mixture, write_shard

H100 = gpus.KNOWN["h100"]


def plan(*arguments):
    """Return the output of `blackmamba plan ... --json`, and its error."""
    done = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    return json.loads(done.stdout), done.exception


def printed(planned):
    console = Console(file=io.StringIO(), width=200)
    table.show(planned, console)
    return console.file.getvalue()


def test_paper_run_is_planned_on_its_own_nodes(monkeypatch):
    monkeypatch.delenv("BLACKMAMBA_DATA", raising=False)
    answer, error = plan("blackmamba_1.5b", "--nodes", "7", "--scaling", "--failures", "0.3", "--restart", "20")
    assert error is None
    assert answer["parameters"]["total"] == 1_458_462_072
    assert answer["training"] == {
        "steps": 145_322,
        "tokens": 145_322 * 2_064_384,
        "tokens_per_step": 2_064_384,
        "warmup_steps": 1453,
    }
    epochs = {source["name"]: round(source["epochs"], 4) for source in answer["data"]["sources"]}
    assert epochs["pile"] == 0.3246
    assert epochs["pg19"] == 0.8115
    missing = answer["data"]["missing"]
    assert missing.startswith("no shards of pile, slimpajama, ") and missing.count("BLACKMAMBA_DATA") == 2
    assert answer["layout"]["works"]
    assert answer["layout"]["fits"]
    assert answer["storage"]["checkpoint"] == pytest.approx(14 * 1_458_462_072, rel=0.001)
    assert answer["storage"]["kept"] == 17  # 14 multiples of 10,000, and the newest 3
    assert answer["storage"]["corpus"] == pytest.approx(2 * 1.24e12, rel=0.01)
    assert answer["layout"]["fitting_nodes"] == [1, 7]
    parts = answer["memory_per_gpu_gib"]
    assert parts["total"] < parts["available"]
    assert set(answer["traffic_per_gpu_per_step"]) == {"expert", "data", "expert_data"}
    time = answer["time"]
    assert time["gpu_hours"] == pytest.approx(time["days"] * 24 * 56)
    lost = 500 * time["seconds_per_step"] + 20 * 60  # half of checkpoint.every, and the restart
    assert time["goodput"]["lost_per_failure"] == pytest.approx(lost)
    assert [row["nodes"] for row in answer["scaling"]["strong"]] == [1, 7]
    assert [row["global_batch"] for row in answer["scaling"]["weak"]][:3] == [144, 288, 576]


@pytest.mark.parametrize("run", ["blackmamba_1.5b", "blackmamba_2.8b"])
def test_every_suggestion_for_eight_nodes_fits(run):
    answer, error = plan(run, "--nodes", "8", "--suggest")
    assert isinstance(error, layout.LayoutError)
    assert not answer["layout"]["works"]
    assert "memory_per_gpu_gib" not in answer
    assert len(answer["layout"]["suggestions"]) == 5 + 2  # and the run's own layout with the next batches
    for suggestion in answer["layout"]["suggestions"]:
        config = load(run, suggestion["overrides"].split())
        layout.check(config, 64)
        assert memory.fullest(config, 64)[0].total < H100.memory_gib * memory.GIB


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (48, []),
        (64, ["parallel.tensor=2", "training.micro_batch=1"]),
        (64, ["parallel.pipeline=2", "training.micro_batch=1"]),
    ],
)
def test_every_rank_of_the_larger_run_builds_here(ranks, overrides):
    config = load("blackmamba_2.8b", overrides)
    layout.check(config, ranks)
    names, experts_held = set(), set()
    for rank in range(ranks):
        with world.fake(config.parallel, ranks, rank) as us:
            model = build(config, us)
            assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
            names |= {name for name, _ in model.named_parameters()}
            experts_held.add((us.pipeline_rank, us.expert_rank))
    assert {int(name.split(".")[2]) for name in names if ".layers." in name} == set(range(36))
    assert len(experts_held) == 8 * config.parallel.pipeline
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["parallel.tensor=3", "data.sequence_length=2049"], "cannot be divided by parallel.tensor=3"),
        (["parallel.pipeline=64"], "36 layers cannot fill parallel.pipeline=64"),
        (["training.micro_batch=16", "parallel.tensor=2"], "does not divide the 33 sequences"),
    ],
)
def test_broken_layouts_are_refused_with_the_reason(overrides, reason):
    made = estimate.make_plan(load("blackmamba_2.8b", overrides), Asked(8, 8, H100))
    assert any(reason in why for why in made.placed.refused)
    assert not made.placed.fits
    assert "What works" in table.refusal(made.placed)


def test_advice_names_a_number_of_nodes_once():
    made = estimate.make_plan(load("blackmamba_1.5b"), Asked(8, 8, H100))
    assert made.placed.advice.count("on 7 nodes") == 1


def test_advice_counts_nodes_and_says_that_nothing_fits():
    config, cluster = load("tiny"), Cluster(4, 4, H100)
    words = advice.advice(config, cluster, [1, 2])
    assert " on 1 node: " in words and "as it is on 2 nodes: " in words and "1 nodes" not in words
    full = replace(cluster, gpu=H100.model_copy(update={"memory_gib": 0.01}))
    assert advice.advice(config, full, [1, 2]).startswith("What works: nothing near it.")


def test_advice_leads_with_batches_and_prices_all():
    made = estimate.make_plan(load("blackmamba_1.5b"), Asked(32, 4, H100))
    title, *lines, caution = made.placed.advice.splitlines()
    assert title.startswith("What works") and caution.startswith("Another training.global_batch trains another model")
    batches = ["training.global_batch=896 training.micro_batch=7", "training.global_batch=1024 training.micro_batch=8"]
    assert [line.split(" on ")[0].strip() for line in lines[:2]] == batches
    assert not any("parallel.tensor=8" in line for line in lines)  # a node has 4 GPUs
    assert [re.findall(r"as it is on (\d+) nodes", line) for line in lines[-2:]] == [["2"], ["14"]]
    assert lines[-3].startswith("  training.micro_batch=9 on 28 nodes: ")  # 112 ranks, the batch of the config
    for line in lines:
        seconds, speed = re.fullmatch(r".*: ([\d.]+) s a step, ([\d,]+) tokens a second", line).groups()
        batch = int(re.findall(r"global_batch=(\d+)", line)[0]) if "global_batch" in line else 1008
        assert int(speed.replace(",", "")) == pytest.approx(batch * 2048 / float(seconds), rel=0.02)


def test_suggestions_can_be_copied_from_a_narrow_terminal():
    made = estimate.make_plan(load("blackmamba_1.5b"), Asked(16, 8, gpus.KNOWN["h200"], suggest=True))
    screen = Console(width=80, file=io.StringIO())
    table.show(made, screen)
    shown = screen.file.getvalue()
    words = {word for each in made.placed.suggestions for word in each.overrides(made.config).split()}
    assert "training.global_batch=1024" in words and all(word in shown.split() for word in words)
    assert "expert exchange" in " ".join(shown.split()) and "…" not in shown


def test_memory_refusal_names_the_given_cluster():
    asked = Asked(4, 4, gpus.KNOWN["a100"], gpu_option="my gpu.yaml")
    refused = table.refusal(estimate.make_plan(load("blackmamba_1.5b", ["training.micro_batch=63"]), asked).placed)
    assert "`blackmamba plan ... --nodes 4 --gpus-per-node 4 --gpu 'my gpu.yaml' --suggest`" in refused


def test_small_gpu_is_refused_and_recomputation_suggested(tmp_path):
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(H100.model_dump() | {"name": "small", "memory_gib": 2.57}))
    long = ["tiny", "data.sequence_length=2048", "kernels.cuda_graph=off"]
    answer, _ = plan(*long, "--nodes", "1", "--gpus-per-node", "1", "--gpu", str(small), "--suggest")
    assert answer["layout"]["works"]
    assert not answer["layout"]["fits"]
    assert [s["recompute"] for s in answer["layout"]["suggestions"]] == ["layers"]


def test_unknown_gpu_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(gpus.GpuError, match=r"h100, h200, a100.*memory_gib"):
        gpus.find("h900")
    wrong = tmp_path / "gpu.yaml"
    wrong.write_text("name: mine\nmemory: 80\n")
    with pytest.raises(gpus.GpuError, match=r"memory_gb_s: Field required \(GB/s that kernels reach"):
        gpus.find(str(wrong))
    assert gpus.find("a100-40gb").memory_gib < 40 < gpus.find("a100").memory_gib


def test_kept_checkpoints_are_counted_by_hand():
    kept = ["training.tokens=204800", "checkpoint.every=10", "checkpoint.keep_last=2"]
    config = load("tiny", kept)  # 100 steps
    assert storage.kept_steps(load("tiny", [*kept, "checkpoint.keep_every=40"])) == {40, 80, 90, 100}
    assert storage.kept_steps(config) == {90, 100}
    assert storage.kept_steps(load("tiny", [*kept, "checkpoint.every=0"])) == {100}


def test_short_times_and_counts_have_fitting_units():
    hours, days, minutes = 3600, 86400, 60
    shown = [table.duration(each) for each in (9.6 * hours, 2 * days, 5 * minutes, 1.5)]
    assert shown == ["9.6 hours", "2.0 days", "5.0 min", "1.5 s"]
    assert [table._count(each) for each in (9.74e10, 136_533, 512)] == ["97.400 B", "0.137 M", "512"]


def test_mfu_is_a_number_or_a_measuring_run(tmp_path):
    assert measured.mfu("0.4") == 0.4
    with pytest.raises(measured.MfuError, match="between 0 and 1"):
        measured.mfu("40")
    with pytest.raises(measured.MfuError, match="has no metrics"):
        measured.mfu(str(tmp_path))
    lines = [json.dumps({"step": step, "mfu": 0.1 * step}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert measured.mfu(str(tmp_path)) == pytest.approx(0.2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "speed/mfu": 0.4}\n{"step": 5, "speed/mf')  # it is being written
    assert measured.mfu(str(tmp_path)) == pytest.approx(0.25)


@pytest.mark.parametrize("every, hinted", [(100_000, False), (1, True)])
def test_high_write_rate_names_setting_that_lowers_it(every, hinted):
    config = load("blackmamba_1.5b", [f"checkpoint.every={every}"])
    said = printed(estimate.make_plan(config, Asked(7, 8, H100)))
    assert ("a larger checkpoint.every lowers it" in said) == hinted


def test_twice_the_mfu_takes_half_the_time():
    config = load("blackmamba_1.5b")
    slow, fast = (estimate.make_plan(config, Asked(7, 8, H100, mfu)).placed for mfu in (0.2, 0.4))
    assert slow.seconds_per_step == pytest.approx(2 * fast.seconds_per_step)
    exact = 2_064_384 * 2.070033408e9 / (56 * 989e12 * 0.2)
    assert slow.seconds_per_step == pytest.approx(exact)
    assert not slow.mfu_is_calculated


def test_without_an_mfu_the_time_is_the_roofline():
    placed = estimate.make_plan(load("blackmamba_1.5b"), Asked(7, 8, H100)).placed
    assert placed.mfu_is_calculated
    assert placed.seconds_per_step == pytest.approx(placed.time.total)
    assert 0.25 < placed.mfu < H100.product_share


def test_small_micro_batches_wait_for_the_host():
    """As on an H200, where 30 layers of any size take the host about 0.11 s."""

    def time(size, *more):
        config = load("blackmamba_1.5b", [f"training.micro_batch={size}", *more])
        return estimate.make_plan(config, Asked(7, 8, H100)).placed.time

    assert time(18).launching == 0
    seconds = [time(2, *more) for more in ([], ["training.recompute=layers"], ["model.mtp.pattern=ME"])]
    whole, again, further = (step.computing + step.launching for step in seconds)
    assert whole == pytest.approx(9 * 0.111, rel=0.1)  # and gradients are added
    assert again > 1.3 * whole  # the second forward pass is launched too
    assert further > whole + 9 * 2 * 0.0037


def test_launches_of_a_cuda_graph_are_never_late():
    def late(*words):
        config = load(
            "blackmamba_1.5b", ["parallel.expert=1", "training.global_batch=2", "training.micro_batch=2", *words]
        )
        return estimate.make_plan(config, Asked(1, 1, H100)).placed.time.launching

    assert late() == 0 < late("kernels.cuda_graph=off")
    assert late("training.recompute=layers") > 0


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor=2, expert=8),
        ParallelConfig(tensor=2, pipeline=2, expert=4, expert_tensor=2),
        ParallelConfig(pipeline=4, expert=8),
        ParallelConfig(tensor=4, expert=2),
        ParallelConfig(tensor=2, context=4, pipeline=2, expert=4),
    ],
)
def test_links_are_those_that_megatrons_groups_cross(parallel):
    nodes, size, experts = 8, 64, parallel.expert * parallel.expert_tensor
    axes = {
        "tp": (1, parallel.tensor),
        "ep": (parallel.expert_tensor, parallel.expert),
        "pp": (size // parallel.pipeline, parallel.pipeline),
        "cp": (parallel.tensor, parallel.context),
        "dp_cp": (parallel.tensor, size // parallel.tensor // parallel.pipeline),
        "expt_dp": (experts, size // experts // parallel.pipeline),
    }
    inside = dict.fromkeys(axes, True)
    for rank in range(size):
        with world.fake(parallel, size, rank) as us:
            for name in axes:
                members = dist.get_process_group_ranks(getattr(us.groups, name))
                inside[name] &= len({member // nodes for member in members}) == 1
    assert {name: traffic._inside_nodes(*axis, size, nodes) for name, axis in axes.items()} == inside


def test_the_table_tells_what_the_json_tells(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = CliRunner().invoke(app, ["plan", "blackmamba_2.8b", "--nodes", "6"])
    assert done.exit_code == 0, done.output
    for expected in (
        "2,783,213,584",
        "628,770,832",
        "138,717",
        "1.2e+21",
        "6 × 8 H100",
        "fits",
        "GPU-hours",
        "with failures",
        "pes2o",
    ):
        assert expected in done.output


@pytest.mark.parametrize(
    ("asked", "overrides", "said"),
    [
        (None, [], r"[\d.,]+ [BM] parameters, [\d.]+ B tokens; add --nodes N \(and --gpu\) for memory"),
        (Asked(7, 8, H100), [], r"fits: [\d.]+ of [\d.]+ GiB on the fullest of 56 H100[^;]*; [\d.]+ hours at best"),
        (Asked(7, 8, H100, mfu=0.2), [], r"fits: .* hours at 20.0% MFU"),
        (Asked(7, 8, H100), ["training.micro_batch=126"], r"cannot run on 56 H100[^:]*: training.micro_batch=126"),
        (Asked(7, 8, gpus.KNOWN["a100-40gb"]), [], r"does not fit: [\d.]+ of [\d.]+ GiB on the fullest of"),
    ],
)
def test_plan_begins_with_its_verdict(asked, overrides, said):
    shown = printed(estimate.make_plan(load("blackmamba_1.5b", overrides), asked))
    assert re.match(rf"blackmamba_1.5b:? {said}", shown), shown


def test_routing_that_depends_on_the_layout_is_noted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["tiny", "--nodes", "1", "--gpus-per-node", "2", "parallel.tensor=2"]
    done = CliRunner().invoke(app, ["plan", *arguments, "model.router.scope=rank"])
    assert "Note: model.router.scope=rank balances the tokens of each rank apart" in done.output
    assert "rank balances" in plan(*arguments, "model.router.scope=rank")[0]["layout"]["routing"]
    assert "Note:" not in CliRunner().invoke(app, ["plan", *arguments]).output


def test_data_that_training_would_refuse_are_refused_here(tmp_path):
    path = three_sources(tmp_path)
    overrides = ["data.kind=mixture", f"data.mixture={path}", "data.sequence_length=16", f"model.vocab_size={VOCAB}"]
    accepted = estimate.make_plan(load("tiny", overrides))
    assert accepted.refused_data is None
    assert "would refuse the data" not in printed(accepted) and "Data not found" not in printed(accepted)
    path.write_text(path.read_text().replace("name: b", "name: b\n  max_epochs: 0.5"))
    refused = estimate.make_plan(load("tiny", overrides))
    assert "max_epochs is 0.5" in refused.refused_data
    done = CliRunner().invoke(app, ["plan", "tiny", *overrides])
    assert str(done.exception) == f"training would refuse the data: {refused.refused_data}"
    assert "--check prints only that" in printed(refused).splitlines()[1]
    assert refused.refused_data not in " ".join(done.output.split())  # the message at the end is the only one


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("model.vocab_size=300", "was tokenized with a vocabulary of 512, the model has 300"),
        ("model.eod_reset=7", "end with token 0. Set model.eod_reset=0"),
        ("data.sequence_length=99", "less than one sample of 99"),
    ],
)
def test_plan_and_training_refuse_the_same_data(tmp_path, override, complaint):
    write_shard(tmp_path / "a/one", 0, 90, vocab=512)
    mixture = write_mixture(tmp_path, [{"name": "a", "shards": "a"}])
    overrides = ["data.kind=mixture", f"data.mixture={mixture}", override]
    done = CliRunner().invoke(app, ["plan", "tiny", *overrides, "--nodes=1", "--gpus-per-node=1", "--check"])
    assert done.exit_code and complaint in str(done.exception)
    run = load("tiny", overrides)
    with pytest.raises((MixtureError, DataError), match=complaint):
        build_data(run.data, vocab_size=run.model.vocab_size, total_samples=1, eod_reset=run.model.eod_reset)


def test_repeated_sources_and_wide_tensor_ranks_give_warnings(tmp_path):
    def warned(*arguments):
        done = CliRunner().invoke(app, ["plan", "tiny", *overrides, *arguments, "--check"])
        assert done.exit_code == 0, done.exception
        return done.stderr

    write_shard(tmp_path / "a/one", 0, 400, vocab=512)
    mixture = write_mixture(tmp_path, [{"name": "a", "shards": "a"}])
    overrides = [f"data.mixture={mixture}", "parallel.tensor=2", "training.evaluate_every=0"]
    epochs = estimate.make_plan(load("tiny", overrides)).sources[0].epochs
    said = warned("--nodes=2", "--gpus-per-node=1")
    assert f"the run reads sources more than once: a {epochs:,.2f} times" in said
    assert "parallel.tensor=2 crosses nodes" in said
    assert "evaluate_every=5 measures nothing" in warned("--nodes=2", "--gpus-per-node=1", "training.evaluate_every=5")
    write_mixture(tmp_path, [{"name": "a", "shards": "a", "max_epochs": 1e9}])
    assert warned("--nodes=1", "--gpus-per-node=2") == ""


def test_a_missing_mixture_file_is_named():
    planned = estimate.make_plan(load("tiny", ["data.kind=mixture", "data.mixture=nowhere.yaml"]))
    assert planned.sources == () and planned.missing_data == "nowhere.yaml: no such mixture file"
    assert printed(planned).splitlines()[1] == "Data not found: nowhere.yaml: no such mixture file"


def test_fp64_has_no_plan_for_gpus():
    with pytest.raises(gpus.GpuError, match="fp64 runs on CPUs only"):
        gpus.find("h100").peak("fp64")


def test_suggestions_are_sorted_by_speed_with_commands():
    config = load("blackmamba_2.8b")
    found = layouts.suggest(config, layouts.Cluster(48, 8, H100), count=4)
    assert [c.seconds_per_step for c in found] == sorted(c.seconds_per_step for c in found)
    for candidate in found:
        changed = load(
            "blackmamba_2.8b", [] if "(" in candidate.overrides(config) else candidate.overrides(config).split()
        )
        assert changed.parallel == candidate.layout.parallel
        assert changed.training.micro_batch == candidate.layout.micro_batch


def test_ramp_is_planned_stage_by_stage():
    """Each stage has its own time of a step, and the run takes the sum of them."""
    ramp = "training.batch_ramp=[{batch: 336, until: 2B}, {batch: 672, until: 5B}]"
    settings = [
        ramp,
        "training.micro_batch=6",
        "training.tokens=10B",
        "optimizer.decay=wsd",
        "optimizer.decay_tokens=2B",
    ]
    answer, error = plan("blackmamba_1.5b", *settings, "--nodes", "7")
    assert error is None
    stages, training = answer["training"]["stages"], answer["training"]
    assert [stage["global_batch"] for stage in stages] == [336, 672, 1008]
    assert [stage["first"] for stage in stages] == [
        1,
        1 + stages[0]["steps"],
        1 + stages[0]["steps"] + stages[1]["steps"],
    ]
    assert sum(stage["steps"] for stage in stages) == training["steps"] == load("blackmamba_1.5b", settings).steps
    assert sum(stage["tokens"] for stage in stages) == training["tokens"]
    assert training["decay_steps"] == round(2e9 / training["tokens_per_step"])
    seconds = sum(stage["steps"] * stage["seconds_per_step"] for stage in stages)
    assert answer["time"]["days"] == pytest.approx(seconds / 86400)
    assert stages[0]["seconds_per_step"] == pytest.approx(stages[2]["seconds_per_step"] / 3, rel=0.05)
    assert stages[2]["seconds_per_step"] == answer["time"]["seconds_per_step"]
    shown = CliRunner().invoke(app, ["plan", "blackmamba_1.5b", *settings, "--nodes", "7"]).output
    assert "336 sequences" in shown and "decay steps, at the end" in shown
    given, _ = plan("blackmamba_1.5b", *settings, "--nodes", "7", "--mfu", "0.2")
    assert given["training"]["stages"][0]["seconds_per_step"] * 3 == pytest.approx(given["time"]["seconds_per_step"])


def test_a_long_update_is_remarked_on():
    words = ["training.global_batch=8", "training.micro_batch=1", "optimizer.kind=muon"]
    plans = [estimate.make_plan(load("blackmamba_1.5b", words[:n]), Asked(1, 8, H100)) for n in (2, 3)]
    assert ["the update takes" in " ".join(table.warnings(planned)) for planned in plans] == [False, True]


def test_flat_and_sudden_rates_give_warnings():
    words = ["optimizer.min_learning_rate=2e-5", "optimizer.warmup_tokens=0", "training.steps=20"]
    more = ("optimizer.decay=linear", "optimizer.learning_rate=2e-5", "start.from=weights")
    said = [table.warnings(estimate.make_plan(load("tiny", [*words, each]))) for each in more]
    assert [[each.partition(" ")[0] for each in some] for some in said] == [
        [],
        ["optimizer.min_learning_rate"],
        ["start.from"],
    ]
