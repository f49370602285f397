"""What the documents promise is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_known_faults_name_exists():
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / "docs" / "known-faults.md").read_text(encoding="utf-8"))
    there = {
        (path.relative_to(ROOT).as_posix(), node.name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(named) > 60 and not set(named) - there


def test_the_readme_says_what_only_words_can_answer():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for said in ("attention reaches back across the boundary", "train.py --resume runs/mha-1 # Ctrl-C saved it; go on",
                 "--init_from runs/mha-1 --dataset book2", "makes GGUF of the layouts", "known-faults"):  # fmt: skip
        assert said in text


def test_every_requirement_is_pinned():
    files = [ROOT / name for name in ("requirements.txt", "requirements-dev.txt")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and line[0] != "#" and line != "-r requirements.txt"]
    assert len(lines) > 15 and all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)
