"""Evaluation is a number of the model and the text (runtime/evaluate.py)."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.tokenfile import TokenFile, TokenWriter
from model import GPT, ModelConfig
from runtime.evaluate import evaluate

T = 8
BYTES = np.arange(11) % 4  # 0 to 3 bytes a token


@pytest.fixture(scope="module")
def model():
    return GPT(ModelConfig(n_layer=1, n_embd=16, n_head=2, block_size=T, vocab_size=11, dropout=0.5), seed=3)


@pytest.fixture
def tokens(tmp_path):
    def write(count):
        with TokenWriter(tmp_path / "val.bin", vocab_size=11) as writer:
            writer.write(np.random.default_rng(0).integers(0, 11, count))
        return TokenFile(tmp_path / "val.bin")

    return write


def by_hand(model, ids):
    """Loss sum and count over windows of T from the first token, one at a time, the last one shorter."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, T):
        window = torch.tensor(ids[start : start + T + 1].astype(np.int64))
        logits = model(window[None, :-1])[0].double()
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    return total, count


@pytest.mark.parametrize("count", [2, T, T + 1, T + 2, 5 * T + 1, 5 * T + 4])
def test_every_target_counts_once_and_the_last_window_may_be_short(model, tokens, count):
    file = tokens(count)
    nats, targets = by_hand(model, file.read(0, count))
    score = evaluate(model, file, BYTES, T, batch_size=2)
    assert score.tokens == targets == count - 1
    assert score.loss == pytest.approx(nats / targets, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_the_batch_size_does_not_matter(model, tokens, batch_size):
    file = tokens(12 * T + 5)
    whole = evaluate(model, file, BYTES, T, batch_size)
    assert whole.loss == pytest.approx(evaluate(model, file, BYTES, T, 2).loss, abs=1e-6)


def test_a_large_vocabularys_logits_are_taken_in_slices_and_add_up(model, tokens, monkeypatch):
    file = tokens(4 * T + 1)
    whole = evaluate(model, file, BYTES, T, 4)
    seen = []
    model.head.register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    monkeypatch.setattr("runtime.evaluate.tokens_at_once", lambda vocab_size: 3)
    score = evaluate(model, file, BYTES, T, 4)
    assert max(seen) == 3 and sum(seen) == 4 * T
    assert score.loss == pytest.approx(whole.loss, abs=1e-6) and score.correct == whole.correct


def test_parts_add_up_to_the_whole(model, tokens):
    file = tokens(12 * T + 5)
    parts = evaluate(model, file, BYTES, T, 3, stop=4 * T) + evaluate(model, file, BYTES, T, 5, start=4 * T)
    whole = evaluate(model, file, BYTES, T, 4)
    assert (parts.tokens, parts.bytes) == (whole.tokens, whole.bytes)
    assert parts.loss == pytest.approx(whole.loss, abs=1e-6)


def test_bits_per_byte_divide_by_the_bytes_of_the_targets(model, tokens):
    file = tokens(3 * T)
    score = evaluate(model, file, BYTES, T, 2)
    target_bytes = sum(int(token) % 4 for token in file.read(1, 3 * T - 1))
    assert score.bytes == target_bytes
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / target_bytes)


def test_dropout_is_off_and_the_mode_comes_back(model, tokens):
    file = tokens(6 * T)
    model.train()
    assert evaluate(model, file, BYTES, T, 2) == evaluate(model, file, BYTES, T, 2)
    assert model.training
