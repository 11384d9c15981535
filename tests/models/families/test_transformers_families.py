"""Models that transformers hosts: our logits, greedy images and pixels against its own, from
checkpoints it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_bench.checks.check_model import check_model
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.models.random_weights import meta_model
from lantern_bench.models.registry import model_of, models
from lantern_bench.utils.errors import UserError
from tests.helpers import tiny_hosted as tiny

CPU = torch.device("cpu")
FLOAT = torch.float32
SCALE = 3.0
SHAPES = {
    "plain": tiny.Shape(),
    "grouped-query": tiny.Shape(kv_heads=2, ffn=40, mult=(2, 2), attends=(0,)),
    "one key head, tied": tiny.Shape(heads=4, kv_heads=1, tied=True, codes=33),
    "odd grid, three resolutions": tiny.Shape(
        dim=24, heads=6, kv_heads=3, ffn=37, side=5, mult=(1, 2, 2), blocks=2
    ),
    "deep, tied, long rotation": tiny.Shape(
        dim=48, heads=3, kv_heads=3, layers=4, tied=True, theta=500.0, side=3
    ),
    "wide codes, few frames": tiny.Shape(
        dim=40, heads=5, kv_heads=5, ffn=56, codes=100, code_dim=12, mult=(2, 1)
    ),
}
SHAPES["wide codes, few frames"] = SHAPES["wide codes, few frames"]._replace(frames=2, attends=())
SHAPES["single frames"] = tiny.Shape(frames=1)
# Every test run compares one shape; the others belong to the long tests.
SHAPES_BY_COST = [
    name if name == "grouped-query" else pytest.param(name, marks=pytest.mark.long)
    for name in SHAPES
]
WRITERS: dict[str, tuple[Callable[..., Any], Callable[..., tiny.Expected]]] = {
    "janus": (tiny.write_janus, tiny.expect_janus),
    "emu3": (tiny.write_emu3, tiny.expect_emu3),
}


def written(folder: Path, family: str, shape: tiny.Shape) -> tuple[Any, Any]:
    """Transformers' model and ours, from the same files."""
    theirs = WRITERS[family][0](folder / "weights", shape)
    # Janus states its grid; Emu3's pictures may have any.
    grid = f"grid: [{shape.side}, {shape.side + 1}]\n" if family == "emu3" else ""
    (folder / "model.yaml").write_text(f"family: {family}\n{grid}target: {{checkpoint: weights}}\n")
    return theirs, model_of(str(folder / "model.yaml")).load(CPU, FLOAT)


@pytest.mark.parametrize("name", SHAPES_BY_COST)
@pytest.mark.parametrize("family", WRITERS)
@torch.no_grad()
def test_agreement_with_transformers(family: str, name: str, tmp_path: Path) -> None:
    """Logits, the greedy image and its pixels are transformers' own."""
    theirs, model = written(tmp_path, family, SHAPES[name])
    condition = model.condition(["a red lantern over the lake"])
    prompts = [
        values[valid] for values, valid in zip(condition.values[0], condition.valid[0], strict=True)
    ]
    wanted = WRITERS[family][1](theirs, *prompts, model.grid, SCALE)
    forced = teacher_forced(model.target, condition, wanted.tokens[None], guided=True)
    chosen = model.target.forced_tokens(torch.arange(len(wanted.tokens))) < 0
    for ours, logits in zip((forced.logits.cond, forced.logits.uncond), wanted.logits, strict=True):
        codes = slice(model.target.n_codes)
        assert (ours[0, chosen, codes] - logits[chosen, codes]).abs().max() < 1e-4
    tokens = decode(
        model=model,
        condition=condition,
        decoding=Decoding("ar", temperature=0, cfg_scale=SCALE),
        generators=[torch.Generator()],
    )[0].tokens
    assert tokens.tolist() == wanted.tokens.tolist()
    pixels = model.draw(wanted.tokens[None])[0]
    assert pixels.shape == wanted.pixels.shape
    assert (pixels.int() - wanted.pixels.int()).abs().max() <= 1
    # Weights with which these checks could fail: tokens differ, and pixels are not all black or
    # white.
    assert len(set(tokens.tolist())) > 2
    assert float(((pixels > 0) & (pixels < 255)).float().mean()) > 0.2


@pytest.mark.parametrize("family", WRITERS)
def test_hosted_models_decode_in_every_drafter_free_mode(family: str, tmp_path: Path) -> None:
    """Greedy drafter-free modes give the greedy image, and forced tokens are in their places."""
    _, model = written(tmp_path, family, SHAPES["grouped-query"])
    condition = model.condition(["a red lantern", "the lake at dusk over the lake"])
    shapes: list[dict[str, Any]] = [
        {"mode": "ar"},
        {"mode": "sjd", "window": 5},
        {"mode": "sjd-pac", "window": 5},
    ]
    images = []
    for shape in shapes:
        greedy = Decoding(temperature=0, cfg_scale=SCALE, **shape)
        images.append(
            [
                image.tokens.tolist()
                for image in decode(
                    model=model,
                    condition=condition,
                    decoding=greedy,
                    generators=[torch.Generator()] * 2,
                )
            ]
        )
    assert images[0] == images[1] == images[2]
    forced = model.target.forced_tokens(torch.arange(model.target.image_tokens))
    assert int((forced >= 0).sum()) == (model.grid[0] if family == "emu3" else 0)
    assert all(
        images[0][0][place] == token for place, token in enumerate(forced.tolist()) if token >= 0
    )
    relaxed = Decoding(mode="lantern++", drafting="jacobi", neighbours=8, **{"lambda": 3.0})
    assert (
        len(
            decode(
                model=model,
                condition=condition,
                decoding=relaxed,
                generators=[torch.Generator()] * 2,
            )[0].tokens
        )
        == model.target.image_tokens
    )


@pytest.mark.parametrize("family", WRITERS)
def test_pictures_become_the_codes_that_transformers_finds(family: str, tmp_path: Path) -> None:
    """The encoder, which training a drafter from pictures needs."""
    theirs, model = written(tmp_path, family, SHAPES["plain"])
    height, width = model.pixels.size
    pictures = torch.randint(
        256, (2, height, width, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    pixels = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        if family == "emu3":
            official = theirs.model.vqmodel.encode(
                pixels, torch.tensor([[height, width]] * 2)
            ).image_tokens
            wanted = torch.stack([codes.flatten() for codes in official])
        else:
            # Transformers' encoder does not scale latents and codes to unit length, as its decoder
            # and the authors do.
            latents = theirs.model.vqmodel.quant_conv(theirs.model.vqmodel.encoder(pixels)).permute(
                0, 2, 3, 1
            )
            rows = torch.nn.functional.normalize(
                theirs.model.vqmodel.quantize.embedding.weight, dim=-1
            )
            wanted = torch.cdist(
                torch.nn.functional.normalize(latents, dim=-1).flatten(1, 2), rows
            ).argmin(-1)
    tokens = model.pixels.tokens(pictures)
    codes = tokens.reshape(2, model.grid[0], -1)[:, :, : model.grid[1]].flatten(1)
    assert codes.tolist() == wanted.tolist()
    assert len(set(codes.flatten().tolist())) > 2


def test_janus_prompts_equal_transformers_own(tmp_path: Path) -> None:
    """The chat template of the published processor, and the padding of its unconditional rows."""
    from transformers import PreTrainedTokenizerFast

    _, model = written(tmp_path, "janus", SHAPES["plain"])
    words = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "weights" / "tokenizer.json"))
    begin, _, pad, image, *_ = tiny.JANUS_SPECIAL
    wanted = words(
        f"{begin}<|User|>: a red lantern\n\n<|Assistant|>:{image}", add_special_tokens=False
    ).input_ids
    values = model.condition([" a red lantern "]).values[0]
    assert values[0].tolist() == wanted
    bare = [words.convert_tokens_to_ids(pad)] * (len(wanted) - 2)
    assert values[1].tolist() == [wanted[0], *bare, wanted[-1]]
    assert words.unk_token_id not in bare


def test_emu3_prompts_state_the_size_and_the_faults(tmp_path: Path) -> None:
    _, model = written(tmp_path, "emu3", SHAPES["plain"])
    names = {number: name for name, number in tiny.vocabulary_of(tmp_path / "weights").items()}
    condition = model.condition(["a red lantern"])
    texts = [
        " ".join(names[int(word)] for word in values[valid])
        for values, valid in zip(condition.values[0], condition.valid[0], strict=True)
    ]
    ends = "<|image start|> 4 * 5 <|image token|>"
    assert texts[0].startswith("<|extra_203|> a red lantern ")
    assert texts[0].endswith(ends)
    assert texts[1].startswith("<|extra_203|> lowres ")
    assert texts[1].endswith(ends)
    assert "lantern" not in texts[1]


@pytest.mark.parametrize(
    "renamed",
    [
        {"text_model.model.": "model.text_model.", "text_model.lm_head.": "lm_head."},
        {"text_model.model.": "model.text_model.model."},
    ],
)
def test_every_naming_of_emu3_files_is_read(renamed: dict[str, str], tmp_path: Path) -> None:
    """Versions of transformers write the published prefixes, those of its modules, or a mixture."""
    from safetensors.torch import load_file, save_file

    _, model = written(tmp_path, "emu3", SHAPES["plain"])
    path = tmp_path / "weights" / "model.safetensors"
    state = {}
    for name, tensor in load_file(path).items():
        for ours, theirs in {**renamed, "vqmodel.": "model.vqmodel."}.items():
            if name.startswith(ours):
                state[theirs + name.removeprefix(ours)] = tensor
                break
        else:
            state[name] = tensor
    save_file(state, path)
    again: Any = model_of(str(tmp_path / "model.yaml")).load(CPU, FLOAT)
    weight = model.target.transformer.output.weight
    assert again.target.transformer.output.weight.equal(weight)
    assert again.codebook is not None
    assert model.codebook is not None
    assert again.codebook.equal(model.codebook)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "janus",
            {"vq_config": {"num_embeddings": 0}},
            "vq_config.num_embeddings: 0: must be a whole number above 0",
        ),
        ("janus", {"text_config": {"hidden_act": "gelu"}}, "text_config.hidden_act: is gelu"),
        (
            "janus",
            {"text_config": {"num_attention_heads": "four"}},
            "text_config.num_attention_heads: four: must be",
        ),
        (
            "janus",
            {"text_config": {"model_type": "granite"}},
            "text_config.model_type: is granite, and only llama",
        ),
        (
            "janus",
            {"text_config": {"model_type": "mistral"}},
            "text_config.model_type: is mistral, and only llama",
        ),
        (
            "janus",
            {"text_config": {"rms_norm_eps": float("nan")}},
            "text_config.rms_norm_eps: nan: must be a number",
        ),
        (
            "janus",
            {"text_config": {"num_hidden_layers": 10**9}},
            "1000000000: must be a whole number above 0 and at",
        ),
        (
            "janus",
            {"text_config": {"num_hidden_layers": 10**6}},
            "has 2 layers, and num_hidden_layers is 1000000",
        ),
        (
            "emu3",
            {"text_config": {"num_hidden_layers": 3}},
            "has 2 layers, and num_hidden_layers is 3",
        ),
        (
            "janus",
            {"text_config": {"rope_scaling": {"rope_type": "llama3"}}},
            "rope_scaling: is of the type llama3",
        ),
        (
            "emu3",
            {"vq_config": {"codebook_size": 41}},
            "has 40 image codes, and vq_config.codebook_size is 41",
        ),
        ("emu3", {"text_config": 7}, "text_config: must be a mapping"),
    ],
)
def test_impossible_configs_are_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    import json

    WRITERS[family][0](tmp_path / "weights", SHAPES["plain"])
    path = tmp_path / "weights" / "config.json"
    stated = json.loads(path.read_text())
    for key, value in changes.items():
        stated[key] = {**stated[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(stated))
    (tmp_path / "model.yaml").write_text(f"family: {family}\ntarget: {{checkpoint: weights}}\n")
    with pytest.raises(UserError) as caught:
        model_of(str(tmp_path / "model.yaml")).load(CPU, FLOAT)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_swish_is_another_name_of_silu(tmp_path: Path) -> None:
    import json

    written(tmp_path, "janus", SHAPES["plain"])
    path = tmp_path / "weights" / "config.json"
    stated = json.loads(path.read_text())
    stated["text_config"]["hidden_act"] = "swish"
    path.write_text(json.dumps(stated))
    assert model_of(str(tmp_path / "model.yaml")).load(CPU, FLOAT).grid == (4, 4)


@pytest.mark.parametrize("grid", [(1, 7), (1, 3)])
def test_models_of_one_row_pass_every_check(grid: tuple[int, int], tmp_path: Path) -> None:
    """Trees that reach beyond the last token of a small image are compared as far as it goes."""
    written(tmp_path, "emu3", SHAPES["plain"])
    file = tmp_path / "model.yaml"
    file.write_text(f"family: emu3\ngrid: {list(grid)}\ntarget: {{checkpoint: weights}}\n")
    captions = ["a red lantern", "the lake at dusk"]
    draws = torch.Generator().manual_seed(0)
    checks = check_model(
        model_of(str(file)).load(CPU, FLOAT), captions, tolerance=1e-4, generator=draws
    )
    assert {check.check for check in checks if check.result == "pass"} >= {
        "cache",
        "tree",
        "forced tokens",
        "guidance",
    }


@pytest.mark.parametrize(("family", "other"), [("janus", "emu3"), ("emu3", "janus")])
def test_models_of_the_other_family_are_named(family: str, other: str, tmp_path: Path) -> None:
    written(tmp_path, family, SHAPES["plain"])
    (tmp_path / "model.yaml").write_text(f"family: {other}\ntarget: {{checkpoint: weights}}\n")
    with pytest.raises(
        UserError, match=r"it is an? (Emu3|Janus) model in the layout of transformers"
    ):
        model_of(str(tmp_path / "model.yaml")).load(CPU, FLOAT)


def test_cards_say_what_is_published() -> None:
    published = {name: model for name, model in models().items() if model.family in WRITERS}
    tokens = {name: card.tokens for name, card in published.items()}
    assert tokens == {"janus-pro-1b": 576, "janus-pro-7b": 576, "emu3-gen": 90 * 91}
    assert published["emu3-gen"].codes == 32768
    assert all(card.mode == "scd" for card in published.values())
    assert "720x720 px" in published["emu3-gen"].description
    assert "384x384 px" in published["janus-pro-1b"].description
    # Parameters of the modules that are built, counted on the meta device.
    for name in published:
        parts = meta_model(name)
        assert (
            sum(weight.numel() for weight in parts.target.parameters())
            == published[name].parameters
        )
        assert parts.drafter is None
