"""What a model is, in its own numbers: its shape, its costs, and the way through one layer's attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention import DESIGNS
from lab.speed import count
from model import ModelConfig

SHAPE = ("n_embd", "n_head", "n_kv_head", "head_dim", "n_layer", "d_ff", "vocab_size", "block_size")
SIX = {"w_q": 1, "w_k": 1, "w_v": 1, "w_dkv": 1, "w_qr": 1, "w_kr": 1, "w_uk": 1, "w_uv": 1,
       "split into heads: q": 2, "split into heads: k": 2, "split into heads: v": 2,
       "softmax of scores: weights": 3, "weights @ v": 4, "heads side by side": 5, "w_o": 6}  # fmt: skip


class Step(NamedTuple):
    """One place on the way through attention: what is there, its shape with B and T as letters, its weights."""

    name: str
    shape: tuple[int | str, ...]
    weights: int = 0


def describe(config: ModelConfig, cache_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Shape and costs of a model; nothing is allocated.

    Attention weights are the matrices of one layer's attention, without biases, and their number divided by
    n_embd^2. FLOPs a token as GPT.flops_per_token counts them, with every key of a full context; forward alone is a
    third. Cache bytes in cache_dtype, for one token and for one sequence of block_size tokens, over all layers.
    """
    with torch.device("meta"):
        weights = matrix_weights(DESIGNS[config.design](config))
    costs = count(config, cache_dtype)
    return {
        **{name: getattr(config, name) for name in SHAPE},
        "attention_weights_per_layer": weights,
        "attention_weights_in_n_embd_squared": weights / config.n_embd**2,
        **costs,
        "forward_flops_per_token": costs["flops_per_token"] // 3,  # backward is two products where forward is one
        "cache_dtype": str(cache_dtype).removeprefix("torch."),
    }


def matrix_weights(module: nn.Module) -> int:
    """Weights of a module's matrices: vectors, as biases, are not counted."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)


def steps(config: ModelConfig) -> list[Step]:
    """The way from x to W_O through one layer's attention: a forward pass without numbers is watched.

    Modules stand in the order in which they are called, under their own names. What happens between modules is told
    only for the designs where it is known and makes the way complete: six steps.
    """
    with torch.device("meta"):
        attn = DESIGNS[config.design](replace(config, attention_path="scratch", attention_dropout=0.0))
        T = 1 + max(config.n_embd, *(size for p in attn.parameters() for size in p.shape))  # no width is taken for T
        rope = None
        if config.positions == "rotary":
            rope = (torch.empty(T, DESIGNS[config.design].rotary_width(config)),) * 2
        x = torch.empty(1, T, config.n_embd)

    found = [Step("x", ("B", "T", config.n_embd))]
    n_kv_head, width = config.n_kv_head or config.n_head, config.head_dim + (config.rope_dim or 0)  # of q and k
    split = [Step("split into heads: q", ("B", config.n_head, "T", width)),
             Step("split into heads: k", ("B", n_kv_head, "T", width)),
             Step("split into heads: v", ("B", n_kv_head, "T", config.head_dim))]  # fmt: skip
    weighted = Step("weights @ v", ("B", config.n_head, "T", config.head_dim))
    known = config.design in ("grouped", "latent")

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            before, after = (("B", *("T" if n == T else n for n in t.shape[1:])) for t in (args[0], out))
            if name == "w_o":
                found.append(Step("heads side by side", before))
            if name == "weights_tap":
                weights = Step("softmax of scores: weights", after)
                found.extend([*split, weights, weighted] if known else [weights])
            elif not isinstance(module, nn.Identity):  # as w_o is where there is none
                again = any(step.name == name for step in found)  # the same weights, applied once more
                found.append(Step(name, after, 0 if again else matrix_weights(module)))

        return note

    for name, module in attn.named_modules():
        if not any(module.children()):
            module.register_forward_hook(watch(name))
    attn(x, rope)
    if rest := matrix_weights(attn) - sum(step.weights for step in found):
        found.append(Step("other weights", (), rest))  # of a design that applies some without calling a module
    return [step._replace(name=f"{SIX[step.name]} {step.name}") if known and step.name in SIX else step
            for step in found]  # fmt: skip
