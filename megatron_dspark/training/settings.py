"""Everything a training run is asked for, in one tree that recipes fill and the command line overrides."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dspark.config import DSparkModelConfig, default_target_layer_ids, draft_transformer_config
from megatron_dspark.data.sampler import AnchorRule
from megatron_dspark.errors import DSparkError
from megatron_dspark.parallel_rules import check_run, check_target_split
from megatron_dspark.targets.folder import TargetConfig

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class DraftSettings:
    """The draft. Sizes that are None are taken from the target."""

    num_layers: int = 5
    block_size: int = 7
    target_layer_ids: list[int] | None = None
    """Taps; None spreads five of them evenly inside [1, target layers − 3]."""
    mask_token_id: int | None = None
    """A token that the target's tokenizer never produces; required."""
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    markov_start: str = "random"
    """How a vanilla Markov head begins: "random", or "bigrams" of the training data (worth a few dozen steps)."""
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    detach_confidence_features: bool = False
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    train_embeddings: bool = False
    train_lm_head: bool = False
    allow_unservable_taps: bool = False
    initializer_std: float = 0.02


@dataclass(kw_only=True)
class ObjectiveSettings:
    """Weights of the loss (paper Eqs. 8 to 10)."""

    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    loss_decay_gamma: float | None = 4.0
    normalizer: str = "tokens"
    chunk_bytes: int | None = None
    """Memory for the logits in flight; None: from 40 MiB on a CPU, 2 GiB on a GPU. No result depends on it."""
    kernel: str = "eager"
    """"eager", or "compiled" for torch.compile between the objective's matrix products."""


@dataclass(kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    learning_rate: float = 6e-4
    min_learning_rate: float = 0.0
    warmup_share: float = 0.04
    """Share of all steps over which the learning rate rises, at least one step when above 0."""
    decay_style: str = "cosine"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    initial_loss_scale: float = 4096.0
    """fp16 alone: what the loss is multiplied by at first. An overflow skips the step; from the second on it halves."""
    min_loss_scale: float = 2.0**-16
    """Lowest loss scale: gradients that overflow at it end the run. Below 1, since the loss is a sum over slots."""
    loss_scale_window: int = 1000
    """Steps without an overflow after which the loss scale doubles."""
    distributed: bool = False
    """Shard optimizer state over data-parallel ranks (Megatron-Core's distributed optimizer)."""


@dataclass(kw_only=True)
class ParallelSettings:
    """How the job is laid out; data parallelism takes the ranks that are left."""

    tensor: int = 1
    context: int = 1
    """Ranks that share the rows of every sample (context parallelism, see `context_shards`)."""
    sequence: bool = False
    """Sequence parallelism: tensor-parallel ranks split the rows of what is not split by tensor parallelism."""
    pipeline: int = 1
    """Stages that the target's layers are split into; the draft is on the last one."""
    virtual_pipeline: int | None = None
    """Stages of each rank, taken in turn (interleaved schedule); None is one."""

    @property
    def ranks(self) -> int:
        """Ranks that hold one replica; data parallelism takes what is left."""
        return self.tensor * self.context * self.pipeline


@dataclass(kw_only=True)
class CheckpointSettings:
    """How checkpoints are written, which are kept, and what a resume may do."""

    asynchronous: bool = False
    """Write in the background while training goes on."""
    keep_last: int | None = None
    """Newest checkpoints to keep; None keeps all."""
    keep_best: int = 0
    """Checkpoints to keep besides, those of the highest validation tau."""
    resume_from: int | None = None
    """Step to resume from instead of the newest; what was logged after it is dropped."""
    allow: list[str] = field(default_factory=list)
    """Settings that may differ from the checkpoint's although they change the result."""


@dataclass(kw_only=True)
class TrainSettings:
    """One training run."""

    target: str = ""
    """Hugging Face folder of the target."""
    data: str = ""
    """JSONL of conversations to train on."""
    validation: str | None = None
    """JSONL of held-out conversations; None trains without validation."""
    output: str = ""
    """Folder of the run: checkpoints, metrics, TensorBoard."""

    warm_start: str | None = None
    """What to start from: a draft's folder in any layout that `megatron-dspark import` reads, or another run's folder
    or one of its checkpoints; None starts at random."""
    steps: int = 1000
    global_batch_size: int = 32
    micro_batch_size: int = 4
    max_length: int = 2048
    """Longest sample in tokens; longer ones are cut."""
    num_anchors: int = 512
    packing: bool = False
    """Put several samples into each row; micro_batch_size counts rows then."""
    packed_length: int | None = None
    """Tokens of a packed row, at most; None takes max_length."""
    anchor_context_parallel: int | None = None
    """Draw anchors that suit context parallelism of this size; None takes parallel.context."""
    seed: int = 1234
    precision: str = "fp32"
    transformer_impl: str = "local"
    block_attention: str = "prefix"
    """How the draft attends: "prefix" anywhere, "flex" (FlexAttention) on CUDA, "dense" for comparison."""
    feature_memory_gib: float = 0.0
    """Memory of each rank for captured features, so that later epochs do not run the target again; 0 keeps none.

    Above 0 the target runs over one sample at a time, as a feature cache's did, and with 0 over whole micro-batches."""
    features: str | None = None
    """Folder of a feature cache (megatron-dspark precompute): the target is not loaded, `target` and `data` are
    optional and only compared with the cache."""
    validation_features: str | None = None
    """Feature cache of the held-out conversations."""
    feature_dtype: str | None = None
    """How the cache must store features, e.g. "bfloat16"; None is that of `precision`, computed in it too."""
    feature_workers: int = 2
    """Threads of each rank that read features ahead."""
    recompute: bool = False
    """Recompute the draft's layers in the backward instead of keeping their activations."""

    log_interval: int = 10
    validation_interval: int = 100
    validation_samples: int = 64
    save_interval: int = 500
    tensorboard: bool = True
    time_limit_minutes: float | None = None
    """Save and stop after the first step that ends later than this; leave time for a save before a queue's limit."""
    timeout_minutes: float = 30.0
    """Longest wait for another rank before the job ends."""

    draft: DraftSettings = field(default_factory=DraftSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)

    @property
    def anchor_rule(self) -> AnchorRule:
        """How anchors are drawn, whatever the layout of the job."""
        return AnchorRule(
            self.num_anchors,
            self.seed,
            self.draft.block_size,
            self.parallel.context if self.anchor_context_parallel is None else self.anchor_context_parallel,
        )

    @property
    def warmup_steps(self) -> int:
        """Steps of rising learning rate: the configured share of this run, whatever its length."""
        if self.optimizer.warmup_share == 0:
            return 0
        return min(max(1, round(self.steps * self.optimizer.warmup_share)), max(self.steps - 1, 0))

    def validate(self) -> None:
        """Refuse what can be refused without reading any file.

        Raises:
            DSparkError: one sentence.
        """
        for name in ("output",) if self.features else ("target", "data", "output"):
            if not getattr(self, name):
                raise DSparkError(f"{name} is not set; give it in the recipe or with --{name}")
        for name in (
            "steps",
            "global_batch_size",
            "micro_batch_size",
            "num_anchors",
            "log_interval",
            "validation_interval",
            "validation_samples",
            "save_interval",
            "feature_workers",
        ):
            if getattr(self, name) < 1:
                raise DSparkError(f"{name} must be at least 1, and it is {getattr(self, name)}")
        if self.max_length < 2:
            raise DSparkError(f"max_length must be at least 2 tokens, and it is {self.max_length}")
        for name, value in _floats(self):
            if not math.isfinite(value):
                raise DSparkError(f"{name} is {value} and has to be a finite number")
        self._validate_checkpoints()
        if self.feature_memory_gib < 0:
            raise DSparkError(f"feature_memory_gib must not be negative, and it is {self.feature_memory_gib}")
        if self.validation_features and not self.features:
            raise DSparkError(
                f"validation_features is {self.validation_features!r} and features is not set; set both, or validation "
                "alone"
            )
        if self.features and self.validation and not self.validation_features:
            raise DSparkError(
                f"validation is {self.validation!r} and a run with features has no target to capture its features; "
                "precompute it too and set validation_features, or unset validation"
            )
        if self.precision not in PRECISIONS:
            raise DSparkError(f"precision is {self.precision!r} and must be one of {', '.join(PRECISIONS)}")
        if self.draft.markov_start not in ("random", "bigrams"):
            raise DSparkError(f"draft.markov_start is {self.draft.markov_start!r}; use 'random' or 'bigrams'")
        if self.draft.markov_start == "bigrams" and self.warm_start is not None:
            raise DSparkError(
                f"draft.markov_start is 'bigrams' and warm_start is {self.warm_start}, which has a Markov head "
                "already; drop one of them"
            )
        if self.draft.markov_start == "bigrams" and self.draft.markov_head_type != "vanilla":
            raise DSparkError(
                f"draft.markov_start 'bigrams' is for the vanilla head and draft.markov_head_type is "
                f"{self.draft.markov_head_type!r}, whose latent is no embedding; use 'random'"
            )
        for name, size in (
            ("parallel.tensor", self.parallel.tensor),
            ("parallel.pipeline", self.parallel.pipeline),
            ("parallel.context", self.parallel.context),
            ("anchor_context_parallel", self.anchor_rule.context_parallel_size),
        ):
            if size < 1:
                raise DSparkError(f"{name} must be at least 1, and it is {size}")
        check_run(self)
        optimizer = self.optimizer
        if not 0 <= optimizer.warmup_share < 1:
            raise DSparkError(f"optimizer.warmup_share must be in [0, 1), and it is {optimizer.warmup_share}")
        if optimizer.learning_rate < 0:
            raise DSparkError(f"optimizer.learning_rate must not be negative, and it is {optimizer.learning_rate}")
        if not 0 <= optimizer.min_learning_rate <= optimizer.learning_rate:
            raise DSparkError(
                f"optimizer.min_learning_rate {optimizer.min_learning_rate} must lie between 0 and learning_rate "
                f"{optimizer.learning_rate}"
            )
        if not 0 < optimizer.min_loss_scale <= optimizer.initial_loss_scale:
            raise DSparkError(
                f"optimizer.min_loss_scale {optimizer.min_loss_scale:g} must lie between 0 and initial_loss_scale "
                f"{optimizer.initial_loss_scale:g}"
            )
        for name, value, fits, range_ in (
            ("optimizer.weight_decay", optimizer.weight_decay, optimizer.weight_decay >= 0, "at least 0"),
            ("optimizer.adam_beta1", optimizer.adam_beta1, 0 <= optimizer.adam_beta1 < 1, "in [0, 1)"),
            ("optimizer.adam_beta2", optimizer.adam_beta2, 0 <= optimizer.adam_beta2 < 1, "in [0, 1)"),
            ("optimizer.adam_eps", optimizer.adam_eps, optimizer.adam_eps > 0, "above 0"),
            ("optimizer.clip_grad", optimizer.clip_grad, optimizer.clip_grad >= 0, "at least 0, which does not clip"),
            ("draft.initializer_std", self.draft.initializer_std, self.draft.initializer_std >= 0, "at least 0"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "at least 0 and below 2**63"),
        ):
            if not fits:
                raise DSparkError(f"{name} must be {range_}, and it is {value}")
        if optimizer.loss_scale_window < 1:
            raise DSparkError(
                f"optimizer.loss_scale_window must be at least 1 step, and it is {optimizer.loss_scale_window}"
            )
        if optimizer.decay_style not in ("cosine", "linear", "constant"):
            raise DSparkError(f"optimizer.decay_style is {optimizer.decay_style!r}; use cosine, linear or constant")

    def _validate_checkpoints(self) -> None:
        checkpoint = self.checkpoint
        if checkpoint.keep_last is not None and checkpoint.keep_last < 1:
            raise DSparkError(f"checkpoint.keep_last must be at least 1, and it is {checkpoint.keep_last}")
        if checkpoint.keep_best < 0:
            raise DSparkError(f"checkpoint.keep_best must not be negative, and it is {checkpoint.keep_best}")
        if checkpoint.keep_best:
            if checkpoint.keep_last is None:
                raise DSparkError(
                    f"checkpoint.keep_best is {checkpoint.keep_best} and checkpoint.keep_last is not set, which keeps "
                    "every checkpoint; set checkpoint.keep_last too"
                )
            held_out = "validation_features" if self.features else "validation"
            if not getattr(self, held_out) or self.save_interval % self.validation_interval:
                raise DSparkError(
                    f"checkpoint.keep_best is {checkpoint.keep_best} and needs a validation at every save: {held_out} "
                    f"is {getattr(self, held_out)!r}, save_interval {self.save_interval}, validation_interval "
                    f"{self.validation_interval}; set {held_out} and make save_interval a multiple"
                )
        for name in ("time_limit_minutes", "timeout_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise DSparkError(f"{name} must be positive, and it is {value}")

    def model_config(self, target: TargetConfig) -> DSparkModelConfig:
        """Return the model config of this run against `target`, validated.

        Raises:
            DSparkError: see `DSparkModelConfig.validate`.
        """
        draft, objective = self.draft, self.objective
        if draft.mask_token_id is None:
            raise DSparkError(
                "draft.mask_token_id is not set; name a token id that the target's tokenizer never produces "
                f"(below {target.vocab_size})"
            )
        if not self.features:
            check_target_split(target, self.parallel.tensor)
        dtype = PRECISIONS[self.precision]
        config = DSparkModelConfig(
            transformer=draft_transformer_config(
                num_layers=draft.num_layers,
                hidden_size=target.hidden_size,
                num_attention_heads=draft.num_attention_heads or target.num_attention_heads,
                num_query_groups=draft.num_key_value_heads or target.num_key_value_heads,
                kv_channels=draft.head_dim or target.head_dim,
                ffn_hidden_size=draft.intermediate_size or target.intermediate_size,
                layernorm_epsilon=target.rms_norm_eps,
                init_method_std=draft.initializer_std,
                params_dtype=dtype,
                bf16=self.precision == "bf16",
                fp16=self.precision == "fp16",
                transformer_impl=self.transformer_impl,
                tensor_model_parallel_size=self.parallel.tensor,
                context_parallel_size=self.parallel.context,
                sequence_parallel=self.parallel.sequence,
                pipeline_model_parallel_size=self.parallel.pipeline,
                virtual_pipeline_model_parallel_size=self.parallel.virtual_pipeline,
                recompute_granularity="full" if self.recompute else None,
                recompute_method="uniform" if self.recompute else None,
                recompute_num_layers=1 if self.recompute else None,
            ),
            vocab_size=target.vocab_size,
            rotary_base=target.rope_theta,
            seq_length=self.max_length,
            block_size=draft.block_size,
            target_layer_ids=(
                default_target_layer_ids(target.num_layers)
                if draft.target_layer_ids is None
                else list(draft.target_layer_ids)
            ),
            num_target_layers=target.num_layers,
            mask_token_id=draft.mask_token_id,
            block_attention=self.block_attention,
            num_anchors=self.num_anchors,
            allow_unservable_taps=draft.allow_unservable_taps,
            markov_rank=draft.markov_rank,
            markov_head_type=draft.markov_head_type,
            enable_confidence_head=draft.enable_confidence_head,
            confidence_head_with_markov=draft.confidence_head_with_markov,
            detach_confidence_features=draft.detach_confidence_features,
            train_embeddings=draft.train_embeddings,
            train_lm_head=draft.train_lm_head,
            ce_loss_weight=objective.ce_weight,
            l1_loss_weight=objective.l1_weight,
            confidence_loss_weight=objective.confidence_weight,
            loss_decay_gamma=objective.loss_decay_gamma,
            loss_normalizer=objective.normalizer,
            objective_chunk_bytes=objective.chunk_bytes,
            objective_kernel=objective.kernel,  # type: ignore[arg-type]
            target_path=None if self.features else str(target.folder),
            replicas_path=str(target.folder) if self.features else None,
        )
        config.validate()
        return config


def _floats(settings: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, value) of every setting that is a float, by the names that `override` takes."""
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if dataclasses.is_dataclass(value):
            yield from _floats(value, f"{prefix}{item.name}.")
        elif isinstance(value, float):
            yield f"{prefix}{item.name}", value
