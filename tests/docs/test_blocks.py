"""The blocks of the pages run in order, as printed; runs end after two steps, or one.

A line is left out only if `ELSEWHERE` names the test that runs it. Blocks marked `shell` need more than a laptop:
`NEEDS` says what, and test_commands.py checks that their commands exist.
"""

import re
import shutil
from importlib.util import find_spec

import pytest

from tests.docs.session import QUICK, ROOT, blocks
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("pages")
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
ELSEWHERE = {  # start of the line -> the test that runs it
    "blackmamba quickstart": "tests/quickstart/test_quickstart.py",
    "blackmamba study": "tests/study/test_study.py",
    "blackmamba doctor": "tests/launch/test_doctor.py",  # its verdict depends on this machine
    "blackmamba evaluate": "tests/docs/test_blocks.py",  # on its own page: test_evaluation_page_runs_as_printed
    "blackmamba export gguf": "tests/interchange/test_gguf.py",  # gguf is optional
    "blackmamba data dedup": "tests/data_tools/test_cleaning.py",  # datatrove is optional
    "blackmamba data filter": "tests/data_tools/test_filters.py",
    "blackmamba data decontaminate": "tests/data_tools/test_cleaning.py",
    "blackmamba data tokenize final/pile": "tests/data_tools/test_cleaning.py",
}
OTHER_TESTS = {  # page -> the test that runs its blocks
    "data.md": "tests/docs/test_data_page.py",
    "cleaning.md": "tests/docs/test_data_page.py",
    "mixtures.md": "tests/docs/test_data_page.py",
    "extending.md": "tests/docs/test_data_page.py",
    "python.md": "tests/docs/test_blocks.py",
    "recipes.md": "tests/docs/test_recipes.py",
    "evaluation.md": "tests/docs/test_blocks.py",
    "reproduction.md": "tests/docs/test_commands.py",
}
RUN = [page for page in PAGES if page.name not in OTHER_TESTS and any(blocks(page))]
NEEDS = {  # what a line in a block marked `shell` needs -> its start
    "a Slurm cluster": (
        *(
            "source scripts/slurm/nccl.env",
            "srun ",
            "for name in $(ls /clean); do sbatch ",
            "sbatch ",
            "squeue ",
            "scancel ",
            "tail -F runs/blackmamba_1.5b/",
        ),
        *("blackmamba launch ", "blackmamba report runs/blackmamba_1.5b"),
    ),
    "a clone of Megatron-LM": ("git clone --branch core_", "PYTHONPATH=Megatron-LM torchrun "),
    "Megatron-Bridge": ("torchrun --nproc-per-node 1 examples/pretrain_in_megatron_bridge.py ",),
    "several machines": ("kubectl apply ", "sky jobs launch ", "MASTER_ADDR=node0 blackmamba train "),
    "a GPU": (
        *("scripts/gpu_check.sh ", "PYTHON=.venv/bin/python scripts/gpu_carry.sh "),
        "POINTS=docs/studies/trend_gpu.json scripts/gpu_study.sh ",
    ),
    "a network": (
        *(
            "git clone ",
            "make ",
            "grep '^hf ' prepare.sh",
            "hf download ",
            "source .venv/bin/activate",
            "pip install ",
            "curl ",
            "apt-get ",
            "lm_eval ",
        ),
        *(
            "blackmamba import zyphra ",
            "blackmamba evaluate BlackMamba-1.5B ",
            "blackmamba evaluate --data evaldata --download ",
            "blackmamba keep-bias exports/released ",
            *(
                "blackmamba data tokenize my_text tokens ",
                "echo 'sources: [{name: mine,",
                "blackmamba import hf mamba my_mamba",
            ),
            *("blackmamba train mamba_343m my_mamba/model.yaml ", "blackmamba export hf runs/more "),
            *("blackmamba evaluate my_mamba ", "blackmamba evaluate runs/more "),
        ),
        *("blackmamba export hf runs/quickstart/quickstart", "python -m megatron_blackmamba.evaluation "),
        ".venv/bin/blackmamba study trend_gpu ",
    ),
    "the paper's corpora": (
        *("blackmamba data tokenize /raw/", "blackmamba data decontaminate /raw /clean "),
        "BLACKMAMBA_DATA=/tokens ",
        "blackmamba evaluate runs/blackmamba_1.5b ",
    ),
    "today's corpora (tests/docs/test_cluster_path.py)": (
        *("blackmamba data corpora ", "bash -e prepare.sh", "bash -e tokenize.sh", "export BLACKMAMBA_DATA="),
        "blackmamba plan blackmamba_1.5b data.mixture=open_mix ",
    ),
    "minutes": ("python -m benchmarks.",),
    "object storage (tests/docs/test_data_page.py)": (
        "blackmamba data tokenize pile/train s3://",
        "blackmamba data verify s3://",
    ),
    "to be stopped (tests/serving)": ("blackmamba chat MODEL",),
    "other programs": ("llama-completion ", "llama-server ", "ollama ", "vllm serve "),
}


EVERYDAY = ("README.md", "try_an_idea.md")
TO_RUN = [pytest.param(page, marks=[] if page.name in EVERYDAY else thorough, id=page.name) for page in RUN]


@pytest.mark.parametrize("page", TO_RUN)
def test_page_runs_as_printed(page, session, quickstart, tmp_path):
    shutil.copytree(quickstart, tmp_path, dirs_exist_ok=True)
    for language, code in blocks(page):
        quick = {QUICK: "1"} if page.name in EVERYDAY else {}
        done = session.run(_without_lines_run_elsewhere(code), tmp_path, language, **quick)
        assert done.returncode == 0, f"{page.name}:\n{code}\n{done.stdout[-3000:]}"


@pytest.mark.skipif(not find_spec("lm_eval"), reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")
@thorough
def test_evaluation_page_runs_as_printed(session, quickstart, questions, tmp_path):
    shutil.copytree(quickstart, tmp_path, dirs_exist_ok=True)
    shutil.copytree(questions, tmp_path / "evaldata")
    code = "".join(code for language, code in blocks(DOCS / "evaluation.md") if language == "bash")
    done = session.run(code, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "boolq" in done.stdout and "hellaswag" in done.stdout, done.stdout


@thorough
def test_python_page_runs_as_one_script(session, tmp_path):
    code = "\n".join(code for language, code in blocks(DOCS / "python.md") if language == "python")
    done = session.run(code, tmp_path, "python")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "DONE [" in done.stdout and "torch.Size([1, " in done.stdout, done.stdout


def _without_lines_run_elsewhere(code):
    lines = code.replace("\\\n", " ").splitlines(keepends=True)
    return "".join(line for line in lines if not _runs_elsewhere(line))


def _runs_elsewhere(line):
    return line.startswith(tuple(ELSEWHERE))


def test_lines_run_elsewhere_are_on_a_page():
    lines = [line for page in PAGES for _, code in blocks(page) for line in code.splitlines()]
    for start, where in [*ELSEWHERE.items(), *OTHER_TESTS.items()]:
        assert start.endswith(".md") or any(line.startswith(start) for line in lines), f"{start!r} is on no page"
        assert (ROOT / where).is_file(), where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_blocks_need_more_than_a_laptop(page):
    known = tuple(start for starts in NEEDS.values() for start in starts)
    code = "".join(re.findall(r"^```shell\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    unknown = [line for line in code.replace("\\\n", " ").splitlines() if line and not line.startswith(known)]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_whether_they_are_commands(page):
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        first = code.splitlines()[0]
        if language not in ("bash", "python", "shell"):
            assert not re.match(r"(\w+=\S+ )*(blackmamba|python|make|srun|sbatch|pip) ", first), f"{page.name}: {first}"
