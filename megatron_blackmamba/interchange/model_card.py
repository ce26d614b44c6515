"""The README.md of an export: what the model is, what it was trained on as far as is known, and how to load it."""

from collections import Counter
from fractions import Fraction
from typing import Any

import yaml

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.formats.evaluations import Evaluation
from megatron_blackmamba.interchange.canonical import Canonical, tokenizer_of
from megatron_blackmamba.interchange.families import FAMILIES
from megatron_blackmamba.layers import layers_of, routes
from megatron_blackmamba.routers import kind_of

_GATES = {
    "silu": "SwiGLU (the experts gate with SiLU)",
    "gelu": "GeGLU (the experts gate with erf-GELU)",
    "relu2": "the square of ReLU gates",
}


def model_card(model: Canonical, native: str = "") -> str:
    """Return the card; `native` is the model type of an export that needs no code."""
    config, past = model.config, model.past()
    trust = "" if native else ", trust_remote_code=True"
    works = (
        f"A `{native}` of transformers: it loads without code of its own."
        if native
        else "Works with transformers 4.50 and later. Where the package `megatron-blackmamba` is installed, its kernels"
        " are used."
    )
    layers = Counter(kind.name for kind in layers_of(config.pattern))
    counted = ", ".join(f"{number} {name}" for name, number in layers.items())
    rows = {
        "Parameters": f"{model.parameters:,}, of which {forward_parameters(model):,} active for each token",
        "Layers": f"{config.layers}: {counted} (`{config.pattern}`)",
        "Width": _width(model),
        "Experts": _experts(model),
        "Activation": _GATES[config.activation] if config.gated else f"{config.activation}, without a gate",
        "Vocabulary": f"{config.vocab_size:,}" + (", tied with the output" if config.tie_embeddings else ""),
        "Precision": _precision(model),
        "Documents": _documents(model),
        **{str(name): str(value) for name, value in past.facts.items()},
    }
    if not routes(config.pattern):
        del rows["Experts"], rows["Activation"]
    adds = (
        "" if (tokenizer := tokenizer_of(model)) is None or not tokenizer.adds_tokens else ", add_special_tokens=False"
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
{_metadata(model, past.evaluation, native)}
---
# {_title(native)}

A base language model of these kinds of layers: {", ".join(layers)}. It continues text; it does not follow instructions.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
model = AutoModelForCausalLM.from_pretrained(folder{trust})
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
inputs = tokenizer("The state of a recurrent model", return_tensors="pt"{adds})
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

{works}
{"" if native else _training(config)}{_scores(past.evaluation)}"""


def _title(native: str) -> str:
    return f"{FAMILIES[native]} language model" if native else "BlackMamba"


def _metadata(model: Canonical, evaluation: Evaluation | None, native: str) -> str:
    """Return the fields that the hub reads, as YAML."""
    kinds = ["mamba"] * _has(model, "A_log") + ["mixture-of-experts"] * routes(model.config.pattern)
    fields: dict[str, Any] = {
        "license": model.license,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["blackmamba", *kinds, native or "custom_code"],
    }
    if evaluation is not None and evaluation.results:
        results = [
            {
                "task": {"type": "text-generation"},
                "dataset": {"name": task, "type": task},
                "metrics": [{"type": name, "value": value} for name, value in result.metrics.items()],
            }
            for task, result in evaluation.by_task().items()
        ]
        fields["model-index"] = [{"name": _title(native), "results": results}]
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).strip()


def _scores(evaluation: Evaluation | None) -> str:
    """Return the table of scores, or nothing."""
    if evaluation is None or not evaluation.results:
        return ""
    lines = [
        "",
        "## Evaluation",
        "",
        "Scored with `blackmamba evaluate`, which uses the tasks of lm-eval.",
        "",
        "| task | metric | value | standard error | questions |",
        "|---|---|---|---|---|",
    ]
    for task, result in evaluation.by_task().items():
        for name, value in result.metrics.items():
            error = result.errors.get(name)
            cells = (task, name, f"{value:.4f}", "–" if error is None else f"{error:.4f}", f"{result.questions:,}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _has(model: Canonical, parameter: str) -> bool:
    """Return whether any layer has a parameter of this name."""
    return any(name.endswith(f".mixer.{parameter}") for name in model.entries)


def _width(model: Canonical) -> str:
    """Return the width of the residual stream, and the sizes of the recurrent layers."""
    decays = {entry.shape for name, entry in model.entries.items() if name.endswith(".mixer.A_log")}
    sizes = {shape[1] if len(shape) == 2 else model.config.mamba2.state_size for shape in decays}
    recurrent = f"; state {' and '.join(map(str, sorted(sizes)))}, convolution {model.config.conv_kernel}"
    return str(model.config.hidden_size) + (recurrent if sizes else "")


def _precision(model: Canonical) -> str:
    """Return the precision of the matrices, and the parameters that have another one."""
    other = {name.partition(".mixer.")[2] for name, entry in model.entries.items() if entry.dtype != model.dtype}
    text = str(model.dtype).removeprefix("torch.")
    return text + (f"; {', '.join(sorted(other))} in float32" if other else "")


def _documents(model: Canonical) -> str:
    """Return how the text before a document affects it."""
    texts = []
    reset = model.config.eod_reset
    if _has(model, "A_log") or _has(model, "dt_bias"):
        texts.append("the state runs across documents" if reset is None else f"the state restarts after token {reset}")
    if _has(model, "linear_qkv.weight"):
        apart = reset is not None and not model.config.attention.across_documents
        texts.append("attention stays in a document" if apart else "attention reads across documents")
    return "; ".join(texts)


def _training(config: ModelConfig) -> str:
    """Return what training with the files does to the balance of the experts, or nothing."""
    if not routes(config.pattern):
        return ""
    if not kind_of(config.router.kind).balanced_by_exports:
        return "Training with these files does not balance the experts.\n"
    option = "`from_pretrained(..., balance_in_training=True)`"
    return f"Training with these files balances the experts only with {option}.\n"


def _experts(model: Canonical) -> str:
    config = model.config
    use = kind_of(config.router.kind).use(config)
    text = f"{config.experts} of {config.expert_hidden_size}, {config.top_k if config.top_k > 1 else 'one'} a token,"
    text += f" scaled by the {use.scores} of its logit" + (" over the sum" if use.normalized else "")
    text += ", chosen with a bias" if use.biased else ""
    text += f", at a width of {config.latent_size}" if config.latent_size else ""
    shared = config.shared_expert_hidden_size
    return text + (f"; and one of {shared} for all tokens" if shared else "")


def forward_parameters(model: Canonical) -> int:
    """Return the parameters active for each token: all but the experts it is not sent to."""
    config, total = model.config, Fraction(0)
    used = {f"decoder.layers.{i}.mixer.": kind for i, kind in enumerate(layers_of(config.pattern))}
    for name, entry in model.entries.items():
        start, mixer, own = name.partition(".mixer.")
        kind = used.get(start + mixer)
        part = kind.parts(config)[kind.part_of(own)] if kind else 1
        total += part * (entry.bytes // entry.dtype.itemsize)
    return int(total)
