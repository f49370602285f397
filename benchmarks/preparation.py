"""Text to token files by prepare.py, and the way nanoGPT's openwebtext script does it, in turn. Prints JSON.

    python -m benchmarks.preparation TEXT [--megabytes 100] [--workers 1 2] [--rounds 3]

TEXT is cut into documents of 3,000 characters, repeated under running numbers up to the size. Both use one byte-pair
tokenizer of GPT-2's kind with up to 50,257 ids, learned from TEXT beforehand, since its own vocabulary has to be
downloaded. The other way: datasets.load_dataset, a split, map with one document a call, ids into a memmap in 1,024
pieces; its cache is a fresh folder each time.
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
DOCUMENT = 3000  # characters

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
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
        subprocess.run(learned, cwd=ROOT, check=True, capture_output=True)
        results = []
        for workers in arguments.workers:
            times: dict[str, list[float]] = {"manyheads": [], "datasets.map": []}
            for turn in range(arguments.rounds):
                out = folder / f"{workers}-{turn}"
                out.mkdir()
                ways = {
                    "manyheads": ["prepare.py", str(out / "ours"), "--files", str(source), "--like", str(tokens),
                                  "--workers", str(workers)],
                    "datasets.map": ["-c", THEIRS, str(source), str(out), str(tokens), str(workers)],
                }  # fmt: skip
                for way, words in ways.items():
                    begun = time.perf_counter()
                    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
                    times[way].append(time.perf_counter() - begun)
            ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
            results.append({"workers": workers, "seconds": times, "ratio": ratio})
        size = source.stat().st_size / 1e6
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "megabytes": size,
                      "documents": number, "results": results}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
