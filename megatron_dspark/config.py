"""What a draft is: every setting, its meaning, and every refusal.

`DSparkModelConfig` is Megatron-Bridge's `GPTModelConfig` for the draft: the embedded `transformer` config describes
the draft's own layers, and the fields here describe the block, the taps, the heads and the objective.
"""

import copy
import dataclasses
import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError
from megatron_dspark.objective.compiled import check_kernel
from megatron_dspark.objective.loss import ObjectiveConfig
from megatron_dspark.parallel_rules import check_parallelism, check_ranks

platform.prepare()

from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig  # noqa: E402
from megatron.bridge.models.transformer_config import TransformerConfig  # noqa: E402
from megatron.bridge.utils.activation_map import callable_to_str, str_to_callable  # noqa: E402
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix  # noqa: E402

register_allowed_target_prefix("megatron_dspark.")

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
BLOCK_ATTENTIONS = ("prefix", "flex", "dense")


def default_target_layer_ids(num_target_layers: int, count: int = 5) -> list[int]:
    """Return `count` tap ids evenly spread inside [1, num_target_layers − 3].

    Raises:
        DSparkError: the target has too few layers for that many distinct taps.
    """
    first, last = 1, num_target_layers - 3
    if last - first + 1 < count:
        raise DSparkError(
            f"a target of {num_target_layers} layers has {max(last - first + 1, 0)} layers inside "
            f"[1, {last}], fewer than the {count} taps asked for; ask for fewer or name target_layer_ids"
        )
    if count == 1:
        return [(first + last) // 2]
    return [first + round(index * (last - first) / (count - 1)) for index in range(count)]


@dataclass(kw_only=True)
class DSparkModelConfig(GPTModelConfig):
    """Configuration of a DSpark draft and of the frozen target that it is trained against.

    `transformer` describes the draft's layers (`num_layers` is the draft's depth, `hidden_size` equals the target's).
    `vocab_size` is the target's true vocabulary; `rotary_base` is the draft's RoPE base.
    """

    builder: ClassVar[str] = "megatron_dspark.builder.DSparkModelBuilder"

    # ---- block and taps
    block_size: int = 7
    """γ: tokens proposed by one draft pass. The block's inputs are the anchor and γ − 1 masks."""
    target_layer_ids: list[int] = field(default_factory=list)
    """Tap ids, strictly increasing: i is the output of target decoder layer i, −1 the embedding output."""
    num_target_layers: int = 0
    """Depth of the target."""
    mask_token_id: int = -1
    """Token that stands in the block's undecided slots; one that the target's tokenizer never produces."""
    num_anchors: int = 512
    """A: anchors drawn for each sample and epoch."""
    allow_unservable_taps: bool = False
    """Permit taps −1 and num_target_layers − 1, which no serving engine can capture for dense targets."""

    block_attention: Literal["prefix", "flex", "dense"] = "prefix"
    """How the draft attends (see `model.block_attention`): all give the same; "flex" is for CUDA, "dense" for tests."""

    # ---- heads
    markov_rank: int = 256
    """r: width of the sequential head's latent."""
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    """Whether the confidence head reads the Markov embedding beside the hidden state."""
    detach_confidence_features: bool = False
    """Keep the confidence loss from training the backbone and W1."""

    # ---- frozen replicas
    train_embeddings: bool = False
    train_lm_head: bool = False
    """Unfreeze the draft's own LM head; the teacher then keeps the target's head beside it."""

    # ---- objective
    ce_loss_weight: float = 0.1
    l1_loss_weight: float = 0.9
    confidence_loss_weight: float = 1.0
    loss_decay_gamma: float | None = 4.0
    """Slot k weighs exp(−k / loss_decay_gamma); None weighs every slot 1."""
    loss_normalizer: Literal["tokens", "weights"] = "tokens"
    """Divide by supervised slots ("tokens"), or by the sum of slot weights as DeepSpec and AutoModel do ("weights")."""
    objective_chunk_bytes: int | None = None
    """Memory for the logits in flight; None: from 40 MiB on a CPU, 2 GiB on a GPU. No result depends on it."""
    objective_kernel: Literal["eager", "compiled"] = "eager"
    """How the objective works between its matrix products: plain PyTorch, or through torch.compile."""

    # ---- target
    target_path: str | None = None
    """Hugging Face folder of the target that runs in the same job; None when features arrive with the batch."""
    replicas_path: str | None = None
    """Without `target_path`: folder whose embedding and LM head the draft copies (a feature cache has them)."""

    def __setattr__(self, name: str, value: Any, /) -> None:
        # A misspelt setting that is stored and never read would train something else than was asked for.
        if not name.startswith("_") and not hasattr(type(self), name) and name not in _field_names(type(self)):
            transformer = self.__dict__.get("transformer")
            if transformer is not None and not hasattr(transformer, name):
                raise DSparkError(f"DSparkModelConfig has no setting {name!r}; see its fields and TransformerConfig's")
        super().__setattr__(name, value)

    def as_dict(self) -> dict[str, Any]:
        """Serialise to plain values: `from_dict` brings back an equal config, and JSON can hold it."""
        result = super().as_dict()
        result["transformer"] = {
            name: _plain(value) for name, value in result["transformer"].items() if not _is_derived(name)
        }
        # Bridge leaves callables out; the draft would come back with another activation.
        result["transformer"]["activation_func"] = callable_to_str(self.transformer.activation_func)
        return result

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "DSparkModelConfig":
        """Bring a config back from `as_dict`.

        Raises:
            DSparkError: the dictionary names a field that does not exist.
        """
        data = copy.deepcopy(data)
        _refuse_unknown(set(data), _field_names(cls), cls.__name__)
        transformer = data.get("transformer")
        if not isinstance(transformer, dict):
            raise DSparkError("a DSparkModelConfig dictionary needs a 'transformer' dictionary, and it is missing")
        _refuse_unknown(set(transformer), _field_names(TransformerConfig), "TransformerConfig")
        if isinstance(transformer.get("activation_func"), str):
            transformer["activation_func"] = str_to_callable(transformer["activation_func"])
        for name in _DTYPE_FIELDS:
            if isinstance(transformer.get(name), str):
                transformer[name] = getattr(torch, transformer[name])
        for name, default in vars(TransformerConfig()).items():
            if isinstance(default, enum.Enum) and isinstance(transformer.get(name), str):
                transformer[name] = type(default)[transformer[name]]
        return super().from_dict(data)  # type: ignore[return-value]

    def finalize(self) -> None:
        """Check every setting, then compute Megatron-Core's derived fields.

        Raises:
            DSparkError: see `validate`.
        """
        self.validate()
        # Stages split the target's layers (see `parallel_rules`); Megatron-Bridge would ask it of the draft's.
        stages = self.transformer.virtual_pipeline_model_parallel_size
        self.transformer.virtual_pipeline_model_parallel_size = None
        try:
            super().finalize()
        finally:
            self.transformer.virtual_pipeline_model_parallel_size = stages

    def validate(self, world_size: int | None = None) -> None:
        """Refuse what cannot work, before any process group, model or file is made.

        Args:
            world_size: number of ranks of the job, when known.

        Raises:
            DSparkError: one sentence naming the setting, both values and the way out.
        """
        self.check_draft()
        for rule in (_check_objective, _check_block_and_taps, _check_heads, _check_machine):
            rule(self)
        check_parallelism(self)
        if world_size is not None:
            check_ranks(self, world_size)

    def check_draft(self) -> None:
        """Refuse a draft that is no dense Qwen3-style model, on whatever machine it is trained.

        Raises:
            DSparkError: one sentence.
        """
        _check_shape(self)

    def objective_config(self) -> ObjectiveConfig:
        """Return what the loss needs of this config: the fields of the same names.

        Raises:
            DSparkError: the objective has no such settings.
        """
        return ObjectiveConfig(**{item.name: getattr(self, item.name) for item in dataclasses.fields(ObjectiveConfig)})

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.transformer.kv_channels or self.transformer.hidden_size // self.transformer.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Key/value heads of the draft."""
        return self.transformer.num_query_groups or self.transformer.num_attention_heads

    @property
    def tap_width(self) -> int:
        """Width of the concatenated taps: m · d."""
        return len(self.target_layer_ids) * self.transformer.hidden_size

    @property
    def confidence_width(self) -> int:
        """Inputs of the confidence head."""
        return self.transformer.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)


def draft_transformer_config(**settings: Any) -> TransformerConfig:
    """Return a TransformerConfig with what every dense draft has: RMSNorm, q/k norm, SwiGLU, no dropout, no biases.

    Settings given by the caller win. Without CUDA, initialisation happens on the CPU and kernel fusions stay off.
    """
    defaults: dict[str, Any] = dict(
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        calculate_per_token_loss=True,
        transformer_impl="local",
    )
    if settings.get("pipeline_model_parallel_size", 1) > 1:
        # What `features.pipeline` says of the payload; a payload that was sent is needed no more.
        dtype = settings.get("params_dtype", torch.float32)
        defaults.update(pipeline_dtype=dtype, variable_seq_lengths=True, deallocate_pipeline_outputs=True)
        # Megatron-Core checks it for every model of variable length, dense ones included.
        defaults.update(moe_token_dispatcher_type="alltoall")
    if not platform.has_cuda():
        defaults.update(use_cpu_initialization=True, gradient_accumulation_fusion=False, apply_rope_fusion=False)
    defaults.update(settings)
    return TransformerConfig(**defaults)


_DTYPE_FIELDS = ("params_dtype", "pipeline_dtype", "autocast_dtype")


def _field_names(cls: type) -> set[str]:
    return {item.name for item in dataclasses.fields(cls)}


def _is_derived(name: str) -> bool:
    return name.startswith("_") and name != "_target_"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _refuse_unknown(names: set[str], known: set[str], owner: str) -> None:
    unknown = sorted(name for name in names - known if not name.startswith("_"))
    if unknown:
        raise DSparkError(f"{owner} has no setting {unknown[0]!r}; remove it or correct its spelling")


# What Megatron-Core and Bridge offer, and a draft is not.
_UNSAYABLE: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "gated_linear_unit": True,
    "glu_linear_offset": 0.0,
    "layernorm_zero_centered_gamma": False,
    "normalization": "RMSNorm",
    "num_moe_experts": None,
    "qk_layernorm": True,
    "rope_scaling": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "seq_len_interpolation_factor": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_size": None,
}
_UNREAD: dict[str, Any] = {
    "apply_query_key_layer_scaling": False,
    "cpu_offloading": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "experimental_attention_variant": None,
    "external_cuda_graph": False,
    "fine_grained_activation_offloading": False,
    "fp16_lm_cross_entropy": False,
    "fp32_residual_connection": False,
    "heterogeneous_block_specs": False,
    "linear_attention_freq": None,
    "mtp_num_layers": None,
    "no_rope_freq": None,
    "qk_clip": False,
    "qk_l2_norm": False,
    "quant_recipe": None,
    "restore_modelopt_state": False,
    "share_embeddings_and_output_weights": False,
    "transformer_layer_spec": None,
    "use_mup": False,
    "window_attn_skip_freq": None,
}


def _check_shape(config: DSparkModelConfig) -> None:
    transformer = config.transformer
    optional = [name for name in ("num_query_groups", "kv_channels") if getattr(transformer, name) is not None]
    for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", *optional):
        value = getattr(transformer, name)
        if not isinstance(value, int) or value < 1:
            raise DSparkError(f"{name} of the draft must be a positive whole number, and it is {value!r}")
    if not config.vocab_size or config.vocab_size < 1:
        raise DSparkError(f"vocab_size must be the target's true vocabulary, and it is {config.vocab_size!r}")
    if transformer.kv_channels is None and transformer.hidden_size % transformer.num_attention_heads:
        raise DSparkError(
            f"hidden_size {transformer.hidden_size} is not a multiple of num_attention_heads "
            f"{transformer.num_attention_heads}; set kv_channels (the head width) explicitly"
        )
    if config.head_dim % 2:
        raise DSparkError(f"the head width must be even for rotary positions, and kv_channels is {config.head_dim}")
    if transformer.num_attention_heads % config.num_key_value_heads:
        raise DSparkError(
            f"num_attention_heads {transformer.num_attention_heads} is not a multiple of num_query_groups "
            f"{config.num_key_value_heads}; choose key/value heads that divide it"
        )
    of_model = _field_names(GPTModelConfig)
    for names, reason in (
        (_UNSAYABLE, "which the exported config of a dense Qwen3-style draft cannot say"),
        (_UNREAD, "which the draft does not read"),
    ):
        for name, value in names.items():
            found = getattr(config if name in of_model else transformer, name)
            if found != value:
                raise DSparkError(f"{name} is {found!r}, {reason}; set it to {value!r}")
    if config.position_embedding_type not in ("rope", GPTModelConfig.position_embedding_type):
        raise DSparkError(
            f"position_embedding_type is {config.position_embedding_type!r} and the draft's positions are rotary; set "
            "it to 'rope'"
        )
    if transformer.recompute_granularity not in (None, "full"):
        raise DSparkError(
            f"recompute_granularity is {transformer.recompute_granularity!r} and the draft recomputes whole layers or "
            "none; set it to 'full' or None"
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(transformer, name):
            raise DSparkError(
                f"{name} is {getattr(transformer, name)} and the draft is trained without dropout; set it to 0"
            )
    if callable_to_str(transformer.activation_func) != "silu":
        raise DSparkError(
            f"the draft's gated MLP uses SiLU, and activation_func is {transformer.activation_func}; leave its default"
        )


def check_taps(taps: Sequence[int], num_layers: int, *, allow_unservable: bool = False) -> None:
    """Refuse taps that a target of `num_layers` layers does not have, or that no serving engine captures.

    Args:
        taps: ids of target layers, from 0; −1 is the embedding output.
        num_layers: the target's depth.
        allow_unservable: take −1 and the last layer.

    Raises:
        DSparkError: one sentence.
    """
    taps, last = list(taps), num_layers - 1
    if not taps:
        raise DSparkError("target_layer_ids is empty; name at least one target layer whose output the draft reads")
    if num_layers < 1:
        raise DSparkError(f"num_target_layers must be the target's depth, and it is {num_layers}")
    if any(second <= first for first, second in itertools.pairwise(taps)):
        raise DSparkError(f"target_layer_ids must strictly increase, and they are {taps}; sort them, each once")
    if taps[0] < -1 or taps[-1] > last:
        raise DSparkError(
            f"target_layer_ids {taps} leave the {num_layers} layers of the target; name layers inside 0 … {last - 1}"
        )
    if not allow_unservable and (taps[0] == -1 or taps[-1] == last):
        raise DSparkError(
            f"target_layer_ids {taps} name layer {-1 if taps[0] == -1 else last}, which no serving engine can capture; "
            f"stay inside 0 … {last - 1}, or set allow_unservable_taps for an experiment"
        )


def _check_block_and_taps(config: DSparkModelConfig) -> None:
    if config.num_anchors < 1:
        raise DSparkError(f"num_anchors must be at least 1, and it is {config.num_anchors}")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise DSparkError(
            f"mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size} tokens; name a "
            "token id that the target's tokenizer never produces"
        )
    check_taps(config.target_layer_ids, config.num_target_layers, allow_unservable=config.allow_unservable_taps)
    if config.block_attention not in BLOCK_ATTENTIONS:
        raise DSparkError(
            f"block_attention is {config.block_attention!r} and must be one of {', '.join(BLOCK_ATTENTIONS)}"
        )


def _check_heads(config: DSparkModelConfig) -> None:
    if config.markov_head_type not in MARKOV_HEAD_TYPES:
        raise DSparkError(
            f"markov_head_type is {config.markov_head_type!r} and must be one of {', '.join(MARKOV_HEAD_TYPES)}"
        )
    if config.markov_rank < 1:
        raise DSparkError(
            f"markov_rank is {config.markov_rank} while markov_head_type names a {config.markov_head_type} head; "
            "give it a rank of at least 1 (engines refuse a draft without one)"
        )


def _check_objective(config: DSparkModelConfig) -> None:
    if not config.transformer.calculate_per_token_loss:
        raise DSparkError(
            "calculate_per_token_loss is False, which would train a mean of micro-batch means instead of the mean over "
            "all supervised slots; set it to True"
        )
    config.objective_config()
    if config.ce_loss_weight == 0 and config.l1_loss_weight == 0:
        raise DSparkError("ce_loss_weight and l1_loss_weight are both 0, so nothing would train the draft's tokens")
    if config.confidence_loss_weight > 0 and not config.enable_confidence_head:
        raise DSparkError(
            f"confidence_loss_weight is {config.confidence_loss_weight} and enable_confidence_head is False, so there "
            "is no confidence to train; set the weight to 0 or enable the head"
        )
    if config.objective_chunk_bytes is not None and config.objective_chunk_bytes < 1:
        raise DSparkError(f"objective_chunk_bytes must be positive or None, and it is {config.objective_chunk_bytes}")
    check_kernel(config.objective_kernel, platform.has_cuda())


def _check_machine(config: DSparkModelConfig) -> None:
    transformer = config.transformer
    if transformer.fp16 and transformer.bf16:
        raise DSparkError("fp16 and bf16 are both set; choose one")
    if transformer.transformer_impl not in ("local", "transformer_engine"):
        raise DSparkError(
            f"transformer_impl is {transformer.transformer_impl!r} and must be 'local' or 'transformer_engine'"
        )
    if transformer.transformer_impl == "transformer_engine" and not platform.has_transformer_engine():
        raise DSparkError(
            "transformer_impl is 'transformer_engine', and Transformer Engine is not installed here; install it "
            "(megatron-dspark[gpu]), or set transformer_impl to 'local'"
        )
