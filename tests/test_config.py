"""The files in config/ say what they claim."""

import tomllib
from pathlib import Path

import pytest
import torch

import attention
from model import GPT, ModelConfig
from runtime.devices import pick_device, pick_dtype
from runtime.runs import TrainConfig, with_batch
from runtime.settings import build, parse

CONFIG = Path(__file__).parent.parent / "config"
FILES = sorted(CONFIG.rglob("*.toml"))
OTHERS = {"fast", "gpu", "nanogpt-cpu", "small", "thorough", "tinystories"}  # no designs: sizes, recipes, data sets
ON_TOP = sorted({path.stem for path in CONFIG.glob("*.toml")} - OTHERS)
DESIGNS = [*ON_TOP, "kv/one-head", "kv/narrow-heads"]
OF_ATTENTION = {"design", "n_head", "head_dim"}.union(*(design.settings for design in attention.DESIGNS.values()))


def model_of(*names, **changes):
    (config, _), _ = parse([str(CONFIG / f"{name}.toml") for name in names], ModelConfig, TrainConfig,
                           prog="", description="")  # fmt: skip
    with torch.device("meta"):
        return GPT(build((ModelConfig,), {"vocab_size": 65} | {
            key: value for key, value in vars(config).items() if value is not None} | changes)[0])  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_builds_and_begins_by_saying_what_it_is(file):
    assert file.read_text(encoding="utf-8").startswith("# ")
    assert model_of(file.relative_to(CONFIG).with_suffix("")).num_parameters() > 0


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_holds_only_its_difference(name):
    """Every line of a design file is about attention, or d_ff where a control says so, and differs from mha."""
    values = tomllib.loads((CONFIG / f"{name}.toml").read_text(encoding="utf-8"))
    assert set(values) <= OF_ATTENTION | ({"d_ff"} if "/" in name else set())
    if name != "mha":
        assert all(ModelConfig.__dataclass_fields__[key].default != value for key, value in values.items())


def test_mha_is_the_default_and_has_8_heads():
    assert model_of("mha").config == model_of().config
    assert model_of().config.n_head == model_of().config.n_kv_head == 8


def test_heads_kv_heads_and_their_width_are_set_from_the_shell():
    words = ["--n_head", "6", "--n_kv_head", "2", "--head_dim", "24", "--n_embd", "64"]
    (config,), _ = parse(words, ModelConfig, prog="", description="")
    assert (config.n_head, config.n_kv_head, config.head_dim, config.n_embd) == (6, 2, 24, 64)


def test_the_defaults_fit_a_machine_without_a_gpu(monkeypatch):
    for part in (torch.cuda, torch.backends.mps):
        monkeypatch.setattr(part, "is_available", lambda: False)
    config = with_batch(TrainConfig(), ModelConfig().block_size)
    device = pick_device(config.device)
    assert device.type == "cpu" and pick_dtype(config.dtype, device) == torch.float32
    assert config.compile is None and config.micro_batch_size is None  # no accumulation


def test_head_counts_do_not_change_the_parameters():
    assert len({model_of(name).num_parameters() for name in ("mha", "single-head", "mha-16")}) == 1


@pytest.mark.parametrize("name", ["kv/one-head", "kv/narrow-heads"])
def test_the_controls_have_mqas_cache_and_parameters(name):
    mqa, control = model_of("mqa"), model_of(name)
    assert control.cache_bytes_per_token() == mqa.cache_bytes_per_token()
    assert control.num_parameters() == mqa.num_parameters()


def test_mqa_caches_an_eighth_of_mha():
    assert model_of("mha").cache_bytes_per_token() == 8 * model_of("mqa").cache_bytes_per_token()


def test_nanogpt_cpu_has_nanogpts_parameters():
    """4 layers of width 128 with LayerNorm without bias, a tied head, 64 learned positions, 65 characters."""
    layer = 2 * 128 + 4 * 128 * 128 + 8 * 128 * 128
    assert model_of("nanogpt-cpu").num_parameters() == 65 * 128 + 64 * 128 + 4 * layer + 128


def test_every_design_has_a_file():
    assert {model_of(name).config.design for name in ON_TOP} == set(attention.DESIGNS)


def test_mla_caches_a_latent_of_half_the_width_and_a_rotary_key_of_half_a_head():
    assert model_of("mla").cache_bytes_per_token() == 3 * (64 + 8) * 4  # layers, fp32; mha has 3 * 2 * 128 * 4


def test_the_window_keeps_a_quarter_of_the_context():
    assert model_of("window").cache_bytes_per_token() == model_of("mha").cache_bytes_per_token() / 4


@pytest.mark.parametrize("design", ON_TOP)
def test_a_design_stacks_on_the_sizes(design):
    for size in ("gpu", "tinystories"):
        assert model_of(size, design).config.n_embd == model_of(size).config.n_embd
