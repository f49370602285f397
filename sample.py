"""Write text with a trained model."""

import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from runtime import errors, settings
from runtime.checkpoint import load_model
from runtime.devices import pick_device
from runtime.errors import UserError, plain
from runtime.generate import TextStream, default_start, generate, rows_at_once, sample_generator, window_start
from runtime.prompts import encode, newest_run, read_text

DESCRIPTION = """Write text with a trained model: prompt and text to standard output, notes to standard error.

Each token is drawn by chance, also at temperature 1, so two calls differ. With the same --seed they do not,
and sample k is the same however many are asked for. Temperature 0 is greedy: the likeliest token, no chance.

A text longer than the model's context (block_size) goes on from its end: the model sees it from the smallest
multiple of block_size / 2 that leaves at most block_size tokens: between half a context and a whole one."""


@dataclass(frozen=True)
class SampleConfig:
    # folder of a training run; if left out, the newest in runs/
    run: Annotated[str | None, tyro.conf.Positional] = None
    checkpoint: Literal["best", "last"] = "best"  # the one of lowest validation loss, or the newest
    prompt: str = ""  # text to go on from; without one, a blank line
    prompt_file: str | None = None  # file with the text to go on from; - is standard input
    num_samples: int = 1  # texts to write; the first is shown while it is made
    max_new_tokens: int = 500  # length of a text without its prompt, if nothing ends it before
    temperature: float = 0.8  # 1 is the model's own probabilities, below it likely tokens gain; 0 is greedy
    top_k: int | None = None  # draw from the k likeliest tokens only
    top_p: float | None = None  # draw from the likeliest tokens that together reach this probability
    seed: int | None = None  # of the draws; if unset another each time, told on standard error
    stop: str = ""  # end a text before these characters; a text also ends at an end-of-text token
    device: str = "auto"  # auto, cpu, cuda, cuda:1 or mps

    def __post_init__(self) -> None:
        if self.run == "":
            raise ValueError("RUN is empty; name the folder of a run, or leave it out for the newest")
        for name in ("num_samples", "max_new_tokens", "top_k"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.prompt and self.prompt_file is not None:
            raise ValueError("--prompt and --prompt_file both give a prompt: leave one of them out")


def say(text: str) -> None:
    print(plain(text), file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Write what a model says: as it is, but a terminal, which obeys control characters, gets them as \\x1b."""
    if sys.stdout.isatty():
        text = re.sub("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)
    sys.stdout.write(text)
    sys.stdout.flush()


def write_samples(heads: list[str], streams: list[TextStream], steps: Iterator[list[int]]) -> int:
    """Write what the steps give each stream behind its head: the first as it comes, then the others, whole.

    What there is so far is written also when it is interrupted. Returns the number of tokens made.
    """
    texts, count = heads, 0
    write(texts[0])
    try:
        for tokens in steps:
            count += sum(not stream.done for stream in streams)
            parts = [stream.feed(token) for stream, token in zip(streams, tokens, strict=True)]
            write(parts[0])
            texts = [text + part for text, part in zip(texts, parts, strict=True)]
            if all(stream.done for stream in streams):
                break
    finally:
        write(streams[0].finish() + "\n")
        for text, stream in zip(texts[1:], streams[1:], strict=True):
            write(text + stream.finish() + "\n")
    return count


def main(argv: list[str]) -> None:
    (config,), given = settings.parse(
        argv, SampleConfig, prog="sample.py", description=DESCRIPTION, files_allowed=False
    )
    if not config.prompt and "prompt" in given:
        raise UserError("the prompt is empty; leave --prompt out to begin without one")
    prompt = config.prompt if config.prompt_file is None else read_text(config.prompt_file, "prompt_file")
    run, device = config.run or newest_run(), pick_device(config.device)
    model, tokenizer, meta = load_model(run, config.checkpoint, device)
    ids = encode(prompt, "prompt", tokenizer) or default_start(tokenizer)
    encode(config.stop, "stop text", tokenizer)  # one that cannot come would never stop anything

    seed = random.getrandbits(31) if config.seed is None else config.seed
    say(f"{run}, step {meta['step']}, {device}, temperature {config.temperature:g}, seed {seed}")
    seen = len(ids) - window_start(len(ids), model.config.block_size)
    if seen < len(ids):
        say(f"the prompt has {len(ids)} tokens; the model sees the last {seen} of them (block_size)")
    if device.type == "cpu" and model.num_parameters() < 5_000_000:
        torch.set_num_threads(1)  # steps of a small model are too short to share: waiting costs more
    clock, count, at_once = time.perf_counter(), 0, rows_at_once(model)
    for first in range(0, config.num_samples, at_once):
        numbers = range(first, min(first + at_once, config.num_samples))
        steps = generate(
            model,
            ids,
            config.max_new_tokens,
            [sample_generator(seed, k) for k in numbers],
            config.temperature,
            config.top_k,
            config.top_p,
            tokenizer.vocab_size,
        )
        heads = [f"--- sample {k + 1} ---\n" * (config.num_samples > 1) + prompt for k in numbers]
        count += write_samples(heads, [TextStream(tokenizer, config.stop) for _ in numbers], steps)
    seconds = time.perf_counter() - clock
    say(f"{count} tokens in {seconds:.1f} s, {count / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    errors.run(main)
