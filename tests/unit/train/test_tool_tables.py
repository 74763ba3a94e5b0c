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
import torch
from tinyworld import image
from transformers.utils.chat_template_utils import render_jinja_template

from vlmrl.data.chat_template import render_chat
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
TOOLS = [{"type": "function", "function": FUNCTION}]


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
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole))
    return str(place / "rows.jsonl")


def items(path: str, encoder: Encoder, stops: tuple[int, ...] = ()) -> list[TrainItem]:
    source = open_source(Data(path=path), Reward(), scored=False)
    params = SamplingParams(stop_ids=(encoder.tokenizer.eos_token_id, *stops))
    recipe = Recipe.model_validate({"kind": "sft", "model": {"path": "m"}, "data": [{"path": path}]})
    feed = PromptFeed(recipe, [source], [], None, encoder, {}, params, {})  # pyright: ignore
    drawn = [(source, row, 0) for row in source.rows]
    return target_items(feed, None, drawn, range(len(drawn)))  # pyright: ignore


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
        calls = [turn_text(t, form) for t in (["I look.", Call("zoom", {"box": [0, 0, 28, 56]})], [Call("zoom", {"box": [1, 2]})])]  # fmt: skip
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
