"""The examples of language models whose last words are codes: SimpleAR and Liquid, on small
checkpoints that transformers wrote.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lantern_bench
from lantern_bench.cli import main as cli
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.models.loaded_model import CodeMap, LoadedModel
from lantern_bench.models.registry import model_of
from tests.helpers import tiny_chameleon
from tests.helpers import tiny_hosted as tiny

CAPTIONS = ["a red lantern over the lake", "the lake at dusk"]
GRID = (4, 5)


class Example(NamedTuple):
    """An example, the writer of its small checkpoint, and the sizes in its code that change."""

    write: Callable[..., Any]
    codes: int
    sizes: dict[str, str]


EXAMPLES = {
    "simplear": Example(
        write=tiny.write_simplear,
        codes=48,
        sizes={"LEVELS = (8, 8, 8, 5, 5, 5)": "LEVELS = (4, 3, 2, 2)", "(64, 64)": str(GRID)},
    ),
    "liquid": Example(
        write=tiny.write_liquid,
        codes=tiny_chameleon.CODES,
        sizes={"(32, 32)": str(GRID)},
    ),
}
SHAPES = {
    "plain": tiny.WordsShape(),
    "all heads": tiny.WordsShape(kv_heads=4),
    "deep": tiny.WordsShape(dim=48, heads=6, kv_heads=1, layers=4),
}


class Written(NamedTuple):
    """An example on disk."""

    theirs: Any  # transformers' model
    file: Path  # the model file

    def load(self) -> LoadedModel:
        return model_of(str(self.file)).load(torch.device("cpu"), torch.float32)


def written(folder: Path, name: str, shape: str = "plain") -> Written:
    """The example beside a small checkpoint, with its sizes in the place of the published ones."""
    example = EXAMPLES[name]
    theirs = example.write(folder / "weights", SHAPES[shape]._replace(codes=example.codes))
    if name == "liquid":
        vq = tiny_chameleon.write_vqgan(folder / "vq")
        vq.rename(folder / "weights" / vq.name)
    code = (Path(__file__).parent / f"hosted_{name}" / f"hosted_{name}.py").read_text()
    for published, small in example.sizes.items():
        assert published in code
        code = code.replace(published, small)
    (folder / "hosted.py").write_text(code)
    file = folder / "model.yaml"
    file.write_text("python: hosted.py\ncheckpoint: weights\n")
    return Written(theirs, file)


def first_code(theirs: Any, name: str) -> int:
    """The word of code 0: codes are the last words."""
    return int(theirs.config.vocab_size) - EXAMPLES[name].codes


def prompts_of(model: LoadedModel, caption: str) -> tuple[Tensor, Tensor]:
    """The words with the caption and of the unconditional prompt, each int64 [n]."""
    condition = model.condition([caption])
    rows = zip(condition.values[0], condition.valid[0], strict=True)
    with_caption, without = (values[valid] for values, valid in rows)
    return with_caption, without


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EXAMPLES)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_those_of_transformers(
    name: str, shape: str, tmp_path: Path
) -> None:
    """Both rows of the logits, and greedy pictures by three modes with guidance."""
    example = written(tmp_path, name, shape)
    model = example.load()
    first = first_code(example.theirs, name)
    codes = list(range(first, first + EXAMPLES[name].codes))
    made = []
    errors = []
    for caption in CAPTIONS:
        prompt, null = prompts_of(model, caption)
        words = tiny.generate_words(
            example.theirs,
            prompt[None],
            null,
            allowed=lambda _count: codes,
            length=model.target.image_tokens,
            guidance_scale=4.0,
            do_sample=False,
        )
        tokens = words - first
        made.append(tokens[0].tolist())
        ours = teacher_forced(model.target, model.condition([caption]), tokens, guided=True).logits
        for start, logits in ((prompt, ours.cond), (null, ours.uncond)):
            assert logits is not None
            whole = torch.cat([start[None], words[:, :-1]], dim=1)
            theirs = example.theirs(whole).logits[0, len(start) - 1 :, first:]
            errors.append(float((logits[0] - theirs).abs().max()))
    print(f"{name}, {shape}: {max(errors):.1e}")
    assert max(errors) < 1e-4
    for mode in ("ar", "sjd", "sjd-pac"):
        for caption, tokens in zip(CAPTIONS, made, strict=True):
            (image,) = lantern_bench.decode(
                model, caption, mode=mode, temperature=0, cfg_scale=4, top_k=0, top_p=1
            )
            assert image.tokens.tolist() == tokens
    assert min(len(set(tokens)) for tokens in made) > 4


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_sweep_is_lossless(name: str, tmp_path: Path) -> None:
    """`ar` and `scd` at the defaults of the example: distances are 0 up to sampling noise."""
    example = written(tmp_path, name)
    captions = [" ".join(words) for words in product(tiny.TEXT[:5], tiny.TEXT[5:])]
    (tmp_path / "captions.txt").write_text("\n".join(captions) + "\n")
    (tmp_path / "two.yaml").write_text(
        f"model: {example.file}\nprompts: {tmp_path / 'captions.txt'}\nimages: 24\nbatch: 8\n"
        "window: 4\nmetrics: distance\ncells: [{mode: ar}, {mode: scd}]\n"
    )
    out = tmp_path / "run"
    typed = ["sweep", str(tmp_path / "two.yaml"), "--dtype", "float32", "--out", str(out)]
    assert cli.main(typed) == 0
    with (out / "quality.csv").open() as file:
        rows = list(csv.DictReader(file))
    print({row["mode"]: row["distance_p"] for row in rows})
    assert [row["mode"] for row in rows] == ["ar", "scd"]
    assert min(float(row["distance_p"]) for row in rows) > 0.001
    assert {row["impossible"] for row in rows} == {"0"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_passes_every_check(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["check-model", str(written(tmp_path, name).file), "--format", "csv"]
    for caption in CAPTIONS:
        typed += ["--prompt", caption]
    assert cli.main(typed) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    results = dict(line.split(",")[:2] for line in lines)
    # Without pixels nothing says which codes look alike.
    assert results.pop("codebook") == {"simplear": "none", "liquid": "pass"}[name]
    names = ("logits", "cache", "tree", "forced tokens", "guidance")
    assert results == dict.fromkeys(names, "pass")


def test_codes_of_simplear_have_the_vectors_of_the_quantiser(tmp_path: Path) -> None:
    """The first number of a vector changes from each code to the next, as published."""
    rows = written(tmp_path, "simplear").load().codebook
    assert rows is not None
    assert rows.shape == (48, 4)
    assert rows[:5, 0].tolist() == [-1.0, -0.5, 0.0, 0.5, -1.0]
    assert rows[[0, 4, 8, 12], 1].tolist() == [-1.0, 0.0, 1.0, -1.0]
    assert rows[[0, 12, 24], 2].tolist() == [-1.0, 0.0, -1.0]
    assert len(set(map(tuple, rows.tolist()))) == 48


def test_pictures_of_a_model_without_pixels_are_maps_of_its_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = written(tmp_path, "simplear")
    picture = tmp_path / "one.png"
    typed = ["generate", CAPTIONS[0], "--model", str(example.file), "--mode", "ar"]
    assert cli.main([*typed, "--out", str(picture)]) == 0
    assert "map of codes, because no decoder here makes pixels" in capsys.readouterr().err
    typed = ["sweep", "--model", str(example.file), "--modes", "ar", "--metrics", "quality"]
    assert cli.main(typed) == 2
    assert "no decoder here makes pixels of its tokens" in capsys.readouterr().err
    tokens = torch.arange(20).flip(0)[None]
    pixels = example.load().draw(tokens)
    assert pixels.shape == (1, 32, 40, 3)
    cells = pixels[0, ::8, ::8].flatten(0, 1)
    assert len(set(map(tuple, cells.tolist()))) == 20  # a colour for each code
    assert pixels[0, :8, :8].flatten(0, 1).unique(dim=0).shape == (1, 3)


def test_maps_leave_out_the_ends_of_rows() -> None:
    codes = torch.tensor([[1, 2, 3, 9, 4, 5, 6, 9]])
    with_ends = CodeMap((2, 3), skipped=0).pixels(codes)
    assert with_ends.equal(CodeMap((2, 3), skipped=0).pixels(codes[codes != 9][None]))


def test_pixels_of_liquid_are_those_of_its_image_tokenizer(tmp_path: Path) -> None:
    model = written(tmp_path, "liquid").load()
    tokens = torch.arange(20)[None]
    pixels = model.draw(tokens)
    assert pixels.shape == (1, 8, 10, 3)
    assert not pixels.equal(model.draw(tokens + 1))
    assert not model_of(model.name).draws_maps
