"""The model: its formula, its initial values, decoding from the cache, what it costs, and what it refuses."""

import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from reference import LAYOUTS, every_layout, lively, random, random_tokens, reference_attention, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, LARGE_VOCABULARY, ModelConfig, tokens_at_once

# The formula


def reference_norm(config: ModelConfig, norm: nn.Module, x: Tensor) -> Tensor:
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    return x if getattr(norm, "bias", None) is None else x + norm.bias


ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "swiglu": lambda x: x / (1 + torch.exp(-x)),  # of the gate
}


def reference_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    def linear(layer: nn.Linear, x: Tensor) -> Tensor:
        return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)

    act, h = ACTIVATIONS[mlp.activation], linear(mlp.w_in, x)
    return linear(mlp.w_out, act(linear(mlp.w_gate, x)) * h if mlp.activation == "swiglu" else act(h))


def reference_position(model: GPT, x: Tensor) -> Tensor:
    """Adds learned or sinusoidal positions (Vaswani et al. 2017, 3.4 and 3.5) to the embeddings."""
    T, width = x.shape[-2:]
    if model.config.positions == "learned":
        return x + model.embed_position.weight[:T]
    if model.config.positions == "sinusoidal":
        wave = (math.sin, math.cos)
        table = [[wave[i % 2](p / 10000 ** (i // 2 * 2 / width)) for i in range(width)] for p in range(T)]
        return x * math.sqrt(width) + torch.tensor(table, dtype=x.dtype)
    return x


def reference_logits(model: GPT, idx: Tensor) -> Tensor:
    config, x = model.config, reference_position(model, model.embed.weight[idx])
    for block in model.blocks:

        def attend(x: Tensor, block: nn.Module = block) -> Tensor:
            return reference_attention(block.attn, x, config.rope_theta)

        if config.norm_position == "pre":
            x = x + attend(reference_norm(config, block.norm_attn, x))
            x = x + reference_mlp(block.mlp, reference_norm(config, block.norm_mlp, x))
        else:
            x = reference_norm(config, block.norm_attn, x + attend(x))
            x = reference_norm(config, block.norm_mlp, x + reference_mlp(block.mlp, x))
    if config.norm_position == "pre":
        x = reference_norm(config, model.norm, x)
    return x @ (model.embed if config.tie_embeddings else model.head).weight.T


VARIANTS = [
    *({"activation": name} for name in ACTIVATIONS),
    *({"norm": norm, "norm_position": at} for norm in ("rmsnorm", "layernorm") for at in ("pre", "post")),
    *({"positions": name} for name in ("none", "learned", "sinusoidal", "rotary")),
    {"positions": "rotary", "rope_theta": 500.0},
    {"bias": True, "norm": "layernorm", "activation": "swiglu"},
    {"n_kv_head": 2, "head_dim": 10},
    {"qk_norm": True},
    {"tie_embeddings": True},
    {"d_ff": 50},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_model_computes_its_formula(settings):
    model, idx = lively(GPT(tiny(**({"positions": "none"} | settings)))).double(), random_tokens(2, 7)
    # Position tables are kept in fp32, which a float64 model shows.
    tolerance = 1e-5 if settings.get("positions") in ("rotary", "sinusoidal") else 1e-10
    torch.testing.assert_close(model(idx), reference_logits(model, idx), atol=tolerance, rtol=tolerance)


def test_the_loss_is_the_mean_of_minus_log_the_probability_of_the_targets():
    model, idx, targets = lively(GPT(tiny())).double(), random_tokens(2, 7), random_tokens(2, 7).flip(1)
    p = model(idx).softmax(-1).tolist()
    terms = [-math.log(p[b][t][targets[b, t]]) for b in range(2) for t in range(7)]
    assert model(idx, targets).item() == pytest.approx(sum(terms) / 14, rel=1e-6)
    assert model(idx, targets, reduction="sum").item() == pytest.approx(sum(terms), rel=1e-6)


def test_dropout_acts_on_the_embeddings_and_on_each_sublayers_output_and_only_in_training():
    config = tiny(dropout=0.5, norm_position="pre")
    model, idx = lively(GPT(config)), random_tokens(2, 7)
    in_eval = model.eval().hidden(idx)
    torch.testing.assert_close(in_eval, lively(GPT(tiny(dropout=0.0, norm_position="pre"))).hidden(idx))
    assert not torch.allclose(model.train().hidden(idx), in_eval)

    for block in model.blocks:  # dropped as a whole, the sublayers leave the stream as it was
        block.dropout.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    model.eval()
    torch.testing.assert_close(model.hidden(idx), model.norm(model.embed(idx)))
    model.dropout.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    assert not model.hidden(idx).any()


def test_biases_are_in_every_layer_but_the_head_or_nowhere():
    model = GPT(tiny(bias=True, norm="layernorm", activation="swiglu", n_layer=1))
    without = {
        name for name, m in model.named_modules() if hasattr(m, "weight") and getattr(m, "bias", None) is None
    }
    assert without == {"embed", "head"}
    plain = GPT(tiny(bias=False, norm="layernorm", activation="swiglu", n_layer=1))
    assert [name for name, _ in plain.named_parameters() if "bias" in name] == []


@every_layout
def test_every_parameter_takes_part_in_the_loss(layout):
    model = lively(GPT(tiny(bias=True, norm="layernorm", positions="learned", **layout)))
    model(random_tokens(2, 16), random_tokens(2, 16).flip(1)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


# Initial values: a pure function of the seed and the parameter's name and shape


def initial(seed: int = 1, **settings) -> dict[str, Tensor]:
    return dict(GPT(tiny(**settings), seed=seed).named_parameters())


@every_layout
def test_designs_share_the_initial_values_of_what_they_have_in_common(layout):
    ours, mha = initial(**layout), initial(n_head=4, n_kv_head=4)
    shared = [name for name in ours if name in mha and ours[name].shape == mha[name].shape]
    assert {"embed.weight", "blocks.1.mlp.w_in.weight", "head.weight"} <= set(shared)
    assert all(torch.equal(ours[name], mha[name]) for name in shared)


def test_mha_and_mqa_begin_with_equal_queries_and_outputs_and_differ_in_keys_and_values():
    mha, mqa = initial(n_kv_head=4), initial(n_kv_head=1)
    differing = {name for name in mha if not torch.equal(mha[name], mqa[name])}
    assert differing == {f"blocks.{i}.attn.w_{kv}.weight" for i in range(2) for kv in "kv"}


def test_another_seed_or_another_name_draws_other_values():
    one, two = initial(seed=1), initial(seed=2)
    drawn = [name for name in one if "norm" not in name]
    assert not any(torch.equal(one[name], two[name]) for name in drawn)
    assert not torch.equal(one["blocks.0.attn.w_q.weight"], one["blocks.1.attn.w_q.weight"])


def test_depth_changes_nothing_but_the_scale_of_what_writes_to_the_stream():
    shallow, deep = initial(n_layer=2), initial(n_layer=8)
    for name, values in shallow.items():
        scale = 2 if name.endswith(("w_o.weight", "w_out.weight")) else 1  # sqrt(2 * 8) / sqrt(2 * 2)
        torch.testing.assert_close(deep[name] * scale, values)


def test_building_a_model_neither_reads_nor_moves_the_global_random_state():
    torch.manual_seed(3)
    before, first = torch.get_rng_state(), initial()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second = initial()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_initial_values_have_the_intended_spread():
    big = {"n_layer": 8, "n_embd": 128, "vocab_size": 128, "positions": "learned"}
    for name, p in initial(bias=True, norm="layernorm", **big).items():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:  # what writes to the stream is divided by sqrt(2 n_layer) = 4
            expected = 0.02 / 4 if name.endswith(("w_o.weight", "w_out.weight")) else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.07), name
            assert abs(p.mean().item()) < 0.1 * expected, name


def test_scaled_initial_values_follow_the_fan_in_and_every_block_begins_as_the_identity():
    config = tiny(init="scaled", n_embd=128, d_ff=512, vocab_size=128)
    model = GPT(config)
    for name, p in model.named_parameters():
        if name.endswith(("w_o.weight", "w_out.weight")):
            assert not p.any(), name
        elif "norm" not in name:
            expected = 0.5 / math.sqrt(128) if name.startswith("blocks") else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.07), name
    idx = random_tokens(2, 8, vocab_size=128)
    torch.testing.assert_close(model.hidden(idx), model.norm(model.embed(idx)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("design", ["grouped", "latent"])
@pytest.mark.parametrize("init", ["scaled", "gpt2"])
def test_gates_begin_about_half_open(design, init):
    """Where a sigmoid is steepest: x is normed and the weights' spread is 0.5 / sqrt(n_embd), so that sd is 0.12."""
    attn = GPT(ModelConfig(design=design, gate=True, init=init, vocab_size=20)).blocks[0].attn
    gates = attn.w_gate(random(4000, 128, dtype=torch.float32)).sigmoid()
    assert gates.mean().item() == pytest.approx(0.5, abs=0.02)
    expected = 0.5 / 4 if init == "scaled" else 0.02 * math.sqrt(128) / 4  # the sigmoid's slope is 1/4
    assert gates.std().item() == pytest.approx(expected, rel=0.15)


# Decoding from the cache


@every_layout
@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "none"])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(layout, positions):
    model, idx = lively(GPT(tiny(positions=positions, **layout)), std=0.2), random_tokens(2, 12)
    full = model(idx)
    for chunks in ([12], [1] * 12, [5, 1, 1, 5], [3, 4, 5]):
        cache = model.new_cache(2, 12)
        steps = [model(part, cache=cache) for part in idx.split(chunks, dim=1)]
        assert cache.length == 12
        torch.testing.assert_close(torch.cat(steps, dim=1), full, atol=1e-5, rtol=0)


@every_layout
@torch.no_grad()
def test_decoding_past_the_room_is_refused_and_changes_nothing(layout):
    model, idx = lively(GPT(tiny(**layout)), std=0.2), random_tokens(1, 16)
    cache = model.new_cache(1, 4)
    model(idx[:, :3], cache=cache)
    with pytest.raises(ValueError, match=r"\b4\b.*\b5\b"):
        model(idx[:, 3:5], cache=cache)
    assert [layer.length for layer in cache.layers] == [3, 3]
    torch.testing.assert_close(model(idx[:, 3:4], cache=cache), model(idx[:, :4])[:, 3:], atol=1e-5, rtol=0)


@torch.no_grad()
def test_more_tokens_than_block_size_are_refused_with_both_numbers():
    model = GPT(tiny(block_size=16))
    with pytest.raises(ValueError, match=r"\b17\b.*\b16\b"):
        model(random_tokens(1, 17))
    cache = model.new_cache(1, 99)
    model(random_tokens(1, 10), cache=cache)
    with pytest.raises(ValueError, match=r"\b17\b.*\b16\b"):
        model(random_tokens(1, 7), cache=cache)
    model(random_tokens(1, 6), cache=cache)
    assert cache.length == 16


# What a model costs


GPT2 = {
    "vocab_size": 50257,
    "block_size": 1024,
    "positions": "learned",
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "bias": True,
    "tie_embeddings": True,
}
LLAMA = {
    "vocab_size": 32000,
    "block_size": 2048,
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
PUBLISHED = {
    "gpt2": (GPT2 | {"n_embd": 768, "n_head": 12, "n_layer": 12}, 124_439_808),
    "gpt2-medium": (GPT2 | {"n_embd": 1024, "n_head": 16, "n_layer": 24}, 354_823_168),
    "gpt3-175b": (GPT2 | {"n_embd": 12288, "n_head": 96, "n_layer": 96, "block_size": 2048}, 174_604_259_328),
    "llama-7b": (LLAMA | {"n_embd": 4096, "n_head": 32, "n_layer": 32, "d_ff": 11008}, 6_738_415_616),
    "llama-65b": (LLAMA | {"n_embd": 8192, "n_head": 64, "n_layer": 80, "d_ff": 22016}, 65_285_660_672),
    "llama2-70b": (
        LLAMA | {"n_embd": 8192, "n_head": 64, "n_kv_head": 8, "n_layer": 80, "d_ff": 28672},
        68_976_648_192,
    ),
}


@pytest.mark.parametrize("settings, parameters", PUBLISHED.values(), ids=PUBLISHED)
def test_published_models_have_their_published_parameter_counts(settings, parameters):
    with torch.device("meta"):
        model = GPT(tiny(**settings))
    assert model.num_parameters() == parameters


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_parameters_are_counted_by_hand_and_tied_ones_once(tied):
    model = GPT(tiny(n_kv_head=1, d_ff=50, positions="learned", tie_embeddings=tied))
    layer = 32 * 32 + 2 * 32 * 8 + 32 * 32 + 2 * 32 * 50 + 2 * 32  # q, k and v, o, MLP, two norms
    inner = 2 * layer + 32  # and the last norm
    assert model.num_parameters(embeddings=False) == inner
    assert model.num_parameters() == inner + 20 * 32 + 16 * 32 + (0 if tied else 20 * 32)
    assert (model.head.weight is model.embed.weight) == tied


@every_layout
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_training_flops_are_those_of_a_real_step(layout, activation, tied):
    config = tiny(attention_path="scratch", activation=activation, tie_embeddings=tied, **layout)
    model, idx = GPT(config), random_tokens(2, 12)
    with FlopCounterMode(display=False) as forward:
        loss = model(idx, idx)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counted = 2 * 12 * model.flops_per_token(context=12)
    assert 3 * forward.get_total_flops() == counted
    # A new design may have weights that are no function of its input and need no gradient: its step costs less.
    step = forward.get_total_flops() + backward.get_total_flops()
    assert step == counted if layout["design"] in LAYOUTS else step <= counted


def test_training_flops_by_hand():
    model = GPT(tiny(n_kv_head=1, head_dim=10, d_ff=50, activation="relu", block_size=16))
    per_layer = 32 * 40 + 2 * 32 * 10 + 40 * 32 + 2 * 32 * 50  # weights of q, k and v, o and the MLP
    weights = 2 * per_layer + 32 * 20  # two layers and the head
    per_key = 2 * 2 * 4 * 10  # layers, one product with K and one with V, heads, width
    # A multiply-add is 2 FLOPs; backward does twice the work of forward.
    assert model.flops_per_token() == 6 * (weights + 16 * per_key)
    assert model.flops_per_token(context=5) == 6 * (weights + 5 * per_key)
    seen = [1, 2, 3, 4, 5]  # keys that each of five tokens sees
    assert model.flops_per_token(context=5, causal=True) == 6 * (weights + sum(seen) / 5 * per_key)
    assert model.flops_per_token(context=4, causal=True) == 6 * (weights + 2.5 * per_key)
    model = GPT(tiny(n_kv_head=1, head_dim=10, d_ff=50, activation="relu", window=2))
    seen = [1, 2, 2, 2]
    assert model.flops_per_token(context=4, causal=True) == 6 * (weights + sum(seen) / 4 * per_key)
    assert model.flops_per_token(context=4) == 6 * (weights + 4 * per_key)  # what is masked is computed all the same


@every_layout
def test_cache_bytes_by_formula_are_the_bytes_allocated(layout):
    model = GPT(tiny(**layout))
    cache = model.new_cache(batch_size=3, room=11)
    allocated = sum(buffer.untyped_storage().nbytes() for layer in cache.layers for buffer in layer.buffers)
    assert cache.nbytes == allocated == 3 * model.cache_bytes(11)
    assert model.new_cache(batch_size=1).nbytes == model.cache_bytes()  # block_size
    assert model.cache_bytes_per_token() == model.cache_bytes() // 16


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_the_cache_holds_k_and_v_of_the_groups_alone(n_kv_head):
    model = GPT(tiny(n_layer=3, n_head=4, n_kv_head=n_kv_head, head_dim=10))
    assert model.new_cache(1, 7).nbytes == 2 * 3 * n_kv_head * 10 * 4 * 7  # K and V, layers ... fp32, room


def test_a_window_bounds_the_cache_at_every_length():
    model, whole = GPT(tiny(block_size=100, window=30)), GPT(tiny(block_size=100))
    per_token = 2 * 2 * 32 * 4  # layers, K and V, all heads' width, fp32
    assert [model.cache_bytes(context) for context in (1, 29, 30, 31, 1000)] == [
        per_token * kept for kept in (1, 29, 30, 30, 30)
    ]
    assert model.new_cache(2).nbytes == 2 * model.cache_bytes() == 2 * 30 * per_token
    assert whole.cache_bytes(31) == 31 * per_token and whole.cache_bytes_per_token() == per_token
    assert model.cache_bytes_per_token() == per_token * 30 // 100
    assert model.cache_bytes_per_token(2) == per_token // 2 * 30 // 100


@torch.no_grad()
def test_a_window_as_long_as_the_context_changes_nothing():
    windowed, whole = (lively(GPT(tiny(window=window))) for window in (16, None))
    torch.testing.assert_close(windowed(random_tokens(2, 16)), whole(random_tokens(2, 16)))


@torch.no_grad()
def test_a_token_reaches_as_far_as_the_layers_have_windows():
    """Each of two layers lets a token see 2 before itself: it knows of those up to 4 back, and of none before."""
    model, idx = lively(GPT(tiny(window=3, positions="none"))).double(), random_tokens(1, 12)
    whole = model(idx)
    for back, known in ((4, True), (5, False)):
        changed = idx.clone()
        changed[0, 11 - back] += 1
        assert torch.allclose(model(changed)[0, 11], whole[0, 11], atol=1e-12) != known


def test_multi_query_caches_one_hth_of_multi_head():
    mha, mqa = (GPT(tiny(n_head=8, n_kv_head=n)) for n in (8, 1))
    assert mha.new_cache(2, 16).nbytes == 8 * mqa.new_cache(2, 16).nbytes
    assert mha.cache_bytes_per_token() == 8 * mqa.cache_bytes_per_token()


# What a config refuses, and what it fills in

SIZES = ["n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "d_ff", "block_size", "vocab_size", "window",
         "kv_rank", "rope_dim"]  # fmt: skip


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"n_head": 4, "n_kv_head": 3}, ["n_head 4", "n_kv_head 3"]),
        ({"n_head": 2, "n_kv_head": 4}, ["n_head 2", "n_kv_head 4"]),
        ({"n_embd": 130, "n_head": 8}, ["n_embd 130", "n_head 8"]),
        ({"head_dim": 5, "positions": "rotary"}, ["rotary", "head_dim 5"]),
        ({"w_o": False, "n_head": 4, "head_dim": 6}, ["w_o", "n_head 4", "head_dim 6", "n_embd 32"]),
        ({"positions": "learned", "rope_theta": 500.0}, ["rope_theta 500.0", "learned"]),
        ({"design": "latent", "positions": "learned", "rope_dim": 4}, ["rope_dim 4", "learned", "leave it out"]),
        ({"design": "latent", "rope_dim": 5}, ["pairs", "rope_dim 5"]),
        ({"design": "latent", "n_kv_head": 2}, ["n_kv_head 2", "latent", "leave it out"]),
        ({"design": "latent", "qk_norm": True}, ["qk_norm True", "latent", "leave it out"]),
        ({"design": "grouped", "kv_rank": 8}, ["kv_rank 8", "grouped", "leave it out"]),
        ({"design": "grouped", "rope_dim": 8}, ["rope_dim 8", "grouped", "leave it out"]),
        ({"design": "linear"}, ["design", "grouped, latent", "linear"]),
        ({"positions": "rotary", "rope_theta": -1.0}, ["rope_theta", "0", "-1.0"]),
        ({"dropout": 1.0}, ["dropout", "below 1", "1.0"]),
        ({"dropout": -0.1}, ["dropout", "at least 0", "-0.1"]),
        ({"attention_dropout": 1.0}, ["attention_dropout", "below 1", "1.0"]),
        ({"n_layer": -2}, ["n_layer", "at least 1", "-2"]),
        *(({name: 0}, [name, "at least 1", "not 0"]) for name in SIZES),
    ],
    ids=str,
)
def test_an_impossible_config_is_refused_and_the_numbers_are_named(settings, said):
    with pytest.raises(ValueError) as error:
        tiny(**settings)
    assert all(part in str(error.value) for part in said), str(error.value)


def test_a_model_without_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(tiny(vocab_size=None))


def test_what_is_left_unset_is_filled_in():
    config = tiny(n_embd=48, n_head=4, n_kv_head=None, head_dim=None, d_ff=None, positions="rotary")
    assert (config.n_kv_head, config.head_dim, config.d_ff, config.rope_theta) == (4, 12, 192, 10000.0)
    assert tiny(positions="none").rope_theta is None


@every_layout
@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "none"])
def test_a_config_built_from_its_own_values_is_the_same(layout, positions):
    config = tiny(positions=positions, **layout)
    assert ModelConfig(**asdict(config)) == config


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_large_vocabulary_never_holds_all_logits_and_gives_the_same_loss_and_gradients(reduction):
    V = 5000
    T = tokens_at_once(V) + 45  # two slices, one of them short
    config = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=T, vocab_size=V, tie_embeddings=True)
    ids = torch.randint(V, (1, T + 1), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[0, ::7] = -100
    sliced, plain = GPT(config), GPT(config)
    with Largest() as seen:
        loss = sliced(ids[:, :-1], targets, reduction=reduction)
        loss.backward()
    assert seen.elements < 0.99 * T * V
    logits = plain(ids[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for (name, p), q in zip(sliced.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name
    with Largest() as seen:
        GPT(replace(config, vocab_size=LARGE_VOCABULARY - 1))(torch.zeros(1, T, dtype=torch.long), targets % 2)
    assert seen.elements == T * (LARGE_VOCABULARY - 1)  # below it, the plain way
