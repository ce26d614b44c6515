"""The model `blackmamba` for lm-eval; importing this module registers it."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_blackmamba.evaluation.encoding import encode_pairs
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.scoring import Batch, Item, Score, make_item, plan
from megatron_blackmamba.evaluation.workers import Here, Load, Pool, default_processes
from megatron_blackmamba.formats.evaluations import Encoding
from megatron_blackmamba.inference import Decoder, Generator, Sampling
from megatron_blackmamba.inference.generator import usable_device
from megatron_blackmamba.inference.weights import fitting_dtype
from megatron_blackmamba.interchange.canonical import tokenizer_of
from megatron_blackmamba.interchange.open import open_model

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
TYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32}


class Watcher(Protocol):
    """A recorder of scores that can also return the scores of an earlier call."""

    def known(self, batches: Sequence[Batch]) -> list[Score]:
        """Return scores of an earlier call for the same batches."""
        ...

    def done(self, batch: Batch, scores: list[Score]) -> None:
        """Record the scores of a batch."""
        ...


@register_model("blackmamba")
class BlackMambaLM(LM):
    """A model of any kind that `blackmamba generate` reads, scored through its recurrent state."""

    def __init__(
        self,
        pretrained: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        tokenizer: str | Path | None = None,
        encoding: str | Encoding = Encoding.joint,
        nproc: int | None = None,
        batch_tokens: int | None = None,
        max_length: int | None = None,
        ema: bool = False,
        **ignored: Any,
    ):
        """Load the model; `batch_tokens` replaces lm-eval's batch_size and max_batch_size, which are ignored."""
        super().__init__()
        self.watcher: Watcher | None = None
        path = Path(pretrained)
        source = open_model(path, None if tokenizer is None else Path(tokenizer), ema=ema)
        text = tokenizer_of(source)
        if text is None:
            raise EvaluationError(f"{path}: this model has no tokenizer. Name one with --tokenizer FILE")
        self.text = text
        self.encoding = Encoding(encoding)
        self.max_length = max_length or source.sequence_length
        where = usable_device(device)
        given = _dtype(dtype)
        self.dtype = given or fitting_dtype(source, where)
        self.batch_tokens = batch_tokens or BATCH_TOKENS[where.type]
        self._load = Load(path, self.dtype, None if tokenizer is None else Path(tokenizer), ema)
        self._place = device
        processes = nproc or default_processes(device)
        self.scorer: Here | Pool = Here(lambda: self.decoder)
        if processes > 1:
            self.scorer = Pool(self._load, processes, device)

    @cached_property
    def decoder(self) -> Decoder:
        """Return the model in this process."""
        return self._load(self._place)

    @property
    def tokenizer_name(self) -> str:
        return self.text.sha256

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations; equal requests are scored once."""
        pairs = [request.args for request in requests]
        distinct = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        scores = self._scores(encode_pairs(list(distinct), self.text, self.encoding))
        results = [scores[distinct[pair]] for pair in pairs]
        for pair, result in zip(pairs, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, result)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts in windows, each token with as much context as fits."""
        owners: list[int] = []
        pairs: list[tuple[list[int], list[int]]] = []
        for number, request in enumerate(requests):
            tokens = self.text.encode(request.args[0], special_text=True)
            windows = get_rolling_token_windows(tokens, self.text.eod_id, self.max_length, 1)
            made = [make_disjoint_window(window) for window in windows]
            pairs += made
            owners += [number] * len(made)
        totals = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._scores(pairs), strict=True):
            totals[owner] += log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Write greedily until a stop text, the end of the document or max_gen_toks."""
        model, greedily = Generator(self.decoder, self.text), Sampling(temperature=0.0)
        texts = []
        for request in requests:
            context, settings = request.args
            if settings.get("do_sample"):
                raise EvaluationError("the model blackmamba writes greedily: set do_sample: false in the task")
            stop = [text for text in settings.get("until", []) if text]
            limit = int(settings.get("max_gen_toks", 256))
            texts.append(model.generate(context, max_new_tokens=limit, sampling=greedily, stop=stop))
        return texts

    def _scores(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        items = [make_item(i, context, rest, self.max_length) for i, (context, rest) in enumerate(pairs)]
        batches = plan([item for item in items if item.scored], self.batch_tokens)
        found = {item.index: (0.0, True) for item in items if not item.scored}  # an empty continuation is certain

        def note(scores: list[Score]) -> None:
            found.update({score.item: (score.log_likelihood, score.greedy) for score in scores})

        def done(batch: Batch, scores: list[Score]) -> None:
            note(scores)
            if self.watcher:
                self.watcher.done(batch, scores)

        if self.watcher:
            note(self.watcher.known(batches))
        left = [batch for batch in batches if any(item.index not in found for item in _items(batch))]
        self.scorer.score_all(left, self.batch_tokens, done)
        return [found[i] for i in range(len(items))]

    def close(self) -> None:
        """Stop the scoring processes."""
        self.scorer.close()


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return the type that a name means; None lets the checkpoint and the device decide, as lm-eval's `auto` does."""
    if given is None or isinstance(given, torch.dtype):
        return given
    if given != "auto" and given not in TYPES:
        raise EvaluationError(f"dtype={given}: no such type. Choose one of auto, {', '.join(TYPES)}.")
    return TYPES.get(given)


def _items(batch: Batch) -> list[Item]:
    return [item for group in batch for item in group.items]
