"""Scoring on a Ray cluster: tasks score parts of the pictures, the driver sums and compares.

A task gets the PNG files themselves, so nodes need no common file system. Ray runs a task again when its node is lost;
an error of the scorers is not tried again.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench import stopping
from lantern_bench.config.protocols import Protocol
from lantern_bench.errors import LanternError, RefusedError
from lantern_bench.runs.threads import prepare_environment

if TYPE_CHECKING:
    from lantern_bench.metrics.reference_sets import Reference
    from lantern_bench.runs.scoring import Measured, Scorers
    from lantern_bench.runs.sweep import Request

# Pictures of a task, and tasks that wait for a worker beside those that run.
_PICTURES, _AHEAD = 64, 2


class Scored(NamedTuple):
    """What a task measured, and the scorers it had."""

    measured: Measured
    labels: tuple[str | None, ...]


@lru_cache(maxsize=1)
def _scorers(protocol: Protocol, device: str) -> Scorers:
    """The scorers of this process, which serves several tasks."""
    from lantern_bench.runs.devices import choose_place
    from lantern_bench.runs.scoring import load_scorers

    return load_scorers(protocol, device=choose_place(device).device)


def labels_of(scorers: Scorers) -> tuple[str | None, ...]:
    """Name the scorers with the hashes of their weights."""
    extractors = (None if one is None else one.label for one in (scorers.extractor, scorers.manifold))
    return (scorers.label, *extractors)


def score_part(
    protocol: Protocol, device: str, records: Sequence[dict[str, Any]], pictures: Sequence[bytes], manifold: bool
) -> Scored | LanternError:
    """Score pictures (PNG files) of these records; the error that a user can act on is returned, not raised."""
    prepare_environment()
    from lantern_bench.runs.scoring import measure_pictures

    try:
        scorers = _scorers(protocol, device)
    except LanternError as error:
        return error
    with tempfile.TemporaryDirectory() as folder:
        named = [record | {"image": f"{number}.png"} for number, record in enumerate(records)]
        for record, png in zip(named, pictures, strict=True):
            (Path(folder) / record["image"]).write_bytes(png)
        return Scored(measure_pictures(named, Path(folder), scorers, manifold=manifold), labels_of(scorers))


class RayMeasure:
    """Measures the pictures of a cell in parts, as tasks; see `scoring.Measure`."""

    def __init__(self, ray: Any, request: Request) -> None:
        self._ray, settings = ray, request.experiment.settings
        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0)) if settings.device in ("auto", "cuda") else 0
        self._device, self._protocol = "cuda" if gpus else "cpu", request.protocol
        self._tasks = _AHEAD + (gpus or int(total.get("CPU", 1)))
        need = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
        self._task = ray.remote(**need, retry_exceptions=False)(score_part)

    def __call__(
        self, records: Sequence[dict[str, Any]], folder: Path, scorers: Scorers, *, manifold: bool
    ) -> Measured:
        """Measure the pictures of records; raises `RefusedError` where a node has other scorers than the driver."""
        from lantern_bench.runs.scoring import measure_pictures

        if not records:
            return measure_pictures(records, folder, scorers, manifold=manifold)
        waiting: deque[Any] = deque()
        found: list[Measured] = []
        for start in range(0, len(records), _PICTURES):
            part = records[start : start + _PICTURES]
            pictures = [(folder / record["image"]).read_bytes() for record in part]
            waiting.append(self._task.remote(self._protocol, self._device, part, pictures, manifold))
            if len(waiting) >= self._tasks:
                found.append(self._take(waiting.popleft(), scorers))
        found += [self._take(ref, scorers) for ref in waiting]
        return joined(found)

    def _take(self, ref: Any, scorers: Scorers) -> Measured:
        while not self._ray.wait([ref], timeout=1.0)[0]:
            stopping.check()
        answer = self._ray.get(ref)
        if isinstance(answer, LanternError):
            raise answer
        if answer.labels != labels_of(scorers):
            what = f"a node of the cluster scores with {answer.labels}, and this one with {labels_of(scorers)}"
            raise RefusedError(what, "Give all nodes the same weights.")
        found: Measured = answer.measured
        return found


def joined(parts: Sequence[Measured]) -> Measured:
    """Join what was measured of parts, in their order; statistics are summed (`FeatureSet.merged`)."""
    import torch

    from lantern_bench.metrics.fidelity import FeatureSet
    from lantern_bench.runs.scoring import Measured

    features = [part.features for part in parts if part.features is not None]
    others = [part.manifold for part in parts if part.manifold is not None]
    rows = [row for part in parts for row in part.rows]
    return Measured(rows, FeatureSet.merged(features) if features else None, torch.cat(others) if others else None)


def score_on_ray(
    ray: Any, request: Request, scorers: Scorers, reference: Reference | None, tell: Callable[[Any], None]
) -> int:
    """Score the pictures of a run as tasks of the cluster; returns the number of rows written."""
    from lantern_bench.runs.sweep import score_store

    return score_store(request.folder, scorers, reference, tell, measure=RayMeasure(ray, request))
