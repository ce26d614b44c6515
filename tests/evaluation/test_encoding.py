"""Context and continuation as tokens, as two versions of lm-eval have it."""

import pytest

from megatron_blackmamba.evaluation.encoding import encode_pairs
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.formats.evaluations import Encoding
from megatron_blackmamba.tokenizer import load_tokenizer


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
