"""Designs on a command line: which file wins, what holds for all, and what is refused before anything is begun."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.designs import Design, DesignFiles, read_designs
from runtime.errors import UserError


@dataclass(frozen=True)
class OwnConfig(DesignFiles):
    seeds: int = 3
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShapeConfig:
    n_head: int = 8
    n_embd: int = 128
    bias: bool = False

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")


@dataclass(frozen=True)
class RunConfig:
    max_steps: int = 100


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()


def read(*words, common=(ShapeConfig, RunConfig), **kwargs):
    return read_designs(words, OwnConfig, prog="compare.py", description="Compare.", common=common, **kwargs)


def refusal(*words, **kwargs):
    with pytest.raises(UserError) as error:
        read(*words, **kwargs)
    return str(error.value)


def test_every_file_is_a_design_in_the_order_given():
    Path("b.toml").write_text("n_head = 4")
    Path("a.toml").write_text("n_embd = 64")
    designs, _, _ = read("b.toml", "a.toml")
    assert list(designs.items()) == [
        ("b", Design("b", "b.toml", {"n_head": 4})),
        ("a", Design("a", "a.toml", {"n_embd": 64})),
    ]


def test_without_a_file_the_default_design():
    assert read()[0] == {"default": Design("default", None, {})}
    assert read("--n_head", "2")[0]["default"].settings == {"n_head": 2}


def test_base_files_lie_under_every_design_and_flags_over_it():
    Path("base.toml").write_text("n_head = 1\nn_embd = 64\nmax_steps = 5")
    Path("more.toml").write_text("n_embd = 32")
    Path("a.toml").write_text("n_head = 4\nbias = true")
    Path("b.toml").write_text("bias = true")
    words = ["a.toml", "b.toml", "--base", "base.toml", "more.toml", "--no-bias", "--seeds", "5"]
    designs, (own,), given = read(*words)
    assert designs["a"].settings == {"n_head": 4, "n_embd": 32, "max_steps": 5, "bias": False}
    assert designs["b"].settings == {"n_head": 1, "n_embd": 32, "max_steps": 5, "bias": False}
    assert own == OwnConfig(("a.toml", "b.toml"), ("base.toml", "more.toml"), 5)
    assert given == {"designs": own.designs, "base": own.base, "bias": False, "seeds": 5}


def test_a_file_that_is_a_flags_value_is_no_design():
    Path("a.toml").write_text("n_head = 4")
    designs, (own,), _ = read("a.toml", "--names", "b.toml", "c.toml")
    assert list(designs) == ["a"] and own.names == ("b.toml", "c.toml")


def test_a_flag_alone_is_not_judged_without_the_files_it_goes_with():
    Path("a.toml").write_text("n_embd = 96")
    assert read("a.toml", "--n_head", "3")[0]["a"].settings == {"n_embd": 96, "n_head": 3}


def test_two_files_of_one_name_are_refused():
    for file in ("a.toml", "other/a.toml"):
        Path(file).write_text("n_head = 4")
    told = "are both called a; give one of them another name"
    assert refusal("a.toml", "other/a.toml") == f"a.toml and other/a.toml {told}"
    assert refusal("a.toml", "a.toml") == "a.toml is given twice: each file is one design"


def test_a_design_that_cannot_be_built_is_refused_with_its_file():
    Path("a.toml").write_text("n_head = 4")
    Path("b.toml").write_text("n_head = 3")
    assert refusal("a.toml", "b.toml") == "b.toml: n_embd 128 is not divisible by n_head 3"
    assert refusal("--n_head", "3") == "n_embd 128 is not divisible by n_head 3"


def test_a_missing_file_and_a_command_setting_in_a_file_are_told():
    Path("mqa.toml").write_text("seeds = 5")
    assert refusal("mqa.toml") == 'mqa.toml: unknown setting "seeds"; --help lists them all'
    assert refusal("mqaa.toml") == "mqaa.toml: no such file; did you mean mqa.toml?"
    assert refusal("--base", "zzz.toml") == "zzz.toml: no such file"


def test_settings_for_other_commands_are_checked_and_left_out():
    Path("a.toml").write_text("n_head = 4\nmax_steps = 5")
    aside = {"common": (ShapeConfig,), "aside": (RunConfig,)}
    assert read("a.toml", **aside)[0]["a"].settings == {"n_head": 4}
    assert refusal("a.toml", "--max_steps", "5", **aside).startswith('unknown setting "max_steps"')
    Path("a.toml").write_text('max_steps = "many"')
    assert refusal("a.toml", **aside) == 'a.toml: max_steps = "many" is not a whole number'


def test_help_tells_that_a_file_is_a_design(capsys):
    with pytest.raises(SystemExit):
        read("--help")
    out = capsys.readouterr().out
    assert "[DESIGNS]" in out and "each of them one design" in out and "--max_steps" in out
