"""The one way to load a tokenizer: from a file, a folder or the Hugging Face hub, with its EOD id and fingerprint.

Two libraries encode. Hugging Face `tokenizers` is the reference; `fastokens`, some fifty times faster, takes over for
batches where it is installed and gives the same ids on a probe of this very vocabulary.
"""

import hashlib
import json
import os
import random
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers

from megatron_blackmamba.formats import lfs
from megatron_blackmamba.tokenizer.short_texts import SHORT_TEXT, Separator, separators

Backend = Literal["auto", "fastokens", "tokenizers"]

# Names under which published tokenizers keep their end-of-document token, most specific first.
KNOWN_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
# Files of transformers that name it, and the key of each: a token, an id or a list of ids.
EOS_KEYS = {
    "tokenizer_config.json": "eos_token",
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
}

LARGEST_ID = 2**24
"""fastokens keeps a table with a row for each id up to the largest."""
OLDEST_FASTOKENS = "0.3.5"
"""Ids of version 0.3.2 could depend on the text that was encoded before."""
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""A byte in vocabularies that fall back on bytes."""
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in _PRINTED}
"""The byte of each character in vocabularies that spell bytes as GPT-2's does: printable ones stand for themselves."""
BYTES |= {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTED)))}


class TokenizerError(ValueError):
    """A tokenizer that cannot be found, read, or used for pretraining."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its identity. Make one with `load_tokenizer`."""

    name: str
    sha256: str
    eod_id: int
    eod_token: str
    content: bytes = field(repr=False)
    backend: Backend = "auto"

    @cached_property
    def vocab_size(self) -> int:
        """Return the largest id plus one, including special and added tokens."""
        return max(self._reference.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Return the bytes of text that each id stands for; None unless the vocabulary spells bytes, as GPT-2's does.

        Special tokens stand for none, the end-of-document token among them.
        """
        if "ByteLevel" not in _types_in(json.loads(self._cleaned).get("decoder")):
            return None
        sizes, alphabet = np.zeros(self.vocab_size, np.int64), set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        added = self._reference.get_added_tokens_decoder()
        for token, number in self._reference.get_vocab(with_added_tokens=False).items():
            if number not in added and not alphabet.issuperset(token):
                return None
            sizes[number] = len(token)  # a character for each byte
        for number, found in added.items():
            sizes[number] = 0 if found.special or number == self.eod_id else len(found.content.encode())
        return sizes

    @cached_property
    def adds_tokens(self) -> bool:
        """Return whether transformers would add tokens to each text, as the file asks for. `encode` does not."""
        return self._reference.num_special_tokens_to_add(is_pair=False) > 0

    @cached_property
    def batch_backend(self) -> str:
        """Return the library that `encode_batch` uses: "fastokens" or "tokenizers"."""
        return "tokenizers" if self._fast is None else "fastokens"

    @property
    def short_name(self) -> str:
        """Return the name without the folders of this machine."""
        return Path(self.name).name if Path(self.name).exists() else self.name

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that determine the ids."""
        return {name: version(name) for name in dict.fromkeys(("tokenizers", self.batch_backend))}

    def encode(self, text: str, *, special_text: bool = False) -> list[int]:
        """Return the ids of one text, by the reference library, without adding tokens.

        With `special_text`, text that spells a special token becomes that token; otherwise it is ordinary text.
        """
        return self._with_special_text(special_text).encode(text, add_special_tokens=False).ids

    def encode_each(self, texts: Sequence[str], *, special_text: bool = False) -> list[list[int]]:
        """Return the ids of every text, by the reference library, without adding tokens."""
        encodings = self._with_special_text(special_text).encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_batch(self, texts: Sequence[str], *, special_text: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, concatenated (uint32), and the length of each (int64)."""
        if self._fast is not None:
            if not special_text and self._separator and sum(map(len, texts)) < SHORT_TEXT * len(texts):
                together = self._separator.encode(texts, self._flat)
                if together is not None:
                    return together
            return self._flat(texts, special_text)
        encodings = self._with_special_text(special_text).encode_batch_fast(list(texts), add_special_tokens=False)
        lengths = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
        ids = np.empty(int(lengths.sum()), np.uint32)
        start = 0
        for encoding, length in zip(encodings, lengths.tolist(), strict=True):
            ids[start : start + length] = encoding.ids
            start += length
        return ids, lengths

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        return self._reference.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    @cached_property
    def _eod_characters(self) -> int:
        return len(self.decode([self.eod_id]))

    def spelled(self, token: int, first: bool = False) -> tuple[str, int]:
        """Return the text of one token within a text or as its first, and the number of characters that begin in it.

        A part of a character is spelled as OpenAI does it, such as `bytes:\\xe2\\x80`: each part has a text of its own.
        """
        text = self.decode([token]) if first else self.decode([self.eod_id, token])[self._eod_characters :]
        if "\ufffd" not in text:
            return text, len(text)
        piece = self._reference.id_to_token(token) or ""
        if BYTE_TOKEN.fullmatch(piece):
            parts = bytes([int(piece[3:5], 16)])
        elif set(piece) <= BYTES.keys():
            parts = bytes(BYTES[character] for character in piece)
        else:
            return text, len(text)
        if parts.decode(errors="replace").encode() == parts:  # the token is this character itself
            return text, len(text)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts), sum(byte & 0xC0 != 0x80 for byte in parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the very bytes this tokenizer was loaded from, unless they are there already."""
        from megatron_blackmamba.formats import atomic

        if not os.path.exists(path) or Path(path).read_bytes() != self.content:
            atomic.write_bytes(path, self.content)

    @cached_property
    def _cleaned(self) -> str:
        """Return the file without settings that silently change text: truncation, padding, spelled EODs."""
        data = json.loads(self.content)
        data["truncation"] = data["padding"] = None
        for token in data.get("added_tokens") or []:
            if token["id"] == self.eod_id:
                token["special"] = True
        return json.dumps(data, ensure_ascii=False)

    @cached_property
    def _reference(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._cleaned)

    @cached_property
    def _reference_for_plain_text(self) -> tokenizers.Tokenizer:
        reference = tokenizers.Tokenizer.from_str(self._cleaned)
        reference.encode_special_tokens = True
        return reference

    def _with_special_text(self, special_text: bool) -> tokenizers.Tokenizer:
        return self._reference if special_text else self._reference_for_plain_text

    def _flat(self, texts: Sequence[str], special_text: bool) -> tuple[np.ndarray, np.ndarray]:
        return _flat(self._fast, texts, special_text)

    @cached_property
    def _separator(self) -> Separator | None:
        """Return the separator with which short texts are encoded together, or None if each is encoded alone."""
        found = list(separators(json.loads(self._cleaned), self.eod_token, self.eod_id, self.encode))
        texts = _probe_texts(self._reference.get_vocab(with_added_tokens=True)) if found else []
        return next((separator for separator in found if separator.is_exact(texts, self._flat)), None)

    @cached_property
    def _fast(self) -> Any:
        """Return the fastokens version, or None if it is disabled, not installed, or not exact."""
        if self.backend == "tokenizers":
            return None
        try:
            import fastokens
            from packaging.version import Version

            found = version("fastokens")
            if Version(found) < Version(OLDEST_FASTOKENS):
                raise ImportError(f"version {found} is too old")
            twin = fastokens.Tokenizer.from_json_str(self._cleaned)
            reason = self._first_difference(twin)
        except ImportError as error:
            reason = f"{error}. Install it with pip install -U fastokens"
        except Exception as error:  # a model it does not know is reported in many ways; all mean the same here
            reason = f"it cannot read this tokenizer ({error})"
        if reason and self.backend == "fastokens":
            raise TokenizerError(f"fastokens cannot stand in for {self.name}: {reason}. Use the backend `tokenizers`")
        return None if reason else twin

    def _first_difference(self, twin: Any) -> str | None:
        probe = _probe_texts(self._reference.get_vocab(with_added_tokens=True))
        for special_text in (False, True):
            expected = self._with_special_text(special_text).encode_batch_fast(probe, add_special_tokens=False)
            flat, lengths = _flat(twin, probe, special_text)
            ends = np.cumsum(lengths)
            for i, encoding in enumerate(expected):
                if flat[ends[i] - lengths[i] : ends[i]].tolist() != encoding.ids:
                    return f"it encodes {probe[i][:60]!r} differently"
        return None


def _flat(fast: Any, texts: Sequence[str], special_text: bool) -> tuple[np.ndarray, np.ndarray]:
    """Encode with fastokens: the ids of all texts back to back, and how many belong to each."""
    ids, offsets = fast.encode_batch_flat(list(texts), False, not special_text)
    return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(offsets, np.uint64).astype(np.int64))


def load_tokenizer(
    name: str | os.PathLike[str],
    *,
    eod: str | int | None = None,
    backend: Backend = "auto",
    revision: str | None = None,
) -> Tokenizer:
    """Load a tokenizer.json, a folder that holds one, or a Hugging Face name such as `EleutherAI/gpt-neox-20b`.

    eod: the end-of-document token or id, where the tokenizer does not say which it is.
    revision: branch, tag or commit on the hub.
    """
    path = _find_file(name, revision)
    content = path.read_bytes()
    data = _parse(content, path)
    try:
        reference = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # `tokenizers` raises bare Exception
        raise TokenizerError(f"{path}: `tokenizers` {version('tokenizers')} cannot read it: {error}") from None
    if (data.get("model") or {}).get("dropout"):
        raise TokenizerError(
            f"{path}: has BPE dropout, so the same text gives different ids each time: set model.dropout to null"
        )
    ids = [(token["content"], token["id"]) for token in data.get("added_tokens") or []]  # the library ignores these
    ids += reference.get_vocab(with_added_tokens=True).items()
    token, largest = max(ids, key=itemgetter(1), default=("", 0))
    if largest > LARGEST_ID:
        raise TokenizerError(f"{path}: the token {token!r} has the id {largest}; ids are at most {LARGEST_ID}")
    eod_id, eod_token = _find_eod(reference, eod, path)
    return Tokenizer(str(name), hashlib.sha256(content).hexdigest(), eod_id, eod_token, content, backend)


def _find_file(name: str | os.PathLike[str], revision: str | None) -> Path:
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(f"{path}: no such file; the folder holds {_listing(path.parent)}")
        return path
    if path.exists():
        return path
    text = os.fspath(name)
    could_be_on_the_hub = (
        re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) and not text.endswith(".json") and text[0] not in "./~"
    )
    if not could_be_on_the_hub or (text.count("/") and path.parent.exists()):
        below = next(path.parent.glob(f"*/{path.name}"), None)  # tokenize --hold-out makes two folders
        meant = f"; did you mean {below}?" if below else ""
        raise TokenizerError(f"{path}: no such tokenizer file (working folder: {Path.cwd()}){meant}")
    try:
        import huggingface_hub as hub

        file: dict[str, Any] = {"repo_id": text, "filename": "tokenizer.json", "revision": revision}
        try:
            hub.get_hf_file_metadata(hub.hf_hub_url(**file))  # asks once; a download tries for 24 s without network
        except Exception:
            if isinstance(cached := hub.try_to_load_from_cache(**file), str):
                return Path(cached)
            raise
        return Path(hub.hf_hub_download(**file))
    except ImportError:
        raise TokenizerError(
            f"{text}: no such file, and no huggingface_hub to fetch it: pip install huggingface_hub"
        ) from None
    except Exception as error:  # missing repository, missing file, gated, offline: many types, one advice
        summary = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TokenizerError(
            f"{text}: no such file or folder, and the Hugging Face hub did not give its tokenizer.json "
            f"({type(error).__name__}: {summary}). On a machine without network, fetch tokenizer.json "
            "elsewhere and pass its path"
        ) from None


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    if lfs.is_pointer(content):
        raise TokenizerError(f"{path}: a pointer of Git LFS, not the tokenizer. Fetch it with git lfs pull")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a tokenizer.json: {error}") from None
    if not isinstance(data, dict) or "model" not in data:
        raise TokenizerError(
            f"{path}: not a tokenizer.json: it has no `model` (a vocab.json or tokenizer_config.json perhaps?)"
        )
    return data


def _find_eod(reference: tokenizers.Tokenizer, wanted: str | int | None, path: Path) -> tuple[int, str]:
    if isinstance(wanted, str) and wanted.isdecimal() and reference.token_to_id(wanted) is None:
        wanted = int(wanted)
    if isinstance(wanted, int):
        token = reference.id_to_token(wanted)
        if token is None:
            raise TokenizerError(f"{path}: no token has the id {wanted}, given as end of document")
        return wanted, token
    candidates = KNOWN_EOD_TOKENS if wanted is None else (wanted,)
    if wanted is None:
        candidates = (*_configured_eos(reference, path), *candidates)
    for token in candidates:
        found = reference.token_to_id(token)
        if found is not None:
            return found, token
    special = [token.content for token in reference.get_added_tokens_decoder().values() if token.special]
    looked_for = repr(wanted) if wanted is not None else "any of " + ", ".join(KNOWN_EOD_TOKENS)
    raise TokenizerError(
        f"{path}: no end-of-document token: looked for {looked_for}. Name one with --eod; "
        f"its special tokens are {', '.join(special) or 'none'}"
    )


def _configured_eos(reference: tokenizers.Tokenizer, path: Path) -> Iterator[str]:
    """Yield the end-of-document tokens that files in the same folder name; the tokenizer's own config comes first."""
    for name, key in EOS_KEYS.items():
        try:
            found = json.loads((path.parent / name).read_bytes()).get(key)
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        for token in found if isinstance(found, list) else [found]:
            if isinstance(token, int):
                token = reference.id_to_token(token) if 0 <= token <= LARGEST_ID else None
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                yield token


def _listing(folder: Path, most: int = 6) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:most] + ["..."] * (len(names) > most)) or "nothing"


def _types_in(part: Any) -> Iterator[str]:
    """Yield the types of a part of a tokenizer.json and of the parts in it."""
    if isinstance(part, dict):
        yield part.get("type", "")
        for inner in part.get("decoders") or ():
            yield from _types_in(inner)


def _probe_texts(vocabulary: dict[str, int]) -> list[str]:
    """Return texts that reveal differences between tokenizers: every token, runs of spaces, marks, all of Unicode."""
    rng = random.Random(0)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = [
        *("  ", "    ", "\n", "\r\n", "\t", " \n", "'ll", "'S", "1", "2026", "e\u0301", "\u00e9", "\u1e9b\u0323"),
        *("\u200d", "a", " the", "\ufb01", "\u0000", "\u00a0", "\u3000", "\U0001f469\u200d\U0001f680", "\u0e01\u0e33"),
        *("\uac00", "_", "--", "\u2019", *KNOWN_EOD_TOKENS[:4], "<|padding|>"),
    ]
    texts = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(400)]
    texts += ["".join(_random_character(rng) for _ in range(rng.randint(1, 40))) for _ in range(200)]
    for start in range(0, len(tokens), 50):  # byte-level vocabularies spell a space as U+0120 and a line feed as U+010A
        texts.append("".join(tokens[start : start + 50]).replace("\u0120", " ").replace("\u010a", "\n"))
    return texts


def _random_character(rng: random.Random) -> str:
    while True:
        character = chr(rng.randrange(rng.choice((0x80, 0x3000, sys.maxunicode + 1))))
        if unicodedata.category(character) != "Cs":  # half a surrogate pair is not text
            return character
