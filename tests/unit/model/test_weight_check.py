"""Weights that are missing, renamed, misshapen or not finite are refused, when loaded and from their headers alone."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlmrl.errors import CheckpointError
from vlmrl.model.load import read_model
from vlmrl.model.model_facts import model_facts
from vlmrl.recipe.schema import Model

Weights = dict[str, Tensor]


def _without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


def _misshapen(weights: Weights) -> Weights:
    name = next(n for n in weights if n.endswith("layers.0.input_layernorm.weight"))
    return weights | {name: torch.ones(len(weights[name]) + 1)}


def changed(source: Path, folder: Path, change: Callable[[Weights], Weights]) -> Model:
    """Settings of a copy of a model folder whose weights were changed."""
    shutil.copytree(source, folder)
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Model(path=str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("layers.1."), r"lack \d+ tensors of the model: .*layers\.1\.input_layernorm"),
        (_without("layers.0.input_layernorm"), r"lack 1 tensors of the model: .*layers\.0\.input_layernorm.weight\n"),
        (lambda weights: {f"foo.{n}": v for n, v in weights.items()}, r"lack \d+ tensors of the model"),
        (lambda weights: {}, r"lack \d+ tensors of the model"),
        (_misshapen, r"1 weights of .* have another shape .*input_layernorm"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(tiny_folder, tmp_path, change, message):
    settings = changed(tiny_folder, tmp_path / "model", change)
    for read in (read_model, model_facts):
        with pytest.raises(CheckpointError, match=message):
            read(settings)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(tiny_folder, tmp_path, value):
    def poison(weights: Weights) -> Weights:
        weights[next(n for n in weights if n.endswith("layers.1.mlp.down_proj.weight"))][3, 2] = value
        return weights

    settings = changed(tiny_folder, tmp_path / "model", poison)
    with pytest.raises(CheckpointError, match=r"1 weights .* NaN or infinity: .*layers\.1\.mlp\.down_proj\.weight"):
        read_model(settings)


def test_whole_weights_are_read_and_tied_ones_may_be_stored_once_or_twice(tiny_folder, tmp_path):
    def both(weights: Weights) -> Weights:
        embedding = next(v for n, v in weights.items() if n.endswith("embed_tokens.weight"))
        return weights | {"lm_head.weight": embedding.clone()}

    for index, change in enumerate((dict, both)):
        settings = changed(tiny_folder, tmp_path / str(index), change)
        assert model_facts(settings).total == sum(p.numel() for p in read_model(settings).parameters())
