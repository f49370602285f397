"""Models and tokenizers in the layouts of Hugging Face's transformers, and back, without that library.

A layout states which of our settings it can express; every other setting has to be at its neutral value, so that one
that was added later is refused by itself. The layouts are those of transformers' modeling_gpt2.py, modeling_llama.py,
modeling_mistral.py and modeling_nemotron.py, version 5.24.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from data.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    HfTokenizer,
    Tokenizer,
    WordTokenizer,
    byte_characters,
)
from model import GPT, ModelConfig
from runtime.checkpoint import load_model, write_synced
from runtime.errors import EnvironmentFault, UserError
from runtime.runs import check_new, write_run
from runtime.settings import build, show

EPS = 1e-5  # of every norm in model.py
BOTH = (True, False)
SIZES = {"n_layer", "n_head", "n_embd", "d_ff", "block_size", "vocab_size"}
OF_TRAINING = {"attention_path", "attention_dropout", "dropout", "init"}  # they change nothing in a trained model
GPT2_SHA256 = "445c95aed02d34f9cebfeeba666b08c9aebb5419c128c1c8e6995ac1a15f28b9"  # of its tokens as we store them
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")  # in older checkpoints; nothing learned


@dataclass(frozen=True)
class Layout:
    """A model_type of transformers, seen from our settings and parameters."""

    model_type: str
    architecture: str
    settings: Callable[[ModelConfig], Mapping[str, tuple[Any, ...] | None]]  # values it can express, None = any
    keys: Mapping[str, tuple[str, ...]]  # setting -> what config.json calls it; more than one must agree
    absent: Mapping[str, Any]  # what transformers takes where config.json lacks a key
    fixed: Mapping[str, Any]  # keys of config.json that have only one value in a model of ours
    activation: str  # the key that names the MLP's activation
    activations: Mapping[str, tuple[str, ...]]  # ours -> its names there
    blocks: str  # what stands before a block's number, and before whatever is not the head
    modules: Mapping[str, str]  # our modules -> theirs; several of ours in one of theirs lie one under the other
    unread: Mapping[str, Any]  # keys that are written and not read
    transposed: bool = False  # linear layers are stored (in, out)
    shifted: bool = False  # weights of norms are stored less one
    biased: tuple[str, ...] = ()  # modules named so have biases there in any case, zero where we have none

    def misfits(self, config: ModelConfig) -> list[str]:
        """Settings of a model, NAME = VALUE, that this layout cannot express."""
        can = {"activation": tuple(self.activations), **self.settings(config)}
        odd = []
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name in can:
                fits = can[field.name] is None or value in can[field.name]
            else:
                fits = field.name in SIZES | OF_TRAINING or value == field.default
            if not fits:
                odd.append(f"{field.name} = {show(value)}")
        return odd

    def their_name(self, name: str) -> str:
        """Where one of our parameters lies in their weights."""
        module, _, kind = name.rpartition(".")
        if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", module):
            return f"{self.blocks}{block[1]}.{self.modules[block[2]]}.{kind}"
        return f"{self.modules[module]}.{kind}"

    def parameters(self, model: GPT) -> Iterator[tuple[str, Tensor]]:
        """Our parameters by our names, and zero biases where only the layout has some."""
        for name, parameter in model.named_parameters():
            yield name, parameter.detach()
            if not model.config.bias and name.endswith("weight") and any(part in name for part in self.biased):
                yield f"{name.removesuffix('weight')}bias", torch.zeros(len(parameter))

    def store(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter of ours as it lies in the file."""
        if self.transposed and tensor.dim() == 2 and name.startswith("blocks"):
            return tensor.T
        if self.shifted and "norm" in name and name.endswith("weight"):
            return tensor.double() - 1  # in float64, so that adding the one gives the same number back
        return tensor

    def restore(self, name: str, tensor: Tensor) -> Tensor:
        """What `store` made, as it was; float32."""
        if self.transposed and tensor.dim() == 2 and name.startswith("blocks"):
            tensor = tensor.T
        if self.shifted and "norm" in name and name.endswith("weight"):
            tensor = tensor.double() + 1
        return tensor.float()


GPT2 = Layout(
    "gpt2",
    "GPT2LMHeadModel",
    settings=lambda config: {
        "norm": ("layernorm",), "positions": ("learned",), "rope_theta": (None,), "bias": BOTH,
        "tie_embeddings": BOTH, "n_kv_head": (config.n_head,), "head_dim": (config.n_embd / config.n_head,),
    },
    keys={
        "n_layer": ("n_layer",), "n_head": ("n_head",), "n_embd": ("n_embd",), "d_ff": ("n_inner",),
        "block_size": ("n_positions", "n_ctx"), "vocab_size": ("vocab_size",),
        "tie_embeddings": ("tie_word_embeddings",),
    },
    absent={"n_inner": None, "tie_word_embeddings": True, "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False},
    fixed={"layer_norm_epsilon": EPS, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
           "add_cross_attention": False},
    activation="activation_function",
    activations={"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu": ("gelu",), "relu": ("relu",),
                 "relu2": ("relu2",)},
    blocks="transformer.h.",
    modules={
        "embed": "transformer.wte", "embed_position": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
        "norm_attn": "ln_1", "attn.w_q": "attn.c_attn", "attn.w_k": "attn.c_attn", "attn.w_v": "attn.c_attn",
        "attn.w_o": "attn.c_proj", "norm_mlp": "ln_2", "mlp.w_in": "mlp.c_fc", "mlp.w_out": "mlp.c_proj",
    },
    unread={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    transposed=True,
    biased=("norm", "attn", "mlp"),
)  # fmt: skip

LLAMA = Layout(
    "llama",
    "LlamaForCausalLM",
    settings=lambda config: {
        "norm": ("rmsnorm",), "rope_theta": None, "bias": BOTH, "tie_embeddings": BOTH, "n_kv_head": None,
        # transformers refuses another number of heads, also where head_dim is given.
        "head_dim": None, "n_head": () if config.n_embd % config.n_head else None,
    },
    keys={
        "n_layer": ("num_hidden_layers",), "n_head": ("num_attention_heads",), "n_embd": ("hidden_size",),
        "n_kv_head": ("num_key_value_heads",), "head_dim": ("head_dim",), "d_ff": ("intermediate_size",),
        "block_size": ("max_position_embeddings",), "vocab_size": ("vocab_size",), "rope_theta": ("rope_theta",),
        "tie_embeddings": ("tie_word_embeddings",), "bias": ("attention_bias", "mlp_bias"),
    },
    absent={"num_key_value_heads": None, "head_dim": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    fixed={"rms_norm_eps": EPS},
    activation="hidden_act",
    activations={"swiglu": ("silu", "swish")},
    blocks="model.layers.",
    modules={
        "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "norm_attn": "input_layernorm",
        "attn.w_q": "self_attn.q_proj", "attn.w_k": "self_attn.k_proj", "attn.w_v": "self_attn.v_proj",
        "attn.w_o": "self_attn.o_proj", "norm_mlp": "post_attention_layernorm", "mlp.w_gate": "mlp.gate_proj",
        "mlp.w_in": "mlp.up_proj", "mlp.w_out": "mlp.down_proj",
    },
    unread={},
)  # fmt: skip

MISTRAL = replace(  # read and never written: it is Llama's layout with a window
    LLAMA,
    model_type="mistral",
    keys={name: keys for name, keys in LLAMA.keys.items() if name != "bias"},
    absent={**LLAMA.absent, "num_key_value_heads": 8, "sliding_window": 4096},
    fixed={"rms_norm_eps": EPS, "sliding_window": None},
)

NEMOTRON = replace(  # the default model's
    LLAMA,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    settings=lambda config: {**LLAMA.settings(config), "norm": ("layernorm",), "n_head": None},
    absent={**LLAMA.absent, "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    fixed={"norm_eps": EPS, "partial_rotary_factor": 1.0},
    activations={"relu2": ("relu2",)},
    shifted=True,
    biased=("norm",),
)

WRITTEN = (GPT2, LLAMA, NEMOTRON)
READ = {layout.model_type: layout for layout in (*WRITTEN, MISTRAL)}


def layout_for(config: ModelConfig) -> Layout:
    """The layout that expresses a model; UserError names what the nearest one cannot."""
    nearest = min(WRITTEN, key=lambda layout: len(layout.misfits(config)))
    if odd := nearest.misfits(config):
        raise UserError(
            f"transformers has no layout known here for a model with {', '.join(odd)} (the nearest is "
            f"{nearest.model_type}): it can only be used here, or train one without"
        )
    return nearest


def write_folder(run: str, folder: Path, which: str) -> Layout:
    """Write a run's checkpoint as a folder that transformers loads; the folder is there whole or not at all.

    UserError if the folder is there, if there is no such run, or if no layout expresses its model.
    """
    model, tokenizer, _ = load_model(run, which)
    layout = layout_for(model.config)
    if folder.exists():
        raise UserError(f"{folder} is there already: give the name of a new folder")
    parts: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in layout.parameters(model):
        parts.setdefault(layout.their_name(name), []).append((name, tensor))
    weights = {
        theirs: layout.store(some[0][0], torch.cat([tensor for _, tensor in some])).contiguous()
        for theirs, some in parts.items()
    }
    config = config_json(layout, model.config, tokenizer)
    generation: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    if tokenizer.vocab_size < model.config.vocab_size:  # slots without a token are never drawn
        generation["suppress_tokens"] = list(range(tokenizer.vocab_size, model.config.vocab_size))
    texts = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": json.dumps(tokenizer_config(tokenizer, model.config.block_size), indent=2),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as aside:
        new = Path(aside, "new")
        new.mkdir()
        for file, text in texts.items():
            write_synced(new / file, text.encode("utf-8"))
        write_synced(new / "model.safetensors", safetensors.torch.save(weights, metadata={"format": "pt"}))
        os.replace(new, folder)
    return layout


def config_json(layout: Layout, config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """A model's config.json."""
    values = {key: getattr(config, setting) for setting, keys in layout.keys.items() for key in keys}
    return {
        "architectures": [layout.architecture], "model_type": layout.model_type, **values, **layout.fixed,
        layout.activation: layout.activations[config.activation][0], **layout.unread, "dtype": "float32",
        "bos_token_id": tokenizer.begin[0] if tokenizer.begin else tokenizer.end_id,
        "eos_token_id": tokenizer.end_id, "pad_token_id": None,
    }  # fmt: skip


def read_folder(source: str, run: Path) -> Layout:
    """Bring a checkpoint of the hub, or of a folder, into a new run's folder.

    UserError if the run is there, or names what in the checkpoint cannot be expressed here.
    """
    check_new(run)
    folder = Path(source) if Path(source).is_dir() else fetched(source)
    raw = read_json(folder / "config.json")
    if raw.get("model_type") not in READ:
        raise UserError(
            f"{folder / 'config.json'}: model_type = {show_json(raw.get('model_type'))} cannot be expressed here; "
            f"only {', '.join(READ)} can"
        )
    layout = READ[raw["model_type"]]
    values = settings_of(layout, raw, folder / "config.json")
    tensors = read_weights(folder, layout)
    if layout is GPT2:
        values["bias"] = any(bool(t.any()) for name, t in tensors.items() if name.endswith(".bias"))
    (config,) = build((ModelConfig,), values)
    weights = ours(layout, config, tensors, folder)
    eos = raw.get("eos_token_id")
    tokenizer = read_tokenizer(folder / "tokenizer.json", eos[0] if isinstance(eos, list) and eos else eos)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder / 'config.json'}: vocab_size = {config.vocab_size} is less than the {tokenizer.vocab_size} ids "
            "of tokenizer.json"
        )
    write_run(run, config, weights, tokenizer, {"name": folder.name, "fingerprint": ""})
    return layout


def fetched(name: str) -> Path:
    """A model of the hub, fetched into its cache: text and safetensors alone, no pickles and no code."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UserError(f"{name} is neither a folder nor the name of a model on the hub, such as openai-community/gpt2")
    import huggingface_hub

    allowed, left_out = ["*.json", "*.safetensors", "*.model"], ["*/*", "consolidated*"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=allowed, ignore_patterns=left_out))
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise UserError(f"there is no folder {name}, and the hub has no model of this name that you may read") from None
    except Exception as error:  # whatever the library's network layer raises
        reason = str(error).strip().split("\n")[0][:200]
        raise EnvironmentFault(
            f"there is no folder {name}, and the hub did not answer ({reason}): connect, or name a folder"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; UserError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is not there; name a folder that save_pretrained of transformers wrote") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold an object {{...}}")
    return found


def show_json(value: Any) -> str:
    return json.dumps(value)[:100]


def settings_of(layout: Layout, raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Our settings from a config.json; UserError names the key that cannot be expressed."""

    def refuse(key: str, allowed: str) -> UserError:
        return UserError(f"{path}: {key} = {show_json(raw.get(key))} cannot be expressed here; {allowed}")

    for key in ("rope_parameters", "rope_scaling"):  # as transformers 5 calls it, and 4
        rope = raw.get(key) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise refuse(key, "only the default kind can")
        raw = raw | {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    for key in ("quantization_config", "auto_map"):
        if raw.get(key):
            raise refuse(key, "only plain weights of transformers' own models can")
    found = {**layout.absent, **raw}
    for key, value in layout.fixed.items():
        if found.get(key) != value:
            raise refuse(key, f"only {show_json(value)} can") if key in raw else UserError(
                f"{path}: {key} is not there, which means {show_json(found.get(key))}, and only {show_json(value)} "
                "can be expressed here"
            )
    names = {theirs: name for name, all_theirs in layout.activations.items() for theirs in all_theirs}
    if found[layout.activation] not in names:
        raise refuse(layout.activation, f"only {', '.join(names)} can")
    own: dict[str, Any] = {"norm": "layernorm" if layout in (GPT2, NEMOTRON) else "rmsnorm"}
    own |= {"positions": "learned" if layout is GPT2 else "rotary", "activation": names[found[layout.activation]]}
    for setting, keys in layout.keys.items():
        given = [found[key] for key in keys if key in found]
        if not given:
            raise UserError(f"{path} has no {keys[0]}")
        if any(value != given[0] for value in given):
            raise UserError(
                f"{path}: {' and '.join(keys)} differ, and here both are one setting, {setting}: it cannot be expressed"
            )
        own[setting] = given[0]
    return own


def read_weights(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """All tensors of a checkpoint's safetensors files by the names that the layout has for them."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(f, str) and Path(f).name == f for f in places.values()):
            raise UserError(f"{index} does not say which file of its folder holds which tensor (weight_map)")
        files = sorted(set(places.values()))
    elif not (folder / files[0]).is_file():
        pickles = " (its .bin files are pickles, which can run code, and are never opened)"
        raise UserError(
            f"{folder} has no model.safetensors{pickles * any(folder.glob('*.bin'))}: load it with transformers and "
            "save it with save_pretrained"
        )
    prefix = layout.blocks.partition(".")[0] + "."
    tensors = {}
    for file in files:
        try:
            stored = safetensors.torch.load_file(folder / file)
        except (SafetensorError, FileNotFoundError) as error:
            raise UserError(f"{folder / file} is damaged or missing ({error})") from None
        for name, tensor in stored.items():
            if not BUFFERS.search(name):  # GPT-2's own checkpoint leaves the prefix out
                tensors[name if name.startswith((prefix, "lm_head.")) else prefix + name] = tensor
    return tensors


def ours(layout: Layout, config: ModelConfig, tensors: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Their tensors as the parameters of our model; UserError names what is missing, left over or of another shape."""
    with torch.device("meta"):
        model = GPT(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in layout.parameters(model)}
    parts: dict[str, list[str]] = {}
    for name in shapes:
        parts.setdefault(layout.their_name(name), []).append(name)
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    weights: dict[str, Tensor] = {}
    for theirs, names in parts.items():
        if theirs not in tensors:
            raise UserError(f"{source} has no tensor {theirs}, which its config.json asks for")
        tensor = layout.restore(names[0], tensors.pop(theirs))
        wanted = (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
        if tensor.shape != wanted:
            raise UserError(f"{source}: {theirs} has {tensor.numel()} numbers, and config.json asks for {wanted}")
        weights |= zip(names, tensor.split([shapes[name][0] for name in names]), strict=True)
    if tensors:
        raise UserError(f"{source} has a tensor {min(tensors)} that cannot be expressed here")
    parameters = dict(model.named_parameters())
    for name in weights.keys() - parameters.keys():  # biases of a layout that always has some
        if weights[name].any():
            raise UserError(
                f"{source}: {layout.their_name(name)} is not zero and the linear layers have no biases, which cannot "
                "be expressed here: bias is one setting"
            )
    return {name: weights[name].contiguous() for name in parameters}


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """A tokenizer of ours as a tokenizer.json: the same ids for every text that it can encode."""
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    if isinstance(tokenizer, HfTokenizer):
        return tokenizer.text
    if isinstance(tokenizer, CharTokenizer):
        made = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate(tokenizer.characters)}))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
    elif isinstance(tokenizer, WordTokenizer):
        made = tokenizers.Tokenizer(models.WordLevel({f" {word}": i for i, word in enumerate(tokenizer.words)}))
        space = normalizers.Replace(Regex(r"[\s\x1c-\x1f]+"), " ")  # what Python's split() takes for space
        made.normalizer = normalizers.Sequence([space, normalizers.Strip(), normalizers.Prepend(" ")])
        made.pre_tokenizer = pre_tokenizers.Split(Regex(" [^ ]+"), "isolated")
        made.decoder = decoders.Fuse()
    else:
        character = {b: c for c, b in byte_characters().items()}
        spelled = {token: "".join(character[b] for b in token) for token in tokenizer.table if token}
        vocab = {spelled[token]: i for i, token in enumerate(tokenizer.table) if token}
        pairs = merges(tokenizer.tokens) if isinstance(tokenizer, BpeTokenizer) else []
        made = tokenizers.Tokenizer(models.BPE(vocab, [(spelled[a], spelled[b]) for a, b in pairs]))
        # Its own pattern is GPT-2's, which ours is another spelling of.
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(pairs))
        made.decoder = decoders.ByteLevel()
    if tokenizer.end_id is not None:
        made.add_special_tokens([END_OF_TEXT])
    return made.to_str()


def merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair that each token of several bytes was merged from, in order; ValueError if one is merged from no pair.

    It is what is left of the token's bytes when all merges of lower rank are done (as tiktoken does them).
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found = []
    for rank, token in enumerate(tokens):
        parts = [bytes([b]) for b in token]
        while len(parts) > 1:
            of_pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            if (lowest := min(of_pairs)) >= rank:
                break
            at = of_pairs.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
        elif len(parts) > 2:
            raise ValueError(f"token {rank} is not merged from two others")
    return found


def tokenizer_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """What tokenizer_config.json says beside tokenizer.json: text is taken and given back as it is."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
        "clean_up_tokenization_spaces": False, "split_special_tokens": True,
    }  # fmt: skip
    names = tokenizer.names if isinstance(tokenizer, HfTokenizer) else {tokenizer.end_id: END_OF_TEXT}
    if tokenizer.end_id is not None:
        config["eos_token"] = names[tokenizer.end_id]
    if tokenizer.begin:
        config["bos_token"] = names[tokenizer.begin[0]]
    return config


def read_tokenizer(path: Path, end_id: Any) -> Tokenizer:
    """The tokenizer of a tokenizer.json: one of our kinds where that gives the same ids, else one that runs it."""
    if not path.is_file():
        raise UserError(f"{path} is not there: load the tokenizer with transformers and save it with save_pretrained")
    text = path.read_text(encoding="utf-8")
    try:
        end_id = end_id if isinstance(end_id, int) else None
        return same_as_ours(text, end_id) or HfTokenizer(text, end_id)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be used here ({error})") from None


def same_as_ours(text: str, end_id: int | None) -> Tokenizer | None:
    """A tokenizer of ours whose tokenizer.json would say the same; None if there is none."""
    theirs = essence(text)
    names = sorted(theirs["vocab"], key=theirs["vocab"].__getitem__) if isinstance(theirs["vocab"], dict) else []
    byte_of, end = byte_characters(), bool(theirs["added"])

    def bpe() -> Tokenizer:
        tokenizer = BpeTokenizer([bytes(byte_of[c] for c in name) for name in names], end)
        known = hashlib.sha256(tokenizer.to_meta()["tokens"].encode()).hexdigest() == GPT2_SHA256
        return BpeTokenizer(tokenizer.tokens, end, "gpt2") if known else tokenizer

    kinds: dict[str, tuple[Callable[[], Tokenizer], ...]] = {
        "WordLevel": (lambda: CharTokenizer(names, end), lambda: WordTokenizer([name[1:] for name in names])),
        "BPE": (lambda: ByteTokenizer(end), bpe),
    }
    for make in kinds.get(theirs["model"]["type"], ()):
        try:
            tokenizer = make()
            if end_id in (None, tokenizer.end_id) and essence(tokenizer_json(tokenizer)) == theirs:
                return tokenizer
        except (ValueError, KeyError, TypeError):  # names that this kind cannot have
            pass
    return None


def essence(text: str) -> dict[str, Any]:
    """What decides the ids in a tokenizer.json, written in one way."""
    import tokenizers

    try:
        described = json.loads(tokenizers.Tokenizer.from_str(text).to_str())
    except Exception as error:  # the library has no class of its own for this
        raise ValueError(f"not a tokenizer.json: {error}") from None
    model, after = described["model"], described["post_processor"]
    vocab = model.pop("vocab")
    return {
        "vocab": {k: v for k, v in vocab.items() if k != END_OF_TEXT} if isinstance(vocab, dict) else vocab,
        "added": [(token["content"], token["id"]) for token in described["added_tokens"]],
        "model": {key: value or None for key, value in model.items()},
        "after": None if after is None or after["type"] == "ByteLevel" else after,
        "normalizer": described["normalizer"], "pre_tokenizer": described["pre_tokenizer"],
    }  # fmt: skip
