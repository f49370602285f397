"""Programs that ours stand beside, read from a checkout."""

import importlib.util
from pathlib import Path
from typing import Any


def nanogpt(folder: Path) -> Any:
    """nanoGPT's model.py as a module, under a name that does not hide ours."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
