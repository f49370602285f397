"""Training runs in processes of their own, which can be killed, starved and misled."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent.parent
TINY = ["--n_layer", "2", "--n_head", "4", "--n_embd", "32", "--block_size", "32", "--batch_size", "8",
        "--threads", "1", "--device", "cpu", "--eval_interval", "10", "--eval_tokens", "300", "--save_interval", "1",
        "--log_interval", "1"]  # fmt: skip

# Importing torch takes seconds, so one process imports it and splits one off for each run, which then goes through
# train.py from its first line. It is that process alone that a signal or a limit meets.
SERVER = """
import json, os, runpy, sys
import torch._dynamo, train
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(order["folder"])
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        exec(order["before"])
        sys.argv = order["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Server:
    """Runs train.py, one run at a time."""

    def __init__(self, output: Path):
        self.output = output
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def start(self, folder: Path, *words: object, before: str = "") -> int:
        """Run train.py in a folder, behind some code of the test's; its process id."""
        argv = [str(ROOT / "train.py"), *map(str, words)]
        order = {"folder": str(folder), "argv": argv, "before": before, "output": str(self.output)}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.child = int(self.process.stdout.readline())
        return self.child

    def end(self) -> SimpleNamespace:
        """Wait until the run is over; its exit status (negative for a signal) and what it printed."""
        status = os.waitstatus_to_exitcode(int(self.process.stdout.readline()))
        self.child = 0
        return SimpleNamespace(status=status, text=self.output.read_text())

    def run(self, folder: Path, *words: object, before: str = "") -> SimpleNamespace:
        self.start(folder, *words, before=before)
        return self.end()


def wait_until(condition, seconds: float = 300) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.001)


def rows(run: Path) -> list[dict]:
    """The log without what is a time."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("elapsed", "tokens_per_s")} for line in lines]


def step_of(run: Path, checkpoint: str = "last") -> int:
    """The step that a checkpoint holds; -1 if there is none, as between two renames."""
    try:
        return json.loads((run / checkpoint / "meta.json").read_text())["step"]
    except FileNotFoundError:
        return -1
