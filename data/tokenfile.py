"""Token files: a 24-byte header, then the ids of one split and nothing else."""

import contextlib
import hashlib
import os
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAGIC, VERSION = b"manyhead", 1
HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes an id, number of ids
MOST_BYTES = 100_000_000  # of a JSON file, which is read at once
DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class DataError(ValueError):
    """A mistake in what the person gave; its message is one finished sentence for that person."""


def first_line(error: Exception) -> str:
    """What an error says, in at most 200 characters: some quote the whole file that they are about."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def read_whole(path: Path) -> str:
    """The text of a file that is read at once; ValueError for one that would fill the memory or keep us waiting."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("it is no file, but a pipe, a device or a folder")
    if info.st_size > MOST_BYTES:
        raise ValueError(f"it has {info.st_size:,} bytes, and at most {MOST_BYTES:,} are read")
    return path.read_text(encoding="utf-8")


class TokenWriter:
    """Stream ids into `path`; the file takes its name only when the `with` block ends well.

    Ids take 16 bits where `vocab_size` allows it and 32 otherwise. `count` and `sha256` (of the ids, without
    the header) describe what was written.
    """

    def __init__(self, path: str | Path, vocab_size: int):
        self.path, self.vocab_size, self.count = Path(path), vocab_size, 0
        self.dtype = DTYPES[2 if vocab_size <= 1 << 16 else 4]
        self._hash = hashlib.sha256()
        self._aside = self.path.with_name(self.path.name + ".tmp")
        self._file = open(self._aside, "wb")  # noqa: SIM115 - __exit__ closes it
        self._file.write(bytes(HEADER.size))

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, ids: np.ndarray | Sequence[int]) -> None:
        """Append ids, each in [0, vocab_size); ValueError for any other."""
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ValueError(f"ids {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size}")
        block = ids.astype(self.dtype, copy=False).tobytes()
        with self._named():
            self._file.write(block)
        self._hash.update(block)
        self.count += ids.size

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            with self._named(), self._file as file:
                file.seek(0)
                file.write(HEADER.pack(MAGIC, VERSION, self.dtype.itemsize, self.count))
                file.flush()
                os.fsync(file.fileno())
            if error is None:
                os.replace(self._aside, self.path)
        finally:
            self._aside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """A write that fails, on a full disk for one, does not know the name of its file."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise


IGNORED = -100  # the target that F.cross_entropy leaves out


class TokenFile:
    """The ids in `path`, read by position; DataError if the file is not a whole token file.

    `counted`, another token file, tells of every id whether it counts as a target; without it all do.

    There is no memory map: pages touched through one stay counted as the process' memory. The file stays
    open, so that a read is one system call.
    """

    def __init__(self, path: str | Path, counted: str | Path | None = None):
        self.path, self._lock = Path(path), threading.Lock()
        self.counted = TokenFile(counted) if counted else None
        if self.path.exists() and not self.path.is_file():  # a pipe would keep us waiting
            raise DataError(f"{self.path} is no file, but a pipe, a device or a folder: prepare the data set again")
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - open as long as the object
        except FileNotFoundError:
            raise DataError(f"{self.path} is missing: prepare the data set again") from None
        size, header = os.fstat(self._file.fileno()).st_size, self._file.read(HEADER.size)
        magic, version, width, self.count = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        if (magic, version) != (MAGIC, VERSION) or width not in DTYPES:
            raise DataError(f"{self.path} is not a token file of version {VERSION}: prepare it again")
        self.dtype = DTYPES[width]
        expected = HEADER.size + self.count * width
        if size != expected:
            what = f"{size:,} bytes where {self.count:,} tokens take {expected:,}"
            raise DataError(f"{self.path} has {what}: prepare it again")
        if self.counted and len(self.counted) != self.count:
            raise DataError(f"{self.counted.path} does not belong to {self.path}: prepare it again")

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, count: int) -> np.ndarray:
        """Ids start .. start + count - 1, (count,), read-only; IndexError outside the file."""
        if start < 0 or count < 0 or start + count > self.count:
            raise IndexError(f"tokens {start} to {start + count} of {self.path}, which has {self.count}")
        offset, size, parts = HEADER.size + start * self.dtype.itemsize, count * self.dtype.itemsize, []
        while size > 0:  # one turn, unless the read is beyond 2 GB
            parts.append(self._read_at(offset, size))
            if not parts[-1]:
                raise DataError(f"{self.path} became shorter while it was in use: prepare it again")
            offset, size = offset + len(parts[-1]), size - len(parts[-1])
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype=self.dtype)

    def window(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids start .. start + count - 1 and their targets, the ids that follow, IGNORED where they do not count.

        Both int64 (count,); IndexError outside the file.
        """
        ids = self.read(start, count + 1).astype(np.int64)
        targets = ids[1:].copy()
        if self.counted:
            targets[self.counted.read(start + 1, count) == 0] = IGNORED
        return ids[:-1], targets

    def _read_at(self, offset: int, size: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), size, offset)
        with self._lock:  # Windows: position and read are two calls
            self._file.seek(offset)
            return self._file.read(size)

    def sha256(self, chunk: int = 1 << 20) -> str:
        """SHA-256 of the ids, as the writer took it; reads the whole file, `chunk` ids at a time."""
        total = hashlib.sha256()
        for start in range(0, self.count, chunk):
            total.update(self.read(start, min(chunk, self.count - start)).tobytes())
        return total.hexdigest()

    def max_id(self, chunk: int = 1 << 20) -> int:
        """The largest id, -1 if there is none; reads the whole file, `chunk` ids at a time."""
        starts = range(0, self.count, chunk)
        return max((int(self.read(s, min(chunk, self.count - s)).max()) for s in starts), default=-1)
