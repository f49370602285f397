"""Multi-head, multi-query and grouped-query attention: one class, n_kv_head decides.

n_kv_head = n_head is multi-head attention (Vaswani et al. 2017): MultiHead = Concat(head_1 .. head_h) W_O with
head_j = Attention(x W_j^Q, x W_j^K, x W_j^V). n_kv_head = 1 is multi-query (Shazeer 2019): all heads share one
K and V. Anything between is grouped-query (Ainslie et al. 2023): query head j uses K/V head j // group.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from attention.cache import LayerCache
from attention.kernel import fused_attention, scratch_attention
from attention.rotary import rotate


class GroupedAttention(nn.Module):
    """Causal self-attention, (B, T, n_embd) -> (B, T, n_embd)."""

    def __init__(self, config: Any):  # a ModelConfig, which stands above this folder
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        # The rows of w_q are the h small projections W_j^Q one under the other, head_dim rows each.
        self.w_q = nn.Linear(config.n_embd, config.n_head * config.head_dim, bias=config.bias)
        self.w_k = nn.Linear(config.n_embd, config.n_kv_head * config.head_dim, bias=config.bias)
        self.w_v = nn.Linear(config.n_embd, config.n_kv_head * config.head_dim, bias=config.bias)
        self.w_o = (
            nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=config.bias)
            if config.w_o
            else nn.Identity()
        )
        # Drawn like the other matrices, gates begin at 0.5 with an sd of 0.12: where a sigmoid is steepest.
        self.w_gate = nn.Linear(config.n_embd, config.n_head, bias=config.bias) if config.gate else None
        self.qk_norm, self.window = config.qk_norm, config.window
        self.attention_dropout = config.attention_dropout
        # Dropped attention weights exist only where weights exist: in the from-scratch path.
        self.scratch = config.attention_path == "scratch" or config.attention_dropout > 0
        self.weights_tap = nn.Identity()  # hook it to see, or to change, the (B, n_head, T, S) weights

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        B, T, _ = x.shape
        q = self.w_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.w_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.w_v(x).view(B, T, self.n_kv_head, self.head_dim)
        if self.qk_norm:  # without weights, so that every head layout keeps the same parameters
            q, k = F.rms_norm(q, (self.head_dim,)), F.rms_norm(k, (self.head_dim,))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, n_head or n_kv_head, T, head_dim)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, n_kv_head, S, head_dim)
        heads = self.attend(q, k, v).transpose(1, 2)  # (B, T, n_head, head_dim)
        if self.w_gate is not None:  # one value from 0 to 1 for each head and token (Qiu et al. 2025, arXiv 2505.06708)
            heads = heads * self.w_gate(x).sigmoid().unsqueeze(-1)
        return self.w_o(heads.reshape(B, T, self.n_head * self.head_dim))  # concatenated -> (B, T, n_embd)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries over keys and values as the cache returns them, (B, n_head, T, head_dim)."""
        if self.scratch:
            dropout = self.attention_dropout if self.training else 0.0
            return scratch_attention(q, k, v, dropout, self.weights_tap, self.window)
        return fused_attention(q, k, v, self.window)

    # What a design tells the model about itself, before anything is allocated.

    settings = frozenset(
        {"n_kv_head", "heads_per_kv", "qk_norm", "w_o", "gate", "window"}  # what it reads that others need not
    )

    @staticmethod
    def resolve(config: Any) -> dict[str, int | None]:
        """Its own settings with what was left unset filled in; ValueError for a layout that cannot be built."""
        group = config.heads_per_kv or 1
        if config.n_head % group:
            raise ValueError(f"n_head {config.n_head} is not divisible by heads_per_kv {group}")
        n_kv_head = config.n_kv_head or config.n_head // group
        if config.heads_per_kv and n_kv_head * group != config.n_head:
            raise ValueError(
                f"n_kv_head {n_kv_head} is not n_head {config.n_head} / heads_per_kv {group}; set one to none"
            )
        if config.n_head % n_kv_head:
            raise ValueError(f"n_head {config.n_head} is not divisible by n_kv_head {n_kv_head}")
        if not config.w_o and config.n_head * config.head_dim != config.n_embd:
            raise ValueError(
                f"without w_o the heads must fill the width: n_head {config.n_head} x head_dim {config.head_dim} "
                f"is not n_embd {config.n_embd}"
            )
        if config.positions == "rotary" and config.head_dim % 2:
            raise ValueError(f"rotary positions turn pairs: head_dim {config.head_dim} is odd")
        return {"n_kv_head": n_kv_head, "heads_per_kv": None}

    @staticmethod
    def rotary_width(config: Any) -> int:
        """How many numbers of a head rotary positions turn."""
        return config.head_dim

    @staticmethod
    def cache_shapes(config: Any) -> list[tuple[int, int]]:
        """(heads, width) of what one layer caches for a token."""
        return [(config.n_kv_head, config.head_dim)] * 2

    @staticmethod
    def score_width(config: Any) -> int:
        """Multiply-adds of one query with one key, plus those of one weight with one value, over all heads."""
        return 2 * config.n_head * config.head_dim
