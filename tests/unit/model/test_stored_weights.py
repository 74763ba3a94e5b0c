"""A model whose weights are still in files is the loaded model, bit for bit, row by row."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import save_checkpoint
from safetensors.torch import load_file, save_file
from tinyfamilies import BUILDERS, build
from torch import Tensor
from transformers import AutoConfig

from vlmrl.checkpoint import io
from vlmrl.checkpoint.load import fingerprint, load_checkpoint_model
from vlmrl.errors import CheckpointError
from vlmrl.model import safetensors_blocks
from vlmrl.model.load import prepare_model, read_model
from vlmrl.model.lora import adapter_parameters, attach_adapter
from vlmrl.model.model_facts import quiet_transformers
from vlmrl.model.stored_weights import is_stored, publishing, stored_weight
from vlmrl.recipe.schema import Lora, Model


def settings(folder: Path, dtype: str = "float32") -> Model:
    return Model.model_validate({"path": str(folder), "dtype": dtype, "device": "cpu"})


def bits(tensor: Tensor) -> Tensor:
    """Its bytes: two NaN, or 0 and -0, are the same only if all bits are."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(stored: Any, whole: Any, cuts: int = 3) -> None:
    """Every parameter, read in `cuts` parts, and every buffer, of either kind; ties; what is trained."""
    assert is_stored(stored) and not is_stored(whole)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    found = dict(stored.named_parameters(remove_duplicate=False))
    assert list(found) == list(expected)
    names: dict[int, str] = {}
    assert {n: names.setdefault(id(p), n) for n, p in found.items()} == {
        n: names.setdefault(id(p), n) for n, p in expected.items()
    }
    for name, parameter in found.items():
        weight = stored_weight(parameter)
        assert parameter.is_meta and weight is not None, name
        assert (parameter.dtype, parameter.shape) == (expected[name].dtype, expected[name].shape), name
        assert parameter.requires_grad == expected[name].requires_grad, name
        edges = [len(parameter) * k // cuts for k in range(cuts + 1)]
        parts = [weight.rows(first, last) for first, last in pairwise(edges)]
        assert torch.equal(bits(torch.cat(parts)), bits(expected[name])), name
        assert torch.equal(bits(torch.cat([rows for _, rows in weight.blocks()])), bits(expected[name])), name
    buffers = dict(whole.named_buffers())
    assert [n for n, _ in stored.named_buffers()] == list(buffers) and buffers
    for name, buffer in stored.named_buffers():
        assert buffer.dtype == buffers[name].dtype and not buffer.is_meta, name
        assert torch.equal(bits(buffer), bits(buffers[name])), name
    assert stored.training == whole.training
    assert stored.all_tied_weights_keys == whole.all_tied_weights_keys
    assert stored.generation_config.to_dict() == whole.generation_config.to_dict()


def saved(model: Any, folder: Path, published: bool = True) -> Path:
    """The model's folder, with names as its published checkpoints have them, or as in memory."""
    with quiet_transformers():
        if published:
            with publishing(model):
                model.save_pretrained(folder)
        else:
            model.save_pretrained(folder, save_original_format=False)
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(safetensors_blocks, "BLOCK_BYTES", 3000)


@pytest.mark.parametrize("published", [True, False], ids=["published", "in memory"])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_family(tmp_path, name, published) -> None:
    folder = saved(build(name).model, tmp_path / "model", published)
    for dtype in ("float32", "bfloat16"):
        state = torch.random.get_rng_state()
        stored, whole = read_model(settings(folder, dtype), in_files=True), read_model(settings(folder, dtype))
        assert torch.equal(torch.random.get_rng_state(), state)  # an adapter that follows gets the same numbers
        assert_same(stored, whole)
        assert fingerprint(stored) == fingerprint(whole)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_family_from_a_checkpoint(tmp_path, name) -> None:
    class NoProcessor:
        def save_pretrained(self, folder: Path) -> None:
            """The families of these tests have none."""

    model = build(name).model
    meta = {"dtype": "float32", "policy": {"temperature": 1.0, "banned_ids": []}}
    folder = save_checkpoint(tmp_path, io.CheckpointContent(3, meta, {}), model, NoProcessor(), {})
    for dtype in ("float32", "bfloat16"):
        state = torch.random.get_rng_state()
        stored = load_checkpoint_model(folder, settings(folder, dtype), in_files=True)
        whole = load_checkpoint_model(folder, settings(folder, dtype))
        assert torch.equal(torch.random.get_rng_state(), state)
        assert_same(stored, whole)
        assert fingerprint(stored) == fingerprint(whole)


def test_experts_are_read_one_by_one(tmp_path) -> None:
    """Each expert is a tensor of its own in the files: a rank reads only its experts."""
    folder = saved(build("qwen3_5_moe").model, tmp_path / "model")
    stored = read_model(settings(folder), in_files=True)
    (name, weight) = next((n, w) for n, p in stored.named_parameters() if (w := stored_weight(p)) and w.conversion)
    assert name.endswith("experts.gate_up_proj") and weight.conversion is not None and weight.conversion.merges
    assert [len(parts) for parts in weight.tensors.values()] == [4, 4]
    read: list[str] = []
    parts = {k: [_Watched(t, read) for t in v] for k, v in weight.tensors.items()}
    object.__setattr__(weight, "tensors", parts)
    assert len(weight.rows(1, 3)) == 2
    assert sorted(int(n.split("experts.")[1].split(".")[0]) for n in read) == [1, 1, 2, 2]


class _Watched:
    """A stored tensor that notes its name when it is read."""

    def __init__(self, tensor: Any, read: list[str]) -> None:
        self.tensor, self.read = tensor, read

    def whole(self) -> Tensor:
        self.read.append(self.tensor.name)
        return self.tensor.whole()


def with_head(tiny_folder: Path, folder: Path, change: float) -> Path:
    """The tiny model, which ties its head to the embeddings, with both of them in its files."""
    folder.mkdir()
    for path in tiny_folder.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tiny_folder / "model.safetensors")
    (name,) = [n for n in tensors if n.endswith("embed_tokens.weight")]
    tensors["lm_head.weight"] = tensors[name].clone()
    tensors["lm_head.weight"][-1, -1] += change
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_tied_head_that_the_files_hold_too(tiny_folder, tmp_path, change) -> None:
    folder = with_head(tiny_folder, tmp_path / "model", change)
    stored, whole = read_model(settings(folder), in_files=True), read_model(settings(folder))
    assert_same(stored, whole)
    assert (stored.lm_head.weight is stored.get_input_embeddings().weight) is (change == 0)


def test_an_adapter_on_weights_in_files_has_the_same_first_values(tiny_folder) -> None:
    found = []
    for in_files in (True, False):
        torch.manual_seed(3)
        model = prepare_model(read_model(settings(tiny_folder, "bfloat16"), in_files=in_files), settings(tiny_folder))
        attach_adapter(model, Lora(rank=4, vision=True), dtype=torch.bfloat16)
        found.append((adapter_parameters(model), torch.random.get_rng_state()))
    (stored, state), (whole, state_whole) = found
    assert list(stored) == list(whole) and torch.equal(state, state_whole)
    for name, parameter in stored.items():
        assert parameter.requires_grad and torch.equal(bits(parameter), bits(whole[name])), name
    assert any(bool(p.any()) for p in stored.values())


def test_what_is_missing_or_of_another_shape_is_refused_alike(tiny_folder, tmp_path) -> None:
    tensors = load_file(tiny_folder / "model.safetensors")
    for index, change in enumerate(("missing", "shape")):
        folder = tmp_path / str(index)
        with_head(tiny_folder, folder, 0.0)
        name = sorted(n for n in tensors if n.endswith("norm.weight"))[0]
        others = {n: t for n, t in tensors.items() if n != name}
        others |= {} if change == "missing" else {name: torch.zeros(7)}
        save_file(others, folder / "model.safetensors", metadata={"format": "pt"})
        texts = []
        for in_files in (True, False):
            with pytest.raises(CheckpointError) as error:
                read_model(settings(folder), in_files=in_files)
            texts.append((error.value.message, error.value.where, error.value.hint))
        assert texts[0] == texts[1] and str(folder) in texts[0][0]


def test_a_checkpoint_of_another_model_is_refused_alike(tmp_path, tiny_folder, tiny_model, tiny_processor) -> None:
    content = io.CheckpointContent(3, {"dtype": "float32", "policy": {"temperature": 1.0, "banned_ids": []}}, {})
    folder = save_checkpoint(tmp_path, content, tiny_model, tiny_processor, {})
    for change in ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, {"intermediate_size": 192}):
        config = AutoConfig.from_pretrained(tiny_folder)
        config.text_config.update(change)
        for load in (io.load_weights, io.link_weights):
            with torch.device("meta" if load is io.link_weights else "cpu"):
                model = type(tiny_model)(config)
            with pytest.raises(CheckpointError) as error:
                load(folder, model)
            assert str(folder) in str(error.value.where)
