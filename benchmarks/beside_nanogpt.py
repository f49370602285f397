"""nanoGPT's CPU recipe beside ours, run in turn, every model scored by our full pass.

    git clone a nanoGPT checkout somewhere else, then
    python -m benchmarks.beside_nanogpt PATH/TO/nanoGPT --text tinyshakespeare.txt --seeds 3 --short 750 > results.json

For every seed these runs, one after the other, or those that --runs names: nanoGPT's recipe by its own train.py (in a
copy of the checkout, with its seed replaced), config/nanogpt-cpu.toml, the default settings, once with the steps given
by --short, and config/fast.toml; config/thorough.toml only where it is named. Prints JSON: steps a second (the median
over the run; evaluations left out), seconds of training and of the whole command, the loss over the whole validation
split in windows of 64 tokens with the seconds that this took, and in windows of the model's own context; and the median
over seeds of nanoGPT's training time, without any evaluation, over that of fast.toml with its evaluation.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from data import open_dataset
from model import GPT, ModelConfig
from runtime.checkpoint import load_model
from runtime.evaluate import evaluate
from runtime.settings import build, read_toml

ROOT = Path(__file__).resolve().parent.parent

RUNS = ["nanogpt", "ours", "default_short", "default", "fast", "thorough"]
FLAGS = [
    "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12",
    "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0",
]  # fmt: skip


def ours_from_nanogpt(checkpoint: Path) -> GPT:
    """nanoGPT's weights in our model of the same shape; its joint q, k, v projection is cut in three."""
    theirs = torch.load(checkpoint, map_location="cpu", weights_only=True)["model"]
    names = ModelConfig.__dataclass_fields__
    settings = {k: v for k, v in read_toml(str(ROOT / "config/nanogpt-cpu.toml")).items() if k in names}
    model = GPT(build((ModelConfig,), settings | {"vocab_size": 65})[0])
    ours = {"embed.weight": theirs["transformer.wte.weight"], "embed_position.weight": theirs["transformer.wpe.weight"],
            "norm.weight": theirs["transformer.ln_f.weight"], "head.weight": theirs["lm_head.weight"]}  # fmt: skip
    for i in range(4):
        block, here = f"transformer.h.{i}.", f"blocks.{i}."
        q, k, v = theirs[block + "attn.c_attn.weight"].chunk(3)
        ours |= {f"{here}attn.w_{name}.weight": part for name, part in zip("qkv", (q, k, v), strict=True)}
        for name, there in {"attn.w_o": "attn.c_proj", "mlp.w_in": "mlp.c_fc", "mlp.w_out": "mlp.c_proj",
                            "norm_attn": "ln_1", "norm_mlp": "ln_2"}.items():  # fmt: skip
            ours[f"{here}{name}.weight"] = theirs[f"{block}{there}.weight"]
    model.load_state_dict(ours, strict=True)
    return model


def run_nanogpt(
    folder: Path, seed: int, dataset: str, steps: int = 2000, compiled: bool = False
) -> dict[str, float]:
    source = (folder / "train.py").read_text()
    (folder / "train_seed.py").write_text(source.replace("manual_seed(1337 ", f"manual_seed({seed} "))
    command = [sys.executable, "train_seed.py", "config/train_shakespeare_char.py", *FLAGS, f"--max_iters={steps}"]
    command += [f"--compile={compiled}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    times = [float(ms) / 1000 for ms in re.findall(r"^iter \d+: loss .* time ([\d.]+)ms", done.stdout, re.M)]
    step = statistics.median(times)
    if steps < 2000:
        return {"steps_per_s": 1 / step}
    data = open_dataset(dataset)
    model = ours_from_nanogpt(folder / "out-shakespeare-char" / "ckpt.pt")
    score = evaluate(model, data.val, data.tokenizer.token_bytes, 64, 64)
    return {"steps_per_s": 1 / step, "training_s": 2000 * step, "loss_64": score.loss}


def run_ours(name: str, flags: list[str], seed: int, dataset: str, folder: Path) -> dict[str, float]:
    out_dir = folder / f"{name}-{seed}"
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--dataset", dataset]
    command += ["--seed", str(seed), "--out_dir", str(out_dir)]
    begun = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    whole = time.perf_counter() - begun
    rows = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "tokens_per_s" in row]
    settings = read_toml(str(out_dir / "settings.toml"))
    tokens = settings["batch_size"] * settings["block_size"]
    model, data = load_model(out_dir, "last")[0], open_dataset(dataset)
    begun = time.perf_counter()
    score = evaluate(model, data.val, data.tokenizer.token_bytes, 64, 64)
    return {
        "steps_per_s": statistics.median(row["tokens_per_s"] for row in trained) / tokens,
        "training_s": [row["elapsed"] for row in rows if "elapsed" in row][-1],
        "loss_64": score.loss,
        "evaluation_s": time.perf_counter() - begun,
        "loss": rows[-1]["val_loss"],
        "whole_s": whole,
    }


def pairs(arguments: argparse.Namespace, folder: Path, flags: list[str], dataset: str) -> dict[str, object]:
    """Steps a second of 300 steps in every round, and ours over theirs, compiled ones without their compilation."""
    flags = [*flags, "--max_steps", "300", "--eval_interval", "999"]
    rounds: list[dict[str, float]] = []
    for seed in range(1, arguments.pairs + 1):
        rates = {}
        for how in ("eager", "compiled")[: 1 + arguments.compile]:
            compiled = how == "compiled"
            theirs = run_nanogpt(folder / "nanoGPT", seed, dataset, 300, compiled)
            ours = run_ours(f"pair-{how}", flags + ["--compile"] * compiled, seed, dataset, folder)
            rates |= {f"nanogpt {how}": theirs["steps_per_s"], f"ours {how}": ours["steps_per_s"]}
        rounds.append(rates)
        print(json.dumps(rates), file=sys.stderr, flush=True)
    beside = [("eager", "eager"), ("compiled", "eager"), ("compiled", "compiled")][: 1 + 2 * arguments.compile]
    ratios = {}
    for ours_how, theirs_how in beside:
        values = [rates[f"ours {ours_how}"] / rates[f"nanogpt {theirs_how}"] for rates in rounds]
        ratios[f"ours {ours_how} / nanogpt {theirs_how}"] = {"median": statistics.median(values), "rounds": values}
    return {"date": time.strftime("%Y-%m-%d"), "ratios": ratios, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--text", type=Path, required=True, help="tinyshakespeare, 1,115,394 characters")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=0, help="only the speed, in so many rounds of 300 steps each")
    parser.add_argument("--compile", action="store_true", help="in these rounds both compiled, too")
    parser.add_argument("--dtype", default="float32", help="of thorough")
    parser.add_argument("--short", type=int, default=700, help="steps of the default settings' short run")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS[:-1])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(arguments.nanogpt, folder / "nanoGPT", ignore=shutil.ignore_patterns(".git", "out-*"))
        shakespeare = folder / "nanoGPT" / "data" / "shakespeare_char"
        shutil.copy(arguments.text, shakespeare / "input.txt")
        subprocess.run([sys.executable, "prepare.py"], cwd=shakespeare, check=True, capture_output=True)
        dataset = str(folder / "tinyshakespeare")
        prepare = [sys.executable, str(ROOT / "prepare.py"), dataset, "--files", str(arguments.text)]
        subprocess.run(prepare, check=True, capture_output=True)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.runs}
        ours = [str(ROOT / "config/nanogpt-cpu.toml"), "--dataset", dataset]
        if arguments.pairs:
            print(json.dumps(pairs(arguments, folder, ours, dataset), indent=1))
            return
        for seed in range(1, arguments.seeds + 1):
            flags = {"ours": ours, "default_short": ["--max_steps", str(arguments.short)], "default": [],
                     "fast": [str(ROOT / "config/fast.toml")],
                     "thorough": [str(ROOT / "config/thorough.toml"), "--dtype", arguments.dtype]}  # fmt: skip
            for name, values in runs.items():
                nanogpt = name == "nanogpt"
                values.append(
                    run_nanogpt(folder / "nanoGPT", seed, dataset) if nanogpt
                    else run_ours(name, flags[name], seed, dataset, folder)
                )  # fmt: skip
            print(json.dumps({name: values[-1] for name, values in runs.items()}), file=sys.stderr, flush=True)
    mean = {
        name: {key: statistics.mean(run[key] for run in values) for key in values[0]} for name, values in runs.items()
    }
    ratio = None
    if {"nanogpt", "fast"} <= runs.keys():
        seeds = zip(runs["nanogpt"], runs["fast"], strict=True)
        ratio = statistics.median(a["training_s"] / (b["training_s"] + b["evaluation_s"]) for a, b in seeds)
    machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
               "cores": os.cpu_count(), "torch": torch.__version__, "short_steps": arguments.short}  # fmt: skip
    results = {"date": time.strftime("%Y-%m-%d"), "nanogpt / fast": ratio, "mean": mean, "runs": runs}
    print(json.dumps({"machine": machine, **results}, indent=1))


if __name__ == "__main__":
    main()
