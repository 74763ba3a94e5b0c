"""Tools from plain typed Python: the schema that a model reads, and the check of the arguments that it writes.

A tool is a function or a method with typed parameters. Each argument must be given by its name, so `*args`, `**kwargs`
and parameters before a `/` are refused. `tool_schema` describes a tool in OpenAI's form, `bind` turns the JSON
arguments of a call into the arguments of the function, and `tools_of` lists the tools of an environment.

These types can be described: str, int, float, bool, None, Any, list, tuple, dict (with keys of type str), Literal,
enums (by the value of a member), and unions. A schema has the form of `transformers.utils.get_json_schema`, with these
differences: a description may be missing, a tuple has a fixed length (`minItems`, `maxItems`), `tuple[T, ...]` is
allowed, the type of the returned value is left out, and `(choices: ...)` in a docstring is only text.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import EnumMeta
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vlmrl.errors import VlmrlError
from vlmrl.redaction.redact import excerpt, first_line, quoted
from vlmrl.untrusted import one_line, parse_json

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Name of a tool. Every format of calls can state such a name."""
ONLY = ""
"""Name of the argument in a call whose format has no names. `bind` gives it to the tool's only parameter."""
MOST_ERROR = 200
"""Maximum number of characters of an error that the model reads."""
MOST_LEVELS = 50
"""Maximum depth of nested arguments. Files of a run hold them below a few levels of their own."""
NO_TOOLS = ("reset", "get_reward")
"""Public methods of an environment in TRL's form that the model does not call."""

_JSON_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
_CONTAINERS: Mapping[Any, tuple[str, str]] = {
    list: ("array", "a list"), tuple: ("array", "a list"), dict: ("object", "an object")
}  # fmt: skip
_TYPES = (
    "str, int, float, bool, list[T], tuple[T, ...], dict[str, T], Literal[...], an Enum, Any, or unions of these; "
    "a parameter annotated `Start` (vlmrl.environments.base) is filled in"
)
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")
_ENTRY = re.compile(r"(\w+(?:, \w+)*)\s*(?:\([^()]*\))?:\s*(.*)")
_MISSING = inspect.Parameter.empty
_SECTION = re.compile(r"(Args|Arguments|Returns|Yields|Raises):")


class ToolError(Exception):
    """Error that the model reads: its call was wrong, or the tool cannot do it. One line, at most MOST_ERROR long."""

    def __init__(self, message: str) -> None:
        super().__init__(excerpt(one_line(message), MOST_ERROR, mark="..."))


class _Mismatch(Exception):
    """Mismatch of a value and its type: the place of the value, the text of what it must be, and the value."""


def tools_of(owner: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools by name: of one function, of a list of functions, or of an environment in TRL's form.

    An environment is an instance or a class. Its tools are its public methods except `reset` and `get_reward`: also
    those that it inherits, static methods, class methods (which TRL leaves out) and coroutines. No property is read.

    Raises: VlmrlError for equal names, and for what is no function or has no usable name.
    """
    if isinstance(owner, (list, tuple)):
        tools: dict[str, Callable[..., Any]] = {}
        for function in owner:
            name = _name(function)
            if name in tools:
                raise VlmrlError(
                    f"two tools have the name `{name}`", where=_place(function), hint="rename one of the functions"
                )
            tools[name] = function
        return tools
    if inspect.isroutine(owner) or isinstance(owner, functools.partial):
        return {_name(owner): owner}
    kind = owner if isinstance(owner, type) else type(owner)
    names = dict.fromkeys(name for base in reversed(kind.__mro__[:-1]) for name in vars(base))
    public = [name for name in names if not name.startswith("_") and name not in NO_TOOLS]
    return {name: getattr(owner, name) for name in public if _is_method(inspect.getattr_static(kind, name))}


def tool_schema(
    function: Callable[..., Any], hidden: Collection[type] = (), *, name: str | None = None
) -> dict[str, Any]:
    """Return the description of a tool in OpenAI's form, from its types and its docstring in Google's style.

    Args:
        hidden: types of parameters that the environment fills in; such parameters are left out.
        name: name of the tool; None = the name of the function.
    Returns: the `vlmrl_schema` of the function if it has one (environments/adapters.py).
    Raises: VlmrlError for a function that cannot be a tool.
    """
    if (own := getattr(function, "vlmrl_schema", None)) is not None:
        return own
    description, texts = _read_docstring(inspect.getdoc(function) or "")
    properties, required = {}, []
    for parameter, (hint, default) in _parameters(function, hidden).items():
        try:
            properties[parameter] = _schema(hint)
        except ValueError as error:
            raise _refused(function, parameter, str(error), f"use one of: {_TYPES}") from None
        if parameter in texts:
            properties[parameter]["description"] = texts[parameter]
        required += [parameter] if default is _MISSING else []
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    described = {"name": name or _name(function), "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


def hidden_parameters(function: Callable[..., Any], hidden: Collection[type]) -> dict[str, type]:
    """Return the parameters that the environment fills in: name -> type, one of `hidden`.

    Raises: VlmrlError for a function that cannot be a tool.
    """
    shown = _parameters(function, hidden)
    return {name: hint for name, (hint, _) in _parameters(function, ()).items() if name not in shown}


def bind(function: Callable[..., Any], arguments: Mapping[str, Any], hidden: Collection[type] = ()) -> dict[str, Any]:
    """Return the arguments of a call as the function takes them, by name; without the parameters that are hidden.

    The values have the types of the parameters. These are converted, because some formats of calls write no types:
    text to a number, true, false, a list or an object; a whole number such as 2.0 to int; int to float; a value other
    than null to its JSON text. A union takes the member that fits without a conversion, else the first that fits, str
    last; the text "null" or "None" is None if nothing else fits. null is only for a parameter that allows None or has
    it as its default.

    Args:
        arguments: JSON values. They are copied.
        hidden: types of parameters that the environment fills in.
    Raises: ToolError for the model's mistake; VlmrlError for a function that cannot be a tool.
    """
    parameters = _parameters(function, hidden)
    try:
        values = parse_json(json.dumps(dict(arguments), allow_nan=False), most_levels=MOST_LEVELS)
    except (TypeError, ValueError, RecursionError):
        raise ToolError(f"arguments must be JSON with finite numbers and at most {MOST_LEVELS} levels") from None
    required = [name for name, (_, default) in parameters.items() if default is _MISSING]
    listing = f"the arguments are: {', '.join(parameters) or 'none'}"
    if list(values) == [ONLY]:
        names = required if len(required) == 1 else list(parameters)
        if len(names) != 1:
            raise ToolError(f"the tool takes no single argument; {listing}")
        values = {names[0]: values[ONLY]}
    for name in values:
        if name not in parameters:
            raise ToolError(f"unknown argument {quoted(name, 40)}; {listing}")
    for name in required:
        if name not in values:
            raise ToolError(f"missing argument `{name}`; {listing}")
    try:
        return {
            name: None if value is default is None else _convert(kind, value, name, False)
            for name, (kind, default) in parameters.items()
            if (value := values.get(name, _MISSING)) is not _MISSING
        }
    except _Mismatch as error:
        place, kind, value = error.args
        raise ToolError(f"`{place}` must be {kind}, not {quoted(value, 60, mark='...')}") from None


def _is_method(static: object) -> bool:
    """Return whether an attribute of a class is a method: a function, or what becomes one when it is read."""
    if isinstance(static, (staticmethod, classmethod)):
        return True
    return callable(static) and hasattr(type(static), "__get__")


def _name(function: Any) -> str:
    name = getattr(function, "__name__", None)
    if not callable(function) or isinstance(function, type) or not isinstance(name, str) or not NAME.fullmatch(name):
        raise VlmrlError(
            f"{quoted(name or function)} cannot be a tool: it is no function with a name of 1 to 64 ASCII letters and "
            "digits",
            where=_place(function),
            hint="write a function with `def`",
        )
    return name


def _place(function: Any) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None


def _refused(function: Any, parameter: str, problem: str, hint: str) -> VlmrlError:
    name = getattr(function, "__name__", type(function).__name__)
    return VlmrlError(f"tool `{name}`: parameter `{parameter}` {problem}", where=_place(function), hint=hint)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function and the texts of its parameters, each on one line."""
    lines = text.splitlines()
    sections = [i for i, line in enumerate(lines) if _SECTION.match(line)]
    description = "\n".join(lines[: sections[0] if sections else None]).strip()
    texts: dict[str, str] = {}
    for start, end in zip(sections, [*sections, None][1:], strict=True):
        names: list[str] = []
        indent = None
        for line in lines[start + 1 : end] if lines[start].startswith("Arg") else ():
            if not line.strip():
                continue
            entry, depth = _ENTRY.match(line.strip()), len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            if depth < indent:
                break  # a section of another name
            if entry and depth == indent:
                names = entry[1].split(", ")
                texts |= dict.fromkeys(names, entry[2].strip())
            else:
                texts |= {name: f"{texts[name]} {line.strip()}".strip() for name in names}
    return description, texts


def _parameters(function: Callable[..., Any], hidden: Collection[type]) -> dict[str, tuple[Any, Any]]:
    """Return the parameters that the model fills in: name -> (type, default).

    Raises: VlmrlError for a parameter without a type, or that cannot be given by its name.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise VlmrlError(
            f"{quoted(function)} cannot be a tool: its parameters are unknown", hint="write a function around it"
        ) from None
    result: dict[str, tuple[Any, Any]] = {}
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        if index == 0 and name in ("self", "cls") and parameter.annotation is _MISSING:
            continue  # a method that was read from its class
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            hint = "give each argument a name and a type; a decorator needs `functools.wraps`"
            raise _refused(function, str(parameter), "has no fixed names for the model to fill in", hint)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise _refused(function, name, "cannot be given by its name", "remove the `/` from the parameters")
        if parameter.annotation is _MISSING:
            raise _refused(function, name, "has no type", f"write `{name}: T`, where T is one of: {_TYPES}")
        kind = _type_of(function, name, parameter.annotation)
        if not any(kind is one for one in hidden):
            result[name] = kind, parameter.default
    return result


def _type_of(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """Return the type of one parameter. Its annotation may be a text, as with `from __future__ import annotations`."""

    def holder() -> None: ...

    # Not `get_type_hints(function)`: the type of the returned value may be known to a type checker alone.
    holder.__annotations__ = {name: annotation}
    plain = inspect.unwrap(function)
    names = getattr(getattr(plain, "__func__", plain), "__globals__", {})
    try:
        return get_type_hints(holder, globalns=names)[name]
    except Exception as error:  # a name that does not exist, or whatever the user's text raises
        problem = f"has a type that cannot be read: {first_line(error, 100)}"
        raise _refused(function, name, problem, "import or define the type at the top level of the file") from None


def _schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type. Raises: ValueError with the problem when it cannot be described."""
    origin, members = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return {}
    if origin in (Union, UnionType):
        parts = [_schema(member) for member in members if member is not NoneType]
        if len(parts) == 1:
            whole = parts[0]
        elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
            names = sorted({part["type"] for part in parts})
            whole = {"type": names[0] if len(names) == 1 else names}
        else:
            whole = {"anyOf": parts}
        return {**whole, "nullable": True} if NoneType in members else whole
    if (choices := _choices(kind)) is not None:
        names = list(dict.fromkeys(_JSON_TYPES.get(type(choice), "") for choice, _ in choices))
        if not choices or "" in names:
            raise ValueError(f"has the type `{_shown(kind)}`, which needs values of type str, int, float, bool or None")
        return {"type": names[0] if len(names) == 1 else names, "enum": [choice for choice, _ in choices]}
    if not isinstance(origin, type) or origin not in (*_JSON_TYPES, *_CONTAINERS):
        raise ValueError(f"has the type `{_shown(kind)}`, which JSON cannot state")
    if origin in _JSON_TYPES:
        return {"type": _JSON_TYPES[origin]}
    schema: dict[str, Any] = {"type": _CONTAINERS[origin][0]}
    if origin is dict and members:
        if members[0] is not str:
            raise ValueError(f"has the type `{_shown(kind)}`, and the keys of a JSON object are texts: dict[str, T]")
        schema["additionalProperties"] = _schema(members[1])
    elif (origin is list and members) or members[-1:] == (...,):
        schema["items"] = _schema(members[0])
    elif members:
        length = len(members)
        schema |= {"prefixItems": [_schema(member) for member in members], "minItems": length, "maxItems": length}
    return schema


def _shown(kind: Any) -> str:
    return excerpt(kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", ""), 100, mark="...")


def _choices(kind: Any) -> list[tuple[Any, Any]] | None:
    """Return what a Literal or an enum allows as pairs: JSON value, value for the function. None for other types."""
    if get_origin(kind) is Literal:
        return [(value, value) for value in get_args(kind)]
    members: Any = kind if isinstance(kind, EnumMeta) else None
    return None if members is None else [(member.value, member) for member in members]


def _convert(kind: Any, value: Any, place: str, exact: bool) -> Any:
    """Return a JSON value as a value of a type.

    Args:
        place: name of the argument, with the indices of the element.
        exact: whether nothing may be converted, except int to float.
    Raises: _Mismatch when it does not fit.
    """
    origin, members = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _convert_union(members, value, place, exact)
    if (choices := _choices(kind)) is not None:
        for fits in (_is_same, *(() if exact else (_reads_same,))):
            for choice, result in choices:
                if fits(choice, value):
                    return result
        raise _Mismatch(place, f"one of {', '.join(json.dumps(choice) for choice, _ in choices)}", value)
    if origin in _CONTAINERS:
        return _convert_container(origin, members, value, place, exact)
    is_loose = not exact or (kind is float and type(value) is int)
    result = _scalar(kind, value) if is_loose else value
    if type(result) is not kind or (kind is float and not math.isfinite(result)):
        raise _Mismatch(place, _WORDS[kind], value)
    return result


def _convert_union(members: tuple[Any, ...], value: Any, place: str, exact: bool) -> Any:
    others = [member for member in members if member is not NoneType]
    if value is None and len(others) < len(members):
        return None
    # Everything has a JSON text, so a text is the last choice if nothing fits as it is.
    tries = [(member, True) for member in others]
    tries += [] if exact else [(member, False) for member in sorted(others, key=lambda member: member is str)]
    for member, strict in tries:
        with suppress(_Mismatch):
            return _convert(member, value, place, strict)
    if len(others) < len(members) and not exact and value in ("null", "None"):
        return None
    if len(others) == 1:
        return _convert(others[0], value, place, exact)  # raises with the place within the value
    raise _Mismatch(place, f"one of these types: {', '.join(map(_shown, members))}", value)


def _convert_container(origin: Any, members: tuple[Any, ...], value: Any, place: str, exact: bool) -> Any:
    words = _CONTAINERS[origin][1]
    items: Any = value
    if isinstance(value, str) and not exact:
        with suppress(ValueError):
            items = read_json(value)
    if type(items) is not (dict if origin is dict else list):
        raise _Mismatch(place, words, value)
    if origin is dict:
        kind = members[1] if members else Any
        return {name: _convert(kind, item, f"{place}[{quoted(name, 20)}]", exact) for name, item in dict(items).items()}
    kinds = members or (Any, ...)
    if origin is list or kinds[-1] is ...:
        kinds = kinds[:1] * len(items)
    if len(kinds) != len(items):
        raise _Mismatch(place, f"a list of {len(kinds)} elements", value)
    pairs = enumerate(zip(kinds, items, strict=True))
    return origin(_convert(kind, item, f"{place}[{i}]", exact) for i, (kind, item) in pairs)


def _scalar(kind: Any, value: Any) -> Any:
    """Return a JSON value converted to a type without loss; the value itself if that is not possible."""
    if kind is str:
        return value if isinstance(value, str) or value is None else json.dumps(value, ensure_ascii=False)
    if kind is bool:
        return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
    number = value
    if isinstance(value, str) and _NUMBER.fullmatch(text := value.strip()):
        number = int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(number, bool):
        return value
    if kind is int and isinstance(number, float) and number.is_integer():
        return int(number)
    if kind is float and isinstance(number, int):
        with suppress(OverflowError):
            return float(number)
    return number


def _is_same(choice: Any, value: Any) -> bool:
    return type(choice) is type(value) and choice == value


def _reads_same(choice: Any, value: Any) -> bool:
    def text(x: Any) -> str:
        return x if isinstance(x, str) else json.dumps(int(x) if isinstance(x, float) and x.is_integer() else x)

    return text(choice) == text(value)


def read_json(text: str) -> Any:
    """Return the value of a JSON text that a model wrote.

    Raises: ValueError for damaged JSON, repeated keys, more than MOST_LEVELS levels, and numbers that are not finite.
    """
    value = parse_json(text, unique_keys=True, most_levels=MOST_LEVELS)
    json.dumps(value, allow_nan=False)  # NaN, and 1e999, which Python reads as infinity
    return value
