"""The manifest of a feature cache: what it was made from, and every shard's size and digest."""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dspark.data.encoded import parts_of_sample
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json, write_json
from megatron_dspark.targets.fingerprint import data_fingerprint, digest_of

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
TARGET_FOLDER = "target"
TABLES_FILE = "frozen_tables.safetensors"
LOSS_MASK_RULE = "replies-and-their-closing-token/1"
SELF_DIGEST = "manifest_sha256"

UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Schema n → function that turns its manifest into that of n + 1; one is added whenever SCHEMA rises."""


@dataclass(frozen=True)
class TargetIdentity:
    """The target that was run, and how text becomes its ids."""

    id: str
    revision: str | None
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    weights_fingerprint: str
    config_fingerprint: str
    tokenizer_fingerprint: str
    chat_template_fingerprint: str


@dataclass(frozen=True)
class FeatureIdentity:
    """What was taken from it, in which arithmetic, and how it is stored."""

    target_layer_ids: list[int]
    hidden_dtype: str
    compute_dtype: str
    source: str
    device: str
    tensor_parallel: int


@dataclass(frozen=True)
class DataIdentity:
    """The samples. `anchor_seed` and `block_size` are null: every position is stored, so any can be trained."""

    fingerprint: str
    loss_mask_rule: str
    max_length: int
    anchor_seed: int | None
    block_size: int | None
    samples: int
    tokens: int
    loss_tokens: int


@dataclass(frozen=True)
class FileEntry:
    """A file beside the shards."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardEntry:
    """A shard; `index_sha256` covers its header, offsets and sample digests, which in turn cover the features."""

    name: str
    samples: int
    tokens: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything that a cache says about itself."""

    schema: int
    complete: bool
    target: TargetIdentity
    features: FeatureIdentity
    data: DataIdentity
    created_with: dict[str, str]
    files: list[FileEntry]
    shards: list[ShardEntry]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the digest over all of them."""
        values = dataclasses.asdict(self)
        return {**values, SELF_DIGEST: digest_of(values)}

    @property
    def identity(self) -> str:
        """Digest of what decides the features of a given sample; caches of one identity can be merged."""
        target = {key: value for key, value in vars(self.target).items() if key not in ("id", "revision")}
        rules = {"loss_mask_rule": self.data.loss_mask_rule, "max_length": self.data.max_length}
        return digest_of({"schema": self.schema, "target": target, "features": vars(self.features), **rules})

    @property
    def content(self) -> str:
        """Digest of the features and samples, however they are cut into shards."""
        return digest_of([self.identity, self.data.fingerprint])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically."""
    write_json(folder / MANIFEST_FILE, manifest.as_dict())


def read_manifest(folder: str | Path, *, complete: bool = True) -> Manifest:
    """Read and check a cache's manifest by itself.

    Args:
        folder: the cache.
        complete: refuse a cache that is still being made.

    Raises:
        DSparkError: there is none, it is of a schema that this version does not read, incomplete, or was edited.
    """
    folder = Path(folder)
    if not (folder / MANIFEST_FILE).is_file():
        raise DSparkError(f"{folder} is no feature cache: it has no {MANIFEST_FILE}; make one with precompute")
    values = read_json(folder / MANIFEST_FILE, "the feature cache's manifest")
    schema = values.get("schema") if isinstance(values, dict) else None
    oldest = min(UPGRADES, default=SCHEMA)
    if isinstance(schema, bool) or not isinstance(schema, int) or not oldest <= schema <= SCHEMA:
        readable = str(SCHEMA) if oldest == SCHEMA else f"{oldest} to {SCHEMA}"
        raise DSparkError(
            f"schema of the feature cache {folder} is {schema!r} and this version reads {readable}; precompute it "
            "again, or use the version that wrote it"
        )
    if complete and values.get("complete") is not True:
        raise DSparkError(
            f"complete of the feature cache {folder} is {values.get('complete')!r} and must be True; run its "
            "precompute again, which goes on with the missing shards"
        )
    stated = values.pop(SELF_DIGEST, None)
    found = digest_of(values)
    while schema < SCHEMA:
        values = UPGRADES[schema](values)
        schema += 1
    manifest = _build(Manifest, values, folder, "")
    if manifest.complete:
        _check_totals(manifest, folder)
    if found != stated:
        raise DSparkError(
            f"the manifest of the feature cache {folder} was edited: {SELF_DIGEST} says {stated!r} and its content "
            f"has {found!r}; restore it, or precompute again"
        )
    return manifest


def samples_fingerprint(samples: Iterable[Any]) -> str:
    """Fingerprint of samples in order: identifiers, ids and loss masks."""
    return data_fingerprint(map(parts_of_sample, samples))


def _check_totals(manifest: Manifest, folder: Path) -> None:
    for name in ("samples", "tokens"):
        stated, found = getattr(manifest.data, name), sum(getattr(shard, name) for shard in manifest.shards)
        if stated != found:
            raise DSparkError(
                f"data.{name} of the feature cache {folder} is {stated} and its shards have {found}; restore the "
                "manifest, or precompute again"
            )


# Where a setting's name is not the field's.
_SETTINGS = {
    "features.hidden_dtype": " feature_dtype, which says what a cache stores when it is not the precision of the run",
    "features.compute_dtype": " precision, or feature_dtype, which accepts any",
    "features.target_layer_ids": " draft.target_layer_ids",
    "data.max_length": " max_length",
}


def require(manifest: Manifest, folder: str | Path, expected: Mapping[str, Any], whose: str) -> None:
    """Refuse a cache in which a field has another value.

    Args:
        manifest: the cache's.
        folder: the cache, for the sentence.
        expected: dotted field → value.
        whose: who expects it, for the sentence ("this run").

    Raises:
        DSparkError: names the first such field and both values.
    """
    for field, value in expected.items():
        found: Any = manifest
        for part in field.split("."):
            found = getattr(found, part)
        if found != value:
            raise DSparkError(
                f"{field} of the feature cache {folder} is {found!r} and {whose} has {value!r}; precompute a cache "
                f"that fits, or change the setting{_SETTINGS.get(field, '')}"
            )


def _build(kind: Any, values: Any, folder: Path, where: str) -> Any:
    """Build nested dataclasses from JSON, refusing missing, unknown and mistyped fields by name."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(values, dict):
            raise _mistyped(folder, where, "an object", values)
        hints = typing.get_type_hints(kind)
        for name in (*hints, *values):
            path = f"{where}.{name}" if where else name
            if name not in values or name not in hints:
                word = "lacks" if name not in values else "has the unknown"
                raise DSparkError(f"the manifest of the feature cache {folder} {word} field {path}; restore it")
        return kind(
            **{name: _build(hints[name], values[name], folder, f"{where}.{name}".lstrip(".")) for name in hints}
        )
    if origin is list:
        if not isinstance(values, list):
            raise _mistyped(folder, where, "a list", values)
        return [_build(arguments[0], item, folder, f"{where}[{index}]") for index, item in enumerate(values)]
    if origin is dict:
        if not isinstance(values, dict):
            raise _mistyped(folder, where, "an object", values)
        return {key: _build(arguments[1], item, folder, f"{where}.{key}") for key, item in values.items()}
    allowed = arguments or (kind,)
    if type(values) not in allowed:
        names = " or ".join("null" if item is type(None) else item.__name__ for item in allowed)
        raise _mistyped(folder, where, names, values)
    return values


def _mistyped(folder: Path, where: str, expected: str, found: Any) -> DSparkError:
    return DSparkError(
        f"{where} of the feature cache {folder} is {found!r} and must be {expected}; restore the manifest"
    )
