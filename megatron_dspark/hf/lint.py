"""Which rules an exported draft breaks, and which serving engines will load it.

The engines' constraints stand in `engine_compat.json`, read from the source of the named releases ("run": true marks
the ones that were also executed). A rule here turns one of its keys into a sentence; `causal_must_be` holds for every
draft of this layout and is among the rules of the config.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, sha256
from megatron_dspark.hf.foreign import TITLES, convert, recognise
from megatron_dspark.hf.layouts import DTYPES, DraftDimensions, tensor_shapes
from megatron_dspark.hf.load import DraftTensors, read_config, tensor_problems
from megatron_dspark.hf.local_paths import local_paths
from megatron_dspark.hf.rules import Problem, config_problems

PROVENANCE_FILE = "dspark_export.json"

# Rules on which engines differ, or that do not concern them: each has a sentence of its own below, or none. Any other
# problem that takes the weights' one meaning away does so under every engine.
_ENGINES_DIFFER = (
    "top-level-keys",
    "architectures",
    "markov-rank",
    "unknown-tensors",
    "missing-tensors",
    "confidence-bias",
    "frozen-replicas",
    "num-anchors",
    "dtype",
)


@dataclass(frozen=True)
class EngineVerdict:
    """What one serving engine will make of the folder.

    Attributes:
        engine: its name and release.
        loads: whether it will load the draft.
        reasons: why not; empty when it loads.
        executed: the constraints were checked by running that release, not only by reading its source.
        launch: how to start it with this draft, where that is known.
    """

    engine: str
    loads: bool
    reasons: tuple[str, ...]
    executed: bool
    launch: str | None


@dataclass(frozen=True)
class LintReport:
    """Every broken rule of a folder, and a verdict for each engine."""

    folder: str
    problems: tuple[Problem, ...]
    engines: tuple[EngineVerdict, ...]

    @property
    def ok(self) -> bool:
        """No rule of the layout is broken. An engine may still refuse a head type that it does not implement."""
        return not self.problems

    def engine(self, name: str) -> EngineVerdict:
        """The verdict of the engine whose name starts with `name` ("vllm").

        Raises:
            DSparkError: no engine, or more than one, is called that.
        """
        found = [verdict for verdict in self.engines if verdict.engine.startswith(name)]
        if not name or len(found) != 1:
            known = ", ".join(verdict.engine for verdict in self.engines)
            raise DSparkError(f"{name!r} does not name one engine; choose one of {known}")
        return found[0]

    def as_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def render(self) -> RenderableType:
        """The report as rich tables."""
        parts: list[RenderableType] = []
        if self.problems:
            table = Table("Rule", "What is wrong, and what to do", title=f"{len(self.problems)} problems", expand=False)
            for problem in self.problems:
                table.add_row(problem.rule, escape(problem.sentence))
            parts.append(table)
        else:
            parts.append(Text("Names, shapes, dtypes and config: no problem found."))
        parts.append(engine_table(self.engines))
        return Group(*parts)


def lint_folder(folder: str | Path) -> LintReport:
    """Check a draft's folder against the DeepSpec layout, and say which engines will load it.

    Args:
        folder: the draft's folder. Of its weights the headers are read, and all bytes where `dspark_export.json` has
            their digests.

    Raises:
        DSparkError: there is no such folder, or its config or weights cannot be opened at all.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = DraftTensors(folder)
    layout = "deepspec"
    with contextlib.suppress(DSparkError):
        layout = recognise(config, tensors.shapes)
    speculators = layout == "speculators"
    problems = list(_local_paths(config)) if speculators else []
    if layout in ("specforge", "modelopt"):
        sentence = (
            f"the folder has {TITLES[layout]}, and engines look for DeepSpec's; convert it with megatron-dspark import"
        )
        problems.append(Problem("layout", sentence, readable=True))
    if speculators:
        try:
            config = convert(config, tensors.shapes, _dtype_of(tensors)).config
        except DSparkError as error:
            problems.append(Problem("layout", str(error)))
            return LintReport(folder.name, tuple(problems), tuple(_refusals(str(error))))
    problems += config_problems(config)
    # Broken sizes are among the problems already; then there are no shapes to compare with.
    with contextlib.suppress(DSparkError):
        problems += tensor_problems(config, tensors.shapes, tensors.dtypes)
    record = None
    if (folder / PROVENANCE_FILE).exists():
        record = read_json(folder / PROVENANCE_FILE, "the export's record")
        problems += [
            Problem(
                "local-paths",
                f"{PROVENANCE_FILE} names the local path {path!r} at {place}, which exists on one machine only; "
                "remove it",
                readable=True,
            )
            for place, path in local_paths(record)
        ]
    verdicts = tuple(
        _verdict(engine, constraints, config, tensors, problems, _trained_tables(record))
        for engine, constraints in engine_constraints().items()
    )
    # No engine would notice.
    problems += _altered_weights(folder, record)
    if speculators:
        verdicts = tuple(_of_speculators(verdict) for verdict in verdicts)
    return LintReport(folder.name, tuple(problems), verdicts)


def _trained_tables(record: Any) -> list[str]:
    """Copies of the target's tables that the draft was trained with and that are no copies any more."""
    found = record.get("trained_tables") if isinstance(record, dict) else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _altered_weights(folder: Path, record: Any) -> Iterator[Problem]:
    written = record.get("weights_sha256") if isinstance(record, dict) else None
    for name, expected in written.items() if isinstance(written, dict) else ():
        found = sha256(folder / name) if (folder / name).is_file() else "missing"
        if found != expected:
            yield Problem(
                "weights-sha256",
                f"{name} is not the file that was exported: its SHA-256 is {found} and {PROVENANCE_FILE} says "
                f"{expected}; copy it again, or export again",
            )


@functools.cache
def engine_constraints() -> Mapping[str, Mapping[str, Any]]:
    """What each serving engine accepts of a dense draft, by engine and release."""
    text = resources.files("megatron_dspark.hf").joinpath("engine_compat.json").read_text(encoding="utf-8")
    engines = json.loads(text)["dense"]
    # The table is silent here; llama.cpp is one of the engines that know the vanilla head only.
    engines["llamacpp"].setdefault("markov_head_types", ["vanilla"])
    return engines


def engine_table(verdicts: tuple[EngineVerdict, ...]) -> Table:
    """The verdicts as one rich table."""
    table = Table("Engine", "Will load", title="Serving engines", expand=False)
    table.add_column("Because / how to start it", overflow="fold")
    for verdict in verdicts:
        evidence = "" if verdict.executed else " (from its source)"
        detail = "; ".join(verdict.reasons) or verdict.launch or ""
        table.add_row(verdict.engine, ("yes" if verdict.loads else "no") + evidence, escape(detail))
    return table


def _of_speculators(verdict: EngineVerdict) -> EngineVerdict:
    """The speculators layout is vLLM's own; the other engines look for keys at top level, or count its taps from 0."""
    if verdict.engine.startswith("vllm"):
        return verdict
    why = "it reads the DeepSpec layout and this is the speculators layout; convert it with megatron-dspark import"
    if engine_constraints()[verdict.engine].get("speculators_aux_ids_shifted") is False:
        why = (
            "it starts with the speculators layout but does not take 1 off its tap ids, so the draft would read the "
            "layer after each tap; convert it with megatron-dspark import"
        )
    # What was executed was the DeepSpec layout.
    return replace(verdict, loads=False, reasons=(why, *verdict.reasons), executed=False)


def _refusals(reason: str) -> Iterator[EngineVerdict]:
    for engine, constraints in engine_constraints().items():
        yield EngineVerdict(engine, False, (reason,), bool(constraints["run"]), None)


def _dtype_of(tensors: DraftTensors) -> str:
    spellings = {spelling: dtype for dtype, (spelling, _) in DTYPES.items()}
    return next((spellings[found] for found in tensors.dtypes.values() if found in spellings), "bfloat16")


def _local_paths(config: Mapping[str, Any]) -> Iterator[Problem]:
    return (problem for problem in config_problems(config) if problem.rule == "local-paths")


def _verdict(
    engine: str,
    constraints: Mapping[str, Any],
    config: Mapping[str, Any],
    tensors: DraftTensors,
    problems: list[Problem],
    trained_tables: list[str],
) -> EngineVerdict:
    reasons = [problem.sentence for problem in problems if not problem.readable and problem.rule not in _ENGINES_DIFFER]
    reasons += _config_reasons(constraints, config)
    reasons += _tensor_reasons(constraints, config, tensors)
    for name in trained_tables:
        if str(constraints.get(name.split(".")[0])).startswith(("ignored", "dropped")):
            reasons.append(f"it takes the target's {name} and leaves this draft's own out, which was trained")
    launch = constraints.get("launch")
    if launch is not None:
        launch = launch.replace("block_size", str(config.get("block_size"))).replace(":DRAFT", ':"DRAFT"')
        launch = re.sub(r"{.*}", r"'\g<0>'", launch)  # JSON on a shell's command line
    return EngineVerdict(engine, not reasons, tuple(dict.fromkeys(reasons)), bool(constraints["run"]), launch)


def _config_reasons(constraints: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    accepted = constraints.get("architectures") or [constraints.get("converter_architecture")]
    have = config.get("architectures")
    if accepted != [None] and not (isinstance(have, list) and set(have) & set(accepted)):
        yield f"it accepts architectures {' or '.join(accepted)}, and config.json says {have!r}"
    kind, kinds = config.get("model_type"), constraints.get("selects_on", "").removeprefix("model_type contains ")
    if not any(part in str(kind) for part in kinds.split(" or ")):
        yield f"it needs a model_type with {kinds} in it, and config.json says {kind!r}"
    for entry in constraints.get("required_top_level", ()):
        # An entry is "key", "key|place.key", or "key (remark)".
        places = entry.split(" (")[0].split("|")
        if not any(_has(config, place) for place in places):
            yield f"it needs {' or '.join(places)} in config.json"
    kinds = constraints.get("markov_head_types")
    if kinds is not None and config.get("markov_head_type") not in kinds:
        kind = config.get("markov_head_type")
        yield f"it implements the {', '.join(kinds)} Markov head, and this draft's is {kind!r}"
    if config.get("markov_rank") == 0:
        yield "it needs a Markov rank above 0"


def _tensor_reasons(constraints: Mapping[str, Any], config: Mapping[str, Any], tensors: DraftTensors) -> Iterator[str]:
    try:
        wanted = set(tensor_shapes(DraftDimensions.from_config(config)))
    except DSparkError as error:
        yield str(error)
        return
    strict = str(constraints.get("unknown_tensor", ""))
    unknown = sorted(set(tensors) - wanted)
    if "ignored" in strict:
        unknown = [name for name in unknown if name.startswith(("markov_head.", "confidence_head."))]
    if "error" in strict and unknown:
        yield f"it refuses tensors that it does not know, such as {unknown[0]}"
    flat_names = [*constraints.get("markov_names", ()), *constraints.get("confidence_names", ())]
    for name in sorted(wanted - set(tensors)):
        if name.endswith((".markov_w1.weight", ".markov_w2.weight")) or name.startswith("confidence_head.proj."):
            flat = name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj")
            if flat in tensors and any(re.fullmatch(_pattern(accepted), flat) for accepted in flat_names):
                continue
        if name == "confidence_head.proj.bias":
            if constraints.get("confidence_bias") != "optional":
                yield "it needs confidence_head.proj.bias, and the folder has none"
        elif name in ("embed_tokens.weight", "lm_head.weight"):
            if not str(constraints.get(name.split(".")[0])).startswith(("optional", "ignored", "dropped")):
                yield f"{name} is absent, and nothing says that it takes the target's"
        else:
            yield f"{name} is absent, and it would be left as the engine initialised it"


def _pattern(name: str) -> str:
    """`markov_w1` in the table stands for both tables, `proj.*` for weight and bias."""
    return re.escape(name).replace("markov_w1", "markov_w[12]").replace(r"\*", r"\w+")


def _has(config: Mapping[str, Any], place: str, value: Any = None) -> bool:
    """Whether the dotted `place` exists in `config` (and equals `value`, when one is given)."""
    found: Any = config
    for key in place.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return False
        found = found[key]
    return value is None or found == value
