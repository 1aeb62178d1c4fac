"""Megatron-Bridge's own `pretrain` on the tiny target: `python -m tests.bridge_pretrain FOLDER`.

It reads FOLDER/settings.json (`TrainSettings`) and writes FOLDER/result.json: what Bridge reported after each step, and
the tensors of the checkpoint that it saved.

What is replaced here is Bridge's own dependence on a GPU or on packages that this loop never uses; the model, the data
and the forward step are the library's. It needs a process of its own, since the replacements stay.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dspark import platform

platform.prepare()

import torch  # noqa: E402

# Imported by Bridge's loop at module level, used only for distillation, energon data sets and in-process restarts.
UNUSED = ("megatron.energon", "modelopt", "nvidia_resiliency_ext.inprocess", "nvidia_resiliency_ext")


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the packages of `UNUSED` that are not installed; any name in them stands for a class."""

    def __init__(self) -> None:
        self.roots = [name for name in UNUSED if not _installed(name)]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        inside = any(name == root or name.startswith(f"{root}.") for root in self.roots)
        # Bridge asks whether this one is there, and would use it.
        if not inside or name.startswith("nvidia_resiliency_ext.checkpointing"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: _placeholder(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        return None


def _placeholder(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    # A class to subclass or subscript, a function to call.
    return type(name, (), {"__init__": lambda *_, **__: None, "__class_getitem__": classmethod(lambda cls, _: cls)})


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


sys.meta_path.append(Placeholders())

from megatron.bridge.data.base import DatasetProvider  # noqa: E402
from megatron.bridge.training import initialize, setup, train  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.config import (  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.core.dist_checkpointing import load_tensors_metadata  # noqa: E402

from megatron_dspark.data.encoded import load_samples  # noqa: E402
from megatron_dspark.data.sampler import Dealer, Sampler  # noqa: E402
from megatron_dspark.targets.folder import read_target_config  # noqa: E402
from megatron_dspark.training.overrides import settings_from_dict  # noqa: E402
from megatron_dspark.training.step import forward_step_dspark  # noqa: E402


@dataclass
class TinyConversations(DatasetProvider):
    """Our sampler's micro-batches, handed to Bridge as they are (`dataloader_type` "external")."""

    settings: Any = None
    dataloader_type: str = "external"

    def build_datasets(self, context: Any) -> tuple[Any, None, None]:
        settings = self.settings
        sampler = Sampler(
            load_samples(settings.data, settings.target, settings.max_length),
            anchors=settings.anchor_rule,
            dealer=Dealer(settings.micro_batch_size, context.pg_collection.dp.rank(), context.pg_collection.dp.size()),
            global_batch_size=settings.global_batch_size,
        )
        starts = (step * settings.global_batch_size for step in range(settings.steps))
        return (batch for start in starts for batch in sampler.step_batches(start)), None, None


class Losses(Callback):
    """Keeps what Bridge reports after every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_step_end(self, context: Any) -> None:
        self.steps.append({name: float(value) for name, value in context.loss_dict.items()})


def allow_cpu() -> None:
    """Take Bridge's checks and warm-ups of CUDA out of its way."""
    started = initialize.initialize_megatron
    setup.initialize_megatron = lambda **keywords: started(**keywords, allow_no_cuda=True)
    # The wheel has no makefile to compile with, and nothing here reads an indexed data set.
    initialize.compile_helpers = lambda: None
    setup.set_jit_fusion_options = lambda *_: None
    torch.cuda.device_count = lambda: 1


def without_distillation() -> None:
    """Where modelopt is absent: what it would answer for a model that is not being distilled."""
    if isinstance(sys.modules["modelopt"].__loader__, Placeholders):
        train.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None


def main(folder: Path) -> None:
    settings = settings_from_dict(json.loads((folder / "settings.json").read_text()))
    optimizer, losses = settings.optimizer, Losses()
    if not platform.has_cuda():
        allow_cpu()
    without_distillation()
    config = ConfigContainer(
        model=settings.model_config(read_target_config(settings.target)),
        train=TrainingConfig(
            train_iters=settings.steps,
            global_batch_size=settings.global_batch_size,
            micro_batch_size=settings.micro_batch_size,
        ),
        validation=ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=optimizer.learning_rate,
            min_lr=optimizer.min_learning_rate,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.adam_beta1,
            adam_beta2=optimizer.adam_beta2,
            adam_eps=optimizer.adam_eps,
            clip_grad=optimizer.clip_grad,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style=optimizer.decay_style,
            start_weight_decay=optimizer.weight_decay,
            end_weight_decay=optimizer.weight_decay,
        ),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        dist=DistributedInitConfig(distributed_backend=platform.communication_backend()),
        dataset=TinyConversations(settings=settings),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=256),
        checkpoint=CheckpointConfig(save=str(folder / "bridge"), save_interval=settings.steps),
        logger=LoggerConfig(log_interval=1),
        rng=RNGConfig(seed=settings.seed),
    )
    pretrain(config, forward_step_dspark, callbacks=[losses])
    saved = folder / "bridge" / f"iter_{settings.steps:07d}"
    tensors = [name for name in load_tensors_metadata(str(saved)) if not name.startswith("optimizer.")]
    (folder / "result.json").write_text(json.dumps({"steps": losses.steps, "tensors": tensors}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
