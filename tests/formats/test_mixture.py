import hashlib
from fractions import Fraction

import pytest

from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.mixture import Mixture, MixtureError, content_fingerprint
from megatron_blackmamba.formats.shards import Shard, ShardError
from tests.data.corpus import write_mixture, write_shard

PAPER = {
    "pile": 0.324588,
    "slimpajama": 0.389505,
    "starcoder": 0.101434,
    "pes2o": 0.135245,
    "proofpile": 0.043278,
    "pg19": 0.005951,
}


def read(tmp_path, text):
    path = tmp_path / "mixture.yaml"
    path.write_text(text)
    return Mixture.read(path)


def names(shards):
    return sorted(shard.prefix.name for shard in shards)


def test_probability_is_tokens_times_weight_exactly(tmp_path):
    mixture = read(tmp_path, "sources: [{name: a, tokens: 2.2e9, weight: 1.2}, {name: b, tokens: 1_000_000_000}]")
    assert mixture.schedule([0, 0], 2048).blends[0].probabilities == [Fraction(66, 91), Fraction(25, 91)]


def test_without_stated_tokens_those_in_the_shards_count(tmp_path):
    mixture = read(tmp_path, "sources: [{name: a, tokens: 100}, {name: b}]")
    assert mixture.schedule([7, 300], 16).blends[0].probabilities == [Fraction(1, 4), Fraction(3, 4)]


def test_phase_changes_weights_it_names_and_keeps_others(tmp_path):
    mixture = read(
        tmp_path,
        "sources: [{name: a, weight: 2}, {name: b}, {name: c}]\n"
        "phases: [{from_sample: 10, weights: {a: 0}}, {from_tokens: 161, weights: {b: 5}}]",
    )
    assert mixture.weights() == [[2, 1, 1], [0, 1, 1], [0, 5, 1]]
    assert mixture.starts(16) == [0, 10, 11]
    with pytest.raises(MixtureError, match="phase 2 starts at sample 6, not after"):
        mixture.starts(32)


def test_finds_shards_by_folder_glob_prefix_or_file(tmp_path):
    for number, name in enumerate(["x/s1", "x/deep/s2", "x/s.3.v2"]):
        write_shard(tmp_path / name, 1000 * number, 50)
    for shards, expected in {
        "x": ["s.3.v2", "s1", "s2"],
        "x/*": ["s.3.v2", "s1"],
        "x/s*.idx": ["s.3.v2", "s1"],
        "x/**/s2.bin": ["s2"],
        "x/s.3.v2": ["s.3.v2"],
        "[x/s1, x/s1.bin, x/deep]": ["s1", "s2"],
    }.items():
        mixture = read(tmp_path, f"sources: [{{name: a, shards: {shards}}}]")
        assert names(mixture.open_shards(mixture.sources[0])[0]) == expected


def test_root_variables_and_home_are_filled_in(tmp_path, monkeypatch):
    write_shard(tmp_path / "tokens/a/s1", 0, 50)
    monkeypatch.setenv("TOKENS", str(tmp_path / "tokens"))
    text = "root: ${TOKENS}\nsources: [{name: a, shards: a}]"
    mixture = read(tmp_path, text)
    assert names(mixture.open_shards(mixture.sources[0])[0]) == ["s1"]
    monkeypatch.delenv("TOKENS")
    with pytest.raises(MixtureError, match="environment variable TOKENS is not set"):
        mixture.open_shards(mixture.sources[0])


def test_validation_shards_are_removed_from_training(tmp_path):
    for number in range(3):
        write_shard(tmp_path / f"x/s{number}", 1000 * number, 50)
    mixture = read(tmp_path, "sources: [{name: a, shards: x, validation: 'x/s[12]'}]")
    training, held_out = mixture.open_shards(mixture.sources[0])
    assert (names(training), names(held_out)) == (["s0"], ["s1", "s2"])
    mixture = read(tmp_path, "sources: [{name: a, shards: x, validation: x}]")
    with pytest.raises(MixtureError, match="'a': no shards to train on beside those held out"):
        mixture.open_shards(mixture.sources[0])


def test_shard_with_a_missing_file_is_an_error(tmp_path):
    write_shard(tmp_path / "x/s1", 0, 50)
    write_shard(tmp_path / "x/s2", 1000, 50)
    mixture = read(tmp_path, "sources: [{name: a, shards: x}]")
    for suffix in (".manifest.json", ".idx", ".bin"):
        file = tmp_path / f"x/s2{suffix}"
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(ShardError, match="s2"):
            mixture.open_shards(mixture.sources[0])
        file.write_bytes(content)


def test_fingerprint_depends_on_content_not_names(tmp_path):
    prints = []
    for folder, order in (("x", ["s1", "s2"]), ("y", ["z", "a"])):
        for number, name in enumerate(order):
            write_shard(tmp_path / folder / name, 1000 * number, 50)
        mixture = read(tmp_path, f"sources: [{{name: a, shards: {folder}}}]")
        prints.append(content_fingerprint(mixture.open_shards(mixture.sources[0])[0]))
    assert prints[0] == prints[1]


def test_fingerprint_is_stable_across_versions(tmp_path):
    shards = [Shard.open(write_shard(tmp_path / f"s{number}", 1000 * number, 50)) for number in range(2)]
    lines = "".join(f"{shard.manifest.bin_sha256} 50 int32\n" for shard in shards).encode()
    assert content_fingerprint(shards) == hashlib.blake2b(lines, digest_size=16).hexdigest()


@pytest.mark.parametrize(
    "text, message",
    [
        ("sources: []", "sources: List should have at least 1 item"),
        ("sources: [{name: a, wieght: 2}]", r"unknown key 'sources.0.wieght'; did you mean 'weight'"),
        ("sources: [{name: a}, {name: a}]", "'a' is given twice"),
        ("sources: [{name: a, weight: -1}]", "sources.0.weight: .* greater than or equal to 0"),
        ("sources: [{name: a, weight: .nan}]", "sources.0.weight: .* finite"),
        ("sources: [{name: a, tokens: 2.5}]", r"sources.0.tokens"),
        ("sources: [{name: a, weight: 0}]", "every source has weight 0"),
        ("sources: [{name: 'a b'}]", "sources.0.name"),
        ("sources: [{name: a}]\nphases: [{weights: {a: 1}}]", "from_sample or at from_tokens"),
        ("sources: [{name: a}]\nphases: [{from_sample: 3, weights: {b: 1}}]", "phase 1 weighs 'b'; the sources are a"),
        ("sources: [{name: a}]\nphases: [{from_sample: 3, weights: {a: 0}}]", "phase 1: every source has weight 0"),
        (
            "sources: [{name: a}]\nphases: [{from_sample: 0, weights: {a: 1}}]",
            "phases.0.from_sample: .* greater than 0",
        ),
        (
            "sources: [{name: a}]\nphases: [{from_tokens: 0, weights: {a: 1}}]",
            "phases.0.from_tokens: .* greater than 0",
        ),
        ("sources: [{name: a}]\nphases: [{from_tokens: 1, weights: {a: -1}}]", "phases.0.weights.a: .* or equal to 0"),
        ("sources: [{name: a, tokens: 0}]", "sources.0.tokens: .* greater than 0"),
        ("sources: [{name: a, max_epochs: 0}]", "sources.0.max_epochs: .* greater than 0"),
        ("sources: [{name: a, weight: 1e30}]", "sources.0.weight: .* less than or equal to"),
        ("sources: [{name: a", "not valid YAML"),
        ("- a", "not a list"),
    ],
)
def test_malformed_file_is_refused_by_name_and_place(tmp_path, text, message):
    with pytest.raises(MixtureError, match=message) as error:
        read(tmp_path, text)
    assert "mixture.yaml" in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MixtureError, match=r"nowhere\.yaml"):
        Mixture.read(tmp_path / "nowhere.yaml")


def test_path_without_shards_says_where_it_looked(tmp_path):
    mixture = read(tmp_path, "sources: [{name: a, shards: nothing/*}]")
    with pytest.raises(MixtureError, match=f"'a': shards: 'nothing/\\*' names no shard .looked for {tmp_path}"):
        mixture.open_shards(mixture.sources[0])


def test_one_error_names_all_sources_without_shards(tmp_path):
    write_shard(tmp_path / "a/s1", 0, 100)
    text = "sources: [{name: a, shards: a}, {name: b, shards: b, validation: held/b}, {name: c, shards: [a, x, y]}]"
    for of_all in (Mixture.prefixes, Mixture.open_all):
        with pytest.raises(MixtureError) as error:
            of_all(read(tmp_path, text))
        lines = str(error.value).splitlines()
        assert [line.split(" names no shard")[0] for line in lines] == [
            "source 'b': shards: 'b'",
            "source 'b': validation: 'held/b'",
            "source 'c': shards: 'x'",
            "source 'c': shards: 'y'",
        ]


def test_variable_that_is_not_set_is_named_once(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_ROOT", raising=False)
    mixture = read(tmp_path, "{root: $NO_SUCH_ROOT, sources: [{name: a, shards: a}, {name: b, shards: b}]}")
    with pytest.raises(MixtureError) as error:
        mixture.open_all()
    assert str(error.value) == "root: '$NO_SUCH_ROOT': the environment variable NO_SUCH_ROOT is not set"


def test_folder_named_like_a_shard_hides_nothing(tmp_path):
    prefix = write_shard(tmp_path / "a/shard_00001", 0, 100)
    (prefix / "cache").mkdir(parents=True)  # as megatron-core's GPTDataset makes
    (prefix / "cache/order.npy").touch()
    for shards in ("a/shard_00001", "a", "a/shard_*", "a/shard_00001.bin"):
        mixture = Mixture.read(write_mixture(tmp_path, [{"name": "a", "shards": shards}]))
        assert mixture.prefixes() == [prefix]
    assert [shard.prefix for shard in find_shards(prefix)] == [prefix]


@pytest.mark.parametrize("shards", ["a", "a/shard_*", "a/shard_0000[12]", "a/shard_00001"])
def test_brackets_in_path_are_part_of_its_name(tmp_path, shards):
    folder = tmp_path / "corpus [v2]"
    wanted = write_shard(folder / "a/shard_00001", 0, 100)
    write_shard(tmp_path / "corpus v/a/shard_00001", 500, 100)  # what a character class would match
    mixture = Mixture.read(write_mixture(folder, [{"name": "a", "shards": shards}]))
    assert mixture.prefixes() == [wanted]
    if "[" not in shards:
        above = Mixture.read(write_mixture(tmp_path, [{"name": "a", "shards": f"corpus [v2]/{shards}"}]))
        assert above.prefixes() == [wanted]


def test_hidden_folders_hold_no_shards(tmp_path):
    prefix = write_shard(tmp_path / "a/shard_00001", 0, 100)
    write_shard(tmp_path / "a/.snapshot/shard_00001", 500, 100)
    assert Mixture.read(write_mixture(tmp_path, [{"name": "a", "shards": "a"}])).prefixes() == [prefix]


@pytest.mark.parametrize("name", ["shards", "text.txt"])
def test_what_is_no_mixture_says_what_one_is(tmp_path, name):
    (tmp_path / "shards").mkdir()
    (tmp_path / "text.txt").write_text("Once upon a time")
    with pytest.raises(MixtureError, match="A mixture is a YAML file that lists folders of shards"):
        Mixture.read(tmp_path / name)


def test_run_file_is_not_a_mixture(tmp_path):
    (tmp_path / "run.yaml").write_text("include: tiny\ndata:\n  mixture: mix.yaml\n")
    with pytest.raises(MixtureError, match=r"run.yaml is a run, not a mixture. Its mixture is mix.yaml"):
        Mixture.read(tmp_path / "run.yaml")


def test_raw_text_as_shards_is_referred_to_tokenize(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "mix.yaml").write_text("sources:\n  - {name: a, shards: a.txt}\n")
    with pytest.raises(MixtureError, match=r"data tokenize \S+/a.txt \S+/a_tokens --tokenizer FILE"):
        Mixture.read(tmp_path / "mix.yaml").prefixes()


def test_unfinished_shards_are_said_to_be(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/tokenizer.json").write_text("{}")
    (tmp_path / "mix.yaml").write_text("sources:\n  - {name: a, shards: a}\n")
    with pytest.raises(MixtureError, match="has not finished here: run it again, with a larger --hold-out"):
        Mixture.read(tmp_path / "mix.yaml").prefixes()


def test_name_of_a_source_is_refused_in_words(tmp_path):
    file = tmp_path / "mixture.yaml"
    file.write_text("sources: [{name: 中文, shards: a, weight: 1}]", encoding="utf-8")
    with pytest.raises(MixtureError) as refused:
        Mixture.read(file)
    assert "begins with a letter or a digit" in str(refused.value) and "[A-Z" not in str(refused.value)
