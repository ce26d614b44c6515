"""Random valid configs: train, kill or stop, resume, also under another layout, and export.

    python -m tests.fuzz_resume --minutes 60 --seed 7

A case follows from its seed. A run that is cut and resumed must give the losses, gradient norms and weights of one that
is not: all digits under one layout, up to rounding in float64 under two. Then transformers loads its export and must
compute the same logits. A failing case is shrunk to the settings that it needs and printed as commands.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron_blackmamba import layers, routers
from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.config import ConfigError, RunConfig, load
from megatron_blackmamba.config.load import unread
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far
from megatron_blackmamba.interchange import convert
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.open import open_model
from megatron_blackmamba.interchange.parity import ParityError
from megatron_blackmamba.runtime import exits, layout
from tests.fuzz_values import AXES, VALUES, WIDTHS
from tests.layers.sizes import LETTERS, SIZES
from tests.training.forks import Forks, Job

STEPS = 5
CLOSE = 1e-7
"""Largest relative difference of losses, norms and weights under two layouts in float64."""
HOLDS, REFUSED, FAILED = "holds", "refused", "FAILED"
Words = dict[str, str]


class Failed(AssertionError):
    """A case that does not hold; the first word says what."""


class Refused(Exception):
    """A config that the package refuses with a reason."""


@dataclass(frozen=True)
class Case:
    """A run, where it is cut, and how it goes on."""

    words: Words
    before: Words
    """The layout of the first part and of the uninterrupted run."""
    ranks_before: int
    after: Words
    ranks_after: int
    cut: int
    """The step at which it is cut."""
    killed: bool
    """Killed with SIGKILL, or stopped after a save."""
    drawn: tuple[str, ...] = field(default=())
    """The keys that shrinking may give back their default."""

    def __str__(self) -> str:
        how = "killed" if self.killed else "stopped"
        layouts = [f"{n} {typed(words)}".strip() for n, words in self.layouts]
        return f"{typed(self.words)} | {layouts[0]} | {how} at {self.cut} | {layouts[1]}"

    @property
    def layouts(self) -> list[tuple[int, Words]]:
        return [(self.ranks_before, self.before), (self.ranks_after, self.after)]

    def commands(self) -> str:
        """Return the runs as commands, with a stop in place of a kill."""
        lines = [f"blackmamba train tiny --nproc {n} {typed(self.words | words)}" for n, words in self.layouts]
        return f"{lines[0]} training.stop_after_steps={self.cut}\n{lines[1]}"


def typed(words: Words) -> str:
    return " ".join(
        f"'{key}={value}'" if set("*[{ ") & set(value) else f"{key}={value}" for key, value in words.items()
    )


def brief(said: str) -> str:
    """Return the first line and the end of a failure."""
    first, _, rest = said.partition("\n")
    return f"{first[:500]}\n...{rest[-800:]}" if rest.strip() else first[:500]


def listed(words: Words) -> list[str]:
    return [f"{key}={value}" for key, value in words.items()]


def valid(words: Words, read: str = "") -> RunConfig | None:
    """Return the config, or None if the package refuses it, or would not read a key."""
    try:
        config = load("tiny", listed(words))
    except ConfigError:
        return None
    return None if read and any(read in note for note in unread(config, [f"{read}={words[read]}"])) else config


def draw(seed: int) -> Case:
    """Return the case of a seed: every key of `VALUES` gets a value now and then, as long as the config is valid."""
    chance = random.Random(seed)
    pattern = "".join(chance.choices(LETTERS, k=chance.randint(1, 4)))
    words = {"model.pattern": pattern} | {k: v for letter in pattern for k, v in SIZES.get(letter, {}).items()}
    words = sized(words | WIDTHS)
    drawn = []
    often = chance.choice((0.1, 0.25, 0.5))
    for key in chance.sample(sorted(VALUES), len(VALUES)):
        if chance.random() < often and valid(more := sized(words | {key: chance.choice(VALUES[key])}), read=key):
            words = more
            drawn.append(key)
    ranks, before = draw_layout(words, chance)
    ranks_after, after = (ranks, before) if chance.random() < 0.3 else draw_layout(words, chance)
    if keeps_layout(words):
        ranks_after, after = ranks, before
    return Case(
        words, before, ranks, after, ranks_after, chance.randint(1, STEPS - 1), chance.random() < 0.4, tuple(drawn)
    )


def sized(words: Words) -> Words:
    """Return the words with the length of a run of `STEPS` steps, or a few more with a ramp."""
    return words | {
        "training.tokens": str(STEPS * int(words["training.global_batch"]) * int(words["data.sequence_length"]))
    }


def draw_layout(words: Words, chance: random.Random) -> tuple[int, Words]:
    """Return a number of processes and a layout that the package accepts for them."""
    for _ in range(200):
        ranks = chance.choice((1, 2, 2, 3, 4, 4))
        sizes = {f"parallel.{axis}": str(chance.choice((1, 1, 2, 2, 4))) for axis in AXES}
        sizes = {key: size for key, size in sizes.items() if size != "1"}
        config = valid(words | sizes)
        if config and not layout.problems(config, ranks):
            return ranks, sizes
    return 1, {}


def keeps_layout(words: Words) -> bool:
    """Return whether another layout may give other numbers: rounding, or a router that says so."""
    config = valid(words)
    assert config
    if config.training.precision != "fp64":
        return True
    kind = routers.kind_of(config.model.router.kind)
    return layers.routes(config.model.trained_pattern) and isinstance(kind.layouts(config.model), routers.Cannot)


def run(case: Case, forks: Forks, folder: Path, exports: bool = True) -> str:
    """Run a case; return what it was compared with. Raise `Failed` if it does not hold."""
    whole, cut = folder / "whole", folder / "cut"
    finish(forks.run(whole, listed(case.words | case.before), case.ranks_before), "start")
    first = listed(case.words | case.before | {"checkpoint.every": "1"})
    if case.killed:
        job = forks.run(cut, first, case.ranks_before, until=case.cut)
        kill(job, cut, case.cut)
        (cut / "until").unlink(missing_ok=True)
    else:
        finish(forks.run(cut, [*first, f"training.stop_after_steps={case.cut}"], case.ranks_before), "stop")
    finish(forks.run(cut, listed(case.words | case.after | {"checkpoint.every": "1"}), case.ranks_after), "resume")
    exact = (case.before, case.ranks_before) == (case.after, case.ranks_after)
    compare_steps(whole, cut, exact)
    compare_weights(whole, cut, exact)
    if not exports:
        return "not exported"
    if case.words["training.precision"] != "fp64":
        return export(cut, folder / "export")
    fresh = {"training.precision": "fp32", "start.from": str(cut / "run"), "training.stop_after_steps": "1"}
    finish(forks.run(folder / "fp32", listed(case.words | case.after | fresh), case.ranks_after), "fp32")
    return export(folder / "fp32", folder / "export")


def finish(job: Job, what: str) -> None:
    codes = job.wait(300)
    if any(codes):
        last = job.output().strip().splitlines()[-1:]
        if what == "start" and set(codes) == {exits.BAD_INPUT}:
            raise Refused(*last)
        raise Failed(f"{what}: exit codes {codes}:\n{job.output()[-3000:]}")


def kill(job: Job, folder: Path, step: int) -> None:
    """Kill all ranks once the step is taken; what the checkpoints have by then is a matter of luck."""
    end = time.monotonic() + 300
    while len(losses(folder)) < step:
        if job.ended() or time.monotonic() > end:
            raise Failed(f"kill: exit codes {job.codes} before step {step}:\n{job.output()[-3000:]}")
        time.sleep(0.01)
    job.kill()
    job.wait(60)


def losses(folder: Path) -> list[dict]:
    metrics = RunFolder(folder / "run").metrics
    return list(metrics_so_far(metrics)) if metrics.is_file() else []


def compare_steps(whole: Path, cut: Path, exact: bool) -> None:
    ours, theirs = losses(cut), losses(whole)
    if [record["step"] for record in ours] != [record["step"] for record in theirs]:
        raise Failed(f"steps: {[record['step'] for record in ours]}")
    for mine, expected in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            if differ(mine[name], expected[name], exact):
                raise Failed(f"{name}: {mine[name]!r} for {expected[name]!r} at step {mine['step']}")


def differ(ours: float, expected: float, exact: bool) -> bool:
    return ours != expected if exact else not abs(ours - expected) <= CLOSE * max(1.0, abs(expected))


def compare_weights(whole: Path, cut: Path, exact: bool) -> None:
    for ema in (False, True):
        try:
            ours, theirs = (CheckpointReader(folder / "run", ema) for folder in (cut, whole))
        except ValueError:
            if ema:
                continue
            raise
        for name, expected in theirs.tensors():
            found = ours.tensor(name)
            furthest = float((found.double() - expected.double()).abs().max()) if found.numel() else 0.0
            if not (furthest == 0.0 if exact else furthest <= CLOSE):
                raise Failed(f"weights: {name} differs by {furthest:.2g}{' in the average' if ema else ''}")


def export(run_folder: Path, out: Path) -> str:
    """Have transformers load an export; it compares logits, experts and what it writes."""
    try:
        comparison = convert.to_hf(open_model(run_folder / "run"), out)
    except ParityError as error:
        raise Failed(f"export: {error}") from None
    except InterchangeError as error:
        return f"not exported: {str(error)[:150]}"
    return str(comparison)


def shrink(case: Case, fails: Callable[[Case], str | None], seconds: float) -> tuple[Case, str]:
    """Return the smallest case found that fails in the same way, and its failure."""
    end, said = time.monotonic() + seconds, fails(case)
    if said is None:
        return case, "it did not fail again"
    smaller = True
    while smaller and time.monotonic() < end:
        smaller = False
        for other in simpler(case):
            if time.monotonic() > end:
                break
            if (now := fails(other)) is not None and now.split(":")[0] == said.split(":")[0]:
                case, said, smaller = other, now, True
                break
    return case, said


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less, the largest steps first."""
    if case.killed:
        yield replace(case, killed=False)
    if case.after != case.before or case.ranks_after != case.ranks_before:
        yield replace(case, after=case.before, ranks_after=case.ranks_before)
    for half in halves(case.drawn):
        words = {key: value for key, value in case.words.items() if key not in half}
        small = {key: value for part in (WIDTHS, *SIZES.values()) for key, value in part.items()}
        words = sized(words | {key: small[key] for key in half if key in small})
        if fitting(words, case):
            yield replace(case, words=words, drawn=tuple(key for key in case.drawn if key not in half))
    pattern = case.words["model.pattern"]
    for place in range(len(pattern)):
        words = case.words | {"model.pattern": pattern[:place] + pattern[place + 1 :]}
        if pattern.count(pattern[place]) == 1:
            words = {key: value for key, value in words.items() if key not in SIZES.get(pattern[place], {})}
        if len(pattern) > 1 and fitting(words, case):
            yield replace(case, words=words)
    alone = replace(case, before={}, after={}, ranks_before=1, ranks_after=1)
    if alone != case:
        yield alone


def halves(keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield halves, quarters and so on, down to single keys."""
    size = len(keys) // 2
    while size > 1:
        yield from (keys[first : first + size] for first in range(0, len(keys), size))
        size //= 2
    yield from ((key,) for key in keys)


def fitting(words: Words, case: Case) -> bool:
    """Return whether both layouts fit these words."""
    configs = [(valid(words | sizes), ranks) for ranks, sizes in case.layouts]
    return all(config and not layout.problems(config, ranks) for config, ranks in configs)


def outcome_of(case: Case, forks: Forks, folder: Path, exports: bool) -> tuple[str, str]:
    """Run a case; return whether it holds, and what was compared or went wrong."""
    try:
        return HOLDS, run(case, forks, folder, exports)
    except Refused as refusal:
        return REFUSED, str(refusal)
    except Exception as error:
        return FAILED, str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fuzz(
    forks: Forks,
    folder: Path,
    seeds: Iterable[int],
    minutes: float,
    shrinking: float = 600,
    exports: bool = True,
    say: Callable[[str], None] = partial(print, flush=True),
) -> list[str]:
    """Run cases until the time is up; return what failed, shrunk for so many seconds each."""
    end, failures, counts = time.monotonic() + 60 * minutes, [], Counter()

    def fails(case: Case) -> str | None:
        what, said = outcome_of(case, forks, folder / "smaller", exports)
        return said if what == FAILED else None

    for seed in seeds:
        if (begun := time.monotonic()) > end:
            break
        case = draw(seed)
        what, said = outcome_of(case, forks, folder / "case", exports)
        counts[what] += 1
        say(f"seed {seed}: {what} in {time.monotonic() - begun:.0f} s: {brief(said)}\n    {case}")
        if what == FAILED:
            small, why = shrink(case, fails, shrinking)
            failures.append(f"seed {seed}: {brief(why)}\n{small}\n{small.commands()}")
            say(f"shrunk: {failures[-1]}")
    say(f"{sum(counts.values())} cases: {dict(counts)}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="begin no case after this time; default: 60")
    parser.add_argument("--seed", type=int, default=None, help="first seed; each case has the next one")
    parser.add_argument("--cases", type=int, default=10**9, help="number of cases; default: as many as fit")
    parser.add_argument("--no-export", action="store_true", help="leave out exports, which take as long as the runs")
    given = parser.parse_args()
    first = random.randrange(10**6) if given.seed is None else given.seed
    forks = Forks()
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
            seeds = range(first, first + given.cases)
            failures = fuzz(forks, Path(folder), seeds, given.minutes, exports=not given.no_export)
    finally:
        forks.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
