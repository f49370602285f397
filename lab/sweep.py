"""Designs x seeds as training runs under one folder, each by train.py, until all are finished.

A run that is finished is left alone, one that was interrupted goes on from its checkpoint, one that fails costs
nobody else theirs. What a run is to be stands in designs/NAME.toml before it begins, so that a folder cannot come
to hold two different comparisons.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from data import Dataset
from model import ModelConfig
from runtime.checkpoint import has_saved, read_checkpoint
from runtime.errors import EnvironmentFault, UserError, plain
from runtime.logbook import clock_time
from runtime.runs import FolderInUse, StopSignal, TrainConfig, check_data, hold, write_whole
from runtime.settings import as_dict, read_toml, show, to_toml

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
POLL_SECONDS = 0.1
OWN = {"seed", "out_dir", "resume", "overwrite", "init_from", "eval_only"}  # settings that belong to one run
ALONE = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}  # of an environment; a run is one process, whatever compare.py began in


class Plan(NamedTuple):
    """What every run of one design is to be, but for its seed."""

    model: ModelConfig
    run: TrainConfig

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in as_dict(self.model, self.run).items() if name not in OWN}


class Run(NamedTuple):
    """One design at one seed, and where it is trained."""

    name: str
    seed: int
    folder: Path
    plan_file: Path
    max_steps: int
    val_tokens: int  # of the whole split, which the last evaluation covers

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def output(self) -> Path:
        """What it printed when it was last trained."""
        return self.folder / "output.txt"

    def last_row(self) -> dict[str, Any]:
        """The newest whole row of its log, or none of it."""
        try:
            with open(self.metrics, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                lines = file.read().splitlines()
        except OSError:
            return {}
        for line in reversed(lines):
            try:
                row = json.loads(line)
                return row if row["step"] >= 0 else {}
            except (ValueError, KeyError, TypeError, RecursionError):  # torn, or the tail of a longer one
                continue
        return {}

    def finished(self) -> bool:
        """Whether its loss over the whole validation split is written down."""
        row = self.last_row()
        loss = row.get("val_loss")  # null where the last update made it something else than a number
        return row.get("step") == self.max_steps and row.get("val_tokens") == self.val_tokens and loss is not None

    def share_done(self) -> float:
        return min(1.0, self.last_row().get("step", 0) / self.max_steps)

    def command(self) -> list[str]:
        """What trains it from where it stands."""
        if has_saved(self.folder):
            return [sys.executable, str(TRAIN), "--resume", str(self.folder)]
        own = ["--seed", str(self.seed), "--out_dir", str(self.folder), "--overwrite"]
        return [sys.executable, str(TRAIN), str(self.plan_file), *own]

    def held(self) -> bool:
        """Whether a process trains in its folder, such as one whose sweep was killed."""
        if not self.folder.exists():
            return False
        try:
            hold(self.folder).close()
        except FolderInUse:
            return True
        return False


def plan_runs(folder: Path, plans: Mapping[str, Plan], seeds: Iterable[int], dataset: Dataset) -> list[Run]:
    """The runs of a sweep, seed by seed, with what each design is to be written down in the folder.

    UserError if the folder holds a design of the same name with other settings, or a run on other data.
    """
    seeds = list(seeds)
    (folder / "designs").mkdir(parents=True, exist_ok=True)
    for name, plan in plans.items():
        file = folder / "designs" / f"{name}.toml"
        if file.exists():
            check_same(plan, read_toml(str(file)), f"{folder} holds a comparison in which {name}")
        for seed in seeds:
            run = folder / f"{name}-{seed}"
            if has_saved(run):
                _, meta, _ = read_checkpoint(run, "last")
                check_same(plan, meta["model"] | meta["train"], f"{run} is a run that")
                check_data(dataset, meta, str(run), exact=True)
    for name, plan in plans.items():
        file = folder / "designs" / f"{name}.toml"
        if not file.exists():
            lines = to_toml(plan.model, plan.run).splitlines(keepends=True)
            write_whole(file, "".join(line for line in lines if line.split(" = ")[0] not in OWN))
    return [
        Run(name, seed, folder / f"{name}-{seed}", folder / "designs" / f"{name}.toml", plan.run.max_steps,
            dataset.val_targets)
        for seed in seeds
        for name, plan in plans.items()
    ]  # fmt: skip


def check_same(plan: Plan, saved: Mapping[str, Any], what: str) -> None:
    """UserError that names the first setting in which what was saved is not what is planned.

    What was saved before a setting existed has its default.
    """
    defaults = {field.name: field.default for cls in (ModelConfig, TrainConfig) for field in fields(cls)}
    for key, now in plan.settings().items():
        was = saved.get(key, defaults[key])
        was = None if was == "none" else was
        if was != now:
            raise UserError(
                f"{what} has {key} {show(was)}, and now it is {show(now)}: give another --out_dir, or the settings of "
                "before"
            )


class Process(Protocol):
    """A run being trained: what is used of subprocess.Popen."""

    def poll(self) -> int | None: ...

    def send_signal(self, number: int, /) -> None: ...

    def wait(self) -> int | None: ...


def start_here(run: Run) -> subprocess.Popen[bytes]:
    """Train a run on this machine."""
    run.output.unlink(missing_ok=True)  # a link in a stranger's folder is not followed
    with open(run.output, "xb") as output:
        return subprocess.Popen(
            run.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in ALONE},
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )  # fmt: skip


class Stopped(Exception):
    """A signal came, and every run that was going has saved."""


class Sweep:
    """Trains runs, `jobs` at a time, each by `start`, and shows how far all of them are."""

    def __init__(
        self, jobs: int, total: int, console: Console, stop: StopSignal,
        start: Callable[[Run], Process] = start_here, poll_seconds: float = POLL_SECONDS,
    ):  # fmt: skip
        self.start, self.poll_seconds = start, poll_seconds
        self.jobs, self.total, self.console, self.stop = jobs, total, console, stop
        self.done = 0  # finished runs, those found finished included
        self.trained: list[float] = []  # seconds that each whole run took here
        self.failures: list[dict[str, Any]] = []
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self.progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self.task = self.progress.add_task("training", total=1.0)

    def train(self, runs: Sequence[Run]) -> None:
        """Bring every run to its end or to a failure; Stopped if a signal came."""
        waiting = list(runs)
        running: dict[Run, tuple[Process, float, float]] = {}  # process, clock, share it began with
        if self.console.is_interactive:
            self.progress.start()
        try:
            while (waiting or running) and not self.stop.number:
                for run in list(waiting):
                    if len(running) == self.jobs:
                        break
                    if run.held():
                        continue  # another process trains it: wait until it has let go
                    waiting.remove(run)
                    if run.finished():
                        self.done += 1
                        continue
                    run.folder.mkdir(parents=True, exist_ok=True)
                    share = run.share_done()
                    self._say(f"{run.name}, seed {run.seed}: " + ("going on" if share else "training"))
                    try:
                        running[run] = self.start(run), time.monotonic(), share
                    except EnvironmentFault as error:  # a cluster's refusal
                        self.done += 1
                        self._failed(run, str(error))
                time.sleep(self.poll_seconds)
                for run, (process, clock, share) in list(running.items()):
                    status = process.poll()
                    if status is not None:
                        del running[run]
                        if status == 2 and (run.held() or run.finished()):
                            waiting.append(run)  # refused: another process was about to begin when this one was started
                            continue
                        self._ended(run, status, time.monotonic() - clock, share)
                self._draw(running)
        finally:
            if self.stop.number and running:
                self._say(f"stopping: {len(running)} running, to be saved first")
            for process, *_ in running.values():
                process.send_signal(self.stop.number or signal.SIGTERM)  # it finishes its step and saves
            for process, *_ in running.values():
                process.wait()
            self.progress.stop()
        if self.stop.number:
            raise Stopped

    def _ended(self, run: Run, status: int, seconds: float, share: float) -> None:
        self.done += 1
        if status == 0 and run.finished():
            if share == 0:
                self.trained.append(seconds)
            loss = run.last_row()["val_loss"]
            left = f", {clock_time(self.seconds_left([]))} left" if self.trained else ""
            self._say(f"{run.name}, seed {run.seed}: {loss:.4f} after {seconds:.0f} s ({self.done}/{self.total}{left})")
            return
        there = run.output.is_file()  # or its folder was removed
        lines = run.output.read_text(encoding="utf-8", errors="replace").strip().splitlines() if there else []
        error = plain(lines[-1]) if lines else f"ended with status {status} and not a word"
        if status < 0:
            error = f"ended by signal {-status}" + ", perhaps for want of memory" * (status == -signal.SIGKILL)
        elif status == 0:
            error = "its validation loss is not a number"
        self._failed(run, error)

    def _failed(self, run: Run, error: str) -> None:
        self.failures.append({"design": run.name, "seed": run.seed, "error": error})
        self._say(f"{run.name}, seed {run.seed} failed: {error}")

    def seconds_left(self, shares: Sequence[float]) -> float:
        """Foretold from the runs that were trained here, for what is left after the shares of those running."""
        each = sum(self.trained) / len(self.trained)
        return each * self._rounds_left(shares)

    def _rounds_left(self, shares: Sequence[float]) -> float:
        """Whole runs left after these shares, for each job that still has one."""
        left = self.total - self.done
        return max(0.0, left - sum(shares)) / max(1, min(self.jobs, left))

    def _say(self, text: str) -> None:
        """A line that stays; the terminal's progress goes on below it."""
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def _draw(self, running: Mapping[Run, tuple[Any, float, float]]) -> None:
        if not self.progress.live.is_started:
            return
        shares = [run.share_done() for run in running]
        if self.trained:
            left = self.seconds_left(shares)
        else:  # the first runs: from what they have done so far
            pace = [(time.monotonic() - clock) / max(run.share_done() - share, 1e-9)
                    for run, (_, clock, share) in running.items()]  # fmt: skip
            left = min(pace, default=0.0) * self._rounds_left(shares)
        known = self.trained or sum(shares) > 0.05
        names = ", ".join(f"{run.name} seed {run.seed}" for run in running)
        words = f"run {min(self.done + 1, self.total)} of {self.total}: {names}"
        words += f", {clock_time(left)} left" if known else ""
        self.progress.update(self.task, completed=(self.done + sum(shares)) / self.total, description=words)
        self.progress.refresh()
