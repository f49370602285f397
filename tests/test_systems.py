"""The named systems: exact sizes, what bench tells about them, and their small forms, which keep the proportions."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

import attention.grouped
import attention.latent
import bench
import train
from attention.kernel import scratch_attention
from lab import describe
from model import GPT, ModelConfig
from runtime.errors import UserError
from runtime.runs import TrainConfig
from runtime.settings import parse

ROOT = Path(__file__).parent.parent
SMALL = str(ROOT / "config/small.toml")
pytestmark = pytest.mark.usefixtures("handlers_come_back")


def transformer_base():
    """The paper's table 3, base, its decoder without the layer that looks at an encoder, by hand."""
    attention = 4 * (512 * 512 + 512)
    mlp = 512 * 2048 + 2048 + 2048 * 512 + 512
    norms = 2 * 2 * 512
    return 37000 * 512 + 6 * (attention + mlp + norms)  # tied; sinusoids are no parameters; no norm at the end


def llama3_8b():
    attention = 2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128
    mlp = 3 * 4096 * 14336
    return 2 * 128256 * 4096 + 32 * (attention + mlp + 2 * 4096) + 4096


# width, heads, K/V heads, width of a head, layers, parameters, and attention's weights in squares of the width
SYSTEMS = {
    "transformer-base": (512, 8, 8, 64, 6, transformer_base(), 4),
    "gpt2": (768, 12, 12, 64, 12, 124_439_808, 4),
    "gpt2-medium": (1024, 16, 16, 64, 24, 354_823_168, 4),
    "gpt3-175b": (12288, 96, 96, 128, 96, 174_604_259_328, 4),
    "llama-7b": (4096, 32, 32, 128, 32, 6_738_415_616, 4),
    "llama-65b": (8192, 64, 64, 128, 80, 65_285_660_672, 4),
    "llama2-70b": (8192, 64, 8, 128, 80, 68_976_648_192, 2.25),  # Q and O whole, K and V an eighth
    "llama3-8b": (4096, 32, 8, 128, 32, 8_030_261_248, 2.5),
}
every_system = pytest.mark.parametrize("name", SYSTEMS)


def file_of(name):
    return str(ROOT / f"config/systems/{name}.toml")


def config_of(*files):
    (config, _), _ = parse(files, ModelConfig, TrainConfig, prog="", description="")
    return config


def told(capsys, *words):
    """Lines and JSON of a description."""
    bench.main(["--describe", *words])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


# Exact


def test_the_table_here_has_every_file():
    assert {path.stem for path in (ROOT / "config/systems").glob("*.toml")} == SYSTEMS.keys()
    assert llama3_8b() == SYSTEMS["llama3-8b"][5]


@every_system
def test_a_system_has_its_published_shape_and_size(name):
    config = config_of(file_of(name))
    with torch.device("meta"):
        model = GPT(config)
    *shape, parameters, squares = SYSTEMS[name]
    assert [config.n_embd, config.n_head, config.n_kv_head, config.head_dim, config.n_layer] == shape
    assert model.num_parameters() == parameters
    found = describe.describe(config)
    assert found["attention_weights_per_layer"] == squares * config.n_embd**2
    assert found["attention_weights_in_n_embd_squared"] == squares


def test_what_no_count_shows_is_as_published():
    def has(name, **settings):
        config = config_of(file_of(name))
        assert {key: getattr(config, key) for key in settings} == settings

    has("transformer-base", norm="layernorm", norm_position="post", activation="relu", positions="sinusoidal")
    for name, context in (("gpt2", 1024), ("gpt2-medium", 1024), ("gpt3-175b", 2048)):
        has(name, norm="layernorm", norm_position="pre", activation="gelu_tanh", positions="learned", init="gpt2",
            block_size=context)  # fmt: skip
    for name, context, theta in (("llama-7b", 2048, 1e4), ("llama-65b", 2048, 1e4), ("llama2-70b", 4096, 1e4),
                                 ("llama3-8b", 8192, 5e5)):  # fmt: skip
        has(name, norm="rmsnorm", norm_position="pre", activation="swiglu", positions="rotary", rope_theta=theta,
            block_size=context, bias=False, tie_embeddings=False)  # fmt: skip


# Described


def test_all_systems_are_told_in_tables_and_in_json(capsys):
    lines, result = told(capsys, *map(file_of, SYSTEMS), "--cache_dtype", "bfloat16")
    assert max(map(len, lines)) <= 100
    assert result["attention_steps"] == [] and list(result["designs"]) == list(SYSTEMS)
    for name, (n_embd, n_head, n_kv_head, head_dim, n_layer, parameters, squares) in SYSTEMS.items():
        one = result["designs"][name]
        context, vocabulary = one["settings"]["block_size"], one["settings"]["vocab_size"]
        matrices = one["settings"]["d_ff"] * n_embd * (3 if "llama" in name else 2) + squares * n_embd**2
        forward = 2 * (n_layer * matrices + vocabulary * n_embd) + 2 * n_layer * 2 * n_head * head_dim * context
        cache = 2 * 2 * n_layer * n_kv_head * head_dim
        assert one["forward_flops_per_token"] == forward and one["flops_per_token"] == 3 * forward
        assert one["cache_bytes_per_token"] == one["cache_bytes_allocated"] == cache
        assert one["cache_bytes_at_full_context"] == cache * context and one["cache_dtype"] == "bfloat16"
        shape, size, costs = (line.split() for line in lines if line.startswith(f" {name} "))
        assert shape[1:6] == [f"{n:,}" for n in (n_embd, n_head, n_kv_head, head_dim, n_layer)]
        assert shape[-2:] == [f"{vocabulary:,}", f"{context:,}"]
        assert size[1] == f"{parameters:,}" and size[-2:] == [f"{squares:g}", "H^2"]
        assert costs[1:] == [f"{n:,.0f}" for n in (3 * forward, forward, cache, cache * context)]


def test_a_terminal_gets_a_description_without_json_and_is_told_the_vocabulary(capsys, monkeypatch):
    words = ["--describe", str(ROOT / "config/mha.toml")]
    bench.main(words)
    piped = capsys.readouterr().out
    assert json.loads(piped.splitlines()[-1])["designs"]["mha"]["vocab_size"] == 96
    assert "where a file names none, 96 ids are assumed" in piped
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    bench.main(words)
    told = capsys.readouterr().out
    assert "w_o" in told and "{" not in told


def test_shapes_beyond_what_can_be_counted_are_refused_in_a_sentence():
    with pytest.raises(UserError, match="too large to be described .* lower head_dim or n_head"):
        bench.main(["--describe", "--n_head", "65536", "--head_dim", "65536"])


def test_a_cache_dtype_without_describe_is_refused():
    with pytest.raises(ValueError, match="cache_dtype bfloat16 needs --describe"):
        bench.BenchConfig(cache_dtype="bfloat16")


def occurring(monkeypatch, config):
    """Shapes and weights on the way through attention in a real forward pass, by the names `steps` uses."""
    found = []
    model = GPT(config)
    attn = model.blocks[0].attn

    def kernel(q, k, v, *rest, **scale):
        found.extend((f"2 split into heads: {name}", t.shape, 0) for name, t in zip("qkv", (q, k, v), strict=True))
        out = scratch_attention(q, k, v, *rest, **scale)
        found.append(("4 weights @ v", out.shape, 0))
        return out

    for module in (attention.grouped, attention.latent):
        monkeypatch.setattr(module, "scratch_attention", kernel)
    model.blocks[0].norm_attn.register_forward_hook(lambda m, args, out: found.append(("x", out.shape, 0)))
    for name, module in attn.named_children():
        number = 6 if name == "w_o" else 1
        if name == "w_o":
            module.register_forward_pre_hook(
                lambda m, args: found.append(("5 heads side by side", args[0].shape, 0))
            )
        if hasattr(module, "weight"):
            label, weights = f"{number} {name}", module.weight.numel()
            module.register_forward_hook(
                lambda m, args, out, label=label, weights=weights: found.append((label, out.shape, weights))
            )
    attn.weights_tap.register_forward_hook(
        lambda m, args, out: found.append(("3 softmax of scores: weights", out.shape, 0))
    )
    with torch.no_grad():
        model(torch.zeros(3, 5, dtype=torch.long))
    return [(name, tuple(shape), weights) for name, shape, weights in found]


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_kv_head": 2}, {"n_kv_head": 1, "bias": True, "qk_norm": True}, {"head_dim": 10, "positions": "learned"},
     {"w_o": False}, {"design": "latent"}, {"design": "latent", "kv_rank": 12, "rope_dim": 6, "bias": True}],
    ids=str,
)  # fmt: skip
def test_the_way_told_is_the_way_that_numbers_go(monkeypatch, changes):
    settings = {"n_layer": 1, "n_head": 4, "n_embd": 32, "block_size": 8, "vocab_size": 11} | changes
    config = ModelConfig(**settings, attention_path="scratch")
    way = describe.steps(ModelConfig(**settings))
    letters = [(step.name, tuple({"B": 3, "T": 5}.get(n, n) for n in step.shape), step.weights) for step in way]
    assert letters == occurring(monkeypatch, config)


def test_one_system_is_told_with_the_way_through_its_attention(capsys):
    lines, result = told(capsys, file_of("llama2-70b"))
    way = {step["name"]: (step["shape"], step["weights"]) for step in result["attention_steps"]}
    H, narrow = 8192, 8192 // 8
    assert way["1 w_k"] == (["B", "T", narrow], H * narrow) and way["6 w_o"] == (["B", "T", H], H * H)
    assert way["2 split into heads: v"] == (["B", 8, "T", 128], 0)
    assert way["3 softmax of scores: weights"][0] == ["B", 64, "T", "T"]
    assert sum(weights for _, weights in way.values()) == 2.25 * H * H
    assert any("(B, 64, T, 128)" in line for line in lines) and any("150,994,944" in line for line in lines)


class Other(attention.grouped.GroupedAttention):
    """Another design: keys come by a detour, and a matrix is applied without a module."""

    def __init__(self, config):
        super().__init__(config)
        self.down = torch.nn.Linear(config.n_embd, 6, bias=False)
        self.w_k = torch.nn.Linear(6, config.n_head * config.head_dim, bias=False)
        self.loose = torch.nn.Parameter(torch.ones(config.n_embd, 3))

    def forward(self, x, rope=None, cache=None):
        B, T, _ = x.shape
        q, v = (w(x).view(B, T, self.n_head, -1).transpose(1, 2) for w in (self.w_q, self.w_v))
        k = self.w_k(self.down(x)).view(B, T, self.n_head, -1).transpose(1, 2)
        heads = scratch_attention(q, k, v, 0.0, self.weights_tap)
        return self.w_o(heads.transpose(1, 2).flatten(2) + 0 * (x @ self.loose).sum())


def test_of_another_design_only_what_occurs_is_told(monkeypatch):
    config = ModelConfig(n_head=4, n_embd=32, vocab_size=11)
    object.__setattr__(config, "design", "other")
    monkeypatch.setattr(describe, "DESIGNS", {"other": Other})
    monkeypatch.setattr(describe, "replace", lambda config, **_: config)  # it would check the design's name
    assert describe.steps(config) == [
        ("x", ("B", "T", 32), 0),
        ("w_q", ("B", "T", 32), 32 * 32),
        ("w_v", ("B", "T", 32), 32 * 32),
        ("down", ("B", "T", 6), 32 * 6),
        ("w_k", ("B", "T", 32), 6 * 32),
        ("softmax of scores: weights", ("B", 4, "T", "T"), 0),
        ("heads side by side", ("B", "T", 32), 0),
        ("w_o", ("B", "T", 32), 32 * 32),
        ("other weights", (), 32 * 3),
    ]


# Small


@every_system
def test_the_small_form_keeps_the_proportions(name):
    whole, small = config_of(file_of(name)), config_of(file_of(name), SMALL)
    assert small.n_embd == 128 and small.n_layer < whole.n_layer and small.block_size < whole.block_size
    assert small.n_head * whole.n_kv_head == whole.n_head * small.n_kv_head
    assert small.head_dim * small.n_head * whole.n_embd == whole.head_dim * whole.n_head * small.n_embd
    assert math.isclose(small.d_ff / small.n_embd, whole.d_ff / whole.n_embd, abs_tol=0.5 / small.n_embd)
    for key in ("tie_embeddings", "norm", "norm_position", "activation", "positions", "rope_theta", "bias", "init"):
        assert getattr(small, key) == getattr(whole, key)
    assert small.vocab_size is None  # the data's


def test_flags_over_the_small_form_keep_the_proportions_too():
    config = config_of(file_of("llama2-70b"), SMALL, "--n_head", "16", "--n_embd", "64")
    assert (config.n_kv_head, config.head_dim, config.d_ff) == (2, 4, 224)


@every_system
def test_the_small_form_trains(name, dataset, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["--dataset", dataset, "--out_dir", str(run), "--block_size", "32", "--max_steps", "2"]
    assert train.main([file_of(name), SMALL, *words]) == 0
    told = capsys.readouterr().out
    if name in ("llama2-70b", "llama3-8b"):
        assert f"*heads_per_kv {8 if name == 'llama2-70b' else 4}," in told and "heads_per_kv none" not in told
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2 and math.isfinite(rows[-1]["val_loss"])
    assert "heads_per_kv = " not in (run / "settings.toml").read_text()  # a run holds numbers, not ratios


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"n_head": 6, "head_dim": 16, "heads_per_kv": 4}, "n_head 6 is not divisible by heads_per_kv 4"),
        ({"n_head": 8, "n_kv_head": 1, "heads_per_kv": 4}, "n_kv_head 1 is not n_head 8 / heads_per_kv 4"),
        ({"heads_per_kv": 0}, "heads_per_kv must be at least 1"),
        ({"d_ff": 512, "d_ff_ratio": 2.0}, "d_ff 512 is not d_ff_ratio 2.0 x n_embd 128"),
        ({"d_ff_ratio": 0.0}, "d_ff_ratio 0.0 x n_embd 128 must be at least 1"),
        ({"d_ff_ratio": math.inf}, "d_ff_ratio inf x n_embd 128 must be at least 1 and below"),
    ],
    ids=str,
)
def test_a_ratio_that_does_not_fit_is_refused(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ModelConfig(**settings)


def test_a_ratio_may_stand_beside_the_number_it_gives():
    by_ratio = ModelConfig(n_head=8, heads_per_kv=4, d_ff_ratio=3.5)
    assert by_ratio == ModelConfig(n_head=8, n_kv_head=2, heads_per_kv=4, d_ff=448, d_ff_ratio=3.5)
    assert by_ratio == ModelConfig(n_head=8, n_kv_head=2, d_ff=448)


# README


def test_the_readme_says_what_the_command_counts(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Named systems")[1].split("\n## ")[0]
    command = next(line for line in text.splitlines() if line.startswith("    python bench.py"))
    assert command.split() == ["python", "bench.py", "--describe", "config/systems/*.toml", "--cache_dtype", "bfloat16"]
    _, result = told(capsys, *map(file_of, SYSTEMS), "--cache_dtype", "bfloat16")
    table = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    rows = {name: cells for name, *cells in table}
    keys = ("n_embd", "n_head", "n_kv_head", "head_dim", "n_layer", "parameters")
    for name, one in result["designs"].items():
        numbers = [f"{one[key]:,}" for key in keys]
        in_squares = f"{one['attention_weights_in_n_embd_squared']:g} H^2"
        assert rows[name] == [*numbers, in_squares, f"{one['cache_bytes_per_token']:,}"]
    assert SYSTEMS.keys() == rows.keys() - {"system", "---"}
