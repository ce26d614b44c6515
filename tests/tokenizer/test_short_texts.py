import json
import random
import textwrap
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_blackmamba.tokenizer import Tokenizer, load_tokenizer, short_texts

pytest.importorskip("fastokens")

EOD = "<|endoftext|>"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
HARMLESS = [
    *(
        "a",
        "word",
        " the",
        "'s",
        "s",
        "'",
        "'S",
        "'ll",
        "1",
        "2026",
        ".",
        "!?",
        "  ",
        "     ",
        " ",
        "\n",
        "\r\n",
        "\t",
        "\f",
    ),
    *(
        "é",
        "e\u0301",
        "\u1e9b\u0323",
        "\ufb01",
        "\uac00",
        "\u1112\u1161",
        "\u0000",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u0085",
    ),
    *("\U0001f469\u200d\U0001f680", "\u0e01\u0e33", "<|", "|>", "<|endoftex", "doftext|>", "<", ">", "\u010b", "_"),
]
"""Pieces with which texts can still be encoded together."""
HARMFUL = ["\u0301", "\u0323", "\u0345", "\v", "\v's", "'s\v", EOD, "<|padding|>", "\u0327s"]


def trained(pre_tokenizer, normalizer=None, special=(EOD,)):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": list(special), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(
        [Path(textwrap.__file__).read_text()] * 2 + ["\v \v\v  \v's 's s's"] * 20,
        trainers.BpeTrainer(vocab_size=500, **options),
    )
    return tokenizer


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def like_gpt2():
    return trained(byte_level(), special=(EOD, "<|padding|>"))


def with_nfc():
    return trained(byte_level(), normalizers.NFC())


def with_template():
    tokenizer = trained(byte_level(), normalizers.NFC(), special=(EOD, "<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {EOD}", special_tokens=[("<s>", 1), (EOD, 0)]
    )
    return tokenizer


def like_llama3():
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    return trained(pre_tokenizers.Sequence([split, byte_level(use_regex=False)]))


def with_prefix_space():
    return trained(byte_level(add_prefix_space=True))


def like_sentencepiece():
    """Tokenize as Llama 2: a word begins with U+2581, the first word of a text too; other characters become bytes."""
    letters = [*map(chr, range(33, 127)), "\u2581"]
    names = ["<unk>", "<s>", EOD, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "\u2581a", "\u2581w", "or"]
    merges = [("\u2581", "a"), ("\u2581", "w"), ("o", "r")]
    model = models.BPE({name: i for i, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<s>", EOD])
    return tokenizer


KINDS = {
    like_gpt2: "\v's",
    with_nfc: "\v's",
    with_template: "\v's",
    like_llama3: EOD,
    with_prefix_space: EOD,
    like_sentencepiece: None,
}


def loaded(folder, tokenizer, change=lambda data: None) -> Tokenizer:
    data = json.loads(tokenizer.to_str())
    change(data)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data))
    return load_tokenizer(path)


def found(tokenizer, change=lambda data: None):
    """Return the separators that the content of a tokenizer allows."""
    data = json.loads(tokenizer.to_str())
    change(data)
    separators = short_texts.separators(data, EOD, 0, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    return [separator.text for separator in separators]


def batches(pieces, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        yield ["".join(rng.choices(pieces, k=rng.randint(0, 6))) for _ in range(rng.randint(1, 30))]


def check(tokenizer, texts):
    """Compare the ids of a batch with those of each text alone, by the reference."""
    ids, lengths = tokenizer.encode_batch(texts)
    expected = tokenizer.encode_each(texts)
    assert lengths.tolist() == [len(ids_of_one) for ids_of_one in expected], texts
    assert ids.tolist() == [i for ids_of_one in expected for i in ids_of_one], texts


def check_many(tokenizer, monkeypatch):
    lines = Path(textwrap.__file__).read_text().splitlines(keepends=True)
    check(tokenizer, [*lines, *(text for texts in batches(HARMLESS, 50, seed=0) for text in texts)])
    monkeypatch.setattr(short_texts, "TOGETHER", 7)
    for texts in batches(HARMLESS, 150, seed=1):
        check(tokenizer, texts)
        if tokenizer.batch_backend == "fastokens":
            assert tokenizer._separator.encode(texts, tokenizer._flat) is not None, texts
    for texts in batches(HARMLESS + HARMFUL, 150, seed=2):
        check(tokenizer, texts)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_the_ids_of_each_text(tmp_path, monkeypatch, kind):
    tokenizer = loaded(tmp_path, kind())
    if KINDS[kind]:
        assert tokenizer._separator.text == KINDS[kind]
    check_many(tokenizer, monkeypatch)


@pytest.mark.parametrize("kind", [with_nfc, like_llama3])
def test_every_character_may_begin_or_end_a_text(tmp_path, kind):
    tokenizer = loaded(tmp_path, kind())
    characters = [chr(code) for code in range(1, 0x3100)]
    alone = [c for c in characters if tokenizer._separator.encode([c, c], tokenizer._flat) is None]
    assert len(alone) < 100
    texts = [c for c in characters if c not in alone]
    assert tokenizer._separator.encode(texts, tokenizer._flat) is not None
    check(tokenizer, texts)
    check(tokenizer, [f"{c}a {c}" for c in texts])
    for character in alone:
        check(tokenizer, ["a", character, "b"])


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ({"content": "some", "single_word": True}, []),
        ({"content": "x", "lstrip": True}, []),
        ({"content": "x", "rstrip": True}, []),
        ({"content": "some"}, [EOD]),  # could begin in the separator "\v's"
        ({"content": "x\v"}, [EOD]),
        ({"content": ">x"}, ["\v's"]),  # could begin in EOD
        ({"content": "x<|endoftext|>y", "special": True}, ["\v's"]),
        ({"content": "q"}, ["\v's", EOD]),
        ({"content": "q", "normalized": True}, ["\v's", EOD]),
        ({"content": "q", "normalized": True, "special": True}, ["\v's"]),
    ],
)
def test_added_tokens_near_separators_forbid_them(tmp_path, token, expected):
    def add(data):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        data["added_tokens"].append({"id": len(data["model"]["vocab"]), **flags, **token})

    assert found(like_gpt2(), add) == expected
    tokenizer = loaded(tmp_path, like_gpt2(), add)
    for texts in batches([*HARMLESS, "some", "ome ", "x", "q"], 30, seed=3):
        check(tokenizer, texts)


def test_unknown_parts_forbid_separators():
    assert found(like_gpt2()) == ["\v's", EOD]
    for normalizer in (normalizers.Strip(), normalizers.Replace("a", "b"), normalizers.Prepend("_")):
        assert found(trained(byte_level(), normalizer)) == []
        assert found(trained(byte_level(), normalizers.Sequence([normalizers.NFC(), normalizer]))) == []
    assert found(trained(byte_level(), normalizers.NFKC())) == [EOD]
    assert found(trained(byte_level(use_regex=False))) == [EOD]
    assert found(trained(pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), byte_level()]))) == []
    assert found(like_sentencepiece()) == []
