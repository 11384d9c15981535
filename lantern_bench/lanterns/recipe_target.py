"""How the embedded target is trained: next-token cross-entropy on tokenised scenes, caption dropped one time in ten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.decode.sampling import guide
from lantern_bench.lanterns.captions import ALL_ATTRIBUTES, FIELDS, MAX_WORDS, VOCABULARY, words
from lantern_bench.lanterns.defaults import GUIDANCE
from lantern_bench.models.conditioning import Condition, WordCaption
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.train.teacher import Taught, teach

__all__ = [
    "TARGET_CONFIG",
    "Sequences",
    "TargetTask",
    "all_conditions",
    "build_target",
    "caption_condition",
    "caption_numbers",
]

TARGET_CONFIG = TransformerConfig(
    vocab_size=2048,
    dim=256,
    layers=8,
    heads=4,
    ffn_dim=704,
    prefix=MAX_WORDS,
    grid=(16, 16),
    prefix_rotary="identity",
)
_BATCH = 32
_DROPPED = 0.1
_EVALUATED = 128


class Sequences(NamedTuple):
    """Tokens int16 [n, 256] of pictures and the indices of their attributes int64 [n, 5]."""

    tokens: Tensor
    attributes: Tensor


def build_target() -> TransformerTarget:
    """The embedded target with fresh weights, drawn from torch's current stream."""
    target = TransformerTarget(TARGET_CONFIG, WordCaption(len(VOCABULARY), MAX_WORDS, TARGET_CONFIG.dim))
    for name, parameter in target.named_parameters():
        if parameter.dim() >= 2:
            deep = name.endswith(("wo.weight", "w2.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * TARGET_CONFIG.layers) ** 0.5 if deep else 0.02)
    return target


def caption_condition(captions: Sequence[str]) -> Condition:
    """Word numbers int64 [B, 10], padded on the left, and which are words; UserError as in `captions.words`."""
    values = torch.zeros(len(captions), MAX_WORDS, dtype=torch.int64)
    for row, caption in enumerate(captions):
        numbers = words(caption)
        values[row, MAX_WORDS - len(numbers) :] = torch.tensor(numbers)
    return Condition(values, values > 0)


class TargetTask:
    """Train the target on token sequences; every sequence's mirror image is in `sequences` as well."""

    name = "target"

    def __init__(self, target: TransformerTarget, sequences: Sequences, held_out: Sequences) -> None:
        self.target = target
        self.module: nn.Module = target
        self._sequences, self._held_out = sequences, held_out
        self._conditions = all_conditions()

    def loss(self, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy of a random batch."""
        rows = torch.randint(len(self._sequences.tokens), (_BATCH,), generator=generator)
        drop = torch.rand(_BATCH, generator=generator) < _DROPPED
        loss = self._nll(Sequences(self._sequences.tokens[rows], self._sequences.attributes[rows]), drop)
        return loss, {}

    def after_step(self, step: int, generator: torch.Generator) -> None:
        """Nothing to do between steps."""

    def evaluate(self) -> dict[str, float]:
        """Held-out NLL (nats a token); mean top-1 and top-10 probability, default guidance, teacher forced."""
        part = Sequences(*(tensor[:_EVALUATED] for tensor in self._held_out))
        keep = torch.zeros(len(part.tokens), dtype=torch.bool)
        nll = sum(
            float(self._nll(Sequences(*(t[i : i + _BATCH] for t in part)), keep[i : i + _BATCH]))
            for i in range(0, len(keep), _BATCH)
        ) / (len(keep) // _BATCH)
        sharp = Sequences(*(tensor[:_BATCH] for tensor in part))
        logits = [self.logits(sharp, torch.full((_BATCH,), dropped)) for dropped in (False, True)]
        top = guide(logits[0], logits[1], GUIDANCE).softmax(-1).topk(10, dim=-1).values
        return {"nll_held_out": nll, "top1": float(top[..., 0].mean()), "top10": float(top.sum(-1).mean())}

    def features(self, sequences: Sequences, dropped: Tensor) -> Taught:
        """Final-norm hidden states [B, P + 255, dim] under teacher forcing."""
        number = caption_numbers(sequences.attributes)
        condition = Condition(self._conditions.values[number], self._conditions.valid[number])
        return teach(self.target, condition, sequences.tokens.long(), dropped)

    def logits(self, sequences: Sequences, dropped: Tensor) -> Tensor:
        """Logits [B, 256, V] that predict each token."""
        hidden = self.features(sequences, dropped).hidden
        out: Tensor = self.target.transformer.output(hidden[:, self.target.config.prefix - 1 :])
        return out

    def _nll(self, sequences: Sequences, dropped: Tensor) -> Tensor:
        logits = self.logits(sequences, dropped)
        wanted = sequences.tokens.long().to(logits.device)
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def all_conditions() -> Condition:
    """The condition of every caption, by its number (attribute indices in mixed base)."""
    return caption_condition([item.caption() for item in ALL_ATTRIBUTES])


def caption_numbers(attributes: Tensor) -> Tensor:
    """Attribute indices int64 [n, 5] -> place in `ALL_ATTRIBUTES` [n]."""
    number = torch.zeros(len(attributes), dtype=torch.int64)
    for column, values in enumerate(FIELDS.values()):
        number = number * len(values) + attributes[:, column]
    return number
