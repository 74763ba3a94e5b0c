"""Upload of a merged folder to the Hugging Face hub, private by default."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from vlmrl.errors import CheckpointError
from vlmrl.redaction.redact import first_line


def check_access(repo: str) -> None:
    """Check that the repository's name is valid and that the hub accepts the token, before hours of work begin.

    Raises: CheckpointError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise CheckpointError(
            f"`{repo}` is not a valid name of a hub repository: {first_line(error)}",
            hint="write it as ORGANISATION/NAME",
        ) from None
    try:
        HfApi().whoami()
    except Exception as error:  # each network library has its own exceptions
        _refused("the hub does not accept your token", error, "hf auth login, or set HF_TOKEN")


def push(folder: Path, repo: str, *, public: bool = False) -> str:
    """Upload all files of the folder as one commit. Return the commit's address.

    The repository is created if it does not exist.

    Raises: CheckpointError if the upload fails. If the repository exists and is public but `public` is False, nothing
        is uploaded.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    hint = f"the folder is complete; to upload it later: hf upload {repo} {folder}"
    try:
        repository = api.create_repo(repo, private=not public, exist_ok=True)
        is_public = api.repo_info(repository.repo_id).private is False
    except Exception as error:  # as above
        _refused(f"the hub repository {repo} cannot be created or read", error, hint)
    if is_public and not public:
        raise CheckpointError(
            f"the hub repository {repo} exists and is public: nothing was uploaded",
            hint="make it private, choose another, or give --public",
        )
    try:
        message = f"Upload {folder.name} (vlmrl merge)"
        return str(api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message=message).commit_url)
    except Exception as error:  # as above
        _refused(f"the upload to {repo} failed", error, hint)


def _refused(what: str, error: Exception, hint: str) -> NoReturn:
    raise CheckpointError(f"{what}: {first_line(error)}", hint=hint) from error
