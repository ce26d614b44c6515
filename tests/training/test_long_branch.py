"""The shipped recipe for length at a tiny size: a hybrid, and its branch on sequences 16 times as long."""

import math

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.data_tools.options import TokenizeOptions
from megatron_blackmamba.data_tools.tokenization import tokenize
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.trace.documents import Tracer
from tests.data.corpus import write_mixture
from tests.thorough import thorough
from tests.training.runs import losses

pytestmark = pytest.mark.xdist_group("branches")

TRUNK, BRANCH = load("hybrid_1.5b"), load("hybrid_1.5b_32k")
LONGER = BRANCH.data.sequence_length // TRUNK.data.sequence_length
LENGTH, STEPS = 8, 3
LONG = 40
"""Tokens of a long document, more than most have."""
TINY = [
    *("model.hidden_size=16", "model.expert_hidden_size=16", "model.experts=2", "model.vocab_size=320"),
    *("model.attention.heads=2", "model.attention.kv_heads=1", "model.state_size=4", "training.precision=fp32"),
    *("parallel.expert=1", "training.evaluate_every=0", "checkpoint.every=3", "training.micro_batch=1"),
]


@pytest.fixture(scope="module")
def mixtures(raw):
    """Write a mixture of all documents, and one that prefers the long ones."""
    tokenizer = str(raw / "tokens/web/tokenizer.json")
    for name, limits in {"short": {"max_tokens": LONG - 1}, "long": {"min_tokens": LONG}}.items():
        options = TokenizeOptions(tokenizer=tokenizer, max_bad="1", workers=1, quiet=True, **limits)
        tokenize([raw / "web.jsonl"], raw / "by_length" / name, options)
    (raw / "longer").mkdir()
    sources = [{"name": name, "shards": f"../by_length/{name}", "weight": w} for name, w in (("short", 1), ("long", 9))]
    write_mixture(raw / "longer", sources)
    return raw


@pytest.fixture(scope="module")
def trunk(forks, mixtures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    batch = 16
    words = [*TINY, f"data.sequence_length={LENGTH}", f"training.global_batch={batch}"]
    words += [f"training.tokens={batch * LENGTH * STEPS}", f"data.mixture={mixtures / 'mixture.yaml'}"]
    job = forks.run(folder, words, ranks=1, config="hybrid_1.5b")
    assert job.wait() == [0], job.output()
    return folder


@thorough
def test_branch_reads_longer_documents_with_slower_angles(forks, mixtures, trunk, tmp_path):
    words = [*TINY, f"data.sequence_length={LENGTH * LONGER}", "training.global_batch=1"]
    words += [f"training.tokens={2 * 16 * LENGTH * STEPS}", f"start.branch={trunk / 'run'}@{STEPS}"]
    words += [f"data.mixture={mixtures / 'longer/mixture.yaml'}"]
    job = forks.run(tmp_path, [*words, "parallel.context=2"], ranks=2, config="hybrid_1.5b_32k")
    assert job.wait() == [0, 0], job.output()
    assert len(losses(tmp_path)) == STEPS and all(map(math.isfinite, losses(tmp_path)))
    tracer = Tracer(RunFolder(tmp_path / "run").root)
    pieces = [
        piece for step in (4, 5, 6) for sample in tracer.steps.samples_of(step) for piece in tracer.pieces(sample)
    ]
    assert sum(len(p.ids) for p in pieces if p.source == "long") > sum(
        len(p.ids) for p in pieces if p.source == "short"
    )
    assert all((piece.document_tokens > LONG) is (piece.source == "long") for piece in pieces)
    read = next(piece for piece in pieces if piece.source == "long")
    readings = tracer.readings(read.origin.source, read.origin.record)
    assert {reading.step for reading in readings} & {4, 5, 6}


def test_angles_turn_as_much_over_a_longer_sequence():
    width = TRUNK.model.hidden_size // TRUNK.model.attention.heads
    slowest = [config.model.attention.rotary_base ** (2 / width - 1) for config in (TRUNK, BRANCH)]
    assert slowest[0] / slowest[1] == pytest.approx(LONGER, rel=1e-4)
    assert TRUNK.model.model_copy(update={"attention": BRANCH.model.attention}) == BRANCH.model
