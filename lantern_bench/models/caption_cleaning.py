"""How LlamaGen's captions are cleaned before the text encoder sees them: it was trained on cleaned ones.

The published sampling code lower-cases a caption and takes out what web captions are full of (addresses, file names,
order numbers, advertising, characters no caption needs), and does so twice. What stands here is that behaviour as a
table of rules in order; the file names of the published code are in the LlamaGen repository, `language/t5.py`.
A plain caption comes out lower-cased and otherwise as it was.
"""

from __future__ import annotations

import html
import re
import unicodedata
from html.parser import HTMLParser
from urllib.parse import unquote_plus

__all__ = ["CLEANING", "cleaned"]

CLEANING = "llamagen-2024"
"""Name of the rules; a change of any of them is a new name, so that no cached feature outlives it."""

_DASHES = "".join(re.escape(chr(code)) for code in range(0x10000) if unicodedata.category(chr(code)) == "Pd")
_HOST = r"[a-z0-9.\-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_ENDINGS = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
_SYMBOLS = re.escape("#®•©™&@·º½¾¿¡§~()[]{}|\\/*")

_ADDRESSES = (
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_HOST})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_HOST})", ""),
)
_CHARACTERS = (
    (r"@\w+\b", ""),
    ("[\u31c0-\u9fff]+", ""),
    (f"[{_DASHES}]+", "-"),
    ("[`\u00b4«»“”¨]", '"'),
    ("[\u2018\u2019]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
)
_NUMBERS = (
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
_WEB_WORDS = (
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
)
_SPACING = (
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    ("^[\"']([\\w\\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)
# A caption with more of these than a few is a file name or an address.
_JOINER = r"[-_]"
_FEW_JOINERS = 3


def cleaned(caption: str) -> str:
    """A caption as the text encoder of LlamaGen is given it."""
    return _once(_once(caption))


def _once(caption: str) -> str:
    import ftfy

    text = unquote_plus(caption).strip().lower().replace("<person>", "person")
    text = _without_tags(_ruled(text, _ADDRESSES))
    text = _ruled(_ruled(text, _CHARACTERS), _NUMBERS)
    if len(re.findall(_JOINER, text)) > _FEW_JOINERS:
        text = re.sub(_JOINER, " ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _ruled(_ruled(text, _WEB_WORDS), _SPACING).strip()


def _ruled(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


class _Text(HTMLParser):
    """Gathers what is between tags."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)


def _without_tags(text: str) -> str:
    parser = _Text()
    parser.feed(text)
    parser.close()
    return "".join(parser.pieces)
