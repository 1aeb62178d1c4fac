"""Megatron parameters of a draft and their Hugging Face names, through Megatron-Bridge's mapping registry.

Bridge carries each tensor across tensor-parallel ranks; the table below says how each one is split. Tasks are built
from the live module, and nothing may be left over on either side (Bridge itself only warns).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import Module

from megatron_dspark import platform
from megatron_dspark.errors import DSparkError
from megatron_dspark.hf.config import refuse_another_draft, settings_from_config, settings_from_model
from megatron_dspark.hf.layouts import DraftDimensions, tensor_shapes
from megatron_dspark.hf.rules import ARCHITECTURE, MODEL_TYPE

platform.prepare()

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry  # noqa: E402
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, WeightConversionTask  # noqa: E402
from megatron.bridge.models.conversion.param_mapping import (  # noqa: E402
    ColumnParallelMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from megatron.bridge.models.conversion.utils import get_module_and_param_from_name, unwrap_model  # noqa: E402

from megatron_dspark.model.draft import DSparkDraft  # noqa: E402

# Split over tensor-parallel ranks by rows, padded in Megatron to a multiple of rows: one row a token.
VOCABULARY = {
    "embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "markov_head.markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_head.markov_w2.weight",
}
# Split by rows (output features). `*` is a layer number.
BY_ROWS = {
    "fc.weight": "fc.weight",
    "layers.*.self_attention.linear_q.weight": "layers.*.self_attn.q_proj.weight",
    "layers.*.self_attention.linear_k.weight": "layers.*.self_attn.k_proj.weight",
    "layers.*.self_attention.linear_v.weight": "layers.*.self_attn.v_proj.weight",
    "layers.*.self_attention.linear_q.bias": "layers.*.self_attn.q_proj.bias",
    "layers.*.self_attention.linear_k.bias": "layers.*.self_attn.k_proj.bias",
    "layers.*.self_attention.linear_v.bias": "layers.*.self_attn.v_proj.bias",
}
# Split by columns (input features); their biases are whole on every rank.
BY_COLUMNS = {
    "layers.*.self_attention.linear_proj.weight": "layers.*.self_attn.o_proj.weight",
    "layers.*.self_attention.linear_proj.bias": "layers.*.self_attn.o_proj.bias",
    "layers.*.mlp.linear_fc2.weight": "layers.*.mlp.down_proj.weight",
}
# Each rank holds its rows of the gate and, below them, its rows of the up projection.
GATED = {"layers.*.mlp.linear_fc1.weight": ("layers.*.mlp.gate_proj.weight", "layers.*.mlp.up_proj.weight")}
# Whole on every rank.
REPLICATED = {
    "hidden_norm.weight": "hidden_norm.weight",
    "norm.weight": "norm.weight",
    "layers.*.input_layernorm.weight": "layers.*.input_layernorm.weight",
    "layers.*.pre_mlp_layernorm.weight": "layers.*.post_attention_layernorm.weight",
    "layers.*.self_attention.q_layernorm.weight": "layers.*.self_attn.q_norm.weight",
    "layers.*.self_attention.k_layernorm.weight": "layers.*.self_attn.k_norm.weight",
    "markov_head.gate_proj.weight": "markov_head.gate_proj.weight",
    "markov_head.gate_proj.bias": "markov_head.gate_proj.bias",
    "markov_head.joint_proj.weight": "markov_head.joint_proj.weight",
    "markov_head.joint_proj.bias": "markov_head.joint_proj.bias",
    "confidence_head.proj.weight": "confidence_head.proj.weight",
    "confidence_head.proj.bias": "confidence_head.proj.bias",
}
# In no Hugging Face folder: the target's own head, kept beside a draft's head that is being trained.
TRAINING_ONLY = ("teacher_lm_head.weight",)


@dataclass(frozen=True)
class HfDraft:
    """A draft on the Hugging Face side, in the attributes that Bridge asks for."""

    config: Mapping[str, Any]
    state: Mapping[str, Tensor] = field(default_factory=dict)
    model_name_or_path: str = "the draft's folder"


class VocabularyMapping(ColumnParallelMapping):
    """Rows of tokens: padded rows are cut on export and become zero on import."""

    def __init__(self, megatron_param: str, hf_param: str, vocab_size: int) -> None:
        super().__init__(megatron_param, hf_param)
        self.vocab_size = vocab_size

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: Module) -> Tensor:
        """Return this rank's rows [padded V / tp, width] of `hf_weights` [V, width]."""
        padded = hf_weights.new_zeros(megatron_module.weight.shape[0] * self.tp_size, hf_weights.shape[1])
        padded[: self.vocab_size] = hf_weights
        return super().hf_to_megatron(padded, megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: Module | None) -> dict[str, Tensor]:
        """Return the true vocabulary's rows [V, width], on every rank."""
        whole = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: weight[: self.vocab_size] for name, weight in whole.items()}


@MegatronModelBridge.register_bridge(source=ARCHITECTURE, target=DSparkDraft, model_type=MODEL_TYPE)
class DSparkDraftBridge(MegatronModelBridge):
    """Carries weights between a `DSparkDraft` and the DeepSpec layout; configs are `hf.config`'s business."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        """The tables above as Bridge's mappings."""
        mappings: list[MegatronParamMapping] = [
            VocabularyMapping(ours, theirs, self.hf_config["vocab_size"]) for ours, theirs in VOCABULARY.items()
        ]
        mappings += [ColumnParallelMapping(ours, theirs) for ours, theirs in BY_ROWS.items()]
        mappings += [RowParallelMapping(ours, theirs) for ours, theirs in BY_COLUMNS.items()]
        mappings += [GatedMLPMapping(ours, gate=gate, up=up) for ours, (gate, up) in GATED.items()]
        mappings += [ReplicatedMapping(ours, theirs) for ours, theirs in REPLICATED.items()]
        return MegatronMappingRegistry(*mappings)

    def build_conversion_tasks(
        self, hf_pretrained: HfDraft, megatron_model: list[Module], weight_dtype: torch.dtype | None = None
    ) -> list[WeightConversionTask]:
        """One task a parameter of the live module, in the layout's order, which is the same on every rank.

        Bridge's own version leaves unknown parameters and absent tensors out with a warning, and takes it that layer
        names have a prefix as soon as the target runs in pipeline stages.

        Raises:
            DSparkError: a parameter has no Hugging Face name, or a tensor of the layout has no parameter.
        """
        self.hf_pretrained, self.hf_config = hf_pretrained, hf_pretrained.config
        (draft,) = unwrap_model(megatron_model)
        registry = self.mapping_registry()
        registry.set_process_groups_from_pg_collection(draft.pg_collection)
        tasks: dict[str, WeightConversionTask] = {}
        layout = list(tensor_shapes(DraftDimensions.from_config(self.hf_config)))
        unfilled = set(layout)
        for name in _stored_names(draft):
            mapping = registry.megatron_to_hf_lookup(name)
            theirs = [] if mapping is None else _hf_names(mapping)
            if not set(theirs) <= unfilled or not theirs:
                raise DSparkError(
                    f"the draft's parameter {name} has no place in the exported layout (config.json describes a draft "
                    "without it), and it must not get lost; add it to the tables of hf/mapping.py and hf/layouts.py"
                )
            unfilled -= set(theirs)
            # The whole draft lives on one pipeline stage: nothing comes from another.
            mapping.pp_group = None
            module, weight = get_module_and_param_from_name(draft, name)
            tasks[theirs[0]] = WeightConversionTask(
                param_name=name,
                global_param_name=name,
                mapping=mapping,
                pp_rank=0,
                vp_stage=0,
                megatron_module=module,
                param_weight=weight,
                weight_dtype=weight_dtype,
            )
        if unfilled:
            raise DSparkError(
                f"config.json asks for {min(unfilled)} and the draft has no parameter for it; export with the "
                "configuration that the draft was built from"
            )
        return [tasks[name] for name in sorted(tasks, key=layout.index)]

    def _with_progress_tracking(
        self, tasks: Iterable[Any], description: str, show_progress: bool = True
    ) -> Iterator[Any]:
        # Bridge's bar is drawn wherever standard output goes; a log file should stay readable.
        console = Console(stderr=True)
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        yield from track(tasks, description, console=console, disable=not (console.is_terminal and first))

    def _broadcast_shared_embeddings(self, megatron_model: Any) -> None:
        # The draft's embedding and LM head are two parameters: there is nothing to tie.
        return None


def load_tensors(draft_module: Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copy Hugging Face tensors into a Megatron draft. Every rank that holds a part of the draft calls it.

    Args:
        draft_module: the draft, alone or wrapped.
        config: config.json of the tensors.
        tensors: every tensor of the layout; each is read once, when its turn comes.

    Raises:
        DSparkError: `config` describes another draft than `draft_module`.
    """
    draft = unwrap_model(draft_module)
    refuse_another_draft(settings_from_model(draft.dspark_config), settings_from_config(config))
    DSparkDraftBridge().load_weights_hf_to_megatron(HfDraft(config, tensors), [draft])


def check_coverage(draft_module: Module, config: Mapping[str, Any]) -> None:
    """Refuse, before anything is gathered, a draft of which a parameter or a tensor of the layout would be left over.

    Raises:
        DSparkError: see `DSparkDraftBridge.build_conversion_tasks`.
    """
    DSparkDraftBridge().build_conversion_tasks(HfDraft(config), [draft_module])


def stream_tensors(draft_module: Module, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) for every tensor of the layout, on every tensor-parallel rank of the draft.

    The tensors alias live parameters where nothing had to be gathered.

    Args:
        draft_module: the draft, alone or wrapped.
        config: the config.json that the tensors will stand beside.

    Raises:
        DSparkError: a parameter or a tensor is left over, or a shape is not the layout's.
    """
    shapes = tensor_shapes(DraftDimensions.from_config(config))
    draft = unwrap_model(draft_module)
    for name, tensor in DSparkDraftBridge().stream_weights_megatron_to_hf(
        [draft], HfDraft(config), cpu=False, merge_adapter_weights=False
    ):
        if tuple(tensor.shape) != shapes[name]:
            raise DSparkError(
                f"{name} has shape {list(tensor.shape)} in the draft, and config.json implies {list(shapes[name])}; "
                "export with the configuration that the draft was built from"
            )
        yield name, tensor


def _stored_names(draft: Module) -> list[str]:
    """Every parameter and saved buffer, without what only training or Transformer Engine needs."""
    names = dict.fromkeys([*(name for name, _ in draft.named_parameters()), *draft.state_dict()])
    return [name for name in names if name not in TRAINING_ONLY and not name.endswith("_extra_state")]


def _hf_names(mapping: MegatronParamMapping) -> list[str]:
    return [mapping.hf_param] if isinstance(mapping.hf_param, str) else list(mapping.hf_param.values())
