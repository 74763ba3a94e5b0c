"""Tools of verl and clients of OpenEnv as environments: in their own forms, in real processes, over a real socket."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from websockets.sync.server import serve

from vlmrl.environments.adapters import as_observation
from vlmrl.environments.base import EnvironmentLimits, Observation
from vlmrl.environments.processes import Answer, Beginning, EnvironmentPool, load_environment

VERL = '''
"""The forms of verl 0.9: verl.tools.schemas, base_tool and function_tool."""
import asyncio
from typing import Any, Optional
from uuid import uuid4
from pydantic import BaseModel

class Parameters(BaseModel):
    type: str
    properties: dict[str, dict]
    required: list[str] = []

class Function(BaseModel):
    name: str
    description: str
    parameters: Parameters

class OpenAIFunctionToolSchema(BaseModel):
    type: str
    function: Function

class ToolResponse(BaseModel):
    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

class BaseTool:
    def __init__(self, config: dict, tool_schema: Optional[OpenAIFunctionToolSchema]):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, **kwargs):
        return instance_id or str(uuid4()), ToolResponse()

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        pass

class Zoom(BaseTool):
    """`create` gets the image, as in verl's older ImageZoomInTool."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.images, self.released = {}, 0

    async def create(self, instance_id: Optional[str], image, level: int = 1, **kwargs) -> str:
        self.images[instance_id] = image, level
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        await asyncio.sleep(0)
        image, level = self.images[instance_id]
        box = parameters["box"]
        if len(box) != 4:
            return {"text": "a box has four numbers"}, -0.5, {"success": False}
        words = f"{parameters.get('label')} at level {level}, {self.config}"
        return ToolResponse(text=words, image=[image.crop(box)]), 1, {"success": True, "name": "x"}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 0.75

class Own(BaseTool):
    """Its schema is in the code; everything else is verl's default."""

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {
            "name": "hello", "description": "Say hello.", "parameters": {"type": "object", "properties": {}}}})

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=f"hello {bool(instance_id)}"), None, {}

def add(a: int, b: int):
    """Add two numbers. Returns (response, reward, metrics)."""
    return f"{a + b}", 0.5, {"steps": a}

def show():
    """Show a picture."""
    from PIL import Image
    return ToolResponse(text="look", image=[Image.new("RGB", (4, 4))])

TOOLS = [add, show]
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Show a part.",
        "parameters": {
            "type": "object",
            "properties": {
                "box": {"type": "array", "items": {"type": "number"}, "description": "left, top, right, bottom"},
                "label": {"type": "string", "enum": ["cat", "dog"]},
            },
            "required": ["box"],
        },
    },
}
OPENENV = '''
"""Clients of OpenEnv 0.3: openenv.core's EnvClient where it is installed, else its form and its protocol."""
import json
from typing import Any, Generic, TypeVar, Union
from pydantic import BaseModel, Field
try:
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from openenv.core.env_server.types import Action, Observation
except ImportError:
    from dataclasses import dataclass
    from websockets.asyncio.client import connect
    ActT, ObsT, StateT = TypeVar("ActT"), TypeVar("ObsT"), TypeVar("StateT")

    class Action(BaseModel):
        metadata: dict[str, Any] = Field(default_factory=dict)

    class Observation(BaseModel):
        done: bool = False
        reward: bool | int | float | None = None
        metadata: dict[str, Any] = Field(default_factory=dict)

    @dataclass
    class StepResult(Generic[ObsT]):
        observation: ObsT
        reward: float | None = None
        done: bool = False

    class EnvClient(Generic[ActT, ObsT, StateT]):
        def __init__(self, base_url: str):
            self.url, self.ws = base_url.replace("http://", "ws://") + "/ws", None

        async def _ask(self, kind, data):
            self.ws = self.ws or await connect(self.url)
            await self.ws.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self.ws.recv())
            if answer["type"] == "error":
                raise RuntimeError(f"Server error: {answer['data']['message']}")
            return self._parse_result(answer["data"])

        async def reset(self, **kwargs):
            return await self._ask("reset", kwargs)

        async def step(self, action, **kwargs):
            return await self._ask("step", self._step_payload(action))

class ClickAction(Action):
    """Click on a place."""
    x: int = Field(description="pixels from the left")
    y: int

class TypeTextAction(Action):
    """Type a text."""
    text: str
    enter: bool = False

class Screen(Observation):
    title: str = ""
    screenshot: str = ""
    notes: list[str] = Field(default_factory=list)

class Shared:
    def _step_payload(self, action):
        return action if isinstance(action, dict) else {"kind": type(action).__name__, **action.model_dump()}

    def _parse_result(self, payload):
        return StepResult(Screen(**payload["observation"]), payload.get("reward"), payload.get("done", False))

    def _parse_state(self, payload):
        return payload

class Desk(Shared, EnvClient[Union[ClickAction, TypeTextAction], Screen, dict]):
    pass

class Clicks(Shared, EnvClient[ClickAction, Screen, dict]):
    pass

class Anything(Shared, EnvClient[dict, Screen, dict]):
    pass
'''


def png(color: str, size: tuple[int, int] = (32, 24)) -> str:
    sink = io.BytesIO()
    Image.new("RGB", size, color).save(sink, "PNG")
    return base64.b64encode(sink.getvalue()).decode()


@pytest.fixture
def address() -> Iterator[str]:
    """A server of OpenEnv's protocol. A click on (9, 9) ends the episode; y = 13 is an error."""

    def answer(socket: Any) -> None:
        begun = ""
        for text in socket:
            message = json.loads(text)
            data = message.get("data", {})
            if message["type"] == "reset":
                begun = json.dumps(data, sort_keys=True)
                reply: dict[str, Any] = {"observation": {"title": f"begun {begun}", "screenshot": png("red")}}
            elif message["type"] == "step" and data.get("y") == 13:
                socket.send(json.dumps({"type": "error", "data": {"message": "no such place", "code": "X"}}))
                continue
            elif message["type"] == "step":
                seen = {k: v for k, v in data.items() if k != "metadata"}
                image = f"data:image/png;base64,{png('blue')}" if "x" in data else "none <image>"
                reply = {
                    "observation": {
                        "title": json.dumps(seen),
                        "screenshot": image,
                        "notes": ["a", "b"][: data.get("x", 0)],
                    },
                    "reward": 0.25,
                    "done": data.get("x") == 9,
                }
            else:
                return
            socket.send(json.dumps({"type": "observation", "data": reply}))

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"


class Episode:
    """One episode of an environment in a file, with its real processes."""

    def __init__(self, file: Path, name: str, args: dict[str, Any], **start: Any) -> None:
        self.environment = load_environment(f"{file}:{name}", args)
        self.pool = EnvironmentPool(self.environment, "hermes", EnvironmentLimits(tool_seconds=20))
        image = Image.new("RGB", (64, 48), "green")
        facts = {"columns": {}, "truth": {}, "images": [image], "seen_sizes": [], "seed": 2**40 + 7, "prompt": "p"}
        self.pool.begin(0, Beginning(**{**facts, **start}))
        self.first = self.only()

    def __enter__(self) -> Episode:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def only(self) -> Answer:
        ((_, answer),) = self.pool.advance(60)
        assert isinstance(answer, Answer), answer
        return answer

    def call(self, name: str, **arguments: Any) -> Answer:
        self.pool.turn(0, f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
        return self.only()

    def end(self) -> Answer:
        self.pool.finish(0)
        return self.only()

    @property
    def tools(self) -> dict[str, Any]:
        return {tool["function"]["name"]: tool["function"] for tool in self.environment.described[""].tools}


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    (tmp_path / "verl_tools.py").write_text(VERL)
    return tmp_path / "verl_tools.py"


@pytest.fixture
def openenv(tmp_path: Path) -> Path:
    (tmp_path / "clients.py").write_text(OPENENV)
    return tmp_path / "clients.py"


def shown(answer: Answer) -> str:
    return " ".join(part if isinstance(part, str) else str(Image.open(io.BytesIO(part)).size) for part in answer.parts)


@pytest.mark.parametrize("as_text", [True, False])
def test_verls_tool_gets_its_settings_and_its_result_is_shown(verl: Path, as_text: bool) -> None:
    args = {"config": {"rate": 2}, "tool_schema": SCHEMA}
    args = {k: json.dumps(v) for k, v in args.items()} if as_text else args
    own = {"zoom": {"create_kwargs": {"level": 3}}}
    # A tool of verl may compute its reward from the truth: its settings hold it, and are not kept back.
    row = {"extra_info": {"tools_kwargs": own, "answer": 3}} if as_text else {"tools_kwargs": own}
    with Episode(verl, "Zoom", args, columns=row, truth={"answer": 3}) as episode:
        assert episode.tools["zoom"] == SCHEMA["function"] and episode.first.parts == []
        assert not episode.environment.described[""].is_open
        answer = episode.call("zoom", box=[0, 0, 20, 10], label="cat")
        assert shown(answer) == "(20, 10) cat at level 3, {'rate': 2}" and not answer.errors
        assert answer.measured == {"success": 1.0, "tool_reward": 1.0}
        answer = episode.call("zoom", box=[1])
        assert shown(answer) == "a box has four numbers" and answer.measured == {"success": 0.0, "tool_reward": 0.5}
        for wrong, words in (({}, "missing argument `box`"), ({"box": [1], "label": "cow"}, "one of"), ({"x": 1}, "x")):
            answer = episode.call("zoom", **wrong)
            assert answer.errors == 1 and shown(answer).startswith("error:") and words in shown(answer)
        assert episode.end().measured == {"reward": 0.75}


def test_verls_tool_with_a_schema_of_its_own_needs_no_arguments(verl: Path) -> None:
    with Episode(verl, "Own", {}) as episode:
        assert episode.tools["hello"]["description"] == "Say hello."
        answer = episode.call("hello")
        assert (shown(answer), answer.measured, answer.errors) == ("hello True", {}, 0)
        assert episode.end().measured == {"reward": 0.0}


def test_verls_function_tools_are_functions(verl: Path) -> None:
    with Episode(verl, "TOOLS", {}) as episode:
        assert list(episode.tools) == ["add", "show"]
        answer = episode.call("add", a=2, b=3)
        assert (shown(answer), answer.measured) == ("5", {"steps": 2.0, "tool_reward": 0.5})
        assert episode.call("add", a=1, b=3).measured == {"steps": 1.0, "tool_reward": 1.0}, "the sum of an episode"
        assert shown(episode.call("show")) == "(4, 4) look"


def test_a_client_has_a_tool_for_each_type_of_action(openenv: Path, address: str) -> None:
    args = {"base_url": address, "row": ["level"]}
    with Episode(openenv, "Desk", args, columns={"level": 4, "other": 5}) as episode:
        assert list(episode.tools) == ["click", "type_text"]
        click = episode.tools["click"]
        assert click["description"] == "Click on a place." and click["parameters"]["required"] == ["x", "y"]
        assert list(click["parameters"]["properties"]) == ["x", "y"], "without OpenEnv's metadata"
        assert click["parameters"]["properties"]["x"]["description"] == "pixels from the left"
        # The seed is 2**40 + 7: servers hand it to libraries that take 32 bits.
        assert shown(episode.first) == '(32, 24) begun {"level": 4, "seed": 7}'
        answer = episode.call("click", x=1, y="2")
        assert shown(answer) == '(32, 24) title: {"kind": "ClickAction", "x": 1, "y": 2}\nnotes: ["a"]'
        assert answer.measured == {"reward": 0.25} and answer.done is None
        answer = episode.call("type_text", text="hi")
        assert '"enter": false' in shown(answer) and "screenshot: none <image>" in shown(answer)
        assert answer.measured == {"reward": 0.5}, "the sum of an episode"
        answer = episode.call("click", x=1, y=13)
        assert answer.errors == 1 and "no such place" in shown(answer)
        assert episode.call("click", x=9, y=0).done == "done"


def test_a_client_with_one_type_of_action_has_the_tool_step(openenv: Path, address: str) -> None:
    with Episode(openenv, "Clicks", {"base_url": address}) as episode:
        assert list(episode.tools) == ["step"] and episode.tools["step"]["description"] == "Click on a place."
        assert '"y": 2' in shown(episode.call("step", x=1, y=2))


def test_a_client_whose_actions_are_dicts_takes_any(openenv: Path, address: str) -> None:
    with Episode(openenv, "Anything", {"base_url": address}) as episode:
        assert '"free": 1' in shown(episode.call("step", action={"free": 1}))


def test_a_server_that_does_not_answer_is_a_fault_of_the_environment(openenv: Path) -> None:
    with pytest.raises(AssertionError, match="Stopped"):
        Episode(openenv, "Clicks", {"base_url": "http://127.0.0.1:9"})


@pytest.mark.parametrize(
    "result",
    ["text", 5, None, ("a", 1.0), ["a", 1.0, {}], {"text": "a"}, {"observation": 1}, ("a", 1.0, 2.0), Observation("x")],
)
def test_other_results_stay_as_they_are(result: Any) -> None:
    sums: dict[str, float] = {}
    assert as_observation(result, sums) is result and sums == {}


@pytest.mark.parametrize(
    "text", ["iVBORw0KGgo" + "A" * 80, "data:image/png;base64," + "A" * 80, "data:image/png;base64,!"]
)
def test_a_text_that_only_looks_like_a_picture_is_a_text(text: str) -> None:
    assert as_observation((text, 0.0, {}), {}) == Observation(text, [], False, {"tool_reward": 0.0})
