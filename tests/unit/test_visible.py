"""Text of others made safe to show, and every door to people that it must pass."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.cli.output import console, draw_table, emit, say, show_table
from vlmrl.cli.progress import ConsoleWatcher
from vlmrl.recipe.files import tomllib
from vlmrl.store.runs import create_run
from vlmrl.types import Group, Row, Score, ScoredSample, Segment, Trajectory
from vlmrl.untrusted import one_line, visible, visible_json

BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
ZERO_WIDTH = "\u200b\u2060\ufeff\u00ad\u180e"
CONTROLS = "\x00\x07\x08\x0d\x1b\x7f\x85\x9b\u2028\u2029"
HOSTILE = f"\x1b[31m[red]:x:{BIDI}{ZERO_WIDTH}{CONTROLS}\U000e0041end"
HIDING = {*BIDI, *ZERO_WIDTH, *CONTROLS, "\U000e0041"}


def assert_safe(text: str) -> None:
    assert not HIDING & set(text), sorted(map(hex, map(ord, HIDING & set(text))))


@pytest.mark.parametrize("character", sorted(HIDING))
def test_a_hidden_character_becomes_its_escape(character):
    number = ord(character)
    assert visible(f"a{character}b") == f"a\\u{number:04x}b" if number < 0x10000 else f"a\\U{number:08x}b"


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "two\nlines\tand a tab",
        "Grüße 中文　全角 שלום سلام",
        "ab\u05d0\u200c\u05d1",
        "👩\u200d🔬 ❤️",
        "a\u00a0b",
        "\u0301e",
    ],
)
def test_what_shows_stays_as_it_is(text):
    assert visible(text) == text


def test_a_joiner_between_ascii_letters_is_hidden_text():
    assert visible("pay\u200dpal") == "pay\\u200dpal"
    assert visible("\u200cx") == "\\u200cx"


def test_one_line_has_no_line_break_of_any_kind():
    assert one_line("a\n  b\r\nc\u2028d\x85e\x0bf") == "a b c d e f"


@given(st.text(st.characters(), max_size=30))
def test_visible_text_has_nothing_hidden_and_may_be_made_visible_again(text):
    shown = visible(text)
    assert visible(shown) == shown
    for before, c in zip(" " + shown, shown, strict=False):
        joins = c in "\u200c\u200d" and not before.isascii()
        assert joins or c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4))
def test_visible_json_reads_as_the_same_value(value):
    text = visible_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert_safe(text)


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
def test_a_visible_basic_string_of_toml_reads_as_the_same_text(text):
    from vlmrl.recipe.explain import toml_value

    assert tomllib.loads(f"key = {toml_value(text)}")["key"] == text
    assert_safe(toml_value(text))


def test_the_consoles_lines_tables_and_markup_are_safe(capsys):
    from rich.panel import Panel
    from rich.text import Text

    out = console()
    out.print(HOSTILE, style="red")
    out.print(Text(HOSTILE), Panel(HOSTILE, title=HOSTILE))
    draw_table(HOSTILE, ("name", HOSTILE), [(HOSTILE, "1")], out)
    shown = capsys.readouterr().err
    assert_safe(shown.replace("\x1b[", "").replace("\r", ""))
    assert shown.count("[red]:x:") >= 4, "markup and emoji names of others are text"


def test_a_table_of_numbers_breaks_none_of_them_and_no_word_of_a_heading():
    from rich.console import Console

    heads = ("part", "mean", "min", "max", "at min", "at max", "none", "correlation with value")
    numbers = ("-0.0003175", "-0.001275", "0.0001234", "100.0%", "99.9%", "12345", "-0.00031")
    for name, whole in (("think", True), ("a_part_with_a_long_name", False)):
        stream = io.StringIO()
        draw_table("parts", heads, [(name, *numbers)], Console(file=stream, width=80))
        words = stream.getvalue().split()
        assert {*numbers, *" ".join(heads).split()} <= {*words} and (name in words) is whole
        assert max(map(len, stream.getvalue().splitlines())) <= 80


def test_a_console_on_a_terminal_still_writes_styles_of_its_own(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console().print("\x1b[2Jred", style="red")
    assert terminal.getvalue() == "\x1b[31m\\u001b[2Jred\x1b[0m\n"


def test_lines_tables_and_json_of_commands_are_safe(capsys):
    say(HOSTILE)
    show_table(HOSTILE, ("name",), [(HOSTILE,)])
    emit({HOSTILE: [HOSTILE]}, True)
    shown = capsys.readouterr()
    assert_safe(shown.err)
    assert_safe(shown.out)
    table, text = shown.out.split("\n", 1)[1].split("\n", 1)
    assert "[red]" in table and json.loads(text) == {HOSTILE: [HOSTILE]}


def test_the_lines_of_training_are_safe():
    stream = io.StringIO()
    watcher = ConsoleWatcher(stream)
    metrics = {
        f"reward/part/{HOSTILE}": 0.5,
        "reward/part/b": 0.25,
        "reward/mean": 0.5,
        "rollout/dead_group_share": 0.0,
        "rollout/truncated_share": 0.0,
        "rollout/response_tokens_mean": 3.0,
        "rollout/tokens_per_second": 1.0,
        "memory/peak_bytes": 1.0,
        "time/step_seconds": 1.0,
    }
    watcher.message(HOSTILE)
    watcher.step(0, 2, metrics)
    watcher.validation(0, {f"eval/{HOSTILE}/reward": 0.5}, best=True, metric="reward")
    watcher.sample(0, _group())
    assert_safe(stream.getvalue())
    assert stream.getvalue().count("[red]") == 7


def _group() -> Group:
    """A group of one sample in which every text is hostile."""
    row = Row(HOSTILE, "s", "table", {})
    trajectory = Trajectory("table", HOSTILE, 0, 0, 0, 0, (1,), (Segment("assistant", (2,), True, (0.0,)),), (), "stop")
    return Group(row, HOSTILE, (ScoredSample(trajectory, HOSTILE, Score(1.0, {HOSTILE: 1.0}, HOSTILE)),))


def test_the_log_of_a_run_is_safe(tmp_path):
    with create_run(tmp_path, kind="rl", recipe_name="r") as run:
        run.write_log(HOSTILE)
        run.event(0, "failed", error=HOSTILE)
    assert_safe(run.log_path().read_text())


def test_what_a_command_is_asked_for_goes_to_stdout_and_what_is_beside_it_to_stderr(capsys, monkeypatch):
    from vlmrl.cli.output import tell

    tell("B is worse than A", bold=True)
    say("next: vlmrl report last")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("B is worse than A\n", "next: vlmrl report last\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_table("evaluation", ("name", "value"), [("accuracy", "0.5")])
    shown = capsys.readouterr()
    assert shown.err == "" and "accuracy  0.5" in shown.out and shown.out.startswith("evaluation\n")
