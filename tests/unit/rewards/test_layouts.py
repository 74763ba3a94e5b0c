"""TaxonRL's ground truths: what each layout says, that reading and writing undo each other, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.errors import RewardError
from vlmrl.tasks.taxonrl.domains import DISTANCES, LAYOUT_RANKS, LAYOUTS, distance_bounds

FUNGI = "0;Boletaceae;Boletus;Boletales;Boletus edulis;Boletaceae;Suillus;Boletales;Suillus luteus"
BIRD = "0;sameFamily;Corvus;Corvidae;Passeriformes;Pica;Corvidae;Passeriformes"


@pytest.mark.parametrize(
    ("name", "text", "truth"),
    [
        ("answer", "1", {"same": True}),
        (
            "fungi",
            FUNGI,
            {
                "same": False,
                "distance": 2,
                "order": ["Boletales", "Boletales"],
                "family": ["Boletaceae", "Boletaceae"],
                "genus": ["Boletus", "Suillus"],
                "species": ["Boletus edulis", "Suillus luteus"],
            },
        ),
        (
            "bird",
            BIRD,
            {
                "same": False,
                "distance": 2,
                "order": ["Passeriformes", "Passeriformes"],
                "family": ["Corvidae", "Corvidae"],
                "genus": ["Corvus", "Pica"],
            },
        ),
        ("sea_star", "0;Asru;Anau", {"same": False, "species": ["Asterias rubens", "Anthenea australiae"]}),
        (
            "chimp",
            "1;SubAdult;Male;Adult;Male",
            {"same": True, "age_group": ["SubAdult", "Adult"], "gender": ["Male", "Male"]},
        ),
        ("gorilla", "0;Silverback;Adult female", {"same": False, "type": ["Silverback", "Adult female"]}),
    ],
)
def test_each_layout_reads_its_own_order_of_fields(name, text, truth):
    assert LAYOUTS[name].read(text) == truth
    assert list(LAYOUTS[name].read(text)) == list(truth)
    assert LAYOUTS[name].write(truth) == text


names = st.one_of(
    st.none(), st.from_regex(r"[A-Z][a-z]{3,8}( [a-z]{3,8})?", fullmatch=True).filter(lambda n: n != "Unknown")
)


@st.composite
def truths(draw: st.DrawFn, name: str):
    """A truth of this layout without contradictions: names are drawn from the coarsest rank down to a distance."""
    layout = LAYOUTS[name]
    same = draw(st.booleans())
    truth: dict = {"same": same}
    if layout.ranks:
        distance = 0 if same else draw(st.integers(1, 4))
        for rank in layout.fields:
            apart = distance >= (["species", *LAYOUT_RANKS].index(rank) + 1)
            first = draw(names)
            second = draw(st.one_of(st.none(), st.just(first))) if not apart else draw(names)
            if apart and first is not None and second == first:
                second = first + "x"
            truth[rank] = [first, second]
        equal = {
            rank: None if None in truth[rank] else distance < LAYOUT_RANKS.index(rank) + 2 for rank in LAYOUT_RANKS
        }
        low, high = distance_bounds(same, equal)
        truth["distance"] = distance if "distance" in layout.columns else distance if low == high else None
    else:
        for label in layout.fields:
            pool = st.one_of(st.none(), st.sampled_from(layout.vocabularies[label].names))
            first = draw(pool)
            truth[label] = [
                first,
                draw(st.one_of(st.none(), st.just(first)) if same and label in layout.fixed else pool),
            ]
    return truth


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_what_is_written_is_read_back(name, data):
    truth = data.draw(truths(name))
    assert LAYOUTS[name].read(LAYOUTS[name].write(truth)) == truth


@pytest.mark.parametrize("name", LAYOUTS)
@given(
    text=st.one_of(st.text(max_size=40), st.lists(st.sampled_from(["0", "1", "", "Asru", "Adult", "x"])).map(";".join))
)
def test_any_text_is_read_or_refused_in_words(name, text):
    try:
        truth = LAYOUTS[name].read(text)
    except RewardError as error:
        assert f"the {name} ground truth" in error.message
    else:
        assert LAYOUTS[name].read(LAYOUTS[name].write(truth)) == truth


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("fungi", BIRD, r"has 8 fields, not 9 \(answer; family1; genus1"),
        ("bird", FUNGI, "has 9 fields, not 8"),
        ("gorilla", "1;Adult;M;Infant", "has 4 fields, not 3"),
        ("answer", "", "is empty"),
        ("answer", None, "is empty"),
        ("answer", "0.7", "neither 0 nor 1"),
        ("answer", "nan", "neither 0 nor 1"),
        ("answer", "\u0661", "neither 0 nor 1"),
        ("sea_star", ";Asru;Anau", "has no answer"),
        ("sea_star", "0;Asru;Asteroidea", "unknown species 'Asteroidea'"),
        ("sea_star", "1;Asru;Anau", "`same` is true but `species` differs: Asterias rubens and Anthenea australiae"),
        ("chimp", "1;Adult;Male;Teen;Male", "unknown age group 'Teen'"),
        ("chimp", "1;Adult;Male;Adult;Female", "`same` is true but `gender` differs: Male and Female"),
        ("bird", BIRD.replace("sameFamily", "samegenera"), "unknown distance 'samegenera'"),
        (
            "bird",
            BIRD.replace("sameFamily", "sameClass"),
            r"`distance` is 4 \(sameClass\); `same` and the names make it 2 \(sameFamily\)",
        ),
        ("bird", BIRD.replace("0;", "1;", 1), "contradicts itself: `same` is true but `genus` differs"),
        ("bird", BIRD.replace("Pica;Corvidae", "Corvus;Paridae"), "`family` differs but the finer `genus` is the same"),
        ("fungi", FUNGI.replace("0;", "1;", 1), "contradicts itself"),
        ("fungi", "1;F;G;O;G a;F;G;O;G b", "`same` is true but `species` differs: G a and G b"),
        ("fungi", "0;F;G;O;G a;F;G;O;G a", "`same` is false but both are G a"),
    ],
)
def test_a_wrong_ground_truth_is_refused_by_what_is_wrong(name, text, told):
    with pytest.raises(RewardError, match=told):
        LAYOUTS[name].read(text)


def test_a_wrong_layout_names_the_one_that_fits():
    with pytest.raises(RewardError) as caught:
        LAYOUTS["fungi"].read(BIRD)
    assert caught.value.hint == "it has as many fields as the layout bird"


@pytest.mark.parametrize("word", DISTANCES)
def test_distances_are_read_in_any_case(word):
    same = word == "sameSpecies"
    assert LAYOUTS["bird"].read(f"{int(same)};{word.upper()};;;;;;")["distance"] == DISTANCES.index(word)


def test_an_unknown_rank_leaves_the_distance_open_only_where_it_matters():
    # genus differs, family is not known, order equal: it may first differ at the family or at the genus.
    assert distance_bounds(False, {"genus": False, "family": None, "order": True}) == (2, 3)
    assert LAYOUTS["fungi"].read("0;;Boletus;Boletales;;;Suillus;Boletales;")["distance"] is None
    # equal families: whatever the orders are called, they are equal.
    assert LAYOUTS["fungi"].read("0;Boletaceae;Boletus;;;Boletaceae;Suillus;;")["distance"] == 2


def test_names_that_tables_write_for_unknown_are_none():
    assert LAYOUTS["fungi"].read("0;nan;;None;unknown;F;G;O;S")["family"] == [None, "F"]


def test_the_same_epithet_in_two_genera_is_not_the_same_species():
    assert LAYOUTS["fungi"].read("0;F;Amanita;O;alba;F;Russula;O;alba")["distance"] == 2


def test_labels_are_read_in_their_other_spellings():
    chimp = LAYOUTS["chimp"].read("0;sub-adult;f;SUB ADULT;M")
    assert chimp == {"same": False, "age_group": ["SubAdult", "SubAdult"], "gender": ["Female", "Male"]}
    assert LAYOUTS["gorilla"].read("0;juvenil;adult_female")["type"] == ["Juvenile", "Adult female"]
    assert LAYOUTS["sea_star"].read("1;asterias rubens;ASRU")["species"] == ["Asterias rubens"] * 2


def test_gorilla_is_also_read_in_the_five_fields_of_chimp():
    assert LAYOUTS["gorilla"].read("0;Silverback;M;Infant;F")["type"] == ["Silverback", "Infant"]


@pytest.mark.parametrize("value", [1, 1.0, True, "1", "1.0000", " 1 "])
def test_an_answer_may_be_a_number_or_text(value):
    assert LAYOUTS["answer"].read(value) == {"same": True}


@pytest.mark.parametrize(
    ("truth", "told"),
    [
        ({}, "`same` is None"),
        ({"same": True, "species": "Asterias rubens"}, "not a list of two names"),
        ({"same": True, "species": ["a;b", "c"]}, "not a name that can be written"),
        ({"same": True, "species": ["Asterias rubens", "Anthenea australiae"]}, "`same` is true but `species` diff"),
    ],
)
def test_a_truth_that_cannot_be_written_is_refused(truth, told):
    with pytest.raises(RewardError, match=told):
        LAYOUTS["sea_star"].write(truth)
