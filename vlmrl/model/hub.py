"""Check that a model exists on the hub, by one request with a short time limit, before transformers loads it.

Without this check, transformers would request each missing file five times.
"""

from __future__ import annotations

from pathlib import Path

from vlmrl.errors import CheckpointError, did_you_mean
from vlmrl.json_text import parse_json
from vlmrl.redaction.redact import first_line

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
        raise CheckpointError(f"`{path}` is no local folder, and the hub has no such public model", hint=hint) from None
    except Exception as error:  # network: every client library has its own exceptions
        reason = first_line(error, 120)
        message = f"`{path}` is no local folder, it is not in the hub cache, and the hub cannot be reached: {reason}"
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
