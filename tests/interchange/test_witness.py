"""A success is said only after the installed transformers has loaded the export, in a process of its own."""

import json
import shutil

import pytest

from megatron_blackmamba.interchange import convert, hf, native, verification, witness
from megatron_blackmamba.interchange.canonical import Canonical
from megatron_blackmamba.quickstart import stages
from tests.interchange.native_grid import write_model
from tests.reference import tiny
from tests.reference.canonical import canonical
from tests.thorough import thorough

SPOILED = """
import importlib.abc, importlib.util, sys

class Spoiler(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "transformers.generation.utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def execute(module):
            load(module)
            def renamed(self, *inputs, **options):
                raise TypeError("generate() takes no inputs any more")
            module.GenerationMixin.generate = renamed
        spec.loader.exec_module = execute
        return spec

sys.meta_path.insert(0, Spoiler())
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "good"
    hf.write(canonical(tiny("silu")), folder)
    return folder


def test_an_incompatible_transformers_fails_the_export(silu, tokenizer_file, tmp_path, monkeypatch):
    (tmp_path / "spoiled").mkdir()
    (tmp_path / "spoiled/sitecustomize.py").write_text(SPOILED)
    model, out = canonical(silu, tokenizer=tokenizer_file), tmp_path / "out.v1"
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", str(tmp_path / "spoiled"))
        with pytest.raises(witness.WitnessError, match=r"out\.v1: transformers .* takes no inputs any more.*refresh"):
            convert.to_hf(model, out)
    mark = (out / witness.MARK).read_text()
    assert "Traceback" in mark and str(tmp_path) not in mark.splitlines()[0].replace(str(out), "")
    found = verification.verify(out).comparison  # with the transformers that is installed
    assert found is not None and found.agrees and found.written == found.same_written == 24
    assert found.reader.startswith("transformers ") and found.tokens == 3 * 72
    assert not (out / witness.MARK).exists() and not list(out.glob("__pycache__"))


@thorough
def test_a_wrong_cache_is_found(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "bad")
    file = folder / "cache_blackmamba.py"  # one pass over all tokens is right, only what the model writes is not
    file.write_text(file.read_text().replace("self.seen += document_BL.shape[1]", "self.reset()"))
    with pytest.raises(witness.WitnessError, match="its outputs are not: largest logit difference"):
        witness.check(hf.read(folder), folder, "short")
    assert (folder / witness.MARK).is_file()


def test_the_quickstart_does_not_claim_an_unchecked_export(monkeypatch, tmp_path, exported):
    def failing(model: Canonical, out, **options):
        shutil.copytree(exported, out)
        raise witness.WitnessError(f"{out}: transformers 9 does not run this export")

    monkeypatch.setattr(convert, "to_hf", failing)
    monkeypatch.setattr("megatron_blackmamba.interchange.open.open_model", lambda path: hf.read(exported))
    quickstart = stages.Quickstart(tmp_path, minutes=1, processes=1)
    with pytest.raises(witness.WitnessError):
        stages.export(quickstart)
    checked = []
    monkeypatch.setattr(witness, "check", lambda model, folder, how="full": checked.append(folder) or "agrees")
    assert stages.export(quickstart) == "agrees" and checked == [quickstart.export]
    assert json.loads((tmp_path / "parity.json").read_text()) == "agrees"


@pytest.mark.parametrize(
    ("layers", "kept"), [("r4r4", "ME"), ("rrr4", "MMME"), ("r4a4", "ME*"), ("r4s4", "MES"), ("r4aa", "ME*")]
)
def test_the_short_check_has_every_kind_of_layer(layers, kept):
    short = witness.first_layers(canonical(tiny("silu", layers=layers)))
    assert short.config.pattern == kept and len(short.entries) < len(canonical(tiny("silu", layers=layers)).entries) + 1


def test_the_short_check_keeps_layers_of_families_whole(tmp_path, monkeypatch):
    model = native.read(write_model("granitemoehybrid", tmp_path / "granite"))

    def ask(folder, *_):
        raise witness.WitnessError(native.read(folder).config.pattern)

    monkeypatch.setattr(witness, "ask", ask)
    with pytest.raises(witness.WitnessError, match=r"granite: SE\*E\. The folder stays"):
        witness.check(model, tmp_path / "granite", "short")
    assert model.config.pattern == "SE*ESE"


def test_a_replacement_that_fails_leaves_the_old_export(silu, tmp_path, monkeypatch):
    def fails(*_):
        raise witness.WitnessError("transformers 9 does not run this export")

    out = tmp_path / "out.v1"
    convert.to_hf(canonical(silu), out, check="none")
    (out / "older").touch()
    with monkeypatch.context() as changed:
        changed.setattr(witness, "ask", fails)
        with pytest.raises(witness.WitnessError, match=r"out\.v1: transformers 9 .* What was there stays"):
            convert.to_hf(canonical(silu), out, overwrite=True)
    assert [*tmp_path.iterdir()] == [out] and (out / "older").exists()
    same = convert.to_hf(hf.read(out), out, overwrite=True, shard_bytes=20_000)  # which also is the source
    assert same is not None and same.agrees and same.reader.startswith("transformers ")
    assert [*tmp_path.iterdir()] == [out] and not (out / "older").exists() and (out / hf.INDEX).exists()


def test_check_too_large_for_memory_is_refused(silu, tmp_path, monkeypatch):
    monkeypatch.setattr(Canonical, "parameters", 10**15)
    with pytest.raises(witness.WitnessError, match="--check short"):
        convert.to_hf(canonical(silu), tmp_path / "out")
    assert not list(tmp_path.iterdir())
