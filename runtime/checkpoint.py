"""Saving a run and reading it back. A save is whole or absent, and nothing in it can run code.

A checkpoint is a folder: model.safetensors, optimizer.safetensors (not in `best`) and meta.json, which holds
the settings, the tokenizer, the step, and the SHA-256 of the other files and of all that it says itself.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from data.tokenfile import first_line, read_whole
from data.tokenizer import Tokenizer
from model import GPT, ModelConfig
from runtime.errors import EnvironmentFault, UserError
from runtime.files import write_synced
from runtime.settings import build

FORMAT = 1
MOST_TENSORS = 100_000  # in a file
MOST_BYTES = 100_000_000  # of a header, as the library has it
TABLES = 2**27  # bytes of position tables that any model may have; a large one more, as much as its weights
# What `safetensors` raises: for a name, of dtypes that torch lacks, and for a size beyond 63 bits, too.
UNREADABLE = (SafetensorError, KeyError, TypeError, FileNotFoundError)


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
        if old.is_symlink():
            old.unlink()
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)  # no system replaces a folder in one step: a stop here leaves `old`, which is read then
    os.rename(aside, folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with a checksum of its own among those it holds."""
    meta = meta | {"sha256": meta["sha256"] | {"meta.json": checksum(meta)}}
    write_synced(folder / "meta.json", json.dumps(meta, indent=1).encode())


def checksum(meta: dict[str, Any]) -> str:
    """SHA-256 of what a meta says, its own checksum left out."""
    others = {name: value for name, value in meta["sha256"].items() if name != "meta.json"}
    return hashlib.sha256(json.dumps(meta | {"sha256": others}).encode()).hexdigest()


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
        for folder in (run / name, run / f"{name}.old", run / name):  # .old: between the two renames of a save
            if (folder / "meta.json").is_file():
                return folder
    if (run / "meta.json").is_file():
        raise UserError(f"{run} is a checkpoint: give the folder of its run, {run.resolve().parent}")
    if (run / "best" / "meta.json").is_file():
        raise UserError(f"{run} has no last/meta.json but its best checkpoint: begin with it, --init_from {run}")
    why = "the run stopped before its first save: begin it anew with train.py --overwrite"
    raise UserError(
        f"{run} holds no checkpoint (no {which}/meta.json): "
        + (why if (run / "settings.toml").is_file() else "it is not the folder of a run")
    )


def has_saved(run: Path) -> bool:
    """Whether there is something to go on from."""
    return any((run / name / "meta.json").is_file() for name in ("last", "last.old"))


def read_meta(folder: Path) -> dict[str, Any]:
    """What meta.json of a checkpoint says; UserError if it is damaged or of another format."""
    try:
        meta = json.loads(read_whole(folder / "meta.json"))
        if meta["format"] != FORMAT:
            raise UserError(f"the checkpoint has format {meta['format']!r:.50} and this version reads {FORMAT}")
        for key in ("model", "train", "tokenizer", "dataset", "sha256"):
            if not isinstance(meta[key], dict):
                raise TypeError(f"{key} is not an object")
        if not meta["sha256"].keys() <= {"model.safetensors", "optimizer.safetensors", "meta.json"}:
            raise ValueError(f"it has checksums of {', '.join(meta['sha256'])}")
        if meta["sha256"].get("meta.json") not in (None, checksum(meta)):  # None: saved before there was one
            raise ValueError("its checksum is not the one it holds")
        if type(meta["step"]) is not int or meta["step"] < 0:
            raise ValueError(f"step is {meta['step']}")
        if type(best := meta["best_loss"]) is not float and best is not None or not math.isfinite(best or 0.0):
            raise TypeError(f"best_loss is {best}")
        for key in ("name", "fingerprint"):
            str.encode(meta["dataset"][key])
        if not isinstance(build((ModelConfig,), meta["model"])[0].vocab_size, int):
            raise ValueError("vocab_size is missing")
    except UserError as error:
        raise UserError(f"{folder / 'meta.json'}: {first_line(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        told = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{folder / 'meta.json'} is damaged ({told}); use another checkpoint") from None
    return meta


def read_tensors(folder: Path, name: str, meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One safetensors file of a checkpoint, its checksum compared; UserError if it is missing or damaged."""
    path = folder / name
    try:
        check_header(path)
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != meta["sha256"][name]:
            raise UserError(f"{path} is damaged: its checksum is not the one in meta.json; use another checkpoint")
        return safetensors.torch.load(content)
    except UNREADABLE as error:
        raise UserError(f"{path} is damaged or missing ({first_line(error)}); use another checkpoint") from None


def check_header(path: Path) -> None:
    """UserError for a safetensors file of more tensors than any model has, each of which would take time and memory."""
    if path.exists() and not path.is_file():  # a pipe would keep us waiting, a device fill the memory
        raise UserError(f"{path} is no file, but a pipe, a device or a folder; use another checkpoint")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        found = file.read(min(length, MOST_BYTES)).count(b"data_offsets")
    if found > MOST_TENSORS:
        raise UserError(f"{path} has {found:,} tensors, and no model has more than {MOST_TENSORS:,}; use another")


def read_checkpoint(run: str | Path, which: str) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    """A run's checkpoint folder, its meta and its weights, of one save; UserError if they are not there or damaged."""
    before: object = object()
    while True:
        now = None
        try:
            folder = find_checkpoint(run, which)
            meta = read_meta(folder)
            now = folder, meta
            return folder, meta, read_tensors(folder, "model.safetensors", meta)
        except (UserError, FileNotFoundError):
            if now == before:
                raise
            before = now  # once does not make it damaged or missing: the run may have saved while we read


def load_weights(model: GPT, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Copy tensors into the model's parameters; UserError names the first that does not fit."""
    parameters = dict(model.named_parameters())
    _compare({name: parameter.shape for name, parameter in parameters.items()}, tensors, source)
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[name])


def _compare(shapes: Mapping[str, torch.Size], tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    """UserError names the first tensor that is not there, left over, of another shape or no floating-point numbers."""
    odd = sorted(shapes.keys() ^ tensors.keys())
    if odd:
        raise UserError(f"{source} does not fit the model: {odd[0]:.200} is in only one of them")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            found = f"{name} {tuple(tensor.shape)} is not {tuple(shape)}" if tensor.shape != shape else name
            kind = "" if tensor.is_floating_point() else f", and holds {str(tensor.dtype).removeprefix('torch.')}"
            raise UserError(f"{source} does not fit the model: {found}{kind}")


def check_sizes(config: ModelConfig, tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    """As load_weights, before there is a model: what settings ask for is not taken until a file holds as much."""
    one = sized(config, tensors, source)
    shapes = {
        name.replace("blocks.0.", f"blocks.{i}.", 1): parameter.shape
        for i in range(config.n_layer)
        for name, parameter in one.named_parameters()
    }
    _compare(shapes, tensors, source)


def sized(config: ModelConfig, tensors: Mapping[str, torch.Tensor], source: Path) -> GPT:
    """A model of one block, all blocks being alike, that has shapes and no memory.

    UserError if these tensors cannot be those of the settings' model, or if its tables alone would fill the memory.
    """
    if config.n_layer > len(tensors):
        raise UserError(f"{source} does not fit the model: n_layer is {config.n_layer}, of {len(tensors)} tensors")
    most = sum(tensor.numel() for tensor in tensors.values())
    for name in ("vocab_size", "n_embd", "n_head", "n_kv_head", "head_dim", "d_ff", "kv_rank", "rope_dim"):
        if (getattr(config, name) or 0) > most:
            told = f"{name} is {getattr(config, name)}, of {most:,} numbers"
            raise UserError(f"{source} does not fit the model: {told}")
    length = config.block_size if config.positions == "learned" else 1  # others have tables, which are counted below
    try:
        with torch.device("meta"):
            one = GPT(replace(config, n_layer=1, block_size=length))
    except RuntimeError as error:  # of numbers whose product is beyond any tensor
        raise UserError(f"{source} does not fit the model, which no memory could hold: {first_line(error)}") from None
    tables = config.block_size * sum(buffer.nbytes for buffer in one.buffers())
    if tables > TABLES + sum(tensor.nbytes for tensor in tensors.values()):
        told = f"block_size {config.block_size} takes {tables:,} bytes of position tables"
        raise UserError(f"{source} does not fit the model: {told}, far more than its weights")
    return one


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
    folder, meta, tensors = read_checkpoint(run, which)
    tokenizer = Tokenizer.from_meta(meta["tokenizer"])
    (config,) = build((ModelConfig,), meta["model"])
    if not 0 < tokenizer.vocab_size <= config.vocab_size:
        raise UserError(f"{folder}: {tokenizer.vocab_size} tokens do not fit vocab_size {config.vocab_size}")
    check_sizes(config, tensors, folder)
    model = GPT(config)
    load_weights(model, tensors, folder)
    return model.to(device).eval(), tokenizer, meta
