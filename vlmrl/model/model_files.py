"""Check that a model is there and complete, in a folder or on the hub, before anything loads it. No torch.

Weights must be safetensors; pickled weights are never opened, although other libraries could read them. The hub is
asked once, with a short time limit: transformers would request each missing file five times.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmrl.errors import CheckpointError, Problem, did_you_mean
from vlmrl.redaction.redact import first_line
from vlmrl.untrusted import parse_json

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
        yield Problem(
            f"{WEIGHTS_INDEX} names {outside[0]!r}, which is not the name of a file in the folder", str(index), _WHOLE
        )
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


ANSWER_SECONDS = 10.0
"""Time limit of the request to the hub, in seconds."""


def require_source(path: str, revision: str | None = None) -> None:
    """Check that `path` is a local folder, a hub model in the local cache, or a model on the hub.

    Raises: CheckpointError when it is none of these; the message says what failed.
    """
    if Path(path).exists():
        return
    listing = "name a local folder, a run, or a hub model (org/name) that is in the cache or can be downloaded"
    hint = did_you_mean(path, models_beside(path), listing)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:  # needs no request; importing the client is slow
        raise CheckpointError(f"`{path}` is neither a local folder nor a hub name", hint=hint)
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
            return
        HfApi().model_info(path, revision=revision, timeout=ANSWER_SECONDS)
    except HFValidationError:
        raise CheckpointError(f"`{path}` is neither a local folder nor a hub name", hint=hint) from None
    except GatedRepoError:
        raise CheckpointError(
            f"the hub model `{path}` is gated", hint="accept its terms, then `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"the hub model `{path}` has no revision `{revision}`", hint="model.revision") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"`{path}` is not a local folder, and the hub has no such public model", hint=hint
        ) from None
    except Exception as error:  # network: every client library has its own exceptions
        reason = first_line(error, 120)
        message = f"`{path}` is not a local folder, it is not in the hub cache, and the hub cannot be reached: {reason}"
        raise CheckpointError(message, hint=hint) from error


def models_beside(path: str) -> list[str]:
    """Return the model folders in the folder that should hold `path`."""
    return [str(file.parent) for file in Path(path).parent.glob("*/config.json")]


WANTED_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.safetensors"]
"""Patterns of the files that are downloaded: configuration, tokenizer, processor, code, weights."""


def is_cached(path: str, revision: str | None = None) -> bool:
    """Return whether a hub model is completely in the local cache: configuration, tokenizer, all shards of weights."""
    from huggingface_hub import try_to_load_from_cache

    def local(name: str) -> Path | None:
        cached = try_to_load_from_cache(path, name, revision=revision)
        return Path(cached) if isinstance(cached, str) else None

    if local("config.json") is None or local("tokenizer_config.json") is None:
        return False
    index = local("model.safetensors.index.json")
    if index is None:
        return local("model.safetensors") is not None
    return all(local(shard) is not None for shard in set(parse_json(index.read_text())["weight_map"].values()))


def cached_folder(path: str) -> Path | None:
    """Return the folder of a hub model in the local cache; None if it is not there, or is no hub name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def download(path: str, revision: str | None = None) -> Path:
    """Download a hub model into the local cache and return its folder there.

    Raises: CheckpointError when the hub cannot be reached, does not have the model, or has no safetensors weights for
        it.
    """
    from huggingface_hub import snapshot_download

    require_source(path, revision)
    try:
        folder = snapshot_download(path, revision=revision, allow_patterns=WANTED_FILES)
    except Exception as error:  # network: every client library has its own exceptions
        reason = first_line(error, 120)
        raise CheckpointError(
            f"`{path}` cannot be downloaded: {reason}", hint="run the same command again: the download continues"
        ) from error
    if not is_cached(path, revision):
        raise CheckpointError(
            f"the hub model `{path}` is incomplete: configuration, tokenizer or weights are missing",
            where=folder,
            hint="its weights must be safetensors",
        )
    return Path(folder)
