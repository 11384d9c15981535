"""Files of published models with a hub made up here: found where people have them, fetched once, checked ever after."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from lantern_bench.cli import main as cli
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io import files, hub_files
from lantern_bench.models.io.hub_files import (
    SOURCES,
    WEIGHTS_FOLDER_VARIABLE,
    HubFile,
    HuggingFaceHub,
    Ledger,
    Licence,
    Part,
    RemoteFile,
    Source,
    expected_paths,
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
    vq = Source("maker/toys", (HubFile("vq.pt", 99, sha(CONTENT["vq.pt"])),), OTHER, revision=COMMIT)
    drafter = Source("other/toy-drafter", (HubFile("config.json"), HubFile("more.json", optional=True)), OTHER)
    parts = (Part("target", (official, converted)), Part("tokenizer", (vq,)), Part("drafter", (drafter,)))
    monkeypatch.setitem(SOURCES, "toy", parts)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(WEIGHTS_FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


class FakeHub:
    """A hub with the files of CONTENT; `cut` breaks the download of a file after half of it."""

    def __init__(self, content=None, cut=None, tags=True):
        self.content, self.cut, self.tags = dict(CONTENT | (content or {})), cut, tags
        self.asked, self.sent = [], 0

    def describe(self, repo, file, revision):
        if file == "more.json":
            self.content.setdefault(file, b"{}")
        tag = sha(self.content[file]) if self.tags and file.endswith(".pt") else None
        return RemoteFile(revision or COMMIT, len(self.content[file]), tag)

    def download(self, repo, file, revision, folder, on_bytes):
        assert revision == COMMIT
        self.asked.append(f"{repo}/{file}")
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{file}.incomplete"
        have = part.read_bytes() if part.exists() else b""
        content = self.content[file]
        if self.cut == file:
            part.write_bytes(content[: len(content) // 2])
            raise ConnectionError("the line is dead")
        on_bytes(len(content) - len(have))
        self.sent += len(content) - len(have)
        part.write_bytes(have + content[len(have) :])
        return part.replace(folder / file)


@pytest.fixture
def hub(monkeypatch):
    fake = FakeHub()
    monkeypatch.setattr("lantern_bench.cli.models._hub", lambda: fake)
    return fake


def typed(*words):
    return cli.main(["weights", *map(str, words)])


def test_get_shows_licences_fetches_all_and_records_them(tmp_path, hub, capsys):
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


def test_get_again_fetches_nothing_and_needs_no_hub(tmp_path, hub, capsys, monkeypatch):
    assert typed("get", "toy", "--dir", tmp_path) == 0
    monkeypatch.setattr("lantern_bench.cli.models._hub", lambda: pytest.fail("no hub is needed"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert typed("get", "toy", "--dir", tmp_path) == 0
    assert "every file is here" in capsys.readouterr().err
    assert typed("check", "toy", "--dir", tmp_path) == 0


def test_a_cut_download_goes_on(tmp_path, capsys, monkeypatch):
    fake = FakeHub(cut="vq.pt")
    monkeypatch.setattr("lantern_bench.cli.models._hub", lambda: fake)
    assert typed("get", "toy", "--dir", tmp_path) == 3
    said = capsys.readouterr().err
    assert "the line is dead" in said and "the same command continues" in said and "Traceback" not in said
    fake.cut, before = None, fake.sent
    assert typed("get", "toy", "--dir", tmp_path) == 0
    assert fake.asked.count("maker/toys/big.pt") == 1
    left = len(CONTENT["vq.pt"]) - len(CONTENT["vq.pt"]) // 2 + len(CONTENT["config.json"]) + len(b"{}")
    assert fake.sent - before == left


@pytest.mark.parametrize("why", ["pinned", "recorded", "of the hub"])
def test_a_file_with_another_hash_is_removed(tmp_path, why, capsys, monkeypatch):
    fake = FakeHub({"vq.pt": b"tampered"} if why == "pinned" else {}, tags=why != "recorded")
    monkeypatch.setattr("lantern_bench.cli.models._hub", lambda: fake)
    name = "vq.pt" if why == "pinned" else "big.pt"
    if why == "recorded":
        Ledger(tmp_path).record("maker/toys", name, "0" * 64, 1, COMMIT)
    if why == "of the hub":
        monkeypatch.setattr(fake, "describe", lambda *_: RemoteFile(COMMIT, 1, "1" * 64))
    assert typed("get", "toy", "--dir", tmp_path) == 3
    said = capsys.readouterr().err
    assert f"{name}: SHA-256" in said and "removed" in said
    assert not (tmp_path / "maker/toys" / name).exists()
    assert Ledger(tmp_path).entry("maker/toys", name).get("sha256") in (None, "0" * 64)


def test_check_records_the_first_time_and_compares_ever_after(tmp_path, hub, capsys):
    target = tmp_path / "maker/toys/big.pt"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"one's own copy")
    assert typed("check", "toy", "--dir", tmp_path, "--format", "csv") == 3
    written = capsys.readouterr()
    assert "recorded now" in written.out and "missing tokenizer, drafter" in written.err
    assert typed("get", "toy", "--dir", tmp_path) == 0
    assert typed("check", "toy", "--dir", tmp_path, "--format", "csv") == 0
    assert "recorded, same" in capsys.readouterr().out
    target.write_bytes(b"another file")
    assert typed("check", "toy", "--dir", tmp_path, "--format", "csv") == 5
    written = capsys.readouterr()
    assert "DIFFERS" in written.out and "1 of 4 files have another SHA-256 than recorded: big.pt" in written.err
    with pytest.raises(RefusedError, match="not the file it was"):
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
def test_files_are_found_where_people_have_them(tmp_path, place):
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vq.pt").write_bytes(b"")
    assert require_part("toy", "tokenizer", tmp_path).path == folder / "vq.pt"


@pytest.mark.parametrize("place", ["t5", "t5-ckpt", "google", ""])
def test_the_text_encoder_is_found_as_the_authors_place_it(tmp_path, place):
    folder = tmp_path / place / "flan-t5-xl"
    folder.mkdir(parents=True)
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "pytorch_model.bin.index.json"]
    for name in [*names, "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]:
        (folder / name).write_text("")
    found = find_part("llamagen-t2i-stage1", "text_encoder", tmp_path)
    assert found is not None and found.folder == folder
    (folder / "tokenizer.json").unlink()
    assert find_part("llamagen-t2i-stage1", "text_encoder", tmp_path) is None


def test_the_hugging_face_cache_counts(tmp_path):
    kept = tmp_path / "hub/models--maker--toys"
    for commit, file in (("abc", "big.pt"), (COMMIT, "vq.pt")):
        (kept / "snapshots" / commit).mkdir(parents=True)
        (kept / "snapshots" / commit / file).write_bytes(b"x")
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text("abc")
    assert require_part("toy", "target", tmp_path / "none").path == kept / "snapshots/abc/big.pt"
    # The pinned revision, whatever the newest one is.
    assert require_part("toy", "tokenizer", tmp_path / "none").path == kept / "snapshots" / COMMIT / "vq.pt"


def test_what_is_missing_is_one_line_with_the_command(tmp_path):
    with pytest.raises(RefusedError) as caught:
        require_part("toy", "target", tmp_path)
    assert caught.value.exit_code == 3 and "\n" not in caught.value.message
    assert "maker/toys big.pt" in caught.value.message and "weights get toy" in str(caught.value.advice)
    with pytest.raises(UserError, match="no files of this model are published"):
        require_part("llamagen-c2i-XL-256", "target", tmp_path)
    assert expected_paths("toy", tmp_path)["target"] == tmp_path / "maker/toys/big.pt"


def test_offline_says_so_and_touches_no_network(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: pytest.fail("no network"))
    assert typed("get", "toy", "--dir", tmp_path) == 3
    said = capsys.readouterr().err
    assert "HF_HUB_OFFLINE forbids" in said and "LANTERN_BENCH_WEIGHTS" in said
    assert not any(tmp_path.rglob("*.pt"))


def test_what_the_real_hub_raises_is_one_line(monkeypatch):
    def refuse(*_args, **_more):
        raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    with pytest.raises(RefusedError, match="the hub cannot be reached: Name or service not known"):
        HuggingFaceHub().describe("maker/toys", "big.pt", None)


def test_the_real_hub_counts_bytes_of_its_progress_bar():
    heard = []
    bar = hub_files._counting(heard.append)(total=10, initial=4, unit="B", desc="x", name="huggingface_hub.x")
    bar.update(6)
    bar.close()
    assert sum(heard) == 10


def test_where_and_which_root(tmp_path, capsys, monkeypatch):
    assert weights_root() == tmp_path / "cache/lantern-bench/weights"
    monkeypatch.setenv(WEIGHTS_FOLDER_VARIABLE, str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/vq.pt").write_bytes(b"")
    assert typed("where", "--format", "csv") == 0
    written = capsys.readouterr()
    assert f"toy,tokenizer,maker/toys,Other,{tmp_path / 'mine/vq.pt'}" in written.out
    assert f"weights: {tmp_path / 'mine'}" in written.err


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["get", "toyy"], "did you mean toy"),
        (["get", "lanterns"], "has no files to fetch"),
        (["get", "llamagen-c2i-XL-256"], "has no files to fetch"),
        (["check", "nothing-like-it"], "unknown model"),
    ],
)
def test_unknown_models(words, wrong, capsys):
    assert typed(*words) == 2
    assert wrong in capsys.readouterr().err


def test_a_damaged_ledger_and_a_file_for_a_folder(tmp_path, capsys):
    (tmp_path / "weights.json").write_text("[]")
    assert typed("check", "toy", "--dir", tmp_path) == 2
    assert "weights.json: damaged" in capsys.readouterr().err
    assert typed("get", "toy", "--dir", tmp_path / "weights.json") == 2
    assert "is a file, not a folder" in capsys.readouterr().err


def test_large_files_are_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_WORTH_REMEMBERING", 4)
    path = tmp_path / "large.pt"
    path.write_bytes(b"12345678")
    first = files.remembered_sha256(path)
    assert first == sha(b"12345678")
    read = []
    assert files.remembered_sha256(path, read.append) == first and read == []
    path.write_bytes(b"87654321")
    os.utime(path, ns=(1, 1))
    assert files.remembered_sha256(path, read.append) == sha(b"87654321") and sum(read) == 8
    (files.cache_folder() / "hashes.json").write_text("damaged")
    assert files.remembered_sha256(path) == sha(b"87654321")


def test_the_table_of_sources_invents_nothing():
    for parts in (parts for name, parts in SOURCES.items() if name != "toy"):
        assert {part.name for part in parts} <= {"target", "tokenizer", "drafter", "text_encoder"}
        for source in (choice for part in parts for choice in part.choices):
            assert source.repo.count("/") == 1 and source.licence.name
            assert source.revision is None or len(source.revision) == 40
            assert all(file.sha256 is None or len(file.sha256) == 64 for file in source.files)
    assert "Chameleon" in SOURCES["anole-7b"][0].choices[0].licence.note
