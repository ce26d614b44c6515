"""Answers of llama.cpp about a GGUF file: tokens of texts, logits, and greedy tokens.

As a program it runs in an environment with llama-cpp-python alone: `PYTHON llama_cpp_probe.py FILE`, and standard input
is `{"texts": […], "prompt": […], "more": N}`. Keys and values stay in fp32 here; llama.cpp's default is fp16.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PYTHON = "LLAMA_CPP_PYTHON"
"""The variable that names the Python of that environment."""
GGML_F32 = 0


def ask(file: Path, texts: Sequence[str] = (), prompt: Sequence[int] = (), more: int = 0) -> dict[str, Any]:
    """Return what llama.cpp says of a file."""
    asked = json.dumps({"texts": list(texts), "prompt": list(prompt), "more": more})
    done = subprocess.run([os.environ[PYTHON], __file__, str(file)], input=asked, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"llama.cpp ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    from llama_cpp import Llama

    asked = json.load(sys.stdin)
    f32 = {"type_k": GGML_F32, "type_v": GGML_F32}
    model = Llama(sys.argv[1], n_ctx=512, n_threads=1, logits_all=True, verbose=False, **f32)
    answer = {"tokens": [model.tokenize(text.encode(), add_bos=True, special=False) for text in asked["texts"]]}
    if asked["prompt"]:
        model.eval(asked["prompt"])
        answer["logits"] = model.scores[: model.n_tokens].tolist()
        greedy = [int(model.scores[model.n_tokens - 1].argmax())]
        while len(greedy) < asked["more"]:
            model.eval(greedy[-1:])
            greedy.append(int(model.scores[model.n_tokens - 1].argmax()))
        answer["greedy"] = greedy
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
