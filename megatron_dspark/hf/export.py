"""Writing a Megatron draft as a Hugging Face folder that serving engines load.

The folder holds config.json, the weights, and dspark_export.json, the record of where they come from. It is complete
and free of lint, or it is not there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as distributed
from huggingface_hub import split_torch_state_dict_into_shards
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import atomic_folder, finite, json_text, refuse_taken, save_tensors, sha256, write_json
from megatron_dspark.hf.card import write_model_card
from megatron_dspark.hf.config import draft_hf_config, settings_from_model
from megatron_dspark.hf.layouts import DraftDimensions, tensor_shapes
from megatron_dspark.hf.lint import PROVENANCE_FILE, EngineVerdict, engine_table, lint_folder
from megatron_dspark.hf.load import CONFIG_FILE, INDEX_FILE
from megatron_dspark.hf.local_paths import local_paths, without_local_paths
from megatron_dspark.hf.speculators import speculators_config

if TYPE_CHECKING:
    from torch.nn import Module

SCHEMA = "megatron-dspark/export/1"
# What every export records, None where the caller does not know it: an absent measurement is visible as such.
RECORDED = ("run", "conventions", "data", "tau", "accepted_length")
WRITTEN_LAYOUTS = ("deepspec", "speculators")
# Larger weights are split over several files with an index.
MAX_SHARD_BYTES = 5_000_000_000
# safetensors' readers in transformers ask for it.
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class ExportReport:
    """What was written, and who will load it.

    Attributes:
        folder: the published folder.
        layout: "deepspec" or "speculators".
        dtype: of every tensor.
        tensors: their number.
        parameters: their elements.
        files: bytes of each file.
        engines: a verdict for each serving engine.
        shortened_paths: places in the provenance at which a path of this machine was cut to its last part.
    """

    folder: str
    layout: str
    dtype: str
    tensors: int
    parameters: int
    files: dict[str, int]
    engines: tuple[EngineVerdict, ...]
    shortened_paths: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON."""
        return asdict(self)

    def render(self) -> RenderableType:
        """The report as rich tables."""
        table = Table("File", "Bytes", title=f"{self.tensors} tensors, {self.parameters:,} parameters in {self.dtype}")
        for name, size in self.files.items():
            table.add_row(name, f"{size:,}")
        return Group(table, engine_table(self.engines))


def export_draft(
    draft_module: "Module | None",
    target_hf_config: Mapping[str, Any],
    output_folder: str | Path,
    dtype: str = "bfloat16",
    provenance: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    layout: str = "deepspec",
    target_name: str | None = None,
) -> ExportReport:
    """Write a draft in the DeepSpec (or speculators) layout. Every rank of the job calls it; one rank writes.

    Tensors are gathered one at a time; the writing rank holds at most one weight file in memory.

    Args:
        draft_module: the draft, alone or wrapped; None on pipeline stages that do not hold it.
        target_hf_config: the target's config.json.
        output_folder: where to publish; it must not hold anything yet.
        dtype: "bfloat16" or "float32".
        provenance: what dspark_export.json records: `run`, `conventions`, `data`, `tau`, `accepted_length` and anything
            else that JSON holds. Paths of this machine inside it are cut to their last part; a NaN becomes null.
        max_shard_bytes: size of weight file above which the weights are split.
        layout: "deepspec" or "speculators".
        target_name: the target's Hugging Face id, for the speculators layout and the model card.

    Returns:
        The report, the same on every rank.

    Raises:
        DSparkError: the draft cannot be described in this layout, the folder is taken, a tensor is left over or not
            finite, or the result breaks a lint rule. Nothing is left in `output_folder`, and every rank raises it.
    """
    # Importing Megatron-Bridge takes seconds, which only this function needs.
    from megatron_dspark.hf.mapping import check_coverage, stream_tensors, unwrap_model

    writer = _writing_rank(draft_module is not None)
    draft = None if draft_module is None else unwrap_model(draft_module)

    def prepare() -> tuple[dict[str, Any], dict[str, Any]] | None:
        if draft is None:
            return None
        config = draft_hf_config(target_hf_config, settings_from_model(draft.dspark_config, dtype))
        check_coverage(draft, config)
        record = _checked_provenance(provenance or {})
        trained = {"embed_tokens.weight": "train_embeddings", "lm_head.weight": "train_lm_head"}
        record["trained_tables"] = [name for name, flag in trained.items() if getattr(draft.dspark_config, flag)]
        if _rank() == writer:
            # `atomic_folder` refuses it too, but only after every tensor was promised to it.
            refuse_taken(Path(output_folder))
        return config, record

    prepared = _on_every_rank(prepare)
    if draft is None or prepared is None or writer not in _tensor_parallel_ranks(draft):
        return _from_writer(None, writer)
    config, record = prepared
    tensors = stream_tensors(draft, config)
    if _rank() != writer:
        return _from_writer(_take_part(lambda: None, tensors), writer)

    def write() -> ExportReport:
        return publish_folder(
            output_folder,
            config,
            tensors,
            record,
            layout=layout,
            target_architectures=list(target_hf_config.get("architectures") or []),
            target_name=target_name,
            max_shard_bytes=max_shard_bytes,
            shortened_paths=tuple(place for place, _ in local_paths(provenance or {})),
        )

    return _from_writer(_take_part(write, tensors), writer)


def publish_folder(
    output_folder: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    record: Mapping[str, Any],
    *,
    layout: str = "deepspec",
    target_architectures: Sequence[str] = (),
    target_name: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    shortened_paths: tuple[str, ...] = (),
) -> ExportReport:
    """Write a draft's folder: config, weights as they come, record and model card; publish it if lint finds nothing.

    Args:
        output_folder: where to publish; it must not hold anything yet.
        config: config.json in the DeepSpec layout.
        tensors: (name, whole tensor) of every tensor of the layout.
        record: what dspark_export.json says beside what is written here.
        layout: "deepspec" or "speculators".
        target_architectures: of the target's config.json, for the speculators layout.
        target_name: the target's Hugging Face id, for the speculators layout and the model card.
        max_shard_bytes: size of weight file above which the weights are split.
        shortened_paths: for the report.

    Raises:
        DSparkError: the folder is taken, a tensor is not finite, or the result breaks a rule.
    """
    if layout not in WRITTEN_LAYOUTS:
        raise DSparkError(f"layout {layout!r} cannot be written; choose {' or '.join(WRITTEN_LAYOUTS)}")
    written = dict(config)
    if layout == "speculators":
        written = speculators_config(config, list(target_architectures), target_name)
    shapes = tensor_shapes(DraftDimensions.from_config(config))
    with atomic_folder(output_folder) as folder:
        write_json(folder / CONFIG_FILE, written)
        _write_weights(folder, config, tensors, max_shard_bytes)
        weights = {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))}
        whole_record = _record(config, record, weights, layout)
        if target_name is not None:
            whole_record["target"] = {**(whole_record.get("target") or {}), "hub_id": target_name}
        write_json(folder / PROVENANCE_FILE, whole_record)
        lint = lint_folder(folder)
        if lint.problems:
            more = f" (and {len(lint.problems) - 1} more)" if len(lint.problems) > 1 else ""
            raise DSparkError(f"the export breaks a rule and was not published: {lint.problems[0].sentence}{more}")
        write_model_card(folder, Path(output_folder).name, config, whole_record, lint.engines)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return ExportReport(
        folder=str(output_folder),
        layout=layout,
        dtype=config["dtype"],
        tensors=len(shapes),
        parameters=sum(prod(shape) for shape in shapes.values()),
        files=files,
        engines=lint.engines,
        shortened_paths=shortened_paths,
    )


def _write_weights(
    folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Write each weight file as soon as its last tensor has come."""
    dtype = getattr(torch, config["dtype"])
    shapes = tensor_shapes(DraftDimensions.from_config(config))
    plan = split_torch_state_dict_into_shards(
        {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()},
        max_shard_size=max_shard_bytes,
        filename_pattern="model{suffix}.safetensors",
    )
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in plan.filename_to_tensors}
    for name, tensor in tensors:
        # NaN and infinity both reach one of the extremes; looking at every element took thirty times as long.
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise DSparkError(
                f"{name} holds values that are not finite, so training has diverged; export an earlier step"
            )
        file = plan.tensor_to_filename[name]
        # A copy of its own: parts of one Megatron parameter share memory, which safetensors refuses.
        waiting[file][name] = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
        if len(waiting[file]) == len(plan.filename_to_tensors[file]):
            save_tensors(waiting.pop(file), folder / file, _METADATA)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
        write_json(folder / INDEX_FILE, index)


def _record(
    config: Mapping[str, Any], provenance: Mapping[str, Any], weights: Mapping[str, str], layout: str = "deepspec"
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "written_by": f"megatron-dspark {version('megatron-dspark')}",
        "layout": layout,
        "dtype": config["dtype"],
        "weights_sha256": dict(weights),
        "block_layout": {
            "inputs": "the anchor, then block_size - 1 masks, at positions anchor ... anchor + block_size - 1",
            "predictions": "slot k predicts the token at anchor + k + 1",
            "context": "taps of positions strictly before the anchor; the block sees itself in both directions",
            "tap_ids": "id i is the output of target decoder layer i, from 0"
            if layout == "deepspec"
            else "id i is the output of target decoder layer i - 1; the embedding is 0",
        },
        **dict.fromkeys(RECORDED),
        **provenance,
    }


def _checked_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    own = {*_record({"dtype": None}, {}, {}), "trained_tables"} - set(RECORDED)
    if own & set(provenance):
        raise DSparkError(
            f"provenance sets {min(own & set(provenance))!r}, which the export writes itself; leave it out"
        )
    try:
        json_text(provenance)
    except TypeError as error:
        raise DSparkError(f"provenance cannot be written as JSON ({error}); give plain values") from None
    return finite(without_local_paths(provenance))


# ---- several ranks: one writes, all learn how it went


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _gathered(value: Any) -> list[Any]:
    """`value` of every rank, in rank order."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _writing_rank(holds_draft: bool) -> int:
    """The first rank that holds the draft: its first tensor-parallel rank of the first data-parallel replica."""
    holders = _gathered(holds_draft)
    if True not in holders:
        raise DSparkError("no rank holds the draft, so there is nothing to export; pass it on the ranks of its stage")
    return holders.index(True)


def _tensor_parallel_ranks(draft: "Module") -> list[int]:
    if not distributed.is_initialized():
        return [0]
    return distributed.get_process_group_ranks(draft.pg_collection.tp)


def _on_every_rank(work: Callable[[], Any]) -> Any:
    """Run `work` on every rank; when it fails on one, all raise that error, and none waits for another for ever."""
    try:
        result, failure = work(), None
    except DSparkError as error:
        result, failure = None, error
    failures = [error for error in _gathered(failure) if error is not None]
    if failures:
        raise failures[0]
    return result


def _take_part(work: Callable[[], Any], tensors: Iterable[Any]) -> Any:
    """Run `work`, and take part in gathering what it leaves of `tensors`: other ranks gather with this one.

    Returns:
        The result, or the exception that `work` or the gathering ended with.
    """
    outcome: Any = None
    try:
        outcome = work()
    except Exception as error:
        outcome = error
    try:
        for _ in tensors:
            pass
    except DSparkError as error:
        outcome = error
    return outcome


def _from_writer(outcome: Any, writer: int) -> ExportReport:
    """Give every rank the writing rank's report, or raise its error everywhere."""
    shared = [outcome]
    if distributed.is_initialized():
        distributed.broadcast_object_list(shared, src=writer)
    if isinstance(shared[0], BaseException):
        raise shared[0]
    return shared[0]
