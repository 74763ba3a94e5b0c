"""Tools from typed Python: their schemas, the arguments of calls, and the tools of an environment."""

from __future__ import annotations

import copy
import enum
import functools
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Dict, List, Literal, Optional, Union  # noqa: UP035

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from vlmrl.environments.tools import MOST_ERROR, ToolError, bind, hidden_parameters, tool_schema, tools_of
from vlmrl.errors import VlmrlError

if TYPE_CHECKING:
    from nowhere import Picture  # type: ignore[import-not-found]


class Start:
    """Type that the environment fills in."""


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Rank(enum.IntEnum):
    FIRST = 1
    SECOND = 2


def scalars(text: str, n: int, x: float, flag: bool) -> str:
    """Take scalars.

    Args:
        text: Some text.
        n: A number.
        x: Another
            number, on two lines.
        flag: true or false.

    Returns:
        What it takes.
    """
    return f"{text}{n}{x}{flag}"


def defaults(n: int = 3, text: str = "a", box: list[float] | None = None):
    """Have defaults.

    Args:
        n: A number.
        text: Some text.
        box: Four numbers.
    """


def lists(a: list, b: list[int], c: list[list[float]], d: List[str]):  # noqa: UP006
    """Take lists.

    Args:
        a: Anything.
        b: Whole numbers.
        c: Nested.
        d: Texts.
    """


def dicts(a: dict, b: dict[str, int], c: Dict[str, list[float]], d: Any):  # noqa: UP006
    """Take objects.

    Args:
        a: Anything.
        b: Whole numbers.
        c: Lists.
        d: All.
    """


def literals(a: Literal["x", "y"], b: Literal[1, 2], c: Literal["x", 1, None, True]):
    """Take literals.

    Args:
        a: Texts.
        b: Numbers.
        c: A mixture.
    """


def enums(a: Color, b: Rank, c: Color | None = None):
    """Take enums.

    Args:
        a: A color.
        b: A rank.
        c: A color or null.
    """


def unions(a: int | str, b: Optional[int], c: Union[list[int], str], d: int | float | None, e: Optional[str] = None):  # noqa: UP007, UP045
    """Take unions.

    Args:
        a: Two.
        b: A number or null.
        c: List or text.
        d: A number.
        e: Text.
    """


def nothing():
    """Take nothing."""


def annotated(a: Annotated[int, "a note"], b: list[Annotated[str, 1]]):
    """Take types with notes.

    Args:
        a: A number.
        b: Texts.
    """


class Env:
    """Environment in TRL's form."""

    def move(self, direction: Literal["up", "down"], steps: int = 1) -> str:
        """Move a figure.

        Several lines
        of description.

        Args:
            direction (str): Where to.
            steps (int, optional): How far: in fields.

        Returns:
            The new place.

        Raises:
            ValueError: never.
        """
        return f"{direction} {steps}"


SAME = [scalars, defaults, lists, dicts, literals, enums, unions, nothing, annotated, Env().move, Env.move]


@pytest.mark.parametrize("function", SAME, ids=lambda f: f.__qualname__)
def test_a_schema_equals_that_of_transformers(function: Callable[..., Any]):
    """Apart from the differences that the module names: the returned value."""
    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert tool_schema(function) == expected


def test_a_schema_in_full():
    def zoom(start: Start, image: int, box: tuple[float, float], points: tuple[int, ...] = (), note: str | None = None):
        """Enlarge a part.

        The picture is cut.

        Arguments:
            image, points: Numbers
                of pictures.
            box (tuple): x and y: two numbers.

        Example:
            zoom(1, (2, 3))
        """

    assert tool_schema(zoom, [Start]) == {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "Enlarge a part.\n\nThe picture is cut.",
            "parameters": {
                "type": "object",
                "properties": {
                    "image": {"type": "integer", "description": "Numbers of pictures."},
                    "box": {
                        "type": "array",
                        "prefixItems": [{"type": "number"}, {"type": "number"}],
                        "minItems": 2,
                        "maxItems": 2,
                        "description": "x and y: two numbers.",
                    },
                    "points": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "description": "Numbers of pictures.",
                    },
                    "note": {"type": "string", "nullable": True},
                },
                "required": ["image", "box"],
            },
        },
    }
    assert hidden_parameters(zoom, [Start]) == {"start": Start}
    assert tool_schema(zoom, [Start], name="other")["function"]["name"] == "other"


def test_a_tool_needs_no_docstring_and_its_returned_type_may_be_unknown():
    def crop(box: list[float]) -> Picture: ...

    described = tool_schema(crop)["function"]
    assert described["description"] == ""
    assert described["parameters"]["properties"] == {"box": {"type": "array", "items": {"type": "number"}}}


def no_type(a: int, b): ...
def stars(*rest: int): ...
def keywords(a: int, **rest: int): ...
def positional(a: int, /, b: int): ...
def unknown_type(a: Picture): ...
def custom(a: Start): ...
def keys(a: dict[int, str]): ...
def nested(a: list[Start]): ...
def raw(a: bytes): ...
def strange(a: Literal[b"x"]): ...
def broken(a: "list["): ...  # noqa: F722


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_type, "tool `no_type`: parameter `b` has no type"),
        (stars, "parameter `*rest"),
        (keywords, "parameter `**rest"),
        (positional, "parameter `a` cannot be given by its name"),
        (unknown_type, "parameter `a` has a type that cannot be read: name 'Picture' is not defined"),
        (custom, "parameter `a` has the type `Start`, which JSON cannot state"),
        (keys, "the keys of a JSON object are texts"),
        (nested, "parameter `a` has the type `Start`"),
        (raw, "parameter `a` has the type `bytes`"),
        (strange, "needs values of type str, int"),
        (broken, "parameter `a` has a type that cannot be read"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_with_its_place(function: Callable[..., Any], words: str):
    with pytest.raises(VlmrlError) as error:
        tool_schema(function)
    assert words in error.value.message and error.value.hint
    assert error.value.where == f"{__file__}:{function.__code__.co_firstlineno}"


def test_bound_arguments_have_the_types_of_the_parameters():
    assert bind(scalars, {"text": "a", "n": 2.0, "x": 3, "flag": True}) == {"text": "a", "n": 2, "x": 3.0, "flag": True}
    values = bind(scalars, {"text": "a", "n": "2", "x": "3e1", "flag": "true"})
    assert values == {"text": "a", "n": 2, "x": 30.0, "flag": True}
    assert [type(v) for v in values.values()] == [str, int, float, bool]


def typed(kind: Any, default: Any = ...) -> Callable[..., Any]:
    """Return a function with one parameter `a` of a type."""

    def tool(a): ...

    def tool_with_default(a=default): ...

    function = tool if default is ... else tool_with_default
    function.__annotations__["a"] = kind
    return function


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (int, " -7 ", -7),
        (int, "+7", 7),
        (int, "2.0", 2),
        (int, "1e3", 1000),
        (float, 10, 10.0),
        (float, ".5", 0.5),
        (float, "5.", 5.0),
        (bool, "False", False),
        (str, 5, "5"),
        (str, True, "true"),
        (str, 1.5, "1.5"),
        (str, [1, 2], "[1, 2]"),
        (str, "\u00e9", "\u00e9"),
        (str, ["\u00e9"], '["\u00e9"]'),
        (list, [1, "a", None], [1, "a", None]),
        (list[float], [1, "2"], [1.0, 2.0]),
        (list[float], "[1, 2]", [1.0, 2.0]),
        (list[list[int]], [[1], "[2]", []], [[1], [2], []]),
        (tuple, [1, "a"], (1, "a")),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], "[1,2,3]", (1, 2, 3)),
        (dict, '{"a": [1]}', {"a": [1]}),
        (dict[str, int], {"a": "1"}, {"a": 1}),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], "2", 2),
        (Literal[1, 2], 2.0, 2),
        (Literal["1", 1], "1", "1"),
        (Literal["1", 1], 1, 1),
        (Literal["1", "2"], 2, "2"),
        (Literal[True, 1], 1, 1),
        (Color, "red", Color.RED),
        (Rank, 2, Rank.SECOND),
        (Rank, "2", Rank.SECOND),
        (int | None, None, None),
        (int | None, "4", 4),
        (int | None, "None", None),
        (list[int] | int | None, "null", None),
        (str | None, "None", "None"),
        (Optional[Any], "None", "None"),  # noqa: UP045
        (Literal["null", 1] | None, "null", "null"),
        (list[int | None], "[1, null]", [1, None]),
        (int | str, "4", "4"),
        (int | str, 4, 4),
        (str | int, 4, 4),
        (int | float, 4, 4),
        (float | str, "4", "4"),
        (float | str, 4, 4.0),
        (str | int, 2.0, 2),
        (str | bool, 2, "2"),
        (float | list[float], "[4]", [4.0]),
        (str | list[float], [4], [4.0]),
        (list[int] | str, "[4]", "[4]"),
        (Any, {"a": None}, {"a": None}),
        (list[Any], [None, {}], [None, {}]),
        (Annotated[int, "x"], "3", 3),
    ],
)
def test_a_value_is_converted(kind: Any, value: Any, result: Any):
    bound = bind(typed(kind), {"a": value})["a"]
    assert bound == result and type(bound) is type(result)
    assert repr(bound) == repr(result)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, 1.5, "`a` must be a whole number, not 1.5"),
        (int, "1.5", "`a` must be a whole number, not '1.5'"),
        (int, True, "`a` must be a whole number, not True"),
        (int, "", "whole number"),
        (int, "1_000", "whole number"),
        (int, "\u0661", "whole number"),
        (int, "0x10", "whole number"),
        (int, "__import__('os')", "whole number"),
        (int, [1], "whole number"),
        (int, None, "`a` must be a whole number, not None"),
        (int, "9" * 500, "whole number"),
        (float, True, "a number"),
        (float, "nan", "a number"),
        (float, "1e999", "a number"),
        (float, 10**400, "a number"),
        (float, "inf", "a number"),
        (float, math.nan, "finite"),
        (Any, [math.inf], "finite"),
        (str, None, "`a` must be a text, not None"),
        (bool, 1, "true or false"),
        (bool, "yes", "true or false"),
        (list, "(1, 2)", "a list"),
        (list, "a", "a list"),
        (list, {"a": 1}, "a list"),
        (list[float], [1, [2]], "`a[1]` must be a number, not [2]"),
        (list[list[int]], [[1], [2, "x"]], "`a[1][1]` must be a whole number, not 'x'"),
        (list, "[1e999]", "a list"),
        (list, "[NaN]", "a list"),
        (list, "[" * 100_000, "a list"),
        (dict, '{"a": 1, "a": 2}', "an object"),
        (dict, [1], "an object"),
        (dict[str, int], {"k": "x"}, "`a['k']` must be a whole number"),
        (tuple[int, int], [1], "a list of 2 elements"),
        (tuple[int, int], [1, 2, 3], "a list of 2 elements"),
        (Literal["a", "b"], "c", '`a` must be one of "a", "b", not \'c\''),
        (Literal[1], True, "one of 1"),
        (Literal["007"], 7, "one of"),
        (Color, "RED", "one of"),
        (int | list[int], "x", "one of these types: int, list[int]"),
        (int | None, "x", "whole number"),
        (list[float] | None, [1, "x"], "`a[1]` must be a number"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_that_the_model_reads(kind: Any, value: Any, words: str):
    with pytest.raises(ToolError) as error:
        bind(typed(kind), {"a": value})
    text = str(error.value)
    assert words in text and len(text) <= MOST_ERROR and len(text.splitlines()) == 1


def test_missing_and_unknown_arguments_are_named():
    for arguments, words in (
        ({}, "missing argument `direction`; the arguments are: direction, steps"),
        ({"direction": "up", "step": 1}, "unknown argument 'step'; the arguments are: direction, steps"),
    ):
        with pytest.raises(ToolError, match=words):
            bind(Env().move, arguments)
    with pytest.raises(ToolError, match="the arguments are: none"):
        bind(nothing, {"a": 1})
    assert bind(nothing, {}) == {}


def test_null_is_for_a_parameter_that_allows_it_or_has_it_as_its_default():
    assert bind(typed(int, None), {"a": None}) == {"a": None}
    assert bind(typed(int, None), {}) == {}
    with pytest.raises(ToolError, match="must be a whole number, not None"):
        bind(typed(int, 3), {"a": None})


def test_the_model_cannot_give_a_hidden_parameter():
    def zoom(start: Start, image: int): ...

    assert bind(zoom, {"image": 1}, [Start]) == {"image": 1}
    with pytest.raises(ToolError, match="unknown argument 'start'; the arguments are: image"):
        bind(zoom, {"image": 1, "start": {}}, [Start])


def test_an_argument_without_a_name_goes_to_the_only_parameter():
    def crop(start: Start, box: list[float], note: str = ""): ...

    assert bind(crop, {"": [1, 2]}, [Start]) == {"box": [1.0, 2.0]}
    assert bind(typed(int, 3), {"": "5"}) == {"a": 5}
    for function in (scalars, defaults, nothing):
        with pytest.raises(ToolError, match="no single argument"):
            bind(function, {"": 1})


def test_bound_values_are_copies():
    arguments = {"a": {"b": [1]}}
    before = copy.deepcopy(arguments)
    bind(typed(dict), arguments)["a"]["b"].append(2)
    assert arguments == before


def test_an_error_is_one_short_line_without_hidden_characters():
    text = str(ToolError("a\nb\x1b[31m" + "c" * 1000))
    assert len(text) == MOST_ERROR and text.startswith("a b\\u001b[31mccc") and text.endswith("...")


KINDS = st.recursive(
    st.sampled_from([str, int, float, bool, Any, Literal["a", 1], Color, list, dict, tuple, int | None, int | str]),
    lambda kind: st.one_of(
        kind.map(lambda k: list[k]),
        kind.map(lambda k: dict[str, k]),
        kind.map(lambda k: tuple[k, ...]),
        st.tuples(kind, kind).map(lambda k: tuple[k[0], k[1]]),
        st.tuples(kind, kind).map(lambda k: Union[k[0], k[1]]),  # noqa: UP007
        kind.map(lambda k: Optional[k]),  # noqa: UP045
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(max_size=3), value, max_size=3),
    max_leaves=8,
)


@given(KINDS, VALUES)
def test_every_value_is_bound_or_refused(kind: Any, value: Any):
    tool_schema(typed(kind))
    try:
        bind(typed(kind), {"a": value})
    except ToolError as error:
        assert len(str(error)) <= MOST_ERROR and "\n" not in str(error)


@given(VALUES.filter(lambda v: v is not None))
def test_a_text_parameter_takes_the_json_text_of_a_value(value: Any):
    """So a format that does not tell `5` from `"5"` loses nothing."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return
    assert bind(typed(str), {"a": value}) == {"a": text}


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Base:
    def reset(self, **row: Any) -> None: ...
    def get_reward(self) -> float:
        return 0.0

    def look(self, place: int) -> str:
        """Look."""
        return f"looked at {place}"


class Full(Base):
    size = 3
    handler = None

    class Inner:
        pass

    def __init__(self) -> None:
        self.late = lambda: None

    @property
    def secret(self) -> int:
        raise AssertionError("a property was read")

    @functools.cached_property
    def heavy(self) -> int:
        raise AssertionError("a property was read")

    def step(self, n: int) -> int:
        return n

    def read(self, path: str) -> str:
        return path

    def close(self) -> None: ...
    @staticmethod
    def add(a: int, b: int) -> int:
        return a + b

    @classmethod
    def kind(cls, n: int) -> str:
        return cls.__name__ * n

    async def fetch(self, page: int) -> int:
        return page

    @wrapped
    def turn(self, degrees: float) -> float:
        """Turn.

        Args:
            degrees: Angle.
        """
        return degrees

    @functools.lru_cache  # noqa: B019
    def cached(self, n: int) -> int:
        return n

    def _private(self, n: int) -> int:
        return n


TOOLS = ["look", "step", "read", "close", "add", "kind", "fetch", "turn", "cached"]


def test_the_tools_of_an_environment_are_its_public_methods():
    tools = tools_of(Full())
    assert list(tools) == TOOLS
    assert tools["look"](2) == "looked at 2" and tools["add"](1, 2) == 3 and tools["kind"](2) == "FullFull"
    for name, function in tools.items():
        schema = tool_schema(function, name=name)["function"]
        assert schema["name"] == name and "self" not in schema["parameters"]["properties"]
    assert tool_schema(tools["turn"])["function"]["parameters"]["properties"] == {
        "degrees": {"type": "number", "description": "Angle."}
    }
    assert tools["turn"](**bind(tools["turn"], {"degrees": "3"})) == 3.0


def test_the_tools_of_a_class_have_the_same_schemas_as_those_of_its_instance():
    tools = tools_of(Full)
    assert list(tools) == TOOLS
    assert {n: tool_schema(f, name=n) for n, f in tools.items()} == {
        n: tool_schema(f, name=n) for n, f in tools_of(Full()).items()
    }
    assert bind(tools["look"], {"place": 1}) == {"place": 1}


def test_a_subclass_switches_a_tool_off():
    class Quiet(Full):
        step = None  # type: ignore[assignment]

    assert "step" not in tools_of(Quiet())


def test_functions_are_tools_by_their_names():
    assert tools_of(scalars) == {"scalars": scalars}
    assert tools_of([scalars, nothing]) == {"scalars": scalars, "nothing": nothing}
    assert list(tools_of(Full().step)) == ["step"]
    assert tools_of([]) == {}
    with pytest.raises(VlmrlError, match="two tools have the name `step`") as error:
        tools_of([Full().step, Full().step])
    assert error.value.where


@pytest.mark.parametrize("one", [lambda: 1, functools.partial(scalars, n=1), Full, 3, "scalars"])
def test_what_has_no_usable_name_is_refused(one: Any):
    with pytest.raises(VlmrlError, match="cannot be a tool"):
        tools_of([one])


def test_a_name_that_formats_cannot_state_is_refused():
    nothing_else = functools.wraps(nothing)(lambda: None)
    nothing_else.__name__ = "gr\u00f6\u00dfe"
    with pytest.raises(VlmrlError, match="cannot be a tool"):
        tool_schema(nothing_else)


def test_a_partial_function_is_refused_not_read_as_an_environment():
    with pytest.raises(VlmrlError, match="cannot be a tool"):
        tools_of(functools.partial(scalars, n=1))
