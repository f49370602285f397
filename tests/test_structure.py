"""Imports run downward only: commands -> lab -> runtime -> model -> attention, and data on the ground."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = {"attention": 0, "data": 0, "model": 1, "runtime": 2, "lab": 3}
COMMANDS = {path.stem for path in ROOT.glob("*.py")} - {"model"}


def rooms_imported(path):
    """First names of what a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module.split(".")[0]


def test_imports_run_downward():
    sources = [*ROOT.glob("*.py"), *(path for room in LEVELS for path in (ROOT / room).glob("*.py"))]
    assert len(sources) > 10
    for path in sources:
        room = path.stem if path.parent == ROOT else path.parent.name
        level = LEVELS.get(room, 9)  # 9: a command
        for name in set(rooms_imported(path)) - {room}:
            assert name not in COMMANDS, f"{path.name} imports the command {name}"
            if name in LEVELS:
                assert LEVELS[name] < level, f"{path.name} imports {name}, which is not below it"


def test_what_people_come_to_read_stays_under_900_lines():
    parts = ["attention/kernel.py", "attention/grouped.py", "attention/cache.py", "attention/rotary.py", "model.py"]
    assert sum(len((ROOT / part).read_text(encoding="utf-8").splitlines()) for part in [*parts, "train.py"]) < 900


BUILT_IN = {"eval", "exec", "__import__"}
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "runpy",
           "importlib"}  # fmt: skip
CALLS = {"pd.read_pickle", "np.fromfile", "os.system", "os.popen"}
LOADS = {"json.load", "json.loads", "tomllib.load", "tomllib.loads", "safetensors.torch.load"}  # and no other `load`
OPTIONS = {"allow_pickle", "trust_remote_code", "weights_only", "shell"}


def is_danger(name):
    return name in CALLS or name.rpartition(".")[2] in ("load", "loads") and name not in LOADS


def dangers(source):
    """What in a source could run what it reads: names, modules, calls and options that are not to occur."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in BUILT_IN:
            yield node.id
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "compile":  # a setting has that name too
            yield "compile"
        elif isinstance(node, ast.Attribute) and is_danger(ast.unparse(node)):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg in OPTIONS:
            yield node.arg
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from ([node.module] if node.module.split(".")[0] in MODULES else filter(is_danger, names))


def test_nothing_reads_pickles_or_runs_text():
    rooms = [*LEVELS, "benchmarks", "tests"]
    others = {"peers.py", "beside_nanogpt.py"}  # they run another program, and open what it has just written
    for path in [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).glob("*.py"))]:
        if path.name in others:
            continue
        found = set(dangers(path.read_text(encoding="utf-8"))) - {"importlib.metadata"}  # it tells versions
        assert not found, f"{path.name}: {found}"


@pytest.mark.parametrize(
    "line",
    ["eval(x)", "import pickle", "import os, dill.source", "from joblib import load",
     "torch.load(x, weights_only=True)", "from torch import load",
     "torch.serialization.load(x)", "torch.jit.load(x)", "np.load(x)", "f(allow_pickle=True)", "import yaml",
     "f(trust_remote_code=True)",
     "exec(x)", "compile(x, '', 'exec')", "__import__('os')", "from importlib import import_module"],
)  # fmt: skip
def test_the_test_for_pickles_sees_them(line):
    assert list(dangers(line))
