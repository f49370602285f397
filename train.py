"""Train one model.

    python train.py                                   the default model on Shakespeare
    python train.py config/gqa-2.toml --seed 2        another design: a file of settings, then flags
    python train.py --resume runs/gqa-2-1             go on where a run stopped
"""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from data import Dataset, dataset_path, open_dataset
from data.loader import Windows
from model import GPT, ModelConfig
from runtime.checkpoint import (
    crop_positions,
    find_checkpoint,
    load_weights,
    read_meta,
    read_tensors,
    save_checkpoint,
)
from runtime.devices import autocast, describe_device, pick_device, pick_dtype
from runtime.errors import EnvironmentFault, UserError, run
from runtime.evaluate import Score, evaluate
from runtime.logbook import Logbook
from runtime.optim import learning_rate, load_optimizer_tensors, make_optimizer, optimizer_tensors
from runtime.runs import StopSignal, check_data, continued, hold, new_folder, python, write_settings
from runtime.settings import as_dict, build, describe, parse, to_toml


@dataclass(frozen=True)
class TrainConfig:
    """The run. Steps are optimiser steps; a batch is what one step sees."""

    dataset: str = "shakespeare"  # a name in data/ (python prepare.py NAME), or the path of a prepared folder
    out_dir: str | None = None  # folder of the run; unset = the next free runs/DESIGN-N
    seed: int = 1  # of initial values, order of the data, and dropout
    max_steps: int = 1500  # steps in all
    batch_size: int | None = None  # sequences a step; unset = 8, or what batch_tokens says
    batch_tokens: int | None = None  # or the same in tokens a step
    micro_batch_size: int | None = None  # sequences at a time on the device; unset = batch_size, no accumulation
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: float = 3e-3  # its peak
    schedule: Literal["linear", "cosine", "trapezoid"] = "linear"  # how it comes down
    warmup_steps: int | None = None  # steps until the peak; unset = decay_steps / 10, at most 100
    decay_steps: int | None = None  # step at which it is down; unset = max_steps, and kept on resume
    final_lr: float = 0.05  # what is left of it then, as a share of the peak
    weight_decay: float = 0.1  # of matrices and tables
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0 = no limit
    eval_interval: int = 250  # steps between evaluations
    eval_tokens: int = 100_000  # validation tokens for them; the last evaluation takes the whole split
    log_interval: int = 10  # steps between lines of the log
    save_interval: int = 250  # steps between saves; the end, Ctrl-C and SIGTERM save as well
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products; auto = bfloat16 on a GPU that has it
    compile: bool | None = None  # torch.compile; unset = on a GPU
    wandb: Literal["off", "offline", "online"] = "off"  # log there as well; metrics.jsonl is always written
    wandb_project: str = "manyheads"
    resume: str | None = None  # go on with this run, in its folder and with its settings
    init_from: str | None = None  # begin a new run with the weights of this one
    eval_only: bool = False  # with --resume: print the loss on the whole validation split and change nothing
    overwrite: bool = False  # replace the run that out_dir holds

    def __post_init__(self):
        for name in ("max_steps", "batch_size", "batch_tokens", "micro_batch_size", "decay_steps", "eval_interval",
                     "eval_tokens", "log_interval", "save_interval"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise ValueError(f"{name} must be at least 1 and below 2^31, not {value}")
        for name in ("seed", "warmup_steps", "weight_decay", "grad_clip"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0, not {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
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


def main(argv: list[str]) -> int:
    """Train as the command line says; returns the exit status."""
    # Settings: from files and flags, or from the checkpoint of the run that goes on.
    (model_config, config), given = parse(argv, ModelConfig, TrainConfig, prog="train.py", description=__doc__)
    if {"resume", "init_from"} <= given.keys():
        raise UserError("resume goes on with a run and init_from begins a new one: give one of them")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UserError("training on several processes is not supported yet; start train.py without torchrun")
    former = config.resume or config.init_from  # the run whose weights this one begins with
    if former:
        source = find_checkpoint(former, "last" if config.resume else "best")
        meta = read_meta(source)
        model_config, config = continued((ModelConfig, TrainConfig), meta, given)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)

    # Data.
    dataset = open_or_prepare(config.dataset)
    dataset.verify()
    if former:
        check_data(dataset, meta, former, exact=bool(config.resume) and not config.eval_only)
    model_config = with_vocabulary(model_config, dataset)
    config = with_batch(config, model_config.block_size)
    windows = Windows(dataset.train, model_config.block_size, config.batch_size, config.seed)
    Windows(dataset.val, model_config.block_size, 1, 0)  # refuses a validation split that is too short
    tokens_per_step = config.batch_size * model_config.block_size
    accumulation = config.batch_size // config.micro_batch_size

    # Model and optimiser.
    torch.set_float32_matmul_precision("high")  # lets GPUs use TF32; changes nothing on a CPU
    model = GPT(model_config, config.seed).to(device)
    optimizer = make_optimizer(model, config)
    compiled = config.compile if config.compile is not None else device.type == "cuda"
    forward = torch.compile(model) if compiled else model
    step, best_loss = 0, math.inf
    if former:
        tensors = read_tensors(source, "model.safetensors", meta)
        load_weights(model, crop_positions(tensors, model_config.block_size), source)
    if config.resume:
        step, best_loss = meta["step"], meta["best_loss"] or math.inf
        if step > config.max_steps:
            raise UserError(f"max_steps {config.max_steps} is behind {former}, which has done {step} steps")
        if model_config.block_size != meta["model"]["block_size"]:
            best_loss = math.inf  # losses of windows of another length do not compare
        tensors = read_tensors(source, "optimizer.safetensors", meta)
        load_optimizer_tensors(model, optimizer, crop_positions(tensors, model_config.block_size))

    def score(start: int = 0, stop: int | None = None, progress: Callable[[float], None] | None = None) -> Score:
        return evaluate(
            model, dataset.val, dataset.tokenizer.token_bytes, model_config.block_size, config.micro_batch_size,
            start, stop, autocast(device, dtype), progress,
        )  # fmt: skip

    if config.eval_only:
        print(f"evaluating {len(dataset.val) - 1:,} tokens", file=sys.stderr, flush=True)
        result = score()
        print(f"{former} at step {step}: val loss {result} in windows of {model_config.block_size}")
        return 0

    # The run's folder and its log.
    stop = StopSignal()
    files = [Path(word).stem for word in argv if word.endswith(".toml")]
    heads = (model_config.n_head, model_config.n_kv_head)
    name = "-".join(files) or ("mha" if heads == (8, 8) else "h{}kv{}".format(*heads))
    out_dir = Path(config.resume) if config.resume else new_folder(config.out_dir, name, config.overwrite)
    lock = hold(out_dir)
    log = Logbook(
        out_dir, start_step=step, max_steps=config.max_steps, tokens_per_step=tokens_per_step, wandb=config.wandb,
        wandb_project=config.wandb_project, settings=as_dict(model_config, config),
    )  # fmt: skip
    kept = replace(config, resume=None, overwrite=False)  # what would begin this run once more
    write_settings(out_dir, to_toml(model_config, kept))
    log.note(describe(model_config, config, given=given))
    log.note(
        f"{model.num_parameters():,} parameters ({model.num_parameters(embeddings=False):,} without embeddings), "
        f"{model.flops_per_token():,} training FLOPs and {model.cache_bytes_per_token():,} cache bytes a token\n"
        f"{dataset.name}: {len(dataset.train):,} training tokens, {tokens_per_step:,} a step, "
        f"{config.max_steps * tokens_per_step / len(dataset.train):.1f} passes\n"
        f"{describe_device(device, dtype, compiled)}; " + (f"going on from step {step} in" if step else "a new run in")
        + f" {out_dir}"
    )  # fmt: skip

    saved = step if config.resume else -1  # the step that `last` holds

    def save(name: str, val_loss: float | None = None) -> None:
        nonlocal saved
        if unseen:
            look()
        with log.pause():
            state = {
                "step": step,
                "best_loss": best_loss if best_loss < math.inf else None,
                "val_loss": val_loss,
                "model": as_dict(model_config),
                "train": as_dict(kept),
                "tokenizer": dataset.tokenizer.to_meta(),
                "dataset": {"name": dataset.name, "fingerprint": dataset.fingerprint},
            }
            moments = optimizer_tensors(model, optimizer) if name == "last" else None
            save_checkpoint(out_dir / name, state, dict(model.named_parameters()), moments)
        if name == "last":
            saved = step

    def record(result: Score) -> None:
        values = {"val_loss": result.loss, "val_bits_per_byte": result.bits_per_byte, "val_tokens": result.tokens}
        log.log(step, step * tokens_per_step, **values)

    unseen: list[torch.Tensor] = []  # (loss, gradient norm) of every step since `look` was called

    def look() -> float:
        """The last step's loss. A GPU is waited for here only, so here a run that has diverged ends."""
        values = torch.stack(unseen).tolist()
        for number, (loss, norm) in enumerate(values, step - len(values) + 1):
            if not math.isfinite(loss + norm):
                raise EnvironmentFault(
                    f"step {number}: the loss is {loss} and its gradient's norm {norm}: training has diverged; "
                    + (f"the last good checkpoint is kept in {out_dir}; " if saved >= 0 else "nothing was saved yet; ")
                    + f"lower learning_rate {config.learning_rate:g} or raise warmup_steps {config.warmup_steps}"
                )
        unseen.clear()
        return values[-1][0]

    try:
        while True:
            # Evaluate what was saved before. A resumed run comes by here again, with the same result.
            if step > 0 and not stop.number and (step == config.max_steps or step % config.eval_interval == 0):
                with log.pause():
                    whole = len(dataset.val) - 1  # targets in the split
                    windows_in_part = max(1, min(config.eval_tokens, whole) // model_config.block_size)
                    part = windows_in_part * model_config.block_size
                    result = score(0, part, log.evaluating)
                    if step % config.eval_interval == 0:
                        record(result)
                    if result.loss < best_loss:
                        best_loss = result.loss
                        save("best", best_loss)
                    if step == config.max_steps:
                        log.note(f"evaluating the whole validation split, {whole:,} tokens")
                        record(result + score(part, None, log.evaluating) if part < whole else result)
            if step == config.max_steps or stop.number:
                if saved < step:
                    save("last")
                break

            # One step: the batch in slices, the mean of their losses, one update.
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            loss = torch.zeros((), device=device)
            for micro in range(accumulation):
                torch.manual_seed(stable_seed(config.seed, step, micro))  # dropout: a function of these alone
                rows = slice(micro * config.micro_batch_size, (micro + 1) * config.micro_batch_size)
                x, y = (t.to(device) for t in windows.batch(step, rows))  # (micro_batch_size, block_size)
                with autocast(device, dtype):
                    micro_loss = forward(x, y) / accumulation
                micro_loss.backward()
                loss += micro_loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            unseen.append(torch.stack((loss, norm)))
            step += 1

            log.tick(step)
            if step == 1 or step % config.log_interval == 0:
                log.log(step, step * tokens_per_step, train_loss=look(), lr=learning_rate(step - 1, config))
            if step % config.save_interval == 0 or step == config.max_steps or stop.number:
                save("last")  # before the evaluation, so that a stop there loses nothing
    finally:
        log.close()
        lock.close()
    if stop.number:
        print(f"stopped after step {step}; go on with: {python()} train.py --resume {out_dir}")
        return 128 + stop.number
    print(f"done; write text with: {python()} sample.py {out_dir}")
    return 0


def open_or_prepare(name: str) -> Dataset:
    """The prepared data set; the default one is prepared if it is not there yet."""
    if name == "shakespeare" and not (dataset_path(name) / "meta.json").is_file():
        status = subprocess.run([sys.executable, str(Path(__file__).with_name("prepare.py")), name]).returncode
        if status:
            raise SystemExit(status)  # it has said why
    return open_dataset(name)


def with_vocabulary(model_config: ModelConfig, dataset: Dataset) -> ModelConfig:
    """The model's settings with vocab_size filled in; UserError if the data hold ids beyond it."""
    vocab_size = model_config.vocab_size or dataset.vocab_size
    highest = max(dataset.vocab_size - 1, dataset.train.max_id(), dataset.val.max_id())
    if highest >= vocab_size:
        raise UserError(f"data set {dataset.name} has ids up to {highest} and vocab_size is {vocab_size}")
    return build((ModelConfig,), as_dict(model_config) | {"vocab_size": vocab_size})[0]


def with_batch(config: TrainConfig, block_size: int) -> TrainConfig:
    """The run's settings with the batch in sequences; UserError if it does not divide."""
    batch_size = config.batch_size or 8
    if config.batch_tokens:
        batch_size, rest = divmod(config.batch_tokens, block_size)
        if rest or not batch_size:
            raise UserError(f"batch_tokens {config.batch_tokens} is not a multiple of block_size {block_size}")
        if config.batch_size not in (None, batch_size):
            raise UserError(f"batch_tokens {config.batch_tokens} is not batch_size {config.batch_size} x {block_size}")
    micro = config.micro_batch_size or batch_size
    if batch_size % micro:
        raise UserError(f"batch_size {batch_size} is not divisible by micro_batch_size {micro}")
    sizes = {"batch_size": batch_size, "batch_tokens": None, "micro_batch_size": micro}
    return build((TrainConfig,), as_dict(config) | sizes)[0]


def stable_seed(*parts: int) -> int:
    """A 63-bit seed that is a function of the parts and of nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


if __name__ == "__main__":
    run(main)
