r"""Calls of tools in the text of a model: read, written and explained in the formats that chat templates speak.

| name | form |
|---|---|
| `hermes` | `<tool_call>{"name": "zoom", "arguments": {"n": 1}}</tool_call>` (Qwen2.5, Qwen3-VL) |
| `qwen_xml` | `<tool_call><function=zoom><parameter=n>1</parameter></function></tool_call>` (Qwen3.5, Qwen3.6) |
| `gemma4` | `<\|tool_call>call:zoom{n:1}<tool_call\|>`, texts between `<\|"\|>` |
| `glm` | `<tool_call>zoom<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>` (GLM-4.5 and later) |
| a mapping | own tags, tag -> name of a tool: `<zoom>1</zoom>`. The body is the tool's only argument, named `ONLY` |

`qwen_xml` and `glm` do not say whether `1` is a text. There a value is a JSON value if it is exactly the text that JSON
writes for it, and no JSON string. So `1.50` and `007` stay texts, also True and None, which the template of Qwen3.5
writes. Nothing is lost: `tools.bind` makes of it what the tool's type says. In the body of own tags, a list or an
object may be written in any way that JSON allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from vlmrl.environments.tools import MOST_ERROR, MOST_LEVELS, NAME, ONLY, read_json
from vlmrl.errors import DataError, VlmrlError, unknown
from vlmrl.redaction.redact import excerpt, quoted, redact_said
from vlmrl.types import Call, Message, TracePart, TraceTurn
from vlmrl.untrusted import number_of, one_line

Form = str | Mapping[str, str]
"""Format of calls: its name, or own tags as a mapping tag -> name of a tool."""
MOST_CHARACTERS = 1 << 16
"""Maximum length of one call."""
BEFORE_CALLS = {"qwen_xml": "\n\n", "gemma4": ""}
"""White space between a text and a call in a format, where it is not one line end."""
THOUGHTS = {
    "<think>": "</think>",
    "<|channel>": "<channel|>",  # Gemma 4
    "[THINK]": "[/THINK]",  # Mistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<mm:think>": "</mm:think>",  # MiniMax
    "\u25c1think\u25b7": "\u25c1/think\u25b7",  # Kimi-VL
}
"""Marks of thoughts: begin -> end."""

_QUOTE = '<|"|>'
_BLANK = re.compile(r"\s*")
_GEMMA_KEY = re.compile(r"[^:,{}\[\]]*")
_GEMMA_SCALAR = re.compile(r"[^,{}\[\]]*")
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class BadCall:
    """Call that cannot be read.

    Args:
        text: the beginning of the call as the model wrote it, at most MOST_ERROR characters.
        why: the problem for the model, one line of at most MOST_ERROR characters.
    """

    text: str
    why: str


@dataclass(frozen=True, slots=True)
class _Format:
    """Format of calls.

    Args:
        begin: mark at which a call begins.
        end: mark that ends it.
        read: text between the marks -> (name, arguments); raises ValueError with the problem.
        write: call -> text between the marks; raises ValueError when it cannot.
        rule: explanation of the values for the model.
    """

    begin: str
    end: str
    read: Callable[[str], tuple[Any, Any]]
    write: Callable[[Call], str]
    rule: str


def read_calls(text: str, form: Form, most: int = 8, *, in_thought: bool = False) -> tuple[Call | BadCall, ...]:
    """Return the calls in a model's text, in order. No text raises an error, and the time is linear in its length.

    One rule holds for all formats. Only what follows the last end of a thought counts (`THOUGHTS`, of any family). From
    there, a call goes from its first mark to the next mark that ends it. If a thought begins between calls and does not
    end, there are no calls at all. A call that does not end is a BadCall, so is a call that cannot be read or is longer
    than MOST_CHARACTERS. At most `most` are returned, and one BadCall behind them if there are more.

    Numbers that are not finite, repeated keys, half surrogate pairs, more than MOST_LEVELS levels, and arguments that
    are no object are not read. In `hermes`, `arguments` may be missing if there are none, or a JSON text of the object
    (as OpenAI writes it).

    Args:
        in_thought: whether the prompt has begun a thought, as the templates of Qwen3.5 do. Then the text needs its end.
    Raises: VlmrlError for an unknown format.
    """
    formats = _formats(form)
    place = max((text.rfind(end) + len(end) for end in THOUGHTS.values() if end in text), default=0)
    if in_thought and place == 0:
        return ()
    marks = re.compile("|".join(map(re.escape, (*formats, *THOUGHTS))))
    calls: list[Call | BadCall] = []
    while (mark := marks.search(text, place)) is not None:
        if mark[0] in THOUGHTS:
            return ()
        one = formats[mark[0]]
        end = text.find(one.end, mark.end())
        place = len(text) if end < 0 else end + len(one.end)
        if len(calls) == most:
            calls.append(_one_more(text[mark.start() : place], most))
        elif len(calls) < most:
            calls.append(_read_one(one, text[mark.start() : place], end >= 0))
    return tuple(calls)


def served_calls(calls: Sequence[tuple[str, str]], most: int = 8) -> tuple[Call | BadCall, ...]:
    """Return calls that a server has read out of a model's text, in order, by the rules of `read_calls`.

    Args:
        calls: name and arguments as JSON text of each.
    """
    read = [
        _checked(f"{name} {arguments}", lambda n=name, a=arguments: (n, read_json(a)))
        for name, arguments in calls[:most]
    ]
    return (*read, *([_one_more(calls[most][1], most)] if len(calls) > most else []))


def served_text(text: str, calls: Sequence[tuple[str, str]], form: Form) -> str:
    """Return a model's text with the calls that a server has read out of it, as the model may have written them.

    A call that cannot be written in the format is written as in `hermes`, whatever it holds. People and rewards read
    the text; the calls are not read from it.

    Args:
        calls: name and arguments as JSON text of each.
    """
    edge = BEFORE_CALLS.get(str(form), "\n")
    for (name, arguments), call in zip(calls, served_calls(calls, len(calls)), strict=True):
        one = f'<tool_call>\n{{"name": {_dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        with suppress(ValueError, VlmrlError):
            one = write_call(call, form) if isinstance(call, Call) else one
        text, edge = text + (edge if text else "") + one, edge[:1]
    return text


def write_call(call: Call, form: Form) -> str:
    """Return a call as the model would write it. `read_calls` of the text returns the call.

    Raises: ValueError for a call that would be read as another one, such as one with a mark of the format in an
        argument, or with the text "5" where the format does not tell it from the number; VlmrlError for an unknown
        format.
    """
    formats = _formats(form)
    tools = dict(zip(formats, form.values(), strict=True)) if isinstance(form, Mapping) else {}
    one = next((one for begin, one in formats.items() if tools.get(begin, call.name) == call.name), None)
    if one is None:
        raise ValueError(f"no tag stands for the tool {quoted(call.name)}")
    try:
        call = Call(call.name, read_json(_dumps(dict(call.arguments))))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from None
    text = f"{one.begin}{one.write(call)}{one.end}"
    calls = read_calls(text, form)
    if [_comparable(read) for read in calls] != [_comparable(call)]:
        raise ValueError(f"the call cannot be written in this format: it would be read as {quoted(calls, 200)}")
    return text


def needs_tools(turns: Sequence[TraceTurn]) -> bool:
    """Return whether a turn of the model follows another one, so that a tool must answer the first."""
    return any(isinstance(x, tuple) and isinstance(y, tuple) for x, y in pairwise(turns))


def traced_turns(trace: Any, place: str) -> tuple[TraceTurn, ...]:
    """Return what a task's `trace` returned as turns, those of the assistant as texts and calls; a text is one turn.

    Raises: DataError for any other value.
    """
    turns: list[Any] = []
    for turn in [trace] if isinstance(trace, str) else trace if isinstance(trace, (list, tuple)) else ():
        if isinstance(turn, Message) and turn.role == "assistant":
            turn = [*([turn.content] if turn.content or not turn.calls else []), *turn.calls]
        turns.append([turn] if isinstance(turn, TracePart) else turn)
    said = [turn for turn in turns if not isinstance(turn, Message)]
    if said and all(isinstance(t, (list, tuple)) and t and all(isinstance(x, TracePart) for x in t) for t in said):
        return tuple(turn if isinstance(turn, Message) else tuple(turn) for turn in turns)
    message = f"it returned {type(trace).__name__} {quoted(trace)}, not the text of a response"
    hint = "a list holds the assistant's turns: texts, vlmrl.Call(name, arguments), or lists of these"
    raise DataError(message, where=place, hint=hint)


def turn_text(parts: Sequence[TracePart] | Message, form: Form, guard: Callable[[Any], Any] | None = None) -> str:
    """Return the text of a turn: its texts and its calls, with the white space between them that chat templates write.

    Args:
        guard: marks control tokens in a JSON value, for texts that will be encoded; the marks of the calls stay.
    Raises: ValueError or VlmrlError as `write_call`.
    """
    if isinstance(parts, Message):
        return parts.content
    text, edge = "", ""
    for part in parts:
        if isinstance(part, str):
            text, edge = text + edge[:1] + (guard(part) if guard else part), BEFORE_CALLS.get(str(form), "\n")
            continue
        one = write_call(part, form)  # before its texts are guarded: they may hold a mark of the format
        text += edge + (write_call(Call(part.name, guard(part.arguments)), form) if guard else one)
        edge = BEFORE_CALLS.get(str(form), "\n")[:1]
    return text


def end_of_thought(text: str) -> str:
    """Return the mark that ends the thought which a prompt begins at its end, as some families do; "" if none."""
    return next((end for begin, end in THOUGHTS.items() if text.rstrip().endswith(begin)), "")


def form_of(template: str) -> str:
    """Return the name of the format that a chat template speaks, from its marks; "hermes" if it has none."""
    if "<|tool_call>" in template:
        return "gemma4"
    if "<function=" in template and "<parameter=" in template:
        return "qwen_xml"
    return "glm" if "<arg_key>" in template else "hermes"


def tools_text(schemas: Sequence[Mapping[str, Any]], form: Form) -> str:
    """Return the text that tells a model its tools and how to call them, for a template that does not."""
    tools = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    formats = _formats(form)
    if isinstance(form, Mapping):
        ways = [f"{one.begin}ARGUMENT{one.end} calls {form[one.begin[1:-1]]}." for one in formats.values()]
    else:
        ways = [write_call(Call("NAME", {"KEY": "VALUE"}), form)]
    rule = next(iter(formats.values())).rule if formats else ""
    intro = "# Tools\n\nYou can call these tools. Each line is the JSON schema of one:"
    how = "\n".join(["To call a tool, write:", *ways, rule, "Several calls may follow each other."])
    return f"{intro}\n<tools>\n{tools}\n</tools>\n\n{how}"


def _formats(form: Form) -> dict[str, _Format]:
    """Return the formats by the mark at which their calls begin. Raises: VlmrlError for an unknown one."""
    if isinstance(form, str):
        if form not in FORMATS:
            raise unknown("format of tool calls", form, FORMATS, error=VlmrlError)
        return {FORMATS[form].begin: FORMATS[form]}
    for tag, tool in form.items():
        if not _TAG.fullmatch(tag) or f"<{tag}>" in THOUGHTS:
            hint = "use letters, digits, _ and -, and not `think`"
            raise VlmrlError(f"{quoted(tag)} cannot be a tag for calls of the tool {quoted(tool)}", hint=hint)
    rule = "A text stands as it is, any other value as JSON."
    return {
        f"<{tag}>": _Format(f"<{tag}>", f"</{tag}>", partial(_read_body, tool), _write_body, rule)
        for tag, tool in form.items()
    }


def _bad(text: str, why: str) -> BadCall:
    return BadCall(excerpt(text, MOST_ERROR, hide=redact_said), excerpt(one_line(why), MOST_ERROR, mark="..."))


def _one_more(text: str, most: int) -> BadCall:
    return _bad(text, f"only {number_of(most, 'call')} of a turn may run")


def _comparable(call: Call | BadCall) -> tuple[str, str]:
    # By their JSON: in Python, 1 equals True and 1.0.
    return (call.name, json.dumps(call.arguments, sort_keys=True)) if isinstance(call, Call) else ("", call.why)


def _read_one(one: _Format, text: str, is_closed: bool) -> Call | BadCall:
    if not is_closed:
        return _bad(text, f"the call is not closed: {one.end} is missing")
    return _checked(text, lambda: one.read(text[len(one.begin) : -len(one.end)]))


def _checked(text: str, read: Callable[[], tuple[Any, Any]]) -> Call | BadCall:
    """Return the call that `read` returns as (name, arguments), if it is one."""
    if len(text) > MOST_CHARACTERS:
        return _bad(text, f"the call has more than {MOST_CHARACTERS:,} characters")
    try:
        name, arguments = read()
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"the name of a tool is a word of 1 to 64 letters and digits, not {quoted(name, 40)}")
        if not isinstance(arguments, dict):
            raise ValueError("the arguments of a call are an object with their names")
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return _bad(text, "the call contains half of a surrogate pair")
    except ValueError as error:
        return _bad(text, str(error))
    return Call(name, arguments)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read_hermes(body: str) -> tuple[Any, Any]:
    call = read_json(body)
    if not isinstance(call, dict) or "name" not in call or call.keys() - {"name", "arguments"}:
        raise ValueError("a call is an object with `name` and `arguments`")
    arguments = call.get("arguments", {})
    return call["name"], read_json(arguments) if isinstance(arguments, str) else arguments


def _write_hermes(call: Call) -> str:
    return f'\n{{"name": {_dumps(call.name)}, "arguments": {_dumps(call.arguments)}}}\n'


def _read_value(text: str, any_layout: bool = False) -> Any:
    """Return the JSON value that a text states, or the text. The module's docstring says which."""
    try:
        value = read_json(text)
        is_json = (any_layout and isinstance(value, (list, dict))) or _dumps(value) == text
    except ValueError:
        return text
    return value if is_json and not isinstance(value, str) else text


def _write_value(value: Any) -> str:
    return value if isinstance(value, str) else _dumps(value)


def _read_body(tool: str, body: str) -> tuple[str, dict[str, Any]]:
    return tool, {ONLY: _read_value(body, any_layout=True)}


def _write_body(call: Call) -> str:
    if list(call.arguments) != [ONLY]:
        raise ValueError("a call in own tags has exactly one argument, and its name is empty")
    return _write_value(call.arguments[ONLY])


def _take(text: str, begin: str, end: str) -> tuple[str, str]:
    """Return what stands between two marks at the beginning of a text, and the rest of the text."""
    if not text.startswith(begin):
        raise ValueError(f"{begin} must stand before {quoted(text, 40, mark='...')}")
    inside, mark, rest = text[len(begin) :].partition(end)
    if not mark:
        raise ValueError(f"{end} is missing behind {begin}")
    return inside, rest


def _add(arguments: dict[str, Any], key: str, value: str) -> None:
    if key in arguments:
        raise ValueError(f"the argument {quoted(key, 40)} occurs more than once")
    arguments[key] = _read_value(value)


def _read_qwen(body: str) -> tuple[str, dict[str, Any]]:
    name, rest = _take(body.strip(), "<function=", ">")
    arguments: dict[str, Any] = {}
    while (rest := rest.lstrip()).startswith("<parameter="):
        key, rest = _take(rest, "<parameter=", ">")
        value, rest = _take(rest, "", "</parameter>")
        # The template puts a value on lines of its own. These two line ends are no part of it.
        _add(arguments, key.strip(), value.removeprefix("\n").removesuffix("\n"))
    if rest != "</function>":
        raise ValueError(f"<parameter=...> or </function> must stand before {quoted(rest, 40, mark='...')}")
    return name.strip(), arguments


def _write_qwen(call: Call) -> str:
    lines = [f"<parameter={key}>\n{_write_value(value)}\n</parameter>\n" for key, value in call.arguments.items()]
    return f"\n<function={call.name}>\n{''.join(lines)}</function>\n"


def _read_glm(body: str) -> tuple[str, dict[str, Any]]:
    name, mark, rest = body.partition("<arg_key>")
    arguments: dict[str, Any] = {}
    rest = mark + rest
    while rest := rest.strip():
        key, rest = _take(rest, "<arg_key>", "</arg_key>")
        value, rest = _take(rest.lstrip(), "<arg_value>", "</arg_value>")
        _add(arguments, key.strip(), value)
    return name.strip(), arguments


def _write_glm(call: Call) -> str:
    pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{_write_value(v)}</arg_value>\n" for k, v in call.arguments.items()]
    return f"{call.name}\n{''.join(pairs)}"


def _read_gemma(body: str) -> tuple[str, dict[str, Any]]:
    name, _ = _take(body.strip(), "call:", "{")
    arguments, place = _gemma_value(body, body.index("{"), 1)
    if body[place:].strip():
        raise ValueError(f"nothing may stand behind the arguments: {quoted(body[place:], 40, mark='...')}")
    return name.strip(), arguments


def _blank(text: str, place: int) -> int:
    match = _BLANK.match(text, place)
    return match.end() if match else place


def _gemma_value(text: str, place: int, level: int) -> tuple[Any, int]:
    """Return the value at a place of a call of Gemma 4, and the place behind it."""
    if text.startswith(_QUOTE, place):
        return _gemma_text(text, place)
    if text[place : place + 1] in ("{", "["):
        if level > MOST_LEVELS:
            raise ValueError(f"it nests more than {MOST_LEVELS} levels")
        return _gemma_members(text, place, level)
    match = _GEMMA_SCALAR.match(text, place)
    scalar = match[0].strip() if match else ""
    try:
        value = None if scalar == "None" else read_json(scalar)  # the first templates of Gemma 4 wrote None
    except ValueError:
        value = scalar
    if isinstance(value, str):
        raise ValueError(f"{quoted(scalar, 40, mark='...')} is no number, true, false or null; a text needs {_QUOTE}")
    return value, place + (len(match[0]) if match else 0)


def _gemma_text(text: str, place: int) -> tuple[str, int]:
    begin = place + len(_QUOTE)
    end = text.find(_QUOTE, begin)
    if end < 0:
        raise ValueError(f"a text is not closed by {_QUOTE}")
    return text[begin:end], end + len(_QUOTE)


def _gemma_members(text: str, place: int, level: int) -> tuple[Any, int]:
    """Return the list or the object that begins at a place, and the place behind it."""
    is_object = text[place] == "{"
    pairs: list[tuple[str, Any]] = []
    end = "}" if is_object else "]"
    place = _blank(text, place + 1)
    while not text.startswith(end, place):
        key = str(len(pairs))
        if is_object:
            key, place = _gemma_key(text, place)
        value, place = _gemma_value(text, _blank(text, place), level + 1)
        pairs.append((key, value))
        place = _blank(text, place)
        if text.startswith(",", place):
            place = _blank(text, place + 1)
        elif not text.startswith(end, place):
            raise ValueError(f"`,` or `{end}` must stand before {quoted(text[place : place + 40], 40)}")
    if not is_object:
        return [value for _, value in pairs], place + 1
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key occurs more than once")
    return members, place + 1


def _gemma_key(text: str, place: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, place):
        key, place = _gemma_text(text, place)
    else:
        match = _GEMMA_KEY.match(text, place)
        key, place = (match[0].strip(), match.end()) if match else ("", place)
    place = _blank(text, place)
    if not text.startswith(":", place):
        raise ValueError(f"`:` is missing behind the key {quoted(key, 40, mark='...')}")
    return key, place + 1


def _write_gemma_value(value: Any) -> str:
    if isinstance(value, Mapping):
        # Sorted as the template does it, without regard to case.
        items = sorted(value.items(), key=lambda item: item[0].lower())
        return "{" + ",".join(f"{_write_gemma_key(k)}:{_write_gemma_value(v)}" for k, v in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_write_gemma_value, value)) + "]"
    return f"{_QUOTE}{value}{_QUOTE}" if isinstance(value, str) else _dumps(value)


def _write_gemma_key(key: str) -> str:
    is_plain = _GEMMA_KEY.fullmatch(key) and key == key.strip() and _QUOTE not in key
    return key if is_plain else f"{_QUOTE}{key}{_QUOTE}"


def _write_gemma(call: Call) -> str:
    return f"call:{call.name}{_write_gemma_value(call.arguments)}"


_ONE_CALL = ("<tool_call>", "</tool_call>")
FORMATS = {
    "hermes": _Format(*_ONE_CALL, _read_hermes, _write_hermes, "The arguments are a JSON object."),
    "qwen_xml": _Format(
        *_ONE_CALL, _read_qwen, _write_qwen, "Each argument has its own <parameter>: text, or JSON."
    ),
    "gemma4": _Format(
        "<|tool_call>", "<tool_call|>", _read_gemma, _write_gemma,
        f"Arguments are separated by commas. Texts stand between {_QUOTE}, numbers, true, false and null do not.",
    ),
    "glm": _Format(
        *_ONE_CALL, _read_glm, _write_glm, "Each argument has its own <arg_key> and <arg_value>: text, or JSON."
    ),
}  # fmt: skip
"""Formats of calls with names: name -> format."""
