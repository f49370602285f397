"""Rotary position embedding (Su et al. 2021), in the half-split layout that Hugging Face's Llama uses."""

import torch
from torch import Tensor


def rotary_tables(length: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (length, width / 2): position p turns pair i by p * theta^(-2i / width)."""
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)  # (width / 2,)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency  # (length, width / 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + width / 2]) of x (B, heads, T, width) by the angles of T positions, +theta."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # (T, width / 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
