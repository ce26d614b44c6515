"""The JSON Schema of run files accepts every file that the program accepts, and refuses typing errors."""

import json
import re

import jsonschema
import pytest
import yaml

from megatron_blackmamba.config import load, shipped
from megatron_blackmamba.config.describe import write_new
from megatron_blackmamba.config.load import config_folder
from megatron_blackmamba.config.schema import NAME, run_file_schema
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.settings.file_kinds import kind_of
from megatron_blackmamba.settings.yaml_files import read_yaml
from tests.docs.test_commands import PAGES

SHIPPED = [path for kind in ("run", "model", "training") for path in sorted(config_folder().glob(f"{kind}/*.yaml"))]
YAML_IN_PAGES = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def valid():
    schema = run_file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).validate


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_match_the_schema(path, valid):
    valid(read_yaml(path))


def test_run_files_in_the_pages_match_the_schema(valid):
    found = [text for page in PAGES for text in YAML_IN_PAGES.findall(page.read_text())]
    assert found
    for text in found:
        content = yaml.safe_load(text)
        if kind_of(content) == "run" and "memory_gib" not in content:  # a GPU file has a name too
            valid(content)


@pytest.mark.parametrize("overrides", [[], ["training.steps=5"], ["training.tokens=3B"]], ids=["", "steps", "3B"])
def test_new_files_match_the_schema_that_they_name(tmp_path, overrides, valid):
    for number, source in enumerate(shipped()):
        file = tmp_path / f"{number}.yaml"
        write_new("mine", source, overrides, file)
        line = file.read_text().splitlines()[0]
        assert line == f"# yaml-language-server: $schema={NAME}"
        assert json.loads((tmp_path / NAME).read_bytes()) == run_file_schema()
        valid(read_yaml(file))
        everything = yaml.safe_load(file.read_text().replace("#: ", ""))
        valid(everything)


@pytest.mark.parametrize(
    "text",
    [
        "include: tiny",
        "include: [tiny, more.yaml]\ntraining: {steps: 300, tokens: 300B}",
        "resume: {allow: training.tokens}",
        "version: 1\nname: saved",
    ],
)
def test_what_people_write_matches_the_schema(text, valid):
    valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    ["modell: {}", "training: {step: 3}", "training: {steps: 3 million}", "data: {kind: sythetic}", "include: 3"],
)
def test_typing_errors_do_not_match_the_schema(text, valid):
    with pytest.raises(jsonschema.ValidationError):
        valid(yaml.safe_load(text))


def test_saved_configs_match_the_schema(valid, tmp_path):
    from megatron_blackmamba.config import to_yaml

    run = RunFolder(tmp_path)
    run.config.write_text(to_yaml(load("blackmamba_2.8b")))
    valid(read_yaml(run.config))
