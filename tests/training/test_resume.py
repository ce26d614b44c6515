import hashlib
import json
import re
from pathlib import Path

import pytest

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.checkpoint.reading import STATE
from megatron_blackmamba.config import from_saved, load, to_saved
from megatron_blackmamba.config.load import walk
from megatron_blackmamba.training.branch import may_differ
from megatron_blackmamba.training.start.resume import (
    ResumeError,
    refuse_changes,
    refuse_start,
    refuse_start_tokenizer,
    refuse_tokenizer,
    rules,
)


def saved():
    return load("tiny").model_dump(mode="json", by_alias=True)


def resumed(*overrides):
    return refuse_changes(saved(), load("tiny", list(overrides)), step=50)


@pytest.mark.parametrize(
    "override, old, new",
    [
        ("model.hidden_size=128", "64", "128"),
        ("data.synthetic.order=1", "2", "1"),
        ("training.precision=bf16", "fp32", "bf16"),
        ("optimizer.distributed=false", "True", "False"),
    ],
)
def test_changed_model_or_data_names_key_and_values(override, old, new):
    with pytest.raises(ResumeError) as error:
        resumed(override)
    message = str(error.value)
    assert override.split("=")[0] in message and old in message and new in message
    assert "step 50" in message and "start.from" in message


def test_changed_learning_rate_must_be_allowed_by_name():
    with pytest.raises(ResumeError, match=r"resume\.allow=\[optimizer\.learning_rate\]"):
        resumed("optimizer.learning_rate=1e-3")
    with pytest.raises(ResumeError, match=r"restore the old value, on the command line or in the run's file"):
        resumed("optimizer.learning_rate=1e-3")
    allowed = resumed("optimizer.learning_rate=1e-3", "resume.allow=[optimizer.learning_rate]")
    assert allowed == ["optimizer.learning_rate: 0.001 from step 51 on, 0.003 before"]


def test_changed_length_is_answered_in_steps_too():
    with pytest.raises(ResumeError, match=rf"training\.steps={load('tiny').steps}, and now training\.steps=60\."):
        resumed("training.steps=60")


FIXED_BESIDE_MODEL = {
    *("data.kind", "data.sequence_length", "data.seed", "data.mask_first_token", "data.synthetic.sources"),
    *("data.synthetic.order", "training.precision", "training.seed", "optimizer.kind", "optimizer.distributed"),
}
LOSS_WEIGHTS = {"model.z_loss", "model.router.z_loss", "model.mtp.loss"}
LENGTH_AND_BATCH = {"training.tokens", "training.global_batch", "training.batch_ramp"}
TOLD = "training.micro_batch"
"""Free, but the log tells of it, since the router balances each micro-batch."""


def test_every_key_has_a_rule_for_resuming():
    assert [key for key, rule in rules().items() if rule is None] == []
    assert {key for key, _, section in walk() if section is None} == rules().keys()


def test_model_data_and_optimizer_state_never_change():
    """The second word on the most dangerous rules, which the fields alone say otherwise."""
    model = {key for key in rules() if key.startswith("model.")}
    assert {key for key, rule in rules().items() if rule.resume == "fixed"} == model - LOSS_WEIGHTS | FIXED_BESIDE_MODEL
    optimizer = {key for key in rules() if key.startswith("optimizer.")} - FIXED_BESIDE_MODEL
    by_name = {key for key, rule in rules().items() if rule.resume == "by name"}
    assert by_name == optimizer | LOSS_WEIGHTS | LENGTH_AND_BATCH


@pytest.mark.parametrize("key", rules())
def test_a_changed_key_follows_its_rule(key):
    before, rule = saved(), rules()[key].resume
    *sections, last = key.split(".")
    section = before
    for name in sections:
        section = section[name]
    section[last] = "another value"
    if rule == "free":
        assert len(refuse_changes(before, load("tiny"), step=50)) == (key == TOLD or key.startswith("parallel."))
        return
    with pytest.raises(ResumeError, match=rf"{key}=another value, and now it is"):
        refuse_changes(before, load("tiny"), step=50)
    named = load("tiny", [f"resume.allow=[{key}]"])
    if rule == "by name":
        assert len(refuse_changes(before, named, step=50)) == 1
    else:
        with pytest.raises(ResumeError, match="start another run"):
            refuse_changes(before, named, step=50)


def test_allowing_a_section_allows_only_its_keys():
    changes = ["optimizer.learning_rate=1e-3", "optimizer.beta2=0.9", "resume.allow=[optimizer]"]
    assert len(resumed(*changes)) == 2
    with pytest.raises(ResumeError, match=r"training\.tokens"):
        resumed(*changes, "training.tokens=4096000")


@pytest.mark.parametrize(
    "model, change, told",
    [
        ([], "training.micro_batch=2", "training.micro_batch: 2 from step 51 .*balances each micro-batch"),
        (
            ["model.router.kind=expert_bias"],
            "training.micro_batch=2",
            "training.micro_batch: 2 from step 51 on, . before$",
        ),
        (["model.pattern=MM"], "training.micro_batch=2", "training.micro_batch: 2 from step 51 on, . before$"),
        (["model.router.scope=rank"], "parallel.tensor=2", "parallel.tensor: 2 from .*the choice depends on parallel"),
        ([], "parallel.tensor=2", "parallel.tensor: 2 from step 51 on, 1 before$"),
        ([], "training.overlap=false", None),
    ],
)
def test_changes_that_route_tokens_otherwise_are_told(model, change, told):
    before = load("tiny", model).model_dump(mode="json", by_alias=True)
    lines = refuse_changes(before, load("tiny", [*model, change]), step=50)
    assert len(lines) == bool(told) and (not told or re.match(told, lines[0]))


@pytest.mark.parametrize("key, value", [("optimizer.beta2", "0.9"), ("model.router.iterations", "3")])
def test_key_missing_from_a_checkpoint_takes_its_default(key, value):
    old = saved()
    *sections, last = key.split(".")
    section = old
    for name in sections:
        section = section[name]
    default = section.pop(last)
    old = from_saved(old, "step 50").model_dump(mode="json", by_alias=True)
    assert refuse_changes(old, load("tiny"), step=50) == []
    with pytest.raises(ResumeError, match=rf"{key}={default}, and now it is {value}"):
        refuse_changes(old, load("tiny", [f"{key}={value}"]), step=50)


def test_tokenizer_may_be_moved_but_not_replaced():
    record = {"tokenizer": {"name": "mine", "sha256": "abc", "file": "/here"}}
    other = {"tokenizer": {"name": "yours", "sha256": "xyz", "file": None}}
    refuse_tokenizer(record, {"tokenizer": {"name": "moved", "sha256": "abc", "file": None}}, 5)
    refuse_tokenizer({"tokenizer": None}, {"tokenizer": None}, 5)
    for now in (other, {"tokenizer": None}):
        with pytest.raises(ResumeError, match=r"mine .*abc"):
            refuse_tokenizer(record, now, 5)


@pytest.fixture
def started(tmp_path):
    """Make a run that starts from the weights of another one."""

    def make(then=(), now=(), tokenizer=None):
        folder = tmp_path / "weights"
        folder.mkdir()
        (folder / manifest.NAME).write_text("{}")
        state = {"config": to_saved(load("tiny", list(then))), "data": {"tokenizer": tokenizer}}
        (folder / STATE).write_text(json.dumps(state))
        return load("tiny", [f"start.from={folder}", f"folder={tmp_path}", *now])

    return make


@pytest.mark.parametrize(
    "old, new",
    [
        (["model.activation=gelu"], ["model.activation=silu"]),  # what an import of released weights says
        (["model.top_k=1"], ["model.top_k=2"]),
        (["model.norm_eps=1e-5"], ["model.norm_eps=1e-6"]),
        (["model.eod_reset=null"], ["model.eod_reset=3"]),
        (["model.router.kind=softmax", "model.router.aux_loss=0.1"], ["model.router.kind=sinkhorn"]),
        (["model.router.kind=sinkhorn"], ["model.router.kind=sinkhorn_bias"]),  # has a bias beside the same weights
        (["model.router.kind=quantile"], ["model.router.kind=sinkhorn"]),
    ],
)
def test_start_refuses_weights_that_compute_otherwise(started, old, new):
    key = new[0].partition("=")[0]
    with pytest.raises(ResumeError, match=rf"weights have .*{key}=.* this run has .*{key}=.*allow=\[.*{key}\]"):
        refuse_start(started(old, new))


def test_start_refuses_weights_with_their_own_head(started):
    with pytest.raises(ResumeError, match=r"Use model\.tie_embeddings=False, or leave start\.from out"):
        refuse_start(started(["model.tie_embeddings=false"], ["model.tie_embeddings=true"]))


def test_start_refuses_other_heads_of_equal_shapes(started):
    attention = ["model.pattern=M*"]
    with pytest.raises(ResumeError, match=r"model\.attention\.heads=4, and this run has model\.attention\.heads=8"):
        refuse_start(started([*attention, "model.attention.heads=4"], [*attention, "model.attention.heads=8"]))


def test_start_allows_changed_outputs_by_name(started):
    refuse_start(started(["model.activation=gelu"], ["resume.allow=[model.activation]"]))


def test_start_allows_other_settings_of_training(started):
    changed = ["model.router.iterations=3", "model.router.scope=rank", "model.init.std=0.1"]
    unused = ["model.attention.heads=8", "model.mamba2.groups=4", "model.dt_rank=4"]  # 4 is the default's value
    refuse_start(started([], [*changed, *unused]))


def test_start_refuses_data_of_another_tokenizer(started):
    first, second = ({"name": name, "sha256": name * 64, "file": None} for name in "ab")
    run = started(tokenizer=first)
    for same in (first, None):  # synthetic data has no tokenizer
        refuse_start_tokenizer(run, {"tokenizer": same})
    with pytest.raises(ResumeError, match=r"tokenizer a .*this data is of b .*resume\.allow=\[data\.mixture\]"):
        refuse_start_tokenizer(run, {"tokenizer": second})
    theirs = Path(run.start.from_) / "tokenizer.json"
    theirs.write_text("{}")
    with pytest.raises(ResumeError, match=f"data tokenize .* --tokenizer {re.escape(str(theirs))}"):
        refuse_start_tokenizer(run, {"tokenizer": second})
    allowed = run.model_copy(update={"resume": run.resume.model_copy(update={"allow": ["data.mixture"]})})
    refuse_start_tokenizer(allowed, {"tokenizer": second})


def test_start_reads_the_tokenizer_of_an_imported_model(started):
    run = started()  # an import records no data, but has its tokenizer beside the weights
    file = Path(run.start.from_) / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ResumeError, match=r"its weights are of the tokenizer tokenizer\.json .*this data is of b "):
        refuse_start_tokenizer(run, {"tokenizer": {"name": "b", "sha256": "b" * 64, "file": None}})
    same = {"name": "b", "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "file": None}
    refuse_start_tokenizer(run, {"tokenizer": same})


IN_BRANCHES = {
    *("data.sequence_length", "data.mask_first_token", "model.attention.rotary_base", "model.eod_reset"),
    *("model.router.iterations", "model.router.temperature", "model.router.start"),
}
"""What a branch may change although a resumed run may not."""


@pytest.mark.parametrize("key", rules())
def test_every_key_has_a_rule_for_branches(key):
    """A branch may change what is free on resume, its schedule, batch, length, data and balance, and nothing else."""
    on_resume = rules()[key].resume
    stays = on_resume == "fixed" or key in LOSS_WEIGHTS
    assert may_differ(key) == (not stays or key in IN_BRANCHES)
    told = key in IN_BRANCHES or key == "data.mixture" or (on_resume == "by name" and not stays)
    assert (rules()[key].branch == "told") == told
