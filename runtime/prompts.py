"""What a command that uses a trained run is given: the run, and a text in its tokens."""

import sys
import time
from pathlib import Path

from data.tokenizer import Tokenizer
from runtime.errors import UserError


def newest_run() -> str:
    """The run in runs/ that saved last; UserError if there is none."""
    now = time.time() + 60  # a save from the future was made while the clock was wrong: it goes behind the others
    times = {path: path.stat().st_mtime for path in Path("runs").glob("*/last/meta.json")}
    saves = sorted(times, key=lambda path: (times[path] <= now, times[path]))
    if not saves:
        raise UserError("there is no run in runs/: train one first, or name the folder of one")
    return saves[-1].parent.parent.as_posix()


def read_text(file: str, setting: str) -> str:
    """The text of a file, or of standard input for "-", unchanged; UserError names the setting if it has none."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = content.decode("utf-8-sig")  # Windows editors put a mark in front
    except FileNotFoundError:
        raise UserError(f"{setting} {file}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{setting} {file}: a folder, not a text") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{setting} {file}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    if not text:
        raise UserError(f"{setting} {file} is empty; name a file with text, or leave --{setting} out")
    return text


def encode(text: str, what: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text behind those that begin one, or none for no text; UserError names what the model cannot know."""
    if unknown := tokenizer.unknown(text):
        named = ", ".join(map(repr, unknown[:10])) + (" and others" if len(unknown) > 10 else "")
        raise UserError(
            f"the {what} has {named}, which the model's {tokenizer.kind} tokenizer does not know; "
            "leave out what it was not trained on"
        )
    ids = tokenizer.encode(text).tolist()
    return [*tokenizer.begin, *ids] if ids else []
