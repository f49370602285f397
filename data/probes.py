"""Probes: generated corpora whose least possible loss is known, each asking one thing of attention.

An example is `length` words, begins with <s>, and is a window of its own. Only some words count in the loss: those
that the words before them decide, so that a model which has found out how loses nothing on them (the floor).
"""

import json
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.tokenfile import DataError, TokenWriter
from data.tokenizer import WordTokenizer

EXAMPLES = {"train": 40_000, "val": 1_000}
Examples = tuple[np.ndarray, np.ndarray]  # ids, int64 (count, length); which of them count, bool (count, length)
SYMBOLS = list(string.ascii_letters + string.digits)


class Probe(NamedTuple):
    """Draw(random, count) makes examples; `floor` is the least mean loss, in nats, on the words that count."""

    about: str
    words: list[str]
    length: int
    draw: Callable[[np.random.Generator, int], Examples]
    floor: float = 0.0
    arcs: Callable[[np.random.Generator, int], list[list[tuple[str, int, int]]]] | None = None  # of the same examples


def probe(name: str) -> Probe:
    """The probe probe-KIND or probe-KIND-N; DataError for another kind, or an N that it cannot have."""
    match = re.fullmatch(r"probe-([a-z]+)(?:-(0|[1-9]\d{0,2}))?", name)
    if not match or match[1] not in PROBES:
        raise DataError(f"there is no probe {name}: take one of {', '.join(f'probe-{kind}' for kind in PROBES)}")
    make, allowed = PROBES[match[1]]
    if not allowed and match[2]:
        raise DataError(f"{name}: probe-{match[1]} takes no number")
    if not allowed:
        return make()
    number = int(match[2] or allowed[0])
    if number not in allowed[1]:
        raise DataError(f"{name}: its number is one of {', '.join(map(str, allowed[1]))}")
    return make(number)


def write(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Write the token files of a probe and return meta.json's content.

    {split}.counted.bin tells of every token whether it counts in the loss; examples.jsonl shows the validation split,
    with the gold arcs of sentences. `guess` is the loss of the best answer
    that looks at nothing: the entropy of the words that count.
    """
    one = probe(name)
    tokenizer = WordTokenizer(one.words)
    splits: dict[str, Any] = {}
    for number, (split, count) in enumerate(EXAMPLES.items()):
        ids, asked = one.draw(np.random.default_rng((seed, number)), count)
        with (
            TokenWriter(folder / f"{split}.bin", tokenizer.vocab_size) as tokens,
            TokenWriter(folder / f"{split}.counted.bin", 2) as counted,
        ):
            tokens.write(np.append(ids, 0))  # one <s> more: what the last example's end is followed by
            counted.write(np.append(asked, False))
        splits[split] = {"examples": count, "tokens": tokens.count, "targets": int(asked.sum()),
                         "sha256": tokens.sha256, "sha256_counted": counted.sha256}  # fmt: skip
    arcs = one.arcs(np.random.default_rng((seed, number)), count) if one.arcs else [[]] * count
    with open(folder / "examples.jsonl", "w", encoding="utf-8") as file:  # of validation, for people to read
        for row, marks, found in zip(ids, asked, arcs, strict=True):
            line = {"words": tokenizer.decode(row).split(), "counted": np.flatnonzero(marks).tolist(), "arcs": found}
            file.write(json.dumps(line) + "\n")
    share = np.bincount(ids[asked]) / asked.sum()  # of validation
    guess = -float((share[share > 0] * np.log(share[share > 0])).sum())
    return {
        "splits": splits, "tokenizer": tokenizer.to_meta(),
        "probe": {"about": one.about, "length": one.length, "floor": one.floor, "guess": guess, "seed": seed},
    }  # fmt: skip


def some_of(random: np.random.Generator, choices: np.ndarray, count: int, width: int) -> np.ndarray:
    """`width` of the choices for each of `count` rows, none of them twice in a row."""
    return random.permuted(np.tile(choices, (count, 1)), axis=1)[:, :width]


def copy() -> Probe:
    """<s>, 31 symbols, <copy>, and the same 31 again, which count."""

    def draw(random: np.random.Generator, count: int) -> Examples:
        symbols = random.integers(2, 2 + len(SYMBOLS), (count, 31))
        start, mark = np.zeros((count, 1), int), np.ones((count, 1), int)
        ids = np.hstack((start, symbols, mark, symbols))
        return ids, np.arange(64) >= np.full((count, 1), 33)

    return Probe("31 symbols are written once more", ["<s>", "<copy>", *SYMBOLS], 64, draw)


def induction() -> Probe:
    """A stretch of 8 to 20 symbols, all different, again and again: from the second symbol of its second time on.

    How long it is differs, so that no fixed distance leads back.
    """

    def draw(random: np.random.Generator, count: int) -> Examples:
        stretch = random.integers(8, 21, (count, 1))
        symbols = some_of(random, np.arange(1, 1 + len(SYMBOLS)), count, 20)
        ids = np.take_along_axis(symbols, np.arange(63) % stretch, axis=1)
        ids = np.hstack((np.zeros((count, 1), int), ids))
        return ids, np.arange(64) >= stretch + 2

    return Probe("a stretch of symbols comes again and again", ["<s>", *SYMBOLS], 64, draw)


def recall(pairs: int) -> Probe:
    """Multi-query associative recall (Arora et al. 2023): pairs of key and value, then each key once more.

    As there, keys are of one half of the symbols and values of the other, and the gaps before a key comes again
    follow a power law (exponent 0.01 - 1). The rest is filled with values of the same pairs and not with any symbol:
    so a key's value is what followed its only other place, and counting which values have come does not help. And the
    value stands behind the key that it answers, where it counts.
    """
    half, length = len(SYMBOLS) // 2, 8 * pairs
    slots = (length - 1 - 2 * pairs) // 2  # where a key and its value may stand once more

    def draw(random: np.random.Generator, count: int) -> Examples:
        keys = some_of(random, np.arange(1, 1 + half), count, pairs)
        values = some_of(random, np.arange(1 + half, 1 + 2 * half), count, pairs)
        ids = np.take_along_axis(values, random.integers(0, pairs, (count, length)), axis=1)
        ids[:, 0] = 0
        ids[:, 1 : 1 + 2 * pairs : 2], ids[:, 2 : 2 + 2 * pairs : 2] = keys, values
        # The first to ring of exponential clocks with these rates: drawn by weight, none twice.
        clocks = random.exponential(size=(count, slots)) * np.arange(1, slots + 1) ** 0.99
        at = 1 + 2 * pairs + 2 * np.argsort(clocks, axis=1)[:, :pairs]
        counted = np.zeros(ids.shape, bool)
        np.put_along_axis(ids, at, keys, axis=1)
        np.put_along_axis(ids, at + 1, values, axis=1)
        np.put_along_axis(counted, at + 1, True, axis=1)
        return ids, counted

    return Probe(f"the value that stood behind a key, of {pairs}", ["<s>", *SYMBOLS], length, draw)


def klookup(k: int) -> Probe:
    """28 bits, a question mark, and as one word the k bits that stand at k fixed places.

    Bits carry no mark of their place, so that one head's weighted mean of them tells at best a single number; k heads
    can bring a bit each.
    """
    places = np.array([20, 7, 13, 3, 25, 10, 17, 28])[:k]  # of the example, whose bits are at 1 .. 28

    def draw(random: np.random.Generator, count: int) -> Examples:
        bits = random.integers(0, 2, (count, 28))
        answer = bits[:, places - 1] @ (1 << np.arange(k)[::-1])  # the first place is the leading bit
        ids = np.hstack((np.zeros((count, 1), int), 1 + bits, np.full((count, 1), 3), 4 + answer[:, None]))
        ids = np.hstack((ids, np.zeros((count, 1), int)))
        return ids, np.arange(32) == np.full((count, 1), 30)

    answers = [f"={number:0{k}b}" for number in range(2**k)]
    about = f"{k} bits from {k} places, in one word" if k > 1 else "1 bit from 1 place"
    return Probe(about, ["<s>", "0", "1", "?", *answers], 32, draw)


def offset(distance: int) -> Probe:
    """Symbols, each followed by the one that stands `distance` words before it; these count, where there is one."""

    def draw(random: np.random.Generator, count: int) -> Examples:
        ids = np.ones((count, 64), int)  # "-": nothing stands there yet
        ids[:, 0] = 0
        ids[:, 1::2] = random.integers(2, 2 + len(SYMBOLS), (count, 32))
        answers = np.arange(2, 64, 2)
        answers = answers[answers - 1 - distance >= 1]
        ids[:, answers] = ids[:, answers - 1 - distance]
        counted = np.zeros(ids.shape, bool)
        counted[:, answers] = True
        return ids, counted

    return Probe(f"the symbol {distance} words back", ["<s>", "-", *SYMBOLS], 64, draw)


# Sentences. What "it" means is decided by the last adjective: animals are tired, places are wide.
ANIMALS = ["animal", "child", "dog", "cat", "horse", "man", "woman", "bird"]
PLACES = ["street", "river", "field", "road", "garden", "bridge", "park", "forest"]
VERBS = ["cross", "enter", "leave", "visit"]
FEELINGS = ["tired", "sick", "scared", "old"]
LOOKS = ["wide", "dark", "long", "crowded"]
SIZES = ["big", "small", "red"]
PREPOSITIONS = ["near", "behind", "beside"]
SENTENCE_WORDS = [
    "<s>", "<pad>", *ANIMALS, *PLACES, *VERBS, *FEELINGS, *LOOKS, *SIZES, *PREPOSITIONS,
    *["the", "did", "not", "because", "it", "was", "too", ".", "who", "why", "?"],
]  # fmt: skip


class Sentence(NamedTuple):
    """The words, from <s> to the answer; and the gold arcs.

    An arc is (kind, later, earlier): places of two words that belong together. A causal head can only look back, so
    that its weight is read at the later one.
    """

    words: list[str]
    arcs: list[tuple[str, int, int]]


def sentence(who: str, where: str, verb: str, cause: str, sizes: tuple[str, str, str], near: tuple[str, str] | None,
             question: str) -> Sentence:  # fmt: skip
    """Write the sentence; `near` is (preposition, animal) beside `who`, a size is "" where there is none.

    Questions: "who ?" asks what "it" is, "who did ?" for the subject, "why ?" for the cause, and a preposition for
    what it stands with.
    """
    words = ["<s>"]

    def noun(name: str, size: str) -> int:
        words.extend(["the", *([size] if size else []), name])
        return len(words) - 1

    def add(text: str) -> int:
        words.extend(text.split())
        return len(words) - 1

    arcs = []
    subject = noun(who, sizes[0])
    if near:
        preposition = add(near[0])
        beside = noun(near[1], sizes[1])
        arcs.append(("preposition to object", beside, preposition))
    arcs.append(("verb to subject", add(f"did not {verb}"), subject))
    place = noun(where, sizes[2])
    pronoun = add("because it")
    reason = add(f"was too {cause}")
    meant = subject if cause in FEELINGS else place
    arcs += [("pronoun to noun", reason, meant), ("pronoun to cause", reason, pronoun)]
    answer = {"who": meant, "who did": subject, "why": reason}[question] if not near or question != near[0] else beside
    mark = add(f". {question} ?")
    arcs.append(("answer", mark, answer))
    words.append(words[answer])
    return Sentence(words, arcs)


EXAMPLE = sentence("animal", "street", "cross", "tired", ("", "", ""), None, "who")


def draw_sentences(random: np.random.Generator, count: int) -> Iterator[Sentence]:
    """Sentences in pairs that differ in the last adjective alone, and so in what "it" means."""

    def one(words: list[str]) -> str:
        return words[random.integers(len(words))]

    for _ in range(0, count, 2):
        who, where, verb = one(ANIMALS), one(PLACES), one(VERBS)
        sizes = (one(SIZES + [""] * 3), one(SIZES + [""] * 3), one(SIZES + [""] * 3))
        other = one([animal for animal in ANIMALS if animal != who])
        near = (one(PREPOSITIONS), other) if random.integers(2) else None
        question = one(["who", "who", "who did", "why", *([near[0]] if near else [])])
        for causes in (FEELINGS, LOOKS):
            yield sentence(who, where, verb, one(causes), sizes, near, question)


def sentences() -> Probe:
    """A sentence and a question about it, one word a token; the answer counts. Shorter ones are filled with <pad>."""
    id_of = {word: number for number, word in enumerate(SENTENCE_WORDS)}

    def draw(random: np.random.Generator, count: int) -> Examples:
        ids, counted = np.ones((count, 24), int), np.zeros((count, 24), bool)
        for row, one in enumerate(draw_sentences(random, count)):
            ids[row, : len(one.words)] = [id_of[word] for word in one.words]
            counted[row, len(one.words) - 1] = True
        return ids, counted

    return Probe(
        "a question about a sentence", SENTENCE_WORDS, 24, draw, arcs=lambda *of: [s.arcs for s in draw_sentences(*of)]
    )


# Kind: what makes it, and the number it takes if there is none in its name, with all that it may take.
PROBES: dict[str, tuple[Callable[..., Probe], tuple[int, range] | None]] = {
    "copy": (copy, None),
    "induction": (induction, None),
    "recall": (recall, (4, range(2, 17))),
    "klookup": (klookup, (4, range(1, 9))),
    "offset": (offset, (8, range(2, 41, 2))),
    "sentences": (sentences, None),
}
