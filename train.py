"""Train one model.

    python train.py                                   the default model on Shakespeare
    python train.py config/gqa-2.toml --seed 2        another design: a file of settings, then flags
    python train.py --resume runs/gqa-2-1             go on where a run stopped

`main` is the whole story: settings, data, model, then the loop.
"""

import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from runtime.settings import as_dict, build, describe, parse, to_toml


@dataclass(frozen=True)
class TrainConfig:
    """The run. Steps are optimiser steps; a batch is what one step sees."""

    dataset: str = "shakespeare"  # a name in data/ (python prepare.py NAME), or the path of a prepared folder
    out_dir: str | None = None  # folder of the run; unset = the next free runs/DESIGN-N
    seed: int = 1  # of initial values, order of the data, and dropout
    max_steps: int = 1000  # steps in all
    batch_size: int | None = None  # sequences a step; unset = 16, or what batch_tokens says
    batch_tokens: int | None = None  # or the same in tokens a step
    micro_batch_size: int | None = None  # sequences at a time on the device; unset = batch_size, no accumulation
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: float = 3e-3  # its peak
    schedule: Literal["linear", "cosine", "trapezoid"] = "linear"  # how it comes down
    warmup_steps: int | None = None  # steps until the peak; unset = decay_steps / 20, at most 100
    decay_steps: int | None = None  # step at which it is down; unset = max_steps, and kept on resume
    final_lr: float = 0.05  # what is left of it then, as a share of the peak
    weight_decay: float = 0.1  # of matrices and tables
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.99  # of AdamW
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
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
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
        if self.eval_only and not self.resume:
            raise ValueError("eval_only needs --resume RUN to say what to evaluate")
        if self.resume and self.init_from:
            raise ValueError("resume goes on with a run and init_from begins a new one: give one of them")
        decay_steps = self.decay_steps or self.max_steps
        warmup_steps = min(100, decay_steps // 20) if self.warmup_steps is None else self.warmup_steps
        if warmup_steps > decay_steps:
            raise ValueError(f"warmup_steps {warmup_steps} is more than decay_steps {decay_steps}")
        object.__setattr__(self, "decay_steps", decay_steps)
        object.__setattr__(self, "warmup_steps", warmup_steps)


MAY_CHANGE = {  # on --resume; anything else would make it another run
    "resume", "eval_only", "max_steps", "eval_interval", "eval_tokens", "log_interval", "save_interval", "device",
    "compile", "wandb", "wandb_project", "block_size",
}  # fmt: skip
MAY_DIFFER = {"block_size", "dropout", "attention_dropout", "attention_path"}  # of the model, on --init_from


def main(argv: list[str]) -> int:
    """Train as the command line says; returns the exit status."""
    (model_config, config), given = parse(argv, ModelConfig, TrainConfig, prog="train.py", description=__doc__)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("training on several processes is not supported yet; start train.py without torchrun")

    source = meta = None
    if config.resume or config.init_from:
        source = find_checkpoint(config.resume or config.init_from, "last" if config.resume else "best")
        meta = read_meta(source)
        model_config, config = settings_from(meta, config, given)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    dataset = open_or_prepare(config.dataset)
    check_match(dataset, meta, config)
    model_config = with_vocabulary(model_config, dataset)
    config = with_batch(config, model_config.block_size)

    torch.set_float32_matmul_precision("high")  # lets GPUs use TF32; changes nothing on a CPU
    model = GPT(model_config, config.seed).to(device)
    optimizer = make_optimizer(model, config)
    step, best_loss = 0, math.inf
    if source:
        weights = crop_positions(read_tensors(source, "model.safetensors", meta), model_config.block_size)
        load_weights(model, weights, source)
    if config.resume:
        step, best_loss = meta["step"], meta["best_loss"] or math.inf
        if not config.eval_only:
            state = crop_positions(read_tensors(source, "optimizer.safetensors", meta), model_config.block_size)
            load_optimizer_tensors(model, optimizer, state)
    compiled = config.compile if config.compile is not None else device.type == "cuda"
    forward = torch.compile(model) if compiled else model

    def score(start: int = 0, stop: int | None = None, progress=lambda share: None) -> Score:
        """Loss on a part of the validation split."""
        return evaluate(
            model, dataset.val, dataset.tokenizer.token_bytes, model_config.block_size, config.micro_batch_size,
            start, stop, autocast(device, dtype), progress,
        )  # fmt: skip

    if config.eval_only:
        result = score()
        print(
            f"{config.resume} at step {step}: val loss {result.loss:.4f} nats/token, {result.bits_per_byte:.4f} "
            f"bits/byte, {result.tokens:,} tokens in windows of {model_config.block_size}"
        )
        return 0

    windows = Windows(dataset.train, model_config.block_size, config.batch_size, config.seed)
    Windows(dataset.val, model_config.block_size, 1, 0)  # refuses a validation split that is too short
    out_dir = Path(config.resume) if config.resume else new_folder(config, model_config, argv)
    tokens_per_step = config.batch_size * model_config.block_size
    accumulation = config.batch_size // config.micro_batch_size
    (out_dir / "settings.toml").write_text(to_toml(model_config, config), encoding="utf-8")
    stop = StopSignal()
    log = Logbook(
        out_dir, start_step=step, max_steps=config.max_steps, tokens_per_step=tokens_per_step, wandb=config.wandb,
        wandb_project=config.wandb_project, settings=as_dict(model_config, config),
    )  # fmt: skip
    log.note(describe(model_config, config, given=given))
    log.note(
        f"{model.num_parameters():,} parameters ({model.num_parameters(embeddings=False):,} without embeddings), "
        f"{model.flops_per_token():,} training FLOPs and {model.cache_bytes_per_token():,} cache bytes a token\n"
        f"{dataset.name}: {len(dataset.train):,} training tokens, {tokens_per_step:,} a step "
        f"({config.max_steps * tokens_per_step / len(dataset.train):.1f} passes), on {describe_device(device, dtype, compiled)}\n"
        f"{out_dir}: " + (f"going on from step {step}" if config.resume else "a new run")
    )

    def save(name: str, loss: float | None = None) -> None:
        with log.pause():
            saved = {
                "step": step, "tokens": step * tokens_per_step, "best_loss": best_loss if step and best_loss < math.inf else None,
                "val_loss": loss, "model": as_dict(model_config), "train": as_dict(config),
                "tokenizer": dataset.tokenizer.to_meta(), "dataset": {"name": dataset.name, "fingerprint": dataset.fingerprint},
            }  # fmt: skip
            state = optimizer_tensors(model, optimizer) if name == "last" else None
            save_checkpoint(out_dir / name, saved, dict(model.named_parameters()), state)

    def record(result: Score) -> None:
        log.log(
            step, step * tokens_per_step, val_loss=result.loss, val_bits_per_byte=result.bits_per_byte,
            val_tokens=result.tokens,
        )  # fmt: skip

    unchecked: list[torch.Tensor] = []  # (loss, gradient norm) of the steps since the last look at them

    def look() -> float:
        """The last step's loss; stops the run if a step since the last look was not finite."""
        values = torch.stack(unchecked).tolist()  # the one place where a GPU has to be waited for
        for i, (loss, norm) in enumerate(values):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                bad = step - len(values) + i + 1
                raise EnvironmentFault(
                    f"step {bad}: loss {loss}, gradient norm {norm}: training has diverged; the last good checkpoint "
                    f"is kept in {out_dir}; lower learning_rate {config.learning_rate:g} or raise warmup_steps"
                )
        unchecked.clear()
        return values[-1][0]

    try:
        while True:
            done = step >= config.max_steps
            if stop.signal is None and step > 0 and (done or step % config.eval_interval == 0):
                with log.pause():
                    short = min(config.eval_tokens, len(dataset.val) - 1)
                    short = max(1, short // model_config.block_size) * model_config.block_size  # whole windows
                    result = score(0, short, log.evaluating)
                    if step % config.eval_interval == 0:
                        record(result)
                    if result.loss < best_loss:
                        best_loss = result.loss
                        save("best", result.loss)
                    if done:
                        if short < len(dataset.val) - 1:
                            result += score(short, None, log.evaluating)
                        record(result)
            if done or stop.signal:
                break

            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            loss = torch.zeros((), device=device)
            for micro in range(accumulation):
                torch.manual_seed(stable_seed(config.seed, step, micro))  # dropout: a function of the step alone
                rows = slice(micro * config.micro_batch_size, (micro + 1) * config.micro_batch_size)
                x, y = (t.to(device, non_blocking=True) for t in windows.batch(step, rows))  # (rows, block_size)
                with autocast(device, dtype):
                    part = forward(x, y) / accumulation
                part.backward()
                loss += part.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1

            unchecked.append(torch.stack((loss, norm)))
            log.tick(step)
            saving = step % config.save_interval == 0 or step == config.max_steps or stop.signal
            if step == 1 or step % config.log_interval == 0:
                row = {"train_loss": look(), "lr": optimizer.param_groups[0]["lr"]}
                log.log(step, step * tokens_per_step, **row)
            if saving:
                if unchecked:
                    look()
                save("last")
    finally:
        log.close()
    if stop.signal:
        print(f"stopped after step {step}; go on with: python train.py --resume {out_dir}")
        return 128 + stop.signal
    print(f"done; write text with: python sample.py {out_dir}")
    return 0


def settings_from(meta: dict[str, Any], config: TrainConfig, given: dict[str, Any]) -> tuple[ModelConfig, TrainConfig]:
    """The settings of a resumed or continued run: the checkpoint's, and of the given ones those that may change."""
    model = {key: value for key, value in meta["model"].items() if key != "vocab_size" or config.resume}
    if config.resume:
        allowed = MAY_CHANGE | {"dataset"} if config.eval_only else MAY_CHANGE
        saved, what = meta["train"] | {"overwrite": False, "init_from": None}, "resume"
    else:
        allowed = MAY_DIFFER | set(as_dict(config))
        saved, what = {}, "init_from"
    for name in given:
        if name not in allowed:
            raise UserError(f"{name} cannot change with --{what}: the checkpoint has {(model | saved).get(name)}")
    if given.get("block_size", 0) > model["block_size"]:
        raise UserError(f"block_size can shrink but not grow: {given['block_size']} is more than {model['block_size']}")
    values = meta["model"] | saved | given
    return build((ModelConfig, TrainConfig), values)


def open_or_prepare(name: str) -> Dataset:
    """The prepared data set; the default one is prepared if it is not there yet."""
    if name == "shakespeare" and not (dataset_path(name) / "meta.json").is_file():
        status = subprocess.run([sys.executable, str(Path(__file__).with_name("prepare.py")), name]).returncode
        if status:
            raise SystemExit(status)  # it has said why
    return open_dataset(name)


def check_match(dataset: Dataset, meta: dict[str, Any] | None, config: TrainConfig) -> None:
    """UserError if the data are not those that the checkpoint was trained on, or not in its tokens."""
    if meta is None:
        return
    run = config.resume or config.init_from
    if dataset.tokenizer.to_meta() != meta["tokenizer"]:
        raise UserError(
            f"data set {dataset.name} (tokenizer {dataset.tokenizer.kind}, {dataset.vocab_size} ids) is not in the "
            f"tokens of {run} (tokenizer {meta['tokenizer'].get('kind')}): prepare the text with that tokenizer"
        )
    if config.resume and not config.eval_only and dataset.fingerprint != meta["dataset"]["fingerprint"]:
        raise UserError(
            f"data set {dataset.name} has changed since {run} was trained on it: prepare it as it was, or begin a "
            f"new run from these weights with --init_from {run}"
        )


def with_vocabulary(model_config: ModelConfig, dataset: Dataset) -> ModelConfig:
    """The model's settings with the vocabulary filled in; UserError if the data hold ids beyond it."""
    vocab_size = model_config.vocab_size or dataset.vocab_size
    highest = max(dataset.vocab_size - 1, dataset.train.max_id(), dataset.val.max_id())
    if highest >= vocab_size:
        raise UserError(f"data set {dataset.name} has ids up to {highest} and vocab_size is {vocab_size}")
    return build((ModelConfig,), as_dict(model_config) | {"vocab_size": vocab_size})[0]


def with_batch(config: TrainConfig, block_size: int) -> TrainConfig:
    """The run's settings with the batch in sequences; UserError if it does not divide."""
    values = as_dict(config)
    if config.batch_tokens:
        size, rest = divmod(config.batch_tokens, block_size)
        if rest or config.batch_size not in (None, size):
            raise UserError(
                f"batch_tokens {config.batch_tokens} is not "
                + (f"a multiple of block_size {block_size}" if rest else f"batch_size {config.batch_size} x {block_size}")
            )
        values |= {"batch_size": size, "batch_tokens": None}
    batch_size = values["batch_size"] or 16
    micro = config.micro_batch_size or batch_size
    if batch_size % micro:
        raise UserError(f"batch_size {batch_size} is not divisible by micro_batch_size {micro}")
    return build((TrainConfig,), values | {"batch_size": batch_size, "micro_batch_size": micro})[0]


def new_folder(config: TrainConfig, model_config: ModelConfig, argv: list[str]) -> Path:
    """The folder of a new run, made; UserError if it holds a run that may not be replaced."""
    if config.out_dir is None:
        files = [Path(word).stem for word in argv if word.endswith(".toml")]
        heads = "mha" if model_config.n_kv_head == model_config.n_head else f"kv{model_config.n_kv_head}"
        name = "-".join(files) or heads
        taken = [int(m[1]) for p in Path("runs").glob("*") if (m := re.fullmatch(rf"{re.escape(name)}-(\d+)", p.name))]
        folder = Path("runs") / f"{name}-{max(taken, default=0) + 1}"
    else:
        folder = Path(config.out_dir)
    parts = [folder / part for part in ("settings.toml", "metrics.jsonl", "last", "best", "last.old", "best.old")]
    if any(part.exists() for part in parts):
        if not config.overwrite:
            raise UserError(
                f"{folder} holds a run already; --resume {folder} goes on with it, --overwrite replaces it, "
                "or choose another --out_dir"
            )
        for part in parts:
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def stable_seed(*parts: int) -> int:
    """A 63-bit seed that is a function of the parts and of nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class StopSignal:
    """Ctrl-C and SIGTERM, noted so that the step can be finished; a second one ends the process at once."""

    def __init__(self):
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number: int, frame: Any) -> None:
        self.signal = number
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)


if __name__ == "__main__":
    run(main)
