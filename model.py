"""The transformer: its settings, its blocks, and what a model costs in parameters, FLOPs and cache.

Read `Block.forward` first, then `GPT.hidden`. Shapes: B sequences, T tokens, n_embd the model's width.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args, get_origin

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attention import DESIGNS
from attention.cache import KVCache, LayerCache
from attention.rotary import rotary_tables

if TYPE_CHECKING:
    Design = str  # mypy cannot read a table
else:
    Design = Literal[tuple(DESIGNS)]


LARGE_VOCABULARY = 4096  # ids from which logits are more memory than all else


def tokens_at_once(vocab_size: int) -> int:
    """Tokens whose logits are held together: 64 MiB of float32."""
    return max(1, 2**24 // vocab_size)


@dataclass(frozen=True)
class ModelConfig:
    """The model. What is left unset is filled in here, so that a built config holds every number."""

    n_layer: int = 3  # blocks
    n_head: int = 8  # query heads
    n_kv_head: int | None = None  # K/V heads: unset = n_head (MHA), 1 = MQA, between = GQA
    heads_per_kv: int | None = None  # or the same as a ratio: query heads to a K/V head
    head_dim: int | None = None  # width of one head; unset = n_embd / n_head
    n_embd: int = 128  # width of the model
    d_ff: int | None = None  # width of the MLP; unset = 4 n_embd
    d_ff_ratio: float | None = None  # or the same as a ratio: d_ff to n_embd
    block_size: int = 128  # longest context, in tokens
    vocab_size: int | None = None  # unset = the data set's
    design: Design = "grouped"  # the attention block: a file in attention/
    attention_path: Literal["fused", "scratch"] = "fused"  # PyTorch's kernel, or the one written out
    attention_dropout: float = 0.0  # share of attention weights dropped; above 0 the path is scratch
    dropout: float = 0.0  # share of embeddings and of each sublayer's output dropped
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # normalisation
    norm_position: Literal["pre", "post"] = "pre"  # before a sublayer, or after its residual sum
    activation: Literal["relu2", "relu", "gelu", "gelu_tanh", "swiglu"] = "relu2"  # of the MLP
    positions: Literal["rotary", "learned", "sinusoidal", "none"] = "rotary"  # position information
    rope_theta: float | None = None  # base of the rotary frequencies; unset = 10000
    bias: bool = False  # biases in linear layers and LayerNorm
    qk_norm: bool = False  # RMSNorm of queries and keys, without weights
    w_o: bool = True  # the output projection that mixes the heads
    gate: bool = False  # a sigmoid gate on every head's output, one value a token, from the block's input
    window: int | None = None  # positions that a query sees, its own included; unset = all before it
    kv_rank: int | None = None  # latent: width of what it caches for keys and values; unset = n_embd / 2
    rope_dim: int | None = None  # latent: width of its rotary key, one for all heads; unset = head_dim / 2
    init: Literal["scaled", "gpt2"] = "scaled"  # by fan-in with sublayers' outputs at zero, or 0.02 as in GPT-2
    tie_embeddings: bool = False  # one matrix for the token embedding and the output head

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_kv_head", "heads_per_kv", "head_dim", "n_embd", "d_ff", "block_size",
                     "vocab_size", "window", "kv_rank", "rope_dim"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise ValueError(f"{name} must be at least 1 and below 2^31, not {value}")
        for field in fields(self):
            choices, value = get_args(field.type), getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in choices:
                raise ValueError(f"{field.name} must be one of {', '.join(choices)}, not {value}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if self.positions == "sinusoidal" and self.n_embd % 2:
            raise ValueError(f"sinusoidal positions come in pairs: n_embd {self.n_embd} is odd")
        if self.positions != "rotary" and self.rope_theta is not None:
            raise ValueError(f"rope_theta {self.rope_theta} is not used with positions {self.positions}; unset it")
        if self.rope_theta is not None and not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta must be above 0 and finite, not {self.rope_theta}")
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}; set head_dim, or change one"
            )
        ratio = 4.0 if self.d_ff_ratio is None else self.d_ff_ratio
        if not 1 <= ratio * self.n_embd < 2**31:
            raise ValueError(f"d_ff_ratio {ratio} x n_embd {self.n_embd} must be at least 1 and below 2^31")
        if self.d_ff_ratio and self.d_ff not in (None, round(ratio * self.n_embd)):
            raise ValueError(f"d_ff {self.d_ff} is not d_ff_ratio {ratio} x n_embd {self.n_embd}; set one to none")
        design = DESIGNS[self.design]
        others = set().union(*(other.settings for other in DESIGNS.values())) - design.settings
        for field in fields(self):
            if field.name in others and (value := getattr(self, field.name)) != field.default:
                raise ValueError(f"{field.name} {value} is not used with design {self.design}; leave it out")
        d_ff, head_dim = self.d_ff or round(ratio * self.n_embd), self.head_dim or self.n_embd // self.n_head
        self._fill({"d_ff": d_ff, "d_ff_ratio": None, "head_dim": head_dim})
        if self.positions == "rotary":
            self._fill({"rope_theta": self.rope_theta or 10000.0})
        self._fill(design.resolve(self))

    def _fill(self, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the one place that writes to the frozen config


class MLP(nn.Module):
    """Two linear layers with an activation between; SwiGLU (Shazeer 2020) gates with a third."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = config.activation
        self.w_in = nn.Linear(config.n_embd, config.d_ff, bias=config.bias)
        if config.activation == "swiglu":
            self.w_gate = nn.Linear(config.n_embd, config.d_ff, bias=config.bias)
        self.w_out = nn.Linear(config.d_ff, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.w_in(x)  # (B, T, d_ff)
        match self.activation:
            case "relu2":
                h = F.relu(h) * h  # relu(h)^2, at less cost than squaring
            case "relu":
                h = F.relu(h)
            case "gelu":
                h = F.gelu(h)
            case "gelu_tanh":
                h = F.gelu(h, approximate="tanh")
            case "swiglu":
                h = F.silu(self.w_gate(x)) * h
        return self.w_out(h)  # (B, T, n_embd)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=1e-5)


class Block(nn.Module):
    """Attention, then an MLP, each added to the stream that runs through."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.norm_attn = make_norm(config)
        self.attn = DESIGNS[config.design](config)
        self.norm_mlp = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        if self.pre_norm:
            x = x + self.dropout(self.attn(self.norm_attn(x), rope, cache))
            return x + self.dropout(self.mlp(self.norm_mlp(x)))
        x = self.norm_attn(x + self.dropout(self.attn(x, rope, cache)))
        return self.norm_mlp(x + self.dropout(self.mlp(x)))


class Unfilled(TorchFunctionMode):
    """PyTorch's own layers come without values: what they would draw is replaced anyway, and takes time."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return None if getattr(func, "__module__", "") == "torch.nn.init" else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    with Unfilled():
        yield


class GPT(nn.Module):
    """A decoder-only language model. `seed` fixes the initial values."""

    sinusoids: Tensor  # (block_size, n_embd)
    rope_cos: Tensor  # (block_size, width), as rope_sin
    rope_sin: Tensor

    @unfilled()
    def __init__(self, config: ModelConfig, seed: int = 1):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set, and there is no data set to take it from")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        if config.positions == "learned":
            self.embed_position = nn.Embedding(config.block_size, config.n_embd)
        elif config.positions == "sinusoidal":
            cos, sin = rotary_tables(config.block_size, config.n_embd, 10000.0)  # the same angles
            half = config.n_embd // 2  # Vaswani et al. 2017, 3.5: sin, cos, sin, cos ...
            table = torch.stack((sin[:, half:], cos[:, half:]), dim=-1).flatten(1)  # (block_size, n_embd)
            self.register_buffer("sinusoids", table, persistent=False)
        elif config.positions == "rotary":
            width = DESIGNS[config.design].rotary_width(config)
            cos, sin = rotary_tables(config.block_size, width, config.rope_theta)
            self.register_buffer("rope_cos", cos, persistent=False)
            self.register_buffer("rope_sin", sin, persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every parameter from a generator of its own, keyed by the seed and the parameter's name.

        So two designs at one seed begin with equal values wherever name and shape agree.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:  # a model built only to be counted
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
                is_output = name.endswith(("w_o.weight", "mlp.w_out.weight"))  # it adds to the stream
                if self.config.init == "gpt2":  # Radford et al. 2019: 2 n_layer outputs add up
                    std = 0.02 / math.sqrt(2 * self.config.n_layer) if is_output else 0.02
                elif name.startswith("blocks"):  # every block begins as the identity
                    std = 0.0 if is_output else 0.5 / math.sqrt(parameter.shape[1])
                else:
                    std = 0.02
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids (B, T) -> the last block's output, normalised, (B, T, n_embd).

        With a cache, idx is what follows the cache.length tokens already in it. Raises ValueError beyond block_size.
        """
        T = idx.size(1)
        start = cache.length if cache else 0
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} tokens do not fit in block_size {self.config.block_size}")
        x = self.embed(idx)  # (B, T, n_embd)
        rope = None
        if self.config.positions == "learned":
            x = x + self.embed_position.weight[start : start + T]
        elif self.config.positions == "sinusoidal":
            x = x * math.sqrt(self.config.n_embd) + self.sinusoids[start : start + T]
        elif self.config.positions == "rotary":
            rope = self.rope_cos[start : start + T], self.rope_sin[start : start + T]
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, cache.layers[i] if cache else None)
        return self.norm(x)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Logits (B, T, vocab_size); or, given targets (B, T), their cross-entropy in nats per token."""
        x = self.hidden(idx, cache)  # (B, T, n_embd)
        if targets is None:
            return self.head(x)
        plain = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)  # what torch's op cannot do
        if self.config.vocab_size < LARGE_VOCABULARY or plain:
            return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten(), reduction=reduction)
        # The same in slices of the tokens, which never holds the (B T, vocab_size) logits whole.
        rows = tokens_at_once(self.config.vocab_size)
        slices = nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
        return F.linear_cross_entropy(
            x.flatten(0, 1), self.head.weight, targets.flatten(), reduction=reduction, options=slices
        )

    def new_cache(self, batch_size: int, room: int | None = None) -> KVCache:
        """An empty cache for `room` positions (block_size if unset), in the dtype and place of the weights."""
        shapes = DESIGNS[self.config.design].cache_shapes(self.config)
        room = room or self.config.block_size
        window = self.config.window
        return KVCache([LayerCache(batch_size, room, shapes, self.head.weight, window) for _ in self.blocks])

    def num_parameters(self, embeddings: bool = True) -> int:
        """Distinct parameters; without embeddings, also without position table and (untied) output head."""
        tables = set() if embeddings else {"embed.weight", "embed_position.weight", "head.weight"}
        return sum(p.numel() for name, p in self.named_parameters() if name not in tables)

    def flops_per_token(self, context: int | None = None, causal: bool = False) -> int:
        """FLOPs to train on one token, forward and backward, by matrix products alone.

        6 for every weight that is multiplied with the token (the head counts also when tied, embedding look-ups
        do not), and 6 for each multiply-add of its query with the `context` keys and values (block_size if
        unset), as in PaLM, appendix B (Chowdhery et al. 2022). With `causal` only the keys that a token sees on
        average count: (context + 1) / 2, or fewer with a window. No path saves the others, it masks them.
        """
        context = context or self.config.block_size
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        scores = self.config.n_layer * DESIGNS[self.config.design].score_width(self.config)
        window = min(self.config.window or context, context)
        seen = window * (window + 1) // 2 + (context - window) * window  # keys, by all queries of a context together
        return 6 * weights + 6 * scores * (seen if causal else context**2) // context

    def cache_bytes(self, context: int | None = None, bytes_per_number: int = 4) -> int:
        """Bytes that decoding keeps of `context` tokens (block_size if unset), over all layers; of a window no more."""
        shapes = DESIGNS[self.config.design].cache_shapes(self.config)
        context = context or self.config.block_size
        kept = min(self.config.window or context, context)
        return self.config.n_layer * sum(heads * width for heads, width in shapes) * kept * bytes_per_number

    def cache_bytes_per_token(self, bytes_per_number: int = 4) -> int:
        """A token's share of these at block_size, rounded down; without a window it is the same at every length."""
        return self.cache_bytes(None, bytes_per_number) // self.config.block_size
