"""Scores and CPU seconds of `blackmamba evaluate` beside lm-eval's `hf` backend, on the same questions in the same run.

    python -m benchmarks.evaluation --data DIR [--model EXPORT] [--limit 200] [--tasks paper] [--batch-size 8]

Both score the same Hugging Face export in fp32. Without --model it has random weights, the width of blackmamba_1.5b and
--layers layers, and a tokenizer must be given. CPU seconds are this process's and include tokenization. The exit code
is 1 if a choice differs, or a log-likelihood by more than 1e-4. Rounding can swap two experts whose logits are nearly
equal, and so change the log-likelihood of one continuation by more than that.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import cpu_model
from benchmarks.generation import random_model
from megatron_blackmamba.config import load
from megatron_blackmamba.evaluation.tasks import load_tasks, names_of
from megatron_blackmamba.interchange import hf

CLOSE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="an export; by default random weights")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokenizer", type=Path, help="of the random model")
    parser.add_argument("--tasks", default="paper")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="of the hf backend")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or export_random(Path(folder) / "model", arguments.layers, arguments.tokenizer)
        rows = compare(model, names_of(arguments.tasks), arguments.data, arguments.limit, arguments.batch_size)
    show(rows, arguments.json)
    sys.exit(any(row["different_choices"] or row["largest_difference"] > CLOSE for row in rows))


def export_random(folder: Path, layers: int, tokenizer: Path | None) -> Path:
    """Write a model of random weights as an export."""
    config = load("blackmamba_1.5b").model
    config = config.model_copy(update={"pattern": config.pattern[:layers]})
    model = random_model(config)
    entries = {
        name: replace(entry, dtype=torch.float32, load=lambda entry=entry: entry.load().float())
        for name, entry in model.entries.items()
    }
    hf.write(replace(model, entries=entries, tokenizer=tokenizer), folder)
    return folder


def compare(model: Path, names: list[str], data: Path, limit: int, batch_size: int) -> list[dict[str, Any]]:
    """Return a row of results for each task."""
    from lm_eval.models.huggingface import HFLM

    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    theirs = HFLM(pretrained=str(model), trust_remote_code=True, device="cpu", dtype="float32", batch_size=batch_size)
    ours = BlackMambaLM(model, dtype="float32", device="cpu", nproc=1)
    assert theirs.max_length == ours.max_length
    ours.decoder  # noqa: B018  load now: neither load is counted
    rows = []
    for task in load_tasks(names, data, download=False):
        task.task.build_all_requests(limit=limit)
        requests = task.task.instances
        ours_scores, our_seconds = timed(lambda r=requests: ours.loglikelihood(r))
        their_scores, their_seconds = timed(lambda r=requests: theirs.loglikelihood(r, disable_tqdm=True))
        differences = [abs(a[0] - b[0]) for a, b in zip(ours_scores, their_scores, strict=True)]
        questions: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            questions.setdefault(request.doc_id, []).append(number)
        rows.append(
            {
                "task": task.name,
                "questions": len(questions),
                "different_choices": sum(
                    choice(ours_scores, numbers) != choice(their_scores, numbers) for numbers in questions.values()
                ),
                "scores": len(requests),
                "beyond": sum(difference > CLOSE for difference in differences),
                "largest_difference": max(differences),
                "ours_cpu_s": our_seconds,
                "hf_cpu_s": their_seconds,
            }
        )
    return rows


def timed(call: Any) -> tuple[list[tuple[float, bool]], float]:
    """Return a call's result and its CPU seconds."""
    begun = time.process_time()
    result = call()
    return result, time.process_time() - begun


def choice(scores: list[tuple[float, bool]], numbers: list[int]) -> int | bool:
    """Return the likeliest of a question's choices; of a single continuation, whether greedy decoding writes it."""
    if len(numbers) == 1:
        return scores[numbers[0]][1]
    return max(range(len(numbers)), key=lambda i: scores[numbers[i]][0])


def show(rows: list[dict[str, Any]], as_json: bool) -> None:
    ours, theirs = (sum(row[key] for row in rows) for key in ("ours_cpu_s", "hf_cpu_s"))
    if as_json:
        print(json.dumps({"machine": cpu_model(), "rows": rows, "ratio": theirs / ours}))
        return
    heads = f"{'questions':>10}{'other choice':>14}{'scores':>8}{'beyond 1e-4':>13}{'largest':>10}"
    print(f"{'task':16}{heads}{'ours, s':>10}{'hf, s':>10}{'ratio':>8}")
    for row in rows:
        times = f"{row['ours_cpu_s']:>10.2f}{row['hf_cpu_s']:>10.2f}{row['hf_cpu_s'] / row['ours_cpu_s']:>8.2f}"
        print(
            f"{row['task']:16}{row['questions']:>10}{row['different_choices']:>14}"
            f"{row['scores']:>8}{row['beyond']:>13}{row['largest_difference']:>10.1e}{times}"
        )
    print(f"all{'':68}{ours:>10.2f}{theirs:>10.2f}{theirs / ours:>8.2f}   {cpu_model()}")


if __name__ == "__main__":
    main()
