"""Chameleon against recordings of transformers' implementation: hidden states, logits, padding,
placement of norms.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden), section 8 of its README.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.models.checkpoint_model import ModelSpec
from lantern_bench.models.families.chameleon import Chameleon
from lantern_bench.models.networks.target import Condition, TransformerTarget, prompt_condition
from tests.helpers.golden_models import GOLDEN

FOLDER = GOLDEN / "chameleon"
STATED = json.loads((FOLDER / "config.json").read_text())


def target_of(*, swin: bool, ids: Sequence[int] | None = None) -> TransformerTarget:
    """The recorded model; every word is an image token where `ids` names none."""
    spec = ModelSpec(about="recorded", config=STATED, vq={}, grid=(3, 4))
    model = Chameleon("recorded", spec, {"target": FOLDER / "model.safetensors"})
    model.config = {**STATED, "swin_norm": swin}
    model.token_ids = tuple(range(STATED["vocab_size"]) if ids is None else ids)
    return model.load_target(torch.device("cpu"), torch.float32)[0]


def prompts(ids: Tensor, mask: Tensor) -> Condition:
    """The recorded rows as conditional and, unused, as unconditional prompts."""
    return Condition(ids.long()[:, None].expand(-1, 2, -1), mask.bool()[:, None].expand(-1, 2, -1))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(FOLDER / "chameleon_expected.safetensors")


@pytest.mark.parametrize("swin", [False, True])
@torch.no_grad()
def test_hidden_states_and_logits_equal_the_recorded_ones(
    *, swin: bool, expected: dict[str, Tensor]
) -> None:
    target = target_of(swin=swin)
    key = f"swin{int(swin)}"
    ids = expected["input_ids"]
    session = target.session(len(ids), guided=False, nodes=1)
    features = session.prefill(prompts(ids, torch.ones_like(ids))).features
    assert (features - expected[f"{key}.hidden"]).abs().max() < 2e-4
    assert (
        target.transformer.output(features) - expected[f"{key}.logits_unmasked"]
    ).abs().max() < 2e-4


@pytest.mark.parametrize("swin", [False, True])
@pytest.mark.parametrize("given", [1, 6, 13])
@torch.no_grad()
def test_logits_through_the_cache_equal_the_recorded_ones(
    *, swin: bool, given: int, expected: dict[str, Tensor]
) -> None:
    target = target_of(swin=swin)
    ids = expected["input_ids"].long()
    rest = ids.shape[1] - given
    session = target.session(len(ids), guided=True, nodes=rest)
    start = session.prefill(prompts(ids[:, :given], torch.ones_like(ids[:, :given])))
    causal = torch.ones(rest, rest, dtype=torch.bool).tril().expand(len(ids), -1, -1)
    more = session.score(ids[:, given:], torch.arange(rest).expand(len(ids), -1), causal)
    wanted = expected[f"swin{int(swin)}.logits_unmasked"][:, given - 1 :]
    assert (torch.cat([start.cond, more.cond], dim=1) - wanted).abs().max() < 2e-4
    assert more.uncond is not None
    assert (more.uncond - more.cond).abs().max() < 2e-4


@pytest.mark.parametrize("swin", [False, True])
@torch.no_grad()
def test_positions_start_behind_left_padding(*, swin: bool, expected: dict[str, Tensor]) -> None:
    """Each row of guidance is padded in its own way: one row is the recorded one, the other a whole
    prompt.
    """
    target = target_of(swin=swin)
    ids = expected["input_ids"].long()
    valid = torch.ones(1, 2, ids.shape[1], dtype=torch.bool)
    valid[0, 0, :4] = False
    session = target.session(1, guided=True, nodes=1)
    features = session.prefill(Condition(torch.stack([ids[1], ids[0]])[None], valid)).features
    logits = target.transformer.output(features)
    key = f"swin{int(swin)}"
    assert (
        logits[0, 4:] - expected[f"{key}.logits_unmasked_leftpad_row1_valid"]
    ).abs().max() < 2e-4
    assert (logits[1] - expected[f"{key}.logits_unmasked"][0]).abs().max() < 2e-4


class Alone:
    """A target without a drafter."""

    drafter = None

    def __init__(self, target: TransformerTarget) -> None:
        self.target = target

    def table(self, columns: int, metric: str = "l2") -> Tensor:
        raise AssertionError("nothing is merged")


@torch.no_grad()
def test_greedy_decoding_takes_the_best_recorded_token(expected: dict[str, Tensor]) -> None:
    """The first token from the recording itself, every later one from a run of the whole sequence
    without a cache.
    """
    ids = list(
        Chameleon(
            "recorded", ModelSpec(about="", config=STATED, vq={}, grid=(3, 4)), {"target": FOLDER}
        ).image_words()
    )
    whole = target_of(swin=False)
    row = expected["input_ids"][0].tolist()
    decoding = Decoding(mode="ar", temperature=0, cfg_scale=1)
    model = Alone(target_of(swin=False, ids=ids))
    condition = prompt_condition([(row, [row[0], row[-1]])])
    image = decode(
        model=model,
        condition=condition,
        decoding=decoding,
        generators=[torch.Generator()],
        keep_logits=True,
    )[0]
    assert image.logits is not None
    assert (image.logits[0] - expected["swin0.logits_unmasked"][0, -1, ids]).abs().max() < 2e-4
    for token, logits in zip(image.tokens.tolist(), image.logits, strict=True):
        prompt = torch.tensor([row])
        features = (
            whole.session(1, guided=False, nodes=1)
            .prefill(prompts(prompt, torch.ones_like(prompt)))
            .features
        )
        wanted = whole.transformer.output(features)[0, -1, ids]
        assert (logits - wanted).abs().max() < 2e-4
        assert token == wanted.argmax()
        row.append(ids[token])
