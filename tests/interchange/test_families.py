"""Help texts, pages and classes follow from the list of families."""

from pathlib import Path

import pytest

from megatron_blackmamba.interchange import commands
from megatron_blackmamba.interchange.families import FAMILIES

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["conversion", "continue_a_model", "training"])
def test_pages_name_every_family(page):
    text = (DOCS / f"{page}.md").read_text()
    assert [name for name in FAMILIES.values() if name not in text] == []


def test_native_formats_have_a_row_for_each_family():
    text = (DOCS / "conversion.md").read_text()
    assert [model_type for model_type in FAMILIES if f"| `{model_type}` |" not in text] == []


@pytest.mark.parametrize("command", [commands.export_hf, commands.export_gguf, commands.import_hf])
def test_help_names_every_family(command):
    assert [name for name in FAMILIES.values() if name not in command.__doc__] == []


def test_every_family_is_a_class_of_its_file():
    from megatron_blackmamba.interchange.native import ARCHITECTURES

    assert [architecture.model_type for architecture in ARCHITECTURES] == list(FAMILIES)
    assert [type(each).__module__.rpartition(".")[2] for each in ARCHITECTURES] == list(FAMILIES)
