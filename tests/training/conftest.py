import json
import random

import pytest

from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize
from megatron_blackmamba.formats.run_folder import RunFolder
from tests.data.corpus import write_mixture
from tests.training.forks import Forks
from tests.training.runs import ON_TWO, losses

WORDS = ["the", "model", "reads", "each", "window", "of", "its", "source", "once", "and", "then", "begins", "again"]


@pytest.fixture(scope="session")
def forks():
    """Ranks that start at once; everything that uses them runs in one test process (`make test` has several)."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def undisturbed(forks, tmp_path_factory):
    """The losses of the 30 steps of ON_TWO when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = forks.run(folder, ON_TWO)
    assert job.wait() == [0, 0], job.output()
    assert RunFolder(folder / "run").done.exists()
    return losses(folder)


@pytest.fixture(scope="session")
def raw(tmp_path_factory):
    """Two corpora of short texts, one with an empty record, and the tokens of both."""
    folder, choose = tmp_path_factory.mktemp("raw"), random.Random(0)
    for name, count in (("web", 260), ("code", 140)):
        texts = [f"{name} {i} " + " ".join(choose.choices(WORDS, k=choose.randint(1, 30))) for i in range(count)]
        texts[7] = ""
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines))
        options = {"max_bad": "1", "workers": 1, "quiet": True}
        one = {"train_tokenizer": 300} if name == "web" else {"tokenizer": str(folder / "tokens/web/tokenizer.json")}
        tokenize([folder / f"{name}.jsonl"], folder / "tokens" / name, TokenizeOptions(**one, **options))
    phases = [{"from_sample": 500, "weights": {"code": 3}}]
    held = folder / "held.jsonl"
    held.write_text("".join(json.dumps({"text": f"held out {i}"}) + "\n" for i in range(9)))
    tokenize([held], folder / "tokens/held", TokenizeOptions(tokenizer=one["tokenizer"], workers=1, quiet=True))
    sources = [{"name": name, "shards": f"tokens/{name}"} for name in ("web", "code")]
    sources[0]["validation"] = "tokens/held"
    write_mixture(folder, sources, phases)
    return folder
