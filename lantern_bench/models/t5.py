"""Caption features from T5, the text encoder of LlamaGen, with their cache on disk.

The text encoder is transformers' own, read from a folder and never from the network. It is loaded for captions without
cached features, encodes them one at a time, so that no caption's features depend on the others, and is freed before
decoding starts. `target.CaptionFeatures` projects the features.
"""

from __future__ import annotations

import gc
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
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


_ENCODER = "encoder.json"
# What decides a feature, besides the weights: transformers reads these.
_NAMED = ("config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "special_tokens_map.json")


class FeatureCache:
    """The features of one encoder under `root`; `about` states everything that can change them."""

    def __init__(self, root: Path, about: Mapping[str, Any]) -> None:
        self.about = json.dumps(dict(about), indent=1, sort_keys=True)
        self.sha256 = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()
        self.folder = root / self.sha256[:16]

    @classmethod
    def only_one(cls, root: Path, wanted: Mapping[str, Any]) -> FeatureCache | None:
        """Return the cache whose `about` has the values `wanted`, for decoding without the encoder's files.

        None without any; raises `RefusedError` when several encoders fit.
        """
        fitting = []
        for path in sorted(root.glob(f"*/{_ENCODER}")):
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
        """Return the file of a caption."""
        name = hashlib.sha256(caption.encode()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.safetensors"

    def put(self, caption: str, features: Tensor) -> None:
        """Write the features [n, width] of a caption; raises `OSError` where nothing can be written."""
        if not (self.folder / _ENCODER).is_file():
            write_atomically(self.folder / _ENCODER, self.about.encode() + b"\n")
        content = save({"features": features.cpu().contiguous()}, metadata={"caption": caption})
        write_atomically(self.path(caption), content)

    def get(self, caption: str) -> Tensor:
        """Return the features [n, width] of a caption; raises `RefusedError` for a damaged file."""
        path = self.path(caption)
        try:
            with safe_open(path, framework="pt") as file:
                written_for = (file.metadata() or {}).get("caption")
                features: Tensor = file.get_tensor("features")
        except (OSError, SafetensorError) as error:
            raise RefusedError(f"{path}: damaged features of a caption: {error}", "Remove the file.") from error
        if written_for != caption:
            raise RefusedError(f"{path}: holds the features of another caption", "Remove the file.")
        return features


class CaptionEncoder:
    """Captions -> features [B, P, width], left-padded, on a device: the `condition` of a model.

    `folder` is the encoder's, in the Hugging Face layout; None allows only captions whose features are in `cache`.
    `model` is the model's name, for messages.
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

    @property
    def sha256(self) -> str:
        """A hash of everything that can change a feature; raises `RefusedError` without encoder and features."""
        return self.cache.sha256

    @cached_property
    def cache(self) -> FeatureCache:
        """The features on disk; raises `RefusedError` without encoder and features."""
        about: dict[str, Any] = {
            "positions": self.positions,
            "dtype": str(self.dtype),
            "width": self.width,
            "cleaning": CLEANING,
        }
        if self.folder is not None:
            # Where both kinds are there, transformers reads safetensors.
            weights = sorted(self.folder.glob("*.safetensors")) or sorted(self.folder.glob("*.bin"))
            files = [path for name in _NAMED if (path := self.folder / name).is_file()] + weights
            return FeatureCache(
                self.cache_root, about | {"files": {path.name: remembered_sha256(path) for path in files}}
            )
        cache = FeatureCache.only_one(self.cache_root, about)
        if cache is None:
            raise self._missing("")
        return cache

    def prepare(self, captions: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Encode the captions that have no features yet and free the encoder; yields (done, total).

        Loads and yields nothing when all have them. Raises `RefusedError` when the encoder or transformers is missing,
        `UserError` for an encoder that cannot be read.
        """
        missing = [caption for caption in dict.fromkeys(captions) if not self.cache.path(caption).is_file()]
        if not missing:
            return
        if self.folder is None:
            raise self._missing(f" for the caption {missing[0]!r}")
        tokenizer, encoder = load_t5(self.folder, self.width, self.dtype)
        encoder.to(self.device)
        yield 0, len(missing)
        try:
            for number, caption in enumerate(missing, start=1):
                self.cache.put(caption, self._encode(cleaned(caption), tokenizer, encoder))
                yield number, len(missing)
        except OSError as error:
            raise UserError(f"{self.cache.folder}: caption features cannot be written: {error.strerror}") from error
        finally:
            del tokenizer, encoder
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def _encode(self, text: str, tokenizer: Any, encoder: Any) -> Tensor:
        """The features [n, width] of the valid positions of a text, on the CPU."""
        padding = {"max_length": self.positions, "padding": "max_length", "truncation": True}
        words = tokenizer([text], **padding, return_tensors="pt").to(self.device)
        hidden = encoder(input_ids=words["input_ids"], attention_mask=words["attention_mask"]).last_hidden_state
        features: Tensor = hidden[0, words["attention_mask"][0].bool()].cpu()
        return features

    def __call__(self, captions: Sequence[str]) -> Condition:
        """Return the features of captions; those that are not cached are encoded now."""
        list(self.prepare(captions))
        values = torch.zeros(len(captions), self.positions, self.width, dtype=self.dtype)
        valid = torch.zeros(len(captions), self.positions, dtype=torch.bool)
        for row, caption in enumerate(captions):
            features = self.cache.get(caption)
            values[row, self.positions - len(features) :] = features
            valid[row, self.positions - len(features) :] = True
        return Condition(values.to(self.device), valid.to(self.device))

    def _missing(self, purpose: str) -> RefusedError:
        fetch = f"Type `lantern-bench weights get {self.model}`"
        if Path(self.model).suffix in (".yaml", ".yml"):
            fetch = f"Name its folder in {self.model}, text_encoder: {{dir: ...}}"
        return RefusedError(
            f"{self.model} needs its text encoder (FLAN-T5-XL){purpose}, and it is not on this machine",
            f"{fetch}; or give features: lantern_bench.decode(..., conditions=...).",
        )


def load_t5(folder: Path, width: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load the tokenizer and the encoder in a folder, without the network and without progress bars.

    Raises `UserError` for a folder that holds no T5 encoder with features of `width` numbers.
    """
    # Before gigabytes are read.
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: is no T5 encoder: config.json cannot be read: {error}") from error
    if config.get("model_type") != "t5":
        raise UserError(f"{folder}: is no T5 encoder: its config.json says model_type {config.get('model_type')}")
    if (numbers := config.get("d_model")) != width:
        text = f"{folder}: is another T5: its features have {numbers} numbers, and the model takes {width}"
        raise UserError(text, "The published models take google/flan-t5-xl.")
    try:
        from transformers import AutoTokenizer, T5EncoderModel, logging
    except ImportError as error:
        raise RefusedError(
            "captions need the package transformers, which is not installed",
            "Type `pip install 'lantern-bench[hf]'`; or give features: lantern_bench.decode(..., conditions=...).",
        ) from error
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    # The console draws the progress.
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        encoder, report = T5EncoderModel.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, UnpicklingError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder}: cannot be read as a T5 encoder: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
    if lacks := sorted(report["missing_keys"])[:5]:
        raise UserError(f"{folder}: is no whole T5 encoder, it lacks {', '.join(lacks)}")
    return tokenizer, encoder.eval().requires_grad_(False)


def caption_prompts(
    model: str, folder: Path | None, positions: int, width: int, device: torch.device, dtype: torch.dtype
) -> Prompts:
    """Return captions as features [positions, width], through the encoder in `folder`."""
    cache = cache_folder() / "features"
    encoder = CaptionEncoder(folder, cache, positions=positions, width=width, device=device, dtype=dtype, model=model)
    try:
        return Prompts(encoder, encoder.prepare, sha256=encoder.sha256)
    except RefusedError:
        # Without encoder and features the model takes no caption, and there is nothing to hash.
        return Prompts(encoder, encoder.prepare)


def random_features(positions: int, width: int) -> Callable[[Sequence[str]], Condition]:
    """Return what replaces a text encoder: normal numbers seeded by the caption, without padding and meaning."""

    def condition(prompts: Sequence[str]) -> Condition:
        rows = []
        for text in prompts:
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.randn(positions, width, generator=generator) / width**0.5)
        return Condition(torch.stack(rows), torch.ones(len(rows), positions, dtype=torch.bool))

    return condition
