"""The training loop: exact resumption, the same work for every design, and a way out of every mistake."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from texts import some_text

import prepare
import train
from data import open_dataset
from data.loader import Windows
from model import GPT, ModelConfig
from runtime import runs
from runtime.checkpoint import read_meta, write_meta
from runtime.errors import EnvironmentFault, UserError
from runtime.settings import build

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("handlers_come_back")
TINY = ["--n_layer", "2", "--n_head", "4", "--n_embd", "32", "--block_size", "16", "--batch_size", "4",
        "--eval_interval", "10", "--eval_tokens", "500", "--save_interval", "15", "--log_interval", "3"]  # fmt: skip


@pytest.fixture
def go(dataset, tmp_path):
    """Train in a folder of the test's: go("a", "--max_steps", "5") trains in a."""

    def train_in(name, *flags, status=0):
        assert train.main(["--dataset", dataset, "--out_dir", str(tmp_path / name), *TINY, *flags]) == status
        return tmp_path / name

    return train_in


def rows(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("elapsed", "tokens_per_s")} for line in lines]


def content(run, checkpoint="last", name="model.safetensors"):
    return (run / checkpoint / name).read_bytes()


def assert_same_run(run, reference):
    assert rows(run) == rows(reference)
    for part in [("last", "model.safetensors"), ("last", "optimizer.safetensors"), ("best", "model.safetensors")]:
        assert content(run, *part) == content(reference, *part)


HEADS = {"mha": [], "gqa": ["--n_kv_head", "2"], "mqa": ["--n_kv_head", "1"]}
HARD = ["--dropout", "0.1", "--attention_dropout", "0.1", "--micro_batch_size", "2"]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_a_resumed_run_is_bitwise_the_run_that_was_never_stopped(go, heads):
    whole = go("whole", "--max_steps", "40", *HARD, *heads)
    half = go("half", "--max_steps", "20", "--decay_steps", "40", *HARD, *heads)
    assert train.main(["--resume", str(half), "--max_steps", "40"]) == 0
    assert_same_run(half, whole)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_goes_on_from_the_weights_in_training_and_their_average(go, optimizer):
    flags = ["--decay_steps", "40", "--ema_decay", "0.9", "--optimizer", optimizer]
    whole = go("whole", "--max_steps", "40", *flags)
    part = go("part", "--max_steps", "15", *flags)  # where no evaluation is due when it is resumed
    assert train.main(["--resume", str(part), "--max_steps", "40"]) == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert content(part, name=name) == content(whole, name=name)


def test_what_is_evaluated_and_saved_is_the_average_of_the_weights(go, capsys):
    plain = go("plain", "--max_steps", "20")
    run = go("run", "--max_steps", "20", "--ema_decay", "0.9")
    assert [row for row in rows(run) if "train_loss" in row] == [row for row in rows(plain) if "train_loss" in row]
    weights, trained = (safetensors.torch.load(content(of)) for of in (run, plain))
    moments = safetensors.torch.load(content(run, name="optimizer.safetensors"))
    assert all(torch.equal(moments[f"{name}/training"], trained[name]) for name in trained)
    assert not any(torch.equal(weights[name], trained[name]) for name in trained)
    assert rows(run)[-1]["val_loss"] != rows(plain)[-1]["val_loss"]
    capsys.readouterr()
    assert train.main(["--eval_only", "--resume", str(run)]) == 0
    assert f"val loss {rows(run)[-1]['val_loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_sigterm_finishes_the_step_saves_and_can_be_resumed_more_than_once(go, dataset, tmp_path, heads):
    whole = go("whole", "--max_steps", "40", *HARD, *heads)
    stopped, copy = tmp_path / "stopped", tmp_path / "copy"
    command = [sys.executable, ROOT / "train.py", "--dataset", dataset, "--out_dir", stopped, *TINY, *HARD, *heads]
    # The signal comes from inside, at a step of our choosing, so that the test does not race with the run.
    at_20 = "import os, runpy, signal, sys; from data.loader import Windows; batch = Windows.batch\n"
    at_20 += "def late(self, step, rows):\n"
    at_20 += "    if step == 19: os.kill(os.getpid(), signal.SIGTERM)\n"
    at_20 += "    return batch(self, step, rows)\n"
    at_20 += "Windows.batch = late; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", at_20, *command[1:], "--max_steps", "40"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # as many threads as here: sums in another order round otherwise
    )  # fmt: skip
    assert done.returncode == 143 and f"--resume {stopped}" in done.stdout, done.stderr
    assert json.loads((stopped / "last" / "meta.json").read_text())["step"] == 20
    shutil.copytree(stopped, copy)
    for run in (stopped, copy):
        assert train.main(["--resume", str(run)]) == 0
        assert_same_run(run, whole)


def test_a_stop_during_the_last_evaluation_comes_when_all_is_done(go, monkeypatch, capsys):
    evaluate = train.evaluate

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr(train, "evaluate", interrupted)
    run = go("run", "--max_steps", "4")
    assert "done; " in capsys.readouterr().out and "val_loss" in rows(run)[-1]


def test_a_stop_during_an_evaluation_loses_no_step(go, tmp_path, monkeypatch):
    whole = go("whole", "--max_steps", "20")
    evaluate = train.evaluate

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", interrupted)
        go("run", "--max_steps", "20", "--save_interval", "99", status=143)
    assert json.loads(content(tmp_path / "run", "last", "meta.json"))["step"] == 10
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", whole)


def test_a_crash_in_the_last_evaluation_loses_no_step(go, tmp_path, monkeypatch):
    def crash(*args):
        raise MemoryError

    monkeypatch.setattr(train, "evaluate", crash)
    with pytest.raises(MemoryError):
        go("run", "--max_steps", "5", "--save_interval", "99")
    assert json.loads(content(tmp_path / "run", "last", "meta.json"))["step"] == 5


def test_a_run_whose_folder_is_now_anothers_saves_nothing_there(go, tmp_path, monkeypatch):
    def replaced(*args):
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "lock").touch()
        return 1e-3

    monkeypatch.setattr(train, "learning_rate", replaced)
    with pytest.raises(EnvironmentFault, match="run was removed and is now another run's"):
        go("run", "--max_steps", "1")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_second_signal_ends_at_once():
    code = (
        "import os, signal; from runtime import runs; stop = runs.StopSignal(); os.kill(os.getpid(), signal.SIGINT)\n"
        "print(stop.number, flush=True); os.kill(os.getpid(), signal.SIGINT); print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and done.stdout.split() == ["2"]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_a_run_and_nohup_does_not(ignored):
    code = (
        f"import os, signal; signal.signal(signal.SIGHUP, signal.SIG_{'IGN' if ignored else 'DFL'})\n"
        "from runtime import runs; stop = runs.StopSignal(); os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('to whom?', flush=True); raise SystemExit(int(stop.number))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == ((0, "to whom?\n") if ignored else (signal.SIGHUP, ""))
    with tempfile.TemporaryFile() as log:  # outlives the terminal, and is told where to go on
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=log)
        log.seek(0)
        assert log.read() == b"to whom?\n"


def test_a_handler_that_a_library_in_c_put_there_is_left(monkeypatch):
    monkeypatch.setattr(runs.signal, "getsignal", lambda number: None)
    with runs.exit_on_signals():
        pass


def test_a_stop_while_data_are_prepared_ends_that_too(monkeypatch):
    """subprocess.run ends what it began where an exception leaves it."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it would have died, and what it began lived on"))
    monkeypatch.setattr(runs, "has_data", lambda name: False)
    monkeypatch.setattr(runs.subprocess, "run", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        runs.open_or_prepare("shakespeare")


def test_sigterm_sent_twice_is_meant_once():
    code = (
        "import os, signal; from runtime import runs; stop = runs.StopSignal()\n"
        "for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\nprint(stop.number)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["15"]


def test_how_often_one_evaluates_logs_or_saves_does_not_change_training(go):
    often = go("often", "--max_steps", "12", "--dropout", "0.1", "--eval_interval", "1", "--log_interval", "1",
               "--save_interval", "1")  # fmt: skip
    never = go("never", "--max_steps", "12", "--dropout", "0.1", "--eval_interval", "99", "--log_interval", "99",
               "--save_interval", "99")  # fmt: skip
    assert content(often) == content(never)


def test_a_run_shorter_than_every_interval_still_saves_and_reports(go):
    run = go("short", "--max_steps", "2", "--eval_interval", "99", "--save_interval", "99")
    assert json.loads((run / "last" / "meta.json").read_text())["step"] == 2
    assert (run / "best" / "model.safetensors").is_file()
    assert rows(run)[-1]["step"] == 2 and "val_loss" in rows(run)[-1]


def test_accumulation_changes_neither_the_loss_nor_the_gradient(go):
    losses = {}
    for micro in ("4", "2", "1"):
        run = go(f"m{micro}", "--max_steps", "12", "--log_interval", "1", "--micro_batch_size", micro)
        losses[micro] = [row["train_loss"] for row in rows(run) if "train_loss" in row]
        assert len(losses[micro]) == 12
    assert losses["2"] == pytest.approx(losses["4"], abs=5e-6)
    assert losses["1"] == pytest.approx(losses["4"], abs=5e-6)


def test_designs_see_the_same_tokens_in_the_same_order(go, monkeypatch):
    seen, batch = [], Windows.batch

    def watched(self, step, rows):
        x, y = batch(self, step, rows)
        seen[-1].append((step, x.tolist(), y.tolist()))
        return x, y

    monkeypatch.setattr(Windows, "batch", watched)
    for name, heads in HEADS.items():
        seen.append([])
        go(name, "--max_steps", "5", *heads)
    assert len(seen[0]) == 5 and seen[0] == seen[1] == seen[2]


def test_the_logged_loss_is_the_models_loss_on_the_steps_batch(go, dataset):
    """ln(vocabulary) at the start, to the model's own figure computed here."""
    run = go("one", "--max_steps", "1")
    config = build((train.ModelConfig,), json.loads(content(run, "last", "meta.json"))["model"])[0]
    x, y = Windows(open_dataset(dataset).train, 16, 4, seed=1).batch(0)
    assert rows(run)[0]["train_loss"] == pytest.approx(GPT(config, seed=1)(x, y).item(), abs=1e-6)


def test_the_last_evaluation_takes_the_whole_split_and_eval_only_repeats_it_and_changes_nothing(go, dataset, capsys):
    run = go("run", "--max_steps", "10")
    final = rows(run)[-1]
    assert final["val_tokens"] == len(open_dataset(dataset).val) - 1
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}
    assert "write text with" in capsys.readouterr().out
    assert train.main(["--eval_only", "--resume", str(run)]) == 0
    assert f"val loss {final['val_loss']:.4f}" in capsys.readouterr().out
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}
    assert train.main(["--eval_only", "--resume", str(run), "--block_size", "8"]) == 0
    assert "in windows of 8" in capsys.readouterr().out


def test_a_worse_evaluation_does_not_replace_the_best(go, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.7])  # at steps 10, 20 and 30, and over the rest of the split
    monkeypatch.setattr(train, "evaluate", lambda *args: train.Score(next(losses) * 100, 100, 100))
    run = go("run", "--max_steps", "30")
    best, last = (json.loads(content(run, which, "meta.json")) for which in ("best", "last"))
    assert (best["step"], best["val_loss"], last["step"]) == (20, 2.0, 30)
    assert content(run, "best") != content(run, "last")


def test_best_is_kept_apart_from_last(go):
    run = go("run", "--max_steps", "30", "--schedule", "trapezoid", "--learning_rate", "0.03", "--seed", "2")
    short = [row for row in rows(run) if row.get("val_tokens", 1e9) < 505]
    best = json.loads(content(run, "best", "meta.json"))
    assert best["val_loss"] == min(row["val_loss"] for row in short)
    assert best["step"] == min(short, key=lambda row: row["val_loss"])["step"]


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(go, tmp_path, monkeypatch, bad):
    forward, calls = GPT.forward, []

    def planted(self, idx, targets=None, *args, **kwargs):
        loss = forward(self, idx, targets, *args, **kwargs)
        if self.training and targets is not None:
            calls.append(1)
            if len(calls) == 18 and bad == "loss":
                loss = loss * float("nan")
            if len(calls) == 18 and bad == "gradient":
                loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    monkeypatch.setattr(GPT, "forward", planted)
    with pytest.raises(EnvironmentFault, match="step 18: .* diverged"):  # and not 20, where the save would see it
        go("run", "--max_steps", "40", "--log_interval", "7", "--save_interval", "4")
    meta = json.loads(content(tmp_path / "run", "last", "meta.json"))
    assert meta["step"] == 16
    weights = safetensors.torch.load(content(tmp_path / "run"))
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_a_learning_rate_far_too_high_ends_with_status_1_and_one_sentence(dataset, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "--dataset", dataset, "--out_dir", tmp_path / "r", *TINY,
         "--learning_rate", "1e12", "--max_steps", "50"], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "diverged" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_with_a_run_is_refused_unless_overwritten(go, tmp_path):
    run = go("run", "--max_steps", "3")
    (run / "mine.txt").write_text("not the run's")
    first = content(run)
    with pytest.raises(UserError, match="holds a run already"):
        go("run", "--max_steps", "3", "--seed", "2")
    assert content(run) == first
    go("run", "--max_steps", "3", "--seed", "2", "--overwrite")
    assert content(run) != first and rows(run)[0]["step"] == 1 and (run / "mine.txt").exists()


def test_without_out_dir_the_next_free_folder_is_named_after_the_design(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train.main(["--dataset", dataset, str(ROOT / "config" / "mqa.toml"), *TINY, "--max_steps", "1"])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mqa-1", "mqa-2"]


def test_a_resumed_run_refuses_by_name_what_would_make_it_another(go):
    run = go("run", "--max_steps", "3")
    for flag, value in [("learning_rate", "1e-3"), ("n_head", "2"), ("seed", "5"), ("batch_size", "8")]:
        with pytest.raises(UserError, match=f"{flag} cannot change with --resume"):
            train.main(["--resume", str(run), f"--{flag}", value])
    with pytest.raises(UserError, match="max_steps 2 is behind"):
        train.main(["--resume", str(run), "--max_steps", "2"])
    with pytest.raises(UserError, match="block_size can shrink but not grow: 32 is more than 16"):
        train.main(["--resume", str(run), "--block_size", "32"])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_resumed_run_may_shrink_its_context(go, positions):
    run = go("run", "--max_steps", "3", "--positions", positions)
    assert train.main(["--resume", str(run), "--block_size", "8", "--max_steps", "5"]) == 0
    meta = json.loads(content(run, "last", "meta.json"))
    assert meta["model"]["block_size"] == 8 and meta["step"] == 5


def test_a_runs_settings_file_repeats_it_even_after_it_was_resumed(go, tmp_path):
    run = go("run", "--max_steps", "4", "--decay_steps", "8")
    assert train.main(["--resume", str(run), "--max_steps", "8"]) == 0
    assert train.main([str(run / "settings.toml"), "--out_dir", str(tmp_path / "again")]) == 0
    assert_same_run(tmp_path / "again", run)


def test_init_from_begins_a_new_run_with_the_weights_of_another(go, dataset, tmp_path):
    old = go("old", "--max_steps", "10")
    new = tmp_path / "new"
    common = ["--dataset", dataset, "--out_dir", str(new), "--init_from", str(old)]
    assert train.main([*common, "--max_steps", "1", "--learning_rate", "1e-9", "--weight_decay", "0"]) == 0
    a, b = (safetensors.torch.load(content(run, which)) for run, which in ((old, "best"), (new, "last")))
    assert all(torch.allclose(a[name], b[name], atol=1e-7) for name in a)
    assert json.loads(content(new, "last", "meta.json"))["step"] == 1
    with pytest.raises(UserError, match="n_layer cannot change with --init_from"):
        train.main([*common[:3], str(tmp_path / "other"), *common[4:], "--n_layer", "3"])


def test_init_from_takes_the_runs_data_set_unless_one_is_named_or_it_is_gone(go, dataset, tmp_path):
    old = go("old", "--max_steps", "1")
    words = ["--init_from", str(old), "--max_steps", "1", "--out_dir"]
    assert train.main([*words, str(tmp_path / "new")]) == 0
    assert f'dataset = "{dataset}"' in (tmp_path / "new" / "settings.toml").read_text()
    meta = read_meta(old / "best")
    meta["dataset"]["name"] = str(tmp_path / "gone")
    write_meta(old / "best", meta)
    with pytest.raises(UserError, match=f"the data set of {old} is not known or not here: give --dataset NAME"):
        train.main([*words, str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()


def test_a_window_that_hides_nothing_is_told(go, capsys):
    for window, told in (("16", True), ("15", False)):
        go(f"window-{window}", "--window", window, "--max_steps", "1")
        assert ("window 16 hides nothing: block_size 16" in capsys.readouterr().out) == told


def test_data_that_do_not_match_the_checkpoint_are_refused(go, dataset, tmp_path):
    run = go("run", "--max_steps", "2")
    changed = Path(shutil.copytree(dataset, tmp_path / "changed"))
    (tmp_path / "other.txt").write_text(some_text(3000, seed=9) + "XYZ")
    prepare.main([str(tmp_path / "other"), "--files", str(tmp_path / "other.txt")])
    with pytest.raises(UserError, match="is not in the tokens of"):
        train.main(["--init_from", str(run), "--dataset", str(tmp_path / "other"), "--out_dir", str(tmp_path / "x")])
    (tmp_path / "again.txt").write_text(some_text(3100))  # the same characters, another text
    prepare.main([str(changed), "--files", str(tmp_path / "again.txt")])
    meta = read_meta(run / "last")
    meta["train"]["dataset"] = str(changed)
    write_meta(run / "last", meta)
    with pytest.raises(UserError, match="has changed since"):
        train.main(["--resume", str(run), "--max_steps", "4"])


def test_token_files_that_changed_are_refused(go, dataset, tmp_path):
    changed = Path(shutil.copytree(dataset, tmp_path / "changed"))
    content = bytearray((changed / "train.bin").read_bytes())
    content[-1] ^= 1
    (changed / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match="not the ones prepared"):
        train.main(["--dataset", str(changed), "--out_dir", str(tmp_path / "run"), *TINY])


def test_a_text_prepared_like_another_goes_on_from_its_run(go, dataset, tmp_path):
    run = go("run", "--max_steps", "2")
    (tmp_path / "few.txt").write_text(some_text(1000).replace("h", "a"))  # other characters than the first
    prepare.main([str(tmp_path / "few"), "--files", str(tmp_path / "few.txt"), "--like", dataset])
    flags = ["--init_from", str(run), "--dataset", str(tmp_path / "few"), "--out_dir", str(tmp_path / "new")]
    assert train.main([*flags, "--max_steps", "2"]) == 0
    assert train.main([str(tmp_path / "new" / "settings.toml"), "--out_dir", str(tmp_path / "again")]) == 0
    assert_same_run(tmp_path / "again", tmp_path / "new")


def test_an_optimiser_state_that_does_not_fit_is_refused(go):
    """Its checksum is right: only the shape tells, and no kernel checks it."""
    run = go("run", "--max_steps", "2")
    path = run / "last" / "optimizer.safetensors"
    tensors = safetensors.torch.load(path.read_bytes())
    tensors["embed.weight/exp_avg"] = torch.zeros(1)
    path.write_bytes(safetensors.torch.save(tensors))
    meta = read_meta(run / "last")
    meta["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_meta(run / "last", meta)
    with pytest.raises(UserError, match="optimiser's state of embed.weight does not fit"):
        train.main(["--resume", str(run), "--max_steps", "4"])


def test_best_is_chosen_anew_when_the_context_shrinks(go):
    run = go("run", "--max_steps", "30")
    assert train.main(["--resume", str(run), "--block_size", "2", "--max_steps", "40"]) == 0
    assert json.loads(content(run, "best", "meta.json"))["model"]["block_size"] == 2


def test_ids_beyond_the_vocabulary_are_refused_and_a_padded_one_is_not(go):
    with pytest.raises(UserError, match="has ids up to 9 and vocab_size is 5"):
        go("small", "--vocab_size", "5", "--max_steps", "1")
    go("padded", "--vocab_size", "16", "--max_steps", "1")


def test_a_split_no_longer_than_the_context_is_refused_with_both_numbers(go):
    with pytest.raises(ValueError, match=r"val.bin has [\d,]+ tokens and block_size 5,000 needs at least 5,001"):
        go("long", "--block_size", "5000", "--max_steps", "1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--micro_batch_size", "3"], "batch_size 4 is not divisible by micro_batch_size 3"),
        (["--batch_size", "none", "--batch_tokens", "40"], "batch_tokens 40 is not a multiple of block_size 16"),
        (["--batch_tokens", "32"], "batch_tokens 32 is not batch_size 4 x 16"),
        (["--n_head", "4", "--n_kv_head", "3"], "n_head 4 is not divisible by n_kv_head 3"),
        (["--max_steps", "0"], "max_steps must be at least 1 and below 2.31, not 0"),
        (["--device", "tpu"], 'device "tpu" is not known'),
        (["--eval_only"], "eval_only needs --resume"),
        (["--resume", ""], "resume is empty"),
        (["--d_ff", "9223372036854775807"], "d_ff must be at least 1 and below 2.31"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(go, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        go("run", *flags)
    assert not (tmp_path / "run").exists()


def test_a_batch_may_be_given_in_tokens(go):
    run = go("run", "--batch_size", "none", "--batch_tokens", "48", "--max_steps", "1")
    assert rows(run)[0]["tokens"] == 48


def test_bfloat16_is_refused_where_the_hardware_lacks_it(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.raises(UserError, match="bfloat16 is not supported by this cpu; use --dtype float32"):
        train.pick_dtype("bfloat16", torch.device("cpu"))
    assert train.pick_dtype("auto", torch.device("cpu")) == torch.float32


def test_bfloat16_trains_where_the_hardware_has_it(go):
    try:
        train.pick_dtype("bfloat16", torch.device("cpu"))
    except UserError:
        pytest.skip("this processor has no bfloat16")
    losses = [
        rows(go(dtype, "--dtype", dtype, "--max_steps", "1"))[0]["train_loss"] for dtype in ("bfloat16", "float32")
    ]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], abs=0.05)


def test_the_gradient_is_clipped(go):
    """Clipped to almost nothing it falls below AdamW's epsilon, and the weights hardly move."""
    free, clipped = (
        safetensors.torch.load(content(go(clip, "--grad_clip", clip, "--weight_decay", "0", "--max_steps", "3")))
        for clip in ("0", "1e-12")
    )
    start = GPT(train.ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=10), seed=1).head.weight
    assert (free["head.weight"] - start).abs().mean() > 1e-3 > 1e-5 > (clipped["head.weight"] - start).abs().mean()


def test_spare_time_is_not_counted_as_training(go, monkeypatch):
    """A slow evaluation makes neither elapsed longer nor tokens_per_s lower."""
    evaluate = train.evaluate

    def slow(*args):
        time.sleep(0.5)
        return evaluate(*args)

    monkeypatch.setattr(train, "evaluate", slow)
    run = go("run", "--max_steps", "12", "--eval_interval", "2", "--save_interval", "99")
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "elapsed" in line][-1]
    assert last["elapsed"] < 2.0


def test_init_seed_is_of_the_initial_values_alone(go, dataset):
    flags = ["--max_steps", "1", "--learning_rate", "1e-12", "--log_interval", "1"]
    run = go("a", "--init_seed", "7", "--seed", "2", *flags)
    config = ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=open_dataset(dataset).vocab_size)
    model = GPT(config, seed=7)
    for name, value in safetensors.torch.load_file(run / "last" / "model.safetensors").items():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), atol=1e-9, rtol=0)
    x, y = Windows(open_dataset(dataset).train, 16, 4, seed=2).batch(0, slice(0, 4))
    assert rows(run)[0]["train_loss"] == pytest.approx(model(x, y).item(), abs=1e-6)


def test_threads_are_set_and_saved_with_the_run(go):
    before = torch.get_num_threads()
    try:
        run = go("a", "--threads", "1", "--max_steps", "1")
        assert torch.get_num_threads() == 1 and "threads = 1" in (run / "settings.toml").read_text()
        with pytest.raises(UserError, match="threads cannot change with --resume"):
            train.main(["--resume", str(run), "--max_steps", "2", "--threads", "2"])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("flags", "step"), [([], 10), (["--eval_tokens", "300"], 20)])
def test_the_best_loss_so_far_holds_only_for_the_same_evaluation_tokens(go, flags, step):
    run = go("a", "--max_steps", "10")
    write_meta(run / "last", read_meta(run / "last") | {"best_loss": 0.5})  # lower than any to come
    train.main(["--resume", str(run), "--max_steps", "20", *flags])
    assert json.loads((run / "best" / "meta.json").read_text())["step"] == step


def test_without_a_gpu_the_defaults_run_and_say_what_was_picked(dataset, tmp_path, monkeypatch, capsys):
    """No flag of the device, the number format, compilation or accumulation."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    flags = ["--n_layer", "1", "--n_embd", "32", "--block_size", "16", "--max_steps", "1"]
    assert train.main(["--dataset", dataset, "--out_dir", str(tmp_path / "a"), *flags]) == 0
    told = " ".join(capsys.readouterr().out.split())
    threads = torch.get_num_threads()
    assert f"cpu, {threads} thread{'s' * (threads > 1)}, float32;" in told and "compiled" not in told
    assert "training tokens, 128 a step" in told  # 8 sequences of 16 at a time: no accumulation
    saved = json.loads((tmp_path / "a" / "last" / "meta.json").read_text())["train"]
    assert saved["batch_size"] == 8 and saved["micro_batch_size"] is None
