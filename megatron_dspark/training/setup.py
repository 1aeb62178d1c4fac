"""What a run is made of before its first step: modules, optimizer, schedule, and whether it may go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_dspark.builder import DSparkModelBuilder
from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.data.chat import ChatSample
from megatron_dspark.data.sampler import AnchorRule
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.pipeline import ForwardCommunicator
from megatron_dspark.files import require_file, require_writable, sha256
from megatron_dspark.model.model import DSparkModel
from megatron_dspark.objective.loss import FractionalDivisor
from megatron_dspark.targets.folder import TargetConfig
from megatron_dspark.training.checkpoint import Checkpoint, checkpoints_folder
from megatron_dspark.training.code_version import code_version
from megatron_dspark.training.overrides import by_path
from megatron_dspark.training.report import last_logged_step
from megatron_dspark.training.settings import TrainSettings


def build_training(
    settings: TrainSettings, config: DSparkModelConfig, groups: ProcessGroupCollection
) -> tuple[list[Any], Any, OptimizerParamScheduler]:
    """Return this rank's wrapped stages, Megatron-Core's optimizer and its schedule.

    On a pipeline stage without the draft the optimizer holds nothing; it still takes part in the gradient norm.
    """
    optimizer_settings = settings.optimizer
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=optimizer_settings.distributed
    )
    models = DSparkModelBuilder(config, forward_communicator=True).build_distributed_models(
        groups, ddp_config=ddp, mixed_precision_wrapper=Float16Module, data_parallel_random_init=False
    )
    weighted = config.loss_normalizer == "weights"
    config.transformer.finalize_model_grads_func = (
        FractionalDivisor(finalize_model_grads) if weighted else finalize_model_grads
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optimizer_settings.learning_rate,
            min_lr=optimizer_settings.min_learning_rate,
            weight_decay=optimizer_settings.weight_decay,
            adam_beta1=optimizer_settings.adam_beta1,
            adam_beta2=optimizer_settings.adam_beta2,
            adam_eps=optimizer_settings.adam_eps,
            clip_grad=optimizer_settings.clip_grad,
            bf16=settings.precision == "bf16",
            fp16=settings.precision == "fp16",
            initial_loss_scale=optimizer_settings.initial_loss_scale,
            min_loss_scale=optimizer_settings.min_loss_scale,
            loss_scale_window=optimizer_settings.loss_scale_window,
            params_dtype=config.transformer.params_dtype,
            use_distributed_optimizer=optimizer_settings.distributed,
        ),
        models,
        use_gloo_process_groups=False,
        pg_collection=groups,
    )
    # Megatron-Core answers this once, with a collective; its clipping asks on ranks with parameters alone.
    for group in SEPARATE_GRAD_NORM_GROUPS:
        optimizer.has_grad_norm_group(group)
    if find_draft_stage(models) is not None:
        config.transformer.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optimizer_settings.learning_rate,
        min_lr=optimizer_settings.min_learning_rate,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.steps,
        lr_decay_style=optimizer_settings.decay_style,
        start_wd=optimizer_settings.weight_decay,
        end_wd=optimizer_settings.weight_decay,
        wd_incr_steps=settings.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return models, optimizer, scheduler


def find_draft_stage(models: list[Any]) -> DSparkModel | None:
    """Return the stage that holds the draft, without its wrappers; None on a rank that has none."""
    return next((stage for stage in map(unwrap_model, models) if stage.draft is not None), None)


def forward_communicator(models: list[Any], groups: ProcessGroupCollection) -> ForwardCommunicator | None:
    """Return what carries payloads between the pipeline stages, for the schedules; None without a pipeline."""
    if groups.pp.size() == 1:
        return None
    return ForwardCommunicator(groups.pp, get_model_config(models[0]))


def describe_data(settings: TrainSettings) -> dict[str, Any]:
    """Return the name and SHA-256 of the training file; of its samples a run adds the fingerprint.

    Raises:
        DSparkError: it does not exist, or is no file.
    """
    path = Path(settings.data)
    require_file(path, "the training data", "make it with megatron-dspark prepare")
    return {"file": path.name, "sha256": sha256(path)}


# Of an ordinary token, so many conversations hold one; a corpus need not be read to its end for it.
_CONVERSATIONS_LOOKED_AT = 1000


def refuse_mask_in_data(samples: Sequence[ChatSample], mask_token_id: int) -> None:
    """Refuse a mask that conversations hold: the draft could not tell what is to be proposed from what stands there.

    Raises:
        DSparkError: names the first sample that has it.
    """
    for sample in samples[:_CONVERSATIONS_LOOKED_AT]:
        if bool((sample.input_ids == mask_token_id).any()):
            raise DSparkError(
                f"draft.mask_token_id {mask_token_id} stands in the sample {sample.sample_id!r}, so it is a token of "
                "ordinary text or of the chat template; name one that the target's tokenizer never produces"
            )


def refuse_without_anchors(samples: Sequence[ChatSample], anchors: AnchorRule, max_length: int) -> None:
    """Refuse samples of which none can have an anchor: nothing would be trained. Mostly the first one is looked at.

    Raises:
        DSparkError: with the longest sample, and the most supervised tokens in a row.
    """
    if any(len(anchors.draw(sample, 0)) for sample in samples):
        return
    longest = max(len(sample.input_ids) for sample in samples)
    in_a_row = max(_longest_run(sample.loss_mask) for sample in samples)
    needed, way = "two supervised tokens in a row", "train on longer replies"
    if anchors.context_parallel_size > 1:
        needed += (
            f" that begin a block of {anchors.block_size} rows inside one of the {2 * anchors.context_parallel_size} "
            "parts that context-parallel ranks make of a sample"
        )
        way += ", or lower parallel.context (anchor_context_parallel)"
    raise DSparkError(
        f"none of the {len(samples)} training samples has a place for an anchor, which takes {needed}: at most "
        f"{in_a_row} are in a row, and the longest sample has {longest} tokens (max_length is {max_length}); {way}"
    )


def _longest_run(mask: Tensor) -> int:
    borders = torch.nonzero(~torch.nn.functional.pad(mask, (1, 1))).flatten()
    return int(borders.diff().max()) - 1


# Where files are may differ from machine to machine; what they hold may not.
_PLACES = {"target", "data", "validation", "features", "validation_features", "warm_start"}


def agreed_by_ranks(settings: TrainSettings, target: TargetConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Return what every rank of a training job must mean alike, by name."""
    values = {name: value for name, value in by_path(settings.as_dict()).items() if name not in _PLACES}
    contents = {"the target's fingerprint": target.fingerprint(), "the training data's SHA-256": data["sha256"]}
    if settings.validation and not settings.features:
        contents["the validation data's SHA-256"] = sha256(Path(settings.validation))
    return {**values, **contents, "the code": code_version()}


# What does not change what is computed, or (layout, kernels) changes its rounding alone.
_FREE_TO_CHANGE = {"output", "steps", "log_interval", "validation_interval", "validation_samples", "save_interval"}
_FREE_TO_CHANGE |= {"tensorboard", "validation", "parallel", "micro_batch_size", "recompute", "target", "data"}
_FREE_TO_CHANGE |= {"block_attention", "checkpoint", "time_limit_minutes", "timeout_minutes"}
_FREE_TO_CHANGE |= {"objective.chunk_bytes", "objective.kernel", "draft.markov_start", "warm_start"}
_FREE_TO_CHANGE |= {"anchor_context_parallel", "packing", "packed_length", "feature_memory_gib"}
_FREE_TO_CHANGE |= {"features", "validation_features", "feature_workers"}
# The scale itself is in the checkpoint.
_FREE_TO_CHANGE |= {"optimizer.initial_loss_scale"}


def _stored_as(values: dict[str, Any]) -> str:
    """Return which of Megatron-Core's three optimizers has these settings: none loads what another has saved."""
    if values["optimizer.distributed"]:
        return "distributed"
    return "single precision" if values["precision"] == "fp32" else "half precision with masters"


def _refuse_other_data(settings: TrainSettings, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Samples count, from a file or from a cache of its features; two caches must have the same features."""
    place = f"the feature cache {settings.features}" if settings.features else settings.data
    # Checkpoints of an earlier version know the file alone.
    key = "samples" if "samples" in before else "sha256"
    if before[key] == now[key]:
        if before.get("features", now.get("features")) == now.get("features", before.get("features")):
            return
        found = f"{place} holds features that were computed or stored in another way"
    elif before["sha256"] == now["sha256"]:
        found = f"{place} gives other tokens now, since the target's tokenizer or chat template has changed"
    else:
        found = f"{place} holds other samples"
    raise DSparkError(
        f"{settings.output} was trained on {before['file']} and {found}; restore the data, choose another output, or "
        "accept the change with --allow data"
    )


# What other verbs leave in their folders.
_OTHERS = {"manifest.json": "a feature cache", "prepare.json": "prepared data", "config.json": "a model"}


def check_output(output: str | Path) -> None:
    """Refuse a folder that cannot be written, or that holds something that a run's files would spoil.

    Raises:
        DSparkError: one sentence.
    """
    require_writable(output, "the run")
    for name, what in _OTHERS.items():
        if (Path(output) / name).exists():
            raise DSparkError(f"{output} holds {what} ({name}) and a run would write into it; choose another output")


def refuse_lost_checkpoints(settings: TrainSettings) -> None:
    """Refuse to start anew in a folder whose run will have saved, and whose checkpoints are gone (a missing mount).

    Raises:
        DSparkError: the metrics go past a first save, and there is no folder of checkpoints, or it is empty.
    """
    folder, done = checkpoints_folder(settings.output), last_logged_step(settings.output)
    # The first save begins a folder in it before the next step is logged, and whatever is killed leaves one there.
    if done > settings.save_interval and not (folder.exists() and any(folder.iterdir())):
        raise DSparkError(
            f"{settings.output} has metrics of {done} steps and {folder} "
            f"{'holds nothing' if folder.exists() else 'does not exist'}: the run would start from nothing and lose "
            "them; restore that folder, choose another output, or remove metrics.jsonl to start anew"
        )


def check_resumable(
    settings: TrainSettings, target: TargetConfig, data: dict[str, Any], checkpoint: Checkpoint, resume: bool
) -> None:
    """Refuse to go on from `checkpoint` where that would give another result than an uninterrupted run.

    What `settings.checkpoint.allow` names may differ.

    Raises:
        DSparkError: names the setting, the target or the data that differs.
    """
    if not resume:
        raise DSparkError(
            f"{settings.output} already has a checkpoint of step {checkpoint.step}; resume it, or choose another output"
        )
    if checkpoint.step > settings.steps:
        raise DSparkError(
            f"{settings.output} is already at step {checkpoint.step} and the run is to end at {settings.steps}; raise "
            "steps or choose another output"
        )
    allowed, now = set(settings.checkpoint.allow), by_path(settings.as_dict())
    for name in allowed:
        if name not in now and name not in settings.as_dict():
            raise DSparkError(f"allow names {name!r}, which is no setting; see --set for their names")
    if "target" not in allowed and checkpoint.run["target"]["fingerprint"] != target.fingerprint():
        raise DSparkError(
            f"{settings.output} was trained against the target {checkpoint.run['target']['name']} and {target.folder} "
            "holds another one; point at the same target, choose another output, or accept the change with "
            "--allow target"
        )
    if "data" not in allowed:
        _refuse_other_data(settings, checkpoint.run["data"], data)
    saved = by_path(checkpoint.run["settings"])
    before = saved.get("anchor_context_parallel") or saved.get("parallel.context", 1)
    if "anchor_context_parallel" not in allowed and before != settings.anchor_rule.context_parallel_size:
        raise DSparkError(
            f"anchors were drawn for context parallelism of size {before} in the checkpoint of step {checkpoint.step} "
            f"and would now be for {settings.anchor_rule.context_parallel_size}, which would change the result; set "
            f"anchor_context_parallel to {before}, choose another output, or accept it with --allow "
            "anchor_context_parallel"
        )
    # What the version that saved did not know behaved like its default.
    saved = {**by_path(TrainSettings().as_dict()), **saved}
    if _stored_as(saved) != _stored_as(now):
        name = next(name for name in ("optimizer.distributed", "precision") if saved[name] != now[name])
        raise DSparkError(
            f"{name} was {saved[name]!r} in the checkpoint of step {checkpoint.step} and is now {now[name]!r}, whose "
            "optimizer state is stored in another way; restore it, or start another run from the weights with "
            f"warm_start={settings.output}"
        )
    for name, value in now.items():
        free = {name, name.split(".")[0]} & (_FREE_TO_CHANGE | allowed)
        if not free and saved[name] != value:
            raise DSparkError(
                f"{name} was {saved[name]!r} in the checkpoint of step {checkpoint.step} and is now {value!r}, "
                f"which would change the result; restore it, choose another output, or accept it with --allow {name}"
            )
