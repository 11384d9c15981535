"""docs/prediction.md: tables equal their data, bars are met, kernels can be counted again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_bench.models.families.lanterns.family import Lanterns
from lantern_bench.profile.cost_model import (
    KERNEL_COUNTS,
    Workload,
    draft_work,
    named_draft,
    target_work,
    verify_work,
)
from scripts.bench import plain_network as network
from scripts.bench.plain_decoding import Plain
from scripts.docs.prediction_tables import PAGE, groups, held_out, predicted, published_rows, render

# Views, and reads of one number: no kernel.
_FREE = {
    "view",
    "_unsafe_view",
    "transpose",
    "select",
    "slice",
    "expand",
    "unsqueeze",
    "squeeze",
    "split",
    "split_with_sizes",
    "t",
    "detach",
    "detach_",
    "alias",
    "permute",
    "unbind",
    "resolve_conj",
    "resolve_neg",
    "item",
    "is_nonzero",
}


def test_page_is_that_of_its_data():
    text = PAGE.read_text(encoding="utf-8")
    assert render(text) == text, "type `python -m scripts.docs.prediction_tables`"


def test_rows_with_a_stated_device_are_predicted_within_the_bar():
    # Nothing is fitted to a speedup, so leaving a paper out changes no constant: each paper is a
    # test by itself.
    rows = groups()["Device stated"]
    assert len(rows) >= 13
    assert median(abs(row["error"]) for row in rows) <= 0.15
    for paper in {row["paper"] for row in rows}:
        assert median(abs(row["error"]) for row in rows if row["paper"] == paper) <= 0.15, paper


def test_launch_time_of_eager_code_cancels_in_a_speedup():
    stack = KERNEL_COUNTS["eager"]
    more = stack._replace(
        **{name: 1.5 * getattr(stack, name) for name in stack._fields if name != "fixed"}
    )
    for row in published_rows():
        assert predicted(row, more) == pytest.approx(predicted(row), rel=0.03)


def test_no_row_is_from_memory():
    for row in published_rows():
        assert row["confidence"] in ("secondary", "borrowed", "paper")
        assert row["source"]


def test_held_out_cells_of_the_reference_runs_are_near():
    errors = [abs(row["error"]) for row in held_out()]
    assert len(errors) >= 5
    assert median(errors) <= 0.1


class _Operations(TorchDispatchMode):
    """Counts the operations that would launch a kernel, by the innermost named function."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inside = ["rest"]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator._schema.name.split("::")[1] not in _FREE:
            self.counts[self._inside[-1]] += 1
        return operator(*args, **(kwargs or {}))

    def named(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(name)
            self.calls[name] += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._inside.pop()

        return run


@pytest.mark.parametrize("label", [None, "chain-5", "eagle1-25", "58n5d10b"])
def test_eager_kernels_are_those_of_the_plain_implementation(label: str | None):
    model = Lanterns().load(torch.device("cpu"), torch.float32)
    target: Any = model.target
    plain = Plain(
        target=network.PlainTarget(target),
        drafter=network.PlainDrafter(model.drafter),
        table=model.table(20),
        scale=2.0,
    )
    count = _Operations()
    for owner, name in (
        (plain.target, "prefill"),
        (plain.drafter, "prefill"),
        (plain.target, "forward"),
    ):
        setattr(
            owner,
            name,
            count.named("prefill" if name == "prefill" else "target", getattr(owner, name)),
        )
    condition = model.condition(["two round red lanterns over a lake at dusk"])
    noise = torch.Generator().manual_seed(0)
    draft = None if label is None else named_draft(label)
    with count:
        if draft is None:
            result = plain.autoregressive(condition, noise, 48)
        elif label == "58n5d10b":
            result = plain.speculative(condition, noise, 48, dynamic=(58, 5, 10))
        else:
            result = plain.speculative(condition, noise, 48, paths=_paths(label))
    steps = len(result.committed)
    at = Workload(sizes=target.config, batch=1, guided=True, context=100)
    stack = KERNEL_COUNTS["eager"]
    ours = target_work(setting=at, nodes=1, weight_bytes=2, stack=stack).kernels
    if draft is not None:
        length = sum(result.committed) / steps
        ours += sum(
            work.kernels
            for work in draft_work(
                setting=at, draft=draft, committed=length, weight_bytes=2, stack=stack
            )
        )
        ours += verify_work(setting=at, draft=draft, committed=length, stack=stack).kernels
    counted = sum(number for name, number in count.counts.items() if name != "prefill") / steps
    assert ours == pytest.approx(counted, rel=0.08)


def _paths(label: str | None) -> Any:
    from lantern_bench.methods.static_trees import STATIC_TREES

    return STATIC_TREES[str(label)]
