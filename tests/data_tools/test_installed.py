"""The installed package beside a user's own module of the name data_tools."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python files of an installation, without the compiled kernels."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    if not (ROOT / "setup.py").exists():
        pytest.skip("only a checkout can be installed")
    pytest.importorskip("setuptools")
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_nothing_but_the_package_is_installed(installed):
    assert [path.name for path in installed.iterdir()] == ["megatron_blackmamba"]
    package, tools = installed / "megatron_blackmamba", installed / "megatron_blackmamba/data_tools"
    assert {path.name for path in (package / "scripts").iterdir()} == {"slurm", "container"}  # none of maintainers
    for needed in ("launch/tried.json", "scripts/slurm/train_job.sh", "configs/run/tiny.yaml"):
        assert (package / needed).is_file(), needed
    assert {path.name for path in tools.glob("*.py")} == {path.name for path in (ROOT / "data_tools").glob("*.py")}
    assert not tools.is_symlink()


def test_source_archive_holds_what_a_build_needs(tmp_path):
    words = ["-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path]
    subprocess.run([sys.executable, "setup.py", *words], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").iterdir()}
    assert sources <= held and {"LICENSE", "README.md", "pyproject.toml", "configs/run/tiny.yaml"} <= held
    assert {"megatron_blackmamba/data_tools/readers.py", "scripts/slurm/train_job.sh"} <= held
    assert not any(name.startswith("tests/") or name.endswith((".so", ".pyc")) for name in held)


def test_other_data_tools_package_does_not_collide(installed, tmp_path):
    (tmp_path / "data_tools.py").write_text("raise SystemExit('the wrong one')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{installed}"}
    for module in (["megatron_blackmamba", "data", "tokenize"], ["megatron_blackmamba.data_tools"]):
        command = [sys.executable, "-m", *module, "--help"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "--tokenizer" in done.stdout, done.stderr
