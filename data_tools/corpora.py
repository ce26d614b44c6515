"""Corpora that can be downloaded today: what to type, and the disk and time that they take.

Figures are the publishers', read from their cards in November 2026; nothing was downloaded.
"""

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_blackmamba.data_tools.mixture import find_mixture
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.mixture import Mixture, MixtureError

BYTES_A_TOKEN = (1.6, 2.8)
"""Bytes of a download for each token, where its size is not published. DCLM-baseline has 3.8T tokens in "over 6 TB"
(mlfoundations/dclm #85), FineMath 1.9 by its card, and FineWeb's sample of 350B tokens 990 GB (its discussion 57)."""
TOKENS_A_CORE = 6e6
"""Tokens of documents of 60 words that `data tokenize --hold-out` makes in a second on one core (docs/measured.md)."""
LARGEST_UINT16 = 65_500
CORES_A_TASK = 16
"""Cores of a task of `tokenize_array.sbatch`."""
ARRAY = Path(__file__).resolve().parents[1] / "scripts/slurm/tokenize_array.sbatch"
SLURM = """\
# Jobs, not commands: each corpus is downloaded by one, then tokenized by an array. SBATCH_ACCOUNT and SBATCH_QOS add
# what your site asks for. Once they have ended, the same script continues what is not complete.
jobs="""
"""The beginning of a script that submits jobs."""
ACCEPT = "accept its terms on its page, then run `hf auth login`"


@dataclass(frozen=True)
class Corpus:
    """A part of a published corpus, as `data tokenize --preset` reads it."""

    repository: str
    """Its data set on the Hugging Face hub."""
    preset: str
    tokens: float
    """As its publisher counts them, with another tokenizer than yours."""
    counted: str
    """What these tokens are of."""
    licence: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    bytes: int | None = None
    """Size of the download; None: no published figure was found."""
    first: str = ""
    """What to do before the download."""

    @property
    def download(self) -> tuple[float, float]:
        """Return the least and the most bytes of the download."""
        least, most = (self.bytes or self.tokens * each for each in BYTES_A_TOKEN)
        return least, most


CORPORA = {
    "fineweb": Corpus(
        "HuggingFaceFW/fineweb-edu",
        "fineweb",
        350e9,
        "a random sample of the 1.3T, which are data/*",
        "ODC-By",
        include=("sample/350BT/*",),
    ),
    "dclm": Corpus(
        "mlfoundations/dclm-baseline-1.0",
        "dclm",
        138e9,
        "the pool of DCLM's 7B-1x models, of 3.8T",
        "CC-BY-4.0",
        include=("global-shard_03_of_10/local-shard_[13689]_of_10/*",),
    ),
    "commonpile": Corpus(
        "common-pile/comma_v0.1_training_dataset",
        "commonpile",
        238.4e9,
        "all but its code (67.8B, the corpus `code`) and US patents (157.4B)",
        "a licence per text, all open",
        exclude=("stackv2_edu/*", "uspto/*"),
    ),
    "code": Corpus(
        "common-pile/stackv2_edu_filtered",
        "commonpile",
        67.8e9,
        "educational files of The Stack v2 in 15 languages, with their text",
        "a licence per file, all open",
    ),
    "finemath": Corpus(
        "HuggingFaceTB/finemath",
        "finemath",
        34e9,
        "finemath-3plus, of which finemath-4plus (9.6B) is a part",
        "ODC-By",
        include=("finemath-3plus/*",),
        bytes=65_039_196_945,
    ),
    "pes2o": Corpus(
        "allenai/peS2o",
        "pes2o",
        42e9,
        "v2, whose card counts words; the Common Pile has the openly licensed part",
        "ODC-By",
        include=("data/v2/*",),
    ),
    "starcoder": Corpus(
        "bigcode/starcoderdata",
        "starcoder",
        250e9,
        "783 GB of text; issues, commits and notebooks have other columns than `content`, and count too",
        "a licence per file",
        exclude=("git-commits*/*", "github-issues*/*", "jupyter-*/*"),
        first=ACCEPT,
    ),
    "nemotron-cc": Corpus(
        "nvidia/Nemotron-CC-v2",
        "nemotron-cc",
        6.6e12,
        "all of it, a part of which is synthetic; High-Quality/* is a part",
        "NVIDIA Data Agreement for Model Training",
        first=ACCEPT,
    ),
}
NOT_HERE = (
    "The Stack v2 publishes identifiers alone: its files come from Software Heritage, under an agreement. `code` is a"
    " part of them with text. The Pile was withdrawn."
)


@dataclass(frozen=True)
class Plan:
    """The folders of corpora, and the speeds to plan with."""

    raw: str
    tokens: str
    tokenizer: str
    rate: int
    """Bytes a second of the download."""
    cores: int
    slurm: str | None = None
    """The partition of Slurm jobs that do all of it; None: commands for this machine."""
    download: bool = True
    """False: the files are there."""

    def commands(self, name: str, corpus: Corpus) -> list[str]:
        """Return the commands from the hub to token shards, as jobs if there is a partition.

        Without a network, `hf download` succeeds with the part of a corpus that is there; with --dry-run it fails.
        """
        patterns = [word for each in corpus.include for word in ("--include", each)]
        patterns += [word for each in corpus.exclude for word in ("--exclude", each)]
        raw, tokens = f"{self.raw.rstrip('/')}/{name}", f"{self.tokens.rstrip('/')}/{name}"
        options = [raw, tokens, "--preset", corpus.preset, "--hold-out", "0.1%", "--tokenizer", self.tokenizer]
        download = ["hf", "download", corpus.repository, "--repo-type", "dataset", *patterns, "--local-dir", raw]
        downloads = [f"{shlex.join(download)} --dry-run > /dev/null", shlex.join(download)] if self.download else []
        if not self.slurm:
            return [*downloads, shlex.join(["blackmamba", "data", "tokenize", *options])]
        found, first, after = self.figures([corpus]), [], ""
        if downloads:
            hours = max(2, math.ceil(2 * found["download_hours"][1]))
            asked = [f"--time={hours}:00:00", "--cpus-per-task=4", "--mem=16G"]
            first, after = [f"download=$({self.job(f'download_{name}', asked, downloads)})"], "afterok:$download"
        tasks, cores = max(1, self.cores // CORES_A_TASK), min(self.cores, CORES_A_TASK)
        asked = [f"--array=0-{tasks - 1}", f"--cpus-per-task={cores}", str(ARRAY), *options]
        return [*first, f"jobs=$jobs:$({self.job(f'tokenize_{name}', asked, after=after)})"]

    def job(self, name: str, asked: Sequence[str], lines: Sequence[str] = (), after: str = "") -> str:
        """Return the command that submits a job of these lines and prints its id; the shell fills in `after`."""
        words = [f"--job-name={name}", f"--partition={self.slurm}", f"--export=ALL,PYTHON={sys.executable}", *asked]
        depends = f"--dependency={after} --kill-on-invalid-dep=yes " if after else ""
        body = "\n".join([" --output=%x-%j.log <<'END'", "#!/bin/bash -e", *lines, "END\n"]) if lines else ""
        return f"sbatch --parsable {depends}{shlex.join(words)}{body}"

    def figures(self, corpora: Sequence[Corpus]) -> dict[str, Any]:
        """Return tokens, bytes and hours of some corpora together."""
        tokens = sum(corpus.tokens for corpus in corpora)
        download = [sum(each) for each in zip(*(corpus.download for corpus in corpora), strict=True)]
        return {
            "tokens": tokens,
            "download_bytes": download,
            "download_hours": [size / self.rate / 3600 for size in download],
            "token_bytes": {"uint16": 2 * tokens, "int32": 4 * tokens},
            "tokenize_hours": tokens / TOKENS_A_CORE / self.cores / 3600,
        }


def chosen(names: Sequence[str]) -> tuple[dict[str, Corpus], str | None]:
    """Return the corpora of these names or of a mixture's sources, and the name of the mixture."""
    if len(names) == 1 and names[0] not in CORPORA:
        try:
            path = find_mixture(names[0])
        except MixtureError as error:
            raise InputError(f"{error}; corpora are {', '.join(CORPORA)}") from None
        found = {source.name for source in Mixture.read(path).sources}
        known = {name: corpus for name, corpus in CORPORA.items() if name in found}
        if not known or found - known.keys():
            raise InputError(f"{names[0]}: no download is known for {', '.join(sorted(found - known.keys()))}")
        return known, names[0]
    if unknown := [name for name in names if name not in CORPORA]:
        raise InputError(f"{unknown[0]}: no such corpus. Choose {', '.join(CORPORA)}, or a mixture such as open_mix")
    return {name: CORPORA[name] for name in names}, None


def script(corpora: dict[str, Corpus], plan: Plan, mixture: str | None = None) -> Iterator[str]:
    """Yield a shell script from the hub to token shards, with figures as comments."""
    yield "# Not downloaded here: tokens, sizes and licences are those that the publishers state."
    if plan.slurm:
        yield SLURM
    for name, corpus in corpora.items():
        yield f"\n# {name}, {_tokens(corpus.tokens)} tokens: {corpus.counted}. Licence: {corpus.licence}."
        if corpus.first:
            yield f"# First {corpus.first}."
        yield from (f"# {line}" for line in sentences([corpus], plan))
        yield from plan.commands(name, corpus)
    if len(corpora) > 1:
        yield "\n# All together:"
        yield from (f"# {line}" for line in sentences([*corpora.values()], plan))
    if mixture:
        words = ["env", f"BLACKMAMBA_DATA={plan.tokens}", "blackmamba", "data", "mixture", mixture, "--tokens", "300e9"]
        check = shlex.join(words)
        yield plan.job("check_mixture", [], [check], after="afterok$jobs") if plan.slurm else check
    if plan.slurm:
        yield "squeue --me"


def sentences(corpora: Sequence[Corpus], plan: Plan) -> Iterator[str]:
    """Yield disk and time of some corpora, for people."""
    found = plan.figures(corpora)
    least, most = BYTES_A_TOKEN
    guessed = f" (estimated at {least} to {most} bytes a token; `hf download --dry-run` prints the exact size)"
    yield (
        f"Download: {_range(found['download_bytes'], _size)}{'' if all(c.bytes for c in corpora) else guessed},"
        f" {_range(found['download_hours'], _hours)} at {_size(plan.rate)}/s."
    )
    two, four = map(_size, found["token_bytes"].values())
    yield (
        f"As tokens: {two}, or {four} with a vocabulary of {LARGEST_UINT16:,} or more;"
        f" {_hours(found['tokenize_hours'])} on {plan.cores} cores."
    )


def table(plan: Plan) -> Iterator[list[str]]:
    """Yield a row for each corpus, its headings first."""
    yield ["corpus", "published as", "tokens", "download", f"at {_size(plan.rate)}/s", "tokens, 2 or 4 bytes", "access"]
    for name, corpus in CORPORA.items():
        found = plan.figures([corpus])
        sizes = [_size(size) for size in found["token_bytes"].values()]
        times = [_range(found[f"download_{what}"], shown) for what, shown in (("bytes", _size), ("hours", _hours))]
        times[0] = times[0] if corpus.bytes else f"~ {times[0]}"
        access = "terms to accept" if corpus.first else "open"
        yield [name, corpus.repository, _tokens(corpus.tokens), *times, " or ".join(sizes), access]


def described(corpora: dict[str, Corpus], plan: Plan) -> dict[str, Any]:
    """Return all of it for programs."""
    each = {
        name: {**asdict(corpus), **plan.figures([corpus]), "commands": plan.commands(name, corpus)}
        for name, corpus in corpora.items()
    }
    return {"corpora": each, "all": plan.figures([*corpora.values()]), "downloaded_here": False}


def _range(pair: Sequence[float], shown: Callable[[float], str]) -> str:
    least, most = map(shown, pair)
    number, _, unit = least.partition(" ")
    return most if least == most else f"{number if most.endswith(unit) else least} to {most}"


def _tokens(count: float) -> str:
    return f"{count / 1e12:.3g}T" if count >= 1e12 else f"{count / 1e9:.4g}B"


def _size(size: float) -> str:
    unit, scale = next(((unit, scale) for unit, scale in (("TB", 1e12), ("GB", 1e9)) if size >= scale), ("MB", 1e6))
    return f"{size / scale:.3g} {unit}"


def _hours(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.2g} days"
    return f"{hours:.2g} hours" if hours >= 1 else f"{hours * 60:.0f} minutes"
