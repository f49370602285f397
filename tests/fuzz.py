"""Feed damaged and hostile files to everything that reads a file, and tell what is not refused in a sentence.

    python tests/fuzz.py --inputs 200000 --seed 1

Inputs are valid files with a few changes, most of them inside the format: a value of its JSON or TOML, a number of its
header, with lengths and checksums made good again. An input crashes a reader if it raises what is no sentence for a
person, takes more than SECONDS of processor time or MEGABYTES of memory, or ends the process; it is then kept in --out
with what was raised. An input is number N of its reader at --seed, always the same.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow
import pyarrow.parquet
import torch
from texts import some_text

import prepare
from data import DataError, open_dataset, open_tokenizer, sources
from data.tokenfile import HEADER, MAGIC, VERSION
from data.tokenizer import ByteTokenizer, CharTokenizer, HfTokenizer, Tokenizer, WordTokenizer, train_bpe
from lab import stats, sweep
from model import GPT, ModelConfig
from runtime import checkpoint, huggingface, logbook, settings
from runtime.errors import EnvironmentFault, UserError
from runtime.runs import TrainConfig, with_data, write_run

SECONDS, MEGABYTES, WAIT = 5, 768, 300  # of processor time, above the start, and of silence until it is killed
REFUSED = (UserError, DataError, EnvironmentFault, ConnectionError)
DEEP, GIANT = '"@deep"', '"@giant"'  # what Python cannot write as JSON
Files = dict[str, bytes]  # the files of a folder: one input
ODD = [None, True, False, 0, 1, -1, 2, 255, 65536, 10**9, 2**31 - 1, 2**31, 2**53, 2**63, 10**12, 10**400, 0.5, -0.0,
       1e308, 5e-324, float("inf"), float("nan"), "", "x", "\0", "\ud800", "é", "\u2028", "none", "../x", "x" * 10**5,
       [], {}, [[]], {"": {}}, [0] * 10**4, ["x"], {"a": 1}, "@deep", "@giant"]  # fmt: skip


def odd(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(ODD))  # what is made of one input is not to be in the next


def alter(draw: random.Random, value: Any) -> Any:
    """A JSON value with one to four changes at places in it; the value itself is used up."""
    root = [value]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        places, todo = [], [root]
        while todo:
            holder = todo.pop()
            keys = list(range(len(holder)) if isinstance(holder, list) else holder)
            places += [(holder, key) for key in (keys if len(keys) < 50 else draw.sample(keys, 50))]
            todo += [holder[key] for key in keys[:50] if isinstance(holder[key], (list, dict))]
        holder, key = draw.choice(places) if places else (root, 0)
        if not places:
            return odd(draw)
        old, kind = holder[key], draw.randrange(6)
        if kind == 0 and holder is not root:
            del holder[key]
        elif kind == 1:
            other, at = draw.choice(places)
            holder[key] = json.loads(json.dumps(other[at]))
        elif kind == 2 and isinstance(holder, dict):
            holder[draw.choice(["x", "", "end", "probe", str(key) * 2])] = odd(draw)
        elif isinstance(old, (int, float)) and kind < 5:
            holder[key] = draw.choice([old + 1, old - 1, -old, old * 2, draw.randrange(2**24)])
        elif isinstance(old, str) and kind < 5:
            at = draw.randrange(len(old) + 1)
            holder[key] = draw.choice([old[:at], old + old, old[:at] + draw.choice("\0\ud800 é=\"]}9") + old[at:]])
        else:
            holder[key] = odd(draw)
    return root[0]


def spelled(text: str) -> bytes:
    text = text.replace(DEEP, "[" * 10**5 + "]" * 10**5).replace(GIANT, "9" * 10**4)
    return text.encode("utf-8", "surrogatepass")


def harm(draw: random.Random, content: bytes) -> bytes:
    """Bytes with a few of them changed, left out, put in, or repeated."""
    made = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, n = draw.randrange(len(made) + 1), draw.choice([1, 1, 2, 8, 100])
        new = draw.choice([draw.randbytes(n), b"\0" * n, b"\xff" * n, made[at : at + n] * 2, b"", content[-n:]])
        made[at : at + draw.choice([0, n, n])] = new
    return bytes(made) if draw.random() < 0.95 else draw.randbytes(draw.randrange(200))


def change_tensors(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file with another header or other numbers, the header's length made good for most."""
    size = struct.unpack("<Q", content[:8])[0]
    head, body = content[8 : 8 + size], content[8 + size :]
    kind = draw.randrange(10)
    if kind < 6:
        head = spelled(json.dumps(alter(draw, json.loads(head))))
    elif kind < 8:
        kinds = [b"F16", b"BF16", b"I32", b"F8_E8M0", b"C64", b"F4"]
        head = head.replace(b"F32", draw.choice(kinds), draw.randrange(1, 4))
    else:
        body = harm(draw, body)
    size = len(head) if draw.random() < 0.95 else draw.choice([0, 1, 2**60, 2**63, 2**64 - 1, len(head) + 1])
    return struct.pack("<Q", size) + head + body


def change_ids(draw: random.Random, content: bytes) -> bytes:
    """A token file with another header or other ids, the count made good for half."""
    magic, version, width, count = HEADER.unpack(content[: HEADER.size])
    ids = content[HEADER.size :] if draw.random() < 0.5 else harm(draw, content[HEADER.size :])
    if draw.random() < 0.5:
        width = draw.choice([2, 4])
        count, ids = len(ids) // width, ids[: len(ids) // width * width]
    else:
        count = draw.choice([0, 1, count - 1, count + 1, 2**31, 2**62, 2**63, 2**64 - 1])
        width = draw.choice([width, width, 0, 1, 4, 8, 2**32 - 1])
    return HEADER.pack(magic, version if draw.random() < 0.9 else 2, width, count) + ids


def toml(values: dict[str, Any]) -> bytes:
    return spelled("".join(f"{key} = {settings.show(value)}\n" for key, value in values.items()))


def change(draw: random.Random, files: Files) -> Files:
    """Another input from a valid one: a file of it is changed, by its kind or (a tenth of them) byte by byte."""
    files, name = dict(files), draw.choice(sorted(files))
    content, kind = files[name], name.rpartition(".")[2]
    if draw.random() < 0.1:
        files[name] = harm(draw, content)
    elif kind == "json":
        files[name] = spelled(json.dumps(alter(draw, json.loads(content)), ensure_ascii=draw.random() < 0.5))
    elif kind == "jsonl":
        lines = content.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = spelled(json.dumps(alter(draw, json.loads(lines[at]))))
        files[name] = b"\n".join(lines[: draw.choice([at + 1, len(lines)])])
    elif kind == "toml":
        made = alter(draw, tomllib.loads(content.decode()))
        files[name] = toml(made) if isinstance(made, dict) else spelled(json.dumps(made))
    elif kind == "safetensors":
        files[name] = change_tensors(draw, content)
    elif kind == "bin":
        files[name] = change_ids(draw, content)
    elif kind == "parquet" and draw.random() < 0.5:  # in what describes it, which begins where the footer says
        start = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
        foot = harm(draw, content[start:-8])
        files[name] = content[:start] + foot + struct.pack("<I", len(foot)) + b"PAR1"
    else:
        files[name] = harm(draw, content)
    if "meta.json" in files and draw.random() < 0.95:
        files["meta.json"] = seal(files)
    return files


def seal(files: Files) -> bytes:
    """meta.json with the checksums that its neighbours have now, where it is whole enough to hold them."""
    try:
        meta = json.loads(files["meta.json"])
        if "sha256" in meta:
            others = meta["sha256"].keys() - {"meta.json"}
            meta["sha256"] |= {name: hashlib.sha256(files[name]).hexdigest() for name in others}
            meta["sha256"]["meta.json"] = checkpoint.checksum(meta)
        elif "fingerprint" in meta:
            names = [f"{split}{kind}.bin" for split in ("train", "val") for kind in ("", ".counted")]
            ids = [hashlib.sha256(files[name][HEADER.size :]).hexdigest() for name in names if name in files]
            whole = json.dumps([meta["tokenizer"], *ids], sort_keys=True)
            meta["fingerprint"] = hashlib.sha256(whole.encode()).hexdigest()
        return json.dumps(meta).encode()
    except Exception:  # a meta that is broken beyond repair is tried as it is
        return files["meta.json"]


def past(files: Files) -> bool:
    """Whether the outer form of every file holds, so that what a reader says of it comes from a later check.

    JSON, TOML and UTF-8 can be parsed, a token file has the magic, a version and a width, safetensors a header that
    is JSON, Parquet a footer that can be read; and the checksums of a checkpoint are those of its files.
    """
    for name, content in files.items():
        try:
            match name.rpartition(".")[2]:
                case "json":
                    json.loads(content)
                case "jsonl":
                    json.loads(content.splitlines()[-1])
                case "toml":
                    tomllib.loads(content.decode("utf-8-sig"))
                case "txt":
                    content[:64].decode("utf-8", "strict")
                case "bin":
                    magic, version, width, _ = HEADER.unpack(content[: HEADER.size])
                    assert (magic, version) == (MAGIC, VERSION) and width in (2, 4)
                case "parquet":
                    pyarrow.parquet.read_metadata(io.BytesIO(content))
                case "safetensors":
                    json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
                    sums = json.loads(files["meta.json"])["sha256"] if "meta.json" in files else {}
                    assert sums.get(name) in (None, hashlib.sha256(content).hexdigest())
        except Exception:  # of any of these readers: it did not get past its header
            return False
    return True


def collect(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def seeds(folder: Path) -> dict[str, list[Files]]:
    """Valid inputs for every reader."""
    text = some_text(200) + "he said: 1 é\n"
    (folder / "text.txt").write_text(text)
    byte, bpe = ByteTokenizer(), train_bpe([text], 280, end=True)
    split = {"type": "Digits", "individual_digits": True}
    described = json.loads(huggingface.tokenizer_json(bpe))
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, described["pre_tokenizer"]]}
    hf = HfTokenizer(json.dumps(described), bpe.end_id)
    sets, runs, exports = [], [], []
    with contextlib.redirect_stdout(io.StringIO()):
        for kind in ("char", "byte", "bpe"):
            words = ["--vocab_size", "280"] * (kind == "bpe")
            prepare.main([str(folder / kind), "--files", str(folder / "text.txt"), "--tokenizer", kind, *words])
            sets.append(collect(folder / kind))
    counted, meta = {}, json.loads(sets[1]["meta.json"])
    for split in ("train", "val"):  # as of a probe: all but the first id count
        n = meta["splits"][split]["tokens"]
        counted[f"{split}.counted.bin"] = HEADER.pack(MAGIC, VERSION, 2, n) + struct.pack(f"<{n}H", 0, *[1] * (n - 1))
        meta["splits"][split] |= {"targets": n - 1}
    meta["probe"] = {"about": "x", "length": 8, "floor": 0.0, "guess": 1.0}
    probe = sets[1] | counted | {"meta.json": json.dumps(meta).encode()}
    sets.append(probe | {"meta.json": seal(probe)})
    shapes: list[tuple[Tokenizer, dict[str, Any]]] = [
        (byte, {}), (hf, {"norm": "rmsnorm", "activation": "swiglu", "n_kv_head": 1}),
        (bpe, {"positions": "learned", "activation": "gelu_tanh", "bias": True, "tie_embeddings": True}),
    ]  # fmt: skip
    for number, (tokenizer, own) in enumerate(shapes):
        config = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=tokenizer.vocab_size, **own)
        run = folder / f"run{number}"
        write_run(run, config, dict(GPT(config).named_parameters()), tokenizer, {"name": "x", "fingerprint": "y"})
        huggingface.write_folder(str(run), folder / f"hf{number}", "last")
        runs.append(collect(run / "last"))
        exports.append(collect(folder / f"hf{number}"))
    kinds = [byte, bpe, hf, CharTokenizer("ab é\n", True), WordTokenizer(["a", "b"])]
    tables = [{"text": [text, "b", None], "n": [1, 2, 3]}, {"text": ["x" * 300] * 200, "d": [b"\xff"] * 200}]
    rows = [{"step": n, "tokens": n * 8, "val_loss": 2.5, "val_tokens": 9, "elapsed": 0.5} for n in range(4)]
    some = settings.as_dict(TrainConfig()) | settings.as_dict(ModelConfig(vocab_size=9, n_kv_head=2))
    given = [dict(n_head=4, learning_rate=1e-3, compile=True), {k: v for k, v in some.items() if v is not None}]
    texts = [json.dumps({"text": text[:50], "id": n}) for n in range(3)]

    def parquet(table: dict[str, Any], **options: Any) -> bytes:
        pyarrow.parquet.write_table(pyarrow.table(table), to := io.BytesIO(), **options)
        return to.getvalue()

    return {
        "token file, data set": sets,
        "checkpoint": runs,
        "tokenizer": [{"meta.json": json.dumps({"tokenizer": kind.to_meta()}).encode()} for kind in kinds],
        "settings": [{"a.toml": toml(values)} for values in given],
        "metrics": [{"metrics.jsonl": "\n".join(map(json.dumps, rows)).encode()}],
        "Hugging Face": exports,
        "rows": [{"a.jsonl": "\n".join(texts).encode()}]
        + [{"a.parquet": parquet(table, compression=how)} for table in tables for how in ("none", "snappy", "zstd")],
        "text": [{"a.txt": b"\xef\xbb\xbf" + text.encode()}],
    }  # fmt: skip


def read_data(folder: Path) -> None:
    dataset = open_dataset(f"{folder}/")
    dataset.verify()
    with_data(ModelConfig(), dataset)
    assert 0 < dataset.val_targets <= len(dataset.val)


def read_checkpoint(folder: Path) -> None:
    shutil.copytree(folder, folder / "run" / "last", ignore=lambda *_: {"run"})
    model, tokenizer, _ = checkpoint.load_model(folder / "run")
    model(torch.zeros(1, 1, dtype=torch.long))
    tokenizer.decode([0, 1])


def read_tokenizer(folder: Path) -> None:
    (folder / "last").mkdir()
    os.rename(folder / "meta.json", folder / "last" / "meta.json")
    tokenizer = open_tokenizer(str(folder))
    tokenizer.decode(tokenizer.encode("a b").tolist())


def read_metrics(folder: Path) -> None:
    sweep.Run("x", 1, folder, folder, 3, 9).finished()
    logbook._keep_rows(folder / "metrics.jsonl", 2)
    stats.read_curve(folder / "metrics.jsonl")


def read_files(folder: Path) -> None:
    for document in sources.files([str(folder)], None, lambda note: None):
        for _ in document.pieces:
            pass


READERS: dict[str, tuple[int, Callable[[Path], Any]]] = {  # parts of the inputs, and what reads a folder
    "token file, data set": (45, read_data),
    "checkpoint": (30, read_checkpoint),
    "tokenizer": (35, read_tokenizer),
    "settings": (25, lambda folder: settings.build((ModelConfig, TrainConfig), settings.read_file(
        str(folder / "a.toml"), ModelConfig, TrainConfig))),
    "metrics": (30, read_metrics),
    "Hugging Face": (5, lambda folder: huggingface.read_folder(str(folder), folder / "new")),
    "rows": (20, read_files),
    "text": (10, read_files),
}  # fmt: skip


class Slow(BaseException):
    """Too much processor time for one input."""


def overdue(*_: Any) -> None:
    raise Slow(f"more than {SECONDS} s")


def status(name: str) -> int:
    """Bytes of this process, by a name in /proc."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def made(reader: str, number: int, seed: int, valid: list[Files]) -> Files:
    draw = random.Random(f"{seed}/{reader}/{number}")
    return change(draw, draw.choice(valid))


def try_one(read: Callable[[Path], Any], files: Files, folder: Path) -> tuple[str, str]:
    """("accepted" or "refused" or "crash", what was raised) for one input in an empty folder."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        read(folder)
        return "accepted", ""
    except REFUSED:
        return "refused", ""
    except BaseException:
        return "crash", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def work(reader: str, numbers: list[int], seed: int, valid: list[Files], aside: str, answers: Any) -> None:
    """In a process of its own: send (number, how it ended, whether past the outer form, seconds, bytes, why)."""
    signal.signal(signal.SIGPROF, overdue)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    read, errors = READERS[reader][1], os.open(os.devnull, os.O_WRONLY)
    os.dup2(errors, 2)  # panics in Rust are printed
    for number, files in enumerate(valid):  # what is loaded once is no input's
        folder = Path(aside, f"valid{number}")
        folder.mkdir()
        ended, why = try_one(read, files, folder)
        assert ended == "accepted", f"a valid input of {reader}: {why or ended}"
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + MEGABYTES * 2**20,) * 2)
    start = status("VmHWM")
    for number in numbers:
        answers.send((number,))
        folder, files = Path(aside, "input"), made(reader, number, seed, valid)
        folder.mkdir()
        since = time.process_time()
        ended, why = try_one(read, files, folder)
        seconds = time.process_time() - since
        shutil.rmtree(folder)
        try:
            is_past = past(files)
        except BaseException:  # memory that the reader did not give back
            ended, is_past, why = "crash", False, traceback.format_exc()
        answers.send((number, ended, is_past, seconds, status("VmHWM") - start, why))
    answers.send(None)


def watch(reader: str, numbers: list[int], seed: int, valid: list[Files], out: Path) -> dict[str, float]:
    """Run these inputs in processes, a new one after each that died; count how they ended and keep those that crash."""
    told = dict.fromkeys(("inputs", "past", "accepted", "refused", "crash", "slowest", "peak"), 0.0)
    fork, now, memory = multiprocessing.get_context("fork"), -1, Path("/dev/shm")
    while numbers:
        ours, theirs = fork.Pipe(duplex=False)
        aside = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True)
        process = fork.Process(target=work, args=(reader, numbers, seed, valid, aside.name, theirs))
        process.start()
        theirs.close()
        answer: Any = (-1,)
        try:
            while ours.poll(WAIT) and (answer := ours.recv()) is not None:
                now = answer[0]
                if len(answer) == 1:
                    continue
                _, ended, is_past, seconds, peak, why = answer
                told["inputs"] += 1
                told["past"] += is_past
                told[ended] += 1
                told["slowest"], told["peak"] = max(told["slowest"], seconds), max(told["peak"], peak / 2**20)
                if why:
                    keep(out, reader, now, made(reader, now, seed, valid), why)
        except EOFError:
            process.join(60)  # it has ended, or is about to
        process.kill()
        process.join()
        aside.cleanup()
        if answer is None:
            break
        if now < 0:
            raise RuntimeError(f"{reader}: not even its valid inputs could be read ({process.exitcode})")
        if len(answer) == 1:  # it was at this one
            told["inputs"], told["crash"] = told["inputs"] + 1, told["crash"] + 1
            keep(out, reader, now, made(reader, now, seed, valid), f"the process ended: {process.exitcode}")
        numbers = [number for number in numbers if number > now]
    return told


def keep(out: Path, reader: str, number: int, files: Files, why: str) -> None:
    folder = out / f"{reader.replace(' ', '-').replace(',', '')}-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (files | {"why.txt": why.encode("utf-8", "backslashreplace")}).items():
        (folder / name).write_bytes(content)


def main(argv: list[str]) -> int:
    """Print how the inputs of each reader ended; 1 if one crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000, help="of all readers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reader", choices=READERS, help="this one alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="folder for the inputs that crash")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = [given.reader] if given.reader else list(READERS)
    parts = sum(READERS[name][0] for name in names)
    line, whole = "{:<21}{:>8,.0f}{:>7.1%}{:>10,.0f}{:>9,.0f}{:>8,.0f}{:>9.2f} s{:>6,.0f} MB".format, [0.0] * 3
    print(f"{'reader':<21}{'inputs':>8}{'past':>7}{'accepted':>10}{'refused':>9}{'crashes':>8}{'slowest':>11}{'peak':>9}")
    with tempfile.TemporaryDirectory() as folder:
        valid = seeds(Path(folder))
        for name in names:
            numbers = list(range(-(-given.inputs * READERS[name][0] // parts)))
            with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
                slices = [numbers[n :: given.jobs] for n in range(given.jobs)]
                tasks = [pool.submit(watch, name, some, given.seed, valid[name], given.out) for some in slices]
            tolds = [task.result() for task in tasks]
            told = {key: (max if key in ("slowest", "peak") else sum)(one[key] for one in tolds) for key in tolds[0]}
            share = told["past"] / told["inputs"]
            shown = [told[key] for key in ("accepted", "refused", "crash", "slowest", "peak")]
            print(line(name, told["inputs"], share, *shown), flush=True)
            whole = [a + told[key] for a, key in zip(whole, ("inputs", "past", "crash"), strict=True)]
    print(f"{whole[0]:,.0f} inputs, {whole[1] / whole[0]:.1%} past their outer form; {whole[2]:,.0f} crashed")
    return int(whole[2] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
