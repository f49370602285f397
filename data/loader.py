"""Training batches as a pure function of (data, seed, step)."""

import math

import numpy as np
import torch

from data.tokenfile import IGNORED, DataError, TokenFile


class Windows:
    """Windows of `block_size` tokens, drawn without replacement within a pass over the split.

    Pass p has an offset and an order of its own, drawn from (seed, p): windows one after another from that offset on,
    in that order, and then the tokens before and after them, end to end, which fill up to two windows more; places of
    the last one that stay empty do not count. So a pass takes every token once as input and the next as its target.
    Where only some tokens count, as in a probe of examples one after another, the offset is 0. Row r of step s is
    sample s * batch_size + r of the endless sequence of passes. The order takes 4 bytes a window.

    DataError if the split is too short for one window and its targets.
    """

    def __init__(self, tokens: TokenFile, block_size: int, batch_size: int, seed: int):
        if len(tokens) <= block_size:
            raise DataError(
                f"{tokens.path} has {len(tokens):,} tokens and block_size {block_size:,} needs at least "
                f"{block_size + 1:,}: prepare a longer text (of few documents, one file) or lower block_size"
            )
        self.tokens, self.block_size, self.batch_size, self.seed = tokens, block_size, batch_size, seed
        self.whole = max(1, (len(tokens) - block_size) // block_size)  # fit in at every offset
        self.per_pass = math.ceil((len(tokens) - 1) / block_size)
        self._pass: tuple[int, int, np.ndarray] | None = None  # the number of the last one asked for, offset, order

    def batch(self, step: int, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (the next tokens, IGNORED where they do not count), both int64 (n_rows, block_size).

        `rows` selects rows of the batch: ranks and micro-batches take slices of one and the same batch.
        """
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        block = np.zeros((2, len(samples), self.block_size), dtype=np.int64)
        block[1] = IGNORED  # where a window is shorter
        for row, sample in enumerate(samples):
            window = self._window(sample)
            block[:, row, : len(window[0])] = window
        inputs, targets = torch.from_numpy(block)
        return inputs, targets

    def _window(self, sample: int) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of one row, each of block_size tokens or, in the last of a pass, of fewer."""
        number, place = divmod(sample, self.per_pass)
        if self._pass is None or self._pass[0] != number:
            self._pass = None  # makes room: of a file of 4 GB in windows of 64 an order takes 125 MB
            random = np.random.default_rng((self.seed, number))
            offset = int(random.integers(len(self.tokens) - self.whole * self.block_size))
            order = np.arange(self.whole, dtype=np.min_scalar_type(max(self.whole, 1 << 16)))
            random.shuffle(order)
            self._pass = number, 0 if self.tokens.counted else offset, order
        _, offset, order = self._pass
        if place < self.whole:
            return self.tokens.window(offset + int(order[place]) * self.block_size, self.block_size)
        end = offset + self.whole * self.block_size
        ends = self.tokens.window(0, offset), self.tokens.window(end, len(self.tokens) - 1 - end)
        return np.concatenate(ends, axis=1)[:, (place - self.whole) * self.block_size :][:, : self.block_size]
