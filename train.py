"""Train one model.

    python train.py                                   the default model on Shakespeare
    python train.py config/gqa-2.toml --seed 2        another design: a file of settings, then flags
    python train.py --resume runs/gqa-2-1             go on where a run stopped
    torchrun --standalone --nproc_per_node 2 train.py     the same on two processes, with the same batches
"""

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import torch

from data.loader import Windows
from data.tokenfile import IGNORED
from model import GPT, ModelConfig
from runtime.checkpoint import (
    check_sizes,
    crop_positions,
    find_checkpoint,
    load_weights,
    read_checkpoint,
    read_tensors,
    save_checkpoint,
)
from runtime.devices import autocast, describe_device, pick_dtype
from runtime.errors import EnvironmentFault, UserError, plain, run
from runtime.evaluate import Score, evaluate
from runtime.logbook import Logbook
from runtime.optim import learning_rate, load_optimizer_tensors, make_optimizer, optimizer_tensors
from runtime.ranks import Ranks
from runtime.runs import (
    StopSignal,
    TrainConfig,
    check_data,
    check_held,
    continued,
    hold,
    new_folder,
    open_or_prepare,
    python,
    with_batch,
    with_data,
    write_whole,
)
from runtime.settings import as_dict, describe, parse, to_toml


def main(argv: list[str]) -> int:
    """Train as the command line says; returns the exit status."""
    # Settings: from files and flags, or from the checkpoint of the run that goes on.
    (model_config, config), given = parse(argv, ModelConfig, TrainConfig, prog="train.py", description=__doc__)
    if {"resume", "init_from"} <= given.keys():
        raise UserError("resume goes on with a run and init_from begins a new one: give one of them")
    former = config.resume or config.init_from  # the run whose weights this one begins with
    ranks = Ranks()
    if former:
        which = "last" if config.resume else "best"
        if find_checkpoint(former, which) and config.resume and not config.eval_only and ranks.first:
            lock = hold(Path(former))  # before anything is read: another process may be about to save
        source, meta, tensors = read_checkpoint(former, which)
        model_config, config = continued((ModelConfig, TrainConfig), meta, given)
    device = ranks.meet(config.device)
    dtype = pick_dtype(config.dtype, device)
    if config.threads:
        torch.set_num_threads(config.threads)

    # Data. The whole batch of a step is a function of the settings; each rank reads its rows of it.
    with ranks.one_first():
        dataset = open_or_prepare(config.dataset)
    dataset.verify()
    if former:
        check_data(dataset, meta, former, exact=bool(config.resume) and not config.eval_only)
    model_config = with_data(model_config, dataset, as_dict(model_config) if former else given)
    block_size = model_config.block_size
    config = with_batch(config, block_size)
    windows = Windows(dataset.train, block_size, config.batch_size, config.seed)
    Windows(dataset.val, block_size, 1, 0)  # refuses a validation split that is too short
    tokens_per_step = config.batch_size * block_size
    ranks.agree("settings and data", f"{model_config} {config} {dataset.fingerprint}")
    ranks.agree("checkpoint, which may just have been saved", f"{former and meta['sha256']}")
    micro_batch_size, micro_batches = ranks.share(config.batch_size, config.micro_batch_size)
    own_rows = slice(micro_batches.start * micro_batch_size, micro_batches.stop * micro_batch_size)

    # Model and optimiser.
    torch.set_float32_matmul_precision("high")  # lets GPUs use TF32; changes nothing on a CPU
    if former:  # before there is a model: what its settings ask for is not taken until the file holds as much
        tensors = crop_positions(tensors, block_size)
        check_sizes(model_config, tensors, source)
    model = GPT(model_config, config.seed if config.init_seed is None else config.init_seed).to(device)
    optimizer = make_optimizer(model, config)
    compiled = config.compile if config.compile is not None else device.type == "cuda"
    forward = torch.compile(model) if compiled else model
    step, best_loss = 0, math.inf
    if former:
        load_weights(model, tensors, source)
    if config.resume:
        step, best_loss = meta["step"], meta["best_loss"] or math.inf
        if step > config.max_steps:
            raise UserError(f"max_steps {config.max_steps} is behind {former}, which has done {step} steps")
        before = meta["model"]["block_size"], meta["train"].get("eval_tokens")
        if (block_size, config.eval_tokens) != before:
            best_loss = math.inf  # losses of other windows or of other tokens do not compare
    if config.resume and not config.eval_only:
        tensors = read_tensors(source, "optimizer.safetensors", meta)
        load_optimizer_tensors(model, optimizer, crop_positions(tensors, block_size))

    def score(start: int = 0, stop: int | None = None, progress: Callable[[float], None] | None = None) -> Score:
        stop = stop or len(dataset.val) - 1
        share = math.ceil((stop - start) / block_size / ranks.count) * block_size  # whole windows for each rank
        start, stop = start + ranks.rank * share, min(stop, start + (ranks.rank + 1) * share)
        with optimizer.averaged():
            own = evaluate(
                model, dataset.val, dataset.tokenizer.token_bytes, block_size, micro_batch_size,
                start, stop, autocast(device, dtype), progress,
            )  # fmt: skip
        nats, *counts = ranks.gather(*astuple(own)).sum(0).tolist()
        return Score(nats, *map(int, counts))

    if config.eval_only:
        if ranks.first:
            print(f"evaluating {dataset.val_targets:,} tokens", file=sys.stderr, flush=True)
        result = score()
        if ranks.first:
            print(f"{plain(former)} at step {step}: val loss {result} in windows of {block_size}")
        return 0

    # The run's folder and its log.
    stop = StopSignal()
    files = [Path(word).stem for word in argv if word.endswith(".toml")]
    n_head, n_kv_head = model_config.n_head, model_config.n_kv_head
    heads = f"h{n_head}kv{n_kv_head}" if n_kv_head else f"{model_config.design}-h{n_head}"
    name = "-".join(files) or ("mha" if heads == "h8kv8" else heads)
    out_dir = Path(config.resume or config.out_dir or "runs")
    if ranks.first and not config.resume:  # the other ranks neither write nor show anything
        out_dir = new_folder(config.out_dir, name, config.overwrite)
        lock = hold(out_dir)
    log = Logbook(
        out_dir, start_step=step, max_steps=config.max_steps, tokens_per_step=tokens_per_step, wandb=config.wandb,
        wandb_project=config.wandb_project, settings=as_dict(model_config, config), silent=not ranks.first,
    )  # fmt: skip
    kept = replace(config, resume=None, overwrite=False)  # what would begin this run once more
    if ranks.first:
        write_whole(out_dir / "settings.toml", to_toml(model_config, kept))
    log.note(describe(model_config, config, given=given))
    if ranks.count > 1 and not config.micro_batch_size and model_config.dropout + model_config.attention_dropout:
        log.note("with dropout, losses depend on the number of processes unless --micro_batch_size is given")
    if model_config.window and model_config.window >= block_size:
        log.note(f"window {model_config.window} hides nothing: block_size {block_size} is no longer than it")
    if config.ema_decay:
        log.note(f"validation losses and checkpoints are of an average of the weights (ema_decay {config.ema_decay:g})")
    log.note(
        f"{model.num_parameters():,} parameters ({model.num_parameters(embeddings=False):,} without embeddings), "
        f"{model.flops_per_token():,} training FLOPs and {model.cache_bytes_per_token():,} cache bytes a token\n"
        f"{dataset.name}: {len(dataset.train):,} training tokens, {tokens_per_step:,} a step, "
        f"{config.max_steps * tokens_per_step / len(dataset.train):.2g} passes\n"
        f"{f'{ranks.count} processes, each on ' if ranks.count > 1 else ''}{describe_device(device, dtype, compiled)}; "
        + (f"going on from step {step} in" if step else "a new run in")
        + f" {out_dir}"
    )  # fmt: skip

    saved = step if config.resume else -1  # the step that `last` holds

    def save(name: str, val_loss: float | None = None) -> None:
        nonlocal saved
        if unseen:
            look()
        if name == "last":
            saved = step
        if not ranks.first:
            return
        check_held(lock, out_dir)
        with log.pause(), optimizer.averaged():
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

    def record(result: Score) -> None:
        values = {"val_loss": result.loss, "val_bits_per_byte": result.bits_per_byte, "val_tokens": result.tokens}
        if dataset.probe:
            values |= {"val_gap": result.loss - dataset.probe["floor"], "val_accuracy": result.accuracy}
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

    def stopping() -> int:
        """The signal to stop, if any rank has got one; all ranks ask at the same moments."""
        return int(ranks.gather(stop.number).max())

    signal = 0
    try:
        while True:
            # Evaluate what was saved before. A resumed run comes by here again, with the same result.
            due = step > 0 and (step == config.max_steps or step % config.eval_interval == 0)
            if due and not stopping():
                with log.pause():
                    whole = len(dataset.val) - 1  # targets in the split, those that do not count included
                    windows_in_part = max(1, min(config.eval_tokens, whole) // block_size)
                    part = windows_in_part * block_size
                    result = score(0, part, log.evaluating)
                    if step % config.eval_interval == 0:
                        record(result)
                    if result.loss < best_loss:
                        best_loss = result.loss
                        save("best", best_loss)
                    if step == config.max_steps:
                        log.note(f"evaluating the whole validation split, {dataset.val_targets:,} tokens")
                        record(result + score(part, None, log.evaluating) if part < whole else result)
                        break
            signal = stopping()
            if step == config.max_steps or signal:
                if saved < step:
                    save("last")
                break

            # One step: this rank's rows in slices, the mean of all ranks' losses, one update.
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            loss = torch.zeros((), device=device)
            inputs, targets = windows.batch(step, own_rows)  # (batch_size / number of ranks, block_size)
            counted = max(1, int(ranks.gather((targets != IGNORED).sum().item()).sum()))
            slices = zip(micro_batches, inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True)
            for micro, x, y in slices:  # x, y: (micro_batch_size, block_size)
                torch.manual_seed(stable_seed(config.seed, step, micro))  # dropout: a function of these alone
                x, y = x.to(device), y.to(device)
                with autocast(device, dtype):
                    micro_loss = forward(x, y, reduction="sum") / counted
                micro_loss.backward()
                loss += micro_loss.detach()
            ranks.add_up([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            optimizer.step()
            optimizer.average(step)
            optimizer.zero_grad()
            unseen.append(torch.stack((loss, norm)))
            step += 1

            log.tick(step)
            if step == 1 or step % config.log_interval == 0:
                log.log(step, step * tokens_per_step, train_loss=look(), lr=learning_rate(step - 1, config))
            if step % config.save_interval == 0 or step == config.max_steps:
                save("last")  # before the evaluation, so that a stop there loses nothing
    finally:
        log.close()
        if ranks.first:
            lock.close()
    ranks.close()
    if signal:
        log.note(f"stopped after step {step}; go on with: {python()} train.py --resume {out_dir}")
        return 128 + signal
    purpose, command = ("see its heads", "heads.py") if dataset.probe else ("write text", "sample.py")
    log.note(f"done; {purpose} with: {python()} {command} {out_dir}")
    return 0


def stable_seed(*parts: int) -> int:
    """A 63-bit seed that is a function of the parts and of nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


if __name__ == "__main__":
    run(main)
