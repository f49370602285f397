"""The runs of a sweep as jobs of a cluster, through submitit: of Slurm where there is one, else on this machine."""

import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.sweep import ALONE, POLL_SECONDS, Run
from runtime.errors import EnvironmentFault, UserError

TIMEOUT_MIN = 240  # of a job, unless given
SAVE_SECONDS = 90  # how long before its time is up a job is told to save, unless given
SLURM_POLL_SECONDS = 2.0
STOP_SECONDS = 180  # a cancelled job is waited for as long; Slurm kills it after 30 unless its administrator says else


class Cluster:
    """Starts runs as jobs; `settings` are KEY=VALUE as submitit's update_parameters takes them.

    UserError if submitit is missing, a setting is none of its, or others can write where the jobs' files are to be.
    """

    def __init__(self, out_dir: Path, settings: Sequence[str], threads: int):
        try:
            import submitit
        except ImportError:
            raise UserError("--launcher submitit needs a package that is not here: pip install submitit") from None
        logging.getLogger("submitit").setLevel(logging.ERROR)  # its warnings would break into the progress
        given = dict(map(read_setting, settings))
        given = {"timeout_min": TIMEOUT_MIN, "cpus_per_task": threads} | given
        save_seconds = given.get("slurm_signal_delay_s", SAVE_SECONDS)
        self.folder = private_folder(out_dir)
        self.executor = submitit.AutoExecutor(self.folder)
        try:
            self.executor.update_parameters(
                **given,
                slurm_srun_args=[f"--cpus-per-task={given['cpus_per_task']}"],  # srun does not take sbatch's
                # train.py saves on SIGTERM. A job is not begun anew by Slurm: its command may be to begin a run, and
                # the next comparison knows how to go on with it.
                slurm_additional_parameters={"signal": f"TERM@{save_seconds}", "no-requeue": True},
            )
        except (NameError, ValueError, TypeError, AssertionError) as error:
            raise UserError(f"--slurm {' '.join(settings)}: {str(error).splitlines()[0]}") from None
        self.on_slurm = self.executor.cluster == "slurm"
        self.poll_seconds = SLURM_POLL_SECONDS if self.on_slurm else POLL_SECONDS
        self.count = 0

    def start(self, run: Run) -> "Job":
        """Submit a run; EnvironmentFault says why if it was refused."""
        self.count += 1
        status_file = self.folder / f"{self.count}.status"
        run.output.unlink(missing_ok=True)  # a link in a stranger's folder is not followed
        command, output, left_out = run.command(), os.path.abspath(run.output), ALONE

        def train() -> None:
            """In the job. Nested, hence pickled whole: the rooms of this repository are not on its path."""
            process = None
            told_to_stop = False

            def stop(number: int, frame: Any) -> None:
                nonlocal told_to_stop
                told_to_stop = True
                if process:
                    process.terminate()

            signal.signal(signal.SIGTERM, stop)
            env = {name: value for name, value in os.environ.items() if name not in left_out}
            with open(output, "wb") as file:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env
                )
            if told_to_stop:
                process.terminate()
            aside = status_file.with_suffix(".tmp")
            aside.write_text(str(process.wait()))
            aside.rename(status_file)

        self.executor.update_parameters(name=f"{run.name}-{run.seed}")
        # On this machine a job is a child of ours, and Ctrl-C in the terminal is to reach it through us.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return Job(self.executor.submit(train), run, status_file, self.on_slurm)
        except RuntimeError as error:
            raise EnvironmentFault(f"the cluster refused the job: {str(error).strip().splitlines()[-1]}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Job:
    """A submitted run, with what a sweep uses of subprocess.Popen."""

    def __init__(self, job: Any, run: Run, status_file: Path, on_slurm: bool):
        self.job, self.run, self.status_file, self.on_slurm = job, run, status_file, on_slurm
        self.returncode: int | None = None

    def poll(self, force: bool = False) -> int | None:
        """Exit status of train.py once it has ended, 1 if the job ended without one. Reads no pickle."""
        if self.returncode is None and self.job.done(force):
            self.returncode = int(self.status_file.read_text()) if self.status_file.exists() else 1
            if not self.status_file.exists():
                with open(self.run.output, "a", encoding="utf-8") as file:
                    file.write(f"\njob {self.job.job_id} ended as {self.job.state}; see {self.job.paths.stderr}\n")
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Cancel the job: train.py gets SIGTERM, whatever the number."""
        if self.on_slurm:
            self.job.cancel(check=False)
        elif not self.job.done():
            os.kill(int(self.job.job_id), signal.SIGTERM)  # its cancel() kills after a second, too soon to save

    def wait(self) -> int | None:
        clock = time.monotonic()
        while self.poll(force=True) is None and time.monotonic() < clock + STOP_SECONDS:
            time.sleep(SLURM_POLL_SECONDS if self.on_slurm else POLL_SECONDS)
        return self.returncode


def read_setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE with the value as a number where it is one; UserError if it is not of the form."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UserError(f"--slurm {text} is not KEY=VALUE, such as timeout_min=240 or slurm_partition=gpu")
    if key.removeprefix("slurm_") in ("nodes", "tasks_per_node", "ntasks_per_node") and value != "1":
        raise UserError(f"--slurm {text}: a run is one process on one node")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            pass
    return key, value


def private_folder(out_dir: Path) -> Path:
    """A new folder in out_dir/jobs that nobody else can write in, since what lies there is executed; older ones go.

    UserError if out_dir or jobs is another user's or others can write in it.
    """
    jobs = out_dir / "jobs"
    jobs.mkdir(mode=0o700, exist_ok=True)
    for folder in (out_dir, jobs):
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
            raise UserError(
                f"{folder} is not yours alone to write in, and job files there would be run as you: give another "
                f"--out_dir, or make it so with chmod go-w {folder}"
            )
    for old in jobs.glob("submitit-*"):  # a job of theirs that still waits will not begin
        shutil.rmtree(old)
    return Path(tempfile.mkdtemp(prefix="submitit-", dir=jobs)).absolute()
