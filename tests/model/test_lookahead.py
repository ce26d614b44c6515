"""A layer, router or last norm that reads later tokens is refused by name before the first step."""

import re

import pytest
import torch

from megatron_blackmamba import layers, norms, routers
from megatron_blackmamba.config import load
from megatron_blackmamba.model import lookahead
from tests.layers.fused import Fused
from tests.layers.running_mean.exported import sums
from tests.layers.running_mean.kind import RunningMean
from tests.model.shifted_norm import ShiftedNorm
from tests.routers.levelled.kind import Levelled
from tests.routers.unbalanced import Unbalanced

pytestmark = pytest.mark.xdist_group("pages")  # shares its session


MODULE = """
from megatron_blackmamba import layers
from tests.model.test_lookahead import WholeMean

layers.register(WholeMean)
"""


class Own(Fused):
    """A layer as a user may write it, between two projections."""

    letter, name = "O", "own"

    def state(self, model):
        return None

    def between(self, x, gate, gain, scale, inputs):
        return self.mix(x, inputs) * gate.sigmoid() * gain * scale


class Centred(Own):
    def mix(self, x, inputs):
        return x + x.roll(-1, 1)


class Chunked(Own):
    """Chunks of 64 tokens, which end where the changed tokens begin."""

    def mix(self, x, inputs):
        return x.unflatten(1, (-1, 64)).cumsum(2).flip(2).flatten(1, 2)


class WholeMean(Own):
    cut = None

    def mix(self, x, inputs):
        return x.mean(1, keepdim=True)


class Hidden(WholeMean):
    def initial(self, name, shape, model, random):
        return torch.zeros(shape) if name == "out_proj.weight" else super().initial(name, shape, model, random)


class Forgetless(Own):
    def mix(self, x, inputs):
        return sums(x, None, None)


class Careful(Own):
    """The mean by a Fourier transform, which rounds, and in training over the whole sequence."""

    def mix(self, x, inputs):
        length = x.shape[1]
        spectrum = torch.fft.rfft(x, 2 * length, dim=1) * torch.fft.rfft(x.new_ones(length), 2 * length)[:, None]
        return torch.fft.irfft(spectrum, 2 * length, dim=1)[:, :length]


class Broken(Own):
    def mix(self, x, inputs):
        raise RuntimeError("needs a GPU")


class Endless(Own):
    def mix(self, x, inputs):
        return x / 0


class AheadRouter(Unbalanced):
    name = "ahead"

    def selecting(self, logits_TE, at):
        return logits_TE - logits_TE.mean(0)


class BalancedRouter(Unbalanced):
    """Balances in training alone."""

    name = "balanced"

    def choose(self, logits_TE, at):
        return (logits_TE - logits_TE.mean(0)).topk(at.model.top_k).indices


class AheadNorm(ShiftedNorm):
    name = "ahead"

    def apply(self, x, parameters_D, eps, settings):
        return super().apply(x / x.norm(dim=0, keepdim=True), parameters_D, eps, settings)


def refuse(kinds, *overrides):
    """Register kinds, check a model that uses them, and forget them."""
    registries = {layers.LayerKind: layers, routers.RouterKind: routers, norms.NormKind: norms}
    homes = [next(home for base, home in registries.items() if issubclass(kind, base)) for kind in kinds]
    added = []
    try:
        for kind, home in zip(kinds, homes, strict=True):
            home.register(kind)
            added.append((home, kind.letter if home is layers else kind.name))
        return lookahead.refuse(load("tiny", ["data.sequence_length=128", *overrides]))
    finally:
        for home, name in added:
            home.unregister(name)


@pytest.mark.parametrize("kind", [Centred, Chunked, Hidden])
def test_layers_that_read_later_tokens_are_refused(kind):
    named = rf"decoder\.layers\.1 and 1 more \(O, {kind.__name__} of tests\.model\.test_lookahead\) reads later tokens"
    with pytest.raises(lookahead.LookaheadError, match=named):
        refuse([kind], "model.pattern=MOEO")


def test_layers_that_read_another_document_are_refused():
    assert refuse([Forgetless], "model.pattern=OE") == []
    with pytest.raises(lookahead.LookaheadError, match=r"Forgetless of .* reads the document before"):
        refuse([Forgetless], "model.pattern=OE", "model.eod_reset=3")


def test_routers_and_norms_are_refused_by_name():
    with pytest.raises(lookahead.LookaheadError, match=r"^model\.router\.kind=ahead \(AheadRouter of .*\) reads later"):
        refuse([AheadRouter], "model.router.kind=ahead")
    with pytest.raises(lookahead.LookaheadError, match=r"^model\.final_norm=ahead \(AheadNorm of .*\) reads later"):
        refuse([AheadNorm], "model.final_norm=ahead")


def test_causal_examples_pass():
    words = ["model.pattern=AFE", "model.router.kind=levelled", "model.final_norm=shifted_norm", "model.eod_reset=3"]
    assert refuse([RunningMean, Fused, Levelled, ShiftedNorm], *words) == []
    assert refuse([Careful, BalancedRouter], "model.pattern=OE", "model.router.kind=balanced") == []


@pytest.mark.parametrize(("kind", "why"), [(Broken, "RuntimeError: needs a GPU"), (Endless, "not finite")])
def test_what_cannot_be_checked_is_noted(kind, why):
    (note,) = refuse([kind], "model.pattern=OE")
    assert re.search(rf"decoder\.layers\.0 .*: not checked for later tokens \(.*{why}", note)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        *(("model.router.kind", kind) for kind in routers.all_kinds()),
        *(("model.final_norm", kind) for kind in norms.all_kinds()),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_routers_and_norms_of_the_package_pass(key, kind):
    config = load("tiny", [f"{key}={kind.name}"])
    (part,) = (part for part in lookahead.parts_of(config.model) if part.kind is kind)
    assert lookahead.problem_of(part, config) is None


@pytest.mark.parametrize("layout", ["tensor=2", "context=2", "pipeline=2", "expert=2"])
def test_layers_are_refused_under_every_layout(layout):
    with pytest.raises(lookahead.LookaheadError, match="WholeMean"):
        refuse([WholeMean], "model.pattern=OE", "model.eod_reset=3", f"parallel.{layout}", "training.precision=bf16")


@pytest.mark.parametrize("command", ["train tiny", "plan tiny", "launch tiny --nodes 1 --gpus-per-node 1 --dry-run"])
def test_commands_refuse_and_leave_no_run(session, tmp_path, command):
    (tmp_path / "ahead.py").write_text(MODULE)
    done = session.run(f"blackmamba {command} model.pattern=OE", tmp_path, BLACKMAMBA_IMPORT="ahead")
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("decoder.layers.0 (O, WholeMean of tests.model.test_lookahead) reads later tokens") == 1
    assert "Traceback" not in done.stdout and not list(tmp_path.glob("runs/*/*"))
