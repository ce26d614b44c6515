"""The names that `from megatron_blackmamba import …` offers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_blackmamba
from tests.runtime.ranks import fork_script
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("world")  # where warm processes run anyway
PACKAGE = Path(megatron_blackmamba.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "python.md").read_text()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return fork_script("tests.api_probe", str(tmp_path_factory.mktemp("api")))


def test_import_loads_nothing_until_a_name_is_used():
    check = (
        "import sys, megatron_blackmamba as mb;"
        "print([m for m in sys.modules if m.startswith('megatron_blackmamba.')]);"
        "mb.load_config; print('megatron_blackmamba.config' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True False"]


def test_every_name_is_found_and_documented():
    for name in megatron_blackmamba.__all__:
        assert getattr(megatron_blackmamba, name).__doc__, name
        assert f"`{name}`" in PAGE or f"`{name}(" in PAGE, f"docs/python.md does not mention {name}"
        assert name in dir(megatron_blackmamba)


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    seen = {(f"{node.module}.{alias.name}", alias.asname or alias.name) for node in imports for alias in node.names}
    seen = {(full, name) for full, name in seen if full.startswith("megatron_blackmamba.")}
    assert {name for _, name in seen} == set(megatron_blackmamba.__all__)
    for full, name in seen:
        module, _, theirs = full.rpartition(".")
        assert getattr(megatron_blackmamba, name) is getattr(sys.modules[module], theirs), name
    assert (PACKAGE / "py.typed").is_file()


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = megatron_blackmamba.trian


def test_random_numbers_of_the_caller_go_on(found):
    assert found["random_numbers"] == [True, True]


def test_copy_of_a_model_is_independent(found):
    assert found["copied"] == {"same": True, "shared": 0, "marks": True}


def test_stored_weights_come_back(found):
    assert found["loaded"]["same"] == {"saved": True, "exported": True, "start.from": True, "run": True}


def test_weights_of_another_model_are_refused(found):
    other, eps = found["loaded"]["refused"]
    assert other == (
        "FOLDER/loaded: its weights have model.experts=8, and this model has model.experts=4. Build the model with"
        " model.experts=8."
    )
    assert (
        "start.from=FOLDER/loaded: its weights have model.norm_eps=1e-05, and this run has model.norm_eps=0.01" in eps
    )


def test_default_dtype_of_torch_changes_nothing(found):
    everything = [True, True, True]  # kept, dtypes, values
    assert found["default_dtypes"] == {"torch.float64": everything, "torch.bfloat16": everything}


def test_expert_biases_move_or_their_loop_is_warned(found):
    without = (
        "the expert biases are not updated, so nothing balances the experts: call update_routers(model) after each"
        " optimizer.step()"
    )
    assert found["expert_biases"] == {
        "update=True": {"moved": [True, True], "told": []},
        "update=False": {"moved": [False, False], "told": [without]},
    }


def test_state_dict_holds_tensors_alone(found):
    assert found["tensors_alone"]


@thorough
def test_two_replicas_train_as_one_process_does(tmp_path):
    found = fork_script("tests.api_replicas", str(tmp_path))
    assert not [rank for rank in [*found["ranks"], *found["page"], found["alone"]] if "error" in rank]
    alone, *ranks = (rank["answer"] for rank in [found["alone"], *found["ranks"]])
    for rank in ranks:
        assert "one of 2 processes without a process group" in rank.pop("refused")
    assert ranks[0] == ranks[1]
    assert ranks[0]["sums"] == pytest.approx(alone["sums"], rel=1e-4, abs=1e-4)
    assert ranks[0]["biases"] == pytest.approx(alone["biases"]) and len(set(alone["biases"])) > 1
    assert (tmp_path / "runs/replicas/config.yaml").is_file()  # written by the page's script
    assert (tmp_path / "of_2").is_dir() and (tmp_path / "export_of_2").is_dir()  # by one of the two


def test_failed_run_leaves_neither_handlers_nor_lock(found):
    assert found["left_by_failures"] == {"told": ["no batches", "no step"], "interrupts": True, "held": []}


def test_mistakes_are_explained(found):
    expected = {
        "a name instead of a config": "'tiny' is no RunConfig: give load_config(...)",
        "batches before the first": "start_sample=-3: give 0 or more.",
        "divided models": "parallel.tensor=2: `build` makes a whole model in each process",
        "an unknown way to encode": "encoding must be joint or separate, not 'apart'",
        "another module": "a Linear is no model of `build`",
        "one sequence without a batch": "tokens have the shape (4,): the model reads [batch, sequence].",
        "another precision": "Build it with training.precision=bf16, fp32 or fp64.",
        "a graph of torch.jit": "torch.jit.trace cannot record this model.",
        "scores of a module": "evaluate reads a folder, not a LanguageModel: give the one that `save` wrote.",
        "a run in a thread": "train handles signals, so call it in the main thread",
        "a model with NaN": "holds NaN or infinity (",
    }
    for name, message in expected.items():
        assert message in found["mistakes"].get(name, ""), name
