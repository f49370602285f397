"""What may go wrong around a run: numbers, memory, the clock, wandb. The last good checkpoint stays."""

import contextlib
import json
import os
import socket
import time

import pytest
import torch
from processes import TINY, rows, step_of

import train
from data.loader import Windows
from runtime.checkpoint import load_model, save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("handlers_come_back")]


def words(dataset, run, steps):
    return ["--dataset", dataset, "--out_dir", run, "--max_steps", steps, *TINY]


@pytest.fixture
def undisturbed(dataset, tmp_path, command):
    assert command(train, *words(dataset, tmp_path / "undisturbed", 20))[0] == 0
    return tmp_path / "undisturbed"


def assert_same_run(run, reference):
    assert rows(run) == rows(reference)
    for name in ("last/model.safetensors", "last/optimizer.safetensors", "best/model.safetensors"):
        assert (run / name).read_bytes() == (reference / name).read_bytes()


@pytest.mark.parametrize("every", [1, 20], ids=["saved at every step", "saved at every 20th"])
@pytest.mark.parametrize("where", ["gradient", "weights"])
def test_a_nan_at_step_50_is_never_saved(dataset, tmp_path, command, monkeypatch, where, every):
    clip, calls, saved = torch.nn.utils.clip_grad_norm_, [], []

    def planted(parameters, *rest):
        parameters = list(parameters)
        calls.append(1)
        if len(calls) == 50 and where == "gradient":
            parameters[0].grad[0, 0] = float("nan")
        norm = clip(parameters, *rest)
        if len(calls) == 50 and where == "weights":  # by way of an update whose loss and norm look well
            parameters[0].grad[0, 0] = float("nan")
        return norm

    def watched(folder, meta, *tensors):
        save_checkpoint(folder, meta, *tensors)
        saved.append((folder.name, meta["step"]))
        assert all(value.isfinite().all() for part in tensors if part for value in part.values())

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", planted)
    monkeypatch.setattr(train, "save_checkpoint", watched)
    run = tmp_path / "run"
    flags = ["--log_interval", 10, "--save_interval", every]
    status, _, err = command(train, *words(dataset, run, 100), *flags)
    # Saved at every 20th it is the evaluation at step 50 that would save: no text of it has the token that went bad.
    assert status == 1 and err.count("\n") == 1 and "step 50: " in err and "diverged" in err, err
    assert max(saved) == ("last", 49 if every == 1 else 40) and ("best", 50) not in saved
    for which in ("last", "best"):
        model, _, _ = load_model(run, which)
        assert all(value.isfinite().all() for value in model.parameters())


def cuda_full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("fault", [cuda_full, lambda: torch.empty(1 << 60)], ids=["a GPU", "the CPU"])
def test_memory_that_runs_out_late_costs_no_step(undisturbed, dataset, tmp_path, command, monkeypatch, fault):
    batch, run = Windows.batch, tmp_path / "run"

    def late(self, step, *rest):
        if step == 7:
            fault()
        return batch(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Windows, "batch", late)
        status, _, err = command(train, *words(dataset, run, 20))
    assert (status, err.count("\n")) == (1, 1) and "lower micro_batch_size or batch_size first" in err
    assert step_of(run) == 7 and command(train, "--resume", run)[0] == 0
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("sequences", [30_000, 100_000_000], ids=["in the model", "in the batch itself"])
def test_a_batch_too_large_for_the_memory_says_what_to_lower(server, dataset, tmp_path, sequences):
    limit = "import resource; size = 4096 * int(open('/proc/self/statm').read().split()[0]) + 500_000_000\n"
    limit += "resource.setrlimit(resource.RLIMIT_AS, (size, size))"
    flags = words(dataset, "run", 20) + ["--batch_size", sequences]
    ended = server.run(tmp_path, *flags, before=limit)
    last = ended.text.splitlines()[-1]
    assert ended.status == 1 and last.startswith("train.py: out of memory; lower micro_batch_size"), ended.text
    assert "Traceback" not in ended.text


def test_a_clock_that_jumps_changes_nothing(undisturbed, dataset, tmp_path, command, monkeypatch):
    """A day ahead or back at every look at it, and the files of the first half from next year."""
    now, jumps, run = time.time, [], tmp_path / "run"

    def jumping():
        jumps.append(1)
        return now() + 86_400 * (-1) ** len(jumps)

    monkeypatch.setattr(time, "time", jumping)
    flags = [*words(dataset, run, 10), "--decay_steps", 20, "--warmup_steps", 2]
    assert command(train, *flags)[0] == 0
    for path in [run, *run.rglob("*")]:
        os.utime(path, (now() + 3e7, now() + 3e7))
    assert command(train, "--resume", run, "--max_steps", 20)[0] == 0
    for name in ("last/model.safetensors", "last/optimizer.safetensors"):
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes()
    elapsed = [json.loads(line).get("elapsed", 0) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [seconds for seconds in elapsed if seconds]
    assert len(times) == 20 and times == sorted(times) and times[-1] < 3600


@contextlib.contextmanager
def server_that_says_nothing():
    """An address where connections are taken and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


KILL_SERVICE = """
import glob, os, signal
from data.loader import Windows
batch = Windows.batch
def late(self, step, rows):
    if step == 5:
        children = " ".join(open(file).read() for file in glob.glob("/proc/self/task/*/children")).split()
        print("killed", len(children), "of wandb's processes")
        for child in children: os.kill(int(child), signal.SIGKILL)
    return batch(self, step, rows)
Windows.batch = late
"""


@pytest.mark.parametrize("fault", ["refused", "silent", "killed"])
def test_a_wandb_that_is_gone_does_not_stop_training(server, dataset, tmp_path, fault):
    """Nobody at its address, one there who never answers, and its own process killed at step 5."""
    with server_that_says_nothing() as address:
        address = address if fault == "silent" else "http://127.0.0.1:9"
        own = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address, "HOME": str(tmp_path)}
        before = f"import os; os.environ.update({own})\n"
        if fault == "killed":
            before += KILL_SERVICE
        else:  # where it waits in vain, not as long as it would
            before += "import runtime.logbook; runtime.logbook.WANDB_SECONDS = 5"
        flags = words(dataset, "run", 20) + ["--wandb", "offline" if fault == "killed" else "online"]
        begun = time.monotonic()
        ended = server.run(tmp_path, *flags, before=before)
        seconds = time.monotonic() - begun
    print(f"{fault}: {seconds:.0f} s")
    told = "wandb is off from here" if fault == "killed" else "wandb is off: "
    assert ended.status == 0 and ended.text.count(told) == 1 and seconds < 300
    assert step_of(tmp_path / "run") == 20 and sum("train_loss" in row for row in rows(tmp_path / "run")) == 20
    assert "Traceback" not in ended.text and ("killed 0" not in ended.text)
