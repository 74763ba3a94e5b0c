from __future__ import annotations

import pytest

from vlmrl.data.doctor import DatasetFacts, RowFacts, baseline, examine_dataset
from vlmrl.data.image_scan import HASH_BYTES, Examined
from vlmrl.errors import DataError
from vlmrl.types import Media


def image(number: int, look: int | None = None, side: int = 56, remarks: tuple[str, ...] = ()) -> Examined:
    name = f"{number:064x}"
    code = (number if look is None else look) * 2654435761 % (1 << 64)
    return Examined(Media(name, side, side), 100, f"{code:016x}" * (HASH_BYTES // 8), remarks)


def row(
    a: int, b: int, same: bool, distance: int | None = None, groups: tuple[str, ...] = (), text: int = 100
) -> RowFacts:
    return RowFacts((a, b), "same" if same else "different", distance, text, groups, f"row {a} {b}")


def verdicts(report: dict) -> dict[str, str]:
    return {check["check"]: check["verdict"] for check in report["checks"]}


def findings(report: dict) -> dict[str, str]:
    return {check["check"]: check["finding"] for check in report["checks"]}


def test_the_baseline_of_guessing() -> None:
    # 60 same of 100: always "same" is right in 0.6; saying 0.6 every time costs 0.6 * 0.4^2 + 0.4 * 0.6^2 = 0.24
    assert baseline({"same": 60, "different": 40}) == {"label": "same", "accuracy": 0.6, "brier": 0.24}
    assert baseline({"a": 1, "b": 2, "c": 1}) == {"label": "b", "accuracy": 0.5}


def sound() -> DatasetFacts:
    train = [row(0, 1, True, 0), row(2, 3, False, 1), row(0, 2, False, 2), row(1, 1, True, 0)]
    return DatasetFacts(
        [image(i + 1) for i in range(8)], {"train": train, "test": [row(4, 5, True, 0), row(6, 7, False, 2)]}
    )


def test_a_sound_dataset_is_all_ok() -> None:
    report = examine_dataset(sound(), max_prompt_tokens=2048)
    assert set(verdicts(report).values()) == {"ok"}
    # 56 x 56 pixels are 2 x 2 = 4 tokens: two images 8, with 100 of text 108
    assert report["image_tokens"]["train"]["bins"] == [[8, 12, 4]] and report["prompt_tokens"]["train"]["max"] == 108
    assert report["labels"]["train"]["distances"] == {"0": 2, "1": 1, "2": 1}
    assert report["image_sizes"] == {"56x56": 8, "others": 0}


def test_rows_over_the_limit_are_counted_by_split() -> None:
    facts = sound()
    facts.images = [*facts.images, image(9, side=800)]
    facts.rows = {**facts.rows, "test": [row(8, 8, True, text=367), row(8, 8, True, text=366), row(4, 5, False)]}
    report = examine_dataset(facts, max_prompt_tokens=2048)
    # 800 x 800 is 841 tokens: 2 x 841 + 367 = 2,049
    assert report["rows_over_limit"] == {"train": 0, "test": 1} and verdicts(report)["rows over the limit"] == "look"
    assert "1 over 2,048 tokens (test 1)" in findings(report)["rows over the limit"]


def test_copies_across_splits_are_found_exact_and_near() -> None:
    facts = sound()
    facts.rows = {**facts.rows, "test": [row(0, 5, False, 1), row(6, 7, True, 0)]}
    facts.images = [*facts.images[:6], image(70, look=2), facts.images[7]]  # image 6 looks like image 1, in train
    report = examine_dataset(facts)
    assert report["exact_copies"]["between"] == {"train+test": 1}
    assert report["near_copies"]["between"] == {"train+test": 1}
    assert verdicts(report)["same image in two splits"] == "bad" and verdicts(report)["near copies (by look)"] == "look"
    assert findings(report)["same image in two splits"] == "1 image in train and test"
    assert findings(report)["near copies (by look)"] == "1 image of test looks like one of train"
    assert report["near_copies"]["examples"] == [
        {"images": [facts.images[k].media.sha256 for k in (1, 6)], "splits": [["train"], ["test"]]}
    ]


def test_an_exact_copy_is_no_near_copy_too() -> None:
    facts = sound()
    facts.rows = {**facts.rows, "test": [row(0, 5, False, 1), row(6, 7, True, 0)]}
    facts.images = [facts.images[0], image(20, look=1), *facts.images[2:]]  # image 1 looks like image 0: of both splits
    report = examine_dataset(facts)
    assert report["exact_copies"]["between"] == {"train+test": 1} and report["near_copies"]["between"] == {}
    assert report["near_copies"]["within"] == 2


def test_more_splits_than_the_doctor_can_tell_apart() -> None:
    with pytest.raises(DataError, match="63 splits"):
        examine_dataset(DatasetFacts([image(1)], {str(number): [row(0, 0, True)] for number in range(63)}))
    report = examine_dataset(DatasetFacts([image(1)], {str(number): [row(0, 0, True)] for number in range(62)}))
    assert len(report["exact_copies"]["between"]) == 62 * 61 // 2


def test_near_copies_within_a_split_are_told_and_are_no_matter() -> None:
    facts = sound()
    facts.images = [
        *facts.images[:3],
        image(40, look=3),
        *facts.images[4:],
    ]  # image 3 looks like image 2, both in train
    report = examine_dataset(facts)
    assert report["near_copies"]["between"] == {} and report["near_copies"]["within"] == 2
    assert findings(report)["near copies (by look)"] == "2 look like another image of their split"
    assert verdicts(report)["near copies (by look)"] == "ok"


def test_repeated_pairs_are_bad_where_they_contradict_or_cross_splits() -> None:
    facts = sound()
    facts.rows = {
        "train": [row(0, 1, True), row(1, 0, True), row(2, 3, True), row(2, 3, False)],
        "test": [row(4, 5, True)],
    }
    report = examine_dataset(facts)
    assert report["repeated_pairs"]["rows"] == 4 and report["repeated_pairs"]["contradicting"] == 1
    assert "; in 1 case their labels contradict, such as row 2 3" in findings(report)["repeated pairs"]
    assert verdicts(report)["repeated pairs"] == "bad"


@pytest.mark.parametrize(("group", "verdict"), [("individual", "bad"), ("species", "look")])
def test_known_individuals_in_the_test_are_bad_and_known_species_worth_a_look(group: str, verdict: str) -> None:
    train = [row(0, 1, True, groups=("a", "a")), row(2, 3, False, groups=("b", "c"))]
    test = [row(4, 5, True, groups=("a", "a")), row(6, 7, False, groups=("d", "e"))]
    report = examine_dataset(DatasetFacts([image(i + 1) for i in range(8)], {"train": train, "test": test}, group))
    assert report["groups"]["shared_with_train"] == {"test": 1} and verdicts(report)[f"{group} overlap"] == verdict
    assert findings(report)[f"{group} overlap"] == "test: 1 of 3 are in train"


@pytest.mark.parametrize(("num_same", "verdict"), [(6, "ok"), (8, "look"), (9, "bad")])
def test_the_share_of_the_largest_class_decides_the_verdict(num_same: int, verdict: str) -> None:
    rows = [row(i, i + 1, i < num_same) for i in range(10)]
    report = examine_dataset(DatasetFacts([image(i + 1) for i in range(11)], {"train": rows}))
    assert verdicts(report)["majority class"] == verdict


def test_images_far_longer_than_wide_are_bad_with_the_row_that_shows_one() -> None:
    facts = sound()
    for i, sides in ((2, (2000, 10)), (3, (2001, 10)), (5, (3, 601))):  # 200 to 1 is taken, 200.1 is not
        facts.images[i] = Examined(Media(f"{i + 1:064x}", *sides), 100, facts.images[i].look)
    report = examine_dataset(facts)
    assert [image["row"] for image in report["long_images"]] == ["row 2 3", "row 4 5"]
    assert verdicts(report)["very long images"] == "bad" and "row 2 3" in findings(report)["very long images"]


def test_unusual_images_and_notes_are_told() -> None:
    facts = sound()
    facts.images = [image(1, remarks=("CMYK",)), *facts.images[1:]]
    facts.notes = {"validation split": ("look", "cut off")}
    report = examine_dataset(facts)
    assert (
        findings(report)["unusual images, handled"] == "CMYK: 1" and findings(report)["validation split"] == "cut off"
    )


def test_images_that_are_not_there_are_not_said_to_be_fine() -> None:
    bare = RowFacts((), "yes", None, 7, (), "row 1")
    report = examine_dataset(DatasetFacts([], {"train": [bare, bare]}))
    assert findings(report)["images"] == "no row has an image: none was looked at"
    assert not {"same image in two splits", "near copies (by look)"} & verdicts(report).keys()
    mixed = examine_dataset(DatasetFacts([image(1)], {"train": [bare, bare._replace(images=(0,))]}))
    assert (verdicts(mixed)["images"], findings(mixed)["images"]) == ("look", "1 of 2 rows have no image")
    assert "images" not in verdicts(examine_dataset(sound()))
