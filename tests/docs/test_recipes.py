"""The recipes run as printed, with each number of steps or tokens divided by 60."""

import re
import shutil

import pytest

from megatron_blackmamba.formats.branches import trunk_of
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far
from tests.docs.session import ROOT, WHOLE, blocks
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("pages")
PAGE = ROOT / "docs/recipes.md"
DIVIDED = re.compile(r"(training\.steps=|checkpoint\.every=|--step |--tokens |optimizer\.warmup_tokens=)(\d+)(K?)")
BY = 60
LENGTHS = {"paper": 5, "trunk": 5, "trunk_anneal_122880": 1, "trunk_anneal_245760": 1, "on_code": 1, "averaged": 1}
LENGTHS |= {"narrow_8e-3": 1, "narrow_1.6e-2": 1, "wide": 1}
SWEPT, TWO = "8e-3 1.6e-2 3.2e-2", "8e-3 1.6e-2"


def divided(found):
    key, number, thousands = found.groups()
    return f"{key}{max(1, int(number) * (1000 if thousands else 1) // BY)}"


@thorough
def test_recipes_run_as_printed_in_small(session, quickstart, tmp_path):
    shutil.copytree(quickstart, tmp_path, dirs_exist_ok=True)
    for language, code in blocks(PAGE):
        small = re.sub(r"(--tokens )(\d+)", r"--name trunk_anneal_\2 \1\2", code) if "--name" not in code else code
        small = DIVIDED.sub(divided, small.replace(SWEPT, TWO))
        done = session.run(small, tmp_path, language, **{WHOLE: "1"})
        assert done.returncode == 0, f"{code}\n{done.stdout[-3000:]}"
    taken = {name: len(list(metrics_so_far(tmp_path / "runs" / name / "metrics.jsonl"))) for name in LENGTHS}
    assert taken == LENGTHS
    assert trunk_of(RunFolder(tmp_path / "runs/on_code")).step == 4
