"""ZipAR: its order, what every token sees, its draws, and what it refuses.

The reference for what a token sees is one forward of the whole image without a cache, with a mask
that is written down from the order alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lantern_bench.checks.claims import audited_cells
from lantern_bench.checks.tabular_model import table_model
from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.loop import Decoded, check_decodable, decode
from lantern_bench.decoding.orders.zipar import ZiparSteps, schedule
from lantern_bench.decoding.sampling import guide
from lantern_bench.methods.catalog import output_of
from lantern_bench.models.networks import target as target_module
from lantern_bench.models.networks.target import (
    Condition,
    TransformerTarget,
    WordCaption,
    force_line_ends,
)
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import LogitsError, RefusedError, UserError

ROWS = 4
PREFIX = 4
IMAGES = 3
LINES = {"codes only": False, "forced ends of rows": True}


class RowModel:
    """A small transformer over a picture of 4 rows, which a forced token ends if wanted."""

    drafter = None

    def __init__(self, *, line_ends: bool, positions: Any = "grid", guided: bool = True) -> None:
        config = TransformerConfig(
            vocab_size=12,
            dim=32,
            layers=3,
            heads=2,
            ffn_dim=48,
            prefix=PREFIX,
            grid=(ROWS, 6 - line_ends),
            prefix_rotary="identity",
            positions=positions,
            line_ends=line_ends,
        )
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.target = TransformerTarget(config, WordCaption(9, PREFIX, config.dim)).eval()
            for parameter in self.target.parameters():
                if parameter.dim() >= 2:
                    torch.nn.init.normal_(parameter, std=0.3)
        self.target.requires_grad_(requires_grad=False)
        self.line = config.line_length
        self.scale = 1.5 if guided else 1.0

    def decode(self, window: int, images: int = IMAGES, **settings: Any) -> list[Decoded]:
        values = torch.tensor([[0, 3, 4, 5], [1, 2, 3, 4], [0, 0, 8, 1]])[:images]
        engine = settings.pop("engine", None)
        tokens = settings.pop("tokens", None)
        mode = settings.pop("mode", "zipar")
        if mode == "zipar":
            settings["window"] = window
        return decode(
            model=self,
            condition=Condition(values, values > 0),
            decoding=Decoding(mode, cfg_scale=self.scale, **settings),
            generators=[torch.Generator().manual_seed(image) for image in range(images)],
            keep_logits=True,
            tokens=tokens,
            engine=engine,
        )

    def reference(self, tokens: Tensor, window: int) -> Tensor:
        """Return the guided logits [B, N, V] of every token, from one forward without a cache.

        The rows of the forward are the prefix, all tokens, and the nodes that start rows.
        """
        target = self.target
        values = torch.tensor([[0, 3, 4, 5], [1, 2, 3, 4], [0, 0, 8, 1]])[: len(tokens)]
        condition = Condition(values, values > 0)
        count = tokens.shape[1]
        places = list(range(count))
        drawn_in = [window * (place // self.line) + place % self.line for place in places]
        carried = tokens
        # 1. The nodes that start the rows: where they are, what they carry, when they are scored.
        if window < self.line:
            for row in range(1, ROWS):
                start = row * self.line
                carries = tokens[:, start - self.line + window - 1]
                if target.config.line_ends:
                    carries = torch.full_like(carries, target.vocab_size - 1)
                carried = torch.cat([carried, carries[:, None]], dim=1)
                places.append(start - 1)
                drawn_in.append(window * row - 1)

        # 2. A token is seen if its position is earlier and it was drawn no later.
        total = PREFIX + len(places)
        sees = torch.zeros(total, total, dtype=torch.bool)
        sees[:, :PREFIX] = True
        sees[:PREFIX, :PREFIX] = torch.ones(PREFIX, PREFIX, dtype=torch.bool).tril()
        for query in range(len(places)):
            for key in range(count):
                is_earlier = places[key] <= places[query] and drawn_in[key] <= drawn_in[query]
                sees[PREFIX + query, PREFIX + key] = is_earlier
            sees[PREFIX + query, PREFIX + query] = True
        valid = torch.cat([condition.valid, torch.ones(len(tokens), len(places)).bool()], dim=1)
        padded = valid[:, None] == valid[:, :, None]
        is_prefix = torch.arange(total) < PREFIX
        allowed = sees & torch.where(is_prefix[:, None], padded, valid[:, None])
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[:, None]
        mask = mask.repeat(2, 1, 1, 1)

        # 3. The logits that each token was drawn from.
        x = torch.cat(
            [
                target.prefix(condition, guided=True),
                target.transformer.tok_embeddings(carried).repeat(2, 1, 1),
            ],
            dim=1,
        )
        rotary = torch.cat([torch.arange(PREFIX), PREFIX + torch.tensor(places)])[None]
        if target.config.positions == "sequence":
            uncounted = (~condition.valid).sum(dim=1, keepdim=True).repeat(2, 1)
            rotary = (rotary - uncounted).clamp_min(0)
        logits = target.transformer.output(target.transformer(x, mask, rotary))
        cond, uncond = logits[:, PREFIX - 1 :].chunk(2)
        logits = guide(cond, uncond, self.scale)
        from_node = [0]
        for place in range(1, count):
            is_start = place % self.line == 0 and window < self.line
            from_node.append(count + place // self.line if is_start else place)
        positions = torch.arange(count).expand(len(tokens), -1)
        return force_line_ends(logits[:, from_node], positions, target.config)


@pytest.fixture(params=LINES)
def model(request: pytest.FixtureRequest) -> RowModel:
    return RowModel(line_ends=LINES[request.param])


def off_by(model: RowModel, window: int) -> float:
    """The largest difference from the reference; impossible tokens have equal logits."""
    images = model.decode(window)
    tokens = torch.stack([image.tokens for image in images]).long()
    logits = torch.stack([image.logits for image in images])
    return float((logits - model.reference(tokens, window)).abs().max())


@pytest.mark.parametrize(
    ("window", "forwards"), [(1, 31), (2, 46), (3, 61), (4, 76), (8, 136), (16, 256)]
)
def test_the_order_of_a_picture_of_16_rows(window: int, forwards: int) -> None:
    steps = schedule(256, line=16, window=window)
    assert 1 + len(steps) == forwards
    nodes_of_all = list(itertools.chain.from_iterable(steps))
    drawn = [node.target for node in nodes_of_all if node.target < 256]
    assert sorted(drawn) == list(range(1, 256))
    committed = [node.position for node in nodes_of_all if node.kept]
    # Nobody needs the keys of the last token.
    assert sorted(committed) == list(range(255))
    so_far = {0}
    for nodes in steps:
        assert {node.source for node in nodes} <= so_far
        for node in nodes:
            row, column = divmod(node.target, 16)
            if column == 0 and 0 < row < 16:
                # The row above has `window` tokens, and no more.
                above = [position for position in so_far if position // 16 == row - 1]
                assert len(above) == window
        so_far |= {node.target for node in nodes}


@pytest.mark.parametrize("window", [1, 2, 3, 5, 6])
def test_every_token_sees_what_the_order_says(model: RowModel, window: int) -> None:
    assert off_by(model, window) < 1e-4


@pytest.mark.parametrize("positions", ["sequence"])
def test_positions_behind_padding(positions: str) -> None:
    assert off_by(RowModel(line_ends=False, positions=positions), 2) < 1e-4


def everything_committed(session: Any, positions: Tensor) -> None:
    """The mistake: a node sees tokens of the rows below it."""


def one_column_too_few(session: Any, positions: Tensor) -> Tensor:
    """The mistake: a node does not see the token before its own position."""
    hidden: Tensor = session._column_positions >= positions[:, :, None] - 1
    return hidden & (session._column_positions >= session._prefix)


@pytest.mark.parametrize("mistake", [everything_committed, one_column_too_few])
def test_a_wrong_view_is_found(model: RowModel, mistake: Callable[..., Any]) -> None:
    with patch.object(target_module._OrderedSession, "_hidden", mistake):
        assert off_by(model, 2) > 0.01


def test_a_wrong_view_within_a_step_is_found(model: RowModel) -> None:
    make = ZiparSteps.__init__

    def init(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self._attention = torch.ones_like(self._attention)

    with patch.object(ZiparSteps, "__init__", init):
        assert off_by(model, 2) > 0.01


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 5}, {"temperature": 0.0}])
def test_a_window_of_a_whole_row_is_autoregressive(
    model: RowModel, settings: dict[str, Any]
) -> None:
    wanted = model.decode(model.line, mode="ar", **settings)
    images = model.decode(model.line, **settings)
    for a, b in zip(wanted, images, strict=True):
        assert a.tokens.equal(b.tokens)
        assert a.trace.committed == b.trace.committed
        assert a.trace.target_forwards == b.trace.target_forwards


@pytest.mark.parametrize("guided", [False, True])
def test_tokens_are_drawn_with_the_noise_of_the_image(*, guided: bool) -> None:
    """An image does not depend on its batch, and other seeds give other images."""
    model = RowModel(line_ends=False, guided=guided)
    together = model.decode(2)
    (alone,) = model.decode(2, images=1)
    assert alone.tokens.equal(together[0].tokens)
    assert not together[0].tokens.equal(together[1].tokens)


def test_tokens_follow_the_logits() -> None:
    """The surprise of many tokens is the entropy of the rows that they were drawn from."""
    model = RowModel(line_ends=False)
    values = torch.tensor([[0, 3, 4, 5]]).expand(2000, -1)
    images = decode(
        model=model,
        condition=Condition(values, values > 0),
        decoding=Decoding("zipar", window=2, cfg_scale=1.5),
        generators=[torch.Generator().manual_seed(seed) for seed in range(2000)],
        keep_logits=True,
    )
    p = torch.stack([image.logits for image in images]).double().softmax(dim=-1)
    tokens = torch.stack([image.tokens for image in images]).long()
    log_p = p.log()
    entropy = -(p * log_p).sum(dim=-1)
    variance = (p * (-log_p - entropy[..., None]).square()).sum(dim=-1)
    surprise = -log_p.gather(2, tokens[..., None]).squeeze(2)
    # Position by position, because tokens of one step share a draw.
    z = (surprise - entropy).sum(dim=0) / variance.sum(dim=0).sqrt()
    assert z.abs().max() < 4.5
    wrong = (surprise - entropy * 1.05).sum(dim=0) / variance.sum(dim=0).sqrt()
    assert wrong.abs().max() > 4.5, "the test has no power"
    # Tokens that one step draws do not share random numbers.
    step = schedule(24, line=6, window=2)[5]
    pair = [node.target for node in step][:2]
    rank = (p.cumsum(dim=-1).gather(2, tokens[..., None]).squeeze(2))[:, pair]
    correlation = torch.corrcoef(rank.T)[0, 1]
    assert correlation.abs() < 0.1


def test_the_trace_counts_tokens_and_forwards() -> None:
    (image,) = RowModel(line_ends=False).decode(2, images=1)
    trace = image.trace
    assert trace.committed == [1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1]
    assert trace.start == [1, 2, 4, 6, 9, 12, 15, 18, 20, 22, 23]
    assert trace.target_forwards == 12
    assert trace.tokens == 24
    assert trace.mean_accepted_length == pytest.approx(23 / 11)
    assert trace.emitted_tv is None
    assert sum(trace.accepted) == sum(trace.offered_depth) == 0


@pytest.mark.parametrize("tokens", [1, 2, 7, 23])
def test_a_part_of_an_image(model: RowModel, tokens: int) -> None:
    whole = model.decode(2)
    for part, image in zip(model.decode(2, tokens=tokens), whole, strict=True):
        assert part.tokens.equal(image.tokens[:tokens])
        assert part.trace.tokens == tokens
        assert (part.logits - image.logits[:tokens]).abs().max() < 1e-4


def test_compiled_steps_give_the_same_tokens(model: RowModel) -> None:
    engine = Engine(compile=True, backend="aot_eager")
    wanted = model.decode(2)
    for _again in range(2):
        for a, b in zip(model.decode(2, engine=engine), wanted, strict=True):
            assert a.tokens.equal(b.tokens)


@pytest.mark.long
def test_inductor_gives_the_same_tokens(model: RowModel) -> None:
    compiled = model.decode(2, engine=Engine(compile=True))
    for a, b in zip(compiled, model.decode(2), strict=True):
        assert a.tokens.equal(b.tokens)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_are_found(value: float) -> None:
    model = RowModel(line_ends=False)
    engine = Engine()
    wanted = model.decode(2, engine=engine)
    weight = model.target.transformer.norm.weight
    kept = weight.clone()
    weight[3] = value
    with pytest.raises(LogitsError, match="the target gave NaN or infinite logits after 0 of 24"):
        model.decode(2, engine=engine)
    weight.copy_(kept)
    for a, b in zip(model.decode(2, engine=engine), wanted, strict=True):
        assert a.tokens.equal(b.tokens)


def test_what_cannot_work_is_refused() -> None:
    decoding = Decoding("zipar", window=2)
    tables = table_model()
    with pytest.raises(RefusedError, match="raster order only"):
        decode(tables, None, decoding, [torch.Generator()])
    model = RowModel(line_ends=False)
    with pytest.raises(UserError, match="--window 7: a row of this model has 6 tokens"):
        check_decodable(model, Decoding("zipar", window=7))
    model.target.line_length = 0
    with pytest.raises(RefusedError, match="mode zipar: the tokens of this model do not form rows"):
        check_decodable(model, decoding)


def test_its_row_says_that_it_is_relaxed() -> None:
    decoding = Decoding("zipar", window=3)
    assert output_of(decoding.drafting, decoding.rule) == "relaxed"
    assert decoding.emitted_tv_problem == "the drafting zipar verifies nothing"
    assert decoding.cell_id == "zipar-w3-t1"
    assert Decoding(**decoding.settings()) == decoding
    with pytest.raises(UserError, match="--modes zipar: it verifies nothing"):
        audited_cells(["zipar"])
    assert all(cell["mode"] != "zipar" for cell in audited_cells(["all"]))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"mode": "zipar", "rule": "strict"}, "mode zipar drafts nothing and has no rule"),
        ({"mode": "zipar", "drafting": "jacobi"}, "mode zipar drafts nothing and has no drafting"),
        ({"mode": "zipar", "initial": "left"}, "initial does not belong here"),
        ({"mode": "sjd", "drafting": "zipar"}, "without drafting write mode: zipar"),
        ({"mode": "ar", "drafting": "zipar"}, "mode ar drafts nothing and has no drafting"),
    ],
)
def test_other_draftings_and_rules_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        Decoding(**values)
