"""Tokens a second in decoding, one sample, float32: beside Hugging Face's generate and beside nanoGPT's.

    python -m benchmarks.decoding [--nanogpt PATH/TO/nanoGPT [--compile]] [--rounds 5] > benchmarks/decoding.json

Two parts, in each of which the two programs take turns. The GPT-2 124M shape with random weights, greedy, after a
prompt of 512 tokens (the time of 33 tokens less that of one, so without the prompt), with the share of what reading
all weights once a token would allow. And 500 tokens from one, temperature 0.8, by the default model at block_size 256
and by nanoGPT's GPT of the same layers, heads and width, as its sample.py calls it; with --compile also by our model
compiled, beside nanoGPT as it is, with the seconds until its first text (less where PyTorch's cache holds the code).
Beyond block_size the two do not the same: nanoGPT's window moves by one token, ours by half a context, and keeps its
cache between. The first part needs transformers.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import nanogpt
from lab.speed import interleave, machine_limits, weight_bytes
from model import GPT, ModelConfig
from runtime.generate import generate, sample_generator
from runtime.settings import build, read_toml

ROOT = Path(__file__).resolve().parent.parent
PROMPT, NEW, SAMPLE = 512, 32, 500


def ours(model: GPT, prompt: list[int], count: int, temperature: float = 0.0, top_k: int | None = None) -> None:
    for _ in generate(model, prompt, count, [sample_generator(1, 0)], temperature, top_k):
        pass


def gpt2_shape(rounds: int) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT(build((ModelConfig,), read_toml(str(ROOT / "config/systems/gpt2.toml")))[0]).eval()
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    prompt = torch.randint(50257, (1, PROMPT), generator=torch.Generator().manual_seed(1))

    def hugging_face(count: int) -> None:
        mask = torch.ones_like(prompt)
        theirs.generate(prompt, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                        pad_token_id=0)  # fmt: skip

    calls = {
        "manyheads, 1": lambda: ours(model, prompt[0].tolist(), 1),
        "hugging face, 1": lambda: hugging_face(1),
        "manyheads": lambda: ours(model, prompt[0].tolist(), 1 + NEW),
        "hugging face": lambda: hugging_face(1 + NEW),
    }
    times = interleave(calls, rounds)
    rate = {}
    for name in ("manyheads", "hugging face"):
        rate[name] = [NEW / (long - short) for long, short in zip(times[name], times[f"{name}, 1"], strict=True)]
    limits = machine_limits(torch.get_num_threads())
    limit = 1e9 * limits["read_gb_per_s"] / weight_bytes(model)
    return {
        "what": f"GPT-2 124M shape, batch 1, float32, {NEW} tokens after {PROMPT}",
        "tokens_per_s": rate,
        "ratio": statistics.median(a / b for a, b in zip(*rate.values(), strict=True)),
        "read_gb_per_s": limits["read_gb_per_s"],
        "tokens_per_s_by_reading_weights": limit,
        "share_of_limit": statistics.median(rate["manyheads"]) / limit,
    }


def small_model(folder: Path, rounds: int, compiled: bool) -> dict[str, Any]:
    theirs_model = nanogpt(folder)
    config = ModelConfig(block_size=256, vocab_size=65)
    model = GPT(config).eval()
    size = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    with contextlib.redirect_stdout(sys.stderr):  # it prints its size
        theirs = theirs_model.GPT(theirs_model.GPTConfig(**size, dropout=0.0, bias=False)).eval()
    start, threads = torch.zeros(1, 1, dtype=torch.long), torch.get_num_threads()

    def small(model: GPT) -> None:
        torch.set_num_threads(1)  # as sample.py does with a model of this size
        ours(model, [0], SAMPLE, 0.8, 200)
        torch.set_num_threads(threads)

    def nano() -> None:
        with torch.no_grad():
            theirs.generate(start, SAMPLE, temperature=0.8, top_k=200)

    calls = {"manyheads": lambda: small(model), "nanogpt": nano}
    first = None
    if compiled:
        copy = GPT(config).eval()
        copy.hidden = torch.compile(copy.hidden, dynamic=True)
        calls["manyheads compiled"] = lambda: small(copy)
        begun = time.perf_counter()
        calls["manyheads compiled"]()
        first = time.perf_counter() - begun
    times = interleave(calls, rounds)
    return {
        "what": f"{SAMPLE} tokens, 3 layers, 8 heads, width 128, block_size 256",
        "parameters": {"manyheads": model.num_parameters(), "nanogpt": sum(p.numel() for p in theirs.parameters())},
        "tokens_per_s": {name: [SAMPLE / t for t in values] for name, values in times.items()},
        "ratio": {
            name: statistics.median(b / a for a, b in zip(times[name], times["nanogpt"], strict=True))
            for name in calls
            if name != "nanogpt"
        },
        "seconds_to_compile_and_write_the_first_text": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, for the second part")
    parser.add_argument("--compile", action="store_true", help="in that part also our model compiled")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    parts = [gpt2_shape(arguments.rounds)]
    if arguments.nanogpt:
        parts.append(small_model(arguments.nanogpt, arguments.rounds, arguments.compile))
    machine = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps({"machine": machine, "date": time.strftime("%Y-%m-%d"), "parts": parts}, indent=1))


if __name__ == "__main__":
    main()
