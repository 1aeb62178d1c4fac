"""The one place that makes Megatron-Core and Megatron-Bridge run on a machine without CUDA.

Megatron-Core names the device "cuda" inside seeding, data-parallel buffers, schedules, optimizers and checkpointing,
and has no flag for another one. Where CUDA is absent, `prepare` answers those calls with the CPU; where CUDA is
present it replaces nothing. Megatron-Bridge additionally imports Transformer Engine in one module that this library
does not use; where Transformer Engine is absent, that single import is served by a placeholder while it happens.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_dspark.quiet import quiet_logs, quiet_warnings

_TRANSFORMER_ENGINE_USER = "megatron.bridge.peft.lora_layers"
_state: dict[str, Any] = {"prepared": False, "mode": None}


def has_cuda() -> bool:
    """Whether this process computes on CUDA devices."""
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def device() -> torch.device:
    """The device on which this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def communication_backend() -> str:
    """The torch.distributed backend for this machine."""
    return "nccl" if has_cuda() else "gloo"


def prepare() -> None:
    """Make `import megatron.bridge` and Megatron-Core's training functions usable here. Call it once a process.

    Without CUDA it replaces `torch.cuda`'s book-keeping functions and installs a function mode for this thread that
    turns a requested "cuda" device into the CPU. It must run before Megatron modules are built, in every process.
    """
    if _state["prepared"]:
        return
    _state["prepared"] = True
    quiet_logs()
    quiet_warnings(cuda=has_cuda())
    if not has_transformer_engine():
        sys.meta_path.insert(0, _TransformerEnginePlaceholder())
    if not has_cuda():
        _replace_cuda_bookkeeping()
        _state["mode"] = _CpuForCuda()
        _state["mode"].__enter__()


class _TransformerEnginePlaceholder(importlib.abc.MetaPathFinder):
    """Serves `transformer_engine.pytorch` to Bridge's LoRA module alone, and only while that module executes.

    A placeholder that stayed would make Megatron-Core believe that Transformer Engine is installed.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TRANSFORMER_ENGINE_USER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithPlaceholder(spec.loader)
        return spec


class _LoaderWithPlaceholder(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with _placeholder_modules("transformer_engine", "transformer_engine.pytorch") as pytorch:
            # The module only names classes (bases, annotations, isinstance checks): any name may stand for one.
            pytorch.__getattr__ = _placeholder_class  # type: ignore[method-assign]
            self._loader.exec_module(module)


class _PlaceholderType(type):
    def __getattr__(cls, name: str) -> type:
        return _placeholder_class(name)


def _placeholder_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _PlaceholderType(name, (torch.nn.Module,), {})


@contextlib.contextmanager
def _placeholder_modules(package: str, submodule: str) -> Iterator[types.ModuleType]:
    outer, inner = types.ModuleType(package), types.ModuleType(submodule)
    outer.pytorch = inner  # type: ignore[attr-defined]
    sys.modules.update({package: outer, submodule: inner})
    try:
        yield inner
    finally:
        sys.modules.pop(package, None)
        sys.modules.pop(submodule, None)


class _NoStream:
    """Stands for a CUDA stream or event: everything on the CPU is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    synchronize = record = wait = wait_stream = wait_event = record_event = _nothing


def _replace_cuda_bookkeeping() -> None:
    import megatron.core.tensor_parallel.random as megatron_random

    cuda = torch.cuda
    cpu_state, set_cpu_state = torch.get_rng_state, torch.set_rng_state

    # A function of its own for every name: torch.compile refuses one that stands in several places.
    def does_nothing() -> Any:
        return lambda *_, **__: None

    def read_state(*_: Any, **__: Any) -> torch.Tensor:
        return cpu_state()

    def write_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        set_cpu_state(state)

    def gives_no_stream() -> Any:
        return lambda *_, **__: _NoStream()

    cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    cuda.get_rng_state, cuda.set_rng_state = read_state, write_state  # type: ignore[assignment]
    for name in ("current_stream", "default_stream", "stream"):
        setattr(cuda, name, gives_no_stream())
    cuda.Stream = cuda.Event = _NoStream  # type: ignore[assignment,misc]
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed_all"):
        setattr(cuda, name, does_nothing())
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment,return-value]
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.reset_peak_memory_stats = does_nothing()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = does_nothing(), does_nothing()  # type: ignore[assignment]
    megatron_random._get_cuda_rng_state = read_state
    megatron_random._set_cuda_rng_state = write_state


_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.DoubleTensor": "torch.cuda.DoubleTensor",
}


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


class _CpuForCuda(TorchFunctionMode):
    """Answers `device="cuda"`, `.cuda()`, `.to("cuda")` with the CPU, and names tensor types as Megatron expects."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if function is torch.Tensor.cuda:
            return arguments[0]
        if function is torch.Tensor.type and len(arguments) == 1 and not keywords:
            # The optimizers of Megatron-Core sort parameters by these names and refuse any other.
            name = function(arguments[0])
            return _CUDA_TYPE_NAMES.get(name, name)
        if _is_cuda(keywords.get("device")):
            keywords = {**keywords, "device": torch.device("cpu")}
        if function is torch.Tensor.to and any(_is_cuda(argument) for argument in arguments[1:]):
            arguments = tuple(torch.device("cpu") if _is_cuda(argument) else argument for argument in arguments)
        return function(*arguments, **keywords)
