"""Caption features as LlamaGen is given them: T5, 120 positions, valid ones last, kept on disk once made.

The encoder is transformers' own, read from a folder and never from the network. It is loaded when a caption is met that
has no features yet, encodes all that are asked for, one at a time so that no caption's features depend on its company,
and is freed before anything is decoded. The projection that takes the features is `conditioning.CaptionFeatures`.
"""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.caption_cleaning import CLEANING, cleaned
from lantern_bench.models.conditioning import Condition
from lantern_bench.models.feature_cache import FeatureCache
from lantern_bench.models.files import remembered_sha256

__all__ = ["CaptionFeatureSource", "left_padded"]

_KINDS = (".safetensors", ".bin")
_UNREADABLE = (pickle.UnpicklingError, SafetensorError)


def left_padded(embeddings: Tensor, mask: Tensor) -> Condition:
    """Features as the encoder gives them -> as the model takes them: valid positions moved to the end, pads zero.

    embeddings [B, P, width], mask [B, P] with the valid positions first; values and mask of the result have them last,
    in the same order. What is left-padded already stays where it is. A mask with holes raises ValueError.
    """
    valid = mask.bool()
    counts = valid.sum(dim=1, keepdim=True)
    position = torch.arange(valid.shape[1], device=valid.device)[None]
    first, last = position < counts, position >= valid.shape[1] - counts
    on_the_right = (valid == last).all(dim=1, keepdim=True)
    if not ((valid == first).all(dim=1, keepdim=True) | on_the_right).all():
        raise ValueError("the valid positions of a mask must stand together, at its beginning or at its end")
    shift = torch.where(on_the_right, 0, counts)
    source = (position + shift) % valid.shape[1]
    moved = embeddings.gather(1, source[..., None].expand(-1, -1, embeddings.shape[2]))
    return Condition(moved * last[..., None].to(embeddings.dtype), last)


class CaptionFeatureSource:
    """Captions -> features [B, P, width], left-padded, on a device: the `condition` of a model.

    folder: of the encoder in the Hugging Face layout, or None where it is not there: then only captions whose features
    are in `cache` can be had. dtype: the encoder's number type. width: what the model takes. model: for messages.
    """

    def __init__(
        self,
        folder: Path | None,
        cache: Path,
        *,
        positions: int = 120,
        width: int = 2048,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        model: str = "the model",
    ) -> None:
        self.folder, self.cache_root, self.model = folder, cache, model
        self.positions, self.width = positions, width
        self.device, self.dtype = torch.device(device), dtype
        self._cache: FeatureCache | None = None

    @property
    def sha256(self) -> str:
        """A hash of all that can change a feature; raises `RefusedError` without encoder and features."""
        return self._features().sha256

    def prepare(self, captions: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Encode the captions that have no features yet and free the encoder; yields (done, of how many).

        Nothing is loaded, and nothing yielded, when all have them. Raises `RefusedError` when the encoder or
        transformers is missing, `UserError` for an encoder that cannot be read.
        """
        cache = self._features()
        missing = [caption for caption in dict.fromkeys(captions) if not cache.has(caption)]
        if not missing:
            return
        encoder = _Encoder(self._folder(missing[0]), self.positions, self.width, self.device, self.dtype)
        yield 0, len(missing)
        try:
            for number, caption in enumerate(missing, start=1):
                cache.put(caption, encoder.encode(caption))
                yield number, len(missing)
        except OSError as error:
            raise UserError(f"{cache.folder}: caption features cannot be written: {error.strerror}") from error
        finally:
            encoder.free()

    def __call__(self, captions: Sequence[str]) -> Condition:
        """The features of captions, encoded now where they are not kept."""
        for _ in self.prepare(captions):
            continue
        cache = self._features()
        values = torch.zeros(len(captions), self.positions, self.width, dtype=self.dtype)
        mask = torch.zeros(len(captions), self.positions, dtype=torch.bool)
        for row, caption in enumerate(captions):
            features = cache.get(caption)
            values[row, : len(features)] = features
            mask[row, : len(features)] = True
        values, mask = left_padded(values, mask)
        return Condition(values.to(self.device), mask.to(self.device))

    def _features(self) -> FeatureCache:
        if self._cache is None:
            kind = {"positions": self.positions, "dtype": str(self.dtype), "width": self.width, "cleaning": CLEANING}
            if self.folder is not None:
                self._cache = FeatureCache(self.cache_root, kind | {"files": _hashes(self.folder)})
            else:
                self._cache = FeatureCache.only_one(self.cache_root, kind)
            if self._cache is None:
                raise self._missing("")
        return self._cache

    def _folder(self, caption: str) -> Path:
        if self.folder is None:
            raise self._missing(f" for the caption {caption!r}")
        return self.folder

    def _missing(self, what: str) -> RefusedError:
        fetch = f"Type `lantern-bench weights get {self.model}`"
        if Path(self.model).suffix in (".yaml", ".yml"):
            fetch = f"Name its folder in {self.model}, text_encoder: {{dir: ...}}"
        return RefusedError(
            f"{self.model} needs its text encoder (FLAN-T5-XL){what}, and it is not on this machine",
            f"{fetch}; or give features: generate --condition FILE.npz.",
        )


class _Encoder:
    """A loaded T5 encoder with its tokenizer."""

    def __init__(self, folder: Path, positions: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        _check_config(folder, width)
        self.positions, self.device = positions, device
        try:
            from transformers import AutoTokenizer, T5EncoderModel, logging
        except ImportError as error:
            raise RefusedError(
                "captions need the package transformers, which is not installed",
                "Type `pip install 'lantern-bench[hf]'`; or give features: generate --condition FILE.npz.",
            ) from error
        shown, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        # The console draws the only progress there is.
        logging.disable_progress_bar()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, about = T5EncoderModel.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, ImportError, KeyError, *_UNREADABLE) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{folder}: cannot be read as a T5 encoder: {reason}") from error
        finally:
            logging.set_verbosity(shown)
            if bars:
                logging.enable_progress_bar()
        if about["missing_keys"]:
            raise UserError(
                f"{folder}: is no whole T5 encoder, it lacks {', '.join(sorted(about['missing_keys'])[:5])}"
            )
        self.model: Any = model.eval().requires_grad_(False).to(device)

    def encode(self, caption: str) -> Tensor:
        """The features [n, width] of the valid positions of a caption, on the CPU."""
        words = self.tokenizer(
            [cleaned(caption)],
            max_length=self.positions,
            padding="max_length",
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = words["attention_mask"].to(self.device)
        with torch.no_grad():
            hidden = self.model(input_ids=words["input_ids"].to(self.device), attention_mask=mask).last_hidden_state
        out: Tensor = hidden[0, mask[0].bool()].cpu()
        return out

    def free(self) -> None:
        """Let go of the encoder's memory."""
        self.model = self.tokenizer = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _check_config(folder: Path, width: int) -> None:
    """Raise `UserError` for a folder of another model, before gigabytes are read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: is no T5 encoder: config.json cannot be read: {error}") from error
    kind, found = config.get("model_type"), config.get("d_model")
    if kind != "t5":
        raise UserError(f"{folder}: is no T5 encoder: its config.json says model_type {kind}")
    if found != width:
        raise UserError(
            f"{folder}: is another T5: its features have {found} numbers, and the model takes {width}",
            "The published models take google/flan-t5-xl.",
        )


def _hashes(folder: Path) -> Mapping[str, str]:
    """The SHA-256 of the files that decide a feature: weights, their index, configuration and tokenizer."""
    named = ("config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "special_tokens_map.json")
    weights = sorted(path.name for path in folder.glob("*") if path.suffix in _KINDS)
    # Where both kinds are there, transformers reads safetensors.
    if any(name.endswith(".safetensors") for name in weights):
        weights = [name for name in weights if name.endswith(".safetensors")]
    return {name: remembered_sha256(folder / name) for name in (*named, *weights) if (folder / name).is_file()}
