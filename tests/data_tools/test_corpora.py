"""`blackmamba data corpora` prints commands for the published files, and figures that follow from the tokens."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from typer.testing import CliRunner

from megatron_blackmamba.data_tools.commands import app
from megatron_blackmamba.data_tools.corpora import CORPORA, chosen
from megatron_blackmamba.data_tools.mixture import plan_mixture
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.sources import PRESETS, find_sources
from megatron_blackmamba.formats.mixture import Mixture
from tests.thorough import thorough

ROOT = Path(__file__).resolve().parents[2]
TAKEN = {
    "fineweb": "sample/350BT/000_00027.parquet",
    "dclm": "global-shard_03_of_10/local-shard_1_of_10/shard_00000000_processed.jsonl.zst",
    "commonpile": "wikimedia/wikimedia-0000.json.gz",
    "code": "stack-edu-0000.json.gz",
    "finemath": "finemath-3plus/train-00000-of-00128.parquet",
    "pes2o": "data/v2/train-00000-of-00010.json.gz",
    "starcoder": "python/train-00000-of-00059.parquet",
    "nemotron-cc": "High-Quality/part_000000.parquet",
}
LEFT = {
    "fineweb": ["sample/10BT/000_00000.parquet", "data/CC-MAIN-2024-10/train-00000-of-00020.parquet"],
    "dclm": ["global-shard_03_of_10/local-shard_2_of_10/shard_00000000_processed.jsonl.zst"],
    "commonpile": ["stackv2_edu/stack-edu-0000.json.gz", "uspto/uspto-0000.json.gz"],
    "finemath": ["finemath-4plus/train-00000-of-00064.parquet", "infiwebmath-3plus/train-00000-of-00096.parquet"],
    "pes2o": ["data/v1/train-00000-of-00020.json.gz"],
    "starcoder": ["git-commits-cleaned/train-0.parquet", "jupyter-scripts-dedup-filtered/train-0.parquet"],
}
"""Paths in the published data sets that the commands download, and others."""


def run(*words):
    done = CliRunner().invoke(app, ["corpora", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", CORPORA)
def test_download_takes_what_the_preset_reads(name, tmp_path):
    corpus, files = CORPORA[name], [TAKEN[name], *LEFT.get(name, ())]
    patterns = {"allow_patterns": list(corpus.include) or None, "ignore_patterns": list(corpus.exclude) or None}
    assert list(filter_repo_objects(files, **patterns)) == [TAKEN[name]]
    file = tmp_path / name / TAKEN[name]
    file.parent.mkdir(parents=True)
    file.touch()
    preset = PRESETS[corpus.preset]
    (found,) = find_sources([str(tmp_path / name)], preset.format, preset.match, split="train").sources
    assert found.path == str(file)


def test_figures_follow_from_tokens_and_rate():
    found = json.loads(run("finemath", "fineweb", "--json", "--rate", "1GB", "--cores", "10"))
    math, web = found["corpora"]["finemath"], found["corpora"]["fineweb"]
    assert math["token_bytes"] == {"uint16": 68e9, "int32": 136e9}
    assert math["download_bytes"] == [65_039_196_945] * 2
    assert web["download_bytes"] == [pytest.approx(560e9), pytest.approx(980e9)]
    assert web["download_hours"][0] == pytest.approx(560 / 3600)
    assert web["tokenize_hours"] == pytest.approx(350e9 / 6e6 / 10 / 3600)
    assert found["all"]["tokens"] == 384e9 and found["downloaded_here"] is False


def test_script_says_what_was_not_done():
    text = run("nemotron-cc", "--raw", "/big disk/raw/", "--tokens", "out", "-t", "mine.json")
    assert "Not downloaded here" in text and "estimated" in text and "First accept its terms" in text
    commands = [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]
    assert commands[1][-2:] == ["--local-dir", "/big disk/raw/nemotron-cc"]
    assert commands[2][3:5] == ["/big disk/raw/nemotron-cc", "out/nemotron-cc"]
    assert "estimated" not in run("finemath")
    assert len(run().splitlines()) == len(CORPORA) + 4


def test_open_mix_states_tokens_of_its_corpora():
    corpora, name = chosen(["open_mix"])
    mixture = Mixture.read(ROOT / "configs/data/open_mix.yaml")
    assert name == "open_mix" and not any(corpus.first for corpus in corpora.values())
    assert {source.name: source.tokens for source in mixture.sources} == {n: c.tokens for n, c in corpora.items()}
    plan = plan_mixture(mixture, 300_000_000_000)
    plan.check()
    for source, planned in zip(mixture.sources, plan.sources, strict=True):
        assert planned.epochs == pytest.approx(source.weight, rel=0.01) and planned.epochs < 0.5


@pytest.mark.parametrize("names", [["nope"], ["fineweb", "nope"], ["paper_mix"]])
def test_unknown_corpora_are_refused(names):
    with pytest.raises(InputError, match=r"corpora are fineweb|no such corpus|no download is known for pg19, pile"):
        chosen(names)


def test_slurm_jobs_tokenize_after_the_download():
    text = run("open_mix", "--slurm", "cpu", "--cores", "40")
    (fineweb,) = re.findall(
        r"download=\S+ .*--job-name=download_fineweb .*? --time=6:00:00 (?s:.*?)END\n\)\n(.*)", text
    )
    assert "--dependency=afterok:$download" in fineweb and "--array=0-1 --cpus-per-task=16" in fineweb
    assert text.count("sbatch --parsable") == text.count("--partition=cpu") == 2 * 5 + 1
    there = run("open_mix", "--slurm", "cpu", "--no-download", "--cores", "3")
    assert "hf download HF" not in there and "$download" not in there and "--array=0-0 --cpus-per-task=3" in there


@thorough
@pytest.mark.parametrize("name", CORPORA)
def test_no_network_stops_a_partial_download(name, tmp_path):
    """By itself, `hf download` calls the part that is there a success."""
    lines = [line for line in run(name, "--raw", str(tmp_path)).splitlines() if line.startswith("hf ")]
    (tmp_path / name).mkdir()
    (tmp_path / name / "some.parquet").touch()
    tools = Path(sys.executable).parent
    environment = {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": f"{tools}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-ec", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "offline" in done.stdout + done.stderr, done.stdout + done.stderr
