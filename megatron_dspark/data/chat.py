"""Conversations as the model sees them: token ids and a loss mask.

The mask is on for exactly the tokens that the target itself emits: the assistant's content and the token that closes
its turn; not the header that the generation prompt supplies, not the newline after the closing token. What counts as
the header is read from the chat template itself: the ids of a sample up to a reply are the ids that a serving engine
feeds the target when it asks for that reply.
"""

import bisect
import functools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from megatron_dspark.data.messages import where_of
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import require_folder

_GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
_PROBE = "zzyzx"


@dataclass(frozen=True)
class ChatSample:
    """One conversation as the model sees it.

    Attributes:
        sample_id: the record's id; the keys of every random draw about this sample.
        input_ids: [S] int64.
        loss_mask: [S] bool, True where the target emitted the token.
    """

    sample_id: str
    input_ids: Tensor
    loss_mask: Tensor


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a target's folder, with its chat template.

    Raises:
        DSparkError: no such folder, no tokenizer in it that transformers can load, or no chat template.
    """
    from transformers import AutoTokenizer

    require_folder(folder, "the target folder", "name a Hugging Face folder on this machine")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        encodes = bool(tokenizer("a", add_special_tokens=False)["input_ids"])
    except Exception as error:  # transformers raises many kinds, for many reasons; each means the same to the user
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DSparkError(
            f"{folder} holds no tokenizer that transformers can load ({reason:.200}); "
            "copy the target's tokenizer files into it"
        ) from None
    if not encodes:
        raise DSparkError(f"{folder} holds no tokenizer (an empty one was loaded); copy the target's tokenizer into it")
    if not tokenizer.chat_template:
        raise DSparkError(
            f"the tokenizer in {folder} has no chat template; add the target's chat_template.jinja to the folder"
        )
    return tokenizer


def encode_prompt(tokenizer: Any, record: dict[str, Any]) -> list[int]:
    """Ids that the target is fed to answer a record whose last message is the user's (generation prompt included).

    Raises:
        DSparkError: the last message is the assistant's, or the chat template refuses the conversation.
    """
    if record["messages"][-1]["role"] == "assistant":
        raise DSparkError(f"{where_of(record)} ends with an assistant message; a prompt ends with the user's")
    return _tokenise(tokenizer, _render(tokenizer, record, record["messages"], prompt=True))


def encode_messages(tokenizer: Any, record: dict[str, Any], max_length: int) -> ChatSample:
    """Apply the chat template and mark the tokens that the target emitted.

    Args:
        tokenizer: the target's, with a chat template, with or without `{% generation %}` tags.
        record: a conversation in the messages format with at least one assistant message. Optional keys:
            `finish_reason` "length" says that the last reply was cut off, so its closing token was not emitted;
            `supervise` "last" masks every reply but the last; `template_options` go to the chat template.
        max_length: longer conversations are cut at the end, in tokens.

    Raises:
        DSparkError: names the record's file and line: the template refuses the conversation or rewrites earlier
            turns, or the mask is all zeros (also when the cut leaves no reply) or all ones.
    """
    if max_length < 2:
        raise DSparkError(f"max_length is {max_length}; a sample needs at least 2 tokens")
    where, messages = where_of(record), record["messages"]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DSparkError(f"{where} has no assistant message, so nothing to learn from; give complete conversations")
    if record.get("supervise") == "last":
        turns = turns[-1:]
    closing = end_of_turn_token(tokenizer, record)
    if _GENERATION_TAG.search(tokenizer.get_chat_template()):
        ids, spans = _spans_by_tags(tokenizer, record, turns, closing)
    else:
        ids, spans = _spans_by_prefix(tokenizer, record, turns)
    loss_mask = torch.zeros(len(ids), dtype=torch.bool)
    for turn, (start, stop) in zip(turns, spans, strict=True):
        closings = [position for position in range(start, stop) if ids[position] == closing]
        if len(closings) != 1:
            raise DSparkError(
                f"{where}, message {turn + 1}: the reply holds the end-of-turn token "
                f"{tokenizer.convert_ids_to_tokens(closing)!r} {len(closings)} times, expected once, at its end; "
                "take it out of the content"
            )
        emitted = closings[0] if turn == turns[-1] and record.get("finish_reason") == "length" else closings[0] + 1
        loss_mask[start:emitted] = True
    sample = ChatSample(record["id"], torch.tensor(ids[:max_length], dtype=torch.int64), loss_mask[:max_length])
    _validate(sample, len(ids), where)
    return sample


def end_of_turn_token(tokenizer: Any, record: dict[str, Any] | None = None) -> int:
    """Id of the special token with which the chat template closes an assistant's turn.

    Args:
        tokenizer: the target's.
        record: a record whose `template_options` apply.

    Raises:
        DSparkError: the template closes the turn with ordinary text or not at all.
    """
    options = (record or {}).get("template_options", {})
    with _refusals_named(record or {}):
        return _end_of_turn(tokenizer, str(tokenizer.chat_template), json.dumps(options, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _end_of_turn(tokenizer: Any, template: str, options: str) -> int:
    """The same, worked out once: a corpus asks it for every line. `template` tells changes of the tokenizer's apart."""
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
    text = tokenizer.apply_chat_template(probe, tokenize=False, **json.loads(options))
    special = _special_ids(tokenizer)
    for index in _tokenise(tokenizer, text.rpartition(_PROBE)[2]):
        if index in special:
            return index
    raise DSparkError(
        "the target's chat template does not close the assistant's turn with a special token, so the end of a reply "
        "cannot be learned; add the end-of-turn token to the template"
    )


def _spans_by_prefix(
    tokenizer: Any, record: dict[str, Any], turns: list[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and, per reply, [first token after its generation prompt, end of its turn)."""
    messages = record["messages"]
    whole = _render(tokenizer, record, messages, prompt=False)
    edges = []
    for turn in turns:
        before = _render(tokenizer, record, messages[:turn], prompt=True)
        through = _render(tokenizer, record, messages[: turn + 1], prompt=False)
        if not (whole.startswith(before) and whole.startswith(through) and len(through) >= len(before)):
            raise DSparkError(
                f"{where_of(record)}, message {turn + 1}: the chat template writes this reply differently once the "
                'conversation goes on, so its tokens are not those that the target emitted; add "supervise": "last" '
                "to the record and give one record per reply"
            )
        edges += [len(before), len(through)]
    ids, cuts = _tokenise_at(tokenizer, whole, edges, where_of(record))
    return ids, list(zip(cuts[::2], cuts[1::2], strict=True))


def _spans_by_tags(
    tokenizer: Any, record: dict[str, Any], turns: list[int], closing: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """The same from the template's own `{% generation %}` tags, which also hold where earlier turns are rewritten."""
    messages = record["messages"]
    with _refusals_named(record):
        encoded = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **record.get("template_options", {}),
        )
    ids, marks = encoded["input_ids"], [0, *encoded["assistant_masks"], 0]
    starts = [index for index in range(len(ids)) if marks[index + 1] and not marks[index]]
    stops = [index + 1 for index in range(len(ids)) if marks[index + 1] and not marks[index + 2]]
    replies = sum(message["role"] == "assistant" for message in messages)
    if len(starts) != replies:
        raise DSparkError(
            f"{where_of(record)}: the chat template's generation tags mark {len(starts)} replies and the conversation "
            f"has {replies}; correct the template"
        )
    # Some templates end the tag before the closing token.
    stops = [
        stop + (ids[stop : stop + 1] == [closing] and closing not in ids[start:stop])
        for start, stop in zip(starts, stops, strict=True)
    ]
    spans = list(zip(starts, stops, strict=True))[-len(turns) :]
    # Where the generation prompt can be rendered, tokens that it supplies are not emitted, whatever the tag says.
    given = _tokenise(tokenizer, _render(tokenizer, record, messages[: turns[-1]], prompt=True))
    if ids[: len(given)] == given:
        spans[-1] = (max(spans[-1][0], len(given)), spans[-1][1])
    return ids, spans


def _tokenise_at(tokenizer: Any, text: str, edges: Iterable[int], where: str) -> tuple[list[int], list[int]]:
    """Ids of `text`, with a token boundary at every edge (increasing character positions), and those boundaries."""
    edges = list(edges)
    ids, restarts = _tokenise_with_restarts(tokenizer, text)
    cuts = []
    for edge in edges:
        # What a server would be fed of the text up to the edge, from the last restart on.
        known, start = _last_restart(restarts, edge)
        before = _tokenise(tokenizer, text[start:edge])
        if ids[known : known + len(before)] != before:
            break
        cuts.append(known + len(before))
    else:
        return ids, cuts
    # A token would straddle an edge (say, a header's newline and a reply that begins with one). The target was fed
    # the header's own tokens, so the pieces are tokenised one by one, if this tokenizer's pieces join to the text.
    pieces, cuts, start = [], [], 0
    for edge in [*edges, len(text)]:
        pieces += _tokenise(tokenizer, text[start:edge])
        cuts.append(len(pieces))
        start = edge
    if tokenizer.decode(pieces) != tokenizer.decode(ids):
        raise DSparkError(
            f"{where}: the tokenizer joins the start of a reply with the text before it; begin the reply with a letter"
        )
    return pieces, cuts[:-1]


def _tokenise_with_restarts(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Ids of `text`, and where tokenisation restarts: (token, first character, end) of every special token.

    A special token and the text after it are tokenised by themselves, so what comes before need not be tokenised again
    for every prefix: a long conversation costs what its length is, not the square of its turns.
    """
    if not tokenizer.is_fast:
        return _tokenise(tokenizer, text), []
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, special = encoded["input_ids"], _special_ids(tokenizer)
    return ids, [(n, *encoded["offset_mapping"][n]) for n, token in enumerate(ids) if token in special]


def _last_restart(restarts: list[tuple[int, int, int]], edge: int) -> tuple[int, int]:
    """(token, first character) of the last restart that is whole before `edge`; the text's start without one."""
    place = bisect.bisect_right(restarts, edge, key=lambda restart: restart[2])
    return restarts[place - 1][:2] if place else (0, 0)


@functools.lru_cache(maxsize=4)
def _special_ids(tokenizer: Any) -> set[int]:
    marked = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def _render(tokenizer: Any, record: dict[str, Any], messages: list[dict[str, str]], *, prompt: bool) -> str:
    with _refusals_named(record):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **record.get("template_options", {})
        )


@contextmanager
def _refusals_named(record: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (TemplateError, TypeError) as error:
        raise DSparkError(f"{where_of(record)}: the target's chat template refuses it ({error})") from None


def _tokenise(tokenizer: Any, text: str) -> list[int]:
    # The template has written every special token that it wants.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _validate(sample: ChatSample, whole_length: int, where: str) -> None:
    length = len(sample.input_ids)
    if not sample.loss_mask.any():
        if whole_length == length:
            raise DSparkError(f"{where}: no token is left to learn from, because its reply is empty; drop the line")
        raise DSparkError(
            f"{where}: no token is left to learn from, because only its first {length} tokens are kept (max_length, or "
            "the positions that the target has) and no reply begins before; raise max_length, or drop the line"
        )
    if sample.loss_mask.all():
        raise DSparkError(
            f"{where}: all {length} tokens count as the assistant's, so there is no prompt; check the chat template"
        )
