"""Processes of environments: what tools return, what goes wrong in them, and what is left of them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from processes import assert_all_gone

from vlmrl.environments.base import CUT_MARK, EnvironmentLimits
from vlmrl.environments.processes import (
    Answer,
    Beginning,
    EnvironmentPool,
    LoadedEnvironment,
    Stopped,
    load_environment,
)
from vlmrl.environments.row_fields import repeats_of
from vlmrl.errors import RewardError
from vlmrl.recipe.schema import Environment
from vlmrl.rewards.identity import changed_files
from vlmrl.setup.run_records import _environment_change
from vlmrl.types import Call

TOOLS = '''
from __future__ import annotations
import asyncio, os, signal, subprocess, time
import numpy
from PIL import Image
from vlmrl.environments.base import EnvironmentUnavailable, Observation, Start

HELD = bytearray(8)
LOOPS = []

def zoom(start: Start, box: list[int]):
    """Show a part of the picture."""
    return start.images[0].crop(tuple(box))

def nap(seconds: float):
    """Sleep."""
    time.sleep(seconds)
    return "slept"

def stuck():
    """Never come back, whatever the signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    while True:
        pass

def die():
    """End the process."""
    os._exit(3)

def kill(word: str):
    """Kill the process."""
    os.kill(os.getpid(), signal.SIGKILL)

def ask(start: Start):
    """Read a column."""
    return start.columns["prices"]

def boom():
    """Raise."""
    raise ValueError("no")

def lookup(word: str):
    """Ask a service."""
    raise EnvironmentUnavailable("the dictionary at dict:80 is down")

def count():
    """Count the calls of this episode."""
    HELD[0] += 1
    return int(HELD[0])

def blocks():
    """Return a text, a picture and a text."""
    image = Image.new("RGB", (20, 10), "blue")
    return [{"type": "text", "text": "a <image>"}, {"type": "image", "image": image}, "b"]

def placed():
    """Return an observation with a place for its picture."""
    return Observation("left <image> right", [Image.new("RGB", (8, 8))], measured={"steps": 2})

def missing(code: str):
    """Need a package, or run the code of a model, which may need one."""
    if code:
        exec(code)
    import no_such_package

def last():
    """End the episode."""
    return Observation(done=True, measured={"won": 1})

def children():
    """Leave a process behind, out of this session."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

def greedy():
    """Use too much memory."""
    return len(bytearray(1 << 40))

def large():
    """Return a large picture."""
    return Image.new("RGB", (400, 100))

def page(parts: int):
    """Return a long text at once, or many of them."""
    texts = [text for _ in range(parts) for text in ("a" * 700_000 + "z" * 700_000, Image.new("RGB", (4, 4)))]
    return texts if parts > 1 else texts[0]

def gallery():
    """Return too many pictures."""
    return [Image.new("RGB", (4, 4))] * 65

async def later(x: int):
    """Answer later, in the same loop as before."""
    loop = asyncio.get_running_loop()
    LOOPS.append(loop)
    return x + 1 if LOOPS[0] is loop else -1

def patterns():
    """Return how many tables of secrets' patterns this process has before it has seen any text."""
    from vlmrl.redaction.secrets import scanner_shapes
    return scanner_shapes.cache_info().currsize

def product(start: Start):
    """Work with numpy."""
    return float((numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum())

TOOLBOX = [zoom, nap, stuck, die, boom, count, blocks, placed, last, children, greedy, large, page, gallery, later,
    product, missing, lookup, patterns, kill, ask]

class Crop:
    def __init__(self, scale=1):
        self.scale = scale
    def reset(self, answer, images, **row):
        self.row = row | {"answer": answer}
    def step(self):
        """A tool called as a hook of other libraries."""
        return str(sorted(self.row)) + str(self.scale)
    def get_reward(self):
        return 0.25

class Broken(Crop):
    def reset(self, **row):
        raise KeyError("no such row")

class Reads(Crop):
    def reset(self, **row):
        self.row = row["prices"]

class Down(Crop):
    def reset(self, **row):
        raise EnvironmentUnavailable()

class Needs:
    def reset(self, height, **row):
        pass
    def look(self):
        return 1
    def get_reward(self):
        return "high"

CHOICE = {"crop": Crop, "broken": Broken, "down": Down, "reads": Reads, "needs": Needs}
'''
LIMITS = EnvironmentLimits(tool_seconds=0.5, memory_mb=2048, workers=3, image_pixels=10_000)
PICTURE = Image.new("RGB", (64, 48), "red")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    return path


HANGS = """
import time
class Hangs:
    def reset(self, **row):
        while True:
            try:
                time.sleep(60)
            except Exception:
                pass
    def look(self):
        return "never"
"""


class Place:
    """A pool, and a way to ask it for one answer."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool

    def begin(self, key: Any = 0, **more: Any) -> Answer | Stopped:
        facts = {"columns": {}, "truth": {}, "images": [PICTURE], "seen_sizes": [(28, 28)], "seed": 1, "prompt": "p"}
        self.pool.begin(key, Beginning(**{**facts, **more}))
        return self.only()

    def call(self, name: str, key: Any = 0, **arguments: Any) -> Answer | Stopped:
        self.pool.turn(key, f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
        return self.only()

    def only(self) -> Answer | Stopped:
        ((_, outcome),) = self.pool.advance()
        return outcome


@contextmanager
def opened(environment: LoadedEnvironment | str, limits: EnvironmentLimits = LIMITS) -> Iterator[Place]:
    """A pool of an environment, closed at the end."""
    loaded = load_environment(environment, {}) if isinstance(environment, str) else environment
    with closing(EnvironmentPool(loaded, "hermes", limits)) as pool:
        yield Place(pool)


@pytest.fixture(scope="module")
def shared(file: Path):
    with opened(f"{file}:TOOLBOX") as place:
        yield place


@pytest.fixture(scope="module")
def choice(file: Path):
    with opened(f"{file}:CHOICE") as place:
        yield place


@pytest.fixture
def place(shared: Place):
    """An episode that has begun."""
    answer = shared.begin()
    assert isinstance(answer, Answer) and answer.parts == [] and answer.done is None
    yield shared
    shared.pool.drop(0)
    assert shared.pool.pids() == [] and not shared.pool.pending


def test_a_tool_returns_a_picture_as_png(place: Place) -> None:
    answer = place.call("zoom", box=[0, 0, 10, 20])
    assert isinstance(answer, Answer) and answer.done is None and answer.errors == 0
    (part,) = answer.parts
    assert isinstance(part, bytes) and part.startswith(b"\x89PNG")
    assert answer.calls == [{"name": "zoom", "arguments": {"box": [0, 0, 10, 20]}}]


def test_texts_blocks_and_places_keep_their_order(place: Place) -> None:
    kinds = [p if isinstance(p, str) else "png" for p in place.call("blocks").parts]
    assert kinds == ["a <image>", "png", "b"], "the word <image> in a text is a word"
    answer = place.call("placed")
    assert [p if isinstance(p, str) else "png" for p in answer.parts] == ["left ", "png", " right"]
    assert answer.measured == {"steps": 2.0}


def test_an_episode_need_not_load_what_its_errors_are_checked_with(place: Place) -> None:
    assert place.call("patterns").parts == ["1"]


def test_a_large_picture_is_shrunk(place: Place) -> None:
    (part,) = place.call("large").parts
    assert Image.open(io.BytesIO(part)).size == (200, 50)


def test_coroutines_and_numpy_work(place: Place) -> None:
    assert place.call("later", x=4).parts == ["5"] and place.call("later", x=5).parts == ["6"]
    assert place.call("product").parts == [str(float(64**3))]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("boom", {}, "error: ValueError: no"),
        ("zoom", {"box": [0, 0, 9, 9], "start": 1}, "start"),
        ("zoom", {}, "box"),
        ("fly", {}, "there is no tool 'fly'; the tools are zoom,"),
        ("greedy", {}, "error: greedy needs more memory than 2048 MiB"),
        ("zoom", {"box": [9, 9, 9, 9]}, "an image of 0 x 0 pixels is empty"),
        ("zoom", {"box": [9, 9, 1, 1]}, "error: ValueError"),
        ("gallery", {}, "more than 64 images"),
        ("zoom", {"box": [0, 0, 2000, 4]}, "an image of 2000 x 4 pixels has too long a side: over 200 to 1"),
        ("nap", {"seconds": 3}, "error: nap took more than 0.5 s"),
    ],
)
def test_a_fault_of_a_call_is_an_observation(place: Place, name: str, arguments: dict[str, Any], words: str) -> None:
    answer = place.call(name, **arguments)
    assert isinstance(answer, Answer) and answer.errors == 1 and answer.done is None
    assert answer.parts[0].startswith("error: ") and words in answer.parts[0] and len(answer.parts[0]) <= 207
    assert place.call("count").parts == ["1"], "the episode goes on"


def test_a_call_that_cannot_be_read_and_one_that_can(place: Place) -> None:
    place.pool.turn(0, '<tool_call>{"name": </tool_call><tool_call>{"name": "count", "arguments": {}}</tool_call>')
    answer = place.only()
    assert answer.errors == 1 and answer.parts[0].startswith("error: the call cannot be read")
    assert answer.parts[1:] == ["\n", "1"] and [c["name"] for c in answer.calls] == ["", "count"]


def test_calls_that_were_read_before_are_run_again(place: Place) -> None:
    place.pool.replay(0, [Call("", {"text": "<tool_call>{"}), Call("count", {}), Call("zoom", {"box": [0, 0, 8, 8]})])
    answer = place.only()
    assert answer.errors == 1 and answer.parts[0].startswith("error: the call cannot be read") and answer.done is None
    assert answer.parts[1:3] == ["\n", "1"] and isinstance(answer.parts[3], bytes)


def test_a_turn_without_a_call_is_the_answer_and_a_tool_may_end_the_episode(place: Place) -> None:
    place.pool.turn(0, "it is red")
    assert place.only().done == "answer"
    answer = place.call("last")
    assert answer.done == "done" and answer.measured == {"won": 1.0}


def test_a_tool_that_cannot_be_interrupted_ends_its_episode_alone(shared: Place) -> None:
    shared.begin("other")
    shared.begin("stuck")
    begin = time.monotonic()
    outcome = shared.call("stuck", "stuck")
    assert isinstance(outcome, Stopped) and outcome.over_time and time.monotonic() - begin < 10
    assert shared.call("count", "other").parts == ["1"]
    shared.pool.drop("other")


def test_the_time_of_a_tool_is_its_own_and_not_that_of_who_reads_its_answer(place: Place) -> None:
    place.pool.turn(0, '<tool_call>{"name": "page", "arguments": {"parts": 3}}</tool_call>')
    while not place.pool._episodes[0].call:
        place.pool.advance(0.0)
    time.sleep(LIMITS.tool_seconds + 1.5)  # as a trainer that reads other texts, or learns
    answer = place.only()
    assert isinstance(answer, Answer), answer
    assert [len(part) > 1_000_000 for part in answer.parts] == [True, False, True, False, True, False]


def test_a_long_text_is_cut_in_the_middle_where_it_was_made(file: Path, place: Place) -> None:
    (text,) = place.call("page", parts=1).parts
    assert len(text) == (1 << 20) + len(CUT_MARK) and text.endswith("z") and text.partition(CUT_MARK)[0][-1] == "a"
    with opened(f"{file}:TOOLBOX", EnvironmentLimits.of(Environment(observation_tokens=10), 1)) as other:
        other.begin()
        assert other.call("page", parts=1).parts == ["a" * 160 + CUT_MARK + "z" * 160]
        assert other.call("nap", seconds=0).parts == ["slept"]


def test_a_process_that_ends_is_a_fault(shared: Place) -> None:
    shared.begin("dead")
    outcome = shared.call("die", "dead")
    assert isinstance(outcome, Stopped) and not outcome.over_time
    assert outcome.why.startswith("in the tool `die`, called with {}: its process ended (exit 3)")
    shared.begin("killed")
    outcome = shared.call("kill", "killed", word="a" * 999)
    assert isinstance(outcome, Stopped) and "its process ended (SIGKILL)" in outcome.why
    assert '`kill`, called with {"word": "aaa' in outcome.why and "a" * 130 not in outcome.why


def test_a_package_that_a_tool_lacks_is_no_error_that_the_model_sees(shared: Place) -> None:
    shared.begin("lacks")
    answer = shared.call("missing", "lacks", code="import no_other_package")
    assert answer.errors == 1 and answer.parts == ["error: ModuleNotFoundError: No module named 'no_other_package'"]
    outcome = shared.call("missing", "lacks", code="")
    assert isinstance(outcome, Stopped) and not outcome.is_outage and not outcome.over_time
    assert outcome.why.startswith("ModuleNotFoundError: No module named 'no_such_package' (tools.py:")
    assert outcome.why.endswith(" in missing: import no_such_package)")


def test_a_service_that_is_down_is_no_error_that_the_model_sees(shared: Place) -> None:
    shared.begin("down")
    outcome = shared.call("lookup", "down", word="a")
    assert outcome == Stopped(False, "the dictionary at dict:80 is down", is_outage=True)


def test_a_column_that_is_kept_back_is_told_where_it_is_missed(shared: Place, choice: Place) -> None:
    row = {"columns": {"prices": {"red": 8}}, "truth": {"answer": 8}}
    shared.begin("row", **row)
    assert shared.call("ask", "row").parts == ['{"red": 8}'], "whatever one row holds: its source repeats no truth"
    shared.begin("kept", **row, repeats={"prices": ["answer"]})
    answer = shared.call("ask", "kept")
    assert answer.errors == 1 and answer.parts[0] == (
        "error: KeyError: 'prices'; `prices` is kept back, as it repeats the truth (answer): a class gets it whose "
        "reset names it as a parameter"
    )
    for key in ("row", "kept"):
        shared.pool.drop(key)
    columns = {"environment": "reads", "prices": 8}
    outcome = choice.begin(columns=columns, truth={"answer": 8}, repeats={"prices": ["answer"]})
    assert isinstance(outcome, Stopped) and "reset reads 'prices', and `prices` is kept back" in outcome.why


def test_modules_beside_the_file_belong_to_its_identity(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("from own.words import WORD\n\ndef say():\n    'Say.'\n    return WORD\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "words.py").write_text("WORD = 'a'\n")
    (tmp_path / "other.py").write_text("unused = 1\n")
    before = load_environment(f"{tmp_path}/tools.py:say", {}).record
    assert list(before["files"]) == ["own/words.py"]
    (tmp_path / "own" / "words.py").write_text("WORD = 'b'\n")
    after = load_environment(f"{tmp_path}/tools.py:say", {}).record
    assert before["sha256"] == after["sha256"] and changed_files(before, after) == ["own/words.py"]
    old, new = ({"source": "rows", "environment": record} for record in (before, after))
    change: Any = _environment_change(None, old, new, {})  # pyright: ignore[reportArgumentType]
    assert change.what == "environment of rows (own/words.py)" and change.kind == "asked"
    assert change.old == json.dumps({"files": before["files"]}) and change.new == json.dumps({"files": after["files"]})
    args = {**before, "args": {"a": 1, "b": 3}}, {**before, "args": {"a": 2, "b": 3}}
    old, now = ({"source": "rows", "environment": record} for record in args)
    other: Any = _environment_change(None, old, now, {})  # pyright: ignore[reportArgumentType]
    assert (other.what, other.old, other.new) == ("environment of rows", '{"args": {"a": 1}}', '{"args": {"a": 2}}')
    passages = ({**before, "args": {"corpus": "p.jsonl"}, "contents": {"": text}} for text in "xy")
    old, now = ({"source": "rows", "environment": record} for record in passages)
    other = _environment_change(None, old, now, {})  # pyright: ignore[reportArgumentType]
    assert other.what == "environment of rows (the passages of p.jsonl have changed)"
    old = {"source": "rows", "environment": before}
    earlier = {key: value for key, value in before.items() if key != "files"}
    assert changed_files(earlier, after) == []
    assert _environment_change(None, {**old, "environment": earlier}, new, {}) is None  # pyright: ignore[reportArgumentType]


def test_every_episode_begins_with_the_same_state(shared: Place) -> None:
    for key in ("a", "b"):
        shared.begin(key)
        assert shared.call("count", key).parts == ["1"] and shared.call("count", key).parts == ["2"]
    for key in ("a", "b"):
        shared.pool.drop(key)


def test_what_an_episode_started_ends_with_it(shared: Place) -> None:
    shared.begin("parent")
    pid = int(shared.call("children", "parent").parts[0])
    assert os.path.exists(f"/proc/{pid}")
    shared.pool.drop("parent")
    assert_all_gone([pid])


def test_what_an_episode_started_ends_when_it_has_ended_by_itself(shared: Place) -> None:
    shared.begin("parent")
    pid = int(shared.call("children", "parent").parts[0])
    assert isinstance(shared.call("die", "parent"), Stopped)
    shared.begin("next")
    assert_all_gone([pid])
    shared.pool.drop("next")


def test_many_episodes_leave_nothing(shared: Place) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        shared.begin(number)
    for number in range(20):
        shared.pool.turn(number, '<tool_call>{"name": "count", "arguments": {}}</tool_call>')
    seen = []
    while shared.pool.pending:
        seen += shared.pool.advance()
    assert sorted(key for key, _ in seen) == list(range(20)) and all(o.parts == ["1"] for _, o in seen)
    for number in range(20):
        shared.pool.drop(number)
    assert len(os.listdir("/proc/self/fd")) <= before and shared.pool.pids() == []


def test_the_first_process_that_is_killed_fails_the_open_episodes_and_comes_back(shared: Place) -> None:
    shared.begin("open")
    (child,) = shared.pool.pids()
    os.kill(shared.pool._forks.pids()[0], 9)
    assert_all_gone([child])
    shared.pool.turn("open", "x")
    assert isinstance(shared.only(), Stopped)
    assert isinstance(shared.begin("next"), Answer)
    shared.pool.drop("next")


def test_a_class_gets_its_row_and_the_truth_that_it_names(file: Path) -> None:
    environment = load_environment(f"{file}:Crop", {"scale": 3})
    described = environment.described[""]
    assert [tool["function"]["name"] for tool in described.tools] == ["step"] and described.own_reward
    with opened(environment) as place:
        columns = {"level": 2, "reward_model": {"ground_truth": "red"}, "extra": json.dumps({"hint": "secret"})}
        truth = {"answer": "red", "hint": "secret"}
        place.begin(columns=columns, truth=truth, repeats=repeats_of([(columns, truth)]))
        # Neither the truth that reset does not name, nor a column that holds it.
        names = ["answer", "image", "level", "prompt", "reward_model", "seed", "seen_sizes"]
        assert place.call("step").parts == [f"{names}3"]
        place.pool.finish(0)
        assert place.only().measured == {"reward": 0.25}


def test_rows_choose_an_environment_and_a_broken_reset_is_a_fault(choice: Place) -> None:
    assert isinstance(choice.begin(columns={"environment": "crop"}, truth={"answer": "x"}), Answer)
    outcome = choice.begin(1, columns={"environment": "broken"})
    assert isinstance(outcome, Stopped) and "KeyError" in outcome.why and "tools.py" in outcome.why
    assert not outcome.is_outage
    outcome = choice.begin(3, columns={"environment": "down"})
    assert isinstance(outcome, Stopped) and outcome.is_outage and outcome.why == "a service that it needs is down"
    outcome = choice.begin(2, columns={"environment": "none of these"})
    assert isinstance(outcome, Stopped) and "crop, broken, down, reads, needs" in outcome.why


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("def f(x: int): 'x'", "g", "has no `g` it has: f"),
        ("class Page:\n def turn(self): 'x'\nclass Held: pass\ndef parse(x: int): 'x'", "Pagee",
         "has no `Pagee` did you mean `Page`?  it has: Page"),
        ("import missing_module", "f", "missing_module"),
        ("f = 3", "f", "not int"),
        ("def f(x): 'x'", "f", "x"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\ndef f(): 'x'",
         "f", "leaves threads running"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told(tmp_path: Path, code: str, name: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(RewardError) as caught:
        load_environment(f"{tmp_path}/bad.py:{name}", {})
    assert words in f"{caught.value.message} {caught.value.hint}" and "parse" not in str(caught.value.hint)


def test_a_reset_that_hangs_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hang.py").write_text(HANGS)
    environment = load_environment(f"{tmp_path}/hang.py:Hangs", {})
    # Of the reset alone: a slow machine may need longer to import the file.
    monkeypatch.setattr("vlmrl.environments.processes.patience", lambda seconds: 1.0)
    with opened(environment) as place:
        outcome = place.begin("hung")
        assert isinstance(outcome, Stopped) and outcome.why == "no answer in time" and place.pool.pids() == []


def test_arguments_are_for_a_class(file: Path) -> None:
    with pytest.raises(RewardError, match=r"environment\.args are for a class"):
        load_environment(f"{file}:TOOLBOX", {"scale": 3})


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="there is no environment file"):
        load_environment(f"{tmp_path}/none.py:f", {})


LOUD = """
import numpy, sys
from PIL import Image

def shout(count: int):
    print("x" * count)
    return "said"

def leave():
    sys.exit("bye")

def numbers():
    return [numpy.float32(0.5), numpy.arange(3)]

def array():
    return numpy.zeros((4, 4, 3))

def hidden():
    return {"crop": Image.new("RGB", (4, 4))}

TOOLS = [shout, leave, numbers, array, hidden]
"""


def test_odd_tools(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    with opened(f"{tmp_path}/loud.py:TOOLS") as place:
        place.begin()
        assert place.call("shout", count=2_000_000).parts == ["said"], "a full pipe stops no tool"
        assert place.call("leave").parts == ["error: SystemExit: bye"]
        assert place.call("numbers").parts == ["0.5\n[0, 1, 2]"]
        for name, words in (("array", "ndarray"), ("hidden", "dict")):
            place.begin(name)
            outcome = place.call(name, name)
            assert isinstance(outcome, Stopped)
            assert f"in the tool `{name}`: a value of type {words} cannot be shown" in outcome.why


def test_an_environment_that_asks_for_what_the_row_lacks_says_so(choice: Place) -> None:
    truth = {"answer": 5}
    outcome = choice.begin(columns={"environment": "needs", "width": 3}, truth=truth)
    assert isinstance(outcome, Stopped) and "reset takes height, which the row does not have" in outcome.why
    assert "answer" in outcome.why and "width" in outcome.why
    columns = {"environment": "needs", "level": 3, "wide": 5}
    outcome = choice.begin("named", columns=columns, truth=truth, repeats={"wide": ["answer"]})
    assert isinstance(outcome, Stopped) and "level, wide, answer" in outcome.why, "also what is kept back"
    assert isinstance(choice.begin("high", columns={"environment": "needs", "height": 3}), Answer)
    choice.pool.finish("high")
    outcome = choice.only()
    assert isinstance(outcome, Stopped) and "get_reward returned 'high'" in outcome.why


def test_arguments_that_a_class_does_not_have_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("class Tools:\n    def __init__(self, size=1): ...\n    def look(self) -> str: return ''\n")
    with pytest.raises(RewardError, match=r"unknown argument `sise` in environment\.args") as error:
        load_environment(f"{path}:Tools", {"sise": 2})
    assert error.value.hint == "did you mean `size`?  known: size"
    assert load_environment(f"{path}:Tools", {"size": 2}).described


def test_the_folder_of_a_killed_pool_is_removed_by_the_next_one(file: Path) -> None:
    code = (
        "import os, signal, sys\nfrom vlmrl.environments.processes import *\n"
        "pool = EnvironmentPool(load_environment(sys.argv[1], {}), 'hermes', EnvironmentLimits())\n"
        "print(pool._folder.path, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "-c", code, f"{file}:TOOLBOX"]
    folder = Path(subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip())
    assert folder.is_dir()
    with opened(f"{file}:TOOLBOX") as living:
        with opened(f"{file}:TOOLBOX"):
            pass
        assert not folder.exists() and living.pool._folder.path.is_dir()
