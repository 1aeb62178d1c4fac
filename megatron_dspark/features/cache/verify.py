"""Checking a whole cache, and describing one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from megatron_dspark.data.chat import load_tokenizer
from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.encoding import stored_tensors
from megatron_dspark.features.cache.reader import FeatureCache, check_size, open_checked
from megatron_dspark.features.cache.schema import (
    MANIFEST_FILE,
    Manifest,
    ShardEntry,
    read_manifest,
    require,
    samples_fingerprint,
)
from megatron_dspark.files import sha256
from megatron_dspark.targets.fingerprint import (
    chat_template_fingerprint,
    config_fingerprint,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from megatron_dspark.targets.folder import read_target_config


@dataclass(frozen=True)
class VerifyReport:
    """What a check found: one sentence for each problem."""

    folder: str
    samples: int
    bytes: int
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(self.__dict__)

    def render(self) -> Text:
        """As text."""
        if self.problems:
            return Text("\n".join(self.problems), style="red")
        return Text(f"{self.folder} is whole: {self.samples:,} samples, {decimal(self.bytes)}, every byte read")


@dataclass(frozen=True)
class ShowReport:
    """What a cache says about itself."""

    folder: str
    content: dict[str, Any]
    bytes: int
    bytes_per_token: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; of the shards only their number."""
        kept = {key: value for key, value in self.content.items() if key not in ("shards", "files")}
        sizes = {"bytes": self.bytes, "bytes_per_token": self.bytes_per_token, "shards": len(self.content["shards"])}
        return {"folder": self.folder, **kept, **sizes}

    def render(self) -> Group:
        """As a table."""
        table = Table("feature cache", self.folder, title_justify="left")
        for name, value in self.as_dict().items():
            if isinstance(value, dict):
                for key, inner in value.items():
                    table.add_row(f"{name}.{key}", "-" if inner is None else str(inner))
            elif name != "folder":
                table.add_row(name, f"{value:,}" if isinstance(value, int) and name != "schema" else str(value))
        return Group(table)


def show_cache(folder: str | Path) -> ShowReport:
    """Describe a cache, finished or not.

    Raises:
        DSparkError: it is none, of another schema, or its manifest was edited.
    """
    manifest = read_manifest(folder, complete=False)
    size = sum(part.bytes for part in (*manifest.shards, *manifest.files))
    tensors = stored_tensors(
        manifest.features.hidden_dtype, len(manifest.features.target_layer_ids), manifest.target.hidden_size
    )
    return ShowReport(str(folder), manifest.as_dict(), size, sum(tensor.bytes_per_token for tensor in tensors))


def verify_cache(folder: str | Path, target: str | Path | None = None) -> VerifyReport:
    """Read every byte of a cache and collect what is wrong.

    Args:
        folder: the cache.
        target: a target's folder to compare with; its weights are read anew, whatever was remembered.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except DSparkError as error:
        return VerifyReport(str(folder), 0, 0, [str(error)])
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda entry: _shard_problem(folder, entry, manifest), manifest.shards)
        problems = [problem for problem in found if problem is not None]
    for entry in manifest.files:
        try:
            check_size(folder / entry.name, entry.bytes, folder)
            digest = sha256(folder / entry.name)
            if digest != entry.sha256:
                problems.append(f"{entry.name} was altered: SHA-256 is {digest} and the manifest says {entry.sha256}")
        except DSparkError as error:
            problems.append(str(error))
    known = {MANIFEST_FILE, *(entry.name for entry in (*manifest.files, *manifest.shards))}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in known:
            problems.append(f"{name} is in the folder and not in the manifest; remove it")
    if not problems:
        problems += _content_problems(folder, manifest, target)
    size = sum(part.bytes for part in (*manifest.shards, *manifest.files))
    return VerifyReport(str(folder), manifest.data.samples, size, problems)


def _shard_problem(folder: Path, entry: ShardEntry, manifest: Manifest) -> str | None:
    try:
        open_checked(folder, entry, manifest)
    except DSparkError as error:
        return str(error)
    digest = sha256(folder / entry.name)
    return (
        None
        if digest == entry.sha256
        else f"{entry.name} was altered: SHA-256 is {digest} and the manifest says {entry.sha256}; restore it"
    )


def _content_problems(folder: Path, manifest: Manifest, target: str | Path | None) -> list[str]:
    try:
        cache = FeatureCache(folder)
        samples = cache.samples()
        found = {"data.fingerprint": samples_fingerprint(samples)}
        found["data.loss_tokens"] = sum(int(sample.loss_mask.sum()) for sample in samples)
        require(manifest, folder, found, "its own samples")
        if target is not None:
            tokenizer = load_tokenizer(target)
            theirs = {
                "weights_fingerprint": weights_fingerprint(target, remember=False),
                "config_fingerprint": config_fingerprint(read_target_config(target, any_architecture=True).raw),
                "tokenizer_fingerprint": tokenizer_fingerprint(target, tokenizer),
                "chat_template_fingerprint": chat_template_fingerprint(tokenizer),
            }
            require(manifest, folder, {f"target.{name}": value for name, value in theirs.items()}, str(target))
    except DSparkError as error:
        return [str(error)]
    return []
