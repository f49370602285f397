"""Train a model on after its K/V heads were made fewer: what does that give back, and how soon?"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import altair as alt
import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from attention.regroup import HOWS
from data import Dataset
from lab.charts import to_svg
from lab.stats import evaluations
from model import ModelConfig
from runtime import errors, settings
from runtime.checkpoint import has_saved, load_model, read_checkpoint
from runtime.errors import EnvironmentFault, UserError
from runtime.evaluate import evaluate
from runtime.logbook import clock_time
from runtime.regrouping import check_regroup, regrouped
from runtime.runs import TrainConfig, check_data, exit_on_signals, hold, open_or_prepare, write_whole
from runtime.settings import build, to_toml

TRAIN = Path(__file__).resolve().parent / "train.py"

DESCRIPTION = """Train a model on after its K/V heads were made fewer (uptraining, Ainslie et al. 2023).

    python uptrain.py runs/mha-1                        GQA with 2 K/V heads and MQA, in every way of regrouping
    python uptrain.py runs/mha-1 --n_kv_head 1 --how mean aligned

Every way of convert.py regroup is trained on for a tenth of the run's own steps and evaluated after each of the shares,
on the same tokens. Beside them stand the run itself, trained on just as long, and each design trained from scratch for
as many steps as the run. The same command goes on with one that was stopped. Writes uptrain.json and uptrain.svg."""


@dataclass(frozen=True)
class UptrainConfig:
    run: Annotated[str, tyro.conf.Positional]  # folder of a trained run with many K/V heads
    n_kv_head: tuple[int, ...] = (2, 1)  # K/V heads to come down to
    how: tuple[str, ...] = HOWS  # what becomes of the old heads: mean, first, random, aligned
    shares: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1)  # of the run's steps after which the loss is told; and 0
    learning_rate: float = 1e-3  # constant, since every share is to be judged by itself
    eval_tokens: int = 100_000  # validation tokens for every loss
    scratch: bool = True  # also train each design from scratch
    out_dir: str | None = None  # unset = runs/uptrain-NAME

    def __post_init__(self) -> None:
        if odd := sorted(set(self.how) - set(HOWS)):
            raise ValueError(f"how is one or more of {', '.join(HOWS)}, not {odd[0]}")
        if not self.shares or min(self.shares) <= 0 or max(self.shares) > 1:
            raise ValueError("shares must be above 0 and at most 1")


def score(run: Path, dataset: Dataset, tokens: int) -> float:
    """A run's loss, nats a token, on the first validation tokens, as the evaluations during training take them."""
    model, _, _ = load_model(run)
    block_size = model.config.block_size
    stop = max(1, min(tokens, len(dataset.val) - 1) // block_size) * block_size
    return evaluate(model, dataset.val, dataset.tokenizer.token_bytes, block_size, 16, 0, stop).loss


def losses(folder: Path, steps: int) -> dict[int, float]:
    """Validation losses by step in a run's log; none if it has not done so many steps."""
    log = folder / "metrics.jsonl"
    # The last step has two: of the tokens asked for, and then of the whole split.
    found = {row["step"]: row["val_loss"] for row in reversed(evaluations(log) if log.exists() else [])}
    return found if steps in found else {}


def train(folder: Path, file: Path, *flags: str) -> None:
    """Train a run to its end, or go on with it."""
    begun = has_saved(folder)
    words = ["--resume", str(folder)] if begun else [str(file), "--out_dir", str(folder), "--overwrite", *flags]
    folder.with_suffix(".txt").unlink(missing_ok=True)  # a link in a stranger's folder is not followed
    with open(folder.with_suffix(".txt"), "x", encoding="utf-8") as output:
        command = [sys.executable, str(TRAIN), *words]
        # In a session of its own it hears of a Ctrl-C from us alone, and has the time to save.
        with exit_on_signals(), subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                status = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
    if status:
        raise EnvironmentFault(f"{folder} was not trained; {output.name} tells why")


def main(argv: list[str]) -> None:
    (config,), _ = settings.parse(argv, UptrainConfig, prog="uptrain.py", description=DESCRIPTION, files_allowed=False)
    parent = Path(config.run)
    _, meta, _ = read_checkpoint(parent, "last")
    if not meta["train"]:
        raise UserError(f"{parent} was not trained here: its steps and its data are not known")
    dataset = open_or_prepare(meta["dataset"]["name"])
    dataset.verify()
    check_data(dataset, meta, config.run, exact=True)
    out = Path(config.out_dir or f"runs/uptrain-{parent.name}")
    old = build((ModelConfig,), meta["model"])[0]
    for n_kv_head in config.n_kv_head:
        for how in config.how:
            check_regroup(old, n_kv_head, how, config.run)
    out.mkdir(parents=True, exist_ok=True)
    lock = hold(out)
    steps = sorted({max(1, round(share * meta["step"])) for share in config.shares})
    if len(steps) < len(config.shares):
        numbers = ", ".join(map(str, steps))
        print(f"some of the shares are the same number of steps: the loss is told after {numbers}", file=sys.stderr)
    every = next(n for n in range(steps[0], 0, -1) if all(step % n == 0 for step in steps))
    names = {field.name for field in fields(TrainConfig)} - {"out_dir", "resume", "init_from", "overwrite"}
    own = {name: value for name, value in meta["train"].items() if name in names}
    own |= {"eval_tokens": config.eval_tokens}
    whole = own | {"max_steps": meta["step"], "eval_interval": meta["step"]}
    more = own | {"max_steps": steps[-1], "decay_steps": steps[-1], "warmup_steps": 0, "final_lr": 1.0,
                  "learning_rate": config.learning_rate, "eval_interval": every}  # fmt: skip
    weights = read_checkpoint(parent, "best")[1]["sha256"]["model.safetensors"]
    same = json.dumps({"weights": weights, "steps": steps, **more})
    if (out / "of.json").exists() and (out / "of.json").read_bytes() != same.encode():
        raise UserError(f"{out} holds a curve of other weights, shares or settings: give another --out_dir")
    write_whole(out / "of.json", same)
    write_whole(out / "more.toml", to_toml(*build((TrainConfig,), more)))
    planned = {"parent": steps[-1]}
    for n in config.n_kv_head:
        planned |= {f"kv{n}-{how}": steps[-1] for how in config.how}
        planned |= {f"kv{n}-scratch": meta["step"]} if config.scratch else {}
    waiting = {name: number for name, number in planned.items() if not losses(out / name, number)}
    total, begun = sum(waiting.values()), time.monotonic()
    curves: list[dict[str, Any]] = []

    def trained(name: str, file: Path, *flags: str) -> dict[int, float]:
        """Losses by step of a run that is trained unless it is finished."""
        if name in waiting:
            left = sum(waiting.values())
            pace = (time.monotonic() - begun) / max(1, total - left)
            told = f", {clock_time(pace * left)} left" if left < total else ""
            print(f"{name}: training for {plural(waiting[name])} ({len(waiting)} to go{told})", file=sys.stderr)
            train(out / name, file, *flags)
            del waiting[name]
        return losses(out / name, planned[name])

    def follow(name: str, design: str, how: str, start: Path) -> None:
        """One curve: the loss of `start`, and after each number of steps from its weights."""
        found = trained(name, out / "more.toml", "--init_from", str(start))
        points = [{"steps": 0, "loss": score(start, dataset, config.eval_tokens)}]
        curves.append({"name": name, "design": design, "how": how,
                       "points": points + [{"steps": step, "loss": found[step]} for step in steps]})  # fmt: skip

    follow("parent", "parent", "trained on", parent)
    for n_kv_head in config.n_kv_head:
        design = f"{n_kv_head} K/V head" + "s" * (n_kv_head > 1)
        for how in config.how:
            start = out / f"kv{n_kv_head}-{how}-start"
            if not has_saved(start):
                regrouped(config.run, start, n_kv_head, how)
            follow(f"kv{n_kv_head}-{how}", design, how, start)
        if config.scratch:
            name = f"kv{n_kv_head}-scratch"
            file = out / f"{name}.toml"
            values = meta["model"] | whole | {"n_kv_head": n_kv_head}
            write_whole(file, to_toml(*build((ModelConfig, TrainConfig), values)))
            end = {"steps": meta["step"], "loss": trained(name, file)[meta["step"]]}
            curves.append({"name": name, "design": design, "how": "from scratch", "points": [end]})
    told = {"command": "python uptrain.py " + " ".join(argv), "parent": config.run, "parent_steps": meta["step"],
            "learning_rate": config.learning_rate, "eval_tokens": config.eval_tokens, "torch": torch.__version__,
            "curves": curves}  # fmt: skip
    write_whole(out / "uptrain.json", json.dumps(told, indent=1) + "\n")
    write_whole(out / "uptrain.svg", picture(curves))
    show(curves, steps, meta["step"])
    print(f"written: {out / 'uptrain.json'}, {out / 'uptrain.svg'}")
    lock.close()


def plural(steps: int) -> str:
    return f"{steps} step" + "s" * (steps != 1)


def show(curves: list[dict[str, Any]], steps: list[int], parent_steps: int) -> None:
    """The losses on the terminal, in Markdown's columns."""
    table = Table(title="Validation loss, nats a token, after more steps", title_justify="left", box=box.MARKDOWN)
    table.add_column("model")
    for step in (0, *steps):
        table.add_column(f"{plural(step)} ({step / parent_steps:.0%})", justify="right")
    for curve in curves:
        of = {point["steps"]: f"{point['loss']:.4f}" for point in curve["points"]}
        if curve["how"] == "from scratch":
            name = f"{curve['design']}, from scratch, {plural(parent_steps)}"
            table.add_row(name, *[""] * len(steps), of[parent_steps])
        else:
            table.add_row(f"{curve['design']}, {curve['how']}", *(of[step] for step in (0, *steps)))
    (Console() if sys.stdout.isatty() else Console(width=120)).print(table)
    print("Every figure is one training with one seed: another seed moves it, so a small difference may be chance.")


def picture(curves: list[dict[str, Any]]) -> str:
    """A panel for each number of K/V heads: loss against steps, beside the parent's, and from scratch as a line."""
    panels = []
    parent = [{"how": "parent", **point} for point in curves[0]["points"]]
    for design in dict.fromkeys(curve["design"] for curve in curves[1:]):
        mine = [curve for curve in curves if curve["design"] == design]
        rows = parent + [{"how": c["how"], **point} for c in mine for point in c["points"]]
        every = alt.Chart(alt.Data(values=rows)).encode(
            y=alt.Y("loss:Q", title="validation loss, nats a token", scale=alt.Scale(zero=False)),
            color=alt.Color("how:N", title=None),
        )  # fmt: skip
        lines = every.transform_filter("datum.how != 'from scratch'").mark_line(point=True)
        lines = lines.encode(x=alt.X("steps:Q", title="steps of training on"))
        rule = every.transform_filter("datum.how == 'from scratch'").mark_rule(strokeDash=[4, 3])
        panels.append((lines + rule).properties(title=design, height=240))
    return to_svg(panels)


if __name__ == "__main__":
    errors.run(main)
