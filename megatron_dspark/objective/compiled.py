"""The element-wise steps of a chunk, compiled by torch.compile into one kernel each.

Eager PyTorch takes a dozen passes over a chunk's logits. Here the logits are never changed: every step reads them and
forms the exponentials anew, so that a GPU, where memory is the limit and exponentials are nearly free, moves a chunk
through its memory about half as often. The last step writes the gradient, a tensor of its own, in the type in which it
is multiplied.

Every probability is exp((logit - maximum) - log(sum)), with the exponential as the last operation. A last operation
that multiplies could be merged into the subtraction p - q, which then rounds once and gives equal p and q a
difference.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_dspark.errors import DSparkError
from megatron_dspark.objective.chunk import LOWEST_EXPONENT, Chunk

# How the work between the matrix products is done.
KERNELS = ("eager", "compiled")


class CompiledChunk(Chunk):
    """A chunk whose logits stay as they are; its rows are one block."""

    def statistics(self, block: slice) -> None:
        """Fill `own`."""
        run, place = self.run, self._place(block)
        self.own[block] = compiled(_statistics)(
            self.draft[block], self.teacher[block], run.local_label[place], run.here[place], run.start
        )

    def probabilities(self, block: slice) -> None:
        """Losses, L1 and D."""
        self.scales = [(over.top, over.total.log()) for over in self.losses(block)]
        if self.run.width > 0:
            self.sums[block] = compiled(_sums)(self.draft[block], self.teacher[block], *self.scales)

    def slopes(self, block: slice) -> None:
        """L1, and the gradient of the draft's logits."""
        run, place = self.run, self._place(block)
        l1, dot = self.sums[block].unbind(-1)
        run.l1[place] = l1
        if not run.wants_grad or run.width == 0:
            return
        a, b = run.ce_weight[place], run.l1_weight[place]
        self.gradient = compiled(_slopes)(
            self.draft[block],
            self.teacher[block],
            *self.scales,
            (a - b * dot, b, a * run.here[place]),
            run.local_label[place],
            run.product_dtype,
        )


def _statistics(draft: Tensor, teacher: Tensor, label: Tensor, here: Tensor, start: int) -> Tensor:
    columns = []
    for logits in (draft, teacher):
        top, index = logits.max(-1)
        columns += [top, (logits - top.unsqueeze(1)).exp().sum(-1), (index + start).to(logits.dtype)]
    label_logit = draft.gather(1, label.unsqueeze(1)).squeeze(1)
    return torch.stack([*columns, label_logit.where(here, 0)], 1)


Scale = tuple[Tensor, Tensor]


def _softmax(logits: Tensor, scale: Scale) -> Tensor:
    top, log_total = scale
    exponent = logits - top.unsqueeze(1) - log_total.unsqueeze(1)
    return exponent.clamp(min=LOWEST_EXPONENT[logits.dtype]).exp()


def _sums(draft: Tensor, teacher: Tensor, draft_scale: Scale, teacher_scale: Scale) -> Tensor:
    p = _softmax(draft, draft_scale)
    difference = p - _softmax(teacher, teacher_scale)
    return torch.stack([difference.abs().sum(-1), (difference.sign() * p).sum(-1)], 1)


def _slopes(
    draft: Tensor,
    teacher: Tensor,
    draft_scale: Scale,
    teacher_scale: Scale,
    weights: tuple[Tensor, Tensor, Tensor],
    label: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    # A new tensor, not the draft's logits overwritten: torch.compile rebuilds aliased inputs that are written to from
    # the place in memory that they had in the first call, and chunks take turns between two places.
    p = _softmax(draft, draft_scale)
    sign = (p - _softmax(teacher, teacher_scale)).sign()
    always, by_sign, at_label = (weight.unsqueeze(1) for weight in weights)
    gradient = p * (always + by_sign * sign)
    here = torch.arange(draft.shape[1], device=draft.device) == label.unsqueeze(1)
    return torch.where(here, gradient - at_label, gradient).to(dtype)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one kernel; the number of rows may change from call to call.

    `fullgraph` makes torch.compile raise where it would otherwise go back to eager PyTorch.
    """
    return torch.compile(function, fullgraph=True)


def check_kernel(kernel: str, on_gpu: bool) -> None:
    """Refuse a kernel that does not exist, and the compiled one where torch.compile has nothing to compile with.

    Raises:
        DSparkError: an unknown name; no C++ compiler; on a GPU no Triton.
    """
    if kernel not in KERNELS:
        raise DSparkError(f"the objective's kernel is {kernel!r} and must be one of {', '.join(KERNELS)}.")
    if kernel != "compiled":
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise DSparkError(
            f"the objective's kernel is 'compiled' but the C++ compiler {compiler} is not installed: install it, name "
            "another one in CXX, or choose 'eager'."
        )
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise DSparkError(
            "the objective's kernel is 'compiled' but triton is not installed: install it, or choose 'eager'."
        )
