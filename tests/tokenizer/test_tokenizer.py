import json
import textwrap
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba import tokenizer as tokenizer_module
from megatron_blackmamba.tokenizer import TokenizerError, load_tokenizer

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
tricky_text = st.lists(
    st.sampled_from(
        ["<|endoftext|>", "<|padding|>", "<s>", "  ", "\n", "e\u0301", "é", "'ll", "def", "<|", "|>", "\u200d"]
    )
).map("".join)


def trained(special=("<|endoftext|>",), size=400):
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(textwrap.__file__).read_text()], trainer)
    return tokenizer


def saved(folder, tokenizer, change=lambda data: None):
    data = json.loads(tokenizer.to_str())
    change(data)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("tokenizer"), trained())


@pytest.fixture(scope="module", params=["fastokens", "tokenizers"])
def tokenizer(request, file):
    if request.param == "fastokens":
        pytest.importorskip("fastokens")
    return load_tokenizer(file, backend=request.param)


def test_file_and_folder_are_the_same_tokenizer(file):
    assert load_tokenizer(file).sha256 == load_tokenizer(file.parent).sha256
    assert load_tokenizer(file).eod_token == "<|endoftext|>"
    assert load_tokenizer(file).vocab_size == 400


@settings(deadline=None, max_examples=200)
@given(st.lists(any_text | tricky_text, max_size=5), st.booleans())
def test_batch_matches_the_reference_text_by_text(tokenizer, texts, special_text):
    ids, lengths = tokenizer.encode_batch(texts, special_text=special_text)
    one_by_one = [tokenizer.encode(text, special_text=special_text) for text in texts]
    assert ids.dtype == np.uint32 and ids.tolist() == [i for ids_of_one in one_by_one for i in ids_of_one]
    assert lengths.tolist() == [len(ids_of_one) for ids_of_one in one_by_one]


@settings(deadline=None, max_examples=200)
@given(any_text | tricky_text)
def test_text_round_trips_and_never_contains_eod(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids


def metaspace():
    """Return a tokenizer that spells spaces as Llama's does, and falls back on bytes."""
    words = ["</s>", "▁", "▁Hello", "▁world", "▁again", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, ignore_merges=True))
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["</s>"])
    return made


@settings(max_examples=60, deadline=None)
@given(text=any_text | tricky_text)
def test_token_bytes_add_up_to_the_text(tokenizer, text):
    assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.token_bytes[tokenizer.eod_id] == 0


@settings(max_examples=60, deadline=None)
@given(text=any_text | tricky_text)
def test_spelled_tokens_add_up_to_the_text(tokenizer, text):
    told = [tokenizer.spelled(token) for token in tokenizer.encode(text)]
    parts = [
        bytes.fromhex(part[6:].replace("\\x", "")) if part.startswith("bytes:\\x") else part.encode()
        for part, _ in told
    ]
    assert b"".join(parts) == text.encode()
    assert sum(characters for _, characters in told) == len(text)


def test_tokens_of_bytes_have_spellings_of_their_own(tokenizer, tmp_path):
    spelled = [tokenizer.spelled(token)[0] for token in range(1, tokenizer.vocab_size)]
    assert len(set(spelled)) == len(spelled)
    vocabulary = {"<|endoftext|>": 0, "<0xE2>": 1, "<0x80>": 2, "<0x41>": 3}
    fallback = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    fallback.decoder = tokenizers.decoders.ByteFallback()
    fallback.add_special_tokens(["<|endoftext|>"])
    found = load_tokenizer(saved(tmp_path, fallback), backend="tokenizers")
    assert [found.spelled(token) for token in (1, 2, 3)] == [("bytes:\\xe2", 1), ("bytes:\\x80", 0), ("A", 1)]


def test_token_bytes_count_added_text_without_special_tokens(tmp_path):
    made = trained(special=("<|endoftext|>", "<|pad|>"))
    made.add_tokens(["über alles"])
    found = load_tokenizer(saved(tmp_path, made))
    ids = found.encode("so über alles<|pad|>", special_text=True)
    assert found.token_bytes[ids].sum() == len("so über alles".encode())
    without = load_tokenizer(saved(tmp_path, made, lambda data: data.update(decoder={"type": "Fuse"})))
    assert without.token_bytes is None


def test_a_flag_makes_special_tokens_of_their_text(tokenizer):
    assert tokenizer.encode("a<|endoftext|>", special_text=True)[-1] == tokenizer.eod_id
    assert tokenizer.encode_batch(["a<|endoftext|>"], special_text=True)[0][-1] == tokenizer.eod_id


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path, file):
    def cut_to_four(data):
        data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        data["padding"] = {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }

    path = saved(tmp_path, trained(), cut_to_four)
    text = "a text of more than four tokens"
    for backend in ("auto", "tokenizers"):
        cutting = load_tokenizer(path, backend=backend)
        assert cutting.decode(cutting.encode(text)) == text
        assert cutting.decode(cutting.encode_batch([text])[0]) == text


def test_unmarked_eod_cannot_be_spelled_by_text(tmp_path):
    def not_special(data):
        data["added_tokens"][0]["special"] = False

    path = saved(tmp_path, trained(), not_special)
    for backend in ("auto", "tokenizers"):
        tokenizer = load_tokenizer(path, backend=backend)
        assert tokenizer.eod_id not in tokenizer.encode_batch(["a<|endoftext|>b"])[0]


def test_fingerprint_is_of_the_file_and_survives_saving(tmp_path, file):
    tokenizer = load_tokenizer(file)
    tokenizer.save(tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_bytes() == file.read_bytes()
    assert load_tokenizer(tmp_path / "copy.json").sha256 == tokenizer.sha256


def test_eod_is_detected_or_requested(tmp_path):
    path = saved(tmp_path, trained(special=("<stop>", "<pad>")))
    with pytest.raises(TokenizerError, match=r"--eod.*<stop>, <pad>"):
        load_tokenizer(path)
    assert load_tokenizer(path, eod="<stop>").eod_id == 0
    assert load_tokenizer(path, eod=1).eod_token == "<pad>"
    with pytest.raises(TokenizerError, match="'<end>'"):
        load_tokenizer(path, eod="<end>")
    with pytest.raises(TokenizerError, match="no token has the id 999999"):
        load_tokenizer(path, eod="999999")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert load_tokenizer(path).eod_token == "<stop>"


def test_nondeterministic_tokenizer_is_refused(tmp_path):
    def drop(data):
        data["model"]["dropout"] = 0.1

    with pytest.raises(TokenizerError, match="dropout"):
        load_tokenizer(saved(tmp_path, trained(), drop))


def test_fastokens_steps_aside_where_it_is_not_exact(file, monkeypatch):
    fastokens = pytest.importorskip("fastokens")
    exact = fastokens.Tokenizer

    class OffByOne:
        wrong_with = ""  # in a text whose ids are wrong

        def __init__(self, json):
            self.exact = exact.from_json_str(json)

        @classmethod
        def from_json_str(cls, json):
            return cls(json)

        def encode_batch_flat(self, texts, *arguments):
            ids, offsets = self.exact.encode_batch_flat(texts, *arguments)
            wrong = any(self.wrong_with in text for text in texts)
            return (np.frombuffer(ids, np.uint32) ^ wrong).tobytes(), offsets

    monkeypatch.setattr(fastokens, "Tokenizer", OffByOne)
    for unknown in ("<|eot_id|>", "<|padding|>"):  # special to other tokenizers, plain text to this one
        OffByOne.wrong_with = unknown
        assert load_tokenizer(file).batch_backend == "tokenizers"
    OffByOne.wrong_with = ""
    tokenizer = load_tokenizer(file)
    assert tokenizer.batch_backend == "tokenizers"
    assert tokenizer.encode_batch(["some text"])[0].tolist() == tokenizer.encode("some text")
    with pytest.raises(TokenizerError, match="differently"):
        load_tokenizer(file, backend="fastokens").encode_batch(["some text"])


def test_fastokens_with_known_faults_is_not_used(file, monkeypatch):
    pytest.importorskip("fastokens")
    monkeypatch.setattr(tokenizer_module, "version", lambda name: "0.3.2" if name == "fastokens" else "1")
    assert load_tokenizer(file).batch_backend == "tokenizers"
    with pytest.raises(TokenizerError, match=r"version 0\.3\.2 is too old.*pip install -U fastokens"):
        load_tokenizer(file, backend="fastokens").encode_batch(["some text"])


def test_what_is_not_a_tokenizer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "pointer.json").write_text("version 1\noid sha256:4d7a214614ab\nsize 12345\n")
    (tmp_path / "train").mkdir()
    (tmp_path / "train/nested.json").touch()
    for name, message in (
        (tmp_path / "nested.json", "did you mean .*train/nested.json"),
        (tmp_path / "vocab.json", "no `model`"),
        (tmp_path / "broken.json", "not a tokenizer.json"),
        (tmp_path / "pointer.json", "a pointer of Git LFS, not the tokenizer"),
        (tmp_path / "absent.json", "no such tokenizer file"),
        (tmp_path, r"the folder holds broken\.json, pointer\.json, train, vocab\.json"),
    ):
        with pytest.raises(TokenizerError, match=message):
            load_tokenizer(name)


def test_decoding_keeps_special_tokens_unless_told(tokenizer):
    ids = [*tokenizer.encode("ab"), tokenizer.eod_id]
    assert tokenizer.decode(ids) == "ab<|endoftext|>"
    assert tokenizer.decode(np.array(ids, np.uint32), skip_special=True) == "ab"


def test_versions_name_every_library_that_decides_ids(tokenizer):
    names = {"tokenizers", tokenizer.batch_backend}
    assert tokenizer.versions == {name: metadata.version(name) for name in names}


def test_short_name_omits_folders(file):
    assert load_tokenizer(file).short_name == "tokenizer.json"
    assert replace(load_tokenizer(file), name="EleutherAI/gpt-neox-20b").short_name == "EleutherAI/gpt-neox-20b"


def test_configured_eod_may_be_text_or_damaged(tmp_path):
    path = saved(tmp_path, trained(special=("<stop>", "<|endoftext|>")))
    assert load_tokenizer(path).eod_token == "<|endoftext|>"
    for content, token in [('{"eos_token": "<stop>"}', "<stop>"), ("{", "<|endoftext|>"), ("[]", "<|endoftext|>")]:
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert load_tokenizer(path).eod_token == token
    assert load_tokenizer(path, eod="300").eod_id == 300  # as the command line passes it


@pytest.mark.parametrize("named", [1, [99999, 1, 0], {"content": "<stop>"}])
def test_model_config_names_the_eod(tmp_path, named):
    path = saved(tmp_path, trained(special=("<|endoftext|>", "<stop>")))
    for name in ("generation_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": named}))
        assert load_tokenizer(path).eod_token == "<stop>"
        (tmp_path / name).unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": named}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(path).eod_token == "<|endoftext|>"


def test_missing_tokenizer_asks_the_hub_once(tmp_path, monkeypatch):
    """A name mistyped on a machine without network is answered at once; what an earlier download left is used."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    with pytest.raises(TokenizerError, match=r"nobody/nothing: .*the Hugging Face hub did not give"):
        load_tokenizer("nobody/nothing")
    assert not slept
    cached = tmp_path / "cached.json"
    cached.write_text("{}")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda **_: str(cached))
    with pytest.raises(TokenizerError, match=r"cached.json: not a tokenizer.json"):
        load_tokenizer("nobody/nothing")


def test_unknown_tokenizer_name_lists_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read at the import
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    for name in ("./absent", "org/absent", "absent.json", "a/b/c"):
        with pytest.raises(TokenizerError, match="no such tokenizer file"):
            load_tokenizer(name)
    with pytest.raises(TokenizerError, match=r"nobody/nothing: .*the Hugging Face hub did not give"):
        load_tokenizer("nobody/nothing")
    for name in "abcdefg":
        (tmp_path / "org" / name).write_text("")
    with pytest.raises(TokenizerError, match=r"holds a, b, c, d, e, f, \.\.\."):
        load_tokenizer("org")
