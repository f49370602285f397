"""Fewer K/V heads: what can be kept exactly is, whatever else is averaged."""

import pytest
import torch

from attention.regroup import HOWS, regroup, turns
from attention.rotary import rotary_tables
from model import GPT, ModelConfig

HEAD_DIM = 8


def block(n_kv_head, positions="rotary", bias=False, seed=1):
    """A block of 4 query heads in float64, all parameters random."""
    config = ModelConfig(n_layer=1, n_head=4, n_kv_head=n_kv_head, head_dim=HEAD_DIM, n_embd=24, bias=bias,
                         positions=positions, vocab_size=5, block_size=16)  # fmt: skip
    attn = GPT(config).blocks[0].attn.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5)
    return attn


def output(attn, rotary):
    x = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return attn(x, rotary_tables(16, HEAD_DIM, 10000.0) if rotary else None)


def regrouped(attn, n_kv_head, how, rotary=True, bias=False):
    positions = "rotary" if rotary else "none"
    new = block(n_kv_head, positions, bias, seed=2)
    new.load_state_dict(regroup(attn.state_dict(), new.state_dict(), how, HEAD_DIM, rotary))
    return new


def with_copies(grouped, bias):
    """Multi-head attention whose K/V heads are copies: the same function, by repeating rows."""
    full = block(4, bias=bias)
    state = grouped.state_dict()
    for name in [name for name in state if name.startswith(("w_k", "w_v"))]:
        rows = state[name].unflatten(0, (-1, HEAD_DIM))
        state[name] = rows.repeat_interleave(4 // len(rows), dim=0).flatten(0, 1)
    full.load_state_dict(state)
    return full


def random_turn(rotary, generator):
    """A rotation of head_dim numbers; with rotary, of the pairs (i, i + head_dim / 2), which it may not mix."""
    if not rotary:
        return torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=generator, dtype=torch.float64))[0]
    angle = torch.rand(HEAD_DIM // 2, generator=generator, dtype=torch.float64) * 6.28
    turn = torch.zeros(HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    for i, a in enumerate(angle):
        j = i + HEAD_DIM // 2
        turn[i, i], turn[i, j], turn[j, i], turn[j, j] = a.cos(), -a.sin(), a.sin(), a.cos()
    return turn


def turn_heads(attn, rotary):
    """Turn every head's keys and values by rotations of its own, and queries and w_o with them."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for head in range(attn.n_kv_head):
            of_keys, of_values = random_turn(rotary, generator), random_turn(False, generator)
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            for layer, turn in ((attn.w_k, of_keys), (attn.w_v, of_values)):
                for parameter in layer.parameters():
                    parameter[rows] = turn @ parameter[rows]
            group = 4 // attn.n_kv_head
            for query in range(head * group, (head + 1) * group):
                rows = slice(query * HEAD_DIM, (query + 1) * HEAD_DIM)
                for parameter in attn.w_q.parameters():
                    parameter[rows] = of_keys @ parameter[rows]
                attn.w_o.weight[:, rows] = attn.w_o.weight[:, rows] @ of_values.T


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("how", ["mean", "first", "aligned"])
@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_heads_that_are_copies_are_joined_exactly(n_kv_head, how, bias):
    grouped = block(n_kv_head, bias=bias)
    full = with_copies(grouped, bias)
    torch.testing.assert_close(output(full, True), output(grouped, True), atol=1e-10, rtol=0)
    joined = regrouped(full, n_kv_head, how, bias=bias)
    torch.testing.assert_close(output(joined, True), output(grouped, True), atol=1e-9, rtol=0)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rotary", [True, False], ids=["rotary", "no positions"])
@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_turned_copies_are_joined_exactly_by_aligning_and_by_nothing_else(n_kv_head, rotary, bias):
    grouped = block(n_kv_head, bias=bias)
    full = with_copies(grouped, bias)
    turn_heads(full, rotary)
    torch.testing.assert_close(output(full, rotary), output(grouped, rotary), atol=1e-10, rtol=0)
    aligned = regrouped(full, n_kv_head, "aligned", rotary, bias)
    torch.testing.assert_close(output(aligned, rotary), output(grouped, rotary), atol=1e-9, rtol=0)
    for how in ("mean", "first"):
        other = output(regrouped(full, n_kv_head, how, rotary, bias), rotary)
        assert (other - output(grouped, rotary)).abs().max() > 0.01


def test_grouped_heads_can_be_grouped_further():
    one = block(1)
    full = with_copies(one, False)
    two = regrouped(full, 2, "mean")
    turn_heads(two, True)
    torch.testing.assert_close(output(regrouped(two, 1, "aligned"), True), output(one, True), atol=1e-9, rtol=0)


def test_mean_first_and_random_take_what_their_names_say():
    full, fresh = block(4), block(2, seed=2)
    keys = full.w_k.weight.unflatten(0, (4, HEAD_DIM))
    expected = {
        "mean": torch.cat(((keys[0] + keys[1]) / 2, (keys[2] + keys[3]) / 2)),
        "first": torch.cat((keys[0], keys[2])),
        "random": fresh.w_k.weight,
    }
    for how, rows in expected.items():
        found = regrouped(full, 2, how)
        torch.testing.assert_close(found.w_k.weight, rows, atol=1e-12, rtol=0)
        assert torch.equal(found.w_q.weight, full.w_q.weight) and torch.equal(found.w_o.weight, full.w_o.weight)
    assert {*expected, "aligned"} == set(HOWS)


@pytest.mark.parametrize("rotary", [True, False], ids=["rotary", "no positions"])
def test_aligned_heads_lie_nearer_to_their_mean(rotary):
    found = torch.randn(6, HEAD_DIM, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def spread(heads):
        groups = heads.unflatten(0, (2, 3))
        return float((groups - groups.mean(dim=1, keepdim=True)).square().sum())

    turn = turns(found, 3, rotary)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(HEAD_DIM, dtype=torch.float64).expand_as(turn))
    assert spread(turn @ found) < 0.95 * spread(found)
