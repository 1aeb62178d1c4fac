"""Settings by name: `name.of.setting=value` on the command line, flat names for comparing, and back from JSON."""

import dataclasses
import types
import typing
from difflib import get_close_matches
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_dspark.errors import DSparkError
from megatron_dspark.training.settings import TrainSettings


def override(settings: TrainSettings, assignments: list[str]) -> TrainSettings:
    """Return `settings` with `name.of.setting=value` assignments applied.

    Raises:
        DSparkError: an assignment names no setting or has a value of another type.
    """
    known, merged = list(by_path(settings.as_dict())), OmegaConf.structured(settings)
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise DSparkError(f"the override {assignment!r} is not name=value; write for example steps=1000")
        if name not in known and not any(other.startswith(f"{name}.") for other in known):
            meant = [other for other in known if other.rsplit(".")[-1] == name] or get_close_matches(name, known, 1)
            hint = f"did you mean {meant[0]}?" if meant else "the settings are those of TrainSettings"
            raise DSparkError(f"the override {assignment!r} names no setting; {hint}")
        try:
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([assignment]))
            # Which also looks up what ${...} stands for.
            OmegaConf.to_object(merged)
        except (OmegaConfBaseException, ValueError, yaml.YAMLError):
            raise DSparkError(f"{name} was given {value!r} and takes {_taken_by(type(settings), name)}") from None
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _taken_by(owner: type, name: str) -> str:
    """What a setting takes, in words, as its annotation says."""
    kind: Any = owner
    for part in name.split("."):
        kind = typing.get_type_hints(kind)[part]
    inner = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return f"settings of its own; set one of them, for example {name}.{dataclasses.fields(kind)[0].name}"
    if types.NoneType in inner:
        (kind,) = (other for other in inner if other is not types.NoneType)
        return f"{_in_words(kind)}, or null"
    return _in_words(kind)


def _in_words(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return f"a list, each item {_IN_WORDS[item]}, as {'[1,2]' if item is int else '[one,two]'}"
    return _IN_WORDS[kind]


def by_path(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `TrainSettings.as_dict()` as one level, by the names that `override` takes ("optimizer.learning_rate")."""
    flat = {}
    for name, value in settings.items():
        flat |= by_path(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def settings_from_dict(values: dict[str, Any]) -> TrainSettings:
    """Bring settings back from `TrainSettings.as_dict`."""
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainSettings), values))  # type: ignore[return-value]
