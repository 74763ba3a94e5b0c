"""The page: all there, nothing loaded, nothing of others' text taken for markup, damage told in its place."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_builders import HOSTILE, evaluate_run, evaluation_row, group, make_run

from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.report.curves import RunCurves, health_charts
from vlmrl.report.evaluations import eval_columns, eval_tables
from vlmrl.report.page import render_report, run_labels, write_report
from vlmrl.store import layout
from vlmrl.store.runs import Run, create_run, open_run, resume_run
from vlmrl.store.verify import shortened
from vlmrl.tasks.figure import Lines, Table, figures_to_json
from vlmrl.tasks.pairs.task import confidence_figures

VOID = {"meta", "img", "br", "link", "input", "hr"}
SVG_LEAVES = {"line", "path", "circle", "rect", "use", "image", "text"}


class Page(HTMLParser):
    """What a browser would make of the page: its tags, attributes and text, and whether every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def page(*runs: Run) -> Page:
    return Page(render_report(list(runs)))


def test_the_page_holds_everything_of_a_run(tmp_path: Path):
    shown = page(make_run(tmp_path, name="first-try"))
    for heading in ("Curves", "Reward parts", "Evaluations", "Rollouts", "Health", "Recipe", "Provenance"):
        assert heading in shown.text
    assert "first-try" in shown.text
    assert "vlmrl train digits.toml" in shown.text
    assert "answer split.1" in shown.text
    assert "custom/thing" in shown.text
    assert "digits.toml:3" in shown.text
    assert not shown.wrong and shown.open == []


def test_the_headline_tells_start_and_end_with_intervals(tmp_path: Path):
    text = re.sub(r"\s+", " ", page(make_run(tmp_path, steps=5)).text)
    assert "Validation reward 0.400 → 0.600" in text
    assert re.search(r"cost: \d+ s, 40 responses of 80 tokens", text), text
    assert "step 0 [0.380, 0.420] to 4 [0.580, 0.620]" in text


def test_the_page_asks_for_nothing(tmp_path: Path):
    shown = page(make_run(tmp_path, text=HOSTILE))
    policy = next(a["content"] for a in shown.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "script" not in policy
    for tag in ("script", "link", "iframe", "object", "embed", "base", "form"):
        assert shown.named(tag) == []
    for tag, attrs in shown.tags:
        for name, value in attrs.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value is not None and value.startswith(("data:image/png;base64,", "#")), (tag, name, value)
    html = render_report([make_run(tmp_path)])
    assert "url(" not in html and "@import" not in html


def test_text_of_model_data_and_recipe_is_never_markup(tmp_path: Path):
    run = make_run(
        tmp_path,
        text=HOSTILE,
        name="x",
        note=HOSTILE,
        tags=["<script>tag</script>"],
        recipe_text=HOSTILE,
        argv=["vlmrl", HOSTILE],
        labels=[HOSTILE],
        seeds={HOSTILE: 1},
        datasets=[{"name": HOSTILE, "path": HOSTILE}],
        resolved={"schema": 1, "recipe": {HOSTILE: {HOSTILE: HOSTILE}}, "origins": {}},
    )
    hostile = evaluation_row(HOSTILE, 0.5, text=HOSTILE, note=HOSTILE, truth={HOSTILE: HOSTILE})
    hostile |= {"parts": {HOSTILE: 1.0}, "outcome": {HOSTILE: 1.0, "accuracy": 1.0}}
    summary = summarise([hostile])
    write_evaluation(
        layout.eval_dir(run.dir, "hostile"),
        Evaluation([hostile], summary),
        {
            "split": HOSTILE,
            "source": HOSTILE,
            "paper": {"numbers": {"accuracy": HOSTILE}, "source": HOSTILE},
        },
    )
    shown = page(run)
    assert shown.named("script") == []
    assert not any("evil" in (attrs.get("src") or "") for attrs in shown.named("img"))
    assert not shown.wrong and shown.open == []
    assert shown.text.count("alert('x')") >= 10
    assert "a.png> {{ 7*7 }}" in shown.text and "a.png> 49" not in shown.text


def test_hostile_metric_names_stay_text_in_charts(tmp_path: Path):
    run = create_run(tmp_path, kind="rl", recipe_name="digits")
    with run:
        for step in range(3):
            run.log(step, "train", {HOSTILE: 0.5, f"reward/part/{HOSTILE}": 1.0, "reward/mean": 0.1})
            run.log(step, "validation", {f"eval/{HOSTILE}": 0.5, "eval/reward": 0.5})
        run.event(3, HOSTILE)
    shown = page(run)
    assert shown.named("script") == [] and not shown.wrong
    assert shown.named("img") == []


def test_control_and_direction_characters_are_made_visible(tmp_path: Path):
    html = render_report([make_run(tmp_path, text="a\u202eb\x00c\x1b[31m")])
    assert "a\\u202eb\\u0000c\\u001b[31m" in html
    assert "\u202e" not in html and "\x00" not in html and "\x1b" not in html


def test_hidden_characters_in_names_notes_and_charts_are_made_visible(tmp_path: Path):
    name = "acc\u202eucy\u200b"
    run = create_run(tmp_path, kind="rl", recipe_name="digits", name="named")
    with run:
        for step in range(3):
            run.log(step, "train", {f"reward/part/{name}": 1.0, "reward/mean": 0.1, name: float(step)})
            run.log(step, "validation", {f"eval/{name}": 0.5, "eval/reward": 0.5})
        run.write_rollouts(0, [replace(group("p", [0.5, 1.0]), prompt_text=name)])
    html = render_report([run])
    assert html.count("acc\\u202eucy\\u200b") > 3
    assert "\u202e" not in html and "\u200b" not in html


def test_images_are_png_data_and_each_content_is_held_once(tmp_path: Path):
    shown = page(make_run(tmp_path))
    uris = [a["src"] for a in shown.named("img")] + [a["href"] for a in shown.named("image")]
    assert uris and all(u is not None and u.startswith("data:image/png;base64,") for u in uris)
    assert len(uris) == len(set(uris)) == 2
    used = {a["href"] for a in shown.named("use")}
    assert used == {f"#{a['id']}" for a in shown.named("image")}


def test_images_that_are_gone_leave_a_note_not_a_hole(tmp_path: Path):
    run = make_run(tmp_path)
    (run.dir / layout.MEDIA / "media-00000.arrow").unlink()
    text = page(run).text
    assert "image not found" in text
    assert "dataset gone cannot be found" in text
    (run.dir / layout.MEDIA / "media-00000.arrow").write_bytes(b"garbage")
    assert "image not found" in page(run).text


def test_a_run_killed_before_its_first_step_renders_with_a_note(tmp_path: Path):
    run = create_run(tmp_path, kind="rl", recipe_name="digits")
    run.close()
    text = page(open_run(tmp_path, run.id)).text
    assert "killed" in text
    assert "No metrics" in text
    assert "This run has no rollouts" in text


def test_a_torn_metrics_file_shows_the_lines_that_are_whole(tmp_path: Path):
    run = make_run(tmp_path)
    with open(run.dir / layout.METRICS, "ab") as file:
        file.write(b'{"step": 9, "kind": "tr')
    assert "Curves" in page(run).text


def test_a_damaged_resolved_recipe_is_told(tmp_path: Path):
    run = make_run(tmp_path, steps=1)
    for content in (b"", b"{", b"[1]", b'{"recipe": 3}'):
        (run.dir / layout.RESOLVED).write_bytes(content)
        assert "resolved recipe is damaged" in page(run).text, content


def test_damaged_rollouts_are_told_at_their_step(tmp_path: Path):
    run = make_run(tmp_path)
    layout.rollout_path(run.dir, 5).write_bytes(b"PAR1")
    shown = page(run)
    assert "damaged" in shown.text
    assert "answer split.1" in shown.text


@pytest.mark.parametrize("name", ["summary.json", "rows.parquet"])
def test_a_damaged_evaluation_does_not_lose_the_page(tmp_path: Path, name: str):
    run = make_run(tmp_path, steps=0)
    (layout.eval_dir(run.dir, "test") / name).write_bytes(b"{")
    text = page(run).text
    assert "Evaluation test" in text


def test_a_run_without_rollouts_shows_answers_of_its_evaluation(tmp_path: Path):
    run = make_run(tmp_path, steps=0, kind="sft")
    text = page(run).text
    assert "Answers in evaluation test" in text
    assert "said p2" in text


def test_a_failed_run_says_why(tmp_path: Path):
    run = create_run(tmp_path, kind="rl", recipe_name="digits")
    run.finish("failed", "the disk is full")
    assert "It failed: the disk is full" in page(run).text


def test_failed_rewards_are_shown_with_their_error(tmp_path: Path):
    run = create_run(tmp_path, kind="rl", recipe_name="digits")
    with run:
        run.write_rollouts(0, [group("bad", [float("nan"), float("nan")]), group("good", [0.2, 0.4])])
    text = page(run).text
    assert "the reward failed" in text
    assert "ZeroDivisionError: row 3" in text


def test_several_runs_are_overlaid_and_told_apart(tmp_path: Path):
    runs = [make_run(tmp_path, name="a"), make_run(tmp_path, name="b")]
    shown = page(*runs)
    assert "Report on 2 runs" in shown.text
    charts = [a for a in shown.named("svg") if a.get("aria-label", "") and "Reward" in str(a.get("aria-label"))]
    assert any("a, training" in str(a["aria-label"]) and "b, training" in str(a["aria-label"]) for a in charts)
    assert "b - a" in shown.text


def test_what_differs_between_the_recipes_is_shown_first(tmp_path: Path):
    other = {"schema": 1, "recipe": {"kind": "rl", "optim": {"lr": 0.5}}, "origins": {}}
    runs = [make_run(tmp_path, name="a", steps=1), make_run(tmp_path, name="b", steps=1, resolved=other)]
    text = page(*runs).text
    shown = text[text.index("Differences") : text.index("values that were set")]
    assert "optim.lr0.0010.5" in shown and "kind" not in shown
    same = page(runs[0], make_run(tmp_path, name="c", steps=1)).text
    assert "The recipes of these runs are the same" in same


def sure_rows() -> list[dict[str, Any]]:
    rows = [evaluation_row(f"p{i}", 0.5) for i in range(8)]
    for i, row in enumerate(rows):
        row["outcome"] = {"label": float(i % 2), "confidence": 0.93 if i % 2 else 0.07, "accuracy": 1.0}
    return rows


def test_the_figures_of_a_task_are_drawn(tmp_path: Path):
    run, rows = make_run(tmp_path, steps=1), sure_rows()
    shown = [
        *confidence_figures([(None, None, row["outcome"]) for row in rows]),
        Lines("precision", {"disc": [(0.0, 1.0), (0.5, 0.25)], "<u>": [(0.0, 0.5)]}, "recall", "precision"),
        Table("confusion", ["true", "<u>"], [["disc", 0.125], ["ring", None]], "Of <u>all</u> rows."),
    ]
    summary = summarise(rows) | {"figures": figures_to_json(shown)}
    write_evaluation(layout.eval_dir(run.dir, "sure"), Evaluation(rows, summary), {"split": "test"})
    drawn = page(run)
    assert "truly the same\n0.90 to 0.95: 4 of 4" in drawn.text
    assert "truly different\n0.05 to 0.10: 4 of 4" in drawn.text
    assert "disc\nrecall 0.5: 0.25" in drawn.text and "(precision)" in drawn.text
    assert "Of <u>all</u> rows." in drawn.text and "0.125" in drawn.text
    assert not drawn.named("u") and not drawn.wrong


def test_figures_that_cannot_be_read_are_a_sentence(tmp_path: Path):
    run, rows = make_run(tmp_path, steps=1), sure_rows()
    summary = summarise(rows) | {"figures": [{"kind": "lines"}], "figures_problem": "`figures` raised KeyError"}
    write_evaluation(layout.eval_dir(run.dir, "sure"), Evaluation(rows, summary), {"split": "test"})
    text = page(run).text
    assert "the figure None cannot be read" in text and "They could not be made: `figures` raised KeyError" in text


def test_an_evaluation_of_an_earlier_version_shows_how_sure_its_answers_are(tmp_path: Path):
    run, rows = make_run(tmp_path, steps=1), sure_rows()
    write_evaluation(layout.eval_dir(run.dir, "sure"), Evaluation(rows, summarise(rows)), {"split": "test"})
    text = page(run).text
    assert "probability answered" in text and "the label is 1\n0.90 to 0.95: 4 of 4" in text


def test_runs_of_one_name_are_called_by_their_ids(tmp_path: Path):
    runs = [make_run(tmp_path, name="same"), make_run(tmp_path, name="same"), make_run(tmp_path, name="other")]
    assert run_labels(runs) == [runs[0].id, runs[1].id, "other"]


def test_a_resume_is_marked_in_the_curves(tmp_path: Path):
    from vlmrl.store.layout import checkpoint_dir

    run = create_run(tmp_path, kind="rl", recipe_name="digits", name="r")
    for step in range(4):
        run.log(step, "train", {"reward/mean": 0.1 * step})
    run.close()
    folder = checkpoint_dir(run.dir, 2)
    folder.mkdir(parents=True)
    (folder / "COMPLETE").write_text("")
    again = resume_run(tmp_path, run.id)
    for step in range(2, 5):
        again.log(step, "train", {"reward/mean": 0.5})
    again.finish()
    assert "r: attempt 2 resumed from step 2" in page(again).text


@pytest.mark.parametrize(("name", "is_smooth"), [("optim/lr", False), ("policy/entropy", True)])
def test_a_setting_is_drawn_as_it_is(name: str, is_smooth: bool):
    lines = [{"step": step, name: 1e-3 if step < 20 else 5e-4, "optim/grad_norm": 1.0} for step in range(40)]
    chart = next(c for c in health_charts([RunCurves("a", 0, train=lines)]) if c.name == name)
    assert (' faint"' in chart.svg) == is_smooth


def test_a_tiny_bound_is_written_like_its_value_and_n_is_not_called_rows(tmp_path: Path):
    run = make_run(tmp_path, steps=1)
    evaluate_run(run.dir, "test", [0.2] * 20, step=1)
    path = run.dir / "eval" / "test" / layout.EVAL_SUMMARY
    summary = json.loads(path.read_text())
    summary["metrics"]["reward"] |= {"value": 0.008, "low": 1.4e-7, "high": 0.128}
    summary["metrics"]["accuracy"] |= {"value": 3e-5, "low": 1e-5, "high": 5e-5}
    path.write_text(json.dumps(summary))
    html = render_report([run])
    assert "[0.000, 0.128]" in html and "[1.0e-05, 5.0e-05]" in html
    assert '<th class="n">n</th>' in html and ">rows</th>" not in html


def test_paired_differences_to_the_first_run_say_whether_they_are_sure(tmp_path: Path):
    runs = [make_run(tmp_path, name=n, steps=1) for n in ("old", "new")]
    evaluate_run(runs[0].dir, "test", [0.2] * 20, step=1)
    evaluate_run(runs[1].dir, "test", [0.9] * 20, step=1)
    text = re.sub(r"\s+", " ", page(*runs).text)
    assert "new - old" in text
    assert "+0.700" in text


def test_the_page_tests_the_difference_and_labels_a_maximum_over_checkpoints(tmp_path: Path):
    runs = [make_run(tmp_path, name=name, steps=1) for name in ("one", "two")]
    for run, scores in zip(runs, ([0.2] * 20, [0.2] * 4 + [0.9] * 16), strict=True):
        evaluate_run(run.dir, "test", scores, step=1)
    evaluate_run(runs[1].dir, "test-later", [0.9] * 20, step=2)
    for step, score in ((1, 0.9), (2, 0.2)):
        evaluate_run(runs[1].dir, f"other-digits-step-{step:06d}", [score] * 20, split="other", step=step, role="test")
    page = unescape(render_report(runs))
    # No validation chose a step: the last one of each run. All rows show the same images, so they count as one.
    words = "accuracy: sign-flip permutation p = 1 (only A right on 0 rows, only B on 20)"
    assert f"Paired test (A = one, step 1; B = two, step 2): {words}" in page
    assert "Rows needed to see 2 points of accuracy with 80% chance: " in page
    assert (
        "two, other-digits: accuracy over 2 checkpoints: mean 0.500; 0.000 at step 2, the last one; 1.000 at step 1"
        in page
    )
    assert "(best of 2 checkpoints, chosen on these test rows themselves: too good for new rows)" in page
    assert "Over checkpoints" not in render_report(runs[:1])


def test_numbers_of_the_paper_stand_beside_ours(tmp_path: Path):
    run = make_run(tmp_path, steps=1)
    evaluate_run(run.dir, "test", [0.9], paper={"numbers": {"accuracy": 0.912}, "source": "arXiv:0000, Table 2"})
    text = page(run).text
    assert "0.912" in text and "arXiv:0000, Table 2" in text


def test_validations_of_training_count_once_at_the_best_step(tmp_path: Path):
    run = create_run(tmp_path, kind="rl", recipe_name="digits")
    with run:
        run.set_best(10, "reward", 0.9)
    for step in (0, 10, 20):
        evaluate_run(
            run.dir, f"validation-digits-step-{step:06d}", [0.5], step=step, during="training", split="validation"
        )
    columns = eval_columns(run, "r", 0)[0]
    assert [c.meta["step"] for c in columns] == [10]


def test_evaluations_of_other_splits_stand_in_tables_of_their_own(tmp_path: Path):
    run = make_run(tmp_path, steps=1)
    evaluate_run(run.dir, "validation", [0.5], split="validation")
    tables: list[dict[str, Any]] = eval_tables(eval_columns(run, "r", 0)[0])
    assert [t["kind"] for t in tables] == ["test, digits, greedy", "validation, digits, greedy"]


def test_writing_makes_the_folder_and_replaces_the_file(tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=1)
    out = tmp_path / "new" / "r.html"
    assert write_report([run], out) == {}
    first = out.read_text("utf-8")
    assert first.startswith("<!doctype html>")
    write_report([run], out)
    assert [p.name for p in out.parent.iterdir()] == ["r.html"]


def test_files_that_are_lost_are_named_on_the_page_and_by_whoever_writes_it(tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=4)
    layout.rollout_path(run.dir, 1).unlink()
    halved = layout.rollout_path(run.dir, 2)
    halved.write_bytes(halved.read_bytes()[:300])
    (layout.eval_dir(run.dir, "test") / layout.EVAL_SUMMARY).unlink()
    lines = (run.dir / layout.METRICS).read_text()
    (run.dir / layout.METRICS).write_text("garbage\n" + lines)
    damage = write_report([run], tmp_path / "r.html")[run.id]
    named = "\n".join(damage)
    told = (
        "with metrics, but without rollouts: 2",
        "rollouts/000003.parquet: the rollout file is damaged",
        "eval/test: this evaluation has no summary.json",
        "metrics.jsonl:1: a line of metrics is damaged",
    )
    assert [what for what in told if what not in named] == []
    text = Page((tmp_path / "r.html").read_text("utf-8")).text
    assert "what they held is not on this page" in text and all(line in text for line in damage)


def test_of_much_damage_the_first_lines_are_shown_and_where_the_rest_is():
    lines = shortened([f"file {n}" for n in range(30)], "RUN")
    assert len(lines) == 21 and lines[-1] == "... and 10 more: vlmrl runs verify RUN"


@pytest.mark.parametrize("name", ["template.html", "reward_page.html", "shell.html", "macros.html", "style.css"])
def test_what_a_page_is_made_of_travels_with_the_package(name: str):
    from importlib.resources import files

    assert files("vlmrl.report").joinpath(name).is_file()


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_all_text_can_be_read_on_what_lies_behind_it(scheme: int):
    """Contrast of at least 4.5 to 1, as WCAG 2.2 asks of small text (1.4.3)."""
    from importlib.resources import files

    style = files("vlmrl.report").joinpath("style.css").read_text("utf-8")
    colours = dict(re.findall(r"--(\w+): #(\w{6})", re.findall(r":root \{(.*?)\}", style, re.S)[scheme]))

    def light(name: str) -> float:
        parts = [int(colours[name][i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05

    pairs = [
        (text, back) for text in ("ink", "soft", "faint", "good", "bad", "warn", "c3") for back in ("paper", "card")
    ]
    for text, back in [*pairs, ("warn", "warnwash"), ("ink", "warnwash")]:
        low, high = sorted((light(text), light(back)))
        assert high / low >= 4.5, (text, back, high / low)


def test_only_evaluations_of_equal_rewards_are_compared_and_their_titles_tell_columns_apart(tmp_path: Path):
    one = {"name": "r.py:f", "sha256": "0" * 64, "weights": {"answer": 0.9, "format": 0.1}}
    scored = {"reward": one, "reward_args": {}, "step": 3}
    other = scored | {"reward": {**one, "weights": {}}}
    runs = [create_run(tmp_path, kind="sft", recipe_name="r", name=name) for name in ("kk", "lora")]
    for run in runs:
        with run:
            pass
    evaluate_run(runs[0].dir, "test-digits-step-000003", [0.9, 0.8, 1.0, 0.7] * 8, **scored)
    evaluate_run(runs[1].dir, "same", [0.5, 0.4, 0.6, 0.3] * 8, **scored)
    evaluate_run(runs[1].dir, "test-digits-step-000003", [1.0, 1.0, 1.0, 0.9] * 8, **other)
    columns = [c for run, label in zip(runs, ("kk", "lora"), strict=True) for c in eval_columns(run, label, 0)[0]]
    (table,) = eval_tables(columns)
    assert [c.label for c in table["columns"]] == ["kk", "lora, same", "lora, test-digits"]
    row = next(row for row in table["rows"] if row["name"] == "reward")
    assert row["difference"]["value"] == pytest.approx(-0.4)
    assert table["against"] == "lora, same - kk"
    assert any(note.startswith("lora, same: scored by r.py:f") for note in table["notes"])
    (apart,) = eval_tables([c for c in columns if c.folder.name != "same"])
    differences = {row["name"]: row["difference"] for row in apart["rows"]}
    assert differences["reward"] is None and differences["accuracy"] is not None
    assert any("scored by different rewards" in note for note in apart["notes"])
