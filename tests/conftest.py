import signal
import sys

import pytest
import torch
from browser import browser  # noqa: F401, a fixture
from hypothesis import settings
from texts import some_text

import prepare
from runtime import errors

# The same examples every time, few of each, and no limit on the time of one: a machine may be busy.
settings.register_profile("tests", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("tests")

torch.set_num_threads(1)  # the tensors here are tiny: a second thread costs more than it gives


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """The path of a small prepared data set."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(some_text(3000))
    prepare.main([str(folder / "set"), "--files", str(folder / "text.txt")])
    return str(folder / "set")


@pytest.fixture
def handlers_come_back():
    """A command that catches Ctrl-C and SIGTERM leaves no trace in the tests after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command with these words; exit status, standard output and standard error."""

    def call(module, *words):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            errors.run(module.main)
        return stop.value.code or 0, *capsys.readouterr()

    return call
