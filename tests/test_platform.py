"""Importing the library: without Transformer Engine, without side effects where CUDA is, and lightly."""

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_package_imports_nothing_heavy() -> None:
    assert run("import sys, megatron_dspark; print('torch' in sys.modules, 'megatron.core' in sys.modules)") == (
        "False False"
    )


def test_what_prepares_checks_and_serves_needs_no_megatron() -> None:
    """`prepare`, `import`, `lint` and `verify`: their machines may lack it, and it changes how torch runs on a CPU."""
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import megatron_dspark.cli, megatron_dspark.data.prepare, megatron_dspark.hf.convert\n"
        "import megatron_dspark.hf.lint, megatron_dspark.hf.record, megatron_dspark.serving.harness\n"
        "print('imported')"
    )
    assert run(code) == "imported"


def test_no_transformer_engine_is_left_behind() -> None:
    code = (
        "from megatron_dspark import platform; platform.prepare(); platform.prepare()\n"
        "import megatron.bridge.peft.lora_layers, sys, importlib.util\n"
        "import megatron.core.utils as u\n"
        "print('transformer_engine' in sys.modules, importlib.util.find_spec('transformer_engine') is None)"
    )
    assert run(code) == "False True"


def test_imports_say_nothing_unless_something_is_wrong() -> None:
    """Everything that is imported to train, where Megatron-Core configures logging (to INFO, on standard output)."""
    code = (
        "import logging\n"
        "import megatron_dspark.builder, megatron_dspark.hf.mapping, megatron_dspark.training.run\n"
        "from megatron.bridge import AutoBridge\n"
        "import warnings, megatron.core.models.backends as backends\n"
        "logging.getLogger('megatron.bridge.utils.import_utils').warning('a real one')\n"
        "warnings.warn_explicit('a real warning', UserWarning, 'f.py', 1, module='megatron.core.optimizer')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["WARNING:megatron.bridge.utils.import_utils:a real one"]
    # Bridge's module has a handler of its own beside the root logger's.
    assert done.stderr.splitlines() == ["a real one", "f.py:1: UserWarning: a real warning"]


def test_changes_nothing_where_cuda_is() -> None:
    """With CUDA (as `is_available` tells it) neither torch.cuda nor the function modes are touched."""
    code = (
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "before = {name: value for name, value in vars(torch.cuda).items()}\n"
        "modes = torch.overrides._len_torch_function_stack() if hasattr(torch.overrides, "
        "'_len_torch_function_stack') else torch._C._len_torch_function_stack()\n"
        "from megatron_dspark import platform; platform.prepare()\n"
        "same = all(vars(torch.cuda)[name] is value for name, value in before.items())\n"
        "print(same, torch._C._len_torch_function_stack() - modes)"
    )
    assert run(code) == "True 0"


def test_cuda_requests_land_on_the_cpu() -> None:
    code = (
        "from megatron_dspark import platform; platform.prepare(); import torch\n"
        "a = torch.zeros(2, device='cuda'); b = torch.ones(2).cuda()\n"
        "c = b.to('cuda:0'); d = b.to(torch.device('cuda'))\n"
        "print({t.device.type for t in (a, b, c, d)}, a.type())"
    )
    assert run(code) == "{'cpu'} torch.cuda.FloatTensor"
