"""Every block of the pages about data runs as printed, in order, in one folder that is empty at first."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("pages")
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("data.md", "cleaning.md", "mixtures.md")
TEXT = "".join((DOCS / page).read_text() for page in PAGES)
BLOCK = re.compile(r"^```(bash|shell|python|yaml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^```\n\$ (blackmamba [^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS = {"s3://": "moto", "datatrove": "datatrove", "dedup": "datatrove", "data filter": "datatrove"}
"""Optional packages, by a word of the blocks that need them."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Yield environment variables with an S3 server, where that is installed."""
    variables = {"BLACKMAMBA_CACHE": str(tmp_path_factory.mktemp("cache"))}
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


def run(session, language, block, folder, environment):
    if language == "yaml":
        (folder / "block.yaml").write_text(block)
        block = "blackmamba data mixture block.yaml --tokens 300e9"
    return session.run(block, folder, "python" if language == "python" else "bash", **environment)


@thorough
def test_every_block_runs_as_printed(session, tmp_path, environment):
    printed = []
    for language, block in BLOCK.findall(TEXT):
        if any(word in block and not find_spec(package) for word, package in NEEDS.items()):
            continue
        done = run(session, language, block, tmp_path, environment)
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}"
        printed.append(done.stdout)
    for expected in (".py, record 1", "quantiles: ", "2 shards, ", "all sound", "mixture.yaml: "):
        assert expected in printed[0], printed[0]
    assert "decoder.py" in printed[-1], printed[-1]


@pytest.mark.parametrize("line, answer", PRINTED.findall(TEXT))
def test_printed_answers_are_what_commands_print(session, tmp_path, environment, line, answer):
    done = session.run(line, tmp_path, **environment)
    assert done.returncode == 0, done.stdout
    words = answer.split()
    assert done.stdout.split()[: len(words)] == words


ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[-1])
def test_examples_of_extending_run_as_printed(code, session, tmp_path):
    done = session.run(code, tmp_path, "python")
    assert done.returncode == 0, done.stdout
