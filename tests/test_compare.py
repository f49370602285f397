"""A comparison from its command line to its files: what is trained, skipped, resumed, refused and written."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from texts import some_text

import compare
import prepare
import train
from data import open_dataset
from lab.designs import Design
from lab.plans import check_alike, make_plan, match_parameters, share_cores, varied
from lab.stats import analyse
from lab.sweep import Plan, Run, Sweep, check_same, plan_runs
from model import GPT, ModelConfig
from runtime.errors import UserError
from runtime.runs import TrainConfig, hold

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("handlers_come_back")
TINY = ["--n_layer", "2", "--n_head", "4", "--n_embd", "32", "--block_size", "16", "--batch_size", "4",
        "--max_steps", "16", "--eval_tokens", "500", "--learning_rate", "1e-2", "--threads", "1"]  # fmt: skip
SMALL_GRID = ["--batch", "1", "--context", "16"]
SPEED = {"speed", "created", "git_commit", "command"}  # what may differ between two equal sweeps


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three design files: mha, the same once more, and mqa."""
    folder = tmp_path_factory.mktemp("designs")
    for name, text in {"mha": "", "again": "", "mqa": "n_kv_head = 1\n"}.items():
        (folder / f"{name}.toml").write_text(text)
    return [str(folder / f"{name}.toml") for name in ("mha", "again", "mqa")]


def command(dataset, out_dir, *words):
    """A comparison as a process would be started."""
    return [sys.executable, str(ROOT / "compare.py"), *words, "--dataset", dataset, "--out_dir", str(out_dir), *TINY]


def run(line, status=0):
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == status, done.stderr
    return done


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def design(results, name):
    return next(one for one in results["designs"] if one["name"] == name)


@pytest.fixture(scope="module")
def sweep(dataset, files, tmp_path_factory):
    """A comparison that nothing disturbed: the folder, and what the process said."""
    folder = tmp_path_factory.mktemp("sweep") / "runs"
    return folder, run(command(dataset, folder, *files, *SMALL_GRID))


def test_it_writes_the_report_and_says_where(sweep):
    folder, done = sweep
    for name in ("results.json", "report.md", "report.html", "loss.svg", "difference.svg"):
        assert (folder / name).stat().st_size > 100
    assert "report.html" in done.stdout and "mqa" in done.stdout
    assert not list(folder.glob("*.tmp"))


def test_losses_and_differences_are_those_of_the_runs(sweep):
    folder, _ = sweep
    results = results_of(folder)
    losses = {}
    for name in ("mha", "again", "mqa"):
        for seed in (1, 2, 3):
            rows = [json.loads(line) for line in (folder / f"{name}-{seed}" / "metrics.jsonl").read_text().splitlines()]
            losses[name, seed] = rows[-1]["val_loss"]
            assert rows[-1]["val_tokens"] == results["dataset"]["val_tokens"]
        mean = sum(losses[name, seed] for seed in (1, 2, 3)) / 3
        assert design(results, name)["loss"]["mean"] == pytest.approx(mean, abs=1e-12)
    pair = design(results, "mqa")["against_baseline"]
    assert pair["differences"] == pytest.approx([losses["mqa", seed] - losses["mha", seed] for seed in (1, 2, 3)])
    assert len(set(losses.values())) == 6  # two designs at three seeds, and one of them twice


def test_the_same_design_trained_twice_differs_by_nothing(sweep):
    folder, _ = sweep
    pair = design(results_of(folder), "again")["against_baseline"]
    assert pair["differences"] == [0, 0, 0] and pair["interval"] == [0, 0] and pair["p_holm"] == 1
    assert pair["detected"] == "no difference detected"
    first, second = (folder / f"{name}-1" / "last" / "model.safetensors" for name in ("mha", "again"))
    assert first.read_bytes() == second.read_bytes() and not first.samefile(second)
    assert "step 16/16" in (folder / "again-1" / "output.txt").read_text()  # really trained
    assert "NaN" not in (folder / "results.json").read_text()


def test_costs_by_formula_are_those_allocated(sweep):
    results = results_of(sweep[0])
    for name, heads in {"mha": 4, "mqa": 1}.items():
        one = design(results, name)
        assert one["cache_bytes_per_token"] == one["cache_bytes_allocated"] == 2 * 2 * heads * 8 * 4
    assert design(results, "mha")["parameters"] - design(results, "mqa")["parameters"] == 2 * 2 * 3 * 8 * 32
    assert ["mha", "again"] in results["equal_cache"]
    assert design(results, "mqa")["changes"] == {"n_kv_head": 1}
    assert results["threads"] == 1 and design(results, "mha")["settings"]["threads"] == 1


def test_unless_said_as_many_runs_are_begun_at_once_as_there_are_cores(sweep):
    cores = run([sys.executable, "-c", "import torch; print(torch.get_num_threads())"]).stdout
    jobs = results_of(sweep[0])["jobs"]
    assert jobs == min(4, int(cores))
    lines = [line for line in sweep[1].stderr.splitlines() if ", seed " in line]
    assert [line.endswith("training") for line in lines[:jobs]] == [True] * jobs


def test_half_and_three_quarters_of_the_length_are_evaluated(sweep):
    steps = [point["step"] for point in design(results_of(sweep[0]), "mqa")["against_baseline"]["curve"]]
    assert steps == list(range(2, 17, 2))


def test_what_is_finished_is_not_trained_again(sweep, dataset, files):
    folder, _ = sweep
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*-*/last/*")}
    former = results_of(folder)
    run(command(dataset, folder, *files, *SMALL_GRID, "--no-speed"))
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*-*/last/*")} and before
    now = results_of(folder)
    assert {k: v for k, v in now.items() if k not in SPEED | {"speed_note"}} == {
        k: v for k, v in former.items() if k not in SPEED | {"speed_note"}
    }
    assert now["speed"] is None and "--no-speed" in now["speed_note"] and former["speed"]


def test_runs_on_other_data_or_with_other_settings_are_not_joined(sweep, tmp_path):
    folder, _ = sweep
    settings = design(results_of(folder), "mha")["settings"]
    (tmp_path / "text.txt").write_text(some_text(3000, seed=1))
    prepare.main([str(tmp_path / "set"), "--files", str(tmp_path / "text.txt")])
    other = open_dataset(str(tmp_path / "set"))
    with pytest.raises(UserError, match="has changed since|is not in the tokens"):
        plan_runs(folder, {"mha": make_plan(Design("mha", None, settings), other, 1)}, [1], other)
    data = open_dataset(settings["dataset"])
    plan = make_plan(Design("mha", None, settings | {"weight_decay": 0.3}), data, 1)
    edited = tmp_path / "edited"
    shutil.copytree(folder / "mha-1", edited / "mha-1")  # as if its design's file had been deleted or edited
    with pytest.raises(UserError, match="mha-1 is a run that has weight_decay 0.1, and now it is 0.3"):
        plan_runs(edited, {"mha": plan}, [1], data)


def test_what_was_begun_before_a_setting_existed_goes_on_with_its_default():
    plan = Plan(ModelConfig(vocab_size=9), TrainConfig())
    saved = {name: value for name, value in plan.settings().items() if name != "gate"}
    check_same(plan, saved, "it")
    with pytest.raises(UserError, match="it has gate false, and now it is true"):
        check_same(Plan(ModelConfig(vocab_size=9, gate=True), TrainConfig()), saved, "it")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--weight_decay", "0.2"], "weight_decay 0.1, and now it is 0.2"),
        (["--threads", "2"], "begun with 1 threads"),
        (["--baseline", "mlp"], "mlp is not among the designs"),
        (["--seed", "4"], "seeds 1 to N"),
        (["--resume", "runs/x"], "resume belongs to one run"),
        (["--vary", "n_head"], "needs the values"),
        (["--vary", "wandb_project", "a/b", "c"], "wandb_project a/b: it names a design"),
        (["--context", "128", "128"], "context names a size twice"),
        (["--vary", "eval_interval", "8", "16"], "eval_interval cannot be"),
        (["--vary", "n-kv-head", "3"], "mha-n_kv_head=3: n_head 4 is not divisible by n_kv_head 3"),
        (["--vary", "n-head", "2", "4"], "n_head are both given"),
        (["--vary", "n_haed", "2", "4"], "n_head"),
        (["--vary", "threads", "1", "2"], "threads cannot be"),
        (["--vary", "learning-rate", "0.1", "0.2", "--rates", "0.1", "0.2"], "give one of them"),
        (["--vary", "d_ff", "64", "128", "--match", "params"], "give one of them"),
        (["--rates", "0.1", "inf"], "rates must be two or more"),
        (["--seeds", "0"], "seeds must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_touched(sweep, dataset, files, words, told):
    folder, _ = sweep
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    line = command(dataset, folder, *files)[2:]
    with pytest.raises(UserError, match=re.escape(told)) as error:
        compare.main([*line[:-2], *words] if "threads" in " ".join(words) else [*line, *words])
    assert "\n" not in str(error.value)
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def test_a_second_comparison_in_a_folder_is_refused_while_the_first_trains(dataset, files, tmp_path, monkeypatch):
    line = command(dataset, tmp_path / "runs", *files)[2:]

    def training(self, runs):
        with pytest.raises(UserError, match=f"another process is training in {tmp_path / 'runs'}"):
            compare.main(line)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "train", training)
    with pytest.raises(KeyboardInterrupt):
        compare.main(line)


def test_a_run_that_fails_costs_nobody_else_theirs(dataset, files, tmp_path):
    (tmp_path / "wild.toml").write_text("learning_rate = 1e9\n")
    designs = [files[0], str(tmp_path / "wild.toml"), files[2]]
    line = command(dataset, tmp_path / "runs", *designs, "--seeds", "1", "--no-speed")
    done = run([word for word in line if word not in ("--learning_rate", "1e-2")], status=1)
    results = results_of(tmp_path / "runs")
    assert [one["loss"]["n"] for one in results["designs"]] == [1, 0, 1]
    (failure,) = results["failures"]
    assert failure["design"] == "wild" and "diverged" in failure["error"] and failure["error"] in done.stderr
    pair = design(results, "mqa")["against_baseline"]
    assert pair["interval"] is None and pair["verdict"] == "too few seeds for a verdict"


def test_each_design_gets_the_best_of_the_rates_on_a_seed_that_is_not_reported(dataset, files, tmp_path):
    line = [*command(dataset, tmp_path / "runs", files[0], files[2], "--seeds", "1", "--no-speed", "--jobs", "2"),
            "--rates", "1e-4", "1e-2"]  # fmt: skip
    run(line)
    results = results_of(tmp_path / "runs")
    assert results["rates"]["best"] == {"mha": 0.01, "mqa": 0.01} and results["rates"]["seed"] == 0
    assert results["rates"]["losses"]["mha"]["0.0001"] > results["rates"]["losses"]["mha"]["0.01"]
    assert [one["seed"] for one in design(results, "mha")["runs"]] == [1]
    assert not (tmp_path / "runs" / "common-rate").exists()  # the best is the common one: nothing to train again
    assert not results["rates"]["differs"] and len(results["rates"]["at_common"]) == 2
    assert "--no-speed" in results["speed_note"]


# What the runs are to be.


def test_vary_multiplies_the_designs():
    designs = {name: Design(name, f"{name}.toml", {"n_kv_head": kv}) for name, kv in {"a": 1, "b": None}.items()}
    made = varied(designs, ["n-head", "2", "4"])
    assert list(made) == ["a-n_head=2", "a-n_head=4", "b-n_head=2", "b-n_head=4"]
    assert made["a-n_head=4"].settings == {"n_kv_head": 1, "n_head": 4}
    assert list(varied({"default": Design("default", None, {})}, ["positions", "none", "rotary"])) == [
        "positions=none", "positions=rotary"
    ]  # fmt: skip


def test_matched_parameters_agree_within_half_a_percent(dataset):
    data = open_dataset(dataset)
    designs = {"mha": {}, "mqa": {"n_kv_head": 1}, "no-wo": {"w_o": False}, "swiglu": {"activation": "swiglu"}}
    plans = {name: make_plan(Design(name, None, settings), data, 1) for name, settings in designs.items()}
    matched, changes = match_parameters(plans, "mha")
    counts = {name: GPT(plan.model).num_parameters() for name, plan in matched.items()}
    assert matched["mha"] == plans["mha"] and len(set(counts.values())) > 1
    assert all(abs(count / counts["mha"] - 1) <= 0.005 for count in counts.values())
    assert matched["mqa"].model.d_ff > plans["mqa"].model.d_ff and len(changes) == 3 and "d_ff 512 -> " in changes[0]
    small = {"wide": {"n_embd": 256}, "mha": {"n_embd": 128}}
    plans = {name: make_plan(Design(name, None, settings), data, 1) for name, settings in small.items()}
    with pytest.raises(UserError, match="d_ff cannot bring wide"):
        match_parameters(plans, "mha")


def test_designs_whose_losses_do_not_compare_are_refused(dataset):
    data = open_dataset(dataset)
    plans = {n: make_plan(Design(n, None, {"block_size": size}), data, 1) for n, size in {"a": 16, "b": 32}.items()}
    with pytest.raises(UserError, match="a has block_size 16 and b 32"):
        check_alike(plans)


@pytest.mark.parametrize(
    ("cores", "jobs", "threads", "shared"),
    [(1, None, None, (1, 1)), (2, None, None, (2, 1)), (3, None, None, (3, 1)), (8, None, None, (4, 2)),
     (8, None, 4, (2, 4)), (2, None, 3, (1, 3)), (8, 1, None, (1, 8)), (8, 3, None, (3, 2)), (2, 1000, None, (1000, 1)),
     (2, 2, 2, (2, 2))],
)  # fmt: skip
def test_cores_are_shared_among_jobs(monkeypatch, tmp_path, cores, jobs, threads, shared):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    given = {"device": "cpu"} | ({"threads": threads} if threads else {})
    assert share_cores({"a": Design("a", None, given)}, jobs, tmp_path) == shared


def test_on_a_gpu_runs_take_turns(monkeypatch, tmp_path):
    monkeypatch.setattr("lab.plans.pick_device", lambda name: torch.device("cuda"))
    assert share_cores({"a": Design("a", None, {})}, None, tmp_path) == (1, torch.get_num_threads())


def test_one_gpu_among_the_designs_is_enough_and_a_cluster_may_have_what_this_machine_lacks(monkeypatch, tmp_path):
    designs = {name: Design(name, None, {"device": name}) for name in ("cpu", "cuda")}
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match='device "cuda" is not on this machine'):
            share_cores(designs, None, tmp_path)
        assert share_cores(designs, 2, tmp_path)[0] == 2  # as jobs of a cluster are
    monkeypatch.setattr("lab.plans.pick_device", torch.device)
    assert share_cores(designs, None, tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("jobs", "done", "shares", "left"),
    [(1, 3, [], 12), (2, 0, [], 24), (2, 3, [], 12), (9, 2, [], 12), (2, 2, [0.5, 0.5], 6), (2, 4, [], 0)],
)
def test_time_left_counts_no_job_that_has_nothing_to_do(jobs, done, shares, left):
    sweep = Sweep(jobs, 4, Console(quiet=True), SimpleNamespace(number=0))
    sweep.done, sweep.trained = done, [11.0, 13.0]
    assert sweep.seconds_left(shares) == pytest.approx(left)


@pytest.mark.parametrize(
    ("jobs", "threads", "speed"), [(1, 8, 8), (4, 2, 8), (3, 2, 6), (1, 1, 1), (1, 9, 9), (50, 1, 8), (3, 9, 9)]
)
def test_speed_is_measured_on_the_cores_that_trained(monkeypatch, dataset, jobs, threads, speed):
    plans = {"a": make_plan(Design("a", None, {"device": "cpu"}), open_dataset(dataset), threads)}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(compare, "measure", lambda *_, **given: given)
    measured = compare.measure_speed(plans, compare.CompareConfig(), jobs, Console(quiet=True))
    assert measured["threads"] == speed


def test_the_threads_of_a_folder_are_kept(dataset, tmp_path):
    designs, data = {"a": Design("a", None, {"block_size": 16})}, open_dataset(dataset)
    plan_runs(tmp_path, {"a": make_plan(designs["a"], data, 5)}, [1, 2], data)
    assert share_cores(designs, 1, tmp_path) == (1, 5)
    assert share_cores(designs, None, tmp_path)[1] == 5
    four = {"b": Design("b", None, {"threads": 4})}
    with pytest.raises(UserError, match="begun with 5 threads"):
        share_cores(four, 1, tmp_path)
    with pytest.raises(UserError, match="designs differ in threads"):
        share_cores(designs | four, 1, tmp_path)


def test_progress_shows_names_as_they_are():
    console = Console(file=io.StringIO(), width=100)
    sweep = Sweep(1, 1, console, SimpleNamespace(number=0))
    sweep.progress.update(sweep.task, description="run 1 of 2: [red][/] seed 1")
    sweep._say("[red][/] :x:")
    console.print(sweep.progress.get_renderable())
    assert "[red][/] :x:\nrun 1 of 2: [red][/] seed 1 " in console.file.getvalue()


def test_a_run_that_another_process_was_about_to_train_is_waited_for(tmp_path):
    """As one whose comparison was killed while it was starting: it held no lock yet, so the next started it as well."""
    run, started = Run("a", 1, tmp_path / "a-1", tmp_path / "a.toml", 16, 100), []

    def start(run):
        assert not started, "it was finished, and is trained again"
        lock = hold(run.folder)
        run.metrics.write_text('{"step": 16, "val_loss": 2.0, "val_tokens": 100}\n')
        started.append(threading.Timer(0.5, lock.close))
        started[-1].start()
        return SimpleNamespace(poll=lambda: 2)

    sweep = Sweep(1, 1, Console(quiet=True), SimpleNamespace(number=0), start)
    sweep.train([run])
    assert (len(started), sweep.done, sweep.failures) == (1, 1, [])
    assert not started[0].is_alive()


def test_a_note_names_the_optimiser(dataset):
    data = open_dataset(dataset)
    plans = {"mha": make_plan(Design("mha", None, {"optimizer": "muon"}), data, 1)}
    assert "All designs train with muon at one learning rate" in compare.notes(plans, compare.CompareConfig(), {})[0]


def test_a_torn_log_is_not_a_finished_run(tmp_path):
    one = Run("a", 1, tmp_path, tmp_path / "a.toml", 16, 100)
    assert not one.finished() and one.share_done() == 0
    row = '{"step": 16, "val_loss": 2.0, "val_tokens": %d}\n'
    one.metrics.write_text(row % 50)  # the short evaluation of the last step
    assert not one.finished()
    one.metrics.write_text(row % 50 + (row % 100)[:30])
    assert not one.finished() and one.share_done() == 1
    one.metrics.write_text(row % 50 + row % 100)
    assert one.finished()
    one.metrics.write_text((row % 100).replace("2.0", "null"))  # the last update made it infinite
    assert not one.finished()


# Planted handicaps are found.


def test_planted_handicaps_are_found_worse_at_three_seeds(dataset, tmp_path):
    designs = {"mha": [], "no-positions": ["--positions", "none"], "tenth-rate": ["--learning_rate", "5e-4"]}
    runs = {}
    for name, flags in designs.items():
        for seed in (1, 2, 3):
            folder = tmp_path / f"{name}-{seed}"
            common = ["--dataset", dataset, "--out_dir", str(folder), "--seed", str(seed)]
            size = ["--n_layer", "2", "--n_head", "4", "--n_embd", "48", "--block_size", "24", "--max_steps", "120"]
            assert train.main([*common, *size, "--eval_interval", "15", "--eval_tokens", "1000", "--learning_rate",
                               "5e-3", *flags]) == 0  # fmt: skip
            runs.setdefault(name, {})[seed] = folder / "metrics.jsonl"
    found = analyse(runs, "mha")["designs"]
    for name in ("no-positions", "tenth-rate"):
        assert found[name]["against_baseline"]["detected"] == "worse", found[name]["against_baseline"]


# Killed again and again, it ends with the same.


def children(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes in /proc")
def test_killed_ten_times_it_ends_with_the_same_results(sweep, dataset, files, tmp_path):
    undisturbed, folder = sweep[0], tmp_path / "runs"
    line = command(dataset, folder, *files, *SMALL_GRID)
    words = tmp_path / "said.txt"

    whole = f'"val_tokens": {results_of(undisturbed)["dataset"]["val_tokens"]}'

    def logs():
        return [path.read_text() for path in folder.glob("*-*/metrics.jsonl")]

    def finished():
        return sum(whole in text for text in logs())

    def inside_a_run(number):
        return lambda: finished() < number <= sum(bool(text) for text in logs())

    def between_runs(number):
        return lambda: finished() >= number

    draw = random.Random(1).uniform(1.0, 4.0)
    points = [
        ("orphan", inside_a_run(1)),  # only the sweep dies: its run goes on alone, and the next sweep waits for it
        ("all", inside_a_run(3)),
        ("between", between_runs(4)),
        ("all", inside_a_run(6)),
        ("between", between_runs(7)),
        ("random", draw),
        ("all", lambda: "measuring speed" in words.read_text()),
        ("all", lambda: "measuring speed: decode" in words.read_text()),
        ("all", lambda: (folder / "results.json").exists()),
        ("all", lambda: any(folder.glob("*.svg")) or any(folder.glob("*.tmp"))),
    ]
    killed = []
    for how, point in points:
        with open(words, "w") as said:
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=ROOT)
        clock = time.monotonic()
        reached = (lambda clock=clock, point=point: time.monotonic() > clock + point) if how == "random" else point
        while process.poll() is None and not reached():
            assert time.monotonic() < clock + 300, f"never came to {how}: {words.read_text()}"
            time.sleep(0.002)
        family = [process.pid] if how == "orphan" else [process.pid, *children(process.pid)]
        assert process.poll() is None, f"{how}: ended before it was killed: {words.read_text()}"
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        killed.append(process.wait())
    assert killed == [-signal.SIGKILL] * 10
    run(line)

    former, now = results_of(undisturbed), results_of(folder)
    assert now["speed"]
    for results in (former, now):
        for key in (*SPEED, "speed_note"):
            results.pop(key, None)
    assert now == former
    assert not list(folder.glob("*.tmp")) and (folder / "report.html").exists()
