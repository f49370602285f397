"""Training windows: a pure function of (data, seed, step) that leaves nothing out and repeats nothing."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from benchmarks.memory import memory
from data import DataError
from data.loader import Windows
from data.tokenfile import HEADER, IGNORED, MAGIC, VERSION, TokenFile, TokenWriter


@pytest.fixture
def counting(tmp_path):
    """A token file of n tokens where the token at place i is i."""

    def make(n):
        with TokenWriter(tmp_path / f"{n}.bin", max(n, 2)) as writer:
            writer.write(np.arange(n))
        return TokenFile(tmp_path / f"{n}.bin")

    return make


def test_targets_are_the_next_tokens(counting):
    x, y = Windows(counting(1000), block_size=16, batch_size=4, seed=1).batch(3)
    assert x.shape == y.shape == (4, 16)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(16))


def test_a_pass_draws_every_window_once_at_one_offset(counting):
    n, block = 1000, 16
    whole = (n - block) // block  # 61, and 23 tokens that fill two windows more
    loader = Windows(counting(n), block, batch_size=1, seed=1)
    offsets = []
    for number in range(20):
        starts = sorted(int(loader.batch(number * 63 + i)[0][0, 0]) for i in range(whole))
        assert np.diff(starts).tolist() == [block] * (whole - 1)
        offsets.append(starts[0])
    assert min(offsets) >= 0 and max(offsets) < n - whole * block
    assert len(set(offsets)) > 5  # each pass has its own


def test_passes_have_orders_of_their_own_and_look_shuffled(counting):
    loader = Windows(counting(1601), 16, batch_size=100, seed=1)
    orders = [((x := loader.batch(step)[0][:99, 0]) - x.min()).tolist() for step in range(2)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


def taken(batches):
    """(input, target) of every place that counts, sorted."""
    x, y = (torch.cat(parts).flatten() for parts in zip(*batches, strict=True))
    return sorted(zip(x[y != IGNORED].tolist(), y[y != IGNORED].tolist(), strict=True))


@pytest.mark.parametrize(("n", "block"), [(94, 5), (17, 16), (18, 16), (31, 16), (33, 16), (1000, 16), (9, 1)])
def test_a_pass_takes_every_token_once(counting, n, block):
    loader = Windows(counting(n), block, batch_size=1, seed=1)
    for number in range(12):
        batches = [loader.batch(number * loader.per_pass + i) for i in range(loader.per_pass)]
        assert taken(batches) == [(i, i + 1) for i in range(n - 1)]
    assert loader.per_pass == math.ceil((n - 1) / block)


def test_what_lies_at_the_ends_of_a_pass_comes_last_and_keeps_its_targets(counting):
    """94 tokens in windows of 5: an offset of up to 8, 17 windows, and two with the other 8, one behind the other."""
    loader = Windows(counting(94), 5, batch_size=19, seed=1)
    for step in range(9):
        x, y = loader.batch(step)
        offset = int(x[:17].min())
        assert x[17:].flatten().tolist() == [*range(offset), *range(offset + 85, 93), 0, 0]
        assert y[17:].flatten().tolist() == [*range(1, offset + 1), *range(offset + 86, 94), IGNORED, IGNORED]


def test_a_step_does_not_depend_on_what_was_read_before(counting):
    tokens = counting(500)
    forward = Windows(tokens, 8, batch_size=7, seed=3)
    batches = [forward.batch(step)[0] for step in range(30)]
    for step in (29, 0, 17, 3):
        assert torch.equal(Windows(tokens, 8, batch_size=7, seed=3).batch(step)[0], batches[step])
        assert torch.equal(forward.batch(step)[0], batches[step])


def test_rows_are_slices_of_the_batch(counting):
    loader = Windows(counting(500), 8, batch_size=6, seed=3)
    x, y = loader.batch(5)
    for rows in (slice(0, 2), slice(2, 6), slice(1, 6, 2)):
        part_x, part_y = loader.batch(5, rows)
        assert torch.equal(part_x, x[rows]) and torch.equal(part_y, y[rows])


def test_batch_size_changes_the_grouping_and_not_the_samples(counting):
    tokens = counting(500)
    by_3 = torch.cat([Windows(tokens, 8, 3, seed=1).batch(step)[0] for step in range(8)])
    by_12 = torch.cat([Windows(tokens, 8, 12, seed=1).batch(step)[0] for step in range(2)])
    assert torch.equal(by_3, by_12)


def test_a_batch_may_be_larger_than_a_pass(counting):
    x, _ = Windows(counting(100), 16, batch_size=23, seed=1).batch(2)  # 7 windows a pass
    assert x.shape == (23, 16)
    starts = x[:, 0].tolist()  # samples 46 to 68; passes begin at multiples of 7
    assert all(len(set(starts[first : first + 5])) == 5 for first in (3, 10, 17))


def test_seeds_differ(counting):
    tokens = counting(5000)
    firsts = [Windows(tokens, 8, 4, seed=seed).batch(0)[0] for seed in range(4)]
    assert len({tuple(x.flatten().tolist()) for x in firsts}) == 4


@pytest.mark.parametrize("n", [17, 18, 31, 32, 33])
def test_texts_barely_long_enough_begin_at_every_place(counting, n):
    loader = Windows(counting(n), 16, batch_size=1, seed=1)
    firsts = [loader.batch(number * loader.per_pass)[0][0].tolist() for number in range(300)]
    assert all(first == list(range(first[0], first[0] + 16)) for first in firsts)
    assert {first[0] for first in firsts} == set(range(n - 16))


def test_a_text_too_short_is_refused_with_both_numbers(counting):
    with pytest.raises(DataError, match=r"has 16 tokens and block_size 16 needs at least 17"):
        Windows(counting(16), 16, batch_size=1, seed=1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_out_every_token_of_every_pass(counting, ranks):
    """Each rank reads its rows of every batch: 12 passes over 94 tokens in 19 windows of 5, 19 batches of 12 rows."""
    tokens, size = counting(94), 12 // ranks
    loaders = [Windows(tokens, 5, batch_size=12, seed=1) for _ in range(ranks)]
    rows = [slice(rank * size, (rank + 1) * size) for rank in range(ranks)]
    parts = [loader.batch(step, own) for step in range(19) for loader, own in zip(loaders, rows, strict=True)]
    x, y = (torch.cat(part).view(12, 19, 5) for part in zip(*parts, strict=True))
    for one in zip(x, y, strict=True):
        assert taken([one]) == [(i, i + 1) for i in range(93)]


def test_the_order_is_the_one_that_published_losses_were_measured_in(counting):
    """An offset, then a permutation, drawn by numpy from (seed, pass); 1,000 tokens are 61 windows of 16 and 24."""
    x, _ = Windows(counting(1000), 16, batch_size=63, seed=5).batch(2)
    random = np.random.default_rng((5, 2))
    assert x[:61, 0].tolist() == (random.integers(24) + 16 * random.permutation(61)).tolist()


def test_batches_open_no_file(counting, monkeypatch):
    loader = Windows(counting(500), 8, batch_size=7, seed=3)
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("a file was opened"))
    monkeypatch.setattr("os.open", lambda *_: pytest.fail("a file was opened"))
    loader.batch(0)


def test_3000_batches_leave_memory_where_it_was_after_100(tmp_path):
    """A file of 200 MB without contents on the disk; `benchmarks/memory.py` does it with 4 GB and train.py."""
    count, after = 100_000_000, {}
    with open(tmp_path / "a.bin", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 2, count))
        file.truncate(HEADER.size + 2 * count)
    loader = Windows(TokenFile(tmp_path / "a.bin"), 64, batch_size=64, seed=1)
    for step in range(3000):
        loader.batch(step)
        if step in (99, 2999):
            after[step] = memory()
    if not after[99]:
        pytest.skip("needs /proc")
    assert after[2999]["private"] - after[99]["private"] < 5
    assert after[2999]["rss"] - after[99]["rss"] < 5


def test_an_order_takes_four_bytes_a_window_and_that_of_the_last_pass_is_dropped(counting):
    tokens = counting(200_000)
    tracemalloc.start()
    loader = Windows(tokens, 1, batch_size=1, seed=1)  # 199,999 windows
    for number in range(3):
        loader.batch(number * 199_999)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4 * 199_999 <= peak < 6 * 199_999
