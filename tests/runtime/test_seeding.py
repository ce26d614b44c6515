import torch

from megatron_blackmamba.runtime.seeding import generator, seed_of


def draw(seed, name, count=4):
    return torch.randn(count, generator=generator(seed, name))


def test_seed_and_name_always_give_the_same_numbers():
    assert torch.equal(
        draw(1, "decoder.layers.0.mixer.in_proj.weight"), draw(1, "decoder.layers.0.mixer.in_proj.weight")
    )
    assert seed_of(1234, "embedding.word_embeddings.weight") == 3049120096115717112


def test_another_seed_or_another_name_gives_other_numbers():
    assert not torch.equal(draw(1, "a"), draw(2, "a"))
    assert not torch.equal(draw(1, "a"), draw(1, "b"))


def test_seed_and_name_are_not_interchangeable():
    assert seed_of(1, "1x") != seed_of(11, "x")


def test_all_names_of_a_large_model_differ():
    names = [f"layers.{i}.experts.{e}.fc{k}" for i in range(64) for e in range(64) for k in (1, 2)]
    assert len({seed_of(0, name) & 0xFFFFFFFF for name in names}) == len(names)  # a CPU generator keeps 32 bits
