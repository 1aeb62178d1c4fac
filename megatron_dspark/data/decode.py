"""Batched decoding with a KV cache whose rows end and begin independently.

The weights and the arithmetic are transformers' own model; two things are ours. `RowCache` lets every row of the batch
stand at its own position, so a finished row makes room for the next prompt at once. `grouped_attention` reads the
shared key/value heads in place instead of copying them once per query head (grouped queries: several times less memory
traffic, which is what a decoding step on a CPU consists of).

Shapes: n rows in use, T new tokens a row, L cached positions read, H query heads, G key/value heads, D head size.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.sampling import SamplingSettings, UniformStream, distribution, draw

_ATTENTION = "dspark_grouped"


@dataclass(frozen=True)
class Request:
    """One prompt to answer: `key` (names its random stream) and the prompt's token ids."""

    key: str
    prompt: list[int]


@dataclass(frozen=True)
class Finished:
    """One answer: position of its request, the tokens that the target emitted, whether the last one ended the turn."""

    index: int
    tokens: list[int]
    stopped: bool


@dataclass
class _Row:
    index: int
    tokens: list[int]
    length: int  # cached positions: everything but the newest token
    stream: UniformStream


class RowCache:
    """Keys and values of up to `rows` sequences: per layer [rows, G, capacity, D]. Passed as `past_key_values`."""

    def __init__(self, config: Any, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, capacity, head_dim)
        # Zeros, not uninitialised memory: a masked position has weight 0, and 0 × NaN would be NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.rows = slice(0, rows)
        self.start = 0
        self.positions: Tensor | None = None
        self.length = 0

    def write_span(self, rows: slice, start: int, length: int) -> None:
        """The next forward writes positions [start, start + length) of `rows`."""
        self.rows, self.start, self.positions, self.length = rows, start, None, start + length

    def write_one(self, positions: Tensor) -> None:
        """The next forward writes one token a row, row i at `positions[i]` ([n] int64)."""
        self.rows, self.positions, self.length = slice(0, len(positions)), positions, int(positions.max()) + 1

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [n, G, T, D] and return everything to attend to, [n, G, L, D]: the call that attention makes."""
        stored = self.keys[layer, self.rows], self.values[layer, self.rows]
        for cache, new in zip(stored, (keys, values), strict=True):
            if self.positions is None:
                cache[:, :, self.start : self.length] = new
            else:
                cache[torch.arange(len(new), device=new.device), :, self.positions] = new[:, :, 0]
        return stored[0][:, :, : self.length], stored[1][:, :, : self.length]

    def share_prefix(self, length: int) -> None:
        """Copy the first `length` positions of row 0 to every row."""
        for cache in (self.keys, self.values):
            cache[:, 1:, :, :length] = cache[:, :1, :, :length]

    def move(self, source: int, destination: int, start: int, stop: int) -> None:
        """Copy positions [start, stop) of one row over another's."""
        for cache in (self.keys, self.values):
            cache[:, destination, :, start:stop] = cache[:, source, :, start:stop]


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' interface: query [n, H, T, D], key and value [n, G, L, D], mask [n, 1, T, L] bool.

    The H / G heads that share a key/value head are laid side by side as queries of that head.

    Returns:
        [n, T, H, D], and no attention weights.
    """
    rows, heads, new, head_dim = query.shape
    groups = key.shape[1]
    if attention_mask is not None and new > 1:
        attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, groups, heads // groups * new, head_dim), key, value, attention_mask, scale=scaling
    )
    return output.reshape(rows, heads, new, head_dim).transpose(1, 2), None


class Decoder:
    """The target, ready to answer prompts."""

    def __init__(self, folder: str, device: str, dtype: str, threads: int) -> None:
        """Load the target.

        Args:
            folder: its Hugging Face folder (Llama or Qwen3, dense).
            device: "cpu", "cuda" or one CUDA device, as "cuda:1".
            dtype: "float32", "bfloat16" or "auto" (the dtype it is stored in).
            threads: CPU threads of one operation.
        """
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging

        torch.set_num_threads(threads)
        AttentionInterface.register(_ATTENTION, grouped_attention)
        had_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=_ATTENTION, local_files_only=True
            )
        finally:
            if had_bar:
                logging.enable_progress_bar()
        if any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or []):
            raise DSparkError(
                f"the target at {folder} has sliding-window layers, which generation does not support; "
                "prepare with responses of your own (keep_responses)"
            )
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self._step_seconds = 0.0

    @torch.inference_mode()
    def decode(
        self,
        requests: Sequence[Request],
        *,
        rows: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        sampling: SamplingSettings,
        seed: int,
        deadline: float = float("inf"),
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> Iterator[Finished]:
        """Answer `requests`, at most `rows` at a time, and yield each answer when it is complete.

        The answers are a function of the arguments and the loaded weights (on one kind of machine), and each one's
        random numbers of `seed` and its own key. Other neighbours in the batch change its logits by rounding only.

        Args:
            requests: prompts, started in this order.
            rows: rows of the batch.
            max_new_tokens: longest answer.
            stop_ids: tokens that end an answer; the answer includes it.
            sampling: temperature (0: greedy), top-k, top-p.
            seed: of the random numbers.
            deadline: `time.time()` after which nothing should be running: no prompt starts that, at the speed seen
                so far and at full length, would end later. The first batch always runs.
            on_tokens: called after every step with the number of tokens that it gave.
        """
        if not self._may_start(max_new_tokens, deadline):
            return
        rows = min(rows, len(requests))
        capacity = max(len(request.prompt) for request in requests) + max_new_tokens
        config = self.model.config
        cache = RowCache(config, rows, capacity, self.device, self.model.dtype)
        prefix = self._prefill_prefix(cache, requests)
        waiting, active = deque(range(len(requests))), []
        while waiting or active:
            room = rows - len(active) if self._may_start(max_new_tokens, deadline) else 0
            starting = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            if starting:
                fresh = [_Row(i, [], len(requests[i].prompt), UniformStream(seed, requests[i].key)) for i in starting]
                logits = self._prefill(cache, [requests[i].prompt for i in starting], prefix, len(active))
                self._append(fresh, logits, sampling, requests)
                active += fresh
                on_tokens(len(fresh))
            elif not active:
                return
            else:
                began = time.perf_counter()
                logits = self._step(cache, active)
                self._append(active, logits, sampling, requests)
                on_tokens(len(active))
                # A running mean: a busy neighbour on the machine shows within some ten steps.
                seconds = time.perf_counter() - began
                self._step_seconds += (seconds - self._step_seconds) * (0.1 if self._step_seconds else 1.0)
            for slot in reversed(range(len(active))):
                row = active[slot]
                stopped = row.tokens[-1] in stop_ids
                if stopped or len(row.tokens) == max_new_tokens:
                    yield Finished(row.index, row.tokens, stopped)
                    last = active.pop()
                    if last is not row:
                        cache.move(len(active), slot, prefix, last.length)
                        active[slot] = last

    def _may_start(self, max_new_tokens: int, deadline: float) -> bool:
        return time.time() + self._step_seconds * max_new_tokens <= deadline or self._step_seconds == 0.0

    def _prefill_prefix(self, cache: RowCache, requests: Sequence[Request]) -> int:
        """Compute what all prompts begin with (system prompt, header) once; returns its length, which may be 0."""
        first = min((request.prompt for request in requests), key=len)
        # Every prompt keeps at least one token of its own, whose output gives the first new token.
        length = len(first) - 1
        for request in requests:
            length = next((i for i in range(length) if request.prompt[i] != first[i]), length)
        if length > 0:
            cache.write_span(slice(0, 1), 0, length)
            self._forward(cache, torch.tensor([first[:length]]), torch.arange(length)[None])
            cache.share_prefix(length)
        return length

    def _prefill(self, cache: RowCache, prompts: list[list[int]], prefix: int, slot: int) -> Tensor:
        """Compute `prompts` after their common prefix, into rows from `slot` on; logits of each last token, [n, V]."""
        tails = [torch.tensor(prompt[prefix:]) for prompt in prompts]
        # Padding stands after a prompt's end: causality hides it from the prompt, decoding overwrites it.
        ids = torch.nn.utils.rnn.pad_sequence(tails, batch_first=True)
        cache.write_span(slice(slot, slot + len(prompts)), prefix, ids.shape[1])
        positions = torch.arange(prefix, prefix + ids.shape[1]).expand(len(prompts), -1)
        hidden = self._forward(cache, ids, positions)
        last = torch.tensor([len(tail) - 1 for tail in tails], device=self.device)
        return self._logits(hidden[torch.arange(len(prompts), device=self.device), last])

    def _step(self, cache: RowCache, active: list[_Row]) -> Tensor:
        """One more token for every row: logits [n, V]."""
        positions = torch.tensor([row.length for row in active])
        cache.write_one(positions.to(self.device))
        hidden = self._forward(cache, torch.tensor([[row.tokens[-1]] for row in active]), positions[:, None])
        for row in active:
            row.length += 1
        return self._logits(hidden[:, 0])

    def _forward(self, cache: RowCache, ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [n, T, hidden] of ids [n, T] at positions [n, T], reading and extending the cache."""
        ids, positions = ids.to(self.device), positions.to(self.device)
        visible = torch.arange(cache.length, device=self.device) <= positions[:, None, :, None]
        output = self.model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=visible, past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden).float()

    def _append(
        self, rows: list[_Row], logits: Tensor, sampling: SamplingSettings, requests: Sequence[Request]
    ) -> None:
        """Choose the next token of every row. Raises DSparkError for logits that are not numbers."""
        largest, chosen = logits.max(dim=-1)
        for row, value in zip(rows, largest.tolist(), strict=True):
            if not value < float("inf"):
                raise DSparkError(
                    f"the target gave a logit of {value} for prompt {requests[row.index].key!r}; check its weights, "
                    "or generate in float32"
                )
        if sampling.greedy:
            tokens = chosen.tolist()
        else:
            probabilities = distribution(logits, sampling)
            tokens = [draw(line, row.stream.take(1)[0]) for row, line in zip(rows, probabilities, strict=True)]
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)
