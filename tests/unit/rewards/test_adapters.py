from __future__ import annotations

from dataclasses import replace

import pytest
from PIL import Image

from vlmrl.errors import RewardError
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import INAPPLICABLE, Call, Media, RewardInput, Turn

ROW = RewardInput(
    response="<answer>7</answer>",
    truth={"answer": "7"},
    columns={"level": 2, "data_source": "geo3k", "extra_info": {"index": 5}},
    num_tokens=9,
    prompt="How many?",
)
OTHER = RewardInput(response="8", truth={"answer": "7"}, columns={"level": 3}, num_tokens=1, prompt="And now?")


def parts(scorer, source, rows=(ROW, OTHER), style="auto", function="reward", **args):
    s = scorer(source, style=style, function=function, **args)
    return s, [dict(score.parts) for score in s.score(list(rows), strict=True)]


def test_our_signature_gets_the_input_and_bound_arguments(scorer):
    source = "def reward(x, bonus=0.0): return {'a': ('7' in x.response) + bonus, 'tokens': x.num_tokens}"
    s, got = parts(scorer, source, bonus=0.5)
    assert s.spec.user.style == "vlmrl" and not s.spec.user.batched
    assert got == [{"a": 1.5, "tokens": 9.0}, {"a": 0.5, "tokens": 1.0}]


def test_a_score_object_is_accepted(scorer):
    source = """
    from vlmrl.types import RewardInput, Score
    def reward(response: RewardInput): return Score(1.0, {'a': 1.0}, 'n')
    """
    assert parts(scorer, source)[1][0] == {"a": 1.0}


def test_trl_functions_get_lists_and_columns(scorer):
    source = """
    def reward(completions, answer, level, **kwargs):
        assert kwargs["prompts"] == ["How many?", "And now?"], kwargs
        assert kwargs["data_source"] == ["geo3k", None]
        return [float(a in c) * l for c, a, l in zip(completions, answer, level)]
    """
    s, got = parts(scorer, source)
    assert s.spec.user.style == "trl" and s.spec.user.batched and s.spec.weights == {"reward": 1.0}
    assert got == [{"reward": 2.0}, {"reward": 0.0}]


def test_trl_functions_that_read_messages_get_messages(scorer):
    source = """
    def reward(prompts, completions, **kwargs):
        texts = [completion[0]["content"] for completion in completions]
        assert prompts[0] == [{"role": "user", "content": "How many?"}]
        return [float(t == "8") for t in texts]
    """
    assert parts(scorer, source)[1] == [{"reward": 0.0}, {"reward": 1.0}]


def test_trl_functions_get_messages_when_the_dataset_has_them(scorer):
    row = RewardInput("yes", columns={"prompt": [{"role": "user", "content": "Is it?"}]})
    source = """
    def reward(completions, prompts):
        return [float(p[0]["role"] == "user" and c[0]["role"] == "assistant") for c, p in zip(completions, prompts)]
    """
    assert parts(scorer, source, [row])[1] == [{"reward": 1.0}]


def test_trl_none_means_not_applicable_and_async_functions_are_awaited(scorer, inputs):
    source = "async def reward(completions, **kwargs): return [None if c == 'b' else 1.0 for c in completions]"
    s = scorer(source)
    scores = s.score(inputs, strict=False)
    assert scores[0].value == 1.0
    assert scores[1].error == INAPPLICABLE


def test_a_function_of_keywords_alone_is_known_by_what_it_reads(scorer):
    source = "def reward(**kwargs): return [float(len(c)) for c in kwargs['completions']]"
    s, got = parts(scorer, source)
    assert s.spec.user.style == "trl" and got == [{"reward": float(len(r.response))} for r in (ROW, OTHER)]


def test_a_function_of_trl_that_the_file_imports_is_read_where_it_is_written(scorer, tmp_path):
    (tmp_path / "their_rewards.py").write_text(
        "def fits(completions, **kw): return [float(c[0]['content'] == '8') for c in completions]\n"
    )
    assert parts(scorer, "from their_rewards import fits", function="fits")[1] == [{"reward": 0.0}, {"reward": 1.0}]


def test_trl_prompts_are_the_datasets_where_it_has_them(scorer):
    row = RewardInput("a", columns={"prompt": "As written"}, prompt="<|im_start|>As written")
    source = "def reward(prompts, completions, **kw): return [float(p == 'As written') for p in prompts]"
    assert parts(scorer, source, [row])[1] == [{"reward": 1.0}]


def test_trl_images_arrive_under_their_column_names(scorer):
    from PIL import Image

    row = RewardInput("a", images=[Image.new("RGB", (4, 2)), Image.new("RGB", (1, 1))])
    s, got = parts(
        scorer, "def reward(completions, images, **kwargs): return [im[0].size[0] + len(im) for im in images]", [row]
    )
    assert s.spec.needs_images and got == [{"reward": 6.0}]


def test_a_class_with_call_as_ms_swift_writes_it(scorer):
    source = """
    class Mine:
        def __call__(self, completions, answer, **kw): return [float(a in c) for c, a in zip(completions, answer)]
    """
    assert parts(scorer, source, function="Mine")[1] == [{"reward": 1.0}, {"reward": 0.0}]


def episode(**more) -> RewardInput:
    """A call and an answer tag in it, a picture and a text of the tool, a bad call, and an answer."""
    call = '<tool_call>{"name": "zoom", "arguments": {"box": "<answer>7</answer>"}}</tool_call>'
    seen = Media("a" * 64, 4, 2)
    turns = (
        Turn("assistant", f"I look. {call}", calls=(Call("zoom", {"box": "<answer>7</answer>"}),)),
        Turn("tool", "here", (seen,)),
        Turn("assistant", "<tool_call>{", calls=(Call("", {"text": "<tool_call>{"}),)),
        Turn("tool", "error: no", errors=1),
        Turn("assistant", "<answer>8</answer>"),
    )
    response = "\n".join(turn.text for turn in turns if turn.role == "assistant")
    return RewardInput(response, {"answer": "8"}, prompt="What?", turns=turns, **more)


MESSAGES = [
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"type": "function", "function": {"name": "zoom", "arguments": {"box": "<answer>7</answer>"}}}],
    },
    {"role": "tool", "name": "zoom", "content": [{"type": "image"}, {"type": "text", "text": "here"}]},
    {"role": "assistant", "content": "", "tool_calls": []},
    {"role": "tool", "name": "", "content": "error: no"},
    {"role": "assistant", "content": "<answer>8</answer>"},
]


def test_trl_functions_get_the_whole_conversation_of_an_episode(scorer):
    source = f"""
    def reward(prompts, completions, **kwargs):
        assert prompts == [[{{"role": "user", "content": "What?"}}]] and "images" not in kwargs
        assert completions == [{MESSAGES!r}], completions
        return [float(sum(m["role"] == "tool" for m in c)) for c in completions]
    """
    assert parts(scorer, source, [episode()])[1] == [{"reward": 2.0}]


def test_what_reset_showed_is_of_the_prompt_for_trl(scorer):
    x = episode(images=[Image.new("RGB", (2, 2)), Image.new("RGB", (4, 2), "red")])
    opened = replace(x, turns=(Turn("user", "a maze", (Media("b" * 64, 2, 2),)), *x.turns))
    source = """
    NEEDS_IMAGES = True
    def reward(prompts, completions, images=None, **kwargs):
        (asked, shown), completion = prompts[0], completions[0]
        assert asked["content"] == "What?" and shown["role"] == "user" and shown["content"][1]["text"] == "a maze"
        assert shown["content"][0]["image"].size == (2, 2) and completion[1]["content"][0]["image"].size == (4, 2)
        return [float(len(completion))]
    """
    assert parts(scorer, source, [opened])[1] == [{"reward": 5.0}]


def test_trl_functions_that_look_at_images_get_those_of_tools_in_their_blocks(scorer):
    source = """
    NEEDS_IMAGES = True
    def reward(completions, images, image, **kwargs):
        block = completions[0][1]["content"][0]
        assert [i.size for i in images[0]] == [(8, 8)] and image[0].size == (8, 8)
        assert block["type"] == "image" and block["image"].size == (4, 2) and block["image"].getpixel((0, 0))[0] == 255
        return [1.0]
    """
    images = [Image.new("RGB", (8, 8)), Image.new("RGB", (4, 2), "red")]
    assert parts(scorer, source, [episode(images=images)])[1] == [{"reward": 1.0}]


def test_verl_functions_get_all_turns_of_an_episode_and_their_number(scorer):
    source = """
    def reward(data_source, solution_str, ground_truth, extra_info=None):
        assert solution_str.split("\\n")[1::2] == ["here", "error: no"] and extra_info["num_turns"] == 6
        return float(solution_str.endswith("<answer>8</answer>"))
    """
    assert parts(scorer, source, [episode()])[1] == [{"score": 1.0}]
    source = "def reward(data_source, solution_str, ground_truth, extra_info=None): return len(extra_info)"
    assert parts(scorer, source, [ROW])[1] == [{"score": 1.0}], "one turn: no more than the columns"


def test_verl_functions_get_their_four_arguments(scorer):
    source = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
        assert extra_info == ({"index": 5} if data_source == "geo3k" else {"level": 3})
        return {"score": scale * (ground_truth in solution_str), "acc": True, "pred": solution_str}
    """
    s, got = parts(scorer, source, function="compute_score", scale=2.0)
    assert s.spec.user.style == "verl" and s.spec.weights == {"score": 1.0}
    assert got == [{"score": 2.0, "acc": 1.0}, {"score": 0.0, "acc": 1.0}]
    assert [x.value for x in s.score([ROW], strict=True)] == [2.0]


def test_verl_functions_may_return_a_number_and_find_nested_truth(scorer):
    row = RewardInput("7", columns={"reward_model": {"style": "rule", "ground_truth": "7"}})
    source = "def compute_score(solution_str, ground_truth): return 1.0 if solution_str == ground_truth else 0.0"
    assert parts(scorer, source, [row], function="compute_score")[1] == [{"score": 1.0}]


def test_verl_functions_that_take_anything_get_all_that_verl_passes(scorer):
    source = """
    def f(solution_str, **given):
        return float(sorted(given) == ["data_source", "extra_info", "ground_truth"])
    """
    assert parts(scorer, source, function="f")[1] == [{"score": 1.0}, {"score": 1.0}]


def test_what_a_dict_holds_besides_numbers_is_left_out(scorer):
    source = """
    def f(solution_str, ground_truth):
        return {"score": -1, "acc": False, "pred": None, "text": "7", "box": (1, 2), "all": {1}, "more": {"a": 1}}
    """
    assert parts(scorer, source, [ROW], function="f")[1] == [{"score": -1.0, "acc": 0.0, "pred": None}]


def test_verl_batches(scorer):
    source = """
    def f(data_sources, solution_strs, ground_truths, extra_infos):
        return [float(g in s) for s, g in zip(solution_strs, ground_truths)]
    """
    assert parts(scorer, source, function="f")[1] == [{"score": 1.0}, {"score": 0.0}]


EASYR1 = {
    "batch": """
    REWARD_NAME, REWARD_TYPE = "mine", "batch"
    def compute_score(reward_inputs, format_weight=0.1):
        return [{"overall": one(r), "format": format_weight} for r in reward_inputs]
    """,
    "sequential": """
    REWARD_TYPE = "sequential"
    def compute_score(reward_input, format_weight=0.1):
        return {"overall": one(reward_input), "format": format_weight}
    """,
    "pairs": """
    def compute_score(predicts: list[str], ground_truths: list[str], format_weight: float = 0.1):
        return [{"overall": one({"response": p, "ground_truth": g}), "format": format_weight}
                for p, g in zip(predicts, ground_truths)]
    """,
    "pair": """
    def compute_score(predict_str: str, ground_truth: str, format_weight: float = 0.1):
        return {"overall": one({"response": predict_str, "ground_truth": ground_truth}), "format": format_weight}
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", EASYR1)
def test_easyr1_functions_of_all_four_forms(scorer, form):
    source = "    def one(r): return float(r['ground_truth'] in r['response'])\n" + EASYR1[form].lstrip("\n")
    s, got = parts(scorer, source, function="compute_score", format_weight=0.3)
    assert s.spec.user.style == "easyr1" and s.spec.user.batched == (form in ("batch", "pairs"))
    assert got == [{"overall": 1.0, "format": 0.3}, {"overall": 0.0, "format": 0.3}]
    assert [x.value for x in s.score([ROW, OTHER], strict=True)] == [1.0, 0.0]


def test_easyr1_length_is_the_token_count(scorer):
    source = "def compute_score(reward_inputs): return [{'overall': r['response_length']} for r in reward_inputs]"
    assert parts(scorer, source, function="compute_score")[1] == [{"overall": 9.0}, {"overall": 1.0}]


def test_a_dict_without_the_value_is_an_error(scorer):
    with pytest.raises(RewardError, match="without `overall`"):
        parts(
            scorer,
            "def compute_score(reward_inputs): return [{'score': 1.0} for r in reward_inputs]",
            function="compute_score",
        )
    with pytest.raises(RewardError, match="without `score`"):
        parts(scorer, "def f(solution_str, ground_truth): return {'acc': 1}", function="f")


def test_a_task_with_several_truth_fields_gives_them_all(scorer):
    row = RewardInput("x", truth={"same": True, "digit": ["1", "1"]})
    source = "def f(solution_str, ground_truth): return float(ground_truth['same'])"
    assert parts(scorer, source, [row], function="f")[1] == [{"score": 1.0}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def reward(completions, ground_truth, solution_str): return 1.0", "it could be trl or verl"),
        ("def reward(a, b): return 1.0", "fit no known convention"),
        ("def reward(response): return 1.0", "fit no known convention"),
        ("def reward(row: str): return 1.0", "fit no known convention"),
        ("def reward(**kwargs): return 1.0", "fit no known convention"),
        ("def reward(): return 1.0", "fit no known convention"),
    ],
)
def test_an_unclear_signature_is_refused_and_names_the_styles(reward_file, source, words):
    with pytest.raises(RewardError, match=words) as error:
        reward_file(source)
    assert 'style = "vlmrl"' in (error.value.hint or "") and '"easyr1"' in (error.value.hint or "")


def test_a_given_style_settles_an_unclear_signature(scorer):
    _, got = parts(scorer, "def reward(response): return float('7' in response.response)", style="vlmrl")
    assert got == [{"reward": 1.0}, {"reward": 0.0}]
    _, got = parts(scorer, "def reward(a, b): return {'overall': float(b in a)}", style="easyr1")
    assert got == [{"overall": 1.0}, {"overall": 0.0}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ("def reward(x, bonus=1): return bonus", {"bonsu": 1}, "takes no argument `bonsu`"),
        ("def reward(x, bonus): return bonus", {}, "calling convention"),
        ("def reward(x, *, bonus): return bonus", {"bonus": 1, "y": 2}, "takes no argument `y`"),
        ("def reward(completions): return 1", {"completions": 1}, "calling convention|takes no argument"),
        ("def reward(completions, scale=1): return 1", {"scal": 1}, "takes no argument `scal`"),
        ("def reward(solution_str, ground_truth, k): return 1", {}, "needs the argument `k`"),
        ("reward = 5", {}, "is a int, not a function"),
        ("def other(x): return 1", {}, "has no function `reward`"),
        ("def reward(x) return 1", {}, "SyntaxError"),
        (
            "import not_there_at_all\ndef reward(x): return 1",
            {},
            "ModuleNotFoundError: No module named 'not_there_at_all'",
        ),
        ("raise SystemExit(0)", {}, "SystemExit"),
        ("import os; os._exit(3)", {}, "exit code 3"),
        ("WEIGHTS = {'a': 'much'}\ndef reward(x): return 1", {}, "ValueError"),
    ],
)
def test_what_is_wrong_with_a_reward_file_is_said_when_it_is_loaded(reward_file, source, args, words):
    with pytest.raises(RewardError, match=words):
        reward_file(source, **args)


def test_a_trl_column_that_is_not_there_is_named(scorer):
    with pytest.raises(RewardError, match="needs the column `solution`; the rows have: answer, level"):
        parts(scorer, "def reward(completions, solution): return [1.0 for c in completions]")


def test_a_file_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(RewardError, match=r"there is no reward file rewards/none\.py") as error:
        load_reward("rewards/none.py:f", base_dir=tmp_path)
    assert str(tmp_path) in (error.value.hint or "")
    with pytest.raises(RewardError, match="does not name a function"):
        load_reward("rewards/none.py", base_dir=tmp_path)
    with pytest.raises(RewardError, match="unknown reward style"):
        load_reward("none.py:f", style="openrlhf", base_dir=tmp_path)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\ndef f(x): return 1")
    with pytest.raises(RewardError, match="not UTF-8"):
        load_reward("latin.py:f", base_dir=tmp_path)


def test_a_relative_path_starts_at_the_recipe_and_then_here(tmp_path, monkeypatch):
    for folder, value in (("recipe", 1.0), ("here", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both.py").write_text(f"def f(x): return {value}")
    (tmp_path / "here" / "only.py").write_text("def f(x): return 3.0")
    monkeypatch.chdir(tmp_path / "here")
    first = load_reward("both.py:f", base_dir=tmp_path / "recipe")
    assert first.user is not None and "recipe" in first.user.file
    assert load_reward("only.py:f", base_dir=tmp_path / "recipe").source_sha256
    assert load_reward("both.py:f").source_sha256 != first.source_sha256


def test_the_folder_of_the_file_is_importable_and_annotations_are_live(scorer, tmp_path):
    (tmp_path / "my_words.py").write_text("WORDS = ['7']")
    source = """
    from dataclasses import dataclass
    from my_words import WORDS
    @dataclass
    class Rule:
        weight: float = 1.0
    assert Rule.__annotations__["weight"] is float
    def reward(x): return Rule().weight * any(w in x.response for w in WORDS)
    """
    assert parts(scorer, source)[1] == [{"reward": 1.0}, {"reward": 0.0}]
    assert not (tmp_path / "__pycache__" / "mine.cpython-311.pyc").exists()


def test_the_hash_is_that_of_the_file(reward_file):
    import hashlib

    source = "def reward(x): return 1.0"
    assert reward_file(source).source_sha256 == hashlib.sha256(source.encode()).hexdigest()


@pytest.mark.parametrize("odd", ["float('nan')", "-float('inf')", "numpy.float32('nan')"])
def test_a_metric_beside_the_score_may_be_not_finite_and_the_score_may_not(scorer, odd):
    verl = f"import numpy\ndef compute_score(solution_str, ground_truth): return {{'score': 0.5, 'near': {odd}}}"
    trl = f"import numpy\ndef f(completions, log_extra, **_):\n log_extra('near', [{odd}])\n return [0.5]"
    note = "`near` is not a finite number"
    for source, function, part in ((verl, "compute_score", "score"), (trl, "f", "reward")):
        (score,) = scorer(source, function=function).score([RewardInput("a", truth={"answer": "1"})])
        assert (score.value, score.parts, score.note) == (0.5, {part: 0.5, "near": None}, note)
    (score,) = scorer(verl.replace("0.5", odd), function="compute_score").score([RewardInput("a", truth={"answer": 1})])
    assert score.failed and "`score` is" in str(score.error)
    weighted = verl + "\nWEIGHTS = {'score': 0.5, 'near': 0.5}"
    (score,) = scorer(weighted, function="compute_score").score([RewardInput("a", truth={"answer": 1})])
    assert score.failed and f"{note}, and it has a weight" in str(score.error)
