"""Caption features against transformers, the published padding, the cache, and missing files."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, T5EncoderModel

from lantern_bench.models.networks import t5 as t5_module
from lantern_bench.models.networks.t5 import CaptionEncoder, cleaned, refuse_captions
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.progress import heard_by
from tests.helpers.tiny_t5 import WIDTH, save_tiny_t5

CAPTIONS = ["A cat on the grass", "two red lanterns over a lake at dusk"]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return save_tiny_t5(tmp_path_factory.mktemp("t5"))


def source(folder, cache, **more):
    options = {
        "positions": 24,
        "width": WIDTH,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return CaptionEncoder(folder, cache=cache, **options | more)


def by_transformers(folder, caption, positions=24):
    """What transformers gives for one caption, padded on the right: features and mask."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = tokenizer(
        [caption], max_length=positions, padding="max_length", truncation=True, return_tensors="pt"
    )
    model = T5EncoderModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(
            input_ids=words["input_ids"], attention_mask=words["attention_mask"]
        ).last_hidden_state
    return hidden, words["attention_mask"]


def flipped(embeddings, mask):
    """The published way to pad on the left, written out for one row at a time."""
    counts = mask.sum(dim=1).tolist()
    rows = [
        features.roll(-count, dims=0) for features, count in zip(embeddings, counts, strict=True)
    ]
    turned = torch.flip(mask, dims=[-1])
    return torch.stack(rows) * turned[..., None], turned


@pytest.mark.parametrize("whole", [False, True])
def test_features_equal_transformers_padded_left(tmp_path, whole):
    """Also those of a whole T5, whose encoder is read alone."""
    folder = save_tiny_t5(tmp_path / "t5", whole=whole)
    values, valid = source(folder, tmp_path / "cache")(CAPTIONS)
    for row, caption in enumerate(CAPTIONS):
        wanted, mask = flipped(*by_transformers(folder, caption.lower()))
        assert torch.equal(valid[row], mask[0].bool())
        assert torch.allclose(values[row], wanted[0], atol=1e-6)
    assert valid.sum(dim=1).tolist() == [6, 9]
    assert values.dtype == torch.float32


def test_long_captions_are_truncated(t5, tmp_path):
    values, valid = source(t5, tmp_path, positions=5)(["the cat on the grass at the lake at dusk"])
    assert values.shape == (1, 5, WIDTH)
    assert valid.all()


def test_captions_that_are_cut_are_counted(t5, tmp_path):
    """Also from the cache; features that were kept by earlier versions do not count."""
    long = "the cat on the grass at the lake at dusk"
    told = []
    for captions in (["a cat on the lake"], [*CAPTIONS, long, long], [long]):
        with heard_by(told.append):
            list(source(t5, tmp_path, positions=6).prepare(captions))
    assert [note.text for note in told] == [
        "2 of 3 captions are longer than the 6 tokens that the model takes",
        "1 of 1 captions are longer than the 6 tokens that the model takes",
    ]
    encoder = source(t5, tmp_path, positions=6)
    path = encoder.path(long)
    save_file({"features": load_file(path)["features"]}, path)
    with heard_by(told.append):
        list(encoder.prepare([long]))
    assert len(told) == 2


def test_an_encoder_that_does_not_fit_in_memory_is_not_read(t5, tmp_path, monkeypatch):
    free = SimpleNamespace(available=1000)
    monkeypatch.setattr("lantern_bench.devices.machine.psutil.virtual_memory", lambda: free)
    monkeypatch.setattr(T5EncoderModel, "from_pretrained", None)
    with pytest.raises(RefusedError, match=r"the text encoder .* needs .* GB, and .* are free"):
        source(t5, tmp_path)(CAPTIONS)


def test_captions_are_encoded_once_and_encoder_freed(t5, tmp_path, monkeypatch):
    loads = []
    models = []
    real = t5_module.load_t5

    def watched(*args):
        tokenizer, model = real(*args)
        loads.append(1)
        models.append(weakref.ref(model))
        return tokenizer, model

    monkeypatch.setattr(t5_module, "load_t5", watched)
    features = source(t5, tmp_path)
    assert list(features.prepare([*CAPTIONS, CAPTIONS[0]])) == [(0, 2), (1, 2), (2, 2)]
    gc.collect()
    assert models[0]() is None
    first = features(CAPTIONS)
    # A later process finds what was kept.
    second = source(t5, tmp_path)
    assert list(second.prepare(CAPTIONS)) == []
    assert torch.equal(second(CAPTIONS).values, first.values)
    assert len(loads) == 1
    # Alone or in company, a caption has the same features.
    alone = source(t5, tmp_path / "other")(CAPTIONS[1:])
    assert torch.equal(alone.values[0], first.values[1])


def test_caches_are_separate_by_encoder_dtype_and_length(t5, tmp_path):
    other = save_tiny_t5(tmp_path / "other", seed=1)
    cache = tmp_path / "cache"
    kinds = [source(t5, cache), source(other, cache), source(t5, cache, dtype=torch.bfloat16)]
    kinds.append(source(t5, cache, positions=30))
    assert len({kind.sha256 for kind in kinds}) == len({kind.cache for kind in kinds}) == 4
    assert kinds[2](CAPTIONS[:1]).values.dtype == torch.bfloat16
    assert len(list(cache.iterdir())) == 1


def test_missing_encoder_error_names_the_fix():
    def refused(model):
        prompts = refuse_captions(model)
        assert prompts.sha256 is None
        for use in (prompts.prepare, prompts.condition):
            with pytest.raises(RefusedError, match="needs its text encoder") as caught:
                use(CAPTIONS)
        assert caught.value.exit_code == 3
        assert "\n" not in caught.value.message
        return str(caught.value.advice)

    assert "weights get llamagen-t2i-stage1" in refused("llamagen-t2i-stage1")
    assert "text_encoder: {dir: ...}" in refused("own/model.yaml")


def test_missing_transformers_error_names_the_extra(t5, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RefusedError, match="transformers, which is not installed") as caught:
        source(t5, tmp_path)(CAPTIONS)
    assert ".[hf]" in str(caught.value.advice)


class Code:
    def __reduce__(self):
        return (os.mkdir, ("never",))


def test_other_folders_are_refused_in_one_line(t5, tmp_path):
    def refused(folder):
        with pytest.raises(UserError) as caught:
            source(folder, tmp_path / "cache")(CAPTIONS)
        assert "\n" not in caught.value.message
        assert str(folder) in caught.value.message
        return caught.value.message

    def copy(name):
        return Path(shutil.copytree(t5, tmp_path / name))

    assert "it has no config.json" in refused(tmp_path)
    other = copy("other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    assert "model_type bert" in refused(other)
    assert "have 16 numbers, and the model takes 32" in refused(
        save_tiny_t5(tmp_path / "narrow", d_model=16)
    )
    cut = copy("cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(cut)
    coded = copy("coded")
    (coded / "model.safetensors").unlink()
    (coded / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Code()}))
    refused(coded)
    assert not Path("never").exists()


def test_damaged_feature_files_are_refused(t5, tmp_path):
    features = source(t5, tmp_path)
    features(CAPTIONS)
    features.path(CAPTIONS[0]).write_bytes(b"no tensors")
    with pytest.raises(RefusedError, match="damaged"):
        features(CAPTIONS)


@pytest.mark.parametrize(
    ("caption", "wanted"),
    [
        ("A Cat on the Grass. ", "a cat on the grass."),
        ("Two <b>red</b> lanterns &amp; a lake", "two red lanterns a lake"),
        (
            "lanterns \u2014 at dusk, see http://www.example.com/a/b.html",
            "lanterns - at dusk, see html",
        ),
        ("\u201cLanterns\u201d by @someone IMG1234.jpg", '"lanterns" by'),
        ("'red lanterns'", "red lanterns"),
        ("red_lanterns-over_the-lake", "red lanterns over the lake"),
        ("free shipping: 1200x800 \u6587 lanterns  #123456", "lanterns"),
    ],
)
def test_captions_are_cleaned_as_published(caption, wanted):
    # What the published function gives for these, oddities included.
    assert cleaned(caption) == wanted
