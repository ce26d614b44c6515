"""Documents of some lengths alone: shards by length, each with its own weight in a mixture."""

import json
from collections import Counter

import pytest

from megatron_blackmamba.data_tools.mixture import verify_mixture
from megatron_blackmamba.data_tools.provenance import origin
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.verification import verify
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.mixture import Mixture
from tests.data_tools.test_hold_out import texts_of

TEXTS = [" ".join(["word"] * (1 + number % 40)) + f" {number}" for number in range(300)]
BUCKETS = {"short": {"max_tokens": 30}, "long": {"min_tokens": 31}}


@pytest.fixture
def corpus(tmp_path):
    """Write a file with a blank text, which is rejected, among documents of many lengths."""
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "web.jsonl").write_text("".join([*lines[:100], '{"text": ""}\n', *lines[100:]]))
    return tmp_path / "web.jsonl"


def test_every_document_is_in_one_bucket(corpus, tmp_path, run, tokenizer):
    for name, limits in BUCKETS.items():
        run(corpus, out=name, max_bad="1", **limits)
        assert not run(corpus, out=name, max_bad="1", **limits).written
    found = {name: texts_of(tmp_path / name, tokenizer) for name in BUCKETS}
    assert Counter(found["short"] + found["long"]) == Counter(TEXTS)
    (short,), (long,) = (find_shards(str(tmp_path / name)) for name in BUCKETS)
    assert max(len(short.document(i)) for i in range(short.manifest.documents)) <= 31  # with its EOD
    assert min(len(long.document(i)) for i in range(long.manifest.documents)) >= 32
    assert not any(verdict.problems for verdict in verify([str(tmp_path / "long")], cores=1, quiet=True))


@pytest.mark.parametrize("hold_out", [None, "20%"])
def test_documents_of_a_bucket_are_traced(corpus, tmp_path, run, tokenizer, hold_out):
    run(corpus, max_bad="1", min_tokens=31, hold_out=hold_out)
    records = corpus.read_text().splitlines()
    for shard in find_shards(str(tmp_path / "out")):
        for place in range(shard.manifest.documents):
            record = origin(shard.manifest, place).record
            assert tokenizer.decode(shard.document(place)[:-1]) == json.loads(records[record - 1])["text"]


def test_buckets_mix_with_validation_documents(corpus, tmp_path, run):
    run(corpus, out="all", max_bad="1", hold_out="20%")
    for name, limits in BUCKETS.items():
        run(corpus, out=name, max_bad="1", hold_out="20%", **limits)
    weights = {"short": 1, "long": 4}
    sources = [{"name": name, "shards": f"{name}/train", "weight": weight} for name, weight in weights.items()]
    sources[0]["validation"] = "all/validation"
    (tmp_path / "mixture.yaml").write_text(json.dumps({"sources": sources}))
    assert verify_mixture(Mixture.read(tmp_path / "mixture.yaml"), cores=1)


def test_other_limits_and_impossible_ones_are_refused(corpus, run):
    run(corpus, max_bad="1", min_tokens=31)
    with pytest.raises(InputError, match="lengths"):
        run(corpus, max_bad="1", min_tokens=20)
    with pytest.raises(InputError, match="--min-tokens 9 is more than --max-tokens 8: swap them"):
        run(corpus, out="never", min_tokens=9, max_tokens=8)
    with pytest.raises(InputError, match="no document has as many tokens"):
        run(corpus, out="never", max_bad="1", min_tokens=10**6)


@pytest.mark.parametrize("choice", [{"min_tokens": 60}, {"hold_out": "2%"}])
def test_a_shard_may_have_no_document_that_fits(tmp_path, run, tokenizer, choice):
    """Files of one length each, a shard each: some shards are empty, and everything reads the folder."""
    (tmp_path / "raw").mkdir()
    texts = [[f"text {i} {j} " + "word " * (200 if i % 3 == 1 else 2) for j in range(10)] for i in range(8)]
    for number, some in enumerate(texts):
        content = "".join(json.dumps({"text": text}) + "\n" for text in some)
        (tmp_path / f"raw/{number}.jsonl").write_text(content)
    found = run(tmp_path / "raw", shard_size="1B", **choice)
    assert {0} < {made.manifest.documents for made in found.shards}
    held = texts_of(tmp_path / "out", tokenizer)
    wanted = {text.strip() for some in texts for text in some if "hold_out" in choice or len(text) > 100}
    assert {text.strip() for text in held} == wanted
    assert not run(tmp_path / "raw", shard_size="1B", **choice).written
    assert not any(verdict.problems for verdict in verify([str(tmp_path / "out")], cores=1, quiet=True))
    shards = {"shards": "out/train", "validation": "out/validation"} if "hold_out" in choice else {"shards": "out"}
    (tmp_path / "mixture.yaml").write_text(json.dumps({"sources": [{"name": "all", **shards}]}))
    assert verify_mixture(Mixture.read(tmp_path / "mixture.yaml"), 16, cores=1)


@pytest.mark.parametrize("choice", [{"hold_out": "1%"}, {"min_tokens": 41}])
def test_max_bad_is_a_fraction_of_all_records(corpus, run, choice):
    """Two of 302 are bad, but more than 1% of those that are chosen."""
    with open(corpus, "a") as file:
        file.write("{}\n")
    assert run(corpus, max_bad="1%", **choice).documents
