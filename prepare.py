"""Turn text into token files, data/NAME/{train.bin,val.bin,meta.json}, that train.py reads."""

import contextlib
import functools
import glob
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from rich.progress import Progress

import data
from data import probes, sources
from data.tokenfile import DataError, TokenWriter
from data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, gpt2_tokenizer, safe_cut, train_bpe
from runtime import errors, settings

try:
    import fcntl
except ImportError:  # Windows, where what a killed run left aside stays there
    fcntl = None  # type: ignore[assignment]  # a module, as mypy sees it

BUILT_IN = {"shakespeare": sources.shakespeare, "tinyshakespeare": sources.tinyshakespeare}
BPE_SAMPLE = 20_000_000  # characters of the training split that byte pairs are learned from
ASIDE = ".aside"  # ends the name of a hidden folder beside a data set that is being made
LONGEST = 4 * sources.PIECE  # characters that may wait for a place where ids do not depend on the cut
FILES_SHOWN = 20


@dataclass(frozen=True)
class PrepareConfig:
    # data set to write: data/NAME; shakespeare and tinyshakespeare bring their text, probe-KIND is generated
    name: Annotated[str, tyro.conf.Positional]
    files: tuple[str, ...] = ()  # texts (.txt, .md), rows (.jsonl, .parquet), folders of them
    hub: str | None = None  # data set on the Hugging Face hub, OWNER/NAME
    subset: str | None = None  # subset of the hub data set, where it has several
    split: str | None = None  # split of the hub data set (train if unset); train[:1000] reads its first 1000 rows
    field: str | None = None  # field of rows that holds the text (text if unset)
    tokenizer: Literal["char", "byte", "bpe", "gpt2"] = "char"  # bpe is learned from the training split
    vocab_size: int | None = None  # ids of the bpe tokenizer (4096 if unset)
    like: str | None = None  # instead: the tokenizer of this run or prepared data set, to go on from it
    val_fraction: float = 0.1  # share held out: the end of one text, or some of many documents
    workers: int | None = None  # threads that encode (if unset, one for each CPU for bpe and gpt2)
    seed: int | None = None  # of the examples of a probe (1 if unset)

    @property
    def is_probe(self) -> bool:
        return Path(self.name).name.startswith("probe-") and not self.files and not self.hub

    def __post_init__(self) -> None:
        built_in = not self.files and not self.hub
        if "" in (*self.files, self.hub):
            raise ValueError("--files or --hub is empty: give the path of a text or OWNER/NAME")
        if self.like and (self.tokenizer != "char" or self.vocab_size):
            raise ValueError("--like brings a tokenizer of its own: leave --tokenizer and --vocab_size out")
        if self.files and self.hub:
            raise ValueError("--files and --hub are two sources of text: give one of them")
        if self.is_probe:
            probes.probe(Path(self.name).name)
            own = {"name", "seed"}
            for name, value in settings.as_dict(self).items():
                if name not in own and value != getattr(PrepareConfig, name):
                    raise ValueError(f"{name} is for text, and {self.name} is generated: leave it out")
        elif self.seed is not None:
            raise ValueError("--seed is for probes, which are drawn by chance: leave it out")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed must be at least 0, not {self.seed}")
        if built_in and not self.is_probe and Path(self.name).name not in BUILT_IN:
            known = ", ".join(BUILT_IN)
            raise ValueError(f"{self.name} is not one of {known} or a probe: give its text with --files or --hub")
        if self.hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub):
            raise ValueError(f"hub {self.hub} is not of the form OWNER/NAME, such as roneneldan/TinyStories")
        if not self.hub and (self.subset or self.split):
            raise ValueError("--subset and --split choose from a hub data set: give --hub or leave them out")
        if built_in and self.field:
            raise ValueError("--field chooses from rows: give --files or --hub or leave it out")
        if self.vocab_size is not None and self.vocab_size >= 2**31:
            raise ValueError(f"vocab_size must be below 2^31, not {self.vocab_size}")
        if self.vocab_size is not None and self.tokenizer != "bpe":
            raise ValueError(f"vocab_size is for --tokenizer bpe, not {self.tokenizer}: leave it out")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction {self.val_fraction} is not between 0 and 1: give one such as 0.1")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers {self.workers} is below 1: give a number of threads or leave it out")


class Part(NamedTuple):
    """A piece of text on its way into the token file of `split`; `last` where its text or document ends."""

    source: str
    split: str
    text: str
    last: bool


@dataclass
class Survey:
    """What a first reading tells: how much text there is, and which of it is held out."""

    val_fraction: float
    documents: Counter[str] = field(default_factory=Counter)  # by source
    characters: Counter[str] = field(default_factory=Counter)  # by source
    alphabet: set[str] = field(default_factory=set)
    places: tuple[float, float] = (1.0, 0.0)  # smallest and largest place() of a document

    def count(self, documents: Iterable[sources.Document]) -> Iterator[str]:
        """Count all documents and pass their pieces on."""
        for source, pieces in documents:
            self.characters[source] += 0  # an empty file is shown, though it is no document
            for number, piece in enumerate(pieces):
                if number == 0:
                    self.documents[source] += 1
                    here = place(piece)
                    self.places = min(self.places[0], here), max(self.places[1], here)
                self.characters[source] += len(piece)
                self.alphabet.update(piece)
                yield piece

    @property
    def many(self) -> bool:
        return self.documents.total() > 1

    def parts(self, documents: Iterable[sources.Document]) -> Iterator[Part]:
        """Every piece with its split: one text is cut by characters, many documents are sorted by hash."""
        # Among few documents all hashes may lie on one side of val_fraction; then one document crosses over.
        limit = min(max(self.val_fraction, math.nextafter(self.places[0], 1)), self.places[1])
        total = self.characters.total()
        left = total - math.ceil(total * self.val_fraction - 1e-6)  # characters until validation begins
        for source, pieces in documents:
            split = None
            for piece, last in with_last(pieces):
                if self.many:
                    split = split or ("val" if place(piece) < limit else "train")
                elif 0 < left <= len(piece):
                    yield Part(source, "train", piece[:left], last=True)
                    piece, left, split = piece[left:], 0, "val"
                else:
                    left, split = max(0, left - len(piece)), "train" if left else "val"
                yield Part(source, split, piece, last)


def with_last(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Every piece, and whether it is the last."""
    held = None
    for piece in pieces:
        if held is not None:
            yield held, False
        held = piece
    if held is not None:
        yield held, True


def place(piece: str) -> float:
    """A number in [0, 1) from how a document begins, so that equal documents come into one split."""
    digest = hashlib.sha256(piece[:65536].encode("utf-8")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def recut(parts: Iterable[Part], cut: Callable[[str], int]) -> Iterator[Part]:
    """The same texts, cut only where `cut` says that the ids do not depend on it."""
    held = ""
    for part in parts:
        held += part.text
        end = len(held) if part.last or len(held) > LONGEST else cut(held)
        if end:
            yield part._replace(text=held[:end])
            held = held[end:]


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts in lists of about one piece, so that short documents travel together."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= sources.PIECE:
            yield batch
            batch, size = [], 0
    yield batch


def make_tokenizer(config: PrepareConfig, survey: Survey, parts: Iterator[Part]) -> Tokenizer:
    """The tokenizer that was asked for; with many documents it has an id for the end of one."""
    if config.like:
        tokenizer = data.open_tokenizer(config.like)
        if survey.many and tokenizer.end_id is None:
            raise DataError(f"{config.like} has no end-of-text token: give one file, not several")
        return tokenizer
    if config.tokenizer == "char":
        return CharTokenizer(sorted(survey.alphabet), end=survey.many)
    if config.tokenizer == "byte":
        return ByteTokenizer(end=survey.many)
    if config.tokenizer == "gpt2":
        return gpt2_tokenizer(sources.gpt2_encoder())

    def sample() -> Iterator[str]:
        taken = 0
        for part in recut(parts, safe_cut):
            if part.split == "train" and taken >= BPE_SAMPLE:
                print(f"byte pairs are learned from the first {taken:,} characters of the training split")
                return
            if part.split == "train":
                taken += len(part.text)
                yield part.text

    asked = 4096 if config.vocab_size is None else config.vocab_size
    print(f"learning a vocabulary of {asked:,} from the training split", flush=True)  # which takes a while
    tokenizer = train_bpe(sample(), asked, end=survey.many)
    if tokenizer.vocab_size < asked:
        print(f"{tokenizer.vocab_size:,} ids where {asked:,} were asked: the text has no more pairs to merge")
    return tokenizer


def encode(
    parts: Iterable[Part], tokenizer: Tokenizer, end: bool, writers: dict[str, TokenWriter], workers: int
) -> Counter[tuple[str, str]]:
    """Encode parts on threads and write them in order; counts of tokens by source and of the rest by split.

    Threads, since tiktoken lets go of Python's lock: nothing is copied and no process has to start.
    """
    counts: Counter[tuple[str, str]] = Counter()
    waiting: deque[tuple[list[Part], Future[list[np.ndarray]]]] = deque()
    stop = np.array([tokenizer.end_id or 0], dtype=np.uint32)

    def ids(batch: list[Part]) -> list[np.ndarray]:
        return [tokenizer.encode(part.text) for part in batch]

    def write_first() -> None:
        batch, encoded = waiting.popleft()
        arrays: dict[str, list[np.ndarray]] = {split: [] for split in writers}
        for part, array in zip(batch, encoded.result(), strict=True):
            ended = end and part.last
            arrays[part.split] += [array, stop] if ended else [array]
            counts["tokens", part.source] += len(array) + ended
            counts["characters", part.split] += len(part.text)
            counts["documents", part.split] += part.last
        for split, writer in writers.items():
            writer.write(np.concatenate(arrays[split] or [stop[:0]]))

    with ThreadPoolExecutor(workers) as pool:
        for batch in batches(recut(parts, tokenizer.safe_cut)):
            waiting.append((batch, pool.submit(ids, batch)))
            if len(waiting) > 2 * workers:  # bounds what lies in memory
                write_first()
        while waiting:
            write_first()
    return counts


def watched(items: Iterable[Any], what: str, total: int | None, size: Callable[[Any], int]) -> Iterator[Any]:
    """Pass items on and show how many characters went by: a bar on a terminal, else a line now and then."""
    done, told, of = 0, time.monotonic(), f" of {total:,}" if total else ""
    with Progress(disable=not sys.stdout.isatty(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        for item in items:
            yield item
            done += size(item)
            if time.monotonic() - told > (10 if bar.disable else 0.1):
                told = time.monotonic()
                if bar.disable:
                    print(f"{what}: {done:,}{of} characters", flush=True)
                bar.update(task, completed=done)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` as a whole, and only if the block ends well."""
    own = folder.is_dir() and {f.name for f in folder.iterdir()} <= set(data.FILES)
    if (folder.exists() or folder.is_symlink()) and not own:
        raise DataError(f"{folder} is there and is not a prepared data set: choose another NAME")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with held(folder.parent, wait=True):  # so that a folder just made is not taken for one left behind
            clear_leftovers(folder)
            aside = tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=ASIDE, dir=folder.parent)
            new, old = (Path(stack.enter_context(aside), name) for name in ("new", "old"))
            stack.enter_context(held(Path(aside.name)))
        new.mkdir()
        yield new
        with held(folder.parent, wait=True):  # two that end at once take their turns
            try:
                if folder.exists():
                    os.replace(folder, old)
                os.replace(new, folder)
            finally:
                put_back(old, folder)
        if old.exists():
            print(errors.plain(f"{folder} takes the place of what was prepared there before"))


@contextlib.contextmanager
def held(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Whether other processes are kept from holding a folder while the block runs and this process lives."""
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except OSError:  # another process has it, or this file system knows no locks
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def clear_leftovers(folder: Path) -> None:
    """Remove what runs that were killed left beside a data set, and put back what one had just moved away."""
    for aside in folder.parent.glob(f".{glob.escape(folder.name)}.{'?' * 8}{ASIDE}"):
        with contextlib.suppress(FileNotFoundError), held(aside) as dead:  # another may be clearing its own away
            if dead:
                put_back(aside / "old", folder)
                shutil.rmtree(aside)


def put_back(old: Path, folder: Path) -> None:
    if old.exists() and not folder.exists():
        os.replace(old, folder)


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """The file without which a folder is no data set: written last."""
    path = folder / "meta.json"
    with errors.naming(path), open(path, "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def corpus(config: PrepareConfig, aside: Path) -> Callable[[sources.Say], Iterator[sources.Document]]:
    """A function that reads all documents from the start and says what it notices."""
    if config.files:
        return functools.partial(sources.files, config.files, config.field)
    if config.hub:
        wanted = config.hub, config.subset, config.split or "train", config.field or "text"
        return lambda say: sources.hub(*wanted, kept=aside / "hub.jsonl")
    return lambda say: BUILT_IN[Path(config.name).name]()


def prepare(config: PrepareConfig) -> None:
    """Read all text twice, to count it and to encode it, then put the data set in its place."""
    folder = data.dataset_path(config.name)
    with replacing(folder) as new:
        documents, survey = corpus(config, new.parent), Survey(config.val_fraction)
        deque(watched(survey.count(documents(lambda note: print(errors.plain(note)))), "reading", None, len), maxlen=0)
        total = survey.characters.total()
        if not total:
            where = ", ".join(survey.characters) or config.hub
            raise DataError(f"there is no text in {where}: give one to train on")

        def parts() -> Iterator[Part]:
            return survey.parts(documents(lambda note: None))

        tokenizer = make_tokenizer(config, survey, parts())
        workers = config.workers or (os.cpu_count() or 1 if config.tokenizer in ("bpe", "gpt2") else 1)
        with (
            TokenWriter(new / "train.bin", tokenizer.vocab_size) as train,
            TokenWriter(new / "val.bin", tokenizer.vocab_size) as val,
        ):
            writers = {"train": train, "val": val}
            shown = watched(parts(), "encoding", total, lambda part: len(part.text))
            counts = encode(shown, tokenizer, survey.many, writers, workers)
        print_counts(survey, counts, writers)
        print(f"{tokenizer.kind} tokenizer, {tokenizer.vocab_size:,} ids")
        for split, writer in writers.items():
            if writer.count < 2:
                raise DataError(
                    f"the {split} split has {writer.count} token(s) and needs 2, from {total:,} characters "
                    f"and val_fraction {config.val_fraction}: give more text or another --val_fraction"
                )
        share = val.count / (train.count + val.count)
        if not config.val_fraction / 2 < share < config.val_fraction * 2:
            print(
                f"note: {share:.0%} of the tokens are held out where val_fraction asks for {config.val_fraction:.0%}, "
                "since documents stay whole; put files together into one, or cut long ones, to come nearer"
            )
        meta = {
            "format": data.FORMAT,
            "arguments": settings.as_dict(config),
            "documents": survey.documents.total(),
            "splits": {
                split: {"characters": counts["characters", split], "tokens": w.count, "sha256": w.sha256}
                for split, w in writers.items()
            },
            "fingerprint": data.fingerprint(tokenizer, train.sha256, val.sha256),
            "tokenizer": tokenizer.to_meta(),
        }
        write_meta(new, meta)
    print(errors.plain(f"wrote {folder}"))


def prepare_probe(config: PrepareConfig) -> None:
    """Generate a probe and put it in its place."""
    folder = data.dataset_path(config.name)
    with replacing(folder) as new:
        meta = probes.write(folder.name, 1 if config.seed is None else config.seed, new)
        hashes = [part[key] for part in meta["splits"].values() for key in ("sha256", "sha256_counted")]
        fingerprint = data.fingerprint(Tokenizer.from_meta(meta["tokenizer"]), *hashes)
        own: dict[str, Any] = {"format": data.FORMAT, "arguments": settings.as_dict(config), "fingerprint": fingerprint}
        meta = {**own, **meta}
        write_meta(new, meta)
    for split, part in meta["splits"].items():
        print(f"{split}: {part['examples']:,} examples, {part['tokens']:,} tokens, of which {part['targets']:,} count")
    told = meta["probe"]
    print(f"{told['about']}; least loss {told['floor']:g}, guessing blindly {told['guess']:.4f} nats")
    print(errors.plain(f"wrote {folder}"))


def print_counts(survey: Survey, counts: Counter[tuple[str, str]], writers: dict[str, TokenWriter]) -> None:
    """One line for each file (the first ones, if there are many) and one for each split."""
    line = "{:>10,} {:>15,} {:>15,}  {}".format
    print(f"{'documents':>10} {'characters':>15} {'tokens':>15}")
    for number, source in enumerate(survey.characters):
        if number == FILES_SHOWN:
            print(f"{'':42}  and {len(survey.characters) - FILES_SHOWN:,} more files")
            break
        print(line(survey.documents[source], survey.characters[source], counts["tokens", source], errors.plain(source)))
    for split, writer in writers.items():
        print(line(counts["documents", split], counts["characters", split], writer.count, f"{split} split"))


def main(argv: list[str]) -> None:
    (config,), _ = settings.parse(
        argv, PrepareConfig, prog="prepare.py", description=__doc__, files_allowed=False
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what lies aside is cleared away
    prepare_probe(config) if config.is_probe else prepare(config)


if __name__ == "__main__":
    errors.run(main)
