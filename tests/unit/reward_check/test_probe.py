from __future__ import annotations

import textwrap
import time
from functools import partial

import pytest

from vlmrl.errors import RewardError
from vlmrl.reward_check.probe import probe_reward
from vlmrl.reward_check.tricks import WORDS, ProbeResult, ranked
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.pairs.answer import form_of
from vlmrl.tasks.pairs.probe_responses import pair_probe
from vlmrl.types import RewardInput

LEVELS = ("loop", "digit")
PAIRS = [
    {"same": True, "loop": ["no", "no"], "digit": ["1", "1"]},
    {"same": False, "loop": ["no", "yes"], "digit": ["1", "8"]},
    {"same": False, "loop": ["yes", "yes"], "digit": ["6", "8"]},
    {"same": True, "loop": ["yes", "yes"], "digit": ["8", "8"]},
]
FORM = partial(pair_probe, form_of(LEVELS))
BASELINE = partial(pair_probe, form_of(()))
PAIR_ROWS = [RewardInput("", truth=t, prompt="Same digit?") for t in PAIRS]
TEXT_ROWS = [RewardInput("", truth={"answer": str(n)}, prompt="How many?") for n in (3, 5, 7, 7)]


def flagged(report) -> set[str]:
    return {p["name"] for p in report["probes"] if p["flagged"]}


def load(tmp_path, source):
    (tmp_path / "r.py").write_text(textwrap.dedent(source))
    return load_reward("r.py:reward", base_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("args", [{}, {"partial": False}, {"consistency": "part"}])
def test_no_trick_pays_against_the_builtin_pair_rewards(args):
    spec = load_reward("taxonomy", args={"levels": LEVELS, **args})
    report = probe_reward(spec, spec.weights, PAIR_ROWS, probe=FORM)
    assert flagged(report) == set()
    assert report["honest"]["answer"] == "always 0.5000 and the commonest names"
    if not args:
        # the names are loop "no; yes": format 0.2, answer 0.4 * 0.75,
        # loop 0.2 * mean(0.5, 1, 0.5, 0.5), digit 0.2 * mean(0, 1, 0, 0)
        assert report["honest"]["uninformed"] == pytest.approx(0.5 + 0.125 + 0.05, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-6, 1e-2])
def test_the_noise_of_a_reward_neither_hides_a_finding_nor_makes_one(tmp_path, noise):
    source = """
        import random
        def reward(x):
            said = [word.strip(".") for word in x.response.split()]
            return float({match}) + random.random() * {noise}
    """
    blind = source.format(match="any(w.isdigit() for w in said)", noise=noise)
    for _ in range(3):
        report = probe_reward(load(tmp_path, blind), {}, TEXT_ROWS)
        assert {p["name"]: p["verdict"] for p in report["probes"]}["the right answer"] == "blind"
    exact = source.format(match='x.response.strip() == x.truth["answer"]', noise=noise)
    report = probe_reward(load(tmp_path, exact), {}, TEXT_ROWS)
    assert flagged(report) == set() and report["unsteady"] == 1


@pytest.mark.slow
def test_a_truth_of_any_kind_is_tried(tmp_path):
    spec = load(tmp_path, "def reward(x): return 1.0")
    rows = [RewardInput("", truth={"same": same}) for same in ([1], True)]
    assert "the right answer" in flagged(probe_reward(spec, {}, rows, probe=BASELINE))


@pytest.mark.slow
def test_names_without_a_weight_are_not_looked_at_which_is_no_finding():
    spec = load_reward("taxonomy", args={"levels": LEVELS, "levels_weight": 0.0})
    assert flagged(probe_reward(spec, spec.weights, PAIR_ROWS, probe=FORM)) == set()
    spec = load_reward("taxonomy", args={"levels": LEVELS})
    assert flagged(probe_reward(spec, {"format": 0.2, "answer": 0.8}, PAIR_ROWS, probe=FORM)) == set()


@pytest.mark.slow
def test_no_trick_pays_against_the_baseline_or_the_text_rewards():
    spec = load_reward("pair_answer")
    assert flagged(probe_reward(spec, spec.weights, PAIR_ROWS, probe=BASELINE)) == set()
    for name in ("exact_match", "number_match"):
        spec = load_reward(name)
        report = probe_reward(spec, spec.weights, TEXT_ROWS)
        assert flagged(report) == set()
        assert report["honest"]["uninformed"] == 0.5  # "7" for every row


@pytest.mark.slow
@pytest.mark.parametrize("name", ["taxonomy", "pair_answer"])
def test_the_repair_that_was_asked_for_is_no_finding(name):
    spec = load_reward(name, args={"relaxed": True, **({"levels": LEVELS} if name == "taxonomy" else {})})
    report = probe_reward(spec, spec.weights, PAIR_ROWS, probe=FORM if name == "taxonomy" else BASELINE)
    assert flagged(report) == set() and "never closed" not in {p["name"] for p in report["probes"]}


@pytest.mark.slow
def test_without_the_gate_and_with_most_weight_on_names_a_contradiction_pays():
    weights = {"format": 0.1, "answer": 0.1, "loop": 0.4, "digit": 0.4}  # TaxonRL's ablation of 80%
    for rule, found in (("off", {"contradiction"}), ("gate", set())):
        spec = load_reward("taxonomy", args={"levels": LEVELS, "consistency": rule})
        assert flagged(probe_reward(spec, weights, PAIR_ROWS, probe=FORM)) == found


@pytest.mark.slow
def test_a_reward_that_is_paid_by_search_is_caught(tmp_path):
    spec = load(tmp_path, "def reward(x): return float(x.truth['answer'] in x.response)")
    found = flagged(probe_reward(spec, spec.weights, TEXT_ROWS))
    assert {"every answer", "every answer, bare", "all numbers", "or", "two answers"} <= found
    assert "nothing" not in found


def test_a_reward_for_the_last_number_alone_reads_one_answer_and_is_warned_of_what_stands_before_it(tmp_path):
    source = r"""
    import re
    def reward(x):
        numbers = re.findall(r"\d+", x.response)
        return float(bool(numbers) and numbers[-1] == x.truth["answer"])
    """
    spec = load(tmp_path, source)
    report = probe_reward(spec, spec.weights, TEXT_ROWS)
    assert flagged(report) == set()
    assert {p["name"] for p in report["probes"] if p["verdict"] == "lenient"} == {"denied", "minus"}


@pytest.mark.slow
def test_a_reward_that_pays_for_length_is_caught(tmp_path):
    spec = load(tmp_path, "def reward(x): return min(1.0, len(x.response) / 1000)")
    assert "very long" in flagged(probe_reward(spec, spec.weights, TEXT_ROWS))


@pytest.mark.slow
def test_a_reward_that_a_text_can_break_is_caught_and_the_row_shown(tmp_path):
    source = """
    def reward(x):
        if "<" not in x.response: return 0.0
        return float(x.response.split("<answer>")[1].split("</answer>")[0] == x.truth["answer"])
    """
    report = probe_reward(load(tmp_path, source), {}, TEXT_ROWS)
    noise = next(p for p in report["probes"] if p["name"] == "noise")
    assert noise["flagged"] and noise["errors"] == 4 and noise["mean"] is None and "IndexError" in noise["error"]


@pytest.mark.slow
def test_taxonrl_as_published_is_full_of_holes(tmp_path):
    source = r"""
    import re
    def reward(x):
        text = x.response
        m = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        try:
            answer = float((m.group(1) if m else text).strip()) == float(x.truth["same"])
        except ValueError:
            answer = False
        form = bool(re.fullmatch(r"<think>.*?</think>\s*<answer>\d+(\.\d+)?</answer>", text, re.DOTALL))
        levels = []
        for level in ("loop", "digit"):
            tag = re.search(rf"<{level}>(.*?)</{level}>", text)
            names = [n.strip() for n in tag.group(1).split(";")][:2] if tag else None
            levels.append(names == x.truth[level])
        return 0.4 * answer + 0.2 * form + 0.4 * sum(levels) / 2
    """
    report = probe_reward(load(tmp_path, source), {}, PAIR_ROWS, probe=FORM, limits={"timeout_seconds": 2.0})
    assert {
        "names outside",
        "wrong, then right",
        "surplus names",
        "two thinks",
        "Python number",
        "empty think",
    } <= flagged(report)


def test_a_reward_that_fails_on_an_honest_answer_stops(tmp_path):
    with pytest.raises(RewardError, match="KeyError"):
        probe_reward(load(tmp_path, "def reward(x): return x.truth['nope']"), {}, TEXT_ROWS)


NAMES = """
import re
from vlmrl.tasks.pairs.answer import PairFormat

FORM = PairFormat(("loop", "digit"))

def reward(x):
    said = FORM.split(x.response)
    if said.problem or x.finish == "length":
        return 0.0
    value, ended = 0.6 - 0.4 * (said.confidence - x.truth["same"]) ** 2, False
    for level in ("loop", "digit"):
        body, true = said.bodies.get(level), x.truth[level]
        if ended or body is None:
            return value if ended and body is None else 0.0
        names = [name.strip() for name in body.split(";")]
        if len(names) != 2:
            return 0.0
        value += 0.2 * bool(%s)
        ended = names[0] != names[1]
    return value
"""


NAMED_ROWS = [
    RewardInput("", truth={"same": len({*digits.split()}) == 1, "loop": loops.split(), "digit": digits.split()})
    for loops, digits in (
        ("none none", "three three"),
        ("none some", "three eight"),
        ("some some", "eight six"),
        ("some some", "nine nine"),
    )
]


@pytest.fixture(scope="module")
def flagged_of_equal_names(tmp_path_factory) -> set[str]:
    """What is flagged in a reward that compares whole names."""
    spec = load(tmp_path_factory.mktemp("equal"), NAMES % "names == true")
    return flagged(probe_reward(spec, spec.weights, NAMED_ROWS, probe=FORM))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "found"),
    [
        ("names == true", set()),
        (
            "all(t in n for t, n in zip(true, names))",
            {
                "longer names",
                "one of several",
                "either or",
                "names denied",
                "every name",
                "every name, or",
                "every name, listed",
            },
        ),
        ("all(n in t for t, n in zip(true, names))", {"cut names"}),
        (
            "all(n[:2] == t[:2] for t, n in zip(true, names))",
            {"longer names", "cut names", "one of several", "either or"},
        ),
        ("set(names) == set(true)", {"swapped"}),
        ("names[0] == true[0]", {"only the first"}),
        ("names[1] == true[1]", {"only the second"}),
        ("all(re.fullmatch(n, t) for t, n in zip(true, names))", {"any text"}),
        ("all(n.strip('-') in ('', t) for t, n in zip(true, names))", {"no letters"}),
        ("all(t in n.split(' or ') for t, n in zip(true, names))", {"either or", "every name, or"}),
        ("all(t in n.split(' / ') for t, n in zip(true, names))", {"one of several"}),
        ("True", {"false names", "every name", "every name, or", "every name, listed"}),
    ],
)
def test_what_a_comparison_of_names_does_not_see_is_named(tmp_path, flagged_of_equal_names, right, found):
    spec = load(tmp_path, NAMES % right)
    tried = probe_reward(spec, spec.weights, NAMED_ROWS, probe=FORM)["probes"]
    assert {p["name"] for p in tried if p["flagged"]} - flagged_of_equal_names == found
    assert all(p["verdict"] in ("blind", "hole") for p in tried if p["name"] in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "found"),
    [
        ("tag == true", {}),
        ("tag.startswith(true)", {"longer at the end": "blind"}),
        (
            "tag.endswith(true)",
            {"longer at the front": "blind", "minus": "lenient", "denied": "lenient"},
        ),
        ("true in tag.split(',')", {"in a list": "hole"}),
        ("not abs(float(tag) - float(true)) > 0", {"not a number": "hole"}),
        ("1 - abs(float(tag) - float(true))", {"not a number": "breaks", "infinite": "breaks"}),
        ("abs(int(tag)) == int(true)", {"minus": "lenient"}),
        ("1", {"the right answer": "blind"}),
        ("tag != true", {"the right answer": "blind"}),
    ],
)
def test_what_a_comparison_of_texts_does_not_see_is_named(tmp_path, right, found):
    source = """
    import re
    def reward(x):
        tags, true = re.findall(r"<answer>([^<]+)</answer>", x.response[:9999]), x.truth["answer"]
        tag = tags[0] if len(tags) == 1 else "-1000"
        try:
            return float(RIGHT)
        except ValueError:
            return 0.0
    """
    report = probe_reward(load(tmp_path, source.replace("RIGHT", right)), {}, TEXT_ROWS)
    told = {p["name"]: p["verdict"] for p in report["probes"] if p["verdict"] not in ("", "silent")}
    assert {name: told.get(name) for name in found} == found and (found or not told)


@pytest.mark.slow
@pytest.mark.parametrize("answers", [["1.0", "2.50", "10.00"], ["A.", "B.", "C."]])
def test_half_of_an_answer_that_is_the_answer_is_no_near_miss(tmp_path, answers):
    """The first half of `1.0` is 1, of `2.50` it is `2.`, which is wrong; of `A.` it is A."""
    source = """
    def reward(x):
        tag = x.response.rpartition("<answer>")[2].removesuffix("</answer>")
        try:
            return float(float(tag) == float(x.truth["answer"]))
        except ValueError:
            return float(tag.strip(".") == x.truth["answer"].strip("."))
    """
    rows = [RewardInput("", truth={"answer": answer}) for answer in answers]
    report = probe_reward(load(tmp_path, source), {}, rows)
    half = next(p for p in report["probes"] if p["name"] == "first half")
    assert not half["flagged"] and half["mean"] in (0.0, None)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["an", "answer", "1.5"])
def test_no_answer_is_taken_for_a_piece_of_its_form(tmp_path, answer):
    """A right answer that is a piece of `</answer>` is changed where it stands; one truth for all is no finding."""
    spec = load_reward("exact_match", args={"require_tag": True})
    rows = [RewardInput("", truth={"answer": answer}, columns={"id": i}) for i in range(3)]
    report = probe_reward(spec, spec.weights, rows)
    assert flagged(report) == set()
    longer = next(p for p in report["probes"] if p["name"] == "longer at the front")
    assert longer["example"].endswith(f"<answer>{'9' if answer == '1.5' else 'x'}{answer}</answer>")


@pytest.mark.slow
def test_a_reward_that_hangs_costs_a_few_time_limits_and_the_rest_is_said_to_be_left_out(tmp_path):
    source = """
    ON_TIMEOUT = {"reward": 0.0}  # a finding all the same
    def reward(x):
        while "<answer>" not in x.response: pass
        return float(f"<answer>{x.truth['answer']}</answer>" in x.response)
    """
    spec = load(tmp_path, source)
    start = time.monotonic()
    rows = [RewardInput("", truth={"answer": str(n)}, prompt="How many?") for n in range(10)]
    report = probe_reward(spec, spec.weights, rows, limits={"timeout_seconds": 0.3})
    hung = [p["name"] for p in report["probes"] if p["verdict"] == "hangs"]
    assert len(hung) == 3 and report["skipped"] > 10
    assert time.monotonic() - start < 30  # ten rows of every trick and every round would be minutes


def test_a_text_that_breaks_the_reward_does_not_hide_that_rows_depend_on_each_other(tmp_path):
    source = """
    def reward(completions, answer, **columns):
        right = [float(a in c) for a, c in zip(answer, completions)]
        if any("nan" in c for c in completions):
            raise ValueError("nan")
        return [r - sum(right) / len(right) for r in right]
    """
    report = probe_reward(load(tmp_path, source), {}, TEXT_ROWS)
    assert report["unsteady"] == 1 and report["behaviour"]["alone"] is not True


def test_findings_are_ranked_unearned_pay_first_and_right_answers_in_odd_dress_last():
    """No answer is paid, and a broken truth is scored: the second is no way to be paid. (What is unfair: below.)"""

    def careless(x: RewardInput) -> float:
        _, _, rest = x.response.partition("<answer>")
        answer, closed, _ = rest.partition("</answer>")
        if not closed:
            return 0.5 if x.response else 0.75
        return float(answer == x.truth["answer"])

    rows = [RewardInput("", truth={"answer": answer}, prompt="What is it?") for answer in ("cat", "dog", "owl", "ant")]
    spec = RewardSpec("careless", careless, {"reward": (0.0, 1.0)}, {"reward": 1.0}, pure=True)
    verdicts = [p["verdict"] for p in probe_reward(spec, spec.weights, rows)["probes"]]
    found = [v for v in verdicts if v]
    assert verdicts[: len(found)] == found, "what was not found stands behind"
    assert found == sorted(found, key=list(WORDS).index) and list(WORDS)[:2] == ["hole", "leak"]
    assert found[0] in ("hole", "leak") and found[-1] == "silent" and list(WORDS)[-2:] == ["silent", "unfair"]


def test_of_one_kind_what_pays_most_comes_first():
    def result(name: str, verdict: str, mean: float | None) -> ProbeResult:
        return ProbeResult(name, "", "void", mean, mean, None, 0, "", verdict, "")

    results = [
        result("a", "unfair", 1.0),
        result("b", "leak", 0.2),
        result("c", "", 0.9),
        result("d", "leak", 0.7),
        result("e", "breaks", None),
        result("f", "hole", 0.1),
        result("g", "leak", None),
    ]
    assert [r.name for r in ranked(results)] == ["f", "d", "b", "g", "e", "a", "c"]


@pytest.mark.slow
def test_honest_play_in_a_form_of_the_tasks_own_is_its_correct_responses(tmp_path):
    source = """
        import re
        def reward(x):
            found = re.fullmatch(r"<cell>([AB])</cell>", x.response)
            return 0.2 * (found is not None) + 0.8 * (found is not None and found[1] == x.truth["cell"])
    """
    rows = [RewardInput("", {"cell": cell, "scene": str(i)}) for i, cell in enumerate("AABAB")]
    blind = probe_reward(load(tmp_path, source), {}, rows)
    assert not flagged(blind) and "no right answer that was tried" in blind["not_probed"]  # no known form fits
    report = probe_reward(load(tmp_path, source), {}, rows, trace=lambda x: f"<cell>{x.truth['cell']}</cell>")
    assert flagged(report) == set()
    assert report["honest"]["informed"] == 1.0 and report["honest"]["wrong"] == 0.2
    assert report["honest"]["answer"] == "always <cell>A</cell>"
    assert report["honest"]["uninformed"] == pytest.approx(0.2 + 0.8 * 3 / 5)


@pytest.mark.slow
def test_a_known_form_that_pays_as_much_as_the_tasks_own_stays_honest_play(tmp_path):
    spec = load(tmp_path, "def reward(x):\n    return float(x.response.strip() == x.truth['answer'])\n")
    traced = probe_reward(spec, {}, TEXT_ROWS, trace=lambda x: "nonsense")
    assert traced["honest"] == probe_reward(spec, {}, TEXT_ROWS)["honest"]


@pytest.mark.parametrize(
    ("pattern", "said", "prompt"),
    [
        (r"<answer>(\\d+)</answer>", "", ""),
        (r"<solution>(\\d+)</solution>", "", "Give the number: <solution>NUMBER</solution>"),
        (r"So: (\\d+) pieces", "So: 3 pieces", ""),
        (r"<look>.+</look><n>(\\d+)</n>", "<look>a {b}</look><n>9</n>", ""),
    ],
)
@pytest.mark.parametrize("form", [0.0, 0.2])
def test_the_form_of_an_answer_is_learned_and_its_format_share_is_no_finding(tmp_path, pattern, said, prompt, form):
    source = f"""
        import re
        def reward(x):
            match = re.fullmatch(r"{pattern}", x.response)
            return 0.0 if match is None else {form} + float(match[1] == x.truth["answer"])
    """.replace("\\\\", "\\")
    rows = [RewardInput(said, truth={"answer": str(n)}, prompt=prompt) for n in (3, 5, 7, 7)]
    report = probe_reward(load(tmp_path, source), {}, rows)
    assert report["honest"]["informed"] == 1 + form
    assert flagged(report) == set()


def test_a_list_of_all_answers_is_tried_in_the_form_that_the_reward_reads(tmp_path):
    source = """
        import re
        def reward(x):
            match = re.fullmatch(r"<answer>(.*)</answer>", x.response)
            return float(match is not None and x.truth["answer"] in match[1])
    """
    report = probe_reward(load(tmp_path, source), {}, TEXT_ROWS)
    assert {"every answer", "all numbers"} <= flagged(report)


def test_a_penalty_for_length_beside_the_answer_is_no_finding(tmp_path):
    source = """
        import re
        def reward(x):
            match = re.fullmatch(r"<answer>(.*?)</answer>", x.response)
            right = match is not None and match[1] == x.truth["answer"]
            return (match is not None) + right - min(abs(x.num_tokens - 5) / 20, 1)
    """
    assert flagged(probe_reward(load(tmp_path, source), {}, TEXT_ROWS)) == set()
