"""Files from strangers: nothing in them runs, and none takes the memory that it asks for before it is refused."""

import json
import os
import shutil
import struct
import tarfile
from pathlib import Path

import fuzz
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch

import train
from data import DataError, open_dataset, sources
from data.tokenfile import HEADER, MAGIC, TokenFile
from data.tokenizer import ByteTokenizer, Tokenizer
from lab import sweep
from lab.stats import evaluations
from lab.sweep import Run
from model import GPT, ModelConfig
from runtime import checkpoint, logbook, settings
from runtime.checkpoint import load_model, read_tensors
from runtime.errors import UserError
from runtime.huggingface import read_folder, tokenizer_json, write_folder
from runtime.runs import write_run

DEEP, GIANT = "[" * 10**5 + "]" * 10**5, "9" * 10**4


@pytest.fixture
def run(tmp_path):
    """The folder of a small run."""
    config = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=256)
    dataset = {"name": "x", "fingerprint": "y"}
    write_run(tmp_path / "run", config, dict(GPT(config).named_parameters()), ByteTokenizer(), dataset)
    return tmp_path / "run"


def put(run, meta=None, weights=None):
    """Put another meta.json, or other weights with the checksum of theirs, into a run."""
    folder = run / "last"
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    text = json.dumps(json.loads((folder / "meta.json").read_text()) | meta) if isinstance(meta, dict) else meta
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"meta.json": text.encode("utf-8", "surrogatepass")} if text else {}
    (folder / "meta.json").write_bytes(files["meta.json"] if isinstance(meta, str) else fuzz.seal(files))


@pytest.mark.parametrize("count", [2**63, 2**62, 2**64 - 1])
def test_a_token_file_cannot_claim_ids_that_it_does_not_hold(tmp_path, count):
    (tmp_path / "a.bin").write_bytes(HEADER.pack(MAGIC, 1, 4, count) + bytes(8))
    with pytest.raises(DataError, match=f"32 bytes where {count:,} tokens"):
        TokenFile(tmp_path / "a.bin")


def tensors(head, body=bytes(4), length=None):
    head = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(head) if length is None else length) + head + body


def one(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


FILES = {
    "header of 2^60 bytes": tensors(b"{}", length=2**60),
    "overlapping tensors": tensors({"a": one(), "b": one()}),
    "a shape whose product overflows": tensors({"a": one(shape=(2**40, 2**40))}),
    "a size beyond 63 bits": tensors({"a": one(shape=(2**63, 0), offsets=(0, 0))}),
    "a dtype that torch lacks": tensors({"a": one("F8_E8M0", (4,))}),
    "a dtype that nobody has": tensors({"a": one("Q")}),
    "the same name twice": tensors(b'{"a":%s,"a":%s}' % ((json.dumps(one()).encode(),) * 2)),
    "deep nesting": tensors(b'{"a":' + DEEP.encode() + b"}"),
    "more tensors than a model has": tensors(
        b"{%s}" % b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(100_001))
    ),
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_weights_that_are_no_models_are_refused(run, content, tmp_path):
    write_folder(str(run), tmp_path / "hf", "last")
    put(run, weights=content)
    told = "has 100,001 tensors" if content is FILES["more tensors than a model has"] else "is damaged|does not fit"
    with pytest.raises(UserError, match=rf"(model.safetensors|run/last) ({told})"):
        load_model(run)
    (tmp_path / "hf" / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="model.safetensors|has no tensor|finite|of 1 tensors|of [14] numbers"):
        read_folder(str(tmp_path / "hf"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_that_are_no_floating_point_numbers_are_refused(run):
    meta = checkpoint.read_meta(run / "last")
    weights = read_tensors(run / "last", "model.safetensors", meta)
    name = "blocks.0.mlp.w_in.weight"
    put(run, weights=safetensors.torch.save(weights | {name: weights[name].to(torch.int32)}))
    with pytest.raises(UserError, match=f"{name}, and holds int32"):
        load_model(run)


SIZES = [
    {"n_layer": 10**9}, {"n_embd": 5 * 10**8}, {"d_ff": 2**31 - 1}, {"vocab_size": 2**31 - 1},
    {"block_size": 2**31 - 1}, {"n_head": 10**9, "n_kv_head": 10**9},
    {"n_embd": 5 * 10**8, "d_ff": 2 * 10**9}, {"head_dim": 2**31 - 2, "block_size": 2**31 - 1},
    {"positions": "sinusoidal", "rope_theta": None, "block_size": 2**31 - 1},
    {"positions": "learned", "rope_theta": None, "block_size": 2**31 - 1},
]  # fmt: skip


@pytest.mark.parametrize("change", SIZES, ids=str)
def test_no_memory_is_taken_for_settings_that_the_weights_do_not_bear_out(run, change, monkeypatch):
    """Of a model that is built, nothing is more than a shape."""

    def built(config):
        assert torch.get_default_device().type == "meta", "memory was asked for"
        return GPT(config)

    monkeypatch.setattr(checkpoint, "GPT", built)
    model = json.loads((run / "last" / "meta.json").read_text())["model"]
    put(run, {"model": model | change})
    with pytest.raises(UserError, match="does not fit the model"):
        load_model(run)


def test_a_stranger_s_config_json_takes_no_memory_either(run, tmp_path):
    write_folder(str(run), tmp_path / "hf", "last")
    path = tmp_path / "hf" / "config.json"
    whole = json.loads(path.read_text())
    for change in ({"num_hidden_layers": 10**9}, {"hidden_size": 2 * 10**9, "intermediate_size": 2 * 10**9},
                   {"max_position_embeddings": 2**31 - 1}, {"num_hidden_layers": 10**400}, {"vocab_size": "\ud800"},
                   {"rope_theta": 10**400}, {"eos_token_id": [10**400]}):  # fmt: skip
        path.write_text(json.dumps(whole | change))
        with pytest.raises(UserError):
            read_folder(str(tmp_path / "hf"), tmp_path / "new")
        assert not (tmp_path / "new").exists()
    for text in (DEEP, f'{{"a": {GIANT}}}', '{"model_type": NaN}', '"\\ud800"'):
        path.write_text(text)
        with pytest.raises(UserError, match="config.json"):
            read_folder(str(tmp_path / "hf"), tmp_path / "new")


@pytest.mark.usefixtures("handlers_come_back")
@pytest.mark.parametrize("name", ["settings.toml.tmp", "metrics.jsonl", "metrics.jsonl.tmp", "output.txt"])
def test_no_link_in_a_strangers_run_leads_a_write_out_of_it(dataset, tmp_path, command, name):
    """A .bashrc, for one, would then hold settings that the run's author chose, and the shell would run them."""
    folder, mine = tmp_path / "run", tmp_path / "mine"
    model = ["--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--block_size", 16, "--threads", 1, "--eval_tokens", 99]
    assert command(train, "--dataset", dataset, "--max_steps", 2, "--out_dir", folder, *model)[0] == 0
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine)
    mine.touch()
    status, _, err = command(train, "--resume", folder, "--max_steps", 3)
    assert (status, "not the log of a run" in err) == ((2, True) if name == "metrics.jsonl" else (0, False))
    if name == "output.txt":
        sweep.start_here(Run("run", 1, folder, tmp_path / "none.toml", 3, 9)).wait()
    assert mine.read_bytes() == b""


def strange(run, dataset, tmp_path):
    """Folders whose files a test may replace, a run's, a data set's and one of transformers', and what reads each."""
    exported, copied = tmp_path / "hf", tmp_path / "set"
    write_folder(str(run), exported, "last")
    shutil.copytree(dataset, copied)
    return {
        run / "last": lambda: load_model(run),
        copied: lambda: open_dataset(str(copied)),
        exported: lambda: read_folder(str(exported), tmp_path / "new"),
    }


def test_a_pipe_and_a_device_are_refused_and_not_read(run, dataset, tmp_path):
    """To read them never ends."""
    names = ("model.safetensors", "train.bin", "config.json")
    for (folder, read), name in zip(strange(run, dataset, tmp_path).items(), names, strict=True):
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            (folder / name).unlink()
            make(folder / name)
            with pytest.raises((UserError, DataError), match=f"{name} (is not JSON .it )?is no file"):
                read()


def test_a_json_file_that_would_fill_the_memory_is_not_read(run, dataset, tmp_path):
    """Of 20 GB without contents on the disk."""
    names = ("meta.json", "meta.json", "config.json")
    for (folder, read), name in zip(strange(run, dataset, tmp_path).items(), names, strict=True):
        os.truncate(folder / name, 20_000_000_000)
        with pytest.raises((UserError, DataError), match=f"{name} .*has 20,000,000,000 bytes"):
            read()


METAS = [
    DEEP, f'{{"format": {GIANT}}}', '{"format": NaN}', '{"format": "\ud800"}', {"step": float("nan")},
    {"best_loss": float("nan")}, {"best_loss": float("inf")}, {"best_loss": 10**400},
    {"dataset": {"name": 1, "fingerprint": ""}}, {"dataset": {"name": "\ud800", "fingerprint": ""}},
    {"model": {"vocab_size": 10**400}}, {"model": {"vocab_size": 256, "d_ff_ratio": 10**400}},
    {"model": {"vocab_size": 256, "rope_theta": float("nan")}}, {"model": {"x" * 10**6: 1}},
    {"tokenizer": {"kind": "byte", "end": 10**10}}, {"tokenizer": {"kind": "word", "end": False, "words": [1]}},
    {"tokenizer": {"kind": "word", "end": False, "words": "ab"}},
    {"tokenizer": {"kind": "word", "end": False, "words": ["a"] * 10**6}},
    {"tokenizer": {"kind": "char", "end": False, "characters": ["a", "b"]}},
    {"tokenizer": {"kind": "char", "end": False, "characters": "\ud800"}},
    {"tokenizer": {"kind": "bpe", "end": False, "tokens": "A" * 10**7}},
    {"tokenizer": {"kind": "x" * 10**6, "end": False}},
]  # fmt: skip


@pytest.mark.parametrize("meta", METAS, ids=lambda meta: str(meta)[:40].encode("ascii", "replace").decode())
def test_a_hostile_meta_is_refused_in_a_sentence(run, meta):
    put(run, meta)
    with pytest.raises((UserError, DataError)):
        load_model(run)


def described(**changes):
    return {"kind": "hf", "end": False, "end_id": None,
            "json": json.dumps(json.loads(tokenizer_json(ByteTokenizer())) | changes)}  # fmt: skip


def doubling(step, inner, count):
    return {"type": "Sequence", inner: [step] * count}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"normalizer": doubling({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}, "normalizers", 4)},
         "Replace may lengthen"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "a"}}, "Replace may lengthen"),
        ({"normalizer": doubling({"type": "ByteLevel"}, "normalizers", 40)}, "41 steps"),
        ({"pre_tokenizer": doubling({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
                                    "pretokenizers", 40)}, "41 steps"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 10**9}, "unk_token": "a"}}, "ids up to 1000000000"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 10**12}, "unk_token": "a"}}, "not a tokenizer.json"),
    ],
)  # fmt: skip
def test_a_tokenizer_json_that_would_fill_the_memory_is_refused(changes, told):
    with pytest.raises(DataError, match=told):
        Tokenizer.from_meta(described(**changes))


def test_a_panic_of_a_library_is_an_error_like_another():
    panic = type("PanicException", (BaseException,), {})
    from data.tokenizer import panics_told

    with pytest.raises(ValueError, match="gave up: index"), panics_told():
        raise panic("index out of range")
    with pytest.raises(KeyboardInterrupt), panics_told():
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"n_layer = {DEEP}", "nested too deep"),
        (f'dataset = "{"x" * 10**7}"', "bytes are more than settings take"),
        (f"n_layer = {GIANT}", "4300 digits"),
        (f"n_layer = 0x{GIANT}", "4300 digits"),
        ("n_layer = 1" + "0" * 400, "below 2"),
        ("rope_theta = 1" + "0" * 400, "not a number|is not a number"),
        ("rope_theta = nan", "nan is not a number"),
        (f"{'x' * 10**6} = 1", "unknown setting"),
        ('positions = "\\u0000"', "one of rotary"),
    ],
    ids=range(9),
)
def test_hostile_settings_are_refused_in_a_sentence(tmp_path, text, told):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UserError, match=told):
        settings.parse([str(tmp_path / "a.toml")], ModelConfig, prog="x", description="x")


def test_a_sentence_about_a_huge_value_stays_short(command, tmp_path):
    import train

    (tmp_path / "a.toml").write_text(f"{'x' * 10**6} = 1")
    status, _, err = command(train, tmp_path / "a.toml")
    assert status == 2 and len(err) < 2500 and err.endswith('--help lists them all\n') and "a.toml: unknown" in err


@pytest.mark.parametrize(
    "line", [DEEP, f'{{"text": {GIANT}}}', '{"text": "\\ud800"}', '{"text": NaN}', "[]", "\xff"], ids=range(6)
)
def test_hostile_rows_are_refused_by_file(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(line.encode("latin-1"))
    with pytest.raises(DataError, match="a.jsonl"):
        list(sources.files([str(tmp_path / "a.jsonl")], None, print))


def test_hostile_parquet_is_refused_by_file(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 9}), path)
    whole = path.read_bytes()
    size = struct.unpack("<I", whole[-8:-4])[0]
    for content in (b"", whole[:-9] + whole[-8:], whole[:-8] + struct.pack("<I", 2**31) + b"PAR1",
                    whole[: -8 - size] + b"\xff" * size + whole[-8:], b"PAR1" * 3):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(DataError, match="a.parquet"):
            list(sources.files([str(path)], None, print))


def test_hostile_lines_of_a_log_are_skipped_or_named(tmp_path):
    row = {"step": 1, "tokens": 8, "val_loss": 2.5, "val_tokens": 9, "elapsed": 0.5}
    odd = [row | {"val_loss": 10**400}, row | {"step": None}, row | {"tokens": "x"}, [], 1, None]
    lines = [json.dumps(line) for line in odd] + [DEEP, GIANT, "\ud800"]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("\n".join([json.dumps(row), *lines]).encode("utf-8", "surrogatepass"))
    assert evaluations(path) == [row]
    path.write_text("\n".join([json.dumps(row), DEEP[:2000] + DEEP[-2000:]]))
    assert Run("x", 1, tmp_path, tmp_path, 3, 9).last_row() == row
    path.write_text("\n".join([json.dumps(row), json.dumps(row | {"elapsed": 10**400}), DEEP]))
    with pytest.raises(UserError, match="line 2 is damaged"):
        logbook._keep_rows(path, 3)


@pytest.mark.parametrize(
    "probe", [1, {}, {"length": 0}, {"length": 8, "floor": "x"}, {"length": 8, "floor": 0, "guess": 10**400}]
)
def test_what_a_data_set_says_of_a_probe_is_numbers(dataset, tmp_path, probe):
    path = tmp_path / "set"
    path.mkdir()
    for split in ("train", "val"):
        (path / f"{split}.bin").symlink_to(f"{dataset}/{split}.bin")
    meta = json.loads(Path(dataset, "meta.json").read_text())
    val = meta["splits"]["val"]
    many = [{"splits": meta["splits"] | {"val": val | {"targets": count}}} for count in (0, val["tokens"] + 1)]
    for change in ({"probe": probe}, *many):
        (path / "meta.json").write_text(json.dumps(meta | change))
        with pytest.raises(DataError, match="meta.json is damaged"):
            open_dataset(str(path))


def test_no_script_and_no_pickle_of_a_hub_data_set_is_opened(tmp_path):
    """`datasets` is pinned to a release that runs no script; its reader of tar files would open pickles."""
    script, tar = tmp_path / "script", tmp_path / "tar"
    script.mkdir()
    (script / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    tar.mkdir()
    (tmp_path / "a.pth").write_bytes(b"\x80\x04.")
    with tarfile.open(tar / "a.tar", "w") as archive:
        archive.add(tmp_path / "a.pth", "a.pth")
    with pytest.raises(DataError, match="cannot be read"):
        list(sources.hub(str(script), None, "train", "text", tmp_path / "kept.jsonl"))
    assert not (tmp_path / "ran").exists()
    (tmp_path / "kept.jsonl").unlink()
    with pytest.raises(DataError, match="is kept as webdataset: take"):
        list(sources.hub(str(tar), None, "train", "text", tmp_path / "kept.jsonl"))


def fuzzed(tmp_path, capsys, *words):
    status = fuzz.main(["--jobs", "1", "--out", str(tmp_path / "out"), *words])
    return status, capsys.readouterr().out


def test_a_short_fuzz_run_finds_nothing(tmp_path, capsys):
    status, told = fuzzed(tmp_path, capsys, "--inputs", "300")
    assert status == 0 and " 0 crashed" in told and not (tmp_path / "out").exists(), told
    assert float(told.splitlines()[-1].split()[2].rstrip("%")) > 50  # most come past the outer form


def hog(path):
    return bytearray(2**31)


def dead(path):
    os._exit(3)


@pytest.mark.parametrize(
    ("bug", "why"), [({}.__getitem__, "KeyError"), (hog, "MemoryError"), (dead, "the process ended: 3")]
)
def test_a_fuzz_run_tells_a_reader_that_crashes_and_keeps_what_did_it(tmp_path, capsys, monkeypatch, bug, why):
    odd = lambda path: path.parent.name == "input"  # noqa: E731 - the valid ones are read before, and have to be
    monkeypatch.setattr(fuzz.stats, "read_curve", lambda path: odd(path) and bug(path))
    status, told = fuzzed(tmp_path, capsys, "--inputs", "20", "--reader", "metrics")
    kept = sorted((tmp_path / "out").glob("metrics-*"))
    assert status == 1 and kept and f"{len(kept)} crashed" in told
    assert why in (kept[0] / "why.txt").read_text() and (kept[0] / "metrics.jsonl").exists()
