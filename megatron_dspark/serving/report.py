"""What a verification found: numbers for machines (`as_dict`) and a table for people (`render`)."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Mismatch:
    """Where a greedy response first leaves the one that the target gives alone.

    Attributes:
        position: index in the response of the first token that differs.
        drafted: the token with the draft; None when that response had already ended. `target_only` likewise.
        top2_gap: the target's best logit minus its second best there, in one-row decoding.
        rounding: how much a logit there moves (largest absolute difference) when the same row is computed in a block,
            as verification does, instead of alone. A gap up to twice this is decided by rounding.
    """

    prompt: str
    position: int
    drafted: int | None
    target_only: int | None
    top2_gap: float
    rounding: float

    @property
    def explained_by_rounding(self) -> bool:
        return self.top2_gap <= 2 * self.rounding


@dataclass(frozen=True)
class Exactness:
    """Greedy token equality with target-only decoding.

    Attributes:
        applies: False for sampled runs: two exact samplers draw different tokens; their equality is one of
            distributions, which the test suite proves.
        tokens_different: positions that differ, everything after a first mismatch included.
    """

    applies: bool
    prompts_compared: int = 0
    prompts_equal: int = 0
    tokens_compared: int = 0
    tokens_different: int = 0
    mismatches: tuple[Mismatch, ...] = ()


@dataclass(frozen=True)
class Slot:
    """Acceptance at one slot of the block.

    Attributes:
        judged: blocks in which this slot's proposal was accepted or rejected, those before it being accepted.
        rate: accepted / judged: P(accepted | all before accepted); None when never judged.
        survival: share of all blocks in which this proposal and all before it were accepted.
        confidence: mean acceptance that the confidence head predicted for the judged proposals; None without the head.
    """

    slot: int
    judged: int
    accepted: int
    rate: float | None
    survival: float
    confidence: float | None


@dataclass(frozen=True)
class VerifyReport:
    """A verification run. Times are wall-clock means on this machine; a response's prefill counts in tokens/s.

    Attributes:
        accepted_length: mean tokens committed a draft/verify iteration, the correction or bonus token included.
        draft_ms: per iteration: the block, the sequential head and the update of the draft's context.
        verify_ms: per iteration: the target's pass over anchor and proposals, and the acceptance rule.
        target_only_ms: per token of target-only decoding, prefill excluded.
        tokens_per_second: with the draft; `tokens_per_second_target_only` without, measured alternately.
        speedup: their ratio.
    """

    draft: str
    target: str
    dtype: str
    device: str
    threads: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_new_tokens: int
    block_size: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    new_tokens_target_only: int
    finish_reasons: dict[str, int]
    iterations: int
    proposals: int
    proposals_accepted: int
    accepted_length: float | None
    slots: tuple[Slot, ...]
    draft_ms: float | None
    verify_ms: float | None
    target_only_ms: float | None
    tokens_per_second: float
    tokens_per_second_target_only: float
    speedup: float
    exactness: Exactness

    @property
    def exact(self) -> bool | None:
        """Every response token-equal (greedy); None when equality does not apply (sampled)."""
        if not self.exactness.applies:
            return None
        return self.exactness.prompts_equal == self.exactness.prompts_compared

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        result = asdict(self)
        result["exact"] = self.exact
        result["slots"] = [asdict(slot) for slot in self.slots]
        result["exactness"]["mismatches"] = [
            asdict(mismatch) | {"explained_by_rounding": mismatch.explained_by_rounding}
            for mismatch in self.exactness.mismatches
        ]
        return result

    def render(self) -> RenderableType:
        """For `rich.print`: a summary, a table by slot, and every mismatch."""
        parts: list[RenderableType] = [self._summary(), self._slot_table()]
        if self.exactness.mismatches:
            parts.append(self._mismatch_table())
        return Group(*parts)

    @property
    def rule(self) -> str:
        """How tokens were chosen, in words; one measurement is recorded for each."""
        if self.temperature == 0:
            return "greedy"
        kept = [f"top-k {self.top_k}"] if self.top_k else []
        kept += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([f"temperature {self.temperature:g}", *kept])

    def _summary(self) -> Table:
        table = Table(title=f"Verification: {self.rule}, {self.dtype} on {self.device}", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("same tokens as the target alone", self._exactness_text())
        table.add_row("accepted length (tokens an iteration)", _number(self.accepted_length, 2))
        table.add_row("iterations", str(self.iterations))
        table.add_row("proposals accepted / made", f"{self.proposals_accepted} / {self.proposals}")
        table.add_row("draft, verify (ms an iteration)", f"{_number(self.draft_ms, 1)}, {_number(self.verify_ms, 1)}")
        table.add_row("target alone (ms a token)", _number(self.target_only_ms, 1))
        table.add_row(
            "tokens/s with, without the draft",
            f"{self.tokens_per_second:.1f}, {self.tokens_per_second_target_only:.1f} ({self.speedup:.2f}x)",
        )
        table.add_row("prompts, new tokens", f"{self.prompts}, {self.new_tokens}")
        table.add_row("ended by", ", ".join(f"{reason} {count}" for reason, count in self.finish_reasons.items()))
        return table

    def _exactness_text(self) -> Text:
        found = self.exactness
        if not found.applies:
            return Text("does not apply: sampled")
        text = f"{found.prompts_equal} of {found.prompts_compared} prompts"
        if self.exact:
            return Text(text, style="green")
        by_rounding = sum(mismatch.explained_by_rounding for mismatch in found.mismatches)
        text += f" ({found.tokens_different} of {found.tokens_compared} tokens differ; {by_rounding} of "
        text += f"{len(found.mismatches)} first mismatches within rounding)"
        return Text(text, style="yellow" if by_rounding == len(found.mismatches) else "red")

    def _slot_table(self) -> Table:
        table = Table(title="Acceptance by slot")
        for heading in ("slot", "judged", "accepted", "accepted if reached", "prefix survives"):
            table.add_column(heading, justify="right")
        with_confidence = any(slot.confidence is not None for slot in self.slots)
        if with_confidence:
            table.add_column("confidence predicted", justify="right")
        for slot in self.slots:
            cells = [str(slot.slot), str(slot.judged), str(slot.accepted), _number(slot.rate, 3)]
            cells.append(_number(slot.survival, 3))
            table.add_row(*cells, *([_number(slot.confidence, 3)] if with_confidence else []))
        return table

    def _mismatch_table(self) -> Table:
        table = Table(title="First token that differs, by prompt")
        for heading in ("prompt", "position", "with draft", "target alone", "top-2 gap", "rounding", "explained"):
            table.add_column(heading, justify="right")
        for mismatch in self.exactness.mismatches:
            table.add_row(
                mismatch.prompt,
                str(mismatch.position),
                "ended" if mismatch.drafted is None else str(mismatch.drafted),
                "ended" if mismatch.target_only is None else str(mismatch.target_only),
                f"{mismatch.top2_gap:.2e}",
                f"{mismatch.rounding:.2e}",
                "yes" if mismatch.explained_by_rounding else "NO",
            )
        return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
