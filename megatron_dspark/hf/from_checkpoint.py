"""From a training run's sharded checkpoint to a Hugging Face folder."""

import os
from pathlib import Path
from typing import Any

from megatron_dspark.builder import DSparkModelBuilder
from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import require_folder
from megatron_dspark.hf.export import MAX_SHARD_BYTES, ExportReport, export_draft
from megatron_dspark.parallel import process_groups
from megatron_dspark.training.checkpoint import Checkpoint, find_checkpoint, load_draft_weights


def export_checkpoint(
    run: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    layout: str = "deepspec",
    target_name: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Export a checkpoint of any layout, without the target.

    One process holds the draft once; under torchrun it is spread over the ranks by tensor parallelism, whatever the
    layout of the run was. The writing rank gathers one tensor at a time and holds at most one weight file.

    Args:
        run: a run's output folder, or one of its `step-…` folders.
        output: the folder to publish; it must not hold anything yet.
        step: optimizer step; None for the newest.
        dtype: "bfloat16" or "float32".
        layout: "deepspec" or "speculators".
        target_name: the target's Hugging Face id, for the speculators layout and the model card.
        max_shard_bytes: size of weight file above which the weights are split.

    Raises:
        DSparkError: there is no checkpoint, it cannot be read, or the export is refused (see `export_draft`).
    """
    require_folder(run, "the run", "name a folder that training wrote")
    checkpoint = find_checkpoint(run, step)
    if checkpoint is None:
        raise DSparkError(f"{run} holds no checkpoint; train a run there first, or name another folder")
    config = DSparkModelConfig.from_dict(checkpoint.run["model"])
    config.target_path = config.replicas_path = None
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    # An export spreads the draft by tensor parallelism alone, whatever the layout of the run was.
    transformer = config.transformer
    transformer.tensor_model_parallel_size, transformer.sequence_parallel = ranks, False
    transformer.context_parallel_size = transformer.pipeline_model_parallel_size = 1
    transformer.virtual_pipeline_model_parallel_size = None
    # Nor do kernels matter, which this machine may lack: parameters have the same names under all of them.
    transformer.transformer_impl, config.objective_kernel = "local", "eager"
    # The checkpoint fills every parameter: drawing random ones first would cost more than reading it.
    transformer.perform_initialization = False
    config.validate(ranks)
    with process_groups(ranks, seed=0) as groups:
        model = DSparkModelBuilder(config).build_model(groups)
        load_draft_weights(checkpoint, model)
        return export_draft(
            model.draft,
            checkpoint.run["target"]["config"],
            output,
            dtype,
            _provenance(checkpoint),
            max_shard_bytes,
            layout=layout,
            target_name=target_name,
        )


def _provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    model, run = checkpoint.run["model"], checkpoint.run
    validation = run["metrics"]["validation"]
    conventions = (
        "ce_loss_weight",
        "l1_loss_weight",
        "confidence_loss_weight",
        "loss_decay_gamma",
        "loss_normalizer",
        "detach_confidence_features",
    )
    return {
        "run": {"step": checkpoint.step, "settings": run["settings"], "metrics": run["metrics"]},
        "target": {key: run["target"][key] for key in ("name", "fingerprint")},
        "conventions": {name: model[name] for name in conventions},
        "data": run["data"],
        "tau": validation.get("tau"),
    }
