"""What the libraries below say at every start although nothing is wrong: these sentences are dropped, no others.

Light to import: the command line calls it before PyTorch is loaded.
"""

import logging
import re
import sys
import warnings

_ALWAYS = {
    # Bridge asks Megatron-Core for a name that Megatron-Core only has beside Transformer Engine.
    "megatron.bridge.utils.import_utils": "Import of FP8GlobalStateManager from megatron.core",
    "megatron.bridge.models.gemma.gemma2_provider": "Gemma2: PyTorch FlexAttention available",
    # The target is a GPTModel because Bridge's conversion of its weights makes one.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # Checkpoints are written synchronously; "mcore" is the strategy that needs no further package.
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    # Bridge reads the target's config under its old key.
    "transformers.configuration_utils": "`torch_dtype` is deprecated",
}
_WITHOUT_CUDA = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "megatron.bridge.utils.fusions": "gradient_accumulation_fusion requires",
}
# (start of the message, module that says it, whether it only goes without saying where there is no CUDA)
_WARNINGS = (
    ("Transformer Engine and Apex are not installed", r"megatron\.", True),
    ("Apex is not installed", r"megatron\.", True),
    ("Only transformer-engine>=1.7.0 supports MoE experts", r"megatron\.", True),
    ("full scope is deprecated. Use empty cuda_graph_modules", r"megatron\.", False),
    ("MimoModelConfig is experimental", r"megatron\.", False),
    # Megatron-Core's gradient and parameter buffers under the distributed optimizer.
    ("`torch.distributed.reduce_scatter_tensor` is deprecated", r"torch\.distributed\.", False),
    ("`torch.distributed.all_gather_into_tensor` is deprecated", r"torch\.distributed\.", False),
)


class _Drop(logging.Filter):
    """Drops the records of one logger that hold a known sentence."""

    def __init__(self, sentence: str, without_cuda: bool) -> None:
        super().__init__()
        self.sentence, self.without_cuda = sentence, without_cuda

    def filter(self, record: logging.LogRecord) -> bool:
        if self.sentence not in record.getMessage():
            return True
        # PyTorch may not be loaded when this filter is installed; it is when the sentence is said.
        return self.without_cuda and sys.modules["torch"].cuda.is_available()


def quiet_logs() -> None:
    """Drop the known log lines. They are dropped at their own logger, before any handler sees them."""
    for known, without_cuda in ((_ALWAYS, False), (_WITHOUT_CUDA, True)):
        for name, sentence in known.items():
            logger = logging.getLogger(name)
            if not any(isinstance(other, _Drop) and other.sentence == sentence for other in logger.filters):
                logger.addFilter(_Drop(sentence, without_cuda))


def quiet_warnings(cuda: bool) -> None:
    """Drop the known warnings; those about missing GPU packages only where there is no GPU."""
    for sentence, module, only_without_cuda in _WARNINGS:
        if not (cuda and only_without_cuda):
            warnings.filterwarnings("ignore", message=re.escape(sentence), module=module)
