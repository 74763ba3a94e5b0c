"""Names of the files of responses, and what becomes of files that a task makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.errors import RecipeError
from vlmrl.evaluate.answer_files import FileWriter, file_stems, is_folder
from vlmrl.tasks import make_task
from vlmrl.tasks.base import NoFile, ResponseFile
from vlmrl.tasks.image_source import literal
from vlmrl.tasks.prompt import compile_template


@pytest.mark.parametrize(
    ("places", "stems"),
    [
        (["a.png", "sub/a.png", "b.c.png"], ["a", "sub/a", "b.c"]),
        (["a.jpg", "a.png", "a.png.gif"], ["a.jpg", "a.png~2", "a.png"]),  # the unique stem `a.png` is taken first
        (["A.png", "a.png"], ["A.png", "a.png~2"]),  # one file on a file system that does not tell case
        (["\u00e9.png", "e\u0301.jpg"], ["\u00e9.png", "e\u0301.jpg"]),  # the same letter in two spellings
        (["a.png", "a.png", "a.png"], ["a.png", "a.png~2", "a.png~3"]),  # of three folders
        (["x.png", "x.svg/b.png"], ["x", "x.svg_/b"]),  # no folder where the file x.svg is
        (["responses.jsonl/b.png"], ["responses.jsonl_/b"]),
        (["a/b/c.png", "a/b.png"], ["a/b/c", "a/b"]),
    ],
)
def test_each_image_has_files_of_its_own(places: list[str], stems: list[str]) -> None:
    assert file_stems(places, ".svg") == stems


def test_a_name_that_is_too_long_ends_in_a_hash() -> None:
    """251 bytes and `.png` are the longest name of a file; `~2`, `-9` and `.svg` must fit behind it."""
    first, second = file_stems(["x" * 251 + ".png", "x" * 250 + "y.png"], ".svg")
    assert first != second and first[:163] == "x" * 163 == second[:163] and len(first) == 180


def test_what_is_a_folder() -> None:
    assert [is_folder(Path(p)) for p in ("o", "o.d", "o.jsonl", "o.JSON", "a.jsonl/o")] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_a_task_of_the_user_s_own_writes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from vlmrl import NoFile, ResponseFile, Task\n\n"
        "def code(text):\n    return int(text) and text if text != 'none' else NoFile('it is none')\n\n"
        "def task(info):\n    return Task('t', 's', 'x', file=ResponseFile('numbers', '.txt', code))\n"
    )
    form = make_task("own.py:task", {}).file
    assert form is not None
    with FileWriter(tmp_path / "o", form, ["a", "b"], 1) as files:
        assert files.add([(0, 0, "7"), (1, 0, "none")]) == [{"files": ["a.txt"]}, {"no_file": "it is none"}]
        assert (tmp_path / "o/a.txt").read_text() == "7" and files.missing == {"it is none": 1}
        with pytest.raises(RecipeError, match=r"`content` of `file` of `own\.py:task` raised ValueError") as error:
            files.add([(0, 0, "x")])
        assert error.value.where == "own.py:4"
        with pytest.raises(RecipeError, match=r"not a text or a vlmrl\.NoFile"):
            files.add([(0, 0, "0")])
    (tmp_path / "own.py").write_text(
        "from vlmrl import Task\n\ndef task(info):\n    return Task('t', 's', 'x', file=3)\n"
    )
    with pytest.raises(RecipeError, match="`file` of the task is 3"):
        make_task("own.py:task", {})


def test_a_file_without_a_picture(tmp_path: Path) -> None:
    with FileWriter(tmp_path, ResponseFile("texts", ".txt", lambda text: text or NoFile("empty")), ["a"], 2) as files:
        assert files.add([(0, 1, "\ud800x")]) == [{"files": ["a-1.txt"]}]
    assert (tmp_path / "a-1.txt").read_text() == "\\ud800x"


@pytest.mark.parametrize(
    "text", ["a \"b\" 'c'", "{{ x }} {% raw %} {# no #}", "\\n \\u0041\n\r\ttab", "\u00e9\U0001f600 \x00\x1b"]
)
def test_a_literal_prompt_is_rendered_as_it_is(text: str) -> None:
    assert compile_template(literal(text), "--prompt")({}) == text
