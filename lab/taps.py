"""Seeing and changing what heads do on the model's own forward pass, by hooks; no second implementation.

A design needs two places for it, which every one has: `weights_tap`, an identity that all attention weights
(B, n_head, T, S) pass in the from-scratch path, and `w_o`, whose input is the heads' outputs side by side,
(B, T, n_head * width).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokenfile import IGNORED
from model import GPT

Change = Callable[[Tensor], Tensor]  # of one layer's heads (B, T, n_head, width)


class Seen(NamedTuple):
    """What the heads did on one text, on the CPU."""

    weights: Tensor  # float64 (n_layer, n_head, T, T)
    outputs: Tensor  # (n_layer, n_head, T, width), before w_o


def attention(model: GPT, layer: int) -> Any:
    """The attention block of a layer."""
    return model.blocks[layer].attn


def open_model(model: GPT, path: Literal["scratch", "fused"] = "scratch") -> GPT:
    """The same model without dropout, and with the from-scratch path, whose weights can be seen, or the fused one."""
    config = replace(model.config, attention_path=path, dropout=0.0, attention_dropout=0.0)
    with torch.device(model.head.weight.device):
        opened = GPT(config)
    opened.load_state_dict(model.state_dict())
    return opened.eval()


@torch.no_grad()
def look(model: GPT, ids: Tensor) -> Seen:
    """Run a text (T,) through an opened model and note weights and outputs of every head."""
    weights: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep(module: torch.nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        weights.append(out[0].double().cpu())

    def keep_heads(heads: Tensor) -> Tensor:
        outputs.append(heads[0].transpose(0, 1).float().cpu())  # (n_head, T, width)
        return heads

    with contextlib.ExitStack() as stack:
        for layer in range(len(model.blocks)):
            stack.callback(attention(model, layer).weights_tap.register_forward_hook(keep).remove)
        stack.enter_context(changed(model, dict.fromkeys(range(len(model.blocks)), keep_heads)))
        model(ids[None].to(model.head.weight.device))
    return Seen(torch.stack(weights), torch.stack(outputs))


@contextlib.contextmanager
def changed(model: GPT, changes: dict[int, Change]) -> Iterator[None]:
    """Within the block the heads of the given layers pass through a function on their way to w_o."""
    n_head = model.config.n_head
    hooks = []
    for layer, change in changes.items():

        def hook(module: torch.nn.Module, args: tuple[Tensor, ...], change: Change = change) -> Tensor:
            heads = args[0].unflatten(-1, (n_head, -1))
            return change(heads).flatten(-2)

        hooks.append(attention(model, layer).w_o.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def put(heads: list[int], values: Tensor) -> Change:
    """A change that replaces the outputs of some heads by values (n_head, width): zeros, or their mean."""

    def change(outputs: Tensor) -> Tensor:
        outputs = outputs.clone()
        outputs[..., heads, :] = values[heads].to(outputs)
        return outputs

    return change


@torch.no_grad()
def losses(model: GPT, x: Tensor, y: Tensor, batch_size: int = 16) -> Tensor:
    """What every window (N, T) adds to the loss, in nats, float64 (N,): their mean is the mean over targets that count.

    That is a window's sum over its targets, over the mean number of targets of a window.
    """
    device, rows = model.head.weight.device, []
    for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
        logits = model(inputs.to(device)).float()
        each = F.cross_entropy(logits.transpose(1, 2), targets.to(device), reduction="none").double().cpu()
        rows.append(each.sum(dim=1))
    return torch.cat(rows) / (y != IGNORED).sum(dim=1).double().mean()


@torch.no_grad()
def share_right(model: GPT, x: Tensor, y: Tensor, batch_size: int = 16) -> float:
    """Share of the targets that count which are the likeliest token."""
    pairs = zip(x.to(model.head.weight.device).split(batch_size), y.split(batch_size), strict=True)
    return sum(int((model(ids).argmax(-1).cpu() == asked).sum()) for ids, asked in pairs) / int((y != IGNORED).sum())


@torch.no_grad()
def mean_outputs(model: GPT, x: Tensor, batch_size: int = 16) -> Tensor:
    """Every head's output, mean over all tokens of the windows (N, T): (n_layer, n_head, width)."""
    totals: dict[int, Tensor] = {}

    def keep(layer: int) -> Change:
        def change(heads: Tensor) -> Tensor:
            totals[layer] = totals.get(layer, 0) + heads.double().sum(dim=(0, 1))
            return heads

        return change

    with changed(model, {layer: keep(layer) for layer in range(len(model.blocks))}):
        for inputs in x.split(batch_size):
            model(inputs.to(model.head.weight.device))
    return (torch.stack([totals[layer] for layer in range(len(model.blocks))]) / x.numel()).float()


@torch.no_grad()
def shares(model: GPT, outputs: Tensor, place: int) -> Tensor:
    """What every head adds to the attention block's output at one token, (n_layer, n_head, n_embd).

    Their sum, and a bias if w_o has one, is the output: w_o is linear, so that each head has a share of its own.
    """
    device, found = model.head.weight.device, []
    for layer, heads in enumerate(outputs[:, :, place].to(device)):
        n_head, width = heads.shape
        alone = torch.zeros(n_head + 1, n_head, width, device=device)  # the last row is no head at all: the bias
        alone[torch.arange(n_head), torch.arange(n_head)] = heads
        out = attention(model, layer).w_o(alone.flatten(1))
        found.append(out[:-1] - out[-1])
    return torch.stack(found).cpu()
