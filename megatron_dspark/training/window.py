"""What the steps since the last logged one reported, as state: a resumed run logs the numbers of an undisturbed one."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from megatron_dspark.data.sampler import MicroBatch


class Window:
    """Sums the reports of a logging window on this rank.

    Attributes:
        tokens, places: this rank's tokens of the window, and those with the padding.
        grad_norm: of the last step that the optimizer took; None before the first.
        skipped: steps that it did not take.
        timed_tokens, timed_steps: the part of the window that this process ran; only these belong to its seconds.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self.tokens, self.places, self.skipped = 0, 0, 0
        self.grad_norm: float | None = None
        self.timed_tokens, self.timed_steps = 0, 0

    def add(self, reports: Sequence[dict[str, Tensor]], batches: Sequence[MicroBatch], grad_norm: float | None) -> None:
        """Add one optimizer step: its micro-batches, their reports (none on a rank without the draft), the norm.

        A step that the optimizer skipped has no norm; its losses were measured all the same.
        """
        if reports:
            self._names = sorted(reports[0])
            step = torch.stack([torch.stack([report[name] for name in self._names]) for report in reports]).sum(0)
            self._sums = step if self._sums is None else self._sums + step
        tokens = sum(batch.num_tokens for batch in batches)
        self.tokens += tokens
        self.places += sum(batch.input_ids.numel() for batch in batches)
        self.timed_tokens += tokens
        self.timed_steps += 1
        if grad_norm is None:
            self.skipped += 1
        else:
            self.grad_norm = grad_norm

    @property
    def reports(self) -> list[dict[str, Tensor]]:
        """The window as one report of [numerator, denominator] sums, for `reduce_report`."""
        return [] if self._sums is None else [dict(zip(self._names, self._sums.unbind(), strict=True))]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's sums as plain values."""
        sums = [] if self._sums is None else self._sums.tolist()
        counts = {"tokens": self.tokens, "places": self.places, "skipped": self.skipped, "grad_norm": self.grad_norm}
        return {"names": self._names, "sums": sums, **counts}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from `state_dict()`."""
        self.tokens, self.places, self.grad_norm = state["tokens"], state["places"], state["grad_norm"]
        self.skipped = state.get("skipped", 0)
        self._names = list(state["names"])
        self._sums = torch.tensor(state["sums"], dtype=torch.float64, device=device) if state["names"] else None

    def total(self, counts: bool, repeated: int = 1) -> dict[str, Any]:
        """Return the state of all ranks together, for a run that goes on in another layout; every rank calls it.

        Args:
            counts: whether this rank's sums are its own; False where another tensor-parallel rank has the same.
            repeated: ranks that count the same tokens.
        """
        states: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(states, self.state_dict() if counts else None)
        states = [state for state in states if state is not None]
        summed = [state["sums"] for state in states if state["names"]]
        return {
            "names": next((state["names"] for state in states if state["names"]), []),
            "sums": torch.tensor(summed, dtype=torch.float64).sum(0).tolist() if summed else [],
            # Context-parallel ranks all count the tokens of their whole rows.
            "tokens": sum(state["tokens"] for state in states) // repeated,
            "places": sum(state["places"] for state in states) // repeated,
            # The same on every rank.
            **{name: states[0][name] for name in ("skipped", "grad_norm")},
        }
