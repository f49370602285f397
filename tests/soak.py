"""Train, kill, resume, compare and sample for as long as asked: nothing may be lost, nothing may pile up.

    python tests/soak.py --minutes 30       a JSON line for every round, then a summary; status 1 if anything went wrong

Every round trains one small model and breaks it off at random moments, with SIGKILL, SIGTERM or Ctrl-C, until it is
finished; weights, optimiser and log must then be those of a run that was left alone. A comparison is killed once and
begun again: the same losses. The run writes a text from a fixed seed: the same text. After each round nothing of ours
may still run and no temporary file be left; memory, open files and the size of the folder may not grow. For Linux.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from texts import some_text

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVAL_TOKENS = 400, 2000
MODEL = ["--dataset", "data/soak", "--n_layer", "2", "--n_head", "4", "--n_embd", "64", "--block_size", "32",
         "--batch_size", "8", "--dropout", "0.1", "--threads", "1"]  # fmt: skip
TRAIN = ["--overwrite", "--out_dir", "run", *MODEL, "--max_steps", STEPS, "--eval_interval", "40", "--eval_tokens",
         EVAL_TOKENS, "--save_interval", "10", "--log_interval", "5"]  # fmt: skip
COMPARE = ["mha.toml", "mqa.toml", *MODEL, "--seeds", "1", "--max_steps", "100", "--no-speed", "--out_dir", "compare"]
SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
MAY_GROW = {"own_kb": 1.1, "folder_bytes": 1.05, "peak_mb": 1.15}  # of what allows for chance; all others not at all
HANGS = 3600  # seconds after which a command will never end


class Soak:
    """The work folder, and how the commands are run in it."""

    def __init__(self, folder, luck):
        self.folder, self.luck, self.lost = folder, luck, []
        self.counts = dict.fromkeys(("kills", "stops", "resumes", "comparisons", "samples"), 0)
        self.peaks = {}  # of this round: command -> MB
        self.whole = 0.0  # seconds of the first training, which nothing disturbs
        (folder / "tmp").mkdir()
        (folder / "text.txt").write_text(some_text(8000))
        (folder / "mha.toml").write_text("n_kv_head = 4\n")
        (folder / "mqa.toml").write_text("n_kv_head = 1\n")
        self.mark = f"SOAK={os.getpid()}-{time.time()}"  # in the environment of all that descends from us
        self.environment = os.environ | dict([self.mark.split("=")]) | {"TMPDIR": str(folder / "tmp")}
        self.shared = set(os.listdir("/dev/shm"))
        self.run("prepare.py", "data/soak", "--files", "text.txt")

    def run(self, command, *words, after=None):
        """Exit status and standard output; a signal comes `after` so many seconds, unless it has ended by then."""
        output = self.folder / "output.txt"
        with open(output, "wb") as out, open(self.folder / "errors.txt", "wb") as err:
            line = [sys.executable, ROOT / command, *map(str, words)]
            process = subprocess.Popen(
                line, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        sent, begun = None, time.monotonic()
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            seconds = time.monotonic() - begun
            if after is not None and sent is None and seconds > after:
                sent = self.luck.choice(SIGNALS)
                process.send_signal(sent)
                self.counts["kills" if sent == signal.SIGKILL else "stops"] += 1
            if seconds > HANGS:
                process.kill()
            time.sleep(0.01)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.peaks[command] = max(self.peaks.get(command, 0), round(used.ru_maxrss / 1024))
        if seconds > HANGS or (sent is None and process.returncode):
            told = (self.folder / "errors.txt").read_text(errors="replace")[-500:]
            self.lost.append(f"{command} {' '.join(map(str, words))}: status {process.returncode}: {told}")
        return process.returncode, output.read_bytes()

    def train(self, interruptions):
        """A run from its beginning, broken off up to so many times; what it ended with."""
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)  # or a run that is killed at once would leave the former one for its own
        begun = time.monotonic()
        self.run("train.py", *TRAIN, after=self.moment() if interruptions else None)
        self.whole = self.whole or time.monotonic() - begun
        while not ended(run):
            interruptions -= 1
            saved = any((run / name / "meta.json").is_file() for name in ("last", "last.old"))
            self.counts["resumes"] += saved
            words = ["--resume", "run"] if saved else TRAIN
            status, _ = self.run("train.py", *words, after=self.moment() if interruptions > 0 else None)
            if status and interruptions <= 0:
                return None  # told already
        sums = [hashlib.sha256((run / part).read_bytes()).hexdigest() for part in
                ("last/model.safetensors", "last/optimizer.safetensors", "best/model.safetensors")]  # fmt: skip
        return sums, rows(run)

    def compare(self, killed):
        """The losses of a comparison of two designs."""
        shutil.rmtree(self.folder / "compare", ignore_errors=True)
        if killed:
            self.run("compare.py", *COMPARE, after=self.moment())
        if self.run("compare.py", *COMPARE)[0]:
            return None
        self.counts["comparisons"] += 1
        results = json.loads((self.folder / "compare" / "results.json").read_text())
        return {design["name"]: [row["loss"] for row in design["runs"]] for design in results["designs"]}

    def sample(self):
        self.counts["samples"] += 1
        return self.run("sample.py", "run", "--seed", "7", "--max_new_tokens", "200")[1].decode()

    def moment(self):
        """Seconds until a command is broken off: up to what a training took that was left alone."""
        return self.luck.uniform(0, self.whole)

    def left(self):
        """What there is at the end of a round."""
        deadline = time.monotonic() + 60
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)  # a comparison that was killed leaves a training to its own end
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        aside = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*")
                 if path.suffix in (".tmp", ".old") or path.parent == self.folder / "tmp"]  # fmt: skip
        memory = Path("/proc/self/status").read_text()
        return {
            "processes": len(alive), "temporary": aside, "shared": sorted(set(os.listdir("/dev/shm")) - self.shared),
            "files": len(files), "folder_bytes": sum(path.stat().st_size for path in files),
            "open": len(os.listdir("/proc/self/fd")), "own_kb": int(memory.split("VmRSS:")[1].split()[0]),
            **{f"peak_mb {command}": peak for command, peak in self.peaks.items()},
        }  # fmt: skip

    def alive(self):
        """The processes that descend from us."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if path.name != str(os.getpid()) and self.mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:  # another user's, or gone
                continue
        return found


def rows(run):
    """The log, without what depends on the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in ("elapsed", "tokens_per_s")} for line in lines]


def ended(run):
    """Whether the last evaluation, of the whole validation split, is in the log."""
    try:
        last = rows(run)[-1]
    except (IndexError, ValueError):
        return False
    return last["step"] == STEPS and last.get("val_tokens", 0) > EVAL_TOKENS  # the one before it has no more


def leaked(rounds):
    """Figures that are larger in the last third of the rounds than in the first, or that should be none and are not."""
    third = max(1, len(rounds) // 3)
    found = {name: most for name in ("processes", "temporary") if (most := max(r[name] for r in rounds))}
    if stayed := rounds[-1]["shared"]:  # others use that folder as well, so what is gone again is not ours
        found["shared"] = stayed
    for name in rounds[0]:
        values = [r[name] for r in rounds]
        if name not in found and isinstance(values[0], int) and name != "round":
            first, last = statistics.median(values[:third]), statistics.median(values[-third:])
            if last > first * MAY_GROW.get(name.split()[0], 1):
                found[name] = [first, last]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="the last round begins before they are over")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the signals")
    args = parser.parse_args()
    begun, rounds = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), random.Random(args.seed))
        reference = soak.train(0), soak.sample(), soak.compare(killed=False)
        if soak.lost:
            sys.exit("\n".join(soak.lost))
        while not rounds or time.monotonic() - begun < 60 * args.minutes:
            soak.peaks = {}
            found = soak.train(interruptions=4), soak.sample(), soak.compare(killed=True)
            for what, expected, got in zip(("run", "text", "comparison"), reference, found, strict=True):
                if got != expected:
                    soak.lost.append(f"round {len(rounds) + 1}: the {what} is another")
            rounds.append({"round": len(rounds) + 1, **soak.left()})
            print(json.dumps(rounds[-1] | {"minutes": round((time.monotonic() - begun) / 60, 1)}), flush=True)
    summary = {"rounds": len(rounds), **soak.counts, "lost": soak.lost, "leaked": leaked(rounds)}
    print(json.dumps(summary, indent=1))
    return bool(summary["lost"] or summary["leaked"])


if __name__ == "__main__":
    sys.exit(main())
