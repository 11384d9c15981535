"""The checks and measurements of one model: which are run, in which order, and how they are written.

`plan_certification` checks the whole request before torch is imported. Bars and rows are in `certify/tables.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.certify import tables as rows_of
from lantern_bench.clock import OnProgress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell, ResolvedExperiment, load_experiment, resolve
from lantern_bench.config.plan import Prompt
from lantern_bench.config.values import Overrides
from lantern_bench.errors import UserError
from lantern_bench.methods.rules import Rule
from lantern_bench.methods.tables import DRAFTINGS, RULES, can_decide, defaults_for, fresh_drafts_problem
from lantern_bench.methods.trees import STATIC_TREES, check_topology, is_chain
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts.sets import load_prompts
from lantern_bench.report.tables import frame, write_csv
from lantern_bench.runs.request import check_neighbours

if TYPE_CHECKING:
    from lantern_bench.certify.broken import Broken
    from lantern_bench.certify.greedy_identity import Agreement
    from lantern_bench.certify.tables import ImageTests
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Compute

Tables: TypeAlias = dict[str, list[dict[str, Any]]]

_BRANCHING = {"tree": "small-7"}  # tested beside the model's own tree: its siblings are sampled
# Where few tokens are possible and every step tries siblings, one that is not taken out of q or p shows.
_NARROW: dict[str, Any] = {"top_k": 3}
_SIBLINGS = {"topology": ((0,), (1,), (2,))}
_MORE = 4  # so many times the images may be decoded until a broken rule is rejected
_FEWER = 4  # the part of the images for filtered cells, deterministic drafts and chains
_SMALL_TREE = {"mode": "speculative", "drafting": "dynamic", "nodes": 10, "depth": 2, "beam": 5}


class Sizes(NamedTuple):
    """Sizes: positions and draws of emitted TV, images of a lossless check, greedy prompts."""

    positions: int
    draws: int
    samples: int
    greedy: int


def plan_certification(
    experiment: str, flags: dict[str, Any], modes: list[str] | None, settings: list[str], sizes: Sizes
) -> Certification:
    """Resolve the relaxed cells and the prompts of an experiment; raises `UserError`, imports no torch."""
    model = model_of(flags["model"][0])
    flags = flags | {"model": [model.name], "prompts": flags["prompts"] or next(iter(model.prompt_sets))}
    loaded = load_experiment(experiment, Overrides.from_flags(flags, modes=modes, settings=settings))
    resolved = resolve(loaded, defaults_of([model.name]))
    check_neighbours(resolved)
    relaxed = tuple(cell for cell in resolved.cells if not cell.decoding.rule_row.lossless)
    check_cells(relaxed)
    if not relaxed:
        raise UserError(f"{experiment}: has no relaxed cell", "Give another --experiment, or other --modes.")
    prompts = load_prompts(resolved.settings.prompts, model)
    return Certification(model.name, resolved, relaxed, prompts, sizes, model.defaults.get("tree"))


def check_cells(cells: Sequence[Cell]) -> None:
    """Raise `UserError` where emitted TV is undefined: at temperature 0, and without drafts."""
    for cell in cells:
        if cell.decoding.greedy:
            raise UserError(f"{cell.cell_id}: emitted TV is not defined at temperature 0", "Give a --temperature.")
        if not cell.decoding.drafts:
            raise UserError(f"{cell.cell_id}: drafts nothing and has no emitted TV", "Leave the mode ar out.")


@dataclass
class Certification:
    """The planned checks of one model; `cells` are the relaxed ones, `tree` is the model's default static tree."""

    model: str
    resolved: ResolvedExperiment
    cells: tuple[Cell, ...]
    prompts: Sequence[Prompt]
    sizes: Sizes
    tree: Any

    @cached_property
    def compute(self) -> Compute:
        """The device and the number type."""
        from lantern_bench.runs.devices import choose_compute

        return choose_compute(self.resolved.settings.device, self.resolved.settings.dtype, fast=True)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, loaded on first use."""
        from lantern_bench.runs.devices import load_models

        return load_models(self.resolved, self.compute)[self.model]

    @cached_property
    def exact(self) -> LoadedModel:
        """The model in float32, where rounding moves few tokens across a filter's edge, not compiled."""
        import torch

        from lantern_bench.runs.devices import load_models

        if self.compute.dtype == torch.float32:
            return self.loaded
        return load_models(self.resolved, self.compute._replace(dtype=torch.float32))[self.model]

    @staticmethod
    def check_folder(folder: Path) -> None:
        """Raise `UserError` before the measurement if the tables cannot be written there."""
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"--out {folder}: {there} is a file, not a folder", "Give a folder that you may write to.")

    def measure(self, emitted_tv: bool, on_progress: OnProgress) -> Tables:
        """Return the tables of a certificate, or those of emitted TV alone."""
        self.prepare(on_progress)
        if emitted_tv:
            return means_of(self.emitted_tv(self.cells, on_progress))
        return self._certificate(on_progress)

    def prepare(self, on_progress: OnProgress) -> None:
        """Read all prompts at once: a text encoder is loaded, used and freed before decoding starts."""
        for done, total in self.loaded.prepare([prompt.text for prompt in self.prompts]):
            on_progress("captions", done / total)

    def write(self, folder: Path, tables: Tables) -> None:
        """Write the tables as CSV, and the settings of the measurement as `measurement.json`."""
        from lantern_bench.runs.machine import package_versions

        for name, rows in tables.items():
            write_csv(frame(name, rows), folder / f"{name}.csv")
        facts: dict[str, Any] = {"model": self.model, "weights": dict(self.loaded.weights)}
        settings = self.resolved.settings
        facts |= {"seed": settings.seed, "prompts": settings.prompts, **self.sizes._asdict()}
        facts |= {"device": self.compute.device.type, "dtype": self.compute.dtype_name, "packages": package_versions()}
        write_atomically(folder / "measurement.json", (json.dumps(facts, indent=2) + "\n").encode())

    def _certificate(self, on_progress: OnProgress) -> Tables:
        from lantern_bench.certify.relaxation import autoregressive

        rows, tests = rows_of.whole_image_rows(self.model, list(self._lossless(on_progress)))
        rows += self._greedy(on_progress)
        # The strict rule with deterministic drafts, because their emitted TV is exact; sampling as in the first cell.
        first = self.cells[0].decoding
        sampling = autoregressive(first).model_dump(include={"temperature", "top_k", "top_p", "filter_order"})
        scales = {"cfg_scale": first.cfg_scale, "cfg_default": self.resolved.cfg_defaults[self.model]}
        strict = Cell(self.model, Decoding.model_validate({**_SMALL_TREE, **sampling, **scales}))
        places = self.emitted_tv([*self.cells, strict], on_progress)
        exact = [row for row in places if row["cell_id"] == strict.cell_id]
        tables = means_of([row for row in places if row["cell_id"] != strict.cell_id])
        rows.append(rows_of.strict_row(self.model, f"dynamic {strict.decoding.tree_label}", exact))
        rows += rows_of.cost_check_rows(tables["emitted_tv"], tables["emitted_tv_places"])
        return {"certificate": rows, "lossless_tests": tests, **tables}

    def _lossless(self, on_progress: OnProgress) -> Iterator[ImageTests]:
        """Whole-image tests of each lossless decoding under three filters, and of its broken rules."""
        from lantern_bench.certify.broken import Broken, broken_rules
        from lantern_bench.certify.whole_image import TESTS

        run = self.cells[0].decoding
        common = {"temperature": run.temperature, "filter_order": run.filter_order}
        common |= {"cfg_scale": run.cfg_scale, "cfg_default": self.resolved.cfg_defaults[self.model]}
        own: dict[str, Any] = {"top_k": run.top_k, "top_p": run.top_p}
        kinds: list[dict[str, Any]] = [{}, *([own] if run.top_k or run.top_p < 1 else []), _NARROW]
        cases = []
        for filters in kinds:
            dtype = "float32" if filters == _NARROW else self.compute.dtype_name
            words = "".join(f", {key.replace('_', '-')} {value:g}" for key, value in filters.items())
            for setting, one in self._lossless_decodings(**common, **filters).items():
                # A chain has the rule of a branching tree, which shows more mistakes: the broken rules run on that,
                # and those of a rule for chains on a static chain.
                shown = one.branches or (one.rule_row.chains and bool(one.paths))
                broken = broken_rules(one, self.loaded, filters == _NARROW) if shown and filters != own else {}
                whole = filters != own and bool(broken) and one.drafting_row.sampled
                images = self.sizes.samples if whole else -(-self.sizes.samples // _FEWER)
                cases.append((setting + words, one, images, dtype, broken))
        level = rows_of.LEVEL / (TESTS * len(cases))  # the strictest of Holm's correction
        for setting, one, images, dtype, broken in cases:
            yield self.tested(setting, one, images, dtype, on_progress)
            for name, accept in broken.items():
                yield self.tested(setting, one, _MORE * images, dtype, on_progress, Broken(name, accept), level)

    def tested(
        self,
        setting: str,
        decoding: Decoding,
        images: int,
        dtype: str,
        on_progress: OnProgress,
        broken: Broken | None = None,
        level: float = 0.0,
    ) -> ImageTests:
        """Test `images` images of a decoding; what is `broken` only until a p-value falls below `level`."""
        from lantern_bench.certify.whole_image import decoded_evidence, edge_tolerance, p_values
        from lantern_bench.decoding.drafting import drafting_of

        name, found = broken and broken.name, []
        about = f"whole images, {setting}" + (f": {name}" if name else "")
        model = self.loaded if dtype == self.compute.dtype_name else self.exact
        depth = drafting_of(decoding, model.target).depth if decoding.drafts else 0
        values: Any = {"tolerance": edge_tolerance(dtype, decoding), "seed": self.resolved.settings.seed}
        values |= {"accept": broken.accept, "make": broken.make} if broken else {}
        for batch in decoded_evidence(model, self.prompts, decoding, images, **values):
            found.append(batch)
            done = sum(len(one.starts) for one in found)
            on_progress(about, min(1.0, done / images))
            if broken and min(p_values(found, depth).values()) < level:
                break
        edge, impossible = (sum(int(getattr(one, key).sum()) for one in found) for key in ("edge", "impossible"))
        tokens = sum(one.starts.size for one in found)
        return rows_of.ImageTests(setting, name, p_values(found, depth), done, tokens, edge, impossible)

    def _greedy(self, on_progress: OnProgress) -> list[dict[str, Any]]:
        """Whether each drafting at temperature 0 gives the tokens of greedy decoding."""
        from lantern_bench.certify.greedy_identity import NEAR_TIE, greedy_agreements

        named = self._lossless_decodings(temperature=0)
        prompts = list(dict.fromkeys(self.prompts[: self.sizes.greedy]))
        found: dict[Decoding, list[Agreement]] = {decoding: [] for decoding in named.values()}
        sizes: Any = {"tolerance": NEAR_TIE[self.compute.dtype_name], "on_progress": on_progress}
        for decoding, part in greedy_agreements(self.loaded, prompts, list(found), **sizes):
            found[decoding] += part
        rows = []
        for setting, decoding in named.items():
            near = [one.difference for one in found[decoding] if one.difference and one.near_tie]
            others = [one.difference for one in found[decoding] if one.difference and not one.near_tie]
            same = len(found[decoding]) - len(near) - len(others)
            rows.append(rows_of.identity_row(self.model, setting, same, near, others))
        return rows

    def _lossless_decodings(self, **values: Any) -> dict[str, Decoding]:
        """Every lossless rule with every drafting that it can decide on, in small, by their labels."""
        named: dict[str, Decoding] = {}
        scale = self.resolved.cfg_defaults[self.model]
        for rule, drafting in itertools.product(RULES.values(), DRAFTINGS.values()):
            decides = rule.lossless and drafting.drafts and can_decide(rule.name, drafting.name)
            if rule.name == "none" or not decides:
                continue
            if fresh_drafts_problem(rule.name, drafting.name, defaults_for(drafting.name, rule.name, "speculative")):
                continue
            common = {"mode": "speculative", "cfg_scale": scale, "cfg_default": scale, **values}
            common |= {"drafting": drafting.name, "rule": rule.name}
            for small in self._trees(rule, values) if "tree" in drafting.defaults else [drafting.small]:
                one = Decoding.model_validate({**common, **small})
                if one.rule == rule.name:  # greedy decoding has no rule for chains
                    suffix = "" if rule.name == "strict" else f", {rule.name}"
                    named[f"{drafting.name} {one.tree_label}{suffix}"] = one
        return named

    def _trees(self, rule: Rule, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The static trees that a rule is tested on: the model's own or the rule's, and one that branches."""
        branching = _SIBLINGS if values.get("top_k") == _NARROW["top_k"] else _BRANCHING
        own = self.tree or DRAFTINGS["static"].defaults["tree"]
        paths = STATIC_TREES[own] if isinstance(own, str) else check_topology(own)
        if rule.chains:
            return [{"topology": paths} if is_chain(paths) else {"tree": rule.tree}]
        return [{"topology": paths}, *([branching] if is_chain(paths) or branching is _SIBLINGS else [])]

    def emitted_tv(self, cells: Sequence[Cell], on_progress: OnProgress) -> list[dict[str, Any]]:
        """The emitted TV of the cells at sampled positions, one row per position and cell."""
        from lantern_bench.certify.relaxation import CostSettings, emitted_tv_rows

        sizes, seed = self.sizes, self.resolved.settings.seed
        settings = CostSettings(sizes.positions, draws=sizes.draws, seed=seed)
        return list(emitted_tv_rows(self.loaded, cells, self.prompts, settings, on_progress))


def means_of(places: list[dict[str, Any]]) -> Tables:
    """The table of means of emitted TV beside the rows it is computed from."""
    return {"emitted_tv": list(rows_of.cost_rows(places)), "emitted_tv_places": places}
