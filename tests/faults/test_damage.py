"""Damage to any file of a run is refused by the file's name, before anything is changed or made of it."""

import contextlib
import io
import json
import random
import shutil

import pytest
import torch
from processes import TINY, rows

import heads
import sample
import train
from runtime.checkpoint import read_meta, read_tensors
from runtime.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("handlers_come_back")]
FILES = ("last/model.safetensors", "last/optimizer.safetensors", "last/meta.json", "best/model.safetensors",
         "best/meta.json")  # fmt: skip


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A run of 20 steps, and in `foreign` files of no such kind, and another run's."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        words = ["--dataset", dataset, "--max_steps", "20", "--decay_steps", "30", "--seed", str(seed), *TINY]
        with contextlib.redirect_stdout(io.StringIO()):
            assert train.main([*words, "--out_dir", str(folder / str(seed))]) == 0
    return folder / "1"


def damaged(content, name, run, draw):
    """(what was done, the file after it)"""
    for share in (0, 0.1, 0.5, 0.99):
        yield f"cut at {share}", content[: int(share * len(content))]
    yield "without its last byte", content[:-1]
    for _ in range(3):
        yield "flip", flipped(content, draw.randrange(8 * len(content)))
    yield "png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0\0\0\1\0\x08\2\0\0\0"
    pickled = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(3)}, "step": 1}, pickled)
    yield "pickle", pickled.getvalue()
    if name.endswith("tensors"):
        yield "another run's", (run.parent / "2" / name).read_bytes()


def flipped(content, bit):
    content = bytearray(content)
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_damage_is_refused_by_name_by_every_command_that_reads_the_file(run, tmp_path, command, name):
    copy = shutil.copytree(run, tmp_path / "run")
    which, file = name.split("/")
    readers = [(sample, copy, "--checkpoint", which, "--max_new_tokens", 1), (heads, copy, "--checkpoint", which)]
    if which == "last":
        readers.append((train, "--resume", copy, "--max_steps", 21))
    if file == "optimizer.safetensors":
        readers = readers[2:]
    for what, content in damaged((run / name).read_bytes(), name, run, random.Random(1)):
        (copy / name).write_bytes(content)
        for words in readers:
            status, _, err = command(*words)
            assert (status, err.count("\n")) == (2, 1) and str(copy / name) in err, (what, words[0], err)
    (copy / name).write_bytes((run / name).read_bytes())
    same = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert same == {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_is_passed_over(run, tmp_path, name):
    """One bit of every byte of meta.json, and of 100 bytes of the other files."""
    draw, content = random.Random(2), (run / name).read_bytes()
    which, file = name.split("/")
    copy = shutil.copytree(run / which, tmp_path / which)
    meta = read_meta(run / which)
    places = range(len(content)) if file == "meta.json" else draw.sample(range(len(content)), 100)
    for place in places:
        (copy / file).write_bytes(flipped(content, 8 * place + draw.randrange(8)))
        with pytest.raises(UserError, match=file):
            # A space that became another space says the same.
            assert read_meta(copy) == meta, "read without a word"
            if file == "meta.json":
                raise UserError(file)
            read_tensors(copy, file, meta)


def test_a_settings_file_is_a_copy_and_is_written_anew(run, tmp_path, command):
    for number, (_, content) in enumerate(damaged((run / "settings.toml").read_bytes(), "", run, random.Random(3))):
        copy = shutil.copytree(run, tmp_path / str(number))
        (copy / "settings.toml").write_bytes(content)
        assert command(train, "--resume", copy, "--max_steps", 20)[0] == 0
        assert (copy / "settings.toml").read_bytes() == (run / "settings.toml").read_bytes()


def test_a_damaged_log_is_refused_by_the_line_and_a_torn_end_is_not(run, tmp_path, command):
    """A digit that became another cannot be told: a row has no checksum, and nothing but `elapsed` is taken from it."""
    copy, draw = shutil.copytree(run, tmp_path / "run"), random.Random(4)
    log, whole = copy / "metrics.jsonl", (run / "metrics.jsonl").read_bytes()
    good, refused = rows(run), 0
    for what, content in [
        *damaged(whole, "", run, draw), *(("flip", flipped(whole, draw.randrange(8 * len(whole)))) for _ in range(40)),
    ]:  # fmt: skip
        log.write_bytes(content)
        status, _, err = command(train, "--resume", copy, "--max_steps", 20)
        if status == 0 and "cut" in what:
            assert all(row in good for row in rows(copy))
        elif status == 0:
            assert what in ("flip", "without its last byte")
            assert sum(row not in rows(copy) for row in good) <= 1
        else:
            assert (status, err.count("\n")) == (2, 1) and f"{log}: line " in err and "is damaged" in err, (what, err)
            assert log.read_bytes() == content
            refused += 1
    assert refused > 15
    rows_out_of_order = whole.splitlines(keepends=True)
    log.write_bytes(b"".join([rows_out_of_order[5], *rows_out_of_order]))
    assert "line 2 is damaged" in command(train, "--resume", copy, "--max_steps", 20)[2]
    assert json.loads(rows_out_of_order[5])["step"] > json.loads(rows_out_of_order[0])["step"]
