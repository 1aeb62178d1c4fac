"""RMSNorm that Megatron-Core's specs can build without Transformer Engine or Apex."""

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class DraftRMSNorm(torch.nn.Module):
    """RMSNorm over the last axis, with statistics in FP32 at least (float64 stays float64).

    Half-precision inputs are normalised in FP32, rounded to their own type, then scaled, as the exported checkpoint's
    readers do.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, split_rows: bool = False
    ) -> None:
        """Args: as named; `split_rows` where sequence-parallel ranks apply the norm to different rows."""
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron-Core's `finalize_model_grads` then adds up the ranks' gradients.
        self.weight.sequence_parallel = split_rows and config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `hidden` [..., hidden_size]; the result has its shape and type."""
        wide = hidden.float() if hidden.dtype in (torch.bfloat16, torch.float16) else hidden
        normalised = torch.nn.functional.rms_norm(wide, (hidden.shape[-1],), None, self.eps)
        return normalised.to(hidden.dtype) * self.weight
