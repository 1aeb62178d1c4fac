"""What a precompute job is asked for."""

from dataclasses import dataclass
from pathlib import Path

from megatron_dspark.errors import DSparkError
from megatron_dspark.features.cache.encoding import HIDDEN_DTYPES

SOURCES = ("megatron-core", "hf")
COMPUTE_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@dataclass(kw_only=True)
class PrecomputeOptions:
    """One precompute job."""

    target: Path
    """Hugging Face folder of the target."""
    data: Path
    """JSONL of conversations."""
    output: Path
    """Folder of the cache."""
    max_length: int = 2048
    """Longest sample in tokens; longer ones are cut, as training cuts them."""
    target_layer_ids: list[int] | None = None
    """Taps; None spreads five of them as a draft without its own choice does."""
    allow_unservable_taps: bool = False
    """Also tap the embedding (-1) or the last layer, which no serving engine captures."""
    dtype: str = "bfloat16"
    """How features are stored: "float32", "bfloat16" or "float8_e4m3fn"."""
    compute_dtype: str | None = None
    """In what the target runs; None is FP32 for FP32 features and BF16 for the others."""
    source: str = "megatron-core"
    """ "megatron-core", or "hf" (transformers) for targets that it does not compute (`targets/computable.py`)."""
    tensor: int = 1
    """Tensor-parallel ranks of the target; data parallelism takes the ranks that are left."""
    pipeline: int = 1
    """Pipeline stages of the target."""
    shard_mib: int | None = None
    """Size of a shard; None takes what suits the total."""
    dry_run: bool = False
    """Only say how large the cache becomes."""

    def __post_init__(self) -> None:
        self.target, self.data, self.output = Path(self.target), Path(self.data), Path(self.output)
        if self.compute_dtype is None:
            self.compute_dtype = "float32" if self.dtype == "float32" else "bfloat16"

    def validate(self, world_size: int) -> None:
        """Refuse what needs no file to be refused.

        Raises:
            DSparkError: one sentence.
        """
        for name, value, known in (
            ("dtype", self.dtype, HIDDEN_DTYPES),
            ("compute_dtype", self.compute_dtype, COMPUTE_DTYPES),
            ("source", self.source, SOURCES),
        ):
            if value not in known:
                raise DSparkError(f"{name} is {value!r} and must be one of {', '.join(known)}")
        for name, least in (("max_length", 2), ("tensor", 1), ("pipeline", 1), ("shard_mib", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DSparkError(f"{name} must be at least {least}, and it is {value}")
        if world_size % (self.tensor * self.pipeline):
            raise DSparkError(
                f"the job has {world_size} ranks, which is no multiple of the {self.tensor} × {self.pipeline} that its "
                "tensor and pipeline parallelism take; start torchrun with such a number"
            )
        if self.source == "hf" and self.tensor * self.pipeline > 1:
            raise DSparkError(
                f"tensor is {self.tensor}, pipeline {self.pipeline} and source 'hf', which has the whole target on "
                "every rank; use 1 and 1"
            )
