"""One place where a command ends: what went wrong, in a sentence, and the exit status that fits.

Anything not named here is a fault of ours, and its traceback is what we want to see.
"""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO


class UserError(Exception):
    """The person's mistake, told in one finished sentence: exit status 2."""


class EnvironmentFault(Exception):
    """The machine's fault (disk, network, memory), told in one finished sentence: exit status 1."""


# All that moves a cursor, rings or sets a title, turns the direction of writing, or cannot stand in an SVG file.
UNSEEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")

WHAT_TO_DO = {
    errno.ENOSPC: "the disk is full; free some space or choose a folder on another disk",
    errno.EROFS: "the disk is read-only; choose another folder",
    errno.EACCES: "permission denied; choose another place or change its permissions",
    errno.EPERM: "not permitted; choose another place or change its permissions",
    errno.EFBIG: "the file grows beyond what the system allows; raise the limit (ulimit -f)",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.EEXIST: "something else is in the way; choose another name",
    errno.ENOTDIR: "a file is where a folder should be; choose another name",
    errno.EISDIR: "a folder is where a file should be; choose another name, or remove it",
    errno.ENOTEMPTY: "it cannot be replaced; remove it, or change its permissions",
    errno.ENOMEM: "out of memory; close other programs or ask for less at a time",
    getattr(errno, "EDQUOT", -1): "your disk quota is used up; free some space",  # Windows has no quotas
}


def plain(text: str) -> str:
    """A name or a sentence that may hold anything, as a terminal or a page may show it: ESC, for one, as \\x1b."""
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError that comes from in here names the file: a full disk alone does not say which one it was for."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Call main with the command line and exit with its status, or with 2, 1 or 130 and one sentence."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started us, as with >&-
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stream that a test or a notebook put there
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]  # TextIO declares none
    try:
        status, message = main(sys.argv[1:]), None
        sys.stdout.flush()  # so that a closed pipe or a full disk shows here, not after exit
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    except Exception as error:
        status, message = judge(error)
        if status is None:
            raise
        if isinstance(error, OSError):
            drop_output(sys.stdout)
        elif status == 2 and os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("LOCAL_RANK", "0") != "0":
            message = None  # one of several processes that all find the same
    if message is not None:
        if len(message) > 2000:  # it quotes a file
            message = f"{message[:1500]} ... {message[-400:]}"
        print(f"{Path(sys.argv[0]).name}: {plain(message)}", file=sys.stderr)
    sys.exit(status)


def judge(error: Exception) -> tuple[int | None, str | None]:
    """Exit status and sentence for an error; status None for a fault of ours, no sentence to stay quiet."""
    # Neither data nor torch is imported for this: an error of theirs means that they are loaded.
    data_error = getattr(sys.modules.get("data"), "DataError", UserError)
    torch_oom = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    if isinstance(error, (UserError, data_error)):
        return 2, str(error)
    if isinstance(error, EnvironmentFault):
        return 1, str(error)
    if isinstance(error, BrokenPipeError):  # the reader, `head` for one, has seen enough
        return 1, None
    if isinstance(error, OSError):
        told = WHAT_TO_DO.get(error.errno, error.strerror or str(error))
        place = error.filename2 or error.filename  # of a renaming, where it went
        return 1, told if place is None else f"{place}: {told}"
    if isinstance(error, (MemoryError, torch_oom)) or (
        isinstance(error, RuntimeError)  # what torch raises on the CPU and on Apple's GPUs
        and any(part in str(error) for part in ("can't allocate memory", "not enough memory", "out of memory"))
    ):
        return 1, "out of memory; lower micro_batch_size or batch_size first, then block_size or n_embd"
    return None, None


def drop_output(*streams: TextIO) -> None:
    """Point streams at nothing, or Python fails once more when it flushes them at exit."""
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
