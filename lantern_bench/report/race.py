"""A race as an animated GIF: one caption, decoded by several cells, painted side by side in measured time.

Frames are a pure function of recorded times: nothing is decoded here. A patch appears when the step that committed its
token ends, and shows the finished picture, because a tokenizer draws whole pictures only.
"""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

FRAME_SECONDS = 0.08
"""A GIF counts hundredths of a second: 12.5 frames a second."""
_SHORTEST, _LONGEST = 2.0, 12.0  # seconds of animation that the fastest lane should last, and the slowest may
_HOLD_MILLISECONDS = 3000
_WIDTH, _GAP, _LINE, _SQUARE, _COLUMNS = 192, 12, 20, 11, 5
_BLANK, _GREY, _INK = "#E8E8E8", "#767676", "#202020"
_TINT = 0.6


class Step(NamedTuple):
    """A step: when it ended, in seconds of decoding, its first token, how many it committed and accepted as drafts."""

    ended: float
    start: int
    committed: int
    accepted: int


class Lane(NamedTuple):
    """One cell: its label and colour, seconds of decoding, steps (the prefill first, which commits the first token).

    tokens: of the picture, forced ones included. picture: uint8 [H, W, 3]. grid: rows and columns of its codes.
    speedup: over AR, None where AR does not take part.
    """

    label: str
    colour: str
    seconds: float
    steps: Sequence[Step]
    tokens: int
    picture: NDArray[np.uint8]
    grid: tuple[int, int]
    speedup: float | None = None


def painted(lane: Lane, since: float, until: float) -> NDArray[np.int8]:
    """The state [tokens] of each token `until` seconds after the begin: 0 to come, 1 there, 2 a draft just accepted.

    Just accepted are the drafts of the steps that ended after `since`, else those of the last step that has ended.
    """
    state = np.zeros(lane.tokens, np.int8)
    before, done = (bisect_right(lane.steps, time, key=lambda step: step.ended) for time in (since, until))
    if done:
        state[: lane.steps[done - 1].start + lane.steps[done - 1].committed] = 1
    if before < len(lane.steps):
        for step in lane.steps[max(0, min(before, done - 1)) : done]:
            state[step.start : step.start + step.accepted] = 2
    return state


def pace(seconds: Sequence[float]) -> int:
    """How many times slower than real time lanes of these seconds are shown; -n for n times faster."""
    if max(seconds) > _LONGEST:
        return -math.ceil(max(seconds) / _LONGEST)
    return max(1, min(math.ceil(_SHORTEST / min(seconds)), math.floor(_LONGEST / max(seconds))))


def frame_times(seconds: Sequence[float]) -> list[float]:
    """The seconds of decoding that each frame shows; the last, at infinity, shows every lane finished."""
    factor = pace(seconds)
    real = FRAME_SECONDS * (-factor if factor < 0 else 1 / factor)
    return [number * real for number in range(math.ceil(max(seconds) / real) + 1)] + [math.inf]


def race_gif(lanes: Sequence[Lane], caption: str, model: str) -> bytes:
    """Draw the race: an endless GIF that holds its last frame; the lanes in rows of at most five."""
    from PIL import Image

    stage, times = _Stage(lanes, caption, model), frame_times([lane.seconds for lane in lanes])
    spans = list(zip([0.0, *times[:-2], math.inf], times, strict=True))
    palette = stage.palette()
    frames = (stage.frame(*span).quantize(palette=palette, dither=Image.Dither.NONE) for span in spans)
    durations = [round(1000 * FRAME_SECONDS)] * (len(spans) - 1) + [_HOLD_MILLISECONDS]
    buffer = io.BytesIO()
    next(frames).save(buffer, "GIF", save_all=True, append_images=frames, duration=durations, loop=0)
    return buffer.getvalue()


class _Stage:
    """What all frames share: the caption, the pace, the labels, and where the panels are."""

    def __init__(self, lanes: Sequence[Lane], caption: str, model: str) -> None:
        from PIL import Image, ImageDraw

        self._panels = [_Panel(lane) for lane in lanes]
        rows = math.ceil(len(lanes) / _COLUMNS)
        columns = math.ceil(len(lanes) / rows)
        height, top = max(panel.height for panel in self._panels) + 2 * _LINE + _GAP, 2 * _LINE + 2 * _GAP
        size = columns * (_WIDTH + _GAP) + _GAP, top + rows * height
        self._places = [(_GAP + n % columns * (_WIDTH + _GAP), top + n // columns * height) for n in range(len(lanes))]
        factor = pace([lane.seconds for lane in lanes])
        speed = "real time" if factor == 1 else f"{abs(factor)}x {'slower' if factor > 1 else 'faster'} than real time"
        self._background = Image.new("RGB", size, "#FFFFFF")
        draw = ImageDraw.Draw(self._background)
        _write(draw, (_GAP, _GAP), caption, _INK, size[0] - 2 * _GAP, bold=True)
        _write(draw, (_GAP, _GAP + _LINE), f"{model}, {speed}; tinted: accepted drafts", _GREY, size[0] - 2 * _GAP)
        for lane, (x, y) in zip(lanes, self._places, strict=True):
            draw.rectangle((x, y + 2, x + _SQUARE, y + 2 + _SQUARE), fill=lane.colour)
            _write(draw, (x + _SQUARE + 5, y), lane.label, _INK, _WIDTH - _SQUARE - 5, bold=True)

    def palette(self) -> Image.Image:
        """One palette for all frames, so that a frame stores only what has changed; text and areas are exact."""
        from PIL import Image, ImageColor

        drafted = [panel for panel in self._panels if any(step.accepted for step in panel.lane.steps)]
        layers = [np.asarray(self.frame(math.inf, math.inf)), *(panel.tinted for panel in drafted)]
        pixels = np.concatenate([layer.reshape(-1, 3) for layer in layers])
        exact = {"#FFFFFF", _BLANK, _GREY, _INK, *(panel.lane.colour for panel in self._panels)}
        # One place is left for Pillow's transparency.
        free = 255 - len(exact)
        chosen = Image.fromarray(pixels[None]).quantize(free, Image.Quantize.MEDIANCUT, kmeans=2)
        fixed = [part for colour in sorted(exact) for part in ImageColor.getrgb(colour)[:3]]
        chosen.putpalette([*(chosen.getpalette() or [])[: 3 * free], *fixed])
        return chosen

    def frame(self, since: float, until: float) -> Image.Image:
        """The frame of `until` seconds, in RGB."""
        from PIL import Image, ImageDraw

        frame = self._background.copy()
        draw = ImageDraw.Draw(frame)
        for panel, (x, y) in zip(self._panels, self._places, strict=True):
            lane, below = panel.lane, y + _LINE + panel.height + 2
            frame.paste(Image.fromarray(panel.pixels(since, until)), (x, y + _LINE))
            done = until >= lane.seconds
            clock, ink = f"{min(until, lane.seconds):.2f} s", _INK if done else _GREY
            _write(draw, (x, below), clock, ink, _WIDTH, bold=done)
            if lane.speedup is not None:
                _write(draw, (x + _WIDTH, below), f"{lane.speedup:.2f}x", ink, _WIDTH, bold=done, anchor="ra")
        return frame


class _Panel:
    """The picture of a lane at the width of a panel, and which token each of its pixels belongs to."""

    def __init__(self, lane: Lane) -> None:
        from PIL import Image, ImageColor

        self.lane = lane
        high, wide = lane.picture.shape[:2]
        self.height = round(high * _WIDTH / wide)
        method = Image.Resampling.LANCZOS if _WIDTH % wide else Image.Resampling.NEAREST
        whole = np.asarray(Image.fromarray(lane.picture).resize((_WIDTH, self.height), method))
        blank = np.broadcast_to(np.array(ImageColor.getrgb(_BLANK), np.uint8), whole.shape)
        tinted = (1 - _TINT) * whole + _TINT * np.array(ImageColor.getrgb(lane.colour))
        self.tinted = tinted.round().astype(np.uint8)
        self._layers = np.stack([blank, whole, self.tinted])
        (rows, columns), (y, x) = lane.grid, (np.arange(self.height), np.arange(_WIDTH))
        # A row may end with forced tokens, which have no patch.
        self._token = (y * rows // self.height * (lane.tokens // rows))[:, None] + x * columns // _WIDTH

    def pixels(self, since: float, until: float) -> NDArray[np.uint8]:
        """The panel uint8 [height, width, 3] at a time, as `painted`."""
        state = painted(self.lane, since, until)[self._token][:, :, None]
        return np.choose(state, self._layers)


def _write(
    draw: ImageDraw.ImageDraw,
    at: tuple[int, int],
    text: str,
    ink: str,
    width: int,
    *,
    bold: bool = False,
    anchor: str = "la",
) -> None:
    """Write a line from its top left corner, smaller or cut where it is wider than `width`; `anchor` as Pillow's."""
    size = next((size for size in (13, 12, 11, 10) if _font(size, bold).getlength(text) <= width), 9)
    font = _font(size, bold)
    while font.getlength(text) > width:
        text = text.rstrip("…")[:-1] + "…"
    draw.text(at, text, fill=ink, font=font, anchor=anchor)


@cache
def _font(size: int, bold: bool) -> ImageFont.FreeTypeFont:
    """The font of matplotlib, which has Greek letters."""
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)
