"""Run transformers' own tests of any model on our modeling files, and on its Mamba for comparison.

    python scripts/hf_generic_tests.py [PYTEST OPTIONS]

The tests belong to the installed version: pip fetches its source distribution into build/borders/sources/. It lacks the
tests of `generate` and of exporters, which git fetches from GitHub. Without GitHub, name a clone of transformers:

    HF_TESTS=FOLDER [HF_TESTS_COMMIT=COMMIT] python scripts/hf_generic_tests.py

COMMIT is a tag or a full id, by default the tag of the installed version. If neither can be read, these tests are left
out, and named. A test that fails with our model alone fails the script. Needs pytest 9 and parameterized.
"""

import importlib
import os
import shutil
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

from megatron_blackmamba.hf.cache_blackmamba import BlackMambaCache
from megatron_blackmamba.hf.configuration_blackmamba import BlackMambaConfig
from megatron_blackmamba.hf.modeling_blackmamba import BlackMambaForCausalLM, BlackMambaModel

SOURCES = Path(__file__).resolve().parents[1] / "build" / "borders" / "sources"
REPOSITORY = os.environ.get("HF_TESTS", "https://github.com/huggingface/transformers")
if Path(REPOSITORY).exists():
    REPOSITORY = str(Path(REPOSITORY).resolve())
COMMIT = os.environ.get("HF_TESTS_COMMIT", f"v{version}")
ELSEWHERE = {"generation.test_utils": "GenerationTesterMixin", "exporters.test_export": "ExportTesterMixin"}
"""Modules that only GitHub has, and the class of tests that each defines."""
OURS = (BlackMambaConfig, BlackMambaModel, BlackMambaForCausalLM)
MODELS = {
    "BlackMamba": OURS,
    "BlackMambaHybrid": OURS,
    "BlackMambaDense": OURS,
    "Mamba": (MambaConfig, MambaModel, MambaForCausalLM),
}
LAYERS = {"BlackMamba": ["r", "4"], "BlackMambaHybrid": ["mamba2", "attention"], "BlackMambaDense": ["r", "mlp"]}


def fetch() -> Path:
    """Return the folder of the installed version's sources, fetched if it is not there."""
    folder = SOURCES / f"transformers-{version}"
    if not folder.exists():
        options = ["--no-deps", "--no-build-isolation", "--no-binary", "transformers", "--dest", str(SOURCES)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"transformers=={version}"], check=True)
        with tarfile.open(f"{folder}.tar.gz") as archive:
            archive.extractall(SOURCES, filter="data")
    return folder


def fetch_from_git() -> Path:
    """Return the folder for the tests that only git has; it is missing if the repository cannot be read."""
    folder = SOURCES / f"git-{version}-{COMMIT.replace('/', '-')}"
    if folder.exists():
        return folder
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    git = ["git", "-C", str(partial)]
    commands = [
        ["git", "init", "--quiet", str(partial)],
        [*git, "remote", "add", "origin", REPOSITORY],
        [*git, "fetch", "--quiet", "--depth", "1", "--filter=blob:none", "origin", COMMIT],
        [*git, "sparse-checkout", "set", "tests/generation", "tests/exporters"],
        [*git, "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=300, env=os.environ | {"GIT_TERMINAL_PROMPT": "0"})
        partial.rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{REPOSITORY} has no {COMMIT}, or cannot be reached: {error}", file=sys.stderr)
    return folder


def origin(folder: Path) -> str:
    """Return a line that says which commit the tests in a folder are of."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=tests of generate and exporters: commit %h of %as"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


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

    batch_size, seq_length, is_training, hidden_size, vocab_size = 5, 7, True, 32, 99

    def __init__(self, model: str) -> None:
        self.model = model
        self.num_hidden_layers = len(LAYERS.get(model, "12"))

    def get_config(self) -> Any:
        sizes: dict[str, Any] = {"vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "pad_token_id": 1}
        if self.model == "Mamba":
            return MambaConfig(num_hidden_layers=2, intermediate_size=64, state_size=8, **sizes)
        sizes |= {"ffn_hidden_size": 48, "mlp_hidden_size": 48, "state_size": 8, "mamba2_state_size": 8}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba2_head_dim": 16}
        layers = LAYERS[self.model]
        return BlackMambaConfig(**sizes, num_layers=len(layers), mamba_moe_layers=layers, kernels="torch")

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        random = torch.Generator().manual_seed(1)
        ids = torch.randint(2, self.vocab_size, (self.batch_size, self.seq_length), generator=random)
        return self.get_config(), {"input_ids": ids}


class CacheChecks(unittest.TestCase):
    """Checks of our caches. transformers' own checks know only its own classes of layers."""

    model_tester: Tester

    def _check_past_key_values_for_generate(self, *arguments: Any, **named: Any) -> None:
        B, cache, length, config = (*arguments, *named.values())  # the names differ by version
        self.assertIsInstance(cache, BlackMambaCache)
        self.assertEqual((len(cache), cache.get_seq_length()), (config.num_layers, length))
        I, W, H = config.inner_size, config.conv_dimension - 1, config.mamba2_head_dim
        keys = (B, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
        channels = I + 2 * config.mamba2_groups * config.mamba2_state_size
        shapes: dict[str, Any] = {
            "r": [(B, I, W), (B, I, config.state_size)],
            "mamba2": [(B, channels, W), (B, I // H, H, config.mamba2_state_size)],
            "attention": [keys, keys],
        }
        for index, kind in enumerate(config.mamba_moe_layers):
            self.assertEqual([tensor.shape for tensor in cache[index]], shapes.get(kind, []))

    def _check_caches_are_equal(self, one: Any, other: Any) -> None:
        self.assertEqual((len(one), one.seen), (len(other), other.seen))
        for index in range(len(one)):
            torch.testing.assert_close(one[index], other[index])

    def check_forward(self) -> None:
        """Check the cache of one call, as `test_past_key_values_format` does before transformers 5."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        cache = BlackMambaForCausalLM(config).eval()(**inputs).past_key_values
        self._check_past_key_values_for_generate(
            self.model_tester.batch_size, cache, self.model_tester.seq_length, config
        )


def cases() -> dict[str, type]:
    """Return one class of tests for each model."""
    common = importlib.import_module("tests.test_modeling_common")
    generation = importlib.import_module("tests.generation.test_utils")
    mixins = (common.ModelTesterMixin, generation.GenerationTesterMixin, unittest.TestCase)
    made = {}
    for name, (_, *classes) in MODELS.items():
        content = {
            "all_model_classes": classes,
            "all_generative_model_classes": classes[1:],  # before 5.0
            "has_attentions": False,
            "test_head_masking": False,
            "test_pruning": False,
            "fx_compatible": False,
            "test_all_params_have_gradient": name != "BlackMamba",  # an expert without tokens has no gradient
            "setUp": lambda self, name=name: setattr(self, "model_tester", Tester(name)),
        }
        bases = mixins if name == "Mamba" else (CacheChecks, *mixins[:2])
        if name != "Mamba" and version.startswith("4."):
            content["test_past_key_values_format"] = CacheChecks.check_forward
        made[f"{name}Test"] = type(f"{name}Test", bases, content)
    return made


class Outcomes:
    """A pytest plugin that collects the outcome of each test of each model."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, str]] = {name: {} for name in MODELS}
        self.messages: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, case, test = report.nodeid.split("::")
        model = case.removesuffix("Test")
        if report.outcome != "passed":
            text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.messages[model, test] = text.strip().splitlines()[-1]
        if (report.when == "call" or report.outcome != "passed") and self.of[model].get(test) != "failed":
            self.of[model][test] = report.outcome  # a test fails with any of its subtests

    def with_outcome(self, model: str, outcome: str) -> set[str]:
        return {test for test, found in self.of[model].items() if found == outcome}

    def failed(self, model: str) -> set[str]:
        return self.with_outcome(model, "failed")


def main(*options: str) -> int:
    folders = (fetch(), fetch_from_git())
    missing, outcomes = prepare(*folders), Outcomes()
    arguments = [__file__, "-c", os.devnull, "-p", "no:cacheprovider", "-q", "--no-header", "--tb=short", *options]
    os.environ[INSIDE] = os.pathsep.join(map(str, folders))
    pytest.main(arguments, [outcomes])
    print("\n| transformers | model | passed | skipped | failed |\n|---|---|---:|---:|---:|")
    for model, results in outcomes.of.items():
        counts = [list(results.values()).count(outcome) for outcome in ("passed", "skipped", "failed")]
        print(f"| {version} | {model} | {counts[0]} | {counts[1]} | {counts[2]} |")
    print(f"left out, since {REPOSITORY} could not be read: {', '.join(missing)}" if missing else origin(folders[1]))
    for test in sorted(outcomes.failed("Mamba")):
        print(f"fails with Mamba: {test}: {outcomes.messages['Mamba', test]}")
    alone = {model: outcomes.failed(model) - outcomes.failed("Mamba") for model in LAYERS}
    for model, tests in alone.items():
        for test in sorted(tests):
            print(f"fails with {model} alone: {test}: {outcomes.messages[model, test]}")
        for test in sorted(outcomes.with_outcome(model, "skipped") & outcomes.with_outcome("Mamba", "passed")):
            print(f"skipped with {model} alone: {test}: {outcomes.messages[model, test]}")
    return 1 if any(alone.values()) or not outcomes.of["BlackMamba"] else 0


INSIDE = "HF_GENERIC_TESTS"
if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
elif INSIDE in os.environ:  # pytest imports this file too
    warnings.simplefilter("ignore")
    if "tests.test_modeling_common" not in sys.modules:
        prepare(*map(Path, os.environ[INSIDE].split(os.pathsep)))
    register()
    globals().update(cases())
