"""The target model as the verifier runs it: transformers, a KV cache that rolls back, and the taps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from megatron_dspark.errors import DSparkError
from megatron_dspark.serving.kv_cache import FixedCache
from megatron_dspark.serving.precision import vocabulary_logits

MODEL_TYPES = ("llama", "qwen3")
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass
class TargetRows:
    """What one target pass gives for the rows it was fed.

    Attributes:
        logits: for the last rows asked for, [rows, vocab_size].
        taps: the residual stream at each tap, in tap order, each [rows fed, hidden_size]. References to what the pass
            computed: `features` copies only the rows that are committed.
    """

    logits: torch.Tensor
    taps: list[torch.Tensor]

    def features(self, rows: int) -> torch.Tensor:
        """The first `rows` rows of all taps side by side, [rows, taps * hidden_size]."""
        return torch.cat([tap[:rows] for tap in self.taps], dim=-1)


class Target:
    """A Llama or Qwen3 dense model from a plain Hugging Face folder.

    Attributes:
        vocab_size: rows of its language-model head.
        max_positions: the longest sequence it was made for, in tokens.
        stop_ids: tokens that end a response.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: Sequence[int] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.layers: int = model.config.num_hidden_layers
        self.max_positions: int = model.config.max_position_embeddings
        self.stop_ids = frozenset(stop_ids)
        self.device = model.lm_head.weight.device
        self._taps: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self.tap_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype, device: torch.device) -> "Target":
        """Load a target folder.

        Raises:
            DSparkError: the folder is missing or is no Llama or Qwen3 dense model, or lacks weights.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise DSparkError(f"the target folder {folder} holds no config.json; give a plain Hugging Face folder")
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise DSparkError(f"transformers cannot read the target's config in {folder} ({error})") from None
        _check_architecture(config, folder)
        shows_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # transformers draws it even where no terminal is
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise DSparkError(f"transformers cannot load the target in {folder} ({error})") from None
        finally:
            if shows_bar:
                logging.enable_progress_bar()
        # transformers fills what it does not find with random numbers and only warns.
        absent = sorted(found["missing_keys"]) + sorted(str(key) for key in found["mismatched_keys"])
        if absent:
            raise DSparkError(f"the target in {folder} lacks {', '.join(absent[:5])}; its weights are incomplete")
        return cls(model.to(device), _stop_ids(model, folder))

    def capture(self, tap_ids: Sequence[int]) -> None:
        """Choose the taps that every pass returns; replaces an earlier choice.

        Hooks only keep a reference to what a layer returned, so a pass costs the same with taps and without.
        """
        for hook in self._hooks:
            hook.remove()
        self.tap_ids = tuple(tap_ids)
        backbone = self.model.model

        def keep(tap: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                self._taps[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        self._hooks = [
            (backbone.embed_tokens if tap == -1 else backbone.layers[tap]).register_forward_hook(keep(tap))
            for tap in self.tap_ids
        ]

    def new_cache(self, capacity: int) -> FixedCache:
        """An empty KV cache for one request of at most `capacity` rows."""
        return FixedCache(self.layers, capacity)

    def forward(self, tokens: Sequence[int], cache: FixedCache, *, logit_rows: int | None = None) -> TargetRows:
        """Feed tokens behind what the cache holds.

        Args:
            tokens: at positions `cache.length` …; the cache then holds them too.
            logit_rows: compute logits for the last so many rows only (a prompt needs one); None means all.
        """
        rows = len(tokens)
        ids = torch.tensor([tokens], device=self.device)
        hidden = self.model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[0]
        logits = vocabulary_logits(hidden[rows - (logit_rows or rows) :], self.model.lm_head.weight)
        taps = [self._taps[tap][0] for tap in self.tap_ids]
        self._taps.clear()
        return TargetRows(logits, taps)


def load_tokenizer(folder: str | Path) -> Any:
    """The target's tokenizer, which must bring a chat template.

    Raises:
        DSparkError: the folder holds no tokenizer or the tokenizer no chat template.
    """
    # Without these, transformers makes up an empty tokenizer of the model's type and does not complain.
    if not any((Path(folder) / name).is_file() for name in _VOCABULARY_FILES):
        raise DSparkError(
            f"the target folder {folder} holds no tokenizer ({', '.join(_VOCABULARY_FILES)}); copy the tokenizer's "
            "files into it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizer libraries raise bare Exception for a damaged file
        raise DSparkError(
            f"transformers cannot load the tokenizer in {folder} ({error}); copy its files again"
        ) from None
    if not tokenizer.chat_template:
        raise DSparkError(f"the tokenizer in {folder} has no chat template; add chat_template.jinja to the folder")
    return tokenizer


def _check_architecture(config: Any, folder: Path) -> None:
    if config.model_type not in MODEL_TYPES:
        raise DSparkError(
            f"the target in {folder} is a {config.model_type!r} model; the verifier runs {' and '.join(MODEL_TYPES)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise DSparkError(f"the target in {folder} is quantised; the verifier runs plain weights")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise DSparkError(
            f"the target in {folder} has layer types {sorted(layer_types)}; the verifier can only roll back "
            "full attention"
        )


def _stop_ids(model: PreTrainedModel, folder: Path) -> list[int]:
    """The tokens that end a response, as transformers' own generation reads them."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        raise DSparkError(
            f"neither generation_config.json nor config.json in {folder} names an eos_token_id; add it, or a "
            "response would never end"
        )
    return [ids] if isinstance(ids, int) else list(ids)
