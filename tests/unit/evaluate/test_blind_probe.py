"""Blind probe of two written evaluations: which rows count, what is lost, what it says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from evaluation_builders import row

from vlmrl.cli.eval import episode_words, result_fields
from vlmrl.errors import StoreError
from vlmrl.evaluate.blind_probe import (
    blind_probe,
    label_of_both,
    normal_folder,
    probe_of,
    relative_drop,
    require_same_image_condition,
)
from vlmrl.evaluate.compare import Side, compare
from vlmrl.evaluate.estimates import difference_interval
from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.over_training import over_checkpoints
from vlmrl.evaluate.records import Evaluation, read_evaluation, write_evaluation
from vlmrl.report.evaluations import EvalColumn, eval_tables
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import read_summary, same_rows_key, shown_label
from vlmrl.store.rollouts import turns_text
from vlmrl.store.runs import create_run
from vlmrl.types import Call, Media, Turn

META = {"split": "test", "source": "s", "role": "test", "greedy": True, "reward": {"name": "r", "sha256": "1"}}


def shown(*names: str) -> list[dict[str, Any]]:
    return [{"sha256": n, "width": 8, "height": 6, "kind": "image"} for n in names]


def answered(right: bool, **fields: Any) -> dict[str, Any]:
    """Outcome of a row without a probability."""
    return {"outcome": {"accuracy": float(right)}, "accuracy": float(right), "score": float(right), **fields}


def evaluation(rows: list[dict[str, Any]], **meta: Any) -> Evaluation:
    return Evaluation(rows, {**summarise(rows), "meta": {**META, **meta}})


def normal_rows(right: list[bool], **fields: Any) -> list[dict[str, Any]]:
    return [
        row(f"p{i}", images=(f"i{i}",), **{"truth": {"answer": i % 3}, "text": f"{i}", **answered(r, **fields)})
        for i, r in enumerate(right)
    ]


@pytest.mark.parametrize(("texts", "is_told"), [(["2"] * 9 + ["1"], True), (["2"] * 8 + ["1"] * 2, False)])
def test_answers_that_are_nearly_all_one_text_need_no_image(texts: list[str], is_told: bool) -> None:
    right = [i % 3 == 2 for i in range(10)]
    normal = [r | {"text": text} for r, text in zip(normal_rows(right), texts, strict=True)]
    found = blind_probe(evaluation(normal), evaluation(blank_rows([False] * 10), images="blank"))
    words = "9 of 10 answers are one text, to 3 different truths"
    expected = f"No answer needs the images, whatever the numbers: {words}, with the true images."
    assert (found["conclusion"] == [expected]) == is_told


def test_the_notes_on_rows_and_rewards_are_kept_where_all_answers_are_one_text() -> None:
    normal = [r | {"text": "2"} for r in normal_rows([False] * 10)]
    normal[0]["images"] = []
    changed = blank_rows([False] * 9)
    changed[0] |= {"images": [], "shown_images": []}
    other = evaluation(changed, images="blank", reward={"name": "r", "sha256": "2"})
    first, *notes = blind_probe(evaluation(normal), other)["conclusion"]
    assert first.startswith("No answer needs the images, whatever the numbers: all 10 answers are one text")
    assert notes == [
        "Prompts without images, which do not count: 1.",
        "Prompts that are only in one of the two evaluations, or with another truth: 1.",
        "The two evaluations were scored by different rewards: `reward` and its parts are left out.",
    ]


def blank_rows(right: list[bool]) -> list[dict[str, Any]]:
    return normal_rows(right, shown_images=shown("grey"))


def test_the_difference_and_its_share_of_the_normal_accuracy() -> None:
    before, after = [True] * 8 + [False] * 2, [True] * 3 + [False] * 6 + [True]
    found = blind_probe(evaluation(normal_rows(before)), evaluation(blank_rows(after), images="blank"))
    m = found["metrics"]["accuracy"]
    assert (found["prompts"], found["rows"], found["images"]) == (10, 10, "blank")
    # 8 of 10 and 4 of 10: 0.4 is lost, half of it.
    assert (m["normal"], m["changed"], m["difference"]) == pytest.approx((0.8, 0.4, 0.4))
    expected = difference_interval(before, after, [(f"i{i}",) for i in range(10)], (0.0, 1.0))
    assert (m["low"], m["high"]) == (expected.low, expected.high)
    share = relative_drop(before, after, [(f"i{i}",) for i in range(10)], (0.0, 1.0))
    assert m["share"] == {"value": pytest.approx(0.5), "low": share.low, "high": share.high}
    # Right only with images: rows 3 to 7; right only without: row 9. p = 2 * (1 + 6) / 2^6.
    assert (m["test"]["only_b"], m["test"]["only_a"]) == (5, 1) and m["test"]["p"] == pytest.approx(14 / 64)
    assert m["chance"] is None and found["same_answer"] is None and found["other_answer"] is None
    assert "not clear whether the accuracy needs the images: 0.800 with the true images" in found["conclusion"][0]
    assert "share" in found["metrics"]["response_tokens"] and found["metrics"]["response_tokens"]["share"] is None


def test_a_clear_loss_is_said_with_its_share() -> None:
    before, after = [True] * 40, [True] * 10 + [False] * 30
    found = blind_probe(evaluation(normal_rows(before)), evaluation(blank_rows(after), images="blank"))
    text = found["conclusion"][0]
    assert text.startswith("The accuracy is 1.000 with the true images and 0.250 with changed ones (blank): 0.750 [0.5")
    assert "of it needs the images, a share of 75% [" in text and text.endswith("; 40 prompts.")
    more = blind_probe(evaluation(normal_rows(after)), evaluation(blank_rows(before), images="blank"))
    assert more["conclusion"][0].startswith("The accuracy is higher without the true images: 0.250 with")
    assert more["metrics"]["accuracy"]["share"]["value"] == -3


def turns(*pictures: int) -> str:
    """Turns of an episode whose tools returned so many pictures each."""
    media = Media("a" * 64, 8, 6, "image")
    tools = [Turn("tool", "x", (media,) * number, errors=1) for number in pictures]
    call = Turn("assistant", "x", calls=(Call("search", {}),))
    return turns_text([*(one for tool in tools for one in (call, tool)), Turn("assistant", "y")])


def test_blank_tools_without_a_picture_change_nothing() -> None:
    rows = [normal_rows([True] * 9, turns=turns(number, 0), ending="answer") for number in (0, 1)]
    for normal, number in ((rows[0], 0), (rows[1], 1)):
        probe = blind_probe(evaluation(normal), evaluation(rows[0], tools="blank"))
        assert probe["no_pictures"] == (number == 0)
        assert ("nothing was changed; --tools off" in probe["conclusion"][0]) == (number == 0), probe["conclusion"]


def test_an_evaluation_of_episodes_has_a_line_about_them(tmp_path: Path) -> None:
    rows = normal_rows([True] * 3, turns=turns(0, 1), ending="answer")
    rows += normal_rows([False], turns=turns(0), ending="turn limit")
    fields = result_fields(tmp_path, evaluation(rows), None)["episodes"]
    assert fields["episode/tool_errors"] == 1.0 and fields["episode/ended/turn_limit"] == 0.25
    assert episode_words(fields) == "episodes: turns 2.8  calls 1.8  tool errors 100%  answer 75%  turn limit 25%"
    assert "episodes" not in result_fields(tmp_path, evaluation(normal_rows([True])), None)


def test_without_tools_nothing_is_called_changed() -> None:
    before, after = [True] * 40, [True] * 10 + [False] * 30
    off = evaluation(normal_rows(after), tools="off")
    text = blind_probe(evaluation(normal_rows(before)), off)["conclusion"][0]
    assert text.startswith("The accuracy is 1.000 with tools and 0.250 without them (tools off): 0.750 [0.5")
    more = blind_probe(evaluation(normal_rows(after)), evaluation(normal_rows(before), tools="off"))["conclusion"][0]
    assert more.startswith("The accuracy is higher without tools: 0.250 with tools and 1.000 without them (tools off)")
    labels = [shown_label({"tools": change}) for change in ("off", "blank")]
    assert labels == ["rows shown without tools (tools off)", "rows shown with changed tools (tools blank)"]
    both = label_of_both([{"tools": "off", "role": "test"}, {"role": "test"}])
    assert both == "rows without tools (tools off) for A and with the true tools for B"


def test_the_chance_level_is_that_of_the_rows_that_count() -> None:
    normal = [row(f"p{i}", label=float(i < 6), images=(f"i{i}",), text=f"{i}") for i in range(8)]
    normal += [row(f"q{i}", label=0.0, images=(), text=f"{i}") for i in range(8)]
    changed = [{**r, "shown_images": shown(*["grey"] * len(r["images"]))} for r in normal]
    found = blind_probe(evaluation(normal), evaluation(changed, images="blank"))
    assert found["metrics"]["accuracy"]["chance"] == {"value": 0.75, "what": "always the commoner answer"}
    assert "always the commoner answer: 0.750" in found["conclusion"][0]
    assert (found["prompts"], found["without_images"]) == (8, 8)
    assert "Prompts without images, which do not count: 8." in found["conclusion"]


def test_rows_that_cannot_show_a_loss_do_not_count() -> None:
    normal = normal_rows([True] * 6)
    changed = normal_rows([False] * 6, shown_images=shown("grey"))
    changed[0]["shown_images"] = changed[0]["images"]  # small already
    changed[1]["truth"] = {"answer": "another"}
    normal[2]["images"] = changed[2]["images"] = changed[2]["shown_images"] = []
    normal.append(row("only here", **answered(True)))
    found = blind_probe(evaluation(normal), evaluation(changed, images="low:8"))
    counts = {key: found[key] for key in ("prompts", "unchanged", "without_images", "unpaired")}
    assert counts == {"prompts": 3, "unchanged": 1, "without_images": 1, "unpaired": 2}
    assert found["metrics"]["accuracy"]["n"] == 3


def test_shuffled_images_of_a_row_with_the_same_answer_are_counted_and_left_out_once_more() -> None:
    """Answers 0, 1, 2, 0, 1, 2: row i shows the image of row i + 1, the last two show those of rows with their answer.

    Rows 4 and 5 are right with the images of 1 and 2, which have the same answers.
    """
    normal = normal_rows([True] * 6)
    changed = normal_rows([False] * 4 + [True] * 2)
    for r, donor in zip(changed, (1, 2, 3, 4, 1, 2), strict=True):
        r["shown_images"] = shown(f"i{donor}")
    found = blind_probe(evaluation(normal), evaluation(changed, images="shuffled"))
    assert (found["prompts"], found["same_answer"], found["other_answer"]["prompts"]) == (6, 2, 4)
    assert found["metrics"]["accuracy"]["changed"] == pytest.approx(1 / 3)
    assert found["other_answer"]["metrics"]["accuracy"]["changed"] == 0
    assert found["conclusion"][1].startswith("2 of 6 prompts were shown the images of a prompt with the same answer.")
    assert found["conclusion"][2].startswith("On the other prompts: ")


def test_samples_of_a_prompt_are_compared_as_prompts() -> None:
    normal = [row("p", sample=k, images=("i",), **answered(True)) for k in range(4)]
    normal += [row("q", sample=k, images=("j",), **answered(k < 2)) for k in range(4)]
    changed = [{**r, **answered(False), "shown_images": shown("grey")} for r in normal]
    found = blind_probe(evaluation(normal), evaluation(changed, images="noise"))
    assert found["metrics"]["pass@1"]["normal"] == 0.75 and found["metrics"]["pass@4"]["normal"] == 1.0
    assert (found["prompts"], found["rows"]) == (2, 8)


def test_two_normal_evaluations_are_no_probe() -> None:
    with pytest.raises(StoreError, match="needs a normal evaluation"):
        blind_probe(evaluation(normal_rows([True])), evaluation(normal_rows([True])))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run with a normal evaluation, a blank one, and one of other weights (step 2)."""
    with create_run(tmp_path, kind="eval", recipe_name="r") as made:
        place = made.dir
    for name, right, extra in (
        ("test-s-step-000001", [True] * 20, {"step": 1}),
        ("test-s-step-000001-blank", [False] * 20, {"step": 1, "images": "blank", "normal": "test-s-step-000001"}),
        ("test-s-step-000002-blank", [True] * 20, {"step": 2, "images": "blank", "normal": "gone"}),
    ):
        rows = blank_rows(right) if "images" in extra else normal_rows(right)
        write_evaluation(layout.eval_dir(place, name), Evaluation(rows, summarise(rows)), {**META, **extra})
    return made


def folder_of(run: Any, name: str) -> Path:
    return layout.eval_dir(run.dir, f"test-s-step-{name}")


def test_what_was_shown_is_read_again_and_the_partner_is_found(run: Any) -> None:
    blank = read_evaluation(folder_of(run, "000001-blank"))
    assert blank.rows[0]["shown_images"][0]["sha256"] == "grey" and blank.rows[0]["images"][0]["sha256"] == "i0"
    assert "shown_images" not in read_evaluation(folder_of(run, "000001")).rows[0]
    probe = probe_of(folder_of(run, "000001-blank"), blank)
    assert probe is not None and probe["normal"] == str(folder_of(run, "000001"))
    gone = folder_of(run, "000002-blank")
    assert normal_folder(gone, read_summary(gone)["meta"]) is None and probe_of(gone, read_evaluation(gone)) is None
    assert probe_of(folder_of(run, "000001"), read_evaluation(folder_of(run, "000001"))) is None


def test_no_maximum_over_checkpoints_is_taken_of_changed_images(run: Any) -> None:
    assert over_checkpoints(run) == []


def test_a_comparison_pairs_only_what_was_shown_alike_unless_both_are_named(run: Any) -> None:
    folders = {name: folder_of(run, name) for name in ("000001", "000001-blank", "000002-blank")}
    normal, blank, other = (Side(name, None, {"e": path}) for name, path in folders.items())
    result = compare(normal, blank)
    assert result["evaluations"] == [] and "the models saw blank and true images" in result["notes"][0]
    both = [Side(s.ref, None, s.evaluations, (s.evaluations["e"],)) for s in (normal, blank)]
    result = compare(*both)
    assert result["evaluations"][0]["blind_probe"]["metrics"]["accuracy"]["difference"] == 1.0
    assert result["conclusion"]["answer"] == "not known"
    assert "they do not say which model is better. The accuracy is 1.000" in result["conclusion"]["text"]
    turned = compare(*reversed(both))  # the same probe, whichever is A
    assert turned["evaluations"][0]["blind_probe"] == result["evaluations"][0]["blind_probe"]
    alike = compare(blank, other)
    assert alike["evaluations"][0]["shown"] == ["blank", "blank"]
    assert "rows shown with changed images (blank)" in alike["conclusion"]["text"]
    together = {"e": folders["000001-blank"], "f": folders["000001"]}
    copy = shutil.copytree(folders["000001"], run.dir / "copy")
    mixed = compare(Side("a", None, together), Side("b", None, {"e": folders["000002-blank"], "f": copy}))
    assert mixed["conclusion"]["evaluations"] == ["f"]
    with pytest.raises(StoreError, match="true images"):
        require_same_image_condition(*folders.values())


def test_rows_shown_alike_have_one_key_and_one_table(run: Any) -> None:
    columns = [EvalColumn("one", 0, read_summary(f), f) for f in layout.eval_dirs(run.dir)]
    assert len({same_rows_key(c.meta) for c in columns}) == 2
    tables = eval_tables(columns)
    assert [t["kind"] for t in tables] == ["test, s, greedy", "test, s, greedy, rows shown with changed images (blank)"]
    notes = " ".join(tables[1]["notes"])
    assert "one, blind probe: The accuracy is 1.000 with the true images" in notes and "is gone" in notes
