"""Text out of a folder: the same whichever way it is asked for, and whatever kind of model the folder holds."""

from dataclasses import replace

import pytest
import torch

from megatron_blackmamba.checkpoint import DamagedCheckpoint
from megatron_blackmamba.inference import Generator, Sampling, load
from megatron_blackmamba.inference.sampling import GenerationError
from megatron_blackmamba.inference.text import Text
from megatron_blackmamba.interchange import hf, megatron, zyphra
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.tokenizer import load_tokenizer
from tests.reference import forward, tiny
from tests.reference.canonical import canonical, write_tokenizer
from tests.tokenizer.test_tokenizer import metaspace, saved


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_file):
    folder = tmp_path_factory.mktemp("export")
    hf.write(canonical(tiny(), tokenizer=tokenizer_file), folder)
    return folder


@pytest.fixture(scope="module")
def generator(folder) -> Generator:
    return load(folder, dtype=torch.float32)


def greedy_by_reference(prompt, new):
    model, tokens = tiny(), list(prompt)
    for _ in range(new):
        tokens.append(int(forward(model.weights, model.config, tokens).logits_SV[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_text_is_that_of_the_reference(generator):
    prompt = generator.tokenizer.encode("a state")
    expected = greedy_by_reference(prompt, 10)
    assert generator.generate("a state", max_new_tokens=10) == generator.tokenizer.decode(expected)


def test_a_batch_gives_what_each_prompt_gives_alone(generator):
    prompts = ["a state", "so", "what then, they said"]
    for sampling in (Sampling(), Sampling(temperature=5.0, top_p=0.9, seed=7)):
        batch = generator.generate_batch(prompts, max_new_tokens=12, sampling=sampling)
        alone = [generator.generate(prompt, max_new_tokens=12, sampling=sampling) for prompt in prompts]
        assert batch == alone


def test_long_prompt_is_read_in_pieces(generator, monkeypatch):
    prompts = [generator.tokenizer.encode(text) for text in ("the state of a recurrent model", "so it is")]
    whole = list(generator.tokens(prompts, max_new_tokens=5))
    monkeypatch.setattr("megatron_blackmamba.inference.generator.READ_AT_ONCE", 8)
    assert list(generator.tokens(prompts, max_new_tokens=5)) == whole


def test_streaming_gives_the_same_text(generator):
    sampling = Sampling(temperature=6.0, seed=3)
    pieces = list(generator.stream("a state", max_new_tokens=20, sampling=sampling))
    assert len(pieces) > 10
    assert "".join(pieces) == generator.generate("a state", max_new_tokens=20, sampling=sampling)


def test_row_ends_at_the_stop_token_alone(generator):
    prompts = [generator.tokenizer.encode(text) for text in ("a state", "so")]
    unstopped = list(generator.tokens(prompts, max_new_tokens=8, stop=-1))
    stop = unstopped[3][0]
    first = next(n for n, row in enumerate(unstopped) if row[0] == stop)
    tokens = list(generator.tokens(prompts, max_new_tokens=8, stop=stop))
    assert [row[0] for row in tokens[: first + 1]] == [row[0] for row in unstopped[:first]] + [None]


def test_generation_ends_when_every_row_has_ended(generator):
    prompt = generator.tokenizer.encode("a state")
    stop = next(generator.tokens([prompt], max_new_tokens=1, stop=-1))[0]
    assert list(generator.tokens([prompt], max_new_tokens=8, stop=stop)) == []


def test_characters_are_held_back_until_they_are_whole():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode("utf-8", errors="replace")

    text = Text(Bytes())
    given = [text.add(byte) for byte in "aé漢🦤b".encode()]
    assert given == ["a", "", "é", "", "", "漢", "", "", "", "🦤", "b"] and text.rest() == ""
    text.add("🦤".encode()[0])
    assert text.rest() == "\ufffd"


@pytest.mark.parametrize("before", ["▁Hello", "<0xC3> <0xA9>", "▁Hello </s>"])
def test_text_continues_the_prompt_s_last_word(tmp_path, before):
    tokenizer = load_tokenizer(saved(tmp_path, metaspace()), backend="tokenizers")
    ids = tokenizer._reference.token_to_id
    prompt, tokens = ([ids(word) for word in words.split()] for words in (before, "▁world <0xC3> <0xA9> ▁again"))
    text = Text(tokenizer, prompt=prompt)
    written = "".join(map(text.add, tokens)) + text.rest()
    assert written == ("" if before.endswith("</s>") else " ") + "worldé again"


def test_samples_share_nothing(generator):
    sampling = Sampling(temperature=6.0)
    texts = [
        text
        for seed in (0, 1, 2)
        for text in generator.generate_batch(
            ["a state"], max_new_tokens=16, sampling=replace(sampling, seed=seed), samples=4
        )
    ]
    assert len(set(texts)) == 12
    one = generator.generate("a state", max_new_tokens=16, sampling=sampling)
    several = generator.generate_batch(["so", "a state"], max_new_tokens=16, sampling=sampling, samples=2)
    assert several[2] == one == texts[0] and several[3] == texts[1]


def test_text_ends_before_a_stop_string(generator):
    whole = generator.generate("a state", max_new_tokens=16)
    stop = whole[6:9]
    cut = whole[: whole.index(stop)]
    assert generator.generate("a state", max_new_tokens=16, stop=["never", stop]) == cut
    pieces = list(generator.pieces(["a state", "so"], max_new_tokens=16, stop=[stop]))
    assert "".join(piece.text for piece in pieces if piece.row == 0) == cut
    assert {piece.row for piece in pieces if piece.finished} == {0, 1}
    assert [piece.finished for piece in pieces if piece.row == 0][-1] == "stop"
    assert generator.generate("a state", max_new_tokens=16, stop=[whole + "?"]) == whole  # held back, then given out
    with pytest.raises(GenerationError, match="empty stop"):
        generator.generate("a state", stop=[""])


def test_ids_outside_the_vocabulary_are_named(generator):
    for wrong in (-1, 64):
        with pytest.raises(GenerationError, match=f"token id {wrong} of prompt 2 \\(position 1\\).*0 to 63"):
            next(generator.tokens([[1], [2, wrong]]))
    with pytest.raises(GenerationError, match="empty prompt"):
        next(generator.tokens([[]]))


def test_wrong_prompts_and_lengths_are_refused(generator):
    with pytest.raises(
        GenerationError, match=r"a prompt is a text, not \['a', 'b'\]. Give several to `generate_batch`"
    ):
        generator.generate(["a", "b"])
    with pytest.raises(GenerationError, match="max_new_tokens must be 0 or more, not -1"):
        generator.generate("a", max_new_tokens=-1)


def test_options_of_another_type_are_named(folder):
    with pytest.raises(GenerationError, match=r"dtype must be a torch\.dtype such as torch\.bfloat16, not 'bf16'"):
        load(folder, dtype="bf16")
    for name in ("temperature", "top_k", "top_p"):
        with pytest.raises(GenerationError, match=f"{name} must be a finite number, not '1'"):
            Sampling(**{name: "1"})


def test_every_kind_of_model_writes_the_same(folder, tmp_path, tokenizer_file, generator):
    zyphra.write(canonical(tiny()), tmp_path / "released")
    megatron.write(canonical(tiny(), tokenizer=tokenizer_file), tmp_path / "ours")
    expected = generator.generate("a state", max_new_tokens=8)
    released = load(tmp_path / "released", tokenizer=tokenizer_file)
    assert released.generate("a state", max_new_tokens=8) == expected
    assert load(tmp_path / "ours").generate("a state", max_new_tokens=8) == expected


def test_missing_model_and_missing_tokenizer_are_named(tmp_path):
    with pytest.raises(DamagedCheckpoint, match=f"{tmp_path}: not a checkpoint"):
        load(tmp_path)
    with pytest.raises(InterchangeError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(GenerationError, match="device must be cpu, cuda or cuda:1, not 'mps'"):
        load(tmp_path, device="mps")
    zyphra.write(canonical(tiny()), tmp_path / "released")
    with pytest.raises(GenerationError, match=r"no tokenizer: .* token ids to `Generator\.tokens`"):
        load(tmp_path / "released").generate("a")


def test_export_contains_the_given_tokenizer(folder, tokenizer_file):
    assert load_tokenizer(folder).sha256 == load_tokenizer(tokenizer_file).sha256


def test_no_sample_at_all_is_refused(generator):
    with pytest.raises(GenerationError, match="samples must be 1 or more, not 0"):
        generator.generate_batch(["a"], samples=0)
