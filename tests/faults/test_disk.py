"""A disk that is full or read-only costs no checkpoint: one sentence names the path, and the run goes on from there."""

import contextlib
import os
import subprocess

import pytest
from processes import TINY, rows, step_of

import train
from runtime.checkpoint import read_meta, read_tensors

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("handlers_come_back")]
LATE = """
import os, subprocess
from data.loader import Windows
batch = Windows.batch
def late(self, step, rows):
    if step == 12:
        {then}
    return batch(self, step, rows)
Windows.batch = late
"""
FILL = LATE.format(then="""
        with open("ballast", "wb", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while file.write(bytes(size)): pass
                except OSError: pass""")
# Open files forbid that a disk becomes read-only; a mount over the folder makes it so for all that is opened later.
SEAL = LATE.format(then="""
        for words in (["--bind", "run", "run"], ["-o", "remount,ro,bind", "run"]):
            subprocess.run(["mount", *words], check=True)""")
LIMIT = LATE.format(then="""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))""")
OFTEN, SELDOM = ["--save_interval", "1"], ["--save_interval", "999", "--eval_interval", "999"]


@pytest.fixture
def disk(tmp_path):
    """A disk of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root can mount a disk here")
    yield folder
    for place in (folder / "run", folder):
        subprocess.run(["umount", "-l", place], capture_output=True)


def words(dataset, steps, *more):
    return ["--dataset", dataset, "--out_dir", "run", "--max_steps", steps, "--decay_steps", 100, *TINY, *more]


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with contextlib.chdir(folder):
        assert train.main([*map(str, words(dataset, 100, *SELDOM))]) == 0
    return folder / "run"


@pytest.mark.parametrize(
    ("then", "flags", "named", "told"),
    [
        (FILL, OFTEN, "run/last.tmp/", "the disk is full; free some space"),
        (FILL, SELDOM, "run/metrics.jsonl", "the disk is full; free some space"),
        (SEAL, OFTEN, "run/last.tmp", "the disk is read-only; choose another folder"),
        (LIMIT, OFTEN, "run/last.tmp/", "raise the limit (ulimit -f)"),
    ],
    ids=["full at a save", "full at a line of the log", "read-only at a save", "file too long at a save"],
)
def test_a_disk_that_takes_no_more(server, dataset, undisturbed, tmp_path, request, then, flags, named, told):
    folder = tmp_path if then == LIMIT else request.getfixturevalue("disk")
    assert server.run(folder, *words(dataset, 10)).status == 0
    ended = server.run(folder, "--resume", "run", "--max_steps", 100, *flags, before=then)
    last = ended.text.splitlines()[-1]
    assert ended.status == 1 and last.startswith(f"train.py: {named}") and told in last, ended.text
    assert "Traceback" not in ended.text and "Exception" not in ended.text
    meta = read_meta(folder / "run" / "last")
    assert meta["step"] == (10 if flags == SELDOM else 12)
    for name in ("model.safetensors", "optimizer.safetensors"):
        read_tensors(folder / "run" / "last", name, meta)
    assert not {"last.tmp", "last.old"} & set(os.listdir(folder / "run"))
    if then == SEAL:  # while it stays so, there is no beginning either
        ended = server.run(folder, "--resume", "run", "--max_steps", 100)
        assert (ended.status, ended.text.count("\n")) == (1, 1)
        assert ended.text.startswith("train.py: run/lock: the disk is read-only")
        subprocess.run(["umount", "-l", folder / "run"], check=True)
    (folder / "ballast").unlink(missing_ok=True)
    assert server.run(folder, "--resume", "run", "--max_steps", 100, *SELDOM).status == 0
    assert step_of(folder / "run") == 100
    name = "last/model.safetensors"
    assert (folder / "run" / name).read_bytes() == (undisturbed / name).read_bytes()
    losses = [[row for row in rows(run) if "train_loss" in row] for run in (folder / "run", undisturbed)]
    assert losses[0] == losses[1] and len(losses[0]) == 100
