"""Forced tokens: every way of decoding ends every row of a picture, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import guide
from lantern_bench.models.networks.eagle import published_drafter
from lantern_bench.models.networks.target import (
    TransformerTarget,
    force_line_ends,
    prompt_condition,
)
from lantern_bench.models.networks.transformer_config import TransformerConfig

ROWS = 3
COLUMNS = 4
CODES = 12
LINE = COLUMNS + 1
IDS = (*range(4, 4 + CODES), 30)
CONFIG = TransformerConfig(
    vocab_size=len(IDS),
    dim=32,
    layers=1,
    heads=4,
    ffn_dim=48,
    prefix=8,
    grid=(ROWS, COLUMNS),
    positions="sequence",
    pairs="halves",
    qk_norm=True,
    text_vocab_size=40,
    token_ids=IDS,
    line_ends=True,
)
WAYS: dict[str, dict[str, Any]] = {
    "static": {"mode": "speculative", "drafting": "static", "tree": "eagle1-25"},
    "chain": {"mode": "speculative", "drafting": "static", "tree": "chain-5"},
    "dynamic": {"mode": "speculative", "drafting": "dynamic", "nodes": 14, "depth": 4, "beam": 4},
    "jacobi uniform": {"mode": "sjd", "window": 7},
    "jacobi left": {"mode": "scd", "window": 7, "initial": "left"},
    "jacobi above": {"mode": "scd", "window": 7, "initial": "above", "coupling": "gumbel"},
    "block left": {"mode": "block-scd", "window": 7, "initial": "left"},
    "block row": {"mode": "block-scd", "window": 20, "initial": "row"},
    "pac": {"mode": "sjd-pac", "window": 9},
    "jacobi row": {
        "mode": "lantern++",
        "neighbours": 5,
        "lambda": 4.0,
        "drafting": "jacobi",
        "window": 20,
        "initial": "row",
    },
    "lantern": {
        "mode": "lantern",
        "neighbours": 5,
        "delta": 0.3,
        "nodes": 14,
        "depth": 4,
        "beam": 4,
    },
    "lantern++": {"mode": "lantern++", "neighbours": 5, "lambda": 4.0, "tree": "eagle1-25"},
    "official static": {
        "mode": "lantern++",
        "neighbours": 5,
        "lambda": 4.0,
        "tree": "small-7",
        "residual": "official",
    },
    "official dynamic": {
        "mode": "lantern",
        "neighbours": 5,
        "delta": 0.3,
        "nodes": 9,
        "depth": 3,
        "beam": 3,
        "residual": "official",
    },
}


class Model:
    """A target and a drafter with weights from a seed; the drafter is like the target or like
    nothing.
    """

    def __init__(self, seed: int = 4) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # fresh layers draw from torch's own stream
            self.target = TransformerTarget(CONFIG).eval()
            self.drafter = published_drafter(CONFIG, self.target).eval()
            torch.nn.init.normal_(self.target.transformer.output.weight, std=0.7)

    def table(self, columns: int, metric: str = "l2") -> Tensor:
        away = torch.arange(1, columns + 1)
        codes = (torch.arange(CODES)[:, None] + away) % CODES
        return torch.cat([codes, codes[:1]]).int()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def condition(images: int) -> Any:
    words = [0, 31, 32, 33]
    prompts = [[*words[: 2 + number], 35, 36, 37] for number in range(images)]
    return prompt_condition([(prompt, prompt[-3:]) for prompt in prompts])


def decoding(way: str, **more: Any) -> Decoding:
    shape = {"mode": "ar"} if way == "ar" else WAYS[way]
    return Decoding(**shape | {"temperature": 1.0, "cfg_scale": 2.0} | more)


def check(tokens: Tensor) -> None:
    lines = tokens.reshape(ROWS, LINE)
    assert (lines[:, -1] == CODES).all()
    assert (lines[:, :-1] < CODES).all()


@pytest.mark.parametrize("way", ["ar", *WAYS])
@pytest.mark.parametrize(
    "more", [{}, {"top_k": 3}, {"top_p": 0.6, "cfg_scale": 1.0}, {"temperature": 0.0}], ids=str
)
def test_every_mode_ends_every_row(model: Model, way: str, more: dict[str, Any]) -> None:
    """Images of a batch have prompts of different lengths, and end at different steps."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    for image in decode(
        model=model,
        condition=condition(3),
        decoding=decoding(way, **more),
        generators=generators,
        keep_logits=True,
    ):
        assert len(image.tokens) == ROWS * LINE
        check(image.tokens)
        assert image.logits is not None
        assert bool(image.logits.isfinite().all())
        assert image.trace.tokens == ROWS * LINE


@pytest.mark.parametrize(
    "way", ["static", "chain", "dynamic", "jacobi uniform", "jacobi left", "jacobi above"]
)
def test_greedy_speculation_equals_greedy_decoding(model: Model, way: str) -> None:
    generators = [torch.Generator(), torch.Generator()]
    plain = decode(
        model=model,
        condition=condition(2),
        decoding=decoding("ar", temperature=0.0),
        generators=generators,
    )
    drafted = decode(
        model=model,
        condition=condition(2),
        decoding=decoding(way, temperature=0.0),
        generators=generators,
    )
    assert [image.tokens.tolist() for image in plain] == [
        image.tokens.tolist() for image in drafted
    ]


@pytest.mark.parametrize("way", ["official dynamic", "jacobi row"])
def test_compiled_steps_end_every_row(model: Model, way: str) -> None:
    """Prompts of different lengths through the programs of one shape, traced whole."""
    engine = Engine(compile=True, backend="aot_eager")
    for _repeat in range(2):
        plain, compiled = (
            decode(
                model=model,
                condition=condition(2),
                decoding=decoding(way),
                generators=[torch.Generator().manual_seed(n) for n in (5, 6)],
                engine=run,
            )
            for run in (None, engine)
        )
        assert [image.tokens.tolist() for image in plain] == [
            image.tokens.tolist() for image in compiled
        ]
        for image in compiled:
            check(image.tokens)


@pytest.mark.parametrize(
    "way", ["static", "dynamic", *(way for way in WAYS if way.startswith("jacobi"))]
)
def test_drafted_forced_tokens_are_always_accepted(model: Model, way: str) -> None:
    """A step whose first draft is the end of a row accepts it; Jacobi drafts of all depths are
    always right there.
    """
    for seed in range(4):
        image = decode(
            model=model,
            condition=condition(1),
            decoding=decoding(way),
            generators=[torch.Generator().manual_seed(seed)],
        )[0]
        steps = zip(image.trace.start, image.trace.child_rank, strict=True)
        for start, ranks in steps:
            known = ranks if way.startswith("jacobi") else ranks[:1]
            assert all(rank == 0 for at, rank in enumerate(known, start + 1) if at % LINE == 0)


@torch.inference_mode()
def test_forced_tokens_leave_the_first_row_unchanged(model: Model) -> None:
    """Before the first end, logits equal those without forced tokens."""
    lined = decode(
        model=model,
        condition=condition(1),
        decoding=decoding("ar"),
        generators=[torch.Generator().manual_seed(3)],
        keep_logits=True,
    )[0]
    scores = model.target.session(1, guided=True, nodes=1).prefill(condition(1))
    raw = model.target.transformer.output(scores.features[:, -1:])
    free = guide(raw[:1], raw[1:], 2.0)[0, 0]
    assert lined.logits is not None
    assert torch.equal(lined.logits[0, :CODES], free[:CODES])
    assert lined.logits[0, CODES] < -1e30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 3.0, 12.5])
def test_guidance_keeps_forced_tokens_certain(
    dtype: torch.dtype, scale: float, model: Model
) -> None:
    draws = torch.Generator().manual_seed(1)
    rows = (0.1 * torch.randn(2, 2 * LINE, CODES + 1, generator=draws)).to(dtype)
    forced = force_line_ends(rows, torch.arange(2 * LINE)[None], model.target.config)
    p = guide(forced[:1], forced[1:], scale).div(0.3).softmax(-1)[0]
    ends = torch.arange(2 * LINE) % LINE == COLUMNS
    assert (p[ends] == torch.eye(CODES + 1)[-1]).all()
    assert (p[~ends, -1] == 0).all()
    assert (p[~ends, :-1] > 0).all()
