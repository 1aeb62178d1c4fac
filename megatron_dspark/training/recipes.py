"""Recipes: Python functions, in any file, that return a complete `TrainSettings`."""

import importlib.util
from pathlib import Path

from megatron_dspark.errors import DSparkError
from megatron_dspark.training.settings import TrainSettings


def load_recipe(name: str) -> TrainSettings:
    """Call the recipe `FILE.py:FUNCTION` and return its settings.

    Raises:
        DSparkError: the file or function does not exist, or it returns something else.
    """
    path, _, function = name.partition(":")
    if not function or not Path(path).is_file():
        raise DSparkError(
            f"the recipe {name!r} is not FILE.py:FUNCTION with an existing file; recipes/ has some to start from"
        )
    spec = importlib.util.spec_from_file_location(f"dspark_recipe_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise DSparkError(f"the recipe file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = getattr(module, function, None)
    if not callable(recipe):
        known = sorted(key for key, value in vars(module).items() if callable(value) and value.__module__ == spec.name)
        raise DSparkError(f"{path} has no recipe {function!r}; it has {', '.join(known) or 'none'}")
    settings = recipe()
    if not isinstance(settings, TrainSettings):
        raise DSparkError(f"the recipe {name} returns a {type(settings).__name__}; it must return TrainSettings")
    return settings
