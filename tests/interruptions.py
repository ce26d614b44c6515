"""Interrupt every command at random moments, as Ctrl-C in a terminal does, and look at what is left.

`python -m tests.interruptions --times 40 --seed 7` runs all commands, `tests/console/test_interrupts.py` a few.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, "-m", "megatron_blackmamba"]
SAVED = 75
"""The code of a training run that has saved its state before it ended."""
LONGEST = 15.0
"""Seconds of a command in which it is interrupted."""
STARTS = 0.5
"""Seconds in which a busy machine may still be starting Python itself, before the first line of this project."""
OURS = f'File "{ROOT / "megatron_blackmamba"}/'
BAD_WORDS = ("Traceback", "Error", "Exception", "Aborted", "Warning", "warnings.warn", "leaked", "rank ", "terminate")


@dataclass(frozen=True)
class Case:
    """A command to interrupt; {material} is the folder that `make_material` fills."""

    words: str
    saves: bool = False
    """Ends with 75 once training has begun, after a checkpoint."""


SHORT = "data.sequence_length=64 training.global_batch=16 training.tokens=30720 training.evaluate_every=0"
NATIVE = "model.pattern=MM model.final_norm=rms"
CASES = {
    "config": Case("config blackmamba_1.5b"),
    "new": Case("new mine --from quickstart"),
    "train": Case(f"train tiny folder=runs name=mine {SHORT} checkpoint.every=5", saves=True),
    "train --nproc": Case(
        f"train tiny --nproc 2 parallel.expert=2 folder=runs name=mine {SHORT} checkpoint.every=5", saves=True
    ),
    "anneal": Case("anneal {material}/runs/mine --tokens 30720 --name annealed folder=runs", saves=True),
    "average": Case("average {material}/runs/mine {material}/runs/other averaged"),
    "keep-bias": Case("keep-bias {material}/runs/mine kept --text {material}/text/0.jsonl"),
    "plan": Case("plan blackmamba_2.8b --nodes 8 --suggest"),
    "doctor": Case("doctor --folder runs"),
    "launch": Case("launch tiny --nodes 1 --gpus-per-node 1 --dry-run"),
    "report": Case("report {material}/runs/mine --out report.html --png pictures"),
    "runs": Case("runs {material}/runs"),
    "compare": Case("compare {material}/runs/mine {material}/runs/other --out compare.html"),
    "quickstart": Case("quickstart --minutes 0.1 --folder quickstart"),
    "generate": Case("generate {material}/runs/mine --prompt a --max-new-tokens 2000"),
    "chat": Case("chat {material}/runs/mine --port 0"),
    "verify": Case("verify {material}/exported --against {material}/runs/mine"),
    "evaluate": Case("evaluate {material}/runs/mine --tasks arc_easy --data {material}/tasks --out scores.json"),
    "evaluate --text": Case(
        "evaluate {material}/runs/mine --text {material}/text/0.jsonl --limit 200 --out scores.json"
    ),
    "evaluate --tasks length": Case(
        "evaluate {material}/runs/mine --tasks length --text {material}/text/0.jsonl --limit 40 --out scores.json"
    ),
    "evaluate --nproc": Case(
        "evaluate {material}/runs/mine --tasks arc_easy --data {material}/tasks --nproc 2 --out scores.json"
    ),
    "study": Case("study smoke --folder study --jobs 2"),
    "data tokenize": Case(
        "data tokenize {material}/text out --tokenizer {material}/tokens/tokenizer.json --workers 2 --shard-size 8"
    ),
    "data tokenize --train-tokenizer": Case("data tokenize {material}/text out --train-tokenizer 8192"),
    "data mixture": Case("data mixture {material}/mixture.yaml --sequence-length 64"),
    "data inspect": Case("data inspect {material}/tokens --lengths"),
    "data verify": Case("data verify {material}/tokens --workers 2"),
    "data adopt": Case("data adopt foreign/text --tokenizer {material}/tokens/tokenizer.json"),
    "data dedup": Case("data dedup {material}/text deduplicated --part-size 4 --workers 2"),
    "data filter": Case("data filter {material}/recipe.yaml {material}/text filtered --workers 2"),
    "data report": Case("data report {material}/tokens --out corpus.html"),
    "data decontaminate": Case(
        "data decontaminate {material}/text clean --against {material}/text/3.jsonl --workers 2"
    ),
    "data trace": Case("data trace {material}/runs/mine --step 3"),
    "data corpora": Case("data corpora"),
    "export hf": Case("export hf {material}/runs/mine out --nproc 2"),
    "export refresh": Case("export refresh {material}/exported --check short"),
    "export gguf": Case("export gguf {material}/runs/native out.gguf"),
    "export zyphra": Case("export zyphra {material}/runs/mine out"),
    "import hf": Case("import hf {material}/exported out"),
    "import zyphra": Case("import zyphra {material}/released out --activation gelu"),
}


def make_material(folder: Path) -> Path:
    """Fill a folder with texts, shards, a run, its exports and a task; what exists stays."""
    if (folder / "done").exists():
        return folder
    (folder / "text").mkdir(parents=True, exist_ok=True)
    chosen = random.Random(1)
    words = ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=chosen.randint(2, 9))) for _ in range(20_000)]
    for number in range(4):
        with open(folder / "text" / f"{number}.jsonl", "w") as file:
            for _ in range(6_000):
                file.write(json.dumps({"text": " ".join(chosen.choices(words, k=150))}) + "\n")
    (folder / "tasks").mkdir(exist_ok=True)
    with open(folder / "tasks" / "arc_easy.jsonl", "w") as file:
        for number in range(400):
            choices = {"text": chosen.choices(words, k=4), "label": ["A", "B", "C", "D"]}
            question = " ".join(chosen.choices(words, k=20))
            file.write(
                json.dumps({"id": str(number), "question": question, "choices": choices, "answerKey": "A"}) + "\n"
            )
    mixture = {"sources": [{"name": "text", "shards": "tokens", "tokens": 1e6, "weight": 1}]}
    (folder / "mixture.yaml").write_text(json.dumps(mixture))
    (folder / "recipe.yaml").write_text("- gopher_repetition\n- gopher_quality\n- pii\n")
    shared = f"{SHORT} model.vocab_size=512 folder=runs data.kind=mixture data.mixture={folder}/mixture.yaml"
    for command in (
        "data tokenize text/0.jsonl tokens --train-tokenizer 512",
        f"train tiny name=mine {shared} training.stop_after_steps=6",
        f"train tiny name=other {shared} training.seed=2 training.stop_after_steps=6",
        f"train tiny name=native {NATIVE} {shared} training.stop_after_steps=1",
        "export hf runs/mine exported",
        "export zyphra runs/mine released",
    ):
        done = subprocess.run([*PROGRAM, *command.split()], cwd=folder, env=environment(), capture_output=True)
        assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
    (folder / "done").touch()
    return folder


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a command: one thread a process, this tree's package."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


@dataclass
class Outcome:
    """The end of one interrupted command."""

    code: int
    lines: list[str]
    seconds: float
    """From the signal to the end."""
    wrong: str
    """What should not be; empty if all is well."""


def interrupt(case: Case, material: Path, delay: float | None, folder: Path) -> Outcome:
    """Start the command in an empty folder, send SIGINT to its process group after `delay` seconds, and judge."""
    work, scratch = folder / "work", folder / "scratch"
    work.mkdir(parents=True)
    scratch.mkdir()
    if "foreign" in case.words:
        (work / "foreign").mkdir()
        for suffix in (".bin", ".idx"):
            shutil.copy(next(material.glob(f"tokens/*{suffix}")), work / f"foreign/text{suffix}")
    words = case.words.format(material=material).split()
    with open(folder / "output", "w+") as output, open(folder / "errors", "w+") as errors:
        process = subprocess.Popen(
            [*PROGRAM, *words],
            cwd=work,
            env=environment(TMPDIR=str(scratch), INTERRUPTED_TEST=str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        sent = time.monotonic()
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            _kill(folder)
            process.wait()
        seconds = time.monotonic() - sent
        alive = _alive(folder)
        errors.seek(0)
        lines = errors.read().splitlines()
    wrong = _judge(case, process.returncode, lines, seconds, delay)
    time.sleep(0.1)
    if alive and _alive(folder):
        time.sleep(1)
        if left := _alive(folder):
            wrong = wrong or f"processes live on: {left}"
            _kill(folder)
    hidden = [str(path.relative_to(work)) for path in work.rglob("*") if ".tmp" in path.name or path.name[0] == "."]
    hidden = [name for name in hidden if Path(name).name not in (".lock", ".work", ".metadata")]
    left = [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")]
    if process.returncode and (hidden or left):
        wrong = wrong or f"left behind: {hidden + left}"
    return Outcome(process.returncode, lines, seconds, wrong)


def _judge(case: Case, code: int, lines: list[str], seconds: float, delay: float | None) -> str:
    said = [line for line in lines if line.startswith("blackmamba: interrupted")]
    bad = [line for line in lines if any(word in line for word in BAD_WORDS)]
    if code == 0 and not bad and not said:
        return ""  # it had ended, or was about to
    if code in (1, -signal.SIGINT) and delay and delay < STARTS and not any(OURS in line for line in lines):
        return ""
    if bad:
        return f"code {code}, {len(lines)} lines: {bad[-1][:150]}"
    if case.saves and code == SAVED:
        return ""
    if code != 130:
        return f"code {code}: {lines[-3:]}"
    if len(said) != 1 or lines[-1] != said[0]:
        return f"not one last line: {lines[-3:]}"
    return f"took {seconds:.1f} s" if seconds > 10 else ""


def _alive(folder: Path) -> list[int]:
    """Return the processes that the command in this folder has started, by a variable of their environment."""
    found, mark = [], f"INTERRUPTED_TEST={folder}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _kill(folder: Path) -> None:
    for number in _alive(folder):
        os.kill(number, signal.SIGKILL)


def length(name: str, material: Path, folder: Path, longest: float = LONGEST) -> float:
    """Return how long the command takes if nobody interrupts it, at most `longest`."""
    started = time.monotonic()
    outcome = interrupt(CASES[name], material, longest, folder)
    taken = min(longest, time.monotonic() - started)
    assert outcome.code in (0, 1, 130, SAVED, -2), (name, outcome)
    return taken


def main() -> None:
    """Interrupt the named commands, or all, and print what went wrong."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("names", nargs="*", help="Commands; all by default.")
    asked.add_argument("--times", type=int, default=40)
    asked.add_argument("--seed", type=int, default=int(time.time()))
    asked.add_argument("--material", type=Path, help="Folder to keep the runs and texts in.")
    asked.add_argument("--longest", type=float, default=LONGEST, help="Seconds of a command in which to interrupt it.")
    options = asked.parse_args()
    print(f"seed {options.seed}", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        material = make_material((options.material or Path(place) / "material").resolve())
        for name in options.names or CASES:
            taken = length(name, material, Path(place) / "length", options.longest)
            shutil.rmtree(Path(place) / "length")
            chosen = random.Random(f"{options.seed} {name}")
            codes: Counter[int] = Counter()
            slowest, wrongs = 0.0, []
            for _ in range(options.times):
                delay = 0.001 + chosen.random() * taken
                outcome = interrupt(CASES[name], material, delay, Path(place) / "one")
                shutil.rmtree(Path(place) / "one", ignore_errors=True)
                codes[outcome.code] += 1
                slowest = max(slowest, outcome.seconds)
                if outcome.wrong:
                    wrongs.append(f"after {delay:.3f} s: {outcome.wrong}")
            failed += len(wrongs)
            print(
                f"{name}: {options.times} in {taken:.1f} s, codes {dict(codes)}, at most {slowest:.1f} s to end,"
                f" {len(wrongs)} wrong",
                flush=True,
            )
            for line in wrongs:
                print(f"    {line}", flush=True)
    print(f"{failed} wrong", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
