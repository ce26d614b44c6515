"""The model `blackmamba` for lm-eval; importing this module registers it."""

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_blackmamba.evaluation.encoding import encode_pairs
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.model import ScoredModel
from megatron_blackmamba.formats.evaluations import Encoding
from megatron_blackmamba.inference import Generator, Sampling

TYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32}


@register_model("blackmamba")
class BlackMambaLM(ScoredModel, LM):
    """A scored model as lm-eval wants one."""

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
        LM.__init__(self)
        ScoredModel.__init__(
            self,
            Path(pretrained),
            dtype=_dtype(dtype),
            device=device,
            tokenizer=None if tokenizer is None else Path(tokenizer),
            nproc=nproc,
            batch_tokens=batch_tokens,
            max_length=max_length,
            ema=ema,
        )
        self.encoding = Encoding(encoding)

    @property
    def tokenizer_name(self) -> str:
        return self.text.sha256

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations; equal requests are scored once."""
        pairs = [request.args for request in requests]
        distinct = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        scores = self.scores(encode_pairs(list(distinct), self.text, self.encoding))
        results = [scores[distinct[pair]] for pair in pairs]
        for pair, result in zip(pairs, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, result)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts in windows, each token with as much context as fits."""
        windows = []
        for request in requests:
            tokens = self.text.encode(request.args[0], special_text=True)
            found = get_rolling_token_windows(tokens, self.text.eod_id, self.max_length, 1)
            windows.append([make_disjoint_window(window) for window in found])
        return self.totals(windows)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Write greedily until a stop text, the end of the document or max_gen_toks; contexts are cut on the left."""
        greedily, texts = Sampling(temperature=0.0), []
        for request in requests:
            context, given = request.args
            settings: Any = normalize_gen_kwargs(given)
            if settings["do_sample"]:
                raise EvaluationError("the model blackmamba writes greedily: set do_sample: false in the task")
            stop, limit = [text for text in settings["until"] if text], settings["max_gen_toks"]
            if limit >= self.max_length:
                raise EvaluationError(
                    f"max_gen_toks={limit} leaves nothing of max_length={self.max_length} for the context: set a larger"
                    " max_length in --model_args, or a smaller max_gen_toks in the task"
                )
            model = Generator(self.decoder, self.text, longest=self.max_length - limit)
            texts.append(model.generate(context, max_new_tokens=limit, sampling=greedily, stop=stop))
            self.cache_hook.add_partial("generate_until", (context, given), texts[-1])
        return texts


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return the type that a name means; None lets the checkpoint and the device decide, as lm-eval's `auto` does."""
    if given is None or isinstance(given, torch.dtype):
        return given
    if given != "auto" and given not in TYPES:
        raise EvaluationError(f"dtype={given}: no such type. Choose one of auto, {', '.join(TYPES)}.")
    return TYPES.get(given)
