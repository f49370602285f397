"""Files of a run's folder, which may be a stranger's: what is written there stays there."""

import os
from pathlib import Path

from runtime.errors import UserError, naming


def write_synced(path: Path, content: bytes) -> None:
    """Write a file anew, so that no link in a stranger's folder leads elsewhere, and wait until it is on the disk."""
    with naming(path):
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def check_own(path: Path, what: str) -> None:
    """UserError if a path of a run's folder is a link, a pipe or whatever else no run puts there."""
    if path.is_symlink() or path.exists() and not path.is_file():
        raise UserError(f"{path} is not {what}: remove it, or choose another folder")
