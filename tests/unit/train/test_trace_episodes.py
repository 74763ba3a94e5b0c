"""Supervised learning with tools: the tokens of a trace are those of a rollout in which the policy writes its turns."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyworld import image

from vlmrl.errors import DataError, VlmrlError
from vlmrl.model.load import stop_ids_of
from vlmrl.model.policy import Policy
from vlmrl.recipe.load import load_recipe
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.episodes import EpisodeEngine
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.setup.model import make_generator
from vlmrl.tasks.source import open_source
from vlmrl.train.collect import PromptFeed
from vlmrl.train.rehearsal import full_row
from vlmrl.train.targets import target_items
from vlmrl.types import Call, Sample, SamplingParams, hash64

TOOLS = '''
from vlmrl.environments.base import Start, Observation

def zoom(start: Start, box: list[int], note: str = ""):
    """Show a part.

    Args:
        box: left, top, right and bottom, in pixels.
        note: any text.
    """
    if box[2] <= box[0]:
        raise ValueError("the box is empty")
    return ["here <|im_end|>", start.images[0].crop(tuple(box)), note]

def stop(start: Start):
    """End."""
    return Observation("over", done=True)

TOOLS = [zoom, stop]

class Shows:
    def reset(self, images, seed, **row):
        self.image = images[0]
        return [f"seed {seed}", self.image.rotate(90)]

    def zoom(self, box: list[int], note: str = ""):
        """Show a part."""
        return ["here", self.image.crop(tuple(box))]
'''
TASK = """
import vlmrl
from vlmrl import Call

TRACES = {
    "two": lambda rng: [["I look. <|im_end|>", Call("zoom", {"box": [0, 0, 28, 56]})], f"it is {rng.randrange(9)}"],
    "three": lambda rng: [
        Call("zoom", {"box": [0, 0, 56, 28], "note": "of <|im_start|> <image>"}),
        [Call("zoom", {"box": [0, 0, 28, 28]}), Call("zoom", {"box": [28, 28, 56, 56]})],
        "done",
    ],
    "one": lambda rng: "it is 5",
    "open end": lambda rng: ["look", Call("zoom", {"box": [9, 0, 9, 28]})][1:],
    "bad box": lambda rng: [Call("zoom", {"box": [9, 0, 9, 28]}), "so"],
    "no tool": lambda rng: [Call("turn", {}), "so"],
    "no call": lambda rng: ["hm", "so"],
    "ends": lambda rng: [Call("stop"), "so"],
    "many": lambda rng: [Call("zoom", {"box": [0, 0, 28, 28]})] * 4 + ["so"],
    "tokens": lambda rng: [["so " * 90, Call("zoom", {"box": [0, 0, 28, 28]})]] * 3 + ["so"],
    "long": lambda rng: [["so " * 600, Call("stop")], "so"],
    "pictures": lambda rng: [[Call("zoom", {"box": [0, 0, 28, 28]})] * 5, "so"],
    "no JSON": lambda rng: [Call("zoom", {"box": {1, 2}}), "so"],
    "nothing": lambda rng: [],
    "number": lambda rng: 5,
    "within": lambda rng: ["a", ["b", 5]],
}

def task(info):
    return vlmrl.Task("looks", "look", "<image>What?", trace=lambda row, rng: TRACES[row.columns["trace"]](rng))
"""
RECIPE = """
kind = "sft"
model = {path = "FOLDER", dtype = "float32", device = "cpu", min_pixels = 784, max_pixels = 3136}
environment = {name = "PLACE/tools.py:NAME", tokens = 1200, turns = 4, images = 4}
rollout = {max_new_tokens = 400}
[[data]]
path = "PLACE/rows.jsonl"
task = "PLACE/task.py:task"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("traces")
    (place / "tools.py").write_text(TOOLS)
    (place / "task.py").write_text(TASK)
    image(3, 56, 56).save(place / "a.png")
    names = [line.split('"')[1] for line in TASK.splitlines() if "lambda rng" in line]
    rows = [json.dumps({"problem": "p", "trace": name, "image": "a.png"}) for name in names]
    (place / "rows.jsonl").write_text("\n".join(rows))
    return place


@pytest.fixture
def opened(place, tiny_folder, tiny_encoder, frozen_tiny_model, tiny_banned):
    """Opens the feed and the engine of an environment."""
    engines = []

    def open_feed(name: str = "TOOLS") -> tuple[PromptFeed, EpisodeEngine]:
        text = RECIPE.replace("FOLDER", str(tiny_folder)).replace("PLACE", str(place)).replace("NAME", name)
        (place / "recipe.toml").write_text(text if name else text.replace("environment =", "optim = {} #"))
        recipe = load_recipe(str(place / "recipe.toml")).recipe
        source = open_source(recipe.data[0], recipe.reward, scored=False)
        stops = stop_ids_of(frozen_tiny_model, tiny_encoder.tokenizer)
        params = SamplingParams(max_new_tokens=400, stop_ids=stops)
        feed = PromptFeed(recipe, [source], [], None, tiny_encoder, {}, params, {})  # pyright: ignore
        policy = Policy(frozen_tiny_model, temperature=1.0, banned_ids=tiny_banned)
        engines.append(make_generator(recipe, policy, tiny_encoder, sources=[source], engine="torch"))
        return feed, engines[-1]

    yield open_feed
    for engine in engines:
        engine.close()


def items_of(feed: PromptFeed, engine: Any, *names: str, occurrence: int = 0) -> Sequence[Any]:
    source = feed.sources[0]
    rows = [next(row for row in source.rows if row.columns["trace"] == name) for name in names]
    return target_items(feed, engine, [(source, row, occurrence) for row in rows], range(len(rows)))


class Forced(TorchEngine):
    """The built-in engine, whose samples are replaced by turns in order."""

    turns: list[tuple[int, ...]]

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        return [(n, [self.force(s) for s in samples]) for n, samples in super().poll(timeout)]

    def force(self, sample: Sample) -> Sample:
        ids = self.turns.pop(0)
        return Sample(ids, "", (0.0,) * len(ids), "stop", 0, sample.seed)


@pytest.mark.parametrize("environment", ["TOOLS", "Shows"])
@pytest.mark.parametrize("name", ["two", "three", "one"])
def test_the_tokens_are_those_of_a_rollout(opened, tiny_banned, environment, name):
    feed, engine = opened(environment)
    [item] = items_of(feed, engine, name)
    tokenizer, source = feed.encoder.tokenizer, feed.sources[0]
    # The turns as a model would write them: by the tokenizer alone, `<|im_end|>` in a text as letters.
    row = next(row for row in source.rows if row.columns["trace"] == name)
    seed = hash64(feed.recipe.train.seed, row.prompt_id, 0) >> 1
    prompt = feed.encode(source, row, 0).encoded
    inner = Forced(engine.inner.policy, tokenizer)
    inner.turns = [s.ids for s in item.segments if s.author == "policy"]
    texts = [tokenizer.decode(ids) for ids in inner.turns]
    calls = '<tool_call>\n{"name": "zoom", "arguments": {"box": '
    spoken = {
        "two": [f"I look. <|im_end|>\n{calls}[0, 0, 28, 56]}}}}\n</tool_call>", None],
        "three": [
            calls + '[0, 0, 56, 28], "note": "of <|im_start|> <image>"}}\n</tool_call>',
            f"{calls}[0, 0, 28, 28]}}}}\n</tool_call>\n{calls}[28, 28, 56, 56]}}}}\n</tool_call>",
            "done",
        ],
        "one": ["it is 5"],
    }[name]
    assert all(said in (None, text.removesuffix("<|im_end|>")) for said, text in zip(spoken, texts, strict=True))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert all(ids[-1] == end and end not in ids[:-1] for ids in inner.turns)
    again = EpisodeEngine(inner, engine.kinds, tokenizer)
    [[sample]] = again.generate([SamplingRequest(prompt, 1, seed)], feed.sampling)
    assert sample.token_ids == tuple(i for s in item.segments for i in s.ids) and sample.ending == "answer"
    assert [(s.ids, s.author, s.role, s.trained, s.media, s.seen_sizes) for s in sample.segments] == [
        (s.ids, s.author, s.role, s.trained, s.media, s.seen_sizes) for s in item.segments
    ]
    assert item.prompt.ids == prompt.prompt_ids and '"name": "zoom"' in tokenizer.decode(item.prompt.ids)
    media = [m for s in sample.segments for m in s.media]
    assert len(media) == {"two": 1, "three": 3, "one": 0}[name] + (environment == "Shows")
    assert sum(item.kinds) == sum(i == tokenizer.convert_tokens_to_ids("<|image_pad|>") for i in sample.token_ids)
    assert all(s.trained == (s.author == "policy") and s.sampler_logp is None for s in item.segments)


def test_traces_of_many_rows_run_together_and_repeat(opened):
    feed, engine = opened()
    names = ["two", "three", "one", "open end", "two"]
    first, second = items_of(feed, engine, *names), items_of(feed, engine, *names)
    for one, other in zip(first, second, strict=True):
        assert one.segments == other.segments and one.kinds == other.kinds
        assert all(torch.equal(one.images[k], other.images[k]) for k in one.images)
    later = [items_of(feed, engine, "two", occurrence=n)[0].segments[-1].ids for n in range(6)]
    assert len(set(later)) > 1, "the trace may differ at each occurrence"
    assert [len(item.segments) for item in first] == [3, 5, 1, 1, 3], "a failing call may end a trace"
    assert engine._episodes == {} and not any(kind.pool.pids() for kind in engine.kinds.values())


WRONG = {
    "bad box": "a call in turn 1 of the trace fails: ValueError: the box is empty",
    "no tool": "turn 1 of the trace fails: there is no tool 'turn'",
    "no call": "turn 1 of the 2 turns of the trace holds no call that can be read: a rollout would end there",
    "ends": "turn 1 of the 2 turns of the trace makes the environment end the episode",
    "many": "turn 4 of the 5 turns of the trace meets a limit of .environment. .turn limit.",
    "tokens": "turn . of the 4 turns of the trace meets a limit of .environment. .token limit.",
    "pictures": "turn 1 of the 2 turns of the trace meets a limit of .environment. .image limit.",
    "long": "turn 1 of the 2 turns of the trace is longer than rollout.max_new_tokens",
    "no JSON": "cannot be written: the arguments are no JSON",
    "nothing": "it returned list .., not the text of a response",
    "number": "it returned int 5",
    "within": "it returned list",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_trace_that_no_rollout_could_be_is_an_error_that_names_the_row(opened, place, name):
    feed, engine = opened()
    with pytest.raises(VlmrlError, match=WRONG[name]) as caught:
        items_of(feed, engine, "two", name)
    row = next(row for row in feed.sources[0].rows if row.columns["trace"] == name)
    hint = str(caught.value.hint)
    assert ("raise the limit" in hint) == ("meets a limit" in WRONG[name]), "the hint fits the cause"
    assert name not in ("no call", "ends", "long") or hint.split()[0] in ("call", "end", "make")
    assert row.place in str(caught.value.where) or str(place / "task.py") in str(caught.value.where)


def test_several_turns_without_an_environment_are_an_error(opened):
    feed, engine = opened("")
    with pytest.raises(DataError, match="the trace has 2 turns, and nothing answers the first one"):
        items_of(feed, engine, "two")
    [item] = items_of(feed, engine, "one")
    assert len(item.segments) == 1


def test_the_text_of_a_trace_has_all_its_turns(opened):
    feed, _ = opened()
    source = feed.sources[0]
    rows = {row.columns["trace"]: row for row in source.rows}
    assert source.task.correct_response(rows["one"], random.Random(0)) == "it is 5"
    text = source.task.correct_response(rows["two"], random.Random(0))
    assert text.startswith('I look. <|im_end|>\n<tool_call>\n{"name": "zoom"') and "\nit is " in text
    assert source.task.correct_turns(rows["open end"], random.Random(0)) == ((Call("zoom", {"box": [9, 0, 9, 28]}),),)


def test_a_full_packed_row_holds_images_within_responses(opened):
    feed, engine = opened()
    [item] = items_of(feed, engine, "three")
    size = len(item.prompt.ids) + item.num_tokens
    for budget in range(size, 2 * size + len(item.prompt.ids) + item.num_tokens, 37):
        full = full_row(item, responses=1, groups=9, tokens_per_row=budget)
        assert full[0].num_tokens == item.num_tokens and full[0].images
        assert sum(len(i.prompt.ids) + i.num_tokens for i in full) <= budget
        assert all(bool(i.images) == (i.num_tokens == item.num_tokens) for i in full)
