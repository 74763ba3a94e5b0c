"""Is there such a model? Asked once, with a short limit, before transformers tries each of its files five times."""

from __future__ import annotations

from pathlib import Path

from vlmrl.errors import CheckpointError

ANSWER_SECONDS = 10.0


def require_source(path: str, revision: str | None = None) -> None:
    """Return when `path` is a folder here, a hub model in the cache, or one that the hub has.

    Raises: CheckpointError that says which of these failed.
    """
    if Path(path).exists():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    hint = "name a local folder, a run, or a hub model (org/name) that is in the cache or can be downloaded"
    try:
        if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
            return
        HfApi().model_info(path, revision=revision, timeout=ANSWER_SECONDS)
    except HFValidationError:
        raise CheckpointError(f"`{path}` is no folder here and no hub name", hint=hint) from None
    except GatedRepoError:
        raise CheckpointError(
            f"the hub model `{path}` is gated", hint="accept its terms, then `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"the hub model `{path}` has no revision `{revision}`", hint="model.revision") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"`{path}` is no folder here, and the hub has no such public model", hint=hint) from None
    except Exception as error:  # the network: every client library raises its own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        message = f"`{path}` is no folder here, it is not in the hub cache, and the hub cannot be asked: {reason}"
        raise CheckpointError(message, hint=hint) from error
