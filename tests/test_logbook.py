"""The record of a run: its rows, its clock, what a person sees, and that wandb can do no harm."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import runtime.logbook
from runtime.errors import UserError
from runtime.logbook import Logbook

ROOT = Path(__file__).parent.parent


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(runtime.logbook, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def open_logbook(folder, start_step=0, console=None, **kwargs):
    console = console or Console(file=io.StringIO())
    kwargs = {"max_steps": 100, "tokens_per_step": 1000, "settings": {}, **kwargs}
    return Logbook(folder, start_step=start_step, console=console, **kwargs)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def shown(book):
    return book._console.file.getvalue()


def steps(book, clock, first, last, seconds):
    for step in range(first, last + 1):
        clock.now += seconds
        book.tick(step)


def test_a_row_is_on_disk_at_once_with_its_keys_in_order_and_its_floats_whole(tmp_path, clock):
    book = open_logbook(tmp_path)
    steps(book, clock, 1, 10, 0.5)
    book.log(10, 10_000, lr=0.1 + 0.2, grad_norm=1.5, train_loss=2 / 3)
    book.log(10, 10_000, val_bits_per_byte=1 / 7, val_loss=1 / 3)
    first, second = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert list(json.loads(first)) == [
        "step", "tokens", "train_loss", "lr", "tokens_per_s", "elapsed", "grad_norm",
    ]  # fmt: skip
    assert second == (
        b'{"step": 10, "tokens": 10000, "val_loss": 0.3333333333333333,'
        b' "val_bits_per_byte": 0.14285714285714285}\n'
    )
    assert json.loads(first)["train_loss"] == 2 / 3 and json.loads(first)["lr"] == 0.1 + 0.2


def test_speed_leaves_out_the_first_five_steps_and_counts_from_row_to_row(tmp_path, clock):
    book = open_logbook(tmp_path)
    steps(book, clock, 1, 5, 60.0)  # compilation
    book.log(5, 5_000, train_loss=1.0)
    steps(book, clock, 6, 10, 0.5)
    book.log(10, 10_000, train_loss=1.0)
    steps(book, clock, 11, 20, 0.25)
    book.log(20, 20_000, train_loss=1.0)
    assert [row.get("tokens_per_s") for row in rows(tmp_path)] == [None, 2000.0, 4000.0]
    assert [row["elapsed"] for row in rows(tmp_path)] == [300.0, 302.5, 305.0]


def test_the_clock_stands_still_while_paused(tmp_path, clock):
    book = open_logbook(tmp_path)
    steps(book, clock, 1, 10, 1.0)
    with book.pause():
        clock.now += 500
        with book.pause():
            clock.now += 500
        assert book.elapsed == 10.0
        book.log(10, 10_000, val_loss=1.0)
    steps(book, clock, 11, 20, 1.0)
    book.log(20, 20_000, train_loss=1.0)
    assert rows(tmp_path)[-1]["elapsed"] == 20.0
    assert rows(tmp_path)[-1]["tokens_per_s"] == 1000.0


def test_a_value_that_json_does_not_know_is_null(tmp_path):
    open_logbook(tmp_path).log(1, 1000, train_loss=1.0, grad_norm=float("inf"))
    assert rows(tmp_path)[0]["grad_norm"] is None
    assert "Infinity" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_resumed_run_drops_what_was_not_saved_and_goes_on(tmp_path, clock):
    book = open_logbook(tmp_path)
    for step in (10, 20, 30):
        steps(book, clock, step - 9, step, 1.0)
        book.log(step, step * 1000, train_loss=1.0)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 20, "tok')  # the machine stopped here
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    book = open_logbook(tmp_path, start_step=20)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:2])
    steps(book, clock, 21, 25, 60.0)
    steps(book, clock, 26, 30, 1.0)
    book.log(30, 30_000, train_loss=1.0)
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 30]
    assert rows(tmp_path)[-1]["elapsed"] == 20.0 + 5 * 60.0 + 5.0
    assert rows(tmp_path)[-1]["tokens_per_s"] == 1000.0
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_whole_last_row_without_its_line_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 10}\n{"step": 20, "elapsed": 7.5}')
    book = open_logbook(tmp_path, start_step=20)
    assert book.elapsed >= 7.5
    book.log(30, 0, val_loss=1.0)
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 30]


def test_a_resumed_run_makes_the_evaluation_at_its_first_step_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 10, "val_loss": 2.0}\n{"step": 20, "train_loss": 1.0}\n{"step": 20, "val_loss": 1.0}\n'
    )
    open_logbook(tmp_path, start_step=20)
    assert [list(row)[1] for row in rows(tmp_path)] == ["val_loss", "train_loss"]
    assert [row["step"] for row in rows(tmp_path)] == [10, 20]


def test_a_resumed_run_without_its_log_starts_one(tmp_path):
    open_logbook(tmp_path, start_step=20).log(30, 0, val_loss=1.0)
    assert [row["step"] for row in rows(tmp_path)] == [30]


def test_a_new_run_starts_with_an_empty_log(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 10}\n')
    open_logbook(tmp_path).close()
    assert rows(tmp_path) == []


def test_a_pipe_gets_plain_ascii_lines(tmp_path, clock):
    book = open_logbook(tmp_path, max_steps=1500, console=Console(file=io.StringIO(), width=20))
    book.log(1, 1000, train_loss=4.0, lr=1e-3)
    steps(book, clock, 1, 55, 0.05)
    book.log(55, 55_000, train_loss=2.12341, lr=1e-3)
    book.log(55, 55_000, val_loss=1.75, val_bits_per_byte=2.5249)
    book.note("best so far [bold] :x: \x1b[2J")
    book.evaluating(0.5)
    book.close()
    # 1,445 steps at 0.05 s are 72 s
    assert shown(book) == (
        "step 1/1500 | loss 4.0000 | lr 1.00e-03\n"
        "step 55/1500 | loss 2.1234 | lr 1.00e-03 | 20,000 tokens/s | 1:12 left\n"
        "step 55/1500 | val loss 1.7500 (2.525 bits/byte)\n"
        "best so far [bold] :x: \\x1b[2J\n"
    )


def test_the_time_left_counts_evaluations_too_and_has_hours(tmp_path, clock):
    book = open_logbook(tmp_path, max_steps=4005)
    steps(book, clock, 1, 105, 1.0)
    with book.pause():
        clock.now += 100
    book.log(105, 0, train_loss=1.0)
    assert "1000 tokens/s | 2:10:00 left" in shown(book).replace(",", "")  # 3,900 steps at 2 s


def test_a_terminal_gets_one_moving_line_and_lasting_notes(tmp_path, clock):
    file = io.StringIO()
    console = Console(force_terminal=True, force_interactive=True, file=file, width=100)
    book = open_logbook(tmp_path, console=console)
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor stays, should the run be killed
    steps(book, clock, 1, 20, 0.5)
    book.log(20, 20_000, train_loss=2.5, lr=1e-3)
    steps(book, clock, 21, 21, 0.5)
    assert "step 21/100" in file.getvalue()
    assert "loss 2.5000 | lr 1.00e-03 | 2,000 tokens/s | 0:40 left" in file.getvalue()
    clock.now += 1
    book.evaluating(0.25)
    assert "evaluating 25%" in file.getvalue()
    book.log(21, 21_000, val_loss=1.75, val_bits_per_byte=2.525)
    assert "step 21/100 | val loss 1.7500 (2.525 bits/byte)\n" in file.getvalue()
    book.close()
    book.close()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_moving_line_is_one_line_at_any_width(tmp_path, clock, width):
    file = io.StringIO()
    console = Console(force_terminal=True, force_interactive=True, file=file, width=width, color_system=None)
    book = open_logbook(tmp_path, console=console, max_steps=100_000)
    steps(book, clock, 1, 20, 0.5)
    book.log(20, 20_000, train_loss=2.5, lr=1e-3)
    steps(book, clock, 21, 21, 0.5)
    last = file.getvalue().rpartition("\x1b[2K")[2]
    assert "\n" not in last and len(last) <= width and "loss 2.5" in last
    book.close()


def test_steps_redraw_the_line_a_few_times_a_second_at_most(tmp_path, clock):
    file = io.StringIO()
    book = open_logbook(tmp_path, console=Console(force_terminal=True, force_interactive=True, file=file))
    drawn = len(file.getvalue())
    steps(book, clock, 1, 100, 0.001)
    few = len(file.getvalue()) - drawn
    steps(book, clock, 1, 100, 0.25)
    assert (len(file.getvalue()) - drawn - few) > 50 * few
    book.close()


def test_quiet_shows_nothing_and_writes_everything(tmp_path, capsys):
    file = io.StringIO()
    console = Console(force_terminal=True, force_interactive=True, file=file)
    book = open_logbook(tmp_path, console=console, quiet=True)
    book.tick(1)
    book.log(1, 1000, train_loss=1.0, val_loss=1.0)
    book.note("x")
    print("still printed")
    book.close()
    assert file.getvalue() == "" and capsys.readouterr().out == "still printed\n" and len(rows(tmp_path)) == 1


def test_a_full_disk_names_the_file(tmp_path):
    book = open_logbook(tmp_path)

    def no_room(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    book._file = SimpleNamespace(write=no_room, close=lambda: no_room(""))
    for writing in (lambda: book.log(1, 1000, train_loss=1.0), book.close):
        with pytest.raises(OSError) as error:
            writing()
        assert error.value.filename == str(tmp_path / "metrics.jsonl")


def test_a_full_disk_while_a_resumed_run_drops_rows_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    def no_room(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 10}\n{"step": 20}\n')
    monkeypatch.setattr("runtime.logbook.os.fsync", no_room)
    with pytest.raises(OSError) as error:
        open_logbook(tmp_path, start_step=10)
    assert error.value.filename == f"{log}.tmp" and log.read_text() == '{"step": 10}\n{"step": 20}\n'


def wandb_process(folder, mode, **env):
    """Log two rows with wandb in a process of its own; returns what it printed."""
    code = f"""
from runtime.logbook import Logbook
options = dict(settings={{"n_head": 8}}, wandb={mode!r})
book = Logbook({str(folder)!r}, start_step=0, max_steps=2, tokens_per_step=1, **options)
book.log(1, 1, train_loss=1.0)
book.log(2, 2, train_loss=0.5)
book.close()
print("done")
"""
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}, "HOME": str(folder), **env}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("done\n") and len(rows(folder)) == 2
    return done.stdout + done.stderr


def test_wandb_offline_writes_into_the_runs_folder(tmp_path):
    # An address where nobody answers: offline must not care.
    out = wandb_process(tmp_path, "offline", WANDB_BASE_URL="http://127.0.0.1:9")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train_loss" in file.read_bytes() and b"n_head" in file.read_bytes()
    assert f"wandb is offline: to send it, wandb sync {file.parent}" in out


def test_wandb_online_without_a_key_is_noted_once_and_harmless(tmp_path):
    out = wandb_process(tmp_path, "online", WANDB_BASE_URL="http://127.0.0.1:9")
    assert out.count("wandb is off") == 1 and "--wandb offline" in out


def test_a_wandb_that_fails_later_is_noted_once_and_harmless(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("the network is gone")  # the library's own errors are none of the system's

    run = SimpleNamespace(define_metric=lambda name, step_metric: None, log=fail, finish=fail, dir="a/b")
    fake = SimpleNamespace(Settings=dict, init=lambda **kwargs: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    book = open_logbook(tmp_path, wandb="offline")
    book.log(1, 1, train_loss=1.0)
    book.log(2, 2, train_loss=1.0)
    book.close()
    assert shown(book).count("wandb is off from here: the network is gone") == 1 and len(rows(tmp_path)) == 2


def test_a_wandb_that_does_not_start_is_noted_once_and_harmless(tmp_path, monkeypatch):
    def fail(**kwargs):
        raise RuntimeError("no room in its folder")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=dict, init=fail))
    book = open_logbook(tmp_path, wandb="offline")
    book.log(1, 1, train_loss=1.0)
    book.close()
    assert shown(book).count("wandb is off: no room in its folder") == 1 and len(rows(tmp_path)) == 1


def test_a_resumed_run_is_another_of_wandbs_runs_whose_charts_go_by_our_steps(tmp_path, monkeypatch):
    """wandb drops a step number that it has had, and continues no offline run."""
    begun, sent, metrics = [], [], []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric: metrics.append((name, step_metric)),
        log=lambda row: sent.append(row["step"]), finish=lambda: None, dir="a/b",
    )  # fmt: skip
    fake = SimpleNamespace(Settings=dict, init=lambda **kwargs: begun.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for start_step in (0, 20):
        book = open_logbook(tmp_path, start_step=start_step, wandb="offline")
        book.log(start_step + 10, 0, train_loss=1.0)
        book.log(start_step + 20, 0, train_loss=1.0)
        book.close()
    assert sent == [10, 20, 30, 40] and metrics == [("*", "step")] * 2
    assert [kwargs["group"] for kwargs in begun] == [tmp_path.name] * 2
    limits = [kwargs["settings"][f"{when}_timeout"] for kwargs in begun for when in ("init", "finish")]
    assert limits == [runtime.logbook.WANDB_SECONDS] * 4
    assert not any({"id", "resume"} & kwargs.keys() for kwargs in begun)
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 30, 40]


@pytest.mark.parametrize("bad", [b"\x89PNG", b"{}", b'{"step": 5}', b"", b"[1]", b"\xff"])
def test_a_damaged_line_is_refused_by_its_number_and_nothing_is_changed(tmp_path, bad):
    content = b'{"step": 10}\n' + bad + b'\n{"step": 20}\n'
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="metrics.jsonl: line 2 is damaged; take it out"):
        open_logbook(tmp_path, start_step=20)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_wandb_is_imported_only_when_asked_for(tmp_path):
    code = f"""
import sys
from runtime.logbook import Logbook
Logbook({str(tmp_path)!r}, start_step=0, max_steps=2, tokens_per_step=1, settings={{}})
print("wandb" in sys.modules, "torch" in sys.modules)
"""
    line = [sys.executable, "-c", code]
    out = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out == "False False\n"
