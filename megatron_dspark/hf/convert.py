"""Reading a draft of any known layout, and writing it in the DeepSpec layout."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, sha256
from megatron_dspark.hf.export import MAX_SHARD_BYTES, RECORDED, ExportReport, publish_folder
from megatron_dspark.hf.foreign import REPLICAS, TITLES, Conversion, convert
from megatron_dspark.hf.layouts import DTYPES, DraftDimensions, tensor_shapes
from megatron_dspark.hf.lint import PROVENANCE_FILE
from megatron_dspark.hf.load import DraftTensors, read_config, refuse_unreadable, tensor_problems
from megatron_dspark.hf.local_paths import without_local_paths
from megatron_dspark.targets.folder import TargetConfig, read_frozen_tables, read_target_config

_FLOATS = {**{spelling: dtype for dtype, (spelling, _) in DTYPES.items()}, "F16": "float16", "F64": "float64"}


class ConvertedTensors(Mapping[str, Tensor]):
    """A folder's tensors under the DeepSpec layout's names; replicas that it lacks are the target's.

    Opening reads headers only; `tensors[name]` reads that tensor from disk.

    Attributes:
        from_target: names of the replicas that are read from the target's folder.
    """

    def __init__(self, tensors: DraftTensors, names: Mapping[str, str], target: TargetConfig | None) -> None:
        self._tensors, self._names, self._target = tensors, names, target
        self.from_target = tuple(name for name in REPLICAS if name not in names)

    def taking_from_target(self, names: Iterable[str]) -> "ConvertedTensors":
        """The same tensors, but these replicas read from the target's folder."""
        kept = {ours: theirs for ours, theirs in self._names.items() if ours not in set(names)}
        return ConvertedTensors(self._tensors, kept, self._target)

    @cached_property
    def _tables(self) -> dict[str, Tensor]:
        return read_frozen_tables(self._target)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.from_target:
            return self._tables[name.removesuffix(".weight")]
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        yield from (*self._names, *self.from_target)

    def __len__(self) -> int:
        return len(self._names) + len(self.from_target)


class OpenedDraft(NamedTuple):
    """A draft of any layout, described in the DeepSpec layout's terms; no tensor has been read from disk."""

    config: dict[str, Any]
    tensors: ConvertedTensors
    conversion: Conversion


def open_draft(folder: str | Path, target: str | Path | None = None, dtype: str | None = None) -> OpenedDraft:
    """Open a draft's folder in any known layout, told by its content.

    Args:
        folder: a draft of DeepSpec, NeMo AutoModel, SpecForge, ModelOpt or speculators.
        target: the target's folder, from which embedding, LM head and depth come where the draft's files lack them.
        dtype: "bfloat16" or "float32", which the config then says; None for the files' own.

    Raises:
        DSparkError: one sentence on what is missing, or on what makes it another kind of draft.
    """
    folder = Path(folder)
    config, tensors = read_config(folder), DraftTensors(folder)
    target_config = None if target is None else read_target_config(target, any_architecture=True)
    try:
        dtype = dtype or _stored_dtype(tensors)
        conversion = convert(config, tensors.shapes, dtype, None if target_config is None else target_config.described)
        converted = ConvertedTensors(tensors, conversion.names, target_config)
        if converted.from_target and target is None:
            raise DSparkError(
                f"the folder ({TITLES[conversion.layout]}) has no {' and no '.join(converted.from_target)}, which are "
                "the target's; name the target's folder (--target)"
            )
    except DSparkError as error:
        raise DSparkError(f"{folder}: {error}") from None
    shapes = {ours: tensors.shapes[theirs] for ours, theirs in conversion.names.items()}
    wanted = tensor_shapes(DraftDimensions.from_config(conversion.config))
    shapes |= {name: wanted[name] for name in converted.from_target}
    # What is stored is converted to one type when it is read.
    spelling = DTYPES[dtype][0]
    refuse_unreadable(folder, tensor_problems(conversion.config, shapes, dict.fromkeys(shapes, spelling)))
    return OpenedDraft(conversion.config, converted, conversion)


def import_draft(
    folder: str | Path,
    output: str | Path,
    *,
    target: str | Path | None = None,
    dtype: str | None = None,
    layout: str = "deepspec",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Write a draft of any known layout in the DeepSpec (or speculators) layout, linted; one tensor is read at a time.

    Args:
        folder: the draft, in any layout that `open_draft` knows.
        output: the folder to publish; it must not hold anything yet.
        target: the target's folder, for what the draft's files leave to it.
        dtype: "bfloat16" or "float32"; None keeps the stored one.
        layout: "deepspec" or "speculators".
        max_shard_bytes: size of weight file above which the weights are split.

    Raises:
        DSparkError: see `open_draft`; or the result breaks a rule of the layout, and then nothing is written.
    """
    folder = Path(folder)
    config, tensors, conversion = open_draft(folder, target, dtype)
    record = _carried_record(folder)
    if "trained_tables" in record:
        record["trained_tables"] = [name for name in record["trained_tables"] if name not in tensors.from_target]
    record["imported"] = {
        "folder": folder.resolve().name,
        "layout": conversion.layout,
        "weights_sha256": {file.name: sha256(file) for file in sorted(folder.glob("*.safetensors"))},
        "taken_from_target": list(tensors.from_target),
        "left_out": list(conversion.dropped),
    }
    architectures: list[str] = []
    if target is not None:
        found = read_target_config(target, any_architecture=True)
        architectures = [found.architecture]
        record["target"] = {"name": found.folder.resolve().name, "fingerprint": found.fingerprint()}
    wanted = tensor_shapes(DraftDimensions.from_config(config))
    return publish_folder(
        output,
        config,
        ((name, tensors[name]) for name in wanted),
        without_local_paths(record),
        layout=layout,
        target_architectures=architectures,
        max_shard_bytes=max_shard_bytes,
    )


def _stored_dtype(tensors: DraftTensors) -> str:
    found = sorted(set(tensors.dtypes.values()) - {"I64", "I32", "BOOL"})
    if len(found) == 1 and _FLOATS.get(found[0]) in DTYPES:
        return _FLOATS[found[0]]
    unknown = [spelling for spelling in found if spelling not in _FLOATS]
    if unknown or not found:
        raise DSparkError(f"the weights are stored as {' and '.join(unknown) or 'nothing'}; only plain floats are read")
    raise DSparkError(
        f"the weights are stored as {' and '.join(found)}, and a draft has one type, {' or '.join(DTYPES)}; choose it "
        "(--dtype)"
    )


def _carried_record(folder: Path) -> dict[str, Any]:
    """What the folder's own record says of the draft's origin, when it has one."""
    path = folder / PROVENANCE_FILE
    if not path.exists():
        return {}
    record = read_json(path, "the draft's record")
    carried = (*RECORDED, "target", "trained_tables")
    return {key: record[key] for key in carried if isinstance(record, Mapping) and record.get(key) is not None}
