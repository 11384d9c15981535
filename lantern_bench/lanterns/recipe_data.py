"""What the five parts learn from: painted scenes, their tokens, and scenes as the tokenizer gives them back.

All of it is made once and kept in the work folder. What depends on a tokenizer is kept under the first digits of its
file's hash, so that a retrained one never meets the tokens of the one before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lantern_bench.lanterns.captions import HELD_OUT, TRAIN
from lantern_bench.lanterns.dataset import SceneSet, scene_set
from lantern_bench.lanterns.recipe_metrics import Pool, judge_pool, reconstruct
from lantern_bench.lanterns.recipe_target import Sequences
from lantern_bench.lanterns.recipe_tokenizer import tokenize
from lantern_bench.models.vq import VQModel

__all__ = ["HELD_OUT_SEED", "TRAIN_SEED", "OnProgress", "RecipeData"]

TRAIN_SEED, HELD_OUT_SEED = 1, 2
_AT_ONCE = 512

OnProgress = Callable[[str, float], None]
"""What is being prepared, and the share that is done."""


@dataclass(frozen=True)
class RecipeData:
    """The data of one training, in `work`: `scenes` pictures to learn from and `held_out` to evaluate on."""

    work: Path
    scenes: int
    held_out: int
    on_progress: OnProgress = lambda _what, _done: None

    def painted(self) -> SceneSet:
        """Scenes of the training captions."""
        return self._scenes("scenes.npz", "painting scenes", TRAIN_SEED)

    def painted_held_out(self) -> SceneSet:
        """Scenes of the held-out captions."""
        return self._scenes("held_out.npz", "painting held-out scenes", HELD_OUT_SEED)

    def sequences(self, tokenizer: VQModel, digest: str) -> Sequences:
        """Tokens of the training scenes and, after them, of their mirror images."""
        scenes = self.painted()
        attributes = torch.from_numpy(scenes.attributes)

        def make() -> Tensor:
            both = [self._tokens(tokenizer, scenes, mirrored) for mirrored in (False, True)]
            return torch.cat(both)

        kept = self.work / f"tokens-{self.scenes}-{digest[:8]}.safetensors"
        return Sequences(_kept(kept, make), torch.cat([attributes, attributes]))

    def held_out_sequences(self, tokenizer: VQModel, digest: str) -> Sequences:
        """Tokens of the held-out scenes."""
        scenes = self.painted_held_out()
        kept = self.work / f"held-out-tokens-{self.held_out}-{digest[:8]}.safetensors"
        tokens = _kept(kept, lambda: self._tokens(tokenizer, scenes, False))
        return Sequences(tokens, torch.from_numpy(scenes.attributes))

    def pool(self, tokenizer: VQModel, digest: str) -> Pool:
        """What the judges learn from: training scenes, a share of them passed through the tokenizer."""
        scenes = self.painted()
        attributes = torch.from_numpy(scenes.attributes)
        kept = self.work / f"pool-{self.scenes}-{digest[:8]}.safetensors"
        return Pool(_kept(kept, lambda: judge_pool(scenes, self._through(tokenizer)).pixels), attributes)

    def _scenes(self, name: str, what: str, seed: int) -> SceneSet:
        among, count = (TRAIN, self.scenes) if seed == TRAIN_SEED else (HELD_OUT, self.held_out)
        return scene_set(among, count, seed, self.work / name, lambda done, total: self.on_progress(what, done / total))

    def _tokens(self, tokenizer: VQModel, scenes: SceneSet, mirrored: bool) -> Tensor:
        what = "tokenizing mirrored scenes" if mirrored else "tokenizing scenes"
        pictures = torch.from_numpy(scenes.pixels)
        return self._by_parts(what, pictures, lambda part: tokenize(tokenizer, part, mirrored))

    def _through(self, tokenizer: VQModel) -> Callable[[Tensor], Tensor]:
        what = "passing scenes through the tokenizer"
        return lambda pixels: self._by_parts(what, pixels, lambda part: reconstruct(tokenizer, part))

    def _by_parts(self, what: str, pictures: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        done, out = 0, []
        for part in pictures.split(_AT_ONCE):
            out.append(work(part))
            done += len(part)
            self.on_progress(what, done / len(pictures))
        return torch.cat(out)


def _kept(path: Path, make: Callable[[], Tensor]) -> Tensor:
    """Read a tensor from its file, or make it and write the file."""
    if path.exists():
        return load_file(path)["kept"]
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({"kept": made.contiguous()}, part)
    os.replace(part, path)
    return made
