"""How taps travel through the target's pipeline stages, and the communicator that carries them.

A stage hands on what Megatron-Core's schedules hand on anyway, one tensor, widened: the residual stream and after it
every tap of the earlier layers, concatenated along the hidden axis in tap order,

    [rows, B, d · (1 + taps before the next stage)]     in `pipeline_dtype`, which is the parameters' type

with rows = S, or S rounded up and divided by the tensor-parallel size under sequence parallelism. Widths grow from
stage to stage and lengths differ between micro-batches, so shapes travel ahead (`variable_seq_lengths`), as for any
model of variable length; a stage refuses a payload whose width is not the one that its own taps imply.
"""

from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_dspark.errors import DSparkError


def join_payload(hidden: Tensor, taps: list[Tensor]) -> Tensor:
    """Return [rows, B, d · (1 + n)] from the residual stream [rows, B, d] and n taps of the same shape."""
    return torch.cat([hidden, *taps], dim=-1)


def split_payload(payload: Tensor, hidden_size: int, num_taps: int) -> tuple[Tensor, list[Tensor]]:
    """Take a payload apart: the residual stream and `num_taps` taps, each [rows, B, hidden_size].

    Raises:
        DSparkError: the payload has another width.
    """
    if payload.shape[-1] != hidden_size * (1 + num_taps):
        raise DSparkError(
            f"a pipeline stage received {payload.shape[-1]} features a row and its taps imply "
            f"{hidden_size} × (1 + {num_taps}); give every stage the same target_layer_ids"
        )
    hidden, *taps = payload.split(hidden_size, dim=-1)
    return hidden.contiguous(), taps


class ForwardCommunicator(P2PCommunicator):
    """Carries what stages hand forwards, and nothing backwards.

    The target is frozen, so no stage has a gradient to hand back. Megatron-Core's own communicator would wait for one
    on every stage but the last; sending zeros of the payload's size would double the traffic to say nothing. With no
    gradient to receive, the schedules' backward of such a stage does nothing.
    """

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Return no gradient: the next stage sends none."""
        return [None]

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send nothing: the previous stage waits for nothing."""

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Send the payload alone."""
        self.send_forward(output_tensors, is_last_stage)
        return [None]

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Receive the payload alone."""
        return self.recv_forward(tensor_shapes, is_first_stage)

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Exchange nothing."""
        return (None, {}) if overlap_p2p_comm else None

    def send_forward_backward_recv_forward_backward(
        self, output_tensor: Any, input_tensor_grad: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> Any:
        """Exchange payloads alone."""
        return self.send_forward_recv_forward(output_tensor, recv_prev, tensor_shape), None
