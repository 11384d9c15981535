"""GLM-Image against transformers: logits, greedy tokens, prompts, and what planted errors move."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.cli.main import main
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.models.families import glm_image
from lantern_bench.models.loaded_model import CodeMap
from lantern_bench.models.networks.transformer import rotary_table
from lantern_bench.models.registry import model_of, models
from lantern_bench.storage.pictures import png_bytes
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers import tiny_hosted as tiny
from tests.helpers.made_up_run import AR, make_record, write_run

CAPTIONS = [
    "a red lantern over the lake",
    "the lake at dusk",
    "a bad red lantern at the lake at dusk",
]
SHAPES = {
    "plain": (tiny.GlmShape(), 1),
    "one key head": (tiny.GlmShape(kv_heads=1), 2),
    "wide heads": (tiny.GlmShape(dim=64, heads=2, grid=(4, 4)), 3),
    "other sections": (tiny.GlmShape(kv_heads=4, sections=(1, 3, 4), grid=(4, 8)), 4),
    "deep": (tiny.GlmShape(layers=5, theta=500.0, codes=33), 5),
    "heads of 32, five sevenths": (tiny.GlmShape(dim=96, heads=3, kv_heads=3, grid=(5, 7)), 6),
}
GREEDY: dict[str, Any] = {"temperature": 0, "cfg_scale": 1.0}


@pytest.fixture(autouse=True)
def small_coarse_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse grid has at most 16 codes, not 256."""
    monkeypatch.setattr(glm_image, "_COARSE_SIDE", 4)


class Written(NamedTuple):
    """Our model of a checkpoint, and what transformers computes for `CAPTIONS`."""

    folder: Path
    model: Any
    condition: Any
    logits: Tensor  # [captions, N, codes]
    tokens: Tensor  # [captions, N], greedy

    def errors(self, model: Any) -> Tensor:
        """The largest error of a logit of `model` by token [N], with prompts in one batch."""
        forced = teacher_forced(model.target, self.condition, self.tokens, guided=False)
        return (forced.logits.cond - self.logits).abs().amax(dim=(0, 2))


def loaded(folder: Path) -> Any:
    return model_of(str(folder / "model.yaml")).load(torch.device("cpu"), torch.float32)


def written(folder: Path, name: str) -> Written:
    shape, seed = SHAPES[name]
    theirs = tiny.write_glm_image(folder, shape, seed)
    model = loaded(folder)
    condition = model.condition(CAPTIONS)
    expected = []
    for values, valid in zip(condition.values, condition.valid, strict=True):
        expected.append(
            tiny.expect_glm_image(theirs, values[0][valid[0]], model.target.config.grids)
        )
    logits, tokens = map(torch.stack, zip(*expected, strict=True))
    return Written(folder, model, condition, logits, tokens)


def greedy(model: Any, condition: Any, **values: Any) -> list[list[int]]:
    images = decode(
        model=model,
        condition=condition,
        decoding=Decoding(**GREEDY, **values),
        generators=[torch.Generator()] * len(condition.values),
    )
    return [image.tokens.tolist() for image in images]


@pytest.mark.parametrize("name", SHAPES)
def test_agreement_with_transformers(name: str, tmp_path: Path) -> None:
    """At the prefill, in both grids and through their switch; with and without a cache."""
    wanted = written(tmp_path, name)
    model = wanted.model
    coarse = model.target.coarse_tokens
    assert 0 < coarse < model.target.image_tokens == wanted.tokens.shape[1]

    # 1. All tokens as one chain behind prompts of three lengths.
    errors = wanted.errors(model)
    print(
        f"{name}: prefill {errors[0]:.1e}, coarse {errors[1:coarse].max():.1e}, "
        f"first fine {errors[coarse]:.1e}, fine {errors[coarse:].max():.1e}"
    )
    assert errors.max() < 1e-4

    # 2. One forward without a cache.
    cond, _ = model.target.logits_without_cache(wanted.condition, wanted.tokens)
    assert (cond - wanted.logits).abs().max() < 1e-4

    # 3. Greedy images, in a batch and alone, one token or one window at a time.
    images = wanted.tokens.tolist()
    assert greedy(model, wanted.condition, mode="ar") == images
    assert greedy(model, wanted.condition, mode="sjd", window=7) == images
    assert greedy(model, wanted.condition, mode="sjd-pac", window=5) == images
    for window in (4, 9, 20):
        copied = {"mode": "sjd", "window": window, "initial": "copy"}
        assert greedy(model, wanted.condition, **copied) == images
    worst = 0.0
    for caption, logits, image in zip(CAPTIONS, wanted.logits, images, strict=True):
        (alone,) = decode(
            model=model,
            condition=model.condition([caption]),
            decoding=Decoding("ar", **GREEDY),
            generators=[torch.Generator()],
            keep_logits=True,
        )
        assert alone.tokens.tolist() == image
        worst = max(worst, float((alone.logits - logits).abs().max()))
    print(f"{name}: along cached steps {worst:.1e}")
    assert worst < 1e-4
    # Weights with which these checks could fail: tokens differ.
    assert len(set(wanted.tokens.flatten().tolist())) > 5


def with_table(**fields: Any) -> Callable[[Any], None]:
    """The rotary table of a config with other fields."""

    def change(target: Any) -> None:
        target.transformer.table.values = rotary_table(replace(target.config, **fields))

    return change


def without_biases(target: Any) -> None:
    for layer in target.transformer.layers:
        layer.attention.wqkv.bias.data.zero_()


def without_output_norms(target: Any) -> None:
    for layer in target.transformer.layers:
        layer.attention_output_norm = nn.Identity()
        layer.ffn_output_norm = nn.Identity()


def one_step_late(target: Any) -> None:
    values = target.transformer.table.values
    first = target.config.prefix
    values[first:] = values[first - 1 : -1].clone()


def prefix_from_the_start(target: Any) -> None:
    target.session_type = type(
        "Session", (target.session_type,), {"_rotary_positions": lambda _, places: places}
    )


ERRORS: dict[str, Callable[[Any], None]] = {
    "no biases": without_biases,
    "no norms behind attention and feed-forward": without_output_norms,
    "sections of other sizes": with_table(axis_pairs=(3, 3, 2)),
    "one grid": with_table(coarse_grid=None, grid=(9, 5)),
    "the fine grid first": with_table(coarse_grid=(6, 5), grid=(4, 3)),
    "a fine grid that starts one later": with_table(coarse_grid=(5, 3)),
    "an image one position late": one_step_late,
    "a prefix that starts at the table's start": prefix_from_the_start,
    "another base": with_table(rope_base=5000.0),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm_image, "_COARSE_SIDE", 4)
        return written(tmp_path_factory.mktemp("glm"), "plain")


@pytest.mark.parametrize("error", ERRORS)
def test_planted_errors_move_logits(error: str, plain: Written) -> None:
    model = loaded(plain.folder)
    assert plain.errors(model).max() < 1e-4
    broken = loaded(plain.folder)
    ERRORS[error](broken.target)
    moved = plain.errors(broken).max()
    print(f"{error}: {moved:.2g}")
    assert moved > 0.1


@pytest.mark.parametrize(
    "pixels", [(1024, 1024), (512, 512), (1152, 768), (768, 1280), (2048, 2048)]
)
def test_published_sizes_rotate_as_in_transformers(
    pixels: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grids, tokens and the rotary table of pictures of published sizes."""
    from transformers import GlmImageConfig
    from transformers.models.glm_image.modeling_glm_image import (
        GlmImageModel,
        GlmImageTextRotaryEmbedding,
    )
    from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

    monkeypatch.undo()  # the published coarse grid
    height, width = pixels
    fine = (height // 32, width // 32)
    coarse = glm_image.coarse_grid(fine)
    assert GlmImageProcessor._get_target_shape(None, height, width) == (*fine, *coarse)

    words = 40
    sizes = models()["glm-image"].sizes
    assert sizes is not None
    config = replace(sizes, prefix=words, grid=fine, coarse_grid=coarse)
    theirs = GlmImageConfig()
    theirs.text_config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": 10000,
        "partial_rotary_factor": 0.5,
        "mrope_section": [8, 12, 12],
    }
    stub: Any = nn.Module()
    stub.config = theirs
    ids = torch.full((1, words), 20000)
    ids[0, -1] = theirs.image_start_token_id
    prefix, _ = GlmImageModel.get_rope_index(
        stub, ids, torch.tensor([[1, *fine], [1, *coarse]]), torch.tensor([2])
    )
    drawn = stub._cached_decode_position_ids.permute(1, 0, 2)
    # Only differences of positions matter, and our image starts at 0.
    positions = torch.cat([prefix, drawn], dim=2) - words
    cosines, sines = GlmImageTextRotaryEmbedding(theirs.text_config)(torch.zeros(1), positions)
    table = rotary_table(config)[: positions.shape[2]]
    assert positions.shape[2] == words + config.image_tokens + 1
    assert (table[:, 0, 0:64:2] - cosines[0, :, :32]).abs().max() < 1e-6
    assert (table[:, 1, 1:64:2] - sines[0, :, :32]).abs().max() < 1e-6
    assert table[:, 0, 64:].eq(1).all()
    assert table[:, 1, 64:].eq(0).all()


def test_prompts_state_both_sizes(plain: Written) -> None:
    names = {
        number: name for name, number in tiny.vocabulary_of(plain.folder / "processor").items()
    }
    condition = plain.model.condition(["a red lantern"])
    prompt, other = condition.values[0]
    text = " ".join(names[int(word)] for word in prompt)
    assert text == "a red lantern <sop> 6 5 <eop> <sop> 4 3 <eop> <|dit_token_16384|>"
    assert other.equal(prompt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mrope_section": [2, 3]}, "mrope_section: [2, 3]: must be three whole numbers above 0"),
        ({"mrope_section": [2, 3, 4]}, "mrope_section: [2, 3, 4]: must have 8 pairs in all"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor: half: must be a number"),
        ({"attention_factor": 2.0}, "attention_factor: is 2.0, which this package's"),
    ],
)
def test_rotary_parameters_are_checked(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny.write_glm_image(tmp_path, tiny.GlmShape())
    path = tmp_path / "vision_language_encoder" / "config.json"
    stated = json.loads(path.read_text())
    stated["text_config"]["rope_parameters"] |= changes
    path.write_text(json.dumps(stated))
    with pytest.raises(UserError) as caught:
        loaded(tmp_path)
    assert message in caught.value.message


def test_other_families_refuse_partial_rotation(tmp_path: Path) -> None:
    """A Janus whose heads rotate in part would load with wrong positions."""
    tiny.write_janus(tmp_path / "weights", tiny.Shape())
    path = tmp_path / "weights" / "config.json"
    stated = json.loads(path.read_text())
    stated["text_config"]["rope_parameters"] = {"partial_rotary_factor": 0.5}
    path.write_text(json.dumps(stated))
    (tmp_path / "model.yaml").write_text("family: janus\ntarget: {checkpoint: weights}\n")
    with pytest.raises(UserError, match=r"partial_rotary_factor: is 0\.5"):
        loaded(tmp_path)


# Further values of the modes without a drafter, all lossless.
LOSSLESS = """
  - {mode: sjd}
  - {mode: sjd, initial: uniform}
  - {mode: sjd, initial: copy}
  - {mode: scd, initial: copy}
  - {mode: scd}
  - {mode: block-scd}
  - {mode: sjd++}
  - {mode: sjd-pac}
"""


def sweep(folder: Path, cells: str, *, images: int) -> dict[str, dict[str, str]]:
    """Decode and score images of the model in `folder`. Returns rows of quality.csv by cell."""
    words = [word for word in tiny.TEXT if len(word) > 1]
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{word} {word}\n" for word in words))
    experiment = folder / "runs.yaml"
    experiment.write_text(
        f"model: {folder / 'model.yaml'}\nprompts: {prompts}\nimages: {images}\nbatch: 16\n"
        "window: 5\ncfg_scale: 1\ntemperature: 0.9\ntop_p: 0.75\nmetrics: distance\n"
        f"cells:\n  - {{mode: ar}}\n{cells}"
    )
    out = folder / "run"
    assert main(["sweep", str(experiment), "--dtype", "float32", "--out", str(out)]) == 0
    with (out / "quality.csv").open() as file:
        return {row["cell_id"]: row for row in csv.DictReader(file)}


def test_drafter_free_modes_are_lossless(tmp_path: Path) -> None:
    """Their distances from the target are 0 up to sampling noise."""
    tiny.write_glm_image(tmp_path, SHAPES["plain"][0])
    rows = sweep(tmp_path, LOSSLESS, images=64)
    print({cell: row["distance_p"] for cell, row in rows.items()})
    assert len(rows) == 1 + LOSSLESS.count("mode")
    assert min(float(row["distance_p"]) for row in rows.values()) > 0.001


@pytest.mark.parametrize(("temperature", "is_lossless"), [(0.9, True), (1.3, False)])
def test_tokens_that_transformers_samples(
    temperature: float, is_lossless: bool, tmp_path: Path
) -> None:
    """They have our distribution, and the test notices tokens of another temperature."""
    theirs = tiny.write_glm_image(tmp_path, SHAPES["plain"][0])
    model = loaded(tmp_path)
    prompt = model.condition(["the lake at dusk"]).values[0, 0]
    torch.manual_seed(1)
    tokens = tiny.generate_glm_image(
        theirs,
        prompt.expand(64, -1),
        model.target.config.grids,
        do_sample=True,
        temperature=temperature,
        top_p=0.75,
        top_k=0,
    ).sequences[:, len(prompt) :]
    file = tmp_path / "tokens.npz"
    np.savez(file, prompts=["the lake at dusk"] * 64, tokens=tokens)
    out = tmp_path / "scored"
    typed = ["score", "--tokens", str(file), "--model", str(tmp_path / "model.yaml")]
    for value in ("temperature=0.9", "top_p=0.75", "cfg_scale=1", "dtype=float32"):
        typed += ["--set", value]
    assert main([*typed, "--out", str(out)]) == 0
    with (out / "quality.csv").open() as file:
        (row,) = csv.DictReader(file)
    print(f"temperature {temperature}: p {row['distance_p']}, impossible {row['impossible']}")
    assert (float(row["distance_p"]) > 0.001) == is_lossless


def test_fine_cells_copy_the_coarse_cells_that_cover_them(plain: Written) -> None:
    """Against upsampling by the nearest cell; coarse cells have no source."""
    target = plain.model.target
    (rows, columns), fine = target.config.grids
    coarse = torch.arange(rows * columns)
    nearest = functional.interpolate(coarse.float().view(1, 1, rows, columns), fine)
    wanted = torch.cat([torch.full_like(coarse, -1), nearest.flatten().long()])
    assert target.sources(torch.arange(target.image_tokens)).equal(wanted)


def test_copies_need_a_coarse_grid() -> None:
    model = model_of("lanterns").load(torch.device("cpu"), torch.float32)
    with pytest.raises(RefusedError, match="initial copy: this model decodes no coarse grid"):
        greedy(model, model.condition(["a red lantern"]), mode="sjd", initial="copy")


def test_the_hosted_example_gives_positions_on_three_axes(plain: Written) -> None:
    """Transformers' decoder in our loop, with its own positions."""
    example = Path(__file__).parents[2] / "examples/hosted_glm_image/hosted_glm_image.py"
    coarse, fine = plain.model.target.config.grids
    code = example.read_text().replace("FINE = (32, 32)", f"FINE = {fine}")
    (plain.folder / "hosted.py").write_text(code.replace("COARSE = (16, 16)", f"COARSE = {coarse}"))
    file = plain.folder / "hosted.yaml"
    file.write_text("python: hosted.py\ncheckpoint: .\n")
    model: Any = model_of(str(file)).load(torch.device("cpu"), torch.float32)
    assert model.condition(CAPTIONS).values.equal(plain.condition.values)

    errors = plain.errors(model)
    cond, _ = model.reference(plain.condition, plain.tokens)
    fresh = float((cond - plain.logits).abs().max())
    print(f"hosted: {errors.max():.1e}, without a cache {fresh:.1e}")
    assert max(float(errors.max()), fresh) < 1e-4
    images = plain.tokens.tolist()
    assert greedy(model, plain.condition, mode="ar") == images
    assert greedy(model, plain.condition, mode="sjd", window=7, initial="copy") == images


def test_exported_codes_are_doubled_as_in_the_diffusion_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code on the page, on an exported image, against interpolation by the nearest code."""
    monkeypatch.setattr(glm_image, "_COARSE_SIDE", 16)
    tiny.write_glm_image(tmp_path, SHAPES["plain"][0]._replace(grid=(32, 32)))
    tokens = torch.randint(16384, (1280,), generator=torch.Generator().manual_seed(0))
    pixels = CodeMap((32, 32), 256).pixels(tokens[None])
    assert pixels.shape == (1, 256, 256, 3)
    record = make_record(cell=AR, prompt=0, walks=[[]], seconds=1.0)
    record |= {"model": str(tmp_path / "model.yaml"), "prompt_source": "prompts.txt:1"}
    run = write_run(tmp_path / "run", [record], [])
    picture = run / record["image"]
    picture.parent.mkdir(parents=True)
    picture.write_bytes(png_bytes(pixels[0], tokens))
    out = tmp_path / "tokens"
    assert main(["export", str(run), str(out), "--layout", "tokens"]) == 0

    page = (Path(__file__).parents[3] / "docs" / "glm-image.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("DIR/CELL", str(out / AR.cell_id)), names)
    fine = tokens[256:].view(1, 1, 32, 32).float()
    doubled = functional.interpolate(fine, scale_factor=2, mode="nearest")
    assert names["prior_token_ids"].equal(doubled.long().view(1, -1))
    written = load_file(out / AR.cell_id / "00000-0000.safetensors")
    assert written["tokens"].equal(tokens[None])
    assert (out / AR.cell_id / "00000-0000.txt").read_text() == "prompt 0\n"


def test_codes_of_another_grid_are_doubled_row_by_row(tmp_path: Path) -> None:
    tiny.write_glm_image(tmp_path, SHAPES["plain"][0])
    model = model_of(str(tmp_path / "model.yaml"))
    coarse, (rows, columns) = model.sizes.grids
    tokens = torch.arange(coarse[0] * coarse[1] + rows * columns).expand(2, -1)
    doubled = model.decoder_input(tokens)["prior_token_ids"].view(2, 2 * rows, 2 * columns)
    assert (
        doubled[0, 0, :4].tolist()
        == [tokens[0, -rows * columns]] * 2 + [tokens[0, -rows * columns + 1]] * 2
    )
    assert doubled[:, ::2].equal(doubled[:, 1::2])
    assert doubled[:, ::2, ::2].flatten(1).equal(tokens[:, -rows * columns :])
    with pytest.raises(UserError, match="tokens, and this run's have 30"):
        model.decoder_input(tokens[:, -30:])
