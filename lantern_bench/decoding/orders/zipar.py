"""ZipAR (arXiv 2412.04062): a row of the picture starts before the row above has ended.

Row r + 1 starts once row r has `window` tokens, and all rows that have started grow by one token a
step. So the order of the tokens is fixed, and a step decides nothing: the nodes that it scores and
the tokens that it draws are in tables, one row for each step.

It is not lossless: the target was trained to see the end of the row above, and a token is drawn
before that exists. docs/algorithms.md, section 8.10.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import touch_while_tracing
from lantern_bench.decoding.image_state import FirstTokens
from lantern_bench.decoding.orders.plain import Steps
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import draw_tokens
from lantern_bench.utils.errors import RefusedError, UserError


class Node(NamedTuple):
    """A token that a step scores."""

    # the position in the image at which it is scored
    position: int
    # the position whose token it carries
    source: int
    # the position of the token that is drawn from its logits; beyond the image: none is drawn
    target: int
    # whether it is committed
    kept: bool


def schedule(tokens: int, line: int, window: int) -> list[list[Node]]:
    """Return the nodes of each step, in order of position, those that draw nothing last.

    Step s draws column c of row r where s = window * r + c (step 0 is the prefill), and scores what
    step s - 1 drew. The first token of a row is drawn from a node at the end of the row above. That
    position has no token yet: the node carries the newest token of its row and is not committed.

    Args:
        tokens: Tokens of an image.
        line: Tokens of a row.
        window: Tokens that a row has when the next row starts, at most `line`.
    """

    def step_of(position: int) -> int:
        row, column = divmod(position, line)
        return window * row + column

    count = max(map(step_of, range(tokens)))
    steps: list[list[Node]] = [[] for _ in range(count)]
    for position in range(tokens):
        step = step_of(position)
        if step < count:
            # Where a window is a whole row, the end of a row draws the start of the next one.
            draws_next = position + 1 < tokens and step_of(position + 1) == step + 1
            target = position + 1 if draws_next else tokens
            steps[step].append(Node(position=position, source=position, target=target, kept=True))
        if position and position % line == 0 and window < line:
            newest = position - line + window - 1
            start = Node(position=position - 1, source=newest, target=position, kept=False)
            steps[step - 1].append(start)
    for nodes in steps:
        nodes.sort(key=lambda node: (node.target == tokens, node.position))
    return steps


class ZiparSteps(Steps):
    """Steps that score the newest token of every unfinished row, and draw one for each."""

    def __init__(self, target: Target, decoding: Decoding, batch: int) -> None:
        self.check(target, decoding)
        super().__init__(target, decoding, batch)
        self._schedule = schedule(
            target.image_tokens, line=target.line_length, window=decoding.value("window")
        )
        width = max(map(len, self._schedule))
        self.noises = width

        # 1. The nodes of each step, filled up with nodes that draw nothing and that none sees.
        filler = Node(position=0, source=0, target=target.image_tokens, kept=False)
        rows = [nodes + [filler] * (width - len(nodes)) for nodes in self._schedule]
        numbers = torch.tensor(rows, device=target.device)
        positions, self._sources, self._targets, is_kept = numbers.unbind(dim=2)
        kept = is_kept.bool()

        # 2. What a step reads of them: tables [steps, ...].
        self._counts = kept.sum(dim=1)
        committed = self._counts.cumsum(dim=0) - self._counts
        self._depths = positions - committed[:, None]
        self._forced = target.forced_tokens(positions)
        self._draws = self._targets < target.image_tokens
        drawn = self._draws.sum(dim=1)
        self._tokens_before = 1 + drawn.cumsum(dim=0) - drawn
        # the kept nodes, then the others
        self._paths = is_kept.argsort(dim=1, descending=True, stable=True)
        itself = torch.eye(width, dtype=torch.bool, device=target.device)
        is_later = positions[:, None] > positions[:, :, None]
        self._attention = (kept[:, None] & ~is_later) | itself

        # 3. The row of the running step, and the session.
        self._step = self.out.new_zeros(1)
        self.session = target.ordered_session(
            batch,
            guided=decoding.cfg_scale != 1,
            nodes=width,
            order=positions[kept].tolist(),
        )

    @staticmethod
    def check(target: Target, decoding: Decoding) -> None:
        """Check that the tokens form rows that are as long as the window.

        Raises:
            RefusedError: They form no rows, or rows of two lengths.
            UserError: The window is longer than a row.
        """
        window = decoding.value("window")
        line = target.line_length
        if not line:
            raise RefusedError(
                f"mode {decoding.mode}: the tokens of this model do not form rows of one length, "
                "so no row can start early",
                "Use the mode sjd or scd.",
            )
        if window > line:
            raise UserError(
                f"--window {window}: a row of this model has {line} tokens",
                f"At most {line} in mode {decoding.mode}, which is raster order.",
            )

    def positions(self, tokens_wanted: int) -> list[list[int]]:
        """Return for each step the positions of the tokens that it draws, up to `tokens_wanted`."""
        steps = []
        for nodes in self._schedule:
            drawn = [node.target for node in nodes if node.target < tokens_wanted]
            if drawn:
                steps.append(drawn)
        return steps

    def start_images(self, first: FirstTokens) -> None:
        """Reset to the state after the prefill, and store the first tokens."""
        super().start_images(first)
        self._step.zero_()

    def step(self, noise: Tensor) -> Tensor:
        """Draw one token of every unfinished row, as `Steps.step`."""
        touch_while_tracing(self._inputs)
        batch = len(self.out)

        def now(table: Tensor) -> Tensor:
            """Return the row of the running step for each image, [B, ...]."""
            row = table.index_select(0, self._step)
            return row.expand(batch, *row.shape[1:])

        # 1. Score the nodes and commit those that carry the token of their position.
        forced = now(self._forced)
        tokens = torch.where(forced < 0, self.out.gather(1, now(self._sources)), forced)
        logits, _ = self.session.score_guided(
            tokens,
            depths=now(self._depths),
            attention=now(self._attention),
            cfg_scale=self._decoding.cfg_scale,
        )
        self.session.commit(now(self._paths), now(self._counts))

        # 2. Draw a token from each node, the filler behind the image.
        bits = noise if self._decoding.greedy else noise.view(logits.shape)
        drawn, broken = draw_tokens(logits, self._decoding, bits)
        before = self._tokens_before.index_select(0, self._step)
        self._note_broken(broken & now(self._draws), before)
        self.out.scatter_(1, now(self._targets), drawn)
        self._step.add_(1)
        return logits
