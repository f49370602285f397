"""A run with fewer K/V heads out of a trained one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attention.regroup import regroup
from model import GPT, ModelConfig
from runtime.checkpoint import load_model
from runtime.errors import UserError
from runtime.runs import check_new, write_run


@torch.no_grad()
def regrouped(run: str, new: Path, n_kv_head: int, how: str, checkpoint: str = "best") -> None:
    """Write the new run; `how` is one of attention.regroup's. Errors as in `check_regroup`."""
    check_new(new)
    model, tokenizer, meta = load_model(run, checkpoint)
    old = model.config
    check_regroup(old, n_kv_head, how, run)
    fresh = GPT(replace(old, n_kv_head=n_kv_head))
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    blocks: Any = zip(model.blocks, fresh.blocks, strict=True)
    for i, (block, made) in enumerate(blocks):
        found = regroup(block.attn.state_dict(), made.attn.state_dict(), how, old.head_dim, old.positions == "rotary")
        weights |= {f"blocks.{i}.attn.{name}": tensor for name, tensor in found.items()}
    write_run(new, fresh.config, weights, tokenizer, meta["dataset"])


def check_regroup(old: ModelConfig, n_kv_head: int, how: str, run: str) -> None:
    """UserError for a run that cannot have so few K/V heads."""
    if old.design != "grouped":
        raise UserError(f"{run} has design {old.design}, which has no K/V heads: name a run of MHA or GQA")
    if not 1 <= n_kv_head < old.n_kv_head or old.n_kv_head % n_kv_head:
        raise UserError(
            f"n_kv_head {n_kv_head} does not divide the {old.n_kv_head} K/V heads of {run}: give a smaller number that "
            "does"
        )
    if how == "aligned" and not old.w_o:
        raise UserError(f"{run} has no w_o, which aligned values would have to turn: take another --how")
