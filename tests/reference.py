"""What the attention and model tests share: small configs, and attention written a second time.

The reference takes every head and every position by itself, in Python loops, straight from the formulas.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from attention import DESIGNS
from model import ModelConfig

# The layouts each design is tested in. A design that is not named here is tested in its default layout. On top of
# these it is tested with every setting of SWITCHES that it reads.
LAYOUTS = {
    "grouped": {
        "mha": {"n_head": 4, "n_kv_head": 4},
        "gqa": {"n_head": 4, "n_kv_head": 2},
        "mqa": {"n_head": 4, "n_kv_head": 1},
        "wide_heads": {"n_head": 6, "n_kv_head": 3, "head_dim": 10},  # 60 numbers in a model 32 wide
        "all_at_once": {"n_head": 4, "n_kv_head": 2, "qk_norm": True, "gate": True, "window": 4},
    },
    "latent": {
        "default": {},
        "wide_heads": {"n_head": 6, "head_dim": 10, "kv_rank": 7},
        "single": {"n_head": 1},
    },
}
SWITCHES = {"gate": {"gate": True}, "window": {"window": 3}, "qk_norm": {"qk_norm": True}, "w_o": {"w_o": False}}


def switches(design: str) -> dict[str, dict[str, object]]:
    """Those of SWITCHES that a design reads."""
    return {name: values for name, values in SWITCHES.items() if name in DESIGNS[design].settings}


every_layout = pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"design": design} | layout, id=f"{design}-{name}")
        for design in DESIGNS
        for name, layout in (LAYOUTS.get(design, {"default": {}}) | switches(design)).items()
    ],
)
every_grouped_layout = pytest.mark.parametrize(
    "layout", [pytest.param(layout, id=name) for name, layout in (LAYOUTS["grouped"] | switches("grouped")).items()]
)
both_paths = pytest.mark.parametrize("path", ["scratch", "fused"])


def tiny(**settings) -> ModelConfig:
    """A config small enough to check by loops: 2 layers, width 32. Nothing hangs on the defaults."""
    small = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 20}
    plain = {"norm": "rmsnorm", "norm_position": "pre", "activation": "relu2", "positions": "rotary"}
    off = {"bias": False, "qk_norm": False, "tie_embeddings": False, "dropout": 0.0, "attention_dropout": 0.0}
    return ModelConfig(**(small | plain | off | {"init": "gpt2"} | settings))


def lively(module: nn.Module, std: float = 0.3) -> nn.Module:
    """Redraw every parameter, biases and norms too: at the small initial values a wrong mask hardly shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return module


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_tokens(batch: int, length: int, vocab_size: int = 20) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


def allocated(run: Callable[[], object]) -> int:
    """Bytes that PyTorch hands out on the CPU while `run` runs, however briefly they live."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return sum(max(0, event.self_cpu_memory_usage) for event in profiler.events())


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary positions by complex numbers: x[i] + 1j x[i + width / 2] times exp(1j p theta^(-2i / width))."""
    T, width = x.shape[-2:]
    z = torch.complex(*x.chunk(2, dim=-1))
    angle = torch.tensor([[p * theta ** (-2 * i / width) for i in range(width // 2)] for p in range(T)])
    z = z * torch.polar(torch.ones_like(angle), angle).to(z.dtype)
    return torch.cat((z.real, z.imag), dim=-1)


def reference_heads(attn: nn.Module, x: Tensor, theta: float | None = None) -> list[Tensor]:
    """Every head's output, (B, T, head_dim), of a GroupedAttention on x (B, T, n_embd), before W_O.

    Causal without a mask, because position i is given nothing but the keys and values 0 .. i, or the last of these.
    """
    width, group = attn.head_dim, attn.n_head // attn.n_kv_head

    def project(linear: nn.Linear, head: int) -> Tensor:  # x W_head + b_head: (B, T, head_dim)
        rows = slice(head * width, (head + 1) * width)
        return x @ linear.weight[rows].T + (0 if linear.bias is None else linear.bias[rows])

    heads = []
    for j in range(attn.n_head):
        q, k, v = project(attn.w_q, j), project(attn.w_k, j // group), project(attn.w_v, j // group)
        if attn.qk_norm:
            q, k = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (q, k))
        if theta is not None:
            q, k = turned(q, theta), turned(k, theta)
        outputs = []
        for i in range(x.size(1)):
            seen = slice(max(0, i + 1 - (attn.window or i + 1)), i + 1)
            scores = (q[:, i : i + 1] * k[:, seen]).sum(-1) / width**0.5  # (B, keys seen)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            output = (weights[..., None] * v[:, seen]).sum(1)  # (B, head_dim)
            if attn.w_gate is not None:
                opened = x[:, i] @ attn.w_gate.weight[j] + (0 if attn.w_gate.bias is None else attn.w_gate.bias[j])
                output = output / (1 + (-opened).exp())[:, None]
            outputs.append(output)
        heads.append(torch.stack(outputs, dim=1))
    return heads


def reference_attention(attn: nn.Module, x: Tensor, theta: float | None = None) -> Tensor:
    """Concat(head_1 .. head_h) W_O, (B, T, n_embd)."""
    heads = torch.cat(reference_heads(attn, x, theta), dim=-1)
    if isinstance(attn.w_o, nn.Identity):
        return heads
    return heads @ attn.w_o.weight.T + (0 if attn.w_o.bias is None else attn.w_o.bias)
