"""The lock covers pyproject.toml, the table of versions is what was measured, and a killed run of it continues."""

import json
import re
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_blackmamba.hf.configuration_blackmamba import TRIED
from megatron_blackmamba.launch import software
from scripts import borders, pythons

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("data", "dev", "docs", "bench", "wandb")
OF_DEV = ("dedup", "language", "s3", "eval", "chat", "gguf", "studies")


def locked(python: str) -> dict[str, Version]:
    """Return the versions of the lock for a Python."""
    here = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    here |= {"platform_machine": "x86_64"}
    lines = (ROOT / "requirements/lock.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    kept = [need for need in wanted if need.marker is None or need.marker.evaluate(here)]
    assert all(len(need.specifier) == 1 and str(need.specifier).startswith("==") for need in kept)
    return {canonicalize_name(need.name): Version(str(need.specifier)[2:]) for need in kept}


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_lock_has_every_requirement(python):
    versions = locked(python)
    for line in metadata.requires("megatron-blackmamba") or ():
        need = Requirement(line)
        here = {"python_version": python, "python_full_version": f"{python}.9"}
        if need.marker and not any(need.marker.evaluate(here | {"extra": extra}) for extra in ("", *EXTRAS, *OF_DEV)):
            continue
        if need.name == "megatron-blackmamba":
            assert need.extras == set(OF_DEV)
            continue
        assert need.specifier.contains(versions[canonicalize_name(need.name)]), f"{need}: run make lock"
    assert {"setuptools", "wheel"} <= versions.keys()  # or the newest would build the package


def test_the_page_is_made_from_the_results():
    assert borders.PAGE.read_text() == borders.page(borders.read_results()), "scripts/borders.py --page"


def test_modeling_files_name_versions_that_were_tried():
    tried = software.tried_versions()["transformers"]
    assert set(TRIED) <= tried and max(tried, key=Version) == TRIED[1]
    assert str(locked("3.11")["transformers"]) == TRIED[1]


def test_a_killed_run_continues(tmp_path, monkeypatch):
    count = tmp_path / "count"
    one = ["-c", f"open({str(count)!r}, 'a').write('x'); print('== 3 passed, 1 skipped in 0.1s ==')"]
    border = borders.Border("orjson", ("1.0", "2.0"), {"one": one, "two": ["-c", "raise SystemExit('two fails')"]})
    monkeypatch.setattr(borders, "BORDERS", (border,))
    monkeypatch.setattr(borders, "RESULTS", tmp_path / "tried.json")
    monkeypatch.setattr(borders, "PAGE", tmp_path / "versions.md")
    monkeypatch.setattr(borders, "environment", lambda border, version: (Path(sys.executable), ""))
    monkeypatch.setattr(borders, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(borders, "log_of", lambda python, name: tmp_path / f"{name}.log")
    assert borders.main(["orjson==1.0"]) == 1
    assert borders.main(["orjson==1.0"]) == 1 and count.read_text() == "x"
    assert borders.main(["orjson==2.0"]) == 1 and count.read_text() == "xx"
    assert borders.main(["orjson==2.0", "--again"]) == 1 and count.read_text() == "xxx"
    page = (tmp_path / "versions.md").read_text()
    assert "| 1.0 | 3 passed, 1 skipped | **failed**: two fails |" in page
    assert len(json.loads((tmp_path / "tried.json").read_text())) == 4
    monkeypatch.setattr(software.resources, "files", lambda package: tmp_path)
    assert software.tried_versions() == {}


def test_the_doctor_names_what_nobody_tried(monkeypatch):
    monkeypatch.setattr(software, "tried_versions", lambda: {"numpy": {"1.2.0", "1.30.1"}, "torch": {"1.0", "99.0"}})
    (found,) = software.versions()
    assert found.status == "note" and "is newer than everything tried (1.2.0 to 1.30.1)" in found.found


def test_a_python_s_result_names_commit_and_date(tmp_path, monkeypatch):
    """`make` is real, on a Makefile whose tests end at once."""
    (tmp_path / "Makefile").write_text("test:\n\t@mkdir -p $(VENV)/bin; echo '== 3 passed in 0.1s =='; $(END)\n")
    monkeypatch.setattr(pythons, "ROOT", tmp_path)
    monkeypatch.setattr(pythons, "RESULTS", tmp_path / "pythons.json")
    monkeypatch.setattr(borders, "PAGE", tmp_path / "versions.md")
    monkeypatch.setattr(borders, "versions_in", lambda python, packages: dict.fromkeys(packages, "1.2"))
    for words in (
        ["init", "-q"],
        ["add", "Makefile"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert pythons.main([sys.executable]) == 0
    (found,) = pythons.read_results()
    assert found.commit == pythons.git("rev-parse", "--short=10", "HEAD") and found.date == date.today().isoformat()
    row = f"| {found.python} | 1.2 | 1.2 | 1.2 | 3 passed in 0.1s | {found.commit}, {found.date} |"
    assert row in (tmp_path / "versions.md").read_text()
    monkeypatch.setenv("END", "exit 1")
    assert pythons.main([sys.executable]) == 1 and "**failed**: 3 passed" in (tmp_path / "versions.md").read_text()
    (tmp_path / "Makefile").write_text("test:\n")
    with pytest.raises(SystemExit):
        pythons.main([sys.executable])


def test_extras_admit_triton_of_the_oldest_torch():
    """Else `make install` replaces a PyTorch that was chosen for an older driver."""
    oldest = re.search(r"^triton==(\S+)", (ROOT / "requirements/lowest.txt").read_text(), re.MULTILINE)[1]
    asked = [need for need in map(Requirement, metadata.requires("megatron-blackmamba") or ()) if need.name == "triton"]
    assert asked and all(need.specifier.contains(oldest) for need in asked)
