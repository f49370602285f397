"""Rotary position embedding (Su et al. 2021), in the half-split layout that Hugging Face's Llama uses."""

import torch
from torch import Tensor


def rotary_tables(length: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (length, width): position p turns pair i by p * theta^(-2i / width).

    Pair i is (x[i], x[i + width / 2]), so that each table holds its width / 2 angles twice; the sines of the
    first half are negative, as the rotation of a pair wants them.
    """
    # On the CPU even for a model that is only counted: on "meta" arange would load PyTorch's compiler, for seconds.
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)  # (width / 2,)
    angle = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequency  # (length, width / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1).float(), torch.cat((-sin, sin), dim=-1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of x (B, T, heads, width) by the angles of T positions: cos and sin are (T, width)."""
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]  # (T, 1, width), the same for every head
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((b, a), dim=-1) * sin  # (a cos - b sin, b cos + a sin)
