"""Seconds from `python train.py` to the end of its first step: imports, data, model, log. Prints JSON.

    python -m benchmarks.start [--rounds 5] [flags of train.py]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def first_step(flags: list[str], folder: Path) -> float:
    """Wall time until the first step's line is in the log; the process is then ended."""
    begun = time.perf_counter()
    command = [sys.executable, "train.py", *flags, "--log_interval", "1", "--out_dir", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        log = folder / "metrics.jsonl"
        while not (log.exists() and log.stat().st_size):
            if process.poll() is not None:
                raise SystemExit(f"train.py ended with {process.returncode} before its first step")
            time.sleep(0.005)
        seconds = time.perf_counter() - begun
        process.kill()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        times = [first_step(flags, Path(name) / str(number)) for number in range(arguments.rounds)]
    command = [sys.executable, "-c", IMPORT]
    imports = [float(subprocess.check_output(command, cwd=ROOT)) for _ in range(arguments.rounds)]
    print(json.dumps({
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "flags": flags,
        "import_train_s": {"median": statistics.median(imports), "all": imports},
        "first_step_s": {"median": statistics.median(times), "all": times},
    }, indent=1))  # fmt: skip


IMPORT = "import time; begun = time.perf_counter(); import train; print(time.perf_counter() - begun)"

if __name__ == "__main__":
    main()
