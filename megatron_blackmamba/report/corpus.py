"""The page of a corpus: what is in it, what is in it twice, what should not be in it, and documents to read."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape

from megatron_blackmamba.data_tools.corpus_figures import VALIDATION, Corpus, Group
from megatron_blackmamba.data_tools.inspection import QUANTILES, text_of_ids, tokenizer_of
from megatron_blackmamba.data_tools.near_copies import SIMILARITY, Place
from megatron_blackmamba.data_tools.progress import listed
from megatron_blackmamba.data_tools.provenance import origin
from megatron_blackmamba.report import charts, html

READ = 5
"""Documents of each source on the page."""
FINDINGS = 3
"""Sources that the head of the page names."""
MANY = 0.05
"""Part of a source's documents with near-copies from which the head names it; of validation text, any is."""
_CHARACTERS = 1500
_LANGUAGES = 12
_DRAWN_TOGETHER = 4
"""Sources in one chart."""


def render(corpus: Corpus, paths: Sequence[str], tokenizer: str | None = None) -> str:
    """Return the whole page as one HTML string."""
    names = listed(paths)
    sections = [
        html.section("Sources", []) + _sources(corpus.groups),
        _copies(corpus, tokenizer),
        _contamination(corpus),
        html.section("Lengths", _lengths(corpus.groups), "Tokens of a document, with its end-of-document token.")
        + _quantiles(corpus.groups),
        html.section(f"{corpus.by.capitalize()}s", _languages(corpus), _languages_words(corpus)),
        _documents(corpus.groups),
    ]
    said = "".join(f'<p class="answer">{escape(line)}</p>' for line in _findings(corpus))
    header = f"<h1>{escape(names)}</h1>{said}{html.facts(_facts(corpus.groups))}"
    command = f"blackmamba data report {names}"
    return html.page(
        f"{names} · corpus", header, sections, f"Written {datetime.now():%Y-%m-%d %H:%M} by {escape(command)}."
    )


def _findings(corpus: Corpus) -> Iterator[str]:
    """Yield what to look at first: items of evaluations, copies of validation text, and sources full of copies."""
    for task in corpus.contamination:
        if task.items:
            held = ", ".join(f"{number:,} of {name}" for name, number in task.documents.items() if number)
            yield f"{len(task.items):,} of {task.looked_for:,} items of {task.task} are in documents: {held}."
    copies, parts = corpus.copies, []
    training = [i for i, name in enumerate(copies.groups) if not name.endswith(VALIDATION)]
    for i, name in enumerate(copies.groups):
        most, where = max((int(copies.found[i, j]), copies.groups[j]) for j in training) if training else (0, "")
        among = copies.compared[i] or 1
        if most and (name.endswith(VALIDATION) or most >= MANY * among):
            place = "the same source" if where == name else f"{where}, which is trained on"
            parts.append((most / among, f"{most:,} of {among:,} documents of {name} have a near-copy in {place}."))
    yield from (said for _, said in sorted(parts, reverse=True)[:FINDINGS])
    if not parts and training:
        yield f"No source has near-copies in {MANY:.0%} of its documents, and no validation text is trained on."


def _facts(groups: Sequence[Group]) -> list[tuple[str, str]]:
    training = [group for group in groups if not group.name.endswith(VALIDATION)]
    held_out = [group for group in groups if group.name.endswith(VALIDATION)]
    facts = [("sources", str(len(training)))]
    for kind, some in (("", training), ("validation ", held_out)):
        for name in ("documents", "tokens") if some else ():
            facts.append((f"{kind}{name}", charts.short(sum(group.total(name) for group in some))))
    return facts


def _sources(groups: Sequence[Group]) -> str:
    columns = ["source", "documents", "tokens", "share", "bytes a token", "skipped", "raw files", "shards"]
    tokens = sum(group.total("tokens") for group in groups if not group.name.endswith(VALIDATION)) or 1
    rows = []
    for group in groups:
        own = group.total("tokens")
        share = "" if group.name.endswith(VALIDATION) else f"{own / tokens:.1%}"
        size = f"{group.total('text_bytes') / max(1, own):.2f}"
        counts = [f"{group.total('documents'):,}", f"{own:,}", share, size, f"{group.skipped:,}"]
        rows.append([group.name, *counts, f"{group.raw_files:,}", f"{len(group.shards):,}"])
    return html.table(columns, rows)


def _lengths(groups: Sequence[Group]) -> list[charts.Bars]:
    drawn = []
    for some in _together(groups):
        counts = [group.lengths.counts.tolist() + [0] * 32 for group in some]
        powers = [power for power in range(32) if any(row[power] for row in counts)]
        names = [f"{2**power:,} to {2 ** (power + 1) - 1:,}" for power in powers]
        shares = {
            group.name: [row[power] / max(1, group.lengths.documents) for power in powers]
            for group, row in zip(some, counts, strict=True)
        }
        drawn.append(charts.Bars("Share of the documents, by tokens", names, shares))
    return drawn


def _quantiles(groups: Sequence[Group]) -> str:
    columns = ["tokens of a document", "shortest", *(f"{share:.0%} quantile" for share in QUANTILES), "longest", "mean"]
    rows = []
    for group in groups:
        known = group.lengths
        values = [known.shortest, *(known.quantiles[share] for share in QUANTILES), known.longest]
        rows.append([group.name, *(f"{value:,}" for value in values), f"{known.mean:,.1f}"])
    return html.table(columns, rows)


def _together(groups: Sequence[Group]) -> list[Sequence[Group]]:
    """Return the groups of each chart."""
    return [groups[first : first + _DRAWN_TOGETHER] for first in range(0, len(groups), _DRAWN_TOGETHER)]


def _languages(corpus: Corpus) -> list[charts.Bars]:
    drawn = []
    for some in _together(corpus.groups):
        total = sum((group.languages for group in some), Counter[str]())
        names = [name for name, _ in total.most_common(_LANGUAGES)]
        shares = {
            group.name: [group.languages[name] / max(1, group.languages.total()) for name in names] for group in some
        }
        drawn.append(charts.Bars(f"Share of the documents, by {corpus.by}", names, shares))
    return drawn


def _languages_words(corpus: Corpus) -> str:
    most = max(len(group.sample) for group in corpus.groups)
    known = f"Of {most:,} random documents of each source, or all where it has fewer."
    model = " Install the extra `language` to tell languages apart." if corpus.by == "script" else ""
    return known + model


def _copies(corpus: Corpus, tokenizer: str | None) -> str:
    copies = corpus.copies
    words = (
        "Documents of the source in the first column that have a near-copy in the source above. At least "
        f"{SIMILARITY:.0%} of the distinct pairs of neighbouring tokens are in both."
    )
    if copies.checked < copies.proposed:
        words += f" The counts are too low: of {copies.proposed:,} candidate pairs, {copies.checked:,} were compared."
    columns = zip(copies.groups, copies.compared, copies.documents, copies.found.tolist(), strict=True)
    rows = [[name, f"{compared:,} of {total:,}", *map(_count, found)] for name, compared, total, found in columns]
    table = html.table(["near-copies of", "compared", *copies.groups], rows)
    shown = [
        _pair(copies.places[one], copies.places[other], similarity, tokenizer)
        for _, examples in sorted(copies.examples.items())
        for one, other, similarity in examples
    ]
    pairs = html.folded(f"{len(shown)} pairs to read", "".join(shown)) if shown else ""
    return html.section("Near-copies", [], words) + table + pairs


def _pair(one: Place, other: Place, similarity: float, tokenizer: str | None) -> str:
    names, texts = [], []
    for shard, place in (one, other):
        names.append(f"{origin(shard.manifest, place)} in {shard.prefix}")
        texts.append(text_of_ids(shard.document(place), tokenizer_of(shard, tokenizer))[:_CHARACTERS])
    return html.details(f"{similarity:.0%}: {' and '.join(names)}", "\n\n[the other one:]\n\n".join(texts))


def _count(number: int) -> str:
    return f"{number:,}" if number else "–"


def _contamination(corpus: Corpus) -> str:
    if not corpus.contamination:
        words = "Not looked for. Add --against with names of tasks, or files of evaluation items."
        return html.section("Evaluation items", [], words)
    names = [group.name for group in corpus.groups]
    rows = [
        [task.task, f"{task.looked_for:,}", f"{len(task.items):,}", *(_count(task.documents[name]) for name in names)]
        for task in corpus.contamination
    ]
    read = ", ".join(f"{len(group.sample):,} of {group.name}" for group in corpus.groups)
    words = f"Items found in random documents, and documents of each source that hold some. Read were {read}."
    table = html.table(["task", "items looked for", "items found", *names], rows)
    return html.section("Evaluation items", [], words) + table


def _documents(groups: Sequence[Group]) -> str:
    shown = []
    for group in groups:
        for document in group.sample[:: max(1, len(group.sample) // READ)][:READ]:
            text = document.text[:_CHARACTERS] + (" [...]" if len(document.text) > _CHARACTERS else "")
            shown.append(html.details(f"{group.name}: {document.origin}, {len(document.ids):,} tokens", text))
    return html.section("Documents", [], "Random documents of each source.") + "".join(shown)
