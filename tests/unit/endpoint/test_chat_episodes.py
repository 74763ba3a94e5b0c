"""Episodes of a model behind an endpoint: its calls are run, and what tools return goes back as messages."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from desk_tools import DESK
from endpoint_server import Behaviour, Endpoint, Reply, completion, failure, plays, serve_endpoint, turn
from PIL import Image
from tinyworld import mixed_prompts

from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.data.turns import TurnEncoder
from vlmrl.environments.base import EnvironmentLimits
from vlmrl.environments.processes import EnvironmentPool, load_environment
from vlmrl.rewards.scoring import Scorer
from vlmrl.rollout.chat import ChatEngine, ChatPrompt, ChatWriter, FourCharacters
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.episodes import CUT_MARK, EpisodeEngine, EpisodeKind, EpisodeLimits
from vlmrl.rollout.sample import Prompt, Rollout, score_rollouts
from vlmrl.services.client import EndpointClient, EndpointOptions
from vlmrl.services.protocol import ChatTurn, RequestRefused, Withheld
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Call, RewardInput, Row, Sample, SamplingParams, hash64

LIMITS = EpisodeLimits(turns=3, tokens=4000, images=4, observation_tokens=64, seconds=60)
WHOLE = replace(LIMITS, observation_tokens=512)
PARAMS = SamplingParams(0.0, max_new_tokens=300)
ADD, LOOK = ("add", '{"a": 1, "b": 2}'), ("look", "{}")
Play = Callable[..., tuple[list[Sample], Endpoint]]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("desk") / "desk.py"
    path.write_text(DESK)
    return path


@pytest.fixture
def play(file: Path) -> Play:
    """Runs episodes at a server of one's own."""

    def played(
        behaviour: Behaviour,
        limits: EpisodeLimits = LIMITS,
        *,
        name: str = "Desk",
        form: Any = "hermes",
        params: SamplingParams = PARAMS,
        num: int = 1,
        start: EncodedPrompt | None = None,
        **more: Any,
    ) -> tuple[list[Sample], Endpoint]:
        environment = load_environment(f"{file}:{name}", {})
        pool = EnvironmentPool(environment, form, EnvironmentLimits(**{"tool_seconds": 5.0, **more}))
        own = start or EncodedPrompt(Row("1", "s", "t", {}), "user: do it", (), (), {}, 0, 0, ())
        tools, user = environment.described[""].tools, ChatTurn("user", ("do it ",))
        chats = [(ChatTurn("system", (str(k),)), user) if num > 1 else (user,) for k in range(num)]
        prompts = [ChatPrompt(**vars(own), chat=chat, tools=tools) for chat in chats]
        kinds = {"s": EpisodeKind(pool, limits, lambda row: ChatWriter(name == "Shows"))}
        with serve_endpoint(behaviour) as endpoint:
            client = EndpointClient(EndpointOptions(endpoint.address, "m", attempts=1))
            engine = EpisodeEngine(ChatEngine(client), kinds, FourCharacters())
            try:
                groups = engine.generate([SamplingRequest(p, 1, 7 + k) for k, p in enumerate(prompts)], params)
            finally:
                engine.close()
                client.close()
        return [sample for group in groups for sample in group], endpoint

    return played


def pixels(part: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition("base64,")[2])))


def test_calls_are_run_and_answered_by_their_ids(play: Play) -> None:
    (sample,), endpoint = play(plays(turn("I add.", ADD, ("add", '{"a": 5, "b": "6"}')), turn("3 and 11")))
    first, second = endpoint.bodies
    assert [tool["function"]["name"] for tool in first["tools"]][:2] == ["add", "look"]
    assert first["tools"][0]["function"]["parameters"]["required"] == ["a", "b"] and second["tools"] == first["tools"]
    assert first["messages"] == [{"role": "user", "content": "do it "}]
    said, *answers = second["messages"][1:]
    assert (said["role"], said["content"]) == ("assistant", "I add.")
    assert said["tool_calls"] == [
        {"id": f"id-add-{i}", "type": "function", "function": {"name": "add", "arguments": text}}
        for i, text in enumerate([ADD[1], '{"a": 5, "b": "6"}'])
    ]
    assert answers == [
        {"role": "tool", "content": f"sum {n}", "tool_call_id": f"id-add-{i}"} for i, n in enumerate((3, 11))
    ]
    assert (sample.ending, sample.finish, sample.measured, sample.num_sampled_tokens) == (
        "answer", "stop", {"reward": 0.5}, 14,
    )  # fmt: skip
    assert [t.role for t in sample.turns] == ["assistant", "tool", "assistant"]
    assert sample.turns[0].calls == (Call("add", {"a": 1, "b": 2}), Call("add", {"a": 5, "b": "6"}))
    assert sample.turns[0].text == (
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": "6"}}\n</tool_call>'
    )
    assert (sample.turns[1].text, sample.turns[2].text) == ("sum 3\nsum 11", "3 and 11")


def test_pictures_of_tools_follow_in_a_turn_of_the_user(play: Play) -> None:
    (sample,), endpoint = play(plays(turn(None, LOOK, ADD, ("look", '{"side": 84}')), turn("seen")))
    said, *answers, user = endpoint.bodies[1]["messages"][1:]
    assert said["content"] is None and [a["tool_call_id"] for a in answers] == ["id-look-0", "id-add-1", "id-look-2"]
    marks = ["[image 1 of id-look-0]", "[image 2 of id-look-2]"]
    assert [a["content"] for a in answers] == [f"before{marks[0]}behind", "sum 3", f"before{marks[1]}behind"]
    assert user["role"] == "user" and [part.get("text") for part in user["content"]] == [marks[0], None, marks[1], None]
    assert [pixels(user["content"][i]).size for i in (1, 3)] == [(56, 28), (84, 28)]
    assert pixels(user["content"][3]).getpixel((0, 0)) == (84, 90, 200)
    assert [(m.width, m.height) for m in sample.turns[1].media] == [(56, 28), (84, 28)]
    assert sample.turns[1].seen_sizes == ((56, 28), (84, 28)) and len(sample.files) == 2


def test_calls_beyond_the_limit_of_a_turn_are_answered_by_an_error(play: Play) -> None:
    (sample,), endpoint = play(plays(turn(None, *[ADD] * 5), turn("ok")), WHOLE, calls=3)
    answers = endpoint.bodies[1]["messages"][2:]
    assert [a["content"] for a in answers[:3]] == ["sum 3"] * 3 and sample.turns[1].errors == 1
    assert {a["content"] for a in answers[3:]} == {
        "error: the call cannot be read: only 3 calls of a turn may run"
    } and len(answers) == 5


BROKEN = [
    (("add", '{"a": 1'), "error: the call cannot be read"),
    (("add", "[1, 2]"), "error: the call cannot be read: the arguments of a call are an object"),
    (("add", '{"a": 1, "a": 2, "b": 0}'), "error: the call cannot be read"),
    (("add", '{"a": NaN, "b": 0}'), "error: the call cannot be read"),
    (("add", '{"a": "\\ud800", "b": 0}'), "half of a surrogate pair"),
    (("add", '{"a": "' + "x" * 70_000 + '"}'), "more than 65,536 characters"),
    (("add", "[" * 4000 + "]" * 4000), "nests more than 50 levels"),
    (("rm -rf", "{}"), "error: the call cannot be read: the name of a tool"),
    (("steal", "{}"), "error: there is no tool 'steal'; the tools are add"),
    (("add", '{"a": 1}'), "error: missing argument `b`"),
]


def test_broken_calls_are_observations(play: Play) -> None:
    limits = replace(LIMITS, observation_tokens=2000)
    (sample,), endpoint = play(plays(turn(None, *(call for call, _ in BROKEN), ADD), turn("well")), limits, calls=20)
    said, *answers = endpoint.bodies[1]["messages"][1:]
    for (call, words), sent, answer in zip(BROKEN, said["tool_calls"], answers, strict=False):
        assert answer["content"].startswith("error: ") and words in answer["content"], (call, answer)
        assert len(answer["content"]) < 300 and (sent["function"]["name"], sent["function"]["arguments"]) == call
    assert answers[-1]["content"] == "sum 3" and len(answers) == len(BROKEN) + 1
    assert (sample.turns[1].errors, sample.ending, sample.fault) == (len(BROKEN), "answer", "")
    assert [call.name for call in sample.turns[0].calls] == [""] * 8 + ["steal", "add", "add"]


def test_arguments_may_hold_the_marks_of_calls_and_thoughts(play: Play) -> None:
    text = "</tool_call></think><think>"
    (sample,), _ = play(plays(turn("<think>x", ("add", f'{{"a": "{text}", "b": 2}}')), turn("ok")))
    assert sample.turns[0].calls == (Call("add", {"a": text, "b": 2}),) and text in sample.turns[0].text
    assert "`a` must be a whole number" in sample.turns[1].text


def test_calls_that_are_written_as_text_are_read_and_answered_by_the_user(play: Play) -> None:
    text = 'so <tool_call>{"name": "look"}</tool_call>'
    (sample,), endpoint = play(plays(completion(text), completion("done")))
    assert endpoint.bodies[1]["messages"][1] == {"role": "assistant", "content": text}
    user = endpoint.bodies[1]["messages"][2]
    assert user["role"] == "user" and [p.get("text") for p in user["content"]] == ["before", None, "behind"]
    assert [t.role for t in sample.turns] == ["assistant", "tool", "assistant"] and sample.turns[0].text == text


def test_own_tags_are_read_as_text(play: Play) -> None:
    (sample,), endpoint = play(plays(completion("<say>2</say>"), completion("done")), form={"say": "tell"})
    assert endpoint.bodies[1]["messages"][-1] == {"role": "user", "content": "word word "}
    assert sample.turns[0].calls == (Call("tell", {"": 2}),)


def test_what_reset_shows_goes_on_with_the_prompt(play: Play) -> None:
    (sample,), endpoint = play(plays(turn("yes")), name="Shows")
    (message,) = endpoint.bodies[0]["messages"]
    assert [p.get("text") for p in message["content"]] == ["do it ", "seed ", None, "7"]
    assert [t.role for t in sample.turns] == ["user", "assistant"] and sample.turns[0].text == "seed 7"


@pytest.mark.parametrize(
    ("limits", "call", "ending"),
    [
        ({"turns": 1}, ADD, "turn limit"),
        ({"images": 0}, LOOK, "image limit"),
        ({"seconds": 0.0}, ADD, "time limit"),
        ({"tokens": 300 + 7 + 1}, ADD, "token limit"),
        ({}, ("leave", "{}"), "done"),
        ({}, ("hang", "{}"), "time limit"),
    ],
)
def test_an_episode_ends_as_in_training(play: Play, limits: dict[str, Any], call: tuple[str, str], ending: str) -> None:
    fast = {"tool_seconds": 0.3} if call[0] == "hang" else {}
    (sample,), endpoint = play(plays(turn("now", call)), replace(LIMITS, **limits), **fast)
    assert (sample.ending, len(endpoint.requests), len(sample.turns)) == (ending, 1, 1)
    assert (sample.finish == "length") == (ending != "done") and sample.measured.get("left") == (
        1.0 if ending == "done" else None
    )


def test_a_turn_begins_if_a_whole_one_fits(play: Play) -> None:
    # 7 tokens of the turn, 2 of `sum 3`, and a whole turn.
    (sample,), _ = play(plays(turn(None, ADD), turn("ok")), replace(LIMITS, tokens=309))
    assert sample.ending == "answer"


def test_a_tool_over_its_time_is_an_error_and_a_turn_over_its_length_an_end(play: Play) -> None:
    (sample,), _ = play(plays(turn(None, ("sleep", '{"seconds": 30}')), turn("late")), tool_seconds=0.2)
    assert sample.turns[1].text == "error: sleep took more than 0.2 s" and sample.ending == "answer"
    (sample,), _ = play(plays(turn("long", ADD, finish="length")))
    assert (sample.ending, len(sample.turns)) == ("turn cut", 1)


def test_a_long_observation_is_cut_in_the_middle(play: Play) -> None:
    (sample,), endpoint = play(plays(turn(None, ("tell", '{"length": 500}')), turn("ok")))
    text = endpoint.bodies[1]["messages"][-1]["content"]
    assert text == sample.turns[1].text and CUT_MARK in text and len(text) == 64 * 4 + len(CUT_MARK)


def test_a_service_that_is_down_is_an_outage(play: Play) -> None:
    (sample,), _ = play(plays(turn(None, ("call_out", "{}"))))
    assert sample.is_outage and "the service is down" in sample.fault and sample.error is None


def test_a_refused_turn_is_an_empty_last_one_and_named(play: Play) -> None:
    (sample,), _ = play(plays(turn("x", ADD), failure(400, "too long")))
    assert isinstance(sample.error, RequestRefused) and "too long" in str(sample.error)
    assert [t.text for t in sample.turns][1:] == ["sum 3", ""] and sample.ending == "answer"
    (sample,), endpoint = play(plays(turn("filtered", ADD, finish="content_filter")))
    assert isinstance(sample.error, Withheld) and len(endpoint.requests) == 1 and sample.turns[0].calls == ()
    (sample,), endpoint = play(plays(completion(CALL, finish="content_filter")))
    assert isinstance(sample.error, Withheld) and len(endpoint.requests) == 1 and sample.turns[0].calls == ()


def test_stop_strings_end_a_turn_in_front_of_its_calls(play: Play) -> None:
    (sample,), _ = play(plays(turn("so yes and", ADD)), params=replace(PARAMS, stop=("yes",)))
    assert (sample.text, sample.ending) == ("so yes", "answer")


def test_grey_pictures_are_sent_for_blank_tools(play: Play) -> None:
    _, endpoint = play(plays(turn(None, LOOK), turn("ok")), grey_images=True)
    assert pixels(endpoint.bodies[1]["messages"][-1]["content"][1]).getpixel((0, 0)) == (128, 128, 128)


def test_many_episodes_are_open_at_once_with_seeds_of_their_own(play: Play) -> None:
    warm = replace(PARAMS, temperature=0.7)
    samples, endpoint = play(plays(turn(None, ("sleep", '{"seconds": 0.2}')), turn("ok")), params=warm, num=12)
    assert [s.seed for s in samples] == [7 + k for k in range(12)] and {s.ending for s in samples} == {"answer"}
    seeds = [body["seed"] for body in endpoint.bodies]
    assert len(set(seeds)) == len(seeds) == 24 and max(seeds) < 2**31


def strange(message: dict[str, Any]) -> Reply:
    import json

    choice = {"message": {"role": "assistant", "content": None, **message}, "finish_reason": "tool_calls"}
    return Reply(body=json.dumps({"choices": [choice]}).encode())


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
        {"id": None, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {"id": 5, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}, "index": 3},
    ],
)
def test_calls_of_other_servers_are_read(play: Play, call: dict[str, Any]) -> None:
    (sample,), endpoint = play(plays(strange({"tool_calls": [call]}), turn("ok")))
    assert sample.turns[1].text == "sum 3"
    said, answer = endpoint.bodies[1]["messages"][1:]
    assert said["tool_calls"][0]["id"] == answer["tool_call_id"] and isinstance(answer["tool_call_id"], str)


def test_a_thought_that_the_server_has_split_off_stays_with_the_turn(play: Play) -> None:
    call = {"function": {"name": "add", "arguments": ADD[1]}}
    (sample,), endpoint = play(plays(strange({"tool_calls": [call], "reasoning_content": "so"}), turn("ok")))
    assert endpoint.bodies[1]["messages"][1]["content"] == "<think>so</think>" and sample.turns[1].text == "sum 3"
    assert sample.turns[0].text.startswith('<think>so</think>\n<tool_call>\n{"name": "add"')


@pytest.mark.parametrize("calls", ["add", [{"function": None}], [5], {"a": 1}, [{"id": "1"}]])
def test_calls_of_a_wrong_form_are_a_broken_answer(play: Play, calls: Any) -> None:
    (sample,), _ = play(plays(strange({"tool_calls": calls})))
    assert "cannot be read" in str(sample.error)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SEE = '<tool_call>\n{"name": "look", "arguments": {"side": 84}}\n</tool_call>'
LEAVE = '<tool_call>{"name": "leave"}</tool_call>'


SAID = [
    ["no call"],
    [CALL, "3"],
    [f"two{CALL}{SEE}", "seen"],
    ['<tool_call>{"name": "add", "arg</tool_call>', "x"],
    ['<tool_call>{"name": "sub"}</tool_call>', SEE, "y"],
    [CALL, CALL, CALL],
    [f"{CALL}{LEAVE}{CALL}"],
    ['<tool_call>{"name": "look"}</tool_call>' * 5],
    ["<think>" + CALL],
]


REWARD = """
def reward(x):
    calls = [call.name for turn in x.turns for call in turn.calls]
    sizes = sum(w for image in x.images for w in image.size)
    return len(x.response) + 1000 * len(calls) + sizes / 7 + x.measured["reward"] + len(x.answer) / 3 + len(x.finish)

NEEDS_IMAGES = True
"""


class Says(Generator):
    """A local engine that says the same. A seed names the episode and its turn."""

    version, copies_weights, works_alone, admits = 0, False, False, True

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.open = encoder, list[tuple[int, int]]()
        turns = [(k, n) for k, texts in enumerate(SAID) for n in range(len(texts))]
        self.of_seed = {hash64(7 + k, n) >> 1 if n else 7 + k: (k, n) for k, n in turns}

    @contextmanager
    def round(self, progress: Any = None) -> Iterator[None]:
        yield

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        self.open.append((len(self.open), request.seed))
        return len(self.open) - 1

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        ready, samples = [one for one in self.open if one[1]], []
        for number, seed in ready:
            self.open[number] = (number, 0)
            k, n = self.of_seed[seed]
            ids = (*self.encoder.encode_text(SAID[k][n]), self.encoder.tokenizer.eos_token_id)
            samples.append((number, [Sample(ids, SAID[k][n], (-1.0,) * len(ids), "stop", 0, seed)]))
        return samples

    def close(self) -> None:
        pass

    sleep = wake = close

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        pass


class OneRow:
    """The source of the row."""

    name, task_name = "s", "t"

    def reward_input(self, row: Row, text: str, finish: Any, num_tokens: int, prompt: str) -> RewardInput:
        return RewardInput(text, {}, {}, [Image.new("RGB", (56, 28))], finish, num_tokens, prompt)


@pytest.mark.parametrize("name", ["Desk", "Shows"])
def test_an_endpoint_that_says_the_same_gives_the_same_episodes_and_scores(
    play: Play, file: Path, tiny_encoder: Any, name: str, tmp_path: Path
) -> None:
    encoder = tiny_encoder.with_tools((), is_open=name == "Shows")
    prompt = next(p for p in mixed_prompts(encoder) if p.num_images == 1)
    prompt = replace(prompt, row=replace(prompt.row, source="s"))
    pool = EnvironmentPool(load_environment(f"{file}:{name}", {}), "hermes", EnvironmentLimits(tool_seconds=5.0))
    turns, eos = TurnEncoder(encoder), tiny_encoder.tokenizer.eos_token_id
    kinds = {"s": EpisodeKind(pool, WHOLE, lambda row: turns)}
    engine: Any = EpisodeEngine(Says(tiny_encoder), kinds, tiny_encoder.tokenizer)
    requests = [SamplingRequest(prompt, 1, 7 + k) for k in range(len(SAID))]
    try:
        local = [group[0] for group in engine.generate(requests, replace(PARAMS, stop_ids=(eos,)))]
    finally:
        engine.close()

    def says(number: int, body: dict[str, Any]) -> Reply:
        texts = SAID[int(body["messages"][0]["content"])]
        return plays(*map(completion, texts))(number, body)

    served, _ = play(says, WHOLE, name=name, start=prompt, num=len(SAID))

    def facts(sample: Sample) -> Any:
        # The time of tools differs, and a resize is on the server's side.
        turns = [replace(t, seconds=0.0, seen_sizes=()) for t in sample.turns]
        roles = [(part.role, part.author, part.media) for part in sample.segments]
        more = sample.ending, sample.finish, sample.measured, sample.files, sample.seed, sample.fault
        return turns, sample.text, roles, *more

    (tmp_path / "r.py").write_text(REWARD)
    with Scorer(load_reward("r.py:reward", base_dir=tmp_path)) as scorer:
        source: Any = OneRow()
        rollouts = [Rollout(Prompt(source, prompt.row, 0, prompt), tuple(ones), 0.0) for ones in (served, local)]
        groups = score_rollouts(rollouts, {"s": scorer}, strict=True)
    scores = [[s.score.value for s in group.samples] for group in groups]
    assert scores[0] == scores[1] and len(set(scores[0])) == len(SAID)
    for texts, one, other in zip(SAID, served, local, strict=True):
        assert facts(one) == facts(other)
        assert [t.text for t in one.turns if t.role == "assistant"] == texts
    assert [s.ending for s in served] == [*["answer"] * 5, "turn limit", "done", "image limit", "answer"]
