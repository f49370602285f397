"""The record of a run: metrics.jsonl, always; a line of progress for the person; wandb, if asked for."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from runtime.errors import UserError, naming, plain
from runtime.files import check_own, write_synced

KEYS = ("step", "tokens", "train_loss", "val_loss", "val_bits_per_byte", "val_tokens", "val_gap", "val_accuracy", "lr",
        "tokens_per_s", "elapsed")  # fmt: skip
WARM_UP_STEPS = 5  # compilation and first touches of memory are not the speed of training
REFRESH_SECONDS = 0.2
WANDB_SECONDS = 30  # the longest that wandb may hold up the start or the end of a run


class Logbook:
    """Writes down and shows what happens in a run. Its clock starts when it is made.

    Rows of metrics.jsonl after `start_step` belong to steps that were never saved: they are dropped, as are
    evaluations at `start_step`, which come after its save and are made again, and
    `elapsed`, the seconds of training without what happens under `pause`, goes on from the last row kept. UserError
    names a line that is damaged.
    With `quiet` everything is written and nothing shown, with `silent` neither.
    """

    def __init__(
        self,
        out_dir: str | Path,
        *,
        start_step: int,
        max_steps: int,
        tokens_per_step: int,
        settings: dict[str, Any],
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "manyheads",
        quiet: bool = False,
        silent: bool = False,
        console: Console | None = None,
    ):
        self.path = Path(out_dir) / "metrics.jsonl" if not silent else Path(os.devnull)
        self.start_step, self.step, self.max_steps = start_step, start_step, max_steps
        self.tokens_per_step = tokens_per_step
        if not silent:
            check_own(self.path, "the log of a run")
        earlier = _keep_rows(self.path, start_step) if start_step > 0 and not silent else 0.0
        self._file = open(self.path, "a" if start_step > 0 else "w", encoding="utf-8", newline="")  # noqa: SIM115 - until close
        self._paused_at: float | None = None
        self._measured: tuple[int, float] | None = None  # step and elapsed from which speed is counted
        self._steady: tuple[int, float] | None = None  # step and time from which the time left is foretold
        self._status, self._doing, self._drawn = "", "", 0.0
        self._console = console or Console()
        self._console.quiet = quiet = quiet or silent
        self._live = Live(console=self._console, get_renderable=self._bar, auto_refresh=False, transient=True)
        if self._console.is_interactive and not quiet:
            self._live.start()
            self._console.show_cursor()  # a run that is killed must not leave the terminal without one
        self._wandb = self._start_wandb(wandb, wandb_project, settings) if wandb != "off" and not silent else None
        self._zero = time.perf_counter() - earlier

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return (time.perf_counter() if self._paused_at is None else self._paused_at) - self._zero

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock for what is not training: evaluating, saving. May be nested."""
        if self._paused_at is not None:
            yield
            return
        self._paused_at = time.perf_counter()
        try:
            yield
        finally:
            self._zero += time.perf_counter() - self._paused_at
            self._paused_at = None

    def tick(self, step: int) -> None:
        """Say that `step` steps are done; cheap enough for every one of them."""
        self.step = step
        if self._measured is None and step >= self.start_step + WARM_UP_STEPS:
            self._measured, self._steady = (step, self.elapsed), (step, time.perf_counter())
        self._draw()

    def log(self, step: int, tokens: int, **values: float) -> None:
        """Write a row and show it; one with train_loss also gets elapsed and, once warm, tokens_per_s.

        tokens_per_s is the mean since the row before. A value that is not finite is written as null.
        """
        self.step = step
        if "train_loss" in values:
            elapsed = self.elapsed
            if self._measured and step > self._measured[0] and elapsed > self._measured[1]:
                speed = (step - self._measured[0]) * self.tokens_per_step / (elapsed - self._measured[1])
                values["tokens_per_s"] = round(speed, 1)
                self._measured = step, elapsed
            values["elapsed"] = round(elapsed, 3)
        row: dict[str, Any] = {"step": step, "tokens": tokens, **values}
        order = [key for key in KEYS if key in row] + [key for key in row if key not in KEYS]
        row = {key: row[key] if math.isfinite(row[key]) else None for key in order}  # JSON knows no NaN
        with naming(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        self._show(values)
        self._ask_wandb(lambda run: run.log(row))

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._console.print(plain(text), markup=False, emoji=False, highlight=False, soft_wrap=True)

    def evaluating(self, fraction: float) -> None:
        """Show how far a long evaluation has come, where there is a terminal."""
        self._draw(f"evaluating {fraction:.0%}")

    def close(self) -> None:
        """Take the progress line away, close the file and let wandb finish; a second call does nothing."""
        self._live.stop()
        try:
            with naming(self.path):
                self._file.close()  # tries once more to write what found no room
        finally:
            self._ask_wandb(lambda run: run.finish())
            self._wandb = None
            with contextlib.suppress(Exception):
                if "wandb" in sys.modules:  # by itself it does so at exit, with a traceback if its process has died
                    sys.modules["wandb"].teardown()

    def _show(self, values: dict[str, float]) -> None:
        where = f"step {self.step}/{self.max_steps}"
        if "val_loss" in values:
            bits = f" ({values['val_bits_per_byte']:.3f} bits/byte)" if "val_bits_per_byte" in values else ""
            tokens = f" over {values['val_tokens']:,} tokens" if "val_tokens" in values else ""
            if "val_gap" in values:  # a probe: its optimum is known, and its words are no text
                bits = f" ({values['val_gap']:.4f} above the floor, {values['val_accuracy']:.1%} right)"
            self.note(f"{where} | val loss {values['val_loss']:.4f}{bits}{tokens}")
        if "train_loss" in values:
            words = {"train_loss": "loss {:.4f}", "lr": "lr {:.2e}", "tokens_per_s": "{:,.0f} tokens/s"}
            self._status = " | ".join(words[key].format(values[key]) for key in words if key in values)
            if not self._live.is_started:
                self.note(f"{where} | {self._status}{self._time_left()}")
        self._draw()

    def _time_left(self) -> str:
        """Foretold from the pace since the warm-up, evaluations and saves included."""
        if self._steady is None or self.step <= self._steady[0]:
            return ""
        pace = (time.perf_counter() - self._steady[1]) / (self.step - self._steady[0])
        return f" | {clock_time(pace * max(0, self.max_steps - self.step))} left"

    def _draw(self, doing: str = "") -> None:
        self._doing, now = doing, time.perf_counter()
        if self._live.is_started and now - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            self._live.refresh()

    def _bar(self) -> Table:
        columns = Column(no_wrap=True), Column(), Column(no_wrap=True)
        line = Table.grid(*columns, padding=(0, 1), expand=True)
        right = self._doing or (self._status + self._time_left()).removeprefix(" | ")
        bar = ProgressBar(total=self.max_steps, completed=self.step)
        line.add_row(f"step {self.step}/{self.max_steps}", bar, right)
        return line

    def _start_wandb(self, mode: Literal["offline", "online"], project: str, settings: dict[str, Any]) -> Any:
        """A wandb run, or None and a note: whatever is wrong with wandb, training goes on without it."""
        out_dir = self.path.parent.resolve()
        try:
            import wandb  # here, because it takes a second

            limit = WANDB_SECONDS
            quietly = wandb.Settings(init_timeout=limit, finish_timeout=limit, console="off", silent=True)
            if mode == "online" and not wandb.login(prompt=False):
                raise RuntimeError("no API key; set WANDB_API_KEY, run `wandb login` or take --wandb offline")
            # A resumed run is a new run of the same group: wandb takes no step number twice, and offline runs
            # cannot be continued. Its charts go by our own "step", so the segments join up.
            run = wandb.init(
                project=project, group=out_dir.name, dir=out_dir, mode=mode, config=settings, settings=quietly
            )
            run.define_metric("*", step_metric="step")
            where = run.url if mode == "online" else f"to send it, wandb sync {Path(run.dir).parent}"
            self.note(f"wandb is {mode}: {where}")
            return run
        except Exception as error:
            self.note(f"wandb is off: {error}")
            return None

    def _ask_wandb(self, call: Callable[[Any], Any]) -> None:
        if self._wandb is None:
            return
        try:
            with self.pause():
                call(self._wandb)
        except Exception as error:
            self._wandb = None
            self.note(f"wandb is off from here: {error}")


def clock_time(seconds: float) -> str:
    """Seconds as minutes and seconds, 75 -> "1:15", with hours from 3,600 on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _keep_rows(path: Path, last_step: int) -> float:
    """Drop rows after last_step, evaluations at it (made again) and a torn last line; return the last `elapsed` kept.

    UserError names any other line that is no row, or whose step is behind the one before.
    """
    kept, elapsed, reached = [], 0.0, 0
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            row = json.loads(line)
            step, then = row["step"] + 0, row.get("elapsed", elapsed) + 0.0
            if step < reached:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):  # not a row of ours
            if content.count(b"\n") == number - 1 and line.strip(b"\0")[:1] in (b"", b"{"):
                break  # all are read, or the last has no end: the machine stopped while it was written
            raise UserError(
                f"{path}: line {number} is damaged; take it out, or move the file away to begin a new log, and resume"
            ) from None
        reached = step
        if step < last_step or (step == last_step and "val_loss" not in row):
            kept.append(line + b"\n")
            elapsed = then
    if b"".join(kept) != content:
        aside = path.with_name(path.name + ".tmp")
        write_synced(aside, b"".join(kept))
        os.replace(aside, path)
    return elapsed
