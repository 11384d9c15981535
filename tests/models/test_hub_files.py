"""Files of published models: where they are found, that a download happens once, that every later use is checked."""

from __future__ import annotations

import hashlib
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from lantern_bench.cli import main as cli
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io import files
from lantern_bench.models.io.hub_files import (
    SOURCES,
    WEIGHTS_FOLDER_VARIABLE,
    ExpectedPaths,
    HubFile,
    Ledger,
    Licence,
    Part,
    Source,
    find_part,
    hashes_of,
    require_part,
    weights_root,
)

COMMIT = "c0ffee" * 6 + "beef"
OTHER = Licence("Other", "read this first")
CONTENT = {name: f"content of {name}".encode() * 9 for name in ("big.pt", "vq.pt", "config.json", "conv.safetensors")}


def sha(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def one_model(tmp_path, monkeypatch):
    """One published model, `toy`, whose VQ is pinned; an empty cache, and no Hugging Face cache."""
    official = Source("maker/toys", (HubFile("big.pt"),), Licence("MIT"), layout="official")
    converted = Source("other/toy-hf", (HubFile("conv.safetensors"), HubFile("config.json")), OTHER, layout="hf")
    vq = Source("maker/toys", (HubFile("vq.pt", sha(CONTENT["vq.pt"])),), OTHER, revision=COMMIT)
    drafter = Source("other/toy-drafter", (HubFile("config.json"), HubFile("more.json", optional=True)), OTHER)
    parts = (Part("target", (official, converted)), Part("tokenizer", (vq,)), Part("drafter", (drafter,)))
    monkeypatch.setitem(SOURCES, "toy", parts)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(WEIGHTS_FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


class FakeHub(BaseHTTPRequestHandler):
    """The part of the Hugging Face hub that a download uses, with the files of `content` at the commit COMMIT.

    `refused` maps a file's name to its HTTP status, a repository's to status and error code; `asked` lists sent files.
    """

    content: ClassVar[dict[str, bytes]] = {}
    named: ClassVar[dict[str, str]] = {}
    refused: ClassVar[dict[str, int | tuple[int, str]]] = {}
    asked: ClassVar[list[str]] = []
    requests: ClassVar[int] = 0

    def do_GET(self):
        type(self).requests += 1
        if self.path.startswith("/api/models/"):
            if self.path.split("/")[4] in self.refused:
                return self.reply(b"", *self.refused[self.path.split("/")[4]])
            return self.reply(json.dumps(self.tree() if "/tree/" in self.path else self.info()).encode())
        name = self.path.rsplit("/", 1)[1]
        assert f"/resolve/{COMMIT}/" in self.path
        if name in self.refused:
            return self.reply(b"", self.refused[name])
        if self.command == "GET":
            self.asked.append(self.path[1:].replace(f"resolve/{COMMIT}/", ""))
        return self.reply(self.content[name], etag=sha(self.content[name]))

    do_HEAD = do_GET

    def lfs(self, name):
        return {"sha256": self.named.get(name, sha(self.content[name])), "size": 1, "pointerSize": 1}

    def info(self):
        files = [{"rfilename": name, "size": len(value)} for name, value in self.content.items()]
        tagged = [
            file | ({"lfs": self.lfs(file["rfilename"])} if file["rfilename"] in self.named else {}) for file in files
        ]
        return {"id": "x/y", "sha": COMMIT, "siblings": tagged}

    def tree(self):
        return [{"type": "file", "path": name, "size": len(v), "oid": sha(v)[:40]} for name, v in self.content.items()]

    def reply(self, body, status=200, error="", etag="none"):
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A fake hub on this machine, which huggingface_hub takes for the real one."""
    fresh = {"content": CONTENT | {"more.json": b"{}"}, "named": {}, "refused": {}, "asked": [], "requests": 0}
    fake = type("Fake", (FakeHub,), fresh)
    server = ThreadingHTTPServer(("127.0.0.1", 0), fake)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    place = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", place)
    template = place + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield fake
    server.shutdown()
    server.server_close()


def typed(*words):
    return cli.main(["weights", *map(str, words)])


def test_get_shows_licences_downloads_and_records_files(tmp_path, hub, capsys):
    root = tmp_path / "w"
    assert typed("get", "toy", "--dir", root) == 0
    said = capsys.readouterr().err
    assert said.index("Other: maker/toys, other/toy-drafter") < said.index("big.pt")
    assert "read this first" in said and "MIT: maker/toys" in said
    assert "big.pt: revision c0ffeec0ffee (unpinned, moves with its repository)" in said and "recorded now" in said
    assert "vq.pt: revision c0ffeec0ffee (pinned)" in said and "as known before" in said
    assert f"export LANTERN_BENCH_WEIGHTS={root}" in said
    assert (root / "maker/toys/big.pt").read_bytes() == CONTENT["big.pt"]
    entry = Ledger(root).entry("maker/toys", "big.pt")
    assert entry == {"sha256": sha(CONTENT["big.pt"]), "bytes": len(CONTENT["big.pt"]), "revision": COMMIT}
    assert sorted(hub.asked) == [
        "maker/toys/big.pt",
        "maker/toys/vq.pt",
        "other/toy-drafter/config.json",
        "other/toy-drafter/more.json",
    ]


def test_get_again_downloads_nothing_and_works_offline(tmp_path, hub, capsys, monkeypatch):
    assert typed("get", "toy", "--dir", tmp_path) == 0
    before = hub.requests
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert typed("get", "toy", "--dir", tmp_path) == 0
    assert "every file is here" in capsys.readouterr().err and hub.requests == before


def test_get_resumes_after_a_failed_download(tmp_path, hub, capsys):
    hub.refused["vq.pt"] = 400
    assert typed("get", "toy", "--dir", tmp_path) == 3
    said = capsys.readouterr().err
    assert "maker/toys: cannot be downloaded" in said and "the same command continues" in said
    assert "Traceback" not in said
    hub.refused.clear()
    assert typed("get", "toy", "--dir", tmp_path) == 0
    assert hub.asked.count("maker/toys/big.pt") == hub.asked.count("maker/toys/vq.pt") == 1


@pytest.mark.parametrize("why", ["pinned", "recorded", "named by the hub"])
def test_downloaded_file_with_another_hash_is_removed(tmp_path, hub, why, capsys):
    name = "vq.pt" if why == "pinned" else "big.pt"
    if why == "pinned":
        hub.content[name] = b"tampered"
    if why == "recorded":
        Ledger(tmp_path).record("maker/toys", name, "0" * 64, 1, COMMIT)
    if why == "named by the hub":
        hub.named[name] = "1" * 64
    assert typed("get", "toy", "--dir", tmp_path) == 3
    said = capsys.readouterr().err
    assert f"{name}: SHA-256" in said and "removed" in said
    assert not (tmp_path / "maker/toys" / name).exists()
    assert Ledger(tmp_path).entry("maker/toys", name).get("sha256") in (None, "0" * 64)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "gated repository: accept its licence first"),
        (404, "RepoNotFound", "the hub no longer has this repository or revision"),
        (400, "", "cannot be downloaded"),
    ],
)
def test_refusal_of_the_hub_is_one_line_with_advice(tmp_path, hub, capsys, status, code, said):
    hub.refused["toys"] = (status, code)
    assert typed("get", "toy", "--dir", tmp_path) == 3
    written = capsys.readouterr().err
    assert f"maker/toys: {said}" in written and "Traceback" not in written and not hub.asked


def test_file_missing_from_its_repository_is_refused(tmp_path, hub, capsys):
    del hub.content["more.json"], hub.content["vq.pt"]
    assert typed("get", "toy", "--dir", tmp_path) == 3
    assert "maker/toys: the repository no longer has vq.pt" in capsys.readouterr().err and not hub.asked


def test_files_are_recorded_at_first_use_and_compared_afterwards(tmp_path):
    target = tmp_path / "maker/toys/big.pt"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"one's own copy")
    recorded = hashes_of(require_part("toy", "target", tmp_path), tmp_path)
    assert recorded == {"big.pt": sha(b"one's own copy")}
    target.write_bytes(b"another file")
    with pytest.raises(RefusedError, match="the file changed"):
        hashes_of(require_part("toy", "target", tmp_path), tmp_path)


def test_hashes_of_a_part_are_recorded_once(tmp_path):
    folder = tmp_path / "other/toy-hf"
    folder.mkdir(parents=True)
    for name in ("conv.safetensors", "config.json"):
        (folder / name).write_bytes(CONTENT[name])
    found = require_part("toy", "target", tmp_path)
    assert found.source.layout == "hf" and found.folder == folder
    wanted = {name: sha(CONTENT[name]) for name in ("conv.safetensors", "config.json")}
    assert hashes_of(found, tmp_path) == wanted == hashes_of(found, tmp_path)
    assert json.loads((tmp_path / "weights.json").read_text())["files"]["other/toy-hf/config.json"]["revision"] is None


@pytest.mark.parametrize("place", ["maker/toys", "toys", "."])
def test_files_are_found_in_usual_directories(tmp_path, place):
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vq.pt").write_bytes(b"")
    assert require_part("toy", "tokenizer", tmp_path).path == folder / "vq.pt"


@pytest.mark.parametrize("place", ["t5", "t5-ckpt", "google", ""])
def test_text_encoder_is_found_in_the_authors_layout(tmp_path, place):
    folder = tmp_path / place / "flan-t5-xl"
    folder.mkdir(parents=True)
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "pytorch_model.bin.index.json"]
    for name in [*names, "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]:
        (folder / name).write_text("")
    found = find_part("llamagen-t2i-stage1", "text_encoder", tmp_path)
    assert found is not None and found.folder == folder
    (folder / "tokenizer.json").unlink()
    assert find_part("llamagen-t2i-stage1", "text_encoder", tmp_path) is None


def test_files_are_found_in_the_hugging_face_cache(tmp_path):
    kept = tmp_path / "hub/models--maker--toys"
    for commit, file in (("abc", "big.pt"), (COMMIT, "vq.pt")):
        (kept / "snapshots" / commit).mkdir(parents=True)
        (kept / "snapshots" / commit / file).write_bytes(b"x")
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text("abc")
    assert require_part("toy", "target", tmp_path / "none").path == kept / "snapshots/abc/big.pt"
    # The pinned revision, whatever the newest one is.
    assert require_part("toy", "tokenizer", tmp_path / "none").path == kept / "snapshots" / COMMIT / "vq.pt"


def test_missing_part_is_one_line_with_the_command(tmp_path, monkeypatch):
    with pytest.raises(RefusedError) as caught:
        require_part("toy", "target", tmp_path)
    assert caught.value.exit_code == 3 and "\n" not in caught.value.message
    assert "maker/toys big.pt" in caught.value.message and "weights get toy" in str(caught.value.advice)
    with pytest.raises(UserError, match="no published files of this model are known"):
        require_part("llamagen-c2i-XL-256", "target", tmp_path)
    monkeypatch.setenv(WEIGHTS_FOLDER_VARIABLE, str(tmp_path))
    assert ExpectedPaths("toy")["target"] == tmp_path / "maker/toys/big.pt"


def test_offline_error_names_the_variable_and_sends_nothing(tmp_path, hub, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert typed("get", "toy", "--dir", tmp_path) == 3
    said = capsys.readouterr().err
    assert "HF_HUB_OFFLINE forbids" in said and "LANTERN_BENCH_WEIGHTS" in said
    assert hub.requests == 0 and not any(tmp_path.rglob("*.pt"))


def test_unreachable_hub_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert typed("get", "toy", "--dir", tmp_path) == 3
    said = capsys.readouterr().err
    assert "maker/toys: cannot be downloaded: " in said and "Traceback" not in said


def test_files_are_found_under_the_root(tmp_path, monkeypatch):
    assert weights_root() == tmp_path / "cache/lantern-bench/weights"
    monkeypatch.setenv(WEIGHTS_FOLDER_VARIABLE, str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/vq.pt").write_bytes(b"")
    assert require_part("toy", "tokenizer").path == tmp_path / "mine/vq.pt"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["get", "toyy"], "did you mean toy"),
        (["get", "lanterns"], "has no files to fetch"),
        (["get", "llamagen-c2i-XL-256"], "has no files to fetch"),
        (["get", "nothing-like-it"], "unknown model"),
    ],
)
def test_unknown_or_unpublished_models_are_refused(words, wrong, capsys):
    assert typed(*words) == 2
    assert wrong in capsys.readouterr().err


def test_damaged_ledger_and_file_as_directory_are_refused(tmp_path, capsys):
    (tmp_path / "weights.json").write_text("[]")
    with pytest.raises(UserError, match=r"weights\.json: damaged"):
        Ledger(tmp_path).entry("maker/toys", "big.pt")
    assert typed("get", "toy", "--dir", tmp_path / "weights.json") == 2
    assert "is a file, not a folder" in capsys.readouterr().err


def test_large_files_are_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_WORTH_REMEMBERING", 4)
    path = tmp_path / "large.pt"
    path.write_bytes(b"12345678")
    read = []
    real = files.file_sha256
    monkeypatch.setattr(files, "file_sha256", lambda path: read.append(path) or real(path))
    assert files.remembered_sha256(path) == sha(b"12345678") == files.remembered_sha256(path) and len(read) == 1
    path.write_bytes(b"87654321")
    os.utime(path, ns=(1, 1))
    assert files.remembered_sha256(path) == sha(b"87654321") and len(read) == 2
    (files.cache_folder() / "hashes.json").write_text("damaged")
    assert files.remembered_sha256(path) == sha(b"87654321")


def test_sources_are_well_formed():
    for parts in (parts for name, parts in SOURCES.items() if name != "toy"):
        assert {part.name for part in parts} <= {"target", "tokenizer", "drafter", "text_encoder"}
        for source in (choice for part in parts for choice in part.choices):
            assert source.repo.count("/") == 1 and source.licence.name
            assert source.revision == "main" or len(source.revision) == 40
            assert all(file.sha256 is None or len(file.sha256) == 64 for file in source.files)
    assert "Chameleon" in SOURCES["anole-7b"][0].choices[0].licence.note


def test_shards_are_found_by_their_index(tmp_path, hub, monkeypatch, capsys):
    """A repository may hold its weights in any number of shards; one source serves two parts and is fetched once."""
    files = (HubFile("model.safetensors", sharded=True), HubFile("config.json"))
    source = Source("maker/big", files, Licence("MIT"), layout="hf")
    monkeypatch.setitem(SOURCES, "big", (Part("target", (source,)), Part("tokenizer", (source,))))
    names = [f"model-{shard:05}-of-00002.safetensors" for shard in (1, 2)]
    index = json.dumps({"weight_map": {f"layer{number}": name for number, name in enumerate(names)}}).encode()
    hub.content = {"config.json": b"{}", "model.safetensors.index.json": index, "other-00001-of-00002.bin": b"x"}
    hub.content |= {name: name.encode() for name in names}
    root = tmp_path / "w"
    assert typed("get", "big", "--dir", root) == 0
    assert sorted(hub.asked) == [
        f"maker/big/{name}" for name in ("config.json", *names, "model.safetensors.index.json")
    ]
    found = require_part("big", "tokenizer", root)
    assert found.path.name == "model.safetensors.index.json" and set(found.paths) > set(names)
    assert typed("get", "big", "--dir", root) == 0 and len(hub.asked) == 4
    (root / "maker/big" / names[1]).unlink()
    assert find_part("big", "target", root) is None
    hub.asked.clear()
    assert typed("get", "big", "--dir", root) == 0
    assert names[1] in " ".join(hub.asked)
