"""How a command ends: the exit status and the one sentence for each kind of mishap."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import DataError
from runtime.errors import EnvironmentFault, UserError, run
from runtime.runs import write_whole

ROOT = Path(__file__).parent.parent


def ending(capsys, monkeypatch, main):
    """Exit status and standard error of a command whose body is `main`."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--x"])
    with pytest.raises(SystemExit) as stop:
        run(main)
    return stop.value.code, capsys.readouterr().err


def raising(error):
    def main(argv):
        raise error

    return main


def test_a_command_gets_its_line_and_its_status_is_the_exit_status(capsys, monkeypatch):
    assert ending(capsys, monkeypatch, lambda argv: 7 if argv == ["--x"] else 8) == (7, "")
    assert ending(capsys, monkeypatch, lambda argv: None)[0] in (0, None)


def test_closed_streams_are_no_fault_of_ours():
    code = 'import sys; from runtime.errors import run; run(lambda _: print(sys.stdin.read(), sys.stdout.isatty()))'
    line = f'exec {sys.executable} -c "{code}" <&- >&-'
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", [UserError, DataError])
def test_a_users_mistake_is_one_sentence_and_status_2(capsys, monkeypatch, kind):
    assert ending(capsys, monkeypatch, raising(kind("n_head is 0"))) == (2, "train.py: n_head is 0\n")


def test_a_fault_of_the_environment_is_status_1(capsys, monkeypatch):
    status_and_sentence = ending(capsys, monkeypatch, raising(EnvironmentFault("no network")))
    assert status_and_sentence == (1, "train.py: no network\n")


@pytest.mark.parametrize(
    "number, told",
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "permission"), (errno.EROFS, "read-only")],
)
def test_the_systems_refusal_names_the_file_and_what_to_do(capsys, monkeypatch, number, told):
    status, err = ending(capsys, monkeypatch, raising(OSError(number, os.strerror(number), "runs/a/last")))
    assert status == 1
    assert err.startswith("train.py: runs/a/last: ") and told in err and err.count("\n") == 1


def test_an_unlisted_system_error_is_told_in_the_systems_words(capsys, monkeypatch):
    error = OSError(errno.EIO, "Input/output error", "data/a/train.bin")
    told = "train.py: data/a/train.bin: Input/output error\n"
    assert ending(capsys, monkeypatch, raising(error)) == (1, told)


def test_a_file_that_cannot_take_its_place_is_told_by_the_name_of_the_place(capsys, monkeypatch, tmp_path):
    place = tmp_path / "heads.html"
    place.mkdir()
    status, err = ending(capsys, monkeypatch, lambda argv: write_whole(place, "text"))
    assert status == 1 and err.startswith(f"train.py: {place}: ")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GB)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 16 bytes"),  # on Windows
    ],
)
def test_running_out_of_memory_says_what_to_lower(capsys, monkeypatch, error):
    status, err = ending(capsys, monkeypatch, raising(error))
    assert status == 1 and "micro_batch_size" in err and err.count("\n") == 1


def test_torchs_own_cpu_allocator_is_recognised(capsys, monkeypatch):
    status, err = ending(capsys, monkeypatch, lambda argv: torch.empty(1 << 60, dtype=torch.uint8))
    assert status == 1 and "micro_batch_size" in err


def test_an_interrupt_is_status_130_without_a_traceback(capsys, monkeypatch):
    assert ending(capsys, monkeypatch, raising(KeyboardInterrupt())) == (130, "train.py: interrupted\n")


def test_an_exit_passes_through(capsys, monkeypatch):
    assert ending(capsys, monkeypatch, raising(SystemExit(5))) == (5, "")


@pytest.mark.parametrize("bug", [ValueError("a bug"), RuntimeError("a bug"), KeyError("a bug")])
def test_a_bug_keeps_its_traceback(monkeypatch, bug):
    with pytest.raises(type(bug)):
        run(raising(bug))


def child(body, **kwargs):
    script = f"from runtime.errors import run\ndef main(argv):\n    {body}\nrun(main)"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    line = [sys.executable, "-c", script]
    return subprocess.Popen(line, cwd=ROOT, env=env, stderr=subprocess.PIPE, **kwargs)


def test_output_is_utf8_whatever_the_locale():
    process = child("print('\\u00e9 \\udcff')", stdout=subprocess.PIPE)
    out, err = process.communicate()
    assert (process.returncode, out.strip(), err) == (0, b"\xc3\xa9 \\udcff", b"")


def test_a_reader_that_leaves_ends_the_command_quietly():
    process = child("[print('x' * 1000) for i in range(1000)]", stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_told_once():
    with open("/dev/full", "wb") as full:
        process = child("print('x')", stdout=full)
        _, err = process.communicate()
    assert process.returncode == 1
    assert b"disk is full" in err and err.count(b"\n") == 1
