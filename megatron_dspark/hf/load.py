"""Reading a draft's Hugging Face folder: the config, and tensors that are read from disk one at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megatron_dspark.errors import DSparkError
from megatron_dspark.files import read_json
from megatron_dspark.hf.layouts import DTYPES, DraftDimensions, foreign_name, tensor_shapes
from megatron_dspark.hf.rules import Problem, config_problems

if TYPE_CHECKING:
    from torch.nn import Module

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class LoadedDraft(NamedTuple):
    """A draft's folder, opened: `config, tensors = load_draft(folder)`."""

    config: dict[str, Any]
    tensors: "DraftTensors"


class DraftTensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder by name. Opening reads the headers; `tensors[name]` reads that tensor from disk.

    Attributes:
        shapes: shape of each tensor, by name.
        dtypes: its safetensors spelling ("BF16"), by name.
    """

    def __init__(self, folder: Path) -> None:
        """Open the weight files of `folder`.

        Raises:
            DSparkError: there are none, one of them is missing or damaged, or the index and the files disagree.
        """
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        for file, expected in _weight_files(folder).items():
            try:
                handle = safe_open(folder / file, framework="pt")
            except FileNotFoundError:
                raise DSparkError(
                    f"{INDEX_FILE} of {folder} names {file}, and there is no such file; copy it"
                ) from None
            except (SafetensorError, OSError) as error:
                raise DSparkError(
                    f"{folder / file} is not a whole safetensors file ({error}); it was cut short or altered, so copy "
                    "or export it again"
                ) from None
            names = list(handle.keys())
            if expected is not None and set(names) != expected:
                name = min(set(names) ^ expected)
                holder, other = (file, INDEX_FILE) if name in names else (INDEX_FILE, file)
                raise DSparkError(
                    f"{holder} of {folder} names the tensor {name}, and {other} does not; copy or export it again"
                )
            for name in names:
                tensor = handle.get_slice(name)
                self.shapes[name], self.dtypes[name] = tuple(tensor.get_shape()), tensor.get_dtype()
                self._files[name] = handle

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def load_draft(folder: str | Path) -> LoadedDraft:
    """Open a draft's folder in the DeepSpec layout, and refuse one whose weights have no single meaning.

    Args:
        folder: what `export_draft` writes, or a release of DeepSpec or AutoModel.

    Returns:
        The config and the tensors; no tensor has been read from disk.

    Raises:
        DSparkError: one sentence that names the file, key or tensor and what to do.
    """
    folder = Path(folder)
    config = read_config(folder)
    _refuse_other_layouts(folder, config)
    refuse_unreadable(folder, config_problems(config))
    tensors = DraftTensors(folder)
    refuse_unreadable(folder, tensor_problems(config, tensors.shapes, tensors.dtypes))
    return LoadedDraft(config, tensors)


def load_into_module(folder: str | Path, draft_module: "Module", optimizer: Any = None) -> None:
    """Copy a folder's weights into a Megatron draft, on every rank that holds a part of it.

    Every rank calls it, with the same folder. Values are converted to each parameter's own dtype. Vocabulary rows that
    Megatron added as padding become zero.

    Args:
        folder: the draft's folder.
        draft_module: the draft, alone or wrapped in Megatron's data-parallel and 16-bit wrappers.
        optimizer: Megatron-Core's optimizer of a run that starts from these weights: its FP32 masters are made anew,
            or its first step would write the masters' old values back.

    Raises:
        DSparkError: the folder is damaged or of another layout, describes another draft than `draft_module`, or leaves
            a parameter or a tensor over.
    """
    # Importing Megatron-Bridge takes seconds, which reading and linting a folder should not cost.
    from megatron_dspark.hf.mapping import load_tensors

    config, tensors = load_draft(folder)
    load_tensors(draft_module, config, tensors)
    if optimizer is not None:
        optimizer.reload_model_params()


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of `folder`.

    Raises:
        DSparkError: there is no such folder or file, or it does not hold a JSON object.
    """
    if not folder.is_dir():
        raise DSparkError(f"{folder} is not a folder; give the folder of an exported draft")
    config = read_json(folder / CONFIG_FILE, "the draft's config")
    if not isinstance(config, dict):
        raise DSparkError(f"{folder / CONFIG_FILE} holds a {type(config).__name__}, where a JSON object is needed")
    return config


def tensor_problems(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> list[Problem]:
    """Compare tensors with the layout that `config` implies: names both ways, shapes, and one dtype for all.

    Args:
        config: a draft's config, whose sizes are valid (see `rules.config_problems`).
        shapes: shape of each tensor, by name.
        dtypes: its safetensors spelling, by name.
    """
    dimensions = DraftDimensions.from_config(config)
    wanted = tensor_shapes(dimensions)
    problems = [_missing(name, shapes) for name in wanted if name not in shapes]
    problems += [_unexpected(name, dimensions) for name in shapes if name not in wanted]
    for name in wanted:
        if name not in shapes or shapes[name] == wanted[name]:
            continue
        have, want = list(shapes[name]), list(wanted[name])
        padded = len(have) == len(want) and have[1:] == want[1:] and want[0] == dimensions.vocab_size < have[0]
        sentence = f"{name} has {have[0]} rows, and config.json says vocab_size = {want[0]}; cut the padded rows"
        if not padded:
            sentence = f"{name} has shape {have}, and config.json implies {want}; the folder mixes two drafts"
        problems.append(Problem("padded-rows" if padded else "tensor-shapes", sentence))
    spellings = {spelling: dtype for dtype, (spelling, _) in DTYPES.items()}
    for name, spelling in dtypes.items():
        if name in wanted and spelling not in spellings:
            problems.append(Problem("dtype", f"{name} is stored as {spelling}; store it as {' or '.join(spellings)}"))
    found = sorted({spelling for name, spelling in dtypes.items() if name in wanted and spelling in spellings})
    declared = config.get("dtype") or config.get("torch_dtype")
    if len(found) > 1:
        problems.append(Problem("dtype", f"the tensors have several dtypes, {' and '.join(found)}; store one", True))
    elif found and declared is not None and spellings[found[0]] != declared:
        problems.append(
            Problem("dtype", f"config.json says {declared} and the tensors are {spellings[found[0]]}; correct it", True)
        )
    return problems


def refuse_unreadable(folder: Path, problems: list[Problem]) -> None:
    """Raise DSparkError on the first problem that takes the weights' one meaning away."""
    unreadable = [problem for problem in problems if not problem.readable]
    if unreadable:
        more = f" (and {len(unreadable) - 1} more: lint the folder)" if len(unreadable) > 1 else ""
        raise DSparkError(f"{folder}: {unreadable[0].sentence}{more}")


def _missing(name: str, shapes: Mapping[str, Any]) -> Problem:
    if name == "confidence_head.proj.bias" and "confidence_head.proj.weight" in shapes:
        return Problem(
            "confidence-bias",
            "confidence_head.proj.weight has no bias beside it, and engines create one and leave it unset; "
            "export confidence_head.proj.bias",
        )
    if name in ("lm_head.weight", "embed_tokens.weight"):
        return Problem(
            "frozen-replicas",
            f"{name} is absent, and a draft of this layout carries its own copy of the target's; export it",
        )
    return Problem("missing-tensors", f"{name} is absent, and config.json asks for it; export the draft again")


def _unexpected(name: str, dimensions: DraftDimensions) -> Problem:
    meaning = foreign_name(name)
    if meaning is None and name.startswith("layers."):
        meaning = f"config.json describes {dimensions.num_hidden_layers} layers without it"
    if meaning is None:
        meaning = "config.json describes a draft without it"
    return Problem("unknown-tensors", f"the tensor {name} does not belong to this layout: {meaning}")


def _weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Each weight file with the tensors that the index puts in it (None: there is no index)."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists() and index.exists():
        raise DSparkError(
            f"{folder} holds both {WEIGHTS_FILE} and {INDEX_FILE}, two sets of weights; remove one of them"
        )
    if single.exists():
        return {WEIGHTS_FILE: None}
    if not index.exists():
        raise DSparkError(
            f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; give the folder of an exported draft"
        )
    placed = read_json(index, "the index of the draft's weights")
    placed = placed.get("weight_map") if isinstance(placed, dict) else None
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise DSparkError(f"{index} has no 'weight_map' from tensor names to files; export the draft again")
    files: dict[str, set[str] | None] = {}
    for name, file in placed.items():
        if Path(file).name != file:
            raise DSparkError(f"{index} puts {name} into {file!r}, outside its own folder; export the draft again")
        files.setdefault(file, set()).add(name)  # type: ignore[union-attr]
    return files


def _refuse_other_layouts(folder: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures") or []
    architecture = names[0] if isinstance(names, list) and names else None
    layout = None
    if "transformer_layer_config" in config or "speculators_model_type" in config:
        layout = "the speculators layout"
    elif architecture == "DFlashDraftModel":
        layout = "the ModelOpt layout"
    elif architecture == "DSparkDraftModel":
        layout = "the SpecForge layout"
    elif "dspark_block_size" in config:
        layout = "DeepSeek-V4's bundled layout"
    if layout:
        raise DSparkError(
            f"{folder} holds a draft in {layout}, and only DeepSpec's is read; convert it with megatron-dspark import"
        )
    if "block_size" not in config and "target_layer_ids" not in config:
        raise DSparkError(
            f"{folder} holds a {architecture or 'model'} without block_size and target_layer_ids, so it is not a draft"
            "; give the folder of an exported draft"
        )
