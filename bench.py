"""Measure the speed and memory of head designs."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lab.describe import SHAPE, Step, describe, steps
from lab.designs import DesignFiles, read_designs
from lab.results import git_commit, machine
from lab.speed import measure
from model import ModelConfig
from runtime import errors
from runtime.devices import pick_device
from runtime.errors import UserError
from runtime.runs import TrainConfig
from runtime.settings import as_dict, build

VOCAB_SIZE = 96  # of a text in characters, where a design names none

DESCRIPTION = f"""Measure the speed and memory of head designs: random weights, no data, no training to an end.

    python bench.py                                     the default design
    python bench.py config/mha.toml config/mqa.toml --batch 1 16 --context 256 2048
    python bench.py config/systems/*.toml --describe                what they are and cost, counted: no model is built
    python bench.py config/systems/llama2-70b.toml --describe       of one, also the way through its attention

Every file is one design; any setting of the model may follow and holds for all (vocab_size is {VOCAB_SIZE} unless
set). The designs take turns; a figure is the median of several rounds, with the lowest and the highest. Beside it
stands its share of what this machine can do: GFLOP/s of a large matrix product, GB/s of a read of 1 GiB of memory.
Tables and one line of JSON, the last, go to standard output; of --describe a terminal gets the tables alone. Nothing
else should run on the machine meanwhile."""


@dataclass(frozen=True)
class BenchConfig(DesignFiles):
    batch: tuple[int, ...] = (1, 16)  # sequences decoded together
    context: tuple[int, ...] = (256, 2048)  # tokens of each, the new one included
    train_batch: int = 8  # sequences of block_size tokens in a training step
    rounds: int = 5  # times that every design has its turn
    threads: int | None = None  # of a CPU; unset = one for each core
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    describe: bool = False  # only tell the shape and count parameters, FLOPs and cache bytes; nothing is run
    cache_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # in which --describe counts cache bytes

    def __post_init__(self) -> None:
        for name in ("batch", "context"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values) or not all(1 <= value < 2**31 for value in values):
                raise ValueError(f"{name} must be one or more different whole numbers from 1")
        for name in ("train_batch", "rounds", "threads"):
            if (value := getattr(self, name)) is not None and not 1 <= value < 2**31:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.cache_dtype != "float32" and not self.describe:
            raise ValueError(f"cache_dtype {self.cache_dtype} needs --describe: speed is measured in float32")


def main(argv: list[str]) -> None:
    """Measure as the command line says."""
    designs, (config,), _ = read_designs(
        argv, BenchConfig, prog="bench.py", description=DESCRIPTION, common=(ModelConfig,), aside=(TrainConfig,)
    )
    models: dict[str, ModelConfig] = {}
    for name, design in designs.items():
        vocab_size = design.settings.get("vocab_size") or VOCAB_SIZE
        (models[name],) = build((ModelConfig,), design.settings | {"vocab_size": vocab_size})
    device = str(pick_device(config.device))
    try:
        counts = {name: describe(model, getattr(torch, config.cache_dtype)) for name, model in models.items()}
        way = steps(next(iter(models.values()))) if config.describe and len(models) == 1 else []
    except RuntimeError as error:  # of torch, for shapes whose elements it cannot count
        raise UserError(f"these shapes are too large to be described ({error}): lower head_dim or n_head") from None
    result: dict[str, Any] = {
        "command": "python bench.py " + shlex.join(argv), "git_commit": git_commit(), "torch": torch.__version__,
        "machine": machine(), "speed": None,
        "designs": {name: {"file": designs[name].file, **counts[name], "settings": as_dict(model)}
                    for name, model in models.items()},
        "attention_steps": [step._asdict() for step in way],
    }  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 100, markup=False, emoji=False)  # names may hold brackets
    for table, note in count_tables(counts):
        console.print(table, Text(note), sep="\n", end="\n\n")
    if way:
        console.print(step_table(way))
    if not config.describe:
        with progress_bar() as progress:
            result["speed"] = measure(models, config.batch, config.context, config.train_batch, config.rounds,
                                      progress, device, config.threads)  # fmt: skip
        for table, note in speed_tables(result["speed"]):
            console.print(table, Text(note), sep="\n", end="\n\n")
    if not (config.describe and sys.stdout.isatty()):
        print(json.dumps(result, allow_nan=False))


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A line on a terminal's standard error that tells what is measured; the function to tell it."""
    console = Console(stderr=True)
    told = TextColumn("{task.percentage:.0f}% {task.description}", markup=False)
    columns = (TextColumn("measuring"), BarColumn(), told, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        if console.is_interactive:
            console.show_cursor()  # a run that is killed must not leave the terminal without one
        task = bar.add_task("", total=1.0)
        yield lambda share, what: bar.update(task, completed=share, description=what)


def count_tables(counts: Mapping[str, Mapping[str, Any]]) -> list[tuple[Table, str]]:
    """What `describe` counted, as tables for the terminal, with what has to be said below each."""
    shape = new_table("Shape", "design", "n_embd (H)", "heads", "K/V heads", "head_dim (d_k)", "layers", "d_ff",
                      "vocab", "context")  # fmt: skip
    size = new_table("Size", "design", "parameters", "without embeddings", "attention weights a layer", "in H^2")
    costs = new_table("Costs", "design", "training FLOPs a token", "forward FLOPs a token", "cache bytes a token",
                      "cache bytes at full context")  # fmt: skip
    for name, c in counts.items():
        shape.add_row(name, *(whole(c[key]) for key in SHAPE))
        size.add_row(name, *(whole(c[key]) for key in ("parameters", "parameters_without_embeddings",
                                                       "attention_weights_per_layer")),
                     f"{c['attention_weights_in_n_embd_squared']:.4g} H^2")  # fmt: skip
        costs.add_row(name, *(whole(c[key]) for key in ("flops_per_token", "forward_flops_per_token",
                                                        "cache_bytes_per_token", "cache_bytes_at_full_context"))
                      )  # fmt: skip
    dtype = next(iter(counts.values()))["cache_dtype"]
    return [
        (shape, f"A trained model has its data's vocabulary; where a file names none, {VOCAB_SIZE} ids are assumed."),
        (size, "Attention weights: the matrices of one layer's attention; biases are not counted."),
        (costs, "FLOPs of matrix products, with every key of a full context; training is forward and backward, three "
                f"times forward. The cache of one sequence, in {dtype}."),
    ]  # fmt: skip


def step_table(way: Sequence[Step]) -> Table:
    """The way from x to W_O, with the weights on it."""
    table = new_table("One layer's attention", "step", "shape", "weights")
    for step in way:
        shape = f"({', '.join(map(str, step.shape))})" if step.shape else ""
        table.add_row(step.name, shape, f"{step.weights:,}" if step.weights else "")
    table.add_section()
    table.add_row("together", "", f"{sum(step.weights for step in way):,}")
    return table


def speed_tables(speed: Mapping[str, Any]) -> list[tuple[Table, str]]:
    """What `measure` found, as tables for the terminal, with what has to be said below each."""
    designs, limits = speed["designs"], speed["limits"]
    arithmetic = f"{limits['matmul_gflops']:,.0f} GFLOP/s, {limits['matmul']}"
    reading = f"{limits['read_gb_per_s']:.1f} GB/s, {limits['read']}"
    where = speed["device"] + f", {speed['threads']} threads" * (speed["device"] == "cpu")
    against = f"x {next(iter(designs))}"

    training = new_table(f"Training steps of {speed['train_batch']} sequences, on {where}", "design", "tokens/s",
                         "low - high", "GFLOP/s", "of limit")  # fmt: skip
    for name, design in designs.items():
        t = design["training"]
        training.add_row(name, *rate(t["tokens_per_s"]), f"{t['gflops']:,.1f}", f"{t['share_of_matmul']:.0%}")

    prefill = new_table("Prefill: a whole context into an empty cache", "batch", "context", "design", "tokens/s",
                        "low - high", "GFLOP/s", "of limit")  # fmt: skip
    for cell, name, p, _ in rows(speed, "prefill", prefill):
        prefill.add_row(*cell, name, *rate(p["tokens_per_s"]), f"{p['gflops']:,.1f}", f"{p['share_of_matmul']:.0%}")

    decode = new_table("Decoding: one token more in each sequence", "batch", "context", "design", "tokens/s",
                       "low - high", against, "ms", "cache MB", "GB/s", "of limit")  # fmt: skip
    for cell, name, d, first in rows(speed, "decode", decode):
        times = d["tokens_per_s"]["median"] / first["tokens_per_s"]["median"]
        decode.add_row(*cell, name, *rate(d["tokens_per_s"]), f"{times:.2f}" + " *"[not d["gain_expected"]],
                       number(d["ms_per_step"]["median"]), number(d["cache_mb"]), f"{d['gb_per_s']:,.1f}",
                       f"{d['share_of_read']:.0%}")  # fmt: skip

    attention = new_table("Attention alone in a decoding step", "batch", "context", "design", "caches", "ms",
                          "low - high", against, "GB/s", "of ideal", "SDPA ms")  # fmt: skip
    for cell, name, a, first in rows(speed, "decode_attention", attention):
        attention.add_row(*cell, name, str(a["caches"]), *rate(a["ms"]),
                          f"{first['ms']['median'] / a['ms']['median']:.2f}", f"{a['gb_per_s']:,.1f}",
                          f"{a['share_of_ideal']:.0%}", number(a["sdpa_ms"]["median"]))  # fmt: skip

    memory = new_table("Peak memory of a fresh process, MB", "design", "at its start", "training", "decoding")
    for name, design in designs.items():
        peaks = (design["peak_memory_mb"][when] for when in ("start", "training", "decoding"))
        memory.add_row(name, *("unknown" if peak is None else f"{peak:,.0f}" for peak in peaks))

    return [
        (training, f"The limit is {arithmetic}. FLOPs leave out the keys that a query may not see."),
        (prefill, ""),
        (decode, "GB/s: the weights and the cache, which every step reads. The limit is "
         f"{reading}; above 100% the processor's own cache served the reads.\n* {speed['decode_gain']}."),
        (attention, "One query in each sequence and head over a full cache for every layer. Ideal: the cache's bytes "
         "at the limit above. SDPA: PyTorch's scaled_dot_product_attention on the same tensors."),
        (memory, "At its start: Python and PyTorch. Training: as above. Decoding: prefill, then a step, with batch "
         f"{max(speed['batch']):,} and context {max(speed['context']):,}."),
    ]  # fmt: skip


def rows(
    speed: Mapping[str, Any], part: str, table: Table
) -> Iterator[tuple[list[str], str, dict[str, Any], dict[str, Any]]]:
    """What belongs in a table: batch and context, named once; a design; what it did there; what the first one did."""
    for number in range(len(speed["batch"]) * len(speed["context"])):
        cell = [design[part][number] for design in speed["designs"].values()]
        for name, found in zip(speed["designs"], cell, strict=True):
            size = [f"{found[key]:,}" if found is cell[0] else "" for key in ("batch", "context")]
            yield size, name, found, cell[0]
        table.add_section()


def rate(values: Mapping[str, float]) -> tuple[str, str]:
    """The median, and from where to where the rounds went."""
    return number(values["median"]), f"{number(values['low'])} - {number(values['high'])}"


def number(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def whole(value: float | None) -> str:
    """Every digit; a dash for what a design has not."""
    return "-" if value is None else f"{value:,.0f}"


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("design", "step", "shape") else "right", overflow="fold")
    return table


if __name__ == "__main__":
    errors.run(main)
