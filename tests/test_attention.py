"""The attention block: the formula, the two paths, what is never copied, and what is cached."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import (
    allocated,
    both_paths,
    every_grouped_layout,
    every_layout,
    lively,
    random,
    reference_attention,
    reference_heads,
    tiny,
    turned,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attention import DESIGNS
from attention.cache import KVCache, LayerCache
from attention.kernel import causal_mask, fused_attention, scratch_attention
from attention.rotary import rotary_tables, rotate
from model import ModelConfig

KERNELS = {"scratch": scratch_attention, "fused": fused_attention}


def build(**settings) -> nn.Module:
    """One attention block in float64, with weights large enough for mistakes to show."""
    config = tiny(**settings)
    return lively(DESIGNS[config.design](config)).double()


def layer_cache(config: ModelConfig, batch_size: int, room: int) -> LayerCache:
    shapes = DESIGNS[config.design].cache_shapes(config)
    return LayerCache(batch_size, room, shapes, torch.empty(0).double(), config.window)


def qkv(B: int, n_head: int, n_kv_head: int, T: int, S: int, width: int, dtype=torch.float64) -> list[Tensor]:
    shapes = [(B, n_head, T, width), (B, n_kv_head, S, width), (B, n_kv_head, S, width)]
    return [random(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


# The formula


def test_one_wide_projection_is_the_small_ones_side_by_side():
    attn, x = build(n_head=4), random(2, 5, 32)
    for wide in (attn.w_q, attn.w_k, attn.w_v):
        small = [rows.T for rows in wide.weight.split(8)]  # four of (n_embd, head_dim)
        torch.testing.assert_close(wide(x), torch.cat([x @ w for w in small], dim=-1), atol=1e-10, rtol=0)


@every_grouped_layout
@both_paths
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_the_block_equals_a_loop_over_separate_heads(layout, path, bias):
    attn, x = build(attention_path=path, bias=bias, **layout), random(2, 6, 32)
    torch.testing.assert_close(attn(x), reference_attention(attn, x), atol=1e-10, rtol=0)


@both_paths
def test_grouped_heads_equal_full_heads_with_copied_keys_and_values(path):
    grouped, full = (build(n_head=4, n_kv_head=n, attention_path=path) for n in (2, 4))
    x = random(2, 6, 32)
    weights = grouped.state_dict()
    for name in ("w_k.weight", "w_v.weight"):
        a, b = weights[name].split(8)  # the two heads
        weights[name] = torch.cat((a, a, b, b))
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(x), full(x), atol=1e-10, rtol=0)


def test_as_many_groups_as_heads_is_multi_head_attention():
    assert tiny(n_head=4, n_kv_head=4) == tiny(n_head=4, n_kv_head=None)


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_weights_are_the_softmax_of_scaled_scores_by_hand(attend):
    q = torch.tensor([[9.0, 9.0, 9.0, 9.0], [2.0, 0.0, 0.0, 0.0]]).view(1, 1, 2, 4)
    k = torch.tensor([[0.0, 5.0, 5.0, 5.0], [math.log(3), 0.0, 7.0, 0.0]]).view(1, 1, 2, 4)
    v = torch.tensor([[4.0, 0.0, 1.0, 0.0], [0.0, 8.0, 1.0, 0.0]]).view(1, 1, 2, 4)
    # The second query scores 0 and 2 ln 3; over sqrt(4) that is 0 and ln 3, so its weights are 1/4 and 3/4.
    expected = torch.tensor([[4.0, 0.0, 1.0, 0.0], [1.0, 6.0, 1.0, 0.0]]).view(1, 1, 2, 4)
    torch.testing.assert_close(attend(q, k, v), expected)


def test_a_query_weighs_the_keys_up_to_its_own_and_the_weights_sum_to_one():
    seen = []
    scratch_attention(*qkv(2, 4, 2, T=3, S=5, width=6), tap=lambda w: seen.append(w) or w)
    (weights,) = seen
    assert weights.shape == (2, 4, 3, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3).double())
    for i in range(3):  # the three queries are the last three of five positions
        assert (weights[:, :, i, : 3 + i] > 0).all() and (weights[:, :, i, 3 + i :] == 0).all()


@pytest.mark.parametrize("n_kv_head", [6, 3], ids=["mha", "gqa"])
def test_the_scratch_path_carries_the_shapes_of_the_formula(n_kv_head):
    B, S, H, h, d, g = 2, 5, 24, 6, 4, n_kv_head
    attn = build(n_embd=H, n_head=h, n_kv_head=g, attention_path="scratch")
    steps = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                steps.append(tuple(out.shape))
            return out

    tapped, concatenated = [], []
    attn.weights_tap.register_forward_hook(lambda module, args, out: tapped.append(tuple(out.shape)))
    attn.w_o.register_forward_pre_hook(lambda module, args: concatenated.append(tuple(args[0].shape)))
    with Record():
        out = attn(random(B, S, H))

    assert (tapped, concatenated, out.shape) == ([(B, h, S, S)], [(B, S, H)], (B, S, H))
    expected = [(B, S, H), (B, S, h, d)]  # q
    expected += 2 * [(B, S, g * d), (B, S, g, d)]  # k, v
    expected += [(B, h, S, d), (B, g, S, d), (B, g, S, d)]  # q, k, v by heads
    expected += [(B, h, S, S), (B, h, S, d), (B, S, H), (B, S, H)]  # scores, heads, concatenation, output
    remaining = iter(steps)
    for shape in expected:
        assert shape in remaining, f"{shape} is missing, or out of place, in {steps}"


def test_heads_do_not_meet_before_w_o():
    attn, x = build(n_head=4, n_kv_head=2, attention_path="scratch"), random(2, 6, 32)
    whole, heads = attn(x), reference_heads(attn, x)
    for j in range(4):
        keep = torch.ones(4, 1, 1).double()
        keep[j] = 0
        hook = attn.weights_tap.register_forward_hook(lambda module, args, out, keep=keep: out * keep)
        slice_of_w_o = attn.w_o.weight[:, j * 8 : (j + 1) * 8]  # (n_embd, head_dim)
        torch.testing.assert_close(whole - attn(x), heads[j] @ slice_of_w_o.T, atol=1e-10, rtol=0)
        hook.remove()


def test_without_w_o_the_block_returns_the_concatenated_heads():
    attn, x = build(n_head=4, n_kv_head=2, w_o=False), random(2, 6, 32)
    torch.testing.assert_close(attn(x), torch.cat(reference_heads(attn, x), dim=-1), atol=1e-10, rtol=0)
    assert {name for name, _ in attn.named_parameters()} == {"w_q.weight", "w_k.weight", "w_v.weight"}


@pytest.mark.parametrize("n_head", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_four_projections_hold_4_h_squared_weights_whatever_the_head_count(n_head):
    attn = build(n_embd=24, n_head=n_head, positions="none")
    assert sum(p.numel() for p in attn.parameters()) == 4 * 24**2


# Scratch and fused


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("T, S", [(7, 7), (3, 7), (1, 7), (1, 1)], ids=["whole", "chunk", "step", "first"])
@pytest.mark.parametrize("n_kv_head", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 99}, {"scale": 0.1}], ids=str)
def test_the_two_paths_agree_in_value_and_gradient(options, n_kv_head, T, S, dtype, tolerance):
    inputs = qkv(2, 4, n_kv_head, T, S, width=10, dtype=dtype)
    towards = random(2, 4, T, 10, seed=9, dtype=dtype)
    scratch, fused = scratch_attention(*inputs, **options), fused_attention(*inputs, **options)
    torch.testing.assert_close(scratch, fused, atol=tolerance, rtol=0)
    scratch, fused = (torch.autograd.grad(out, inputs, towards) for out in (scratch, fused))
    torch.testing.assert_close(scratch, fused, atol=tolerance, rtol=0)


@pytest.mark.parametrize("T, S", [(7, 7), (3, 7), (1, 7)], ids=["whole", "chunk", "step"])
def test_values_may_be_narrower_than_keys(T, S):
    q, k, v = qkv(2, 4, 2, T, S, width=10)
    v = v[..., :6].detach().requires_grad_()
    results = []
    for attend in (scratch_attention, fused_attention):
        out = attend(q, k, v)
        assert out.shape == (2, 4, T, 6)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    torch.testing.assert_close(*results, atol=1e-10, rtol=0)


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_scores_are_multiplied_by_the_scale_that_is_given(attend):
    q, k, v = qkv(2, 4, 2, 5, 5, width=16)
    torch.testing.assert_close(attend(q, k, v, scale=0.5), attend(2 * q, k, v), atol=1e-10, rtol=0)  # 2 / sqrt(16)


@pytest.mark.parametrize("T, S", [(6, 6), (3, 6), (1, 6)], ids=["whole", "chunk", "step"])
@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_what_lies_before_the_window_has_no_influence(attend, T, S):
    q, k, v = (t.detach() for t in qkv(2, 4, 2, T, S, width=8, dtype=torch.float32))
    before = attend(q, k, v, window=2)
    for i in range(T):
        place = S - T + i
        hidden = [j for j in range(S) if not place - 1 <= j <= place]  # a window of 2: itself and the one before
        k_changed, v_changed = k.clone(), v.clone()
        k_changed[:, :, hidden], v_changed[:, :, hidden] = 1e30, -1e30
        assert torch.equal(attend(q, k_changed, v_changed, window=2)[:, :, i], before[:, :, i])
    assert not torch.allclose(before, attend(q, k, v))
    torch.testing.assert_close(attend(q, k, v, window=S), attend(q, k, v), atol=1e-6, rtol=0)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e2, 1e4])
@pytest.mark.parametrize("T", [6, 4, 2], ids=["whole", "chunk", "short_chunk"])
@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_nothing_leaks_from_later_tokens_at_any_score_size(attend, T, magnitude):
    S = 6
    q, k, v = (t.detach() for t in qkv(2, 4, 2, T, S, width=8, dtype=torch.float32))
    q = q * magnitude
    before = attend(q, k, v)
    for i in range(T - 1):
        later = slice(S - T + i + 1, None)  # the positions that query i must not see
        for extreme in (1e4, -1e4, 1e30, -1e30):
            k_changed, v_changed = k.clone(), v.clone()
            k_changed[:, :, later], v_changed[:, :, later] = extreme, -extreme
            after = attend(q, k_changed, v_changed)
            assert torch.equal(after[:, :, : i + 1], before[:, :, : i + 1])


@pytest.mark.parametrize("n_kv_head", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_attention_dropout_draws_the_mask_of_pytorch(n_kv_head):
    q, k, v = qkv(2, 4, n_kv_head, T=7, S=7, width=8, dtype=torch.float32)
    torch.manual_seed(5)
    ours = scratch_attention(q, k, v, dropout=0.3)
    torch.manual_seed(5)
    theirs = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_attention_dropout_takes_the_scratch_path_and_stops_in_evaluation(monkeypatch):
    attn, x = build(attention_path="fused", attention_dropout=0.5), random(2, 6, 32)
    monkeypatch.delattr(F, "scaled_dot_product_attention")  # whoever calls it, fails
    seen = []
    attn.weights_tap.register_forward_hook(lambda module, args, out: seen.append(out))
    torch.manual_seed(0)
    first, second = attn(x), attn(x)
    assert len(seen) == 2 and not torch.allclose(first, second)
    torch.testing.assert_close(attn.eval()(x), reference_attention(attn, x), atol=1e-10, rtol=0)


def test_a_cached_step_is_never_called_causal(monkeypatch):
    """is_causal aligns the first query with the first key, which is wrong as soon as older keys are there."""
    calls, kernel = [], F.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        calls.append((kwargs.get("is_causal", False), kwargs.get("attn_mask")))
        return kernel(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for n_kv_head in (4, 2, 1):
        config = tiny(n_kv_head=n_kv_head, attention_path="fused")
        attn, cache = build(n_kv_head=n_kv_head, attention_path="fused"), layer_cache(config, 1, 16)
        attn(random(1, 3, 32), None, cache)  # nothing is cached yet
        calls.clear()
        for T in (1, 2, 3, 1):
            attn(random(1, T, 32), None, cache)
        assert [causal for causal, _ in calls] == [False] * 4
        assert [mask is None for _, mask in calls] == [True, False, False, True]  # one query sees every key


def test_the_mask_aligns_the_last_query_with_the_last_key():
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(3, 5, torch.device("cpu")).int().tolist() == expected
    in_window = [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert causal_mask(3, 5, torch.device("cpu"), window=2).int().tolist() == in_window


# Keys and values are never copied to full size


def copies_keys(attend, n_kv_head: int, T: int, S: int, width: int) -> tuple[bool, bool]:
    """Whether memory for K at full size is taken, forward and backward.

    Forward needs the output; backward the gradient of q and at most one more of that size. Everything else is
    small in the shapes used here, and K at full size is not: its copies come on top, one for K and one for V.
    """
    q, k, v = qkv(2, 16, n_kv_head, T, S, width, dtype=torch.float32)
    full = k.nbytes * 16 // n_kv_head
    out = attend(q, k, v)
    towards = torch.ones_like(out)
    forward = allocated(lambda: attend(q, k, v))
    backward = allocated(lambda: torch.autograd.grad(out, (q, k, v), towards))
    return forward > out.nbytes + full, backward > 2 * out.nbytes + full


def repeating(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What must not be done, the usual way."""
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    return fused_attention(q, k, v)


def broadcasting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What must not be done, in disguise: a matrix product over a broadcast axis copies it out."""
    B, n_head, T, width = q.shape
    q = q.view(B, k.size(1), -1, T, width)
    scores = q @ k.unsqueeze(2).transpose(-2, -1) / math.sqrt(width)
    scores = scores.masked_fill(~causal_mask(T, k.size(2), q.device), -math.inf)
    return (scores.softmax(-1) @ v.unsqueeze(2)).view(B, n_head, T, width)


copy_cases = pytest.mark.parametrize(
    "T, S, width", [(8, 8, 256), (1, 512, 64), (4, 512, 64)], ids=["training", "one_token", "chunk"]
)


@copy_cases
@pytest.mark.parametrize("n_kv_head", [2, 1], ids=["gqa", "mqa"])
@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_shared_keys_and_values_are_never_copied_out(attend, n_kv_head, T, S, width):
    assert copies_keys(attend, n_kv_head, T, S, width) == (False, False)


@copy_cases
@pytest.mark.parametrize("attend", [repeating, broadcasting])
def test_a_copy_would_be_noticed(attend, T, S, width):
    inputs = qkv(2, 16, 2, T, S, width)
    torch.testing.assert_close(attend(*inputs), fused_attention(*inputs), atol=1e-10, rtol=0)
    assert copies_keys(attend, 2, T, S, width) == (True, True)


@both_paths
@pytest.mark.parametrize("n_kv_head", [2, 1], ids=["gqa", "mqa"])
@torch.no_grad()
def test_decoding_one_token_with_a_long_cache_allocates_less_than_full_keys(path, n_kv_head):
    layout = {"n_head": 16, "head_dim": 32, "n_kv_head": n_kv_head, "attention_path": path}
    attn, cache = build(**layout), layer_cache(tiny(**layout), batch_size=2, room=512)
    attn(random(2, 511, 32), None, cache)
    x = random(2, 1, 32)
    taken = allocated(lambda: attn(x, None, cache))
    assert cache.length == 512
    full = 2 * 16 * 512 * 32 * x.element_size()
    assert 0 < taken < full / 4


# The cache


def test_a_cache_returns_everything_seen_as_views_of_its_buffers():
    cache, new = LayerCache(2, 5, [(3, 4), (1, 7)], torch.empty(0).double()), random(2, 3, 5, 4)
    other = random(2, 1, 5, 7)
    for start, end in ((0, 2), (2, 3), (3, 5)):
        keys, values = cache.append(new[:, :, start:end], other[:, :, start:end])
        assert torch.equal(keys, new[:, :, :end]) and torch.equal(values, other[:, :, :end])
        assert keys.data_ptr() == cache.buffers[0].data_ptr()
    assert cache.length == 5


def test_a_full_cache_refuses_more_and_stays_as_it_was():
    cache = LayerCache(1, 4, [(2, 3)], torch.empty(0))
    cache.append(torch.ones(1, 2, 3, 3))
    with pytest.raises(ValueError, match=r"room for 4 .* 5 "):
        cache.append(torch.ones(1, 2, 2, 3))
    assert cache.length == 3
    assert cache.append(torch.ones(1, 2, 1, 3))[0].shape == (1, 2, 4, 3)


def test_a_cleared_cache_begins_again_in_the_same_memory():
    layers = [LayerCache(1, 4, [(2, 3)], torch.empty(0)) for _ in range(2)]
    cache, memory = KVCache(layers), [layer.buffers[0].data_ptr() for layer in layers]
    for layer in layers:
        layer.append(torch.ones(1, 2, 4, 3))
    cache.clear()
    assert cache.length == 0
    for layer in layers:
        assert torch.equal(layer.append(torch.zeros(1, 2, 1, 3))[0], torch.zeros(1, 2, 1, 3))
    assert [layer.buffers[0].data_ptr() for layer in layers] == memory


def test_a_cache_with_a_window_keeps_no_more_than_the_window():
    """Written by one, and in chunks shorter and longer than the window of 3; every new position finds what it sees."""
    new = random(1, 2, 12, 4)
    for chunks in ([1] * 12, [2] * 6, [1, 2, 1, 3, 1, 4], [5, 7], [12], [3, 1, 1, 7]):
        cache = LayerCache(1, 12, [(2, 4)], torch.empty(0).double(), window=3)
        assert cache.buffers[0].shape == (1, 2, 3, 4)
        memory = cache.buffers[0].data_ptr()
        for part in new.split(chunks, dim=2):
            (seen,) = cache.append(part)
            first = max(0, cache.length - part.size(2) - 2)  # what the first of the new positions sees
            expected = new[:, :, first : cache.length]
            if part.size(2) == 1:  # in any order
                seen, expected = (t[..., 0].sort(dim=-1).values for t in (seen, expected))
            assert torch.equal(seen, expected)
        assert cache.length == 12 and cache.buffers[0].data_ptr() == memory
        with pytest.raises(ValueError, match=r"room for 12 .* 13 "):
            cache.append(new[:, :, :1])
    assert LayerCache(1, 2, [(2, 4)], torch.empty(0), window=3).buffers[0].shape == (1, 2, 2, 4)


def test_a_step_beyond_the_window_copies_nothing_of_the_cache():
    cache = LayerCache(1, 1000, [(2, 4)], torch.empty(0), window=500)
    cache.append(torch.ones(1, 2, 700, 4))
    new = torch.ones(1, 2, 1, 4)
    assert cache.append(new)[0].data_ptr() == cache.buffers[0].data_ptr()
    assert allocated(lambda: cache.append(new)) < cache.buffers[0].nbytes / 10


# Rotary positions


def test_position_p_turns_the_first_pair_by_p_radians_by_hand():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    expected = [[1.0, 0.0], [math.cos(1), math.sin(1)], [-math.sin(2), math.cos(2)]]
    turned_x = rotate(x[:, None], *rotary_tables(3, 2, 10000.0))  # one head
    torch.testing.assert_close(turned_x[:, 0], torch.tensor(expected))


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_rotation_is_a_product_of_complex_numbers(theta):
    x = random(2, 3, 9, 8)
    rotated = rotate(x.transpose(1, 2), *rotary_tables(9, 8, theta)).transpose(1, 2)
    torch.testing.assert_close(rotated, turned(x, theta), atol=1e-6, rtol=0)


def test_rotated_scores_depend_on_the_distance_alone():
    cos, sin = rotary_tables(40, 8, 10000.0)
    q, k = random(8, seed=1), random(8, seed=2)
    q, k = (rotate(x.expand(40, 1, 8), cos, sin)[:, 0] for x in (q, k))
    scores = q @ k.T  # (query, key)
    for distance in range(-39, 40):
        same = scores.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), atol=1e-5, rtol=0)
    assert scores[0].std() > 0.1  # and do depend on it


# What every design must do, in every layout


@every_layout
@both_paths
def test_every_design_keeps_the_shape_of_the_stream(layout, path):
    assert build(attention_path=path, **layout)(random(2, 5, 32)).shape == (2, 5, 32)


@every_layout
def test_every_design_computes_the_same_by_both_paths(layout):
    x, results = random(2, 7, 32), []
    for path in ("scratch", "fused"):
        attn = build(attention_path=path, **layout)
        out = attn(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), attn.parameters())])
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)


@every_layout
@both_paths
def test_no_design_lets_a_position_see_later_ones(layout, path):
    attn, x = build(attention_path=path, **layout), random(2, 7, 32)
    before = attn(x)
    for i in range(6):
        changed = x.clone()
        changed[:, i + 1 :] *= -1e4
        after = attn(changed)
        torch.testing.assert_close(after[:, : i + 1], before[:, : i + 1], atol=1e-10, rtol=0)
        assert not torch.allclose(after[:, i + 1 :], before[:, i + 1 :])


@every_layout
@both_paths
@torch.no_grad()
def test_every_design_decodes_from_its_cache_what_it_computes_at_once(layout, path):
    config, attn, x = tiny(**layout), build(attention_path=path, **layout), random(2, 9, 32)
    for chunks in ([9], [1] * 9, [4, 1, 1, 3], [2, 3, 4], [1, 7, 1]):
        cache = layer_cache(config, 2, room=9)
        steps = [attn(part, None, cache) for part in x.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), attn(x), atol=1e-10, rtol=0)


@every_layout
def test_every_design_names_settings_that_exist(layout):
    settings = DESIGNS[layout["design"]].settings
    assert set(layout) - {"design", "n_head", "head_dim"} <= settings <= set(ModelConfig.__dataclass_fields__)
