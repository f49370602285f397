"""Which designs a command is asked about: every settings file on its line is one, apart from the others."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from runtime.errors import UserError, plain
from runtime.settings import build, read, read_file


@dataclass(frozen=True)
class DesignFiles:
    """What the settings class of a command that takes several designs derives from."""

    # settings files, each of them one design
    designs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    base: tuple[str, ...] = ()  # settings files that hold under every design; the design wins over them


class Design(NamedTuple):
    """One design: the stem of its file ("default" without a file), the file, and what was set for it."""

    name: str
    file: str | None
    settings: dict[str, Any]  # from the base files, then its own, then the flags: the later wins


def read_designs(
    argv: Sequence[str],
    *classes: type,
    prog: str,
    description: str,
    common: Sequence[type] = (),
    aside: Sequence[type] = (),
) -> tuple[dict[str, Design], tuple[Any, ...], dict[str, Any]]:
    """Read a command line into its designs by name, the command's own settings, and the flags that were given.

    `classes` are the command's own, one of them a DesignFiles; their settings come from flags alone. The
    settings of the classes `common` come from files and flags, and a flag holds for every design. Those of the
    classes `aside` a file may hold, since it serves other commands as well: they are checked and left out.
    UserError for two files of one name, and for a design that cannot be built, before anything is begun.
    """
    given = read(argv, *classes, *common, prog=prog, description=description, files_allowed=False)
    own_names = {field.name for cls in classes for field in fields(cls)}
    own = build(classes, {name: value for name, value in given.items() if name in own_names})
    line = next(one for one in own if isinstance(one, DesignFiles))
    common_names = {field.name for cls in common for field in fields(cls)}
    flags = {name: value for name, value in given.items() if name in common_names}

    def contents(file: str) -> dict[str, Any]:
        values = read_file(file, *common, *aside)
        return {name: value for name, value in values.items() if name in common_names}

    base: dict[str, Any] = {}
    for file in line.base:
        base |= contents(file)
    designs: dict[str, Design] = {}
    for file in line.designs or (None,):
        name = Path(file).stem if file else "default"
        if plain(name) != name:
            raise UserError(f"{file} cannot name a design, because it holds control characters: rename it")
        if name in designs and designs[name].file == file:
            raise UserError(f"{file} is given twice: each file is one design")
        if name in designs:
            raise UserError(f"{designs[name].file} and {file} are both called {name}; give one of them another name")
        settings = base | (contents(file) if file else {}) | flags
        try:
            build(common, settings)
        except UserError as error:
            raise UserError(f"{file}: {error}" if file else str(error)) from None
        designs[name] = Design(name, file, settings)
    return designs, own, given
