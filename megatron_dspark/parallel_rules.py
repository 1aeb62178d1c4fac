"""Which parallel layouts compose: the one source of the refusals and of the tables in docs/parallelism.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_dspark.errors import DSparkError

if TYPE_CHECKING:
    from megatron_dspark.config import DSparkModelConfig
    from megatron_dspark.targets.folder import TargetConfig


@dataclass(frozen=True)
class Axis:
    """A supported way to spread a job.

    Attributes:
        name: short name, as in the names of the tested layouts ("TP2-DP2").
        setting: what turns it on.
        what: one sentence on what is split and what stays whole.
    """

    name: str
    setting: str
    what: str


AXES = (
    Axis(
        "TP",
        "parallel.tensor",
        "attention heads, MLP and vocabulary of draft and target; per-position projections of the heads stay whole",
    ),
    Axis(
        "SP",
        "parallel.sequence",
        "with TP: block slots and context rows between the split layers, and the target's rows",
    ),
    Axis("PP", "parallel.pipeline", "the target's layers; the draft and its optimizer are on the last stage"),
    Axis(
        "VPP",
        "parallel.virtual_pipeline",
        "with PP: several stages on each rank, run by the interleaved schedule",
    ),
    Axis(
        "CP",
        "parallel.context",
        "rows of every sample, and with them its blocks; keys and values of all earlier rows stay visible",
    ),
    Axis("packed", "packing", "nothing: several samples stand in one row"),
    Axis("DP", "torchrun's ranks", "samples; uneven numbers of supervised slots give the full-batch gradient"),
    Axis("DO", "optimizer.distributed", "with DP: optimizer state (Megatron-Core's distributed optimizer)"),
)


@dataclass(frozen=True)
class Rule:
    """A combination that is refused before anything is created.

    Attributes:
        refused: the combination, for the table.
        because: why.
        violation: config -> the sentence for the person who asked for it, None when it is not asked for.
    """

    refused: str
    because: str
    violation: Callable[["DSparkModelConfig"], str | None]


def check_parallelism(config: "DSparkModelConfig") -> None:
    """Refuse the first combination of `RULES` that `config` asks for.

    Raises:
        DSparkError: one sentence.
    """
    for rule in RULES:
        sentence = rule.violation(config)
        if sentence is not None:
            raise DSparkError(sentence)


def check_target_split(target: "TargetConfig", tensor_parallel_size: int, stages: int = 1) -> None:
    """Refuse a tensor-parallel size that does not divide the target's heads, and stages that do not divide its layers.

    Raises:
        DSparkError: one sentence.
    """
    for name, value in (
        ("num_attention_heads", target.num_attention_heads),
        ("num_key_value_heads", target.num_key_value_heads),
    ):
        if value % tensor_parallel_size:
            raise DSparkError(
                f"the target at {target.folder} has {name} {value}, which tensor_model_parallel_size "
                f"{tensor_parallel_size} does not divide; choose a size that does, or train from features computed "
                "beforehand"
            )
    if target.num_layers % stages:
        raise DSparkError(_uneven_stages(stages, target.num_layers))


def _tensor_sizes(config: "DSparkModelConfig") -> str | None:
    transformer, size = config.transformer, config.transformer.tensor_model_parallel_size
    for name, value in (
        ("num_attention_heads", transformer.num_attention_heads),
        ("num_query_groups", config.num_key_value_heads),
        ("ffn_hidden_size", transformer.ffn_hidden_size),
        ("hidden_size", transformer.hidden_size),
    ):
        if value % size:
            return (
                f"tensor_model_parallel_size {size} does not divide the draft's {name} {value}; choose a size that does"
            )
    return None


def _sequence_without_tensor(config: "DSparkModelConfig") -> str | None:
    transformer = config.transformer
    if transformer.sequence_parallel and transformer.tensor_model_parallel_size == 1:
        return (
            "sequence_parallel splits rows over tensor-parallel ranks and tensor_model_parallel_size is 1; set it to "
            "False, or tensor_model_parallel_size above 1"
        )
    return None


def _stages(config: "DSparkModelConfig") -> int:
    transformer = config.transformer
    return transformer.pipeline_model_parallel_size * (transformer.virtual_pipeline_model_parallel_size or 1)


def _virtual_without_pipeline(config: "DSparkModelConfig") -> str | None:
    transformer = config.transformer
    size, virtual = transformer.pipeline_model_parallel_size, transformer.virtual_pipeline_model_parallel_size
    if virtual is not None and (size == 1 or virtual < 2):
        return (
            f"virtual_pipeline_model_parallel_size is {virtual} and pipeline_model_parallel_size {size}, which leaves "
            "nothing to interleave; set it to None, or both to at least 2"
        )
    return None


def _pipeline_without_target(config: "DSparkModelConfig") -> str | None:
    size = config.transformer.pipeline_model_parallel_size
    if size > 1 and config.target_path is None:
        return (
            f"pipeline_model_parallel_size is {size} and no target runs in this job (target_path is None); the draft "
            "needs one stage alone: set it to 1"
        )
    return None


def _pipeline_layers(config: "DSparkModelConfig") -> str | None:
    if config.num_target_layers % _stages(config):
        return _uneven_stages(_stages(config), config.num_target_layers)
    return None


def _uneven_stages(stages: int, layers: int) -> str:
    return (
        f"{stages} pipeline stages do not divide the target's {layers} layers; choose pipeline_model_parallel_size × "
        "virtual_pipeline_model_parallel_size so that they do"
    )


def _payload(config: "DSparkModelConfig") -> str | None:
    transformer = config.transformer
    if transformer.pipeline_model_parallel_size == 1:
        return None
    wanted = {"pipeline_dtype": transformer.params_dtype, "variable_seq_lengths": True, "overlap_p2p_comm": False}
    for name, value in wanted.items():
        if getattr(transformer, name) != value:
            return (
                f"{name} is {getattr(transformer, name)} and the taps that travel through the pipeline need {value}; "
                "build the config with draft_transformer_config, or set it"
            )
    return None


def _only(name: str, value: Any) -> Callable[["DSparkModelConfig"], str | None]:
    def violation(config: "DSparkModelConfig") -> str | None:
        asked = getattr(config.transformer, name)
        return None if asked == value else f"{name}={asked!r} is not supported for the draft yet; set it to {value!r}"

    return violation


RULES = (
    Rule("TP that does not divide heads, key/value heads, MLP or hidden size", "they are split evenly", _tensor_sizes),
    Rule("SP without TP", "it splits rows over tensor-parallel ranks", _sequence_without_tensor),
    Rule("VPP without PP, or of one stage", "there is nothing to interleave", _virtual_without_pipeline),
    Rule("PP without a target in the job", "the draft is on one stage", _pipeline_without_target),
    Rule("PP × VPP that does not divide the target's layers", "stages are of equal depth", _pipeline_layers),
    Rule(
        "PP with another payload type, fixed lengths or overlapped sends",
        "taps widen the payload from stage to stage",
        _payload,
    ),
    Rule("expert parallelism", "the dense draft has no experts", _only("expert_model_parallel_size", 1)),
    Rule("FP8", "not yet", _only("fp8", None)),
    Rule("FP4", "not yet", _only("fp4", None)),
    Rule("multi-latent attention", "the draft's attention is grouped-query", _only("multi_latent_attention", False)),
)
# Refused by `TrainSettings`, which knows more than the model's config.
RUN_RULES = (
    ("PP with `feature_memory_gib`", "a stage cannot keep what the others compute"),
    ("CP with anchors drawn for another CP size", "ranks would hold parts of blocks"),
    ("TP that does not divide the target's heads", "they are split evenly"),
    ("ranks that are no multiple of TP × CP × PP", "data parallelism takes whole replicas"),
)


def render_tables(tested: list[str]) -> str:
    """Return docs/parallelism.md's tables in Markdown.

    Args:
        tested: names of the layouts that the test matrix runs.
    """
    lines = ["| axis | setting | what it splits | layouts tested |", "|---|---|---|---|"]
    for axis in AXES:
        with_it = sum(axis.name in {part.rstrip("0123456789") for part in name.split("-")} for name in tested)
        lines.append(f"| {axis.name} | `{axis.setting}` | {axis.what} | {with_it} |")
    lines += ["", f"Tested: {', '.join(tested)}."]
    lines += ["", "| refused | because |", "|---|---|"]
    lines += [f"| {rule.refused} | {rule.because} |" for rule in RULES]
    lines += [f"| {refused} | {because} |" for refused, because in RUN_RULES]
    return "\n".join(lines) + "\n"
