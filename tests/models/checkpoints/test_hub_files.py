"""Files of published models: where they are found, and that downloads happen once and continue."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from lantern_bench.cli import main as cli
from lantern_bench.models.checkpoints import hub
from lantern_bench.models.checkpoints.hub import (
    LICENCE_NOTES,
    PARTS,
    Source,
    expected_path,
    local_path,
    local_paths,
    missing_sources,
)
from lantern_bench.storage.run_directory import results_root
from lantern_bench.utils import files as files_module
from lantern_bench.utils import hashes
from lantern_bench.utils.errors import RefusedError, UserError

COMMIT = "c0ffee" * 6 + "beef"
OTHER = "Other"
SHARDS = [f"model-{shard:05}-of-00002.safetensors" for shard in (1, 2)]
INDEX = json.dumps(
    {"weight_map": {f"layer{number}": name for number, name in enumerate(SHARDS)}}
).encode()
CONTENT = {
    name: f"content of {name}".encode() * 9 for name in ("big.pt", "vq.pt", "config.json", *SHARDS)
}
CONTENT |= {"model.safetensors.index.json": INDEX, "other-00001-of-00002.bin": b"x"}


def sha(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def published(tmp_path, monkeypatch):
    """Published models: `toy`, whose VQ is of a pinned revision, and `big`, in one folder; nothing
    is here.
    """
    official = Source("maker/toys", "MIT", "big.pt")
    converted = Source("other/toy-hf", OTHER)
    vq = Source(repo="maker/toys", licence=OTHER, file="vq.pt", revision=COMMIT)
    drafter = Source("other/toy-drafter", OTHER, "config.json")
    folder = Source("maker/big", "MIT")
    toy = {"target": (official, converted), "tokenizer": (vq,), "drafter": (drafter,)}
    monkeypatch.setattr(
        hub, "PARTS", {"toy": toy, "big": {"target": (folder,), "tokenizer": (folder,)}}
    )
    monkeypatch.setattr(hub, "LICENCE_NOTES", {OTHER: "read this first"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(hub.WEIGHTS_VARIABLE, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


class FakeHub(BaseHTTPRequestHandler):
    """The part of the Hugging Face hub that a download uses, with the files of `content` at the
    commit COMMIT.

    `refused` maps a file's name to its HTTP status, a repository's to status and error code;
    `asked` lists sent files.
    """

    content: ClassVar[dict[str, bytes]] = {}
    refused: ClassVar[dict[str, int | tuple[int, str]]] = {}
    asked: ClassVar[list[str]] = []
    requests: ClassVar[int] = 0

    def do_GET(self):
        type(self).requests += 1
        if self.path.startswith("/api/models/"):
            if self.path.split("/")[4] in self.refused:
                return self.reply(b"", *self.refused[self.path.split("/")[4]])
            return self.reply(
                json.dumps(self.tree() if "/tree/" in self.path else self.info()).encode()
            )
        name = self.path.rsplit("/", 1)[1]
        assert f"/resolve/{COMMIT}/" in self.path
        if name in self.refused:
            return self.reply(b"", self.refused[name])
        if self.command == "GET":
            self.asked.append(self.path[1:].replace(f"resolve/{COMMIT}/", ""))
        return self.reply(self.content[name], etag=sha(self.content[name]))

    def do_HEAD(self):
        self.do_GET()

    def info(self):
        files = [{"rfilename": name, "size": len(value)} for name, value in self.content.items()]
        return {"id": "x/y", "sha": COMMIT, "siblings": files}

    def tree(self):
        return [
            {"type": "file", "path": name, "size": len(v), "oid": sha(v)[:40]}
            for name, v in self.content.items()
        ]

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
def fake_hub(monkeypatch):
    """A fake hub on this machine, which huggingface_hub takes for the real one."""
    fresh = {"content": dict(CONTENT), "refused": {}, "asked": [], "requests": 0}
    fake = type("Fake", (FakeHub,), fresh)
    server = ThreadingHTTPServer(("127.0.0.1", 0), fake)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield fake
    server.shutdown()
    server.server_close()


def typed(words):
    return cli.main(["weights", *map(str, words)])


def test_get_shows_licences_and_downloads_the_files(tmp_path, fake_hub, capsys):
    root = tmp_path / "w"
    assert typed(["get", "toy", "--dir", root]) == 0
    output = capsys.readouterr().err
    assert output.index("Other: maker/toys, other/toy-drafter") < output.index("big.pt")
    assert "read this first" in output
    assert "MIT: maker/toys" in output
    assert "maker/toys (unpinned, moves with its repository): " in output
    assert "maker/toys (c0ffeec0ffee): " in output
    assert f"export LANTERN_BENCH_WEIGHTS={root}" in output
    assert (root / "maker/toys/big.pt").read_bytes() == CONTENT["big.pt"]
    asked = ["maker/toys/big.pt", "maker/toys/vq.pt", "other/toy-drafter/config.json"]
    assert sorted(fake_hub.asked) == asked


def test_files_come_into_the_hugging_face_cache_and_are_found_there(tmp_path, fake_hub):
    assert typed(["get", "toy"]) == 0
    paths = local_paths("toy")
    assert paths["target"].read_bytes() == CONTENT["big.pt"]
    assert paths["target"].is_relative_to(tmp_path / "hub")
    # The pinned revision, whatever the newest one is.
    assert COMMIT in str(paths["tokenizer"])
    assert missing_sources("toy") == []


def test_get_again_downloads_nothing_and_works_offline(tmp_path, fake_hub, capsys, monkeypatch):
    assert typed(["get", "toy", "--dir", tmp_path]) == 0
    before = fake_hub.requests
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert typed(["get", "toy", "--dir", tmp_path]) == 0
    assert "every file is here" in capsys.readouterr().err
    assert fake_hub.requests == before


def test_get_resumes_after_a_failed_download(tmp_path, fake_hub, capsys):
    fake_hub.refused["vq.pt"] = 400
    assert typed(["get", "toy", "--dir", tmp_path]) == 3
    output = capsys.readouterr().err
    assert "maker/toys: cannot be downloaded" in output
    assert "the same command continues" in output
    assert "Traceback" not in output
    fake_hub.refused.clear()
    assert typed(["get", "toy", "--dir", tmp_path]) == 0
    assert (
        fake_hub.asked.count("maker/toys/big.pt") == fake_hub.asked.count("maker/toys/vq.pt") == 1
    )


def test_shards_are_found_by_their_index(tmp_path, fake_hub):
    """A repository may hold its weights in any number of shards; one source serves two parts and is
    fetched once.
    """
    root = tmp_path / "w"
    assert typed(["get", "big", "--dir", root]) == 0
    wanted = ["big.pt", "other-00001-of-00002.bin", "vq.pt"]
    assert sorted(fake_hub.asked) == sorted(
        f"maker/big/{name}" for name in CONTENT if name not in wanted
    )
    (source,) = hub.PARTS["big"]["target"]
    assert source.found_in(root / "maker/big") == root / "maker/big"
    (root / "maker/big" / SHARDS[1]).unlink()
    assert source.found_in(root / "maker/big") is None
    fake_hub.asked.clear()
    assert typed(["get", "big", "--dir", root]) == 0
    assert fake_hub.asked == [f"maker/big/{SHARDS[1]}"]


@pytest.mark.parametrize(
    ("refused", "output"),
    [
        ({"toys": (403, "GatedRepo")}, "gated repository: accept its licence first"),
        ({"toys": (404, "RepoNotFound")}, "the hub no longer has this repository or revision"),
        ({"toys": (400, "")}, "cannot be downloaded"),
        (None, "cannot be downloaded: "),
    ],
)
def test_refusal_of_the_hub_is_one_line_with_advice(
    *, tmp_path, fake_hub, capsys, monkeypatch, refused, output
):
    """None: there is nothing at the hub's address."""
    fake_hub.refused.update(refused or {})
    if refused is None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert typed(["get", "toy", "--dir", tmp_path]) == 3
    written = capsys.readouterr().err
    assert f"maker/toys: {output}" in written
    assert "Traceback" not in written
    assert not fake_hub.asked


def test_file_missing_from_its_repository_is_refused(tmp_path, fake_hub, capsys):
    del fake_hub.content["vq.pt"]
    assert typed(["get", "toy", "--dir", tmp_path]) == 3
    assert "maker/toys: the repository no longer has vq.pt" in capsys.readouterr().err


def test_offline_error_names_the_variable_and_sends_nothing(
    tmp_path, fake_hub, capsys, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert typed(["get", "toy", "--dir", tmp_path]) == 3
    output = capsys.readouterr().err
    assert "HF_HUB_OFFLINE forbids" in output
    assert "LANTERN_BENCH_WEIGHTS" in output
    assert fake_hub.requests == 0
    assert not any(tmp_path.rglob("*.pt"))


def test_a_tilde_in_a_variable_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (hub.WEIGHTS_VARIABLE, "LANTERN_BENCH_CACHE", "LANTERN_BENCH_RESULTS", "HF_HOME"):
        monkeypatch.setenv(name, "~/x")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert hub.weights_folder() == tmp_path / "x"
    assert hub._hub_cache() == tmp_path / "x/hub"
    assert files_module.cache_folder() == tmp_path / "x"
    assert results_root() == tmp_path / "x"


@pytest.fixture
def homeless(monkeypatch):
    """A user without a home folder, and no variable that names another folder."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "LANTERN_BENCH_CACHE"):
        monkeypatch.setenv(name, "")
    yield
    files_module.temporary_cache.cache_clear()
    files_module.cache_problems.clear()


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "--dir", None])
def test_without_a_home_a_folder_must_be_named(
    *, tmp_path, fake_hub, capsys, monkeypatch, homeless, variable
):
    """The temporary cache would be removed with the files when the command ends."""
    words = ["get", "toy"]
    if variable == "--dir":
        words += ["--dir", tmp_path]
    elif variable:
        monkeypatch.setenv(variable, str(tmp_path))
    code = typed(words)
    written = capsys.readouterr().err
    if variable:
        assert code == 0, written
        assert len(list(tmp_path.rglob("big.pt"))) == 1
    else:
        assert code == 3
        reason = "HOME is not set and this user has no home folder"
        assert f"error: maker/toys: {reason}, so nothing would be kept" in written
        for name in ("--dir FOLDER", "LANTERN_BENCH_WEIGHTS", "HF_HOME"):
            assert name in written
        assert fake_hub.requests == 0


def test_a_folder_that_cannot_be_made_is_named(fake_hub, capsys):
    assert typed(["get", "toy", "--dir", "/proc/nothing/here"]) == 3
    written = capsys.readouterr().err
    assert "maker/toys: cannot be written: " in written
    assert "/proc/nothing" in written
    assert "give --dir FOLDER" in written


def test_any_source_of_a_part_is_found_below_the_named_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(hub.WEIGHTS_VARIABLE, str(tmp_path))
    target = hub.PARTS["toy"]["target"]
    assert expected_path(target) == tmp_path / "maker/toys/big.pt"
    assert local_path(target) is None
    folder = tmp_path / "other/toy-hf"
    folder.mkdir(parents=True)
    for name in ("conv.safetensors", "config.json"):
        (folder / name).write_bytes(b"x")
    assert local_path(target) == expected_path(target) == folder
    (folder / "conv.safetensors").unlink()
    assert local_path(target) is None


@pytest.mark.parametrize(
    "folder", ["toys", "t5/toys", "t5-ckpt/toys", "trained_drafters/toys", "chameleon", "."]
)
def test_files_are_found_in_the_authors_folders(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(hub.WEIGHTS_VARIABLE, str(tmp_path))
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "vq.pt").write_bytes(b"")
    assert local_path(hub.PARTS["toy"]["tokenizer"]) == tmp_path / folder / "vq.pt"


def test_missing_part_is_one_line_with_the_command(tmp_path):
    with pytest.raises(RefusedError) as caught:
        local_paths("toy")
    assert caught.value.exit_code == 3
    assert "\n" not in caught.value.message
    assert "maker/toys" in caught.value.message
    assert "weights get toy" in str(caught.value.advice)
    with pytest.raises(UserError, match="no published files of this model are known"):
        local_paths("llamagen-c2i-XL-256")


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["get", "anole-7"], "did you mean anole-7b"),
        (["get", "lanterns"], "has no files to fetch"),
        (["get", "llamagen-c2i-XL-256"], "has no files to fetch"),
        (["get", "nothing-like-it"], "unknown model"),
        (["get", "toy", "--dir", __file__], "is a file"),
    ],
)
def test_what_cannot_be_fetched_is_refused(words, wrong, capsys):
    assert typed(words) == 2
    assert wrong in capsys.readouterr().err


def test_large_files_are_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hashes, "_WORTH_REMEMBERING", 4)
    path = tmp_path / "large.pt"
    path.write_bytes(b"12345678")
    read = []
    real = hashes._large_sha256
    monkeypatch.setattr(hashes, "_large_sha256", lambda path: read.append(path) or real(path))
    assert hashes.remembered_sha256(path) == sha(b"12345678") == hashes.remembered_sha256(path)
    assert len(read) == 1
    path.write_bytes(b"87654321")
    os.utime(path, ns=(1, 1))
    assert hashes.remembered_sha256(path) == sha(b"87654321")
    assert len(read) == 2
    (files_module.cache_folder() / "hashes.json").write_text("damaged")
    assert hashes.remembered_sha256(path) == sha(b"87654321")


def test_sources_are_well_formed():
    for parts in PARTS.values():
        assert parts.keys() <= {"target", "tokenizer", "drafter", "text_encoder"}
        for source in itertools.chain.from_iterable(parts.values()):
            assert source.repo.count("/") == 1
            assert source.licence
            assert source.patterns
            assert source.revision == "main" or len(source.revision) == 40
    assert "Chameleon" in LICENCE_NOTES[PARTS["anole-7b"]["target"][0].licence]


def test_a_file_of_the_same_size_and_time_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp -p` over a file and `rsync -a` keep both; other programs can also set the time back."""
    monkeypatch.setenv("LANTERN_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashes, "_WORTH_REMEMBERING", 0)
    path = tmp_path / "model.pt"
    other = tmp_path / "other.pt"
    path.write_bytes(b"a" * 5000)
    other.write_bytes(b"b" * 5000)
    for file in (path, other):
        os.utime(file, ns=(10**18, 10**18))
    first = hashes.remembered_sha256(path)
    shutil.copy2(other, path)
    assert path.stat().st_mtime_ns == 10**18
    assert hashes.remembered_sha256(path) == files_module.file_sha256(other) != first

    # Also where not even the inode and the time of the change differ.
    state = path.stat()
    content = b"b" * 2500 + b"c" + b"b" * 2499
    path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda _self, **_how: state)
        found = hashes.remembered_sha256(path)
    assert found == hashlib.sha256(content).hexdigest()


def test_files_of_the_hub_are_known_by_their_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv(hub.WEIGHTS_VARIABLE, str(tmp_path / "weights"))
    repo = next(iter(hub.PARTS.values()))["target"][0].repo
    snapshot = tmp_path / f"models--{repo.replace('/', '--')}" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "t2i_XL_stage2_512.pt").symlink_to("../../blobs/abc")
    notes = tmp_path / "weights" / repo / ".cache/huggingface/download"
    notes.mkdir(parents=True)
    (notes / "pytorch_model.bin.metadata").write_text("commit\ndef\n1.0\n")
    hub.published_files.cache_clear()
    assert hub.published_files()["abc"] == f"{repo}/t2i_XL_stage2_512.pt"
    assert hub.published_files()["def"] == f"{repo}/pytorch_model.bin"
    assert "0" not in hub.published_files()
    hub.published_files.cache_clear()
