"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache holds one small latent a token.

    c = RMSNorm(x W_DKV)    the latent, kv_rank numbers; every head's key and value are made of it:
    k_j = [c W_UK_j ; k_R]  and  v_j = c W_UV_j,  where k_R = rotate(x W_KR) is one rotary key for all heads,
    q_j = [x W_Q_j ; rotate(x W_QR_j)],  head_j = softmax(q_j k_j^T / sqrt(head_dim + rope_dim)) v_j.

Decoding never makes a key or value of what is cached: (x W_Q_j) (c W_UK_j)^T = (x W_Q_j W_UK_j^T) c^T, so the query
goes into the latent's space, all heads attend to the rows [c ; k_R] themselves, as in multi-query attention, and W_UV_j
is applied to the weighted latent. This is why positions have a part of their own: a rotation between W_Q and W_UK would
keep the two from meeting.

As in DeepSeek-V2-Lite queries are not compressed. The norm of the latent is the paper's, without weights of its own:
they would only scale what W_UK and W_UV read, which these can do themselves. It comes before the cache.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.cache import LayerCache
from attention.kernel import fused_attention, scratch_attention
from attention.rotary import rotate


class LatentAttention(nn.Module):
    """Causal self-attention, (B, T, n_embd) -> (B, T, n_embd)."""

    def __init__(self, config: Any):  # a ModelConfig, which stands above this folder
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.kv_rank, self.rope_dim = config.kv_rank, config.rope_dim or 0
        width = config.n_head * config.head_dim
        self.w_q = nn.Linear(config.n_embd, width, bias=config.bias)
        self.w_dkv = nn.Linear(config.n_embd, config.kv_rank, bias=config.bias)
        # Without biases: one of w_uk would add the same to all scores of a query, one of w_uv can be left to w_o.
        self.w_uk = nn.Linear(config.kv_rank, width, bias=False)
        self.w_uv = nn.Linear(config.kv_rank, width, bias=False)
        if self.rope_dim:
            self.w_qr = nn.Linear(config.n_embd, config.n_head * self.rope_dim, bias=config.bias)
            self.w_kr = nn.Linear(config.n_embd, self.rope_dim, bias=config.bias)
        self.w_o = nn.Linear(width, config.n_embd, bias=config.bias)
        self.w_gate = nn.Linear(config.n_embd, config.n_head, bias=config.bias) if config.gate else None
        self.scale = 1 / math.sqrt(config.head_dim + self.rope_dim)
        self.attention_dropout = config.attention_dropout
        self.scratch = config.attention_path == "scratch" or config.attention_dropout > 0
        self.weights_tap = nn.Identity()  # hook it to see, or to change, the (B, n_head, T, S) weights

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        B, T, _ = x.shape
        q = self.w_q(x).view(B, T, self.n_head, self.head_dim)
        row = F.rms_norm(self.w_dkv(x), (self.kv_rank,)).view(B, T, 1, self.kv_rank)
        if self.rope_dim:
            q_rotary = self.w_qr(x).view(B, T, self.n_head, self.rope_dim)
            k_rotary = self.w_kr(x).view(B, T, 1, self.rope_dim)
            if rope is not None:
                q_rotary, k_rotary = rotate(q_rotary, *rope), rotate(k_rotary, *rope)
            q = torch.cat((q, q_rotary), dim=-1)  # (B, T, n_head, head_dim + rope_dim)
            row = torch.cat((row, k_rotary), dim=-1)  # (B, T, 1, kv_rank + rope_dim)
        q, rows = q.transpose(1, 2), row.transpose(1, 2)  # (B, n_head, T, ...), (B, 1, T, ...)
        if cache is not None:
            (rows,) = cache.append(rows)  # (B, 1, S, kv_rank + rope_dim)
        # To expand costs less where nothing older is there: a product with a key has fewer numbers than with a row.
        heads = self.expanded(q, rows) if rows.size(2) == T else self.absorbed(q, rows)
        heads = heads.transpose(1, 2)  # (B, T, n_head, head_dim)
        if self.w_gate is not None:  # as in grouped.py
            heads = heads * self.w_gate(x).sigmoid().unsqueeze(-1)
        return self.w_o(heads.reshape(B, T, self.n_head * self.head_dim))  # concatenated -> (B, T, n_embd)

    def expanded(self, q: Tensor, rows: Tensor) -> Tensor:
        """Attention with a key and value for every head and token, (B, n_head, T, head_dim); S is T."""
        B, _, S, _ = rows.shape
        latent, k_rotary = rows.split((self.kv_rank, self.rope_dim), dim=-1)  # (B, 1, S, ...) both
        k = self.w_uk(latent).view(B, S, self.n_head, self.head_dim).transpose(1, 2)  # (B, n_head, S, head_dim)
        v = self.w_uv(latent).view(B, S, self.n_head, self.head_dim).transpose(1, 2)
        k = torch.cat((k, k_rotary.expand(B, self.n_head, S, -1)), dim=-1)  # (B, n_head, S, head_dim + rope_dim)
        return self.softmax(q, k, v)

    def absorbed(self, q: Tensor, rows: Tensor) -> Tensor:
        """The same from the cached rows as they are, with W_UK on the query's side and W_UV behind the weights."""
        w_uk, w_uv = (w.weight.view(self.n_head, self.head_dim, self.kv_rank) for w in (self.w_uk, self.w_uv))
        q, q_rotary = q.split((self.head_dim, self.rope_dim), dim=-1)
        q = torch.cat((q @ w_uk, q_rotary), dim=-1)  # (B, n_head, T, kv_rank + rope_dim)
        return self.attend(q, rows) @ w_uv.transpose(-2, -1)  # (B, n_head, T, head_dim)

    def attend(self, q: Tensor, rows: Tensor) -> Tensor:
        """Queries over the cache's rows, key and value in one: (B, n_head, T, kv_rank), weighted latents."""
        return self.softmax(q, rows, rows)[..., : self.kv_rank]

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.scratch:
            dropout = self.attention_dropout if self.training else 0.0
            return scratch_attention(q, k, v, dropout, self.weights_tap, scale=self.scale)
        return fused_attention(q, k, v, scale=self.scale)

    # What a design tells the model about itself, before anything is allocated.

    settings = frozenset({"kv_rank", "rope_dim", "gate"})  # what it reads that others need not

    @staticmethod
    def resolve(config: Any) -> dict[str, int]:
        """Its own settings with what was left unset filled in; ValueError for a layout that cannot be built.

        kv_rank is half the model's width, the rank at which small models lost little (arXiv 2506.09342), and with 8
        heads the 4 head_dim of DeepSeek-V2; rope_dim is half a head's, as there.
        """
        kv_rank = config.kv_rank or max(1, config.n_embd // 2)
        if config.positions != "rotary":
            if config.rope_dim is not None:
                raise ValueError(
                    f"rope_dim {config.rope_dim} is not used with positions {config.positions}; leave it out"
                )
            return {"kv_rank": kv_rank}
        rope_dim = config.rope_dim or max(2, config.head_dim // 4 * 2)
        if rope_dim % 2:
            raise ValueError(f"rotary positions turn pairs: rope_dim {rope_dim} is odd")
        return {"kv_rank": kv_rank, "rope_dim": rope_dim}

    @staticmethod
    def rotary_width(config: Any) -> int:
        """How many numbers of a head rotary positions turn."""
        return config.rope_dim

    @staticmethod
    def cache_shapes(config: Any) -> list[tuple[int, int]]:
        """(heads, width) of what one layer caches for a token: the latent and the rotary key, side by side."""
        return [(1, config.kv_rank + (config.rope_dim or 0))]

    @staticmethod
    def score_width(config: Any) -> int:
        """Multiply-adds of one query with one key, plus those of one weight with one value, all heads, expanded."""
        return config.n_head * (2 * config.head_dim + (config.rope_dim or 0))
