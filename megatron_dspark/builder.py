"""From a config to modules on this rank's process groups."""

from typing import Any

from megatron_dspark import platform

platform.prepare()

from megatron.core.pipeline_parallel.utils import (  # noqa: E402
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder  # noqa: E402
from megatron.training.vocab_utils import calculate_padded_vocab_size  # noqa: E402

from megatron_dspark.config import DSparkModelConfig  # noqa: E402
from megatron_dspark.errors import DSparkError  # noqa: E402
from megatron_dspark.features.colocated import FrozenTarget, load_target  # noqa: E402
from megatron_dspark.model.draft import DSparkDraft  # noqa: E402
from megatron_dspark.model.model import DSparkModel  # noqa: E402
from megatron_dspark.parallel_rules import check_target_split  # noqa: E402
from megatron_dspark.targets.computable import check_computable  # noqa: E402
from megatron_dspark.targets.folder import (  # noqa: E402
    TargetConfig,
    copy_rows,
    read_frozen_tables,
    read_target_config,
)


class DSparkModelBuilder(GPTModelBuilder):
    """Builds `DSparkModel` from `DSparkModelConfig`, as Megatron-Bridge's own builders build theirs.

    `build_distributed_models` (wrapping in DDP, mixed precision, hooks) is inherited from `GPTModelBuilder`.
    """

    _model_config: DSparkModelConfig

    def __init__(self, model_config: DSparkModelConfig, *, forward_communicator: bool = False) -> None:
        """Prepare to build.

        Args:
            model_config: what to build.
            forward_communicator: the job's schedules run with `training.setup.forward_communicator`, which a pipeline
                needs: a frozen target's stages send nothing backwards, and other communicators would wait for it.
        """
        super().__init__(model_config)
        self._forward_communicator = forward_communicator
        self._targets: list[FrozenTarget] | None = None

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> DSparkModel:
        """Build the draft and, when `target_path` is set, load the frozen target and the draft's replicas from it.

        With `replicas_path` the replicas alone are loaded: features then come with the batches.

        Args:
            pg_collection: process groups of this rank.
            pre_process: whether this is the first pipeline stage; None asks the process groups.
            post_process: whether this is the last one, which holds the draft; None asks the process groups.
            vp_stage: virtual pipeline stage, None without.

        Raises:
            DSparkError: the config does not fit the target (see `check_against_target`) or itself, the target cannot
                be split over the tensor-parallel ranks, or the loop would wait for gradients that a frozen target's
                stages do not send.
        """
        config = self._model_config
        config.finalize()
        if config.pipeline_model_parallel_size > 1 and not self._forward_communicator:
            raise DSparkError(
                f"pipeline_model_parallel_size is {config.pipeline_model_parallel_size}, and stages of a frozen target "
                "send nothing backwards, which this loop's schedule would wait for; set it to 1, or run the schedule "
                "with the communicator of megatron_dspark.training.setup.forward_communicator and build with "
                "forward_communicator=True"
            )
        stages = config.transformer.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage, stages) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage, stages) and is_pp_last_stage(pg_collection.pp)
        target = None
        if config.target_path is not None:
            target_config = read_target_config(config.target_path)
            check_against_target(config, target_config)
            check_target_split(target_config, config.transformer.tensor_model_parallel_size)
            if self._targets is None:
                check_computable(target_config)
                # Megatron-Bridge loads all stages of a rank together.
                self._targets = load_target(
                    config.target_path, config.target_layer_ids, config.transformer, pg_collection
                )
            target = self._targets[vp_stage or 0]
        elif config.replicas_path is not None:
            target_config = read_target_config(config.replicas_path, any_architecture=True)
            check_against_target(config, target_config)
        model = DSparkModel(
            config, padded_vocab_size(config), pg_collection, target, vp_stage, pre_process, post_process
        )
        has_replicas = config.target_path is not None or config.replicas_path is not None
        if has_replicas and model.draft is not None:
            load_frozen_replicas(model.draft, target_config)
        return model


def padded_vocab_size(config: DSparkModelConfig) -> int:
    """Return the vocabulary that is stored: a multiple of `make_vocab_size_divisible_by` · tensor-parallel size."""
    return calculate_padded_vocab_size(
        config.vocab_size,
        config.make_vocab_size_divisible_by,
        config.transformer.tensor_model_parallel_size,
        logging_enabled=False,
    )


def check_against_target(config: DSparkModelConfig, target: TargetConfig) -> None:
    """Refuse a draft config that does not belong to this target.

    Raises:
        DSparkError: hidden size, vocabulary or depth differ.
    """
    for name, ours, theirs in (
        ("hidden_size", config.transformer.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if ours != theirs:
            raise DSparkError(
                f"the draft's {name} is {ours} and the target at {target.folder} has {theirs}; they must be equal"
            )


def load_frozen_replicas(draft: DSparkDraft, target: TargetConfig) -> None:
    """Copy the target's embedding and LM head into the draft's own tables (this rank's rows)."""
    tables, rank = read_frozen_tables(target), draft.pg_collection.tp.rank()
    copies: dict[str, Any] = {"embed_tokens": draft.embed_tokens, "lm_head": draft.lm_head}
    for name, module in copies.items():
        copy_rows(module.weight, tables[name], rank)
    if draft.dspark_config.train_lm_head:
        copy_rows(draft.teacher_lm_head.weight, tables["lm_head"], rank)
