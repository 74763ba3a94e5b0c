"""Calls of tools: read from what models write, written as their chat templates write them, explained in a prompt."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from vlmrl.environments.calls import (
    FORMATS,
    MOST_CHARACTERS,
    THOUGHTS,
    BadCall,
    Form,
    form_of,
    read_calls,
    tools_text,
    turn_text,
    write_call,
)
from vlmrl.environments.tools import MOST_ERROR, MOST_LEVELS, bind
from vlmrl.errors import VlmrlError
from vlmrl.types import Call

spec = importlib.util.find_spec("trl")
assert spec and spec.origin
TEMPLATES = Path(spec.origin).parent / "chat_templates"
"""Chat templates of published models, as TRL ships them."""
TAGS = {"crop": "zoom", "search": "find"}
FORMS: list[Form] = [*FORMATS, TAGS]
BOX = Call("zoom", {"image": 0, "box": [10, 20.5, 300, 400]})
CALLS = [
    BOX,
    Call("now", {}),
    Call("find", {"query": 'a "quoted" text\nof two lines, {with: [brackets]} & <b>tags</b>', "most": 3}),
    Call("set_all", {"a": -0.0, "B": 1, "nested": {"z": [1, {"k": "v"}, True, False], "a": {}}, "c": [], "e": ""}),
    Call("say", {"text": "Gr\u00fc\u00dfe \u4f60\u597d \U0001f600", "x": -1.5e-07}),
]


def why(*calls: Call | BadCall) -> list[str]:
    return [call.why if isinstance(call, BadCall) else f"read: {call}" for call in calls]


# Texts of models, with the calls that they contain.
GOLDEN: list[tuple[str, Form, str, tuple[Call, ...]]] = [
    (
        "Qwen3-VL, text before",
        "hermes",
        'I look closer.\n<tool_call>\n{"name": "zoom", "arguments": {"image": 0, "box": [10, 20.5, 300, 400]}}\n'
        "</tool_call><|im_end|>",
        (BOX,),
    ),
    (
        "two calls",
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}'
        "</tool_call>",
        (Call("now", {}), Call("f", {"a": "b"})),
    ),
    (
        "the arguments as JSON text, and on one line",
        "hermes",
        '<tool_call>{"name":"f","arguments":"{\\"a\\": [1, \\"x\\"]}"}</tool_call>',
        (Call("f", {"a": [1, "x"]}),),
    ),
    ("no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', (Call("now", {}),)),
    (
        "a mark of a thought within an argument",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"q": "what is <think>?"}}</tool_call>',
        (Call("f", {"q": "what is <think>?"}),),
    ),
    (
        "Qwen3.5, a thought before, several lines in a value",
        "qwen_xml",
        "<think>\nLet me see: <tool_call>\n<function=no>\n</function>\n</tool_call>\n</think>\n\nNow.\n\n<tool_call>\n"
        "<function=find>\n<parameter=query>\nfirst line\n\n  second <b> line\n</parameter>\n<parameter=most>\n3\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>",
        (Call("find", {"query": "first line\n\n  second <b> line", "most": 3}),),
    ),
    (
        "without line ends, and JSON that JSON writes otherwise stays a text",
        "qwen_xml",
        "<tool_call><function=f><parameter=a>1.50</parameter><parameter=b>007</parameter><parameter=c>[1,2]</parameter>"
        '<parameter=d>"q"</parameter><parameter=e>NaN</parameter><parameter=f>True</parameter></function></tool_call>',
        (Call("f", {"a": "1.50", "b": "007", "c": "[1,2]", "d": '"q"', "e": "NaN", "f": "True"}),),
    ),
    (
        "values with line ends, empty values",
        "qwen_xml",
        "<tool_call>\n<function=f>\n<parameter=a>\n\n\n</parameter>\n<parameter=b>\n\n</parameter>\n<parameter=c></parameter>\n"
        "</function>\n</tool_call>",
        (Call("f", {"a": "\n", "b": "", "c": ""}),),
    ),
    ("no parameters", "qwen_xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>", (Call("now", {}),)),
    (
        "Gemma 4, a thought before",
        "gemma4",
        "<|channel>thought\nI need <|tool_call>call:no{}<tool_call|>\n<channel|><|tool_call>call:zoom{box:[10,20.5,"
        "300,400],image:0}<tool_call|><|tool_response>",
        (BOX,),
    ),
    (
        "brackets and commas within texts",
        "gemma4",
        '<|tool_call>call:find{query:<|"|>a, {b: [c]} "d"<|"|>,most:3}<tool_call|><turn|>',
        (Call("find", {"query": 'a, {b: [c]} "d"', "most": 3}),),
    ),
    (
        "blanks, keys between marks, all kinds of values",
        "gemma4",
        '<|tool_call>call:f{ <|"|>a b<|"|> : true , n:null,\nl:[ ],'
        'o:{ x : -1.5e3 ,y:[[1],{}]},t:<|"|><|"|>}<tool_call|>',
        (Call("f", {"a b": True, "n": None, "l": [], "o": {"x": -1500.0, "y": [[1], {}]}, "t": ""}),),
    ),
    (
        "GLM-4.5V",
        "glm",
        "<think>a thought</think>\nI look.\n<tool_call>zoom\n<arg_key>image</arg_key>\n<arg_value>0</arg_value>\n"
        "<arg_key>box</arg_key>\n<arg_value>[10, 20.5, 300, 400]</arg_value>\n</tool_call><|observation|>",
        (BOX,),
    ),
    (
        "GLM-4.7, without line ends",
        "glm",
        "<tool_call>f<arg_key>a</arg_key><arg_value> two words\n</arg_value></tool_call><tool_call>now</tool_call>",
        (Call("f", {"a": " two words\n"}), Call("now", {})),
    ),
    (
        "own tags",
        TAGS,
        "<think>where?</think>I search.<search>red car</search> and <crop>\n[1,2]\n</crop><crop>{}</crop>"
        "<crop>5</crop><search>1.50</search>",
        (
            Call("find", {"": "red car"}),
            Call("zoom", {"": [1, 2]}),
            Call("zoom", {"": {}}),
            Call("zoom", {"": 5}),
            Call("find", {"": "1.50"}),
        ),
    ),
    ("other tags", TAGS, '<tool_call>{"name": "f"}</tool_call><answer>1</answer><Crop>1</Crop>', ()),
    ("no call", "hermes", "The answer is 3. </tool_call>", ()),
    ("a call of another format", "gemma4", '<tool_call>{"name": "f"}</tool_call>', ()),
]


@pytest.mark.parametrize(("form", "text", "calls"), [g[1:] for g in GOLDEN], ids=[g[0] for g in GOLDEN])
def test_calls_are_read(form: Form, text: str, calls: tuple[Call, ...]):
    assert read_calls(text, form) == calls


FAMILIES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen_xml",
    "qwen3_5_nothink": "qwen_xml",
    "qwen3_6": "qwen_xml",
    "qwen3_8": "qwen_xml",
    "nemotron_3_nano": "qwen_xml",
    "gemma4": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm",
}
SILENT = ["qwen2_5_vl", "gemma3", "smolvlm", "idefics3", "llava_next"]
"""Templates that know no tools."""


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_template_writes_what_is_read_and_what_write_call_writes(name: str):
    form = FAMILIES[name]
    assert form_of(template(name)) == form
    for calls in [[call] for call in CALLS] + [CALLS]:
        tool_calls = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
        assistant = {"role": "assistant", "content": "I see.", "tool_calls": tool_calls}
        messages = [{"role": "user", "content": "what?"}, assistant]
        rendered = render_jinja_template([messages], chat_template=template(name), bos_token="")[0][0]
        assert read_calls(rendered, form) == tuple(calls), rendered
        texts = [write_call(call, form) for call in calls]
        if form != "gemma4" and "nemotron" not in name:  # it writes the text behind the calls; a line end less
            said = turn_text(["I see.", *calls], form)
            assert ("".join(said.split()) in "".join(rendered.split())) if form == "glm" else (said in rendered)
        if form == "glm":  # its template puts a line end more around the arguments of each call
            rendered, texts = ("".join(t.split()) for t in (rendered, "".join(texts)))
            assert texts in rendered
        else:
            assert all(text in rendered for text in texts), (texts, rendered)


def switch(flag: bool, n: int | None, off: bool = True) -> None: ...


@pytest.mark.parametrize("name", FAMILIES)
def test_true_false_and_null_arrive_from_every_template(name: str):
    """The template of Qwen3.5 writes True and None, as Python does; those of Qwen3.6 and later write JSON."""
    arguments = {"flag": True, "n": None, "off": False}
    tool_call = {"type": "function", "function": {"name": "switch", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [tool_call]}]
    rendered = render_jinja_template([messages], chat_template=template(name), bos_token="")[0][0]
    (call,) = read_calls(rendered, FAMILIES[name])
    assert isinstance(call, Call) and bind(switch, call.arguments) == arguments


@pytest.mark.parametrize("name", SILENT)
def test_a_template_without_tools_gets_hermes(name: str):
    assert form_of(template(name)) == "hermes"
    assert form_of("<parameter=") == form_of("<function=") == "hermes"


def json_text(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def xml_text(text: str) -> str:
    return f"<tool_call>\n<function=f>\n{text}\n</function>\n</tool_call>"


def gemma_text(text: str) -> str:
    return f"<|tool_call>call:f{text}<tool_call|>"


BAD: list[tuple[Form, str, str]] = [
    ("hermes", json_text(""), "Expecting value"),
    ("hermes", json_text("zoom(1)"), "Expecting value"),
    ("hermes", json_text('{"name": "f", "arguments": {"a": NaN}}'), "Out of range float"),
    ("hermes", json_text('{"name": "f", "arguments": {"a": -Infinity}}'), "Out of range float"),
    ("hermes", json_text('{"name": "f", "arguments": {"a": 1e999}}'), "Out of range float"),
    ("hermes", json_text('{"name": "f", "arguments": {"a": 1, "a": 2}}'), "the key `a` occurs more than once"),
    ("hermes", json_text('{"name": "f", "name": "g", "arguments": {}}'), "the key `name` occurs more than once"),
    ("hermes", json_text('{"name": "f", "arguments": [1]}'), "the arguments of a call are an object"),
    ("hermes", json_text('{"name": "f", "arguments": null}'), "the arguments of a call are an object"),
    ("hermes", json_text('{"name": "f", "arguments": "[1]"}'), "the arguments of a call are an object"),
    ("hermes", json_text('{"name": "f", "arguments": "\\"{}\\""}'), "the arguments of a call are an object"),
    ("hermes", json_text('{"name": "f", "arguments": "a"}'), "Expecting value"),
    ("hermes", json_text('{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}'), "more than once"),
    ("hermes", json_text('{"name": "f", "box": [1]}'), "an object with `name` and `arguments`"),
    ("hermes", json_text('{"arguments": {}}'), "an object with `name` and `arguments`"),
    ("hermes", json_text('[{"name": "f", "arguments": {}}]'), "an object with `name` and `arguments`"),
    ("hermes", json_text('{"name": 3, "arguments": {}}'), "the name of a tool"),
    ("hermes", json_text('{"name": "a b", "arguments": {}}'), "the name of a tool"),
    ("hermes", json_text('{"name": "' + "a" * 65 + '"}'), "the name of a tool"),
    ("hermes", json_text('{"name": "f", "arguments": {"a": "\\ud800"}}'), "half of a surrogate pair"),
    ("hermes", json_text('{"name": "f", "arguments": {"a": ' + "[" * 60 + "]" * 60 + "}}"), "nests more than"),
    ("hermes", json_text("[" * 60_000), "nests more than"),
    ("hermes", json_text('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}"), "Exceeds the limit"),
    ("hermes", json_text(" " * MOST_CHARACTERS), "has more than 65,536 characters"),
    ("hermes", 'a <tool_call>{"name": "f"}', "the call is not closed: </tool_call> is missing"),
    ("hermes", "<tool_call>", "not closed"),
    ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "f"}</tool_call>', "Extra data"),
    ("qwen_xml", json_text('{"name": "f", "arguments": {}}'), "<function= must stand before"),
    ("qwen_xml", json_text("<function=f>"), "</function> must stand before ''"),
    ("qwen_xml", json_text("<function=f"), "> is missing behind <function="),
    ("qwen_xml", xml_text("<parameter=a>\n1"), "</parameter> is missing"),
    ("qwen_xml", xml_text("<parameter=a>\n1\n</parameter>\n<parameter=a>\n1\n</parameter>"), "'a' occurs more than"),
    ("qwen_xml", xml_text("text"), "must stand before 'text"),
    ("qwen_xml", xml_text("</function>\n<function=g>"), "must stand before"),
    ("qwen_xml", json_text("<function=a b></function>"), "the name of a tool"),
    ("qwen_xml", json_text("<function=></function>"), "the name of a tool"),
    ("qwen_xml", xml_text("<parameter=a>\n\ud800\n</parameter>"), "half of a surrogate pair"),
    ("gemma4", gemma_text("{a:text}"), "'text' is no number, true, false or null"),
    ("gemma4", gemma_text('{a:"text"}'), "is no number, true, false or null"),
    ("gemma4", gemma_text("{a:NaN}"), "'NaN' is no number"),
    ("gemma4", gemma_text("{a:1e999}"), "is no number"),
    ("gemma4", gemma_text("{a:}"), "'' is no number"),
    ("gemma4", gemma_text("{a}"), "`:` is missing behind the key 'a'"),
    ("gemma4", gemma_text('{<|"|>a:1}'), "a text is not closed"),
    ("gemma4", gemma_text('{a:<|"|>b}'), "a text is not closed"),
    ("gemma4", gemma_text("{a:1,a:2}"), "a key occurs more than once"),
    ("gemma4", gemma_text("{a:[1,2}"), "`,` or `]` must stand before '}'"),
    ("gemma4", gemma_text("{a:1"), "`,` or `}` must stand before ''"),
    ("gemma4", gemma_text("{} and"), "nothing may stand behind the arguments"),
    ("gemma4", gemma_text("(a=1)"), "{ is missing behind call:"),
    ("gemma4", gemma_text("{a:" + "[" * 30_000 + "}"), f"nests more than {MOST_LEVELS} levels"),
    ("gemma4", "<|tool_call>f{a:1}<tool_call|>", "call: must stand before"),
    ("gemma4", "<|tool_call>call:{}<tool_call|>", "the name of a tool"),
    ("gemma4", "<|tool_call>call:f{a:1}<turn|>", "not closed: <tool_call|> is missing"),
    ("glm", json_text(""), "the name of a tool"),
    ("glm", json_text("f\n{}"), "the name of a tool"),
    ("glm", json_text("f<arg_key>a</arg_key>"), "<arg_value> must stand before ''"),
    ("glm", json_text("f<arg_key>a</arg_key><arg_value>1"), "</arg_value> is missing"),
    ("glm", json_text("f<arg_key>a</arg_key></arg_key><arg_value>1</arg_value>"), "<arg_value> must stand before"),
    ("glm", json_text("f<arg_key>a</arg_key><arg_value>1</arg_value>b"), "<arg_key> must stand before 'b'"),
    ("glm", json_text("f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2), "'a' occurs more than once"),
    (TAGS, "<crop>1", "</crop> is missing"),
    (TAGS, "<crop>1<search>2</search>", "</crop> is missing"),
]


@pytest.mark.parametrize(("form", "text", "words"), BAD)
def test_a_call_that_cannot_be_read_says_why(form: Form, text: str, words: str):
    (call,) = read_calls(text, form)
    assert isinstance(call, BadCall), call
    assert words in call.why and len(call.why) <= MOST_ERROR and len(call.why.splitlines()) == 1
    assert len(call.text) <= MOST_ERROR and call.text[:5] in text


def test_the_calls_around_a_bad_one_are_read():
    good = json_text('{"name": "f"}')
    assert why(*read_calls(good + json_text("x") + good, "hermes"))[::2] == ["read: Call(name='f', arguments={})"] * 2
    assert isinstance(read_calls(good + json_text("x") + good, "hermes")[1], BadCall)


KNOWN = [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("\u25c1think\u25b7", "\u25c1/think\u25b7")]


@pytest.mark.parametrize(("begin", "end"), dict([*KNOWN, *THOUGHTS.items()]).items())
def test_only_calls_behind_the_last_thought_count(begin: str, end: str):
    one, two = json_text('{"name": "one"}'), json_text('{"name": "two"}')
    calls = (Call("two"),)
    assert read_calls(f"{begin}{one}{end}{two}", "hermes") == calls
    assert read_calls(f"{one}{end}{two}", "hermes") == calls  # the prompt has begun the thought
    assert read_calls(f"{begin}{end}{one}{begin} again {end}{two}", "hermes") == calls
    assert read_calls(f"<tool_call> draft {end}{two}", "hermes") == calls
    assert read_calls(f"{begin}{one}", "hermes") == ()
    assert read_calls(f"{begin}{end}{one}{begin}{two}", "hermes") == ()
    assert read_calls(f"{begin}{one}{end}", "hermes") == ()


def test_a_thought_that_the_prompt_began_must_end():
    text = json_text('{"name": "one"}')
    assert read_calls(text, "hermes", in_thought=True) == ()
    assert read_calls(f"</think>{text}", "hermes", in_thought=True) == (Call("one"),)


def test_too_many_calls_are_one_error():
    text = json_text('{"name": "f"}')
    assert read_calls(text * 8, "hermes") == (Call("f"),) * 8
    calls = read_calls(text * 20, "hermes")
    assert calls[:8] == (Call("f"),) * 8 and why(*calls[8:]) == ["only 8 calls of a turn may run"]
    assert why(*read_calls(text * 3 + "<tool_call>", "hermes", 1))[1:] == ["only 1 call of a turn may run"]
    assert why(*read_calls(text + "<tool_call>", "hermes", 1))[1:] == ["only 1 call of a turn may run"]
    assert read_calls(f"{text * 20}<think>", "hermes") == ()


def test_an_unknown_format_and_tags_that_are_none_are_refused():
    with pytest.raises(VlmrlError, match="unknown format of tool calls `hermess`") as error:
        read_calls("", "hermess")
    assert "did you mean `hermes`" in str(error.value)
    for tag in ("think", "a b", "", "1", "a>", "/a"):
        with pytest.raises(VlmrlError, match="cannot be a tag"):
            read_calls("", {tag: "f"})


MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>", "</parameter>"),
    *("<|tool_call>", "<tool_call|>", "call:f{", "}", "{", "[", "]", ":", ",", '<|"|>', "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", '{"name": "f", "arguments": {', "}}", '"a": ', "1", "NaN", "null", "None"),
    *("<crop>", "</crop>", "\ud800", "\n", "a"),
    *THOUGHTS,
    *THOUGHTS.values(),
]
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(st.characters(), max_size=4), max_size=30).map("".join)


@given(TEXTS, st.sampled_from(FORMS), st.integers(0, 4))
@example("\udcff<tool_call>\udcff", "hermes", 4)
def test_every_text_is_read(text: str, form: Form, most: int):
    calls = read_calls(text, form, most)
    assert len(calls) <= most + 1
    for call in calls:
        if isinstance(call, Call):
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
        else:
            assert len(call.why) <= MOST_ERROR >= len(call.text) and len(call.why.splitlines()) == 1


KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | KEYS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=6)
PLAIN_KEYS = st.from_regex(r"[A-Za-z_]\w{0,5}", fullmatch=True)
NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)


@given(NAMES, st.dictionaries(PLAIN_KEYS, VALUES, max_size=4), st.sampled_from(["hermes", "gemma4"]))
@example("f", {"a": {" b": 1, "": 2, "c:d": 3, "{": 4}}, "gemma4")
def test_a_written_call_is_read_again(name: str, arguments: dict[str, Any], form: str):
    """These two formats state the type of each value: every call can be written, apart from one with their marks."""
    call = Call(name, arguments)
    read = read_calls(f"a{write_call(call, form)}b", form)
    assert read == (call,) and json.dumps(sorted_items(read[0])) == json.dumps(sorted_items(call))


def sorted_items(value: Any) -> Any:
    """Return objects as sorted lists, so that 1, 1.0 and true differ in JSON."""
    if isinstance(value, Call):
        value = value.arguments
    if isinstance(value, Mapping):
        return sorted((k, sorted_items(v)) for k, v in value.items())
    return [sorted_items(v) for v in value] if isinstance(value, list) else value


@given(NAMES, st.dictionaries(PLAIN_KEYS, VALUES, max_size=4), st.sampled_from(["qwen_xml", "glm"]))
def test_a_written_call_is_read_again_or_refused_for_a_text_that_looks_like_json(
    name: str, arguments: dict[str, Any], form: str
):
    call = Call(name, arguments)
    try:
        text = write_call(call, form)
    except ValueError:
        assert any(isinstance(v, str) and is_json(v) for v in arguments.values())
    else:
        assert read_calls(text, form) == (call,)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@given(VALUES, st.sampled_from(["crop", "search"]))
def test_a_call_in_own_tags_is_read_again_or_refused(value: Any, tag: str):
    call = Call(TAGS[tag], {"": value})
    try:
        text = write_call(call, TAGS)
    except ValueError:
        assert isinstance(value, str) and is_json(value)
    else:
        assert text.startswith(f"<{tag}>") and read_calls(text, TAGS) == (call,)


@pytest.mark.parametrize(
    ("form", "call", "words"),
    [
        ("hermes", Call("f", {"a": "</tool_call>"}), "would be read as"),
        ("hermes", Call("f", {"a": "</think>"}), "would be read as"),
        ("hermes", Call("f", {"a": "<channel|>"}), "would be read as"),
        ("hermes", Call("f", {"a": float("nan")}), "Out of range"),
        ("hermes", Call("f", {"a": "\ud800"}), "would be read as"),
        ("hermes", Call("f", {"a": {1, 2}}), "no JSON"),
        ("hermes", Call("a b", {}), "would be read as"),
        ("hermes", Call("f", {"a": "b" * MOST_CHARACTERS}), "would be read as"),
        ("qwen_xml", Call("f", {"a": "5"}), "would be read as (Call(name='f', arguments={'a': 5}),)"),
        ("qwen_xml", Call("f", {"a": "true"}), "would be read as"),
        ("qwen_xml", Call("f", {"a": "b</parameter>c"}), "would be read as"),
        ("qwen_xml", Call("f", {"a>b": 1}), "would be read as"),
        ("qwen_xml", Call("f", {" a": 1}), "would be read as"),
        ("qwen_xml", Call("f>", {}), "would be read as"),
        ("gemma4", Call("f", {"a": 'b<|"|>c'}), "would be read as"),
        ("gemma4", Call("f", {"a": "<tool_call|>"}), "would be read as"),
        ("glm", Call("f", {"a": "</arg_value>"}), "would be read as"),
        ("glm", Call("f", {"a": "null"}), "would be read as"),
        (TAGS, Call("zoom", {"box": [1]}), "exactly one argument"),
        (TAGS, Call("zoom", {}), "exactly one argument"),
        (TAGS, Call("other", {"": 1}), "no tag stands for the tool 'other'"),
        (TAGS, Call("zoom", {"": "</crop>"}), "would be read as"),
        (TAGS, Call("zoom", {"": "[1,2]"}), "would be read as"),
    ],
)
def test_a_call_that_would_be_read_as_another_is_not_written(form: Form, call: Call, words: str):
    with pytest.raises(ValueError) as error:
        write_call(call, form)
    assert words in str(error.value)


def crop(box: list[float], label: str = "") -> None: ...


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_format_leaves_open_the_type_of_the_parameter_decides(form: str):
    (call,) = read_calls(write_call(Call("crop", {"box": [1, 2], "label": 5}), form), form)
    assert isinstance(call, Call) and bind(crop, call.arguments) == {"box": [1.0, 2.0], "label": "5"}


SCHEMAS = [
    {"type": "function", "function": {"name": "zoom", "description": "Vergr\u00f6\u00dfere"}},
    {"type": "function", "function": {"name": "find"}},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_system_block_names_the_tools_and_shows_a_call(form: Form):
    text = tools_text(SCHEMAS, form)
    inside = text.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in inside.splitlines()] == SCHEMAS and "Vergr\u00f6\u00dfere" in inside
    behind = text.partition("</tools>")[2]
    if isinstance(form, str):
        assert read_calls(behind, form) == (Call("NAME", {"KEY": "VALUE"}),)
    else:
        assert "<crop>ARGUMENT</crop> calls zoom." in behind and "<search>ARGUMENT</search> calls find." in behind


HOSTILE = {
    "marks": "<tool_call>" * 90_000,
    "calls": "<tool_call></tool_call>" * 45_000,
    "thoughts": "<think>" * 140_000,
    "ends": "</think>" * 120_000,
    "brackets": "[" * 1_000_000,
    "deep": "<tool_call>" + "[" * 60_000 + "</tool_call>",
    "deep gemma": "<|tool_call>call:f{" + "a:[{" * 15_000 + "<tool_call|>",
    "repeated keys": json_text("{" + ",".join(f'"{i}":1' for i in [*range(6000), 5999]) + "}"),
    "parameters": xml_text("".join(f"<parameter={i}></parameter>" for i in range(2000))),
    "open parameters": xml_text("<parameter=a>" * 4500),
    "keys": json_text("f" + "".join(f"<arg_key>{i}</arg_key><arg_value></arg_value>" for i in range(1300))),
    "tags": "<crop><search>" * 70_000,
    "blanks": "<tool_call>" + " " * 1_000_000 + "</tool_call>",
    "a long open call": "<tool_call>" + "ab " * 330_000,
}


@pytest.mark.parametrize("form", FORMATS)
def test_the_text_of_a_turn_keeps_the_marks_of_its_calls_and_guards_all_else(form: str):
    call = Call("zoom", {"box": [1, 2], "note": "<end> é"})

    def guard(value: Any) -> Any:
        return json.loads(json.dumps(value, ensure_ascii=False).replace("<", "\ue000"))

    plain, guarded = turn_text(["A <b>", call, call], form), turn_text(["A <b>", call, call], form, guard)
    assert [text.strip() for text in plain.split(write_call(call, form))] == ["A <b>", "", ""]
    assert guarded.replace("\ue000", "<") == plain and read_calls(plain, form) == (call, call)
    assert re.match("A \ue000b>\n*" + re.escape(FORMATS[form].begin), guarded) and guarded.count("\ue000") == 3
    mark = FORMATS[form].end
    with pytest.raises(ValueError, match="would be read as"):
        turn_text([Call("zoom", {"note": f"{mark} x"})], form, lambda v: {"note": "guarded"})


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_takes_less_than_a_second(text: str):
    """Each takes under 0.2 s; quadratic code takes minutes."""
    for form in FORMS:
        start = time.process_time()
        read_calls(text, form)
        assert time.process_time() - start < 1


def test_reading_imports_neither_torch_nor_transformers_nor_pydantic():
    modules = "torch", "transformers", "pydantic"
    code = f"import sys, vlmrl.environments.calls; print([m for m in {modules} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
