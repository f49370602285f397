"""The GPT-2 124M shape on an accelerator: training beside nanoGPT, and decoding with fewer K/V heads. Prints JSON.

    python -m benchmarks.accelerator [--nanogpt PATH/TO/nanoGPT] [--seconds 60] > benchmarks/accelerator.json
    python -m benchmarks.accelerator --small        # a few seconds on a CPU, to see that it runs

It needs torch alone (2.11 or newer). Training: bfloat16 autocast, torch.compile, fused AdamW, random tokens, in turns
of a third of the time each; the first steps, which compile, are left out; the share is of this device's own bfloat16
matrix product. Decoding: one token a sequence over a full cache in bfloat16, attention by PyTorch's kernels, for 12, 4
and 1 K/V heads; where memory does not suffice, that is said.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import peers
from model import GPT, ModelConfig
from runtime.optim import make_optimizer

GPT2 = ModelConfig(
    n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, activation="gelu_tanh", positions="learned",
    init="gpt2", tie_embeddings=True,
)  # fmt: skip  # config/systems/gpt2.toml without biases and with nanoGPT's padded vocabulary
SMALL = replace(GPT2, n_layer=2, n_head=12, n_embd=96, head_dim=None, d_ff=None, n_kv_head=None, block_size=64)
ADAMW = SimpleNamespace(optimizer="adamw", learning_rate=6e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, ema_decay=0.0)


def waited(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, the device's work included."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def matmul_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a bfloat16 matrix product, the best of several tries."""
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / min(waited(lambda: a @ b, device) for _ in range(10))


def trainer(model: Any, optimizer: Any, loss_of: Any, ids: torch.Tensor, device: torch.device) -> Callable[[], None]:
    compiled, x, y = torch.compile(model), ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(compiled, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def training(config: ModelConfig, batch: int, seconds: float, nanogpt: Path | None, device: torch.device) -> Any:
    torch.set_float32_matmul_precision("high")
    ids = torch.randint(config.vocab_size or 0, (batch, config.block_size + 1), device=device)
    model = GPT(config).to(device)
    steps = {"manyheads": trainer(model, make_optimizer(model, ADAMW), lambda m, x, y: m(x, y), ids, device)}
    if nanogpt:
        theirs = peers.nanogpt(nanogpt)
        size = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
        with contextlib.redirect_stdout(sys.stderr):  # it prints its size
            other = theirs.GPT(theirs.GPTConfig(**size, dropout=0.0, bias=False)).to(device)
            optimizer = other.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
        steps["nanogpt"] = trainer(other, optimizer, lambda m, x, y: m(x, y)[1], ids, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # compile and warm up
        for _ in range(5):
            waited(step, device)
    for _ in range(3):
        for name, step in steps.items():
            until = time.perf_counter() + seconds / 3
            while time.perf_counter() < until:
                times[name].append(waited(step, device))
    rates = {name: batch * config.block_size / statistics.median(values) for name, values in times.items()}
    return {
        "tokens_per_s": rates,
        "ratio": rates["manyheads"] / rates["nanogpt"] if nanogpt else None,
        "flops_per_token": model.flops_per_token(causal=True),
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
    }


@torch.inference_mode()
def decoding(config: ModelConfig, batches: list[int], contexts: list[int], device: torch.device) -> list[Any]:
    rows: list[Any] = []
    for context in contexts:
        for batch in batches:
            row: dict[str, Any] = {"batch": batch, "context": context, "ms": {}}
            for n_kv_head in (config.n_head, config.n_head // 3, 1):
                try:
                    row["ms"][n_kv_head] = 1e3 * one_token(replace(config, n_kv_head=n_kv_head), batch, context, device)
                except torch.OutOfMemoryError:
                    row["ms"][n_kv_head] = "out of memory"
            rows.append(row)
    return rows


def one_token(config: ModelConfig, batch: int, context: int, device: torch.device) -> float:
    """Seconds to decode one token a sequence where the cache holds context - 1; the median of 20."""
    model = GPT(replace(config, block_size=context)).to(device, torch.bfloat16).eval()
    cache, ids = model.new_cache(batch), torch.zeros(batch, 1, dtype=torch.long, device=device)

    def step() -> None:
        for layer in cache.layers:
            layer.length = context - 1
        model(ids, cache=cache)

    for _ in range(3):
        waited(step, device)
    return statistics.median(waited(step, device) for _ in range(20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--seconds", type=float, default=60, help="of training, for each program")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--small", action="store_true", help="a small model and few steps")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = arguments.small
    config, batch, seconds = (SMALL, 2, 1) if small else (GPT2, arguments.batch, arguments.seconds)
    rate = matmul_rate(device, 256 if small else 8192)
    trained = training(config, batch, seconds, arguments.nanogpt, device)
    reached = trained["tokens_per_s"]["manyheads"] * trained["flops_per_token"]
    batches, contexts = ([1, 2], [64]) if small else ([1, 4, 16, 64], [512, 2048, 8192, 16384])
    print(json.dumps({
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"), "matmul_tflops": rate / 1e12, "training": trained,
        "share_of_matmul": reached / rate, "decoding": decoding(config, batches, contexts, device),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
