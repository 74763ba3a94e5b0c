"""What servers and proxies do: thoughts beside the content, addresses that are none, proxies for this machine."""

from __future__ import annotations

import json

import httpx
import pytest

from vlmrl.services.client import base_url, open_client
from vlmrl.services.protocol import EndpointError, read_answers


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_beside_the_content_is_joined(name: str) -> None:
    message = {"content": "<answer>3</answer>", name: "two and one"}
    [answer] = read_answers(json.dumps({"choices": [{"message": message}]}).encode())
    assert answer.text == "<think>two and one</think><answer>3</answer>"
    message["content"] = "<think>two and one</think><answer>3</answer>"
    assert read_answers(json.dumps({"choices": [{"message": message}]}).encode())[0].text == message["content"]


@pytest.mark.parametrize("address", ["http://localhost:8000/v1\n/x", "http://local host/v1", "http://localhost/\x00"])
def test_an_address_with_a_line_break_or_a_space_is_refused_at_once(address: str) -> None:
    with pytest.raises(EndpointError, match="not one of http or https"):
        base_url(address)


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    client = open_client(concurrency=1)
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert client._transport_for_url(httpx.URL(f"http://{host}:8000/v1")) is client._transport
    assert client._transport_for_url(httpx.URL("http://example.org/v1")) is not client._transport
