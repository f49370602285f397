"""A save is whole or absent, and a damaged one is refused by name (runtime/checkpoint.py)."""

import errno
import json
import os
import shutil
import sys

import pytest
import torch

from model import GPT, ModelConfig
from runtime import checkpoint
from runtime.checkpoint import find_checkpoint, load_weights, read_meta, read_tensors, save_checkpoint
from runtime.errors import EnvironmentFault, UserError

META = {"step": 1, "best_loss": None, "model": {"vocab_size": 5}, "train": {}, "tokenizer": {"kind": "byte"}}
META |= {"dataset": {"name": "x", "fingerprint": "y"}}


def save(folder, value):
    save_checkpoint(folder, META | {"step": value}, {"w": torch.full((3,), float(value))}, {"s": torch.zeros(1)})


def value_of(folder):
    meta = read_meta(folder)
    weights = read_tensors(folder, "model.safetensors", meta)
    assert weights["w"].tolist() == [meta["step"]] * 3
    return meta["step"]


def test_who_has_lost_the_last_checkpoint_is_not_told_to_remove_the_best(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "meta.json").touch()
    (tmp_path / "settings.toml").touch()
    with pytest.raises(UserError, match="no last/meta.json but its best checkpoint: begin with it, --init_from"):
        find_checkpoint(tmp_path)


def test_a_save_is_read_back_and_leaves_nothing_beside_it(tmp_path):
    save(tmp_path / "last", 1)
    save(tmp_path / "last", 2)
    assert value_of(tmp_path / "last") == 2
    assert os.listdir(tmp_path) == ["last"]


def test_the_same_state_is_the_same_bytes(tmp_path):
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 1)
    for name in ("model.safetensors", "optimizer.safetensors", "meta.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


CALLS = ["os.fsync"] * 4 + ["os.rename"] * 2 + ["os.fsync"]


@pytest.mark.parametrize("stop_at", range(len(CALLS)))
def test_a_stop_at_any_moment_leaves_a_whole_checkpoint(tmp_path, monkeypatch, stop_at):
    """Files and their folder are synced before the first rename; a stop before any of these calls harms nothing."""
    save(tmp_path / "last", 1)
    seen = []

    class Stop(BaseException):
        pass

    def watch(name, real):
        def call(*arguments):
            if len(seen) == stop_at:
                raise Stop
            seen.append(name)
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", watch("os.fsync", os.fsync))
        patch.setattr(checkpoint.os, "rename", watch("os.rename", os.rename))
        with pytest.raises(Stop):
            save(tmp_path / "last", 2)
    assert seen == CALLS[:stop_at]
    # Read, and nothing moved, by others; the last sync is of the renames.
    assert value_of(find_checkpoint(tmp_path, "last")) == (1 if stop_at < 6 else 2)
    save(tmp_path / "last", 3)
    assert value_of(find_checkpoint(tmp_path, "last")) == 3


@pytest.mark.parametrize("begun", ["nothing", "last", "last.old", "last and last.old"])
def test_a_kill_before_any_call_of_the_system_leaves_a_whole_checkpoint(tmp_path, begun):
    """What a kill would leave, at every file that is opened, made, renamed or removed, is read, and saved over."""
    left = []

    def watch(event, arguments):
        if watching and event in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}:
            watching.clear()  # the copying is not what is watched
            left.append(shutil.copytree(tmp_path / "run", tmp_path / "left" / str(len(left))))
            watching.append(event)

    (tmp_path / "run").mkdir()
    for name in begun.split(" and ") if begun != "nothing" else []:
        save(tmp_path / "run" / name, 1)
    (tmp_path / "run" / "last.tmp").mkdir()  # of an earlier kill
    (tmp_path / "run" / "last.tmp" / "meta.json").write_text("{")
    watching = ["begun"]
    sys.addaudithook(watch)
    save(tmp_path / "run" / "last", 2)
    watching.clear()  # a hook stays for ever, so it is made to do nothing
    assert len(left) >= 10
    for run in left:
        if begun == "nothing" and not (run / "last").exists():
            with pytest.raises(UserError, match="holds no checkpoint"):
                find_checkpoint(run)
        else:
            assert value_of(find_checkpoint(run)) in (1, 2)
        save(run / "last", 3)
        assert value_of(find_checkpoint(run)) == 3 and os.listdir(run) == ["last"]


def test_a_full_disk_keeps_the_former_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "last", 1)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")  # the system names no file

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", full)
        with pytest.raises(OSError) as error:
            save(tmp_path / "last", 2)
    assert error.value.filename == str(tmp_path / "last.tmp" / "model.safetensors")
    assert os.listdir(tmp_path) == ["last"]
    assert value_of(tmp_path / "last") == 1


def test_the_finished_save_goes_before_the_one_it_replaces(tmp_path):
    save(tmp_path / "last.old", 1)
    assert value_of(find_checkpoint(tmp_path)) == 1
    save(tmp_path / "last", 2)
    save(tmp_path / "last.old", 1)
    assert value_of(find_checkpoint(tmp_path)) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "foreign", "gone"])
def test_damage_is_refused_by_the_files_name(tmp_path, name, damage):
    save(tmp_path / "last", 1)
    path = tmp_path / "last" / name
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes({"flip": content, "cut": content[:-1], "foreign": b"PK\x03\x04"}[damage])
    with pytest.raises(UserError, match=name):
        read_tensors(tmp_path / "last", name, read_meta(tmp_path / "last"))


@pytest.mark.parametrize("key", ["step", "best_loss", "model", "dataset", "sha256", "tokenizer"])
@pytest.mark.parametrize("value", ["gone", -1, "x", [], {}])
def test_a_meta_of_other_types_is_refused_by_name(tmp_path, key, value):
    save(tmp_path / "last", 1)
    path = tmp_path / "last" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["sha256"]["meta.json"]  # as of one that was saved before there was this checksum
    meta[key] = value
    if value == "gone":
        del meta[key]
    path.write_text(json.dumps(meta))
    with pytest.raises(UserError):
        value_of(tmp_path / "last")
        assert (key, value) in [("tokenizer", {})], "read without a word"
        raise UserError


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', "\xff", '{"format": 1, "step": "x"}'])
def test_a_damaged_meta_is_refused_by_name(tmp_path, text):
    (tmp_path / "meta.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=str(tmp_path)):
        read_meta(tmp_path)


def test_best_falls_back_to_last_and_nothing_is_said_to_be_there_by_mistake(tmp_path):
    with pytest.raises(UserError, match="no run in"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="it is not the folder of a run"):
        find_checkpoint(tmp_path, "best")
    (tmp_path / "settings.toml").touch()
    with pytest.raises(UserError, match="stopped before its first save"):
        find_checkpoint(tmp_path, "best")
    save(tmp_path / "last", 1)
    assert find_checkpoint(tmp_path, "best") == tmp_path / "last"
    with pytest.raises(UserError, match="last is a checkpoint: give the folder of its run"):
        find_checkpoint(tmp_path / "last")
    save(tmp_path / "best", 1)
    assert find_checkpoint(tmp_path, "best") == tmp_path / "best"


def test_weights_of_another_shape_are_refused_with_both_shapes(tmp_path):
    small, large = (GPT(ModelConfig(n_layer=1, n_embd=width, n_head=2, vocab_size=5)) for width in (8, 16))
    with pytest.raises(UserError, match=r"embed.weight \(5, 8\) is not \(5, 16\)"):
        load_weights(large, dict(small.named_parameters()), tmp_path)
    deeper = GPT(ModelConfig(n_layer=2, n_embd=8, n_head=2, vocab_size=5))
    with pytest.raises(UserError, match="blocks.1"):
        load_weights(deeper, dict(small.named_parameters()), tmp_path)


@pytest.mark.parametrize("part", [0, 1])
def test_values_that_are_not_finite_are_not_saved(tmp_path, part):
    save(tmp_path / "last", 1)
    tensors = [{"w": torch.zeros(3)}, {"s": torch.zeros(1)}]
    tensors[part] |= {"bad": torch.tensor([0.0, float("nan")])}
    with pytest.raises(EnvironmentFault, match=f"step 1: bad is not finite: .* good checkpoint in {tmp_path}; lower"):
        save_checkpoint(tmp_path / "last", META, *tensors)
    assert os.listdir(tmp_path) == ["last"] and value_of(tmp_path / "last") == 1


def test_a_meta_without_a_checksum_of_its_own_is_still_read(tmp_path):
    save(tmp_path / "last", 1)
    meta = read_meta(tmp_path / "last")
    del meta["sha256"]["meta.json"]
    (tmp_path / "last" / "meta.json").write_text(json.dumps(meta))
    assert value_of(tmp_path / "last") == 1
    (tmp_path / "last" / "meta.json").write_text(json.dumps(meta | {"sha256": meta["sha256"] | {"meta.jsoo": "0"}}))
    with pytest.raises(UserError, match="meta.json is damaged"):
        read_meta(tmp_path / "last")


def test_meta_is_plain_json(tmp_path):
    save(tmp_path / "last", 1)
    assert json.loads((tmp_path / "last" / "meta.json").read_text())["step"] == 1
