"""Raw files and shards in a real S3 server on this machine, over connections that break."""

import contextlib
import fcntl
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data_tools import object_storage
from megatron_blackmamba.data_tools.inspection import read_documents
from megatron_blackmamba.data_tools.object_storage import RemoteFolder
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize
from megatron_blackmamba.data_tools.verification import verify
from megatron_blackmamba.formats import remote
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.mixture import IncompleteError, Mixture
from megatron_blackmamba.formats.remote import RemoteError, cached
from megatron_blackmamba.formats.shards import ShardError
from megatron_blackmamba.formats.step_records import read_metrics
from megatron_blackmamba.runtime.ports import free_port
from tests.thorough import thorough

pytest.importorskip("moto", reason="moto is not installed: pip install megatron-blackmamba[dev]")
pytest.importorskip("s3fs", reason="s3fs is not installed: pip install megatron-blackmamba[s3]")
pytestmark = pytest.mark.xdist_group("s3")

TEXTS = [f"document {i}: " + "import json and read the text " * (i % 9) for i in range(60)]


class Cutter:
    """A proxy before the server that can break connections after some bytes of the answer, or hold answers back."""

    def __init__(self, server_port):
        self.server_port, self.cuts, self.after = server_port, 0, 0
        self.pause, self.waiting = threading.Event(), threading.Event()
        self.pause.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.server_port))
            threading.Thread(target=self.pass_on, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self.pass_on, args=(server, client, True), daemon=True).start()

    def pass_on(self, source, target, answer):
        sent = 0
        try:
            while data := source.recv(1 << 16):
                if answer and not self.pause.is_set():
                    self.waiting.set()
                    self.pause.wait()
                target.sendall(data)
                sent += len(data)
                if answer and self.cuts and sent > self.after:
                    self.cuts -= 1
                    break
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server():
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port), "-H", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            assert process.poll() is None
            time.sleep(0.05)
    yield Cutter(port)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def s3(server):
    """A bucket, through the proxy; named as users name it, by the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        import s3fs

        files = s3fs.S3FileSystem()
        files.mkdir("bucket")
        yield files


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("BLACKMAMBA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def raw(s3, tmp_path_factory):
    """Raw files in three formats, here and in the bucket."""
    folder = tmp_path_factory.mktemp("raw") / "web"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(lines[:20]))
    with gzip.GzipFile(folder / "b.jsonl.gz", "wb", mtime=0) as file:
        file.write("".join(lines[20:40]).encode())
    pq.write_table(pa.table({"text": TEXTS[40:]}), folder / "c.parquet")
    (folder / "notes.pdf").write_bytes(b"no text")
    s3.put(str(folder), "bucket/raw/", recursive=True)
    return folder


def options(tokenizer_file, **more):
    return TokenizeOptions(
        **{"tokenizer": str(tokenizer_file), "workers": 1, "quiet": True, "shard_size": "1KB", **more}
    )


@pytest.fixture
def shards(s3, raw, tokenizer_file, tmp_path):
    """Shards made here, and from the bucket into the bucket."""
    here = tokenize([raw], tmp_path / "here", options(tokenizer_file))
    there = tokenize(["s3://bucket/raw/web"], "s3://bucket/tokens/web", options(tokenizer_file, overwrite=True))
    return here, there


def test_shards_from_s3_to_s3_equal_local_ones(s3, shards, tmp_path, tokenizer_file):
    here, there = shards
    assert [made.manifest.bin_sha256 for made in there.shards] == [made.manifest.bin_sha256 for made in here.shards]
    assert [str(path) for path in there.not_taken] == ["s3://bucket/raw/web/notes.pdf"]
    for path in (tmp_path / "here").iterdir():
        if path.name.endswith((".bin", ".idx", "tokenizer.json")):
            assert s3.cat_file(f"bucket/tokens/web/{path.name}") == path.read_bytes()
    again = tokenize(["s3://bucket/raw/web"], "s3://bucket/tokens/web", options(tokenizer_file))
    assert not again.written and len(again.shards) == 3
    s3.rm_file("bucket/tokens/web/shard_00002.bin")
    repaired = tokenize(["s3://bucket/raw/web"], "s3://bucket/tokens/web", options(tokenizer_file))
    assert [manifest.shard for manifest in repaired.written] == [2]
    assert not list((tmp_path / "cache").rglob("*.bin"))


@pytest.mark.parametrize("name, pieces", [("a.jsonl", 1), ("c.parquet", 2)])
def test_object_replaced_while_it_is_tokenized_is_noticed(s3, raw, tokenizer_file, tmp_path, monkeypatch, name, pieces):
    content, url = (raw / name).read_bytes(), f"s3://bucket/replaced/{name}"
    other, read, whole = content.replace(b"document", b"DOCUMENT"), [], remote.RemoteFile.readinto
    assert other != content
    s3.pipe_file(f"bucket/replaced/{name}", content)

    def readinto(file, buffer):
        read.append(whole(file, buffer))
        if len(read) == pieces:
            s3.pipe_file(f"bucket/replaced/{name}", other)
        return read[-1]

    with monkeypatch.context() as patch:
        patch.setattr(remote.RemoteFile, "readinto", readinto)
        with pytest.raises(InputError, match=f"{url}: changed while it was read"):
            tokenize([url], tmp_path / "out", options(tokenizer_file))
    assert not list((tmp_path / "out").glob("shard_*"))
    assert len(tokenize([url], tmp_path / "out", options(tokenizer_file)).written) == 1


@thorough
def test_training_from_s3_matches_training_from_disk(shards, tmp_path):
    losses = []
    for number, (root, inside) in enumerate([(tmp_path, "here"), ("s3://bucket", "tokens/web")]):
        (tmp_path / f"{number}.yaml").write_text(f"root: {root}\nsources: [{{name: web, shards: {inside}}}]\n")
        overrides = [f"folder={tmp_path}", f"name=run{number}", "data.kind=mixture", "training.tokens=320"]
        overrides += [f"data.mixture={tmp_path}/{number}.yaml", "data.sequence_length=16", "model.vocab_size=640"]
        overrides += ["training.global_batch=4", "training.micro_batch=4", "logging.tensorboard=false"]
        command = [sys.executable, "-m", "megatron_blackmamba", "train", "tiny", *overrides]
        subprocess.run(command, check=True, capture_output=True)
        losses.append([record["loss"] for record in read_metrics(tmp_path / f"run{number}/metrics.jsonl")])
    assert losses[0] == losses[1] and len(losses[0]) == 5


def test_cut_connections_are_resumed(s3, server, shards, tmp_path):
    big = os.urandom(3 << 20)
    s3.pipe_file("bucket/big", big)
    server.cuts, server.after = 4, 300_000
    assert remote.open_remote("s3://bucket/big").read() == big
    assert server.cuts == 0
    server.cuts = 2
    remote.download("s3://bucket/big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == big
    server.cuts, server.after = 1, 0
    remote.upload(tmp_path / "big", "s3://bucket/copy")
    assert s3.cat_file("bucket/copy") == big
    server.cuts = 0


class Stop(Exception):
    """Ends a download."""


def download(url, target, monkeypatch, after):
    """Download in pieces of 1 MiB, call `after` when one has been read, and return the number of reads."""
    whole, pieces = remote.RemoteFile.readinto, []

    def readinto(file, buffer):
        pieces.append(len(buffer))
        if len(pieces) == 2:
            after()
        return whole(file, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "_PIECE", 1 << 20)
        patch.setattr(remote.RemoteFile, "readinto", readinto)
        remote.download(url, target)
    return len(pieces)


def test_part_is_continued_unless_the_object_was_replaced(s3, tmp_path, monkeypatch):
    def stop():
        raise Stop

    one, two = os.urandom(3 << 20), os.urandom(3 << 20)
    url, target = "s3://bucket/replaced", tmp_path / "copy"
    s3.pipe_file("bucket/replaced", one)
    with pytest.raises(Stop):
        download(url, target, monkeypatch, stop)
    assert [path.stat().st_size for path in tmp_path.glob(".copy.*.part")] == [1 << 20]
    assert download(url, target, monkeypatch, lambda: None) == 3  # two pieces and the end
    assert target.read_bytes() == one
    with pytest.raises(Stop):
        download(url, target, monkeypatch, stop)
    s3.pipe_file("bucket/replaced", two)  # of the same size
    remote.download(url, target)
    assert target.read_bytes() == two
    download(url, target, monkeypatch, lambda: s3.pipe_file("bucket/replaced", one))  # while it is read
    assert target.read_bytes() == one
    assert not list(tmp_path.glob(".copy*"))


def test_a_full_cache_disk_is_named(s3, tmp_path):
    s3.pipe_file("bucket/big", bytes(3 << 20))
    program = "import resource, sys; from megatron_blackmamba.formats import remote; from pathlib import Path\n"
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    program += "remote.download('s3://bucket/big', Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "copy")], capture_output=True, text=True)
    message = f"RemoteError: {tmp_path}/copy: File too large. This is the local copy of s3://bucket/big: make space"
    assert message in done.stderr


def test_array_tasks_keep_each_others_shards(s3, raw, tokenizer_file, monkeypatch):
    """The second task of --array starts while the first uploads."""
    url, upload, manifests = "s3://bucket/tokens/array", object_storage.upload, []

    def upload_while_another_task_starts(local, target):
        if local.suffix == ".idx":
            manifests.append(len(list(local.parent.glob("*.manifest.json"))))
            RemoteFolder.open(url)
        upload(local, target)

    monkeypatch.setattr(object_storage, "upload", upload_while_another_task_starts)
    tokenize(["s3://bucket/raw/web"], url, options(tokenizer_file))
    assert len(manifests) == len(s3.glob("bucket/tokens/array/*.manifest.json")) == 3
    assert not list((cached(url) / ".making").glob("*.bin"))


def test_array_tasks_may_start_together(s3, shards, tokenizer_file, monkeypatch):
    """The second task of --array waits while the first reads manifests, and finds them all in place."""
    url, download, local = "s3://bucket/tokens/web", object_storage.download, []
    folder = RemoteFolder.open(url).folder

    def download_while_another_task_looks(source, target):
        local.append(target.exists())
        with open(folder.with_name(f".{folder.name}.lock"), "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        download(source, target)

    monkeypatch.setattr(object_storage, "download", download_while_another_task_looks)
    RemoteFolder.open(url)
    assert local == [True] * 4


def test_a_killed_overwrite_leaves_no_manifest(s3, shards, tokenizer_file, monkeypatch):
    """The manifest of the old shard would call the new tokens complete."""
    upload = object_storage.upload

    def upload_until_killed(local, target):
        if local.suffix == ".idx":
            raise KeyboardInterrupt
        upload(local, target)

    monkeypatch.setattr(object_storage, "upload", upload_until_killed)
    with pytest.raises(KeyboardInterrupt):
        tokenize(["s3://bucket/raw/web"], "s3://bucket/tokens/web", options(tokenizer_file, overwrite=True, seed=1))
    monkeypatch.undo()
    assert len(s3.glob("bucket/tokens/web/*.manifest.json")) == 2


def test_another_tokenizer_in_the_bucket_replaces_the_copy(s3, raw, shards, tokenizer_file, tmp_path):
    copy = find_shards("s3://bucket/tokens/web")[0].prefix.parent / "tokenizer.json"
    other = tmp_path / "other.json"
    other.write_text(copy.read_text() + "\n")  # the same tokens, but another file
    tokenize(["s3://bucket/raw/web"], "s3://bucket/tokens/web", options(other, overwrite=True))
    assert not any(verdict.problems for verdict in verify(["s3://bucket/tokens/web"]))
    assert copy.read_text() == other.read_text()


@thorough
def test_a_connection_that_always_breaks_is_named(s3, server):
    s3.pipe_file("bucket/big", bytes(3 << 20))
    server.cuts, server.after = 10**6, 300_000
    try:
        with pytest.raises(RemoteError, match="s3://bucket/big: failed 6 times"):
            remote.open_remote("s3://bucket/big").read()
    finally:
        server.cuts = 0


def test_local_copies_follow_the_bucket(s3, shards, tmp_path):
    (first, second, _) = find_shards("s3://bucket/tokens/web")
    assert first.prefix == tmp_path / "cache/s3/bucket/tokens/web/shard_00001"
    assert (first.prefix.parent / "tokenizer.json").exists()
    before = first.bin_path.stat().st_mtime_ns
    for suffix in (".bin", ".idx", ".manifest.json"):  # another shard in its place
        s3.copy(f"bucket/tokens/web/shard_00001{suffix}", f"bucket/tokens/web/shard_00002{suffix}")
    (again, changed, _) = find_shards("s3://bucket/tokens/web")
    assert again.bin_path.stat().st_mtime_ns == before
    assert changed.manifest.bin_sha256 == first.manifest.bin_sha256 != second.manifest.bin_sha256
    assert changed.bin_path.read_bytes() == first.bin_path.read_bytes()
    s3.pipe_file("bucket/tokens/web/shard_00003.bin", b"no tokens")
    (again.prefix.parent / "shard_00003.bin").unlink()
    with pytest.raises(RemoteError, match=r"shard_00003.bin: its sha256 is not that of its manifest"):
        find_shards("s3://bucket/tokens/web")


def test_damaged_local_copies_are_fetched_again(s3, shards, monkeypatch):
    (shard, *_) = find_shards("s3://bucket/tokens/web")
    whole = {path: path.read_bytes() for path in (shard.bin_path, shard.idx_path)}
    for path, content in whole.items():
        path.write_bytes(content[:-2])
        find_shards("s3://bucket/tokens/web")
        assert path.read_bytes() == content
    shard.bin_path.unlink()
    version = remote.RemoteFile("s3://bucket/tokens/web/shard_00001.bin").version
    part = shard.bin_path.with_name(f".{shard.bin_path.name}.{version}.part")
    part.write_bytes(bytes(len(whole[shard.bin_path]) // 2))  # zeros, as after a loss of power
    find_shards("s3://bucket/tokens/web")
    assert shard.bin_path.read_bytes() == whole[shard.bin_path] and not part.exists()


def test_a_cache_that_cannot_be_written_is_named(s3, shards, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLACKMAMBA_CACHE", str(tmp_path / "file"))
    with pytest.raises(RemoteError, match=r"file/s3/bucket/tokens/web: cannot hold local copies: Not a directory"):
        find_shards("s3://bucket/tokens/web")


FETCH = "import sys; from megatron_blackmamba.formats.find_shards import find_shards; find_shards(sys.argv[1])"


def test_a_killed_fetch_leaves_the_cache_to_another(s3, server, shards, tmp_path):
    """Two processes share a cache; the first waits for an answer, and is killed, while the second waits for it."""
    cache = tmp_path / "cache/s3/bucket/tokens/web"
    command = [sys.executable, "-c", FETCH, "s3://bucket/tokens/web"]
    manifests = len(list(cache.glob("*.manifest.json")))
    server.pause.clear()
    first = subprocess.Popen(command)
    try:
        assert server.waiting.wait(60)
        second = subprocess.Popen(command)
    finally:
        first.kill()
        first.wait()
        server.pause.set()
    assert second.wait(60) == 0 and manifests == 0
    assert [shard.bin_path.read_bytes() for shard in find_shards(str(cache))] == [
        (tmp_path / f"here/shard_{number:05d}.bin").read_bytes() for number in (1, 2, 3)
    ]


def test_missing_objects_are_named(s3, shards, tmp_path):
    s3.rm(["bucket/tokens/web/shard_00002.manifest.json"])
    (tmp_path / "mix.yaml").write_text("root: s3://bucket/tokens\nsources: [{name: web, shards: web}]\n")
    mixture = Mixture.read(tmp_path / "mix.yaml")
    with pytest.raises(IncompleteError, match=r"lacks shard_00002 of 3"):
        mixture.open_shards(mixture.sources[0])
    (tmp_path / "mix.yaml").write_text("root: s3://bucket\nsources: [{name: web, shards: 'tokens/web/shard_*'}]\n")
    mixture = Mixture.read(tmp_path / "mix.yaml")
    assert len(mixture.open_shards(mixture.sources[0])[0]) == 2
    with pytest.raises(RemoteError, match=r"s3://bucket/none\.jsonl: no such object"):
        tokenize(["s3://bucket/none.jsonl"], tmp_path / "out", TokenizeOptions(tokenizer="x"))
    with pytest.raises(ShardError, match="s3://bucket/nothing: no shard in this folder"):
        find_shards("s3://bucket/nothing")


def test_a_datatrove_pipeline_writes_shards_to_s3(s3, raw, tokenizer_file, tmp_path, monkeypatch):
    """The tasks are real processes of datatrove's executor."""
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader

    from megatron_blackmamba.data_tools.datatrove_step import ShardWriter

    monkeypatch.chdir(tmp_path)
    for number in range(2):
        (tmp_path / f"in{number}.jsonl").write_bytes((raw / "a.jsonl").read_bytes())
    steps = [JsonlReader(str(tmp_path), glob_pattern="in*"), ShardWriter("s3://bucket/trove", str(tokenizer_file))]
    LocalPipelineExecutor(steps, tasks=2, workers=2, logging_dir=str(tmp_path / "logs")).run()
    assert [shard.manifest.documents for shard in find_shards("s3://bucket/trove")] == [20, 20]
    assert not any(verdict.problems for verdict in verify(["s3://bucket/trove"]))
    assert not (tmp_path / "s3:").exists()


def test_equal_names_below_two_urls_are_told_apart(s3, tmp_path, tokenizer_file):
    for folder in ("web", "code"):
        lines = [json.dumps({"text": f"{folder} {i}" if i != 2 or folder == "web" else ""}) for i in range(6)]
        s3.pipe_file(f"bucket/twins/{folder}/0.jsonl", "\n".join(lines).encode())
    urls = ["s3://bucket/twins/web", "s3://bucket/twins/code/0.jsonl"]
    tokenize(urls, tmp_path / "out", options(tokenizer_file, max_bad="1"))
    assert {
        (document.text, str(document.origin)) for document in read_documents([str(tmp_path / "out")], count=20)
    } == {
        (f"{folder} {i}", f"{folder}/0.jsonl, record {i + 1}")
        for folder in ("web", "code")
        for i in range(6)
        if i != 2 or folder == "web"
    }


def test_names_in_s3_are_not_patterns(s3, raw, tmp_path, tokenizer_file):
    for name in ("a[1].jsonl", "a?.jsonl", "a1.jsonl"):
        s3.pipe_file(
            f"bucket/odd[1]/in/{name}", (raw / "a.jsonl").read_bytes() + name.encode().join([b'{"text": "', b'"}'])
        )
    s3.pipe_file("bucket/odd1/in/other.jsonl", b'{"text": "another folder"}')
    made = tokenize(["s3://bucket/odd[1]/in"], "s3://bucket/odd[1]/out", options(tokenizer_file))
    assert [source.name for shard in made.shards for source in shard.manifest.sources] == [
        "a1.jsonl", "a?.jsonl", "a[1].jsonl"
    ]  # fmt: skip
    assert not tokenize(["s3://bucket/odd[1]/in"], "s3://bucket/odd[1]/out", options(tokenizer_file)).written
    one = tokenize(["s3://bucket/odd[1]/in/a?.jsonl"], tmp_path / "one", options(tokenizer_file))
    assert [source.name for source in one.shards[0].manifest.sources] == ["a?.jsonl"]
    assert len(find_shards("s3://bucket/odd[1]/out")) == len(find_shards("s3://bucket/odd[1]/out/shard_*")) == 3
    fewer = options(tokenizer_file, overwrite=True, match="a1*")
    tokenize(["s3://bucket/odd[1]/in"], "s3://bucket/odd[1]/out", fewer)
    assert len(find_shards("s3://bucket/odd[1]/out")) == 1


def test_finished_shards_in_s3_are_not_called_verified(shards, tokenizer_file):
    command = ["data", "tokenize", "s3://bucket/raw/web", "s3://bucket/tokens/web", "-t", str(tokenizer_file)]
    said = CliRunner().invoke(app, [*command, "--shard-size", "1KB", "--workers", "1"]).stdout
    assert "already complete, of the right sizes (`blackmamba data verify` reads them): 3" in said


def test_local_shards_are_no_copies_of_a_url(run, write_jsonl, tmp_path):
    """Copies that are not whole are removed, so no shard of the user may be taken for one."""
    run(write_jsonl("a.jsonl", TEXTS))
    os.truncate(tmp_path / "out/shard_00001.bin", 2)
    files = sorted((tmp_path / "out").iterdir())
    with pytest.raises(RemoteError, match=r"not in object storage\. Use s3://, gs:// or hf://, or a local path"):
        find_shards(f"file://{tmp_path}/out")
    assert sorted((tmp_path / "out").iterdir()) == files
