"""The math reward in its workers: bombs, errors, arguments; and the parts that look at a response as a whole."""

from __future__ import annotations

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards import Builtin, reward_record
from vlmrl.rewards.base import RewardSpec, WorkerFunction, earned_on_timeout
from vlmrl.rewards.math import maye
from vlmrl.rewards.math.expressions import UnreadableError, check_size, number_token
from vlmrl.rewards.math.grader import make_grader
from vlmrl.rewards.math.latex import find_answer, read_number
from vlmrl.rewards.math.reading import read_unit
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import REWARDS, load_recorded, load_reward
from vlmrl.types import RewardInput

BOMB = r"\boxed{\binom{99999999}{44444444}}"
"""Answer that SymPy would compute for hours."""


def boxed(answer: str, gold: str = "20", **more) -> RewardInput:
    return RewardInput(f"\\boxed{{{answer}}}", {"answer": gold}, **more)


@pytest.mark.slow
def test_a_bomb_is_refused_by_its_form_and_the_others_are_unchanged():
    good = [boxed("20"), boxed("21"), boxed(r"\frac{40}{2}")]
    with Scorer(load_reward("math"), timeout_seconds=0.8) as scorer:
        before = scorer.score(good)
        scores = scorer.score([good[0], RewardInput(BOMB, {"answer": "20"}), *good[1:]])
    assert [scores[0], *scores[2:]] == before
    assert [s.value for s in before] == [1.0, 0.0, 1.0]
    bomb = scores[1]
    assert bomb.value == 0.0 and bomb.status == "ok" and not earned_on_timeout(bomb)
    assert "its binomial coefficient is too large" in bomb.note
    assert before[1].detail == {
        "math": {"gold": "20", "answer": "21", "gold_value": "20", "answer_value": "21", "verdict": "wrong",
                 "reason": "the values differ"}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "truth", "response"),
    [
        ("tag", "<answer>7</answer>", "<answer>7</answer>"),
        ("tag", r"<think>\boxed{3}</think> <answer>4</answer>", r"\boxed{3} <answer>4</answer>"),
        ("box", "<answer>7</answer>", r"\boxed{7}"),
        ("box", r"<answer>It is 7.</answer> \boxed{7}", r"<answer>It is 7.</answer> \boxed{7}"),
        ("text", "<answer>7</answer>", "<answer>7</answer>"),
    ],
)
def test_the_gold_answer_is_taken_out_of_the_answer_tag(place, truth, response):
    grade = make_grader(place=place)
    assert grade(RewardInput(response, {"answer": truth})).parts["accuracy"] == 1.0
    assert grade(RewardInput(response.replace("7", "8").replace("4", "5"), {"answer": truth})).parts["accuracy"] == 0.0


@pytest.mark.parametrize(
    "before",
    ["The answer is not ", "It isn\u2019t $", "x is never \\(", "Anything but **", "neither 5 nor ", "NOT "],
)
def test_a_denial_right_before_the_box_counts(before):
    result = make_grader()(RewardInput(f"{before}\\boxed{{20}}.", {"answer": "20"}))
    assert result.parts["accuracy"] == 0.0 and "the words before the last box deny it" in result.note


@pytest.mark.parametrize(
    "before",
    [
        *(
            "It is not 5 but ",
            "It is not \\boxed{5} but ",
            "The answer is not negative, so ",
            "If not, ",
            "x is not 5.\n",
        ),
        *("It is not only ", "not small: ", "This is a knot ", "It is not.\n\n", "not\n"),
    ],
)
def test_a_denial_of_something_else_does_not_count(before):
    assert make_grader()(RewardInput(f"{before}\\boxed{{20}}.", {"answer": "20"})).parts["accuracy"] == 1.0


def in_worker(body: str, monkeypatch, tmp_path, **facts) -> RewardSpec:
    """A built-in of workers whose grader is this module text."""
    (tmp_path / "grader_of_a_test.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = WorkerFunction("slow", "grader_of_a_test", "make", {"right": "a"})
    return RewardSpec("slow", lambda x: {}, {"accuracy": (0.0, 1.0)}, {"accuracy": 1.0}, worker=worker, **facts)


@pytest.mark.slow
def test_many_bombs_in_a_row_do_not_end_the_call(monkeypatch, tmp_path):
    """A group of bombs is the responses' fault where `on_timeout` is declared: the rest of the call is still scored."""
    body = (
        "import os\n"
        "def make(right):\n"
        "    def grade(x):\n"
        "        if x.response == 'bomb':\n"
        "            os._exit(3)\n"
        "        return {'accuracy': float(x.response == right)}\n"
        "    return grade\n"
    )
    spec = in_worker(body, monkeypatch, tmp_path, on_timeout={"accuracy": 0.0})
    monkeypatch.setattr("vlmrl.rewards.attempts.AttemptRule.lost_in_a_row", 2)
    texts = ["bomb"] * 3 + ["a", "b"]
    with Scorer(spec) as scorer:
        scores = scorer.score([RewardInput(text) for text in texts])
    assert [s.value for s in scores] == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert all(earned_on_timeout(s) for s in scores[:-2]) and not scorer.failures


@pytest.mark.slow
def test_a_builtin_in_a_worker_that_raises_or_cannot_start_is_an_error(monkeypatch, tmp_path):
    with Scorer(in_worker("def make(right):\n    return lambda x: 1 / 0\n", monkeypatch, tmp_path)) as scorer:
        (score,) = scorer.score([RewardInput("a")])
        assert score.status == "failed"
        assert score.error == "ZeroDivisionError: division by zero (grader_of_a_test.py:2)"
    missing = in_worker("import no_such_module\n", monkeypatch, tmp_path)
    with Scorer(missing) as scorer, pytest.raises(RewardError, match=r"slow.*no_such_module"):
        scorer.score([RewardInput("a")])


@pytest.mark.slow
def test_a_gold_answer_that_cannot_be_graded_fails_and_is_no_0():
    with Scorer(load_reward("math")) as scorer:
        golds = ("", "\\boxed{}", "a long solution without a box " * 20, "\\int_0^1 x", "\\frac{1}{")
        scores = scorer.score([boxed("20", gold) for gold in golds])
        assert all(score.status == "failed" and "cannot be graded" in (score.error or "") for score in scores)
        (score,) = scorer.score([RewardInput("\\boxed{20}", {"other": 1, "another": 2})])
        assert "no expected answer" in (score.error or "")


def test_the_time_limit_is_the_shorter_of_both():
    spec = load_reward("math")
    assert spec.timeout_seconds == 2.5 and spec.worker is not None and not spec.pure
    for given, used in ((10.0, 2.5), (1.0, 1.0)):
        with Scorer(spec, timeout_seconds=given) as scorer:
            assert scorer.rewards[0].backend.limits.seconds == used


def test_loading_the_reward_imports_no_sympy_here():
    import subprocess
    import sys

    code = (
        "import sys; from vlmrl.tasks.builtin_rewards import load_reward; load_reward('math'); load_reward('maye');"
        "load_reward('rllava_math'); "
        "print([m for m in ('sympy', 'math_verify', 'latex2sympy2_extended') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"units": "optionall"}, "optional"), ({"place": "somewhere"}, "box"), ({"decimals": -1}, "decimals = -1"),
        ({"decimals": True}, "decimals"), ({"script": "elvish"}, "latin"), ({"min_tokens": -1}, "min_tokens"),
        ({"mixed": "both"}, "mixed"), ({"unit": "ignored"}, "takes no argument `unit`"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(args, words):
    with pytest.raises(RewardError) as error:
        load_reward("math", args=args)
    assert words in str(error.value)


def test_the_length_is_a_part_where_its_limits_are_given():
    assert "length" not in load_reward("math").ranges
    spec = load_reward("math", args={"soft_tokens": 10, "max_tokens": 20})
    assert spec.ranges["length"] == (0.0, 1.0) and spec.on_timeout["length"] == 0.0
    for tokens, finish, part in ((10, "stop", 1.0), (15, "stop", 0.5), (25, "stop", 0.0), (5, "length", 0.0)):
        assert spec(boxed("20", finish=finish, num_tokens=tokens))["length"] == part
    for args in ({"soft_tokens": 10}, {"max_tokens": 10}, {"soft_tokens": 20, "max_tokens": 10}):
        with pytest.raises(RewardError, match="0 < soft < max"):
            load_reward("math", args=args)


def test_the_reward_is_loaded_again_from_its_record():
    spec = load_reward("math", args={"units": "required", "decimals": 4})
    record = reward_record(spec, {"accuracy": 1.0, "think_format": 0.1})
    again = load_recorded(record)
    assert again.args == spec.args and again.worker == spec.worker and again.on_timeout == spec.on_timeout
    assert isinstance(REWARDS["math"], Builtin) and record["version"] == REWARDS["math"].version


@pytest.mark.parametrize(
    ("text", "place", "thought", "answer", "reason"),
    [
        ("<answer>\\boxed{5}</answer>", "tag", "skip", "5", ""),
        ("<answer>5</answer>", "tag", "skip", "5", ""),
        ("\\boxed{5}", "tag", "skip", None, "no <answer> tag"),
        (" 5 ", "text", "skip", "5", ""),
        ("5 and \\boxed{6}", "text", "skip", "6", ""),
        ("5 and \\boxed{6", "text", "skip", None, "the last box is not closed"),
        ("<think>\\boxed{5}</think>", "box", "read", "5", ""),
        ("<think>\\boxed{5}</think>", "box", "skip", None, "there is no box after the thought"),
        ("\\boxed{" + "1+" * 300 + "1}", "box", "skip", None, "the answer has more than 500 characters"),
        ("\\boxed{\\frac{1}{2}}\\}", "box", "skip", "\\frac{1}{2}", ""),
    ],
)
def test_the_answer_is_found_where_the_recipe_says(text, place, thought, answer, reason):
    assert find_answer(text, place=place, thought=thought) == (answer, reason)


def test_long_responses_take_linear_time():
    """400 kB of half boxes and open thoughts are read in one pass; a quadratic reader would need many seconds."""
    for piece in ("\\boxed{", "<think>", "{", "\\boxed", "</think>\\boxed{5}", "\\{"):
        find_answer(piece * (400_000 // len(piece)))
        maye.format_part(piece * (400_000 // len(piece)))


def test_numbers_are_exact():
    number = read_number("0.1")
    assert number is not None and (number.value * 10, number.step) == (1, number.value) and number.digits == 1
    assert read_number("1/0") is None and read_number("\\frac{1}{0}") is None
    assert read_number("9" * 301) is None and read_number("1e999") is not None and read_number("1e9999") is None
    assert str(number_token("1,234")) == "1234" and str(number_token("-7")) == "-7"
    with pytest.raises(ValueError):
        number_token("__import__('os')")


@pytest.mark.parametrize(
    ("text", "powers"),
    [
        ("cm", (("length", 1),)), ("\\text{ cm}^{2}", (("length", 2),)), ("sq. ft", (("length", 2),)),
        ("m/s^2", (("length", 1), ("time", -2))), ("cubic meters", (("length", 3),)), ("mL", (("length", 3),)),
        ("km per hour", (("length", 1), ("time", -1))), ("^{\\circ}C", (("celsius", 1),)), ("%", (("percent", 1),)),
        ("red apples", (("count red apple", 1),)), ("or 5", None), ("is wrong", None), ("x", None), ("", None),
        ("square units", (("any", 2),)), ("meters squared", (("length", 2),)),
    ],
)  # fmt: skip
def test_units_are_read_as_what_they_measure(text, powers):
    unit = read_unit(text)
    assert (unit.powers if unit else None) == powers


@pytest.mark.parametrize(
    "text", ["9^{9^{9}}", "2^{2^{2^{2}}}", "10^{99999}", "9999!", "3!!", "1" * 301, "\\sum_{i=1}^{9} i", "x" * 301]
)
def test_what_cannot_be_computed_is_refused_before_it_is_parsed(text):
    with pytest.raises(UnreadableError):
        check_size(text)


def test_the_published_reward_is_a_sum_that_a_penalty_replaces():
    # right, one thought, no ideographs: 1 + 1 + 0; cut: -0.1; 5 of 10 characters ideographs: -0.05
    grade = maye.make_grader(key=None, min_tokens=1, penalty=-0.1)

    def value(text: str, finish="stop", tokens=9) -> float:
        given = grade(RewardInput(text, {"solution": "\\boxed{20}"}, finish=finish, num_tokens=tokens))
        return sum(given.parts.values())

    right = "<think>a</think>\\boxed{20}"
    assert value(right) == 2.0
    assert value(right, "length") == pytest.approx(-0.1) and value(right, tokens=0) == pytest.approx(-0.1)
    assert value("\u7b54" * 5 + "abcde") == pytest.approx(-0.05)
    assert value("<think></think>") == 1.0, "an empty thought counts"
    assert value("<think>a</think><think>b</think>") == 0.0
    assert value("\u0434\u0430 \u3042") == 0.0, "only ideographs count"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("answer 5", 0.0), ("\u03b1 = 5\u00b0", 0.0), ("", 0.0), ("5", 0.0), ("caf\u00e9", 0.0),
        ("ab\u7b54\u6848", -0.5), ("ab\u3042\u3044", -0.5), ("abc\u0434", -0.25), ("\uac00", -1.0),
    ],
)  # fmt: skip
def test_the_language_part_is_the_share_of_other_letters(text, part):
    spec = load_reward("language")
    assert spec(RewardInput(text))["language"] == part


def test_the_language_of_a_recipe_is_not_penalised():
    spec = load_reward("language", args={"script": "cyrillic"})
    assert spec(RewardInput("\u043e\u0442\u0432\u0435\u0442 x = 5"))["language"] == 0.0
    assert spec(RewardInput("\u7b54"))["language"] == -1.0


def test_the_think_format_and_the_end():
    spec, end = load_reward("think_format"), load_reward("ending", args={"min_tokens": 3})
    for text, part in (
        ("<think>a</think>b", 1.0), (" <think>a</think> b", 1.0), ("<think></think>b", 0.0), ("<think>a</think> ", 0.0),
        ("x<think>a</think>b", 0.0), ("<think>a<think>b</think>c", 0.0), ("<think>\u200b</think>b", 0.0), ("b", 0.0),
    ):  # fmt: skip
        assert spec(RewardInput(text)) == {"think_format": part}, text
    for finish, tokens, part in (("stop", 3, 0.0), ("stop", 2, -1.0), ("length", 9, -1.0)):
        assert end(RewardInput("a", finish=finish, num_tokens=tokens)) == {"ending": part}


POLICIES = [
    # (arguments, gold, answer, right)
    ({"units": "required"}, "12 cm", "12", 0), ({"units": "required"}, "12", "12 cm", 0),
    ({"units": "required"}, "12 cm", "0.12 m", 1), ({"units": "required"}, "12", "12", 1),
    ({"units": "ignored"}, "12 cm", "12 in", 1), ({"units": "ignored"}, "12 cm", "13 in", 0),
    ({"units": "required"}, "45^\\circ", "45", 1), ({"degrees": "required"}, "45^\\circ", "45", 0),
    ({"degrees": "required"}, "45^\\circ", "45^\\circ", 1), ({"degrees": "ignored"}, "45^\\circ", "45", 1),
    ({"percent": "value"}, "20\\%", "20", 0), ({"percent": "value"}, "20\\%", "0.2", 1),
    ({"percent": "value"}, "20", "20\\%", 0), ({"percent": "ignored"}, "20\\%", "20", 1),
    ({"percent": "ignored"}, "20\\%", "0.2", 0), ({"money": "required"}, "\\$20", "20", 0),
    ({"money": "required"}, "\\$20", "20 dollars", 1), ({"money": "ignored"}, "\\$20", "\u20ac20", 1),
    ({"decimals": 0}, "6\\sqrt{5}", "13.416", 0), ({"decimals": 0}, "\\frac{1}{2}", "0.5", 1),
    ({"decimals": 5}, "6\\sqrt{5}", "13.4", 0), ({"decimals": 5}, "6\\sqrt{5}", "13.416", 1),
    ({"decimals": 2}, "\\frac{1}{3}", "0.33", 1), ({"sets": "loose"}, "\\{1,2\\}", "(1,2)", 1),
    ({"sets": "loose"}, "\\{1,2\\}", "(1,3)", 0), ({"intervals": "ends"}, "[1,2)", "(1,2]", 1),
    ({"intervals": "ends"}, "[1,2)", "(1,3]", 0), ({"choices": "exact"}, "B", "B. 45", 0),
    ({"choices": "exact"}, "B", "(B)", 1), ({"mixed": "product"}, "1", "2\\frac{1}{2}", 1),
    ({"mixed": "product"}, "2.5", "2\\frac{1}{2}", 0),
]  # fmt: skip


def test_each_policy_decides_as_it_says():
    wrong = [
        (args, gold, answer)
        for args, gold, answer, right in POLICIES
        if load_reward("math", args=args)(boxed(answer, gold))["accuracy"] != right
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("130°", r"\angle 2 = 130^\circ", 1),
        ("130°", "∠2 = 130°", 1),
        ("130", r"\angle 2 = 13", 0),
        ("27°", r"\text{27°}", 1),
        ("27°", r"27\text{°}", 1),
        ("27°", r"\mathrm{27^\circ}", 1),
        ("28°", r"\mathrm{27^\circ}", 0),
        ("27°", "27度", 1),
        ("27°", "\uff12\uff17°", 1),
        ("3 cm", r"\text{3cm}", 1),
        ("3 cm", r"\text{3 m}", 0),
        ("5", "5 apples", 1),
        ("5", "5 million", 0),
        ("5", r"\text{5 million}", 0),
        ("5", r"5 \text{ hundredths}", 0),
        ("5", "5 factorial", 0),
        ("5", "5 otherwise six", 0),
        ("5 million", "5", 0),
        ("5 million", "5 million", 1),
        ("1 gal", "231 in^3", 1),
        ("1 gal", "1 m^3", 0),
    ],
)
def test_values_in_text_commands_and_words_that_change_a_value(gold, answer, right):
    assert make_grader()(boxed(answer, gold)).parts["accuracy"] == right
