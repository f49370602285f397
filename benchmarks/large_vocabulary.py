"""The loss of a large vocabulary, with all logits at once and in slices: seconds, memory, and how far they differ.

    python -m benchmarks.large_vocabulary [--rounds 5] > benchmarks/large_vocabulary.json

The output head alone, forward and backward: 1,024 tokens of width 768 and 50,257 ids, in float32; then each once more
in a process of its own for its peak memory, less what the process held before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.speed import peak_mb
from model import tokens_at_once

TOKENS, WIDTH, VOCABULARY = 1024, 768, 50257


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.empty(VOCABULARY, WIDTH).normal_(0, 0.02, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


def sliced(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As GPT.forward does it."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=tokens_at_once(VOCABULARY), chunking_method=None)
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


WAYS = {"plain": plain, "sliced": sliced}


def once(way: str) -> tuple[float, list[Tensor]]:
    hidden, weight, targets = inputs()
    begun = time.perf_counter()
    loss = WAYS[way](hidden, weight, targets)
    loss.backward()
    seconds = time.perf_counter() - begun
    assert hidden.grad is not None and weight.grad is not None
    return seconds, [loss.detach(), hidden.grad, weight.grad]


def peak_of(way: str) -> float:
    code = f"import benchmarks.large_vocabulary as b; b.print_peak({way!r})"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def print_peak(way: str) -> None:
    hidden, weight, targets = inputs()
    before = peak_mb()
    WAYS[way](hidden, weight, targets).backward()
    print(peak_mb() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {"plain": [], "sliced": []}
    results: dict[str, list[Tensor]] = {}
    for number in range(rounds + 1):  # the first does not count
        for way in WAYS:
            seconds, results[way] = once(way)
            times[way] += [seconds] if number else []
    parts = zip(("loss", "gradient of the input", "gradient of the weight"), *results.values(), strict=True)
    print(json.dumps({
        "date": time.strftime("%Y-%m-%d"), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "tokens": TOKENS, "width": WIDTH, "vocabulary": VOCABULARY, "tokens_at_once": tokens_at_once(VOCABULARY),
        "seconds": times,
        "ratio": statistics.median(b / a for a, b in zip(times["plain"], times["sliced"], strict=True)),
        "relative_difference": {name: ((a - b).norm() / a.norm()).item() for name, a, b in parts},
        "peak_mb": {way: peak_of(way) for way in WAYS},
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
