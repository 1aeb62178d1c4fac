"""One request: draft a block, verify it in one target pass, commit what survives, roll the rest back.

State of a request and its rule when proposals are rejected:

| state | rule |
|---|---|
| token buffer | only committed tokens are ever appended |
| target KV cache | verified rows are written, then the rejected tail is dropped |
| draft context KV | grows by committed rows only |
| target features | the rows of rejected proposals are never copied out of the pass |
| random numbers | one stream a request; a block consumes the same count whatever is accepted |

Invariant between blocks: with n committed tokens, both caches hold rows 0 … n - 2, and the last token, the anchor, has
not been fed to either model.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_dspark.errors import DSparkError
from megatron_dspark.sampling import SamplingSettings, distribution, draw
from megatron_dspark.serving.acceptance import verify_greedy, verify_sampled
from megatron_dspark.serving.draft import DraftModel, Proposal
from megatron_dspark.serving.target import Target, TargetRows


class Uniforms(Protocol):
    """Where a request's random numbers come from (`sampling.UniformStream`, or a recorded list in tests)."""

    def take(self, count: int) -> list[float]: ...


@dataclass(frozen=True)
class BlockRecord:
    """What one draft/verify iteration did; kept for the report.

    Attributes:
        width: proposals verified.
        accepted: proposals that survived verification and belong to the response.
        judged: slots whose proposal was accepted or rejected; those behind a rejection or behind the end of the
            response were never decided.
        committed: accepted proposals plus the correction or bonus token. A block in which the response ends counts up
            to its end; one that only ran into `max_new_tokens` counts in full, since the draft earned it.
        confidence: the confidence head's logit of every slot; empty without the head.
        draft_seconds: drafting, the update of the draft's context included.
        verify_seconds: the target pass and the acceptance rule.
    """

    width: int
    accepted: int
    judged: int
    committed: int
    confidence: tuple[float, ...]
    draft_seconds: float
    verify_seconds: float


@dataclass
class Block:
    """One iteration in full: the record and the tensors it came from (for replay and inspection; not kept).

    Attributes:
        start: position of the anchor.
        target_logits: after the anchor and after each proposal, [width + 1, vocab_size].
        target_probabilities: p, FP64 [width + 1, vocab_size]; None when greedy. `draft_probabilities` is q.
        tokens: what the verification emitted: accepted proposals, then the correction or bonus token.
    """

    record: BlockRecord
    start: int
    anchor: int
    proposal: Proposal
    target_logits: torch.Tensor
    draft_probabilities: torch.Tensor | None
    target_probabilities: torch.Tensor | None
    tokens: list[int]


@dataclass
class Generation:
    """A finished response.

    Attributes:
        token_ids: the new tokens; a stop token, when one ended the response, is the last.
        finish_reason: "stop" (a stop token), "length" (max_new_tokens) or "context" (the target's positions ran out).
        prefill_seconds: the prompt's pass and the first token; with a draft, also its context of the prompt.
        decode_seconds: everything after the first token.
        blocks: one record a draft/verify iteration; empty without a draft.
    """

    token_ids: list[int]
    finish_reason: str
    prefill_seconds: float
    decode_seconds: float
    blocks: list[BlockRecord] = field(default_factory=list)


def check_compatible(target: Target, draft: DraftModel) -> None:
    """Refuse a draft that was made for another target. Raises DSparkError."""
    config = draft.config
    for what, ours, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.layers),
    ):
        if ours != theirs:
            raise DSparkError(
                f"the draft was made for a target with {what} {ours} and this target has {theirs}; give the target "
                "that the draft was trained with"
            )


class TokenBuffer:
    """The prompt and the committed response of one request, and when it ends.

    Attributes:
        tokens: prompt and response.
        finish_reason: None while the response goes on.
    """

    def __init__(self, target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        if not prompt_ids:
            raise DSparkError("the prompt has no tokens; give at least one")
        if max_new_tokens < 1:
            raise DSparkError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        room = target.max_positions - len(prompt_ids)
        if room < 1:
            raise DSparkError(
                f"the prompt has {len(prompt_ids)} tokens and the target {target.max_positions} positions; shorten "
                "the prompt"
            )
        self.tokens = list(prompt_ids)
        self.prompt_length = len(prompt_ids)
        self.limit = len(prompt_ids) + min(max_new_tokens, room)
        self.finish_reason: str | None = None
        self._limit_reason = "length" if max_new_tokens <= room else "context"
        self._stop_ids = target.stop_ids

    def until_stop(self, tokens: list[int]) -> list[int]:
        """`tokens` up to and including the first stop token."""
        for index, token in enumerate(tokens):
            if token in self._stop_ids:
                return tokens[: index + 1]
        return tokens

    def commit(self, tokens: list[int]) -> None:
        """Append verified tokens, up to a stop token or the limit."""
        kept = self.until_stop(tokens)[: self.limit - len(self.tokens)]
        self.tokens.extend(kept)
        if kept[-1] in self._stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = self._limit_reason


class Session:
    """One request with a draft. Call `prefill` once, then `step` until `finished`.

    Args:
        settings: the request's sampling rule, for the draft and the target alike.
        uniforms: the request's own random numbers, used in this order: the first token, then in every block one a
            proposal, one acceptance test a proposal, and one for the residual or bonus token. A greedy request uses
            none.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModel,
        prompt_ids: Sequence[int],
        *,
        settings: SamplingSettings,
        max_new_tokens: int,
        uniforms: Uniforms,
    ) -> None:
        check_compatible(target, draft)
        self.target, self.draft, self.settings, self.uniforms = target, draft, settings, uniforms
        self.buffer = TokenBuffer(target, prompt_ids, max_new_tokens)
        if target.tap_ids != draft.config.target_layer_ids:
            target.capture(draft.config.target_layer_ids)
        # The last block may verify past the response's end, never past the target's positions.
        capacity = min(self.buffer.limit + draft.config.block_size, target.max_positions)
        self.cache = target.new_cache(capacity)
        self.context = draft.new_context(capacity)

    @property
    def finished(self) -> bool:
        return self.buffer.finish_reason is not None

    @torch.inference_mode()
    def prefill(self) -> None:
        """Feed the prompt to both models and commit the first token."""
        rows = self.target.forward(self.buffer.tokens, self.cache, logit_rows=1)
        self.draft.extend_context(self.context, rows.features(len(self.buffer.tokens)))
        self.buffer.commit([_choose(rows.logits[0], self.settings, self.uniforms)])

    @torch.inference_mode()
    def step(self) -> Block:
        """Draft, verify, commit and roll back one block."""
        device, anchor, start = self.target.device, self.buffer.tokens[-1], len(self.buffer.tokens) - 1
        width = min(self.draft.config.block_size, self.target.max_positions - 1 - start)
        began = _now(device)
        proposal, draft_probabilities = self._draft(anchor, width)
        drafted = _now(device)
        rows = self.target.forward([anchor, *proposal.tokens], self.cache)
        accepted, following, target_probabilities = self._verify(rows, proposal.tokens, draft_probabilities)
        emitted = [*proposal.tokens[:accepted], following]
        self.buffer.commit(emitted)
        self.cache.crop(start + 1 + accepted)
        verified = _now(device)
        # The anchor and the accepted proposals are the rows that both fed the target and stayed.
        self.draft.extend_context(self.context, rows.features(accepted + 1))
        confidence = () if proposal.confidence is None else tuple(proposal.confidence.tolist())
        ended = _now(device)

        response = self.buffer.until_stop(emitted)
        survived = min(accepted, len(response))
        rejection_in_response = accepted < width and len(response) > accepted
        record = BlockRecord(
            width=width,
            accepted=survived,
            judged=survived + rejection_in_response,
            committed=len(response),
            confidence=confidence,
            draft_seconds=(drafted - began) + (ended - verified),
            verify_seconds=verified - drafted,
        )
        return Block(record, start, anchor, proposal, rows.logits, draft_probabilities, target_probabilities, emitted)

    def _draft(self, anchor: int, width: int) -> tuple[Proposal, torch.Tensor | None]:
        """Proposals, and the distributions q they were drawn from when the request samples."""
        if self.settings.greedy:
            return self.draft.propose(self.context, anchor, lambda logits: int(logits.argmax()), width), None
        numbers, kept = iter(self.uniforms.take(width)), []

        def choose(logits: torch.Tensor) -> int:
            kept.append(distribution(logits, self.settings))
            return draw(kept[-1], next(numbers))

        proposal = self.draft.propose(self.context, anchor, choose, width)
        return proposal, torch.stack(kept)

    def _verify(
        self, rows: TargetRows, proposals: list[int], draft_probabilities: torch.Tensor | None
    ) -> tuple[int, int, torch.Tensor | None]:
        if draft_probabilities is None:
            return *verify_greedy(rows.logits.argmax(-1).tolist(), proposals), None
        probabilities = distribution(rows.logits, self.settings)
        uniforms = self.uniforms.take(len(proposals) + 1)
        return *verify_sampled(probabilities, draft_probabilities, proposals, uniforms), probabilities


def generate(
    target: Target,
    draft: DraftModel,
    prompt_ids: Sequence[int],
    *,
    settings: SamplingSettings,
    max_new_tokens: int,
    uniforms: Uniforms,
    observe: Callable[[Session, Block], None] | None = None,
) -> Generation:
    """Answer a prompt with speculative decoding.

    Args:
        prompt_ids: the prompt's tokens.
        max_new_tokens: the longest response; the target's positions may end it earlier.
        uniforms: the request's random numbers (see `Session`).
        observe: called after every block.

    Raises:
        DSparkError: the draft was made for another target, or the prompt leaves no room for a response.
    """
    session = Session(target, draft, prompt_ids, settings=settings, max_new_tokens=max_new_tokens, uniforms=uniforms)
    began = _now(target.device)
    session.prefill()
    prefilled = _now(target.device)
    blocks = []
    while not session.finished:
        block = session.step()
        blocks.append(block.record)
        if observe is not None:
            observe(session, block)
    return _generation(session.buffer, began, prefilled, _now(target.device), blocks)


@torch.inference_mode()
def generate_target_only(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    settings: SamplingSettings,
    max_new_tokens: int,
    uniforms: Uniforms,
) -> Generation:
    """Answer a prompt with the target alone, one token a pass: what `generate` must not differ from."""
    buffer = TokenBuffer(target, prompt_ids, max_new_tokens)
    cache = target.new_cache(buffer.limit)
    began = _now(target.device)
    rows = target.forward(buffer.tokens, cache, logit_rows=1)
    buffer.commit([_choose(rows.logits[0], settings, uniforms)])
    prefilled = _now(target.device)
    while buffer.finish_reason is None:
        rows = target.forward(buffer.tokens[-1:], cache)
        buffer.commit([_choose(rows.logits[0], settings, uniforms)])
    return _generation(buffer, began, prefilled, _now(target.device), [])


def _choose(logits: torch.Tensor, settings: SamplingSettings, uniforms: Uniforms) -> int:
    if settings.greedy:
        return int(logits.argmax())
    return draw(distribution(logits, settings), uniforms.take(1)[0])


def _generation(
    buffer: TokenBuffer, began: float, prefilled: float, ended: float, blocks: list[BlockRecord]
) -> Generation:
    assert buffer.finish_reason is not None
    return Generation(
        buffer.tokens[buffer.prompt_length :], buffer.finish_reason, prefilled - began, ended - prefilled, blocks
    )


def _now(device: torch.device) -> float:
    """The clock, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
