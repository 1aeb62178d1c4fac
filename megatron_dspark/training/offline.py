"""A draft-only job: what a feature cache has to be for a run, and what it gives it in place of the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dspark.config import DSparkModelConfig
from megatron_dspark.data.chat import ChatSample, load_tokenizer
from megatron_dspark.data.encoded import load_samples
from megatron_dspark.features.cache.feed import FeatureFeed
from megatron_dspark.features.cache.reader import FeatureCache
from megatron_dspark.features.cache.schema import LOSS_MASK_RULE, require
from megatron_dspark.files import require_file
from megatron_dspark.targets.fingerprint import (
    chat_template_fingerprint,
    config_fingerprint,
    tokenizer_fingerprint,
)
from megatron_dspark.targets.folder import TargetConfig, read_target_config
from megatron_dspark.training.settings import PRECISIONS, TrainSettings


@dataclass(frozen=True)
class OfflineFeatures:
    """The caches of a run.

    Attributes:
        train: of the training data.
        validation: of the held-out data, None without.
        target: config of the target that both come from; its folder is inside the cache.
        workers: threads that read.
    """

    train: FeatureCache
    validation: FeatureCache | None
    target: TargetConfig
    workers: int

    @property
    def samples(self) -> Sequence[ChatSample]:
        """Training samples."""
        return self.train.samples()

    @property
    def held_out(self) -> Sequence[ChatSample]:
        """Held-out samples."""
        return [] if self.validation is None else self.validation.samples()

    def describe(self) -> dict[str, Any]:
        """What a checkpoint remembers of the data: the same for any layout of the same features in files."""
        manifest = self.train.manifest
        return {
            "file": self.train.folder.name,
            "sha256": manifest.content,
            "samples": manifest.data.fingerprint,
            "features": manifest.identity,
        }

    def check(self, settings: TrainSettings, config: DSparkModelConfig) -> None:
        """Compare both caches with the run, and with `target`, `data` and `validation` where the run names them.

        Raises:
            DSparkError: names the field and both values.
        """
        features = {
            "features.target_layer_ids": list(config.target_layer_ids),
            "data.max_length": settings.max_length,
            "data.loss_mask_rule": LOSS_MASK_RULE,
        }
        for field, value in (("anchor_seed", settings.seed), ("block_size", config.block_size)):
            if getattr(self.train.manifest.data, field) is not None:
                features[f"data.{field}"] = value
        if settings.target:
            features.update(_identity_of(settings.target))
        files = ((self.train, settings.data), (self.validation, settings.validation))
        for cache, path in files:
            if cache is None:
                continue
            require(cache.manifest, cache.folder, features, "this run")
            if path:
                require_file(path, "the data", "unset it, since the cache has its samples")
                samples = load_samples(path, settings.target or self.target.folder, settings.max_length)
                expected = {"data.fingerprint": samples.fingerprint}
                require(cache.manifest, cache.folder, expected, f"{path}")

    def feed(self, context_rank: int, context_size: int) -> FeatureFeed:
        """Return what reads features for training on a context-parallel rank."""
        caches = [cache for cache in (self.train, self.validation) if cache is not None]
        return FeatureFeed(caches, self.workers, context_rank, context_size)


def open_features(settings: TrainSettings) -> OfflineFeatures:
    """Open the run's feature caches.

    Raises:
        DSparkError: a cache is not whole, stores another type, or the two come from different targets.
    """
    dtype = PRECISIONS[settings.precision]
    name = str(dtype).removeprefix("torch.")
    stored = {"features.hidden_dtype": settings.feature_dtype or name}
    if settings.feature_dtype is None:
        stored["features.compute_dtype"] = name
    train = FeatureCache(settings.features, stored, dtype=dtype)
    validation = None
    if settings.validation_features:
        ours = {f"target.{field}": value for field, value in vars(train.manifest.target).items()}
        ours |= {f"features.{field}": value for field, value in vars(train.manifest.features).items()}
        for field in ("target.id", "target.revision"):
            ours.pop(field)
        validation = FeatureCache(settings.validation_features, ours, whose=str(train.folder), dtype=dtype)
    return OfflineFeatures(train, validation, train.target(), settings.feature_workers)


def _identity_of(folder: str) -> dict[str, Any]:
    target, tokenizer = read_target_config(folder, any_architecture=True), load_tokenizer(folder)
    return {
        "target.weights_fingerprint": target.weights_fingerprint(),
        "target.config_fingerprint": config_fingerprint(target.raw),
        "target.tokenizer_fingerprint": tokenizer_fingerprint(folder, tokenizer),
        "target.chat_template_fingerprint": chat_template_fingerprint(tokenizer),
    }
