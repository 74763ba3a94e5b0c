"""Reward functions written for TRL give TRL's numbers here.

Every function runs twice: by TRL's own `GRPOTrainer._calculate_rewards` (1.16), and bound as a worker binds it. TRL's
shipped functions are among them. Numbers are compared in float32, which TRL's are; where a function does not judge a
response they are NaN there, and the response is left out here.

Importing TRL's trainer takes half a minute. So the method is read from its file and run with the little that it uses.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib.util
import inspect
import math
import textwrap
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vlmrl.errors import RewardError
from vlmrl.rewards.base import UserReward
from vlmrl.rewards.scoring import Scorer
from vlmrl.rewards.user_reward import bind_user_reward
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import INAPPLICABLE, RewardInput

pytest.importorskip("trl")

ROWS = [
    (r"<think>one and one</think> \boxed{2}", "$2$", 0, [5, 6, 7, 7, 7]),
    (r"<think>a third</think> The answer is \boxed{\frac{1}{3}}", r"$\frac{1}{3}$", 1, [1, 2, 3, 1, 2, 3, 1, 2, 3]),
    (r"no thought: \boxed{4}", "$5$", 2, list(range(18))),
    ("", "$7$", 3, [2]),
    (r"\boxed{8}", "no formula at all", 4, [4] * 20),
]
"""Response, solution, another column, token ids. The last solution cannot be parsed: TRL's accuracy leaves it out."""

SHIPPED = """
from trl.rewards import (accuracy_reward, get_cosine_scaled_reward, get_repetition_penalty_reward,
                         get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward)
overlong = get_soft_overlong_punishment(max_completion_len=18, soft_punish_cache=10)
repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5)
cosine = get_cosine_scaled_reward(max_len=20)
"""
SHIPPED_NAMES = (
    "accuracy_reward",
    "think_format_reward",
    "reasoning_accuracy_reward",
    "overlong",
    "repetition",
    "cosine",
)

WRITTEN = """
import asyncio, functools
import numpy as np

def by_level(completions, level, **kwargs):
    return [len(c[0]["content"]) / 100 + l for c, l in zip(completions, level)]

def keywords_alone(**kwargs):
    assert kwargs["prompts"][0][0]["role"] == "user" and "prompt" not in kwargs
    return [float(len(ids)) + n for ids, n in zip(kwargs["completion_ids"], kwargs["level"])]

def some_not_judged(completions, level, **kwargs):
    return [None if l % 2 else 0.125 for l in level]

async def awaited(completions, **kwargs):
    await asyncio.sleep(0)
    return [float("boxed" in c[0]["content"]) for c in completions]

class Rule:
    __name__ = "rule"
    def __init__(self, scale): self.scale = scale
    def __call__(self, prompts, completions, solution, **kwargs):
        return [self.scale * float(s.strip("$") in c[0]["content"]) for c, s in zip(completions, solution)]

class Awaited(Rule):
    async def __call__(self, prompts, completions, solution, **kwargs): return [0.5 for _ in prompts]

rule, awaited_rule = Rule(0.3), Awaited(1)
partly = functools.partial(by_level)

def by_step(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / 7 for _ in completions]

def logs(completions, log_extra, log_metric, **kwargs):
    scores = [float(len(c[0]["content"])) for c in completions]
    log_extra("acc", [s > 20 for s in scores])
    log_extra("seen", ["text" for _ in scores])
    log_metric("mean_length", sum(scores))
    return scores

def an_array(completions, **kwargs): return np.linspace(0, 1, len(completions), dtype=np.float32)
def a_generator(completions, **kwargs): return (0.1 * n for n in range(len(completions)))
def bools(completions, completion_ids, **kwargs): return [len(ids) > 5 for ids in completion_ids]
def ids_have_a_default(completions, completion_ids=None, **kwargs): return [float(ids[0]) for ids in completion_ids]
"""
WRITTEN_NAMES = (
    "by_level",
    "keywords_alone",
    "some_not_judged",
    "awaited",
    "rule",
    "awaited_rule",
    "partly",
    "by_step",
    "logs",
    "an_array",
    "a_generator",
    "bools",
    "ids_have_a_default",
)
STEP = 5


def source_of(file: str, name: str) -> str:
    """A function or method of TRL, as text without its decorators."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations is not None
    text = Path(spec.submodule_search_locations[0], file).read_text()
    found = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
    found.decorator_list = []
    return ast.unparse(found)


@functools.cache
def trl_method() -> Any:
    """`GRPOTrainer._calculate_rewards`."""
    names: dict[str, Any] = {
        "torch": torch,
        "nn": torch.nn,
        "asyncio": asyncio,
        "inspect": inspect,
        "functools": functools,
        "profiling_context": lambda *a: nullcontext(),
        "gather": lambda rewards: rewards,
        "logger": SimpleNamespace(warning=lambda text: None),
        "Callable": None,
    }
    for file, name in (("trainer/utils.py", "is_async_callable"), ("trainer/grpo_trainer.py", "_calculate_rewards")):
        exec("from __future__ import annotations\n" + source_of(file, name), names)
    return names["_calculate_rewards"]


def trl_numbers(function: Any) -> np.ndarray:
    """[N] what TRL's trainer makes of a function, NaN where it gave None."""
    loop = asyncio.new_event_loop()
    pending = defaultdict(list)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        state=SimpleNamespace(global_step=STEP),
        environments=None,
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=["f"],
        _log_completion_extra=lambda column, values: pending[column].extend(values),
        _log_metric=lambda name, value: pending[name].append(value),
        async_loop=loop,
    )
    prompts = [[{"role": "user", "content": f"Question {n}"}] for n in range(len(ROWS))]
    rows = [{"prompt": p, "solution": s, "level": n} for p, (_, s, n, _) in zip(prompts, ROWS, strict=True)]
    completions = [[{"role": "assistant", "content": text}] for text, *_ in ROWS]
    run = lambda: trl_method()(trainer, rows, prompts, completions, [ids for *_, ids in ROWS])  # noqa: E731

    async def beside() -> Any:
        return await asyncio.to_thread(run)

    found = loop.run_until_complete(beside())
    loop.close()
    return found[:, 0].numpy()


def inputs(ids: bool = True) -> list[RewardInput]:
    """The same rows as vlmrl reads them from TRL's table."""
    found = []
    for n, (text, solution, level, tokens) in enumerate(ROWS):
        columns = {"prompt": [{"role": "user", "content": f"Question {n}"}], "solution": solution, "level": level}
        found.append(
            RewardInput(
                text,
                {"answer": solution},
                columns,
                (),
                "stop",
                len(tokens),
                f"Question {n}",
                tokens if ids else None,
                STEP,
            )
        )
    return found


@functools.cache
def module_of(source: str) -> ModuleType:
    module = ModuleType("functions")
    module.__file__ = "functions.py"
    exec(source, module.__dict__)
    return module


CASES = [(SHIPPED, name) for name in SHIPPED_NAMES] + [(WRITTEN, name) for name in WRITTEN_NAMES]


@pytest.mark.parametrize(("source", "name"), CASES, ids=[name for _, name in CASES])
def test_a_function_written_for_trl_gives_trls_numbers(source, name):
    module = module_of(source)
    theirs = trl_numbers(getattr(module, name))
    style = "auto" if name != "partly" else "trl"
    bound = bind_user_reward(module, UserReward("functions.py", name, source, style, {}), nullcontext())
    assert (bound.style, bound.batched, dict(bound.weights)) == ("trl", True, {"reward": 1.0})
    ours = [parts["reward"] for parts in bound.call(inputs())]
    for number, value in zip(theirs.tolist(), ours, strict=True):
        assert value is None if math.isnan(number) else np.float32(value) == np.float32(number)


def test_a_response_that_is_not_judged_is_left_out_and_no_failure(tmp_path):
    with open_scorer(tmp_path, WRITTEN, "some_not_judged") as scorer:
        scores = scorer.score(inputs(), strict=True)
        assert [score.error for score in scores] == [None, INAPPLICABLE] * 2 + [None]
        assert [score.failed for score in scores] == [False] * 5 and scorer.failures == 0
        assert [score.value for score in scores[::2]] == [0.125] * 3 and math.isnan(scores[1].value)


def open_scorer(tmp_path: Path, source: str, name: str) -> Scorer:
    (tmp_path / "f.py").write_text(textwrap.dedent(source))
    return Scorer(load_reward(f"{tmp_path / 'f.py'}:{name}"), timeout_seconds=60)


def test_numbers_of_log_extra_are_parts_without_weight(tmp_path):
    with open_scorer(tmp_path, WRITTEN, "logs") as scorer:
        first, *_ = scorer.score(inputs(), strict=True)
    assert first.parts == {"acc": 1.0, "reward": float(len(ROWS[0][0]))} and first.value == first.parts["reward"]


def test_a_function_that_needs_token_ids_says_so_where_there_are_none(tmp_path):
    with open_scorer(tmp_path, WRITTEN, "bools") as scorer, pytest.raises(RewardError) as error:
        scorer.score(inputs(ids=False), strict=True)
    assert "`bools` needs `completion_ids`, but no token ids are saved with" in error.value.message
    assert "a table needs a column `completion_ids`" in (error.value.hint or "")


def test_a_trainer_state_that_is_not_known_says_what_is(tmp_path):
    source = "def f(completions, trainer_state, **kw): return [trainer_state.max_steps for _ in completions]"
    told = r"trainer_state\.max_steps: .*only `trainer_state.global_step`"
    with open_scorer(tmp_path, source, "f") as scorer, pytest.raises(RewardError, match=told):
        scorer.score(inputs(), strict=True)


def test_a_function_that_judges_nothing_is_a_bug(tmp_path):
    with open_scorer(tmp_path, "def f(completions, **kw): return [None for _ in completions]", "f") as scorer:
        with pytest.raises(RewardError, match="returned None for all 5 responses of a call"):
            scorer.score(inputs(), strict=True)
        assert {score.error for score in scorer.score(inputs())} == {INAPPLICABLE} and scorer.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "needs", "score"),
    [
        ("def f(completions): return [1.0 for _ in completions]", False, 1.0),
        (
            "def f(completions, **columns): return [float(len(columns['completion_ids'][0])) for _ in completions]",
            True,
            5.0,
        ),
        ("def f(x): return 1.0", False, 1.0),
        ("def f(x): return float(len(x.token_ids))", True, 5.0),
    ],
)
def test_only_functions_that_may_read_them_are_sent_token_ids(tmp_path, source, needs, score):
    with open_scorer(tmp_path, source, "f") as scorer:
        assert scorer.spec.needs_token_ids is needs
        assert scorer.score(inputs()[:1], strict=True)[0].value == score
