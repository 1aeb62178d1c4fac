"""Starting a run from a draft that exists: an export of another run, or another tool's draft in any known layout.

The one place where training reads what `hf/` writes: files come back in by the door through which they went out.
"""

from typing import TYPE_CHECKING

import torch

from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.config import refuse_another_draft, settings_from_config, settings_from_model
from megatron_dspark.hf.convert import OpenedDraft as WarmStart
from megatron_dspark.hf.convert import open_draft
from megatron_dspark.hf.foreign import REPLICAS
from megatron_dspark.targets.folder import read_frozen_tables, read_target_config

if TYPE_CHECKING:
    from megatron_dspark.model.draft import DSparkDraft


def open_warm_start(folder: str, config: DSparkModelConfig) -> WarmStart:
    """Open the draft that a run starts from, and refuse one that means something else than `config`'s.

    Frozen replicas stay the target's own, to the last bit: an export in bfloat16 holds rounded ones, and the teacher
    reads them. Trained ones are the folder's.

    Args:
        folder: a draft in any layout that `hf.convert.open_draft` reads.
        config: the run's model config, with `target_path` or `replicas_path`.

    Raises:
        DSparkError: the folder cannot be read; its draft differs from the run's in a setting, which is named; or it
            holds an embedding or LM head that was trained, and the run would freeze the target's.
    """
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
