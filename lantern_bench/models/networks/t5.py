"""Caption features from T5, the text encoder of LlamaGen, with their cache on disk.

Captions are encoded one at a time, so that the features of a caption do not depend on other
captions.
"""

from __future__ import annotations

import gc
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote_plus

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lantern_bench.devices.machine import check_free
from lantern_bench.models.networks.t5_files import check_encoder, no_encoder
from lantern_bench.models.networks.target import Condition, Prompts
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_file
from lantern_bench.utils.hashes import remembered_sha256
from lantern_bench.utils.progress import Note, tell
from lantern_bench.utils.text import one_line

# ---- Caption cleaning, as in the training of LlamaGen

CLEANING = "llamagen-2024"
"""Name of the rules in caption_cleaning.toml. Change it with a rule, so that features cached under
the old name are not used."""

_RULES = msgspec.toml.decode(
    (Path(__file__).parent / "caption_cleaning.toml").read_bytes(),
    type=dict[str, list[tuple[str, str]]],
)


def cleaned(caption: str) -> str:
    """Clean a caption twice, as the official code does for LlamaGen's text encoder."""
    import ftfy

    for _ in range(2):
        pieces: list[str] = []  # the text between tags
        parser = HTMLParser(convert_charrefs=True)
        parser.handle_data = pieces.append  # type: ignore[method-assign, assignment]
        caption = unquote_plus(caption).strip().lower().replace("<person>", "person")
        parser.feed(_ruled(caption, "addresses"))
        parser.close()
        caption = _ruled("".join(pieces), "characters")
        # A caption with more than 3 joiners is a file name or an address.
        if len(re.findall("[-_]", caption)) > 3:
            caption = re.sub("[-_]", " ", caption)
        caption = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
        caption = _ruled(caption, "spacing").strip()
    return caption


def _ruled(text: str, kind: str) -> str:
    for pattern, replacement in _RULES[kind]:
        text = re.sub(pattern, replacement, text)
    return text


# ---- Features

# Files that determine a feature, besides the weights. transformers reads them.
_NAMED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "spiece.model",
    "special_tokens_map.json",
)


@dataclass
class CaptionEncoder:
    """Captions to features [B, positions, width], left-padded.

    `sha256` covers everything that can change a feature.
    """

    folder: Path  # of the encoder
    cache: Path  # of the features of this encoder, below the folder that was given
    positions: int  # of a caption
    width: int  # numbers of a feature
    device: torch.device  # where captions are encoded
    dtype: torch.dtype  # of the encoder's weights
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        # If both kinds exist, transformers reads safetensors.
        weights = sorted(self.folder.glob("*.safetensors")) or sorted(self.folder.glob("*.bin"))
        files = [*filter(Path.is_file, map(self.folder.joinpath, _NAMED)), *weights]
        about = {
            "positions": self.positions,
            "dtype": str(self.dtype),
            "width": self.width,
            "cleaning": CLEANING,
            "files": {path.name: remembered_sha256(path) for path in files},
        }
        self.sha256 = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.cache /= self.sha256[:16]

    def path(self, caption: str) -> Path:
        """Return the file with the features of a caption."""
        name = hashlib.sha256(caption.encode()).hexdigest()[:32]
        return self.cache / name[:2] / f"{name}.safetensors"

    def prepare(self, captions: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Encode the captions that have no features yet, and say how many captions are cut.

        Yields:
            Encoded captions and their total. Nothing if all captions have features.
        """
        yield from self._complete(captions)
        texts = list(dict.fromkeys(captions))
        cut = sum(self._tokens(text) > self.positions for text in texts)
        if cut:
            text = f"{cut:,} of {len(texts):,} captions are longer than the {self.positions} tokens"
            advice = "The model sees their beginning only."
            tell(Note(f"{text} that the model takes", advice, "warning"))

    def _complete(self, captions: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Encode captions as `prepare` does, then free the encoder."""
        missing = [
            caption for caption in dict.fromkeys(captions) if not self.path(caption).is_file()
        ]
        if not missing:
            return
        tokenizer, encoder = load_t5(self.folder, self.width, self.dtype)
        encoder.to(self.device)
        yield 0, len(missing)
        try:
            for number, caption in enumerate(missing, start=1):
                text = cleaned(caption)
                kept = {
                    "features": self._encode(text, tokenizer, encoder),
                    "tokens": torch.tensor(len(tokenizer(text)["input_ids"])),
                }
                write_file(self.path(caption), save(kept))
                yield number, len(missing)
        finally:
            del tokenizer, encoder
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def _encode(self, text: str, tokenizer: Any, encoder: Any) -> Tensor:
        """Return the features [n, width] of the valid positions of a text, on the CPU."""
        words = tokenizer(
            [text],
            max_length=self.positions,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        mask = words["attention_mask"]
        hidden = encoder(input_ids=words["input_ids"], attention_mask=mask).last_hidden_state
        return hidden[0, mask[0].bool()].cpu()

    def __call__(self, captions: Sequence[str]) -> Condition:
        """Return the features of captions. Captions that are not in the cache are encoded now."""
        list(self._complete(captions))
        values = torch.zeros(len(captions), self.positions, self.width, dtype=self.dtype)
        valid = torch.zeros(len(captions), self.positions, dtype=torch.bool)
        for row, caption in enumerate(captions):
            with self._kept(caption) as file:
                features = file.get_tensor("features")
            start = self.positions - len(features)
            values[row, start:] = features
            valid[row, start:] = True
        return Condition(values.to(self.device), valid.to(self.device))

    def _tokens(self, caption: str) -> int:
        """Return the tokens of a whole caption; 0 if its features were kept without."""
        with self._kept(caption) as file:
            return int(file.get_tensor("tokens")) if "tokens" in set(file.keys()) else 0

    @contextmanager
    def _kept(self, caption: str) -> Iterator[Any]:
        """Open the features of a caption. Raises `RefusedError` for a damaged file."""
        path = self.path(caption)
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise RefusedError(
                f"{path}: damaged features of a caption: {error}", "Remove the file."
            ) from error


def load_t5(folder: Path, width: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a T5 encoder.

    Args:
        folder: Folder in the layout of transformers.
        width: Numbers of a feature that the model takes.
        dtype: Type of the weights.

    Returns:
        Tokenizer and encoder.

    Raises:
        UserError: The folder has no T5 encoder, or one of another width.
        RefusedError: transformers is not installed, or too little memory is free.
    """
    check_encoder(folder, width)
    from transformers import AutoConfig, AutoTokenizer, T5EncoderModel, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with _reading(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            numbers = sum(weight.numel() for weight in T5EncoderModel(config).parameters())
    check_free(
        subject=f"the text encoder {folder}",
        needed=numbers * dtype.itemsize,
        device=torch.device("cpu"),  # where transformers reads it
        advice="Stop other programs. Features of captions are kept, so it is needed once.",
    )
    with _reading(folder):
        encoder, report = T5EncoderModel.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    lacking = sorted(report["missing_keys"])[:5]
    if lacking:
        raise UserError(f"{folder}: is no whole T5 encoder, it lacks {', '.join(lacking)}")
    return tokenizer, encoder.eval().requires_grad_(requires_grad=False)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raise `UserError` for any error of the libraries that read the encoder."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{folder}: cannot be read as a T5 encoder: {one_line(error)}") from error


def refuse_captions(model: str) -> Prompts:
    """Refuse captions of a model whose text encoder is not on this machine."""

    def refuse(_captions: Sequence[str]) -> NoReturn:
        raise no_encoder(model)

    return Prompts(refuse, refuse)


def random_features(positions: int, width: int) -> Callable[[Sequence[str]], Condition]:
    """Return a replacement of a text encoder: normal numbers, seeded by the caption."""

    def condition(prompts: Sequence[str]) -> Condition:
        rows = []
        for text in prompts:
            seed = hashlib.sha256(text.encode()).digest()[:7]
            generator = torch.Generator().manual_seed(int.from_bytes(seed))
            rows.append(torch.randn(positions, width, generator=generator) / width**0.5)
        return Condition(torch.stack(rows), torch.ones(len(rows), positions, dtype=torch.bool))

    return condition
