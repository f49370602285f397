"""The report says what the figures say, fetches nothing, runs nothing of what it is told, and works in a browser."""

import contextlib
import io
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from lab import charts, report
from lab.stats import analyse

CHROMIUM = shutil.which("chromium")
FIVE = {"single-head": (1, 1, 0.09), "mha": (8, 8, 0.0), "mha-16": (16, 16, 0.014), "gqa-2": (8, 2, 0.0), "mqa": (8, 1, 0.013)}
AWKWARD = '</script><b>"x"&|`*'


def fs(median):
    return {"median": median, "low": median * 0.95, "high": median * 1.04}


def make_results(folder, designs=FIVE, seeds=(1, 2, 3), baseline="mha", speed=True, rates=False, **changes):
    """results.json's content for {name: (n_head, n_kv_head, effect on the loss)}, statistics by analyse()."""
    luck, runs = random.Random(1), {}
    for index, (name, (*_, effect)) in enumerate(designs.items()):
        runs[name] = {}
        for seed in seeds:
            path = runs[name][seed] = Path(folder, f"{index}-{seed}.jsonl")
            rows = []
            for step in (*range(40, 401, 40), 400):
                progress = min(1, step / 300)
                loss = 1.70 + (1 - progress) ** 2 + effect * progress + 0.01 * seed + luck.gauss(0, 0.003)
                rows.append({"step": step, "tokens": step * 1024, "val_loss": loss, "val_bits_per_byte": loss / 0.693,
                             "val_tokens": 99968})  # fmt: skip
            rows[-1]["val_tokens"] = 499809
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    analysis = analyse(runs, baseline)
    entries = []
    for name, (n_head, n_kv_head, _) in designs.items():
        size = 2 * 3 * n_kv_head * (128 // n_head) * 4
        settings = {"n_head": n_head, "n_kv_head": n_kv_head, "head_dim": 128 // n_head, "n_embd": 128}
        own = {"n_head": designs[baseline][0], "n_kv_head": designs[baseline][1], "head_dim": 128 // designs[baseline][0]}
        finished = [{"seed": s, "folder": f"x-{s}", "loss": 1.7, "bits_per_byte": 2.4} for s in runs[name]]
        entries.append({
            "name": name, "files": [], "is_baseline": name == baseline, "runs": finished,
            "changes": {k: v for k, v in settings.items() if own.get(k, v) != v}, "settings": settings | {"norm": "layernorm"},
            **settings, "learning_rate": 0.003, "parameters": 512384 + 3 * 2 * 128 * n_kv_head * (128 // n_head),
            "parameters_without_embeddings": 490000, "flops_per_token": 3000000 + 6 * 6 * 128 * n_kv_head * (128 // n_head),
            "cache_bytes_per_token": size, "cache_bytes_allocated": float(size),
            "sample": f"ROMEO:\n  {AWKWARD} from {name}", **analysis["designs"][name],
        })  # fmt: skip
    sizes = [e["cache_bytes_per_token"] for e in entries]
    groups = [[e["name"] for e in entries if e["cache_bytes_per_token"] == size] for size in sorted(set(sizes))]
    found = {
        "format": 1, "command": "python compare.py <a> & b", "created": "2026-11-30T01:20:00+00:00", "git_commit": None,
        "versions": {"torch": "2.13.0"}, "machine": {"cpu": "Xeon <1>", "cores": 2, "memory_gb": 23.4, "system": "Linux"},
        "threads": 2, "jobs": 1, "first_look": False,
        "dataset": {"name": "shakespeare", "tokenizer": "char", "train_tokens": 4.8e6, "val_tokens": 499809},
        "max_steps": 400, "tokens_per_step": 1024, "tokens_seen": 409600, "share_of_pass": 0.085, "block_size": 128,
        "seeds": list(seeds), "baseline": baseline, "match": "width", "vary": {}, "held_equal": ["data: the same"],
        "adjusted": [], "notes": ["AdamW and one learning rate for all."], "designs": entries,
        "pooled": analysis["pooled"], "failures": [], "rates": None, "equal_cache": [g for g in groups if len(g) > 1],
        "speed": make_speed(entries) if speed else None, "speed_note": None if speed else "two jobs ran at once",
    }  # fmt: skip
    if rates:
        names = list(designs)
        common = [{"name": e["name"], **{k: e["loss"][k] for k in ("mean", "sd")}, "difference": (e["against_baseline"] or {}).get("mean"),
                   **{k: (e["against_baseline"] or {}).get(k) for k in ("interval", "p_holm", "verdict")}} for e in entries]
        found["rates"] = {"seed": 0, "tried": [0.0015, 0.003, 0.006], "common": 0.003,
                          "losses": {n: {"0.0015": 1.9, "0.003": 1.8, "0.006": None} for n in names},
                          "best": dict.fromkeys(names, 0.003), "order": names, "order_at_common": names[::-1],
                          "differs": True, "at_common": common}  # fmt: skip
    return found | changes


def make_speed(entries):
    """Training slows with the number of heads; decoding speeds up with fewer cache bytes, from batch x context 768 on."""
    designs = {}
    for e in entries:
        ratio = 3072 / e["cache_bytes_per_token"]
        decode = []
        for batch, context in ((1, 128), (1, 512), (1, 2048), (16, 128), (16, 512), (16, 2048)):
            large = batch * context >= 768
            rate = batch * 700 * (1 if not large else ratio ** (0.5 if batch > 1 else 0.1)) / (1 + context / 4096)
            decode.append({"batch": batch, "context": context, "tokens_per_s": fs(rate), "ms_per_step": fs(1000 * batch / rate),
                           "cache_mb": batch * context * e["cache_bytes_per_token"] / 1e6, "gb_per_s": 11.0,
                           "share_of_read": 0.4, "gain_expected": large})  # fmt: skip
        designs[e["name"]] = {
            "training": {"tokens_per_s": fs(23000 / (1 + 0.03 * e["n_head"])), "gflops": 60.0, "share_of_matmul": 0.4},
            "prefill": [{"batch": 1, "context": 128, "tokens_per_s": fs(50000), "gflops": 50.0, "share_of_matmul": 0.3}],
            "decode": decode,
            "decode_attention": [{"batch": 16, "context": 2048, "caches": 3, "ms": fs(6.8 / ratio**0.6), "gb_per_s": 20.0,
                                  "share_of_ideal": 0.5, "sdpa_ms": fs(7.0)}],
            "peak_memory_mb": {"start": 250.0, "training": 700.0, "decoding": 420.0},
        }  # fmt: skip
    return {"threads": 2, "device": "cpu", "rounds": 5, "batch": [1, 16], "context": [128, 512, 2048], "train_batch": 8,
            "limits": {"matmul_gflops": 150.0, "read_gb_per_s": 27.0, "matmul": "float32 2048 x 2048", "read": "1 GB"},
            "designs": designs, "decode_gain": "where batch x context < 6 n_embd no gain is to be expected."}  # fmt: skip
