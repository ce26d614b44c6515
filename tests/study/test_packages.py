"""A corpus from pinned wheels is the same on every machine, and a changed wheel is refused."""

import hashlib
import zipfile

import pytest

from megatron_blackmamba.study import StudyError
from megatron_blackmamba.study.config import CorpusConfig
from megatron_blackmamba.study.corpus import Corpus
from megatron_blackmamba.study.packages import Packages, download


def text(word, lines=30):
    return "".join(f"{word} is what line number {i} speaks of, at some length\n" for i in range(lines))


def wheel(folder, name, files):
    """Write a wheel that pip downloads; return its line in a requirements file."""
    about = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n{text(name + ' described')}",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def pins(tmp_path, monkeypatch):
    """Pin two packages, which pip finds in a folder instead of an index."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    one = {f"one/{i}.py": text(f"code{i}") for i in range(6)}
    two = {f"two/{i}.LICENSE": text(f"licence{i}") for i in range(3)} | {"two/a.md": text("prose"), "two/b.py": "short"}
    two |= {"two/c.py": "\0" * 1000, "two/d.py": b"\xff" * 1000}
    lines = [wheel(shelf, "one", one), wheel(shelf, "two", two)]
    (tmp_path / "pins.txt").write_text("# a comment\n" + "".join(lines))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return tmp_path / "pins.txt"


def test_corpora_of_two_machines_are_equal(pins, tmp_path):
    config = CorpusConfig(packages=str(pins), unseen=True, megabytes=1, weights={"prose": 4.0})
    first, second = (Corpus(tmp_path / name, config).gather() for name in ("first", "elsewhere"))
    assert first == second and all(len(part["sha256"]) == 64 for parts in first.values() for part in parts.values())
    documents = {source: sum(part["documents"] for part in parts.values()) for source, parts in first.items()}
    assert documents == {"code": 6, "prose": 3, "licences": 3}


def test_order_does_not_depend_on_the_wheels_place(pins, tmp_path):
    download(pins, tmp_path / "wheels")
    code = [*Packages(tmp_path / "wheels").code()]
    assert len(code) == 6 and code != sorted(code)
    for path in (tmp_path / "wheels").glob("one*"):
        path.rename(path.with_name("z" + path.name))
    assert [*Packages(tmp_path / "wheels").code()] == code


def test_a_wheel_of_another_hash_is_refused(pins, tmp_path):
    wheel(tmp_path / "shelf", "one", {"one/0.py": text("changed")})
    with pytest.raises(StudyError, match=r"pip could not download the packages of .*pins\.txt:\n(.|\n)*hash"):
        download(pins, tmp_path / "wheels")
