"""A model folder is checked against itself: head, token ids, chat template; its processor's files are copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlmrl.errors import CheckpointError
from vlmrl.model.load import banned_ids_of, load_processor, refuse_unknown_ids, write_processor
from vlmrl.model.model_files import folder_problems
from vlmrl.model.tiny import build_tiny
from vlmrl.recipe.schema import Model
from vlmrl.setup.model import _longest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    build_tiny(folder, ["How many?"], vocabulary=280, hidden=64, layers=1, vision_layers=1)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def test_a_tied_head_of_its_own_is_a_problem(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert folder_problems(folder) == []
    weights = dict(load_file(folder / "model.safetensors"))
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    for head, expected in ((weights[name].clone(), 0), (weights[name] + 1, 1)):
        save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
        assert len(folder_problems(folder)) == expected
    [problem] = folder_problems(folder)
    assert "ties the head" in problem.message and "tie_word_embeddings" in str(problem.hint)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert folder_problems(folder) == []


def tokenizer(**ids: int) -> SimpleNamespace:
    return SimpleNamespace(get_vocab=lambda: ids, pad_token_id=0, eos_token_id=1)


def test_a_token_beyond_the_embedding_is_an_error() -> None:
    refuse_unknown_ids(tokenizer(a=0, b=1), 2, "m")
    with pytest.raises(CheckpointError, match=r"1 tokens .* such as 'zone' with the id 2"):
        refuse_unknown_ids(tokenizer(a=0, zone=2), 2, "m")


def test_rows_of_the_embedding_without_a_token_are_banned() -> None:
    model = SimpleNamespace(
        config=SimpleNamespace(image_token_id=2),
        generation_config=SimpleNamespace(eos_token_id=1),
        get_input_embeddings=lambda: torch.nn.Embedding(7, 2),
    )
    assert banned_ids_of(model, tokenizer(pad=0, end=1, image=2, a=3, c=5)) == (0, 2, 4, 6)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.json"])
def test_a_chat_template_elsewhere_is_used_and_all_files_are_copied(folder: Path, tmp_path: Path, place: str) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    content = json.loads((folder / place).read_text()) if (folder / place).exists() else {}
    (folder / place).write_text(json.dumps(content | {"chat_template": template}, indent=7))
    processor = load_processor(Model(path=str(folder)))
    assert processor.chat_template == template
    (tmp_path / "out").mkdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)  # as a checkpoint that was removed meanwhile
    write_processor(processor, tmp_path / "out")
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert place in after and "tokenizer.json" in after and "config.json" not in after
    assert all(before[name] == after[name] for name in after)


def test_an_engine_gets_no_more_tokens_than_the_model_has_positions() -> None:
    rollout = SimpleNamespace(max_prompt_tokens=4096, max_new_tokens=16)
    recipe = SimpleNamespace(rollout=rollout, longest_response=16, eval=SimpleNamespace(longest=lambda tokens: tokens))
    assert _longest(recipe, SimpleNamespace(max_position_embeddings=4096)) == 4096
    assert _longest(recipe, SimpleNamespace(max_position_embeddings=8192)) == 4112
    assert _longest(recipe, SimpleNamespace()) == 4112
