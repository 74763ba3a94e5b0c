"""Values of table cells (prompts, images, answers, texts, numbers), in all forms that trainers write; names of columns.

The names are those of TRL, verl, EasyR1 and ms-swift, and other common ones.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.data.images import MAX_FILE_BYTES
from vlmrl.errors import DataError, listed
from vlmrl.redaction.redact import quoted
from vlmrl.types import Call, Message
from vlmrl.untrusted import parse_json

ROLES = {
    **{"system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "human": "user"},
    **{"gpt": "assistant", "function_call": "assistant", "function": "tool", "observation": "tool"},
}
MAX_DEPTH = 50
UNREADABLE = (ValueError, OverflowError, KeyError)
"""Exceptions of Arrow's `to_pylist` for a value that Python cannot hold: a date after the year 9999, an unknown time
zone."""
NO_FILE = "no image file"
"""First words of the message for a path that leads to no file."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*")
_DATA_URI = re.compile(r"data:image/[A-Za-z0-9.+-]+(?:;[A-Za-z0-9-]+=[^;,]*)*;base64,")
_LIST = re.compile(r"\s*\[\s*[{\['\"\]]|\s*\{\s*['\"]")
"""Beginning of a list or an object, in JSON or as Python prints it."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def python_rows(rows: Any, place: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table or record batch as dicts of Python values.

    Args:
        place: returns the place of the row with an index, for messages.
    Raises: DataError that names the first cell that Python cannot hold.
    """
    try:
        return rows.to_pylist()
    except UNREADABLE as error:
        raise unreadable_cell(rows, place) from error


def unreadable_cell(rows: Any, place: Callable[[int], str]) -> DataError:
    """Return the error that names the first cell of Arrow rows that Python cannot hold.

    Args:
        rows, place: see `python_rows`.
    """
    for index in range(rows.num_rows):
        for name in rows.schema.names:
            try:
                rows.slice(index, 1).select([name]).to_pylist()
            except UNREADABLE as error:
                kind = rows.schema.field(name).type
                return DataError(
                    f"a value of type {kind} cannot be read: {str(error).strip() or type(error).__name__}",
                    where=f"{place(index)}, column `{name}`",
                    hint="store it as text, or remove the column",
                )
    return DataError("the rows cannot be read", where=place(0))


class Chat(NamedTuple):
    """Chat of a prompt cell.

    Args:
        prompt: all before the response, with `<image>` for each image part.
        answer: text of the last message if the assistant wrote it; None without one.
        images: values inside content parts, in order.
        response: turns of the assistant to learn, and the messages between them; () if the chat ends with the prompt.
            It begins with the first call, and is the last message of a chat without tools.
    """

    prompt: tuple[Message, ...]
    answer: str | None
    images: list[Any]
    response: tuple[Message, ...]


def read_chat(fields: Mapping[str, Any], roles: Mapping[str, str], where: str) -> Chat:
    """Return the chat of a row: its prompt, behind a system message and earlier turns in columns of their own, if any.

    `history` is a list of [question, answer]. If it is a text, it is a column like others.

    Raises: DataError as `read_messages`; for a history of another form, and a system message behind these columns.
    """
    system = fields.get(roles.get("system", ""))
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    history = structured(fields.get(roles.get("history", "")), where)
    for pair in history if isinstance(history, (list, tuple)) else ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"`{roles['history']}` has {show(pair)}, not [question, answer]", where=where)
        before += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    chat = read_messages(fields.get(roles["prompt"]), where, before)
    if before and any(turn.role == "system" for turn in chat.prompt[1:]):
        hint = "columns `system` and `history` stand in front of them: give it in the column `system` alone"
        raise DataError("the messages have a system message of their own", where=where, hint=hint)
    return chat


def read_messages(value: Any, where: str, before: Sequence[Mapping[str, Any]] = ()) -> Chat:
    """Return a prompt cell as a chat.

    Args:
        value: text, or a list of turns {role, content}; content is text or a list of parts {type: text|image, ...}.
            ShareGPT's {from, value} is read too, and so is a list written as JSON text. Calls of tools are OpenAI's
            `tool_calls`, or the value of ShareGPT's turns from `function_call`.
        where: row and column, for messages.
        before: turns {role, content} in front of it.
    Raises: DataError for any other value, a call without a result, or a result without a call.
    """
    value = structured(value, where)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"the prompt is {show(value)}, not text or a list of messages", where=where)
    turns: list[Message] = []
    images: list[Any] = []
    for number, turn in enumerate([*before, *value]):
        place = f"{where}, message {number}"
        if not isinstance(turn, Mapping):
            raise DataError(f"a message is {show(turn)}, not {{role, content}}", where=place)
        role = turn.get("role") or turn.get("from")
        if not isinstance(role, str) or role not in ROLES:
            hint = "roles: system, user, assistant, tool"
            raise DataError(f"a message has the role {role!r}", where=place, hint=hint)
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        given, content = (content, None) if role == "function_call" else (turn.get("tool_calls"), content)
        calls = _read_calls(given, place) if ROLES[role] == "assistant" else ()
        text, inside = ("", []) if calls and content is None else _read_content(content, place)
        images += inside
        turns.append(Message(ROLES[role], _without_surrogates(text), calls))  # type: ignore[arg-type]
    last = turns[-1]
    end = len(turns) - (last.role == "assistant")
    begin = next((i for i, turn in enumerate(turns) if turn.calls or turn.role == "tool"), end)
    if not any(turn.role == "user" for turn in turns[:begin]):
        raise DataError("the prompt has no user message", where=where)
    answer = last.content if last.role == "assistant" and (last.content or not last.calls) else None
    return Chat(tuple(turns[:begin]), answer, images, _read_response(turns, begin, where))


def _read_response(turns: Sequence[Message], begin: int, where: str) -> tuple[Message, ...]:
    """Return the turns from index `begin` on. Results that follow each other are one. Raises: DataError."""
    response: list[Message] = []
    for number, turn in enumerate(turns[begin:], start=begin):
        last, wrong = response[-1] if response else Message("user", ""), ""
        if turn.role == "tool":
            wrong = "" if last.calls or last.role == "tool" else "a result without a call"
        elif last.calls:
            wrong = "a call without a result: a message of role `tool` must follow it"
        elif turn.role == "system" or (turn.role == "assistant") == (last.role == "assistant"):
            wrong = f"a message of role `{turn.role}` behind one of role `{last.role}`"
        elif turn.role == "assistant" and not (turn.content or turn.calls) and len(turns) > begin + 1:
            wrong = "a message of the assistant without a text and a call"
        if wrong:
            raise DataError(wrong, where=f"{where}, message {number}")
        if turn.role == last.role == "tool":  # texts are lines, as those of an environment
            edge = "" if last.content.endswith("<image>") or turn.content.startswith("<image>") else "\n"
            response[-1] = Message("tool", f"{last.content}{edge}{turn.content}")
        else:
            response.append(turn)
    if response and response[-1].role != "assistant":
        raise DataError(f"the chat ends with a message of role `{response[-1].role}`: nothing is learned", where=where)
    return tuple(response)


def _read_calls(value: Any, where: str) -> tuple[Call, ...]:
    """Return calls {name, arguments}. Arguments as JSON text may have a null."""
    calls = []
    for function in _functions(value, where, "a call is {name, arguments}, arguments an object or its JSON text"):
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = parse_json(arguments)
        else:
            arguments = _without_nulls(plain_at(arguments, where))
        if not isinstance(arguments, Mapping):
            raise DataError(f"a call of a tool has the arguments {show(function['arguments'])}", where=where)
        calls.append(Call(function["name"], arguments))
    return tuple(calls)


def read_tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return a cell with schemas of tools in OpenAI's form; None has none. Raises: DataError for any other value."""
    schemas = []
    for function in _functions(value, where, "a tool is {type: function, function: {name, description, parameters}}"):
        own = {name: structured(field, where) if name == "parameters" else field for name, field in function.items()}
        own.pop("type", None)  # of OpenAI's newer form
        schemas.append({"type": "function", "function": _without_nulls(plain_at(own, where))})
    return tuple(schemas)


def _functions(value: Any, where: str, hint: str) -> Iterator[Mapping[str, Any]]:
    """Yield objects with a name, each also within {function: ...} or as JSON text. Raises: DataError."""
    value = structured(value, where)
    for one in value if isinstance(value, (list, tuple)) else [value] if value else ():
        one = structured(one, where)
        function = (one.get("function") or one) if isinstance(one, Mapping) else {}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"a tool or its call is {show(one)}", where=where, hint=hint)
        yield function


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without null fields, which Arrow adds to the objects of a table."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def structured(value: Any, where: str) -> Any:
    """Return a cell with a list or an object written as JSON text as that value; any other cell unchanged.

    Raises: DataError for a text that begins like a list or an object and is no JSON, such as Python's own notation.
    """
    if not isinstance(value, str) or not _LIST.match(value):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise DataError(
            f"the cell {show(value)} begins like a list or an object, but is not JSON",
            where=where,
            hint="Python's own notation (single quotes, as pandas writes it) is not read: write it with json.dumps",
        ) from error


def _read_content(content: Any, where: str) -> tuple[str, list[Any]]:
    if isinstance(content, str):
        return content, []
    if not isinstance(content, (list, tuple)):
        raise DataError(f"a message's content is {show(content)}, not text or a list of parts", where=where)
    texts, images = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, Mapping) and kind in ("image", "image_url"):
            texts.append("<image>")
            payload = next((part[key] for key in ("image", "image_url", "path", "url") if part.get(key)), None)
            if payload is not None:
                images.append(payload)
        else:
            raise DataError(
                f"a content part is {show(part)}", where=where, hint="parts: {type: text, text}, {type: image}"
            )
    return "".join(texts), images


def split_images(value: Any, where: str = "") -> list[Any]:
    """Return the image values of a cell that holds no image, one image, or a list of them (as JSON text, too).

    Raises: DataError as `structured`.
    """
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return []
    value = structured(value, where)
    if isinstance(value, (list, tuple)):
        return [item for item in value if item is not None]
    return [value]


def looks_like_image(value: Any, by_name: bool = True) -> bool:
    """Return whether a cell has images: bytes, base64, or, if `by_name`, the name of an image file."""
    try:
        value = next(iter(split_images(value)), None)
        if isinstance(value, str) and value.lower().endswith(IMAGE_SUFFIXES):
            return by_name
        return value is not None and isinstance(read_image(value, None, ""), bytes)
    except DataError:
        return False


def read_image(value: Any, root: Path | None, where: str, depth: int = 0) -> bytes | Path:
    """Return an image value as file bytes, or as the path of a file inside `root`.

    Args:
        value: bytes; text: a data URI, base64, or a path; a dict {bytes, path} (Hugging Face), {image: ...} (verl),
            {url: ...} (OpenAI).
        root: folder that paths must stay in after links are resolved; None = paths are refused.
        depth: number of dicts around the value; at most 3.
    Raises: DataError for an address on the network, a path that leaves the root or is no file, or any other value.
    """
    if isinstance(value, Mapping):
        for key in ("bytes", "image", "path", "url", "image_url"):
            if depth < 3 and value.get(key) is not None and value.get(key) != "":
                return read_image(value[key], root, where, depth + 1)
        raise DataError(f"an image is {show(value)}, which has none of the keys bytes, path, image", where=where)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if not isinstance(value, str):
        raise DataError(f"an image is {show(value)}, not bytes, text or {{bytes, path}}", where=where)
    text = value.strip()
    encoded = _from_base64(text, where)
    if encoded is not None:
        return encoded
    text = text.removeprefix("file://")
    if text.startswith("data:"):
        raise DataError(f"the data URI {show(text)} is not an image in base64", where=where)
    if _SCHEME.match(text):
        raise DataError(
            f"the image {show(text)} is a URL, and nothing is fetched from the network: "
            "download it first, and give its path or bytes",
            where=where,
        )
    return _inside(text, root, where)


def image_bytes(image: bytes | Path, where: str) -> bytes:
    """Return the bytes of an image that `read_image` returned. Raises: DataError when its file cannot be read."""
    try:
        return image.read_bytes() if isinstance(image, Path) else image
    except OSError as error:
        raise DataError(f"the image cannot be read: {error.strerror or error}", where=where) from error


def _from_base64(text: str, where: str) -> bytes | None:
    """Return the bytes of an image in base64, or None if the text is no base64.

    Raises: DataError for a data URI that does not decode, and for a text longer than base64 of the largest file.
    """
    uri = _DATA_URI.match(text)
    if uri is None and len(text) < 60:
        return None
    limit = MAX_FILE_BYTES * 4 // 3 + 100  # base64 has 4 characters per 3 bytes; 100 for the head of a data URI
    if len(text) > limit:
        raise DataError(f"the image has {len(text):,} base64 characters; the limit is {limit:,}", where=where)
    body = re.sub(r"\s+", "", text[uri.end() :] if uri else text).rstrip("=")
    # The alphabet of URLs and a missing padding are read, too.
    body = body.replace("-", "+").replace("_", "/") + "=" * (-len(body) % 4)
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        if uri:
            raise DataError(f"the data URI is not base64: {error}", where=where) from error
        return None
    return data if uri or data.startswith(_MAGIC) else None


def _inside(text: str, root: Path | None, where: str) -> Path:
    if root is None:
        raise DataError(
            f"the image {show(text)} is a path, and this source has no folder of images",
            where=where,
            hint="give `images_root` in `[[data]]`",
        )
    if "\0" in text or not text:
        raise DataError(f"the image path {show(text)} is not a path", where=where)
    base = root.resolve()
    try:
        path = (base / text).resolve()
        if not path.is_relative_to(base):
            by_link = Path(os.path.normpath(base / text)).is_relative_to(base)
            hint = "set `images_root` in `[[data]]` to the folder that holds the images"
            raise DataError(
                f"the image path {show(text)} leaves {base}" + (f" by a link, to {path}" if by_link else ""),
                where=where,
                hint='set `images_root = "/"` in `[[data]]`, or the folder that holds the images'
                if text.startswith("/")
                else f"{hint} behind the link, or put the images there in its place"
                if by_link
                else hint,
            )
        if not path.is_file():
            raise DataError(f"{NO_FILE} {show(text)} in {root}", where=where, hint="check the path and `images_root`")
        if path.stat().st_size > MAX_FILE_BYTES:
            size = path.stat().st_size
            raise DataError(
                f"the image file {show(text)} has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}", where=where
            )
    except (OSError, RuntimeError, ValueError) as error:  # invalid paths, such as one with half a surrogate pair
        raise DataError(f"the image path {show(text)} cannot be used: {error}", where=where) from error
    return path


def text_of(value: Any) -> str | None:
    """Return the text of a cell: the cell itself, or the last turn of a chat; None for any other value."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        content = value[-1].get("content")
        return content if isinstance(content, str) else None
    return None


def number_of(value: Any) -> float:
    """Return a cell as a number; NaN if it is not a finite number."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def read_answer(value: Any, where: str) -> Any:
    """Return an answer cell as a JSON value. Of verl's {style, ground_truth}, return only the ground truth."""
    if isinstance(value, str) and "ground_truth" in value:
        value = structured(value, where)
    if isinstance(value, Mapping) and "ground_truth" in value:
        value = value["ground_truth"]
    return plain_at(value, where)


def plain(value: Any, depth: int = 0) -> Any:
    """Return a cell as a JSON value.

    NaN, infinities and bytes become None, dates and times become ISO text, decimals become numbers.

    Raises: DataError for a value nested more than 50 deep.
    """
    if depth > MAX_DEPTH:
        raise DataError(f"a value is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        return _without_surrogates(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_without_surrogates(str(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, (bytes, bytearray, memoryview)) else _without_surrogates(str(value))


def plain_at(value: Any, where: str) -> Any:
    """Return `plain` of a cell or row. Raises: DataError with its place."""
    try:
        return plain(value)
    except DataError as error:
        raise DataError(error.message, where=where) from error


def _without_surrogates(text: str) -> str:
    """Return a text in which `?` replaces each lone surrogate (half of a character).

    JSON may contain lone surrogates; files and tokenizers cannot store them.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def show(value: Any, most: int = 80) -> str:
    """Return the `repr` of a value, shortened to at most `most` characters, for messages."""
    return quoted(value, most, mark="...")


Spellings = Mapping[str, Sequence[str]]
"""Role -> column names that are recognised, in order of preference."""

IMAGES = ("images", "image", "image_path", "image_paths")
_ANSWER = ("solution", "answer", "ground_truth", "reward_model")
TRAINING: Spellings = {
    "prompt": ("prompt", "problem", "messages", "question", "query", "conversations"),
    "images": IMAGES,
    "answer": _ANSWER,
    "response": ("response", "completion"),
    "tools": ("tools",),
    "system": ("system",),
    "history": ("history",),
}
"""Columns of a table to train on."""
STYLES: Mapping[str, str] = {
    "TRL": "`prompt`, `image` or `images`, `solution`; prompts are texts or lists of {role, content}",
    "verl": "`prompt`, `images`, `reward_model` with {style, ground_truth}",
    "EasyR1": "`problem`, `images`, `answer`",
    "ms-swift": "`messages` of {role, content}, `images`, `solution`; or `query`, `response`, `history` of pairs",
    "LLaVA, ShareGPT": "`conversations` of {from, value}, from human and gpt, `image`: a path below the table's folder "
    "or `images_root`; the last turn of gpt is the truth `answer`, and what `vlmrl sft` learns",
}
"""Library whose tables are read as they are -> the columns of these, as Markdown."""
RESPONSES: Spellings = {
    "response": (
        "response",
        "completion",
        "output",
        "prediction",
        "predict",
        "generated_text",
        "generation",
        "model_output",
        "solution_str",
        "text",
    ),
    # The order differs from that of TRAINING: existing reports rely on both orders.
    "ground_truth": (
        "ground_truth",
        "truth",
        "answer_im",
        "gts",
        "ground_truths",
        "reward_model",
        "solution",
        "label",
        "answer",
        "target",
        "reference",
    ),
    "prompt": ("prompt", "problem", "question", "query", "input"),
    "group": ("group", "group_id", "prompt_id", "uid", "problem_id", "question_id"),
    "step": ("step", "global_step", "training_step"),
    "finish": ("finish", "finish_reason"),
    "num_tokens": ("num_tokens", "response_length", "completion_length", "num_completion_tokens"),
    "score": ("score", "reward", "overall"),
    "token_ids": ("completion_ids", "token_ids", "response_ids"),
    "turns": ("turns",),
    "measured": ("measured",),
    "images": IMAGES,
}
"""Columns of a table of saved responses. `turns` and `measured` are of episodes, as `generate` writes them."""
PAIRS: Spellings = {
    "images": IMAGES,
    "problem": ("problem",),
    "answer": ("answer", *(name for name in _ANSWER if name != "answer")),
    "composite": ("answer_im",),
}
"""Columns of a table of image pairs. `composite` holds the answer together with the names of the two images."""


@dataclass(frozen=True)
class Mapped:
    """Column of each role of a training table; None = the table has no such column.

    `style` is the name of the trainer that uses these column names; "own" = no known trainer.
    """

    prompt: str | None
    images: str | None
    answer: str | None
    response: str | None
    tools: str | None
    system: str | None
    history: str | None
    style: str

    def named(self) -> dict[str, str]:
        """Return role -> column, without the roles that have no column."""
        return {key: getattr(self, key) for key in TRAINING if getattr(self, key)}


def match_columns(
    spellings: Spellings,
    columns: Sequence[str],
    named: Mapping[str, str] | None = None,
    *,
    where: str = "",
    option: str = "",
) -> dict[str, str]:
    """Return role -> column; a role without a column is left out, and no column has two roles.

    Args:
        named: role -> column that the user chose; these take precedence.
        option: the option or recipe key with which the user chooses columns, for messages.
    Raises: DataError for an unknown role, or a named column that the table lacks, with the nearest name.
    """
    matched = dict(named or {})
    for role, column in matched.items():
        if role not in spellings:
            raise DataError(f"{option} names `{role}`", where=where, hint=listed(role, tuple(spellings), "roles"))
        if column not in columns:
            raise DataError(
                f"no column `{column}` (named as {role})", where=where, hint=listed(column, columns, "columns")
            )
    for role, names in spellings.items():
        if role not in matched:
            free = [name for name in names if name in columns and name not in matched.values()]
            matched |= {role: free[0]} if free else {}
    return matched


def map_columns(columns: Sequence[str], named: Mapping[str, str], first: Mapping[str, Any], where: str) -> Mapped:
    """Find the column of each role of a training table.

    Args:
        named: `[[data]] columns` of the recipe: role -> column; these take precedence.
        first: a row of the table. If its column `reward_model` holds a `ground_truth`, as in verl's tables, that column
            is preferred for the answer; otherwise `reward_model` is not used for the answer.
    Raises: DataError; see `match_columns`.
    """
    cell = structured(first.get("reward_model"), f"{where}, column `reward_model`")
    is_verl = isinstance(cell, Mapping) and "ground_truth" in cell
    others = tuple(name for name in _ANSWER if name != "reward_model")
    spellings = {**TRAINING, "answer": ("reward_model", *others) if is_verl else others}
    matched = match_columns(spellings, columns, named, where=where, option="`columns`")
    return Mapped(**{role: matched.get(role) for role in TRAINING}, style=_style(matched))


def missing_prompt(columns: Sequence[str], where: str) -> DataError:
    """Return the error for a table whose prompt column is not recognised."""
    return DataError(
        f"no prompt column; the table has: {', '.join(columns)}",
        where=where,
        hint=f"recognised names: {', '.join(TRAINING['prompt'])}; name yours: --columns prompt=NAME; in a recipe: "
        'columns = {prompt = "NAME"}, or prompt = "FILE" with a Jinja template',
    )


def _style(matched: Mapping[str, str]) -> str:
    if matched.get("answer") == "reward_model":
        return "verl"
    by_prompt = {"problem": "EasyR1", "messages": "ms-swift", "prompt": "TRL"}
    return by_prompt.get(matched.get("prompt", ""), "own")
