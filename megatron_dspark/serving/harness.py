"""Measure an exported draft against its target: is the output the same, how much is accepted, how fast is it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.progress import track

from megatron_dspark.errors import DSparkError
from megatron_dspark.sampling import SamplingSettings, UniformStream
from megatron_dspark.serving.draft import DraftModel
from megatron_dspark.serving.precision import parse_device, parse_dtype
from megatron_dspark.serving.report import Exactness, Mismatch, Slot, VerifyReport
from megatron_dspark.serving.target import Target, load_tokenizer
from megatron_dspark.serving.verify import BlockRecord, Generation, check_compatible, generate, generate_target_only

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Prompt:
    """One request: its name and its tokens, chat template applied."""

    name: str
    ids: list[int]


def verify_drafter(
    draft_folder: str | Path,
    target_folder: str | Path,
    prompts: Sequence[dict[str, Any]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    progress: bool = True,
) -> VerifyReport:
    """Answer every prompt with and without the draft and compare.

    Both ways run prompt by prompt in turn, the first of each pair alternating, so that a busy machine slows both.

    Args:
        draft_folder: an exported draft (model.safetensors and config.json).
        target_folder: the target's Hugging Face folder, tokenizer and chat template included.
        prompts: {"id": ..., "messages": [...]} each, the last message a user's. Ids are unique: a prompt's random
            numbers depend on (seed, id) alone. `template_options`, where there are any, go to the chat template, as
            they do in training.
        temperature: 0 is greedy, and only then is token equality checked.
        dtype: "float32" (block and single-row arithmetic agree up to near ties), "bfloat16" or "float64" (in which
            transformers still computes the target's norms and rotary angles in FP32).
        threads: PyTorch's CPU threads during the run; None leaves them.
        progress: show a progress bar when stderr is a terminal.

    Raises:
        DSparkError: an input is missing, damaged or inconsistent; raised before anything is generated.
    """
    settings = SamplingSettings(temperature, top_k, top_p)
    if max_new_tokens < 1:
        raise DSparkError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if threads is not None and threads < 1:
        raise DSparkError(f"threads is {threads}; it must be at least 1")
    torch_dtype, torch_device = parse_dtype(dtype), parse_device(device)
    _check_prompts(prompts)
    draft = DraftModel.load(draft_folder, torch_dtype, torch_device)
    tokenizer = load_tokenizer(target_folder)
    target = Target.load(target_folder, torch_dtype, torch_device)
    check_compatible(target, draft)
    tokenized = _tokenize(prompts, tokenizer, target)

    with _threads(threads):
        runs = _run(target, draft, tokenized, settings, max_new_tokens, seed, progress)
        exactness = Exactness(applies=False)
        if settings.greedy:
            exactness = _compare(target, tokenized, runs, draft.config.block_size)
        used_threads = torch.get_num_threads()
    return _report(
        runs,
        draft=str(draft_folder),
        target=str(target_folder),
        dtype=dtype,
        device=device,
        threads=used_threads,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        block_size=draft.config.block_size,
        prompts=len(tokenized),
        prompt_tokens=sum(len(prompt.ids) for prompt in tokenized),
        exactness=exactness,
    )


def _check_prompts(prompts: Sequence[dict[str, Any]]) -> None:
    if not prompts:
        raise DSparkError("there are no prompts; give at least one")
    seen: set[str] = set()
    for number, prompt in enumerate(prompts, 1):
        name, messages = prompt.get("id"), prompt.get("messages")
        if not isinstance(name, str) or not name:
            raise DSparkError(f"prompt {number} has the id {name!r}; give every prompt a text id")
        if name in seen:
            raise DSparkError(f"two prompts have the id {name!r}; ids must be unique, random numbers depend on them")
        seen.add(name)
        if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
            raise DSparkError(
                f"prompt {name!r} has no list of messages with the texts 'role' and 'content'; give at least a user's"
            )
        if not isinstance(prompt.get("template_options", {}), dict):
            raise DSparkError(
                f"prompt {name!r} has the template_options {prompt['template_options']!r}; give an object of the chat "
                "template's options"
            )
        if messages[-1].get("role") != "user":
            raise DSparkError(
                f"prompt {name!r} ends with the role {messages[-1].get('role')!r}; a prompt ends with a user's message"
            )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _tokenize(prompts: Sequence[dict[str, Any]], tokenizer: Any, target: Target) -> list[Prompt]:
    tokenized = []
    for prompt in prompts:
        try:
            ids = tokenizer.apply_chat_template(
                prompt["messages"],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **prompt.get("template_options", {}),
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise DSparkError(
                f"the target's chat template refuses the messages of prompt {prompt['id']!r} ({error}); correct them"
            ) from None
        if not ids:
            raise DSparkError(f"prompt {prompt['id']!r} has no tokens; the chat template left nothing of it")
        if len(ids) >= target.max_positions:
            raise DSparkError(
                f"prompt {prompt['id']!r} has {len(ids)} tokens and the target {target.max_positions} positions; "
                "shorten it"
            )
        if max(ids) >= target.vocab_size:
            raise DSparkError(
                f"the tokenizer gave token {max(ids)} for prompt {prompt['id']!r} and the target's vocabulary has "
                f"{target.vocab_size} tokens; give the target's own tokenizer"
            )
        tokenized.append(Prompt(prompt["id"], list(ids)))
    return tokenized


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Pair:
    """One prompt answered both ways."""

    drafted: Generation
    alone: Generation


def _run(
    target: Target,
    draft: DraftModel,
    prompts: list[Prompt],
    settings: SamplingSettings,
    max_new_tokens: int,
    seed: int,
    progress: bool,
) -> list[_Pair]:
    def drafted(prompt: Prompt, limit: int) -> Generation:
        uniforms = UniformStream(seed, prompt.name)
        return generate(target, draft, prompt.ids, settings=settings, max_new_tokens=limit, uniforms=uniforms)

    def alone(prompt: Prompt, limit: int) -> Generation:
        uniforms = UniformStream(seed, prompt.name)
        return generate_target_only(target, prompt.ids, settings=settings, max_new_tokens=limit, uniforms=uniforms)

    warm_up = min(_WARM_UP_TOKENS, max_new_tokens)
    drafted(prompts[0], warm_up)
    alone(prompts[0], warm_up)
    pairs = []
    console = Console(stderr=True)
    shown = progress and console.is_terminal
    for index, prompt in enumerate(track(prompts, "verifying", console=console, disable=not shown)):
        if index % 2:
            with_draft = drafted(prompt, max_new_tokens)
            pairs.append(_Pair(with_draft, alone(prompt, max_new_tokens)))
        else:
            without = alone(prompt, max_new_tokens)
            pairs.append(_Pair(drafted(prompt, max_new_tokens), without))
    return pairs


def _compare(target: Target, prompts: list[Prompt], pairs: list[_Pair], block_size: int) -> Exactness:
    """Token equality, prompt by prompt."""
    compared = different = 0
    mismatches = []
    for prompt, pair in zip(prompts, pairs, strict=True):
        ours, theirs = pair.drafted.token_ids, pair.alone.token_ids
        longest, shortest = max(len(ours), len(theirs)), min(len(ours), len(theirs))
        compared += longest
        if ours == theirs:
            continue
        differing = [at for at in range(shortest) if ours[at] != theirs[at]]
        different += len(differing) + longest - shortest
        mismatches.append(_explain(target, prompt, ours, theirs, (differing or [shortest])[0], block_size))
    return Exactness(
        applies=True,
        prompts_compared=len(pairs),
        prompts_equal=len(pairs) - len(mismatches),
        tokens_compared=compared,
        tokens_different=different,
        mismatches=tuple(mismatches),
    )


@torch.inference_mode()
def _explain(
    target: Target, prompt: Prompt, ours: list[int], theirs: list[int], position: int, block_size: int
) -> Mismatch:
    """Decode again up to the mismatch, row by row, then the last rows as a block: how near was it, how far apart?"""
    common = theirs[:position]
    cache = target.new_cache(len(prompt.ids) + len(common) + 1)
    logits = target.forward(prompt.ids, cache, logit_rows=1).logits[0]
    for token in common:
        logits = target.forward([token], cache).logits[0]
    best, second = logits.double().topk(2).values.tolist()
    rows = min(block_size + 1, cache.length)
    cache.crop(cache.length - rows)
    block = target.forward([*prompt.ids, *common][-rows:], cache, logit_rows=1).logits[0]
    return Mismatch(
        prompt=prompt.name,
        position=position,
        drafted=ours[position] if position < len(ours) else None,
        target_only=theirs[position] if position < len(theirs) else None,
        top2_gap=best - second,
        rounding=float((block - logits).abs().max()),
    )


def _report(pairs: list[_Pair], *, block_size: int, **described: Any) -> VerifyReport:
    """Add up what the runs recorded."""
    blocks = [block for pair in pairs for block in pair.drafted.blocks]
    new = sum(len(pair.drafted.token_ids) for pair in pairs)
    new_alone = sum(len(pair.alone.token_ids) for pair in pairs)
    speed = new / sum(pair.drafted.prefill_seconds + pair.drafted.decode_seconds for pair in pairs)
    speed_alone = new_alone / sum(pair.alone.prefill_seconds + pair.alone.decode_seconds for pair in pairs)
    decoded_alone = new_alone - len(pairs)
    return VerifyReport(
        **described,
        block_size=block_size,
        new_tokens=new,
        new_tokens_target_only=new_alone,
        finish_reasons=dict(Counter(pair.drafted.finish_reason for pair in pairs)),
        iterations=len(blocks),
        proposals=sum(block.width for block in blocks),
        proposals_accepted=sum(block.accepted for block in blocks),
        accepted_length=_mean([block.committed for block in blocks]),
        slots=tuple(_slot(blocks, slot) for slot in range(block_size)),
        draft_ms=_mean([1000 * block.draft_seconds for block in blocks]),
        verify_ms=_mean([1000 * block.verify_seconds for block in blocks]),
        target_only_ms=(
            1000 * sum(pair.alone.decode_seconds for pair in pairs) / decoded_alone if decoded_alone else None
        ),
        tokens_per_second=speed,
        tokens_per_second_target_only=speed_alone,
        speedup=speed / speed_alone,
    )


def _slot(blocks: list[BlockRecord], slot: int) -> Slot:
    judged = [block for block in blocks if block.judged > slot]
    accepted = sum(block.accepted > slot for block in judged)
    confidences = [block.confidence[slot] for block in judged if block.confidence]
    return Slot(
        slot=slot,
        judged=len(judged),
        accepted=accepted,
        rate=accepted / len(judged) if judged else None,
        survival=accepted / len(blocks) if blocks else 0.0,
        confidence=float(torch.tensor(confidences).sigmoid().mean()) if confidences else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
