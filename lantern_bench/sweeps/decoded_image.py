"""A decoded image: its tokens, picture and trace, and the columns of its record."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lantern_bench.storage.pictures import png_bytes, tokens_sha256
from lantern_bench.utils.cores import cpu_quota, usable_cores

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from lantern_bench.decoding.trace import ImageTrace

# An image is disturbed when its threads did not run for more than this fraction of its seconds.
DISTURBED = 0.05
_STILL_VALID = "Token counts and quality are valid; times may not be."


def quiet_advice() -> str:
    """Say what to do about disturbed images: mostly other programs, but a quota holds back too."""
    quota = cpu_quota()
    if quota is None or quota >= len(usable_cores()):
        return f"Close other programs. {_STILL_VALID}"
    limit = f"The CPU quota of this container is {quota:.3g} of {len(usable_cores())} cores"
    threads = max(1, int(quota))
    return (
        f"{limit}: give at most --threads {threads} and one process, or raise the quota, "
        f"and close other programs. {_STILL_VALID}"
    )


@dataclass(frozen=True)
class DecodedImage:
    """One decoded prompt."""

    prompt: str
    tokens: Tensor  # int32 [N] on the CPU
    trace: ImageTrace  # committed and accepted tokens of every step, seconds, forwards
    # uint8 [H, W, 3]; None without a tokenizer, and for a part of an image
    pixels: Tensor | None = None
    pixel_seconds: float = 0.0
    peak_memory: int | None = None  # bytes on the device
    logits: Tensor | None = None  # guided [N, V]; None unless requested

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens committed per step, bonus token included. None for an image of one token."""
        return self.trace.mean_accepted_length

    @property
    def seconds(self) -> float:
        """Seconds of decoding, without text encoding and pixels."""
        return self.trace.seconds

    @cached_property
    def picture(self) -> Image | None:
        """The picture in RGB. None without pixels."""
        from PIL import Image

        return None if self.pixels is None else Image.fromarray(self.pixels.cpu().numpy())

    def png(self) -> bytes:
        """Return the picture as a PNG file. Raises `ValueError` without pixels."""
        if self.pixels is None:
            raise ValueError("an image without pixels has no picture")
        return png_bytes(self.pixels, self.tokens)

    def __repr__(self) -> str:
        return f"DecodedImage({self.prompt!r}: {len(self.tokens)} tokens, {self.seconds:.3g} s)"

    def _repr_png_(self) -> bytes | None:
        return None if self.picture is None else self.png()

    def lost_share(self, batch: int) -> float:
        """Return the fraction of decoding time for which the threads of its batch lacked a core.

        `batch` is the number of images that were decoded together.
        """
        import torch

        seconds = self.trace.seconds * batch
        if not self.trace.usage or not seconds:
            return 0.0
        return self.trace.usage.lost_seconds(seconds, torch.get_num_threads()) / seconds

    def columns(self, batch: int) -> dict[str, Any]:
        """Return the columns of its record about decoding, for a batch of `batch` images."""
        trace = self.trace
        phases = trace.phases
        measured = sum(phases.get(name, 0.0) for name in ("draft", "target", "verify", "prefill"))
        return self._usage_columns(batch) | {
            "decoded_together": batch,
            "tokens": trace.tokens,
            "target_forwards": trace.target_forwards,
            "drafter_forwards": trace.drafter_forwards,
            "start_per_step": trace.start,
            "committed_per_step": trace.committed,
            "accepted_per_step": trace.accepted,
            "offered_depth_per_step": trace.offered_depth,
            "child_rank_per_step": trace.child_rank,
            "mean_accepted_length": trace.mean_accepted_length,
            "mal_uncut": trace.mal_uncut,
            "step_compression": trace.step_compression,
            "seconds": trace.seconds,
            "draft_seconds": phases.get("draft", 0.0),
            "target_seconds": phases.get("target", 0.0) + phases.get("prefill", 0.0),
            "verify_seconds": phases.get("verify", 0.0),
            "other_seconds": max(0.0, trace.seconds - measured),
            "pixel_seconds": self.pixel_seconds,
            "peak_memory_bytes": self.peak_memory,
            "neighbour_mass": trace.neighbour_mass,
            "neighbour_mass_tried": trace.neighbour_mass_tried,
            "emitted_tv": trace.emitted_tv,
            "tokens_sha256": tokens_sha256(self.tokens),
        }

    def _usage_columns(self, batch: int) -> dict[str, Any]:
        """Return the columns from the processor's counters, per image. Empty without counters."""
        usage = self.trace.usage
        if usage is None:
            return {}
        waited = usage.waited_seconds
        steal = usage.steal_seconds
        return {
            "cpu_seconds": usage.cpu_seconds / batch,
            "waited_seconds": None if waited is None else waited / batch,
            "steal_seconds": None if steal is None else steal / batch,
            "involuntary_switches": usage.involuntary_switches,
            "disturbed": self.lost_share(batch) > DISTURBED,
        }
