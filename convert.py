"""Bring models to and from Hugging Face's transformers, and to fewer K/V heads.

    python convert.py to-hf runs/mha-1 exported/mha                  a folder that transformers loads
    python convert.py from-hf DIR_OR_NAME runs/gpt2                  a run from a folder, or from a model on the hub
    python convert.py regroup runs/mha-1 runs/gqa --n_kv_head 2      a run with fewer K/V heads

Each has a --help that tells more.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from runtime import errors, settings
from runtime.errors import UserError
from runtime.huggingface import read_folder, write_folder
from runtime.regrouping import regrouped
from runtime.runs import python


class Named:
    """Settings whose names are not empty, since an empty path is the current folder."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if value == "":
                raise ValueError(f"{name} is empty; give a name")


@dataclass(frozen=True)
class ToHfConfig(Named):
    run: Annotated[str, tyro.conf.Positional]  # folder of a training run
    folder: Annotated[str, tyro.conf.Positional]  # new folder to write
    checkpoint: Literal["best", "last"] = "best"  # the one of lowest validation loss, or the newest


@dataclass(frozen=True)
class FromHfConfig(Named):
    source: Annotated[str, tyro.conf.Positional]  # folder with config.json, safetensors, tokenizer.json; or a hub name
    run: Annotated[str, tyro.conf.Positional]  # new folder of a run


@dataclass(frozen=True)
class RegroupConfig(Named):
    run: Annotated[str, tyro.conf.Positional]  # folder of a run with many K/V heads
    new: Annotated[str, tyro.conf.Positional]  # new folder of a run with fewer
    n_kv_head: int  # of the new one; it divides the old one's
    how: Literal["mean", "first", "random", "aligned"] = "aligned"  # what becomes of the old ones
    checkpoint: Literal["best", "last"] = "best"  # the one of lowest validation loss, or the newest


def to_hf(config: ToHfConfig) -> None:
    """Write a run as a folder that AutoModelForCausalLM and AutoTokenizer of transformers load.

    Its layout is gpt2 (learned positions, LayerNorm), llama (rotary positions, RMSNorm, SwiGLU) or nemotron (rotary
    positions, LayerNorm, ReLU squared: the default model). A model that none of them can express is refused.
    """
    layout = write_folder(config.run, Path(config.folder), config.checkpoint)
    print(errors.plain(f"wrote {config.folder} in the layout of {layout.model_type}"))


def from_hf(config: FromHfConfig) -> None:
    """Bring a checkpoint of transformers (gpt2, llama, mistral or nemotron) into a run's folder.

    SOURCE is a folder, or the name of a model on the hub. Only JSON and safetensors are read and no code is run.
    What a model here cannot express is refused, by the key of config.json. Dropout does not come along.
    """
    layout = read_folder(config.source, Path(config.run))
    print(errors.plain(f"wrote {config.run} from the layout of {layout.model_type}"))
    print(errors.plain(f"write text with: {python()} sample.py {config.run}"))


def regroup(config: RegroupConfig) -> None:
    """Make a run of GQA or MQA out of a trained one with more K/V heads (Ainslie et al. 2023).

    Each new K/V head stands for as many old ones: their mean, the first of them, a random one, or (aligned) their mean
    after they were turned onto each other with what reads them. It loses what the heads do not share: train it on, for
    a twentieth of its parent's steps or so, with train.py --init_from; uptrain.py measures what that gives back.
    """
    regrouped(config.run, Path(config.new), config.n_kv_head, config.how, config.checkpoint)
    print(errors.plain(f"wrote {config.new}; train it on with: {python()} train.py --init_from {config.new}"))


COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "to-hf": (ToHfConfig, to_hf),
    "from-hf": (FromHfConfig, from_hf),
    "regroup": (RegroupConfig, regroup),
}


def main(argv: list[str]) -> None:
    word = argv[0] if argv else "--help"
    if word in ("--help", "-h"):
        print(__doc__.strip())
        return
    if word not in COMMANDS:
        raise UserError(f'"{word}" is not one of {", ".join(COMMANDS)}; --help tells what they do')
    kind, command = COMMANDS[word]
    (config,), _ = settings.parse(
        argv[1:], kind, prog=f"convert.py {word}", description=inspect.cleandoc(command.__doc__), files_allowed=False
    )
    command(config)


if __name__ == "__main__":
    errors.run(main)
