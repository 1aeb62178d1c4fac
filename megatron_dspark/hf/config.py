"""The config.json of an exported draft: written from the target's config and the draft's own settings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.layouts import dtype_names
from megatron_dspark.hf.rules import ARCHITECTURE, MODEL_TYPE, config_problems, rope_base

if TYPE_CHECKING:
    from megatron_dspark.config import DSparkModelConfig

# What the draft takes over from the target as it stands. Everything else is written from the draft's own
# settings, so that a field that only means something for the target cannot slip through.
COPIED_FROM_TARGET = ("initializer_range", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class DraftExportSettings:
    """What the draft is, in the words of the exported config.

    Attributes:
        block_size: γ, predictions a block.
        target_layer_ids: taps; id i is the output of target decoder layer i, from 0.
        num_target_layers: decoder layers of the target.
        num_draft_layers: decoder layers of the draft; `num_hidden_layers` in the file.
        rope_theta: base of the rotary frequencies, which run over the whole head.
        rope_scaling: must be None or the default type: the draft's rotary embedding is the plain one.
        num_anchors: anchors a sample in training; engines do not use it.
        dtype: "bfloat16" or "float32", of the exported tensors.
        bos_token_id, eos_token_id, max_position_embeddings: the target's, when None.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_draft_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    attention_bias: bool = False
    num_anchors: int = 512
    rope_scaling: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    max_position_embeddings: int | None = None


def draft_hf_config(target_hf_config: Mapping[str, Any], settings: DraftExportSettings) -> dict[str, Any]:
    """Write the config.json of a draft.

    Args:
        target_hf_config: the target's config.json; of a multimodal target, its text part is used.
        settings: the draft.

    Returns:
        The config, all keys of which engines read at top level.

    Raises:
        DSparkError: the settings contradict the target, or describe a draft that this layout cannot hold or that
            no engine can serve.
    """
    target = target_hf_config.get("text_config") or target_hf_config
    _refuse_contradictions(target, settings)
    dtype_names(settings.dtype)
    scaling = settings.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default" or set(scaling) - {"rope_type", "type", "rope_theta"}:
        raise DSparkError(
            f"rope scaling {dict(scaling)!r} cannot be exported: the draft's rotary embedding is the plain one, "
            "so engines would rotate differently from training; set rope scaling of the draft to none"
        )
    positions = _own_or_target(settings.max_position_embeddings, target, "max_position_embeddings")
    if positions is None:
        raise DSparkError(
            "neither the draft's settings nor the target's config says max_position_embeddings, without which engines "
            "do not know how long a context may be; set it"
        )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": settings.dtype,
        "torch_dtype": settings.dtype,
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_draft_layers,
        "num_target_layers": settings.num_target_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.head_dim,
        "attention_bias": settings.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": float(settings.rms_norm_eps),
        "rope_theta": float(settings.rope_theta),
        "rope_parameters": {"rope_theta": float(settings.rope_theta), "rope_type": "default"},
        "max_position_embeddings": positions,
        "layer_types": ["full_attention"] * settings.num_draft_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": _own_or_target(settings.bos_token_id, target, "bos_token_id"),
        "eos_token_id": _own_or_target(settings.eos_token_id, target, "eos_token_id"),
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token_id,
        "target_layer_ids": list(settings.target_layer_ids),
        "num_anchors": settings.num_anchors,
        "markov_rank": settings.markov_rank,
        "markov_head_type": settings.markov_head_type,
        "enable_confidence_head": settings.enable_confidence_head,
        "confidence_head_with_markov": settings.confidence_head_with_markov,
        "sample_from_anchor": True,
    }
    config.update({key: target[key] for key in COPIED_FROM_TARGET if target.get(key) is not None})
    for problem in config_problems(config):
        raise DSparkError(problem.sentence)
    return config


def settings_from_model(model_config: "DSparkModelConfig", dtype: str = "bfloat16") -> DraftExportSettings:
    """The draft that a model configuration describes, for export in `dtype`.

    Raises:
        DSparkError: see `DSparkModelConfig.check_draft`, which refuses what an exported config cannot say.
    """
    transformer = model_config.transformer
    model_config.check_draft()
    return DraftExportSettings(
        hidden_size=transformer.hidden_size,
        intermediate_size=transformer.ffn_hidden_size,
        vocab_size=model_config.vocab_size,
        num_draft_layers=transformer.num_layers,
        num_attention_heads=transformer.num_attention_heads,
        num_key_value_heads=model_config.num_key_value_heads,
        head_dim=model_config.head_dim,
        rms_norm_eps=transformer.layernorm_epsilon,
        rope_theta=model_config.rotary_base,
        num_target_layers=model_config.num_target_layers,
        target_layer_ids=tuple(model_config.target_layer_ids),
        block_size=model_config.block_size,
        mask_token_id=model_config.mask_token_id,
        markov_rank=model_config.markov_rank,
        markov_head_type=model_config.markov_head_type,
        enable_confidence_head=model_config.enable_confidence_head,
        confidence_head_with_markov=model_config.confidence_head_with_markov,
        attention_bias=transformer.add_qkv_bias,
        num_anchors=model_config.num_anchors,
        dtype=dtype,
    )


def settings_from_config(config: Mapping[str, Any]) -> DraftExportSettings:
    """The draft that a config.json describes: the inverse of `draft_hf_config` for everything of the draft's own.

    Raises:
        DSparkError: a rule is broken without which the weights have no single meaning.
    """
    for problem in config_problems(config):
        if not problem.readable:
            raise DSparkError(problem.sentence)
    own = {field.name: config[field.name] for field in fields(DraftExportSettings) if field.name in config}
    own["num_draft_layers"] = config["num_hidden_layers"]
    own["target_layer_ids"] = tuple(config["target_layer_ids"])
    own["rope_theta"] = float(rope_base(config))
    own["rope_scaling"] = None
    own["dtype"] = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    own.setdefault("num_anchors", 512)
    return DraftExportSettings(**own)


def refuse_another_draft(own: DraftExportSettings, other: DraftExportSettings) -> None:
    """Refuse weights that fit by shape but were trained to mean something else.

    The block size, the number of anchors and the dtype may differ: they change how a draft is trained on, not what its
    weights mean.

    Raises:
        DSparkError: the first setting on which `own` (the module) and `other` (the folder) differ.
    """
    free = ("block_size", "num_anchors", "dtype", "bos_token_id", "eos_token_id", "max_position_embeddings")
    for field in fields(DraftExportSettings):
        ours, theirs = getattr(own, field.name), getattr(other, field.name)
        if field.name not in free and ours != theirs:
            raise DSparkError(
                f"the folder's draft has {field.name} = {theirs!r} and the draft being loaded has {ours!r}; configure "
                "the draft like the folder's"
            )


def _own_or_target(own: Any, target: Mapping[str, Any], key: str) -> Any:
    return target.get(key) if own is None else own


def _refuse_contradictions(target: Mapping[str, Any], settings: DraftExportSettings) -> None:
    for key, own in (
        ("hidden_size", settings.hidden_size),
        ("vocab_size", settings.vocab_size),
        ("num_hidden_layers", settings.num_target_layers),
    ):
        if key not in target:
            raise DSparkError(
                f"the target's config has no {key}, so the draft cannot be described; use its config.json"
            )
        if target[key] != own:
            raise DSparkError(
                f"the draft was built for a target whose {key} is {own}, and this target's config says {target[key]}; "
                "export with the config of the target that the draft was trained against"
            )
