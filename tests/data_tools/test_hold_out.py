"""A split by hash: every document on one side, near-copies on the same one, and every document traceable."""

import json
from collections import Counter

import numpy as np
import pytest

from megatron_blackmamba.data_tools.hold_out import HoldOut, hold_out_of, normalized, packed
from megatron_blackmamba.data_tools.mixture import verify_mixture
from megatron_blackmamba.data_tools.provenance import origin, places_of
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.verification import verify
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from megatron_blackmamba.formats.shards import SourceFile

TEXTS = [f"document {i} of the corpus, chapter {i * 7919}" for i in range(400)]
COPIES = [text.upper().replace(",", " -\n") for text in TEXTS]


def texts_of(folder, tokenizer):
    return [
        tokenizer.decode(shard.document(number)[:-1])
        for shard in find_shards(str(folder))
        for number in range(shard.manifest.documents)
    ]


@pytest.fixture
def corpus(tmp_path):
    """Write two files, the second with near-copies of the first, a blank line and a text without a token."""
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    copies = [json.dumps({"text": text}) + "\n" for text in COPIES]
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join([*lines[:100], "\n", '{"text": ""}\n', *lines[100:]]))
    (folder / "b.jsonl").write_text("".join(copies))
    return folder


def test_every_document_is_on_one_side(corpus, tmp_path, run, tokenizer):
    summary = run(corpus, hold_out="10%", max_bad="10", shard_size="1KB")
    sides = {side: texts_of(tmp_path / "out" / side, tokenizer) for side in ("train", "validation")}
    assert Counter(sides["train"] + sides["validation"]) == Counter(TEXTS + COPIES)
    held_out = {normalized(text) for text in sides["validation"]}
    assert held_out.isdisjoint(map(normalized, sides["train"])) and 20 < len(held_out) < 60
    assert summary.documents == len(TEXTS + COPIES)
    again = run(corpus, hold_out="10%", max_bad="10", shard_size="1KB")
    assert not again.written
    assert not any(verdict.problems for verdict in verify([str(tmp_path / "out")], cores=1, quiet=True))


def test_both_sides_report_a_bad_record_once(corpus, tmp_path, run):
    with open(corpus / "a.jsonl", "a") as file:
        file.write("no JSON\n")
    (corpus / "c.jsonl").write_bytes((corpus / "a.jsonl").read_bytes())
    whole, split = (run(corpus, out=str(i), max_bad="10", **more) for i, more in enumerate(({}, {"hold_out": "50%"})))
    assert split.rejected == whole.rejected == {"blank": 2, "empty": 2, "invalid JSON": 2}
    assert split.copies == whole.copies == [("c.jsonl", "a.jsonl")]


def test_documents_of_both_sides_are_traced(corpus, tmp_path, run, tokenizer):
    run(corpus, hold_out="0.1", max_bad="10")
    records = {name: (corpus / name).read_text().splitlines() for name in ("a.jsonl", "b.jsonl")}
    for shard in find_shards(str(tmp_path / "out")):
        manifest = shard.manifest
        for place in range(manifest.documents):
            found = origin(manifest, place)
            assert found.record is not None
            text = json.loads(records[found.source][found.record - 1])["text"]
            assert tokenizer.decode(shard.document(place)[:-1]) == text
            (source,) = (source for source in manifest.sources if source.name == found.source)
            assert places_of(manifest, source, found.record) == [place]
        taken = sum(len(places_of(manifest, source, r + 1)) for source in manifest.sources for r in range(410))
        assert taken == manifest.documents


def test_both_sides_mix_and_other_splits_leak(corpus, tmp_path, run):
    run(corpus, hold_out="10%", max_bad="10")
    run(corpus, out="other", hold_out="20%", max_bad="10")

    def check(training, validation):
        path = tmp_path / "mixture.yaml"
        path.write_text(f"sources: [{{name: a, shards: {training}, validation: {validation}}}]")
        return verify_mixture(Mixture.read(path))

    assert check("out/train", "out/validation")
    assert check("other/train", "out/validation")  # the larger share holds out the same documents, and more
    with pytest.raises(MixtureError, match=r"trains on .*a\.jsonl, which .* holds out for validation"):
        check("out/train", "other/validation")
    with pytest.raises(MixtureError, match=r"trains on .*a\.jsonl, which .* holds out for validation"):
        check("out/validation", "out/train")


def test_clusters_keep_edited_copies_together(tmp_path, run, tokenizer):
    edited = [text.replace("of the corpus", "in this corpus") for text in TEXTS]
    (tmp_path / "raw").mkdir()
    for name, texts in (("a.jsonl", TEXTS), ("b.jsonl", edited)):
        (tmp_path / "raw" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = [f"b.jsonl\t{i}\tnear-duplicate\ta.jsonl:{i}\tsimilarity 0.8\n" for i in range(1, 401)]
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean/removed.tsv").write_text("file\trecord\treason\tresembles\tdetail\n" + "".join(rows))
    run(tmp_path / "raw", hold_out="25%", clusters=str(tmp_path / "clean"))
    for side in ("train", "validation"):
        found = texts_of(tmp_path / "out" / side, tokenizer)
        plain = [text.replace("in this corpus", "of the corpus") for text in found]
        assert {*Counter(plain).values()} == {2}
    short = [text for i in range(200) for text in (f"yes {i}", f"Yes, {i}!")]
    (tmp_path / "short").mkdir()
    (tmp_path / "short/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in short))
    (tmp_path / "clean/removed.tsv").write_text("file\trecord\treason\tresembles\tdetail\n")
    run(tmp_path / "short", out="fourth", hold_out="25%", clusters=str(tmp_path / "clean"))
    train, held_out = (
        {*map(normalized, texts_of(tmp_path / "fourth" / s, tokenizer))} for s in ("train", "validation")
    )
    assert train and held_out and train.isdisjoint(held_out)
    (tmp_path / "clean/removed.tsv").write_text("x.jsonl\t1\tnear-duplicate\tx.jsonl:2\t\n")
    with pytest.raises(InputError, match=r"lists other files than the inputs, such as x\.jsonl"):
        run(tmp_path / "raw", out="third", hold_out="25%", clusters=str(tmp_path / "clean"))


def test_wrong_splits_are_refused(corpus, tmp_path, run):
    for share in ("0", "1", "half", "100%"):
        with pytest.raises(InputError, match=f"--hold-out {share}: give a share of the documents, such as 1%"):
            run(corpus, hold_out=share)
    with pytest.raises(InputError, match="--clusters is for --hold-out"):
        run(corpus, clusters="clean")
    with pytest.raises(InputError, match=r"removed\.tsv: no such file"):
        run(corpus, hold_out="1%", clusters="absent")
    with pytest.raises(InputError, match="--hold-out reads the inputs twice"):
        run("-", hold_out="1%")
    with pytest.raises(InputError, match="validation: the corpus is too small for this --hold-out"):
        run(corpus, hold_out="0.0001", max_bad="10")


def test_share_does_not_move_documents_back():
    small, large = (HoldOut(share, "validation") for share in (0.01, 0.1))
    texts = [f"text {i}" for i in range(20_000)]
    one, ten = small.takes("f", range(1, 20_001), texts), large.takes("f", range(1, 20_001), texts)
    assert not (one & ~ten).any() and abs(one.mean() - 0.01) < 0.004 and abs(ten.mean() - 0.1) < 0.01
    assert normalized("Ｈello,  World! ") == "hello world" and normalized("...") == "..."
    assert hold_out_of("5%", None, "train", {"f"}).share == 0.05


def test_ascii_is_normalized_as_other_text():
    for character in map(chr, range(128)):
        text = f"{character}A_b{character}{character}7 {character}"
        assert normalized(text) == normalized(f"{text} é").removesuffix(" é")


def test_masks_survive_a_manifest():
    mask = np.array([True, False, False, True, True] * 3)
    source = SourceFile(name="a", sha256="", bytes=1, records=15, documents=9, side=packed(mask))
    assert (SourceFile.model_validate_json(source.model_dump_json()).mask == mask).all()
