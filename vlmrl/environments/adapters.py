"""Tools and clients that were written for other systems, recognised by their shape: none of these systems is imported.

| shape | becomes |
|---|---|
| verl's `BaseTool`: a class with `create`, `execute`, `release`, ... | a class with that tool |
| OpenEnv's `EnvClient`: a class with `reset`, `step`, `_step_payload`, ... | a class with a tool per type of action |

`as_observation` reads what they return; so a function that returns verl's response with reward and metrics works, too.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_type_hints

from vlmrl.environments.base import Observation
from vlmrl.untrusted import parse_json

VERL = ("get_openai_tool_schema", "create", "execute", "calc_reward", "release")
OPENENV = ("reset", "step", "_step_payload", "_parse_result")
"""Methods by which a class is recognised."""
NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of OpenEnv's actions and observations that are not for the model."""
RESPONSE = ("text", "image", "video")
"""Fields of verl's response of a tool."""
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_PICTURE = re.compile(r"(?:data:image/[a-z]+;base64,|(?=iVBORw0KGgo|/9j/|UklGR))([A-Za-z0-9+/=\s]{64,})")


def as_environment(target: Any, args: Mapping[str, Any]) -> Any:
    """Return a class of another system as an environment; anything else as it is.

    Args:
        args: `environment.args`, with which the class will be called.
    """
    if not inspect.isclass(target):
        return target
    for names, adapt in ((VERL, _of_verl), (OPENENV, _of_openenv)):
        if all(callable(getattr(target, name, None)) for name in names):
            return adapt(target, args)
    return target


def as_observation(result: Any, sums: dict[str, float]) -> Any:
    """Return what a tool of verl or a client of OpenEnv returned as an observation; anything else as it is.

    verl's reward of a tool is measured as `tool_reward`, its metrics by their names; OpenEnv's reward as `reward`.

    Args:
        sums: sums of the rewards of this episode by name, which are updated.
    """
    kind, reward, done = "tool_reward", None, False
    metrics: Mapping[str, Any] = {}
    if all(hasattr(result, name) for name in ("observation", "reward", "done")):
        values, reward, kind, done = _fields(result.observation), result.reward, "reward", bool(result.done)
    elif isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping):
        response, reward, metrics = result
        is_whole = isinstance(response, Mapping) and "text" in response and response.keys() <= set(RESPONSE)
        values = _fields(response) if is_whole or _is_response(response) else {"text": response}
    elif _is_response(result):
        values = _fields(result)
    else:
        return result
    if reward is not None:
        sums[kind] = sums.get(kind, 0.0) + float(reward)
    images, texts = [], {}
    for name, value in values.items():
        pictures = [_picture(one) for one in (value if isinstance(value, list) else [value])]
        if pictures and all(picture is not None for picture in pictures):
            images += pictures
        elif value is not None and value not in ("", [], {}):
            texts[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = "\n".join(f"{name}: {text}" if len(texts) > 1 else text for name, text in texts.items())
    numbers = {str(name): float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return Observation(text, images, done, numbers | sums)


def _is_response(value: Any) -> bool:
    """Return whether a value is verl's ToolResponse."""
    return all(hasattr(value, name) for name in RESPONSE)


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of an observation by name, of a response without videos."""
    fields = value if isinstance(value, Mapping) else vars(value) if hasattr(value, "__dict__") else {"text": value}
    return {str(name): one for name, one in fields.items() if name not in (*NOT_SHOWN, "video")}


def _picture(value: Any) -> Any:
    """Return a PIL image, also of a data URL or a PNG, JPEG or WebP file in base64; None of another value."""
    if hasattr(value, "convert"):
        return value
    match = _PICTURE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    from PIL import Image

    try:
        with Image.open(io.BytesIO(base64.b64decode(match[1])), formats=["PNG", "JPEG", "WEBP"]) as image:
            return image.convert("RGB")
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError):
        return None


def _typed(name: str, schema: Mapping[str, Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes the arguments of a schema in OpenAI's form, and calls `call(self, arguments)`."""

    def tool(self: Any, **arguments: Any) -> Any:
        return call(self, arguments)

    given = schema["function"].get("parameters") or {}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for key, one in (given.get("properties") or {}).items():
        kind = Literal[tuple(one["enum"])] if one.get("enum") else _TYPES.get(str(one.get("type")), Any)
        default = inspect.Parameter.empty if key in (given.get("required") or ()) else None
        parameters.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default))
    tool.__name__, tool.__signature__, tool.vlmrl_schema = name, inspect.Signature(parameters), schema  # type: ignore[attr-defined]
    return tool


def _of_verl(tool_class: type, args: Mapping[str, Any]) -> type:
    """Return the environment of a `BaseTool`. Its `config` and `tool_schema` are arguments, as tables or JSON texts."""
    config, schema = (parse_json(v) if isinstance(v := args.get(k), str) else v for k in ("config", "tool_schema"))

    def tool_of() -> Any:
        """Return a tool; verl's type of its schema is known from an annotation in the class or one that it extends."""
        inits = [vars(base)["__init__"] for base in tool_class.__mro__[:-1] if "__init__" in vars(base)]
        hints = [get_type_hints(one).get("tool_schema") for one in inits if schema]
        kinds: list[Any] = [k for hint in hints for k in (hint, *get_args(hint)) if hasattr(k, "model_validate")]
        return tool_class(config or {}, kinds[0].model_validate(schema) if kinds else schema)

    if not schema:
        own = tool_of().get_openai_tool_schema()
        schema = own if isinstance(own, Mapping) else own.model_dump(exclude_unset=True, exclude_none=True)
    name = schema["function"]["name"]

    class VerlTool:
        def __init__(self, **_: Any) -> None:
            self._tool, self._id = tool_of(), uuid.uuid4().hex

        async def reset(self, images: Sequence[Any], tools_kwargs: Any = None, extra_info: Any = None) -> None:
            own = tools_kwargs or extra_info
            for key in ("tools_kwargs", name, "create_kwargs")[bool(tools_kwargs) :]:
                own = own.get(key) if isinstance(own, Mapping) else None
            pictures = {"image": images[0] if images else None, "images": images}
            known = {**pictures, "instance_id": self._id, "create_kwargs": own or {}, **(own or {})}
            takes = inspect.signature(self._tool.create).parameters
            is_open = any(one.kind is one.VAR_KEYWORD for one in takes.values())
            known = {k: v for k, v in known.items() if k in takes or (is_open and k not in pictures)}
            result = await self._tool.create(**known)
            self._id = result[0] if isinstance(result, tuple) else result

        async def get_reward(self) -> float:
            reward = await self._tool.calc_reward(self._id)
            await self._tool.release(self._id)
            return float(reward or 0.0)

    setattr(VerlTool, name, _typed(name, schema, lambda self, values: self._tool.execute(self._id, values)))
    return VerlTool


def _of_openenv(client_class: type, args: Mapping[str, Any]) -> type:
    """Return the environment of an `EnvClient`: a tool for each type of action, `step` if there is one.

    `row` in the arguments names the columns of a row that the server gets at its reset, besides the seed.
    """
    bases = (base for one in client_class.__mro__ for base in vars(one).get("__orig_bases__", ()))
    action = next((types[0] for base in bases if len(types := get_args(base)) == 3), dict)
    actions: list[Any] = [one for one in get_args(action) or (action,) if hasattr(one, "model_json_schema")]

    class Client:
        def __init__(self, row: Sequence[str] = (), **given: Any) -> None:
            self._client, self._row = client_class(**given), row

        def reset(self, seed: int, **row: Any) -> Any:
            own = {name: row[name] for name in self._row if name in row}
            return self._client.reset(seed=seed % 2**32, **own)

    for one in actions or [None]:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", one.__name__.removesuffix("Action")).lower() if one else ""
        name = words if len(actions) > 1 and words else "step"
        table = (
            one.model_json_schema() if one else {"properties": {"action": {"type": "object"}}, "required": ["action"]}
        )
        shown = {k: v for k, v in table["properties"].items() if k not in NOT_SHOWN}
        parameters = {"type": "object", "properties": shown, "required": list(table.get("required", ()))}
        described = {"name": name, "description": inspect.getdoc(one) or "", "parameters": parameters}
        make = (lambda values, kind: kind(**values)) if one else (lambda values, kind: values["action"])
        call = lambda self, values, make=make, kind=one: self._client.step(make(values, kind))  # noqa: E731
        setattr(Client, name, _typed(name, {"type": "function", "function": described}, call))
    return Client
