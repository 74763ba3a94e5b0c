"""The list of graded pairs: what a person calls right, what `math` says, and what the published judge of MAYE says.

`math/forms.jsonl` has answers in many forms, without their box: units, degrees, thousands, options, points, roots,
intervals, matrices, sizes, percent, money, sets; `right` was decided by hand before they were graded.

`math/pairs.jsonl` has a line for each pair: the gold answer, the response, `right` and `why` (worked out by hand), and
`maye`, the verdict of the published code itself on that pair. Where the gold answer has no box, that code was given it
in one, as its datasets have it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards.math import maye
from vlmrl.rewards.math.expressions import TooLargeError, check_size
from vlmrl.rewards.math.grader import make_grader
from vlmrl.types import RewardInput

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math" / "pairs.jsonl").read_text("utf-8").splitlines()]
NEVER_ENDS = r"9^{9^{9}}"
"""Answer on which the published rule needs its clock; `math` refuses it at once."""


@pytest.fixture(scope="module")
def grade():
    return make_grader()


def test_the_list_is_long_and_says_why() -> None:
    assert len(PAIRS) >= 300
    assert all(pair["why"] and pair["about"] for pair in PAIRS)
    assert len({(pair["gold"], pair["response"]) for pair in PAIRS}) == len(PAIRS)
    assert 0.4 < sum(pair["right"] for pair in PAIRS) / len(PAIRS) < 0.7


@pytest.mark.parametrize("about", sorted({pair["about"] for pair in PAIRS}))
def test_every_pair_is_graded_as_by_hand(grade, about) -> None:
    wrong = []
    for pair in (pair for pair in PAIRS if pair["about"] == about):
        result = grade(RewardInput(pair["response"], {"answer": pair["gold"]}))
        assert result.detail["reason"] and result.detail["verdict"] in ("right", "wrong", "no answer")
        assert bool(result.note) != pair["right"], "a note says why where it is wrong"
        if (result.parts["accuracy"] == 1.0) != pair["right"]:
            wrong.append((pair["gold"], pair["response"], pair["why"], result.detail))
    assert not wrong


def test_every_form_is_graded_as_by_hand(grade) -> None:
    lines = (Path(__file__).parent / "math" / "forms.jsonl").read_text("utf-8").splitlines()
    forms = [json.loads(line) for line in lines]
    assert len(forms) >= 350 and sum(not form["right"] for form in forms) / len(forms) > 0.15
    wrong = []
    for form in forms:
        result = grade(RewardInput(f"\\boxed{{{form['answer']}}}", {"answer": form["gold"]}))
        if (result.parts["accuracy"] == 1.0) != form["right"]:
            wrong.append((form, result.detail["reason"]))
    assert not wrong


@pytest.mark.parametrize(
    "form",
    [
        "((9!)!)!", r"\binom{99999999}{49999999}", r"\binom{\binom{99}{49}}{9}", "x^x^x^x", "x^{x^{x^x}}", "9^{9^{9}}",
        "((9^{999})^{999})^{999}", r"\Gamma(99999999)", r"\exp(\exp(\exp(9)))", "(999!)^{9999}", "99999!",
    ],
)  # fmt: skip
def test_what_is_too_large_by_its_form_is_never_computed(grade, form: str) -> None:
    with pytest.raises(TooLargeError):
        check_size(form)
    assert grade(RewardInput(f"\\boxed{{{form}}}", {"answer": "5"})).parts["accuracy"] == 0.0
    assert grade(RewardInput(f"\\boxed{{{form}}}", {"answer": form})).parts["accuracy"] == 1.0  # the same text


@pytest.mark.slow
def test_the_published_rule_is_reproduced() -> None:
    """Equal to the published code on every pair, and right on far fewer of them than `math`."""
    different = []
    for pair in PAIRS:
        if NEVER_ENDS in pair["response"]:
            continue
        gold = pair["gold"] if "boxed" in pair["gold"] else f"\\boxed{{{pair['gold']}}}"
        if maye.judge(pair["response"], gold)[0] != pair["maye"]:
            different.append((pair["gold"], pair["response"], pair["maye"]))
    assert not different
    assert sum(pair["maye"] == pair["right"] for pair in PAIRS) / len(PAIRS) < 0.75


def test_a_solution_without_a_box_is_an_error_of_the_published_rule() -> None:
    grade = maye.make_grader(key=None, min_tokens=1, penalty=-0.1)
    with pytest.raises(RewardError, match="has no box"):
        grade(RewardInput("no box here", {"answer": "20"}, num_tokens=5))


CODE = ("__import__('os').getcwd()", "1+1", "[].append(1)", "exit()", "2**3", "000", "1e3", "\\text{__import__}")
FORMULAS = (r"6\sqrt{5}", r"2.5x+1", r"\frac{a}{b}", r"x^2+y^2=4", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\binom{5}{2}")


@pytest.mark.slow
def test_model_text_reaches_no_evaluator(monkeypatch, grade) -> None:
    """SymPy's reader of Python texts, which `sympify` calls for a text, is called for none of them."""
    import sympy.parsing.sympy_parser as parser
    import sympy.physics.units  # it reads its own names when it is first imported

    from vlmrl.rewards.math import expressions, grader

    maye.make_grader(key=None, min_tokens=1, penalty=-0.1)  # as a worker does when it starts
    calls: list[object] = []

    def watched(*args, **kwargs):
        calls.append(args)
        return evaluate(*args, **kwargs)

    evaluate = parser.eval_expr
    monkeypatch.setattr(parser, "eval_expr", watched)
    for cached in (expressions.expression, expressions.constant, grader.judge, maye.judge):
        cached.cache_clear()
    texts = [pair["response"] for pair in PAIRS if NEVER_ENDS not in pair["response"]]
    texts += [f"So it is \\boxed{{{code}}}" for code in (*CODE, *FORMULAS)]
    for text in texts:
        for gold in ("20", r"7x+\sqrt{3}"):
            grade(RewardInput(text, {"answer": gold}))
        maye.judge(text, "\\boxed{20}")
    assert calls == []
    sympy.sympify("1+1")
    assert calls, "the watch sees what sympify does"
