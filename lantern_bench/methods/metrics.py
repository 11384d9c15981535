"""The quality metrics: one row each (docs/adding-a-metric.md).

The functions of the shipped rows need torch. So they stand in `metrics/`, below `@measures(NAME)`.
Another package decorates its function with `@image_metric` or `@set_metric`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal, TypeVar

from lantern_bench.methods.parameters import Importable, fingerprint_of, load_code

Function = TypeVar("Function", bound=Callable[..., Any])
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The functions of shipped metrics, as soon as their modules are imported."""


@dataclass(frozen=True)
class Metric:
    """A quality metric.

    Metrics of tokens are made of one set of sums (metrics/token_sums.py), and have no function.
    """

    # also the name of its column
    name: str
    # what the figure of a cell is
    meaning: str
    # Of a metric of images: (protocol, device) -> scorer, where scorer(pictures, prompts) returns a
    # number or None for each picture, uint8 [3, h, w], and scorer.label, if any, names its network.
    # Of a metric of sets: (FeatureSets) -> figure. None: `measures` registers it.
    load: Importable | None = None
    # Whether it is measured of each image, of all images of a cell against a reference, or of the
    # tokens of a cell.
    level: Literal["image", "set", "tokens"] = "image"
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
    # ends of intervals lie between them
    bounds: tuple[float, float] = (-inf, inf)
    # Of metrics of sets: the fewest pictures, and the fewest for each feature of the extractor
    min_images: int = 2
    min_images_per_feature: int = 0
    # whether mean and covariance of the reference are not enough
    needs_features: bool = True
    # whether it uses the extractor of the protocol's manifold
    is_manifold: bool = False
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
        """Return the function, imported; a shipped one from the module that registers it."""
        if self.load is None:
            return _FUNCTIONS[self.name]
        return load_code(self.load)

    def fingerprint(self) -> str:
        """8 hex digits that change with the file of its function."""
        return fingerprint_of(self.function())[:8]


def measures(name: str) -> Callable[[Function], Function]:
    """Register a function as the one of the shipped metric `name`."""

    def register(function: Function) -> Function:
        _FUNCTIONS[name] = function
        return function

    return register


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


_of_sets = partial(Metric, level="set", against_ar="spread", scored_by="fid_features")
_of_tokens = partial(
    Metric,
    level="tokens",
    against_ar="none",
    scored_by="model",
    digits=".3f",
)
_FROM_0_TO_1 = (0.0, 1.0)
SHIPPED_METRICS = (
    _of_tokens(
        "distance",
        "distance of the tokens from the target's distribution; "
        "0 for lossless modes, up to sampling noise",
        digits=".4f",
        better="lower",
        in_summary=True,
        on_screen=True,
        extras=(
            (
                "distance_p",
                "float",
                "",
                "chance of such tokens in a lossless mode, after Holm over the cells of the run",
            ),
            ("impossible", "float", "", "share of tokens that the target cannot give"),
            (
                "argmax_mismatch",
                "float",
                "",
                "at temperature 0: share of tokens that are not the target's most likely",
            ),
        ),
    ),
    _of_tokens(
        "surprise",
        "-log p(x) minus its mean under the target, nats per token; "
        "above 0: less likely tokens than the target's",
        better="lower",
        on_curves=False,
        extras=(
            (
                "entropy",
                "float",
                "nats",
                "mean entropy of the target's distributions along the images",
            ),
            ("largest_p", "float", "", "mean largest probability of these distributions"),
            ("ten_largest_p", "float", "", "mean sum of their ten largest probabilities"),
        ),
    ),
    _of_tokens(
        "prompt_information",
        "log p(x | prompt) - log p(x) minus its mean under the target, nats per token; "
        "below 0: tied less to the prompt",
        on_curves=False,
    ),
    _of_sets(
        "fid",
        "Frechet distance to the reference, with the features of fid_features",
        label="FID",
        digits=".2f",
        better="lower",
        in_summary=True,
        on_screen=True,
        bounds=(0.0, inf),
        min_images_per_feature=2,  # with fewer, most of the covariance is noise
        needs_features=False,
        extras=(
            (
                "fid_infinity",
                "float",
                "",
                "fid extrapolated to infinitely many pictures, where it was asked for",
            ),
            ("fid_infinity_low", "float", "", "lower end of the 95 % interval of fid_infinity"),
            ("fid_infinity_high", "float", "", "upper end of the 95 % interval of fid_infinity"),
        ),
    ),
    _of_sets(
        "kid",
        "kernel distance to the reference, over all pictures",
        label="KID",
        digits=".4g",
        better="lower",
        on_curves=False,
        min_images=5,
        extras=(
            ("kid_std", "float", "", "standard deviation of kid over subsets"),
            (
                "kid_subset",
                "int",
                "images",
                "images in one subset of kid: at most 1000 and half of n",
            ),
            (
                "n_reference",
                "int",
                "images",
                "pictures of the reference; empty where it does not say",
            ),
        ),
    ),
    Metric(
        "clip_score",
        "mean cosine between picture and caption, not scaled",
        label="CLIP score",
        image_meaning="cosine between picture and caption, not scaled",
        in_summary=True,
    ),
    Metric(
        "prompt_accuracy",
        "share of pictures that show all attributes of the caption",
        digits=".3f",
        image_meaning="1 when all attributes of the caption are seen, else 0",
        scored_by="protocol",
    ),
    _of_sets(
        "precision",
        "share of pictures inside the reference's manifold; depends on n_reference",
        digits=".3f",
        against_ar="both",
        image_meaning="1 where the picture is inside the reference's manifold, else 0",
        in_summary=True,
        on_curves=False,
        bounds=_FROM_0_TO_1,
        min_images=256,  # docs/quality.md has the measurement
        is_manifold=True,
    ),
    _of_sets(
        "recall",
        "share of the reference inside the pictures' manifold; depends on images and n_reference",
        digits=".3f",
        in_summary=True,
        on_curves=False,
        bounds=_FROM_0_TO_1,
        min_images=256,
        is_manifold=True,
    ),
    Metric(
        "hpsv2",
        "mean HPSv2.1, not scaled",
        label="HPSv2",
        image_meaning="HPSv2.1: cosine between picture and caption, not scaled",
    ),
    Metric(
        "image_reward",
        "mean ImageReward 1.0",
        label="ImageReward",
        image_meaning="ImageReward 1.0",
    ),
)
