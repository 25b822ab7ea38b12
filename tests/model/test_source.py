"""Where a model's files come from, with a Hub of our own: a small server that answers as the real one does."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from penstock.errors import ModelError
from penstock.model.load import load_tokenizer
from penstock.model.source import find_source
from penstock.recipe.recipe import Recipe

SHA = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "original/model.safetensors": b"the same again",
}
REFUSALS = {  # owner -> status, the Hub's own error code
    "gated": (403, "GatedRepo"),
    "private": (401, "RepoNotFound"),
    "missing": (404, "RepoNotFound"),
    "broken": (503, ""),
}


class Hub(BaseHTTPRequestHandler):
    fetched: ClassVar[list[str]] = []

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        owner = parts[2] if api else parts[0]
        status, code = REFUSALS.get(owner, (200, ""))
        if "nowhere" in self.path:
            status, code = 404, "RevisionNotFound"
        if status != 200:
            return self.send(status, b"{}", {"X-Error-Code": code}, body=body)
        if api and "tree" in parts:
            tree = [{"type": "file", "path": n, "size": len(c), "oid": SHA} for n, c in FILES.items()]
            return self.send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body=body)
        if api:
            info = {"id": "someone/model", "sha": SHA, "siblings": [{"rfilename": name} for name in FILES]}
            return self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body=body)
        file = "/".join(parts[4:])
        if file not in FILES:  # the client's statistics
            return self.send(404, b"", {}, body=body)
        if body:
            self.fetched.append(file)
        return self.send(200, FILES[file], {"ETag": f'"{file}"', "X-Repo-Commit": SHA}, body=body)

    def send(self, status, content, headers, *, body):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The server's address as the Hub's, and an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    Hub.fetched.clear()
    point_at(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def point_at(monkeypatch, tmp_path, endpoint):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def test_small_files_first_and_weights_when_asked_for(hub):
    source = find_source("someone/model")
    assert sorted(p.name for p in source.directory.iterdir()) == ["config.json", "tokenizer.json"]
    source = find_source("someone/model", weights=True)
    assert (source.directory / "model.safetensors").read_bytes() == b"weights"
    assert sorted(Hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert source.directory.name == SHA


def test_what_was_fetched_serves_when_the_hub_is_away(hub, monkeypatch, tmp_path):
    fetched = find_source("someone/model", weights=True)
    point_at(monkeypatch, tmp_path, "http://127.0.0.1:9")
    assert find_source("someone/model", weights=True) == fetched


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("gated/model", None, r"accepted its terms\n.*HF_TOKEN to your access token \(HF_TOKEN is not set\)"),
        ("private/model", None, r"no permission to read it\n.*HF_TOKEN"),
        ("missing/model", None, "no such model on the Hub"),
        ("someone/model", "nowhere", "has no revision 'nowhere'"),
        ("broken/model", None, "the Hub cannot be reached.*503"),
    ],
)
def test_refusals_say_why(hub, name, revision, message):
    with pytest.raises(ModelError, match=message):
        find_source(name, revision)


def test_unreachable_hub_is_said_within_seconds_with_the_alternatives(monkeypatch, tmp_path):
    point_at(monkeypatch, tmp_path, "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ModelError, match="cannot be reached") as error:
        find_source("someone/model")
    assert time.monotonic() - start < 5
    for way in ("--model PATH", "HF_HOME", "--model demo", "--init random"):
        assert way in str(error.value)


def test_offline_by_choice_asks_nobody(monkeypatch, tmp_path):
    point_at(monkeypatch, tmp_path, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        find_source("someone/model")


def test_local_sources(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert find_source(str(tmp_path)).directory == tmp_path
    source = find_source(str(tmp_path / "m.gguf"))
    assert (source.directory, source.gguf) == (tmp_path, {"gguf_file": "m.gguf"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/place", "no such directory"),
        ("./nowhere", "no such directory"),
        ("nowhere.gguf", "no such GGUF file"),
        (str(Path(__file__)), "is a file, but not a GGUF file"),
    ],
)
def test_paths_that_lead_nowhere(name, message):
    with pytest.raises(ModelError, match=message):
        find_source(name)


@pytest.mark.parametrize("name", ["/no/such/place", "nowhere.gguf"])
@pytest.mark.parametrize("flag", ["model", "tokenizer"])
def test_the_flag_to_check_is_the_one_that_was_given(name, flag):
    with pytest.raises(ModelError, match=f"Check the path given to --{flag}"):
        load_tokenizer(Recipe(**{flag: name}))
