"""The quality metrics, one row each; a row names its function by module (docs/adding-a-metric.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal

from lantern_bench.methods.parameters import Code, fingerprint_of, load_code


@dataclass(frozen=True)
class Metric:
    """A quality metric.

    `load` of a metric of images is (protocol, device) -> scorer; `scorer(pictures, prompts)` gives a number or None for
    each picture, uint8 [3, h, w], and `scorer.label`, if any, names its network. Of a metric of sets it is
    (`FeatureSets`) -> figure. Those of tokens are made of one set of sums (`analysis/token_distance.py`).
    """

    name: str  # of its columns
    meaning: str  # of the figure of a cell
    load: Code
    # Measured of each image, of all images of a cell against a reference, or of the tokens of a cell.
    level: Literal["image", "set", "tokens"] = "image"
    label: str = ""  # in tables and charts; by default the name in words
    digits: str = ".4f"  # how numbers are written
    better: Literal["higher", "lower"] = "higher"
    # paired: difference from ar over the same prompts; spread: inside the interval of ar with other seeds or not; none:
    # compared with the target itself.
    against_ar: Literal["paired", "spread", "both", "none"] = "paired"
    image_meaning: str = ""  # of the figure of one image, where it has one
    scored_by: str = "clip_model"  # column that names the network behind the figure
    in_summary: bool = False  # whether summary.csv has it, beside a published figure
    # whether the printed summary has it; where it has none of these, it has all of summary.csv
    on_screen: bool = False
    on_curves: bool = True  # whether speed is drawn against it
    bounds: tuple[float, float] = (-inf, inf)  # ends of intervals lie between them
    # For metrics of sets: fewest pictures, and fewest for each feature of the extractor.
    min_images: int = 2
    min_images_per_feature: int = 0
    needs_features: bool = True  # whether mean and covariance of the reference are not enough
    is_manifold: bool = False  # whether it uses the extractor of the protocol's manifold
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
        """Return `load`, imported."""
        return load_code(self.load)

    def fingerprint(self) -> str:
        """8 hex digits that change with the file of its function."""
        return fingerprint_of(self.load)[:8]


_of_sets = partial(Metric, level="set", against_ar="spread", scored_by="fid_features")
_of_tokens = partial(
    Metric,
    load="lantern_bench.metrics.token_sums:token_sums",
    level="tokens",
    against_ar="none",
    scored_by="model",
    digits=".3f",
)
_SHARE = (0.0, 1.0)
SHIPPED_METRICS = (
    _of_tokens(
        "distance",
        "distance of the tokens from the target's distribution; of a lossless mode 0 up to its interval",
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
        "-log p(x) minus its mean under the target, nats per token; above 0: less likely tokens than the target's",
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
        "log p(x | prompt) - log p(x) minus its mean under the target, nats per token; below 0: tied less to it",
        on_curves=False,
    ),
    _of_sets(
        "fid",
        "Frechet distance to the reference, with the features of fid_features",
        "lantern_bench.metrics.fidelity:fid",
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
        "lantern_bench.metrics.fidelity:kid",
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
        "lantern_bench.metrics.image_scorers:clip_score",
        label="CLIP score",
        image_meaning="cosine between picture and caption, not scaled",
        in_summary=True,
    ),
    Metric(
        "prompt_accuracy",
        "share of pictures that show all attributes of the caption",
        "lantern_bench.metrics.image_scorers:prompt_accuracy",
        digits=".3f",
        image_meaning="1 when all attributes of the caption are seen, else 0",
        scored_by="protocol",
    ),
    _of_sets(
        "precision",
        "share of pictures inside the reference's manifold; depends on n_reference",
        "lantern_bench.metrics.fidelity:precision",
        digits=".3f",
        against_ar="both",
        image_meaning="1 where the picture is inside the reference's manifold, else 0",
        in_summary=True,
        on_curves=False,
        bounds=_SHARE,
        min_images=256,  # docs/quality.md has the measurement
        is_manifold=True,
    ),
    _of_sets(
        "recall",
        "share of the reference inside the pictures' manifold; depends on images and n_reference",
        "lantern_bench.metrics.fidelity:recall",
        digits=".3f",
        in_summary=True,
        on_curves=False,
        bounds=_SHARE,
        min_images=256,
        is_manifold=True,
    ),
    Metric(
        "hpsv2",
        "mean HPSv2.1, not scaled",
        "lantern_bench.metrics.image_scorers:hpsv2",
        label="HPSv2",
        image_meaning="HPSv2.1: cosine between picture and caption, not scaled",
    ),
    Metric(
        "image_reward",
        "mean ImageReward 1.0",
        "lantern_bench.metrics.image_scorers:image_reward",
        label="ImageReward",
        image_meaning="ImageReward 1.0",
    ),
)
