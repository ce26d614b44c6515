"""Checks of a run's settings by the kinds of layers, routers, norms and optimizers, which settings do not know."""

from collections.abc import Callable, Iterable, Iterator

from megatron_blackmamba import layers, norms, optimizers, routers
from megatron_blackmamba.config import extensions, groups, mup
from megatron_blackmamba.registry import ImportFailed, UnknownKind, own_module
from megatron_blackmamba.settings import ModelConfig, RunConfig

FP8_MULTIPLE = 16
"""Sides of matrices that are multiplied in FP8 are multiples of this."""
Problem = tuple[str, str]
"""A section of the config, such as "model.router", and what is wrong with it."""


def problem_of(run: RunConfig) -> Problem | None:
    """Return what is wrong with a run first, or None."""
    return problem_of_model(run.model) or _first(
        ("optimizer", lambda: [" ".join(optimizers.problems(run.optimizer))]),
        (extensions.OPTIMIZER, lambda: extensions.problems_of_optimizer(run.optimizer)),
        ("", lambda: groups.problems(run)),
        ("", lambda: mup.problems(run)),
        ("", lambda: _clipped(run)),
        ("", lambda: _without_experts(run)),
        ("", lambda: _in_fp8(run)),
        ("", lambda: _in_float64(run)),
        ("", lambda: _exported(run)),
        ("", lambda: _cut(run)),
        ("", lambda: _extra_depth(run)),
    )


def problem_of_model(model: ModelConfig) -> Problem | None:
    """Return what is wrong with a model first, or None."""
    return _first(
        ("model.pattern", lambda: _letters(model.pattern)),
        ("model.final_norm", lambda: _norm(model.final_norm)),
        ("model.router", lambda: [" ".join(routers.problems(model.router))]),
        (extensions.MODEL, lambda: extensions.problems_of_model(model)),
        ("model", lambda: ("; ".join(kind.problems(model)) for kind in layers.kinds_in(model.pattern))),
        ("", lambda: _without_layers(model)),
    )


def _first(*asked: tuple[str, Callable[[], Iterable[str]]]) -> Problem | None:
    """Return the first problem; an answer may rely on those before it."""
    for section, ask in asked:
        try:
            problem = next(filter(None, ask()), None)
        except (UnknownKind, ImportFailed) as error:
            problem = str(error)
        if problem:
            return section, problem
    return None


def _letters(pattern: str) -> Iterator[str]:
    wrong = sorted(set(pattern) - {kind.letter for kind in layers.all_kinds()})
    if wrong or not pattern:
        own = f". {own_module()}" if wrong else ""
        yield f"a pattern is made of {layers.described()}; found {wrong or 'nothing'}{own}"
    for kind in layers.kinds_in(pattern):
        assert kind.costs  # refuses a cost that leaves a question open


def _norm(name: str) -> Iterator[str]:
    norms.kind_of(name)  # refuses an unknown one
    yield from ()


def _without_layers(model: ModelConfig) -> Iterator[str]:
    """Refuse what is added to layers that the model does not have."""
    for key, readers in layers.unread_switches(model).items():
        yield f"model.{key}: only {readers} have it, and model.pattern={model.pattern} has none. Remove the key."


def _without_experts(run: RunConfig) -> Iterator[str]:
    expert, pattern = run.parallel.expert, run.model.pattern
    if expert > 1 and not layers.routes(pattern):
        yield f"parallel.expert={expert}, but the pattern {pattern!r} has no layer with experts"


def _clipped(run: RunConfig) -> Iterator[str]:
    """Refuse a cap of logits that no layer computes, or that do not depend on the size of the weights."""
    if run.optimizer.qk_clip is None:
        return
    if readers := layers.unread_keys(run.model.pattern).get("attention"):
        yield f"optimizer.qk_clip: only {readers} have logits, and model.pattern={run.model.pattern} has none."
    if run.model.attention.qk_norm:
        yield (
            "optimizer.qk_clip shrinks queries and keys, whose size model.attention.qk_norm=true removes. Leave out"
            " one of them."
        )


def _in_fp8(run: RunConfig) -> Iterator[str]:
    """Refuse FP8 products of other precisions, and of sizes that GPUs do not multiply."""
    if run.kernels.linear != "fp8":
        return
    if run.training.precision != "bf16":
        yield (
            f"kernels.linear=fp8 rounds bf16 tensors: it needs training.precision=bf16, not"
            f" {run.training.precision}. Set both, or leave kernels.linear=local."
        )
    sizes = [("model.hidden_size", run.model.hidden_size, 1)]
    if layers.routes(run.model.pattern):
        sizes.append(("model.expert_hidden_size", run.model.expert_hidden_size or 0, run.parallel.expert_tensor))
        sizes.append(("model.latent_size", run.model.latent_size or 0, 1))
    for key, size, ranks in sizes:
        if size % (FP8_MULTIPLE * ranks):
            parts = f" / parallel.expert_tensor={ranks}" if ranks > 1 else ""
            yield (
                f"{key}={size}{parts} must be a multiple of {FP8_MULTIPLE} for kernels.linear=fp8. Change the size,"
                " or use kernels.linear=local."
            )


def _in_float64(run: RunConfig) -> Iterator[str]:
    """Refuse fp64 with implementations that would compute in a lower precision."""
    if run.training.precision != "fp64":
        return
    if run.kernels.linear == "te":
        yield "kernels.linear=te has no float64: training.precision=fp64 needs kernels.linear=local"
    for key, op in (("scan", "selective_scan"), ("ssd", "ssd"), ("delta", "delta")):
        wanted = getattr(run.kernels, key)
        exact = _exact(op) if wanted != "auto" else ()
        if wanted not in ("auto", *exact):
            yield (f"kernels.{key}={wanted} computes in fp32: training.precision=fp64 needs auto, {' or '.join(exact)}")


def _exact(op: str) -> list[str]:
    """Return the backends of an op that compute in float64; torch is imported only here."""
    from megatron_blackmamba.ops import backends

    return backends.exact(f"{backends.ROOT}.{op}")


def _exported(run: RunConfig) -> Iterator[str]:
    """Refuse exports of models that a Hugging Face folder cannot hold, before the first one is due."""
    if not run.checkpoint.export_every:
        return
    reasons = layers.obstacles(run.model)
    if run.training.precision == "fp64":
        reasons.append("training.precision=fp64 has no place in a Hugging Face model")
    if reasons:
        yield f"checkpoint.export_every cannot export this model: {'; '.join(reasons)}. Set it to 0."


def _extra_depth(run: RunConfig) -> Iterator[str]:
    """Refuse multi-token prediction that the run cannot train."""
    pattern = run.model.mtp.pattern
    if pattern is None:
        return
    if not pattern or set(pattern) - set(run.model.pattern):
        yield f"model.mtp.pattern={pattern!r} is made of letters of model.pattern={run.model.pattern}"
    if run.model.arrangement == "parallel":
        yield "model.mtp has no parallel arrangement. Use model.arrangement=sequential, or leave out model.mtp.pattern."


def _cut(run: RunConfig) -> Iterator[str]:
    """Refuse parallel.context with layers or implementations that pass no state on."""
    context = run.parallel.context
    if context == 1:
        return
    for kind in layers.kinds_in(run.model.pattern):
        if cut := kind.uncut(run.model):
            yield (
                f"parallel.context={context} cannot cut the sequences of {kind.name} layers ({kind.letter}):"
                f" {cut.reason}. Use parallel.context=1."
            )
    if run.kernels.scan == "mamba_ssm":
        yield f"kernels.scan=mamba_ssm takes no initial state: parallel.context={context} needs kernels.scan=auto"
