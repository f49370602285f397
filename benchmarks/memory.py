"""Memory of train.py on a large token file, beside its log lines. Prints JSON.

    python -m benchmarks.memory [--gigabytes 4] [--steps 3000] [--folder FOLDER]

Random bytes are written as 16-bit ids through the project's own writer; the file is deleted afterwards. A tiny model
(one layer of width 16) then takes steps of 64 windows of 64 tokens. Before the first one train.py reads the file twice
from end to end, to see that it is whole and that its ids are in the vocabulary.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import data
from data.tokenfile import TokenWriter
from data.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 10_000_000  # ids


def memory(pid: int | str = "self") -> dict[str, float]:
    """What a process has in memory now, in MB (10^6 bytes); {} where /proc does not tell or the process is gone.

    `private` is what it alone has, `pss` counts pages shared by n processes as 1/n, `rss` all it can reach.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    private = kb["Private_Clean"] + kb["Private_Dirty"]
    return {"private": private * 1024 / 1e6, "pss": kb["Pss"] * 1024 / 1e6, "rss": kb["Rss"] * 1024 / 1e6}


def write_dataset(folder: Path, size: int) -> None:
    """A data set whose training split has `size` bytes, with a short validation split."""
    random, tokenizer = np.random.default_rng(1), ByteTokenizer()
    writers = {}
    for split, count in (("train", size // 2), ("val", 10_000)):
        with TokenWriter(folder / f"{split}.bin", 300) as writers[split]:
            for start in range(0, count, CHUNK):
                writers[split].write(random.integers(256, size=min(CHUNK, count - start), dtype=np.uint16))
    meta = {
        "format": data.FORMAT,
        "splits": {split: {"tokens": writer.count} for split, writer in writers.items()},
        "fingerprint": data.fingerprint(tokenizer, *(writer.sha256 for writer in writers.values())),
        "tokenizer": tokenizer.to_meta(),
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--folder", type=Path, help="where the file is written and deleted")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        begun = time.perf_counter()
        write_dataset(Path(name), int(arguments.gigabytes * 1e9))
        written = time.perf_counter() - begun
        command = [
            sys.executable, "-u", "train.py", "--dataset", name, "--out_dir", f"{name}/run", "--n_layer", "1",
            "--n_embd", "16", "--n_head", "2", "--block_size", "64", "--batch_size", "64", "--log_interval", "100",
            "--eval_interval", "1000000", "--save_interval", "1000000", "--device", "cpu", "--threads", "1",
            "--max_steps", str(arguments.steps + 100),
        ]  # fmt: skip
        after = {}
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout:
                if found := re.search(r"step\s+([\d,]+)", line):
                    after[int(found[1].replace(",", ""))] = {k: round(v, 1) for k, v in memory(run.pid).items()}
        size = Path(name, "train.bin").stat().st_size
    if run.returncode:
        sys.exit(run.returncode)
    print(json.dumps({
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "bytes": size,
        "seconds_to_write": round(written, 1), "mb_after_step": after, "growth_mb": {
            kind: round(after[arguments.steps][kind] - after[100][kind], 1) for kind in ("private", "rss")
        },
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
