"""Settings: typed fields of frozen dataclasses in one flat namespace, from TOML files and the command line.

A settings file is a list of flags and nothing else: both go through the same checks, in one sentence each.
The line is read here and not by tyro, because files may stand anywhere on it, `--flag true` and `--flag`
both hold, and we must know which settings were given. tyro prints `--help`: a field's help is the comment
behind it or above it.
"""

import dataclasses
import difflib
import json
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from runtime.errors import UserError

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
MOST_BYTES = 2**20  # of a settings file
SURROGATE = re.compile("[\0\ud800-\udfff]")  # a zero byte, and bytes that are not UTF-8


class Kind(NamedTuple):
    """What a field holds: one value of a type (one of `choices`, if there are any), or many, or none."""

    type: type
    choices: tuple[str, ...] = ()
    optional: bool = False
    many: bool = False
    positional: bool = False

    @staticmethod
    def of(hint: Any) -> "Kind":
        """Read a hint: int, float, bool, str or Literal; `tuple[one, ...]`; `| None`; tyro's Positional."""
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        hint = get_args(hint)[0] if marks else hint
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        hint = next((part for part in parts if part is not types.NoneType), None)
        many = get_origin(hint) is tuple
        hint = get_args(hint)[0] if many else hint
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        return Kind(str if choices else hint, choices, len(parts) > 1, many, tyro.conf.Positional in marks)

    def check(self, value: Any) -> Any:
        """The value as the field holds it, from TOML's or JSON's types; ValueError says what it is not."""
        if self.optional and value in (None, "none"):
            return None
        if self.many:
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{show(value)} is not a list")
            return tuple(self._replace(optional=False, many=False).check(part) for part in value)
        if type(value) is int and self.type is float and abs(value) < 2**1023:  # beyond, it stays what it is
            value = float(value)
        fits = value in self.choices if self.choices else type(value) is self.type
        if not fits or value != value or SURROGATE.search(str(value)):  # only NaN differs from itself
            words = "one of " + ", ".join(self.choices) if self.choices else WORDS[self.type]
            raise ValueError(f"{show(value)} is not {words}{' or none' * self.optional}")
        return value

    def typed(self, texts: list[str]) -> Any:
        """The words of a command line in TOML's types; a word that is not of the type stays for check."""
        if self.many and not (self.optional and texts == ["none"]):
            return [self._replace(many=False).typed([text]) for text in texts]
        (text,) = texts
        try:
            return {"true": True, "false": False}[text.lower()] if self.type is bool else self.type(text)
        except (ValueError, KeyError):
            return text


def parse(
    argv: Sequence[str], *classes: type, prog: str, description: str, files_allowed: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read a command line into one instance of each class, and the settings that files or flags gave.

    Words ending in .toml are settings files unless they are a flag's value; a later file wins over an
    earlier one and a flag over all. `--help` prints and exits. UserError tells a mistake.
    """
    given, origin = _read(argv, classes, prog, description, files_allowed)
    try:
        return build(classes, given), given
    except UserError as error:  # settings that do not fit each other: it names them, and here is who set them
        files = dict.fromkeys(origin[word] for word in re.findall(r"\w+", str(error)) if word in origin)
        raise UserError(f"{', '.join(files)}: {error}" if files else str(error)) from None


def read(
    argv: Sequence[str], *classes: type, prog: str, description: str, files_allowed: bool = True
) -> dict[str, Any]:
    """As parse, but only the settings that were given: each checked by itself, nothing built of them."""
    return _read(argv, classes, prog, description, files_allowed)[0]


def _read(
    argv: Sequence[str], classes: Sequence[type], prog: str, description: str, files_allowed: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """As read, and the file of every setting that one of them gave and no flag."""
    kinds = _kinds(classes)
    if "--help" in argv or "-h" in argv:
        _print_help(classes, prog, description, files_allowed)
    files, flags = _read_line(argv, kinds, files_allowed)
    given: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for file in files:
        values = read_file(file, *classes)
        given |= values
        origin |= dict.fromkeys(values, file)
    checked = _checked(flags, kinds)
    return given | checked, {name: file for name, file in origin.items() if name not in checked}


def read_file(file: str, *classes: type) -> dict[str, Any]:
    """The settings in a file, each checked by itself as one of the classes'; UserError names the file."""
    return _checked(read_toml(file), _kinds(classes), f"{file}: ")


def build(classes: Iterable[type], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """One instance of each class from saved values, checked as a file's are; UserError if they do not fit."""
    classes = tuple(classes)
    checked = _checked(values, _kinds(classes))
    instances = []
    for cls in classes:
        fields = dataclasses.fields(cls)
        for f in fields:
            if f.name not in checked and f.default is f.default_factory is dataclasses.MISSING:
                raise UserError(f"{f.name.upper()} is missing; --help tells what it is")
        try:
            instances.append(cls(**{f.name: checked[f.name] for f in fields if f.name in checked}))
        except ValueError as error:
            raise UserError(str(error)) from None
    return tuple(instances)


def as_dict(*instances: Any) -> dict[str, Any]:
    """All settings of the instances, name -> value."""
    return {f.name: getattr(one, f.name) for one in instances for f in dataclasses.fields(one)}


def to_toml(*instances: Any) -> str:
    """All settings as the text of a settings file, class by class; read back, it builds equal instances."""
    lines = []
    for one in instances:
        lines.append(f"# {type(one).__name__}")
        for f in dataclasses.fields(one):
            value = getattr(one, f.name)
            if value is not None or f.default is not None:  # TOML has no null; "none" only where it is needed
                lines.append(f"{f.name} = {show(value)}")
    return "\n".join(lines) + "\n"


def describe(*instances: Any, given: Mapping[str, Any]) -> str:
    """All settings in one block; what differs from the default is marked * if given, ~ if worked out.

    What was given and is now unset, such as a ratio that a number took the place of, is told as it was given.
    """
    lines = ["settings (* given, ~ worked out; the others are the defaults)"]
    for one in instances:
        line = f"  {_title(type(one)):<7}"
        for f in dataclasses.fields(one):
            value = getattr(one, f.name)
            value = given.get(f.name) if value is None else value
            mark = "" if value == f.default else "*" if f.name in given and given[f.name] == value else "~"
            item = f" {mark}{f.name} {_bare(value)},"
            if len(line) + len(item) > 100:
                lines.append(line)
                line = " " * 9
            line += item
        lines.append(line.rstrip(","))
    return "\n".join(lines)


def show(value: Any) -> str:
    """A value as TOML writes it; None, which TOML lacks, as "none"."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(show, value)) + "]"
    if value is None or isinstance(value, str):  # JSON escapes as TOML does, and leaves one character bare
        return json.dumps("none" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_toml(file: str) -> dict[str, Any]:
    """The contents of a TOML file; UserError names the file, the line and the fault."""
    path = Path(file)
    try:
        if path.is_file() and (size := path.stat().st_size) > MOST_BYTES:
            raise UserError(f"{file}: {size:,} bytes are more than settings take, at most {MOST_BYTES:,}; name another")
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # Windows editors put a mark in front
    except FileNotFoundError:
        near = {p.stem: p for p in [*Path("config").rglob("*.toml"), *path.parent.glob("*.toml")]}
        close = difflib.get_close_matches(path.stem, near, 1)
        hint = f"; did you mean {near[close[0]].as_posix()}?" if close else ""
        raise UserError(f"{file}: no such file{hint}") from None
    except IsADirectoryError:
        raise UserError(f"{file}: a folder, not a settings file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}: line {line} is not UTF-8; save the file as UTF-8") from None
    except RecursionError:
        raise UserError(f"{file}: not a settings file: its values are nested too deep") from None
    except ValueError as error:  # tomllib says "what (at line 3, column 5)"
        what, _, place = str(error).rstrip(")").partition(" (at ")
        raise UserError(f"{file}: not valid TOML at {place or 'some line'}: {what}") from None


def _kinds(classes: Iterable[type]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for cls in classes:
        hints = get_type_hints(cls, include_extras=True)
        for f in dataclasses.fields(cls):
            assert f.name not in kinds, f"two settings are named {f.name}"
            kinds[f.name] = Kind.of(hints[f.name])
    return kinds


def _named(name: str, kinds: Mapping[str, Kind], where: str = "") -> str:
    """The setting that is meant, - and _ alike; UserError tells the nearest name if there is none."""
    plain = name.replace("-", "_")
    if plain in kinds:
        return plain
    near = difflib.get_close_matches(plain[:100], kinds, 1)
    hint = f'did you mean "{near[0]}"?' if near else "--help lists them all"
    raise UserError(f'{where}unknown setting "{name}"; {hint}')


def _checked(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: str = "") -> dict[str, Any]:
    """Settings by their right names, in the types that the fields hold; UserError begins with `where`."""
    checked = {}
    for key, value in values.items():
        if isinstance(value, dict):
            raise UserError(f"{where}[{key}] is a table; settings are plain lines such as n_head = 8")
        name = _named(key, kinds, where)
        try:
            checked[name] = kinds[name].check(value)
        except ValueError as error:
            raise UserError(f"{where}{name} = {error}") from None
    return checked


def _read_line(
    argv: Sequence[str], kinds: Mapping[str, Kind], files_allowed: bool
) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into settings files and settings, flags and positional ones, not yet checked."""
    flags = {name: kind for name, kind in kinds.items() if not kind.positional}
    files: list[str] = []
    alone: list[str] = []
    values: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":  # "-" by itself is standard input
            (files if files_allowed and word.endswith(".toml") else alone).append(word)
            continue
        key, equals, text = word.removeprefix("--").partition("=")
        if key[:3] in ("no-", "no_") and flags.get(key[3:].replace("-", "_"), Kind(str)).type is bool:
            if equals:
                raise UserError(f"--{key} takes no value; write --{key[3:]}={text}")
            key, equals, text = key[3:], "=", "false"
        name = _named(key, flags)
        kind = flags[name]
        texts = [text] if equals else []
        # A word that begins with -- is never taken for a value, or a mistyped flag would be swallowed.
        while not equals and words and not words[0].startswith("--") and (kind.many or not texts):
            if kind.type is bool and words[0].lower() not in ("true", "false", "none"):
                break
            texts.append(words.pop(0))
        if not texts and kind.type is not bool:
            raise UserError(f"--{name} needs a value; one that begins with -- is written --{name}=VALUE")
        if kind.many and name in values:
            raise UserError(f"--{name} is given twice; write all its values behind one")
        values[name] = kind.typed(texts or ["true"])
    for name, kind in kinds.items():
        if kind.positional and alone:
            taken = len(alone) if kind.many else 1
            values[name], alone = kind.typed(alone[:taken]), alone[taken:]
    if alone:
        files_too = " and files end in .toml" * files_allowed
        raise UserError(f'unexpected "{alone[0]}"; settings are written --NAME VALUE{files_too}')
    return files, values


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else show(value)


def _title(cls: type) -> str:
    return cls.__name__.removesuffix("Config").lower()


def _print_help(classes: Sequence[type], prog: str, description: str, files_allowed: bool) -> None:
    """Print the help, grouped by class with comments and defaults, and exit."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def in_our_words(info: Any) -> tyro.constructors.PrimitiveConstructorSpec | None:
        kind = Kind.of(info.type)
        if kind.type not in WORDS:
            return None  # one of the classes
        name = "true|false" if kind.type is bool else "|".join(kind.choices) or kind.type.__name__.upper()
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*" if kind.many else 1,
            metavar=name + " ..." * kind.many + "|none" * kind.optional,
            instance_from_str=lambda texts: kind.check(kind.typed(texts)),
            is_instance=lambda value: True,
            str_from_instance=lambda value: (
                list(map(_bare, value)) or ["nothing"] if kind.many and value is not None else [_bare(value)]
            ),
        )

    description += "\n\nWhat is true or false may be written --NAME or --no-NAME; none unsets a setting."
    if files_allowed:
        description += "\n\nSettings files end in .toml; a later one wins over an earlier, a flag over all."
    whole = dataclasses.make_dataclass("Settings", [(_title(cls), cls) for cls in classes])
    marks = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff, tyro.conf.PositionalMetavarFromFieldName)
    tyro.cli(whole, args=["--help"], prog=prog, description=description, use_underscores=True, config=marks,
             registry=registry)  # fmt: skip
