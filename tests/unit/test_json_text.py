"""JSON that a crash or a person may have damaged: one function reads it, and never ends in a traceback."""

from __future__ import annotations

import ast
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vlmrl
from vlmrl.data.dataset import read_info
from vlmrl.errors import VlmrlError
from vlmrl.store.checkpoints import read_meta
from vlmrl.store.evaluated_rows import read_summary
from vlmrl.store.kept_recipe import planned_steps, read_resolved
from vlmrl.store.lock import read_owner
from vlmrl.store.manifest import read_raw, read_remote
from vlmrl.store.metrics import parse_line
from vlmrl.store.prune import pruned_ranges
from vlmrl.untrusted import MOST_LEVELS, parse_json

OWN_MESSAGES = {
    "checkpoint/proof.py",
    "data/chat_template.py",
    "demo.py",
    "dist/world.py",
    "evaluate/shared_rows.py",
    "rewards/__init__.py",
    "rollout/vllm/settings.py",
    "rollout/vllm/wire.py",
}
"""Files that read what a process of this program has just written to another one."""
SCRATCH = {
    "data/table_pieces.py",
    "data/image_scan.py",
    "tasks/table_rows.py",
}
"""Files that read what the same command wrote into a folder for its own use."""
CAUGHT = {"recipe/imports/read.py"}
"""Reads foreign recipes with a parser of its own hooks, and catches what it raises."""


def nested(levels: int, pair: str = "[]") -> str:
    return "[" * levels + "]" * levels if pair == "[]" else '{"a": ' * (levels - 1) + "{}" + "}" * (levels - 1)


@pytest.mark.parametrize("pair", ["[]", "{}"])
@pytest.mark.parametrize("kind", [str, str.encode])
def test_levels_are_counted_and_the_most_are_named(pair: str, kind: Callable[[str], Any]):
    assert parse_json(kind(nested(MOST_LEVELS, pair))) == json.loads(nested(MOST_LEVELS, pair))
    for levels in (MOST_LEVELS + 1, 900, 200_000):
        with pytest.raises(ValueError, match=f"nests more than {MOST_LEVELS} levels"):
            parse_json(kind(nested(levels, pair)))
    with pytest.raises(ValueError):
        parse_json(kind("[" * 200_000))


def test_brackets_side_by_side_or_in_texts_are_no_levels():
    value = [{"a": []}] * 500 + ["[" * 1000, {"{" * 1000: 1}]
    assert parse_json(json.dumps(value)) == value


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "manifest": ("manifest.json", read_raw),
    "resolved": ("resolved.json", read_resolved),
    "summary": ("summary.json", read_summary),
    "logger": ("sinks.json", read_remote),
    "pruned": ("rollouts/pruned.json", pruned_ranges),
    "meta": ("meta.json", read_meta),
    "dataset": ("dataset.json", read_info),
}


@pytest.mark.parametrize("text", ["[" * 200_000, nested(900), "[]", '"x"', "{", "\ud800"])
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, text: str):
    file, read = READERS[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    (tmp_path / "COMPLETE").write_text("")
    with pytest.raises(VlmrlError) as error:
        read(tmp_path)
    assert error.value.where and str(tmp_path) in error.value.where


META = {
    "schema": 1, "step": 1, "dtype": "float32", "policy": {"temperature": 1.0, "banned_ids": [1]}, "files": {}
}  # fmt: skip
WRONG_VALUES = {
    "logger": [{"schema": 2, "sinks": {}}, {"schema": 1, "sinks": {"wandb": 3}}, {"schema": 1}],
    "pruned": [{"schema": 1, "steps": [[1]]}, {"schema": 1, "steps": [[1, "2"]]}, {"steps": []}],
    "meta": [
        {**META, **change}
        for change in (
            {"step": "1"}, {"dtype": "int8"}, {"policy": {}}, {"policy": {"temperature": math.nan, "banned_ids": []}},
            {"policy": {"temperature": 1, "banned_ids": [1 << 80]}}, {"base": ["x"]}, {"lora": {"rank": 1}},
            {"optimizer_updates": -1}, {"base": {"path": "x"}, "lora": {}, "freeze": ["all"]}, {"quantize": "2bit"},
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_record_with_a_wrong_value_is_an_error_that_names_it(tmp_path: Path, name: str):
    file, read = READERS[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    for value in WRONG_VALUES[name]:
        (tmp_path / file).write_text(json.dumps(value))
        (tmp_path / "COMPLETE").write_text("")
        with pytest.raises(VlmrlError, match=r"wrong value|reads schema|no base model") as error:
            read(tmp_path)
        assert error.value.where and str(tmp_path) in error.value.where


@pytest.mark.parametrize("text", [b"[" * 200_000, nested(900).encode()])
def test_a_damaged_file_that_may_be_missing_counts_as_missing(tmp_path: Path, text: bytes):
    for name in ("run.lock", "resolved.json"):
        (tmp_path / name).write_bytes(text)
    assert (parse_line(text), read_owner(tmp_path), planned_steps(tmp_path)) == (None, None, None)


@pytest.mark.slow
def test_files_are_read_by_the_one_function():
    root = Path(vlmrl.__file__).parent
    own = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if _calls_json(path)}
    assert own == {"untrusted.py"} | OWN_MESSAGES | SCRATCH | CAUGHT


def _calls_json(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return any(isinstance(n, ast.Attribute) and ast.unparse(n) in ("json.loads", "json.load") for n in nodes)


def test_a_repeated_key_among_many_is_named_at_once():
    """Counting each key by itself takes minutes here."""
    text = "{" + ",".join(f'"{i}":1' for i in [*range(60_000), 59_999]) + "}"
    start = time.process_time()
    with pytest.raises(ValueError, match="the key `59999` occurs more than once"):
        parse_json(text, unique_keys=True)
    assert time.process_time() - start < 5
