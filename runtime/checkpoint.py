"""Saving a run and reading it back. A save is whole or absent, and nothing in it can run code.

A checkpoint is a folder: model.safetensors, optimizer.safetensors (not in `best`) and meta.json, which holds
the settings, the tokenizer, the step, and the SHA-256 of the other files and of all that it says itself.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from data.tokenizer import Tokenizer
from model import GPT, ModelConfig
from runtime.errors import EnvironmentFault, UserError, naming
from runtime.settings import build

FORMAT = 1


def save_checkpoint(
    folder: Path, meta: dict[str, Any], weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor] | None
) -> None:
    """Write a checkpoint folder aside, sync it to the disk, and only then give it its name.

    At every moment `folder`, or else `folder`.old, is a whole checkpoint. OSError leaves the former one in place, and
    so does EnvironmentFault, for values that are not finite.
    """
    aside, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        parts = {"model.safetensors": weights} | ({} if optimizer is None else {"optimizer.safetensors": optimizer})
        sums = {}
        for name, tensors in parts.items():
            tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
            if bad := [k for k, v in tensors.items() if not v.isfinite().all()]:
                raise EnvironmentFault(
                    f"step {meta['step']}: {bad[0]} is not finite: training has diverged; nothing is saved over the "
                    f"last good checkpoint in {folder.parent}; lower learning_rate or raise warmup_steps"
                )
            content = safetensors.torch.save(tensors)
            sums[name] = hashlib.sha256(content).hexdigest()
            write_synced(aside / name, content)
        write_meta(aside, {"format": FORMAT, **meta, "sha256": sums})
        _sync_folder(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)  # no system replaces a folder in one step: a stop here leaves `old`, which is read then
    os.rename(aside, folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with a checksum of its own among those it holds."""
    meta = meta | {"sha256": meta["sha256"] | {"meta.json": _checksum(meta)}}
    write_synced(folder / "meta.json", json.dumps(meta, indent=1).encode())


def _checksum(meta: dict[str, Any]) -> str:
    """SHA-256 of what a meta says, its own checksum left out."""
    others = {name: checksum for name, checksum in meta["sha256"].items() if name != "meta.json"}
    return hashlib.sha256(json.dumps(meta | {"sha256": others}).encode()).hexdigest()


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with naming(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if os.name == "posix":  # Windows cannot open a folder
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def find_checkpoint(run: str | Path, which: str = "last") -> Path:
    """The folder of a run's checkpoint; `best` falls back to `last`. UserError if there is none."""
    run = Path(run)
    if not run.is_dir():
        runs = sorted(path.parent.as_posix() for path in Path("runs").glob("*/settings.toml"))
        raise UserError(f"no run in {run}" + (f"; there are {', '.join(runs)}" if runs else "; train one first"))
    for name in dict.fromkeys((which, "last")):
        for folder in (run / name, run / f"{name}.old"):  # .old: between the two renames of a save
            if (folder / "meta.json").is_file():
                return folder
    raise UserError(f"{run} holds no checkpoint (no {which}/meta.json); the run stopped before its first save")


def read_meta(folder: Path) -> dict[str, Any]:
    """What meta.json of a checkpoint says; UserError if it is damaged or of another format."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise UserError(f"{folder / 'meta.json'} has format {meta['format']} and this version reads {FORMAT}")
        for key in ("model", "train", "tokenizer", "dataset", "sha256"):
            if not isinstance(meta[key], dict):
                raise TypeError(f"{key} is not an object")
        if not meta["sha256"].keys() <= {"model.safetensors", "optimizer.safetensors", "meta.json"}:
            raise ValueError(f"it has checksums of {', '.join(meta['sha256'])}")
        if meta["sha256"].get("meta.json") not in (None, _checksum(meta)):  # None: saved before there was one
            raise ValueError("its checksum is not the one it holds")
        if type(meta["step"]) is not int or meta["step"] < 0:
            raise ValueError(f"step is {meta['step']}")
        if meta["best_loss"] is not None and not isinstance(meta["best_loss"], float):
            raise TypeError(f"best_loss is {meta['best_loss']}")
        str.encode(meta["dataset"]["fingerprint"])
        if not isinstance(build((ModelConfig,), meta["model"])[0].vocab_size, int):
            raise ValueError("vocab_size is missing")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{folder / 'meta.json'} is damaged ({error!r}); use another checkpoint") from None
    return meta


def read_tensors(folder: Path, name: str, meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One safetensors file of a checkpoint, its checksum compared; UserError if it is missing or damaged."""
    path = folder / name
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != meta["sha256"][name]:
            raise UserError(f"{path} is damaged: its checksum is not the one in meta.json; use another checkpoint")
        return safetensors.torch.load(content)
    except (SafetensorError, KeyError, FileNotFoundError) as error:
        raise UserError(f"{path} is damaged or missing ({error}); use another checkpoint") from None


def load_weights(model: GPT, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Copy tensors into the model's parameters; UserError names the first that does not fit."""
    parameters = dict(model.named_parameters())
    odd = sorted(parameters.keys() ^ tensors.keys())
    if odd:
        raise UserError(f"{source} does not fit the model: {odd[0]} is in only one of them")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)} is not {tuple(parameter.shape)}"
            raise UserError(f"{source} does not fit the model: {name} {shapes}")
        parameter.data.copy_(tensors[name])


def crop_positions(tensors: dict[str, torch.Tensor], block_size: int) -> dict[str, torch.Tensor]:
    """Learned positions (and what an optimiser keeps of them) cut to a smaller block_size."""
    return {
        name: value[:block_size].clone() if name.startswith("embed_position.") and value.dim() == 2 else value
        for name, value in tensors.items()
    }


def load_model(
    run: str | Path, which: str = "best", device: str | torch.device = "cpu"
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """A run's model, ready to be used, its tokenizer, and the checkpoint's meta; UserError if it cannot be read."""
    folder = find_checkpoint(run, which)
    meta = read_meta(folder)
    try:
        tensors = read_tensors(folder, "model.safetensors", meta)
    except UserError:
        if read_meta(find_checkpoint(run, which)) == meta:
            raise
        return load_model(run, which, device)  # not damaged: the run saved anew while we read
    tokenizer = Tokenizer.from_meta(meta["tokenizer"])
    (config,) = build((ModelConfig,), meta["model"])
    if not 0 < tokenizer.vocab_size <= config.vocab_size:
        raise UserError(f"{folder}: {tokenizer.vocab_size} tokens do not fit vocab_size {config.vocab_size}")
    model = GPT(config)
    load_weights(model, tensors, folder)
    return model.to(device).eval(), tokenizer, meta
