"""A run's folder and settings: a new run, one that goes on, one that begins with another's weights."""

import dataclasses
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from data import Dataset
from runtime.errors import UserError
from runtime.settings import build

MAY_CHANGE = {  # on --resume; anything else would make it another run
    "resume", "max_steps", "eval_interval", "eval_tokens", "log_interval", "save_interval", "device", "compile",
    "wandb", "wandb_project", "block_size",
}  # fmt: skip
MAY_DIFFER = {"block_size", "dropout", "attention_dropout", "attention_path"}  # of the model, on --init_from
PARTS = ("settings.toml", "metrics.jsonl", "last", "best", "last.old", "best.old")  # of a run's folder


def continued(classes: tuple[type, type], meta: dict[str, Any], given: dict[str, Any]) -> tuple[Any, ...]:
    """Settings (of the model, of the run) for --resume or --init_from: the checkpoint's, under those given.

    A resumed run takes all its settings from the checkpoint, a run with another's weights only the model's.
    UserError names a given setting that would not fit the checkpoint.
    """
    model_class, run_class = classes
    if "resume" in given:
        how, saved = "resume", meta["train"]
        free = MAY_CHANGE | ({"eval_only", "dataset"} if given.get("eval_only") else set())
    else:
        how, saved = "init_from", {}
        free = MAY_DIFFER | {field.name for field in dataclasses.fields(run_class)}
    for name in given:
        kept = (meta["model"] | saved).get(name)
        if name not in free and given[name] != kept:
            raise UserError(f"{name} cannot change with --{how}: the checkpoint has {'none' if kept is None else kept}")
    (model_saved,) = build((model_class,), meta["model"])
    if given.get("block_size", 0) > model_saved.block_size:
        raise UserError(
            f"block_size can shrink but not grow: {given['block_size']} is more than {model_saved.block_size}"
        )
    return build(classes, meta["model"] | saved | given)


def check_data(dataset: Dataset, meta: dict[str, Any], run: str, exact: bool) -> None:
    """UserError if the data are not in the checkpoint's tokens or, with `exact`, not those it was trained on."""
    if dataset.tokenizer.to_meta() != meta["tokenizer"]:
        raise UserError(
            f"data set {dataset.name} (tokenizer {dataset.tokenizer.kind}, {dataset.vocab_size} ids) is not in the "
            f"tokens of {run}: prepare the text with --like {meta['dataset'].get('name')}, which has its tokenizer"
        )
    if exact and dataset.fingerprint != meta["dataset"]["fingerprint"]:
        raise UserError(
            f"data set {dataset.name} has changed since {run} was trained on it: prepare it as it was, or begin a "
            f"new run from these weights with --init_from {run}"
        )


def new_folder(out_dir: str | None, name: str, overwrite: bool) -> Path:
    """The folder of a new run, made: out_dir, or the next free runs/NAME-N.

    UserError if it holds a run, unless `overwrite`, which removes that run and nothing else in the folder.
    """
    if out_dir is None:
        taken = [int(m[1]) for p in Path("runs").glob("*") if (m := re.fullmatch(rf"{re.escape(name)}-(\d+)", p.name))]
        out_dir = f"runs/{name}-{max(taken, default=0) + 1}"
    folder = Path(out_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out_dir {folder} is a file: give the name of a folder")
    parts = [folder / part for part in PARTS if (folder / part).exists()]
    if parts and not overwrite:
        raise UserError(
            f"{folder} holds a run already; --resume {folder} goes on with it, --overwrite replaces it, or choose "
            "another --out_dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder):
        for part in parts:
            shutil.rmtree(part) if part.is_dir() else part.unlink()
    return folder


def hold(folder: Path) -> Any:
    """An open file that keeps other processes from training in the same folder; UserError if one does."""
    file = open(folder / "lock", "w")  # noqa: SIM115 - the system lets go of it when the process ends
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except OSError:
        raise UserError(f"another process is training in {folder}: wait for it or choose another --out_dir") from None
    return file


def write_settings(folder: Path, text: str) -> None:
    """Write settings.toml whole: aside, then renamed."""
    aside = folder / "settings.toml.tmp"
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, folder / "settings.toml")


def python() -> str:
    """The interpreter as a person would call it here."""
    here = os.path.relpath(sys.executable) if sys.prefix != sys.base_prefix else "python"
    return "python" if here.startswith("..") else here


class StopSignal:
    """Ctrl-C and SIGTERM, noted so that the step can be finished; a second one ends the process at once."""

    def __init__(self) -> None:
        self.number = 0  # of the signal, once there was one
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.number = number
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)
