"""Token files: what is read is what was written, and a damaged file is told apart from a whole one."""

import hashlib
import os
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data import DataError
from data.tokenfile import TokenFile, TokenWriter


def write(path, ids, vocab_size):
    with TokenWriter(path, vocab_size) as writer:
        writer.write(ids)
    return writer


@pytest.mark.parametrize(("vocab_size", "width"), [(65, 2), (65536, 2), (65537, 4), (100_000, 4)])
def test_ids_come_back_in_the_smallest_width_that_fits(tmp_path, vocab_size, width):
    ids = [0, 1, vocab_size - 1]
    write(tmp_path / "a.bin", ids, vocab_size)
    tokens = TokenFile(tmp_path / "a.bin")
    assert tokens.dtype.itemsize == width
    assert tokens.read(0, 3).tolist() == ids
    assert (tmp_path / "a.bin").stat().st_size == 24 + 3 * width


def test_header_is_magic_version_width_and_count(tmp_path):
    write(tmp_path / "a.bin", range(5), 300)
    content = (tmp_path / "a.bin").read_bytes()
    assert struct.unpack("<8sIIQ", content[:24]) == (b"manyhead", 1, 2, 5)
    assert content[24:] == np.arange(5, dtype="<u2").tobytes()


def test_streamed_writes_equal_one_write(tmp_path):
    ids = np.random.default_rng(1).integers(0, 500, 1000)
    with TokenWriter(tmp_path / "a.bin", 500) as writer:
        for part in np.split(ids, [10, 10, 700]):
            writer.write(part)
    assert writer.count == 1000
    assert writer.sha256 == hashlib.sha256(ids.astype("<u2").tobytes()).hexdigest()
    tokens = TokenFile(tmp_path / "a.bin")
    assert len(tokens) == 1000
    np.testing.assert_array_equal(tokens.read(333, 444), ids[333:777])
    assert tokens.max_id(chunk=7) == ids.max()


def test_ids_outside_the_vocabulary_are_never_written(tmp_path):
    for bad in ([500], [-1], np.array([70_000])):
        with pytest.raises(ValueError, match="do not fit a vocabulary of 500"):
            write(tmp_path / "a.bin", bad, 500)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(tmp_path):
    write(tmp_path / "a.bin", [1, 2, 3], 10)
    with pytest.raises(KeyboardInterrupt), TokenWriter(tmp_path / "a.bin", 10) as writer:
        writer.write([4] * 100)
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
    assert TokenFile(tmp_path / "a.bin").read(0, 3).tolist() == [1, 2, 3]


def test_damaged_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    with pytest.raises(DataError, match="missing"):
        TokenFile(path)
    write(path, range(100), 300)
    content = path.read_bytes()
    for damaged, reason in [
        (content[:-1], "has 223 bytes where 100 tokens take 224"),
        (content + b"x", "has 225 bytes"),
        (content[:10], "not a token file"),
        (b"", "not a token file"),
        (b"PK" + content[2:], "not a token file"),
        (content[:8] + b"\x02" + content[9:], "not a token file of version 1"),
        (content[:12] + b"\x03" + content[13:], "not a token file"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=reason):
            TokenFile(path)


def test_reading_outside_the_file_is_an_error(tmp_path):
    write(tmp_path / "a.bin", range(10), 300)
    tokens = TokenFile(tmp_path / "a.bin")
    assert tokens.read(10, 0).tolist() == []
    for start, count in [(0, 11), (10, 1), (-1, 2)]:
        with pytest.raises(IndexError):
            tokens.read(start, count)


@pytest.mark.parametrize("system_has_pread", [True, False])
def test_threads_can_read_one_file(tmp_path, monkeypatch, system_has_pread):
    if not system_has_pread:  # as on Windows
        monkeypatch.delattr("os.pread", raising=False)
    write(tmp_path / "a.bin", range(10_000), 10_000)
    tokens = TokenFile(tmp_path / "a.bin")
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda start: tokens.read(start, 10), range(0, 10_000, 10)))
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(10_000))


def test_reading_does_not_make_the_process_grow(tmp_path):
    """A memory map would count every page it touched: 40 MB here."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with TokenWriter(tmp_path / "a.bin", 300) as writer:
        for _ in range(20):
            writer.write(np.zeros(1_000_000, dtype=np.uint16))
    tokens = TokenFile(tmp_path / "a.bin")
    before = resident()
    for start in range(0, len(tokens), 100_000):
        tokens.read(start, 100_000)
    assert resident() - before < 5_000_000
    tracemalloc.start()  # reading it whole gives its memory back
    assert tokens.sha256() == writer.sha256 and tokens.max_id() == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    seen, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr("data.tokenfile.os.fsync", lambda fd: (seen.append("sync"), sync(fd)))
    monkeypatch.setattr("data.tokenfile.os.replace", lambda a, b: (seen.append("rename"), replace(a, b)))
    with TokenWriter(tmp_path / "a.bin", 10) as writer:
        writer.write([1, 2, 3])
    assert seen == ["sync", "rename"] and TokenFile(tmp_path / "a.bin").count == 3
