"""An export's own record (`dspark_export.json`): which target it was trained against, what serving it measured.

Nothing here imports Megatron-Core: a machine that only serves needs none.
"""

from pathlib import Path
from typing import Any

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, write_json
from megatron_dspark.hf.card import CARD_FILE, model_card, write_model_card
from megatron_dspark.hf.lint import PROVENANCE_FILE, lint_folder
from megatron_dspark.hf.load import read_config
from megatron_dspark.hf.local_paths import without_local_paths
from megatron_dspark.targets.folder import read_target_config


def refuse_another_target(folder: str | Path, target: str | Path) -> None:
    """Refuse a target that an exported draft was not trained against; drafts without our record are taken as they are.

    Args:
        folder: the exported draft.
        target: the target's folder.

    Raises:
        DSparkError: the target's config or weights are others, or cannot be read.
    """
    path = Path(folder) / PROVENANCE_FILE
    trained = read_json(path, "the export's record").get("target") if path.exists() else None
    if not trained:
        return
    found = read_target_config(target, any_architecture=True).fingerprint()
    if found != trained["fingerprint"]:
        raise DSparkError(
            f"the draft {folder} was trained against the target {trained['name']} (fingerprint "
            f"{trained['fingerprint'][:12]}…) and {target} holds another one ({found[:12]}…); verify it with its own"
        )


def record_accepted_length(folder: str | Path, measured: dict[str, Any]) -> None:
    """Write what the verifier measured into the export's `dspark_export.json` and its model card.

    A model card that somebody has edited is left as it is.

    Args:
        folder: the exported draft.
        measured: the accepted length and how it was measured.
    """
    folder = Path(folder)
    path, card = folder / PROVENANCE_FILE, folder / CARD_FILE
    record, config = read_json(path, "the export's record"), read_config(folder)
    engines = lint_folder(folder).engines
    name = folder.resolve().name
    ours = card.exists() and card.read_text(encoding="utf-8") == model_card(name, config, record, list(engines))
    # One entry a way of decoding: a sampled measurement does not replace the greedy one.
    record["accepted_length"] = {**(record.get("accepted_length") or {}), **without_local_paths(measured)}
    write_json(path, record)
    if ours:
        write_model_card(folder, name, config, record, engines)
