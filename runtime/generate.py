"""Writing with a model: the draw of a token, the cached loop, and ids to text as they come."""

import codecs
import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokenizer import Tokenizer
from model import GPT
from runtime.errors import EnvironmentFault


def rows_at_once(model: GPT) -> int:
    """How many samples share a step: always so many rows, real or blank, and sample k always in the same one.

    A matrix product rounds differently for another number of rows, and now and then a draw would turn on it;
    with a fixed number, a sample cannot depend on how many others were asked for. Measured on a CPU with the
    default model, 4 rows take a fifth longer than 1, and 8 nearly half. Where the weights outgrow the caches, reading
    them is what a step costs: products of one row do that at the speed of memory, and of 4 rows at half of it. A GPU
    has room for more.
    """
    if model.head.weight.device.type != "cpu":
        return 16
    return 4 if model.num_parameters() < 2**23 else 1  # 32 MiB


def sample_generator(seed: int, k: int) -> torch.Generator:
    """The random stream of sample k alone."""
    key = hashlib.sha256(f"{seed}/sample/{k}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)


def choose(
    logits: Tensor,
    generators: Sequence[torch.Generator],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw an id for each row of logits (B, V) by the row's own generator, one number each; (B,).

    Temperature 0 takes the likeliest id and draws nothing. top_k leaves the k likeliest (and their equals),
    then top_p the fewest whose probabilities reach top_p (nucleus sampling, Holtzman et al. 2020).
    EnvironmentFault if a logit is not a number, ValueError for a negative temperature.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or more, not {temperature}")
    if not logits.isfinite().all():
        raise EnvironmentFault(
            "the model's output is not a number (NaN or infinite): its training diverged or its weights are "
            "damaged; sample its other checkpoint, or train it again with a lower learning_rate"
        )
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.cpu().double()  # the same draw from the same logits, whatever made them
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no temperature overflows it
    if top_k is not None:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < least, -math.inf)
    p = logits.softmax(-1)  # (B, V)
    if top_p is not None:
        order = torch.from_numpy(np.argsort(-p.numpy()))  # 1 ms for 50,000 ids, where torch takes 5 to 12
        falling = p.gather(-1, order)
        before = falling.cumsum(-1) - falling  # probability of all that are likelier
        p = p.scatter(-1, order, falling.masked_fill(before >= top_p, 0.0))
    cdf = p.cumsum(-1)
    draws = torch.stack([torch.rand(1, generator=g) for g in generators])  # (B, 1)
    return torch.searchsorted(cdf, draws * cdf[:, -1:], right=True).squeeze(-1)  # first id beyond the draw


def default_start(tokenizer: Tokenizer) -> list[int]:
    """What every tokenizer can begin with: its own beginning, a blank line, the end of the text before, or id 0."""
    if tokenizer.begin:
        return list(tokenizer.begin)
    if not tokenizer.unknown("\n") and (blank := tokenizer.encode("\n\n").tolist()):
        return blank  # where a paragraph, in a play a speaker's name, begins
    return [tokenizer.end_id or 0]


def window_start(length: int, block_size: int) -> int:
    """Where the window of a text of `length` tokens begins: the one place that a position alone decides.

    0 while all fits, then the smallest multiple of block_size // 2 that leaves at most block_size tokens.
    """
    stride = max(1, block_size // 2)
    return stride * math.ceil(max(0, length - block_size) / stride)


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    generators: Sequence[torch.Generator],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    vocab_size: int | None = None,
) -> Iterator[list[int]]:
    """Continue a prompt of ids `count` times over, a token for each generator a step; yields these ids.

    The model is in eval mode and there are at most `rows_at_once` generators. Ids from vocab_size on, slots
    without a token, are never drawn. A token is a function of those before it and of its own stream, so that
    one call equals several that take up where the last one stopped. Errors as in `choose`.
    """
    device, block_size = model.head.weight.device, model.config.block_size
    n, rows = len(generators), rows_at_once(model)
    if not prompt or not 0 < n <= rows:
        raise ValueError(f"{len(prompt)} prompt tokens and {n} samples: both from 1, samples to {rows}")
    cache = model.new_cache(rows)
    start = window_start(len(prompt), block_size)
    window = torch.tensor(prompt[start:], device=device).expand(rows, -1)  # (rows, at most block_size)
    new = window
    for length in range(len(prompt), len(prompt) + count):
        if moved := window_start(length, block_size) - start:
            start += moved
            window = new = window[:, moved:]  # every position has changed: what was cached is of no use
            cache.clear()
        logits = model.head(model.hidden(new, cache)[:, -1])[:n, :vocab_size]  # (n, vocab_size)
        ids = choose(logits, generators, temperature, top_k, top_p)
        yield ids.tolist()
        new = F.pad(ids, (0, rows - n)).to(device)[:, None]  # (rows, 1)
        window = torch.cat((window, new), dim=1)


class TextStream:
    """One sample's ids to text, as they come and in whole characters.

    It ends before the first `stop` in it, which may run over several tokens, or at the tokenizer's end_id;
    `done` tells that it has. What may be the beginning of a stop is held back until it proves not to be one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str = ""):
        self.tokenizer, self.stop, self.done = tokenizer, stop, False
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # keeps half a character's bytes
        self.held = ""

    def feed(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self.done:
            return ""
        if token == self.tokenizer.end_id:
            return self.finish()
        text = self.held + self.utf8.decode(self.tokenizer.decode_bytes([token]))
        if self.stop and self.stop in text:
            self.done = True
            return text.partition(self.stop)[0]
        longest = min(len(text), len(self.stop) - 1)
        held = next((n for n in range(longest, 0, -1) if text.endswith(self.stop[:n])), 0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The rest, when no more tokens come; half a character becomes U+FFFD."""
        rest = "" if self.done else self.held + self.utf8.decode(b"", final=True)
        self.done = True
        return rest
