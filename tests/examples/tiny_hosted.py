"""The example of docs/adding-a-model.md beside a small checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.helpers import tiny_hosted as tiny

EXAMPLE = Path(__file__).parent / "hosted_janus"
CAPTIONS = ["a red lantern", "the lake at dusk over the lake"]
SHAPE = tiny.Shape(kv_heads=2, side=3, codes=64)


def write_model(folder: Path, shape: tiny.Shape = SHAPE) -> Path:
    """The model file of the example beside its code and a checkpoint with the tokenizer that the
    example takes.
    """
    checkpoint = folder / "Janus-Pro-1B"
    tiny.write_janus(checkpoint, shape)
    for name in ("hosted_janus.py", "janus.yaml"):
        shutil.copy(EXAMPLE / name, folder / name)
    words = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    start, _, pad, *_ = tiny.JANUS_SPECIAL
    first = [(start, words.token_to_id(start))]
    words.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=first)
    special = {"bos_token": start, "pad_token": pad, "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(checkpoint)
    return folder / "janus.yaml"
