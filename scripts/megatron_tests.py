#!/usr/bin/env python3
"""Run megatron-core's own unit tests on CPUs, under the changes of `megatron_blackmamba.engine.changes`.

    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    pip install einops nltk pytest-mock requests six                   # what those tests import
    python scripts/megatron_tests.py Megatron-LM                       # everything below, hours on two cores
    python scripts/megatron_tests.py Megatron-LM tensor_parallel/test_layers.py

The checkout must be of the installed version of megatron-core (its wheel has no tests); its
`megatron/core` is not used. Each file runs in eight gloo ranks. A test has passed if it passed on all ranks.
What fails or hangs runs once more alone, since a failed collective leaves the other ranks waiting.
scripts/megatron_tests.md keeps the results so far, with the cause of each failure.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from megatron_blackmamba.runtime.ports import free_port

FOLDERS = ("tensor_parallel", "pipeline_parallel", "distributed", "dist_checkpointing", "transformer/moe", "data")
PERSISTENT = "its spawned writer chooses among the GPUs, of which there are none"
ON_A_GPU = "asks for its result on a GPU"
# Files and folders, or the beginnings of test names, that CPUs cannot run.
LEFT_OUT = {
    "tensor_parallel/test_initialization.py::Test::test_te_": "layers of Transformer Engine",
    "distributed/test_finalize_model_grads.py::TestAllReduceLNGrads": "layers of Transformer Engine",
    "tensor_parallel/test_tensor_parallel_utils.py::test_gather_split_1d_tensor": "gloo gathers no matrix from vectors",
    "tensor_parallel/test_random.py::test_checkpoint_without_output": "Transformer Engine's FP8 state",
    "tensor_parallel/test_random.py::test_convert_cuda_rng_state": "generators of CUDA graphs",
    "tensor_parallel/test_random.py::test_double_fork_cuda_rng_states_tracker[True]": "generators of CUDA graphs",
    "distributed/megatron_fsdp": "Megatron-FSDP builds its device mesh on CUDA",
    "distributed/test_torch_fully_sharded_parallel.py": "FSDP2 shards on CUDA streams",
    "dist_checkpointing/test_fp8.py": "FP8 tensors are Transformer Engine's",
    "dist_checkpointing/models/test_bert_model.py": "builds its layers from Transformer Engine",
    "dist_checkpointing/models/test_mamba.py": "builds its layers from mamba-ssm",
    "dist_checkpointing/test_async_save.py::TestAsyncSave::test_async_is_equivalent_to_sync[True-True]": PERSISTENT,
    "dist_checkpointing/test_async_save.py::TestAsyncSave::test_async_is_equivalent_to_sync[False-True]": PERSISTENT,
    "dist_checkpointing/models/test_moe_experts.py": "builds its experts from Transformer Engine",
    "pipeline_parallel/test_fine_grained_activation_offloading.py": "offloads with CUDA streams and pinned memory",
    "transformer/moe/test_multihot_indices_converter.py": "a CUDA kernel",
    "transformer/moe/test_sequential_mlp.py::TestParallelSequentialMLP::test_gpu_forward": ON_A_GPU,
    "transformer/moe/test_shared_experts.py::TestSharedExperts::test_gpu_forward": ON_A_GPU,
    "transformer/moe/test_shared_experts.py::TestSharedExpertsOverlap::test_gpu_forward": ON_A_GPU,
    "data/test_preprocess_mmdata.py": "reads images with torchvision",
    "data/test_preprocess_data.py": "downloads a tokenizer",
    "data/test_bin_reader.py": "downloads a tokenizer",
    "data/test_fim_dataset.py": "needs a tokenizer of NVIDIA's test machines",
    "distributed/test_grad_sync_with_expert_parallel.py": "builds its layers from Transformer Engine",
}
MISSING = re.compile(
    r"name 'TE\w+' is not defined|transformer_engine|Transformer Engine|typed_torch|Grouped GEMM is not available"
    r"|(sequence parallel|persist_layer_norm) not supported by torch LayerNorm|Emerging Optimizers is not installed"
)
"""What failures say that come from missing libraries: Transformer Engine, Apex (LayerNorm), grouped_gemm, Muon's."""
HERE = Path(__file__).resolve().parent
START = 300  # seconds until the first test begins, on a busy machine
PASSED, SKIPPED, FAILED, HUNG = "passed", "skipped", "failed", "hung"


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended on the way out
    work = options.work or Path(tempfile.mkdtemp(prefix="megatron_tests_"))
    prepare(options.checkout, work)
    results = work / "results.jsonl"
    done = {json.loads(line)["file"] for line in results.read_text().splitlines()} if results.exists() else set()
    waiting = [name for name in test_files(work, options.tests) if name not in done]
    start = time.monotonic()
    for place, name in enumerate(waiting, 1):
        began = time.monotonic()
        outcomes = run_file(work, name, options)
        record = {"file": name, "seconds": round(time.monotonic() - began), "outcomes": outcomes}
        with open(results, "a") as file:
            file.write(json.dumps(record) + "\n")
        left = (time.monotonic() - start) / place * (len(waiting) - place) / 60
        print(
            f"{place}/{len(waiting)} {name}: {counts(outcomes)} in {record['seconds']} s, {left:.0f} min left",
            flush=True,
        )
        for test, (outcome, why) in outcomes.items():
            if outcome in (FAILED, HUNG):
                print(f"  {outcome} {test.split('::', 1)[-1]}: {why[:300]}", flush=True)
    everything: dict[str, list[str]] = {}
    for line in results.read_text().splitlines():
        everything |= json.loads(line)["outcomes"]
    print(f"all: {counts(everything)}; results: {results}")
    return int(any(outcome in (FAILED, HUNG) for outcome, _ in everything.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="Source tree of Megatron-LM, of the installed version.")
    parser.add_argument("tests", nargs="*", default=FOLDERS, help="Files or folders below tests/unit_tests.")
    parser.add_argument("--ranks", type=int, default=8, help="Number of ranks (default 8; the tests expect it).")
    parser.add_argument("--limit", type=float, default=900, help="Seconds for one file (default 900).")
    parser.add_argument("--test-limit", type=float, default=180, help="Seconds without news from a test (default 180).")
    parser.add_argument("--work", type=Path, help="Folder for copies and results; a second call resumes in it.")
    return parser.parse_intermixed_args()  # also tests after options


def prepare(checkout: Path, work: Path) -> None:
    """Copy what the tests need next to each other, so that the installed megatron.core is the one they import."""
    version = importlib.metadata.version("megatron-core")
    info = checkout / "megatron" / "core" / "package_info.py"
    if not (checkout / "tests" / "unit_tests").is_dir() or not info.exists():
        sys.exit(
            f"no source tree of Megatron-LM with its tests: {checkout}. Clone it: git clone --branch core_v{version}"
        )
    found = runpy.run_path(str(info))["__version__"]
    if found != version:
        sys.exit(f"megatron-core {version} is installed, but {checkout} is {found}: check out core_v{version}.")
    packages = [path for path in (checkout / "megatron").iterdir() if path.is_dir() and path.name != "core"]
    for source in [checkout / "tests", checkout / "tools", *packages, *checkout.glob("*.py")]:
        target = work / source.relative_to(checkout)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy(source, target)


def test_files(work: Path, names: list[str]) -> list[str]:
    top = work / "tests" / "unit_tests"
    files = []
    for name in names:
        path = top / name
        if not path.exists():
            sys.exit(f"no such test: {path}.")
        files += [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    relative = list(dict.fromkeys(str(file.relative_to(top)) for file in files))
    for name in relative:
        reason = next((why for part, why in LEFT_OUT.items() if name == part or name.startswith(part + "/")), None)
        if reason:
            print(f"{name}: left out: {reason}")
    return [name for name in relative if not any(name == part or name.startswith(part + "/") for part in LEFT_OUT)]


def run_file(work: Path, name: str, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return each test's outcome and reason; what failed after another failure runs once more alone."""
    deadline = time.monotonic() + options.limit
    outcomes: dict[str, list[str]] = {}
    while time.monotonic() < deadline:
        news = run_ranks(work, name, sorted(outcomes), [], options, deadline)
        outcomes |= news
        if list(news) == ["collection"] and any(part.startswith(f"{name}::") for part in LEFT_OUT):
            return {"collection": [SKIPPED, "all of its tests are left out by name"]}
        if not any(outcome == HUNG for outcome, _ in news.values()):
            break
    skip_what_is_missing(outcomes)
    for test in [test for test, (outcome, _) in outcomes.items() if outcome in (FAILED, HUNG)]:
        if time.monotonic() < deadline:
            alone = run_ranks(work, name, [], [test], options, deadline)
            outcomes[test] = alone.get(test, outcomes[test])
    skip_what_is_missing(outcomes)
    if time.monotonic() >= deadline:
        outcomes[f"{name}::the rest"] = [HUNG, f"the limit of {options.limit:g} s for the file"]
    return outcomes


def skip_what_is_missing(outcomes: dict[str, list[str]]) -> None:
    """Count a failure for want of a library as skipped."""
    for test, (outcome, why) in outcomes.items():
        if outcome == FAILED and MISSING.search(why):
            outcomes[test] = [SKIPPED, f"needs a GPU library: {why}"]


def run_ranks(work, name, skip, only, options, deadline) -> dict[str, list[str]]:
    """Run a file's tests in all ranks until they end, or until none has had news for a while."""
    news = Path(tempfile.mkdtemp(dir=work, prefix="news_"))
    common = {
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(work), str(HERE)]),
    }
    temporary = work / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "tmp_dist_ckpt").mkdir(parents=True)  # rank 0 makes it while the others already write there
    orders = {"news": str(news), "temporary": str(temporary), "skip": skip, "only": only, "left_out": list(LEFT_OUT)}
    common["MEGATRON_TESTS"] = json.dumps(orders)
    command = [sys.executable, str(HERE / "megatron_tests_plugin.py"), "-q", "-p", "no:cacheprovider"]
    command += ["-p", "megatron_tests_plugin", "-o", "addopts=", f"tests/unit_tests/{name}"]
    with open(news / "ranks.log", "wb") as log:
        ranks = subprocess.Popen(
            command, cwd=work, env=os.environ | common, stdout=log, stderr=log, start_new_session=True
        )
    try:
        hung = wait(ranks, news, deadline, options.test_limit)
        if hung:
            os.killpg(ranks.pid, signal.SIGUSR1)  # each rank writes its stacks
            time.sleep(2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    return merge(news, options.ranks, hung)


def wait(ranks: subprocess.Popen, news: Path, deadline: float, patience: float) -> bool:
    """Return whether the ranks had to be given up."""
    last, size = time.monotonic(), -1
    while ranks.poll() is None:
        time.sleep(0.5)
        now = time.monotonic()
        written = sum(file.stat().st_size for file in news.glob("*.jsonl"))
        if written != size:
            last, size = now, written
        if now > deadline or now > last + (patience if size else START):
            return True
    return False


def merge(news: Path, ranks: int, hung: bool) -> dict[str, list[str]]:
    """Merge the ranks' reports: the worst outcome of a test counts; one that some rank began and not all ended hung."""
    reports: dict[str, dict[int, list[str]]] = {}
    begun: dict[str, set[int]] = {}
    for rank in range(ranks):
        file = news / f"{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            entry = json.loads(line)
            begun.setdefault(entry["test"], set()).add(rank)
            if "outcome" in entry:
                reports.setdefault(entry["test"], {})[rank] = [entry["outcome"], entry["why"]]
    outcomes = {}
    for test in begun:
        of_test = reports.get(test, {})
        failed = [f"rank {rank}: {why}" for rank, (outcome, why) in sorted(of_test.items()) if outcome == FAILED]
        if failed:
            outcomes[test] = [FAILED, failed[0]]
        elif len(of_test) < ranks:
            waiting = sorted(set(range(ranks)) - set(of_test))
            what = f"; {waits_in(news, waiting[0])}" if hung else "; a rank died"
            outcomes[test] = [HUNG, f"no end on ranks {waiting}{what}"]
        else:
            kinds = {outcome for outcome, _ in of_test.values()}
            outcomes[test] = [PASSED if PASSED in kinds else SKIPPED, next(why for _, why in of_test.values())]
    if not begun:
        log = (news / "ranks.log").read_text(errors="replace").splitlines()
        outcomes["collection"] = [FAILED, next((line for line in reversed(log) if "Error" in line), "no test ran")]
    return outcomes


def waits_in(news: Path, rank: int) -> str:
    """Return the innermost frames of a rank's main thread, which is the last that faulthandler writes."""
    stacks = news / f"{rank}.stacks"
    main = stacks.read_text().split("(most recent call first):")[-1] if stacks.exists() else ""
    return f"rank {rank} waits in: " + " < ".join(line.strip() for line in main.strip().splitlines()[:6])


def counts(outcomes: dict[str, list[str]]) -> str:
    found = Counter(outcome for outcome, _ in outcomes.values())
    return ", ".join(f"{found[kind]} {kind}" for kind in (PASSED, SKIPPED, FAILED, HUNG) if found[kind]) or "no tests"


if __name__ == "__main__":
    sys.exit(main())
