"""The blocks of README, tutorial, experiments, conversion and python run in order, as printed.

Runs end after two steps. A line is left out only if `ELSEWHERE` says why, and which test runs it or what it needs.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.docs.session import ROOT, blocks

pytestmark = pytest.mark.xdist_group("pages")
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SEVERAL_PROCESSES = "--nproc"  # these lines: tests/training/test_launcher.py and tests/distributed
ELSEWHERE = {  # start of the line -> the test that runs it, or what it needs
    "blackmamba quickstart": "tests/quickstart/test_quickstart.py",
    "blackmamba study": "tests/study/test_study.py",
    "blackmamba doctor": "tests/launch/test_doctor.py",  # its verdict depends on this machine
    "blackmamba evaluate": "tests/evaluation/test_evaluate.py",  # lm-eval is optional
    "blackmamba data dedup": "tests/data_tools/test_cleaning.py",  # datatrove is optional
    "blackmamba data decontaminate": "tests/data_tools/test_cleaning.py",
    "blackmamba data tokenize final/pile": "tests/data_tools/test_cleaning.py",
}
OTHER_TESTS = {  # page -> the test that runs its blocks
    "data.md": "tests/docs/test_data_page.py",
    "extending.md": "tests/docs/test_extending.py",
    "reproduction.md": "tests/docs/test_commands.py",
}
RUN = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("tutorial", "experiments", "conversion"))]


@pytest.fixture(scope="module")
def quickstart(session, tmp_path_factory):
    """What `blackmamba quickstart` leaves behind, in small: text, shards, a mixture and a run of two steps."""
    folder = tmp_path_factory.mktemp("quickstart")
    corpus = folder / "runs/quickstart/corpus/code"
    corpus.mkdir(parents=True)
    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("[a-z]*.py"))]
    (corpus / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = session.run(
        "cd runs/quickstart\n"
        "blackmamba data tokenize corpus/code/train.jsonl tokens/code --train-tokenizer 1024\n"
        "echo 'sources: [{name: code, shards: tokens/code}]' > mixture.yaml\n"
        "blackmamba train quickstart data.mixture=$PWD/mixture.yaml folder=$PWD\n",
        folder,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return folder


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_page_runs_as_printed(page, session, quickstart, tmp_path):
    shutil.copytree(quickstart, tmp_path, dirs_exist_ok=True)
    for language, code in blocks(page):
        done = session.run(_without_lines_run_elsewhere(code), tmp_path, language)
        assert done.returncode == 0, f"{page.name}:\n{code}\n{done.stdout[-3000:]}"


def test_python_page_runs_as_one_script(session, tmp_path):
    code = "\n".join(code for language, code in blocks(DOCS / "python.md") if language == "python")
    done = session.run(code, tmp_path, "python")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "DONE [" in done.stdout and "torch.Size([1, " in done.stdout, done.stdout


def _without_lines_run_elsewhere(code):
    lines = code.replace("\\\n", " ").splitlines(keepends=True)
    return "".join(line for line in lines if not _runs_elsewhere(line))


def _runs_elsewhere(line):
    return line.startswith(tuple(ELSEWHERE)) or SEVERAL_PROCESSES in line


def test_lines_run_elsewhere_are_on_a_page():
    lines = [line for page in PAGES for _, code in blocks(page) for line in code.splitlines()]
    for start, where in [*ELSEWHERE.items(), *OTHER_TESTS.items()]:
        assert start.endswith(".md") or any(line.startswith(start) for line in lines), f"{start!r} is on no page"
        assert where.startswith("needs ") or (ROOT / where).is_file(), where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_whether_they_are_commands(page):
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        first = code.splitlines()[0]
        if language not in ("bash", "python", "shell"):
            assert not re.match(r"(\w+=\S+ )*(blackmamba|python|make|srun|sbatch|pip) ", first), f"{page.name}: {first}"
