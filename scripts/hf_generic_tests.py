"""Run transformers' own tests of any model on our modeling files, and on its Mamba for comparison.

    python scripts/hf_generic_tests.py [PYTEST OPTIONS]

The tests belong to the installed version: pip fetches its source distribution into .hf_versions/. It lacks the tests of
`generate`, which git fetches from GitHub. If GitHub cannot be reached, they are left out, and named. A test that fails
with our model alone fails the script. Needs pytest 9 and parameterized.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import types
import unittest
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, MambaConfig, MambaForCausalLM, MambaModel
from transformers import __version__ as version
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_blackmamba.hf.configuration_blackmamba import BlackMambaConfig
from megatron_blackmamba.hf.modeling_blackmamba import BlackMambaForCausalLM, BlackMambaModel

SOURCES = Path(__file__).resolve().parents[1] / ".hf_versions" / "sources"
GITHUB = "https://github.com/huggingface/transformers"
ELSEWHERE = {"generation.test_utils": "GenerationTesterMixin", "exporters.test_export": "ExportTesterMixin"}
"""Modules that only GitHub has, and the class of tests that each defines."""
MODELS = {
    "BlackMamba": (BlackMambaConfig, BlackMambaModel, BlackMambaForCausalLM),
    "Mamba": (MambaConfig, MambaModel, MambaForCausalLM),
}


def fetch() -> Path:
    """Return the folder of the installed version's sources, fetched if it is not there."""
    folder = SOURCES / f"transformers-{version}"
    if not folder.exists():
        options = ["--no-deps", "--no-build-isolation", "--no-binary", "transformers", "--dest", str(SOURCES)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"transformers=={version}"], check=True)
        with tarfile.open(f"{folder}.tar.gz") as archive:
            archive.extractall(SOURCES, filter="data")
    return folder


def fetch_from_github() -> Path:
    """Return the folder for the tests that only GitHub has; it is missing if GitHub cannot be reached."""
    folder = SOURCES / f"github-{version}"
    if folder.exists():
        return folder
    clone = ["git", "clone", "--quiet", "--depth", "1", "--filter=blob:none", "--sparse", "--branch", f"v{version}"]
    checkout = ["git", "-C", str(folder), "sparse-checkout", "set", "tests/generation", "tests/exporters"]
    try:
        for command in ([*clone, GITHUB, str(folder)], checkout):
            subprocess.run(command, check=True, timeout=300, env=os.environ | {"GIT_TERMINAL_PROMPT": "0"})
    except (OSError, subprocess.SubprocessError) as error:
        print(f"GitHub cannot be reached: {error}", file=sys.stderr)
    return folder


def prepare(*folders: Path) -> list[str]:
    """Make the folders importable as `tests`; return the classes of tests that they lack."""
    package = types.ModuleType("tests")
    package.__path__ = [str(folder / "tests") for folder in folders]
    sys.modules["tests"] = package
    common, missing = (folders[0] / "tests" / "test_modeling_common.py").read_text(), []
    for name, mixin in ELSEWHERE.items():
        parent_name, own = name.split(".")
        if f".{name} " not in common or any(
            (Path(path) / parent_name / f"{own}.py").exists() for path in package.__path__
        ):
            continue
        parent, module = types.ModuleType(f"tests.{parent_name}"), types.ModuleType(f"tests.{name}")
        parent.__path__ = []
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[parent.__name__], sys.modules[module.__name__] = parent, module
        missing.append(mixin)
    return missing


def register() -> None:
    """Name our classes where the tests look up what a model computes."""
    AutoConfig.register("blackmamba", BlackMambaConfig)
    AutoModel.register(BlackMambaConfig, BlackMambaModel)
    AutoModelForCausalLM.register(BlackMambaConfig, BlackMambaForCausalLM)
    modeling_auto.MODEL_MAPPING_NAMES["blackmamba"] = "BlackMambaModel"
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["blackmamba"] = "BlackMambaForCausalLM"


class Tester:
    """Small configs and inputs, as the tests ask for them."""

    batch_size, seq_length, is_training, num_hidden_layers, hidden_size, vocab_size = 5, 7, True, 2, 32, 99

    def __init__(self, config_class: type) -> None:
        self.config_class = config_class

    def get_config(self) -> Any:
        sizes: dict[str, Any] = {"vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "state_size": 8}
        if self.config_class is MambaConfig:
            return MambaConfig(num_hidden_layers=2, intermediate_size=64, **sizes, pad_token_id=1)
        layers: dict[str, Any] = {"num_layers": 2, "mamba_moe_layers": ["r", "4"], "ffn_hidden_size": 48}
        return BlackMambaConfig(**sizes, **layers, kernels="torch", pad_token_id=1)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        random = torch.Generator().manual_seed(1)
        ids = torch.randint(2, self.vocab_size, (self.batch_size, self.seq_length), generator=random)
        return self.get_config(), {"input_ids": ids}


def cases() -> dict[str, type]:
    """Return one class of tests for each of the two models."""
    common = importlib.import_module("tests.test_modeling_common")
    generation = importlib.import_module("tests.generation.test_utils")
    mixins = (common.ModelTesterMixin, generation.GenerationTesterMixin, unittest.TestCase)
    made = {}
    for name, (config_class, *classes) in MODELS.items():
        content = {
            "all_model_classes": classes,
            "all_generative_model_classes": classes[1:],  # before 5.0
            "has_attentions": False,
            "test_head_masking": False,
            "test_pruning": False,
            "fx_compatible": False,
            "test_all_params_have_gradient": name == "Mamba",  # an expert without tokens has no gradient
            "setUp": lambda self, config_class=config_class: setattr(self, "model_tester", Tester(config_class)),
        }
        made[f"{name}Test"] = type(f"{name}Test", mixins, content)
    return made


class Outcomes:
    """A pytest plugin that collects the outcome of each test of each model."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, str]] = {name: {} for name in MODELS}
        self.messages: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, case, test = report.nodeid.split("::")
        model = case.removesuffix("Test")
        if report.failed:
            self.messages[model, test] = str(report.longrepr).strip().splitlines()[-1]
        if (report.when == "call" or report.outcome != "passed") and self.of[model].get(test) != "failed":
            self.of[model][test] = report.outcome  # a test fails with any of its subtests

    def failed(self, model: str) -> set[str]:
        return {test for test, outcome in self.of[model].items() if outcome == "failed"}


def main(*options: str) -> int:
    folders = (fetch(), fetch_from_github())
    missing, outcomes = prepare(*folders), Outcomes()
    arguments = [__file__, "-c", os.devnull, "-p", "no:cacheprovider", "-q", "--no-header", "--tb=short", *options]
    os.environ[INSIDE] = os.pathsep.join(map(str, folders))
    pytest.main(arguments, [outcomes])
    print("\n| transformers | model | passed | skipped | failed |\n|---|---|---:|---:|---:|")
    for model, results in outcomes.of.items():
        counts = [list(results.values()).count(outcome) for outcome in ("passed", "skipped", "failed")]
        print(f"| {version} | {model} | {counts[0]} | {counts[1]} | {counts[2]} |")
    for mixin in missing:
        print(f"left out, since GitHub cannot be reached: {mixin}")
    alone = outcomes.failed("BlackMamba") - outcomes.failed("Mamba")
    for test in sorted(outcomes.failed("Mamba")):
        both = "both" if test in outcomes.failed("BlackMamba") else "Mamba alone"
        print(f"fails with {both}: {test}: {outcomes.messages['Mamba', test]}")
    for test in sorted(alone):
        print(f"fails with BlackMamba alone: {test}: {outcomes.messages['BlackMamba', test]}")
    return 1 if alone or not outcomes.of["BlackMamba"] else 0


INSIDE = "HF_GENERIC_TESTS"
if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
elif INSIDE in os.environ:  # pytest imports this file too
    warnings.simplefilter("ignore")
    if "tests.test_modeling_common" not in sys.modules:
        prepare(*map(Path, os.environ[INSIDE].split(os.pathsep)))
    register()
    globals().update(cases())
