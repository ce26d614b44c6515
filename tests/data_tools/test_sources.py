import io
import os
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.sources import (
    PRESETS,
    Source,
    find_sources,
    format_of,
    parse_array,
    parse_size,
    plan_shards,
)
from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, plan


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "c/part-10.jsonl.zst",
        "c/part-9.jsonl.zst",
        "c/a/more.txt",
        "c/README.md",
        "c/.cache/x.jsonl",
        "d/b.parquet",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))
    return tmp_path


def names(found):
    return [source.name for source in found.sources]


def test_folder_files_are_sorted_and_others_reported(corpus):
    found = find_sources(["c"])
    assert names(found) == ["a/more.txt", "part-9.jsonl.zst", "part-10.jsonl.zst"]
    assert [source.format for source in found.sources] == ["text", "jsonl", "jsonl"]
    assert [path.name for path in found.ignored] == ["README.md"]


def test_files_keep_their_order_and_common_folder_names(corpus):
    assert names(find_sources(["d/b.parquet", "c/part-9.jsonl.zst"])) == ["d/b.parquet", "c/part-9.jsonl.zst"]
    assert names(find_sources(["c/part-9.jsonl.zst"])) == ["part-9.jsonl.zst"]


def test_a_pattern_or_a_format_chooses_within_folders(corpus):
    assert names(find_sources(["c"], match="*.md|*.txt", format="text")) == ["README.md", "a/more.txt"]
    assert names(find_sources(["c"], format="text")) == ["a/more.txt"]


@pytest.mark.parametrize(
    "inputs, message",
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["c/README.md"], "cannot tell its format by its name: add --format"),
        (["c", "c/part-9.jsonl.zst"], "named twice"),
        (["-", "c"], "cannot be combined with files"),
        ([], "no input"),
    ],
)
def test_inputs_that_cannot_be_are_named(corpus, inputs, message):
    with pytest.raises(InputError, match=message):
        find_sources(inputs)


def test_folder_without_input_counts_the_files_seen(corpus):
    with pytest.raises(InputError, match="c: no input in this folder among its 4 files"):
        find_sources(["c"], format="parquet")
    with pytest.raises(InputError, match=r"that matches \*\.tsv"):
        find_sources(["c"], match="*.tsv")


def test_small_files_share_a_shard():
    sources = [Source(str(size), str(size), "jsonl", size, 0) for size in (3, 3, 3, 50, 1, 12, 2)]
    sizes = [[source.bytes for source in shard] for shard in plan_shards(sources, 10)]
    assert sizes == [[3, 3, 3], [50], [1], [12], [2]]


PUBLISHED = {
    "pile": ("train/00.jsonl.zst", "val.jsonl.zst", "test.jsonl.zst"),
    "slimpajama": ("train/chunk1/example_train_0.jsonl.zst", "validation/chunk1/example_holdout_0.jsonl.zst"),
    "starcoder": ("python/train-00000-of-00059.parquet",),
    "pes2o": ("data/v2/train-00000-of-00010.json.gz", "data/v2/validation-00000-of-00002.json.gz"),
    "proofpile": ("arxiv/train/a.jsonl.zst", "arxiv/validation/a.jsonl.zst", "arxiv/test/a.jsonl.zst"),
    "pg19": ("train/10000.txt", "validation/1022.txt", "test/10146.txt"),
    "fineweb": ("data/CC-MAIN-2024-10/train-00000-of-00020.parquet",),
    "dclm": ("global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst",),
    "commonpile": ("wikimedia/wikimedia-0000.json.gz",),
    "nemotron-cc": ("High-Quality/part_000000.parquet",),
    "finemath": ("finemath-3plus/train-00000-of-00128.parquet",),
}


def test_help_names_every_preset():
    (preset,) = get_args(get_type_hints(TokenizeOptions, include_extras=True)["preset"])[1:]
    assert set(re.findall(r"[\w-]+", preset.help)) >= PRESETS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_take_training_files_only(tmp_path, name):
    assert PUBLISHED.keys() == PRESETS.keys()
    training, *held_out = PUBLISHED[name]
    for file in (*PUBLISHED[name], "metadata.csv"):
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert format_of(path) in (PRESETS[name].format, None)

    def taken(**options):
        jobs = plan([str(tmp_path / name)], tmp_path / "out", TokenizeOptions(preset=name, **options)).jobs
        return [source.name for job in jobs for source in job.sources]

    assert taken() == [training]
    assert sorted(taken(split="all")) == sorted(PUBLISHED[name])
    if held_out:
        assert taken(split="validation") == held_out[:1]
    else:
        with pytest.raises(InputError, match="belongs to the validation split by its path: add --split train"):
            taken(split="validation")


def test_folder_of_another_split_names_the_flag(corpus):
    (corpus / "c").rename(corpus / "validation")
    with pytest.raises(InputError, match="belongs to the train split by its path: add --split validation"):
        find_sources(["validation"], split="train")
    assert names(find_sources(["validation"], split="validation"))[0] == "a/more.txt"
    assert names(find_sources(["validation/a/more.txt"], split="train")) == ["more.txt"]  # named by itself


def test_excluded_files_are_ignored_and_listed(corpus):
    found = find_sources(["c"], exclude=["a/*", "*-9.*"])
    assert names(found) == ["part-10.jsonl.zst"]
    assert [path.name for path in found.ignored] == ["README.md", "more.txt", "part-9.jsonl.zst"]


@pytest.mark.parametrize("text, size", [("4GB", 4 * 10**9), ("1.5kb", 1500), ("2MiB", 2**21), ("77", 77)])
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4 apples", "-3", "0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="not a size"):
        parse_size(text)


def test_an_array_counts_from_zero_and_says_so():
    assert parse_array("0/8") == (0, 8) and parse_array("7/8") == (7, 8)
    with pytest.raises(InputError, match=r"counts from 0.*--array=0-7"):
        parse_array("8/8")
    with pytest.raises(InputError, match="INDEX/COUNT"):
        parse_array("3")


def test_nothing_behind_links_is_passed_over(corpus):
    (corpus / "far").mkdir()
    (corpus / "far/z.jsonl").write_bytes(b"x")
    (corpus / "c/linked").symlink_to(corpus / "far")
    (corpus / "c/loop").symlink_to(corpus / "c")
    assert names(find_sources(["c"]))[1:3] == ["linked/z.jsonl", "part-9.jsonl.zst"]
    (corpus / "far/gone.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(InputError, match=r"gone\.jsonl: a link to nothing \(nowhere\.jsonl\)"):
        find_sources(["c"])


def test_unreadable_folder_is_an_error(corpus, monkeypatch):
    real = os.scandir

    def scandir(path):
        if str(path).endswith("a"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError):
        find_sources(["c"])


def test_the_folder_for_the_shards_is_no_input(corpus):
    (corpus / "c/tokens").mkdir()
    (corpus / "c/tokens/tokenizer.json").write_text("{}")
    assert names(find_sources(["c"], apart="c/tokens")) == names(find_sources(["c"], apart="elsewhere"))[:3]
    assert names(find_sources(["c/a"], apart="c")) == ["more.txt"]  # the shards may lie above
    with pytest.raises(InputError, match="is an input and the folder for the shards"):
        find_sources(["c"], apart="c")


def test_files_without_suffix_are_named_one_by_one(tmp_path):
    for name in ("page", "another"):
        (tmp_path / name).write_text("some text")
    with pytest.raises(InputError, match="Name the files one by one, with --format text"):
        find_sources([str(tmp_path)])
    assert names(find_sources([str(tmp_path / "page")], "text")) == ["page"]


def test_standard_input_without_records_is_refused(monkeypatch):
    ours, theirs = os.openpty()
    with open(theirs) as terminal, open(ours):
        monkeypatch.setattr("sys.stdin", terminal)
        with pytest.raises(InputError, match="is this terminal: pipe the records in"):
            find_sources(["-"])
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="is closed: pipe the records in"):
        find_sources(["-"])


def test_a_table_cannot_be_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(InputError, match="parquet cannot be read from standard input"):
        find_sources(["-"], "parquet")


def test_named_pipe_is_refused_for_standard_input(corpus):
    os.mkfifo("pipe.jsonl")
    with pytest.raises(InputError, match="Read a pipe as standard input"):
        find_sources(["pipe.jsonl"])


def test_non_utf8_file_name_is_escaped(corpus):
    path = os.fsdecode(b"bad\xff.jsonl")
    Path(path).write_bytes(b"x")
    assert names(find_sources([path])) == ["bad\\xff.jsonl"]


def test_file_names_with_odd_digits_are_sorted(corpus):
    for name in ("part1²3.jsonl", "part1¹.jsonl", "part٣.jsonl"):
        (corpus / "odd" / name).parent.mkdir(exist_ok=True)
        (corpus / "odd" / name).write_text("{}")
    assert len(find_sources([corpus / "odd"]).sources) == 3


def test_advised_match_reads_the_folder(tmp_path):
    for name in ("a.py", "b.py", "c.rst"):
        (tmp_path / name).write_text("text")
    with pytest.raises(InputError) as refused:
        find_sources([str(tmp_path)])
    assert "--match '*.py' --format text" in str(refused.value) and "also there: .rst" in str(refused.value)
    assert len(find_sources([str(tmp_path)], format="text", match="*.py").sources) == 2


@pytest.mark.parametrize("option", ["format", "split", "backend", "preset"])
def test_unknown_choice_is_refused_before_anything_is_read(option):
    with pytest.raises(InputError, match=f"--{option} json: choose "):
        plan(["missing.jsonl"], "out", TokenizeOptions(**{option: "json"}))
