"""Which parallel layouts compose: the one source of the refusals and of the tables in docs/parallelism.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError

if TYPE_CHECKING:
    from megatron_dspark.config import DSparkModelConfig
    from megatron_dspark.targets.folder import TargetConfig
    from megatron_dspark.training.settings import TrainSettings


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
        violation: what was asked for -> the sentence for the person who did, None when it is not this combination.
    """

    refused: str
    because: str
    violation: Callable[..., str | None]


def check_parallelism(config: "DSparkModelConfig") -> None:
    """Refuse the first combination of `RULES` that a model's config asks for.

    Raises:
        DSparkError: one sentence.
    """
    _refuse(RULES, config)


def check_ranks(config: "DSparkModelConfig", ranks: int) -> None:
    """Refuse a number of ranks that the config's sizes do not divide (`RANK_RULES`).

    Raises:
        DSparkError: one sentence.
    """
    _refuse(RANK_RULES, config, ranks)


def check_run(settings: "TrainSettings") -> None:
    """Refuse the first combination of `RUN_RULES` that a training run asks for.

    Raises:
        DSparkError: one sentence.
    """
    _refuse(RUN_RULES, settings)


def _refuse(rules: tuple[Rule, ...], *asked: Any) -> None:
    for rule in rules:
        sentence = rule.violation(*asked)
        if sentence is not None:
            raise DSparkError(sentence)


def check_target_split(target: "TargetConfig", tensor_parallel_size: int, stages: int = 1) -> None:
    """Refuse a target that does not split evenly (`TARGET_RULES`).

    Raises:
        DSparkError: one sentence.
    """
    _refuse(TARGET_RULES, target, tensor_parallel_size, stages)


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


def _ranks(config: "DSparkModelConfig", ranks: int) -> str | None:
    replica = config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
    if ranks % replica:
        return (
            f"tensor × pipeline × context parallel sizes need a multiple of {replica} ranks and the job has {ranks}; "
            "start torchrun with such a number"
        )
    return None


RANK_RULES = (Rule("ranks that are no multiple of TP × CP × PP", "data parallelism takes whole replicas", _ranks),)


def _target_sizes(target: "TargetConfig", tensor_parallel_size: int, _stages: int) -> str | None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(target, name)
        if value % tensor_parallel_size:
            return (
                f"the target at {target.folder} has {name} {value}, which tensor_model_parallel_size "
                f"{tensor_parallel_size} does not divide; choose a size that does, or train from features computed "
                "beforehand"
            )
    return None


def _target_layers(target: "TargetConfig", _tensor_parallel_size: int, stages: int) -> str | None:
    return _uneven_stages(stages, target.num_layers) if target.num_layers % stages else None


TARGET_RULES = (
    Rule("TP that does not divide the target's heads, key/value heads or MLP", "they are split evenly", _target_sizes),
    Rule("precompute: PP that does not divide the target's layers", "stages are of equal depth", _target_layers),
)


def _feature_memory(settings: "TrainSettings") -> str | None:
    if settings.feature_memory_gib and settings.parallel.pipeline > 1:
        return (
            f"feature_memory_gib is {settings.feature_memory_gib} and parallel.pipeline {settings.parallel.pipeline}: "
            "a stage cannot keep what the others compute; set feature_memory_gib to 0"
        )
    return None


def _anchors_of_another_layout(settings: "TrainSettings") -> str | None:
    if settings.parallel.context not in (1, settings.anchor_rule.context_parallel_size):
        return (
            f"anchor_context_parallel is {settings.anchor_context_parallel} and parallel.context "
            f"{settings.parallel.context}, whose ranks would hold parts of blocks; set both to the same size"
        )
    return None


def _packed_length(settings: "TrainSettings") -> str | None:
    length = settings.packed_length
    if length is not None and (not settings.packing or length < settings.max_length):
        return (
            f"packed_length is {length} with packing {settings.packing} and max_length {settings.max_length}; set "
            "packing, and rows that hold the longest sample"
        )
    return None


def _flex_without_cuda(settings: "TrainSettings") -> str | None:
    if settings.block_attention == "flex" and not platform.has_cuda():
        return "block_attention is 'flex', which needs CUDA, and there is none here; use 'prefix'"
    return None


RUN_RULES = (
    Rule("PP with `feature_memory_gib`", "a stage cannot keep what the others compute", _feature_memory),
    Rule("CP with anchors drawn for another CP size", "ranks would hold parts of blocks", _anchors_of_another_layout),
    Rule("packed rows shorter than the longest sample", "documents are not split", _packed_length),
    Rule("`block_attention=flex` without CUDA", "its kernel is CUDA's", _flex_without_cuda),
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
    every = (*RULES, *TARGET_RULES, *RUN_RULES, *RANK_RULES)
    lines += [f"| {rule.refused} | {rule.because} |" for rule in every]
    return "\n".join(lines) + "\n"
