"""LlamaGen's conditions: caption features from T5, class labels, and random features.

The text encoder is transformers' own, read from a folder and never from the network. It is loaded for captions without
cached features, encodes them one at a time, so that no caption's features depend on the others, and is freed before
decoding starts. `conditioning.CaptionFeatures` projects the features.
"""

from __future__ import annotations

import gc
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from urllib.parse import unquote_plus

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import cache_folder, remembered_sha256, write_atomically
from lantern_bench.models.loaded_model import Prompts
from lantern_bench.models.model import class_number
from lantern_bench.models.target import Condition

# ---- Caption cleaning, as in the training of LlamaGen

CLEANING = "llamagen-2024"
"""Name of the rules; changing a rule needs a new name, so that no feature cached under the old one is used."""

_DASHES = "".join(re.escape(chr(code)) for code in range(0x10000) if unicodedata.category(chr(code)) == "Pd")
_HOST = r"[a-z0-9.\-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_ENDINGS = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
_SYMBOLS = re.escape("#®•©™&@·º½¾¿¡§~()[]{}|\\/*")

_ADDRESSES = ((rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_HOST})", ""), (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_HOST})", ""))
_CHARACTERS = (
    (r"@\w+\b", ""),
    ("[\u31c0-\u9fff]+", ""),
    (f"[{_DASHES}]+", "-"),
    ("[`\u00b4«»“”¨]", '"'),
    ("[\u2018\u2019]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.{_ENDINGS}", ""),
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (f"[{_SYMBOLS}]+", " "),
    (r"\s+\.\s+", " "),
)
_SPACING = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{_ENDINGS}(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    ("\\b\\d+\\.?\\d*[x\u0445×]\\d+\\.?\\d*\\b", ""),
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    ("^[\"']([\\w\\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


def cleaned(caption: str) -> str:
    """The caption as LlamaGen's text encoder takes it: cleaned twice, as in the official code."""
    import ftfy

    for _ in range(2):
        pieces: list[str] = []  # the text between tags
        parser = HTMLParser(convert_charrefs=True)
        parser.handle_data = pieces.append  # type: ignore[method-assign, assignment]
        parser.feed(_ruled(unquote_plus(caption).strip().lower().replace("<person>", "person"), _ADDRESSES))
        parser.close()
        caption = _ruled("".join(pieces), _CHARACTERS)
        # A caption with more joiners than 3 is a file name or an address.
        if len(re.findall("[-_]", caption)) > 3:
            caption = re.sub("[-_]", " ", caption)
        caption = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
        caption = _ruled(caption, _SPACING).strip()
    return caption


def _ruled(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


_ABOUT = "encoder.json"


class FeatureCache:
    """The features of one encoder under `root`; `about` states everything that can change them."""

    def __init__(self, root: Path, about: Mapping[str, Any]) -> None:
        self.about = json.loads(json.dumps(dict(about), sort_keys=True))
        self.sha256 = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()
        self.folder = root / self.sha256[:16]

    @classmethod
    def only_one(cls, root: Path, wanted: Mapping[str, Any]) -> FeatureCache | None:
        """The cache whose `about` has the values `wanted`, for decoding without the encoder's files; None without any.

        Raises `RefusedError` when several encoders fit.
        """
        fitting = []
        for path in sorted(root.glob(f"*/{_ABOUT}")):
            try:
                about = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise RefusedError(f"{path}: damaged: {error}", "Remove the folder; it will be made again.") from error
            if wanted.items() <= about.items():
                fitting.append(cls(root, about))
        if len(fitting) > 1:
            raise RefusedError(
                f"{root}: holds caption features of {len(fitting)} text encoders, and the encoder itself is missing",
                "Fetch the encoder, or leave only the folder of the features you mean.",
            )
        return fitting[0] if fitting else None

    def path(self, caption: str) -> Path:
        """The file of a caption."""
        name = hashlib.sha256(caption.encode()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.safetensors"

    def put(self, caption: str, features: Tensor) -> None:
        """Keep the features [n, width] of a caption; raises OSError where nothing can be written."""
        about = self.folder / _ABOUT
        if not about.is_file():
            write_atomically(about, json.dumps(self.about, indent=1, sort_keys=True).encode() + b"\n")
        content = save({"features": features.cpu().contiguous()}, metadata={"caption": caption})
        write_atomically(self.path(caption), content)

    def get(self, caption: str) -> Tensor:
        """The features [n, width] of a caption; raises `RefusedError` for a damaged file, KeyError for none."""
        path = self.path(caption)
        if not path.is_file():
            raise KeyError(caption)
        try:
            with safe_open(path, framework="pt") as file:
                kept = (file.metadata() or {}).get("caption")
                features: Tensor = file.get_tensor("features")
        except (OSError, SafetensorError) as error:
            raise RefusedError(f"{path}: damaged features of a caption: {error}", "Remove the file.") from error
        if kept != caption:
            raise RefusedError(f"{path}: holds the features of another caption", "Remove the file.")
        return features


def left_padded(embeddings: Tensor, mask: Tensor) -> Condition:
    """Features padded on the right -> padded on the left, as the model takes them, with padding set to zero.

    embeddings [B, P, width], mask [B, P] with the valid positions first; the result has them last, in the same order.
    Rows that are padded on the left already stay as they are. A mask with holes raises ValueError.
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

    folder: the encoder's, in the Hugging Face layout; None allows only captions whose features are in `cache`. dtype:
    the encoder's number type. width: of the features that the model takes. model: its name, for messages.
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
        """A hash of everything that can change a feature; raises `RefusedError` without encoder and features."""
        return self._features().sha256

    def prepare(self, captions: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Encode the captions that have no features yet and free the encoder; yields (done, total).

        Loads and yields nothing when all have them. Raises `RefusedError` when the encoder or transformers is missing,
        `UserError` for an encoder that cannot be read.
        """
        cache = self._features()
        missing = [caption for caption in dict.fromkeys(captions) if not cache.path(caption).is_file()]
        if not missing:
            return
        if self.folder is None:
            raise self._missing(f" for the caption {missing[0]!r}")
        encoder = _Encoder(self.folder, self.positions, self.width, self.device, self.dtype)
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
        """The features of captions; those that are not cached are encoded now."""
        list(self.prepare(captions))
        values = torch.zeros(len(captions), self.positions, self.width, dtype=self.dtype)
        mask = torch.zeros(len(captions), self.positions, dtype=torch.bool)
        for row, caption in enumerate(captions):
            features = self._features().get(caption)
            values[row, self.positions - len(features) :] = features
            mask[row, self.positions - len(features) :] = True
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

    def _missing(self, what: str) -> RefusedError:
        fetch = f"Type `lantern-bench weights get {self.model}`"
        if Path(self.model).suffix in (".yaml", ".yml"):
            fetch = f"Name its folder in {self.model}, text_encoder: {{dir: ...}}"
        return RefusedError(
            f"{self.model} needs its text encoder (FLAN-T5-XL){what}, and it is not on this machine",
            f"{fetch}; or give features: lantern_bench.decode(..., conditions=...).",
        )


class _Encoder:
    """A loaded T5 encoder with its tokenizer."""

    def __init__(self, folder: Path, positions: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.positions, self.device = positions, device
        # Before gigabytes are read.
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: is no T5 encoder: config.json cannot be read: {error}") from error
        if config.get("model_type") != "t5":
            raise UserError(f"{folder}: is no T5 encoder: its config.json says model_type {config.get('model_type')}")
        if (has := config.get("d_model")) != width:
            text = f"{folder}: is another T5: its features have {has} numbers, and the model takes {width}"
            raise UserError(text, "The published models take google/flan-t5-xl.")
        try:
            from transformers import AutoTokenizer, T5EncoderModel, logging
        except ImportError as error:
            raise RefusedError(
                "captions need the package transformers, which is not installed",
                "Type `pip install 'lantern-bench[hf]'`; or give features: lantern_bench.decode(..., conditions=...).",
            ) from error
        shown, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        # The console draws the progress.
        logging.disable_progress_bar()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, about = T5EncoderModel.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, ImportError, KeyError, UnpicklingError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{folder}: cannot be read as a T5 encoder: {reason}") from error
        finally:
            logging.set_verbosity(shown)
            if bars:
                logging.enable_progress_bar()
        if lacks := sorted(about["missing_keys"])[:5]:
            raise UserError(f"{folder}: is no whole T5 encoder, it lacks {', '.join(lacks)}")
        self.model: Any = model.eval().requires_grad_(False).to(device)

    def encode(self, caption: str) -> Tensor:
        """The features [n, width] of the valid positions of a caption, on the CPU."""
        words = self.tokenizer(
            [cleaned(caption)], max_length=self.positions, padding="max_length", truncation=True, return_tensors="pt"
        )
        mask = words["attention_mask"].to(self.device)
        with torch.no_grad():
            hidden = self.model(input_ids=words["input_ids"].to(self.device), attention_mask=mask).last_hidden_state
        out: Tensor = hidden[0, mask[0].bool()].cpu()
        return out

    def free(self) -> None:
        """Free the encoder's memory."""
        self.model = self.tokenizer = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _hashes(folder: Path) -> Mapping[str, str]:
    """The SHA-256 of the files that decide a feature: weights, configuration and tokenizer."""
    named = ("config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "special_tokens_map.json")
    # Where both kinds are there, transformers reads safetensors.
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    weights = [path.name for path in found]
    return {name: remembered_sha256(folder / name) for name in (*named, *weights) if (folder / name).is_file()}


def caption_prompts(
    model: str, folder: Path | None, shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Prompts:
    """Captions as features [positions, width] = `shape`, through the encoder in `folder`."""
    size = dict(zip(("positions", "width"), shape, strict=True))
    source = CaptionFeatureSource(folder, cache_folder() / "features", device=device, dtype=dtype, model=model, **size)
    try:
        return Prompts(source, source.prepare, sha256=source.sha256)
    except RefusedError:
        # Without encoder and features the model takes no caption, and there is nothing to hash.
        return Prompts(source, source.prepare)


def class_condition(classes: int) -> Callable[[Sequence[str]], Condition]:
    """Prompts that name classes -> their labels int64 [B]; `UserError` for one that names none."""

    def condition(prompts: Sequence[str]) -> Condition:
        labels = torch.tensor([class_number(text, classes) for text in prompts])
        return Condition(labels, torch.ones(len(labels), 1, dtype=torch.bool))

    return condition


def random_features(positions: int, width: int) -> Callable[[Sequence[str]], Condition]:
    """Replace a text encoder: normal numbers seeded by the caption, without padding and without meaning."""

    def condition(prompts: Sequence[str]) -> Condition:
        rows = []
        for text in prompts:
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.randn(positions, width, generator=generator) / width**0.5)
        return Condition(torch.stack(rows), torch.ones(len(rows), positions, dtype=torch.bool))

    return condition
