"""Which conversations go to training and which are held out."""

import hashlib
import json
from collections import Counter
from typing import Any

from megatron_dspark.data.messages import Record, read_messages
from megatron_dspark.data.options import BUILT_IN_PROMPTS, DEFAULT_TRAIN_SAMPLES, PrepareOptions
from megatron_dspark.data.prompts import general_prompts
from megatron_dspark.errors import DSparkError

TRAIN, HELDOUT, GENERAL = "train.jsonl", "heldout.jsonl", "general_heldout.jsonl"


def prompt_sets(options: PrepareOptions) -> dict[str, list[Record]]:
    """Records of every file to write. Held-out ones first: what a time limit leaves out is training data."""
    if options.built_in:
        compose = BUILT_IN_PROMPTS[str(options.prompts)]
        heldout = compose(options.heldout_samples, "heldout", options.seed)
        train = compose(options.train_samples or DEFAULT_TRAIN_SAMPLES, "train", options.seed)
    else:
        heldout, train = _split_file(options)
    sets = {HELDOUT: heldout}
    if options.general_heldout_samples:
        sets[GENERAL] = general_prompts(options.general_heldout_samples, "heldout", options.seed)
    sets[TRAIN] = train
    extra: dict[str, Any] = {"template_options": options.template_options} if options.template_options else {}
    if options.supervise == "last":
        extra["supervise"] = "last"
    return {name: [_with(record, extra) for record in records] for name, records in sets.items()}


def _split_file(options: PrepareOptions) -> tuple[list[Record], list[Record]]:
    """Held-out and train records of a user's file; the split depends on ids and texts, not on the order of lines."""
    records = read_messages(options.prompts)
    if options.keep_responses:
        for record in records:
            if record["messages"][-1]["role"] != "assistant":
                raise DSparkError(f"{record.where} does not end with an assistant message, which keep_responses needs")
    else:
        records = [_without_last_reply(record) for record in records]
    # A prompt that occurs twice could end up on both sides, so only prompts that occur once are held out.
    occurrences = Counter(_prompt_text(record) for record in records)
    candidates = [record for record in records if occurrences[_prompt_text(record)] == 1]
    candidates.sort(key=lambda record: hashlib.sha256(record["id"].encode()).digest())
    wanted = options.heldout_samples
    if len(candidates) < wanted:
        raise DSparkError(
            f"heldout_samples is {wanted}, and {options.prompts} has {len(candidates)} prompts that occur once; "
            "ask for fewer"
        )
    chosen = {record["id"] for record in candidates[:wanted]}
    train = [record for record in records if record["id"] not in chosen]
    if len(train) < (options.train_samples or 1):
        raise DSparkError(
            f"train_samples is {options.train_samples or 'all'}, and {options.prompts} has {len(train)} conversations "
            f"besides the {wanted} held out; ask for fewer"
        )
    return [record for record in records if record["id"] in chosen], train[: options.train_samples]


def _without_last_reply(record: Record) -> Record:
    """The prompt whose last reply the target will write; earlier replies are not the target's and are not learned."""
    messages = record["messages"][:-1] if record["messages"][-1]["role"] == "assistant" else record["messages"]
    kept = {key: value for key, value in record.items() if key not in ("messages", "finish_reason")}
    if any(message["role"] == "assistant" for message in messages):
        kept["supervise"] = "last"
    return _with(record, {}, {**kept, "messages": messages})


def _prompt_text(record: Record) -> str:
    messages = record["messages"]
    return json.dumps(messages[:-1] if messages[-1]["role"] == "assistant" else messages, sort_keys=True)


def _with(record: dict[str, Any], extra: dict[str, Any], content: dict[str, Any] | None = None) -> Record:
    changed = Record({**(record if content is None else content), **extra})
    changed.where = getattr(record, "where", "")
    return changed
