"""Multi-head latent attention: the paper's formula, the absorbed form, and what is cached."""

import math

import pytest
import torch
from reference import allocated, both_paths, lively, random, random_tokens, tiny, turned
from torch import Tensor, nn

from attention.cache import LayerCache
from attention.latent import LatentAttention
from attention.rotary import rotary_tables
from model import GPT, ModelConfig

LAYOUTS = [
    {},
    {"kv_rank": 5, "rope_dim": 6, "head_dim": 10, "n_head": 3},
    {"n_head": 1},
    {"positions": "none"},
    {"gate": True, "bias": True},
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
PRECISIONS = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


def build(dtype: torch.dtype = torch.float64, **settings) -> tuple[LatentAttention, ModelConfig]:
    config = tiny(design="latent", **settings)
    return lively(LatentAttention(config)).to(dtype), config


def new_cache(config: ModelConfig, batch_size: int, room: int, dtype: torch.dtype = torch.float64) -> LayerCache:
    return LayerCache(batch_size, room, LatentAttention.cache_shapes(config), torch.empty(0, dtype=dtype))


def by_the_paper(attn: LatentAttention, x: Tensor, theta: float | None) -> Tensor:
    """Equations 9 to 19 of arXiv 2405.04434 for one head and one position at a time, with the query of 2.1.2 direct."""
    d, r = attn.head_dim, attn.rope_dim

    def project(linear: nn.Linear, x: Tensor, rows: slice = slice(None)) -> Tensor:
        return x @ linear.weight[rows].T + (0 if linear.bias is None else linear.bias[rows])

    c = project(attn.w_dkv, x)
    c = c / c.square().mean(-1, keepdim=True).sqrt()  # (B, T, kv_rank)
    heads = []
    for j in range(attn.n_head):
        of_head, of_rotary = slice(j * d, (j + 1) * d), slice(j * r, (j + 1) * r)
        q, k, v = project(attn.w_q, x, of_head), project(attn.w_uk, c, of_head), project(attn.w_uv, c, of_head)
        if r:
            q_r, k_r = project(attn.w_qr, x, of_rotary), project(attn.w_kr, x)
            if theta is not None:
                q_r, k_r = turned(q_r, theta), turned(k_r, theta)
            q, k = torch.cat((q, q_r), -1), torch.cat((k, k_r), -1)  # (B, T, d + r)
        outputs = []
        for i in range(x.size(1)):  # given nothing but what stands up to i
            scores = (q[:, i : i + 1] * k[:, : i + 1]).sum(-1) / math.sqrt(d + r)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            outputs.append((weights[..., None] * v[:, : i + 1]).sum(1))
        head = torch.stack(outputs, dim=1)  # (B, T, d)
        if attn.w_gate is not None:
            head = head / (1 + (-project(attn.w_gate, x, slice(j, j + 1))).exp())
        heads.append(head)
    return project(attn.w_o, torch.cat(heads, dim=-1))


@each_layout
@both_paths
@pytest.mark.parametrize("turning", [True, False], ids=["rotary", "unturned"])
def test_the_block_is_the_papers_formula(layout, path, turning):
    attn, config = build(attention_path=path, **layout)
    x, theta = random(2, 7, 32), config.rope_theta if turning else None
    rope = rotary_tables(7, config.rope_dim, theta) if theta else None
    tolerance = 1e-5 if rope else 1e-10  # the tables are kept in fp32
    torch.testing.assert_close(attn(x, rope), by_the_paper(attn, x, theta), atol=tolerance, rtol=0)


@each_layout
@both_paths
@pytest.mark.parametrize("dtype, tolerance", PRECISIONS, ids=["fp64", "fp32"])
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 4], [2, 7]], ids=str)
@torch.no_grad()
def test_the_absorbed_form_equals_the_expanded_one(monkeypatch, layout, path, dtype, tolerance, chunks):
    attn, config = build(dtype, attention_path=path, **layout)
    x, cache = random(2, 9, 32, dtype=dtype), new_cache(config, 2, 9, dtype)
    tables = rotary_tables(9, config.rope_dim, 500.0) if config.rope_dim else None
    expanded, steps = attn(x, tables), []
    for part in x.split(chunks, dim=1):
        places = slice(cache.length, cache.length + part.size(1))
        steps.append(attn(part, tuple(table[places] for table in tables) if tables else None, cache))
        monkeypatch.setattr(attn, "expanded", None)  # from the second chunk on whoever calls it fails
    torch.testing.assert_close(torch.cat(steps, dim=1), expanded, atol=tolerance, rtol=0)


@both_paths
@torch.no_grad()
def test_decoding_makes_no_key_or_value_of_what_is_cached(path):
    attn, config = build(attention_path=path, n_head=16, head_dim=32, kv_rank=16, rope_dim=8)
    cache = new_cache(config, 2, 512)
    attn(random(2, 511, 32), None, cache)
    x = random(2, 1, 32)
    taken = allocated(lambda: attn(x, None, cache))
    keys = 2 * 16 * 512 * 32 * 8  # sequences, heads, positions, width, bytes
    assert cache.length == 512 and 0 < taken < keys / 4


@pytest.mark.parametrize("positions, width", [("rotary", 12 + 6), ("learned", 12)])
def test_the_cache_holds_the_latent_and_the_shared_rotary_key_alone(positions, width):
    rope_dim = 6 if positions == "rotary" else None
    config = tiny(design="latent", n_layer=3, kv_rank=12, rope_dim=rope_dim, positions=positions)
    model = GPT(config)
    assert model.new_cache(2, 7).nbytes == 2 * 7 * 3 * width * 4  # sequences, room, layers ... fp32
    assert model.cache_bytes_per_token() == 3 * width * 4  # d_c + d_R numbers a layer, as the paper counts
    model = lively(model)
    cache, ids = model.new_cache(1, 7), random_tokens(1, 7)
    stream: list[Tensor] = []
    model.blocks[0].attn.register_forward_pre_hook(lambda module, given: stream.append(given[0]))
    model(ids, cache=cache)
    latent = cache.layers[0].buffers[0][0, 0, :, :12]  # (positions, kv_rank)
    made = stream[0][0] @ model.blocks[0].attn.w_dkv.weight.T
    torch.testing.assert_close(latent, made / made.square().mean(-1, keepdim=True).sqrt(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_parameters_are_counted_by_hand(positions):
    attn, _ = build(n_embd=32, n_head=4, head_dim=6, kv_rank=12, rope_dim=2 if positions == "rotary" else None,
                    positions=positions)  # fmt: skip
    expected = 32 * 4 * 6 + 4 * 6 * 32  # w_q and w_o
    expected += 32 * 12 + 12 * 4 * 6 + 12 * 4 * 6  # w_dkv, w_uk, w_uv
    expected += 32 * 4 * 2 + 32 * 2 if positions == "rotary" else 0  # w_qr, w_kr
    assert sum(p.numel() for p in attn.parameters()) == expected


def test_training_flops_by_hand():
    model = GPT(tiny(design="latent", n_layer=1, n_head=4, head_dim=6, kv_rank=12, rope_dim=2, d_ff=50))
    weights = 2 * 32 * 24 + 32 * 12 + 2 * 12 * 24 + 32 * 8 + 32 * 2 + 2 * 32 * 50 + 32 * 20  # the last is the head
    per_key = 4 * (6 + 2) + 4 * 6  # a key of head_dim and rope_dim, a value of head_dim
    assert model.flops_per_token(context=5) == 6 * (weights + 5 * per_key)
    assert model.flops_per_token(context=5, causal=True) == 6 * (weights + 3 * per_key)


def test_what_is_left_unset_is_half_the_width_and_half_a_head():
    config = ModelConfig(design="latent", n_embd=128, n_head=8)
    assert (config.kv_rank, config.rope_dim, config.n_kv_head) == (64, 8, None)
    assert ModelConfig(design="latent", n_embd=30, n_head=3).rope_dim == 4  # of 10, and even
    assert ModelConfig(design="latent", n_embd=8, n_head=8).rope_dim == 2  # of 1, but a pair
    assert ModelConfig(design="latent", positions="learned").rope_dim is None


def test_queries_and_outputs_begin_as_those_of_multi_head_attention():
    latent, mha = (dict(GPT(ModelConfig(design=d, vocab_size=20)).named_parameters()) for d in ("latent", "grouped"))
    for name in ("w_q", "w_o"):
        assert torch.equal(latent[f"blocks.1.attn.{name}.weight"], mha[f"blocks.1.attn.{name}.weight"])
