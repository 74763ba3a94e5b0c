"""A folder in vlmrl/tasks is a shipped task: no other file names it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import vlmrl
from vlmrl.tasks.entry import entries_of

PAGE = Path(__file__).parents[3] / "docs" / "tasks.md"
TRY = """
import json, sys
from vlmrl.data.open_dataset import open_dataset
from vlmrl.setup.catalogs import catalogs
from vlmrl.recipe.schema import Data
from vlmrl.tasks import task_of
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput
task = task_of(open_dataset(Data(path="squares")))
name, args = task.profile("default")
result = load_reward(name, **args).fn(RewardInput("<think>a</think><answer>3</answer>", {"answer": 3}))
print(json.dumps([task.name, name, result.parts, "squares" in catalogs().tasks, "squares" in catalogs().rewards]))
"""


def page_files() -> dict[str, str]:
    """Return the files of a shipped task as docs/tasks.md gives them: name -> text."""
    blocks = re.findall(r"```python\n# squares/(\w+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return dict(blocks)


@pytest.mark.slow
def test_a_folder_of_ones_own_task_becomes_a_shipped_task(tmp_path: Path) -> None:
    shutil.copytree(Path(vlmrl.__file__).parent, tmp_path / "vlmrl", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("-m", "vlmrl", "init", "squares", "--task")
    folder = tmp_path / "vlmrl" / "tasks" / "squares"
    folder.mkdir()
    for name in ("task.py", "prompt.jinja"):
        shutil.copy(tmp_path / "squares" / name, folder)
    text = (folder / "task.py").read_text().replace('(":score", {})', '("squares", {})')
    (folder / "task.py").write_text(text)
    shutil.rmtree(tmp_path / "squares")
    files = page_files()
    assert set(files) == {"__init__.py", "rewards.py", "entries.py"}
    for name, text in files.items():
        (folder / name).write_text(text)

    made = json.loads(run("-m", "vlmrl", "prep", "squares", "--out", "squares", "--rows", "8", "--json"))
    assert made["info"]["splits"]["train"]["rows"] == 8
    parts = {"format": 1.0, "accuracy": 1.0, "nearness": 1.0}
    assert json.loads(run("-c", TRY)) == ["squares", "squares", parts, True, True]


def test_two_folders_cannot_have_one_name() -> None:
    one, other = ModuleType("one"), ModuleType("other")
    one.TASKS, other.TASKS = {"a": 1, "b": 2}, {"b": 3}
    assert entries_of([one], "TASKS") == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match=r"other\.TASKS has `b`"):
        entries_of([one, other], "TASKS")
