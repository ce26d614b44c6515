"""Configs that another version of the program saved."""

import shlex
from pathlib import Path

import pytest
import yaml

from megatron_blackmamba.config import (
    ConfigError,
    find,
    from_saved,
    load,
    migrations,
    read_saved,
    shipped,
    to_saved,
    to_yaml,
)
from megatron_blackmamba.config.migrations import Migration, assume, remove, rename
from megatron_blackmamba.formats.run_folder import RunFolder


@pytest.fixture
def later(monkeypatch):
    """A later version, in which keys were renamed, removed and given another default."""
    changes = (
        Migration("one name for both", rename({"start.source": "start.from"})),
        Migration("the router's key moves", rename({"training.router_start": "model.router.start"})),
        Migration("every run does that now", remove("training.fast", meaning=True)),
        Migration("the default changed from 0.9 to 0.95", assume("optimizer.beta2", 0.9)),
    )
    monkeypatch.setattr(migrations, "MIGRATIONS", changes)


def old(**sections):
    """The tiny run as version 1 saved it, with some sections' keys changed; None drops a key."""
    content = load("tiny").model_dump(mode="json", by_alias=True)
    for section, changes in sections.items():
        content[section] = {k: v for k, v in (content[section] | changes).items() if v is not None}
    return content


@pytest.mark.parametrize("name", shipped())
def test_a_saved_config_is_read_back(name, tmp_path, monkeypatch):
    monkeypatch.delenv("BLACKMAMBA_DATA", raising=False)
    run = load(name)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(run))
    assert from_saved(to_saved(run), "here") == read_saved(path) == load(path) == run


def test_a_missing_key_has_its_default():
    run = from_saved(old(model={"norm_eps": None}, optimizer={"eps": None}, training={"guard": None}), "here")
    assert run == load("tiny")


def test_every_migration_since_the_saved_version_applies(later):
    content = old(
        start={"from": None, "source": "runs/a"},
        training={"router_start": "uniform"},
        model={"router": {}},
        optimizer={"beta2": None},
    )
    run = from_saved(content, "here")
    assert (run.start.from_, run.model.router.start, run.optimizer.beta2) == ("runs/a", "uniform", 0.9)
    assert "source" in content["start"]  # what was read is left as it was


def test_migrations_before_the_saved_version_do_not_apply(later):
    content = old(optimizer={"beta2": None})
    assert from_saved({"version": 4, **content}, "here").optimizer.beta2 == 0.9
    assert from_saved({"version": 5, **content}, "here").optimizer.beta2 == 0.95
    with pytest.raises(ConfigError, match=r"'start.source' is unknown"):
        from_saved({"version": 2, **old(start={"source": "runs/a"})}, "here")


def test_a_file_with_a_version_is_migrated(later, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"version": 1, **old(start={"from": None, "source": "runs/a"})}))
    assert load(path).start.from_ == "runs/a"
    path.write_text(yaml.safe_dump(old(optimizer={"beta2": None})))
    assert load(path).optimizer.beta2 == 0.95  # no version: a person wrote it, for today's defaults


def test_a_removed_key_with_another_meaning_is_refused(later):
    assert from_saved(old(training={"fast": True}), "here") == load("tiny")
    with pytest.raises(ConfigError, match=r"here: training.fast=False is no longer supported.*training.fast=True"):
        from_saved(old(training={"fast": False}), "here")


def test_newer_config_is_refused_with_a_remedy(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"version": 99, **old()}))
    newest = migrations.current_version()
    for read in (load, read_saved):
        with pytest.raises(
            ConfigError, match=rf"config.yaml: a newer megatron-.*version 99.*reads up to {newest}.*Upgrade"
        ):
            read(path)
    with pytest.raises(ConfigError, match=r"here: 'training.warp' is unknown to megatron-blackmamba .*newer version"):
        from_saved(old(training={"warp": 9}), "here")


@pytest.mark.parametrize("content", [None, [], "text", {"version": "1"}, {"version": 0}, {"version": True}, {}])
def test_nonsense_is_refused_in_words(content):
    with pytest.raises(ConfigError, match=r"^here: ") as error:
        from_saved(content, "here")
    assert "Traceback" not in str(error.value)


def test_impossible_values_name_the_key():
    with pytest.raises(ConfigError, match=r"here: optimizer.beta1=2"):
        from_saved(old(optimizer={"beta1": 2}), "here")


def as_version_1(content):
    """Give a saved config the names of keys that version 1 wrote."""
    kernels, start, resume = (content.pop(name) for name in ("kernels", "start", "resume"))
    for newer in ("ssd", "delta", "scan_states", "cuda_graph", "if_missing"):
        del kernels[newer]
    del start["branch"], start["reread"]
    return content | {"model": content["model"] | kernels, "init": start | resume}


def test_old_names_in_saved_config_are_read_silently(tmp_path, recwarn):
    changed = ["kernels.scan=chunked", "kernels.linear=te", "start.from=runs/a", "resume.allow=[optimizer]"]
    run = load("tiny", changed)
    saved = as_version_1(run.model_dump(mode="json", by_alias=True))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"version": 1, **saved}))
    assert from_saved(saved, "here") == read_saved(path) == load(path) == run
    assert not recwarn.list


def test_saved_router_keys_that_nothing_read_are_forgotten():
    router = {"kind": "sinkhorn", "iterations": 3, "aux_loss": 0.5}
    assert from_saved(old(model={"router": router}), "here") == load("tiny", ["model.router.iterations=3"])
    softmax = from_saved(old(model={"router": {"kind": "softmax", "iterations": 3, "aux_loss": 0.5}}), "here")
    assert softmax == load("tiny", ["model.router.kind=softmax", "model.router.aux_loss=0.5"])


@pytest.mark.parametrize("old, new", migrations.RENAMED.items())
def test_an_old_name_is_read_with_one_note(old, new, tmp_path):
    value = {"dispatcher": "allgather", "linear": "te", "scan": "chunked", "from": "runs/a", "allow": ["optimizer"]}
    section, key = old.split(".")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"include": str(find("tiny")), section: {key: value[key]}}))
    written = yaml.safe_dump(value[key], default_flow_style=True).removesuffix("\n...\n").strip()
    expected = load("tiny", [f"{new}={written}"])
    for files, overrides, where in ((path, [], str(path)), ("tiny", [f"{old}={written}"], "the command line")):
        notes = []
        assert load(files, overrides, notes.append) == expected
        assert notes == [f"{where}: {old} is called {new} now; the old name still works."]
    with pytest.warns(FutureWarning, match=new):
        load(path)


def test_an_old_value_is_read_with_one_note(tmp_path):
    expected = load("tiny", ["kernels.scan=cpp"])
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"include": str(find("tiny")), "kernels": {"scan": "cpu"}}))
    for files, overrides, where in ((path, [], str(path)), ("tiny", ["kernels.scan=cpu"], "the command line")):
        notes = []
        assert load(files, overrides, notes.append) == expected
        assert notes == [f"{where}: kernels.scan=cpu is called kernels.scan=cpp now; the old name still works."]
    assert from_saved({"version": 4, **old(kernels={"scan": "cpu"})}, "here") == expected


def test_old_and_new_key_together_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"include": str(find("tiny")), "init": {"from": "a"}, "start": {"from": "b"}}))
    with pytest.raises(ConfigError, match=r"mine.yaml: init.from and start.from are the same key.*Remove init.from"):
        load(path)


@pytest.fixture
def saved_run(tmp_path, monkeypatch):
    """A run that trained in runs/old of this directory."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "old")
    for folder in (run.root, run.checkpoints, run.checkpoint(7), run.launches / "001"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(load("tiny", ["name=old", "folder=runs"])))
    run.metrics.touch()
    return run.root


INSIDE = ("config.yaml", "checkpoints/step_00000007/config.yaml", "launch/001/config.yaml")


@pytest.mark.parametrize("inside", INSIDE)
def test_moved_run_does_not_train_in_old_folder(saved_run, inside):
    """It would begin anew there and leave the moved checkpoints alone."""
    assert load(saved_run / inside, to_train=True).name == "old"
    moved = saved_run.rename(saved_run.with_name("new name"))
    with pytest.raises(ConfigError, match=r"but trains in .*/runs/old") as raised:
        load(moved / inside, to_train=True)
    advised = shlex.split(str(raised.value).partition("add ")[2].partition(";")[0])
    run = load(moved / inside, advised, to_train=True)
    assert Path(run.folder) / run.name == moved
    assert load(moved / inside, ["name=other"], to_train=True).name == "other"


def test_config_of_run_is_refused_in_another_directory(saved_run, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"name=old folder={saved_run.parent}"):
        load(saved_run / "config.yaml", to_train=True)
    with pytest.warns(FutureWarning, match="belongs to the run in"):  # what does not train may read it
        assert load(saved_run / "config.yaml").name == "old"


def test_copied_config_is_a_run_of_its_own(saved_run, tmp_path):
    (tmp_path / "copy.yaml").write_text((saved_run / "config.yaml").read_text())
    assert load("copy.yaml", to_train=True).name == "old"


def test_run_in_a_linked_folder_is_not_moved(saved_run, tmp_path):
    saved_run.rename(tmp_path / "disk")
    saved_run.symlink_to(tmp_path / "disk")
    assert load(saved_run / "config.yaml", to_train=True).name == "old"
