"""The messages format: JSON lines, one conversation (or prompt) a line.

    {"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

`messages` holds an optional system message, then user and assistant messages; a prompt ends with the user's. Optional
keys: `id` (unique; a digest of the messages where it is absent), `domain` (any word), `finish_reason` ("stop", or
"length" when the last reply was cut off), `supervise` ("all" replies are learned, or the "last" one only) and
`template_options` (passed to the chat template). Other keys are kept and mean nothing here.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from megatron_dspark.errors import DSparkError

ROLES = ("system", "user", "assistant")
FINISH_REASONS = ("stop", "length")
SUPERVISE = ("all", "last")


class Record(dict[str, Any]):
    """One conversation: a plain dict that also knows `where` it was read, so that a later error can name it."""

    where: str = ""
    line: int = 0


def read_messages(path: str | Path) -> list[Record]:
    """Read a JSON-lines file of conversations or prompts, one object a line; blank lines are skipped.

    A line without an `id` gets one from its messages' digest, so that it does not depend on the line's place.

    Raises:
        DSparkError: the file is missing or empty, a line is not what the format says, or an id occurs twice.
    """
    path = Path(path)
    with open_conversations(path) as file:
        lines = file.read().split(b"\n")
    records = [
        parse_line(line, f"{path} line {number}", number) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not records:
        raise without_conversations(path)
    refuse_repeated(path, ((record["id"], record.line) for record in records))
    return records


def without_conversations(path: Path) -> DSparkError:
    """The refusal of a file without a conversation."""
    return DSparkError(f"{path} holds no conversation; write one JSON object on each line")


@contextlib.contextmanager
def open_conversations(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of conversations for reading its bytes.

    Raises:
        DSparkError: it is missing or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise DSparkError(f"the conversations were expected at {path}, and there is no such file") from None
    except OSError as error:
        raise DSparkError(f"the conversations at {path} cannot be read ({error.strerror})") from None


def parse_line(line: bytes, where: str, number: int = 0) -> Record:
    """One line's record.

    Args:
        line: JSON.
        where: file and line, for errors about the record.
        number: the line's, from 1.

    Raises:
        DSparkError: the line is not what the format says.
    """
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DSparkError(f"{where} is not UTF-8 ({error.reason} at byte {error.start}); convert the file") from None
    if "\0" in text:
        raise DSparkError(f"{where} holds NUL bytes, as UTF-16 does, and not UTF-8 alone; convert the file")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DSparkError(f"{where} is not valid JSON ({error}); write one object on each line") from None
    except (RecursionError, ValueError) as error:
        raise DSparkError(f"{where} is JSON that cannot be read ({error}); write one object of messages") from None
    _refuse_half_characters(value, where)
    record = check_record(value, where)
    record.line = number
    return record


def refuse_repeated(path: Path, lines_of_ids: Iterable[tuple[str, int]]) -> None:
    """Refuse an id that two lines have.

    Args:
        path: their file.
        lines_of_ids: (id, number of its line) in order.
    """
    seen: dict[str, int] = {}
    for identifier, number in lines_of_ids:
        if identifier in seen:
            raise DSparkError(
                f"{path} has the id {identifier!r} on line {seen[identifier]} and again on line {number}; "
                "make the ids unique"
            )
        seen[identifier] = number


def check_record(value: Any, where: str) -> Record:
    """`value` as a `Record`; raises DSparkError, beginning with `where`, when it is not in the messages format."""
    if not isinstance(value, dict):
        raise DSparkError(f"{where} holds a {type(value).__name__}, expected an object with `messages`")
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DSparkError(f"{where} has no list of `messages`; give at least one user message")
    for index, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            found = message.get("role") if isinstance(message, dict) else message
            raise DSparkError(f"{where}, message {index}: role {found!r} is not one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise DSparkError(f"{where}, message {index}: content is {message.get('content')!r}, expected a string")
    if next((message["role"] for message in messages if message["role"] != "system"), None) != "user":
        raise DSparkError(f"{where} does not begin with a user message (after an optional system message)")
    for key, allowed in (("finish_reason", FINISH_REASONS), ("supervise", SUPERVISE)):
        if value.get(key, allowed[0]) not in allowed:
            raise DSparkError(f"{where}: {key} is {value[key]!r}, expected one of {', '.join(allowed)}")
    for key, kind in (("id", str), ("domain", str), ("template_options", dict)):
        if key in value and (not isinstance(value[key], kind) or (key == "id" and not value[key])):
            wanted = {"id": "text that is not empty", "domain": "text", "template_options": "an object"}[key]
            raise DSparkError(f"{where}: {key} is {value[key]!r}, expected {wanted}")
    record = Record(value)
    if "id" not in record:
        text = json.dumps(messages, sort_keys=True, ensure_ascii=False)
        record = Record({"id": hashlib.sha256(text.encode()).hexdigest()[:16], **value})
    record.where = where
    return record


def _refuse_half_characters(value: Any, where: str) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DSparkError(
            f"{where} has {ascii(text[error.start])[1:-1]}, half of a surrogate pair, which is no text; put the whole "
            "character there, or remove it"
        ) from None


def where_of(record: dict[str, Any]) -> str:
    """File and line of a record, or its id when it was not read from a file."""
    return getattr(record, "where", "") or f"record {record.get('id', '(no id)')!r}"
