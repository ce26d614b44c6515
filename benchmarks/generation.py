"""Time per generated token against length: BlackMamba here and in transformers, Mamba, and a dense transformer.

    python -m benchmarks.generation [--lengths 10 100 1000 2000 4000] [--repeats 15] [--threads 2] [--plot FILE]

This is the paper's figure: one-token prompt, growing length, batch 1. Weights are random, in bf16. All models at all
lengths take turns of two tokens, so other load on the machine affects all of them. The token before these two is not
counted, because the threads of the previous model may still be spinning.

- ours: `megatron_blackmamba.inference`, generating from a one-token prompt to the last length
- export: the exported modeling files in plain PyTorch (`kernels="torch"`)
- mamba: transformers' own Mamba with as many parameters as ours uses per token
- transformer: transformers' Llama of the same size with a KV cache, filled to that length
- bound: bytes that a step of ours must read, divided by the fastest of three measured read bandwidths

The bandwidth is measured once per round, and its median is used, as for the times. The size of a state does not depend
on its past, so peers with a state start from eight tokens; ours runs to the end.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._common import cpu_model
from megatron_blackmamba.config import ModelConfig, load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange.canonical import Canonical, Entry, shapes
from megatron_blackmamba.interchange.hf import to_json
from megatron_blackmamba.ops.matvec import matvec
from megatron_blackmamba.report.charts import Line, Lines
from megatron_blackmamba.report.pictures import write_picture

Step = Callable[[], Any]
TURN = 2
NAMES = {
    "ours": "BlackMamba, recurrent decoding",
    "export": "BlackMamba, export in plain transformers",
    "mamba": "Mamba of the same active size, transformers",
    "transformer": "transformer of the same active size, KV cache",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="blackmamba_1.5b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 100, 1000, 2000, 4000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, help="number of layers, for a quick run")
    parser.add_argument("--peers", nargs="*", choices=list(NAMES)[1:], default=list(NAMES)[1:])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    config = load(arguments.model).model
    if arguments.layers:
        config = config.model_copy(update={"pattern": config.pattern[: arguments.layers]})
    result = run(config, sorted(arguments.lengths), arguments.repeats, arguments.peers)
    if arguments.plot:
        plot(result, arguments.plot)
    print(json.dumps(result, indent=2)) if arguments.json else show(result)


def run(config: ModelConfig, lengths: list[int], repeats: int, peers: list[str]) -> dict[str, Any]:
    model = random_model(config)
    decoder = Decoder(pack(model, torch.bfloat16))
    active = decoder.weights.bytes_a_token
    steps: dict[tuple[str, int], Step] = {}
    for length, step in ours(decoder, lengths).items():
        steps["ours", length] = step
    for peer in peers:
        for length, step in PEERS[peer](config, lengths).items():
            steps[peer, length] = step
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    bandwidths = []
    for repeat in range(repeats):
        bandwidths.append(read_bandwidth())
        turns = list(steps.items())
        for key, step in turns if repeat % 2 else reversed(turns):  # so that each comes after both of its neighbours
            step()
            start = time.perf_counter()
            for _ in range(TURN):
                step()
            seconds[key].append((time.perf_counter() - start) / TURN)
    bandwidth = statistics.median(bandwidths)
    return {
        "machine": machine(),
        "layers": config.layers,
        "bytes_a_token": active,
        "bandwidth": bandwidth,
        "bound_ms": 1e3 * active / bandwidth,
        "ms": {
            name: {length: 1e3 * statistics.median(seconds[name, length]) for length in lengths}
            for name in ["ours", *peers]
        },
    }


def random_model(config: ModelConfig, device: str = "cpu") -> Canonical:
    """Return weights of the right shapes, which are made when they are read."""

    def entry(name: str, shape: tuple[int, ...]) -> Entry:
        def load() -> Tensor:
            weight = torch.empty(shape, dtype=torch.bfloat16, device=device).uniform_(-0.03, 0.03)
            return weight + 1 if name.endswith(("norm.weight", ".D")) else weight

        return Entry(shape, torch.bfloat16, load)

    return Canonical(config, {name: entry(name, shape) for name, shape in shapes(config).items()}, "random weights")


def ours(decoder: Decoder, lengths: list[int]) -> dict[int, Step]:
    """Generate from one token on; keep the state at each length, and step each from there."""
    state = decoder.start(1)
    token = torch.tensor([1])
    steps = {}
    for position in range(1, max(lengths) + 1):
        token = decoder.step(state, token).argmax(dim=-1)
        if position in lengths:
            steps[position] = _stepper(decoder, state.rows(torch.tensor([0])), token)
    return steps


def _stepper(decoder: Decoder, state: Any, token: Tensor) -> Step:
    def step() -> None:
        token.copy_(decoder.step(state, token).argmax(dim=-1))

    return step


def export(config: ModelConfig, lengths: list[int]) -> dict[int, Step]:
    from megatron_blackmamba.hf.configuration_blackmamba import BlackMambaConfig
    from megatron_blackmamba.hf.modeling_blackmamba import BlackMambaForCausalLM

    described = to_json(config, 2048, torch.bfloat16) | {"kernels": "torch", "auto_map": None}
    model = randomised(BlackMambaForCausalLM, BlackMambaConfig(**described))
    return {length: hf_stepper(model, 8) for length in lengths}


def mamba(config: ModelConfig, lengths: list[int]) -> dict[int, Step]:
    model = mamba_model(config)
    return {length: hf_stepper(model, 8) for length in lengths}


def mamba_model(config: ModelConfig) -> Any:
    """Return transformers' Mamba with as many parameters as ours uses per token."""
    from transformers import MambaConfig, MambaForCausalLM

    size = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "state_size": config.state_size}
    one = parameters(MambaForCausalLM, MambaConfig(num_hidden_layers=1, **size))
    layer = parameters(MambaForCausalLM, MambaConfig(num_hidden_layers=2, **size)) - one
    layers = 1 + round((active_parameters(config) - one) / layer)
    return randomised(MambaForCausalLM, MambaConfig(num_hidden_layers=layers, **size))


def transformer(config: ModelConfig, lengths: list[int]) -> dict[int, Step]:
    model = transformer_model(config, 2 * max(lengths))
    return {length: hf_stepper(model, length) for length in lengths}


def transformer_model(config: ModelConfig, longest: int) -> Any:
    """Return transformers' Llama with as many parameters as ours uses per token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_hidden_size,
        "num_attention_heads": max(1, config.hidden_size // 72),
        "tie_word_embeddings": True,
        "max_position_embeddings": longest,
    }
    one = parameters(LlamaForCausalLM, LlamaConfig(num_hidden_layers=1, **size))
    layer = parameters(LlamaForCausalLM, LlamaConfig(num_hidden_layers=2, **size)) - one
    layers = max(1, 1 + round((active_parameters(config) - one) / layer))
    return randomised(LlamaForCausalLM, LlamaConfig(num_hidden_layers=layers, **size))


PEERS = {"export": export, "mamba": mamba, "transformer": transformer}


def hf_stepper(model: Any, length: int, rows: int = 1) -> Step:
    """Return a function that runs one step of `model` for some sequences of `length` tokens."""
    read = model(torch.ones(rows, length, dtype=torch.long), use_cache=True, logits_to_keep=1)
    named = next(name for name in ("cache", "past_key_values", "cache_params") if name in read)
    held = {"cache": read[named], "token": read.logits[:, -1].argmax(dim=-1)}

    def step() -> None:
        output = model(held["token"][:, None], **{named: held["cache"]}, use_cache=True)
        held["cache"], held["token"] = output[named], output.logits[:, -1].argmax(dim=-1)

    return step


def randomised(model_class: type, config: Any) -> Any:
    with torch.device("meta"):
        model = model_class(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    for parameter in model.parameters():
        parameter.uniform_(-0.03, 0.03)
    for name, buffer in model.named_buffers():  # rotary frequencies, which to_empty left without values
        buffer.copy_(torch.linspace(1, 1e-4, buffer.numel()).view(buffer.shape)) if "inv_freq" in name else None
    return model


def parameters(model_class: type, config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config).parameters())


def active_parameters(config: ModelConfig) -> int:
    idle = config.experts - 1
    all_of = {name: torch.Size(shape).numel() for name, shape in shapes(config).items()}
    experts = sum(size for name, size in all_of.items() if ".local_experts." in name)
    return sum(all_of.values()) - experts * idle // config.experts


def read_bandwidth() -> float:
    """Bytes a second, the best of three ways of reading what is too large for any cache."""
    memory = torch.ones(2**27, dtype=torch.float32)
    matrix = memory.view(torch.bfloat16).view(-1, 1024)
    vector = torch.ones(1, 1024)
    ways = (memory.sum, memory.view(torch.int32).amax, lambda: matvec(matrix, vector))
    best = 0.0
    for way in ways:
        start = time.perf_counter()
        way()
        best = max(best, memory.nbytes / (time.perf_counter() - start))
    return best


def machine() -> str:
    return f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def show(result: dict[str, Any]) -> None:
    lengths = list(next(iter(result["ms"].values())))
    bound = result["bound_ms"]
    print(f"{result['machine']}; {result['layers']} layers, bf16, batch 1; milliseconds a token at each length")
    print(f"{'':46}" + "".join(f"{length:>9,}" for length in lengths) + "   of the bound")
    for name, row in result["ms"].items():
        share = f"{bound / row[lengths[-1]]:>14.0%}" if name in ("ours", "export") else ""
        print(f"{NAMES[name]:46}" + "".join(f"{row[length]:9.1f}" for length in lengths) + share)
    gigabytes = f"{result['bytes_a_token'] / 1e9:.3f} GB at {result['bandwidth'] / 1e9:.1f} GB/s"
    print(f"{'bound: ' + gigabytes:46}" + f"{bound:9.1f}" * len(lengths))
    mine = list(result["ms"]["ours"].values())
    print(f"ours, longest over shortest: {mine[-1] / mine[0]:.3f}", end="")
    if "export" in result["ms"]:
        print(f"; export over ours: {result['ms']['export'][lengths[-1]] / mine[-1]:.2f}", end="")
    print()


def plot(result: dict[str, Any], path: Path) -> None:
    rows = [(NAMES[name], [*row], [*row.values()]) for name, row in result["ms"].items()]
    bound = ("memory-bandwidth bound of BlackMamba", result["bound_ms"])
    write_picture(path, [by_length(f"Generation, batch 1, bf16: {result['machine']}", rows, bound)])


def by_length(title: str, rows: Iterable[tuple[str, list[int], list[float]]], bound: tuple[str, float]) -> Lines:
    """Return a chart of milliseconds a token over the length, with a bound."""
    curves = [Line(name, lengths, ms, colour=i) for i, (name, lengths, ms) in enumerate(rows)]
    ends = [min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves)]
    curves.append(Line(bound[0], ends, [bound[1]] * 2, colour=len(curves), dashed=True, thin=True))
    return Lines(f"{title}, milliseconds a token", curves, x_label="length, tokens", zero=True, log=True)


if __name__ == "__main__":
    gc.disable()
    main()
