"""Example folders for users: a table with prompt and reward, or a whole task; each with a recipe and a passing test."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from vlmrl.errors import DataError, unknown

STYLES = ("vlmrl", "trl", "verl", "easyr1")
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
FUNCTIONS = {"vlmrl": "score", "trl": "score", "verl": "compute_score", "easyr1": "compute_score"}
SIDE_PIXELS, CELLS, EDGE_PIXELS = 112, 4, 14
LARGE_SIDE_PIXELS, SMALL_EDGE_PIXELS = 448, 6
"""Image with a tool: the recipe shrinks it to SIDE_PIXELS, where its squares are specks."""
QUESTION = "How many black squares are in the image?"
_WEIGHTS = "\n[reward.weights]\nformat = 0.2\nanswer = 0.8\n"
_IMPORTS = {"vlmrl": "from vlmrl.types import RewardInput\n\n"}
_BELOW = "Think about it first, then give the number"
_TOOL_PROMPT = "The squares are small: `zoom` shows a part of the image. When you know the number, end with"
_TOOL_PIXELS = f"max_pixels = {SIDE_PIXELS**2}                  # the tool sees the image as it is stored\n\n[[data]]"
_TOOL_TABLE = """[environment]
name = "tools.py:zoom"              # what the model may call; the prompt shows it. Several: TOOLS = [zoom, ...]
turns = 3                           # of the model; the last one should be its answer
tokens = 1024                       # of a whole episode behind its prompt, with what the tools show

[rollout]"""
_CALLS = {
    "vlmrl": '    parts = score(RewardInput(response, truth={"answer": answer}))\n'
    '    return 0.2 * parts["format"] + 0.8 * parts["answer"]',
    "trl": "    return score([response], answer=[answer])[0]",
    "verl": '    return compute_score("squares", response, answer)["score"]',
    "easyr1": '    inputs = [{"response": response, "response_length": 1, "ground_truth": answer}]\n'
    '    return compute_score(inputs)[0]["overall"]',
}


def write_task(
    folder: Path, *, style: str = "vlmrl", model: str = MODEL, whole: bool = False, tools: bool = False
) -> list[Path]:
    """Write the folder, all of it or nothing.

    Args:
        folder: must not exist, or be empty.
        whole: True = one file with a task: its data, truth, reward and attacks; False = rows, a prompt and a reward.
        style: calling convention of the reward: vlmrl, trl, verl or easyr1.
        model: `model.path` in the recipe.
        tools: whether the model gets a tool, in an environment of several turns; its reward is in vlmrl's style.
    Returns: the files, sorted.
    Raises: DataError when the folder is not empty, the style is unknown, or the folder cannot be written.
    """
    if whole and style != "vlmrl":
        raise DataError(f"a task's own reward is in vlmrl's style, not {style}", hint="leave out --style or --task")
    if tools and (whole or style != "vlmrl"):
        what = "a whole task" if whole else f"a reward in {style}'s style"
        hint = "leave out --tools, and add [environment] to the recipe yourself: docs/environments.md"
        raise DataError(f"--tools makes rows, a tool and a reward in vlmrl's style, and not {what}", hint=hint)
    if style not in STYLES:
        raise unknown("style", style, STYLES, error=DataError)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} exists and is not empty; nothing was written", hint="give another name")
        _write_whole(folder, style, model, whole, tools)
        return sorted(path for path in folder.rglob("*") if path.is_file())
    except OSError as error:
        raise DataError(
            f"{folder} cannot be made: {error.strerror or error}", hint="choose a folder where you may write"
        ) from error


def _write_whole(folder: Path, style: str, model: str, whole: bool, tools: bool) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.absolute().parent / f".{folder.name}.{os.getpid()}"
    try:
        if whole:
            part.mkdir(parents=True)
            _write_task_file(part, folder, model)
        else:
            (part / "images").mkdir(parents=True)
            _write_texts(part, folder, style, model, tools)
            _write_rows(part, tools)
        if folder.exists():
            folder.rmdir()
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_texts(part: Path, folder: Path, style: str, model: str, tools: bool) -> None:
    function, weights = FUNCTIONS[style], _WEIGHTS if style == "vlmrl" else ""
    recipe = _read("recipe.txt", MODEL=_quoted(model), FUNCTION=function, WEIGHTS=weights)
    call = f"def value(response: str, answer: str) -> float:\n{_CALLS[style]}"
    marks = {"FOLDER": folder.name, "IMPORTS": _IMPORTS.get(style, ""), "FUNCTION": function, "CALL": call}
    texts = {
        "recipe.toml": recipe,
        "prompt.jinja": _read("prompt.jinja"),
        "reward.py": _read(f"reward_{style}.txt"),
        f"test_{_identifier(folder.name)}.py": _read("test_reward.txt", **marks),
    }
    if tools:
        texts["recipe.toml"] = recipe.replace("\n[[data]]", _TOOL_PIXELS).replace("[rollout]", _TOOL_TABLE)
        texts["prompt.jinja"] = texts["prompt.jinja"].replace(_BELOW, _TOOL_PROMPT)
        last = texts["reward.py"].replace("the text that the model wrote", "the text of the model's last turn")
        texts["reward.py"] = last.replace("x.response", "x.answer")
        texts["tools.py"] = _read("tools.txt")
        texts[f"test_{_identifier(folder.name)}_tools.py"] = _read("test_tools.txt", FOLDER=folder.name)
    _write(part, texts)


def _write_task_file(part: Path, folder: Path, model: str) -> None:
    texts = {
        "task.py": _read("task.txt", NAME=_quoted(folder.absolute().name)),
        "prompt.jinja": _read("prompt.jinja"),
        "recipe.toml": _read("task_recipe.txt", MODEL=_quoted(model), FOLDER=folder.as_posix()),
        f"test_{_identifier(folder.name)}.py": _read("test_task.txt", FOLDER=folder.as_posix()),
    }
    _write(part, texts)


def _write(part: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (part / name).write_text(text, encoding="utf-8")


def _quoted(text: str) -> str:
    """Return a text with the escapes that it needs between the quotes of a string in TOML or Python."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _write_rows(part: Path, tools: bool) -> None:
    rng = random.Random(0)
    sizes = (LARGE_SIDE_PIXELS, SMALL_EDGE_PIXELS) if tools else (SIDE_PIXELS, EDGE_PIXELS)
    rows = []
    for number in range(16):
        count = 1 + number % 8
        name = f"images/{number:02d}.png"
        (part / name).write_bytes(draw_squares(count, rng, *sizes))
        rows.append(json.dumps({"question": QUESTION, "image": name, "answer": str(count)}))
    (part / "rows.jsonl").write_text("\n".join(rows[:12]) + "\n", encoding="utf-8")
    (part / "validation.jsonl").write_text("\n".join(rows[12:]) + "\n", encoding="utf-8")


def draw_squares(count: int, rng: random.Random, side: int = SIDE_PIXELS, edge: int = EDGE_PIXELS) -> bytes:
    """Return a PNG of side x side pixels with `count` black squares in different cells of a 4 x 4 grid."""
    from PIL import Image, ImageDraw

    from vlmrl.data.images import encode_png

    image = Image.new("RGB", (side, side), "white")
    draw, cell = ImageDraw.Draw(image), side // CELLS
    for place in rng.sample(range(CELLS * CELLS), count):
        x, y = place % CELLS * cell, place // CELLS * cell
        draw.rectangle((x + 7, y + 7, x + 6 + edge, y + 6 + edge), fill="black")
    return encode_png(image)


def _identifier(name: str) -> str:
    """Return a folder's name as a part of a module name.

    It makes the test file's name unique, because pytest does not accept two test modules with the same name.
    """
    return re.sub(r"\W", "_", name)


def _read(name: str, **marks: str) -> str:
    """Return a text of this folder with a value in the place of each `@MARK@`."""
    text = files("vlmrl.tasks.scaffold").joinpath(name).read_text(encoding="utf-8")
    for mark, value in marks.items():
        text = text.replace(f"@{mark}@", value)
    return text
