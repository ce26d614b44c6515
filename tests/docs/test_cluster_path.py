"""The path from raw text to a job, as docs/train_on_a_cluster.md prints it, on stand-ins for the corpora.

Stand-ins have the published paths and formats. Downloads are left out, sizes and the model are smaller, and the job is
printed instead of submitted.
"""

import gzip
import json
import re
import textwrap
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_blackmamba.data_tools.bpe import train
from megatron_blackmamba.data_tools.corpora import CORPORA
from megatron_blackmamba.data_tools.sources import PRESETS
from megatron_blackmamba.formats.mixture import Mixture
from tests.data_tools.test_corpora import TAKEN
from tests.docs.session import ROOT

pytestmark = pytest.mark.xdist_group("pages")
SMALLER = {
    "blackmamba_1.5b": "tiny model.vocab_size=640 training.tokens=1000 data.sequence_length=64 training.micro_batch=2",
    "--nodes 7 --gpus-per-node 8 --gpu h100": "--nodes 1 --gpus-per-node 2 --gpu h100",
    "--nodes 7 --time 24:00:00": "--nodes 1 --time 24:00:00 --dry-run",
    " --slurm cpu": "",  # tests/slurm/test_tokenizing.py has jobs
    "bash -e prepare.sh\n": "",  # the text is here, as on nodes without internet
    "bash -e tokenize.sh": "sed 's/0.1%/20%/; s/300e9/1000 --sequence-length 64/' tokenize.sh | bash -e",
    "open_mix --nodes 7\n": "open_mix --nodes 1 --gpus-per-node 2 --gpu h100\n",
    "srun --nodes=1 ": "",
}


def write(path, format, texts):
    path.parent.mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if format == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else gzip.compress(lines))


def test_printed_path_goes_from_text_to_a_job(session, tmp_path):
    text = Path(textwrap.__file__).read_text() + Path(json.__file__).read_text()
    (tmp_path / "20B_tokenizer.json").write_bytes(train([[text]], 600))
    sources = [source.name for source in Mixture.read(ROOT / "configs/data/open_mix.yaml").sources]
    for number, name in enumerate(sources):
        texts = [part for part in text.split("\n\n") if len(part) > 80][number :: len(sources)]
        write(tmp_path / "raw" / name / TAKEN[name], PRESETS[CORPORA[name].preset].format, texts)
    page = (ROOT / "docs/train_on_a_cluster.md").read_text()
    blocks = [b for b in re.findall(r"^```shell\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "open_mix" in b]
    blocks = [b for b in blocks if "decontaminate" not in b][:5]  # later ones are for faults
    elsewhere = r"^(curl|grep|srun --nodes=7|source|blackmamba evaluate) .*\n"
    code = re.sub(elsewhere, "", "".join(blocks).replace("\\\n", " "), flags=re.MULTILINE)
    for printed, smaller in SMALLER.items():
        assert printed in code
        code = code.replace(printed, smaller)
    done = session.run(re.sub(r"(?<![\w.])/(raw|tokens)\b", rf"{tmp_path}/\1", code), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Data not found" not in done.stdout
    for name in sources:
        assert (tmp_path / "tokens" / name / "validation" / "tokenizer.json").is_file()
        assert re.search(rf"^ *{name} .* 4 *$", done.stdout, re.MULTILINE), done.stdout
    assert "#SBATCH" in done.stdout or "sbatch" in done.stdout, done.stdout[-2000:]
