"""Imports run downward only: commands -> lab -> runtime -> model -> attention, and data on the ground."""

import ast
from pathlib import Path

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


def test_nothing_reads_pickles_or_runs_text():
    for path in [*ROOT.glob("*.py"), *(path for room in LEVELS for path in (ROOT / room).glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Name, ast.Attribute)):
                name = node.id if isinstance(node, ast.Name) else f"{getattr(node.value, 'id', '')}.{node.attr}"
                assert name not in {"eval", "exec", "pickle", "torch.load", "pickle.load"}, f"{path.name}: {name}"
