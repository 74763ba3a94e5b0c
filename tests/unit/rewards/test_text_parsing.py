from __future__ import annotations

import pytest
from pair_responses import parse_pair_response

from vlmrl.rewards.text_parsing import find_tags, normalise_name, tagged_text
from vlmrl.tasks.pairs.answer import parse_probability

LEVELS = ("order", "family", "genus")


def parse(text: str, levels=LEVELS):
    return parse_pair_response(text, levels)


def test_a_full_response_is_read():
    r = parse(
        "<think>Look. <order>A; B</order>\n<family>C; D</family> so</think>\n <answer>0.25</answer>\n",
    )
    assert r.ok and r.problem == ""
    assert r.confidence == 0.25
    assert r.names == {"order": ("a", "b"), "family": ("c", "d"), "genus": None}
    assert r.think.startswith("Look. ") and r.think.endswith(" so")


@pytest.mark.parametrize("number", ["0", "1", "0.5", "0.1234", "1.0", "1.0000", " 0.5 ", "\n1\t"])
def test_these_numbers_are_probabilities(number):
    assert parse_probability(number) == float(number)


@pytest.mark.parametrize(
    "number",
    [
        "",
        " ",
        "7.0000",
        "1.0001",
        "1e0",
        "0_1",
        "+1",
        "-0",
        "00.5",
        ".5",
        "0.",
        "0.12345",
        "1.00000",
        "\u0661.\u0660",
        "0.\u0665",
        "\uff10.5",
        "0,5",
        "50%",
        "nan",
        "inf",
        "True",
        "0.5 0.5",
        "\u00a00.5",
        "\u200b0.5",
        "0.5\x00",
        "01",
        "2",
    ],
)
def test_these_are_not(number):
    assert parse_probability(number) is None
    assert not parse(f"<think>x</think><answer>{number}</answer>").ok


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no <think>"),
        ("<think>x</think>", "no <answer>"),
        ("<think>x<answer>1</answer>", "no </think>"),
        ("<think>x</think><answer>1", "no </answer>"),
        ("<think>x</think><answer>1</answer><answer>1</answer>", "<answer> appears 2 times"),
        ("<think>x</think><think>y</think><answer>1</answer>", "<think> appears 2 times"),
        ("<answer>1</answer><think>x</think>", "<answer> is out of place"),
        ("<think>x<answer>1</answer></think>", "<answer> is out of place"),
        ("Sure! <think>x</think><answer>1</answer>", "text before <think>"),
        ("<think>x</think> so <answer>1</answer>", "text between </think> and <answer>"),
        ("<think>x</think><answer>1</answer>.", "text after </answer>"),
        ("<think> \n</think><answer>1</answer>", "<think> is empty"),
        ("<think><order>a; b</think><answer>1</answer>", "no </order>"),
        ("<think>a; b</order></think><answer>1</answer>", "no <order>"),
        ("<think><order>a; b</order><order>a; b</order></think><answer>1</answer>", "<order> appears 2 times"),
        ("<think>x</think><order>a; b</order><answer>1</answer>", "<order> is not inside <think>"),
        ("<think>x</think><answer>1</answer><order>a; b</order>", "<order> is not inside <think>"),
        ("<order>a; b</order><think>x</think><answer>1</answer>", "<order> is out of place"),
        (
            "<think><genus>a; b</genus><order>a; b</order></think><answer>1</answer>",
            "levels are not in the order order, family, genus",
        ),
        ("<think><order><family>a; b</family>a; b</order></think><answer>1</answer>", "<family> is out of place"),
        ("<think><order>a, b</order></think><answer>1</answer>", "<order> does not hold two names separated by `;`"),
        (
            "<think><order>a; b; c</order></think><answer>1</answer>",
            "<order> does not hold two names separated by `;`",
        ),
        ("<think><order>a; </order></think><answer>1</answer>", "<order> holds an empty name"),
        (
            f"<think><order>a; {'b' * 201}</order></think><answer>1</answer>",
            "<order> holds a name of more than 200 characters",
        ),
        (
            "<think>x</think><answer>maybe</answer>",
            "the answer 'maybe' is not a number from 0 to 1 with at most 4 decimals",
        ),
    ],
)
def test_the_first_problem_is_named(text, problem):
    r = parse(text)
    assert not r.ok
    assert r.problem == problem


def test_tags_of_other_spelling_are_text():
    assert parse("<think><Answer> <answer > </ answer> <b>bold</b></think><answer>1</answer>").ok
    assert parse(r"\<think\>x\</think\>\<answer\>1\</answer\>").problem == "no <think>"


def test_what_can_be_read_of_a_bad_response_is_still_returned():
    r = parse("Sure: <think><order>a; b</order></think><answer>0.75</answer>")
    assert not r.ok
    assert (r.confidence, r.names["order"], r.think) == (0.75, ("a", "b"), "<order>a; b</order>")
    assert parse("<answer>0.1</answer><answer>0.9</answer>").confidence == 0.9


@pytest.mark.parametrize(
    ("written", "level", "normal"),
    [
        ("Corvus", "", "corvus"),
        ("  Sub-Adult ", "", "sub adult"),
        ("sub_adult", "", "sub adult"),
        ("Corvus.", "", "corvus"),
        ('"Corvus corax",', "", "corvus corax"),
        ("Order Passeriformes", "order", "passeriformes"),
        ("Order: Passeriformes", "order", "passeriformes"),
        ("Cor\u200bv\u00adus\ufeff", "", "corvus"),
        ("e\u200b\u0301", "", "\u00e9"),
        ("age group Adult", "age-group", "adult"),
        ("Order", "order", "order"),
        ("ordering", "order", "ordering"),
        ("\uff21", "", "a"),
        ("?", "", "?"),
        ("7", "digit", "7"),
    ],
)
def test_names_are_compared_in_a_normal_form(written, level, normal):
    assert normalise_name(written, level) == normal


def test_aliases_apply_after_normalising_on_both_sides():
    assert normalise_name("Juvenil.", "type", {"juvenil": "Juvenile"}) == "juvenile"
    assert normalise_name("A. Rubens", "", {"a. rubens": "Asterias rubens"}) == "asterias rubens"


@pytest.mark.parametrize("levels", [("think",), ("a", "a"), ("a b",), ("",), ("a|b",)])
def test_level_names_that_cannot_be_tags_are_refused(levels):
    with pytest.raises(ValueError, match="tag"):
        parse_pair_response("x", levels)


def test_one_tag_is_read_and_others_are_refused():
    assert tagged_text("a <answer> 5</answer> b", "answer") == (" 5", "")
    assert tagged_text("5", "answer") == (None, "no <answer> tag")
    assert tagged_text("<answer>1</answer><answer>2</answer>", "answer")[0] is None
    assert tagged_text("</answer>1<answer>", "answer")[0] is None
    assert [str(t) for t in find_tags("<a><b></a>", ("a",))] == ["<a>", "</a>"]
