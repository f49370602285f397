"""Several processes train one model: the same data, the same losses, one voice, and no process left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from test_train import TINY, content, rows

import prepare
import train
from runtime import ranks
from runtime.errors import UserError
from runtime.ranks import Ranks

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("handlers_come_back")
SAME = ["--batch_size", "8", "--max_steps", "50", "--eval_interval", "25", "--log_interval", "1"]


def start(count, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    return subprocess.Popen([*command, ROOT / "train.py", *map(str, words)], cwd=ROOT, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"},  # one process would take a thread for each core
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def torchrun(count, *words):
    """Exit status, standard output and standard error of train.py on `count` processes."""
    process = start(count, *words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def assert_near(run, reference, first=0, atol=1e-5):
    """The same rows, with losses that differ by rounding alone."""
    ours, theirs = (list(filter(lambda row: row["step"] > first, rows(r))) for r in (run, reference))
    assert [(row["step"], row.keys()) for row in ours] == [(row["step"], row.keys()) for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=atol), a["step"]


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """The run of one process that the others are compared with."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert train.main(["--dataset", dataset, *TINY, *SAME, "--out_dir", str(run)]) == 0
    return run


@pytest.mark.parametrize("count", [2, 4])
def test_losses_and_evaluations_are_those_of_one_process_over_fifty_steps(alone, dataset, tmp_path, count):
    status, out, err = torchrun(count, "--dataset", dataset, *TINY, *SAME, "--out_dir", tmp_path / "run")
    assert status == 0, err
    assert_near(tmp_path / "run", alone)
    assert out.count("step 50/50 | loss") == out.count("done; ") == out.count("a new run in") == 1
    assert f"{count} processes, each on cpu" in out


def test_a_run_goes_on_with_another_number_of_processes(alone, dataset, tmp_path):
    flags = ["--dataset", dataset, *TINY, *SAME, "--out_dir", tmp_path / "run"]
    for count, more in ((2, [*flags, "--max_steps", 10, "--decay_steps", 50]),
                        (1, ["--resume", tmp_path / "run", "--max_steps", 20]),
                        (4, ["--resume", tmp_path / "run", "--max_steps", 35]),
                        (2, ["--resume", tmp_path / "run", "--max_steps", 50])):  # fmt: skip
        status, _, err = torchrun(count, *more)
        assert status == 0, err
    assert rows(tmp_path / "run")[-1]["val_loss"] == pytest.approx(rows(alone)[-1]["val_loss"], abs=1e-5)
    losses = [[r["train_loss"] for r in rows(run) if "train_loss" in r] for run in (tmp_path / "run", alone)]
    assert len(losses[0]) == 50 and losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_dropout_and_accumulation_do_not_depend_on_the_number_of_processes(dataset, tmp_path):
    flags = ["--dataset", dataset, *TINY, "--batch_size", 8]
    flags += ["--micro_batch_size", 2, "--dropout", 0.2, "--max_steps", 9]
    for count in (1, 2):
        assert torchrun(count, *flags, "--out_dir", tmp_path / str(count))[0] == 0
    assert_near(tmp_path / "2", tmp_path / "1")


def test_a_probe_whose_answers_fall_unevenly_is_weighed_as_by_one_process(tmp_path):
    prepare.main(["probe-induction"])
    flags = ["--dataset", "probe-induction", *TINY[:6], "--batch_size", 6, "--max_steps", 6, "--log_interval", 1]
    for count in (1, 3):
        status, _, err = torchrun(count, *flags, "--out_dir", tmp_path / str(count))
        assert status == 0, err
    assert_near(tmp_path / "3", tmp_path / "1")


def test_settings_are_compared_first_and_gradients_are_added_up_once_a_step(dataset, tmp_path, monkeypatch):
    sums, agreed = [], []
    monkeypatch.setattr(Ranks, "agree", lambda self, what, value: agreed.append(value))
    monkeypatch.setattr(Ranks, "add_up", lambda self, tensors: sums.append(len(tensors)))
    flags = ["--batch_size", "8", "--micro_batch_size", "2", "--max_steps", "5", "--out_dir", str(tmp_path / "run")]
    train.main(["--dataset", dataset, *TINY, *flags])
    assert len(sums) == 5 and sums[0] > 2
    assert len(agreed) == 2 and "n_head=" in agreed[0] and "learning_rate=" in agreed[0]


def test_all_gradients_travel_in_one_message(monkeypatch):
    one, sent, tensors = Ranks(), [], [torch.ones(2, 3), torch.ones(4)]
    one.count = 2
    monkeypatch.setattr(ranks.dist, "all_reduce", lambda tensor: sent.append(tensor.numel()) or tensor.mul_(2))
    one.add_up(tensors)
    assert sent == [10] and [tensor.unique().tolist() for tensor in tensors] == [[2], [2]]


def test_a_rank_that_is_not_the_first_writes_and_says_nothing(dataset, tmp_path, monkeypatch, capfd):
    made = Ranks.__init__
    monkeypatch.setattr(Ranks, "__init__", lambda self: made(self) or setattr(self, "first", False))
    flags = [*SAME, "--max_steps", "3", "--save_interval", "1", "--out_dir", str(tmp_path / "run")]
    assert train.main(["--dataset", dataset, *TINY, *flags]) == 0
    assert not (tmp_path / "run").exists() and capfd.readouterr() == ("", "")


def test_every_rank_takes_rows_of_its_own_and_together_all(monkeypatch):
    one = Ranks()
    for count, micro in ((1, None), (2, None), (4, 1), (4, 3)):
        rows = []
        for rank in range(count):
            one.rank, one.count = rank, count
            size, own = one.share(12, micro)
            rows += [row for m in own for row in range(m * size, (m + 1) * size)]
        assert rows == list(range(12))


@pytest.mark.parametrize(
    ("count", "micro", "words"),
    [
        (5, None, "batch_size 12 cannot be shared among 5 processes"),
        (2, 4, "batch_size 12 in micro-batches of 4 is 3 of them, which cannot be shared among 2 processes"),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(count, micro, words):
    one = Ranks()
    one.count = count
    with pytest.raises(UserError, match=words):
        one.share(12, micro)


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("RANK", "abc", "2"), ("RANK", "1", ""), ("RANK", "5", "2"), ("RANK", "0", "0"), ("RANK", "-1", "-3")],
)
def test_places_that_cannot_be_are_refused(monkeypatch, name, value, other):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", other)
    with pytest.raises(UserError, match=f"RANK is {value} and WORLD_SIZE is {other or 1}"):
        Ranks()


def test_processes_with_different_settings_are_refused():
    one = Ranks()
    one.gather = lambda number: torch.tensor([[number], [number + 1.0]], dtype=torch.float64)
    with pytest.raises(UserError, match="do not have the same settings"):
        one.agree("settings", "seed 1")
    Ranks().agree("settings", "seed 1")


def test_several_processes_without_torchrun_are_told_of_it(command, monkeypatch, dataset, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    status, _, err = command(train, "--dataset", dataset, "--out_dir", tmp_path / "run")
    assert status == 1 and "start it with torchrun, or unset WORLD_SIZE" in err and err.count("\n") == 1


def test_a_mistake_is_told_once(dataset, tmp_path):
    status, _, err = torchrun(2, "--dataset", dataset, *TINY, "--batch_size", 3, "--out_dir", tmp_path / "run")
    assert status != 0 and err.count("batch_size 3 cannot be shared among 2 processes") == 1
    assert not (tmp_path / "run").exists()


def test_each_process_takes_the_gpu_of_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.pick_device("auto", 1) == ranks.pick_device("cuda", 1) == torch.device("cuda:1")
    assert ranks.pick_device("cuda:0", 1) == torch.device("cuda:0")
    with pytest.raises(UserError, match='"cuda:2" is not on this machine'):
        ranks.pick_device("auto", 2)


def wait_for(run, step, process):
    """Until the log shows that step; then torchrun's own processes, each a rank."""
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not any(row["step"] >= step for row in rows(run)):
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.05)
    return sorted(psutil.Process(process.pid).children(), key=lambda child: int(child.environ()["RANK"]))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_dies_ends_all_with_a_message_and_the_run_can_go_on(dataset, tmp_path, rank):
    run = tmp_path / "run"
    process = start(2, "--dataset", dataset, *TINY, "--max_steps", 10**6, "--save_interval", 5, "--out_dir", run)
    members = wait_for(run, 6, process)
    members[rank].kill()
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0 and not any(member.is_running() for member in members)
    assert "lost another" in err if rank else "SIGKILL" in err
    step = json.loads((run / "last" / "meta.json").read_text())["step"]
    assert step >= 5 and train.main(["--resume", str(run), "--max_steps", str(step + 2)]) == 0


@pytest.mark.parametrize(
    ("number", "rank"), [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGTERM, 0), (signal.SIGTERM, 1)]
)
def test_a_signal_to_torchrun_or_to_one_rank_saves_and_leaves_no_process(dataset, tmp_path, number, rank):
    run = tmp_path / "run"
    process = start(2, "--dataset", dataset, *TINY, "--max_steps", 10**6, "--save_interval", 10**6, "--out_dir", run)
    members = wait_for(run, 6, process)
    os.kill(process.pid if rank is None else members[rank].pid, number)
    out, err = process.communicate(timeout=60)
    assert not any(member.is_running() for member in members)
    assert f"--resume {run}" in out, err
    assert content(run) and json.loads((run / "last" / "meta.json").read_text())["step"] >= 6
