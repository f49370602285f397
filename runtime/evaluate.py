"""The full pass: a loss that is a number of the model and the text, not a sample."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F

from data.tokenfile import IGNORED, TokenFile
from model import GPT, tokens_at_once


@dataclass(frozen=True)
class Score:
    """Sums over targets, so that scores of parts add up to the score of the whole."""

    nats: float
    tokens: int  # targets that count
    bytes: int
    correct: int = 0  # targets that were the likeliest token

    def __add__(self, other: "Score") -> "Score":
        return Score(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def accuracy(self) -> float:
        """Share of targets to which the model gives the highest probability."""
        return self.correct / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the text, which compares tokenizers; nan where no target has bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    def __str__(self) -> str:
        return f"{self.loss:.4f} nats/token, {self.bits_per_byte:.4f} bits/byte, {self.tokens:,} tokens"


@torch.no_grad()
def evaluate(
    model: GPT,
    tokens: TokenFile,
    token_bytes: np.ndarray,
    block_size: int,
    batch_size: int,
    start: int = 0,
    stop: int | None = None,
    autocast: contextlib.AbstractContextManager | None = None,
    progress: Callable[[float], None] | None = None,
) -> Score:
    """Score the targets start + 1 .. stop of a split in non-overlapping windows of block_size tokens.

    Every target counts once (of a probe, those asked for), the last window may be shorter, sums are float64, dropout
    is off; the result does not depend on batch_size. `stop` is the last target's index (the whole split if unset). The
    first token of a window is scored from the window's own beginning: a loss belongs to its block_size.
    """
    stop = min(stop or len(tokens), len(tokens) - 1)
    device, slices = model.head.weight.device, tokens_at_once(model.head.out_features)
    was_training = model.training
    model.eval()
    total = Score(0.0, 0, 0)
    at = start
    while at < stop:
        rows = min(batch_size, (stop - at) // block_size) or 1
        width = min(block_size, stop - at)
        ids, targets = tokens.window(at, rows * width)
        x, y = (torch.from_numpy(part).view(rows, width).to(device) for part in (ids, targets))
        nats, correct = 0.0, 0
        with autocast or contextlib.nullcontext():
            hidden = model.hidden(x).flatten(0, 1)  # (rows * width, n_embd)
            for h, wanted in zip(hidden.split(slices), y.flatten().split(slices), strict=True):
                logits = model.head(h).float()  # (slices, vocab_size)
                losses = F.cross_entropy(logits, wanted, reduction="none")  # 0 where IGNORED
                nats += losses.cpu().double().sum().item()  # mps has no float64
                correct += int((logits.argmax(-1) == wanted).sum())
        counted = targets[targets != IGNORED]
        total += Score(nats, len(counted), int(token_bytes[counted].sum()), correct)
        at += rows * width
        if progress:
            progress((at - start) / (stop - start))
    model.train(was_training)
    return total
