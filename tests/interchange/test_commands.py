"""The verbs export and import, as they are typed."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megatron_blackmamba import cli
from megatron_blackmamba.config import load
from megatron_blackmamba.interchange import hf, megatron, parity, verification
from megatron_blackmamba.interchange.canonical import InterchangeError
from tests.reference import tiny, write_released
from tests.reference.canonical import canonical


@pytest.fixture
def blackmamba(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def typed(*arguments: str):
        return CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)

    return typed


def test_converts_released_files_and_explains_the_activation(blackmamba, silu, tokenizer_file, tmp_path):
    write_released(tmp_path / "released", silu)
    done = blackmamba(
        "import", "zyphra", "released", "out", "--to", "hf", "--tokenizer", str(tokenizer_file), "--no-verify"
    )
    assert "activation: gelu (the released inference code gates with erf-GELU" in done.stderr
    assert hf.read(tmp_path / "out").config.activation == "gelu"


def test_a_checkpoint_is_exported_and_imported_again(blackmamba, silu, tokenizer_file, tmp_path):
    megatron.write(canonical(silu, tokenizer=tokenizer_file), tmp_path / "ours")
    words = ("export", "hf", "ours", "exported", "--dtype", "bf16", "--json", "--check", "short")
    told = json.loads(blackmamba(*words).stdout)
    assert told["parity"]["same_top1"] == told["parity"]["tokens"] == 3 * 72
    assert told["parity"]["same_written"] == 24 and told["parity"]["reader"].startswith("transformers ")
    blackmamba("import", "hf", "exported", "back", "--no-verify")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    done = blackmamba("export", "zyphra", "back", "released", "--no-verify")
    assert "warning: This model's experts gate with SiLU" in done.stderr
    assert "not compared" in done.stdout


def test_wrong_pair_is_told_apart_by_its_pattern():
    ours, theirs = (SimpleNamespace(config=load("tiny", [f"model.pattern={each}"]).model, source=each) for each in "MS")
    with pytest.raises(InterchangeError, match=r"^S: not the model of M: model\.pattern is S, not M") as told:
        verification._same_config(ours, theirs)
    assert "mamba_moe_layers" not in str(told.value)


def test_an_export_is_verified_against_its_source(blackmamba, silu, tokenizer_file, tmp_path):
    megatron.write(canonical(silu, tokenizer=tokenizer_file), tmp_path / "ours")
    blackmamba("export", "hf", "ours", "exported", "--dtype", "bf16", "--no-verify")
    done = blackmamba("verify", "exported", "--against", "ours")
    assert "exported: the model of ours" in done.stdout and "top-1 agreement 216/216" in done.stdout
    with open(tmp_path / "exported" / "modeling_blackmamba.py", "a") as file:
        file.write("\n")
    told = json.loads(blackmamba("verify", "exported", "--against", "ours", "--check", "none", "--json").stdout)
    assert told["comparison"] is None and "blackmamba export refresh exported" in told["notes"][0]

    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    (tmp_path / "exported" / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert "config.json: eos_token_id is 7, but a document ends with 0" in verified_notes(blackmamba)
    generation = tmp_path / "exported" / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"temperature": 0.5, "do_sample": True}))
    assert "generation_config.json: sets do_sample, temperature too" in verified_notes(blackmamba)
    (tmp_path / "exported" / "cache_blackmamba.py").unlink()
    (tmp_path / "exported" / "more").mkdir()
    (tmp_path / "exported" / "more" / "helper.py").touch()
    assert "cache_blackmamba.py is missing: blackmamba export refresh" in verified_notes(blackmamba)
    assert "more/helper.py is code of somebody else" in verified_notes(blackmamba)
    with open(tmp_path / "exported" / "tokenizer.json", "a") as file:
        file.write("\n")
    assert "tokenizer.json differs from " in verified_notes(blackmamba)
    (tmp_path / "exported" / "tokenizer.json").unlink()
    assert "exported has no tokenizer.json; ours has one" in verified_notes(blackmamba)

    name = "decoder.layers.2.mixer.D"
    megatron.write(canonical(silu.with_weights(**{name: 2 * silu.weights[name]})), tmp_path / "other")
    with pytest.raises(parity.ParityError, match=f"{name} is not what other"):
        blackmamba("verify", "exported", "--against", "other")
    megatron.write(canonical(tiny("gelu")), tmp_path / "gelu")
    with pytest.raises(InterchangeError, match=r"model\.activation is silu, not gelu"):
        blackmamba("verify", "exported", "--against", "gelu")


def verified_notes(blackmamba):
    return blackmamba("verify", "exported", "--against", "ours", "--check", "none").stderr


@pytest.mark.parametrize("option", [["--dry-run"], ["--push-to", "me/tiny"], ["--overwrite"]])
def test_following_a_run_refuses_options_of_one_export(blackmamba, option):
    assert "Leave out --every" in blackmamba("export", "hf", "run", "out", "--every", "5", *option).stderr


def test_the_file_of_a_chat_template_is_noted(blackmamba, silu, tokenizer_file, tmp_path):
    hf.write(canonical(silu, tokenizer=tokenizer_file), tmp_path / "exported")
    file = tmp_path / "exported/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))
    told = blackmamba("import", "hf", "exported", "out", "--no-verify").stderr
    assert "out leaves out the chat template in exported/tokenizer_config.json" in told


def test_more_ends_of_a_text_are_noted(blackmamba, silu, tokenizer_file, tmp_path):
    hf.write(canonical(silu, tokenizer=tokenizer_file), tmp_path / "exported")
    file = tmp_path / "exported/generation_config.json"
    end = json.loads(file.read_text())["eos_token_id"]
    words = ("import", "hf", "exported", "out", "--no-verify", "--overwrite")
    assert "ends a text" not in blackmamba(*words).stderr
    file.write_text(json.dumps({"eos_token_id": [7, end, 9]}))
    assert f"out ends a text with id {end} only; exported also with 7, 9" in blackmamba(*words).stderr


def test_a_config_alone_overwrites_no_file(blackmamba, silu, tmp_path):
    hf.write(canonical(silu), tmp_path / "exported")
    (tmp_path / "mine.yaml").write_text("precious")
    words = ("import", "hf", "exported", "mine.yaml", "--config-only")
    assert "mine.yaml: already there" in blackmamba(*words).stderr
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    blackmamba(*words, "--overwrite")
    assert "pattern: MEME" in (tmp_path / "mine.yaml").read_text()


def test_dry_run_needs_a_name_to_upload_to(blackmamba):
    assert "--dry-run needs --push-to" in blackmamba("export", "hf", "run", "out", "--dry-run").stderr


def test_unreadable_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["blackmamba", "import", "zyphra", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"blackmamba: {tmp_path}/config.json: has no field" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_tells_what_would_be_uploaded(blackmamba, silu, tokenizer_file, tmp_path):
    megatron.write(canonical(silu, tokenizer=tokenizer_file), tmp_path / "ours")
    words = ["export", "hf", "ours", "exported", "--no-verify", "--push-to", "me/model"]
    done = blackmamba(*words, "--license", "mit", "--dry-run")
    told = [line.split() for line in done.stderr.splitlines() if " -> " in line]
    files = sorted(path for path in (tmp_path / "exported").rglob("*") if path.is_file())
    assert [int(line[0].replace(",", "")) for line in told] == [path.stat().st_size for path in files]
    assert [line[-1].split("/me/model/blob/main/")[1] for line in told] == [path.name for path in files]
    assert "nothing was uploaded" in done.stderr
    assert "license: mit\n" in (tmp_path / "exported" / "README.md").read_text()


def test_an_upload_that_fails_leaves_the_export(blackmamba, silu, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    megatron.write(canonical(silu), tmp_path / "ours")
    with pytest.raises(InterchangeError, match=r"me/model: not uploaded .* `hf auth login`"):
        blackmamba("export", "hf", "ours", "exported", "--no-verify", "--push-to", "me/model")
    assert (tmp_path / "exported" / "model.safetensors").exists()
    for name in ("model", "me/../model", "-/x"):
        with pytest.raises(InterchangeError, match="--push-to"):
            blackmamba("export", "hf", "ours", "other", "--push-to", name)
    assert not (tmp_path / "other").exists()
