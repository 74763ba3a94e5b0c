"""Options that all commands for tables have, beside a task's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.prep_options import Option, TableRequest, chosen_names, parameters_of, table_options


@table_options("hub:org/rows", validation_rows=7, test="Another test set.")
def prep(request: TableRequest, side: Annotated[int, Option("Pixels.", min=5)] = 9, *, limits: Limits) -> Any:
    """Return the arguments."""
    return request, side, limits.force


def test_shared_options_come_first_then_a_tasks_own() -> None:
    options = parameters_of(prep)
    assert [option.name for option in options] == [
        "source", "test", "synthetic", "out", "name", "seed", "validation_rows", "max_bad", "images_root",
        "test_images_root", "side",
    ]  # fmt: skip
    by_name = {option.name: option for option in options}
    assert by_name["source"].option.positional and not by_name["test"].option.positional
    assert by_name["test"].option.help == "Another test set." and by_name["validation_rows"].default == 7
    assert (by_name["side"].kind, by_name["side"].default, by_name["side"].option.min) == (int, 9, 5)


def test_a_command_gets_its_options_and_the_request() -> None:
    assert prep(limits=Limits()) == (TableRequest("hub:org/rows", validation_rows=7), 9, False)
    request, side, force = prep("rows.json", seed=3, side=8, limits=Limits(force=True))
    assert (request.table, request.seed, request.validation_rows, side, force) == ("rows.json", 3, 7, 8, True)
    with pytest.raises(TypeError, match="colour"):
        prep(colour="red", limits=Limits())


def test_what_a_dataset_keeps_of_a_request() -> None:
    request = TableRequest("hub:org/rows", "/home/me/rows.json", seed=2, out=Path("/x"), images_root=Path("/y"))
    assert request.args() == {
        "source": "rows.json", "test": None, "seed": 2, "validation_rows": 0, "max_bad": 0.0,
    }  # fmt: skip
    assert TableRequest("hub:org/rows").args()["source"] == "hub:org/rows"
    assert TableRequest("hub:org/rows", synthetic=300).args() == {"synthetic": 300, "seed": 0}


def test_each_source_has_a_folder_of_images() -> None:
    both = TableRequest(None, "a.json", "b.json", images_root=Path("/a"))
    assert both.sources() == [("a.json", Path("/a")), ("b.json", Path("/a"))]
    assert replace(both, test_images_root=Path("/b")).sources()[1] == ("b.json", Path("/b"))
    assert TableRequest("hub:org/rows").sources() == [("hub:org/rows", None)]
    assert TableRequest(None, test="b.json").sources() == [("b.json", None)]


def test_numbers_of_drawn_rows_and_the_folder() -> None:
    assert TableRequest(None, synthetic=20).drawn() == {"train": 20, "validation": 20, "test": 40}
    assert TableRequest(None, synthetic=600).drawn() == {"train": 600, "validation": 60, "test": 120}
    assert TableRequest(None, "rows.json").drawn() == {}
    with pytest.raises(DataError, match=r"but rows\.json is a source"):
        TableRequest(None, test="rows.json", synthetic=20).drawn()
    assert TableRequest(None).place("task") == ("task", Path("data/task"))
    assert TableRequest(None, name="own", out=Path("x")).place("task") == ("own", Path("x"))
    with pytest.raises(DataError, match="cannot be used"):
        TableRequest(None, name="../x").place("task")


def test_names_in_the_text_of_an_option() -> None:
    assert chosen_names("--asks", " b, a", ["a", "b"], "kinds") == ("b", "a")
    assert chosen_names("--asks", None, ["a"], "kinds") == ()
    with pytest.raises(DataError, match="--asks names `c`") as error:
        chosen_names("--asks", "a,c", ["a", "b"], "kinds")
    assert error.value.hint == "kinds: a, b"
