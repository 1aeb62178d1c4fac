"""Starting a run from a draft that exists: another run's checkpoint, its export, or another tool's draft.

The one place where training reads what `hf/` writes: files come back in by the door through which they went out.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.config import refuse_another_draft, settings_from_config, settings_from_model
from megatron_dspark.hf.convert import OpenedDraft as WarmStart
from megatron_dspark.hf.convert import open_draft
from megatron_dspark.hf.foreign import REPLICAS
from megatron_dspark.targets.folder import read_frozen_tables, read_target_config
from megatron_dspark.training.checkpoint import Checkpoint, find_checkpoint, load_draft_weights

if TYPE_CHECKING:
    from megatron_dspark.model.draft import DSparkDraft


def open_warm_start(folder: str, config: DSparkModelConfig) -> WarmStart | Checkpoint:
    """Open the draft that a run starts from, and refuse one that means something else than `config`'s.

    Frozen replicas stay the target's own, to the last bit: an export in bfloat16 holds rounded ones, and the teacher
    reads them. Trained ones are the folder's.

    Args:
        folder: a draft in any layout that `hf.convert.open_draft` reads, or a run's folder (its newest checkpoint), or
            one `step-…` folder of it.
        config: the run's model config, with `target_path` or `replicas_path`.

    Raises:
        DSparkError: the folder cannot be read; its draft differs from the run's in a setting, which is named; or it
            holds an embedding or LM head that was trained, and the run would freeze the target's.
    """
    path = Path(folder)
    if (path / "checkpoints").is_dir() or path.name == "checkpoints" or path.name.startswith("step-"):
        return _open_checkpoint(folder, config)
    opened = open_draft(folder, config.target_path or config.replicas_path)
    try:
        refuse_another_draft(settings_from_model(config), settings_from_config(opened.config))
    except DSparkError as error:
        raise DSparkError(f"warm_start {folder}: {error}") from None
    trained = {REPLICAS[0]: config.train_embeddings, REPLICAS[1]: config.train_lm_head}
    frozen = [name for name in REPLICAS if not trained[name]]
    stored = [name for name in frozen if name not in opened.tensors.from_target]
    if stored:
        tables = read_frozen_tables(
            read_target_config(config.target_path or config.replicas_path, any_architecture=True)
        )
        for name in stored:
            theirs = opened.tensors[name]
            if not torch.equal(tables[name.removesuffix(".weight")].to(theirs.dtype), theirs):
                setting = "draft.train_embeddings" if name == REPLICAS[0] else "draft.train_lm_head"
                raise DSparkError(
                    f"warm_start {folder}: its {name} is not the target's, so it was trained or belongs to another "
                    f"target, and {setting} is false, which freezes the target's; set {setting}=true, or start from "
                    "another draft"
                )
    return opened._replace(tensors=opened.tensors.taking_from_target(frozen))


def _open_checkpoint(folder: str, config: DSparkModelConfig) -> Checkpoint:
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        raise DSparkError(f"warm_start {folder}: the run has no checkpoint yet; wait for one, or name another folder")
    saved = DSparkModelConfig.from_dict(checkpoint.run["model"])
    try:
        refuse_another_draft(settings_from_model(config), settings_from_model(saved))
    except DSparkError as error:
        raise DSparkError(f"warm_start {folder}: {error}") from None
    for table in ("embeddings", "lm_head"):
        if getattr(saved, f"train_{table}") and not getattr(config, f"train_{table}"):
            raise DSparkError(
                f"warm_start {folder}: its run trained the {table} (draft.train_{table}) and this one would freeze the "
                f"target's; set draft.train_{table}=true, or start from another draft"
            )
    target = read_target_config(config.target_path or config.replicas_path, any_architecture=True)
    if not (config.train_embeddings and config.train_lm_head):
        theirs = checkpoint.run["target"]
        if theirs["fingerprint"] != target.fingerprint():
            raise DSparkError(
                f"warm_start {folder}: it was trained against the target {theirs['name']} and {target.folder} holds "
                "another one; point at the same target, or start from another draft"
            )
    return checkpoint


def warm_start_model(model: Any | None, opened: WarmStart | Checkpoint) -> None:
    """Fill a run's draft from what `open_warm_start` returned; every rank calls it, in any layout.

    Args:
        model: the stage that holds the draft, None on the other stages.
        opened: a draft's folder, or another run's checkpoint.
    """
    if not isinstance(opened, Checkpoint):
        start_from_draft(None if model is None else model.draft, opened)
        return
    kept: list[str] = []
    if model is not None:
        config = model.draft.dspark_config
        trained = {REPLICAS[0]: config.train_embeddings, REPLICAS[1]: config.train_lm_head}
        kept = [f"draft.{name}" for name in (*REPLICAS, "teacher_lm_head.weight") if not trained.get(name)]
    load_draft_weights(opened, model, keep=kept)


def start_from_draft(draft: "DSparkDraft | None", opened: WarmStart) -> None:
    """Fill this rank's part of the draft. A trained LM head leaves the teacher's, which is the target's, alone.

    The caller refreshes the optimizer's FP32 masters afterwards (`optimizer.reload_model_params()`).

    Args:
        draft: this rank's draft, None on a pipeline stage without one.
        opened: what `open_warm_start` returned.
    """
    # Importing Megatron-Bridge takes seconds, which a run that starts from random weights should not cost.
    from megatron_dspark.hf.mapping import load_tensors

    if draft is not None:
        load_tensors(draft, opened.config, opened.tensors)
