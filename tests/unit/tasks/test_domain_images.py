from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from pair_tables import photo, write_parquet

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.taxonrl.domains import DOMAINS
from vlmrl.tasks.taxonrl.prepare import prepare_domain
from vlmrl.tasks.taxonrl.raw_images import FacePair, _with_splits, check_folders, parse_pairs, person_of

PAIRS = {"num_pairs": 60, "validation_pairs": 10, "test_pairs": 20}


def prepare(out: Path, domain: str, source: Path, **more: Any):
    return prepare_domain(domain, str(source), out=out, **{**PAIRS, **more}, limits=Limits(workers=1))


def rows_of(path: Path) -> dict[str, list[Any]]:
    dataset = open_dataset(Data(path=str(path)))
    return {split: list(dataset.rows(split)) for split in dataset.splits}


def fungi_table(folder: Path, images_a_species: int = 20, split: bool = False) -> list[dict[str, str]]:
    """As Danish Fungi publishes its metadata: a path and the ranks, among other columns."""
    (folder / "photos").mkdir(parents=True)
    rows = []
    for species in range(8):
        for i in range(images_a_species):
            path = f"photos/{species}-{i}.jpg"
            (folder / path).write_bytes(photo(species * 100 + i))
            names = {"order": f"O{species // 4}", "family": f"F{species // 2}", "genus": f"G{species // 2}"}
            row = {"gbifID": str(species), "image_path": path, **names, "species": f"G{species // 2} s{species}"}
            rows.append({**row, **({"split": "test" if i % 4 == 0 else "train"} if split else {})})
    return rows


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_table_of_paths_and_ranks_becomes_pairs_over_the_hierarchy(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "meta.csv", fungi_table(tmp_path))
    made = prepare(tmp_path / "out", "fungi", source)
    # each genus has two species, each family one genus, each order two families: distances 1 (siblings), 3 and 4
    assert made.info["splits"]["train"]["by_distance"] == {"0": 30, "1": 10, "3": 10, "4": 10}
    for members in rows_of(tmp_path / "out").values():
        for row in members:
            species = [origin.split("/")[1].split("-")[0] for origin in row.columns["origins"]]
            assert row.truth["species"] == [f"G{int(one) // 2} s{one}" for one in species]
            assert row.truth["order"] == [f"O{int(one) // 4}" for one in species]
            assert row.truth["same"] == (species[0] == species[1]) == (row.truth["distance"] == 0)
    assert made.info["truth_fields"] == ["order", "family", "genus", "species"]


def test_the_splits_of_a_table_are_kept_and_validation_is_cut_off_train(tmp_path: Path) -> None:
    rows = fungi_table(tmp_path, split=True)
    prepare(tmp_path / "out", "fungi", write_csv(tmp_path / "meta.csv", rows))
    given = {row["image_path"]: row["split"] for row in rows}
    found = rows_of(tmp_path / "out")
    used = {split: {o for row in members for o in row.columns["origins"]} for split, members in found.items()}
    assert {given[path] for path in used["test"]} == {"test"}
    assert {given[path] for path in used["train"] | used["validation"]} == {"train"}
    assert used["validation"] and not used["train"] & used["validation"]


def test_wrong_rows_of_a_table_are_listed_and_too_many_of_them_are_an_error(tmp_path: Path) -> None:
    rows = fungi_table(tmp_path)
    rows[3]["species"] = ""
    rows[5]["image_path"] = rows[4]["image_path"]
    rows[7]["image_path"] = "photos/none.jpg"
    rows[9]["image_path"] = "../outside.jpg"
    (tmp_path / rows[11]["image_path"]).write_bytes(photo(11)[:-100])
    source = write_csv(tmp_path / "meta.csv", rows)
    with pytest.raises(
        DataError, match=r"5 of 160 images cannot be used, more than --max-bad 0\.01; nothing was written"
    ):
        prepare(tmp_path / "out", "fungi", source)
    made = prepare(tmp_path / "out", "fungi", source, max_bad=0.05)
    listed = {one["origin"]: one["reason"] for one in made.info["dropped"]}
    assert listed["meta.csv:5"] == "no species" and "is in the table twice" in listed["meta.csv:7"]
    assert "no image file" in listed["photos/none.jpg"] and "leaves" in listed["../outside.jpg"]
    assert "truncated" in listed["photos/0-11.jpg"]


def individuals(folder: Path, domain: str) -> Path:
    kinds = {"gorilla": ("Silverback", "Juvenil", "Infant"), "chimp": ("Adult", "Infant", "sub-adult")}.get(domain)
    for number in range(20):
        place = folder / kinds[number % 3] / f"id{number}" if kinds else folder / f"id{number}"
        place.mkdir(parents=True)
        for i in range(6):
            (place / f"{i}.jpg").write_bytes(photo(number * 10 + i))
    return folder


@pytest.mark.parametrize(
    ("domain", "levels", "field"),
    [
        ("gorilla", "type,individual", "type"),
        ("chimp", "age_group,individual", "age_group"),
        ("whale", None, None),
    ],
)
def test_folders_an_individual_become_pairs_and_no_individual_is_in_two_splits(
    tmp_path: Path, domain: str, levels: str | None, field: str | None
) -> None:
    made = prepare(tmp_path / "out", domain, individuals(tmp_path / "in", domain), levels=levels)
    found = rows_of(tmp_path / "out")
    names = {split: {n for row in members for n in row.columns["individuals"]} for split, members in found.items()}
    assert not names["train"] & names["test"] and not names["train"] & names["validation"]
    assert made.info["doctor"]["groups"]["shared_with_train"] == {"validation": 0, "test": 0}
    for row in (row for members in found.values() for row in members):
        assert row.truth["same"] == (row.columns["individuals"][0] == row.columns["individuals"][1])
        assert row.truth["distance"] is None
        if field:
            spelt = {"Juvenil": "Juvenile", "sub-adult": "SubAdult"}
            folders = [origin.split("/")[0] for origin in row.columns["origins"]]
            assert row.truth[field] == [spelt.get(name, name) for name in folders]
    assert made.info["truth_fields"] == ([field] if field else [])


def test_files_whose_names_are_not_utf8_are_used_and_written_another_way(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / "in" / f"id{number}").mkdir(parents=True)
        for i in range(4):
            name = os.fsencode(tmp_path / "in" / f"id{number}") + b"/M\xfcller %d.jpg" % i
            Path(os.fsdecode(name)).write_bytes(photo(number * 10 + i))
    bad = Path(os.fsdecode(os.fsencode(tmp_path / "in" / "id0") + b"/bad\xff.jpg"))
    bad.write_bytes(b"no image")
    made = prepare(tmp_path / "out", "whale", tmp_path / "in", max_bad=0.1)
    origins = {o for members in rows_of(made.path).values() for row in members for o in row.columns["origins"]}
    assert "id1/M\\udcfcller 2.jpg" in origins and all("M\\udcfcller" in origin for origin in origins)
    assert [one["origin"] for one in made.info["dropped"]] == ["id0/bad\\udcff.jpg"]


def test_a_name_under_two_parents_keeps_the_one_it_has_most_often(tmp_path: Path) -> None:
    """Else the pairs of such images contradict themselves, and what is left of them is no longer balanced."""
    rows = fungi_table(tmp_path)
    for row in rows[:3]:
        row["order"] = "O1"  # family F0 is in O0 37 times
    rows[45]["family"] = "incertae sedis"
    rows[50]["genus"] = "Unknown"
    source = write_csv(tmp_path / "meta.csv", rows)
    made = prepare(tmp_path / "out", "fungi", source, max_bad=0.05)
    listed = {one["origin"]: one["reason"] for one in made.info["dropped"]}
    told = "the family F0 is in the order O1 here and in O0 elsewhere (37 images)"
    assert [listed.pop(rows[i]["image_path"]) for i in range(3)] == [told] * 3
    assert listed == {
        "meta.csv:47": "the family is 'incertae sedis', which names none",
        "meta.csv:52": "the genus is 'Unknown', which names none",
    }
    assert made.info["splits"]["train"]["by_distance"] == {"0": 30, "1": 10, "3": 10, "4": 10}


def test_a_folder_of_unknown_individuals_is_left_out(tmp_path: Path) -> None:
    """Two images of it would be called the same individual."""
    source = individuals(tmp_path / "in", "whale")
    (source / "unknown").mkdir()
    (source / "unknown" / "a.jpg").write_bytes(photo(999))
    made = prepare(tmp_path / "out", "whale", source)
    reason = "the individual is 'unknown', which names none"
    assert made.info["dropped"] == [{"origin": "unknown/a.jpg", "reason": reason}]


def test_a_table_a_split_may_be_named_anywhere_in_the_file_name(tmp_path: Path) -> None:
    rows = fungi_table(tmp_path)
    write_csv(tmp_path / "DF20-train_metadata_PROD-2.csv", [row for i, row in enumerate(rows) if i % 4])
    write_csv(tmp_path / "DF20-public_test_metadata.csv", [row for i, row in enumerate(rows) if not i % 4])
    prepare(tmp_path / "out", "fungi", tmp_path)
    used = {s: {o for row in rows for o in row.columns["origins"]} for s, rows in rows_of(tmp_path / "out").items()}
    first = {row["image_path"] for i, row in enumerate(rows) if not i % 4}
    assert used["test"] <= first and not (used["train"] | used["validation"]) & first


def test_species_of_seven_images_each_fill_three_splits(tmp_path: Path) -> None:
    made = prepare(tmp_path / "out", "fungi", write_csv(tmp_path / "meta.csv", fungi_table(tmp_path, 7)))
    # of 7: 2 (of 1.05) to validation, 2 (of 1.4) to test, 3 are left; 8 species, one same pair of two images
    assert {s: f["images"] for s, f in made.info["splits"].items()} == {"train": 24, "validation": 16, "test": 16}
    assert made.info["splits"]["validation"]["same"] == 5 and made.info["splits"]["test"]["same"] == 8


def test_splits_may_be_spelt_otherwise_and_unknown_ones_are_told(tmp_path: Path) -> None:
    rows = fungi_table(tmp_path, 24)
    for i, row in enumerate(rows):
        row["split"] = ("Training", "VAL ", "testing", "holdout")[i % 4]
    source = write_csv(tmp_path / "meta.csv", rows)
    with pytest.raises(DataError, match=r"meta\.csv:5: the split 'holdout' is none of train, validation, test"):
        prepare(tmp_path / "out", "fungi", source)
    made = prepare(tmp_path / "out", "fungi", source, max_bad=0.25)
    images = {split: fields["images"] for split, fields in made.info["splits"].items()}
    assert images == {"train": 48, "validation": 48, "test": 48}


def test_images_within_a_table_of_labelled_images_are_told(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": photo(i), "path": f"{i}.jpg"}, "individual": f"id{i % 4}"} for i in range(8)]
    with pytest.raises(DataError, match="train row 0: the image is in the table itself, which must give its path"):
        prepare(tmp_path / "out", "whale", write_parquet(tmp_path / "t.parquet", rows))


def test_levels_read_a_folder_of_images_by_its_folders_whatever_tables_are_in_it(tmp_path: Path) -> None:
    source = individuals(tmp_path / "in", "whale")
    (source / "notes.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no column `images`; the table has: a, b") as caught:
        prepare(tmp_path / "out", "whale", source)
    assert "has image_path, individual; --levels reads a folder's images" in str(caught.value.hint)
    assert prepare(tmp_path / "out", "whale", source, levels="individual").info["counts"]["classes"] == 20
    with pytest.raises(DataError, match=r"--levels names folders, but .*notes\.csv is a table"):
        prepare(tmp_path / "out", "whale", source / "notes.csv", levels="individual")


def test_too_few_individuals_for_the_splits_are_told(tmp_path: Path) -> None:
    source = individuals(tmp_path / "in", "whale")
    for number in range(5, 20):
        for i in range(1, 6):
            (source / f"id{number}" / f"{i}.jpg").unlink()
    with pytest.raises(
        DataError, match="5 individuals with two images or more, and train and validation and test need"
    ) as caught:
        prepare(tmp_path / "out", "whale", source)
    assert "--validation-pairs 0" in str(caught.value.hint)
    for seed in range(20):
        made = prepare(tmp_path / f"{seed}", "whale", source, validation_pairs=0, seed=seed)
        assert set(made.info["splits"]) == {"train", "test"}


def test_folders_that_name_what_the_domain_does_not_have_are_refused() -> None:
    assert check_folders(DOMAINS["chimp"], ["-", "individual"]) == ["-0", "individual"]
    assert check_folders(DOMAINS["bird"], None) == ["order", "family", "genus", "species"]
    for domain, levels in (
        ("whale", ["type", "individual"]),
        ("fungi", ["genus", "species"]),
        ("chimp", ["age_group"]),
    ):
        with pytest.raises(DataError, match="does not fit"):
            check_folders(DOMAINS[domain], levels)


def test_lists_of_pairs_are_read_in_both_forms() -> None:
    # folds of 2 x 1 pairs: one the same and one different in each
    text = "2\t1\nAnn_Li\t1\t4\nAnn_Li\t2\tBo\t13\nBo\t1\t2\nBo\t3\tCy\t1\n"
    assert parse_pairs(text, "pairs.txt") == [
        FacePair("Ann_Li/Ann_Li_0001.jpg", "Ann_Li/Ann_Li_0004.jpg", True, 0),
        FacePair("Ann_Li/Ann_Li_0002.jpg", "Bo/Bo_0013.jpg", False, 0),
        FacePair("Bo/Bo_0001.jpg", "Bo/Bo_0002.jpg", True, 1),
        FacePair("Bo/Bo_0003.jpg", "Cy/Cy_0001.jpg", False, 1),
    ]
    cplfw = "Ann_Li_1.jpg 1\nAnn_Li_2.jpg 1\nAnn_Li_3.jpg 0\nBo_1.jpg 0\n"
    assert [(pair.first, pair.same) for pair in parse_pairs(cplfw, "p")] == [
        ("Ann_Li_1.jpg", True),
        ("Ann_Li_3.jpg", False),
    ]
    wrongs = [
        ("Ann 1\n", "is not a pair"),
        ("a_1.jpg 1\nb_1.jpg 0\n", "different labels"),
        ("", "empty"),
        ("a_1.jpg 1\n", "a pair has two"),
        ("Ann_Li 1 x\n", "is not a pair"),
        ("Ann_Li 1 \u0662\n", "is not a pair"),
        ("2 1\nAnn 1 2\n", "announces 4 pairs, but there are 1"),
        ("3\nAnn 1 2\n", "announces 6 pairs, but there are 1"),
        (f"{'9' * 5000}\nAnn 1 2\n", "is not a pair"),
        (f"Ann 1 {'9' * 5000}\n", "is not a pair"),
    ]
    for wrong, what in wrongs:
        with pytest.raises(DataError, match=what):
            parse_pairs(wrong, "pairs.txt")


def faces(folder: Path, people: int) -> None:
    for number in range(people):
        place = folder / "lfw" / f"P{number}"
        place.mkdir(parents=True)
        for i in (1, 2):
            (place / f"P{number}_{i:04d}.jpg").write_bytes(photo(number * 10 + i))


def test_the_ten_folds_of_lfw_are_eight_to_train_one_to_validate_one_to_test(tmp_path: Path) -> None:
    faces(tmp_path / "in", 40)
    lines = ["10\t2"]
    for fold in range(10):
        p = 4 * fold
        lines += [f"P{p}\t1\t2", f"P{p + 1}\t1\t2", f"P{p}\t1\tP{p + 2}\t1", f"P{p + 1}\t2\tP{p + 3}\t2"]
    (tmp_path / "in" / "pairs.txt").write_text("\n".join(lines))
    made = prepare(tmp_path / "out", "human", tmp_path / "in")
    assert {split: fields["rows"] for split, fields in made.info["splits"].items()} == {
        "train": 32,
        "validation": 4,
        "test": 4,
    }
    found = rows_of(tmp_path / "out")
    assert {name for row in found["test"] for name in row.columns["individuals"]} == {"P36", "P37", "P38", "P39"}
    assert [row.truth["same"] for row in found["test"]] == [True, True, False, False]
    assert made.info["doctor"]["groups"]["shared_with_train"] == {"validation": 0, "test": 0}


def test_a_list_without_folds_is_split_by_person(tmp_path: Path) -> None:
    faces(tmp_path / "in", 60)
    lines = [f"P{n} 1 2" for n in range(0, 60, 2)] + [f"P{n} 1 P{n + 1} 1" for n in range(0, 60, 2)]
    (tmp_path / "in" / "pairs.txt").write_text("\n".join(lines))
    made = prepare(tmp_path / "out", "human", tmp_path / "in" / "pairs.txt")
    assert made.info["doctor"]["groups"]["shared_with_train"] == {"validation": 0, "test": 0}
    assert made.info["splits"]["train"]["rows"] == 48 and made.info["splits"]["test"]["rows"] == 6


def test_pairs_that_cannot_be_used_or_contradict_each_other_are_listed_with_their_line(tmp_path: Path) -> None:
    faces(tmp_path / "in", 60)
    root = tmp_path / "in" / "lfw"
    (root / "P0" / "P0_0002.jpg").write_bytes(b"")  # the pairs of lines 1 and 31 need P0; 31 takes the sound image
    (root / "P3" / "P3_0001.jpg").write_bytes((root / "P2" / "P2_0001.jpg").read_bytes())  # line 32: P2 1 P3 1
    lines = [f"P{n} 1 2" for n in range(0, 60, 2)] + [f"P{n} 1 P{n + 1} 1" for n in range(0, 60, 2)]
    lines += ["P5 1 P4 1"]  # line 61 is line 33 the other way round
    (tmp_path / "in" / "pairs.txt").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"1 of 90 images cannot be used, more than --max-bad 0\.01"):
        prepare(tmp_path / "out", "human", tmp_path / "in")
    made = prepare(tmp_path / "out", "human", tmp_path / "in", max_bad=0.05)
    contrary = "one image twice, or the same two images elsewhere, called the same and different"
    assert {one["origin"]: one["reason"] for one in made.info["dropped"]} == {
        "P0/P0_0002.jpg": "an empty file (0 bytes)",
        "pairs.txt:1": "P0/P0_0002.jpg cannot be used",
        "pairs.txt:32": contrary,
        "pairs.txt:61": "the same two images as pairs.txt:33",
    }
    assert sum(fields["rows"] for fields in made.info["splits"].values()) == 58


def test_more_wrong_pairs_than_the_share_and_no_sound_pair_at_all_are_refused(tmp_path: Path) -> None:
    """Pairs 1 and 2 are the same two images, called the same and different."""
    faces(tmp_path / "in", 60)
    lines = ["P0/P0_0001.jpg 1", "P0/P0_0002.jpg 1", "P0/P0_0002.jpg 0", "P0/P0_0001.jpg 0"]
    (tmp_path / "in" / "pairs_CPLFW.txt").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"none of the 2 pairs can be used; nothing was written:\n  pairs_CPLFW"):
        prepare(tmp_path / "out", "human", tmp_path / "in", max_bad=1)
    for n in range(2, 60):
        lines += [f"P{n}/P{n}_0001.jpg 1", f"P{n}/P{n}_0002.jpg 1"]
    (tmp_path / "in" / "pairs_CPLFW.txt").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"2 of 60 pairs cannot be used, more than --max-bad 0\.01") as caught:
        prepare(tmp_path / "out", "human", tmp_path / "in")
    assert "--max-bad 0.04 leaves them out" in str(caught.value.hint) and not (tmp_path / "out").exists()
    made = prepare(tmp_path / "out", "human", tmp_path / "in", max_bad=0.04)
    assert sum(fields["rows"] for fields in made.info["splits"].values()) == 58


def test_pairs_between_two_splits_of_a_list_without_folds_are_told() -> None:
    """All 780 pairs of 40 persons: the two persons of a test pair leave 2 x 38 pairs that no split can have."""
    met = [(a, b) for a in range(40) for b in range(a)]
    pairs = [FacePair(f"P{a}_1.jpg", f"P{b}_1.jpg", False, None, f"pairs.txt:{i}") for i, (a, b) in enumerate(met)]
    splits, between = _with_splits({"": pairs})
    assert {split: len(found) for split, found in splits.items()} == {"train": 703, "test": 1}
    known = {pair.where: pair for pair in pairs}
    tested = {person_of(splits["test"][0].first), person_of(splits["test"][0].second)}
    lost = [known[one.origin] for one in between]
    assert len(lost) == 76 and all(len({person_of(p.first), person_of(p.second)} & tested) == 1 for p in lost)
    assert {one.reason for one in between} == {"one of its persons is in test, the other is not"}
