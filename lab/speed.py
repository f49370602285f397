"""How fast designs are and how much memory they take: random weights, no data, no training to an end.

The designs take turns in every round, A B C A B C, so that a machine that slows down slows all of them; the first
calls, which touch memory for the first time, are left out. Beside a figure stands its share of what this machine
can do at all: a large matrix product for arithmetic, a read of memory that no processor cache holds for decoding.

Run as `python -m lab.speed` this is the process in which `measure` has one design's peak memory measured.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import DESIGNS
from attention.cache import KVCache
from model import GPT, ModelConfig
from runtime.errors import EnvironmentFault, UserError
from runtime.optim import make_optimizer
from runtime.settings import as_dict, build

ROOT = Path(__file__).resolve().parent.parent
LEAST_SECONDS = 0.05  # what one turn takes at least: short calls are repeated, so that the clock does not matter
LIMIT_TRIES = 7
READ_BYTES = 2**30  # more than three times the largest cache of a processor that we know of in use, 300 MB
MATMUL_SIZE = 2048
# No value changes the speed.
ADAMW = SimpleNamespace(optimizer="adamw", learning_rate=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, ema_decay=0.0)

Progress = Callable[[float, str], None]
Timed = Callable[[str, Mapping[str, Callable[[], Any]]], dict[str, list[float]]]  # what, and the calls -> seconds


def count(config: ModelConfig, cache_dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """What a design costs by count: parameters, training FLOPs and cache bytes a token; nothing is allocated.

    FLOPs as GPT.flops_per_token counts them. Cache bytes a token of a full context, by the formula, and as a cache
    would allocate them; both rounded down.
    """
    with torch.device("meta"):
        model = GPT(config).to(cache_dtype)
        cache = model.new_cache(1)
    return {
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(embeddings=False),
        "flops_per_token": model.flops_per_token(),
        "cache_bytes_per_token": model.cache_bytes_per_token(cache_dtype.itemsize),
        "cache_bytes_allocated": cache.nbytes // config.block_size,
        "cache_bytes_at_full_context": cache.nbytes,
    }


def machine_limits(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The best of several tries: GFLOP/s of a float32 matrix product, and GB/s (10^9) of a sum over 1 GiB."""
    with torch_threads(threads), torch.inference_mode():
        wait = waiter(device)
        a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device=device)
        product = min(seconds(lambda: (a @ b, wait())) for _ in range(LIMIT_TRIES))
        memory = torch.ones(READ_BYTES // 4, device=device)
        read = min(seconds(lambda: (memory.sum(), wait())) for _ in range(LIMIT_TRIES))
    return {
        "matmul_gflops": rounded(2 * MATMUL_SIZE**3 / product / 1e9),
        "read_gb_per_s": rounded(READ_BYTES / read / 1e9),
        "matmul": f"float32 matrix product {MATMUL_SIZE} x {MATMUL_SIZE}, best of {LIMIT_TRIES}",
        "read": f"float32 sum over {READ_BYTES / 2**30:g} GiB, best of {LIMIT_TRIES}",
    }


def measure(
    configs: Mapping[str, ModelConfig],
    batch: Sequence[int],
    context: Sequence[int],
    train_batch: int = 8,
    rounds: int = 5,
    progress: Progress | None = None,
    device: str = "cpu",
    threads: int | None = None,
) -> dict[str, Any]:
    """Speed and peak memory of the designs by name, over every batch size and context (tokens), in float32.

    training: forward, backward and AdamW's step on train_batch sequences of the design's own block_size.
    prefill: `context` tokens a sequence into an empty cache, logits for the last. decode: one more token a
    sequence where the cache holds context - 1, without the draw. decode_attention: of such a step only the
    attention, with a cache for every layer, and scaled_dot_product_attention on the same tensors beside it.

    A rate is {"median", "low", "high"} over the rounds. FLOPs count for a query only the keys that it may see
    (GPT.flops_per_token, causal). Bytes are those a step has to read, weights and cache; a share of the read above
    1 means that the processor's cache served it. Peak memory, of fresh processes, in MB (10^6 bytes).
    `progress` is told the share of turns done and what was last. UserError for what the memory would not hold.
    """
    check_memory(configs, batch, context, train_batch, device)
    threads, wait = threads or torch.get_num_threads(), waiter(device)
    cells = [(b, c) for b in batch for c in context]
    turns = len(configs) * (rounds + 1)  # the warm-up is one
    total, done = 1 + turns * (1 + 4 * len(cells)) + len(configs), 0

    def tick(what: str) -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done / total, what)

    def timed(what: str, calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        waited = {name: after(call, wait) for name, call in calls.items()}
        return interleave(waited, rounds, lambda name: tick(f"{what}, {name}"))

    with torch_threads(threads):
        limits = machine_limits(threads, device)
        tick("limits of the machine")
        designs: dict[str, Any] = {name: {"prefill": [], "decode": [], "decode_attention": []} for name in configs}
        for name, result in measure_training(configs, train_batch, timed, limits, device).items():
            designs[name]["training"] = result
        with torch.inference_mode():
            models = {name: decoder(config, max(context)).to(device) for name, config in configs.items()}
            for b, c in cells:
                for name, parts in measure_cell(models, b, c, timed, limits).items():
                    for part, result in parts.items():
                        designs[name][part].append({"batch": b, "context": c} | result)
            del models
    for name, config in configs.items():
        size = {"batch": max(batch), "context": max(context), "train_batch": train_batch}
        designs[name]["peak_memory_mb"] = peak_memory(name, config, size | {"device": device, "threads": threads})
        tick(f"peak memory, {name}")
    return {
        "threads": threads, "device": device, "rounds": rounds, "limits": limits, "batch": list(batch),
        "context": list(context), "train_batch": train_batch, "designs": designs,
        "decode_gain": "where batch x context < 6 n_embd a step reads more bytes of weights than even MHA has cache "
        "(with an MLP of 4 n_embd), and no gain in speed is to be expected of fewer K/V heads",
    }  # fmt: skip


def measure_training(
    configs: Mapping[str, ModelConfig], train_batch: int, timed: Timed, limits: Mapping[str, Any], device: str
) -> dict[str, dict[str, Any]]:
    """The part "training" of every design."""
    models = {name: GPT(config).to(device) for name, config in configs.items()}
    times = timed("training", {name: training_step(model, train_batch) for name, model in models.items()})
    results = {}
    for name, model in models.items():
        rate = spread(train_batch * model.config.block_size / t for t in times[name])
        results[name] = {"tokens_per_s": rate, **arithmetic(rate, model.flops_per_token(causal=True), limits)}
    return results


def measure_cell(
    models: Mapping[str, GPT], batch: int, context: int, timed: Timed, limits: Mapping[str, Any]
) -> dict[str, dict[str, dict[str, Any]]]:
    """The parts of every design that belong to one batch and context; the caches of all are there together."""
    where = f"batch {batch}, context {context}"
    caches = {name: model.new_cache(batch, context) for name, model in models.items()}
    filling = timed(f"prefill, {where}", {name: prefill(model, caches[name]) for name, model in models.items()})
    steps = timed(f"decode, {where}", {name: decode(model, caches[name]) for name, model in models.items()})
    calls = {}
    for name, model in models.items():
        calls[name], calls[f"{name}, sdpa"] = decode_attention(model, caches[name])
    attending = timed(f"attention, {where}", calls)
    results = {}
    for name, model in models.items():
        cache, peak = caches[name].nbytes, limits["read_gb_per_s"]
        rate = spread(batch * context / t for t in filling[name])
        read = (weight_bytes(model) + cache) / statistics.median(steps[name]) / 1e9
        read_attending = cache / statistics.median(attending[name]) / 1e9
        results[name] = {
            "prefill": {"tokens_per_s": rate, **arithmetic(rate, prefill_flops(model, context), limits)},
            "decode": {
                "tokens_per_s": spread(batch / t for t in steps[name]),
                "ms_per_step": spread(1e3 * t for t in steps[name]),
                "cache_mb": rounded(cache / 1e6),
                "gb_per_s": rounded(read),
                "share_of_read": rounded(read / peak),
                "gain_expected": gain_expected(batch, context, model.config.n_embd),
            },
            "decode_attention": {
                "caches": len(caches[name].layers),
                "ms": spread(1e3 * t for t in attending[name]),
                "gb_per_s": rounded(read_attending),
                "share_of_ideal": rounded(read_attending / peak),
                "sdpa_ms": spread(1e3 * t for t in attending[f"{name}, sdpa"]),
            },
        }
    return results


def interleave(
    work: Mapping[str, Callable[[], Any]],
    rounds: int,
    tick: Callable[[str], None] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of one call, for every round; in a round each takes its turn: A B C, A B C.

    A turn is as many calls as the warm-up, which is left out, needed to fill LEAST_SECONDS.
    """
    calls = dict.fromkeys(work, 0)
    for name, call in work.items():
        begun = clock()
        while calls[name] == 0 or clock() - begun < LEAST_SECONDS:
            call()
            calls[name] += 1
        tick(name)
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            begun = clock()
            for _ in range(calls[name]):
                call()
            times[name].append((clock() - begun) / calls[name])
            tick(name)
    return times


def training_step(model: GPT, train_batch: int) -> Callable[[], None]:
    """A call that trains one step on train_batch sequences of block_size random ids."""
    optimizer = make_optimizer(model, ADAMW)
    ids = random_ids(model, train_batch, model.config.block_size)

    def call() -> None:
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def decoder(config: ModelConfig, context: int) -> GPT:
    """The model for inference, with positions for at least `context` tokens."""
    return GPT(replace(config, block_size=max(config.block_size, context))).eval()


def prefill(model: GPT, cache: KVCache) -> Callable[[], Tensor]:
    """A call that fills the whole room of the cache anew; logits (B, vocab_size) of the last position."""
    ids = random_ids(model, *room(cache))

    def call() -> Tensor:
        cache.clear()
        return model.head(model.hidden(ids, cache)[:, -1])

    return call


def decode(model: GPT, cache: KVCache) -> Callable[[], Tensor]:
    """A call that decodes one token a sequence as the last that a full cache has room for, again and again."""
    batch, context = room(cache)
    ids = random_ids(model, batch, 1)

    def call() -> Tensor:
        for layer in cache.layers:
            layer.length = context - 1
        return model(ids, cache=cache)  # (B, 1, vocab_size)

    return call


def decode_attention(model: GPT, cache: KVCache) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two calls: one query a sequence and head over every layer's full cache, by the design's path and by SDPA.

    Each layer has a cache of its own, as in a model: one alone would stay in the processor's cache and flatter.
    """
    block: Any = model.blocks[0]
    n_head, (batch, _), width = model.config.n_head, room(cache), cache.layers[0].buffers[0].size(-1)
    q = torch.randn(batch, 1, n_head, width, device=model.head.weight.device).transpose(1, 2)  # (B, n_head, 1, width)

    def ours() -> None:
        for layer in cache.layers:
            block.attn.attend(q, *layer.buffers)

    def sdpa() -> None:
        for layer in cache.layers:
            k, v = layer.buffers[0], layer.buffers[-1]  # one buffer is both
            F.scaled_dot_product_attention(q, k, v, enable_gqa=n_head != k.size(1))

    return ours, sdpa


def prefill_flops(model: GPT, context: int) -> float:
    """FLOPs of a forward pass for each of `context` tokens, a third of training's; the head is for the last alone."""
    head = model.head.weight.numel()
    return (model.flops_per_token(context, causal=True) - 6 * head) / 3 + 2 * head / context


def weight_bytes(model: GPT) -> int:
    """Bytes of weights that a step reads: all but the tables, of which it looks up a row; the head is multiplied."""
    return model.head.weight.element_size() * (model.num_parameters(embeddings=False) + model.head.weight.numel())


def gain_expected(batch: int, context: int, n_embd: int) -> bool:
    """Whether MHA's cache, 2 n_embd numbers a layer and token, weighs as much as a block's 12 n_embd^2 weights."""
    return batch * context >= 6 * n_embd


def check_memory(
    configs: Mapping[str, ModelConfig],
    batch: Sequence[int],
    context: Sequence[int],
    train_batch: int,
    device: str = "cpu",
    available: int | None = None,
) -> None:
    """UserError that names what would not fit in the `available` bytes (unset = found out; unknown = no check).

    An estimate from below: the weights and what AdamW and the gradients add, or the caches of all designs, which are
    there at the same time, and the widest activations of one.
    """
    if available is None:
        available = available_memory(device)
    if available is None:
        return
    with torch.device("meta"):
        models = {name: GPT(config) for name, config in configs.items()}
    weights = {name: 4 * model.num_parameters() for name, model in models.items()}
    training = 4 * sum(weights.values()) + max(
        4 * train_batch * c.block_size * (c.n_layer * (2 * c.d_ff + 8 * c.n_embd) + 2 * c.vocab_size)
        for c in configs.values()
    )
    if training > available:
        largest = max(weights, key=weights.__getitem__)
        raise UserError(
            f"training {', '.join(configs)} needs about {gb(training)} and {gb(available)} of memory are free: measure "
            f"fewer designs at a time, or smaller ones ({largest} has {weights[largest] // 4:,} parameters), or lower "
            "train_batch"
        )
    for b in batch:
        for c in context:
            caches = {name: b * model.cache_bytes(c) for name, model in models.items()}
            activations = max(
                4 * b * c * (max(3 * config.d_ff, 2 * DESIGNS[config.design].score_width(config)) + 2 * config.n_embd)
                + (8 * b * config.n_head * c * c if config.attention_path == "scratch" else 0)
                for config in configs.values()
            )
            needed = sum(weights.values()) + sum(caches.values()) + activations
            if needed > available:
                raise UserError(
                    f"batch {b} x context {c} needs about {gb(needed)} ("
                    + ", ".join(f"{gb(size)} for the cache of {name}" for name, size in caches.items())
                    + f", {gb(activations)} to fill one) and {gb(available)} of memory are free: lower batch or "
                    "context, or measure fewer designs at a time"
                )


def available_memory(device: str) -> int | None:
    """Bytes that a program could still take, or None where the system does not tell."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def peak_memory(name: str, config: ModelConfig, task: Mapping[str, Any]) -> dict[str, float | None]:
    """Peak memory in MB of fresh processes: after the imports, after training steps, after prefill and decoding.

    Training and decoding have a process each, side by side, so that neither hides behind the other's peak.
    `task` is the rest of what `work_for_peak` is to know.
    """
    workers = {}
    for phase in ("training", "decoding"):
        words = json.dumps({**task, "config": as_dict(config), "phase": phase})
        line = [sys.executable, "-m", "lab.speed", words]
        workers[phase] = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    peaks: dict[str, float | None] = {}
    for phase, worker in workers.items():
        with worker:
            answer = worker.stdout.read()
        if worker.returncode:
            raise EnvironmentFault(
                f"{name}: the process that measures the memory of {phase} ended with status {worker.returncode}, "
                "perhaps for want of memory; lower batch, context or train_batch"
            )
        peaks |= json.loads(answer)
    return {key: peaks[key] for key in ("start", "training", "decoding")}


def work_for_peak(task: Mapping[str, Any]) -> dict[str, float | None]:
    """What the fresh process does: a few steps of one phase; the peaks before and after them."""
    torch.set_num_threads(task["threads"])
    (config,), device = build((ModelConfig,), task["config"]), task["device"]
    torch.optim.AdamW([torch.zeros(1)])  # loads 80 MB of PyTorch, which are no design's
    start = peak_mb(device)
    if task["phase"] == "training":
        step = training_step(GPT(config).to(device), task["train_batch"])
        for _ in range(3):  # the first makes AdamW's moments, the others have them beside the gradients
            step()
    else:
        with torch.inference_mode():
            model = decoder(config, task["context"]).to(device)
            cache = model.new_cache(task["batch"], task["context"])
            prefill(model, cache)()
            decode(model, cache)()
    return {"start": start, task["phase"]: peak_mb(device)}


def peak_mb(device: str = "cpu") -> float | None:
    """The largest memory that this process has had so far, in MB (10^6 bytes); None where it cannot be known."""
    if device.startswith("cuda"):
        return rounded(torch.cuda.max_memory_allocated(device) / 1e6)
    try:  # Linux; getrusage would hand on the peak of the process that started this one
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return rounded(1024 * int(status["VmHWM"].split()[0]) / 1e6)
    except (OSError, KeyError):
        pass
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    return rounded(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """So many threads for PyTorch's kernels, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def waiter(device: str) -> Callable[[], None]:
    """What waits until the device has done what it was given; a CPU has, when a call returns."""
    kind = torch.device(device).type
    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(kind, lambda: None)


def after(call: Callable[[], Any], wait: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        call()
        wait()

    return both


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def room(cache: KVCache) -> tuple[int, int]:
    """(B, positions) that a cache has room for."""
    return cache.layers[0].buffers[0].size(0), cache.layers[0].room


def random_ids(model: GPT, batch: int, length: int) -> Tensor:
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
    return ids.to(model.head.weight.device)


def arithmetic(rate: Mapping[str, float], flops: float, limits: Mapping[str, Any]) -> dict[str, float]:
    """What a rate of tokens at so many FLOPs each comes to."""
    gflops = rate["median"] * flops / 1e9
    return {"gflops": rounded(gflops), "share_of_matmul": rounded(gflops / limits["matmul_gflops"])}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest over the rounds."""
    values = list(values)
    return {"median": rounded(statistics.median(values)), "low": rounded(min(values)), "high": rounded(max(values))}


def rounded(value: float) -> float:
    """To five digits: more than any of it is good for."""
    return float(f"{value:.5g}")


def gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


if __name__ == "__main__":
    print(json.dumps(work_for_peak(json.loads(sys.argv[1]))))
