"""Text out of a folder: the same whichever way it is asked for, and whatever kind of model the folder holds."""

import pytest
import torch

from megatron_blackmamba.checkpoint import DamagedCheckpoint
from megatron_blackmamba.inference import Generator, Sampling, load
from megatron_blackmamba.inference.generator import _Text
from megatron_blackmamba.inference.sampling import GenerationError, next_tokens
from megatron_blackmamba.interchange import hf, megatron, zyphra
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.tokenizer import load_tokenizer
from tests.reference import forward, tiny
from tests.reference.canonical import canonical, write_tokenizer


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
        alone = [
            generator.generate(
                prompt, max_new_tokens=12, sampling=Sampling(sampling.temperature, sampling.top_p, sampling.seed + row)
            )
            for row, prompt in enumerate(prompts)
        ]
        assert batch == alone


def test_a_prompt_longer_than_one_reading_goes_in_pieces(generator, monkeypatch):
    prompts = [generator.tokenizer.encode(text) for text in ("the state of a recurrent model", "so it is")]
    whole = list(generator.tokens(prompts, max_new_tokens=5))
    monkeypatch.setattr("megatron_blackmamba.inference.generator.READ_AT_ONCE", 8)
    assert list(generator.tokens(prompts, max_new_tokens=5)) == whole


def test_streaming_gives_the_same_text(generator):
    sampling = Sampling(temperature=6.0, seed=3)
    pieces = list(generator.stream("a state", max_new_tokens=20, sampling=sampling))
    assert len(pieces) > 10
    assert "".join(pieces) == generator.generate("a state", max_new_tokens=20, sampling=sampling)


def test_the_same_seed_writes_the_same_text_and_another_writes_another(generator):
    texts = [generator.generate("a", max_new_tokens=20, sampling=Sampling(temperature=6.0, seed=s)) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_row_ends_at_the_stop_token_while_others_go_on(generator):
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


def test_top_p_draws_from_the_likeliest_only():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(300, 1)
    sampling = Sampling(temperature=1.0, top_p=0.7, seed=0)
    drawn = next_tokens(logits, sampling, sampling.generators(300))
    assert set(drawn.tolist()) == {0, 1}
    everything = Sampling(temperature=1.0, seed=0)
    counts = torch.bincount(next_tokens(logits, everything, everything.generators(300)), minlength=4) / 300
    torch.testing.assert_close(counts, logits[0].exp(), atol=0.1, rtol=0)


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_impossible_sampling_is_refused(options):
    with pytest.raises(GenerationError, match=next(iter(options))):
        Sampling(**options)


def test_characters_are_held_back_until_they_are_whole():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode("utf-8", errors="replace")

    text = _Text(Bytes())
    given = [text.add(byte) for byte in "aé漢🦤b".encode()]
    assert given == ["a", "", "é", "", "", "漢", "", "", "", "🦤", "b"] and text.rest() == ""
    text.add("🦤".encode()[0])
    assert text.rest() == "\ufffd"


def test_every_kind_of_model_writes_the_same(folder, tmp_path, tokenizer_file, generator):
    zyphra.write(canonical(tiny()), tmp_path / "released")
    megatron.write(canonical(tiny(), tokenizer=tokenizer_file), tmp_path / "ours")
    expected = generator.generate("a state", max_new_tokens=8)
    released = load(tmp_path / "released", tokenizer=tokenizer_file)
    assert released.generate("a state", max_new_tokens=8) == expected
    assert load(tmp_path / "ours").generate("a state", max_new_tokens=8) == expected


def test_a_folder_with_no_model_and_a_model_with_no_tokenizer_are_named(tmp_path):
    with pytest.raises(DamagedCheckpoint, match=f"{tmp_path}: not a checkpoint"):
        load(tmp_path)
    with pytest.raises(InterchangeError, match="no such folder"):
        load(tmp_path / "nowhere")
    zyphra.write(canonical(tiny()), tmp_path / "released")
    with pytest.raises(GenerationError, match="without a tokenizer"):
        load(tmp_path / "released").generate("a")


def test_the_tokenizer_in_the_export_is_the_one_given(folder, tokenizer_file):
    assert load_tokenizer(folder).sha256 == load_tokenizer(tokenizer_file).sha256
