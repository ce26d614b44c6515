"""Every block of docs/data.md runs as printed, in order, in one folder that is empty at first."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
BLOCK = re.compile(r"^```(bash|shell|python|yaml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^```\n\$ (blackmamba [^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS = {"s3://": "moto", "datatrove": "datatrove", "dedup": "datatrove"}
"""Optional packages, by a word of the blocks that need them."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Yield environment variables with an S3 server, where that is installed, and without the Hugging Face hub."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cache = str(tmp_path_factory.mktemp("cache"))
    variables = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "BLACKMAMBA_CACHE": cache}
    if not find_spec("moto") or not find_spec("s3fs"):
        yield variables
        return
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    url = f"http://{host}:{port}"
    boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    ).create_bucket(Bucket="corpora")
    yield variables | keys | {"AWS_ENDPOINT_URL": url}
    server.stop()


def command(language, block, folder):
    if language in ("bash", "shell"):
        return ["bash", "-euc", block]
    if language == "python":
        (folder / "block.py").write_text(block)
        return [sys.executable, "block.py"]
    (folder / "block.yaml").write_text(block)
    return ["blackmamba", "data", "mixture", "block.yaml", "--tokens", "300e9"]


def test_every_block_runs_as_printed(tmp_path, environment):
    printed = []
    for language, block in BLOCK.findall(PAGE.read_text()):
        if any(word in block and not find_spec(package) for word, package in NEEDS.items()):
            continue
        done = subprocess.run(
            command(language, block, tmp_path), cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stderr[-3000:]}"
        printed.append(done.stdout)
    for expected in (".py, record 1", "quantiles: ", "2 shards, ", "all sound", "mixture.yaml: "):
        assert expected in printed[0], printed[0]
    assert "decoder.py" in printed[-1], printed[-1]


@pytest.mark.parametrize("line, answer", PRINTED.findall(PAGE.read_text()))
def test_printed_answers_are_what_commands_print(tmp_path, environment, line, answer):
    done = subprocess.run(["bash", "-euc", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = answer.split()
    assert done.stdout.split()[: len(words)] == words
