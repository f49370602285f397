"""Look inside a trained model's heads."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.text import Text

from data import open_dataset
from data.probes import EXAMPLE
from data.tokenfile import IGNORED, DataError
from data.tokenizer import Tokenizer
from lab.headstudy import TOKENS, Windows, of_text, study, validation
from lab.taps import look, open_model
from model import GPT
from runtime import errors, settings
from runtime.checkpoint import load_model
from runtime.devices import pick_device
from runtime.errors import UserError, plain
from runtime.prompts import encode, newest_run, read_text
from runtime.runs import check_data, write_whole

DESCRIPTION = """Look inside a trained model's heads: where each looks, what it may be called, what it is worth.

    python heads.py                                     the newest run in runs/
    python heads.py runs/mha-1 --text "ROMEO: But soft"
    python heads.py runs/mha-1 --compare runs/mqa-1     designs side by side

Writes heads.html (attention maps, W_O step by step, ablations) and heads.json into the run's folder, and prints a
table. Scores are means over the validation text that the run was trained beside; heads.html defines each of them. A
head gets a name only where a score clears its threshold, well above what a head scores that looks at all alike."""


@dataclass(frozen=True)
class HeadsConfig:
    # folder of a training run; if left out, the newest in runs/
    run: Annotated[str | None, tyro.conf.Positional] = None
    compare: tuple[str, ...] = ()  # other runs, to be shown beside it
    checkpoint: Literal["best", "last"] = "best"  # the one of lowest validation loss, or the newest
    text: str | None = None  # the text whose attention is drawn; unset = a piece of the validation text
    text_file: str | None = None  # or a file with it; - is standard input
    eval_tokens: int | None = None  # tokens that ablations are measured on; unset = 8,192, of a probe all
    out_dir: str | None = None  # folder for heads.html and heads.json; unset = the run's
    device: str = "auto"  # auto, cpu, cuda, cuda:1 or mps
    threads: int | None = None  # of a CPU; unset = one for each core; 1 where other programs keep these busy

    def __post_init__(self) -> None:
        for name in ("run", "text", "out_dir"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; give one or leave it out")
        if self.text and self.text_file is not None:
            raise ValueError("--text and --text_file both give a text: leave one of them out")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ValueError(f"threads must be from 1 to 1024, not {self.threads}")
        if self.eval_tokens is not None and not 2 <= self.eval_tokens < 2**31:
            raise ValueError(f"eval_tokens must be at least 2 and below 2^31, not {self.eval_tokens}")


def texts(
    run: str, model: GPT, tokenizer: Tokenizer, meta: dict[str, Any], text: str | None, eval_tokens: int | None
) -> tuple[torch.Tensor, Windows, str]:
    """The ids to draw (T,), the windows to measure on, and where these come from."""
    block_size, name = model.config.block_size, meta["dataset"]["name"]
    ids = encode(text, "text", tokenizer) if text is not None else None
    if ids is not None and len(ids) < 2:
        raise UserError("the text has fewer than two tokens; give a longer one")
    try:
        dataset = open_dataset(name)
        check_data(dataset, meta, run, exact=True)
        dataset.verify()
    except (DataError, UserError) as error:
        if ids is None:
            raise UserError(f"the text that {run} was trained beside cannot be read, so give --text: {error}") from None
        return torch.tensor(ids[:block_size]), of_text(ids, block_size, eval_tokens or TOKENS), "the text given"
    windows = validation(dataset, block_size, eval_tokens or (len(dataset.val) if dataset.probe else TOKENS))
    # A probe is drawn as far as its last question, where the answer has to be found.
    asked, last = " ".join(EXAMPLE.words[:-1]), int((windows.y[0] != IGNORED).nonzero().max())
    if ids is None and "sentences" in name and tokenizer.kind == "word" and not tokenizer.unknown(asked):
        ids = tokenizer.encode(asked).tolist()
    drawn = torch.tensor(ids[:block_size]) if ids else windows.x[0, : last + 1]
    return drawn, windows, f"the validation split of {name}"


def main(argv: list[str]) -> None:
    (config,), given = settings.parse(argv, HeadsConfig, prog="heads.py", description=DESCRIPTION, files_allowed=False)
    text = read_text(config.text_file, "text_file") if config.text_file is not None else config.text
    names, device = [config.run or newest_run(), *config.compare], pick_device(config.device)
    if len({Path(name).resolve() for name in names}) < len(names):
        raise UserError("a run is named twice; name each once")
    out_dir = Path(config.out_dir or names[0])
    if config.out_dir:
        out_dir.mkdir(parents=True, exist_ok=True)  # before the long part, should it not be possible
    if out_dir.exists() and not os.access(out_dir, os.W_OK):
        raise UserError(f"{out_dir} cannot be written to: give another folder with --out_dir")
    if config.threads:
        torch.set_num_threads(config.threads)
    console, studied = Console(stderr=True), []
    for name in names:
        model, tokenizer, meta = load_model(name, config.checkpoint, device)
        model = open_model(model)
        ids, windows, told = texts(name, model, tokenizer, meta, text, config.eval_tokens)
        if text is not None and len(ids) < (whole := len(encode(text, "text", tokenizer))):
            cut = f"the maps show the first {len(ids):,} of the text's {whole:,} tokens: its context is no longer"
            print(plain(f"{name}: {cut}"), file=sys.stderr)
        if not console.is_interactive:
            print(plain(f"{name}: looking at its heads"), file=sys.stderr)
        with console.status("looking") as status:

            def tell(share: float, what: str, name: str = name) -> None:
                status.update(Text(plain(f"{name}: {what}, {share:.0%}")))

            try:
                found = study(model, tokenizer, windows, tell)
            except UserError as error:
                raise UserError(f"{name}: {error}") from None
        studied.append((plain(name), model, tokenizer, meta, ids, plain(told), look(model, ids), found))

    # The page's libraries take seconds to load, so they wait until here.
    from lab.headpage import write_page
    from lab.headreport import Part, page_content, saved, show

    parts = [Part(*one) for one in studied]
    write_whole(out_dir / "heads.json", json.dumps(saved(parts), indent=1, allow_nan=False))
    for note in write_page(page_content(parts), out_dir / "heads.html"):
        print(note, file=sys.stderr)
    show(parts, Console(width=max(80 if sys.stdout.isatty() else 120, Console().width)))
    print(plain(f"page: {out_dir / 'heads.html'}"))


if __name__ == "__main__":
    errors.run(main)
