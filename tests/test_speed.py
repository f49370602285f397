"""The measurement of speed: turns, what is timed, counts and bytes by formula, memory. No test looks at a time."""

import json
import math

import pytest
import torch
from reference import every_layout, tiny

from attention import grouped
from lab import speed
from lab.speed import (
    check_memory,
    count,
    decode,
    decode_attention,
    decoder,
    gain_expected,
    interleave,
    machine_limits,
    measure,
    peak_memory,
    prefill,
    prefill_flops,
    random_ids,
    weight_bytes,
)
from model import GPT, ModelConfig
from runtime.errors import EnvironmentFault, UserError

# By hand, a block: w_q and w_o 64 each, w_k and w_v 32 each, the MLP 256, norms 16. Two blocks, a norm of 8, and
# 80 each for embedding and head.
SMALL = ModelConfig(n_layer=2, n_embd=8, n_head=2, n_kv_head=1, head_dim=4, d_ff=16, vocab_size=10, block_size=6)
MATRICES, VECTORS = 2 * (64 + 64 + 32 + 32 + 256), 2 * 16 + 8


class Clock:
    """Time that passes only in the calls, each of which is written down."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def call(self, name, *costs):
        costs = list(costs)

        def act():
            self.calls.append(name)
            self.now += costs.pop(0) if len(costs) > 1 else costs[0]

        return act

    def __call__(self):
        return self.now


def test_designs_take_turns_and_the_warm_up_is_left_out(monkeypatch):
    monkeypatch.setattr(speed, "LEAST_SECONDS", 0.5)
    clock = Clock()
    work = {"a": clock.call("a", 7.0, 1.0, 2.0, 4.0), "b": clock.call("b", 9.0, 3.0)}
    times = interleave(work, 3, clock=clock)
    assert clock.calls == ["a", "b"] + ["a", "b"] * 3
    assert times == {"a": [1.0, 2.0, 4.0], "b": [3.0, 3.0, 3.0]}


def test_short_calls_are_repeated_until_a_turn_is_long_enough(monkeypatch):
    monkeypatch.setattr(speed, "LEAST_SECONDS", 0.5)
    clock = Clock()
    turns = []
    times = interleave({"a": clock.call("a", 0.25), "b": clock.call("b", 2.0)}, 2, turns.append, clock)
    assert clock.calls == ["a", "a", "b"] * 3
    assert times == {"a": [0.25, 0.25], "b": [2.0, 2.0]}
    assert turns == ["a", "b"] * 3


def test_counts_equal_those_by_hand_and_nothing_is_built():
    assert count(SMALL) == {
        "parameters": MATRICES + VECTORS + 2 * 80,
        "parameters_without_embeddings": MATRICES + VECTORS,
        "flops_per_token": 6 * (MATRICES + 80) + 6 * 2 * (2 * 2 * 4) * 6,
        "cache_bytes_per_token": 2 * 2 * 4 * 4,
        "cache_bytes_at_full_context": 6 * 2 * 2 * 4 * 4,
        "cache_bytes_allocated": 2 * 2 * 4 * 4,
    }
    assert count(ModelConfig(n_embd=2**20, n_layer=2, vocab_size=2**20))["parameters"] > 2**40


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_all_weights_but_the_tables(tied):
    config = ModelConfig(**vars(SMALL) | {"tie_embeddings": tied, "positions": "learned", "rope_theta": None})
    assert weight_bytes(GPT(config)) == 4 * (MATRICES + VECTORS + 80)


def test_prefill_counts_the_head_once_and_only_keys_that_are_seen():
    # A token sees (4 + 1) / 2 of 4 keys on average, with 2 x 2 heads x 4 multiply-adds for each and layer.
    assert prefill_flops(GPT(SMALL), 4) == pytest.approx(2 * MATRICES + 2 * 80 / 4 + 2 * 2 * (2 * 2 * 4) * (4 + 1) / 2)


def test_a_gain_is_expected_where_the_cache_of_mha_weighs_as_much_as_the_weights():
    assert gain_expected(1, 768, 128) and gain_expected(16, 48, 128)
    assert not gain_expected(1, 767, 128)


@every_layout
@torch.inference_mode()
def test_a_decoding_call_is_the_step_that_follows_the_prefill_however_often_it_is_made(layout):
    model = decoder(tiny(**layout, block_size=6), 9)
    assert model.config.block_size == 9
    for name, parameter in model.named_parameters():  # those of w_o begin at zero, and hide the attention
        if "norm" not in name:
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    cache = model.new_cache(3, 9)
    for attention_alone in decode_attention(model, cache):
        attention_alone()
    first = prefill(model, cache)()
    tokens = random_ids(model, 3, 9)
    torch.testing.assert_close(first, model(tokens)[:, -1], atol=1e-4, rtol=0)
    step = decode(model, cache)
    last = torch.cat((tokens[:, :8], random_ids(model, 3, 1)), dim=1)
    for _ in range(3):
        torch.testing.assert_close(step(), model(last)[:, -1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("n_kv_head", [1, 2])
@torch.inference_mode()
def test_attention_is_measured_over_a_cache_for_every_layer_and_sdpa_on_the_same_tensors(monkeypatch, n_kv_head):
    model = decoder(ModelConfig(**vars(SMALL) | {"n_kv_head": n_kv_head}), 5)
    cache = model.new_cache(3, 5)
    seen: dict[str, list] = {"fused": [], "sdpa": []}
    options = []
    monkeypatch.setattr(grouped, "fused_attention", lambda *tensors: seen["fused"].append(tensors[:3]))

    def sdpa(*tensors, **given):
        seen["sdpa"].append(tensors)
        options.append(given)

    monkeypatch.setattr(speed.F, "scaled_dot_product_attention", sdpa)
    for call in decode_attention(model, cache):
        call()
    for (q, k, v), layer in zip(seen["fused"], cache.layers, strict=True):
        assert q.shape == (3, 2, 1, 4) and k.shape == v.shape == (3, n_kv_head, 5, 4)
        assert k is layer.buffers[0] and v is layer.buffers[1]
    assert all(a is b for ours, theirs in zip(*seen.values(), strict=True) for a, b in zip(ours, theirs, strict=True))
    assert options == [{"enable_gqa": n_kv_head == 1}] * 2


def test_limits_are_work_over_the_best_time_and_threads_are_put_back(monkeypatch):
    monkeypatch.setattr(speed, "READ_BYTES", 4096)
    monkeypatch.setattr(speed, "MATMUL_SIZE", 8)
    times = iter([0.5, 0.25] + [0.5] * (speed.LIMIT_TRIES - 2) + [0.125] * speed.LIMIT_TRIES)
    threads = []

    def seconds(call):
        call()
        threads.append(torch.get_num_threads())
        return next(times)

    monkeypatch.setattr(speed, "seconds", seconds)
    before = torch.get_num_threads()
    limits = machine_limits(before + 1)
    assert limits["matmul_gflops"] == pytest.approx(2 * 8**3 / 0.25 / 1e9)
    assert limits["read_gb_per_s"] == pytest.approx(4096 / 0.125 / 1e9)
    assert set(threads) == {before + 1} and torch.get_num_threads() == before


@pytest.fixture
def measured(monkeypatch):
    """What `measure` gives for two designs whose limits and memory are made up, and what it told of its progress."""

    def limits(threads, device):
        return {"matmul_gflops": 100.0, "read_gb_per_s": 10.0, "threads_then": torch.get_num_threads()}

    monkeypatch.setattr(speed, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(speed, "machine_limits", limits)
    monkeypatch.setattr(speed, "peak_memory", lambda name, config, task: {"start": 1.0, "name": name, "task": task})
    configs = {"mha": ModelConfig(**vars(SMALL) | {"n_kv_head": 2}), "mqa": SMALL}
    told: list[tuple[float, str]] = []
    threads = torch.get_num_threads()
    result = measure(configs, [1, 3], [4, 48], 2, 3, lambda *words: told.append(words), threads=threads + 1)
    assert torch.get_num_threads() == threads
    return result, told, configs


def test_a_measurement_holds_every_cell_of_every_design(measured):
    result, _, configs = measured
    json.dumps(result, allow_nan=False)
    assert result["rounds"] == 3
    assert result["threads"] == result["limits"]["threads_then"] == torch.get_num_threads() + 1
    for part in ("prefill", "decode", "decode_attention"):
        for design in result["designs"].values():
            cells = [(found["batch"], found["context"]) for found in design[part]]
            assert cells == [(1, 4), (1, 48), (3, 4), (3, 48)]
    assert [d["gain_expected"] for d in result["designs"]["mha"]["decode"]] == [False, True, False, True]
    task = result["designs"]["mqa"]["peak_memory_mb"]["task"]
    assert (task["batch"], task["context"], task["train_batch"]) == (3, 48, 2)


def test_rates_bytes_and_shares_agree_with_each_other(measured):
    result, _, configs = measured
    near = {"rel": 1e-3}  # figures are rounded
    for name, design in result["designs"].items():
        kv, model = {"mha": 2, "mqa": 1}[name], GPT(configs[name])
        training = design["training"]
        flops = model.flops_per_token(causal=True)
        assert training["gflops"] == pytest.approx(training["tokens_per_s"]["median"] * flops / 1e9, **near)
        assert training["share_of_matmul"] == pytest.approx(training["gflops"] / 100, **near)
        for d, a in zip(design["decode"], design["decode_attention"], strict=True):
            size = d["batch"] * d["context"] * 2 * 2 * kv * 4 * 4  # layers, K and V, heads, width, bytes
            assert d["cache_mb"] == pytest.approx(size / 1e6, **near)
            ms = d["ms_per_step"]["median"]
            assert d["tokens_per_s"]["median"] == pytest.approx(1e3 * d["batch"] / ms, **near)
            assert d["gb_per_s"] == pytest.approx((weight_bytes(model) + size) / ms / 1e6, **near)
            assert d["share_of_read"] == pytest.approx(d["gb_per_s"] / 10, **near)
            assert a["gb_per_s"] == pytest.approx(size / a["ms"]["median"] / 1e6, **near)
            assert a["share_of_ideal"] == pytest.approx(a["gb_per_s"] / 10, **near) and a["caches"] == 2
            for rate in (d["tokens_per_s"], a["ms"], a["sdpa_ms"]):
                assert 0 < rate["low"] <= rate["median"] <= rate["high"] < math.inf


def test_progress_rises_to_the_end_and_designs_alternate_in_it(measured):
    _, told, _ = measured
    shares = [share for share, _ in told]
    assert shares == sorted(set(shares)) and shares[-1] == 1.0
    training = [what for _, what in told if what.startswith("training")]
    assert training == ["training, mha", "training, mqa"] * 4  # warm-up and three rounds


def test_a_grid_that_would_not_fit_is_refused_with_its_cell_and_sizes():
    configs = {"mha": ModelConfig(vocab_size=96), "mqa": ModelConfig(n_kv_head=1, vocab_size=96)}
    check_memory(configs, [1, 16], [128, 2048], 8, available=10**9)
    with pytest.raises(UserError) as error:
        check_memory(configs, [1, 16], [128, 2048], 8, available=10**8)
    # By formula 3 layers x 2 x 128 x 4 bytes for each of 32,768 tokens, and an eighth of that.
    assert str(error.value).startswith("batch 16 x context 2048 needs about ")
    assert "and 0.10 GB of memory are free" in str(error.value)
    assert "0.10 GB for the cache of mha, 0.01 GB for the cache of mqa" in str(error.value)


def test_a_model_that_could_not_be_trained_is_refused_with_its_size():
    config = ModelConfig(n_embd=8192, n_layer=80, vocab_size=96)
    with pytest.raises(UserError, match=r"training big needs about .*big has 64,\d{3},\d{3},\d{3} parameters"):
        check_memory({"big": config}, [1], [4], 1, available=10**10)


def test_what_a_window_bounds_is_not_asked_for():
    check_memory({"window": ModelConfig(vocab_size=96, window=8)}, [16], [2048], 1, available=3 * 10**8)
    with pytest.raises(UserError, match="for the cache of mha"):
        check_memory({"mha": ModelConfig(vocab_size=96)}, [16], [2048], 1, available=3 * 10**8)


def test_where_the_free_memory_is_unknown_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(speed, "available_memory", lambda device: None)
    check_memory({"big": ModelConfig(n_embd=8192, n_layer=80, vocab_size=96)}, [10**6], [10**6], 1)


TASK = {"batch": 48, "context": 512, "train_batch": 1, "device": "cpu", "threads": 1}


@pytest.mark.skipif(speed.peak_mb() is None, reason="peak memory cannot be read on this system")
def test_peak_memory_is_of_a_process_of_its_own_and_holds_the_cache():
    held = torch.ones(250_000_000)  # a GB of ours, which is none of theirs
    config = ModelConfig(n_layer=1, n_embd=8, n_head=1, head_dim=512, d_ff=8, vocab_size=10, block_size=8)
    peaks = peak_memory("wide", config, TASK)
    assert 0 < peaks["start"] < held.nbytes / 1e6
    assert peaks["start"] <= peaks["training"] < peaks["decoding"]
    assert peaks["decoding"] - peaks["start"] > 48 * 512 * 2 * 512 * 4 / 1e6


def test_a_process_that_dies_is_told_with_its_design(monkeypatch):
    monkeypatch.setattr(speed.sys, "executable", "/bin/false")
    with pytest.raises(EnvironmentFault, match="mqa: the process that measures the memory of training ended with"):
        peak_memory("mqa", SMALL, TASK)
