"""How the embedded drafter is trained: the task of every drafter, on painted scenes, with the recipe `lanterns`.

Losses and recipe are `train.drafter_task` and `train.drafter_recipe`, shared with `lantern-bench train drafter`; here
is only what the embedded world's sequences are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lantern_bench.lanterns.defaults import GUIDANCE
from lantern_bench.lanterns.recipe_target import Sequences, all_conditions, caption_numbers
from lantern_bench.models.conditioning import Condition
from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.target import TransformerTarget
from lantern_bench.spec.decoding import Decoding
from lantern_bench.train.drafter_recipe import RECIPES
from lantern_bench.train.drafter_task import DrafterTask
from lantern_bench.train.lessons import Lessons, LiveFeatures, Sequenced

__all__ = ["drafter_task"]

_BATCH = RECIPES["lanterns"].batch
_EVALUATED = 32


def drafter_task(
    drafter: EagleDrafter, target: TransformerTarget, sequences: Sequences, held_out: Sequences, seed: int = 0
) -> DrafterTask:
    """Train a drafter for the embedded target, which is frozen by this."""
    target.eval().requires_grad_(False)
    recipe = replace(RECIPES["lanterns"], batch=_BATCH)
    features, examined = (LiveFeatures(target, _sequenced(part)) for part in (sequences, held_out))
    rows = range(min(_EVALUATED, len(held_out.tokens)))
    learnt = range(len(sequences.tokens))
    lessons = Lessons(
        features, learnt, recipe.batch, recipe.dropped, seed, lambda: examined.examined(rows), guided=recipe.guided
    )
    examined_with = Decoding(mode="ar", drafting="none", rule="none", cfg_scale=GUIDANCE)
    return DrafterTask(drafter, lessons, recipe, examined_with)


def _sequenced(sequences: Sequences) -> Sequenced:
    """Tokens, and the condition of rows by their attributes."""
    conditions, numbers = all_conditions(), caption_numbers(sequences.attributes)

    def condition(rows: Sequence[int]) -> Condition:
        chosen = numbers[list(rows)]
        return Condition(conditions.values[chosen], conditions.valid[chosen])

    return Sequenced(sequences.tokens, condition)
