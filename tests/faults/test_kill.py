"""A run that is killed loses nothing that it saved, and no two runs share a folder."""

import hashlib
import os
import random
import signal
import time

import pytest
from processes import TINY, rows, step_of, wait_until

import sample
import train
from runtime import checkpoint
from runtime.checkpoint import find_checkpoint, read_meta, read_tensors, save_checkpoint
from runtime.errors import UserError
from runtime.runs import hold

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("handlers_come_back")]
KILLS, STEPS, INSIDE = 50, 500, 10


def sums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory):
    """The folder of a run that nothing happens to, the sums of every checkpoint of it, and the seconds of one step."""
    folder, saved = tmp_path_factory.mktemp("undisturbed"), {}

    def watched(place, meta, *tensors):
        save_checkpoint(place, meta, *tensors)
        saved[place.name, meta["step"]] = sums(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train, "save_checkpoint", watched)
        begun = time.monotonic()
        assert train.main(words(dataset)) == 0
    return folder / "run", saved, (time.monotonic() - begun) / STEPS


def words(dataset):
    return ["--dataset", dataset, "--out_dir", "run", "--max_steps", str(STEPS), *TINY]


def test_a_run_killed_fifty_times_is_the_run_that_was_never_killed(server, dataset, undisturbed, tmp_path):
    whole, saved, seconds = undisturbed
    run, draw, inside, between, span = tmp_path / "run", random.Random(1), 0, 0, 6 * seconds
    for kill in range(KILLS):
        before = read_meta(find_checkpoint(run))["step"] if kill else 0
        span /= 1 + (before > kill * STEPS / KILLS)  # faster than the undisturbed run was: it must not end before
        child = server.start(tmp_path, *(["--resume", "run"] if kill else words(dataset)))
        wait_until(lambda: step_of(run) > before)  # noqa: B023 - called in this round
        time.sleep(draw.uniform(0, span))
        os.kill(child, signal.SIGKILL)
        assert server.end().status == -signal.SIGKILL, "the run ended before it was killed as often as it should be"
        left = {path.name for path in run.iterdir()}
        inside += bool(left & {"last.tmp", "last.old", "best.tmp", "best.old"})
        between += bool({"last", "best"} - left)
        for name in ("last", "best"):
            checkpoint = find_checkpoint(run, name)
            meta = read_meta(checkpoint)
            name = checkpoint.name.removesuffix(".old")
            assert sums(checkpoint) == saved[name, meta["step"]], f"after kill {kill + 1}, {checkpoint.name}"
    reached = read_meta(find_checkpoint(run))["step"]
    print(f"{KILLS} kills up to step {reached}, {inside} inside a save, {between} of them between its two renames")
    assert inside >= INSIDE
    assert server.run(tmp_path, "--resume", "run").status == 0
    assert sums(run / "last") == saved["last", STEPS] and sums(run / "best") == sums(whole / "best")
    assert rows(run) == rows(whole)
    assert [row["step"] for row in rows(run) if "train_loss" in row] == list(range(1, STEPS + 1))


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_gone(server, dataset, tmp_path, command, monkeypatch):
    """The first goes on unharmed, and no lock outlives it when it is killed."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    child = server.start(tmp_path, *words(dataset))
    wait_until(lambda: step_of(run) > 0)
    for second, told in (
        (["--resume", "run"], "another process is training in run: wait for it or choose another --out_dir"),
        ([*words(dataset), "--overwrite"], "another process is training in run"),
        (words(dataset), "run holds a run already"),
    ):
        status, _, err = command(train, *second)
        assert (status, err.count("\n")) == (2, 1) and told in err
    step = step_of(run)
    wait_until(lambda: step_of(run) > step)
    os.kill(child, signal.SIGKILL)
    assert server.end().status == -signal.SIGKILL
    step = read_meta(find_checkpoint(run))["step"]
    assert command(train, "--resume", "run", "--max_steps", step + 1)[0] == 0
    logged = [row["step"] for row in rows(run) if "train_loss" in row]
    assert logged == list(range(1, step + 2))


def test_a_folder_in_use_is_refused_before_anything_of_it_is_read(dataset, tmp_path, command, monkeypatch):
    """What another process is about to replace would look damaged."""
    monkeypatch.chdir(tmp_path)
    assert command(train, *words(dataset), "--max_steps", 2)[0] == 0
    weights = tmp_path / "run" / "last" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"x")
    with hold(tmp_path / "run"):
        status, _, err = command(train, "--resume", "run")
        assert (status, err.count("\n")) == (2, 1) and "another process is training in run" in err
    assert "is damaged: its checksum" in command(train, "--resume", "run")[2]


@pytest.mark.parametrize(
    "reader",
    [[train, "--resume", "run", "--eval_only"], [sample, "run", "--checkpoint", "last", "--max_new_tokens", 1]],
)
def test_a_save_while_a_checkpoint_is_read_does_not_make_it_damaged(dataset, tmp_path, command, monkeypatch, reader):
    monkeypatch.chdir(tmp_path)
    assert command(train, *words(dataset), "--max_steps", 2)[0] == 0
    reads = []

    def while_it_saves(folder, name, meta):
        reads.append(meta["step"])
        if len(reads) == 1:
            others = {key: tensor + 0.5 for key, tensor in read_tensors(folder, name, meta).items()}
            save_checkpoint(folder, meta | {"step": 1}, others, None)
        return read_tensors(folder, name, meta)

    monkeypatch.setattr(checkpoint, "read_tensors", while_it_saves)
    status, _, err = command(*reader)
    assert (status, reads) == (0, [2, 1]), err


@pytest.mark.parametrize("lost", ["find_checkpoint", "read_meta"])
def test_what_is_not_there_for_a_moment_is_read_a_moment_later(dataset, tmp_path, command, monkeypatch, lost):
    """A save renames two folders: between the two calls that look for them both may have been elsewhere."""
    monkeypatch.chdir(tmp_path)
    assert command(train, *words(dataset), "--max_steps", 2)[0] == 0
    whole, misses = getattr(checkpoint, lost), iter([FileNotFoundError(2, "gone", "run/last"), None])

    def once(*arguments):
        if miss := next(misses):
            raise miss
        return whole(*arguments)

    monkeypatch.setattr(checkpoint, lost, once)
    assert checkpoint.read_checkpoint("run", "last")[1]["step"] == 2
    monkeypatch.undo()
    (tmp_path / "run" / "last" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="damaged or missing"):
        checkpoint.read_checkpoint(tmp_path / "run", "last")


def test_a_lock_is_made_and_nothing_that_is_no_lock_is_touched(tmp_path):
    lock = tmp_path / "lock"
    lock.write_text("a note of mine")
    hold(tmp_path).close()
    assert lock.read_text() == "a note of mine"
    for odd in (lambda: lock.symlink_to(tmp_path / "other"), lock.mkdir, lambda: os.mkfifo(lock)):
        lock.unlink() if not lock.is_dir() else lock.rmdir()
        odd()
        with pytest.raises(UserError, match="lock is not the lock of a run"):
            hold(tmp_path)
    assert not (tmp_path / "other").exists()


def test_a_run_that_was_killed_between_two_renames_has_saved(tmp_path):
    for name in ("last", "last.old"):
        (tmp_path / name / name).mkdir(parents=True)
        (tmp_path / name / name / "meta.json").touch()
        assert checkpoint.has_saved(tmp_path / name) and not checkpoint.has_saved(tmp_path)
