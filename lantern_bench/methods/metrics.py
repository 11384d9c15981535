"""The quality metrics: one row each (docs/adding-a-metric.md).

The shipped rows are in metrics.toml. Their functions are in `metrics/`, because they import torch.
Another package decorates its function with `@image_metric` or `@set_metric`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from pydantic import ConfigDict

from lantern_bench.methods.parameters import Importable, fingerprint_of, load_code, read_rows


@dataclass(frozen=True)
class Metric:
    """A quality metric.

    Metrics of tokens are made of one set of sums (metrics/token_sums.py), metrics of drafts are
    columns of the records, and results of official scorers are imported. They have no function.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of rows in metrics.toml

    # also the name of its column
    name: str
    # what the figure of a cell is
    meaning: str
    # Of a metric of images: (protocol, device) -> scorer, where scorer(pictures, prompts) returns a
    # number or None for each picture, uint8 [3, h, w], and scorer.label, if any, names its network.
    # Of a metric of sets: (FeatureSets) -> figure.
    load: Importable = ""
    # Whether it is measured of each image, of all images of a cell against a reference, of the
    # tokens of a cell, or of its drafts while they are verified.
    level: Literal["image", "set", "tokens", "drafts"] = "image"
    # in tables and charts; "": the name in words
    label: str = ""
    # how numbers are written
    digits: str = ".4f"
    better: Literal["higher", "lower"] = "higher"
    # paired: difference from ar over the same prompts. spread: inside the interval of ar with other
    # seeds or not. none: it is compared with the target itself.
    against_ar: Literal["paired", "spread", "both", "none"] = "paired"
    # of the figure of one image, where it has one
    image_meaning: str = ""
    # the column that names the network behind the figure
    scored_by: str = "clip_model"
    # whether summary.csv has it, beside a published figure
    in_summary: bool = False
    # Whether the printed summary has it. If it has none of them, it has all of summary.csv.
    on_screen: bool = False
    # whether speed is drawn against it
    on_curves: bool = True
    # of its axis: linear below this figure, logarithmic above it; None: linear
    linear_below: float | None = None
    # ends of intervals lie between them
    bounds: tuple[float, float] = (-inf, inf)
    # Of metrics of sets: the fewest pictures, and the fewest for each feature of the extractor
    min_images: int = 2
    min_images_per_feature: int = 0
    # whether mean and covariance of the reference are not enough
    needs_features: bool = True
    # whether it uses the extractor of the protocol's manifold
    is_manifold: bool = False
    # whether the figure of a cell is the mean over the categories of its images
    by_category: bool = False
    # columns beside the figure: name, type, unit, meaning
    extras: tuple[tuple[str, str, str, str], ...] = ()

    @property
    def heading(self) -> str:
        """The name of the figure for people."""
        return self.label or self.name.replace("_", " ")

    @property
    def is_paired(self) -> bool:
        """Whether images are compared with those of ar for the same prompts."""
        return self.against_ar in ("paired", "both")

    @property
    def has_spread(self) -> bool:
        """Whether cells are compared with the spread of ar."""
        return self.against_ar in ("spread", "both")

    def function(self) -> Callable[..., Any]:
        """Return the function, imported."""
        return load_code(self.load)

    def fingerprint(self) -> str:
        """8 hex digits that change with the file of its function."""
        return fingerprint_of(self.load)[:8]


def image_metric(name: str, meaning: str, **fields: Any) -> Callable[[Importable], Metric]:
    """Make a metric of single images of a function (protocol, device) -> scorer.

    Args:
        name: The metric's name, in columns.
        meaning: The meaning of the figure of a cell.
        **fields: Other fields of `Metric`.
    """
    return lambda load: Metric(name, meaning, load, **fields)


def set_metric(name: str, meaning: str, **fields: Any) -> Callable[[Importable], Metric]:
    """Make a metric of sets of images of a function (`FeatureSets`) -> figure.

    Args:
        name: The metric's name, in columns.
        meaning: The meaning of the figure of a cell.
        **fields: Other fields of `Metric`.
    """
    return lambda load: Metric(name, meaning, load, level="set", against_ar="spread", **fields)


SHIPPED_METRICS = read_rows("metrics.toml", Metric)["row"]
