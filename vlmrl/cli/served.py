"""Models that a server answers for, as commands name them with `--endpoint` and `--model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmrl.errors import RecipeError

if TYPE_CHECKING:
    from vlmrl.endpoint.client import EndpointOptions
    from vlmrl.setup.model_origin import ModelOrigin


def endpoint_of(
    endpoint: str | None,
    served: str | None,
    key_env: str | None,
    concurrency: int,
    *,
    model: str | None,
    gpus: str | None,
) -> EndpointOptions | None:
    """Return the endpoint that a command's options name, or None if its model is loaded here.

    Args:
        served: value of `--model`.
        model: the command's argument.
    Raises: RecipeError when the options do not go together; EndpointError for an unusable address.
    """
    if endpoint is None:
        if served is not None or key_env is not None:
            raise RecipeError("--model and --key-env belong to --endpoint", hint="add --endpoint URL")
        if model is None:
            raise RecipeError("no model is named", hint="name a run, a model folder or a hub name, or use --endpoint")
        return None
    if model is not None:
        raise RecipeError(f"`{model}` and --endpoint both name a model", hint="leave one of them out")
    if not served:
        raise RecipeError("--endpoint needs the name of the model there", hint="add --model NAME")
    if gpus is not None:
        raise RecipeError("--gpus is for a model that is loaded here, not for --endpoint", hint="leave out --gpus")
    from vlmrl.endpoint.client import EndpointOptions, base_url

    return EndpointOptions(base_url(endpoint), served, key_env, concurrency)


def served_origin(endpoint: EndpointOptions) -> ModelOrigin:
    """Return the origin of an endpoint's model."""
    from vlmrl.setup.model_origin import ModelOrigin

    return ModelOrigin(endpoint.model, endpoint=endpoint.url)
