"""Rules about the trained weights: adapters, frozen parts, quantized weights, and the optimizers for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from vlmrl.errors import Problem
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import Model
from vlmrl.recipe.validation_messages import literal_choices

PARTS = tuple(literal_choices(get_args(Model.model_fields["freeze"].annotation)[0]))


def _frozen(loaded: LoadedRecipe) -> Iterator[Problem]:
    if set(PARTS) <= set(loaded.recipe.model.freeze):
        message = "`model.freeze` names every part: nothing is left to train"
        yield Problem(message, loaded.where(("model", "freeze")), f"leave out at least one of {', '.join(PARTS)}")


def _frozen_under_adapter(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find a `model.freeze` that contradicts `[lora]`.

    With an adapter, all weights are frozen anyway, and `model.freeze` means that a part gets no adapter.
    """
    lora, freeze = loaded.recipe.lora, loaded.recipe.model.freeze
    where = loaded.where(("model", "freeze"))
    if lora is None or set(PARTS) <= set(freeze):
        return
    adapted = {"language", "vision", "connector"} if lora.vision else {"language"}
    if adapted <= set(freeze):
        message = f"`model.freeze` names every part that would get an adapter ({', '.join(sorted(adapted))})"
        hint = "leave language out" if not lora.vision else "leave one of them out"
        yield Problem(f"{message}: nothing is left to train", where, hint)
    elif lora.vision and {"vision", "connector"} <= set(freeze):
        message = "`lora.vision` adds adapters to the vision tower and the connector, but `model.freeze` excludes both"
        yield Problem(message, loaded.where(("lora", "vision"), ("model", "freeze")), "remove one of the two")
    else:
        idle = [part for part in freeze if part not in adapted]
        if idle:
            message = f"`model.freeze` of {', '.join(idle)} changes nothing: with [lora] no weight there is trained"
            yield Problem(message, where, "remove it", "warning")


def _dropout(loaded: LoadedRecipe) -> Iterator[Problem]:
    lora = loaded.recipe.lora
    if lora is not None and lora.dropout > 0 and loaded.recipe.kind == "rl":
        message = f"`lora.dropout` is {lora.dropout}: the policy that is trained would not be the one that sampled"
        yield Problem(message, loaded.where(("lora", "dropout")), "leave dropout out (= 0) in reinforcement learning")


def _patterns(loaded: LoadedRecipe) -> Iterator[Problem]:
    lora = loaded.recipe.lora
    if lora is None:
        return
    names = {"exclude": lora.exclude, "targets": [] if isinstance(lora.targets, str) else lora.targets}
    for key, values in names.items():
        if any(not value.strip() for value in values):
            yield Problem(f"`lora.{key}` holds an empty name", loaded.where(("lora", key)), "remove it")
    if "all-linear" in names["targets"]:
        message = '`lora.targets` lists "all-linear", which is not the name of a layer'
        yield Problem(message, loaded.where(("lora", "targets")), 'write targets = "all-linear"')
    if "*" in lora.exclude:
        message = '`lora.exclude` has "*", which leaves no layer: nothing is left to train'
        yield Problem(message, loaded.where(("lora", "exclude")), "remove it")


def _quantized(loaded: LoadedRecipe) -> Iterator[Problem]:
    model = loaded.recipe.model
    if model.quantize is None:
        return
    where = loaded.where(("model", "quantize"))
    if loaded.recipe.lora is None:
        message = f'`model.quantize` is "{model.quantize}", but quantized weights cannot be trained themselves'
        yield Problem(message, where, "add a [lora] table, or remove model.quantize")


def _optimizer(loaded: LoadedRecipe) -> Iterator[Problem]:
    optim, model = loaded.recipe.optim, loaded.recipe.model
    where = loaded.where(("optim", "name"))
    if optim.name == "adamw_bf16_kahan" and model.dtype == "float32":
        message = f"`optim.name` is {optim.name}, which holds bfloat16 weights, but `model.dtype` is {model.dtype}"
        yield Problem(message, where, 'set model.dtype = "bfloat16", or optim.name = "adamw"')


def _slow_rate(loaded: LoadedRecipe) -> Iterator[Problem]:
    lr = loaded.recipe.optim.lr
    if loaded.recipe.lora is not None and lr < 3e-6:
        message = f"`optim.lr` is {lr}, a rate for training all weights; an adapter hardly changes with it"
        yield Problem(message, loaded.where(("optim", "lr")), "leave it out: with [lora] it is then 1e-5", "warning")


LORA_RULES: tuple[Callable[[LoadedRecipe], Iterator[Problem]], ...] = (
    _frozen,
    _frozen_under_adapter,
    _dropout,
    _patterns,
    _quantized,
    _optimizer,
    _slow_rate,
)
