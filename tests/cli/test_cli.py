"""The messages of the command line outside its commands."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from megatron_blackmamba import cli, registry
from megatron_blackmamba.config import arguments
from tests.runtime.ranks import ROOT, environment

EXTENSION = """
from megatron_blackmamba import layers
from tests.layers.running_mean.kind import RunningMean

layers.register(RunningMean)
"""


def run_with_extension(module, folder, *arguments, more=""):
    (folder / "my_layers.py").write_text(EXTENSION + more)
    found = environment(PYTHONPATH=str(ROOT), BLACKMAMBA_IMPORT=module)  # it is in the current folder
    command = [sys.executable, "-m", "megatron_blackmamba", *arguments]
    return subprocess.run(command, env=found, cwd=folder, capture_output=True, text=True)


def test_commands_import_extensions(tmp_path):
    done = run_with_extension("my_layers", tmp_path, "config", "tiny", "model.pattern=MA")
    assert done.returncode == 0 and "pattern: MA" in done.stdout, done.stderr


def test_run_names_the_module_that_its_layers_need(tmp_path):
    train = ("train", "tiny", "model.pattern=MA", "name=mean", "training.steps=2", "training.global_batch=1")
    train += ("training.micro_batch=1", "checkpoint.every=1")
    done = run_with_extension("my_layers", tmp_path, *train, "training.stop_after_steps=1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/mean/config.yaml").read_text().startswith("# trained with BLACKMAMBA_IMPORT=my_layers\n")
    generated = run_with_extension("", tmp_path, "generate", "runs/mean", "--prompt", "Once")
    assert "found ['A']. If a module of your own defines it, name that module in BLACKMAMBA_IMPORT" in generated.stderr
    reported = run_with_extension("", tmp_path, "report", "runs/mean")  # which only reads records
    assert reported.returncode == 0, reported.stderr
    resumed = run_with_extension("my_layers", tmp_path, *train, more="# edited since\n")
    assert "code of my_layers has changed since step 1\n" in resumed.stdout, resumed.stdout + resumed.stderr


def test_locales_without_a_letter_get_another():
    """A table has "–" and "→", which Latin-1 lacks: such a locale must not end a command."""
    command = [sys.executable, "-m", "megatron_blackmamba", "plan", "tiny"]
    done = subprocess.run(command, env=environment(PYTHONIOENCODING="latin-1"), capture_output=True, encoding="latin-1")
    assert (done.returncode, done.stderr) == (0, "") and "?" in done.stdout


def test_commands_work_without_docstrings():
    command = [sys.executable, "-m", "megatron_blackmamba", "config", "tiny"]
    done = subprocess.run(command, env=environment(PYTHONOPTIMIZE="2"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "content", "said"),
    [
        (
            "mine",
            "import nowhere_at_all",
            "the module imports what is missing: No module named 'nowhere_at_all'. ",
        ),
        ("mine", "1 / 0", "the module cannot be imported: ZeroDivisionError: division by zero. Correct"),
        ("mine", "def broken(:", "the module cannot be imported: SyntaxError: "),
        ("mine", "from os import nothing", "the module cannot be imported: ImportError: cannot import name 'nothing'"),
        ("my_lairs", "", "No module named 'my_lairs'. Add the folder"),
        ("mine.py", "", "give the name of the module, mine, not its file."),
    ],
)
def test_broken_extension_is_named_with_its_cause(tmp_path, monkeypatch, module, content, said):
    (tmp_path / "mine.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("BLACKMAMBA_IMPORT", module)
    with pytest.raises(registry.ImportFailed) as refused:
        registry.import_extensions.__wrapped__()
    assert str(refused.value).startswith(f"BLACKMAMBA_IMPORT={module}: {said}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train tiny --batch_size=4", "training.global_batch=VALUE"),
        ("train tiny --training.seed 4", "training.seed=VALUE"),
        ("config tiny --name x", "name=VALUE"),
        ("config tiny --learning-rate 1", "optimizer.learning_rate=VALUE"),
        ("train --config mine.yaml tiny", "mine.yaml"),
        ("plan tiny --epochs 3", "source"),
        ("doctor --folder here --seven", ""),
        ("--name", ""),
        ("sample runs/tiny", "generate?"),
        ("tokenize text", "tokenize?"),
        ("data verfy text", "verify?"),
        ("export huggingface runs/tiny out", "hf?"),
        ("import transformers out", "hf?"),
        ("export released out", "zyphra?"),
        ("trian tiny", "train?"),
        ("zzz", ""),
    ],
)
def test_wrong_options_and_commands_are_explained(words, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["blackmamba", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    found = [line for line in lines if line.startswith("blackmamba:")]
    suggested = [
        line.partition("Did you mean '")[2].partition("'")[0] + "?" for line in lines if "Did you mean" in line
    ]
    assert [*suggested, *(line.rpartition(" ")[2].rstrip(".") for line in found)] == ([said] if said else [])


def run_without(module, *words):
    start = f"import sys; sys.modules['{module}'] = None; from megatron_blackmamba.__main__ import main; main()"
    return subprocess.run([sys.executable, "-c", start, *words], cwd=ROOT, capture_output=True, text=True)


def test_chat_names_what_to_install():
    done = run_without("starlette", "chat", "nowhere")
    told = "blackmamba: starlette or uvicorn is missing: pip install -e '.[chat]'\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_commands_work_without_the_serving_package():
    done = run_without("megatron_blackmamba.serving", "--help")
    assert done.returncode == 0 and "generate" in done.stdout and "chat" not in done.stdout, done.stderr


def commands(group, words=()):
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


def test_help_shows_every_command_in_one_section():
    registered = typer.main.get_command(cli.app).commands
    assert sorted(name for names in cli.SECTIONS.values() for name in names) == sorted(registered)


def test_help_cuts_no_names_at_80_columns():
    found = list(commands(typer.main.get_command(cli.app)))
    assert ("data", "tokenize") in found
    for words in found:
        said = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"})
        assert said.exit_code == 0 and "…" not in said.output, said.output


@pytest.mark.parametrize(("rank", "pauses"), [("0", []), ("1", [""])])
def test_later_ranks_pause_before_they_refuse(rank, pauses, monkeypatch, capsys):
    done = []
    monkeypatch.setattr(cli, "time", SimpleNamespace(sleep=lambda _: done.append(capsys.readouterr().err)))
    monkeypatch.setattr(cli.os, "_exit", done.append)
    monkeypatch.setattr(sys, "argv", ["blackmamba", "config", "no_such_run"])
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv(cli.SAID, raising=False)
    with pytest.raises(SystemExit):
        cli.main()
    assert done == [*pauses, 2]
    assert capsys.readouterr().err.startswith("blackmamba: ")


@pytest.mark.parametrize(("quiet", "said"), [(False, "blackmamba: an old name\n"), (True, "")])
def test_notes_are_silenced_by_quiet(quiet, said, capsys):
    arguments.note("an old name", quiet)
    assert capsys.readouterr().err == said


def test_model_without_its_weights_is_warned_of(tmp_path, capsys):
    """Continuing an imported model takes both its model.yaml and start.from."""
    words = ["tiny", str(tmp_path / "model.yaml"), f"folder={tmp_path}"]
    (tmp_path / "model.yaml").write_text("model: {hidden_size: 32}\n")
    arguments.compose(words, to_train=True)
    assert capsys.readouterr().err == ""
    (tmp_path / "manifest.json").touch()
    arguments.compose(words, to_train=True)
    assert f"starts from random weights: add start.from={tmp_path} to" in capsys.readouterr().err
    arguments.compose([*words, f"start.from={tmp_path}"], to_train=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("plan tiny --check", "need --nodes"),
        ("plan tiny --suggest", "need --nodes"),
        ("plan tiny --mfu 0.2", "need --nodes"),
        ("doctor tiny --all-ranks --quick", "does not go with --quick"),
        ("doctor --all-ranks --json", "does not go with --quick"),
        ("doctor --unfit names", "needs --all-ranks"),
        ("evaluate runs/tiny --watch --out scores.json", "no --out"),
        ("evaluate runs/tiny --watch --json", "no --json"),
        ("study smoke --gpus 4", "add --slurm"),
        ("generate runs/tiny -p a --stream --no-stream", "exclude each other"),
        ("study smoke --slurm --minutes 5", "leave out them or --slurm"),
    ],
)
def test_options_without_effect_are_refused(words, refused):
    said = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"})
    assert said.exit_code == 2
    assert refused in " ".join(said.output.replace("│", " ").split())


def test_folder_without_runs_is_said_to_have_none(tmp_path):
    assert CliRunner().invoke(cli.app, ["runs", str(tmp_path)]).stdout == f"{tmp_path}: no runs yet\n"
