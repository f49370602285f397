"""Compare head designs."""

import json
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text

from lab.designs import Design, DesignFiles, read_designs
from lab.launcher import Cluster
from lab.plans import EVAL_TOKENS, EVALUATIONS, check_alike, make_plan, match_parameters, share_cores, varied
from lab.results import describe, rates_part, run_rows, write_sample
from lab.speed import count, measure
from lab.stats import analyse
from lab.sweep import OWN, Plan, Run, Stopped, Sweep, plan_runs
from model import ModelConfig
from runtime import errors
from runtime.devices import pick_device
from runtime.errors import EnvironmentFault, UserError
from runtime.runs import StopSignal, TrainConfig, hold, open_or_prepare, write_whole

FIVE = [f"config/{name}.toml" for name in ("single-head", "mha", "mha-16", "gqa-2", "mqa")]  # if no file is named
FIVE_STEPS, QUICK_STEPS = 320, 80
ROUNDS, QUICK_ROUNDS = 3, 2  # of the speed part
RATE_SEED = 0  # rates are chosen on it; reported seeds begin at 1

DESCRIPTION = f"""Compare head designs: what does each cost, what does it buy, and is the difference real?

    python compare.py                                   five designs, three seeds of {FIVE_STEPS} steps: six minutes
    python compare.py config/mha.toml config/mqa.toml --seeds 5 --out_dir runs/heads
    python compare.py --vary n_head 1 2 4 8 16 --out_dir runs/head-count

Every file is one design; the first, or the one that --baseline names, is what the others are compared with. Any
setting of train.py may follow and holds for all. Each design is trained at every seed, on the same tokens in the same
order, at one learning rate unless its file or --rates gives it one of its own. The same command goes on
with a comparison that was stopped. It writes report.html, report.md and results.json; what a run printed is in its
folder's output.txt.

The defaults below are train.py's. Where a setting is not given a comparison takes others: out_dir runs/compare;
threads, the cores shared among the jobs; eval_tokens {EVAL_TOKENS:,}; eval_interval and save_interval, so that a run
is evaluated n times, n the first of {EVALUATIONS} that divides max_steps; without a file and --vary, max_steps
{FIVE_STEPS} and baseline mha; with --quick, max_steps {QUICK_STEPS} and out_dir runs/compare-quick. seed, resume,
init_from, eval_only and overwrite belong to one run and are refused."""


@dataclass(frozen=True)
class CompareConfig(DesignFiles):
    seeds: int = 3  # trainings of each design, with seeds 1, 2, ...; below 3 there are no intervals
    baseline: str | None = None  # name of the design that the others are compared with; unset = the first
    vary: tuple[str, ...] = ()  # a setting and its values, as n_head 1 2 4: every design with each of them
    # what is made equal: width = only the design differs; params = d_ff is adjusted until parameters agree within 0.5%
    match: Literal["width", "params"] = "width"
    rates: tuple[float, ...] = ()  # learning rates to choose from for each design, on a seed that is not reported
    jobs: int | None = None  # runs at a time; unset = what there are cores for, up to 4; 1 on a GPU or a cluster
    # submitit = every run is a job of the Slurm cluster here (4 hours, a CPU a thread, no GPU, unless --slurm says
    # else), or of this machine where there is none; speed is measured where compare.py runs
    launcher: Literal["local", "submitit"] = "local"
    slurm: tuple[str, ...] = ()  # for submitit's jobs: timeout_min=120 gpus_per_node=1 mem_gb=8 slurm_partition=gpu
    quick: bool = False  # a first look in three minutes: one seed, 80 steps, two contexts, unless given
    speed: bool = True  # measure training, prefill, decoding and memory after the training
    batch: tuple[int, ...] = (1, 16)  # sequences decoded together, when speed is measured; batch_size is training's
    context: tuple[int, ...] = (128, 512, 2048)  # tokens already in the cache then

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs"):
            if (value := getattr(self, name)) is not None and not 1 <= value < 2**31:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("batch", "context"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be one or more whole numbers from 1")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} names a size twice")
        if self.slurm and self.launcher != "submitit":
            raise ValueError("slurm is for jobs of a cluster: add --launcher submitit, or leave it out")
        if len(self.vary) == 1:
            raise ValueError(f"vary {self.vary[0]} needs the values to try: --vary {self.vary[0]} V1 V2")
        if self.rates and (len(set(self.rates)) < max(2, len(self.rates)) or not all(0 < r < 1e9 for r in self.rates)):
            raise ValueError("rates must be two or more different learning rates above 0")
        if self.rates and self.vary and self.vary[0].replace("-", "_") == "learning_rate":
            raise ValueError("--rates chooses the learning rate and --vary learning_rate sets it; give one of them")
        if self.match == "params" and self.vary and self.vary[0].replace("-", "_") == "d_ff":
            raise ValueError("--match params sets d_ff and --vary d_ff as well; give one of them")


def main(argv: list[str]) -> int:
    """Train, measure and report as the command line says; returns the exit status."""
    console = Console(stderr=True)
    designs, config, given = read_line(argv)
    dataset = open_or_prepare(next(iter(designs.values())).settings.get("dataset", TrainConfig.dataset))
    out_dir = Path(given.get("out_dir") or ("runs/compare-quick" if config.quick else "runs/compare"))
    jobs, threads = share_cores(designs, config.jobs or (1 if config.launcher == "submitit" else None), out_dir)
    plans = {name: make_plan(design, dataset, threads) for name, design in designs.items()}
    check_alike(plans)
    baseline = config.baseline or next(iter(plans))
    if baseline not in plans:
        raise UserError(f"baseline {baseline} is not among the designs: {', '.join(plans)}")
    plans, adjusted = match_parameters(plans, baseline) if config.match == "params" else (plans, [])
    out_dir.mkdir(0o777 if config.launcher == "local" else 0o755, parents=True, exist_ok=True)
    lock = hold(out_dir)
    cluster = Cluster(out_dir, config.slurm, threads) if config.launcher == "submitit" else None
    if cluster and not cluster.on_slurm:
        print("there is no Slurm here: the jobs run on this machine", file=sys.stderr)

    # Training. The rates first, if they are to be chosen; every design at its own; then all at the common one.
    stop = StopSignal()
    seeds = range(1, config.seeds + 1)
    how = (cluster.start, cluster.poll_seconds) if cluster else ()
    sweep = Sweep(jobs, len(plans) * (config.seeds + len(config.rates)), console, stop, *how)
    rate = plans[baseline].run.learning_rate
    common = {name: at_rate(plan, rate) for name, plan in plans.items()} if config.rates else plans
    tried: dict[str, dict[float, float]] = {}
    try:
        if config.rates:
            many = {rate_name(name, r): at_rate(plan, r) for name, plan in plans.items() for r in config.rates}
            trials = plan_runs(out_dir / "rates", many, [RATE_SEED], dataset)
            sweep.train(trials)
            tried = by_rate(trials, plans, config.rates)
            if baseline not in tried:
                raise EnvironmentFault(f"the baseline {baseline} failed at every rate: {why(sweep, baseline)}")
            plans = {name: at_rate(plans[name], min(by, key=by.__getitem__)) for name, by in tried.items()}
        runs = plan_runs(out_dir, plans, seeds, dataset)
        sweep.train(runs)
        moved = {name: common[name] for name, plan in plans.items() if plan != common[name]}
        sweep.total += len(moved) * config.seeds
        common_runs = plan_runs(out_dir / "common-rate", moved, seeds, dataset) if moved else []
        sweep.train(common_runs)
        common_runs += [run for run in runs if run.name not in moved]
    except Stopped:
        told = f"stopped; every run has saved, and the same command goes on with {out_dir}"
        print(errors.plain(told), file=sys.stderr)
        return 128 + stop.number
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)  # from here on there is nothing to save
    finished = by_design(runs)
    if not finished[baseline]:
        raise EnvironmentFault(f"no run of the baseline {baseline} was finished: {why(sweep, baseline)}")

    # What the runs say.
    analysis = analyse(metrics(finished), baseline)
    results = describe(designs, plans, baseline, dataset, argv) | {
        "first_look": config.quick, "seeds": list(seeds), "jobs": jobs, "match": config.match,
        "vary": {config.vary[0].replace("-", "_"): list(config.vary[1:])} if config.vary else {}, "adjusted": adjusted,
        "failures": sweep.failures, "pooled": analysis["pooled"], "comparisons": analysis["comparisons"],
        "notes": notes(plans, config, tried), "rates": None, "speed": None, "speed_note": None,
    }  # fmt: skip
    for entry in results["designs"]:
        group = finished[entry["name"]]
        sample = write_sample(group[0].folder) if group else None
        entry |= analysis["designs"][entry["name"]] | {"runs": run_rows(group), "sample": sample}
    if config.rates:
        best = ", ".join(f"{name} {plan.run.learning_rate:g}" for name, plan in plans.items())
        results["adjusted"] = [*adjusted, f"learning rate: each design's best on seed {RATE_SEED}: {best}"]
        results["rates"] = rates_part(tried, RATE_SEED, plans, rate, analysis,
                                      analyse(metrics(by_design(common_runs)), baseline))  # fmt: skip
    if not config.speed:
        results["speed_note"] = "Speed was not measured: --no-speed was given."
    else:
        try:
            results["speed"] = measure_speed(plans, config, jobs, console)
        except (UserError, EnvironmentFault) as error:  # the losses are worth a report without it
            results["speed_note"] = f"Speed was not measured: {error}"

    # The report. Its libraries take seconds to load, so they wait until here.
    from lab.report import show, write_report

    write_whole(out_dir / "results.json", json.dumps(results, indent=1, allow_nan=False))
    write_report(results, out_dir)
    show(results, Console())
    for failure in sweep.failures:
        print(f"failed: {failure['design']}, seed {failure['seed']}: {failure['error']}", file=sys.stderr)
    print(errors.plain(f"report: {out_dir / 'report.html'}"))
    lock.close()
    return 1 if sweep.failures else 0


def read_line(argv: Sequence[str]) -> tuple[dict[str, Design], CompareConfig, dict[str, Any]]:
    """The designs, varied, the comparison's own settings, and the flags; UserError tells a mistake."""

    def read(words: Sequence[str]) -> tuple[dict[str, Design], tuple[CompareConfig], dict[str, Any]]:
        common = (ModelConfig, TrainConfig)
        return read_designs(words, CompareConfig, prog="compare.py", description=DESCRIPTION, common=common)

    designs, (config,), given = read(argv)
    steps: dict[str, Any] = {}
    if not config.designs and not config.vary:
        root = Path(__file__).resolve().parent
        files = [file if Path(file).exists() else str(root / file) for file in FIVE]
        designs, (config,), given = read([*files, *argv])
        config = replace(config, baseline=config.baseline or "mha")
        steps = {"max_steps": FIVE_STEPS}
    if config.quick:
        config = replace(config, seeds=given.get("seeds", 1), context=given.get("context", (128, 2048)))
        steps = {"max_steps": QUICK_STEPS}
    for name, design in designs.items():
        settings = steps | {key: value for key, value in design.settings.items() if key != "out_dir"}
        for key in OWN & settings.keys():
            hint = "; --seeds N trains seeds 1 to N" if key == "seed" else ""
            raise UserError(f"{key} belongs to one run and not to a comparison{hint}")
        designs[name] = design._replace(settings=settings)
    field = config.vary[0].replace("-", "_") if config.vary else None
    if field in given:
        raise UserError(f"--vary {field} and --{field} are both given; leave one of them out")
    return varied(designs, config.vary), config, given


def notes(
    plans: Mapping[str, Plan], config: CompareConfig, tried: Mapping[str, Mapping[float, float]]
) -> list[str]:
    """What a reader must know to judge the comparison fairly."""
    told = []
    if config.quick:
        told.append("This is a first look: far too short to settle anything.")
    if len({plan.run.learning_rate for plan in plans.values()}) == 1 and not config.rates:
        rate = next(iter(plans.values())).run.learning_rate
        optimizers = " or ".join(sorted({plan.run.optimizer for plan in plans.values()}))
        told.append(
            f"All designs train with {optimizers} at one learning rate, {rate:g}: a design that would do better at "
            "another is at a disadvantage. --rates lets each have its own."
        )
    for name in tried:
        rate = plans[name].run.learning_rate
        if rate in (min(config.rates), max(config.rates)):
            end = "lowest" if rate == min(config.rates) else "highest"
            told.append(f"{name} did best at the {end} of the rates tried, {rate:g}, and might do better beyond it.")
    counts = {name: count(plan.model)["parameters"] for name, plan in plans.items()}
    if config.match == "params":
        told.append("Parameters were made equal by widening or narrowing the MLP (d_ff); others add heads or layers.")
    elif len(set(counts.values())) > 1:
        told.append(
            f"Parameters are not equal: from {min(counts.values()):,} to {max(counts.values()):,}. --match params "
            "makes them equal by the width of the MLP."
        )
    return told


def rate_name(name: str, rate: float) -> str:
    return f"{name}-rate={rate:g}"


def by_rate(runs: Sequence[Run], names: Iterable[str], rates: Sequence[float]) -> dict[str, dict[float, float]]:
    """Final losses by design and learning rate; a design that failed at every rate is left out."""
    done = {run.name: run.last_row()["val_loss"] for run in runs if run.finished()}
    tried = {name: {r: done[rate_name(name, r)] for r in rates if rate_name(name, r) in done} for name in names}
    return {name: losses for name, losses in tried.items() if losses}


def why(sweep: Sweep, name: str) -> str:
    """The last failure of a design."""
    return next((f["error"] for f in reversed(sweep.failures) if f["design"].startswith(name)), "it was not trained")


def at_rate(plan: Plan, rate: float) -> Plan:
    return Plan(plan.model, replace(plan.run, learning_rate=rate))


def by_design(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The finished runs of each design, in order of seed; none for one that always failed."""
    groups: dict[str, list[Run]] = {run.name: [] for run in runs}
    for run in runs:
        if run.finished():
            groups[run.name].append(run)
    return groups


def metrics(groups: Mapping[str, Sequence[Run]]) -> dict[str, dict[int, Path]]:
    return {name: {run.seed: run.metrics for run in group} for name, group in groups.items()}


def measure_speed(plans: Mapping[str, Plan], config: CompareConfig, jobs: int, console: Console) -> dict[str, Any]:
    """Speed and memory of every design, on all the cores that trained them, with a line that tells how far it is."""
    configs = {name: plan.model for name, plan in plans.items()}
    run = next(iter(plans.values())).run
    threads = run.threads * max(1, min(jobs, torch.get_num_threads() // run.threads))
    told = ""
    with console.status("measuring speed") as status:

        def tell(share: float, what: str) -> None:
            nonlocal told
            phase = what.partition(",")[0]  # without size and design
            if console.is_interactive:
                status.update(Text(f"measuring speed {share:.0%}: {what}"))
            elif phase != told:
                console.print(f"measuring speed: {phase}", markup=False, highlight=False)
            told = phase

        device = str(pick_device(run.device))
        return measure(configs, config.batch, config.context, run.batch_size, threads=threads, progress=tell,
                       device=device,
                       rounds=QUICK_ROUNDS if config.quick else ROUNDS)  # fmt: skip


if __name__ == "__main__":
    errors.run(main)
