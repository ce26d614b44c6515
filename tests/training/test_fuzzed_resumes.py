"""A run that is cut and resumed gives the numbers of one that is not, whatever its config and layout.

`python -m tests.fuzz_resume` draws more cases, and shrinks one that fails.
"""

import random
from dataclasses import replace

import pytest

from megatron_blackmamba.config.load import keys
from tests import fuzz_resume
from tests.fuzz_resume import Case, Failed, draw, sized
from tests.fuzz_values import NOT_DRAWN, VALUES, WIDTHS
from tests.layers.sizes import SIZES
from tests.thorough import thorough

EXPERTS, PIPELINE, GROUPS = {"model.pattern": "ME"}, {"model.pattern": "MEMM"}, {"model.pattern": "E"}
GROUPS |= {"model.router.kind": "hash", "model.tie_embeddings": "false", "optimizer.distributed": "false"}
GROUPS |= {"optimizer.groups.embedding.learning_rate": "2", "optimizer.groups.head.learning_rate": "0.5"}
PIPELINE |= {"optimizer.distributed": "false"}
ZAYA = {"model.pattern": "ESEE", "model.router.kind": "zaya", "model.router.hidden_size": "20"}
ZAYA |= {"model.residual_scaling": "true", "model.router.bias_update_rate": "0.1"}
CUT = {"parallel.tensor": "2", "parallel.expert": "2", "parallel.expert_tensor": "2"}
TWO_STAGES, TWO_PARTS = {"parallel.pipeline": "2"}, {"parallel.expert": "2"}


def case(words, before, ranks, after, ranks_after):
    for letter in words["model.pattern"]:
        words = SIZES.get(letter, {}) | words
    return Case(sized(WIDTHS | words), before, ranks, after, ranks_after, 2, killed=False)


@pytest.mark.xdist_group("forks")
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(case(EXPERTS, TWO_PARTS, 4, TWO_PARTS, 4), id="experts with replicas"),
        pytest.param(case(PIPELINE, TWO_STAGES, 2, TWO_STAGES, 2), id="a stage without experts"),
        pytest.param(case(GROUPS, {}, 1, {}, 1), id="groups of equal size"),
        pytest.param(case(EXPERTS, CUT, 4, {}, 2), id="cut experts on two ranks", marks=thorough),
    ],
)
def test_a_cut_run_ends_as_a_whole_one(forks, tmp_path, cut):
    fuzz_resume.run(cut, forks, tmp_path, exports=False)


@thorough
@pytest.mark.xdist_group("forks")
def test_killed_zaya_goes_on_in_other_stages(forks, tmp_path):
    words = ZAYA | {"model.mamba2.groups": "2"}
    killed = replace(case(words, TWO_STAGES | {"parallel.tensor": "2"}, 4, TWO_PARTS, 2), killed=True)
    assert "top-1 agreement" in fuzz_resume.run(killed, forks, tmp_path)


@thorough
@pytest.mark.xdist_group("forks")
def test_killed_latent_experts_go_on_in_other_stages(forks, tmp_path):
    words = {"model.pattern": "ESEE", "model.mamba2.groups": "2", "model.latent_size": "20", "model.top_k": "2"}
    words |= {"model.shared_expert_hidden_size": "8", "model.router.kind": "expert_bias"}
    killed = replace(case(words, TWO_STAGES | {"parallel.tensor": "2"}, 4, TWO_PARTS, 2), killed=True)
    assert "top-1 agreement" in fuzz_resume.run(killed, forks, tmp_path)


@thorough
@pytest.mark.xdist_group("forks")
def test_random_configs_resume_and_export(forks, tmp_path):
    failures = fuzz_resume.fuzz(forks, tmp_path, range(random.randrange(10**6), 10**7), minutes=1.5, shrinking=60)
    assert not failures, "\n\n".join(failures)


@thorough
def test_a_failing_case_shrinks_to_its_cause():
    """Here a case fails if it has averaged weights and a layer of attention, whatever else it has."""

    def fails(found):
        wrong = "training.ema" in found.words and "*" in found.words["model.pattern"]
        return "loss: wrong" if wrong else None

    found = next(found for found in map(draw, range(1000)) if fails(found) and len(found.drawn) > 10)
    small, said = fuzz_resume.shrink(found, fails, seconds=60)
    assert said == "loss: wrong" and small.drawn == ("training.ema",) and small.words["model.pattern"] == "*"
    assert small.layouts == [(1, {}), (1, {})] and not small.killed


def test_another_number_fails(tmp_path):
    for folder, loss in (("whole", 2.0), ("cut", 2.001)):
        (tmp_path / folder / "run").mkdir(parents=True)
        line = f'{{"step": 1, "loss": {loss}, "grad_norm": 1.0}}\n'
        (tmp_path / folder / "run" / "metrics.jsonl").write_text(line)
    with pytest.raises(Failed, match=r"loss: 2\.001 for 2\.0 at step 1"):
        fuzz_resume.compare_steps(tmp_path / "whole", tmp_path / "cut", exact=False)


def test_every_key_is_drawn_or_has_a_reason():
    assert set(VALUES) | set(NOT_DRAWN) == set(keys()) and not set(VALUES) & set(NOT_DRAWN)
