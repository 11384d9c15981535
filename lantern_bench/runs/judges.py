"""From a protocol to the judges that carry it out, with their weights at hand.

All that a protocol needs is found before anything is decoded or scored, so that what is missing is said first. What
the protocols are is `spec/protocols.py`; how rows are made with the judges is `runs/score.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lantern_bench.lanterns.classifier import AttributeClassifier, load_classifier
from lantern_bench.measure import clip, fidelity
from lantern_bench.measure.rewards import Reward, load_reward
from lantern_bench.spec.protocols import EMBEDDED, PROTOCOLS, Protocol

__all__ = ["Judges", "embedded_judges", "judges_of"]


@dataclass(frozen=True)
class Judges:
    """What scores the pictures, under one protocol. A judge that is None leaves its columns empty.

    `manifold` is the extractor of precision and recall where it is another than `extractor`.
    """

    protocol: Protocol
    clip: clip.ClipScorer | None = None
    extractor: fidelity.Extractor | None = None
    classifier: AttributeClassifier | None = None
    device: torch.device | str = "cpu"
    manifold: fidelity.Extractor | None = None
    rewards: Mapping[str, Reward] = field(default_factory=dict)

    @property
    def label(self) -> str | None:
        """What judges pictures with their captions, and its weights; None where nothing does."""
        judges = [*([] if self.clip is None else [self.clip]), *self.rewards.values()]
        return "; ".join(judge.label for judge in judges) or None


def judges_of(
    protocol: Protocol,
    *,
    clip_weights: Path | None = None,
    features_weights: Path | None = None,
    device: torch.device | str = "cpu",
) -> Judges:
    """Find what a protocol needs.

    Raises `RefusedError` for what is not on this machine and `UserError` for a file that is of another model.
    """
    manifold = protocol.manifold if protocol.manifold != protocol.features else None
    return Judges(
        protocol,
        extractor=fidelity.find_extractor(protocol.features, features_weights) if protocol.features else None,
        manifold=fidelity.find_extractor(manifold) if manifold else None,
        clip=clip.load_clip(protocol.clip_model, clip_weights, prefix=protocol.clip_prefix, device=device)
        if protocol.clip_model
        else None,
        classifier=load_classifier(device=device) if protocol.accuracy else None,
        device=device,
        rewards={name: load_reward(name, device=device) for name in protocol.rewards},
    )


def embedded_judges(device: torch.device | str = "cpu") -> Judges:
    """The judges of the embedded family, from the weights in the package (`RefusedError` when they are missing)."""
    return judges_of(PROTOCOLS[EMBEDDED], device=device)
