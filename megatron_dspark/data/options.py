"""What a preparation can be asked for, and every refusal of a combination that cannot work."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dspark.data.generate import GenerateSettings
from megatron_dspark.data.messages import SUPERVISE
from megatron_dspark.data.prompts import general_prompts, recipe_prompts
from megatron_dspark.errors import DSparkError
from megatron_dspark.files import sha256

SMOLLM2 = "smollm2"
BUILT_IN_PROMPTS = {"recipes": recipe_prompts, "general": general_prompts}
DEFAULT_TRAIN_SAMPLES = 400

# They change where and how fast, not what.
_FREE = ("output", "workers")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(GenerateSettings):
    """What to prepare: how the target answers (see `GenerateSettings`), and what.

    Attributes:
        output: folder to write.
        target: "smollm2" (converted into `<output>/target`) or a Hugging Face folder of a dense Llama or Qwen3
            (with `keep_responses`, of any decoder).
        prompts: "recipes", "general", or a JSONL file of prompts or of complete conversations.
        train_samples: conversations to train on; None is 400 of the built-in prompts, or all that a file has left.
        heldout_samples: conversations for validation and verification, disjoint from training.
        general_heldout_samples: everyday questions to measure beside a narrow domain; 0 writes no such file.
        keep_responses: use a file's conversations as they are. Otherwise the last reply of each is generated anew by
            the target, which is what a drafter should learn from.
        supervise: "all" replies or the "last" one only (for chat templates that rewrite earlier turns).
        template_options: passed to the chat template, for example {"enable_thinking": False}.
        seed: of the random numbers, and of the order of the built-in prompts.
        time_limit_seconds: when the whole preparation should be finished; the training set is what gets shorter.
    """

    output: str | Path
    target: str | Path = SMOLLM2
    prompts: str | Path = "recipes"
    train_samples: int | None = None
    heldout_samples: int = 32
    general_heldout_samples: int = 0
    keep_responses: bool = False
    supervise: str = "all"
    template_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("heldout_samples", 1), ("general_heldout_samples", 0), ("train_samples", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DSparkError(f"{name} is {value}; it must be at least {least}")
        if self.supervise not in SUPERVISE:
            raise DSparkError(f"supervise is {self.supervise!r}; choose one of {', '.join(SUPERVISE)}")
        if self.keep_responses and self.built_in:
            raise DSparkError(
                f"keep_responses needs a file of conversations, and prompts is {str(self.prompts)!r}, which has none; "
                "name a JSONL file or leave keep_responses out"
            )
        if self.general_heldout_samples and str(self.prompts) == "general":
            raise DSparkError(
                f"general_heldout_samples is {self.general_heldout_samples} and prompts is 'general', whose "
                "held-out file holds the same questions; set general_heldout_samples to 0"
            )
        if not self.built_in and not Path(self.prompts).is_file():
            raise DSparkError(
                f"prompts is {str(self.prompts)!r}, which is neither {' nor '.join(map(repr, BUILT_IN_PROMPTS))} nor a "
                "file; name a JSONL file"
            )

    @property
    def built_in(self) -> bool:
        """Whether the prompts are ours."""
        return str(self.prompts) in BUILT_IN_PROMPTS

    def generation(self, time_limit_seconds: float | None) -> GenerateSettings:
        """The generation's settings alone, with what is left of the time limit."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(GenerateSettings)}
        return GenerateSettings(**{**values, "time_limit_seconds": time_limit_seconds})

    def recorded(self) -> dict[str, Any]:
        """As plain JSON values, with the digest of a prompts file beside its name."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        values["prompts_sha256"] = None if self.built_in else sha256(self.prompts)
        return {name: value for name, value in values.items() if name not in _FREE}
