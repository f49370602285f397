"""Text to token files to batches. A prepared data set lies in data/NAME: train.bin, val.bin, meta.json."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.tokenfile import DataError, TokenFile, first_line, read_whole
from data.tokenizer import Tokenizer

__all__ = ["DataError", "Dataset", "dataset_path", "fingerprint", "open_dataset", "open_tokenizer"]

HERE = Path(__file__).resolve().parent
FILES = ("train.bin", "val.bin", "train.counted.bin", "val.counted.bin", "examples.jsonl", "meta.json")
FORMAT = 1


@dataclass(frozen=True)
class Dataset:
    """A prepared data set: both splits, the tokenizer that made them, and everything meta.json says."""

    name: str
    path: Path
    train: TokenFile
    val: TokenFile
    tokenizer: Tokenizer
    meta: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer and the ids of both splits, taken when they were written."""
        return self.meta["fingerprint"]

    @property
    def probe(self) -> dict[str, Any] | None:
        """What is known of a probe: length of an example, floor and guess (nats a target); None for text."""
        return self.meta.get("probe")

    @property
    def val_targets(self) -> int:
        """How many tokens of the validation split count in its loss."""
        return self.meta["splits"]["val"].get("targets", len(self.val) - 1)

    def verify(self) -> None:
        """Read both splits whole; DataError if they are not what was prepared, one bit or all of it."""
        files = [file for split in (self.train, self.val) for file in (split, split.counted) if file]
        if fingerprint(self.tokenizer, *(file.sha256() for file in files)) != self.fingerprint:
            raise DataError(f"{self.path}: the token files are not the ones prepared: prepare the data set again")


def fingerprint(tokenizer: Tokenizer, *sha256: str) -> str:
    """SHA-256 that two data sets share only if their tokenizers and their token files are the same."""
    text = json.dumps([tokenizer.to_meta(), *sha256], sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def dataset_path(name: str) -> Path:
    """Folder of a data set: data/NAME for a plain name, the path itself for a name with a separator."""
    if "/" in name or "\\" in name:
        return Path(name)
    plain = re.fullmatch(r"(?!__)\w[\w.-]*", name, flags=re.ASCII)
    if not plain or (HERE / f"{name}.py").exists():  # the code lies beside the data
        raise DataError(f"{name!r} cannot name a data set: take letters, digits, '-', '_', '.', no module")
    return HERE / name


def open_dataset(name: str) -> Dataset:
    """The prepared data set NAME; DataError if there is none or a part of it is damaged."""
    path = dataset_path(name)
    if not (path / "meta.json").is_file():
        ready = ", ".join(sorted(file.parent.name for file in HERE.glob("[!.]*/meta.json"))) or "none"
        raise DataError(
            f"no data set in {path} (prepared so far: {ready}): run python prepare.py {name}, with --files FILE for a "
            "text of yours"
        )
    try:
        meta = json.loads(read_whole(path / "meta.json"))
        if meta["format"] != FORMAT:
            raise DataError(f"it has format {meta['format']!r:.50} where {FORMAT} is read: prepare it again")
        tokenizer = Tokenizer.from_meta(meta["tokenizer"])
        counts = [meta["splits"][split]["tokens"] for split in ("train", "val")]
        meta["fingerprint"].encode("ascii")
        _check_counted(meta, counts[1])
    except DataError as error:
        raise DataError(f"{path / 'meta.json'}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        told = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{path / 'meta.json'} is damaged ({told}): prepare the data set again") from None
    train, val = (
        TokenFile(path / f"{split}.bin", path / f"{split}.counted.bin" if "probe" in meta else None)
        for split in ("train", "val")
    )
    dataset = Dataset(name, path, train, val, tokenizer, meta)
    if [len(dataset.train), len(dataset.val)] != counts:
        raise DataError(f"{path}: meta.json does not belong to its token files: prepare the data set again")
    return dataset


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of the prepared data set NAME, or of the run in the folder NAME; DataError if there is neither."""
    saved = Path(name) / "last" / "meta.json"
    if not saved.is_file():
        return open_dataset(name).tokenizer
    try:
        return Tokenizer.from_meta(json.loads(read_whole(saved))["tokenizer"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        told = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{saved} is damaged ({told}): name another run or a data set") from None


def _check_counted(meta: dict[str, Any], tokens: int) -> None:
    """ValueError unless what meta.json says of a probe, and of the targets that count, are numbers to reckon with."""
    targets, probe = meta["splits"]["val"].get("targets", 1), meta.get("probe")
    if type(targets) is not int or not 1 <= targets <= tokens:
        raise ValueError(f"{targets!r:.50} targets of {tokens} tokens")
    if "probe" in meta:
        if type(probe["length"]) is not int or not 1 <= probe["length"] < 2**31:
            raise ValueError(f"an example of {probe['length']!r:.50} tokens")
        if not all(isinstance(probe[key], (int, float)) and abs(probe[key]) < 1e9 for key in ("floor", "guess")):
            raise ValueError("its losses are no numbers")
