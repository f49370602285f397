"""Settings from files and the command line: what wins, what is refused, and in which words."""

import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import tyro

from runtime.errors import UserError
from runtime.settings import as_dict, build, describe, parse, to_toml

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class ShapeConfig:
    """The shape."""

    n_head: int = 8  # query heads
    n_kv_head: int | None = None  # key and value heads
    norm: Literal["layer", "rms"] = "rms"  # which norm
    activation: Literal["gelu", "relu"] | None = "gelu"
    bias: bool = True

    def __post_init__(self):
        if self.n_kv_head and self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not divisible by n_kv_head {self.n_kv_head}")


@dataclass(frozen=True)
class WorkConfig:
    learning_rate: float = 0.1
    compile: bool | None = None
    out_dir: str | None = None
    name: str = "a"
    layers: tuple[int, ...] = (1, 2)
    files: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RunConfig:
    run: tyro.conf.Positional[str]  # folder of the run
    more: tyro.conf.Positional[tuple[str, ...]] = ()
    prompt: str = ""


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(*words, **kwargs):
    return parse(words, ShapeConfig, WorkConfig, prog="train.py", description="Train.", **kwargs)


def given(*words):
    return read(*words)[1]


def refusal(*words, read=read):
    with pytest.raises(UserError) as error:
        read(*words)
    return str(error.value)


def write(name, text):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_without_arguments_all_is_default_and_nothing_is_given():
    assert read() == ((ShapeConfig(), WorkConfig()), {})


def test_files_stack_wherever_they_stand_and_the_shell_wins():
    write("a.toml", "n_head = 4\nn_kv_head = 1\nlearning_rate = 1")
    write("b.toml", "n_kv_head = 2\nbias = false")
    (shape, work), names = read("--learning_rate", "0.5", "a.toml", "--name", "x", "b.toml")
    assert shape == ShapeConfig(n_head=4, n_kv_head=2, bias=False)
    assert work == WorkConfig(learning_rate=0.5, name="x")
    assert set(names) == {"n_head", "n_kv_head", "learning_rate", "bias", "name"}


def test_given_holds_a_value_that_equals_the_default():
    write("a.toml", "n_head = 8")
    assert given("a.toml", "--name", "a") == {"n_head": 8, "name": "a"}


def test_the_last_of_equal_flags_wins():
    assert given("--n_head", "4", "--n-head=2") == {"n_head": 2}


def test_dash_and_underscore_are_alike_in_files_and_flags():
    write("a.toml", "n-head = 4")
    assert given("a.toml", "--n-kv-head", "2", "--learning_rate=3") == {
        "n_head": 4, "n_kv_head": 2, "learning_rate": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "words, value",
    [
        (["--compile"], True),
        (["--no-compile"], False),
        (["--no_compile"], False),
        (["--compile", "true"], True),
        (["--compile", "True"], True),
        (["--compile", "false"], False),
        (["--compile", "none"], None),
        (["--compile=false"], False),
        (["--compile=none"], None),
    ],
)
def test_every_spelling_of_a_switch(words, value):
    write("a.toml", "n_head = 4")
    assert given(*words, "a.toml", "--name", "x") == {"n_head": 4, "compile": value, "name": "x"}


def test_none_unsets_what_a_file_set():
    write("a.toml", 'n_kv_head = 2\nactivation = "relu"\nout_dir = "x"\nfiles = ["a"]')
    write("b.toml", 'n_kv_head = "none"')
    shape, work = read("a.toml", "b.toml", "--activation", "none", "--out_dir=none", "--files", "none")[0]
    assert (shape.n_kv_head, shape.activation, work.out_dir, work.files) == (None, None, None, None)


def test_none_is_an_ordinary_text_where_a_setting_cannot_be_unset():
    assert given("--name", "none") == {"name": "none"}
    assert refusal("--n_head", "none") == 'n_head = "none" is not a whole number'


@pytest.mark.parametrize("words", [["-1"], ["-1e0"], ["-1.0", "--name", "a"]])
def test_a_negative_number_is_a_value(words):
    assert given("--learning_rate", *words)["learning_rate"] == -1.0


def test_a_text_may_hold_equals_signs_and_begin_with_dashes():
    assert given("--name=--a=b") == {"name": "--a=b"}
    assert given("--name", "-") == {"name": "-"}
    assert given("--name=") == {"name": ""}


def test_a_list_takes_values_up_to_the_next_flag():
    assert given("--layers", "3", "-4", "--name", "x") == {"layers": (3, -4), "name": "x"}
    assert given("--layers=3") == {"layers": (3,)}
    write("a.toml", "layers = []")
    assert given("a.toml") == {"layers": ()}


def test_a_file_right_after_a_flag_is_its_value_and_files_can_be_switched_off():
    assert given("--out_dir", "a.toml", "--files", "b.toml") == {"out_dir": "a.toml", "files": ("b.toml",)}
    assert "unexpected" in refusal("a.toml", read=lambda word: read(word, files_allowed=False))


def test_positional_settings_are_read_in_order_and_required():
    def run(*words):
        return parse(words, RunConfig, prog="sample.py", description="Sample.", files_allowed=False)

    assert run("--prompt", "p", "r", "a.toml", "-") == (
        (RunConfig("r", ("a.toml", "-"), "p"),),
        {"prompt": "p", "run": "r", "more": ("a.toml", "-")},
    )
    assert run("r") == ((RunConfig("r"),), {"run": "r"})
    assert refusal(read=run) == "RUN is missing; --help tells what it is"


@pytest.mark.parametrize(
    "text, message",
    [
        ("n_heads = 4", 'unknown setting "n_heads"; did you mean "n_head"?'),
        ("zzz = 4", 'unknown setting "zzz"; --help lists them all'),
        ('n_head = "eight"', 'n_head = "eight" is not a whole number'),
        ("n_head = 8.0", "n_head = 8.0 is not a whole number"),
        ("n_head = true", "n_head = true is not a whole number"),
        ("n_kv_head = [1]", "n_kv_head = [1] is not a whole number or none"),
        ('learning_rate = "1"', 'learning_rate = "1" is not a number'),
        ("learning_rate = false", "learning_rate = false is not a number"),
        ("learning_rate = nan", "learning_rate = nan is not a number"),
        ("bias = 1", "bias = 1 is not true or false"),
        ("name = 3", "name = 3 is not text"),
        ('norm = "batch"', 'norm = "batch" is not one of layer, rms'),
        ('layers = "1"', 'layers = "1" is not a list'),
        ("layers = [1, 2.5]", "layers = 2.5 is not a whole number"),
        ("[model]\nn_head = 4", "[model] is a table; settings are plain lines such as n_head = 8"),
        ("n_head = 4\nbias =\n", "not valid TOML at line 2, column 7: Invalid value"),
        (b"n_head = 4\nname = '\xe9'\n", "line 2 is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_files_mistake_is_one_sentence_that_names_the_file(text, message):
    write("config/x.toml", text)
    assert refusal("config/x.toml") == f"config/x.toml: {message}"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--n_heads", "4"], 'unknown setting "n_heads"; did you mean "n_head"?'),
        (["-n_head", "4"], 'unknown setting "-n_head"; did you mean "n_head"?'),
        (["--no-n_head"], 'unknown setting "no-n_head"; did you mean "n_head"?'),
        (["--n_head", "eight"], 'n_head = "eight" is not a whole number'),
        (["--n_head", "1e3"], 'n_head = "1e3" is not a whole number'),
        (["--norm", "batch"], 'norm = "batch" is not one of layer, rms'),
        (["--activation", "tanh"], 'activation = "tanh" is not one of gelu, relu or none'),
        (["--compile=maybe"], 'compile = "maybe" is not true or false or none'),
        (["--layers", "1", "x"], 'layers = "x" is not a whole number'),
        (["--layers", "1", "--layers", "2"], "--layers is given twice; write all its values behind one"),
        (["--out_dir", "\udcff"], 'out_dir = "\udcff" is not text or none'),
        (["--bias", "maybe"], 'unexpected "maybe"; settings are written --NAME VALUE and files end in .toml'),
    ],
)
def test_a_mistake_on_the_line_is_one_sentence(words, message):
    assert refusal(*words) == message


@pytest.mark.parametrize(
    "words", [["--n_head"], ["--n_head", "--bias"], ["--name", "--n_haed", "4"], ["--layers"]]
)
def test_a_flag_without_its_value_does_not_swallow_the_next(words):
    assert refusal(*words).startswith(f"{words[0]} needs a value; one that begins with -")


def test_a_classs_own_refusal_is_passed_on():
    write("a.toml", "n_kv_head = 3")
    assert refusal("--n_kv_head", "3") == "n_head 8 is not divisible by n_kv_head 3"
    assert refusal("a.toml") == "a.toml: n_head 8 is not divisible by n_kv_head 3"
    write("b.toml", "n_head = 4\nbias = false")
    assert refusal("a.toml", "b.toml") == "b.toml, a.toml: n_head 4 is not divisible by n_kv_head 3"
    assert refusal("a.toml", "b.toml", "--n_head", "2").startswith("a.toml: n_head 2")


def test_a_missing_file_is_told_with_the_nearest_one():
    write("config/mqa.toml", "")
    assert refusal("config/mqaa.toml") == "config/mqaa.toml: no such file; did you mean config/mqa.toml?"
    assert refusal("mqa.toml") == "mqa.toml: no such file; did you mean config/mqa.toml?"
    assert refusal("other/zzz.toml") == "other/zzz.toml: no such file"


def test_a_folder_is_not_a_settings_file():
    Path("a.toml").mkdir()
    assert refusal("a.toml") == "a.toml: a folder, not a settings file"


def test_a_file_from_a_windows_editor_is_read():
    write("a.toml", b"\xef\xbb\xbfn_head = 4\r\nbias = false\r\n")
    assert given("a.toml") == {"n_head": 4, "bias": False}


def test_saved_settings_come_back_equal():
    text = 'quote " back \\ line\n tab\t bell\x07 del\x7f é \U0001f600 \u2028'
    for instances in [
        (ShapeConfig(), WorkConfig()),
        (ShapeConfig(2, 1, "layer", None, False), WorkConfig(1e-05, False, text, "none", (), ("x", text))),
    ]:
        assert build((ShapeConfig, WorkConfig), tomllib.loads(to_toml(*instances))) == instances
        assert build((ShapeConfig, WorkConfig), as_dict(*instances)) == instances


def test_a_saved_none_is_written_only_where_none_is_not_the_default():
    text = to_toml(ShapeConfig(activation=None))
    assert 'activation = "none"' in text and "n_kv_head" not in text


@pytest.mark.parametrize(
    "values, message",
    [
        ({"n_heads": 4}, 'unknown setting "n_heads"; did you mean "n_head"?'),
        ({"n_head": "4"}, 'n_head = "4" is not a whole number'),
        ({"n_kv_head": 3}, "n_head 8 is not divisible by n_kv_head 3"),
    ],
)
def test_saved_values_are_checked_like_a_file(values, message):
    assert refusal(values, read=lambda values: build([ShapeConfig], values)) == message


def test_the_block_marks_what_differs_and_where_it_came_from():
    given = {"n_head": 4, "bias": True, "compile": False}
    block = describe(ShapeConfig(n_head=4, n_kv_head=2), WorkConfig(), given=given)
    assert "*n_head 4," in block and "~n_kv_head 2," in block
    assert " bias true" in block and " norm rms," in block
    assert "*compile false," in block  # it was given, and something else took its place
    unset = describe(ShapeConfig(n_kv_head=2), given={"n_kv_head": None})  # and then worked out
    assert "~n_kv_head 2," in unset
    assert max(map(len, block.splitlines())) <= 100


@pytest.mark.parametrize("columns", [None, "100"])
@pytest.mark.parametrize("words", [["--help"], ["a.toml", "-h", "--n_heads"]])
def test_help_is_grouped_by_class_with_comments_and_defaults(capsys, monkeypatch, columns, words):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stop:
        read(*words)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    order = ["shape options", "The shape.", "--n_head INT", "work options", "--layers INT ..."]
    assert sorted(order, key=out.index) == order
    assert "query heads (default: 8)" in out and "key and value heads (default: none)" in out
    assert "--norm layer|rms" in out and "--compile true|false|none" in out and "(default: 1 2)" in out
    assert ".toml" in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= int(columns or 85)


def test_help_names_positional_settings(capsys):
    with pytest.raises(SystemExit):
        parse(["-h"], RunConfig, prog="sample.py", description="Sample.", files_allowed=False)
    out = capsys.readouterr().out
    assert "usage: sample.py [-h] RUN [MORE]" in out and "folder of the run (required)" in out
    assert ".toml" not in out


def test_reading_settings_loads_nothing_heavy():
    code = "import sys, runtime.settings; print({'torch', 'numpy', 'wandb', 'datasets'} & set(sys.modules))"
    line = [sys.executable, "-c", code]
    out = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
