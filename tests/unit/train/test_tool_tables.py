"""Supervised learning on tables whose chats have tools: the tokens are those that the chat template writes."""

from __future__ import annotations

import importlib.util
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tinyworld import image
from transformers.utils.chat_template_utils import render_jinja_template

from vlmrl.data.encode import Encoder
from vlmrl.data.turns import TurnEncoder
from vlmrl.environments.calls import form_of, tools_text, turn_text
from vlmrl.errors import DataError
from vlmrl.model.packing import TrainItem
from vlmrl.recipe.schema import Data, Recipe, Reward
from vlmrl.tasks.source import open_source
from vlmrl.train.collect import PromptFeed
from vlmrl.train.targets import target_items
from vlmrl.types import Call, Message, SamplingParams

spec = importlib.util.find_spec("trl")
assert spec and spec.origin
TEMPLATES = Path(spec.origin).parent / "chat_templates"
BOX = {"box": [0, 0, 28, 56], "note": "a <|im_end|> b"}
FUNCTION = {
    "name": "zoom",
    "description": "Show a part.",
    "parameters": {"type": "object", "properties": {"box": {"type": "array"}, "note": {"type": "string"}}},
}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": arguments}}


def openai(arguments: Any = json.dumps(BOX)) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "I look.", "tool_calls": [called(arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "here "}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [called({"box": [1, 2]})]},
        {"role": "tool", "content": "nothing <|im_start|>"},
        {"role": "assistant", "content": "A cat."},
    ]


def sharegpt() -> list[dict[str, str]]:
    call = json.dumps({"name": "zoom", "arguments": BOX})
    return [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": "<image>What?"},
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "here <image>"},
        {"from": "function_call", "value": json.dumps([{"name": "zoom", "arguments": {"box": [1, 2]}}])},
        {"from": "observation", "value": "nothing <|im_start|>"},
        {"from": "gpt", "value": "A cat."},
    ]


@pytest.fixture
def place(tmp_path) -> Path:
    for number, name in enumerate(("a", "b")):
        image(number, 56, 56).save(tmp_path / f"{name}.png")
    return tmp_path


def write(place: Path, *rows: dict[str, Any]) -> str:
    whole = [{"images": ["a.png", "b.png"], "tools": TOOLS} | row for row in rows]
    lines = [{name: value for name, value in row.items() if value is not ...} for row in whole]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return str(place / "rows.jsonl")


def items(path: str, encoder: Encoder, stops: tuple[int, ...] = ()) -> list[TrainItem]:
    source = open_source(Data(path=path), Reward(), scored=False)
    params = SamplingParams(stop_ids=(encoder.tokenizer.eos_token_id, *stops))
    recipe = Recipe.model_validate({"kind": "sft", "model": {"path": "m"}, "data": [{"path": path}]})
    feed = PromptFeed(recipe, [source], [], None, encoder, {}, params, {})  # pyright: ignore
    drawn = [(source, row, 0) for row in source.rows]
    return target_items(feed, None, drawn, range(len(drawn)))  # pyright: ignore


def trained(item: TrainItem, encoder: Encoder) -> list[str]:
    return [encoder.tokenizer.decode(s.ids) for s in item.segments if s.trained]


def text_of(item: TrainItem, encoder: Encoder) -> str:
    """The stream as the template writes it: one placeholder for an image."""
    ids = [*item.prompt.ids, *(i for s in item.segments for i in s.ids)]
    token = re.escape(encoder.processor.image_token)
    return re.sub(f"(?:{token})+", lambda _: encoder.processor.image_token, encoder.tokenizer.decode(ids))


@pytest.mark.parametrize("form", ["openai", "arguments as objects", "sharegpt", "sharegpt, tools as text", "trl"])
def test_all_forms_give_the_same_stream(place, tiny_encoder, form):
    row = {
        "openai": {"messages": openai()},
        "arguments as objects": {"messages": openai(BOX)},
        "sharegpt": {"conversations": sharegpt(), "tools": [FUNCTION]},
        "sharegpt, tools as text": {"conversations": json.dumps(sharegpt()), "tools": json.dumps([FUNCTION])},
        "trl": {"messages": openai(BOX), "tools": [json.dumps(TOOLS[0])]},
    }[form]
    [item] = items(write(place, row), tiny_encoder)
    said = "" if "share" in form else "I look.\n"
    one = turn_text([Call("zoom", BOX)], "hermes")
    two = turn_text([Call("zoom", {"box": [1, 2]})], "hermes")
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    edge = "<|im_end|>\n<|im_start|>"
    assert text_of(item, tiny_encoder) == (
        f"<|im_start|>system\n{tools_text(TOOLS, 'hermes')}\n\nBe short.{edge}user\n{picture}What?{edge}assistant\n"
        f"{said}{one}{edge}tool\nhere {picture}{edge}assistant\n{two}{edge}tool\nnothing <|im_start|>{edge}assistant\n"
        "A cat.<|im_end|>"
    )
    assert [(s.role, s.trained, s.author) for s in item.segments] == [
        ("assistant", True, "policy"), ("tool", False, "environment")
    ] * 2 + [("assistant", True, "policy")]  # fmt: skip
    control = tiny_encoder.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    ids = [i for s in item.segments for i in s.ids]
    assert [ids.count(i) for i in control] == [5, 4] and [len(s.media) for s in item.segments] == [0, 1, 0, 0, 0]
    assert item.prompt.num_images == 1 and item.images and sum(item.kinds) == 4
    assert item.segments[1].seen_sizes == ((56, 56),)


FAMILIES = {
    "qwen3_vl": "<|image_pad|>",
    "qwen3_5_nothink": "<|image_pad|>",
    "qwen3_6": "<|image_pad|>",
    "qwen3_8": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "smolvlm": "<image>",
    "idefics3": "<image>",
    "lfm2_2_5_vl": "<image>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "gemma4_v5": "<|image|>",
    "llava_next": "<image>",
}
"""Template of a published model, as TRL ships it -> its placeholder."""
NATIVE = ("qwen3_vl", "qwen3_5_nothink", "qwen3_6", "qwen3_8")
"""Those that write calls and results of tools as we do."""
SPECIAL = re.compile(r"<\|?[A-Za-z_]+\|?>|</s>|<s>")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_stream_is_what_the_template_of_a_family_writes(place, tiny_processor, name):
    template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    processor = deepcopy(tiny_processor)
    processor.chat_template, processor.image_token = template, FAMILIES[name]
    marks = [m for m in dict.fromkeys(SPECIAL.findall(template)) if m not in ("<image>", "<think>")]
    processor.tokenizer.add_special_tokens({"additional_special_tokens": [FAMILIES[name], *marks]})
    encoder = Encoder(processor, min_pixels=784, max_pixels=3136, thinking="off")
    turns, form = TurnEncoder(encoder), form_of(template)
    chat = openai({"box": [0, 0, 28, 56]})
    chat[5]["content"] = "nothing"
    if name in ("gemma3", "llava_next"):  # no system message
        chat = [{**chat[1], "content": [chat[1]["content"][0], {"type": "text", "text": "What?"}]}, *chat[2:]]
    without = {} if name not in ("llava_next",) else {"tools": None}
    [item] = items(write(place, {"messages": chat} | without), encoder, (turns.end_id,))
    said = text_of(item, encoder).removesuffix(processor.tokenizer.eos_token)
    if name in NATIVE:
        chat[4]["content"] = ""
        whole = render_jinja_template([chat], tools=TOOLS, chat_template=template, bos_token="", enable_thinking=False)[
            0
        ][0]
    else:
        turns_with_calls = (["I look.", Call("zoom", {"box": [0, 0, 28, 56]})], [Call("zoom", {"box": [1, 2]})])
        calls = [turn_text(turn, form) for turn in turns_with_calls]
        messages = [
            Message("user", "<image>What?"),
            Message("assistant", calls[0]),
            Message(turns.role, "here <image>"),
        ]
        messages += [Message("assistant", calls[1]), Message(turns.role, "nothing"), Message("assistant", "A cat.")]
        if chat[0]["role"] == "system":
            messages.insert(0, Message("system", "Be short."))
        shown = encoder.with_tools(TOOLS) if not without else encoder
        whole = shown.render(messages)
    for edge in ("Assistant:", "[/INST]"):  # behind these prompts, an answer begins with a space
        whole = whole.replace(f"{edge} ", edge)
    assert whole.startswith(said), (whole, said)
    assert len(whole) - len(said) < 60, whole[len(said) :]
    assert turns.role == ("tool" if name not in ("gemma3", "gemma4", "gemma4_v5", "llava_next") else "user")


def test_nulls_that_arrow_adds_are_no_parameters_and_no_arguments(place, tiny_encoder):
    other = {
        "name": "count",
        "description": None,
        "parameters": {"type": "object", "properties": {"of": {"type": "x"}}},
    }
    call = called({"of": "cats"})
    call["function"]["name"] = "count"
    rows = [
        {"messages": openai(BOX), "tools": TOOLS, "images": ["a.png", "b.png"]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "How many?"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": [{"type": "function", "function": other}],
            "images": [],
        },
    ]
    for row in rows:  # Arrow has one type for a column: a text is a part here
        for turn in row["messages"]:
            if isinstance(turn["content"], str):
                turn["content"] = [{"type": "text", "text": turn["content"]}]
    table = pa.Table.from_pylist(rows)
    assert table["tools"][1].as_py()[0]["function"]["parameters"]["properties"]["box"] is None
    assert table["messages"][1].as_py()[1]["tool_calls"][0]["function"]["arguments"]["box"] is None
    pq.write_table(table, place / "rows.parquet")
    first, second = items(str(place / "rows.parquet"), tiny_encoder)
    [same] = items(write(place, {"messages": openai(BOX)}), tiny_encoder)
    assert text_of(first, tiny_encoder) == text_of(same, tiny_encoder)
    assert trained(second, tiny_encoder) == [turn_text([Call("count", {"of": "cats"})], "hermes") + "<|im_end|>"]
    shown = {"name": "count", "parameters": other["parameters"]}
    tools = tools_text([{"type": "function", "function": shown}], "hermes")
    assert tools in text_of(second, tiny_encoder)


def test_a_null_in_a_json_text_is_an_argument(place, tiny_encoder):
    [item] = items(write(place, {"messages": openai('{"note": null}')}), tiny_encoder)
    assert '"arguments": {"note": null}' in trained(item, tiny_encoder)[0]


def test_of_several_questions_the_turns_behind_the_last_one_are_trained(place, tiny_encoder):
    """As the last turn alone is trained of a chat without tools; all before the first call is the prompt."""
    chat = [
        {"role": "user", "content": "<image>Hello"},
        {"role": "assistant", "content": "Hi."},
        *openai()[1:],
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Again.", "tool_calls": [called({"box": [3, 4]})] * 2},
        {"role": "tool", "content": "left"},
        {"role": "tool", "content": "<image>"},
        {"role": "tool", "content": "right"},
        {"role": "assistant", "content": "Two."},
    ]
    chat[2] = {"role": "user", "content": "What?"}
    [item] = items(write(place, {"messages": chat, "images": ["a.png", "b.png", "a.png"]}), tiny_encoder)
    one = turn_text(["Again.", *[Call("zoom", {"box": [3, 4]})] * 2], "hermes")
    assert trained(item, tiny_encoder) == [f"{one}<|im_end|>", "Two.<|im_end|>"]
    text, edge = text_of(item, tiny_encoder), "<|im_end|>\n<|im_start|>"
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"Hello{edge}assistant\nHi.{edge}user\nWhat?{edge}assistant\nI look.\n<tool_call>" in text
    assert f"A cat.{edge}user\nAnd now?{edge}assistant\nAgain.\n<tool_call>" in text
    assert text.endswith(f"{edge}tool\nleft{picture}right{edge}assistant\nTwo.<|im_end|>")
    assert tiny_encoder.tokenizer.decode(item.prompt.ids).endswith("What?<|im_end|>\n<|im_start|>assistant\n")


def test_images_within_messages_take_their_places(place, tiny_encoder):
    chat = openai()
    for turn, file in ((chat[1], "a.png"), (chat[3], "b.png")):
        turn["content"] = [{"type": "image", "image": file} if p["type"] == "image" else p for p in turn["content"]]
    [item] = items(write(place, {"messages": chat, "images": ...}), tiny_encoder)
    [same] = items(write(place, {"messages": openai()}), tiny_encoder)
    assert text_of(item, tiny_encoder) == text_of(same, tiny_encoder)
    assert [s.media for s in item.segments] == [s.media for s in same.segments]


def test_a_chat_may_end_with_a_call(place, tiny_encoder):
    [item] = items(write(place, {"messages": openai()[:3], "images": ["a.png"]}), tiny_encoder)
    assert trained(item, tiny_encoder) == [turn_text(["I look.", Call("zoom", BOX)], "hermes") + "<|im_end|>"]


def test_a_thought_that_the_prompt_begins_must_end(place, tiny_processor):
    processor = deepcopy(tiny_processor)
    processor.chat_template = (TEMPLATES / "qwen3_6.jinja").read_text("utf-8")
    path = write(place, {"messages": openai()})
    with pytest.raises(DataError, match="</think> is missing, as the prompt begins a thought"):
        items(path, Encoder(processor, min_pixels=784, max_pixels=3136))
    chat = openai()
    for turn in chat[2::2]:
        turn["content"] = f"hm\n</think>\n\n{turn['content'] or ''}"
    encoder = Encoder(processor, min_pixels=784, max_pixels=3136)
    [item] = items(write(place, {"messages": chat}), encoder)
    assert "<|im_start|>assistant\n<think>\nhm\n</think>\n\nI look.\n\n<tool_call>" in text_of(item, encoder)


def test_tools_of_many_rows_do_not_stay_in_memory(tiny_processor, monkeypatch):
    monkeypatch.setattr("vlmrl.data.encode.KEPT_TOOLS", 3)
    encoder, rendered = Encoder(tiny_processor), []
    right = encoder._render
    monkeypatch.setattr(encoder, "_render", lambda *given: rendered.append(given) or right(*given))
    for number in range(8):
        encoder.with_tools([{"type": "function", "function": {**FUNCTION, "name": f"f{number}"}}])
    assert len(encoder._with_tools) <= 3 and len(rendered) <= 3, "whether the template shows tools is tried once"


def bad(number: int, **changes: Any) -> list[dict[str, Any]]:
    chat = openai()
    chat[number] = {**chat[number], **changes}
    return chat


NO_CALL = [*sharegpt()[:2], {"from": "function_call", "value": "zoom()"}]
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no result": ({"messages": [*openai()[:3], *openai()[4:]]}, "a call without a result", "`messages`, message 3"),
    "no call": ({"messages": [*openai()[:2], *openai()[3:]]}, "a result without a call", "`messages`, message 2"),
    "a user's result": ({"messages": bad(3, role="user")}, "a call without a result", "message 3"),
    "two answers": (
        {"messages": [*openai(), openai()[6]]},
        "of role `assistant` behind one of role `assi",
        "message 7",
    ),
    "a system message": ({"messages": [*openai(), openai()[0]]}, "of role `system` behind one", "message 7"),
    "nothing said": ({"messages": bad(4, content="", tool_calls=None)}, "without a text and a call", "message 4"),
    "no answer": ({"messages": openai()[:-1]}, "the chat ends with a message of role `tool`", "`messages`"),
    "no image": ({"images": ["a.png"], "messages": bad(5, content="<image>")}, "2 <image> marks for 1", "`messages`"),
    "a third image": ({"images": ["a.png"] * 3, "messages": openai()}, "has 3 images but its chat has 2", "rows.jsonl"),
    "unknown role": ({"messages": bad(3, role="critic")}, "the role 'critic'", "`messages`, message 3"),
    "no name": ({"messages": bad(2, tool_calls=[{"function": {}}])}, "a tool or its call is {'function'", "message 2"),
    "arguments": ({"messages": openai("{'box': 1}")}, "a call of a tool has the arguments", "message 2"),
    "a list": ({"messages": openai([1])}, "a call of a tool has the arguments", "message 2"),
    "tools": ({"messages": openai(), "tools": ["zoom"]}, "a tool or its call is 'zoom'", "column `tools`"),
    "a number of tools": ({"messages": openai(), "tools": 5}, "a tool or its call is 5", "column `tools`"),
    "a function call that is none": ({"conversations": NO_CALL}, "a tool or its call is 'zoom()'", "message 2"),
    "a mark of the format": ({"messages": openai({"note": "</tool_call>"})}, "cannot be written", "rows.jsonl:1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_chat_is_named_with_row_and_column(place, tiny_encoder, name):
    row, message, where = WRONG[name]
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        items(write(place, row), tiny_encoder)
    assert "rows.jsonl:1" in str(caught.value.where) and where in str(caught.value.where)
