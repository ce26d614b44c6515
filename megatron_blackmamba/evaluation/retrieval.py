"""Does a model find a fact that it has read far back? Passkeys in filler, and values of keys among other pairs."""

import hashlib
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

from megatron_blackmamba.evaluation.model import Pair, ScoredModel
from megatron_blackmamba.formats.evaluations import ScoringKey, TaskResult
from megatron_blackmamba.tokenizer import Tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the fact is: 0 at the beginning, 1 just before the question."""
SHORTEST = 128
QUESTIONS = 4
"""Questions for each length and depth."""
TIMES = 4
"""The default length, in lengths of training."""
SENTENCES = (
    "The grass is green.", "The sky is blue.", "The sun is bright.", "The river runs to the sea.",
    "Here we go again.", "There and back again.", "The road goes on.", "The night was long.",
    "Nobody knew the reason.", "It rained all day.", "The old house was quiet.", "They waited for the train.",
)  # fmt: skip
SYLLABLES = ("ba", "do", "fi", "ku", "le", "mo", "na", "pi", "ro", "su", "ta", "ve", "wo", "xi", "zu")


@dataclass(frozen=True)
class Retrieval:
    """Questions about one fact in a long context, made from a seed: `passkey` or `recall`."""

    kind: str
    length: int | None

    version = "1"
    file: Path | None = None

    @property
    def name(self) -> str:
        """Return the name among the tasks."""
        return f"length:{self.kind}"

    @property
    def sha256(self) -> str:
        """Return a hash of what determines the questions, beside their number and the tokenizer."""
        return hashlib.sha256(f"{self.kind} {SENTENCES} {SYLLABLES} {DEPTHS}".encode()).hexdigest()

    def longest(self, model: ScoredModel) -> int:
        """Return the tokens of the longest context."""
        return self.length or TIMES * model.max_length

    def measure(self, key: ScoringKey, model: ScoredModel, limit: int | None) -> TaskResult:
        """Ask `limit` questions for each length and depth, each with the fact and with another one in its place."""
        cells = [*product(doubling(SHORTEST, key.max_length), DEPTHS)]
        asked = [(cell, number) for cell in cells for number in range(limit or QUESTIONS)]
        pairs: list[Pair] = []
        for (length, depth), number in asked:
            chosen = random.Random(f"{self.kind} {length} {depth} {number}")
            pairs += QUESTION[self.kind](chosen, model.text, length, depth)
        scores = model.scores(pairs, max(len(context) + len(answer) for context, answer in pairs))
        right, other = scores[::2], scores[1::2]
        hits = [float(greedy) for _, greedy in right]
        gains = [(mine - theirs) / math.log(2) for (mine, _), (theirs, _) in zip(right, other, strict=True)]
        rows = []
        for cell in cells:
            places = [i for i, (of_cell, _) in enumerate(asked) if of_cell == cell]
            means = {
                name: statistics.fmean(all[i] for i in places)
                for name, all in (("accuracy", hits), ("gain_bits", gains))
            }
            rows.append({"length": cell[0], "depth": cell[1], **means})
        answers = {"accuracy": hits, "gain_bits": gains}
        metrics = {name: statistics.fmean(values) for name, values in answers.items()}
        errors = {name: statistics.stdev(values) / math.sqrt(len(values)) for name, values in answers.items()}
        return TaskResult(key, metrics, errors, len(asked), answers, 0.0, rows=rows)


def doubling(first: int, last: int) -> list[int]:
    """Return lengths that double from the first on, and the last."""
    found = [first]
    while found[-1] < last:
        found.append(min(2 * found[-1], last))
    return found


def passkey(chosen: random.Random, tokenizer: Tokenizer, length: int, depth: float) -> list[Pair]:
    """Return the context with its key and the context with another key, both with the first key as the answer."""
    key, another = chosen.sample(range(10_000, 100_000), 2)
    filler = partial(chosen.choice, [f" {sentence}" for sentence in SENTENCES])
    facts = [f" The pass key is {each}. Remember it: {each} is the pass key." for each in (key, another)]
    return _asked(tokenizer, length, depth, filler, facts, " What is the pass key? The pass key is", f" {key}")


def recall(chosen: random.Random, tokenizer: Tokenizer, length: int, depth: float) -> list[Pair]:
    """Return pairs of keys and values; the asked key has its value in the first context, and another in the second."""
    asked, value = _word(chosen, 3), _word(chosen, 2)

    def another(word: str, syllables: int) -> str:
        while (found := _word(chosen, syllables)) == word:
            continue
        return found

    values = value, another(value, 2)
    facts = [f"{asked} = {value}\n" for value in values]
    return _asked(
        tokenizer,
        length,
        depth,
        lambda: f"{another(asked, 3)} = {_word(chosen, 2)}\n",
        facts,
        f"{asked} =",
        f" {value}",
    )


QUESTION = {"passkey": passkey, "recall": recall}


def _asked(
    tokenizer: Tokenizer,
    length: int,
    depth: float,
    filler: Callable[[], str],
    facts: list[str],
    question: str,
    answer: str,
) -> list[Pair]:
    """Return a context of about `length` tokens for each fact, with the fact at a depth of the filler."""
    ask, tell = tokenizer.encode(question), tokenizer.encode(answer)
    told = [tokenizer.encode(fact) for fact in facts]
    left = length - 1 - len(ask) - max(map(len, told))
    pieces: list[list[int]] = []
    while len(piece := tokenizer.encode(filler())) <= left:
        pieces.append(piece)
        left -= len(piece)
    before = round(depth * len(pieces))
    first, rest = ([*chain.from_iterable(some)] for some in (pieces[:before], pieces[before:]))
    return [([tokenizer.eod_id, *first, *fact, *rest, *ask], tell) for fact in told]


def _word(chosen: random.Random, syllables: int) -> str:
    return "".join(chosen.choices(SYLLABLES, k=syllables))
