"""scripts/lost_facts.py: what a fact is, and when it is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from lost_facts import Lost, facts, lost, markdown_texts, python_texts


@pytest.mark.parametrize(
    ("text", "fact", "kind"),
    [
        ("Source: GRPO, arXiv:2402.03300 eq. 4.", "2402.03300", "arXiv"),
        ("Source: GRPO, arXiv:2402.03300 eq. 4.", "4", "number"),
        ("as GRPO has it", "GRPO", "capitalised"),
        ("the estimator of Schulman", "Schulman", "capitalised"),
        ("at most 1,000 MiB", "1000", "number"),
        ("at most 1,000 MiB", "MiB", "unit"),
        ("at most 1,000 MiB", "at most", "word"),
        ("1e-6 is added", "1e-6", "number"),
        ("95% of them", "95%", "number"),
        ("see `returns.gae`", "returns.gae", "name"),
        ('"mask" is allowed', "mask", "quoted"),
        ("Raises: ValueError when empty.", "ValueError", "error"),
        ("values in [0, 1], shape [G][P]", "[0, 1]", "shape"),
        ("values in [0, 1], shape [G][P]", "[G]", "shape"),
        ("with --accept-changes", "--accept-changes", "identifier"),
        ("the key max_new_tokens", "max_new_tokens", "identifier"),
        ("two of them", "two", "word"),
        ("At most that", "at most", "word"),
    ],
)
def test_a_fact_is_found_with_its_kind(text: str, fact: str, kind: str):
    assert facts(text).get(fact) == kind


def test_the_first_word_of_a_sentence_is_no_name():
    assert facts("Return it. Another follows.") == {}


OLD = '''"""Module of 3."""


def f(x):
    """Return x. Raises: ValueError above 0.5 nats. Source: arXiv:1506.02438 eq. 16."""
    # not above 80 GiB
    return f"{x} tokens of `max`"


def g():
    """Return 7."""
'''


def test_facts_are_lost_from_docstrings_comments_and_strings():
    new = OLD.replace(" Raises: ValueError above 0.5 nats.", "").replace("80 GiB", "that").replace(" of `max`", "")
    found = lost(python_texts(OLD), python_texts(new))
    assert {m.fact for m in found} == {"ValueError", "0.5", "nat", "80", "GiB", "max"}
    assert {(m.place, m.elsewhere) for m in found} == {("f", False)}


def test_a_fact_that_moved_within_the_file_is_marked():
    new = OLD.replace("Module of 3.", "Module of 3, see arXiv:1506.02438.").replace(
        " Source: arXiv:1506.02438 eq. 16.", ""
    )
    found = lost(python_texts(OLD), python_texts(new))
    assert Lost("f", "arXiv", "1506.02438", True) in found and Lost("f", "number", "16", False) in found


def test_a_text_that_says_the_same_in_other_words_loses_nothing():
    new = OLD.replace("Raises: ValueError above 0.5 nats.", "Above 0.5 nats it raises a ValueError.")
    assert new != OLD and lost(python_texts(OLD), python_texts(new)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("of PPO and its kin", "of PPO-like ones"),
        ("a step", "several steps"),
        ("see `gae`", "see gae"),
        ("1,000", "1000"),
    ],
)
def test_the_same_fact_in_another_form_is_not_lost(old: str, new: str):
    assert lost({"f": f"Return {old}."}, {"f": f"Return {new}."}) == []


def test_a_removed_definition_loses_its_facts():
    assert [m.fact for m in lost(python_texts(OLD), python_texts(OLD[: OLD.index("def g")]))] == ["7"]


def test_each_key_of_a_table_is_a_place_of_its_own():
    old = (
        'class Table:\n    """A table."""\n\n    a: int = 1\n    """At most 5."""\n    b: int = 2\n    """From 5."""\n'
    )
    new = old.replace("At most 5", "At most some")
    assert lost(python_texts(old), python_texts(new)) == [Lost("Table.a", "number", "5", True)]


def test_markdown_is_compared_by_section():
    old, new = "# A\n\nTakes 5 minutes.\n\n## B\n\nAt 3.\n", "# A\n\nTakes minutes.\n\n## B\n\nAt 3 or 5.\n"
    assert lost(markdown_texts(old), markdown_texts(new)) == [Lost("A", "number", "5", True)]
