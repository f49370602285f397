"""prepare.py killed at every moment, on a full and on a read-only disk: never half a data set, no former one lost."""

import concurrent.futures
import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from texts import some_text

import prepare
from data import DataError, open_dataset

ROOT = Path(prepare.__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("handlers_come_back")]

# Splits off a process for each order, which kills itself before its n-th step that changes the disk (0: never).
SERVER = """
import os, signal, sys
import prepare
from data import sources, tokenfile
sources.PIECE = 2000

def run(number, words):
    def step(event="write", arguments=()):
        nonlocal number
        opened = event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if opened or event in ("write", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            number -= 1
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    write = tokenfile.TokenWriter.write
    tokenfile.TokenWriter.write = lambda *given: (write(*given), step())
    sys.addaudithook(step)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    prepare.errors.run(lambda argv: prepare.main(words))

for line in sys.stdin:
    number, *words = line.split("\\t")
    child = os.fork()
    if child == 0:
        run(int(number), [word.strip() for word in words])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def split_off():
    """Runs prepare.py until its n-th step on the disk; its exit status, -9 if it was killed there."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def run(number, *words):
            server.stdin.write("\t".join(map(str, (number, *words))) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        yield run
        server.stdin.close()


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("former", [False, True])
def test_killed_at_any_moment_it_leaves_whole_data_sets_and_ends_well_when_called_again(tmp_path, split_off, former):
    old, new, empty, place = (tmp_path / name for name in ("old.txt", "new.txt", "empty.txt", "place"))
    old.write_text(some_text(1000, seed=1))
    new.write_text(some_text(3000, seed=2))
    empty.write_text("")
    command = place / "set", "--files", new
    assert split_off(0, place / "set", "--files", old) == 0
    before = contents(place / "set")
    assert split_off(0, *command) == 0
    whole = contents(place / "set")
    steps = between = 0
    while True:
        shutil.rmtree(place / "set")
        if former:
            (place / "set").mkdir()
            for name, content in before.items():
                (place / "set" / name).write_bytes(content)
        steps += 1
        status = split_off(steps, *command)
        if status == 0:
            break  # it has fewer steps than that
        assert status == -9
        if (place / "set").exists():
            assert contents(place / "set") in ((before, whole) if former else (whole,))
        elif former:  # between two renames, so it lies beside; what comes next puts it back, even if it fails
            between += 1
            assert split_off(0, place / "set", "--files", empty) == 2
            assert contents(place / "set") == before
        assert split_off(0, *command) == 0
        assert contents(place / "set") == whole
        assert [path.name for path in place.iterdir()] == ["set"], "something is left aside"
    assert steps > 15 and between == former
    open_dataset(str(place / "set")).verify()


def test_what_another_process_is_preparing_is_not_cleared_away(tmp_path, split_off):
    (tmp_path / "a.txt").write_text(some_text(1000))
    with prepare.replacing(tmp_path / "set") as new:
        assert split_off(0, tmp_path / "set", "--files", tmp_path / "a.txt") == 0
        assert new.is_dir()
        open_dataset(str(tmp_path / "set")).verify()


def test_preparations_that_end_at_once_take_their_turns(tmp_path, monkeypatch):
    def slowly(old, new, replace=os.replace):
        time.sleep(0.02)
        replace(old, new)

    def one(number):
        with prepare.replacing(tmp_path / "set") as new:
            (new / "meta.json").write_text(str(number))
            ready.wait()

    monkeypatch.setattr(os, "replace", slowly)
    ready = threading.Barrier(4)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_command_killed_by_the_clock_can_be_called_again(tmp_path):
    """From outside, at moments drawn by chance, a good part of them while it writes."""
    (tmp_path / "a.txt").write_text(some_text(400_000))
    command = [sys.executable, "prepare.py", str(tmp_path / "set"), "--files", str(tmp_path / "a.txt")]
    draw, writing = random.Random(1), 0
    for _ in range(4):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            while not list(tmp_path.glob(".set.*/new/train.bin*")) and process.poll() is None:
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0, 0.1))
            process.kill()
        writing += process.returncode == -9
        with contextlib.suppress(DataError):
            open_dataset(str(tmp_path / "set")).verify()
            shutil.rmtree(tmp_path / "set")
        assert not (tmp_path / "set").exists()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    open_dataset(str(tmp_path / "set")).verify()
    assert writing and sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "set"]


@pytest.fixture
def disk(tmp_path):
    """A disk of 400 kB of its own, with a data set on it; mount takes more options of mount."""

    def mount(options):
        return subprocess.run(["mount", "-o", options, "-t", "tmpfs", "tmpfs", place], capture_output=True)

    place = tmp_path / "disk"
    place.mkdir()
    if not shutil.which("mount") or mount("size=400k").returncode:
        pytest.skip("may not mount a disk here")
    try:
        (tmp_path / "old.txt").write_text(some_text(1000, seed=1))
        (tmp_path / "new.txt").write_text(some_text(5000, seed=2))
        prepare.main([str(place / "set"), "--files", str(tmp_path / "old.txt")])
        yield place, mount
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_disk_that_fills_up_at_any_moment_costs_one_sentence(disk, command, tmp_path):
    place, _ = disk
    before, failed = contents(place / "set"), 0
    for pages in range(100):
        filler = place / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with open(filler, "r+b") as file:
            file.truncate(filler.stat().st_size - 4096 * pages)
        status, _, error = command(prepare, place / "set", "--files", tmp_path / "new.txt")
        filler.unlink()
        assert [path.name for path in place.iterdir()] == ["set"]
        if status == 0:
            break
        failed += 1
        assert status == 1 and error.count("\n") == 1 and str(place) in error
        assert error.endswith(": the disk is full; free some space or choose a folder on another disk\n")
        assert contents(place / "set") == before
    assert failed > 10 and contents(place / "set") != before
    open_dataset(str(place / "set")).verify()


def test_a_read_only_disk_costs_one_sentence(disk, command, tmp_path):
    place, mount = disk
    before = contents(place / "set")
    assert mount("remount,ro").returncode == 0
    for name in ("set", "other", "folder/other"):
        status, _, error = command(prepare, place / name, "--files", tmp_path / "new.txt")
        assert status == 1 and error.count("\n") == 1
        assert str(place) in error and error.endswith(": the disk is read-only; choose another folder\n")
    assert contents(place / "set") == before and [path.name for path in place.iterdir()] == ["set"]
    open_dataset(str(place / "set")).verify()


def test_a_limit_on_the_size_of_files_costs_one_sentence(tmp_path):
    resource = pytest.importorskip("resource")
    (tmp_path / "a.txt").write_text(some_text(5000))
    done = subprocess.run(
        [sys.executable, "prepare.py", str(tmp_path / "set"), "--files", str(tmp_path / "a.txt")],
        cwd=ROOT, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "train.bin: the file grows beyond what the system allows" in done.stderr
    assert os.listdir(tmp_path) == ["a.txt"]
