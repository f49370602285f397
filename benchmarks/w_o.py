"""How large is what runs through attention? RMS of the stream x, of the heads side by side, and of W_O of them.

    python -m benchmarks.w_o runs/mha-1 [RUN ...]

For every layer of every run, at its beginning (drawn again from its seed) and trained, on 8,192 tokens of its
validation split. A Markdown table.
"""

import sys

import torch
from torch import Tensor

from data import open_dataset
from lab.headstudy import validation
from lab.taps import attention
from model import GPT
from runtime.checkpoint import load_model


@torch.no_grad()
def sizes(model: GPT, x: Tensor) -> list[tuple[float, float, float]]:
    """By layer, RMS of the stream that enters, of the heads side by side, and of W_O's output."""
    found: dict[int, dict[str, float]] = {layer: {} for layer in range(len(model.blocks))}
    hooks = []

    def rms(values: Tensor) -> float:
        return float(values.double().square().mean().sqrt())

    for layer, block in enumerate(model.blocks):
        at, w_o = found[layer], attention(model, layer).w_o
        hooks.append(block.register_forward_pre_hook(lambda m, args, at=at: at.update(x=rms(args[0]))))
        hooks.append(w_o.register_forward_hook(lambda m, args, out, at=at: at.update(heads=rms(args[0]), out=rms(out))))
    model.eval()(x)
    for hook in hooks:
        hook.remove()
    return [(at["x"], at["heads"], at["out"]) for at in found.values()]


def main(*runs: str) -> None:
    print("| run | layer | x, beginning | heads | W_O of them | x, trained | heads | W_O of them |")
    print("|---|---|---|---|---|---|---|---|")
    for run in runs:
        trained, _, meta = load_model(run, "best", torch.device("cpu"))
        seed = meta["train"]["seed"] if meta["train"]["init_seed"] is None else meta["train"]["init_seed"]
        x = validation(open_dataset(meta["dataset"]["name"]), trained.config.block_size, 8192).x
        for layer, (first, last) in enumerate(zip(sizes(GPT(trained.config, seed), x), sizes(trained, x), strict=True)):
            print(f"| {run} | {layer} | " + " | ".join(f"{value:.3f}" for value in (*first, *last)) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
