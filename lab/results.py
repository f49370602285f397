"""What a comparison writes down beside its statistics: what was compared, held equal, and on which machine."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from data import Dataset
from lab.designs import Design
from lab.speed import count
from lab.sweep import Plan, Run
from runtime.checkpoint import load_model
from runtime.errors import UserError
from runtime.generate import TextStream, default_start, generate, sample_generator
from runtime.settings import show

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_TOKENS = 300
TRAINING = ("optimizer", "learning_rate", "schedule", "warmup_steps", "weight_decay", "beta1", "beta2", "grad_clip")
TOLD = ("n_layer", "n_embd", "d_ff", "positions", "norm", "activation", "dropout", "init")  # if all designs share it


def describe(
    designs: Mapping[str, Design], plans: Mapping[str, Plan], baseline: str, dataset: Dataset, command: Sequence[str]
) -> dict[str, Any]:
    """The comparison's settings, what its designs share and what they cost."""
    reference = plans[baseline]
    run, model = reference.run, reference.model
    tokens_per_step = run.batch_size * model.block_size
    tokens = run.max_steps * tokens_per_step
    entries = [entry(designs[name], plan, reference) for name, plan in plans.items()]
    counts = sorted({e["parameters"] for e in entries})
    by_cache: dict[int, list[str]] = {}
    for e in entries:
        by_cache.setdefault(e["cache_bytes_per_token"], []).append(e["name"])
    shared = {k: v for k, v in reference.settings().items() if all(p.settings()[k] == v for p in plans.values())}
    training = [f"{name} {bare(shared[name])}" for name in TRAINING if name in shared]
    held = [
        f"data: {dataset.name}, tokenizer {dataset.tokenizer.kind}; at each seed the same tokens in the same order",
        f"length: {run.max_steps:,} steps of {tokens_per_step:,} tokens, {tokens:,} in all, "
        f"{tokens / len(dataset.train):.2f} of one pass over the training text",
        f"training: {', '.join(training)}",
        f"evaluation: the whole validation split, {dataset.val_targets:,} tokens in windows of {model.block_size}, "
        "after the last step",
        "settings: " + ", ".join(f"{name} {bare(shared[name])}" for name in TOLD if name in shared),
        f"processor threads: {run.threads}",
    ]
    if {"init", "init_seed", "n_layer"} <= shared.keys():
        held.append("initial values: at each seed, those of every parameter that designs share by name and shape")
    if len(counts) == 1:
        held.append(f"parameters: {counts[0]:,}")
    return {
        "format": 1,
        "command": "python compare.py " + shlex.join(command),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "numpy", "scipy", "altair")},
        "machine": machine(),
        "threads": run.threads,
        "dataset": {"name": dataset.name, "tokenizer": dataset.tokenizer.kind, "fingerprint": dataset.fingerprint,
                    "train_tokens": len(dataset.train), "val_tokens": dataset.val_targets, "probe": dataset.probe},
        "max_steps": run.max_steps, "tokens_per_step": tokens_per_step, "tokens_seen": tokens,
        "share_of_pass": tokens / len(dataset.train), "block_size": model.block_size, "baseline": baseline,
        "held_equal": held, "designs": entries,
        "equal_cache": [names for names in by_cache.values() if len(names) > 1],
    }  # fmt: skip


def entry(design: Design, plan: Plan, reference: Plan) -> dict[str, Any]:
    """One design: its settings, what they change against the baseline's, and its costs by formula and by allocation."""
    settings = plan.settings()
    changes = {k: v for k, v in settings.items() if v != reference.settings()[k] and k != "threads"}
    return {
        "name": design.name, "files": [design.file] if design.file else [],
        "changes": changes, "settings": settings,
        **{k: settings[k] for k in ("n_head", "n_kv_head", "head_dim", "n_embd", "learning_rate")},
        "n_kv_head": settings["n_kv_head"] or settings["n_head"],  # unset where heads do not share keys and values
        **count(plan.model),
    }  # fmt: skip


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What each finished run ended with."""
    rows = []
    for run in runs:
        last = run.last_row()
        rows.append({"seed": run.seed, "folder": run.folder.name, "loss": last["val_loss"],
                     "bits_per_byte": last["val_bits_per_byte"]})  # fmt: skip
    return rows


def write_sample(folder: Path) -> str | None:
    """A text by the model that a run ended with, from a fixed seed; None if its checkpoint is gone."""
    try:
        model, tokenizer, _ = load_model(str(folder), "last", torch.device("cpu"))
    except UserError:
        return None
    stream = TextStream(tokenizer, "")
    steps = generate(model, default_start(tokenizer), SAMPLE_TOKENS, [sample_generator(1, 0)], 0.8,
                     vocab_size=tokenizer.vocab_size)  # fmt: skip
    text = ""
    for (token,) in steps:
        text += stream.feed(token)
        if stream.done:
            break
    return text + stream.finish()


def rates_part(
    tried: Mapping[str, Mapping[float, float]], seed: int, plans: Mapping[str, Plan], common: float,
    analysis: Mapping[str, Any], at_common: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Which rate each design was given, and whether the order of the designs differs at one rate for all."""

    def order(designs: Mapping[str, Any]) -> list[str]:
        means = {name: design["loss"]["mean"] for name, design in designs.items()}
        return sorted((name for name in means if means[name] is not None), key=means.__getitem__)

    rows = []
    for name in plans:
        design = at_common["designs"][name]
        against = design["against_baseline"] or {}
        rows.append({"name": name, "mean": design["loss"]["mean"], "sd": design["loss"]["sd"],
                     "difference": against.get("mean"),
                     **{key: against.get(key) for key in ("interval", "p_holm", "verdict")}})  # fmt: skip
    best, same = order(analysis["designs"]), order(at_common["designs"])
    return {
        "seed": seed, "tried": sorted({rate for by in tried.values() for rate in by}), "common": common,
        "losses": {name: {f"{rate:g}": loss for rate, loss in sorted(by.items())} for name, by in tried.items()},
        "best": {name: plan.run.learning_rate for name, plan in plans.items()},
        "order": best, "order_at_common": same, "differs": best != same, "at_common": rows,
    }  # fmt: skip


def bare(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


def machine() -> dict[str, Any]:
    """The processor, its cores, memory and system."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or not such a processor
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": memory and round(memory, 1),
            "system": f"{platform.system()} {platform.release()}"}  # fmt: skip


def git_commit() -> str | None:
    """The commit of this code, with "+" if files differ from it; None where there is no git."""
    try:
        ask = ["git", "-C", str(ROOT)]
        commit = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*ask, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
        return commit + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None
