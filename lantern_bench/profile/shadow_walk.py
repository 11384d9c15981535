"""One decode that shows what a step of many other settings would do.

The walk follows one setting. Each of its steps drafts a tree and scores it once.
Whether a draft is accepted depends only on p, q, its neighbours and the rule, so every setting is
evaluated on the same drafts (`decoding/acceptance/expectation.py`). docs/prediction.md, "Many
settings from one walk", says what this assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lantern_bench.analysis.token_distance import BLOCKS
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.expectation import ExpectedStep, ScoredDrafts
from lantern_bench.decoding.loop import configured_rule, decode, image_generators
from lantern_bench.decoding.protocol import Logits
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.decoding.step import SpeculativeStep
from lantern_bench.decoding.tree import DraftTree
from lantern_bench.methods.catalog import RULES
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.metrics.token_sums import ImageLayout, centred_features
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.utils.progress import ignore_events

Array: TypeAlias = NDArray[np.float64]

_STRICT = ConfiguredRule(RULES["strict"])


class WalkSums(NamedTuple):
    """Sums over the steps of B images, for each of S settings on one tree of M nodes.

    Everything but `steps` is an expected number, given the drafts of the walk.
    """

    # steps of the walk, [B]
    steps: Array
    # times that each node of the tree is committed, the root always, [S, B, M]
    reach: Array
    # times that a node of each depth is committed, [S, B, D + 1]
    committed: Array
    # times that a draft below a node of each depth is tested, [S, B, D + 1]
    tested: Array
    # [S, B]; 0 where verification does not measure it
    emitted_tv: Array
    # tokens that the target cannot give, [S, B]
    impossible: Array
    # of the features of all tokens, as `FeatureSums.of` reads them, [S, B, blocks, columns]; the
    # shifts of lossless settings are left out
    features: Array

    @classmethod
    def joined(cls, parts: Sequence[WalkSums]) -> WalkSums:
        """Return the sums of the images of all parts."""
        steps, *others = zip(*parts, strict=True)
        return cls(np.concatenate(steps), *[np.concatenate(arrays, axis=1) for arrays in others])


def walk_images(
    model: LoadedModel,
    walk: Decoding,
    settings: Sequence[Decoding],
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    progress: Callable[[float], None] = ignore_events,
) -> WalkSums:
    """Decode one image for each prompt with `walk`, and evaluate all settings at every step.

    Args:
        model: The model.
        walk: The setting that is followed.
        settings: Settings that sample and draft as `walk` does.
        prompts: The prompts, decoded together.
        seeds: The seed of each image.
        progress: Receives after each step the fraction of the tokens that are done.
    """
    shadow = ShadowWalk(model, walk, settings, images=len(prompts), progress=progress)
    decode(
        model=model,
        condition=model.condition(prompts),
        decoding=walk,
        generators=image_generators(model, seeds),
        engine=model.engine,
        observe=shadow.observe,
    )
    return shadow.sums


class _ScoredNodes(NamedTuple):
    """The nodes of the draft of a step; the token behind a node is the one emitted there."""

    p: Tensor  # [B, M, V]
    # features of every token minus their means under p, [B, M, F, V]
    features: Tensor
    # the upper triangle of their covariance under p, [B, M, F (F + 1) / 2]
    covariance: Tensor
    # in which block of the image the token behind is; 0 for forced tokens, [B, M, blocks]
    in_block: Tensor


class ShadowWalk:
    """Evaluates settings at each step of a decode.

    Attributes:
        sums: What has been added up.
    """

    def __init__(
        self,
        model: LoadedModel,
        walk: Decoding,
        settings: Sequence[Decoding],
        *,
        images: int,
        progress: Callable[[float], None],
    ) -> None:
        """Prepare the rules of the settings; arguments as of `walk_images`."""
        self._walk = walk
        self._layout = ImageLayout.of(model)
        self._progress = progress
        self._rules = [configured_rule(setting, model) for setting in settings]
        # Without filters the target can give every token.
        self._is_filtered = bool(walk.value("top_k")) or walk.value("top_p") < 1
        self._features = len(feature_names(model, walk))
        size = (len(settings), images)
        depths = 1 + draft_depth(walk)
        self.sums = WalkSums(
            steps=np.zeros(images),
            reach=np.zeros((*size, 1 + walk.draft_nodes)),
            committed=np.zeros((*size, depths)),
            tested=np.zeros((*size, depths)),
            emitted_tv=np.zeros(size),
            impossible=np.zeros(size),
            features=np.zeros((*size, BLOCKS, self._features * (self._features + 3) // 2)),
        )

    def observe(self, step: SpeculativeStep, logits: Logits) -> None:
        """Add what each setting is expected to do in a step."""
        images = step.images
        is_active = images.position < images.tokens_wanted
        active = is_active.nonzero().squeeze(1)
        self.sums.steps[:] += is_active.double().cpu().numpy()
        self._add_step(step, self._scored(step, logits), active=active)
        done = images.position.clamp_max(images.tokens_wanted).sum() / images.tokens_wanted
        self._progress(float(done) / len(is_active))

    def _scored(self, step: SpeculativeStep, logits: Logits) -> _ScoredNodes:
        """Return the nodes of the draft of a step."""
        tree = step.drafting.tree
        layout = self._layout
        guided = guide(logits.cond, logits.uncond, self._walk.cfg_scale)
        p = decoding_probabilities(guided, self._walk)
        rows = p.flatten(0, 1)

        # 1. The features of every token.
        positions = step.images.position[:, None] + tree.depths
        positions = positions.clamp_max(len(layout.is_drawn) - 1)
        further = []
        if logits.uncond is not None:
            information = logits.cond.log_softmax(dim=-1) - logits.uncond.log_softmax(dim=-1)
            further.append(information.flatten(0, 1).double())
        if layout.component is not None:
            further.append(layout.component.expand(len(rows), -1))
            above = _tokens_above(step, line=layout.line)
            further.append(
                layout.closeness(
                    positions.flatten(), left=tree.tokens.flatten(), above=above.flatten()
                )
            )
        features, _ = centred_features(rows.double(), further)

        # 2. Their covariance under p.
        covariance = (features * rows.double()[:, None]) @ features.transpose(1, 2)
        triangle = torch.triu_indices(self._features, self._features, device=rows.device)
        covariance = covariance[:, triangle[0], triangle[1]]

        # 3. Whether a token cannot be given counts as a feature too. Its mean under p is 0.
        if self._is_filtered:
            features = torch.cat([features, (rows == 0).double()[:, None]], dim=1)
        in_block = functional.one_hot(layout.block[positions], BLOCKS).double()
        return _ScoredNodes(
            p=p,
            features=features.to(p.dtype).unflatten(0, p.shape[:2]),
            covariance=covariance.unflatten(0, p.shape[:2]),
            in_block=in_block * layout.is_drawn[positions].unsqueeze(2),
        )

    def _add_step(self, step: SpeculativeStep, every: _ScoredNodes, *, active: Tensor) -> None:
        """Add the settings at the images that are not done."""
        nodes = _ScoredNodes(*(values[active] for values in every))
        tree = step.drafting.tree.of_images(active)
        drafts = ScoredDrafts(
            tree,
            nodes.p,
            nodes.features,
            depth_limit=step.images.depth_limit[active],
            position=step.images.position[active],
        )
        shift_of_strict = drafts.expected(_STRICT).shift
        images = active.cpu().numpy()
        for index, rule in enumerate(self._rules):
            found = drafts.expected(rule)
            reach = found.reach.double()
            self._add_counts(index, images, tree, found=found)
            if rule.row.lossless:
                continue
            # The shift of the strict rule is 0 on average: it only takes away noise of the drafts.
            shift = (found.shift - shift_of_strict).double()
            of_tokens = torch.cat([shift[..., : self._features], nodes.covariance], dim=2)
            in_block = (nodes.in_block * reach.unsqueeze(2)).transpose(1, 2)
            self.sums.features[index, images] += (in_block @ of_tokens).cpu().numpy()
            if self._is_filtered:
                impossible = (reach * shift[..., -1]).sum(dim=1)
                self.sums.impossible[index, images] += impossible.cpu().numpy()

    def _add_counts(
        self, index: int, images: Array, tree: DraftTree, *, found: ExpectedStep
    ) -> None:
        """Add how often the nodes of a setting are committed, and their emitted TV."""
        reach = found.reach.double()
        self.sums.reach[index, images, : reach.shape[1]] += reach.cpu().numpy()
        depths = self.sums.committed.shape[-1]
        at_depth = functional.one_hot(tree.depths, depths).double()
        both = torch.stack([reach, reach * found.tries], dim=1) @ at_depth
        committed, tested = both.cpu().numpy().transpose(1, 0, 2)
        self.sums.committed[index, images] += committed
        self.sums.tested[index, images] += tested
        if found.emitted_tv is not None:
            emitted_tv = (reach * found.emitted_tv).sum(dim=1)
            self.sums.emitted_tv[index, images] += emitted_tv.cpu().numpy()


def strict_of(decoding: Decoding) -> Decoding:
    """Return the strict rule with the drafts and the sampling of a decoding."""
    kept = {*SAMPLING, "drafting", *decoding.drafting_row.parameter_names} - {"mode"}
    values = {key: value for key, value in decoding.settings().items() if key in kept}
    return Decoding("speculative", rule="strict", cfg_default=decoding.cfg_default, **values)


def feature_names(model: LoadedModel, decoding: Decoding) -> list[str]:
    """Return the features of the distance that a walk adds up, all but `alike`."""
    names = ["surprise", "squared_surprise"]
    if decoding.cfg_scale != 1:
        names.append("prompt_information")
    if model.codebook is not None:
        names += ["first_component", "closeness"]
    return names


def draft_depth(decoding: Decoding) -> int:
    """Return the depth of the deepest draft of a static or dynamic tree."""
    return len(decoding.paths[-1]) if decoding.paths else int(decoding.value("depth"))


def _tokens_above(step: SpeculativeStep, line: int) -> Tensor:
    """Return for each node the token above the token behind it, int64 [B, M].

    It may be an ancestor of the node, if lines are shorter than the tree is deep. It is any token
    in the first line.
    """
    tree = step.drafting.tree
    depths = tree.depths
    ahead = depths.amax() + 1

    # The ancestors of each node by depth, [B, M, D + 1]; other nodes write to a further column.
    column = torch.where(tree.attention, depths[:, None], ahead)
    tokens = tree.tokens[:, None].expand_as(column)
    ancestors = tokens.new_zeros((*depths.shape, int(ahead) + 1)).scatter_(2, column, tokens)

    depth_above = depths - line + 1
    on_path = ancestors.gather(2, depth_above.clamp_min(0).unsqueeze(2)).squeeze(2)
    before = step.images.position[:, None] + depths - line
    in_image = step.images.out.gather(1, before.clamp_min(0))
    return torch.where(depth_above >= 0, on_path, in_image)
