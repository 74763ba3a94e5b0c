from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_responses import parse_pair_response

from vlmrl.errors import RewardError
from vlmrl.rewards.base import combine
from vlmrl.rewards.text_parsing import MAX_NAME_CHARS, normalise_name
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

LEVELS = ("loop", "digit")
PIECES = [f"<{slash}{tag}>" for tag in ("think", "answer", *LEVELS) for slash in ("", "/")]
PIECES += ["0.5", "1", "a; b", ";", " ", "\n", "x", "<", ">", "</", "\u0660", "\ud800"]
SOUP = st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(max_size=200)
NAMES = st.tuples(st.sampled_from("abc"), st.sampled_from("abc"))


@st.composite
def truths(draw):
    loop, digit = list(draw(NAMES)), list(draw(NAMES))
    return {"same": loop[0] == loop[1] and digit[0] == digit[1], "loop": loop, "digit": digit}


@given(SOUP)
def test_the_parser_reads_any_text(text):
    r = parse_pair_response(text, LEVELS)
    assert r.ok == (r.problem == "")
    assert set(r.names) == set(LEVELS)
    assert r.confidence is None or 0 <= r.confidence <= 1
    if r.ok:
        assert r.confidence is not None and r.think and text.count("<answer>") == 1


@given(SOUP, truths(), st.sampled_from(["gate", "part", "off"]), st.booleans())
def test_whatever_is_written_the_value_stays_in_range_and_a_broken_format_earns_nothing(text, truth, rule, partial):
    spec = load_reward("taxonomy", args={"levels": LEVELS, "consistency": rule, "partial": partial})
    parts = spec(RewardInput(text, truth))
    value, _ = combine(parts, spec.weights)
    assert 0 <= value <= 1 + 1e-12
    if not parse_pair_response(text, LEVELS).ok:
        assert value == 0


@given(st.lists(st.tuples(SOUP, truths()), min_size=2, max_size=4))
def test_what_was_scored_before_changes_no_score(samples):
    args = {"levels": LEVELS, "aliases": {"c": "a"}, "levels_decide": False}
    warm = load_reward("taxonomy", args=args)
    seen = dict(samples[0][1])
    for text, truth in samples:
        seen.update(truth)  # the same mapping with other contents: nothing may be remembered by identity
        expected = load_reward("taxonomy", args=args).fn(RewardInput(text, dict(truth)))
        assert warm.fn(RewardInput(text, truth)) == warm.fn(RewardInput(text, seen)) == expected


@given(truths(), st.integers(0, 10_000), NAMES, NAMES)
def test_no_response_earns_more_than_the_right_one(truth, number, loop, digit):
    spec = load_reward("taxonomy", args={"levels": LEVELS})

    def value(loop_names, digit_names, p):
        tags = "".join(
            f"<{level}>{names[0]}; {names[1]}</{level}>"
            for level, names in zip(LEVELS, (loop_names, digit_names), strict=True)
            if names
        )
        return combine(spec(RewardInput(f"<think>{tags}.</think><answer>{p}</answer>", truth)), spec.weights)[0]

    deeper = truth["digit"] if truth["loop"][0] == truth["loop"][1] else None
    assert value(truth["loop"], deeper, float(truth["same"])) == pytest.approx(1, abs=1e-12)
    assert value(loop, digit, f"{number / 10_000:.4f}") <= 1 + 1e-12


@given(st.text(max_size=40))
def test_normalising_a_name_twice_changes_nothing_more(name):
    once = normalise_name(name)
    assert normalise_name(once) == once


@given(st.text(st.characters(max_codepoint=127), max_size=40), st.sampled_from(["", "order", "age-group"]))
def test_case_does_not_matter_in_a_name(name, level):
    assert normalise_name(name, level) == normalise_name(name.upper(), level) == normalise_name(name, level.upper())


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [
        "<think>",
        "</think>",
        "<",
        "<answer>0.",
        "<loop>a;",
        "a; ",
        " ",
        "<think><loop>",
        "\u0344",
        "0",
        "<loop>a; b</loop>",
    ],
)
def test_a_million_characters_of_anything_are_read_in_time(piece):
    def seconds(chars: int) -> float:
        text = f"<think>{piece * (chars // len(piece))}</think><answer>1</answer>"
        start = time.process_time()
        parse_pair_response(text, LEVELS)
        parse_pair_response(f"<think><loop>{piece * (chars // len(piece))}; b</loop></think><answer>1</answer>", LEVELS)
        return time.process_time() - start

    seconds(1000)
    assert seconds(1_000_000) < 10  # quadratic work would take hours


def test_a_name_that_is_too_long_is_not_normalised():
    assert normalise_name("A_\u0344") == "a \u0308\u0301"
    assert normalise_name("A_\u0344" * MAX_NAME_CHARS) == "a_\u0344" * MAX_NAME_CHARS


PARTS = st.dictionaries(st.sampled_from("abcdef"), st.none() | st.floats(-5, 5), min_size=1)
WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10), min_size=1)


@given(PARTS, WEIGHTS)
def test_the_effective_weights_always_add_up_to_all_weights_of_the_parts(parts, weights):
    counted = [name for name in weights if name in parts]
    if all(parts[name] is None for name in counted):
        with pytest.raises(RewardError):
            combine(parts, weights)
        return
    value, shares = combine(parts, weights)
    assert sum(shares.values()) == pytest.approx(sum(weights[n] for n in counted), rel=1e-9)
    assert value == pytest.approx(sum(shares[n] * parts[n] for n in shares), rel=1e-9, abs=1e-9)


@given(PARTS, WEIGHTS, st.randoms())
def test_the_value_does_not_depend_on_the_order_of_the_parts(parts, weights, random):
    names = list(parts)
    random.shuffle(names)
    try:
        value, _ = combine(parts, weights)
    except RewardError:
        return
    assert combine({n: parts[n] for n in names}, weights)[0] == value


@given(st.floats(0, 1), WEIGHTS)
def test_equal_parts_give_that_number_whatever_is_missing(number, weights):
    names = sorted(weights)
    full, _ = combine(dict.fromkeys(names, number), weights)
    for gone in names[1:]:
        some, _ = combine({**dict.fromkeys(names, number), gone: None}, weights)
        assert some == pytest.approx(full, rel=1e-9, abs=1e-12)
