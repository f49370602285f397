"""Train designs one after the other and print a table: parameters, cache, loss and speed.

    python -m benchmarks.designs config/single-head.toml config/mha.toml config/mqa.toml --seeds 1 --out_dir runs/table

A finished run is not repeated. tokens/s is the median over a run, training alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from model import GPT, ModelConfig
from runtime.settings import build, read_toml

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("designs", nargs="+", type=Path)
    parser.add_argument("--seeds", nargs="+", default=["1"])
    parser.add_argument("--dataset", default="shakespeare")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/designs"))
    arguments = parser.parse_args()
    print("| design | parameters | cache bytes/token | seed | val loss | bits/byte | tokens/s | training s |")
    print("|---|---|---|---|---|---|---|---|")
    for design in arguments.designs:
        for seed in arguments.seeds:
            run = arguments.out_dir / f"{arguments.dataset}-{design.stem}-{seed}"
            if not (run / "last" / "meta.json").is_file():
                command = [sys.executable, str(ROOT / "train.py"), str(design), "--seed", seed]
                command += ["--dataset", arguments.dataset, "--out_dir", str(run)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            values = {k: v for k, v in read_toml(str(run / "settings.toml")).items()
                      if k in ModelConfig.__dataclass_fields__}  # fmt: skip
            with torch.device("meta"):
                model = GPT(build((ModelConfig,), values)[0])
            speed = statistics.median(row["tokens_per_s"] for row in rows if "tokens_per_s" in row)
            seconds = [row["elapsed"] for row in rows if "elapsed" in row][-1]
            print(
                f"| {design.stem} | {model.num_parameters():,} | {model.cache_bytes_per_token():,} | {seed} | "
                f"{rows[-1]['val_loss']:.4f} | {rows[-1]['val_bits_per_byte']:.4f} | {speed:,.0f} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
