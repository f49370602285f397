"""Models and tokenizers in the layouts of Hugging Face's transformers, and back, without that library.

A layout is a table, which both directions read: the setting of ours in each key of config.json, the module of theirs
in which each of ours lies. A setting that it does not hold has to be at its neutral value, so that one that was added
later is refused by itself. The layouts are those of transformers' modeling_gpt2.py, modeling_llama.py,
modeling_mistral.py and modeling_nemotron.py, version 5.24.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from data.tokenfile import first_line, read_whole
from data.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    HfTokenizer,
    Tokenizer,
    WordTokenizer,
    byte_characters,
    load_hf,
)
from model import GPT, ModelConfig
from runtime.checkpoint import UNREADABLE, check_header, load_model, sized
from runtime.errors import EnvironmentFault, UserError
from runtime.files import write_synced
from runtime.runs import check_new, write_run
from runtime.settings import as_dict, build, show

EPS = 1e-5  # of every norm in model.py
OF_TRAINING = {"attention_path", "attention_dropout", "dropout", "init"}  # they change nothing in a trained model
GPT2_SHA256 = "445c95aed02d34f9cebfeeba666b08c9aebb5419c128c1c8e6995ac1a15f28b9"  # of its tokens as we store them
LONGEST_TOKEN = 10_000  # bytes
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")  # in older checkpoints; nothing learned


@dataclass(frozen=True)
class Layout:
    """A model_type of transformers, seen from our settings and parameters."""

    model_type: str
    architecture: str
    own: Mapping[str, Any]  # settings of ours that it fixes
    keys: Mapping[str, str]  # key of config.json -> the setting of ours in it
    fixed: Mapping[str, Any]  # keys that have only one value in a model of ours
    absent: Mapping[str, Any]  # what transformers takes where config.json lacks a key, if it is not that value
    unread: Mapping[str, Any]  # keys that are written and not read
    activations: dict[str, str]  # its names of the MLP's activation -> ours; of equal ones the first is written
    blocks: str  # what stands before a block's number, and before whatever is not the head
    modules: Mapping[str, str]  # our modules -> theirs; several of ours in one of theirs lie one under the other
    biased: tuple[str, ...] = ()  # modules named so have biases there in any case, zero where we have none
    uneven: bool = False  # n_embd need not be a multiple of n_head
    transposed: bool = False  # linear layers are stored (in, out)
    shifted: bool = False  # weights of norms are stored less one

    def misfits(self, config: ModelConfig) -> list[str]:
        """Settings of a model, NAME = VALUE, that this layout cannot express."""
        neutral = {field.name: field.default for field in fields(config)} | {"rope_theta": None, **self.own}
        neutral |= {"n_kv_head": config.n_head, "head_dim": config.n_embd / config.n_head}
        free = {*self.keys.values(), *OF_TRAINING, "bias"}
        odd = [name for name, value in neutral.items() if name not in free and getattr(config, name) != value]
        odd += ["activation"] * (config.activation not in self.activations.values())
        odd += ["n_head"] * (config.n_embd % config.n_head > 0 and not self.uneven)
        return [f"{name} = {show(getattr(config, name))}" for name in odd]

    def places(self, model: GPT) -> dict[str, dict[str, Tensor]]:
        """Their tensors by name: the parameters of ours in each, and zero biases where only the layout has some."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in model.named_parameters():
            module, _, kind = name.rpartition(".")
            block, part = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", module).groups()
            theirs = (f"{self.blocks}{block}." if block else "") + self.modules[part]
            found.setdefault(f"{theirs}.{kind}", {})[name] = parameter.detach()
            if not model.config.bias and any(word in part for word in self.biased):
                found.setdefault(f"{theirs}.bias", {})[f"{module}.bias"] = torch.zeros(len(parameter))
        return found

    def turned(self, theirs: str, tensor: Tensor, sign: int) -> Tensor:
        """A tensor of ours as it lies in the file (sign -1), or one of the file as ours (sign 1)."""
        if self.transposed and tensor.dim() == 2 and theirs.startswith(self.blocks):
            return tensor.T
        if self.shifted and theirs.endswith("norm.weight"):
            return tensor.double() + sign  # in float64, so that there and back is the same number
        return tensor


GPT2 = Layout(
    "gpt2", "GPT2LMHeadModel",
    own={"norm": "layernorm", "positions": "learned"},
    keys={"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "n_inner": "d_ff", "n_positions": "block_size",
          "n_ctx": "block_size",  # an older name, which llama.cpp's converter reads
          "vocab_size": "vocab_size", "tie_word_embeddings": "tie_embeddings", "activation_function": "activation"},
    fixed={"layer_norm_epsilon": EPS, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
           "add_cross_attention": False},
    absent={"n_inner": None, "tie_word_embeddings": True, "activation_function": "gelu_new"},
    unread={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
                 "relu": "relu", "relu2": "relu2"},
    blocks="transformer.h.",
    modules={"embed": "transformer.wte", "embed_position": "transformer.wpe", "norm": "transformer.ln_f",
             "head": "lm_head", "norm_attn": "ln_1", "attn.w_q": "attn.c_attn", "attn.w_k": "attn.c_attn",
             "attn.w_v": "attn.c_attn", "attn.w_o": "attn.c_proj", "norm_mlp": "ln_2", "mlp.w_in": "mlp.c_fc",
             "mlp.w_out": "mlp.c_proj"},
    biased=("norm", "attn", "mlp"),
    transposed=True,
)  # fmt: skip

LLAMA = Layout(
    "llama", "LlamaForCausalLM",
    own={"norm": "rmsnorm", "positions": "rotary"},
    keys={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head",
          "head_dim": "head_dim", "hidden_size": "n_embd", "intermediate_size": "d_ff", "hidden_act": "activation",
          "max_position_embeddings": "block_size", "vocab_size": "vocab_size", "rope_theta": "rope_theta",
          "tie_word_embeddings": "tie_embeddings", "attention_bias": "bias", "mlp_bias": "bias"},
    fixed={"rms_norm_eps": EPS},
    absent={"num_key_value_heads": None, "head_dim": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    unread={},
    activations={"silu": "swiglu", "swish": "swiglu"},
    blocks="model.layers.",
    modules={"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "norm_attn": "input_layernorm",
             "attn.w_q": "self_attn.q_proj", "attn.w_k": "self_attn.k_proj", "attn.w_v": "self_attn.v_proj",
             "attn.w_o": "self_attn.o_proj", "norm_mlp": "post_attention_layernorm", "mlp.w_gate": "mlp.gate_proj",
             "mlp.w_in": "mlp.up_proj", "mlp.w_out": "mlp.down_proj"},
)  # fmt: skip

MISTRAL = replace(  # read and never written: it is Llama's layout with a window
    LLAMA,
    model_type="mistral",
    keys={key: setting for key, setting in LLAMA.keys.items() if setting != "bias"},
    fixed={"rms_norm_eps": EPS, "sliding_window": None},
    absent={**LLAMA.absent, "num_key_value_heads": 8, "sliding_window": 4096},
)

NEMOTRON = replace(  # the default model's
    LLAMA,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    own={"norm": "layernorm", "positions": "rotary"},
    fixed={"norm_eps": EPS, "partial_rotary_factor": 1.0},
    absent={**LLAMA.absent, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    activations={"relu2": "relu2"},
    biased=("norm",),
    uneven=True,
    shifted=True,
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
    weights = {
        theirs: layout.turned(theirs, torch.cat(list(some.values())), -1).contiguous()
        for theirs, some in layout.places(model).items()
    }
    ids = {"bos_token_id": [*tokenizer.begin, tokenizer.end_id][0], "eos_token_id": tokenizer.end_id}
    unused = list(range(tokenizer.vocab_size, model.config.vocab_size))  # ids without a token are never drawn
    generation = ids | ({"suppress_tokens": unused} if unused else {})
    texts = {
        "config.json": json.dumps(config_json(layout, model.config) | ids, indent=2),
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


def config_json(layout: Layout, config: ModelConfig) -> dict[str, Any]:
    """A model's config.json, but for what its tokenizer says."""
    names = {ours: theirs for theirs, ours in reversed(layout.activations.items())}
    values = as_dict(config) | {"activation": names[config.activation]}
    return {
        "architectures": [layout.architecture], "model_type": layout.model_type, "dtype": "float32",
        **{key: values[setting] for key, setting in layout.keys.items()}, **layout.fixed, **layout.unread,
        "pad_token_id": None,
    }  # fmt: skip


def read_folder(source: str, run: Path) -> Layout:
    """Bring a checkpoint of the hub, or of a folder, into a new run's folder.

    UserError if the run is there, or names what in the checkpoint cannot be expressed here.
    """
    check_new(run)
    folder = Path(source) if Path(source).is_dir() else fetched(source)
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") not in [*READ]:  # a list, so that any value can be asked for
        told = f"model_type = {show_json(raw.get('model_type'))} cannot be expressed here; only {', '.join(READ)} can"
        raise UserError(f"{path}: {told}")
    layout = READ[raw["model_type"]]
    values = settings_of(layout, raw, path)
    tensors = read_weights(folder, layout)
    if layout is GPT2:  # no key tells
        values["bias"] = any(bool(t.any()) for name, t in tensors.items() if name.endswith(".bias"))
    names = (f"{layout.modules['embed']}.weight", "lm_head.weight")
    tables = [tensors[name].float() for name in names if name in tensors]
    if len(tables) == 2 and not torch.equal(*tables):  # transformers does not tie them then, whatever the key says
        values["tie_embeddings"] = False
    (config,) = build((ModelConfig,), values)
    weights = our_weights(layout, config, tensors, folder)
    eos = raw.get("eos_token_id")
    end_id = eos[0] if isinstance(eos, list) and eos else eos
    if end_id is not None and type(end_id) is not int:  # true is an int too
        raise UserError(f"{path}: eos_token_id = {show_json(eos)} is no id: give a number, a list of them, or null")
    tokenizer = read_tokenizer(folder / "tokenizer.json", end_id)
    if tokenizer.vocab_size > config.vocab_size:
        told = f"vocab_size = {config.vocab_size} is less than the {tokenizer.vocab_size} ids of tokenizer.json"
        raise UserError(f"{path}: {told}")
    write_run(run, config, weights, tokenizer, {"name": Path(source).resolve().name, "fingerprint": ""})
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
        found = json.loads(read_whole(path))
    except FileNotFoundError:
        raise UserError(f"{path} is not there; name a folder that save_pretrained of transformers wrote") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({first_line(error)})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold an object {{...}}")
    return found


def show_json(value: Any) -> str:
    return json.dumps(value)[:100]


def settings_of(layout: Layout, raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Our settings from a config.json; UserError names the key that cannot be expressed."""

    def refuse(key: str, allowed: str) -> UserError:
        found = f"{key} is not there, which means {show_json(layout.absent.get(key))}, and"
        found = f"{key} = {show_json(raw[key])}" if key in raw else found
        return UserError(f"{path}: {found} cannot be expressed here; only {allowed} can")

    for key in ("rope_parameters", "rope_scaling"):  # as transformers 5 calls it, and 4
        rope = raw.get(key) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise refuse(key, "the default kind")
        if any(isinstance(value, dict) for value in rope.values()):
            raise refuse(key, "one kind for all layers")
        said = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        if any(raw.get(name, value) != value for name, value in said.items()):
            raise refuse(key, "what config.json says elsewhere")
        raw = raw | said
    for key in ("quantization_config", "auto_map"):
        if raw.get(key):
            raise refuse(key, "plain weights of transformers' own models")
    found = {**layout.fixed, **layout.absent, **raw}
    for key, value in layout.fixed.items():
        if found[key] != value:
            raise refuse(key, show_json(value))
    values = dict(layout.own)
    for key, setting in layout.keys.items():
        value = found.get(key, values.get(setting))
        if value is None and key not in layout.absent:
            raise UserError(f"{path} has no {key}: name a folder that save_pretrained of transformers wrote")
        if setting == "activation":
            if value not in [*layout.activations]:
                raise refuse(key, ", ".join(layout.activations))
            value = layout.activations[value]
        if values.setdefault(setting, value) != value:
            keys = " and ".join(other for other, same in layout.keys.items() if same == setting)
            raise UserError(f"{path}: {keys} differ, and here both are one setting, {setting}: it cannot be expressed")
    return values


def read_weights(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """All tensors of a checkpoint's safetensors files by the names that the layout has for them."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        places = read_json(index).get("weight_map")
        named = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
        if not named or not all(re.fullmatch(r"[\w.-]+\.safetensors", file) for file in places.values()):
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
            check_header(folder / file)
            stored = safetensors.torch.load_file(folder / file)
        except UNREADABLE as error:
            raise UserError(f"{folder / file} is damaged or missing ({first_line(error)})") from None
        for name, tensor in stored.items():
            if BUFFERS.search(name):
                continue
            theirs = name if name.startswith((prefix, "lm_head.")) else prefix + name  # GPT-2's own leaves it out
            if theirs in tensors:
                raise UserError(f"{folder} has the tensor {theirs} twice, with and without {prefix}: leave one out")
            if not tensor.is_floating_point() or not tensor.float().isfinite().all():
                kind = str(tensor.dtype).removeprefix("torch.")
                raise UserError(f"{folder}: {theirs} ({kind}) does not hold finite numbers of a floating-point dtype")
            tensors[theirs] = tensor
    return tensors


def our_weights(
    layout: Layout, config: ModelConfig, tensors: dict[str, Tensor], source: Path
) -> dict[str, Tensor]:
    """Their tensors as the parameters of our model; UserError names what is missing, left over or of another shape."""
    sized(config, tensors, source)
    with torch.device("meta"):
        model = GPT(config)
        places = layout.places(model)
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    weights: dict[str, Tensor] = {}
    for theirs, some in places.items():
        if theirs not in tensors:
            raise UserError(f"{source} has no tensor {theirs}, which its config.json asks for")
        tensor = layout.turned(theirs, tensors.pop(theirs), 1).float()
        rows = [len(parameter) for parameter in some.values()]
        wanted = (sum(rows), *next(iter(some.values())).shape[1:])
        if tensor.shape != wanted:
            raise UserError(f"{source}: {theirs} has {tensor.numel()} numbers, and config.json asks for {wanted}")
        if theirs.endswith(".bias") and not config.bias and tensor.any():  # of a layout that always has some
            told = "is not zero and the linear layers have none, which cannot be expressed here: bias is one setting"
            raise UserError(f"{source}: {theirs} {told}")
        weights |= zip(some, tensor.split(rows), strict=True)
    if tensors:
        raise UserError(f"{source} has a tensor {min(tensors)} that cannot be expressed here")
    return {name: weights[name].contiguous() for name, _ in model.named_parameters()}


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
    names = tokenizer.names if isinstance(tokenizer, HfTokenizer) else {tokenizer.end_id: END_OF_TEXT}
    special = {"eos_token": tokenizer.end_id, "bos_token": next(iter(tokenizer.begin), None)}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
        "clean_up_tokenization_spaces": False, "split_special_tokens": True,
        **{key: names[number] for key, number in special.items() if number is not None},
    }  # fmt: skip


def read_tokenizer(path: Path, end_id: int | None) -> Tokenizer:
    """The tokenizer of a tokenizer.json: one of our kinds where that gives the same ids, else one that runs it."""
    if not path.is_file():
        raise UserError(f"{path} is not there: load the tokenizer with transformers and save it with save_pretrained")
    try:
        text = read_whole(path)
        return same_as_ours(text, end_id) or HfTokenizer(text, end_id)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be used here ({first_line(error)})") from None


def same_as_ours(text: str, end_id: int | None) -> Tokenizer | None:
    """A tokenizer of ours whose tokenizer.json would say the same; None if there is none."""
    theirs = essence(text)
    names = sorted(theirs["vocab"], key=theirs["vocab"].__getitem__) if isinstance(theirs["vocab"], dict) else []
    byte_of, end = byte_characters(), bool(theirs["added"])

    def bpe() -> Tokenizer:
        if max(map(len, names)) > LONGEST_TOKEN:  # whose merges would be looked for without end
            raise ValueError(f"a token of {max(map(len, names))} bytes")
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
    described = json.loads(load_hf(text).to_str())
    model, after = described["model"], described["post_processor"]
    vocab = model.pop("vocab")
    return {
        "vocab": {k: v for k, v in vocab.items() if k != END_OF_TEXT} if isinstance(vocab, dict) else vocab,
        "added": [(token["content"], token["id"]) for token in described["added_tokens"]],
        "model": {key: value or None for key, value in model.items()},
        "after": None if after is None or after["type"] == "ByteLevel" else after,
        "normalizer": described["normalizer"], "pre_tokenizer": described["pre_tokenizer"],
    }  # fmt: skip
