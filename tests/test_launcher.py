"""Runs as jobs of submitit, on its local executor: what a sweep sees of them, stopping them, and who may write."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from test_compare import TINY, children, command

import compare
import train
from lab.launcher import Cluster, private_folder, read_setting
from lab.sweep import Run, Stopped, Sweep, start_here
from runtime.errors import UserError
from runtime.runs import StopSignal

pytest.importorskip("submitit")
pytestmark = [
    pytest.mark.usefixtures("handlers_come_back"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes in /proc"),
]
CODE = {  # of a run, by its seed
    1: "import json, os; print('WORLD_SIZE' in os.environ)\n"
    "print(json.dumps({'step': 1, 'val_tokens': 1, 'val_loss': 2.5}), file=open('metrics.jsonl', 'w'))",
    2: "import sys; sys.exit('train.py: it diverged')",
    3: "import os; print('step 1', flush=True); os.kill(os.getpid(), 9)",
    4: "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: time.sleep(2) or sys.exit('saved'))\n"
    "print('training', flush=True); time.sleep(600)",
}


class Script(Run):
    """A run that takes no training."""

    def command(self):
        return [sys.executable, "-c", f"import os; os.chdir({str(self.folder)!r})\n" + CODE[self.seed]]


def scripts(folder, *seeds):
    return [Script("a", seed, folder / f"a-{seed}", folder, 1, 1) for seed in seeds]


def sweep_of(start, stop, jobs=2):
    return Sweep(jobs, 4, Console(quiet=True), stop, start)


def all_below(pid):
    found = children(pid)
    return found + [one for child in found for one in all_below(child)]


def test_a_sweep_sees_of_a_job_what_it_sees_of_a_process(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of whatever compare.py itself was started in
    monkeypatch.setattr("submitit.core.utils.pickle_load", lambda file: pytest.fail(f"{file} is read"))
    seen = []
    for start in (start_here, Cluster(tmp_path, [], 1).start):
        folder = tmp_path / start.__name__
        runs = scripts(folder, 1, 2, 3)
        sweep = sweep_of(start, StopSignal())
        sweep.train(runs)
        texts = [run.output.read_text() for run in runs]
        seen.append(([run.finished() for run in runs], sweep.failures, sweep.done, texts))
        sweep = sweep_of(lambda run: pytest.fail(f"{run} was started"), StopSignal())
        sweep.train(runs[:1])  # it is finished
    assert seen[0] == seen[1] and seen[0][0] == [True, False, False] and seen[0][3][0] == "False\n"
    assert [failure["error"][:18] for failure in seen[0][1]] == ["train.py: it diver", "ended by signal 9,"]


@pytest.fixture
def begun_here():
    """The processes below this one that the test began; a library may have left helpers of its own before."""
    before = all_below(os.getpid())
    return lambda: [pid for pid in all_below(os.getpid()) if pid not in before]


def test_a_stop_reaches_every_job_and_none_is_left(tmp_path, begun_here):
    stop, (run,) = StopSignal(), scripts(tmp_path, 4)
    start = Cluster(tmp_path, [], 1).start

    def begun(run):
        job = start(run)
        while not (run.output.exists() and "training" in run.output.read_text()):
            time.sleep(0.05)
        below = begun_here()
        assert len(below) >= 2  # the job and its training
        for pid in [*below, os.getpid()]:  # as a terminal does
            os.kill(pid, signal.SIGINT)
        return job

    with pytest.raises(Stopped):
        sweep_of(begun, stop).train([run])
    assert stop.number == signal.SIGINT and run.output.read_text().split() == ["training", "saved"]
    assert not begun_here()


def test_a_run_whose_folder_was_removed_costs_nobody_else_theirs(tmp_path):
    def start(run):
        process = start_here(run)
        if run.seed == 2:
            shutil.rmtree(run.folder)
        return process

    sweep = sweep_of(start, StopSignal())
    sweep.train(runs := scripts(tmp_path, 2, 1))
    assert runs[1].finished() and "not a word" in sweep.failures[0]["error"]


def test_a_job_that_ends_without_a_word_is_a_failure_that_says_where_to_look(tmp_path, begun_here):
    cluster, (run,) = Cluster(tmp_path, [], 1), scripts(tmp_path, 4)

    def killed(run):
        job = cluster.start(run)
        while not (run.output.exists() and "training" in run.output.read_text()):
            time.sleep(0.05)
        for pid in begun_here():  # from the top, as when a node is lost
            os.kill(pid, signal.SIGKILL)
        return job

    sweep = sweep_of(killed, StopSignal())
    sweep.train([run])
    assert "ended as" in sweep.failures[0]["error"] and str(cluster.folder) in sweep.failures[0]["error"]


def test_job_files_lie_where_nobody_else_can_write(tmp_path):
    first = private_folder(tmp_path)
    assert first.stat().st_mode & 0o777 == 0o700
    (first / "1_submitted.pkl").write_bytes(b"of a former comparison")
    second = private_folder(tmp_path)
    assert list((tmp_path / "jobs").iterdir()) == [second] and not list(second.iterdir())
    for folder, mode in ((tmp_path, 0o757), (tmp_path / "jobs", 0o770)):
        before = folder.stat().st_mode
        folder.chmod(mode)
        with pytest.raises(UserError, match=f"{folder} is not yours alone"):
            private_folder(tmp_path)
        folder.chmod(before)
    second.rmdir()
    (tmp_path / "jobs").rename(tmp_path / "elsewhere")
    (tmp_path / "jobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not yours alone"):
        private_folder(tmp_path)
    (tmp_path / "jobs").unlink()
    (tmp_path / "jobs").mkdir(0o700)
    if os.getuid() == 0:
        os.chown(tmp_path / "jobs", 12345, -1)
        with pytest.raises(UserError, match="not yours alone"):
            private_folder(tmp_path)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("memory=4", "--slurm memory=4: Parameter 'memory'"),
        ("slurm_partitoin=gpu", "Unknown argument 'partitoin'"),
        ("timeout_min=long", 'timeout_min.*"long"'),
        ("timeout_min", "not KEY=VALUE"),
        ("nodes=2", "one process on one node"),
    ],
)
def test_a_mistake_in_a_setting_of_the_cluster_is_one_sentence(tmp_path, word, told):
    with pytest.raises(UserError, match=told) as error:
        Cluster(tmp_path, [word], 1)
    assert "\n" not in str(error.value)


def test_slurm_tells_a_job_to_save_in_time_and_never_begins_one_anew(tmp_path, monkeypatch):
    """By the script that would be handed to sbatch: its command may be to begin a run that has gone on since."""
    monkeypatch.setattr("submitit.SlurmExecutor.affinity", classmethod(lambda cls: 2))  # as where there is a Slurm
    cluster = Cluster(tmp_path, ["slurm_signal_delay_s=120"], 2)
    assert cluster.on_slurm
    lines = cluster.executor._executor._make_submission_file_text("train", "uid").splitlines()
    assert {"#SBATCH --no-requeue", "#SBATCH --signal=TERM@120"} <= set(lines) and "#SBATCH --requeue" not in lines


def test_values_of_settings_are_numbers_where_they_look_so():
    texts = ["timeout_min=5", "mem_gb=1.5", "slurm_time=2:00:00"]
    assert list(map(read_setting, texts)) == [("timeout_min", 5), ("mem_gb", 1.5), ("slurm_time", "2:00:00")]


def test_slurm_without_submitit_and_submitit_not_installed_are_told(dataset, tmp_path, monkeypatch):
    line = ["--vary", "n_kv_head", "1", "2", "--dataset", dataset, "--out_dir", str(tmp_path), *TINY]
    with pytest.raises(UserError, match="add --launcher submitit"):
        compare.main([*line, "--slurm", "mem_gb=4"])
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match="pip install submitit"):
        compare.main([*line, "--launcher", "submitit"])


def test_a_comparison_by_jobs_that_is_killed_goes_on_and_ends_as_what_nothing_disturbed(dataset, tmp_path):
    folder = tmp_path / "runs"
    line = command(dataset, folder, "--vary", "n_kv_head", "4", "1", "--seeds", "1", "--no-speed",
                   "--launcher", "submitit")  # fmt: skip
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, umask=0o002)  # as where users have groups of their own
    first = folder / "n_kv_head=4-1"
    while not (first / "last" / "meta.json").exists():
        assert process.poll() is None
        time.sleep(0.002)
    for pid in [process.pid, *all_below(process.pid)]:  # the comparison and its job
        os.kill(pid, signal.SIGKILL)
    process.wait()
    step = json.loads((first / "last" / "meta.json").read_text())["step"]
    assert subprocess.run([*line, "--jobs", "2"], stdin=subprocess.DEVNULL).returncode == 0
    assert step < 16 and f"going on from step {step}" in (first / "output.txt").read_text()
    assert len(list(folder.glob("jobs/*/*.status"))) == 2
    losses = [one["loss"]["mean"] for one in json.loads((folder / "results.json").read_text())["designs"]]
    for name, loss in zip(("n_kv_head=4", "n_kv_head=1"), losses, strict=True):
        whole = tmp_path / name
        assert train.main([str(folder / "designs" / f"{name}.toml"), "--seed", "1", "--out_dir", str(whole)]) == 0
        weights = [run / "last" / "model.safetensors" for run in (whole, folder / f"{name}-1")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert loss == json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
