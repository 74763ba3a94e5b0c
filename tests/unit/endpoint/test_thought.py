"""A thought that a server splits off is part of the response, as the model wrote it."""

from __future__ import annotations

import json

import pytest

from vlmrl.endpoint.chat import read_answers


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_beside_the_content_is_joined(name: str) -> None:
    message = {"content": "<answer>3</answer>", name: "two and one"}
    [answer] = read_answers(json.dumps({"choices": [{"message": message}]}).encode())
    assert answer.text == "<think>two and one</think><answer>3</answer>"
    message["content"] = "<think>two and one</think><answer>3</answer>"
    assert read_answers(json.dumps({"choices": [{"message": message}]}).encode())[0].text == message["content"]
