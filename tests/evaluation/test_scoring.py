"""The scorer: contexts read once, states branched, and the same numbers as reading every sequence by itself."""

import pytest
import torch

from megatron_blackmamba.evaluation import scoring
from megatron_blackmamba.evaluation.encoding import encode_pairs
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.scoring import Item, make_item, plan, score
from megatron_blackmamba.formats.evaluations import Encoding
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.tokenizer import load_tokenizer
from tests.evaluation.conftest import random_model


def items():
    context = tuple(range(1, 31))
    other = (40, 41, *range(3, 30))
    shorter = context[:25]  # sorts before the whole context with one continuation, behind it with the other
    pairs = [
        (context, (50,)),
        (context, (51, 52, 53)),
        (shorter, (9,)),
        (shorter, (60,)),
        (other, (1, 2)),
        (other, (3,)),
    ]
    pairs += [((7,), (8, 9)), (context[:20], (21, 22, 23, 24, 61)), ((*other[:20], 61, 61, 61), (4,))]
    return [make_item(i, *pair, 64) for i, pair in enumerate(pairs)]


def alone(decoder, item):
    """Log-likelihood and greediness from one pass over the whole sequence."""
    logits = decoder.read_all(decoder.start(1), torch.tensor([item.tokens]))[0].double().log_softmax(-1)
    places = range(item.context, len(item.tokens))
    total = sum(logits[at - 1, item.tokens[at]].item() for at in places)
    return total, all(int(logits[at - 1].argmax()) == item.tokens[at] for at in places)


@pytest.mark.parametrize("pattern", ["MEME", "*E*-", "M*E-"])
@pytest.mark.parametrize("more", [{}, {"eod_reset": 9}], ids=["plain", "resetting"])
def test_shared_contexts_change_no_score(pattern, more, monkeypatch):
    """Nor do pieces of a long sequence."""
    monkeypatch.setattr(scoring, "PIECE", 7)
    decoder = Decoder(pack(random_model(pattern, None, **more), torch.float32))
    for budget in (16, 1000):
        found = {s.item: s for batch in plan(items(), budget) for s in score(decoder, batch, budget)}
        for item in items():
            total, greedy = alone(decoder, item)
            assert found[item.index].log_likelihood == pytest.approx(total, abs=1e-4)
            assert found[item.index].greedy == greedy


def test_a_shared_context_is_read_once():
    read = sum(group.tokens for batch in plan(items(), 1000) for group in batch)
    apart = sum(len(item.tokens) - 1 for item in items())
    assert read < 0.6 * apart


def test_every_item_is_planned_once_within_the_budget():
    many = [make_item(i, tuple((i * j) % 60 + 1 for j in range(5 + i % 9)), (1,), 64) for i in range(50)]
    batches = plan(many, 40)
    assert sorted(item.index for batch in batches for group in batch for item in group.items) == list(range(50))
    assert all(len(batch) * max(group.longest for group in batch) <= 40 for batch in batches if not batch[0].shared)


def test_long_contexts_are_cut_on_the_left():
    item = make_item(0, range(100), (7, 8), 10)
    assert item == Item(0, (*range(91, 100), 7, 8), 2)
    assert make_item(0, (1,), tuple(range(20)), 10).scored == 10


# Context and continuation as tokens, as two versions of lm-eval have it.


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    """A tokenizer that merges "a" and "b" across the border of context and continuation."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4, "Ġb": 5}
    made = Tokenizer(models.BPE(words, [("a", "b"), ("Ġ", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("merging") / "tokenizer.json"
    made.save(str(path))
    return load_tokenizer(path)


def test_joint_encoding_splits_the_tokens_of_both_texts(merging):
    assert encode_pairs([("aa", "b a")], merging, Encoding.joint) == [([1, 1], [4, 1])]


def test_separate_encoding_keeps_both_sides_apart(merging):
    assert encode_pairs([("aa", "b a")], merging, Encoding.separate) == [([1, 1], [2, 4, 1])]


def test_only_joint_encoding_moves_trailing_spaces(merging):
    assert encode_pairs([("a ", "b")], merging, Encoding.joint) == [([1], [5])]
    assert encode_pairs([("a ", "b")], merging, Encoding.separate) == [([1, 4], [2])]


@pytest.mark.parametrize("encoding", list(Encoding))
def test_end_of_document_stands_for_an_empty_context(merging, encoding):
    assert encode_pairs([("", "ab")], merging, encoding) == [([0], [3])]


def test_continuation_that_merges_into_context_is_refused(merging):
    with pytest.raises(EvaluationError, match=r"'b' has no token of its own.* 'ba'\. Use --encoding separate"):
        encode_pairs([("ba", "b")], merging, Encoding.joint)
    assert encode_pairs([("ba", "b")], merging, Encoding.separate) == [([2, 1], [2])]
    assert encode_pairs([("a", "")], merging, Encoding.joint) == [([1], [])]
