"""From a training run's sharded checkpoint to a Hugging Face folder."""

from pathlib import Path
from typing import Any

from megatron_dspark.builder import DSparkModelBuilder
from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, write_json
from megatron_dspark.hf.export import ExportReport, export_draft
from megatron_dspark.hf.lint import PROVENANCE_FILE
from megatron_dspark.hf.rules import without_local_paths
from megatron_dspark.parallel import process_groups
from megatron_dspark.training.checkpoint import Checkpoint, find_checkpoint, load_draft_weights


def export_checkpoint(
    run: str | Path, output: str | Path, *, step: int | None = None, dtype: str = "bfloat16"
) -> ExportReport:
    """Export a checkpoint of any tensor- or data-parallel size; one process, without the target.

    Args:
        run: a run's output folder, or one of its `step-…` folders.
        output: the folder to publish; it must not hold anything yet.
        step: optimizer step; None for the newest.
        dtype: "bfloat16" or "float32".

    Raises:
        DSparkError: there is no checkpoint, it cannot be read, or the export is refused (see `export_draft`).
    """
    checkpoint = find_checkpoint(run, step)
    if checkpoint is None:
        raise DSparkError(f"{run} holds no checkpoint; train a run there first, or name another folder")
    config = DSparkModelConfig.from_dict(checkpoint.run["model"])
    config.target_path = None
    config.transformer.tensor_model_parallel_size = 1
    with process_groups(1, seed=0) as groups:
        model = DSparkModelBuilder(config).build_model(groups)
        load_draft_weights(checkpoint, model)
        return export_draft(model.draft, checkpoint.run["target"]["config"], output, dtype, _provenance(checkpoint))


def record_accepted_length(folder: str | Path, measured: dict[str, Any]) -> None:
    """Write what the verifier measured into the export's `dspark_export.json`.

    Args:
        folder: the exported draft.
        measured: the accepted length and how it was measured.
    """
    path = Path(folder) / PROVENANCE_FILE
    record = read_json(path, "the export's record")
    # One entry a way of decoding: a sampled measurement does not replace the greedy one.
    record["accepted_length"] = {**(record.get("accepted_length") or {}), **without_local_paths(measured)}
    write_json(path, record)


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
