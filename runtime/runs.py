"""A run's folder and settings: a new run, one that goes on, one that begins with another's weights."""

import contextlib
import dataclasses
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from torch import Tensor

from data import Dataset, dataset_path, open_dataset
from data.tokenizer import Tokenizer
from model import ModelConfig
from runtime.checkpoint import save_checkpoint
from runtime.errors import EnvironmentFault, UserError, drop_output
from runtime.files import check_own, write_synced
from runtime.settings import as_dict, build, to_toml

MAY_CHANGE = {  # on --resume; anything else would make it another run
    "resume", "max_steps", "eval_interval", "eval_tokens", "log_interval", "save_interval", "device", "compile",
    "wandb", "wandb_project", "block_size", "micro_batch_size",
}  # fmt: skip
MAY_DIFFER = {"block_size", "dropout", "attention_dropout", "attention_path"}  # of the model, on --init_from
PARTS = ("settings.toml", "metrics.jsonl", "last", "best", "last.old", "best.old")  # of a run's folder


@dataclass(frozen=True)
class TrainConfig:
    """The run. Steps are optimiser steps; a batch is what one step sees."""

    dataset: str = "shakespeare"  # a name in data/ (python prepare.py NAME), or the path of a prepared folder
    out_dir: str | None = None  # folder of the run; unset = the next free runs/DESIGN-N
    seed: int = 1  # of initial values, order of the data, and dropout
    init_seed: int | None = None  # of initial values alone; unset = seed
    max_steps: int = 1500  # steps in all
    batch_size: int | None = None  # sequences a step; unset = 8, or what batch_tokens says
    batch_tokens: int | None = None  # or the same in tokens a step
    micro_batch_size: int | None = None  # sequences at a time on a device; unset = all of a process, no accumulation
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the blocks, adamw for the rest
    learning_rate: float = 3e-3  # its peak
    schedule: Literal["linear", "cosine", "trapezoid"] = "linear"  # how it comes down
    warmup_steps: int | None = None  # steps until the peak; unset = decay_steps / 10, at most 100
    decay_steps: int | None = None  # step at which it is down; unset = max_steps, and kept on resume
    final_lr: float = 0.05  # what is left of it then, as a share of the peak
    weight_decay: float = 0.1  # of matrices and tables
    beta1: float = 0.9  # of AdamW, and the momentum of Muon
    beta2: float = 0.95  # of AdamW
    ema_decay: float = 0.0  # such as 0.99: evaluate and save an average of the weights over about 1 / (1 - it) steps
    grad_clip: float = 1.0  # largest norm of the gradient; 0 = no limit
    eval_interval: int = 250  # steps between evaluations
    eval_tokens: int = 100_000  # validation tokens for them; the last evaluation takes the whole split
    log_interval: int = 10  # steps between lines of the log
    save_interval: int = 250  # steps between saves; the end, Ctrl-C, SIGTERM and a closed terminal save as well
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    threads: int | None = None  # of a CPU; unset = one for each core; another number rounds differently
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products; auto = bfloat16 on a GPU that has it
    compile: bool | None = None  # torch.compile; unset = on a GPU
    wandb: Literal["off", "offline", "online"] = "off"  # log there as well; metrics.jsonl is always written
    wandb_project: str = "manyheads"
    resume: str | None = None  # go on with this run, in its folder and with its settings
    init_from: str | None = None  # begin a new run with the weights of this one, on its data set if none is named
    eval_only: bool = False  # with --resume: print the loss on the whole validation split and change nothing
    overwrite: bool = False  # replace the run that out_dir holds

    def __post_init__(self):
        for name in ("max_steps", "batch_size", "batch_tokens", "micro_batch_size", "decay_steps", "eval_interval",
                     "eval_tokens", "log_interval", "save_interval", "threads"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise ValueError(f"{name} must be at least 1 and below 2^31, not {value}")
        for name in ("seed", "init_seed", "warmup_steps", "weight_decay", "grad_clip"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0, not {value}")
        for name in ("beta1", "beta2", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if self.threads and self.threads > 1024:
            raise ValueError(f"threads {self.threads} is more than 1024: give the number of cores or less")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0, not {self.learning_rate}")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"final_lr is a share of the peak, from 0 to 1, not {self.final_lr}")
        for name in ("dataset", "out_dir", "resume", "init_from"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; give a name or leave it out")
        if self.eval_only and not self.resume:
            raise ValueError("eval_only needs --resume RUN to say what to evaluate")
        decay_steps = self.decay_steps or self.max_steps
        warmup_steps = min(100, decay_steps // 10) if self.warmup_steps is None else self.warmup_steps
        if warmup_steps > decay_steps:
            raise ValueError(f"warmup_steps {warmup_steps} is more than decay_steps {decay_steps}")
        object.__setattr__(self, "decay_steps", decay_steps)
        object.__setattr__(self, "warmup_steps", warmup_steps)


def continued(classes: tuple[type, type], meta: dict[str, Any], given: dict[str, Any]) -> tuple[Any, ...]:
    """Settings (of the model, of the run) for --resume or --init_from: the checkpoint's, under those given.

    A resumed run takes all its settings from the checkpoint, a run with another's weights the model's and the data set.
    UserError names a given setting that would not fit the checkpoint, or says that a data set has to be named.
    """
    model_class, run_class = classes
    if "resume" in given:
        how, saved = "resume", meta["train"]
        if not saved and not given.get("eval_only"):
            raise UserError(
                f"{given['resume']} holds a model that was brought in, with no training to go on with: begin a new "
                f"run from its weights with --init_from {given['resume']}"
            )
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
    if not saved and "dataset" not in given:
        run, own = given[how], meta["dataset"]
        if not own["fingerprint"] or not (brings_itself(own["name"]) or has_data(own["name"])):
            raise UserError(
                f"the data set of {run} is not known or not here: give --dataset NAME, of one in its tokens; a new one "
                f"is made by python prepare.py NAME --files FILE --like {run}"
            )
        saved = {"dataset": own["name"]}
    return build(classes, meta["model"] | saved | given)


def brings_itself(name: str) -> bool:
    """Whether a data set is prepared when it is first asked for."""
    return name == "shakespeare" or name.startswith("probe-")


def has_data(name: str) -> bool:
    return (dataset_path(name) / "meta.json").is_file()


def open_or_prepare(name: str) -> Dataset:
    """The prepared data set; the default one and the probes are prepared if they are not there yet."""
    if brings_itself(name) and not has_data(name):
        with exit_on_signals():
            status = subprocess.run([sys.executable, str(Path(__file__).parent.parent / "prepare.py"), name]).returncode
        if status:
            raise SystemExit(status)  # it has said why
    return open_dataset(name)


def with_data(model_config: ModelConfig, dataset: Dataset, given: Collection[str] = ()) -> ModelConfig:
    """The model's settings with vocab_size filled in and, for a probe, block_size if it is not among those given.

    UserError if the data hold ids beyond vocab_size, or if block_size is not a multiple of an example's length.
    """
    block_size = model_config.block_size
    if dataset.probe:
        length = dataset.probe["length"]
        block_size = block_size if "block_size" in given else length
        if block_size % length:
            raise UserError(
                f"a text of {dataset.name} has {length} tokens, and block_size {block_size} is not a multiple of "
                f"{length}: take {length} or {2 * length}"
            )
    vocab_size = model_config.vocab_size or dataset.vocab_size
    highest = max(dataset.vocab_size - 1, dataset.train.max_id(), dataset.val.max_id())
    if highest >= vocab_size:
        raise UserError(f"data set {dataset.name} has ids up to {highest} and vocab_size is {vocab_size}")
    return build((ModelConfig,), as_dict(model_config) | {"vocab_size": vocab_size, "block_size": block_size})[0]


def with_batch(config: TrainConfig, block_size: int) -> TrainConfig:
    """The run's settings with the batch in sequences; UserError if it does not divide."""
    batch_size = config.batch_size or 8
    if config.batch_tokens:
        batch_size, rest = divmod(config.batch_tokens, block_size)
        if rest or not batch_size:
            raise UserError(f"batch_tokens {config.batch_tokens} is not a multiple of block_size {block_size}")
        if config.batch_size not in (None, batch_size):
            raise UserError(f"batch_tokens {config.batch_tokens} is not batch_size {config.batch_size} x {block_size}")
    if batch_size % (config.micro_batch_size or 1):
        raise UserError(f"batch_size {batch_size} is not divisible by micro_batch_size {config.micro_batch_size}")
    sizes = {"batch_size": batch_size, "batch_tokens": None}
    return build((TrainConfig,), as_dict(config) | sizes)[0]


def check_data(dataset: Dataset, meta: dict[str, Any], run: str, exact: bool) -> None:
    """UserError if the data are not in the checkpoint's tokens or, with `exact`, not those it was trained on."""
    if dataset.tokenizer.to_meta() != meta["tokenizer"]:
        if dataset.probe:
            raise UserError(f"{dataset.name} has words of its own, which {run} does not know: train a new run on it")
        raise UserError(
            f"data set {dataset.name} (tokenizer {dataset.tokenizer.kind}, {dataset.vocab_size} ids) is not in the "
            f"tokens of {run}: prepare the text with --like {run}, which has its tokenizer"
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
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise UserError(f"out_dir {folder} is a file or a broken link: give the name of a folder")
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


def check_new(folder: Path) -> None:
    """UserError if a folder holds a run."""
    if any((folder / part).exists() for part in PARTS):
        raise UserError(f"{folder} holds a run already: give the name of a new folder")


def write_run(
    folder: Path, config: ModelConfig, weights: dict[str, Tensor], tokenizer: Tokenizer, dataset: dict[str, Any]
) -> None:
    """A new run whose weights were made elsewhere: a checkpoint at step 0 without an optimiser, and its settings.

    `dataset` is the name and the fingerprint of what its losses are measured on. UserError if the folder holds a run.
    """
    check_new(folder)
    meta = {
        "step": 0, "best_loss": None, "val_loss": None, "model": as_dict(config), "train": {},
        "tokenizer": tokenizer.to_meta(), "dataset": dataset,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "last", meta, weights, None)
    write_whole(folder / "settings.toml", to_toml(config))


class FolderInUse(UserError):
    """Another process trains there."""


def hold(folder: Path) -> Any:
    """An open file that keeps other processes from training in the same folder; FolderInUse if one does."""
    path = folder / "lock"
    check_own(path, "the lock of a run")
    file = open(path, "a")  # noqa: SIM115 - the system lets go of it when the process ends
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except OSError:
        raise FolderInUse(f"another process is training in {folder}: wait for it or choose another --out_dir") from None
    return file


def check_held(lock: Any, folder: Path) -> None:
    """EnvironmentFault if another lock than ours lies in a folder: it was removed, and another run began there."""
    path = folder / "lock"
    if path.exists() and not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
        raise EnvironmentFault(f"{folder} was removed and is now another run's: nothing is saved over that one")


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all: aside, synced, then renamed."""
    aside = path.with_name(path.name + ".tmp")
    write_synced(aside, text.encode())
    os.replace(aside, path)


def python() -> str:
    """The interpreter as a person would call it here."""
    here = os.path.relpath(sys.executable) if sys.prefix != sys.base_prefix else "python"
    return "python" if here.startswith("..") else here


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal raise SystemExit, so that a process begun there is ended as well."""
    numbers = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    former = {number: signal.getsignal(number) for number in numbers}
    former = {number: handler for number, handler in former.items() if handler not in (signal.SIG_IGN, None)}
    for number in former:  # not those ignored, as nohup has it, or handled by a library in C
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def is_file(stream: TextIO) -> bool:
    """Whether a stream leads to a file of the disk, not to a terminal, a pipe or nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    return False


class StopSignal:
    """Ctrl-C, SIGTERM and a closed terminal, noted so that the step can be finished; Ctrl-C once more ends at once.

    A scheduler may send SIGTERM twice, to the process and to all of its job, and means it once.
    """

    def __init__(self) -> None:
        self.number = 0  # of the signal, once there was one
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        if signal.getsignal(hangup := getattr(signal, "SIGHUP", signal.SIGTERM)) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(hangup, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.number = self.number or number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if number == getattr(signal, "SIGHUP", None):
            # What is said to a terminal that is gone would fail, before the save; a file is still there.
            drop_output(*(s for s in (sys.stdout, sys.stderr) if not is_file(s)))
