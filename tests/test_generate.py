"""Drawing a token, the cached loop past the context, and whole characters (runtime/generate.py)."""

import math

import pytest
import torch
from reference import every_layout, lively

from data.tokenizer import ByteTokenizer, CharTokenizer
from model import GPT, ModelConfig
from runtime.errors import EnvironmentFault
from runtime.generate import TextStream, choose, generate, sample_generator, window_start


def small_model(vocab_size=30, dtype=torch.float64, **settings):
    """A model whose text varies: the weights are larger than at the start of a training."""
    settings = {"block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32} | settings
    return lively(GPT(ModelConfig(vocab_size=vocab_size, **settings))).to(dtype).eval()


def written(model, prompt, count, samples=1, seed=1, **options):
    """The ids of each sample, a list of lists."""
    generators = [sample_generator(seed, k) for k in range(samples)]
    return [list(ids) for ids in zip(*generate(model, prompt, count, generators, **options), strict=True)]


def shares(probabilities, draws=20_000, **options):
    """How often each id is drawn from these probabilities."""
    logits = torch.tensor(probabilities).log().expand(draws, -1)
    ids = choose(logits, [sample_generator(1, 0)] * draws, **options)
    return (torch.bincount(ids, minlength=len(probabilities)) / draws).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.2, 0.5, 0.3]),
        ({"temperature": 0.5}, [4 / 38, 25 / 38, 9 / 38]),  # squares, over their sum
        ({"top_k": 2}, [0, 5 / 8, 3 / 8]),
        ({"top_k": 9}, [0.2, 0.5, 0.3]),
        ({"top_p": 0.45}, [0, 1, 0]),
        ({"top_p": 0.6}, [0, 5 / 8, 3 / 8]),
        ({"top_p": 0.9}, [0.2, 0.5, 0.3]),
        ({"top_p": 0.6, "top_k": 2}, [0, 1, 0]),  # of 5/8 and 3/8 the first alone reaches 0.6
        ({"temperature": 1e-310}, [0, 1, 0]),
        ({"temperature": 0}, [0, 1, 0]),
    ],
)
def test_ids_are_drawn_with_the_probabilities_of_the_definition(options, expected):
    for share, probability in zip(shares([0.2, 0.5, 0.3], **options), expected, strict=True):
        # five standard deviations of a share of 20,000 draws; what is ruled out never comes
        assert abs(share - probability) <= 5 * math.sqrt(probability * (1 - probability) / 20_000)


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-24])  # the first and the last that torch.rand can give
def test_what_is_ruled_out_is_not_drawn_by_an_extreme_number_either(monkeypatch, draw):
    monkeypatch.setattr(torch, "rand", lambda *size, generator: torch.full(size, draw))
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.5, 1.0]])
    assert choose(logits, [None], top_k=1).tolist() == [3]
    assert choose(logits, [None], top_p=0.7).tolist() == ([1] if draw == 0 else [3])


def test_a_negative_temperature_is_refused():
    with pytest.raises(ValueError, match="temperature must be 0"):
        choose(torch.zeros(1, 3), [sample_generator(1, 0)], temperature=-0.1)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_are_told_and_not_drawn_from(temperature):
    model = small_model()
    with torch.no_grad():
        model.head.weight[3] = math.nan
    with pytest.raises(EnvironmentFault, match="not a number"):
        written(model, [1], 5, temperature=temperature)


def test_the_window_starts_where_the_rule_says():
    assert [window_start(length, 8) for length in (1, 8, 9, 12, 13, 16, 17)] == [0, 0, 4, 4, 8, 8, 12]
    assert [window_start(length, 5) for length in (5, 6, 7, 8, 10)] == [0, 2, 2, 4, 6]  # steps of 5 // 2
    assert [window_start(length, 1) for length in (1, 2, 3)] == [0, 1, 2]


def uncached(model, prompt, count, temperature):
    """Sample 0 of seed 1 by a whole forward pass over the window for every token."""
    ids, block_size, generator = list(prompt), model.config.block_size, sample_generator(1, 0)
    for _ in range(count):
        start = 0
        while len(ids) - start > block_size:
            start += max(1, block_size // 2)
        with torch.no_grad():
            ids.append(int(choose(model(torch.tensor([ids[start:]]))[:, -1], [generator], temperature)))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_path": "scratch"},
        {"positions": "learned"},
        {"positions": "sinusoidal", "block_size": 7},
        {"block_size": 1},
    ],
    ids=str,
)
@every_layout
@pytest.mark.parametrize("prompt_length", [1, 50])
def test_cached_text_is_the_uncached_text_also_past_the_context(layout, settings, prompt_length):
    model = small_model(**layout, **settings)
    prompt = [(7 * i * i + 3) % 30 for i in range(prompt_length)]
    expected = uncached(model, prompt, 45, temperature=2.0)
    assert len(set(expected)) > 5  # or the comparison would say little
    assert written(model, prompt, 45, temperature=2.0) == [expected]


@pytest.mark.parametrize("temperature", [0, 1])
def test_one_call_of_24_tokens_equals_four_of_6(temperature):
    model, prompt = small_model(), [1, 2, 3]
    whole = written(model, prompt, 24, temperature=temperature)[0]
    parts, generator = [], sample_generator(1, 0)
    for _ in range(4):
        parts += [ids[0] for ids in generate(model, prompt + parts, 6, [generator], temperature)]
    assert len(prompt + whole) > model.config.block_size + model.config.block_size // 2
    assert parts == whole


def test_a_samples_logits_are_the_same_to_the_last_bit_whatever_is_written_beside_it():
    model, seen = small_model(dtype=torch.float32), []
    model.head.register_forward_hook(lambda module, given, logits: seen.append(logits[0].clone()))
    with_others = written(model, [1, 2], 60, samples=4)
    alone = written(model, [1, 2], 60, samples=1)
    assert torch.stack(seen[:60]).equal(torch.stack(seen[60:]))
    assert alone == with_others[:1]
    assert len(set(map(tuple, with_others))) == 4


def test_a_sample_depends_on_the_seed_and_on_its_number():
    model = small_model()
    first = written(model, [1], 20, samples=2, seed=5)
    assert first == written(model, [1], 20, samples=2, seed=5)
    assert first[0] != first[1]
    assert first[0] != written(model, [1], 20, seed=6)[0]


@pytest.mark.parametrize("temperature", [0, 2])
def test_slots_without_a_token_are_never_drawn(temperature):
    model = small_model(vocab_size=64)
    with torch.no_grad():
        model.head.weight[40:] *= 100  # an untrained model would choose little else
    ids = written(model, [1], 500, samples=2, temperature=temperature, vocab_size=40)
    assert max(map(max, ids)) < 40
    assert max(map(max, written(model, [1], 5, temperature=temperature))) >= 40


def test_writing_uses_no_random_numbers_but_its_own():
    model, state = small_model(), torch.get_rng_state()
    written(model, [1], 5)
    assert torch.get_rng_state().equal(state)


def streamed(tokenizer, ids, stop=""):
    """What each id adds to the text, and the rest."""
    stream = TextStream(tokenizer, stop)
    return [*(stream.feed(token) for token in ids), stream.finish()]


def test_characters_of_several_tokens_come_whole():
    ids = list("é😀a".encode())
    assert streamed(ByteTokenizer(), ids) == ["", "é", "", "", "", "😀", "a", ""]


def test_bytes_that_are_no_characters_come_as_the_tokenizer_decodes_them():
    assert streamed(ByteTokenizer(), "a😀".encode()[:3]) == ["a", "", "", "\ufffd"]
    ids = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    assert "".join(streamed(ByteTokenizer(), ids)) == ByteTokenizer().decode(ids)


def test_ids_outside_the_vocabulary_add_nothing():
    assert streamed(CharTokenizer("ab"), [0, 7, 1]) == ["a", "", "b", ""]


@pytest.mark.parametrize(
    ("text", "stop", "pieces"),
    [
        ("abcd", "bc", ["a", "", "", "", ""]),  # over two tokens, and nothing comes after it
        ("aaab", "aab", ["", "", "a", "", ""]),
        ("abac", "abc", ["", "", "ab", "ac", ""]),  # looked like it, and is given back
        ("ab", "bc", ["a", "", "b"]),  # held to the end
        ("ab", "a", ["", "", ""]),
        ("é", "é", ["", "", ""]),
    ],
)
def test_the_text_ends_before_the_stop(text, stop, pieces):
    assert streamed(ByteTokenizer(), text.encode(), stop) == pieces


def test_the_text_ends_at_the_end_of_a_document():
    assert streamed(ByteTokenizer(end=True), [97, 256, 98]) == ["a", "", "", ""]
    stream = TextStream(ByteTokenizer(end=True), stop="ab")
    assert (stream.feed(97), stream.done, stream.feed(256), stream.done) == ("", False, "a", True)
