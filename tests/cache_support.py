"""Feature caches for tests: a real one of the tiny target, and quick ones of random numbers."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_dspark.features.cache.encoding import StoredTensor, encode, stored_tensors
from megatron_dspark.features.cache.plan import ShardPlan, plan_shards
from megatron_dspark.features.cache.schema import DataIdentity, FeatureIdentity, Manifest, TargetIdentity
from megatron_dspark.features.cache.shard import StoredSample
from megatron_dspark.features.cache.writer import CacheWriter, WriterBehind
from megatron_dspark.files import write_json
from megatron_dspark.targets.fingerprint import data_fingerprint

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny_target"
MAX_LENGTH = 96
HIDDEN, TAPS, VOCABULARY = 64, [1, 3], 500


def small_data(folder: Path, train: int = 10, held_out: int = 3) -> tuple[Path, Path]:
    """The first conversations of the tiny target's data."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("heldout", held_out)):
        lines = (TINY / f"data/{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]))
    return folder / "train.jsonl", folder / "heldout.jsonl"


def precompute_options(data: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Keywords of PrecomputeOptions for the tiny target: FP32, shards of about three samples."""
    values = dict(target=TINY / "model", data=data, output=output, max_length=MAX_LENGTH, dtype="float32", shard_mib=1)
    return {**values, **changes}


def precompute_rank(rank: int, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run precompute on a rank of a pool."""
    from megatron_dspark.features.cache.options import PrecomputeOptions
    from megatron_dspark.features.cache.precompute import precompute

    return precompute(PrecomputeOptions(**options)).as_dict()


def tree(folder: Path) -> dict[str, str]:
    """Relative name → digest of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class RandomCache:
    """A cache of random features that needs no target: what the files are is the same."""

    def __init__(
        self, folder: Path, count: int = 12, seed: int = 0, dtype: str = "bfloat16", prefix: str = "s"
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(500, 900, (count,), generator=generator).tolist()
        self.folder, self.seed, self.dtype = folder, seed, dtype
        self.ids = [f"{prefix}{number}" for number in range(count)]
        self.tensors: list[StoredTensor] = stored_tensors(dtype, len(TAPS), HIDDEN)
        self.plan: ShardPlan = plan_shards(lengths, self.tensors, shard_mib=1)
        samples = [self.content(number) for number in range(count)]
        masks = [tensors["loss_mask"] for tensors in samples]
        fingerprint = data_fingerprint(
            (name, tensors["input_ids"].numpy().tobytes(), tensors["loss_mask"].to(torch.uint8).numpy().tobytes())
            for name, tensors in zip(self.ids, samples, strict=True)
        )
        manifest = Manifest(
            schema=1,
            complete=False,
            target=TargetIdentity("random", None, "None", VOCABULARY, HIDDEN, 8, "w", "c", "t", "h"),
            features=FeatureIdentity(TAPS, dtype, "float32", "megatron-core", "cpu", 1),
            data=DataIdentity(
                fingerprint=fingerprint,
                loss_mask_rule="replies-and-their-closing-token/1",
                max_length=1000,
                anchor_seed=None,
                block_size=None,
                samples=count,
                tokens=sum(lengths),
                loss_tokens=sum(int(mask.sum()) for mask in masks),
            ),
            created_with={"torch": "any"},
            files=[],
            shards=[],
        )
        self.writer = CacheWriter(folder, manifest, self.plan, self.tensors)

    def content(self, number: int) -> dict[str, torch.Tensor]:
        """What is stored of a sample."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        length = self.plan.lengths[number]
        rows = torch.randn(length, (len(TAPS) + 1) * HIDDEN, generator=generator)
        return {
            "input_ids": torch.randint(0, VOCABULARY, (length,), generator=generator, dtype=torch.int32),
            "loss_mask": torch.rand(length, generator=generator) > 0.5,
            **encode("taps", rows[:, : len(TAPS) * HIDDEN], self.dtype, HIDDEN),
            **encode("final_hidden", rows[:, len(TAPS) * HIDDEN :], self.dtype, HIDDEN),
        }

    def samples(self, shard: int) -> Iterator[StoredSample]:
        """The samples of a shard."""
        for number in self.plan.samples(shard):
            yield StoredSample(self.ids[number], self.content(number))

    def write(self, ranks: int = 1) -> "RandomCache":
        """Write all of it, rank by rank; go on where something is there."""
        if self.writer.check():
            self.writer.tidy()
            return self
        with self.writer.alone():
            self.writer.begin({"target/config.json": self._write_config})
            for rank in range(ranks):
                with WriterBehind(self.writer) as behind:
                    for shard in self.writer.missing(rank, ranks):
                        behind.write(shard, self.writer.gather(shard, self.samples(shard)))
            self.writer.finish()
        return self

    @staticmethod
    def _write_config(path: Path) -> None:
        write_json(path, {"model_type": "random"})
