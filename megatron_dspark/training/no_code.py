"""Checkpoints are data: whatever in one would run code when unpickled is found before anything is unpickled.

PyTorch's distributed checkpoints keep their index (`.metadata`) as a pickle and objects that are no tensors as
torch.save archives, and PyTorch 2.x and Megatron-Core 0.19 read both without restriction (tensors alone are read with
weights_only). So both are read here first, by readers that know a short list of classes and refuse all others.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.serialization import get_unsafe_globals_in_checkpoint

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"the index names {module}.{name}, which no checkpoint of ours contains")
        return super().find_class(module, name)


def refuse_code(folder: str | Path) -> None:
    """Read a checkpoint's index and all of its objects that are no tensors, with restricted readers.

    Raises:
        pickle.UnpicklingError: something in it is no plain data.
        OSError, EOFError, KeyError, ValueError, AttributeError: a file is missing or is none.
    """
    folder = Path(folder)
    if (folder / "common.pt").exists():
        raise pickle.UnpicklingError("it has a common.pt, which no checkpoint of ours contains")
    with open(folder / ".metadata", "rb") as file:
        index = _IndexReader(file).load()
    for key, place in index.storage_data.items():
        if not isinstance(index.state_dict_metadata[key.fqn], BytesStorageMetadata):
            continue
        if Path(place.relative_path).name != place.relative_path:
            raise pickle.UnpicklingError(f"the index points outside the checkpoint, at {place.relative_path}")
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        foreign = get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        if foreign:
            raise pickle.UnpicklingError(f"{key.fqn} names {foreign[0]}, which no checkpoint of ours contains")
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
