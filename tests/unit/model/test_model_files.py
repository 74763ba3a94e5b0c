"""A model folder that is not whole, or not of the kind that is read, is told by its files alone."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmrl.errors import CheckpointError
from vlmrl.model.model_files import (
    CONFIG,
    MAX_LAYERS,
    WEIGHTS,
    WEIGHTS_INDEX,
    folder_problems,
    read_header,
    stored_numbers,
)

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path, tiny_folder: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit(name: str, **values: object) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def sharded(folder: Path, weight_map: object) -> None:
    (folder / WEIGHTS).rename(folder / SHARDS[0])
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def tensors(folder: Path) -> list[str]:
    return [name for name in read_header(folder / WEIGHTS)[0] if name != "__metadata__"]


def other_weights(name: str) -> Damage:
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


CASES: dict[str, tuple[Damage, str]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), "there is no config.json"),
    "config cut": (lambda f: (f / CONFIG).write_text('{"model_type": "q'), "config.json of the model is not JSON"),
    "config null": (lambda f: (f / CONFIG).write_text("null"), "config.json of the model is not a JSON object"),
    "config of nothing": (lambda f: (f / CONFIG).write_text("{}"), "has no `model_type`"),
    "config too deep": (lambda f: (f / CONFIG).write_text("[" * 100_000), "config.json of the model is not JSON"),
    "a million layers": (edit(CONFIG, text_config={"num_hidden_layers": 10**6}), "num_hidden_layers = 1,000,000"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "holds no weights"),
    "weights cut": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), "is cut short"),
    "weights empty": (lambda f: (f / WEIGHTS).write_bytes(b""), "model.safetensors is damaged"),
    "weights without end": (lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 16), "its header is longer than the file"),
    "weights pickled": (other_weights("pytorch_model.bin"), "are in pytorch_model.bin, a format that vlmrl does"),
    "weights in parts, pickled": (other_weights("pytorch_model-00001-of-00002.bin"), "a format that vlmrl does not"),
    "weights for llama.cpp": (other_weights("model.gguf"), "are in model.gguf, a format that vlmrl does not read"),
    "weights of another name": (other_weights("mine.safetensors"), "under a name that is not loaded: mine.safetensors"),
    "a shard gone": (
        lambda f: sharded(f, {"x": SHARDS[1], tensors(f)[0]: SHARDS[0]}),
        f"1 of 2 weight files .*: {SHARDS[1]}",
    ),
    "a tensor gone": (lambda f: sharded(f, {"x.weight": SHARDS[0]}), "lacks 1 tensors .* such as x.weight"),
    "an index of nothing": (lambda f: sharded(f, ["x"]), "no `weight_map` that can be read"),
    "an index that leaves": (
        lambda f: sharded(f, {"x": "../../etc/passwd"}),
        "'../../etc/passwd', which is not the name of a file",
    ),
    "an index of numbers": (lambda f: sharded(f, {"x": 3}), "names 3, which is not the name of a file"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer"),
    "no processor": (lambda f: (f / "processor_config.json").unlink(), "holds no image processor"),
    "broken processor": (lambda f: (f / "processor_config.json").write_text("{"), "processor_config.json of the model"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("[]"), "tokenizer.json of the model is not a"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing_or_broken_is_told_with_the_next_step(folder: Path, case: str) -> None:
    damage, message = CASES[case]
    assert folder_problems(folder) == []
    damage(folder)
    [problem] = folder_problems(folder)
    assert problem.level == "error" and problem.where and str(folder) in problem.where
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(problem.message)


def test_all_that_is_wrong_comes_at_once(folder: Path) -> None:
    for name in (WEIGHTS, "tokenizer.json", "processor_config.json"):
        (folder / name).unlink()
    assert [p.message.split(" holds ")[1][:6] for p in folder_problems(folder)] == ["no wei", "no tok", "no ima"]


def test_a_checkpoint_keeps_its_weights_elsewhere_and_code_of_its_own_reads_what_it_likes(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert folder_problems(folder, has_weights=False) == []
    (folder / "tokenizer.json").rename(folder / "mine.tiktoken")
    assert folder_problems(folder, has_weights=False, own_code=True) == []


def test_a_model_of_many_layers_is_believed(folder: Path) -> None:
    edit(CONFIG, text_config={"num_hidden_layers": MAX_LAYERS})(folder)
    assert folder_problems(folder) == []


def test_whole_shards_are_counted(folder: Path) -> None:
    begin, names = read_header(folder / WEIGHTS)[1], tensors(folder)
    assert begin == 8 + struct.unpack("<Q", (folder / WEIGHTS).read_bytes()[:8])[0]
    before = stored_numbers(folder)
    assert before == (folder / WEIGHTS).stat().st_size // 4 - begin // 4
    sharded(folder, dict.fromkeys(names, SHARDS[0]))
    assert folder_problems(folder) == [] and stored_numbers(folder) == before


@pytest.mark.parametrize("header", [{"x": {}}, {"x": {"data_offsets": "ab"}}, {"x": None}, ["x"]])
def test_a_header_of_another_kind_is_an_error(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged"):
        read_header(tmp_path / "x.safetensors")
