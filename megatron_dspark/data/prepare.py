"""From a target and prompts to training data: what `megatron-dspark prepare` does.

Writes `train.jsonl`, `heldout.jsonl`, on request `general_heldout.jsonl`, and last of all `prepare.json`, which says
how they were made. Until that file exists the job is unfinished and the same call continues it.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megatron_dspark.data.chat import encode_messages, encode_prompt, load_tokenizer
from megatron_dspark.data.generate import generate_responses
from megatron_dspark.data.messages import Record, read_messages
from megatron_dspark.data.options import SMOLLM2, PrepareOptions
from megatron_dspark.data.split import HELDOUT, TRAIN, prompt_sets
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, sha256, write_json, write_json_lines
from megatron_dspark.targets.folder import read_target_config
from megatron_dspark.targets.smollm2 import SMOLLM2_MASK_TOKEN_ID, convert_smollm2

__all__ = ["PrepareOptions", "PrepareReport", "prepare"]

_REPORT, _STARTED, _RESPONSES = "prepare.json", "prepare.started.json", "responses.jsonl"
_SCHEMA = 1
_TARGET = "target"


@dataclass(frozen=True)
class PrepareReport:
    """What was prepared: the content of prepare.json, and whether an earlier call had made it.

    Attributes:
        content: schema, options, target, files (samples, tokens, mean response length, SHA-256), generation, seconds.
        reused: nothing was left to do.
    """

    content: dict[str, Any]
    reused: bool

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**self.content, "reused": self.reused}

    def render(self) -> Group:
        """A table of the files, and a line for everything a person should notice."""
        table = Table(title="Prepared data" + (" (already done)" if self.reused else ""), title_justify="left")
        for column in ("file", "samples", "tokens", "of these learned", "mean reply", "replies cut"):
            table.add_column(column, justify="left" if column == "file" else "right")
        for name, facts in self.content["files"].items():
            numbers = (facts["samples"], facts["tokens"], facts["loss_tokens"])
            cut = f"{facts['cut_replies'] / facts['samples']:.0%}"
            table.add_row(name, *(f"{number:,}" for number in numbers), f"{facts['mean_response_tokens']:.1f}", cut)
        lines = [f"target: {self.content['target']['folder']}"]
        generation = self.content["generation"]
        if generation:
            lines.append(
                f"generated in {generation['seconds']:.0f} s, {generation['tokens_per_second']:.0f} tokens/s"
                + (f"; {generation['resumed_samples']} answers kept from before" * bool(generation["resumed_samples"]))
            )
            if generation["unfinished"]:
                lines.append(f"the time limit left {generation['unfinished']} prompts unanswered")
            if generation["unusable"]:
                lines.append(f"{generation['unusable']} empty answers were left out")
            if generation["tokenised_differently"]:
                lines.append(f"{generation['tokenised_differently']} answers read back as other tokens than were made")
        return Group(table, *(Text(line) for line in lines))


def prepare(options: PrepareOptions) -> PrepareReport:
    """Make the training data, continue an interrupted preparation, or report a finished one.

    Raises:
        DSparkError: something is missing or does not fit (before a file is made, where it can be known), or the
            folder was prepared, or begun, with other options.
    """
    began = time.time()
    output = Path(options.output)
    recorded = options.recorded()
    if (output / _REPORT).exists():
        return PrepareReport(_finished(output, recorded), reused=True)
    generation = None
    if (output / _STARTED).exists():
        started = read_json(output / _STARTED, "the state of the unfinished preparation")
        _refuse_difference(output, started["options"], recorded, "was begun", free=("time_limit_seconds",))
        generation = started["generation"]
    elif output.exists() and (not output.is_dir() or any(not _of_target(path) for path in output.iterdir())):
        raise DSparkError(f"{output} is not empty and no preparation began there; choose another folder")
    sets = prompt_sets(options)
    folder = convert_smollm2(output / _TARGET) if options.target == SMOLLM2 else Path(options.target)
    generated = [name for name in sets if not (options.keep_responses and name in (HELDOUT, TRAIN))]
    _check(sets, generated, folder)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / _STARTED, {"options": recorded, "generation": generation})
    if generated:
        prompts = [record for name in generated for record in sets[name]]
        if not (output / _RESPONSES).exists():
            left = options.time_limit_seconds
            left = None if left is None else max(1e-3, left - (time.time() - began))
            report = generate_responses(prompts, folder, output / _RESPONSES, options.generation(left), title="prepare")
            generation = report.as_dict()
            write_json(output / _STARTED, {"options": recorded, "generation": generation})
        _fill_in(sets, generated, output / _RESPONSES, options)
    content = {
        "schema": _SCHEMA,
        "options": recorded,
        "target": _target_facts(options, folder),
        "files": _write(sets, folder, output),
        "generation": generation,
        "seconds": time.time() - began,
    }
    write_json(output / _REPORT, content)
    for leftover in (_RESPONSES, _STARTED):
        (output / leftover).unlink(missing_ok=True)
    return PrepareReport(content, reused=False)


def _of_target(path: Path) -> bool:
    """Whether a file is the converted target, or what a killed conversion left of one."""
    return path.name == _TARGET or path.name.startswith(f".{_TARGET}.")


def _check(sets: dict[str, list[Record]], generated: list[str], folder: Path) -> None:
    """Read the target's config and tokenizer and encode everything once, before anything is written."""
    # Only the target's own answers need a model that we run.
    longest = read_target_config(folder, any_architecture=not generated).max_position_embeddings
    tokenizer = load_tokenizer(folder)
    for name, records in sets.items():
        for record in records:
            if name in generated:
                encode_prompt(tokenizer, record)
            else:
                encode_messages(tokenizer, record, longest)


def _fill_in(sets: dict[str, list[Record]], generated: list[str], responses: Path, options: PrepareOptions) -> None:
    """Put the answered conversations in place of their prompts; unanswered ones drop out."""
    answered = {record["id"]: record for record in read_messages(responses)}
    for name in generated:
        sets[name] = [answered[record["id"]] for record in sets[name] if record["id"] in answered]
        if not sets[name]:
            responses.unlink()
            limit = options.time_limit_seconds
            raise DSparkError(
                f"no answer for {name} was ready within "
                f"time_limit_seconds {'(none)' if limit is None else format(limit, 'g')}; call again with a higher one"
            )


def _write(sets: dict[str, list[Record]], folder: Path, output: Path) -> dict[str, dict[str, Any]]:
    """Check every conversation by encoding it, then write the files; returns what prepare.json says about each."""
    tokenizer = load_tokenizer(folder)
    longest = read_target_config(folder, any_architecture=True).max_position_embeddings
    facts = {}
    for name, records in sets.items():
        samples = [encode_messages(tokenizer, record, longest) for record in records]
        learned = sum(int(sample.loss_mask.sum()) for sample in samples)
        facts[name] = {
            "samples": len(samples),
            "tokens": sum(len(sample.input_ids) for sample in samples),
            "loss_tokens": learned,
            "mean_response_tokens": learned / len(samples),
            "cut_replies": sum(record.get("finish_reason") == "length" for record in records),
        }
    for name, records in sets.items():
        write_json_lines(output / name, records)
        facts[name]["sha256"] = sha256(output / name)
    return facts


def _target_facts(options: PrepareOptions, folder: Path) -> dict[str, Any]:
    config = read_target_config(folder, any_architecture=True)
    facts = {
        "folder": str(folder),
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "fingerprint": config.fingerprint(),
    }
    if options.target == SMOLLM2:
        facts["mask_token_id"] = SMOLLM2_MASK_TOKEN_ID
    return facts


def _finished(output: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    """The content of prepare.json, if it was made with these options and its files are as they were."""
    content = read_json(output / _REPORT, "the report of the preparation")
    if content.get("schema") != _SCHEMA:
        raise DSparkError(
            f"{output / _REPORT} has schema {content.get('schema')}, expected {_SCHEMA}; prepare into another folder"
        )
    _refuse_difference(output, content["options"], recorded, "was prepared")
    for name, facts in content["files"].items():
        found = sha256(output / name) if (output / name).is_file() else "none, the file is missing"
        if found != facts["sha256"]:
            raise DSparkError(
                f"{output / name} was changed after its preparation (SHA-256 {found}, expected {facts['sha256']}); "
                "prepare into another folder"
            )
    return content


def _refuse_difference(
    output: Path, old: dict[str, Any], new: dict[str, Any], verb: str, free: tuple[str, ...] = ()
) -> None:
    for name in {**new, **old}:
        if name not in free and old.get(name) != new.get(name):
            raise DSparkError(
                f"{output} {verb} with {name} {old.get(name)!r} and now it is {new.get(name)!r}; use the same options, "
                "or choose another folder"
            )
