"""Outputs of conversions on full disks, behind links, under two commands at once, and after kill -9."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from megatron_blackmamba import cli
from megatron_blackmamba.formats import leftovers
from megatron_blackmamba.interchange import convert, megatron
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.folder import new_folder
from tests.interchange.native_grid import write_model
from tests.reference import tiny, write_released
from tests.reference.canonical import canonical, write_tokenizer
from tests.small_disk import small_disk
from tests.thorough import thorough
from tests.waiting import Command, wait_until

DISK = 3 * 2**20
WRITES = """
import sys, time
from pathlib import Path
from megatron_blackmamba.formats.atomic import atomic_file
from megatron_blackmamba.interchange.folder import new_folder
with (new_folder if sys.argv[2] == "folder" else atomic_file)(Path(sys.argv[1])) as out:
    (out / "weights").write_bytes(b"half") if sys.argv[2] == "folder" else out.write(b"half")
    time.sleep(600)
"""
"""A process that is writing an output."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Models of 0.2 to 0.3 MB, in every form."""
    folder = tmp_path_factory.mktemp("sources")
    model = canonical(tiny("silu", vocab=300), tokenizer=write_tokenizer(folder / "tokenizer.json"))
    megatron.write(model, folder / "checkpoint")
    write_released(folder / "released", tiny("silu", vocab=300))
    write_model("mamba", folder / "native", vocab_size=300, hidden_size=32, num_hidden_layers=2)
    convert.to_checkpoint(native := convert.native.read(folder / "native"), folder / "mamba", verify=False)
    assert native.bytes < 0.3 * 2**20 < DISK / 3
    return folder


@pytest.fixture
def full_disk(tmp_path):
    """A file system, and a function that leaves it so many free bytes."""
    with small_disk(tmp_path / "disk", DISK) as disk:

        def leave(free: int) -> Path:
            (disk / "ballast").write_bytes(b"\0" * (DISK - free))
            return disk

        yield leave


COMMANDS = {
    "import hf": "import hf {}/native OUT --no-verify",
    "average": "average {}/checkpoint {}/checkpoint OUT",
    "import zyphra": "import zyphra {}/released OUT --to hf --no-verify",
    "export hf": "export hf {}/checkpoint OUT --check none",
    "export hf by two": "export hf {}/checkpoint OUT --check none --nproc 2",
    "export hf --native": "export hf {}/mamba OUT --native --check none",
    "export zyphra": "export zyphra {}/checkpoint OUT --no-verify",
    "export gguf": "export gguf {}/mamba OUT --tokenizer {}/tokenizer.json",
}


ALMOST_ALL = "almost all"
IN_EVERY_RUN = {("import hf", 4096), ("average", 64 * 1024), ("export hf", ALMOST_ALL), ("export gguf", 4096)}
FULL = [
    pytest.param(command, free, marks=[] if (command, free) in IN_EVERY_RUN else thorough)
    for command in COMMANDS
    for free in (4096, 64 * 1024, ALMOST_ALL)
]


@pytest.mark.parametrize(("command", "free"), FULL)
def test_full_disk_is_one_line_that_names_output(command, free, sources, full_disk, tmp_path, monkeypatch, capsys):
    if command == "export gguf":
        pytest.importorskip("gguf")

    def run(out):
        words = COMMANDS[command].replace("{}", str(sources)).replace("OUT", str(out)).split()
        monkeypatch.setattr(sys, "argv", ["blackmamba", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    if free == ALMOST_ALL:
        assert not run(tmp_path / "out")
        files = [tmp_path / "out"] if (tmp_path / "out").is_file() else [*(tmp_path / "out").iterdir()]
        free = sum(-(-file.stat().st_size // 4096) * 4096 for file in files) - 4096
    disk = full_disk(free)
    capsys.readouterr()
    assert run(disk / "out") == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blackmamba: ")]
    assert len(told) == 1 and told[0].startswith(f"blackmamba: {disk}/out"), told
    assert "No space left" in told[0] or "as on a full disk" in told[0]
    assert [path.name for path in disk.iterdir()] == ["ballast"]


def writing(out: Path, kind: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(out), kind])
    wait_until(lambda: any(out.parent.glob(f".{out.name}.*.tmp")))
    return process


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_next_call_removes_what_a_killed_one_left(kind, tmp_path):
    out, again = tmp_path / "out", lambda: [*leftovers.remove_abandoned(tmp_path / "out")]
    process = writing(out, kind)
    try:
        (left,) = tmp_path.iterdir()
        assert again() == [(left, process.pid)]
        with pytest.raises(InterchangeError, match=f"process {process.pid} is writing it"), new_folder(out):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie writes nothing
    (tmp_path / ".out2.").mkdir()
    assert again() == [] and [path.name for path in tmp_path.iterdir()] == [".out2."]
    process.wait()


def test_what_another_host_may_write_stays(tmp_path, capsys):
    mine = leftovers.beside(tmp_path / "out").name.split(".")
    gone = 4194304  # above the largest number of a process
    names = {
        "reused number": (".".join([*mine[:3], f"{os.getpid()}-1", *mine[4:]]), False),
        "dead": (".".join([*mine[:3], f"{gone}-1", *mine[4:]]), False),
        "interrupted": (".".join([*mine[:3], f"{gone}-2", *mine[4:], "77", "tmp"]), False),
        "another kernel": (".".join([*mine[:2], "00000000", f"{gone}-1", *mine[4:]]), True),
        "earlier version": (".out.0123abcd.tmp", True),
        "another output": (".out.x.0123abcd.tmp", True),
    }
    for name, _ in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").touch()
    with new_folder(tmp_path / "out"):
        pass
    assert {what: (tmp_path / name).exists() for what, (name, _) in names.items()} == {
        what: stays for what, (_, stays) in names.items()
    }
    assert capsys.readouterr().err.count("unfinished") == 2


def test_scratch_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "from megatron_blackmamba.formats.leftovers import scratch; import os\n"
    program += "with scratch('check') as folder: (folder / 'big').touch(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(tmp_path)})
    assert len([*tmp_path.iterdir()]) == 1
    with leftovers.scratch("check") as folder:
        assert [*tmp_path.iterdir()] == [folder]
    assert not [*tmp_path.iterdir()]


def test_a_replacement_killed_between_its_renames_is_undone(tmp_path, monkeypatch):
    def written(text, **how):
        with new_folder(tmp_path / "out", **how) as folder:
            for name in ("manifest.json", "model.yaml"):
                (folder / name).write_text(text)

    written("old")
    if not os.fork():
        monkeypatch.setattr("megatron_blackmamba.interchange.folder._rename", lambda *_: os._exit(9))
        written("lost", overwrite=True)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 9 and not (tmp_path / "out").exists()
    with pytest.raises(InterchangeError, match="already there"):
        written("other")
    assert (tmp_path / "out/model.yaml").read_text() == "old"
    written("new", overwrite=True)
    assert [*tmp_path.iterdir()] == [tmp_path / "out"] and (tmp_path / "out/model.yaml").read_text() == "new"


def test_two_writers_of_one_folder_end_in_words(tmp_path):
    with (
        pytest.raises(InterchangeError, match="another command has written it meanwhile"),
        new_folder(tmp_path / "out"),
    ):
        thread = threading.Thread(target=write, args=(tmp_path / "out",))
        thread.start()
        thread.join()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "first"]


def write(out: Path) -> None:
    with new_folder(out) as folder:
        (folder / "first").touch()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_an_empty_folder_is_filled(there, tmp_path):
    real, link = tmp_path / "disk" / "real", tmp_path / "out"
    (real if there else real.parent).mkdir(parents=True)
    link.symlink_to(real)
    write(link)
    assert link.is_symlink() and (real / "first").is_file()
    with pytest.raises(InterchangeError, match="already there"):
        write(link)


def test_a_mounted_folder_is_refused_at_once(full_disk):
    with pytest.raises(InterchangeError, match="a file system is mounted here"):
        disk = full_disk(2**20)
        (disk / "ballast").unlink()
        write(disk)


@thorough
@pytest.mark.parametrize("command", ["import hf", "average", "export hf", "export gguf"])
def test_commands_remove_what_their_killed_calls_left(command, sources, tmp_path):
    out = tmp_path / "out"
    words = COMMANDS[command].replace("{}", str(sources)).replace("OUT", str(out)).split()
    typed = [sys.executable, "-m", "megatron_blackmamba", *words]
    process = subprocess.Popen(typed)
    wait_until(lambda: any(tmp_path.glob(".out.*.tmp")), Command(process))
    process.kill()
    process.wait()
    assert any(tmp_path.glob(".out.*.tmp"))
    assert subprocess.run(typed).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
