"""The task of training a drafter: features, losses and 1 - TV agree with decoding; its files of
tokens and its log.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.teacher_forcing import drafter_logits_along, teacher_forced
from lantern_bench.models import registry
from lantern_bench.models.checkpoints.drafter_files import load_drafter
from lantern_bench.models.networks.eagle import untrained_drafter
from lantern_bench.models.networks.target import (
    CachedTarget,
    Condition,
    TransformerTarget,
    force_line_ends,
)
from lantern_bench.training import token_data
from lantern_bench.training.drafter_job import Data, DrafterJob
from lantern_bench.training.drafter_task import (
    DrafterTask,
    Sequences,
    drafter_like,
    in_order,
    target_features,
    unroll,
)
from lantern_bench.training.recipe import RECIPES, DrafterFlags, DrafterRecipe
from lantern_bench.training.token_data import make_tokens
from lantern_bench.training.train_drafter import read_log, write_drafter
from lantern_bench.training.trainer import SINGLE, Processes
from lantern_bench.utils.errors import RefusedError
from lantern_bench.utils.progress import ignore_events
from tests.examples.tiny_hosted import SHAPE, write_model
from tests.helpers import golden_models, tiny_chameleon
from tests.helpers.tiny_target import CAPTIONS, CONFIG, caption_condition, tiny_model, tiny_target

CPU = torch.device("cpu")
RECIPE = RECIPES["lanterns"].model_copy(update={"batch": 4, "autocast": False})
DECODING = Decoding(mode="ar", cfg_scale=2.0)
CHAMELEON = ("a red lantern", "red", "a red lantern over a lantern")


def tiny_sequences(count: int = 8) -> Sequences:
    tokens = torch.randint(
        CONFIG.vocab_size, (count, 16), generator=torch.Generator().manual_seed(1)
    )
    return Sequences(
        tiny_target(), tokens, lambda rows: caption_condition([CAPTIONS[row % 4] for row in rows])
    )


def task_of(
    sequences: Sequences, processes: Processes = SINGLE, recipe: DrafterRecipe = RECIPE
) -> DrafterTask:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafter = untrained_drafter(sequences.target)
        return DrafterTask(
            drafter=drafter,
            training=sequences,
            held_out=sequences,
            recipe=recipe,
            decoding=DECODING,
            processes=processes,
        )


@pytest.fixture(
    scope="module", params=["bundled", "llamagen", "hosted", "anole-7b", "lumina-mgpt-7b-768"]
)
def sequences(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Sequences:
    """Of four families and a model of transformers with wide heads; the last has ends of lines and
    obeys its grid.
    """
    if request.param == "bundled":
        return tiny_sequences()
    folder = tmp_path_factory.mktemp("model")
    if request.param == "llamagen":
        return _with_random_features(
            golden_models.load(golden_models.recorded_target(folder, "t2i")).target
        )
    if request.param == "hosted":
        return _loaded(write_model(folder, SHAPE._replace(side=4, head_dim=12)))
    return _loaded(tiny_chameleon.write_model_file(folder, request.param, (4, 4)))


def _with_random_features(target: object) -> Sequences:
    """The recorded text-conditional target, with made-up features of which some positions are
    padding.
    """
    assert isinstance(target, TransformerTarget)
    positions, width = target.cls_embedding.uncond_embedding.shape  # type: ignore[union-attr]
    draws = torch.Generator().manual_seed(4)
    values = torch.randn(3, positions, width, generator=draws)
    valid = (
        torch.arange(positions)[None] >= torch.tensor([0, positions - 9, positions - 1])[:, None]
    )
    tokens = torch.randint(target.vocab_size, (3, target.image_tokens), generator=draws)
    return Sequences(target, tokens, lambda rows: Condition(values[list(rows)], valid[list(rows)]))


def _loaded(path: Path) -> Sequences:
    loaded = registry.model_of(str(path)).load(CPU, torch.float32)
    target = loaded.target
    assert isinstance(target, CachedTarget)
    draws = torch.Generator().manual_seed(2)
    lines = torch.randint(target.n_codes, (3, 4, target.config.line_length), generator=draws)
    if target.config.line_ends:
        lines[:, :, -1] = target.vocab_size - 1
    return Sequences(
        target, lines.flatten(1), lambda rows: loaded.condition([CHAMELEON[row] for row in rows])
    )


@torch.no_grad()
def test_features_and_drafts_match_the_decode_sessions(sequences: Sequences) -> None:
    target = sequences.target
    rows = range(3)
    condition = sequences.condition(rows)
    tokens = sequences.tokens[:3].long()
    forced = teacher_forced(target, condition, tokens, guided=True)
    given, null = (
        target_features(
            target=target, condition=condition, tokens=tokens, dropped=torch.full((3,), gone)
        )
        for gone in (False, True)
    )
    count = tokens.shape[1]
    features = torch.cat([given.hidden, null.hidden])[:, -(count - 1) :]
    assert (features - forced.logits.features[:, :-1]).abs().max() < 1e-4

    task = task_of(replace(sequences, tokens=sequences.tokens[:3]))
    p = guide(forced.logits.cond, forced.logits.uncond, 2.0).softmax(-1)
    drafts = drafter_logits_along(task.drafter, forced)
    q = guide(drafts.cond, drafts.uncond, 2.0).softmax(-1)
    overlap = torch.minimum(p[:, 1:], q).sum(-1).mean()
    assert task.overlap(task.drafter) == pytest.approx(float(overlap), abs=1e-5)


@torch.no_grad()
def test_unrolled_levels_match_a_draft_tree(sequences: Sequences) -> None:
    """From any position on, each level is what the decode session drafts there from the same
    tokens.
    """
    target = sequences.target
    drafter = task_of(sequences).drafter
    condition = sequences.condition(range(3))
    tokens = sequences.tokens[:3].long()
    forced = teacher_forced(target, condition, tokens, guided=True)
    features = sequences.features_twice(range(3))
    levels = unroll(drafter=drafter, target=features, features=features.hidden, levels=3)
    for root in (1, 4):
        session = drafter.session(3, guided=True, nodes=4)
        session.prefill(condition, forced.prefix.features)
        true_features = torch.cat([forced.prefix.features[:, -1:], forced.logits.features], dim=1)
        drafts = session.observe(tokens[:, :root], true_features[:, :root], torch.full((3,), root))
        for level, predicted in enumerate(levels):
            place = features.valid.shape[1] - 2 + root + level
            assert drafts.uncond is not None
            wanted = torch.cat([drafts.cond, drafts.uncond])
            number = torch.full((3, 1), root + level)
            got = force_line_ends(
                drafter.head(predicted[:, place : place + 1]), number, drafter.config
            )
            assert (got - wanted).abs().max() < 1e-4
            seen = torch.ones(3, 1, level + 1, dtype=torch.bool)
            drafts = session.extend(
                tokens[:, root + level][:, None], torch.zeros(3, 1, dtype=torch.int64), seen
            )
    assert (levels[1] - levels[0]).abs().max() > 1e-3  # a guess differs from the true feature


def test_guided_batches_compare_guided_distributions() -> None:
    sequences = tiny_sequences(4)
    recipe = RECIPE.model_copy(update={"guided": True, "levels": 1, "dropped": 0.0})
    task = task_of(sequences, recipe=recipe)
    _, parts = task.loss(torch.Generator().manual_seed(0))
    assert float(parts["train_one_minus_tv"]) == pytest.approx(task.overlap(task.drafter), abs=1e-6)
    alone = task_of(sequences, recipe=recipe.model_copy(update={"dropped": 1.0}))
    plain = task_of(sequences, recipe=recipe.model_copy(update={"guided": False}))
    losses = [variant.loss(torch.Generator().manual_seed(0)) for variant in (alone, plain)]
    assert float(losses[0][1]["soft_loss"]) == pytest.approx(
        float(losses[1][1]["soft_loss"]), abs=1e-6
    )
    assert float(losses[0][1]["train_one_minus_tv"]) != pytest.approx(
        float(parts["train_one_minus_tv"]), abs=1e-4
    )


def test_loss_weighs_the_total_variation_of_each_level() -> None:
    """Total variation of each level, added up by hand: level k is valid from the image's token k +
    1 on.
    """
    sequences = tiny_sequences(4)
    nothing_else = dict.fromkeys(("feature_weight", "soft_weight", "noise", "dropped"), 0.0)
    plain = RECIPE.model_copy(update={**nothing_else, "levels": 3, "level_decay": 0.5})
    task = task_of(sequences, recipe=plain)
    with torch.no_grad():
        features = sequences.features_twice(range(4))
        first = features.hidden.shape[1] - sequences.target.image_tokens

        def distribution(features: Tensor) -> Tensor:
            return guide(*task.drafter.head(features).chunk(2), DECODING.cfg_scale).softmax(-1)

        lost = []
        for level, predicted in enumerate(
            unroll(drafter=task.drafter, target=features, features=features.hidden, levels=3)
        ):
            p = distribution(features.hidden[:, first + 1 + level :])
            q = distribution(predicted[:, first + level : -1])
            lost.append(float((p - q).abs().sum(-1).mean()) / 2)
        loss = float(task.loss(torch.Generator().manual_seed(0))[0])
    assert lost[2] > lost[0]
    assert loss == pytest.approx((lost[0] + 0.5 * lost[1] + 0.25 * lost[2]) / 1.75, abs=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        RECIPE.model_copy(update={"guided": False, "levels": 1, "noise": 0.1, "soft_weight": 1.0}),
    ],
    ids=["levels", "noise"],
)
def test_every_family_trains_and_loads_its_written_drafter(
    sequences: Sequences, recipe: DrafterRecipe, tmp_path: Path
) -> None:
    target = sequences.target
    target.requires_grad_(requires_grad=False)
    task = task_of(sequences, recipe=recipe)
    before = task.overlap(task.drafter)
    optimiser = torch.optim.AdamW(
        [p for p in task.drafter.parameters() if p.requires_grad], lr=3e-3
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        loss, parts = task.loss(generator)
        assert torch.isfinite(loss)
        assert set(parts) == {"feature_loss", "soft_loss", "train_one_minus_tv"}
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert task.overlap(task.drafter) > before
    assert all(p.grad is None for p in target.parameters())
    write_drafter(
        drafter=task.drafter, folder=tmp_path / "out", target="tiny", weights={"target": "x"}
    )
    read = load_drafter(tmp_path / "out", target)
    assert read.mask_padding
    assert task.overlap(read) == pytest.approx(task.overlap(task.drafter), abs=1e-6)
    assert {name: tuple(t.shape) for name, t in read.state_dict().items()} == {
        name: tuple(t.shape) for name, t in task.drafter.state_dict().items()
    }


def test_two_processes_compute_the_gradient_of_one() -> None:
    sequences = tiny_sequences()
    grads = []
    for count in (1, 2):
        total: list[Tensor] = []
        for rank in range(count):
            task = task_of(sequences, Processes(rank, count))
            task.loss(torch.Generator().manual_seed(7))[0].backward()
            total.append(
                torch.cat(
                    [p.grad.flatten() for p in task.drafter.parameters() if p.grad is not None]
                )
            )
        grads.append(torch.stack(total).mean(0))
    assert (grads[0] - grads[1]).abs().max() < 1e-6
    assert grads[0].abs().max() > 1e-3


def test_order_visits_every_row_once_per_epoch() -> None:
    drawn = in_order(7, 1, drawn=0, wanted=5) + in_order(7, 1, drawn=5, wanted=9)
    assert sorted(drawn[:7]) == sorted(drawn[7:]) == list(range(7))
    assert drawn[:7] != drawn[7:]
    assert in_order(7, 1, drawn=0, wanted=14) == drawn


def test_drafter_copy_shares_only_the_head() -> None:
    target = tiny_target()
    drafter = untrained_drafter(target)
    copy = drafter_like(drafter, torch.bfloat16)
    assert copy.fc.weight.dtype == torch.bfloat16
    assert copy.table.values.dtype == torch.float32
    assert copy.head is drafter.head
    assert not copy.embed_tokens.weight.requires_grad
    with torch.no_grad():
        copy.fc.weight.zero_()
    assert drafter.fc.weight.abs().max() > 0


def test_token_files_continue_where_they_were_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []
    model = tiny_model()
    data = Data(["red"] * 11)

    def decoded(*_: Any, slots: list[tuple[str, int]], **__: Any) -> list[Any]:
        repeats = [repeat for _, repeat in slots]
        if repeats[0] == 8 and len(calls) == 2:
            calls.clear()
            raise KeyboardInterrupt
        calls.append(repeats)
        return [
            SimpleNamespace(tokens=torch.full((16,), repeat, dtype=torch.int32))
            for repeat in repeats
        ]

    def make(seed: int = 0) -> Tensor:
        job = DrafterJob(
            flags=DrafterFlags(target="tiny", data="all", seed=seed),
            data=data,
            recipe=RECIPE,
            decoding=DECODING,
            prompts=[],
            out=tmp_path,
            work=tmp_path,
        )
        return make_tokens(job, model, ignore_events)

    monkeypatch.setattr(token_data, "_BATCH", 4)
    monkeypatch.setattr(token_data, "decode_slots", decoded)

    with pytest.raises(KeyboardInterrupt):
        make()
    rows = make()
    assert rows[:, 0].tolist() == list(range(11))
    assert calls == [[8, 9, 10]]
    assert torch.equal(make(), rows)
    assert len(calls) == 1
    (folder,) = tmp_path.iterdir()
    make(seed=1)
    assert len(list(tmp_path.iterdir())) == 2
    (folder / "00000.safetensors").write_bytes(b"short")
    with pytest.raises(RefusedError, match="damaged"):
        make()


def test_another_file_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    assert read_log(path) == []
    path.write_text("something else\n")
    with pytest.raises(RefusedError, match="is not the log of a training"):
        read_log(path)
