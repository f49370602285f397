"""A run's folder and settings: a new run, one that goes on, one that begins with another's weights."""

import dataclasses
import re
import shutil
import signal
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
        how, saved = "resume", meta["train"] | {"init_from": None}
        free = MAY_CHANGE | ({"eval_only", "dataset"} if given.get("eval_only") else set())
    else:
        how, saved = "init_from", {}
        free = MAY_DIFFER | {field.name for field in dataclasses.fields(run_class)}
    for name in given:
        if name not in free:
            kept = (meta["model"] | saved).get(name)
            raise UserError(f"{name} cannot change with --{how}: the checkpoint has {'none' if kept is None else kept}")
    if given.get("block_size", 0) > meta["model"]["block_size"]:
        raise UserError(
            f"block_size can shrink but not grow: {given['block_size']} is more than {meta['model']['block_size']}"
        )
    return build(classes, meta["model"] | saved | given)


def check_data(dataset: Dataset, meta: dict[str, Any], run: str, exact: bool) -> None:
    """UserError if the data are not in the checkpoint's tokens or, with `exact`, not those it was trained on."""
    if dataset.tokenizer.to_meta() != meta["tokenizer"]:
        raise UserError(
            f"data set {dataset.name} (tokenizer {dataset.tokenizer.kind}, {dataset.vocab_size} ids) is not in the "
            f"tokens of {run} (tokenizer {meta['tokenizer'].get('kind')}): prepare the text with that tokenizer"
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
    parts = [folder / part for part in PARTS if (folder / part).exists()]
    if parts and not overwrite:
        raise UserError(
            f"{folder} holds a run already; --resume {folder} goes on with it, --overwrite replaces it, or choose "
            "another --out_dir"
        )
    for part in parts:
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
