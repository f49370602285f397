"""A text to train on in a test: words of eight letters' making, the same for one seed."""

import random


def some_text(words: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    vocabulary = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(40)]
    return " ".join(draw.choices(vocabulary, k=words)) + "\n"
