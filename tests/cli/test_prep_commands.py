from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path

import pytest
from command_line import started, this_process
from pair_tables import photo, table_rows, write_parquet

from vlmrl.tasks.taxonrl.domains import DOMAINS


def test_every_domain_has_its_command_and_an_example_in_its_help(tmp_path: Path) -> None:
    for name, domain in DOMAINS.items():
        assert f"same {domain.target if name != 'human' else 'person'} or not" in domain.about
        done = this_process("prep", name, "--help", cwd=tmp_path)
        assert done.code == 0 and f"Example: vlmrl prep {name} --synthetic 600" in done.out


@pytest.mark.parametrize("columns", [80, 100])
def test_prep_and_the_doctor_tell_the_same_and_fit_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    source = write_parquet(tmp_path / "rows.parquet", table_rows("bird", 60))
    out = str(tmp_path / "bird")
    done = this_process("prep", "bird", source, "--out", out, "--workers", 1, "--json", cwd=tmp_path)
    made = json.loads(done.out)
    assert made["outcome"] == "created" and made["info"]["splits"]["validation"]["rows"] == 6
    shown = this_process("prep", "bird", source, "--out", out, "--workers", 1, cwd=tmp_path)
    table = [line for line in shown.out.splitlines() if line.startswith(("│", "┃", "┏", "└"))]
    assert len(table) > 12 and max(map(len, table)) <= columns
    for check in made["info"]["doctor"]["checks"]:
        assert check["check"] in shown.out
    again = this_process("data", "doctor", out, "--workers", 1, "--json", cwd=tmp_path)
    report = json.loads(again.out)["doctor"]
    for key in ("image_tokens", "prompt_tokens", "labels", "exact_copies", "near_copies", "repeated_pairs", "remarks"):
        assert report[key] == made["info"]["doctor"][key], key


def test_the_doctor_counts_an_image_whose_bytes_changed_and_looks_at_the_others(tmp_path: Path) -> None:
    out = tmp_path / "bird"
    source = write_parquet(tmp_path / "rows.parquet", table_rows("bird", 60))
    this_process("prep", "bird", source, "--out", out, "--workers", 1, "--json", cwd=tmp_path)
    shard = out / "media-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[data.index(b"\xff\xd8\xff") + 60] ^= 1  # within the first JPEG
    shard.write_bytes(data)
    done = this_process("data", "doctor", out, "--workers", 1, "--json", cwd=tmp_path)
    broken = [c for c in json.loads(done.out)["doctor"]["checks"] if c["check"] == "broken images"]
    assert done.code == 0 and len(broken) == 1 and broken[0]["verdict"] == "bad", done.err
    assert "does not have the bytes it was stored with" in broken[0]["finding"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_prep_ends_in_order_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    rows = table_rows("whale", 96)
    for i, row in enumerate(rows):
        row["images"] = [{"bytes": photo(2 * i + side, 800, 600), "path": None} for side in (0, 1)]
    source = write_parquet(tmp_path / "rows.parquet", rows, group=4)
    words = ("prep", "whale", source, "--out", tmp_path / "out", "--workers", 2)
    run = started(*words, cwd=tmp_path)
    parts, end = tmp_path / ".out.building" / "work", time.monotonic() + 60
    while len(list(parts.glob("rows-*.jsonl"))) < 2:
        assert time.monotonic() < end and run.poll() is None
        time.sleep(0.005)
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (130, "") and not (tmp_path / "out").exists()
    again = shlex.join(["vlmrl", *map(str, words)])
    assert err == f"prep was interrupted: the parts that are done are kept; continue with: {again}\n"
    again = this_process(*words, cwd=tmp_path)
    assert again.code == 0 and "found: an interrupted run had made" in again.err


@pytest.mark.parametrize(
    ("source", "then"), [(["rows.parquet"], "the parts that are"), (["--synthetic", 40], "nothing was")]
)
def test_who_interrupts_prep_is_told_whether_anything_is_kept(tmp_path: Path, monkeypatch, source, then) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vlmrl.tasks.taxonrl.prepare.check_name", interrupted)
    done = this_process("prep", "whale", *source, cwd=tmp_path)
    assert done.code == 130 and done.err.startswith(f"prep was interrupted: {then}")


def test_names_of_files_cannot_steer_the_terminal_or_the_printer(tmp_path: Path) -> None:
    # in notes as O[/b]/..., which Rich would read as its markup
    classes = [("O[", "b]", "G", "r"), ("O[", "b]", "G", "s"), ("P", "Q", "H", "t"), ("P", "Q", "H", "u")]
    for number, names in enumerate(classes):
        folder = tmp_path.joinpath("in", *names)
        folder.mkdir(parents=True)
        for i in range(12):
            (folder / f"{i}.jpg").write_bytes(photo(100 * number + i))
    (folder / "a\x1b[2Jb\x07.jpg").write_bytes(b"no image")
    out = tmp_path / "[" / "i]"
    words = ("prep", "bird", tmp_path / "in", "--out", out, "--workers", 1, "--max-bad", 0.1)
    done = this_process(*words, cwd=tmp_path)
    shown = this_process("data", "show", out, "--n", 1, cwd=tmp_path)
    assert (done.code, shown.code) == (0, 0), done.err + shown.err
    assert "no sibling: class O[/b]" in done.err and r"a\u001b[2Jb\u0007.jpg" in done.err + done.out
    assert str(out) in done.out and "rows left out when the dataset was made: 1 (dropped.jsonl)" in shown.out
    screens = done.out + done.err + shown.out + shown.err
    assert "\x1b" not in screens and "\x07" not in screens


def test_distances_are_shown_where_there_are_any(tmp_path: Path) -> None:
    for domain in ("whale", "bird"):
        source = write_parquet(tmp_path / f"{domain}.parquet", table_rows(domain, 20))
        done = this_process("prep", domain, source, "--out", tmp_path / domain, "--workers", 1, cwd=tmp_path)
        assert done.code == 0 and ("by distance" in done.out.split("data doctor")[0]) == (domain == "bird")
    again = this_process("prep", "bird", tmp_path / "bird", "--out", tmp_path / "b", cwd=tmp_path)
    assert again.code == 2 and "bird is a dataset that `vlmrl prep` has made" in again.err


WRONG = [
    (["prep", "fungi", "gone.parquet"], "no dataset at gone.parquet"),
    (["prep", "fungi", "{rows}@tset"], "no split `tset`"),
    (["prep", "fungi", "{rows}", "--on-overlong", "shrink"], "--on-overlong 'shrink' is unknown"),
    (["prep", "fungi", "{rows}", "--on-overlong", "drop"], "without --max-prompt-tokens"),
    (["prep", "fungi", "{rows}", "--name", "../x"], "the dataset name '../x' cannot be used"),
    (["prep", "fungi", "{rows}", "--synthetic", "50"], "leave one out"),
    (["prep", "fungi", "{rows}"], "all 40 rows are wrong; nothing was written"),
    (["prep", "bird", "{rows}", "--max-prompt-tokens", "20"], "40 rows are over --max-prompt-tokens 20"),
    (
        ["prep", "bird", "{rows}", "--max-prompt-tokens", "20", "--on-overlong", "resize"],
        "tokens for an image beside the text; nothing was written",
    ),
    (["prep", "whale", "{folder}"], "no image in empty; nothing was written"),
]


@pytest.mark.parametrize(("arguments", "told"), WRONG)
def test_a_mistake_is_told_in_words_and_nothing_is_written(tmp_path: Path, arguments: list[str], told: str) -> None:
    rows = write_parquet(tmp_path / "in" / "rows.parquet", table_rows("bird", 40))
    (tmp_path / "empty").mkdir()
    given = [one.format(rows=rows, folder=tmp_path / "empty") for one in arguments]
    done = this_process(*given, "--out", "out", "--workers", 1, cwd=tmp_path)
    assert done.code == 2 and told in " ".join(done.err.split()) and "Traceback" not in done.err
    assert "hint:" in done.err and sorted(path.name for path in tmp_path.iterdir()) == ["empty", "in"]
