"""Causal scaled dot-product attention (Vaswani et al. 2017, section 3.2.1): from scratch, and fused.

Both take q (B, n_head, T, head_dim), k (B, n_kv_head, S, head_dim) and v (B, n_kv_head, S, width), with width
head_dim or less, and return (B, n_head, T, width). The T queries belong to the last T of the S positions, so query i
sees keys 0 .. S - T + i; with a window only the last `window` of these. Scores are multiplied by `scale`,
1 / sqrt(head_dim) if unset. n_head is a multiple of n_kv_head: query head j reads K/V head j // group, where group =
n_head / n_kv_head.

K and V are never copied for the heads that share them. A group's query heads sit next to each other, so they
fold into rows, (B, n_kv_head, group * T, head_dim), and one matrix product serves the whole group.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_mask(T: int, S: int, device: torch.device, window: int | None = None) -> Tensor:
    """(T, S) booleans, True where a query may look; the last query is aligned with the last key."""
    mask = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    return mask if window is None else mask.triu(S - T - window + 1)


def scratch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    tap: Callable[[Tensor], Tensor] = lambda w: w,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, step by step; `tap` is shown every attention weight on its way."""
    B, n_head, T, head_dim = q.shape
    n_kv_head, S = k.shape[1:3]
    rows = n_head // n_kv_head * T

    q = q.reshape(B, n_kv_head, rows, head_dim)  # a group's queries, one under the other
    scores = q @ k.transpose(-2, -1) * (scale or 1 / math.sqrt(head_dim))  # (B, n_kv_head, rows, S)
    scores = scores.view(B, n_head, T, S)
    scores = scores.masked_fill(~causal_mask(T, S, q.device, window), -math.inf)
    weights = tap(F.softmax(scores, dim=-1))  # (B, n_head, T, S), every row sums to 1
    weights = F.dropout(weights, dropout)
    out = weights.reshape(B, n_kv_head, rows, S) @ v  # (B, n_kv_head, rows, width)
    return out.view(B, n_head, T, -1)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """The same by PyTorch's kernels, which never hold the (T, S) weights whole."""
    B, n_head, T, head_dim = q.shape
    n_kv_head, S, width = v.shape[1:]
    narrow = window is not None and window < S
    if width < head_dim:  # the kernels that do not hold the weights want values as wide as keys
        v = F.pad(v, (0, head_dim - width))
    if T == S and not narrow:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=n_head != n_kv_head, scale=scale)
        return out[..., :width]
    # With cached keys is_causal would be wrong without a word: it aligns the first query with the first key.
    group = n_head // n_kv_head
    mask = None if T == 1 and not narrow else causal_mask(T, S, q.device, window).repeat(group, 1)  # (group * T, S)
    q = q.reshape(B, n_kv_head, group * T, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.view(B, n_head, T, head_dim)[..., :width]
