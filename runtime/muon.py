"""Muon: gradient descent on matrices by orthogonal updates (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

import math

import torch
from torch import Tensor

UPDATE_RMS = 0.2  # of an update's elements at learning rate 1, about AdamW's (Liu et al. 2025, arXiv 2502.16982)


def orthogonalise(G: Tensor, steps: int = 5) -> Tensor:
    """About U V^T for every matrix U S V^T of a batch (k, m, n), by a quintic Newton-Schulz iteration.

    A step takes a singular value s to a s + b s^3 + c s^5. Five draw what is above a hundredth of the matrix's norm to
    between 0.7 and 1.2; U and V stay. In float32, since bfloat16 is slow on most CPUs.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.mT if G.size(-2) > G.size(-1) else G  # wide, so that X X^T is the small product
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(steps):
        S = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(S, S, S, beta=b, alpha=c), X, beta=a)  # a X + (b S + c S S) X
    return X.mT if G.size(-2) > G.size(-1) else X


def muon(params: list[Tensor], means: list[Tensor], lr: float, weight_decay: float, beta: float) -> None:
    """One step on matrices that have gradients; `means` are the means of earlier gradients and are brought up to date.

    An update is the orthogonalised mean (Nesterov's), scaled so that the root mean square of its elements is UPDATE_RMS
    times lr, whatever the shape: MQA's narrow w_k learns at the rate of w_q.
    """
    by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for p, mean in zip(params, means, strict=True):
        assert p.grad is not None
        by_shape.setdefault(p.shape, []).append((p, p.grad.lerp(mean.lerp_(p.grad, 1 - beta), beta)))
    for shape, pairs in by_shape.items():  # one batch for all of a shape: many small products are slow
        updates = orthogonalise(torch.stack([mean for _, mean in pairs]))
        for (p, _), update in zip(pairs, updates, strict=True):
            scale = UPDATE_RMS * math.sqrt(shape.numel()) / (update.norm() + 1e-7)
            p.mul_(1 - lr * weight_decay).sub_(update * (lr * scale))
