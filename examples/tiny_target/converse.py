"""The tiny target answers: greedy generation, conversations for the data files, and how good the answers are."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.tiny_target.recipe_text import Request, draw_answers, draw_request, entropy, is_possible
from megatron_dspark.data.chat import encode_messages
from megatron_dspark.errors import DSparkError

MAX_NEW_TOKENS = 240
SMALLEST_GAP = 1e-3
"""Kept answers have this distance, in logits, between the first and the second choice of every token, so that
another processor's rounding (about 1e-5) generates the same tokens."""

console = Console(stderr=True)


def progress() -> Progress:
    """A bar with elapsed and remaining time in a terminal, nothing in a pipe."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@torch.no_grad()
def answer_loss(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> dict[str, float]:
    """Loss on the assistant's tokens of `count` fresh conversations, beside the least that is possible.

    Returns:
        `loss` and `floor` in nats a token; the floor is the grammar's own freedom, which no model can predict.
    """
    rng = random.Random(f"evaluation {seed}")
    total = free = tokens = 0.0
    for _ in range(count):
        request = draw_request(rng)
        conversation = {"id": "", "messages": draw_answers(rng, request)}
        sample = encode_messages(tokenizer, conversation, model.config.max_position_embeddings)
        logits = model(sample.input_ids[None]).logits[0, :-1]
        labels, answered = sample.input_ids[1:], sample.loss_mask[1:]
        total += torch.nn.functional.cross_entropy(logits[answered], labels[answered], reduction="sum").item()
        free += sum(entropy(lines) for lines in request.answers)
        tokens += answered.sum().item()
    return {"loss": total / tokens, "floor": free / tokens}


@torch.no_grad()
def generate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, histories: list[list[dict[str, str]]]
) -> list[tuple[list[int], float]]:
    """Answer every conversation greedily, in one batch padded on the left.

    Returns:
        Per conversation the token ids (with `<|im_end|>`, unless `MAX_NEW_TOKENS` came first) and the smallest
        distance in logits between the first and the second choice of any of them.
    """
    rows = [tokenizer.apply_chat_template(h, add_generation_prompt=True, return_dict=False) for h in histories]
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    output = model.generate(
        input_ids=ids,
        attention_mask=(torch.arange(longest) >= longest - lengths[:, None]).long(),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best_two = torch.stack(output.logits, dim=1).topk(2, dim=-1).values  # [conversations, new tokens, 2]
    gaps = best_two[..., 0] - best_two[..., 1]
    answers = []
    for row, gap in zip(output.sequences[:, longest:].tolist(), gaps, strict=True):
        length = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        answers.append((row[:length], gap[:length].min().item()))
    return answers


def converse(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, held_out: bool, seed: int
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Hold `count` different conversations in which the model answers.

    A conversation is left out when a token was so close a call that rounding could change it, and when its answer
    does not read back from text as the same tokens.

    Returns:
        The records to write, and per conversation whether every answer is one that the grammar could have given.

    Raises:
        DSparkError: hardly any answer can be kept, as it happens with a model that has learned nothing.
    """
    name = "heldout" if held_out else "train"
    rng = random.Random(f"{name} {seed}")
    records: list[dict[str, Any]] = []
    coherent: list[bool] = []
    seen: set[tuple[str, ...]] = set()
    with progress() as bar:
        task = bar.add_task(f"{name} conversations", total=count, note="")
        while len(records) < count:
            if len(seen) > 64 + 10 * count:
                raise DSparkError(
                    f"only {len(records)} of {len(seen)} answers read back as the tokens they were made of, by clear "
                    f"choices, and {count} are wanted; train for more steps"
                )
            requests: list[Request] = []
            while len(requests) < min(32, 2 * count):
                request = draw_request(rng, held_out)
                if tuple(request.questions) not in seen:
                    seen.add(tuple(request.questions))
                    requests.append(request)
            for messages, kept, possible, reason in _answer_all(model, tokenizer, requests):
                if kept and len(records) < count:
                    record = {"id": f"{name}-{len(records):04d}", "messages": messages, "domain": "recipes"}
                    records.append({**record, "finish_reason": reason})
                    coherent.append(possible)
            bar.update(task, completed=len(records))
    return records, coherent


def _answer_all(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, requests: list[Request]
) -> Iterator[tuple[list[dict[str, str]], bool, bool, str]]:
    """Per request: the messages, whether to keep them, whether they are coherent, and how the last turn ended."""
    histories: list[list[dict[str, str]]] = [[] for _ in requests]
    kept, coherent, reasons = [True] * len(requests), [True] * len(requests), ["stop"] * len(requests)
    for turn in range(2):
        active = [i for i, request in enumerate(requests) if len(request.questions) > turn]
        if not active:
            continue
        for i in active:
            histories[i].append({"role": "user", "content": requests[i].questions[turn]})
        for i, (ids, gap) in zip(active, generate(model, tokenizer, [histories[i] for i in active]), strict=True):
            ended = ids[-1] == tokenizer.eos_token_id
            text = tokenizer.decode(ids[:-1] if ended else ids)
            histories[i].append({"role": "assistant", "content": text})
            same_tokens = tokenizer.encode(text, add_special_tokens=False) == (ids[:-1] if ended else ids)
            kept[i] &= gap >= SMALLEST_GAP and same_tokens
            coherent[i] &= ended and is_possible(requests[i].answers[turn], text)
            reasons[i] = "stop" if ended else "length"
    yield from zip(histories, kept, coherent, reasons, strict=True)
