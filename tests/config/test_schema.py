"""The JSON Schema for editors, applied by the jsonschema package: what `load` takes is valid, and mistakes are not."""

import re

import jsonschema
import pytest
import yaml

from megatron_blackmamba.config import load, to_yaml
from megatron_blackmamba.config.describe import new_run
from megatron_blackmamba.config.load import config_folder
from megatron_blackmamba.config.schema import run_file_schema

FILES = [path for kind in ("run", "model", "training") for path in sorted((config_folder() / kind).glob("*.yaml"))]


class AsEditorsRead(yaml.SafeLoader):
    """YAML 1.2 as far as it concerns numbers: 409_600 is a text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it without ClassVar
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":int", ":float"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


AsEditorsRead.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$"), [*"-+0123456789"])
AsEditorsRead.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"), [*"-+.0123456789"]
)


@pytest.fixture(scope="module")
def faults():
    """Return the keys of a file that an editor marks."""
    schema = run_file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    return lambda text: [
        (*error.path, error.message) for error in validator.iter_errors(yaml.load(text, AsEditorsRead))
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_files_are_valid(faults, path):
    assert faults(path.read_text()) == []


def test_written_configs_are_valid(faults, tmp_path):
    config = load("tiny")
    assert faults(to_yaml(config)) == []
    new = new_run("mine", "tiny", ["training.steps=5"], tmp_path / "mine.yaml")
    assert faults(new) == []
    assert faults(new.replace("#: ", "")) == []


@pytest.mark.parametrize("written", ["training: {tokens: 300B}", "training: {tokens: 3e11}", "resume: {allow: data}"])
def test_other_spellings_are_valid(faults, tmp_path, written):
    (tmp_path / "mine.yaml").write_text(f"include: tiny\n{written}\n")
    load(tmp_path / "mine.yaml")
    assert faults((tmp_path / "mine.yaml").read_text()) == []


@pytest.mark.parametrize(
    "written",
    ["modle: {}", "model: {expert: 4}", "model: {experts: four}", "training: {precision: fp16}", "include: 3"],
)
def test_mistakes_are_marked(faults, written):
    assert len(faults(written)) == 1
