from __future__ import annotations

from typing import Any

import pytest
from domain_builders import TRUTHS
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.errors import RewardError
from vlmrl.tasks.taxonrl.domains import DOMAINS, LAYOUTS
from vlmrl.tasks.taxonrl.task import truth_problems


@pytest.mark.parametrize("name", DOMAINS)
def test_a_sound_truth_has_no_problem(name: str) -> None:
    assert truth_problems(DOMAINS[name], TRUTHS[name]) == []


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("whale", {"same": None}, "`same` is None, not true or false"),
        ("whale", {"same": 1}, "`same` is 1, not true or false"),
        ("whale", {"distance": 1}, "`distance` is 1, but `whale` has no hierarchy"),
        ("bird", {"order": "Passeriformes"}, "`order` is 'Passeriformes', not two names"),
        ("bird", {"order": ["Passeriformes"]}, "`order` is ['Passeriformes'], not two names"),
        ("bird", {"genus": ["Pica", ""]}, "`genus` has '', which is neither a name nor null"),
        ("bird", {"genus": ["Pica", 3]}, "`genus` has 3, which is neither a name nor null"),
        ("bird", {"genus": ["Pica", "a;b"]}, "`genus` has the name 'a;b', which no answer can hold"),
        ("bird", {"genus": ["Pica", " Picus"]}, "`genus` has the name ' Picus', which no answer can hold"),
        ("gorilla", {"type": ["Juvenil", None]}, "`type` has the label 'Juvenil', which is none of Silverback, "),
        ("chimp", {"age_group": ["adult", "Adult"]}, "`age_group` has the label 'adult', which is none of Infant, "),
        ("sea_star", {"species": ["Asru", "Asru"]}, "`species` has the label 'Asru', which is none of Asterias rubens"),
        ("fungi", {"same": True, "distance": 0}, "`same` is true but `genus` differs: Boletus and Suillus"),
        (
            "sea_star",
            {"species": ["Asterias rubens", "Anthenea australiae"]},
            "`same` is true but `species` differs: Asterias rubens and Anthenea australiae",
        ),
        ("fungi", {"genus": ["A", "a"], "species": ["A b", "A b"]}, "`same` is false but both are A b"),
        ("bird", {"genus": ["Pica", "Pica"]}, "`order` differs but the finer `genus` is the same: Pica"),
        ("fungi", {"distance": 3}, "`distance` is 3 (sameOrder); `same` and the names make it 2 (sameFamily)"),
        ("fungi", {"distance": 1}, "`distance` is 1 (sameGenus); `same` and the names make it 2 (sameFamily)"),
        ("fungi", {"distance": 0}, "`distance` is 0 (sameSpecies); `same` and the names make it 2 (sameFamily)"),
        ("fungi", {"distance": 7}, "`distance` is 7, not a whole number from 0 to 4"),
        ("fungi", {"distance": True}, "`distance` is True, not a whole number"),
        (
            "bird",
            {"order": None, "distance": 2},
            "`distance` is 2 (sameFamily); `same` and the names make it 3 (sameOrder) to 4 (sameClass)",
        ),
    ],
)
def test_each_mistake_is_named(name: str, change: dict[str, Any], problem: str) -> None:
    found = truth_problems(DOMAINS[name], TRUTHS[name] | change)
    assert [words for words in found if words.startswith(problem)], found


def test_unknown_names_and_left_out_fields_are_sound() -> None:
    assert truth_problems(DOMAINS["fungi"], {"same": False}) == []
    assert truth_problems(DOMAINS["bird"], {"same": False, "distance": 3, "order": [None, "A"], "genus": None}) == []
    assert truth_problems(DOMAINS["chimp"], {"same": True, "age_group": ["Infant", "Adult"]}) == []


def names(labels: tuple[str, ...]) -> st.SearchStrategy[Any]:
    one = st.sampled_from(labels or ("Aa", "aa", "Bb")) | st.none()
    return st.lists(one, min_size=2, max_size=2)


@st.composite
def truths(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(DOMAINS)))
    domain = DOMAINS[name]
    truth = {field.name: draw(names(field.labels)) for field in domain.fields}
    distance = draw(st.none() | st.integers(0, 4)) if domain.levels else None
    return name, {"same": draw(st.booleans()), "distance": distance, **truth}


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(truths())
def test_sound_is_what_the_layout_can_write_and_read_back(drawn: tuple[str, dict[str, Any]]) -> None:
    name, truth = drawn
    domain = DOMAINS[name]
    problems = truth_problems(domain, truth)
    try:
        text = LAYOUTS[domain.layout].write(truth)
    except RewardError as error:
        assert problems, (truth, str(error))
        return
    if domain.layout == "fungi" and problems:  # its layout has no column for the distance
        assert problems[0].startswith("`distance` is")
        assert truth_problems(domain, truth | {"distance": None}) == []
        return
    assert problems == []
    back = LAYOUTS[domain.layout].read(text)
    assert truth_problems(domain, back) == [] and back["same"] is truth["same"]
