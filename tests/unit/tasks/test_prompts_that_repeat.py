"""A prompt is the same in every run: templates that draw at random or print addresses are errors."""

from __future__ import annotations

import pytest

from vlmrl.errors import DataError, RecipeError
from vlmrl.tasks.prompt import render_user
from vlmrl.types import Row

ROW = Row("p", "rows", "table", {}, (), {"options": ["a", "b"], "n": 3})


@pytest.mark.parametrize("source", ["{{ options | random }}", "{{ range(9) | random }}?"])
def test_a_random_choice_is_no_filter(source: str) -> None:
    with pytest.raises(RecipeError, match="No filter named 'random'"):
        render_user(source, ROW, {}, where="p.jinja")


def test_random_text_is_an_unknown_name() -> None:
    with pytest.raises(DataError, match="lipsum"):
        render_user("{{ lipsum(n=1) }}", ROW, {}, where="p.jinja")


def test_the_address_of_an_object_is_an_error() -> None:
    with pytest.raises(DataError, match="address of an object"):
        render_user("{{ columns.items }}", ROW, {}, where="p.jinja")
    assert render_user("{{ n }} at 0x1234567", ROW, {}, where="p.jinja") == "3 at 0x1234567"
