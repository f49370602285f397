"""Train a model on after its K/V heads were made fewer: what does that give back, and how soon?"""

import json
import subprocess
import sys
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
from model import ModelConfig
from runtime import errors, settings
from runtime.checkpoint import find_checkpoint, load_model, read_meta
from runtime.errors import EnvironmentFault, UserError
from runtime.evaluate import evaluate
from runtime.regrouping import regrouped
from runtime.runs import TrainConfig, check_data, open_or_prepare, write_whole
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
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    # The last step has two: of the tokens asked for, and then of the whole split.
    found = {row["step"]: row["val_loss"] for row in reversed(rows) if row.get("val_loss") is not None}
    return found if steps in found else {}


def train(folder: Path, file: Path, *flags: str) -> None:
    """Train a run to its end, or go on with it."""
    begun = (folder / "last" / "meta.json").exists()
    words = ["--resume", str(folder)] if begun else [str(file), "--out_dir", str(folder), "--overwrite", *flags]
    with open(folder.with_suffix(".txt"), "w", encoding="utf-8") as output:
        command = [sys.executable, str(TRAIN), *words]
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    if status:
        raise EnvironmentFault(f"{folder} was not trained; {output.name} tells why")


def main(argv: list[str]) -> None:
    (config,), _ = settings.parse(argv, UptrainConfig, prog="uptrain.py", description=DESCRIPTION, files_allowed=False)
    parent = Path(config.run)
    meta = read_meta(find_checkpoint(parent, "last"))
    if not meta["train"]:
        raise UserError(f"{parent} was not trained here: its steps and its data are not known")
    dataset = open_or_prepare(meta["dataset"]["name"])
    check_data(dataset, meta, config.run, exact=True)
    out = Path(config.out_dir or f"runs/uptrain-{parent.name}")
    out.mkdir(parents=True, exist_ok=True)
    steps = sorted({max(1, round(share * meta["step"])) for share in config.shares})
    every = next(n for n in range(steps[0], 0, -1) if all(step % n == 0 for step in steps))
    names = {field.name for field in fields(TrainConfig)} - {"out_dir", "resume", "init_from", "overwrite"}
    own = {name: value for name, value in meta["train"].items() if name in names}
    own |= {"eval_tokens": config.eval_tokens}
    whole = own | {"max_steps": meta["step"], "eval_interval": meta["step"]}
    more = own | {"max_steps": steps[-1], "decay_steps": steps[-1], "warmup_steps": 0, "final_lr": 1.0,
                  "learning_rate": config.learning_rate, "eval_interval": every}  # fmt: skip
    write_whole(out / "more.toml", to_toml(*build((TrainConfig,), more)))
    console, curves = Console(stderr=True), []

    def follow(name: str, design: str, how: str, start: Path) -> None:
        """One curve: the loss of `start`, and after each number of steps from its weights."""
        folder = out / name
        if not losses(folder, steps[-1]):
            console.print(f"{name}: training for {steps[-1]} steps", markup=False, highlight=False)
            train(folder, out / "more.toml", "--init_from", str(start))
        found = losses(folder, steps[-1])
        points = [{"steps": 0, "loss": score(start, dataset, config.eval_tokens)}]
        curves.append({"name": name, "design": design, "how": how,
                       "points": points + [{"steps": step, "loss": found[step]} for step in steps]})  # fmt: skip

    follow("parent", "parent", "trained on", parent)
    for n_kv_head in config.n_kv_head:
        for how in config.how:
            start = out / f"kv{n_kv_head}-{how}-start"
            if not (start / "last" / "meta.json").exists():
                regrouped(config.run, start, n_kv_head, how)
            follow(f"kv{n_kv_head}-{how}", f"{n_kv_head} K/V heads", how, start)
        if config.scratch:
            folder = out / f"kv{n_kv_head}-scratch"
            if not losses(folder, meta["step"]):
                console.print(f"{folder.name}: training for {meta['step']} steps", markup=False, highlight=False)
                file = out / f"{folder.name}.toml"
                values = meta["model"] | whole | {"n_kv_head": n_kv_head}
                write_whole(file, to_toml(*build((ModelConfig, TrainConfig), values)))
                train(folder, file)
            end = {"steps": meta["step"], "loss": losses(folder, meta["step"])[meta["step"]]}
            curves.append({"name": folder.name, "design": f"{n_kv_head} K/V heads", "how": "from scratch",
                           "points": [end]})  # fmt: skip
    told = {"command": "python uptrain.py " + " ".join(argv), "parent": config.run, "parent_steps": meta["step"],
            "learning_rate": config.learning_rate, "eval_tokens": config.eval_tokens, "torch": torch.__version__,
            "curves": curves}  # fmt: skip
    write_whole(out / "uptrain.json", json.dumps(told, indent=1) + "\n")
    write_whole(out / "uptrain.svg", picture(curves))
    show(curves, steps, meta["step"])
    print(f"written: {out / 'uptrain.json'}, {out / 'uptrain.svg'}")


def show(curves: list[dict[str, Any]], steps: list[int], parent_steps: int) -> None:
    """The losses on the terminal, in Markdown's columns."""
    table = Table(title="Validation loss, nats a token, after more steps", title_justify="left", box=box.MARKDOWN)
    table.add_column("model")
    for step in (0, *steps):
        table.add_column(f"{step} steps ({step / parent_steps:.0%})", justify="right")
    for curve in curves:
        of = {point["steps"]: f"{point['loss']:.4f}" for point in curve["points"]}
        if curve["how"] == "from scratch":
            name = f"{curve['design']}, from scratch, {parent_steps} steps"
            table.add_row(name, *[""] * len(steps), of[parent_steps])
        else:
            table.add_row(f"{curve['design']}, {curve['how']}", *(of[step] for step in (0, *steps)))
    (Console() if sys.stdout.isatty() else Console(width=120)).print(table)


def picture(curves: list[dict[str, Any]]) -> str:
    """A panel for each number of K/V heads: loss against steps, beside the parent's, and from scratch as a line."""
    panels = []
    parent = [{"how": "parent", **point} for point in curves[0]["points"]]
    for design in dict.fromkeys(curve["design"] for curve in curves[1:]):
        mine = [curve for curve in curves if curve["design"] == design]
        rows = [{"how": c["how"], **point} for c in mine if c["how"] != "from scratch" for point in c["points"]]
        lines = alt.Chart(alt.Data(values=rows + parent)).mark_line(point=True).encode(
            x=alt.X("steps:Q", title="steps of training on"), color=alt.Color("how:N", title=None),
            y=alt.Y("loss:Q", title="validation loss, nats a token", scale=alt.Scale(zero=False, type="log")),
        )  # fmt: skip
        scratch = [{"loss": c["points"][0]["loss"]} for c in mine if c["how"] == "from scratch"]
        rule = alt.Chart(alt.Data(values=scratch)).mark_rule(strokeDash=[4, 3], color="#888888").encode(y="loss:Q")
        panels.append((lines + rule).properties(title=f"{design} (dashed: from scratch)", height=240))
    return to_svg(panels)


if __name__ == "__main__":
    errors.run(main)
