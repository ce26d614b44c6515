"""Keep a small export of this version, for later ones to refresh: `python -m tests.interchange.release`."""

import json
import os
import tarfile
import tempfile
from pathlib import Path

if __name__ == "__main__":  # tests/interchange/conftest.py sets them for tests
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modeling_files_")

import torch
import transformers
from transformers import AutoModelForCausalLM

from megatron_blackmamba import __version__
from megatron_blackmamba.interchange import hf
from tests.reference import tiny
from tests.reference.canonical import canonical, write_tokenizer

RELEASED = Path(__file__).parent / "released"
PROMPT = [7, 11, 23, 5, 40, 12, 9, 31]
GREEDY = {"do_sample": False, "no_repeat_ngram_size": 1, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 24}


def written(folder: Path) -> list[int]:
    """Return what the export writes after the prompt; no token twice, since the tiny model would repeat one."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    prompt = torch.tensor([PROMPT])
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)[0, len(PROMPT) :].tolist()


def keep(version: str = __version__) -> None:
    """Write an export and the text that it writes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export"
        hf.write(canonical(tiny("silu"), tokenizer=write_tokenizer(Path(scratch) / "tokenizer.json")), folder)
        found = {"written_with": f"transformers {transformers.__version__}", "text": written(folder)}
        (RELEASED / f"{version}.json").write_text(json.dumps(found) + "\n")
        with tarfile.open(RELEASED / f"{version}.tar.xz", "w:xz") as archive:
            archive.add(folder, "export")


if __name__ == "__main__":
    keep()
