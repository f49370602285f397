"""From designs to what every run is to be: settings varied, defaults of a comparison, parameters matched."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from data import Dataset
from lab.designs import Design
from lab.speed import count
from lab.sweep import OWN, Plan
from model import ModelConfig
from runtime.devices import pick_device
from runtime.errors import UserError
from runtime.runs import TrainConfig, with_batch, with_data
from runtime.settings import build, read, read_toml, show

EVALUATIONS = (8, 12, 16, 4)  # of a run: the first number that divides it, so that half and three quarters are seen
EVAL_TOKENS = 25_600  # of each of these; the last evaluation takes the whole split
SAME = ("dataset", "block_size", "max_steps", "batch_size", "eval_interval", "eval_tokens")  # or losses do not compare


def varied(designs: Mapping[str, Design], words: Sequence[str]) -> dict[str, Design]:
    """Every design with every value of a setting: words are its name and the values. UserError tells a mistake."""
    if not words:
        return dict(designs)
    name, *texts = words
    made = {}
    for design in designs.values():
        for text in texts:
            ((field, value),) = read([f"--{name}={text}"], ModelConfig, TrainConfig, prog="", description="").items()
            if field in {*SAME, *OWN, "threads"}:
                raise UserError(f"--vary {field} cannot be: all runs share it, or their losses would not compare")
            shown = value if isinstance(value, str) else show(value).strip('"')
            if not re.fullmatch(r"[\w.,+ -]+", shown):
                raise UserError(f"--vary {field} {shown}: it names a design, so take letters, digits, . , + and -")
            new = f"{field}={shown}" if design.file is None else f"{design.name}-{field}={shown}"
            settings = design.settings | {field: value}
            try:
                build((ModelConfig, TrainConfig), settings)
            except UserError as error:
                raise UserError(f"{new}: {error}") from None
            if new in made:
                raise UserError(f"--vary {field}: {shown} is given twice")
            made[new] = Design(new, design.file, settings)
    return made


def make_plan(design: Design, dataset: Dataset, threads: int) -> Plan:
    """What every run of a design is to be, with vocabulary, batch and evaluations filled in."""
    model, run = build((ModelConfig, TrainConfig), design.settings | {"threads": threads})
    count = next((n for n in EVALUATIONS if run.max_steps % n == 0), EVALUATIONS[0])
    every = max(1, run.max_steps // count)
    own = {"eval_interval": every, "save_interval": every, "eval_tokens": EVAL_TOKENS}
    own = {name: value for name, value in own.items() if name not in design.settings}
    model = with_data(model, dataset, design.settings)
    return Plan(model, with_batch(dataclasses.replace(run, **own), model.block_size))


def check_alike(plans: Mapping[str, Plan]) -> None:
    """UserError if designs differ in what losses must have in common to compare."""
    (first, one), *others = plans.items()
    for name, plan in others:
        for field in SAME:
            a, b = one.settings()[field], plan.settings()[field]
            if a != b:
                raise UserError(f"{first} has {field} {show(a)} and {name} {show(b)}: their losses would not compare")


def share_cores(designs: Mapping[str, Design], jobs: int | None, folder: Path) -> tuple[int, int]:
    """Runs at a time, and CPU threads of each: those of the runs a folder holds, those given, or an equal share.

    Unset, jobs are as many as there are cores for, up to 4: a small model gains less by a second thread than a second
    model does by a core of its own. On a GPU one at a time. Another number of threads rounds differently, so one sweep
    never mixes them: UserError if it would.
    """
    asked = {design.settings.get("threads") for design in designs.values()}
    if len(asked) > 1:
        raise UserError(f"designs differ in threads ({', '.join(map(str, asked))}): all runs share them")
    threads, cores = asked.pop(), torch.get_num_threads()
    for file in [file for part in (".", "rates") for file in (folder / part / "designs").glob("*.toml")]:
        saved = read_toml(str(file)).get("threads")
        if not isinstance(saved, int):
            raise UserError(f"{file} is damaged: delete {folder}, or give another --out_dir")
        if threads not in (None, saved):
            raise UserError(f"{folder} was begun with {saved} threads: give --threads {saved} or another --out_dir")
        threads = saved
    devices = {design.settings.get("device", "auto") for design in designs.values()}
    most = jobs or (min(4, cores) if all(pick_device(device).type == "cpu" for device in devices) else 1)
    threads = threads or max(1, cores // most)
    return jobs or max(1, min(most, cores // threads)), threads


def match_parameters(plans: Mapping[str, Plan], baseline: str) -> tuple[dict[str, Plan], list[str]]:
    """Plans whose d_ff is changed until parameters agree with the baseline's within 0.5%; and what was changed.

    Widening the MLP is the convention of Shazeer 2019 and Llama 2; others add heads or layers. UserError if no
    width of the MLP does it.
    """
    target = count(plans[baseline].model)["parameters"]
    matched, changes = {}, []
    for name, plan in plans.items():
        one, two = (count(dataclasses.replace(plan.model, d_ff=width))["parameters"] for width in (1, 2))
        d_ff = 1 + round((target - one) / (two - one))
        if name == baseline:
            d_ff = plan.model.d_ff
        model = dataclasses.replace(plan.model, d_ff=max(1, d_ff))
        total = count(model)["parameters"]
        if abs(total / target - 1) > 0.005:
            raise UserError(
                f"d_ff cannot bring {name} to the {target:,} parameters of {baseline}: the nearest is {total:,}"
            )
        if d_ff != plan.model.d_ff:
            told = f"{total:,} parameters ({total / target - 1:+.2%})"
            changes.append(f"{name}: d_ff {plan.model.d_ff} -> {d_ff}, {told}")
        matched[name] = Plan(model, plan.run)
    return matched, changes
