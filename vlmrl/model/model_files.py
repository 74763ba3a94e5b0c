"""Check that a model folder has all files that loading needs, complete. Imports neither torch nor transformers.

Weights must be safetensors; pickled weights are never opened, although other libraries could read them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmrl.errors import CheckpointError, Problem
from vlmrl.json_text import parse_json

CONFIG = "config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROCESSOR = ("processor_config.json", "preprocessor_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "sentencepiece.bpe.model",
)
"""Possible names of the tokenizer's file, which depend on the library that wrote it. One of them must exist."""
JSON_FILES = (
    CONFIG,
    "generation_config.json",
    *PROCESSOR,
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    WEIGHTS_INDEX,
)
CHAT_TEMPLATE = "chat_template.json"
PROCESSOR_FILES = {
    *PROCESSOR,
    *TOKENIZER,
    CHAT_TEMPLATE,
    "chat_template.jinja",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
}
"""Files of tokenizer, image processor and chat template."""
HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
COMPARED_BYTES = 1 << 20
MAX_HEADER_BYTES = 100 << 20
MAX_JSON_BYTES = 256 << 20
MAX_LAYERS = 1000
"""Maximum number of layers of a tower, because a model is built before its parameters are counted: with a million
layers this would take hours."""
LAYER_KEYS = ("num_hidden_layers", "depth", "num_layers", "n_layers")
_WHOLE = "copy or download the folder again; `save_pretrained` of model and processor writes all files that are needed"


def folder_problems(folder: Path, *, has_weights: bool = True, own_code: bool = False) -> list[Problem]:
    """Return what is missing or broken in a model folder, from the names and headers of its files.

    Args:
        has_weights: whether weights must be in the folder; False for a checkpoint, which keeps them elsewhere.
        own_code: whether the repository may run its own code (`model.trust_remote_code`), which may read other files.
    """
    names = {path.name for path in folder.iterdir()}
    problems = [problem for name in JSON_FILES if name in names and (problem := _json_problem(folder / name))]
    if CONFIG not in names:
        hint = f"a model folder holds {CONFIG}, weights in .safetensors and the processor's files"
        problems.append(Problem(f"{folder} holds no model: there is no {CONFIG}", str(folder), hint))
    elif not problems:
        problems += _config_problems(folder / CONFIG)
    if has_weights:
        problems += _weight_problems(folder, names)
        if not problems:
            problems += _head_problems(folder)
    if own_code:
        return problems
    if not names & set(TOKENIZER):
        message = f"{folder} holds no tokenizer (none of {', '.join(TOKENIZER[:3])} ...)"
        problems.append(Problem(message, str(folder), _WHOLE))
    if not names & set(PROCESSOR):
        message = f"{folder} holds no image processor (neither {' nor '.join(PROCESSOR)})"
        problems.append(Problem(message, str(folder), f"text-only models are not supported; otherwise: {_WHOLE}"))
    return problems


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file (name -> dtype, shape, data_offsets) and the offset of its data in bytes.

    Format: 8 bytes of little-endian header length, then a JSON header of that length, then the data.

    Raises: CheckpointError when the header is damaged, or when the file is too short for its data.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MAX_HEADER_BYTES, size):
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = parse_json(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        missing = 8 + length + end - size
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} is damaged: {error}", where=str(path)) from error
    if missing > 0:
        message = f"{path.name} is cut short: {size:,} bytes of {size + missing:,}"
        raise CheckpointError(message, where=str(path), hint="copy it again, or use another checkpoint of the run")
    return header, 8 + length


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a safetensors file. Raises: CheckpointError, see `read_header`."""
    header = read_header(path)[0]
    try:
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"}
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} is damaged: {error}", where=str(path)) from error


def stored_numbers(folder: Path) -> int:
    """Return the number of elements in a folder's safetensors files; 0 without files. Raises: see `stored_shapes`."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(math.prod(shape) for path in files for shape in stored_shapes(path).values())


def _json_problem(path: Path) -> Problem | None:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            return Problem(f"{path.name} has more than {MAX_JSON_BYTES:,} bytes", str(path))
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        return Problem(f"{path.name} of the model is not JSON: {error}", str(path), _WHOLE)
    return (
        None
        if isinstance(value, dict)
        else Problem(f"{path.name} of the model is not a JSON object", str(path), _WHOLE)
    )


def _config_problems(path: Path) -> Iterator[Problem]:
    config: dict[str, Any] = parse_json(path.read_bytes())
    if not isinstance(config.get("model_type"), str):
        yield Problem(f"{path.name} of the model has no `model_type`", str(path), _WHOLE)
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in LAYER_KEYS:
            count = part.get(key)
            if isinstance(count, int) and not 0 <= count <= MAX_LAYERS:
                message = f"{path.name} of the model has {key} = {count:,}; 0 to {MAX_LAYERS:,} are accepted"
                yield Problem(message, str(path))


def _weight_problems(folder: Path, names: set[str]) -> Iterator[Problem]:
    if WEIGHTS_INDEX in names:
        yield from _index_problems(folder)
        return
    if WEIGHTS not in names:
        yield _no_weights(folder, names)
        return
    try:
        stored_shapes(folder / WEIGHTS)
    except CheckpointError as error:
        yield Problem(error.message, error.where, _WHOLE)


def _head_problems(folder: Path) -> Iterator[Problem]:
    """Report a configuration that ties head and embedding, although the files have a head of its own.

    transformers would train with one of them, and the saved model could not be loaded again.
    """
    config = parse_json((folder / CONFIG).read_bytes())
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    if config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is not True:
        return
    ends: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, offset = read_header(path)
        for name in header:
            if name.endswith((HEAD, EMBEDDINGS)):
                first, last = header[name]["data_offsets"]
                with open(path, "rb") as file:
                    file.seek(offset + first)
                    key = HEAD if name.endswith(HEAD) else EMBEDDINGS
                    ends[key] = file.read(min(last - first, COMPARED_BYTES))
    if len(ends) == 2 and ends[HEAD] != ends[EMBEDDINGS]:
        message = f"{CONFIG} ties the head to the embedding, and the files have a head ({HEAD}) with other values"
        hint = f"set tie_word_embeddings to false in {CONFIG}, or remove {HEAD} from the files"
        yield Problem(message, str(folder / CONFIG), hint)


def _no_weights(folder: Path, names: set[str]) -> Problem:
    others = sorted(name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf")))
    if not others:
        return Problem(f"{folder} holds no weights: there is no {WEIGHTS}", str(folder), _WHOLE)
    if others[0].endswith(".safetensors"):
        hint = f"one file is called {WEIGHTS}; several are listed in {WEIGHTS_INDEX}"
        return Problem(f"{folder} holds weights, but under a name that is not loaded: {others[0]}", str(folder), hint)
    message = f"the weights of {folder} are in {others[0]}, a format that vlmrl does not read"
    hint = "if you trust them, convert them: load the model with transformers and `save_pretrained` it as safetensors"
    return Problem(message, str(folder), hint)


def _index_problems(folder: Path) -> Iterator[Problem]:
    index = folder / WEIGHTS_INDEX
    try:
        listed: dict[str, str] = dict(parse_json(index.read_bytes())["weight_map"])
        by_file: dict[str, list[str]] = {}
        for tensor, file in listed.items():
            by_file.setdefault(file, []).append(tensor)
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield Problem(f"{WEIGHTS_INDEX} has no `weight_map` that can be read: {error}", str(index), _WHOLE)
        return
    outside = [name for name in by_file if not isinstance(name, str) or Path(name).name != name]
    if outside:
        yield Problem(f"{WEIGHTS_INDEX} names {outside[0]!r}, which is no file name in the folder", str(index), _WHOLE)
        return
    missing = sorted(name for name in by_file if not (folder / name).is_file())
    if missing:
        listing = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        message = f"{len(missing)} of {len(by_file)} weight files that {WEIGHTS_INDEX} names are missing: {listing}"
        yield Problem(message, str(folder), _WHOLE)
    for name in sorted(by_file.keys() - set(missing)):
        try:
            lost = set(by_file[name]) - stored_shapes(folder / name).keys()
        except CheckpointError as error:
            yield Problem(error.message, error.where, _WHOLE)
            continue
        if lost:
            message = f"{name} lacks {len(lost)} tensors that {WEIGHTS_INDEX} says it holds, such as {min(lost)}"
            yield Problem(message, str(folder), _WHOLE)
