"""What pairing is worth, and how often the verdict is wrong when nothing differs.

    python -m benchmarks.pairing --dataset tinyshakespeare --out_dir runs/pairing > benchmarks/pairing.json

Pairing: MHA against MQA over ten seeds, the MQA runs with the same data order and initial values as the MHA run of
that seed, with only one of them the same, and with neither (the MHA run of the next seed); the standard deviation of
the difference in loss is what decides how many seeds a comparison needs. A real null: MHA against MHA from other
initial values on the same data, twenty seeds; the share of sets of 3, 5 and 10 of these seeds for which the verdict
would be "better" or "worse" (all sets of 3, two thousand drawn ones of the others; sets overlap, so that the shares
are no more exact than twenty differences are). A run that is finished is not repeated.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
FAR = 1000  # distance to the seeds of runs that share nothing


def final_loss(folder: Path) -> float | None:
    if not (folder / "metrics.jsonl").exists():
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    whole = "val_loss" in last and len([row for row in rows if "val_loss" in row]) >= 2
    return last["val_loss"] if whole else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="tinyshakespeare")
    parser.add_argument("--max_steps", type=int, default=160)
    parser.add_argument("--out_dir", type=Path, default=Path("runs/pairing"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, on one thread each")
    arguments = parser.parse_args()

    def train(kind: str, design: str, seed: int, data: int, init: int) -> float:
        folder = arguments.out_dir / f"{kind}-{seed}"
        if final_loss(folder) is None:
            command = [sys.executable, str(ROOT / "train.py"), str(ROOT / f"config/{design}.toml"), "--threads", "1",
                       "--seed", str(data), "--init_seed", str(init), "--dataset", arguments.dataset, "--max_steps",
                       str(arguments.max_steps), "--eval_interval", str(arguments.max_steps), "--eval_tokens", "1280",
                       "--out_dir", str(folder), "--overwrite"]  # fmt: skip
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return final_loss(folder)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        def all_of(kind: str, design: str, seeds: range, data: int = 0, init: int = 0) -> list[float]:
            return list(pool.map(lambda s: train(kind, design, s, data + s, init + s), seeds))

        ten = range(1, 11)
        mha = all_of("mha", "mha", range(1, 21))
        pairs = {
            "same data and initial values": all_of("mqa", "mqa", ten),
            "same data": all_of("mqa-init", "mqa", ten, init=FAR),
            "same initial values": all_of("mqa-data", "mqa", ten, data=2 * FAR),
        }
        null = all_of("mha-init", "mha", range(1, 21), init=FAR)
    differences = {name: [b - a for a, b in zip(mha, losses, strict=False)] for name, losses in pairs.items()}
    both = pairs["same data and initial values"]
    differences["neither"] = [b - a for a, b in zip(mha[1:10] + mha[:1], both, strict=True)]
    zeros = [b - a for a, b in zip(mha, null, strict=True)]
    shares = {}
    draw = random.Random(0)
    for n in (3, 5, 10):
        sets = list(itertools.combinations(zeros, 3)) if n == 3 else [draw.sample(zeros, n) for _ in range(2000)]
        shares[str(n)] = statistics.mean(float(stats.ttest_1samp(one, 0).pvalue < 0.05) for one in sets)
    print(json.dumps({
        "max_steps": arguments.max_steps, "dataset": arguments.dataset,
        "sd_of_mha_over_seeds": statistics.stdev(mha[:10]),
        "pairing": {name: {"mean": statistics.mean(d), "sd": statistics.stdev(d), "differences": d}
                    for name, d in differences.items()},
        "null": {"mean": statistics.mean(zeros), "sd": statistics.stdev(zeros), "differences": zeros,
                 "p_all_20": float(stats.ttest_1samp(zeros, 0).pvalue), "share_of_false_verdicts": shares},
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
