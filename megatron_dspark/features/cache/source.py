"""Where features come from: the target in Megatron-Core, or any decoder that transformers can run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dspark import platform
from megatron_dspark.config import draft_transformer_config
from megatron_dspark.errors import DSparkError
from megatron_dspark.targets.folder import TargetConfig

Capture = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""[S] token ids → (taps [S, m·d], last hidden state after the final norm [S, d]); None on all pipeline stages but the
last."""

_PROBE_TOKENS = 8
_PROBE_TOLERANCE = 1e-2


def megatron_source(
    target: TargetConfig, taps: list[int], dtype: torch.dtype, groups: Any, tensor: int, pipeline: int
) -> Capture:
    """Load the target as a training run with colocated features loads it, so that both give the same bits."""
    from megatron_dspark.features.colocated import load_target
    from megatron_dspark.features.pipeline import ForwardCommunicator

    transformer = draft_transformer_config(
        num_layers=1,
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_attention_heads,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
    )
    (stage,) = load_target(target.folder, taps, transformer, groups)
    communicator = None if pipeline == 1 else ForwardCommunicator(groups.pp, transformer)
    first, last = groups.pp.rank() == 0, groups.pp.rank() == pipeline - 1

    def capture(ids: Tensor) -> tuple[Tensor, Tensor] | None:
        shape = (len(ids), 1, target.hidden_size)
        received = None if communicator is None else communicator.recv_forward(shape, first)
        features = stage.run_stage(ids[None].to(platform.device()), received=received)
        if isinstance(features, Tensor):
            communicator.send_forward(features, last)
            return None
        return features.taps[:, 0], features.final_hidden[:, 0]

    return capture


def transformers_source(folder: str | Path, taps: list[int], dtype: torch.dtype) -> tuple[Capture, dict[str, Tensor]]:
    """Load a target with transformers, for what Megatron-Core does not compute.

    Returns:
        The capture, and the target's embedding and LM head [V, d].

    Raises:
        DSparkError: transformers cannot load it, tensors are missing, the decoder layers cannot be found, or the
            target's logits are more than its LM head times its last hidden state (a soft cap, a scale), which is all
            that a draft's teacher can be given.
    """
    from transformers import AutoModelForCausalLM

    platform.prepare()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # transformers raises many kinds, and asks for packages in some
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DSparkError(
            f"transformers cannot load the target {folder} ({reason:.300}); mend that, or name another folder of it"
        ) from error
    # transformers fills what it does not find with random numbers and only warns.
    if absent := sorted(found["missing_keys"]):
        raise DSparkError(f"the target {folder} lacks {len(absent)} of its tensors, for example {absent[0]}")
    model = model.eval().requires_grad_(False).to(platform.device())
    base, depth = model.base_model, model.config.get_text_config().num_hidden_layers
    stacks = [module for module in base.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == depth]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if len(stacks) != 1 or head is None or embedding is None:
        raise DSparkError(
            f"the decoder layers of the target at {folder} were expected as one list of {depth} modules beside an "
            f"embedding and an LM head, and {len(stacks)} such lists were found; use a decoder-only language model"
        )
    kept: dict[int, Tensor] = {}

    def keep(tap: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    for tap in taps:
        # Some decoders scale the embedding before the first layer: its input is what they call the embedding output.
        if tap == -1:
            stacks[0][0].register_forward_pre_hook(
                lambda _module, positional, named: kept.__setitem__(-1, (*positional, named.get("hidden_states"))[0]),
                with_kwargs=True,
            )
        else:
            stacks[0][tap].register_forward_hook(keep(tap))

    @torch.no_grad()
    def capture(ids: Tensor) -> tuple[Tensor, Tensor]:
        kept.clear()
        output = base(input_ids=ids[None].to(platform.device()), use_cache=False)
        return torch.cat([kept[tap] for tap in taps], dim=-1)[0], output.last_hidden_state[0]

    _check_head(model, capture, folder)
    tables = {"embed_tokens": embedding.weight.detach().cpu(), "lm_head": head.weight.detach().cpu()}
    return capture, tables


@torch.no_grad()
def _check_head(model: Any, capture: Capture, folder: str | Path) -> None:
    head = model.get_output_embeddings()
    ids = torch.arange(1, 1 + min(_PROBE_TOKENS, head.weight.shape[0] - 1))
    _, hidden = capture(ids)
    expected = model(input_ids=ids[None].to(hidden.device), use_cache=False).logits[0].float()
    found = (hidden @ head.weight.T).float()
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if difference > _PROBE_TOLERANCE or getattr(head, "bias", None) is not None:
        raise DSparkError(
            f"the logits of the target at {folder} are not its LM head times its last hidden state (they differ by "
            f"{difference:.0%}: a soft cap, a scale or a bias), which is what a draft's teacher is; no draft for it"
        )
