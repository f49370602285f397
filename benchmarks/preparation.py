"""Text to token files by prepare.py, and the way nanoGPT's openwebtext script does it, in turn. Prints JSON.

    python -m benchmarks.preparation TEXT [--megabytes 100] [--workers 1 2] [--rounds 3] [--ways manyheads datasets.map]
    python -m benchmarks.preparation TEXT --megabytes 1000 --workers 2 --rounds 1 --ways gpt2 char      # its memory

TEXT is cut into documents of 3,000 characters, repeated under running numbers up to the size. The first two ways use
one byte-pair tokenizer of GPT-2's kind with up to 50,257 ids, learned from TEXT beforehand, since its own vocabulary
has to be downloaded; `gpt2` and `char` are prepare.py with these tokenizers. datasets.map: load_dataset, a split, map
with one document a call, ids into a memmap in 1,024 pieces; its cache is a fresh folder each time. peak_mb is the
largest memory (PSS, 10^6 bytes) of the process and all its children together, looked at ten times a second.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory import memory

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = 3000  # characters
WAYS = ["manyheads", "datasets.map", "gpt2", "char"]

THEIRS = """
import sys
import numpy as np
from datasets import load_dataset
from data import open_tokenizer

source, out, tokens, workers = sys.argv[1:]
tokenizer = open_tokenizer(tokens)
encoding = tokenizer._encoding

def process(example):
    ids = encoding.encode_ordinary(example["text"])
    ids.append(tokenizer.end_id)
    return {"ids": ids, "len": len(ids)}

dataset = load_dataset("json", data_files=source, split="train", cache_dir=out + "/cache")
splits = dataset.train_test_split(test_size=0.1, seed=1, shuffle=True)
splits = splits.map(process, remove_columns=["text"], num_proc=int(workers))
for split, part in splits.items():
    array = np.memmap(f"{out}/{split}.bin", dtype=np.uint16, mode="w+", shape=(sum(part["len"]),))
    at, shards = 0, min(1024, len(part))
    for number in range(shards):
        batch = part.shard(num_shards=shards, index=number, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"])
        array[at : at + len(ids)] = ids
        at += len(ids)
    array.flush()
"""


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    children = [int(c) for path in Path(f"/proc/{pid}/task").glob("*/children") for c in path.read_text().split()]
    return [pid, *(member for child in children for member in family(child))]


def timed(words: list[str]) -> tuple[float, float]:
    """Seconds and peak memory (MB) of python with these words."""
    begun, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=said, stderr=said
    ) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError):  # one of them has just ended
                peak = max(peak, sum(memory(member).get("pss", 0.0) for member in family(process.pid)))
            time.sleep(0.1)
        seconds = time.perf_counter() - begun
        if process.returncode:
            said.seek(0)
            sys.exit(said.read())
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:2])
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, tokens = folder / "text.jsonl", folder / "tokens"
        with open(source, "w", encoding="utf-8") as file:
            number = 0
            while file.tell() < arguments.megabytes * 1_000_000:
                start = number * DOCUMENT % (len(text) - DOCUMENT)
                file.write(json.dumps({"text": f"{number} {text[start : start + DOCUMENT]}"}) + "\n")
                number += 1
        halves = [folder / "a.txt", folder / "b.txt"]  # of several texts, so that there is an end-of-text token
        for half, part in zip(halves, (text[: len(text) // 2], text[len(text) // 2 :]), strict=True):
            half.write_text(part, encoding="utf-8")
        learned = [sys.executable, "prepare.py", str(tokens), "--files", *map(str, halves), "--val_fraction", "0.5",
                   "--tokenizer", "bpe", "--vocab_size", "50257"]  # fmt: skip
        if set(WAYS[:2]) & set(arguments.ways):
            timed(learned)
        results = []
        for workers in arguments.workers:
            measured: dict[str, list[tuple[float, float]]] = {way: [] for way in arguments.ways}
            for turn in range(arguments.rounds):
                out = folder / f"{workers}-{turn}"
                out.mkdir()
                ours = ["prepare.py", str(out / "ours"), "--files", str(source), "--workers", str(workers)]
                ways = {
                    "manyheads": [*ours, "--like", str(tokens)],
                    "datasets.map": ["-c", THEIRS, str(source), str(out), str(tokens), str(workers)],
                    "gpt2": [*ours, "--tokenizer", "gpt2"],
                    "char": [*ours, "--tokenizer", "char"],
                }
                for way in arguments.ways:
                    measured[way].append(timed(ways[way]))
                shutil.rmtree(out)
            result: dict[str, Any] = {
                "workers": workers,
                "seconds": {way: [seconds for seconds, _ in pairs] for way, pairs in measured.items()},
                "peak_mb": {way: [round(peak, 1) for _, peak in pairs] for way, pairs in measured.items()},
            }
            if set(WAYS[:2]) <= measured.keys():
                pairs = zip(*(result["seconds"][way] for way in WAYS[:2]), strict=True)
                result["ratio"] = statistics.median(b / a for a, b in pairs)
            results.append(result)
        size = source.stat().st_size / 1e6
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "megabytes": size,
                      "documents": number, "results": results}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
