"""Models that answer dataset rows: loaded here, or named at a server with `--endpoint` and `--model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmrl.errors import Problem, RecipeError

if TYPE_CHECKING:
    from pathlib import Path

    from vlmrl.inference.eval_recipe import ChosenRecipe
    from vlmrl.launch.request import AnswerRequest
    from vlmrl.recipe.schema import Recipe
    from vlmrl.services.client import EndpointOptions
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
    from vlmrl.services.client import EndpointOptions, base_url

    return EndpointOptions(base_url(endpoint), served, key_env, concurrency)


def open_answering(
    request: AnswerRequest, endpoint: EndpointOptions | None, root: Path
) -> tuple[ModelOrigin, ChosenRecipe, Recipe, list[Problem]]:
    """Return the model that answers, its recipe as chosen and as settled for this machine, and warnings about it.

    Args:
        endpoint: the endpoint that answers; None = the model is loaded here.
        root: folder of the runs.
    Raises: as `find_model`, `choose_recipe` and `settle_for_answers`.
    """
    from vlmrl.inference.eval_recipe import choose_recipe
    from vlmrl.setup.model_origin import ModelOrigin, find_model
    from vlmrl.setup.open_values import settle_for_answers

    if endpoint is None:
        which = request.checkpoint
        origin = find_model(request.model, root, int(which) if which.isdigit() else which)
    else:
        origin = ModelOrigin(endpoint.model, endpoint=endpoint.url)
    chosen = choose_recipe(
        origin,
        root,
        recipe=request.recipe,
        data=request.data,
        task=None if request.has_images else request.task,
        images=request.has_images,
        overrides=list(request.overrides),
    )
    settled, warnings = settle_for_answers(chosen.recipe, origin.files) if endpoint is None else (chosen.recipe, [])
    return origin, chosen, settled, warnings
