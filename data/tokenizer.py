"""Tokenizers: text to ids and back, each of them stored whole in a JSON object."""

import base64
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from data.tokenfile import DataError, first_line

END_OF_TEXT = "<|endoftext|>"
# Where bpe and gpt2 may merge: GPT-2's pattern as tiktoken writes it. No match of it runs from a character
# that is not white space into one that is, so that safe_cut() can take a long text apart.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Tokenizer:
    """What the kinds share: `table`, the bytes of every id, empty for the end of a text.

    `end_id` is the id written after each document, the last one unless the tokenizer came with a model; None where
    there is none. `begin` are ids that stand before every text a model reads, as they did in its training.
    """

    kind: str
    begin: tuple[int, ...] = ()
    safe_cut: Callable[[str], int] = staticmethod(len)  # where a text may be cut and give the same ids

    def __init__(self, table: list[bytes], end: bool):
        self.end_id = len(table) if end else None
        self.table = table + [b""] * end
        self.vocab_size = len(self.table)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, (n,), the end of a text never among them; DataError for unknown characters."""
        raise NotImplementedError

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of the ids; ids outside the vocabulary give nothing."""
        return b"".join(self.table[i] for i in map(int, ids) if 0 <= i < self.vocab_size)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Number of UTF-8 bytes of each id, int64 (vocab_size,)."""
        return np.array([len(token) for token in self.table], dtype=np.int64)

    def unknown(self, text: str) -> list[str]:
        """Characters of the text that `encode` refuses, each once, in order of appearance."""
        return [c for c in dict.fromkeys(text) if "\ud800" <= c <= "\udfff"]  # half characters, not text

    def to_meta(self) -> dict[str, Any]:
        """A JSON object from which `from_meta` makes this tokenizer again, without any other file."""
        return {"kind": self.kind, "end": self.end_id is not None}

    @staticmethod
    def from_meta(meta: dict[str, Any]) -> "Tokenizer":
        """The tokenizer that `to_meta` described; DataError if the description is damaged."""
        try:
            kind, end = meta["kind"], meta["end"]
            if type(end) is not bool:  # a number would be taken for so many ids
                raise ValueError(f"end is {end!r:.50}")
            if kind == "char":
                return CharTokenizer(_all_text([meta["characters"]])[0], end)
            if kind == "byte":
                return ByteTokenizer(end)
            if kind == "word":
                return WordTokenizer(_all_text(meta["words"]))
            if kind in ("bpe", "gpt2"):
                tokens = [base64.b64decode(token, validate=True) for token in meta["tokens"].split()]
                return BpeTokenizer(tokens, end, kind)
            if kind == "hf":
                return HfTokenizer(meta["json"], meta["end_id"])
            raise ValueError(f"unknown kind {kind!r}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            told = first_line(error)
            raise DataError(f"the stored tokenizer is damaged ({told}): prepare the data again") from None

    def _refuse(self, text: str) -> DataError:
        characters = ", ".join(repr(c) for c in self.unknown(text)[:10])
        return DataError(f"the {self.kind} tokenizer does not know {characters}: take text without it")


def _all_text(values: list[str]) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{values!r:.50} is not text")
    return values


@contextlib.contextmanager
def panics_told() -> Iterator[None]:
    """ValueError for a panic of a library in Rust, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library gave up: {error}") from None


class CharTokenizer(Tokenizer):
    """One id for each character, in the order given."""

    kind = "char"

    def __init__(self, characters: Iterable[str], end: bool = False):
        self.characters = "".join(characters)
        super().__init__([c.encode("utf-8") for c in self.characters], end)
        codes = [ord(c) for c in self.characters]
        self._ids = np.full(max(codes, default=0) + 2, -1, dtype=np.int32)  # by code point, -1 unknown
        self._ids[codes] = np.arange(len(codes))

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self._ids[np.minimum(codes, len(self._ids) - 1)]  # the last place is always unknown
        if ids.size and ids.min() < 0:
            raise self._refuse(text)
        return ids

    def unknown(self, text: str) -> list[str]:
        known = set(self.characters)
        return [c for c in dict.fromkeys(text) if c not in known]

    def to_meta(self) -> dict[str, Any]:
        return super().to_meta() | {"characters": self.characters}


class ByteTokenizer(Tokenizer):
    """One id for each of the 256 bytes of UTF-8."""

    kind = "byte"

    def __init__(self, end: bool = False):
        super().__init__([bytes([b]) for b in range(256)], end)

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        except UnicodeEncodeError:
            raise self._refuse(text) from None


class WordTokenizer(Tokenizer):
    """One id for each word of a list; words stand between spaces. Text comes back with one space before each."""

    kind = "word"

    def __init__(self, words: Sequence[str]):
        self.words = list(words)
        super().__init__([f" {word}".encode() for word in self.words], end=False)
        self._ids = {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> np.ndarray:
        if self.unknown(text):
            raise self._refuse(text)
        return np.array([self._ids[word] for word in text.split()], dtype=np.int64)

    def unknown(self, text: str) -> list[str]:
        return [word for word in dict.fromkeys(text.split()) if word not in self._ids]

    def to_meta(self) -> dict[str, Any]:
        return super().to_meta() | {"words": self.words}


def safe_cut(text: str) -> int:
    """The last place where PATTERN splits whatever comes before and after the text; 0 if there is none."""
    for start in (max(0, len(text) - 4096), 0):
        if places := [match.start() for match in re.finditer(r"(?<=\S)[ \n]", text[start:])]:
            return start + places[-1]
    return 0


class BpeTokenizer(Tokenizer):
    """Byte pair encoding by tiktoken; the id of a token is its place in `tokens`, which is its rank."""

    safe_cut = staticmethod(safe_cut)

    def __init__(self, tokens: Sequence[bytes], end: bool, kind: str = "bpe"):
        import tiktoken

        if not {bytes([b]) for b in range(256)} <= set(tokens):
            raise ValueError("tokens for single bytes are missing")
        self.kind, self.tokens = kind, list(tokens)
        super().__init__(self.tokens, end)
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        special = {END_OF_TEXT: self.end_id} if end else {}
        with panics_told():
            self._encoding = tiktoken.Encoding(kind, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text: str) -> np.ndarray:
        if not text.isascii() and self.unknown(text):  # tiktoken would replace them without a word
            raise self._refuse(text)
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def to_meta(self) -> dict[str, Any]:
        tokens = " ".join(base64.b64encode(token).decode("ascii") for token in self.tokens)
        return super().to_meta() | {"tokens": tokens}


def train_bpe(texts: Iterable[str], vocab_size: int, end: bool) -> BpeTokenizer:
    """Learn byte pairs from texts; fewer tokens than asked where the texts hold no more pairs.

    `vocab_size` counts the end of a text; DataError if it leaves no room for the 256 bytes.
    """
    if vocab_size < 256 + end:  # the trainer would panic
        what = "the 256 bytes" + " and the end of a text" * end
        raise DataError(f"vocab_size {vocab_size} has no room for {what}: give at least {256 + end}")
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size - end, pattern=PATTERN)
    ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    return BpeTokenizer([bytes(token) for token, _ in ranks], end)


def byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in GPT-2's files, and the byte (Radford et al. 2019)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


def gpt2_tokenizer(encoder_json: bytes) -> BpeTokenizer:
    """GPT-2's tokenizer from its `encoder.json`, which writes every byte as one printable character."""
    byte_of, ids = byte_characters(), json.loads(encoder_json)
    names = sorted(ids.keys() - {END_OF_TEXT}, key=ids.__getitem__)
    return BpeTokenizer([bytes(byte_of[c] for c in name) for name in names], end=True, kind="gpt2")


# What a step that changes text would change: cases, accents, spaces, control characters, any ASCII.
PROBE = "".join(map(chr, [32, *range(32, 127)])) + "\t\r\n  \u00c9e\u0301 \ufb01\uff21\u732b\U0001f600\x01\u00a0 \n "


MOST_STEPS = 8  # of a tokenizer.json, since some double a text
NORMALIZERS = {"Sequence", "Prepend", "Replace", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip",
               "StripAccents", "BertNormalizer", "ByteLevel"}  # fmt: skip


def load_hf(text: str) -> Any:
    """The tokenizer of the `tokenizers` library that a tokenizer.json describes; ValueError if it is damaged."""
    import tokenizers

    try:
        with panics_told():
            tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library has no class of its own for this
        raise ValueError(f"not a tokenizer.json: {error}") from None
    ids = tokenizer.get_vocab().values()
    if ids and max(ids) >= 2 * len(ids) + 1000:  # the library writes, and we keep, a place for every id below it
        raise ValueError(f"its {len(ids)} tokens have ids up to {max(ids)}")
    return tokenizer


class HfTokenizer(Tokenizer):
    """What a tokenizer.json of Hugging Face describes, run by its `tokenizers` library, which loads no code.

    Special tokens are never read out of a text. ValueError for a description that is damaged, that cannot encode
    every text, or whose tokens are not a text's bytes one after the other.
    """

    kind = "hf"
    safe_cut = staticmethod(lambda text: 0)  # what it does at a cut is not known

    def __init__(self, text: str, end_id: int | None):
        self._tokenizer = load_hf(text)
        self.text, described = text, json.loads(text)
        _check_steps(described)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        special = {token["id"] for token in described["added_tokens"] if token["special"]}
        added = {token["id"] for token in described["added_tokens"]}
        bytes_of = _byte_reader(described["decoder"])
        self.names = {number: token for token, number in self._tokenizer.get_vocab().items()}
        table = [b""] * (1 + max(self.names, default=0))
        for number, token in self.names.items():
            if number not in special:
                table[number] = token.encode("utf-8") if number in added else bytes_of(token)
        if not {bytes([b]) for b in range(256)} <= set(table):
            raise ValueError("tokens for single bytes are missing")
        if end_id is not None and not 0 <= end_id < len(table):
            raise ValueError(f"the end of a text is {end_id}, beyond its {len(table)} ids")
        super().__init__(table, end=False)
        self.end_id = end_id
        if described["model"].get("dropout"):
            raise ValueError("its dropout gives a text other ids each time: set it to null")
        with panics_told():
            same = self.decode(self.encode(PROBE)) in (PROBE, f" {PROBE}")
            probe = self._tokenizer.encode(PROBE)
        if not same:
            raise ValueError("its tokens are not a text's bytes one after the other: a step in it changes the text")
        self.begin = tuple(probe.ids[: probe.special_tokens_mask.index(0)])
        if max(self.begin, default=0) >= len(table):
            raise ValueError(f"every text begins with {max(self.begin)}, beyond its {len(table)} ids")

    def encode(self, text: str) -> np.ndarray:
        if not text.isascii() and self.unknown(text):
            raise self._refuse(text)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def to_meta(self) -> dict[str, Any]:
        return super().to_meta() | {"json": self.text, "end_id": self.end_id}


def _check_steps(described: dict[str, Any]) -> None:
    """ValueError for steps in a tokenizer.json that could make a short text fill the memory, one after the other."""

    def steps(part: Any) -> Iterator[dict[str, Any]]:
        for inner in part if isinstance(part, list) else []:
            yield from steps(inner)
        if isinstance(part, dict):
            yield part
            yield from steps(part.get("normalizers") or part.get("pretokenizers"))

    for key in ("normalizer", "pre_tokenizer"):
        found = list(steps(described.get(key)))
        if len(found) > MOST_STEPS:
            raise ValueError(f"its {key} has {len(found)} steps, and at most {MOST_STEPS} are run")
        for step in found if key == "normalizer" else []:
            replaced = step.get("pattern", {}).get("String") if step["type"] == "Replace" else " "
            if step["type"] not in NORMALIZERS or not replaced or len(step.get("content", "")) > 1:
                raise ValueError(f"its normalizer {step['type']} may lengthen a text without end")


def _byte_reader(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """A function from a token of a tokenizer.json to its bytes, as its decoder puts them together."""
    decoder = decoder or {"type": "none"}
    steps = [step["type"] for step in decoder.get("decoders", [decoder])]
    if "ByteLevel" in steps:
        byte_of = byte_characters()
        return lambda token: bytes(byte_of[c] for c in token)
    if "ByteFallback" not in steps:
        raise ValueError(f"its decoder ({', '.join(steps)}) is neither ByteLevel nor ByteFallback")
    # SentencePiece's way: a space is written as U+2581, a byte that no token has as <0x0A>.
    return lambda token: (
        bytes.fromhex(token[3:5]) if re.fullmatch("<0x[0-9A-F]{2}>", token) else token.replace("\u2581", " ").encode()
    )
