"""What `check` says of a recipe's loggers."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.recipe.load import load_recipe
from vlmrl.setup import check
from vlmrl.setup.check import check_loggers, quick_look

GOOD = "class Mine:\n    def open(self, run): ...\n    def log(self, line): ...\n    def samples(self, line, s): ...\n"


def problems(folder: Path, log: str) -> list[tuple[str, str | None, str]]:
    """(message, hint, level) of each problem of a recipe with this `[log]`."""
    (folder / "r.toml").write_text(f'model.path = "m"\n[[data]]\npath = "d.jsonl"\n[log]\n{log}\n')
    return [(p.message, p.hint, p.level) for p in check_loggers(load_recipe(folder / "r.toml"))]


def test_no_logger_and_those_that_are_installed_are_fine(tmp_path):
    assert problems(tmp_path, "") == []
    assert problems(tmp_path, 'sinks = ["wandb", "trackio", "tensorboard"]\nproject = "p q"\ngroup = "a/b"') == []


def test_an_unknown_logger_is_told_with_the_nearest(tmp_path):
    ((message, hint, level),) = problems(tmp_path, 'sinks = ["wandbb"]')
    assert message == "`log.sinks` names `wandbb`, and there is no such logger" and level == "error"
    assert hint is not None and hint.startswith(
        "did you mean `wandb`?  loggers: tensorboard, wandb, trackio; or a class"
    )


def test_a_logger_twice_is_an_error(tmp_path):
    ((message, _, _),) = problems(tmp_path, 'sinks = ["wandb", "tensorboard", "wandb"]')
    assert message == "`log.sinks` has two loggers called wandb"


def test_a_missing_library_is_told_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda package: package != "trackio")
    ((message, hint, level),) = problems(tmp_path, 'sinks = ["wandb", "trackio"]')
    assert message == "the logger trackio needs trackio, which is not installed" and level == "error"
    assert hint is not None and "pip install '.[trackio]'" in hint


def test_a_folder_is_no_library(tmp_path, monkeypatch):
    """wandb writes a folder `wandb` where it runs: Python could import that."""
    (tmp_path / "not_there").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert check.is_installed("json") and not check.is_installed("not_there")


def test_every_extra_of_a_logger_is_one_that_can_be_installed():
    import tomllib

    from vlmrl.loggers import BUILTIN

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for name in BUILTIN:
        assert any(line.startswith(name) for line in project["optional-dependencies"][name])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (GOOD, "`Mine` has no method `close`"),
        (GOOD.replace("Mine", "Yours"), "mine.py has no class `Mine`"),
        ("def f(:\n", "the logger's file is not valid Python"),
        (None, "`log.sinks` names a file that does not exist: "),
    ],
)
def test_a_class_of_ones_own_is_looked_at_without_being_run(tmp_path, source, said):
    if source is not None:
        (tmp_path / "mine.py").write_text("raise SystemExit\n" + source)
    ((message, _, _),) = problems(tmp_path, 'sinks = ["mine.py:Mine"]')
    assert said in message


def test_a_class_beside_the_recipe_is_found(tmp_path):
    (tmp_path / "mine.py").write_text(GOOD + "    def close(self, status): ...\nclass Sub(Mine): ...\n")
    assert problems(tmp_path, 'sinks = ["mine.py:Mine", "tensorboard", "mine.py:Sub"]') == []
    loaded = load_recipe(tmp_path / "r.toml")
    assert loaded.recipe.log.sinks == [f"{tmp_path}/mine.py:Mine", "tensorboard", f"{tmp_path}/mine.py:Sub"]
    (tmp_path / "tensorboard").mkdir()
    assert load_recipe(tmp_path / "r.toml").recipe.log.sinks[1] == "tensorboard", "a name is no path"


def test_keys_that_no_logger_takes_are_warned_about_and_impossible_ones_refused(tmp_path):
    ((message, _, level),) = problems(tmp_path, 'sinks = ["tensorboard"]\nproject = "x"')
    assert (message, level) == ("`log.project` does nothing: no logger of log.sinks uses it", "warning")
    assert problems(tmp_path, 'sinks = ["wandb"]\nproject = "a/b"')[0][0] == "`log.project` cannot be `a/b`"
    assert "128" in problems(tmp_path, f'sinks = ["wandb"]\nname = "{"x" * 129}"')[0][0]


def test_train_looks_at_loggers_before_anything_is_opened(tmp_path):
    (tmp_path / "r.toml").write_text('model.path = "m"\n[[data]]\npath = "d.jsonl"\n[log]\nsinks = ["nope"]\n')
    assert any("nope" in p.message for p in quick_look(load_recipe(tmp_path / "r.toml"))[0])
