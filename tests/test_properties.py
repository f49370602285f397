"""What holds for any settings, text, token file and draw, tried on what Hypothesis thinks of."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from data.loader import Windows
from data.tokenfile import IGNORED, TokenFile, TokenWriter
from data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, gpt2_tokenizer, train_bpe
from model import ModelConfig
from runtime.generate import choose, sample_generator
from runtime.runs import TrainConfig
from runtime.settings import Kind, build, get_type_hints, parse, read_file, show, to_toml

in_a_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def values(kind):
    """What may stand in a field: sizes up to 64, shares, any text that has a name."""
    plain = {int: st.integers(1, 64), float: st.floats(0.001, 0.999), bool: st.booleans()}
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
    one = st.sampled_from(kind.choices) if kind.choices else plain.get(kind.type, text)
    return one | st.none() if kind.optional else one


@st.composite
def configs(draw, cls):
    """An instance, from some of its settings, that the class takes."""
    kinds = {name: Kind.of(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}
    some = draw(st.lists(st.sampled_from(sorted(kinds)), unique=True, max_size=8))
    try:
        return cls(**{name: draw(values(kinds[name])) for name in some})
    except ValueError:
        assume(False)


@given(configs(ModelConfig), configs(TrainConfig))
@in_a_folder
def test_settings_come_back_from_the_file_that_they_were_written_to(tmp_path, model, train):
    (tmp_path / "a.toml").write_text(to_toml(model, train), encoding="utf-8", newline="")
    given = read_file(str(tmp_path / "a.toml"), ModelConfig, TrainConfig)
    assert build((ModelConfig, TrainConfig), given) == (model, train)


@given(configs(TrainConfig))
@in_a_folder
def test_a_file_and_the_command_line_say_the_same(tmp_path, config):
    (tmp_path / "a.toml").write_text(to_toml(config), encoding="utf-8", newline="")
    texts = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    words = [f"--{name}={v if isinstance(v, str) else 'none' if v is None else show(v)}" for name, v in texts.items()]
    read = [parse(line, TrainConfig, prog="x", description="x")[0][0] for line in (words, [str(tmp_path / "a.toml")])]
    assert read == [config, config]


ANY = {
    "byte": ByteTokenizer(),
    "bpe": train_bpe(["the heather 12 123 \u00e9t\u00e9 \u732b\u732b  \n\n" * 5], 300, end=True),
    "gpt2": gpt2_tokenizer(json.dumps(
        {name: i for i, name in enumerate([
            *map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)]), *map(chr, range(256, 324)), "he",
            "\u0120he", "<|endoftext|>",
        ])}
    ).encode()),
}  # fmt: skip


@pytest.mark.parametrize("tokenizer", [*ANY.values(), *(Tokenizer.from_meta(t.to_meta()) for t in ANY.values())])
@given(TEXT)
def test_any_text_comes_back_from_its_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not ids.size or ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.end_id not in ids.tolist() or tokenizer.end_id is None


@given(st.sets(st.characters(exclude_categories=["Cs"]), min_size=1), st.data())
def test_a_text_of_the_alphabet_comes_back_from_its_ids(alphabet, data):
    tokenizer = CharTokenizer(sorted(alphabet))
    text = data.draw(st.text(st.sampled_from(sorted(alphabet))))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.unknown(text) == [] and len(tokenizer.encode(text)) == len(text)


IDS = st.integers(2, 2**20).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=2)))


def write(path, ids, vocab_size):
    with TokenWriter(path, vocab_size) as writer:
        writer.write(ids)
    return path


@given(IDS, st.data())
@in_a_folder
def test_any_window_of_a_token_file_is_what_was_written(tmp_path, made, data):
    vocab_size, ids = made
    counted = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    tokens = TokenFile(write(tmp_path / "a.bin", ids, vocab_size), write(tmp_path / "b.bin", counted, 2))
    start = data.draw(st.integers(0, len(ids) - 1))
    count = data.draw(st.integers(0, len(ids) - 1 - start))
    assert tokens.read(start, count).tolist() == ids[start : start + count]
    inputs, targets = tokens.window(start, count)
    follow = slice(start + 1, start + count + 1)
    assert inputs.tolist() == ids[start : start + count]
    assert targets.tolist() == [i if c else IGNORED for i, c in zip(ids[follow], counted[follow], strict=True)]
    assert tokens.max_id(chunk=3) == max(ids) and len(tokens) == len(ids)


@given(st.integers(1, 9), st.integers(0, 60), st.integers(1, 7), st.integers(0, 2**64), st.integers(0, 3))
@in_a_folder
def test_a_pass_over_any_data_is_a_permutation_and_a_step_is_a_function_of_its_number(
    tmp_path, block, more, batch, seed, number
):
    length = block + 1 + more
    tokens = TokenFile(write(tmp_path / "a.bin", range(length), length))
    windows = Windows(tokens, block, batch, seed)
    samples = range(number * windows.per_pass, (number + 1) * windows.per_pass)
    steps = range(samples[0] // batch, samples[-1] // batch + 1)
    rows = torch.stack([torch.cat(part) for part in zip(*map(windows.batch, steps), strict=True)], dim=-1)
    first = samples[0] - steps[0] * batch
    own = rows[first : first + len(samples)]  # (windows of the pass, block, input and target); token i of the file is i
    starts = sorted(own[: windows.whole, 0, 0].tolist())
    assert np.diff(starts).tolist() == [block] * (windows.whole - 1)
    assert windows.whole == max(1, (length - block) // block) and starts[-1] + block < length
    counted = own[own[..., 1] != IGNORED].tolist()
    assert sorted(counted) == [[i, i + 1] for i in range(length - 1)]
    again = [Windows(tokens, block, batch, seed).batch(step) for step in reversed(steps)][::-1]
    assert torch.equal(rows, torch.stack([torch.cat(part) for part in zip(*again, strict=True)], dim=-1))


LOGITS = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.floats(-50, 50, width=32)
)


@given(LOGITS, st.floats(0.05, 5), st.none() | st.integers(1, 15), st.none() | st.floats(0.01, 1), st.integers(0, 99))
def test_only_what_the_definition_allows_is_drawn(logits, temperature, top_k, top_p, seed):
    """Allowed are the top_k likeliest and their equals, and of these the likeliest until top_p is reached."""
    drawn = choose(torch.from_numpy(logits), [sample_generator(seed, k) for k in range(len(logits))], temperature,
                   top_k, top_p).tolist()  # fmt: skip
    for row, token in zip(logits.astype(np.float64), drawn, strict=True):
        falling = np.sort(row)[::-1]
        least = falling[min(top_k or len(row), len(row)) - 1]
        p = np.where(row >= least, np.exp((row - row.max()) / temperature), 0.0)
        p /= p.sum()
        likelier = p[p > p[token]].sum()
        assert p[token] > 0 and (top_p is None or likelier < top_p + 1e-9), (row, token, p)


@given(LOGITS, st.sampled_from([{"temperature": 0}, {"temperature": 1e-9}, {"top_k": 1}, {"top_p": 1e-9}]))
def test_greedy_is_the_likeliest_by_whichever_way(logits, options):
    logits, generators = logits.round(), [sample_generator(1, k) for k in range(len(logits))]
    drawn = choose(torch.from_numpy(logits), generators, **options)
    assert np.array_equal(logits[np.arange(len(logits)), drawn.numpy()], logits.max(-1))


@given(LOGITS, st.floats(0.05, 5), st.none() | st.integers(1, 15), st.none() | st.floats(0.01, 1))
def test_the_draws_of_all_numbers_are_probabilities_that_sum_to_one(logits, temperature, top_k, top_p):
    """Evenly spread numbers in place of random ones: an id's share of them is its probability."""
    row, n = torch.from_numpy(logits[:1]).expand(400, -1), iter((np.arange(400) + 0.5) / 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *size, generator: torch.full(size, next(n)))
        shares = torch.bincount(choose(row, [None] * 400, temperature, top_k, top_p), minlength=row.size(1)) / 400
    x = logits[0].astype(np.float64)
    p = np.where(x >= np.sort(x)[::-1][min(top_k or len(x), len(x)) - 1], np.exp((x - x.max()) / temperature), 0.0)
    p /= p.sum()
    kept = np.array([p[p > one].sum() < (top_p or 2) for one in p])  # equals stand or fall together here, but not there
    assume(len(set(x)) == len(x) or top_p is None)
    p = np.where(kept, p, 0.0) / p[kept].sum()
    assert math.isclose(shares.sum(), 1, abs_tol=1e-6)
    assert np.abs(shares.numpy() - p).max() <= 0.01


