"""Regrouped runs, and what training them on gives back."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

import convert
import train
import uptrain
from runtime.checkpoint import load_model
from runtime.runs import hold

pytestmark = pytest.mark.usefixtures("handlers_come_back")


@pytest.fixture(scope="module")
def parent(tmp_path_factory, dataset):
    """A small trained run with four K/V heads."""
    folder = tmp_path_factory.mktemp("parent") / "mha"
    train.main(["--dataset", dataset, "--block_size", "32", "--n_layer", "1", "--n_head", "4", "--n_embd", "32",
                "--max_steps", "40", "--eval_interval", "40", "--eval_tokens", "600", "--threads", "1",
                "--out_dir", str(folder)])  # fmt: skip
    return folder


def test_regroup_writes_a_run_with_fewer_heads_and_keeps_the_rest(parent, tmp_path, command):
    status, out, _ = command(convert, "regroup", parent, tmp_path / "new", "--n_kv_head", 2, "--how", "mean")
    assert status == 0 and f"--init_from {tmp_path / 'new'}" in out
    old, tokenizer, _ = load_model(parent)
    new, same, meta = load_model(tmp_path / "new")
    assert (new.config.n_kv_head, meta["step"]) == (2, 0) and same.to_meta() == tokenizer.to_meta()
    keys = old.blocks[0].attn.w_k.weight.unflatten(0, (2, 2, 8))
    torch.testing.assert_close(new.blocks[0].attn.w_k.weight, keys.mean(dim=1).flatten(0, 1))
    changed = {name for name, p in new.named_parameters() if not torch.equal(p, dict(old.named_parameters())[name])}
    assert changed == {"blocks.0.attn.w_k.weight", "blocks.0.attn.w_v.weight"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--n_kv_head", "3"], "n_kv_head 3 does not divide the 4 K/V heads"),
        (["--n_kv_head", "4"], "n_kv_head 4 does not divide the 4 K/V heads"),
        (["--n_kv_head", "2", "--how", "best"], "how"),
        ([], "N_KV_HEAD is missing"),
    ],
)
def test_what_cannot_be_regrouped_is_refused(parent, tmp_path, command, words, told):
    status, _, err = command(convert, "regroup", parent, tmp_path / "new", *words)
    assert status == 2 and told in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_the_curve_begins_at_the_regrouped_model_and_goes_on(parent, tmp_path, command):
    words = [parent, "--n_kv_head", 1, "--how", "mean", "random", "--shares", "0.025", "0.1", "0.5", "0.51",
             "--eval_tokens", "600", "--out_dir", tmp_path / "up"]  # fmt: skip
    status, out, err = command(uptrain, *words)
    assert status == 0, err
    shares, first, second, *_, last = err.splitlines()
    assert shares == "some of the shares are the same number of steps: the loss is told after 1, 4, 20"
    assert first == "parent: training for 20 steps (4 to go)"
    assert re.fullmatch(r"kv1-mean: training for 20 steps \(3 to go, \d+:\d\d left\)", second)
    assert re.fullmatch(r"kv1-scratch: training for 40 steps \(1 to go, \d+:\d\d left\)", last)
    assert "| 1 step (2%) |" in out and "1 K/V head, mean" in out and "one training with one seed" in out
    told = json.loads((tmp_path / "up" / "uptrain.json").read_text())
    curves = {curve["name"]: curve["points"] for curve in told["curves"]}
    assert list(curves) == ["parent", "kv1-mean", "kv1-random", "kv1-scratch"]
    assert [point["steps"] for point in curves["kv1-mean"]] == [0, 1, 4, 20]
    assert [point["steps"] for point in curves["kv1-scratch"]] == [40]
    rows = [json.loads(line) for line in (parent / "metrics.jsonl").read_text().splitlines()]
    evaluated = next(row["val_loss"] for row in rows if row.get("val_loss"))  # of the same 600 tokens
    assert curves["parent"][0]["loss"] == pytest.approx(evaluated, abs=1e-6)
    assert len({curve[0]["loss"] for name, curve in curves.items() if name != "kv1-scratch"}) == 3
    for name in ("parent", "kv1-mean", "kv1-random"):
        assert curves[name][-1]["loss"] < curves[name][0]["loss"]
    assert f"{curves['kv1-mean'][1]['loss']:.4f}" in out
    svg = (tmp_path / "up" / "uptrain.svg").read_text()
    axis = re.search(r"nats a token' for a linear scale with values from ([\d.]+) to ([\d.]+)", svg)
    low, high = map(float, axis.groups())
    found = [point["loss"] for curve in curves.values() for point in curve]
    assert min(found) - 0.5 < low <= min(found) and max(found) <= high < max(found) + 0.5
    assert ">from scratch<" in svg and ">1 K/V head<" in svg
    again = command(uptrain, *words)
    assert again[0] == 0 and "training" not in again[2] and again[1] == out


def test_a_folder_of_other_weights_or_settings_is_refused_and_so_is_a_parent_without_heads_to_join(
    parent, tmp_path, command, dataset
):
    words = [parent, "--n_kv_head", 2, "--how", "mean", "--no-scratch", "--out_dir", tmp_path / "up"]
    given = {"--shares": ["0.05"], "--eval_tokens": ["600"], "--learning_rate": ["0.001"]}
    changes = {"--shares": ["0.05", "0.1"], "--eval_tokens": ["300"], "--learning_rate": ["0.5"]}

    def flags(settings):
        return [word for name, values in settings.items() for word in (name, *values)]

    assert command(uptrain, *words, *flags(given))[0] == 0
    for name, values in changes.items():
        status, _, err = command(uptrain, *words, *flags(given | {name: values}))
        assert status == 2 and "of other weights, shares or settings" in err, err
    status, _, err = command(uptrain, parent, "--n_kv_head", 3, "--out_dir", tmp_path / "none")
    assert status == 2 and "3 does not divide" in err and not (tmp_path / "none").exists()


def test_token_files_that_changed_are_refused(parent, dataset, tmp_path, command):
    file = Path(dataset, "val.bin")
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        status, _, err = command(uptrain, parent, "--out_dir", tmp_path / "up")
    finally:
        file.write_bytes(whole)
    assert status == 2 and "not the ones prepared" in err and err.count("\n") == 1
    assert not (tmp_path / "up").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_reaches_the_training_which_has_the_time_to_save(tmp_path, monkeypatch, number):
    script = tmp_path / "slow.py"
    script.write_text(
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.5)\n    print('saved', flush=True)\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('begun', flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(uptrain, "TRAIN", script)
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "run.txt"

    def interrupt(*_):
        if "begun" not in output.read_text():  # not yet: look again
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, lambda *_: pytest.fail("it would have died, and the training gone on"))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            uptrain.train(tmp_path / "out" / "run", tmp_path / "more.toml")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert output.read_text() == "begun\nsaved\n"


def test_a_second_curve_in_a_folder_is_refused(parent, tmp_path, command):
    (tmp_path / "up").mkdir()
    with hold(tmp_path / "up"):
        status, _, err = command(uptrain, parent, "--out_dir", tmp_path / "up")
    assert status == 2 and "another process is training in" in err and err.count("\n") == 1
