"""A prompt is known by the text that it renders: not by its file, its comments or the names of its task's settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.tasks import TASKS, make_task
from vlmrl.tasks.prompt import earlier_prints, prompt_print, render_user, same_prompt
from vlmrl.types import Row

SHIPPED = json.loads((Path(__file__).parents[2] / "golden" / "prompts.json").read_text("utf-8"))
"""`task variant` -> {"print": the fingerprint, "at 75082c1": what runs of that commit recorded}."""
LABELS = {"labels": ["Adult", "Infant"]}
ASKED = "{% if problem is defined and problem %}\n{{ problem | trim }}\n{% else %}\nAlike?\n{% endif %}\n"


def shown(template, system=None, **variables):
    return prompt_print(template, system, variables)


def tasks():
    for name, entry in TASKS.items():
        for variant in entry.variants or (None,):
            if name not in ("table", "pairs"):  # their prompts are the dataset's
                task = make_task(name, {"name": name, "levels": ["loop", "digit"]}, variant)
                yield f"{name} {task.variant}".strip(), task


@pytest.mark.parametrize(("name", "task"), tasks(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_shipped_prompt_is_the_one_that_earlier_runs_asked(name, task):
    now = prompt_print(task.template, None, task.variables, task.name)
    told = (
        f"the prompt `{name}` renders another text: runs that go on say so. If that is meant, write {now} into "
        "tests/golden/prompts.json, without `at 75082c1`"
    )
    assert now == SHIPPED[name]["print"], told
    old = SHIPPED[name].get("at 75082c1")
    earlier = earlier_prints(now, task.name, task.template, None, task.variables)
    assert old is None or old in earlier, f"a run made at 75082c1 would be told that the prompt `{name}` has changed"
    renamed = earlier_prints(now, "another_name", task.template + "{# x #}", None, {"other": 1, **task.variables})
    assert old is None or old in renamed, f"list {old} in vlmrl/tasks/prompt.py"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ask.", "{# why #}Ask.\n\n"),
        ("Say {{ labels | join(', ') }}.", 'Say {{labels|join(", ")}}.'),
        ("Say {{ labels | join(', ') }}.", "Say Adult, Infant."),
        ("{% for x in labels %}{{ x }};{% endfor %}", "{% for label in labels %}{{ label }};{% endfor %}"),
        ("{% if labels %}a{{ labels[0] }}{% else %}b{% endif %}", "aAdult"),
        (ASKED + "Say {{ labels[1] }}.", ASKED.replace("problem | trim", "problem|trim") + "Say Infant."),
        (ASKED + "{% if question %}{{ labels[0] }}{% endif %}", ASKED + "{% if question %}Adult{% endif %}"),
    ],
)
def test_another_way_to_write_the_same_text_is_the_same_prompt(one, other):
    assert shown(one, **LABELS) == shown(other, **LABELS)
    assert shown(one, **LABELS) == shown(other, unused=3, **LABELS), "a setting that is not read shapes nothing"


def test_settings_count_by_their_values_where_a_loop_over_the_row_reads_them():
    loop = "{% for c in columns %}{{ c }}{{ labels[0] }}{% endfor %}"
    assert shown(loop, **LABELS) == shown("{% for c in columns %}{{c}}{{labels[0]}}{% endfor %}", **LABELS)
    assert shown(loop, **LABELS) != shown(loop, labels=["Infant", "Adult"])


@pytest.mark.parametrize(
    "other",
    [
        "<image><image>Say Adult,  Infant.",
        "<image><image>Say Infant, Adult.",
        "<image>Say <image>Adult, Infant.",
        "Say Adult, Infant.",
        "<image><image>Say adult, Infant.",
        "<image><image>Say {{ labels }}.",
        "<image><image>Say {{ problem }}.",
        "<image><image>Say {{ labels | join(', ') }}",
        "<image><image>\nSay Adult, Infant.",
    ],
)
def test_another_text_or_place_of_an_image_is_another_prompt(other):
    assert shown("<image><image>Say {{ labels | join(', ') }}.", **LABELS) != shown(other, **LABELS)


def test_the_system_message_and_whose_rows_bring_their_messages_count():
    assert len({shown("Ask."), shown("Ask.", ""), shown("Ask.", "Be brief.")}) == 3
    assert prompt_print("", None, {}, "table") != prompt_print("", None, {}, "episodes")
    assert prompt_print("Ask.", None, {}, "table") == prompt_print("Ask.", None, {}, "episodes")


def test_a_setting_goes_before_a_column_and_an_assigned_name_before_a_setting():
    for assigned in ("{% set labels = q %}", "{% set labels = 'x' %}"):
        rendered = shown(assigned + "{{ labels[0] }}", **LABELS)
        assert rendered not in (shown(assigned + "Adult", **LABELS), shown("Adult", **LABELS))
    assert shown("{% if q is defined %}mine{% endif %}ours") != shown("ours"), "a row may have the column"
    row = Row("1", "s", "table", {}, columns={"labels": ["mine"]})
    assert render_user("{{ labels[0] }}", row, LABELS, where="t") == "Adult"


def test_a_template_that_could_run_for_ever_is_not_run_for_its_fingerprint():
    endless = "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    assert shown(endless) == shown(endless + " ") != shown(endless.replace("x", "y"))
    assert shown("{{ labels | random }}", **LABELS) == shown("{{ labels | random }}", **LABELS)


def test_records_of_before_and_after_are_of_one_prompt_where_nothing_changed():
    now = shown("Ask.")
    earlier = earlier_prints(now, "table", "Ask.", None, {})
    record, old = {"sha256": now, "earlier": list(earlier)}, {"sha256": earlier[0]}
    assert same_prompt(old, record) and same_prompt(record, old) and same_prompt(old, dict(old))
    other = shown("Ask!")
    changed = {"sha256": other, "earlier": list(earlier_prints(other, "table", "Ask!", None, {}))}
    assert not same_prompt(old, changed) and not same_prompt(record, changed)


PIECES = (
    "a",
    " ",
    "\n",
    "{# c #}",
    "{{ labels[0] }}",
    "{{ labels | join('-') }}",
    "{{ q }}",
    "{{ q | trim }}",
    "<image>",
    "{% if q %}y{{ labels[0] }}{% else %}n{% endif %}",
    "{% if labels %}a{% endif %}",
    "Adult",
    "{{ 'a' }}",
    "{{ labels[0] ~ q }}",
    "{% for x in labels %}{{ x }}{% endfor %}",
    "{% for x in labels %}{{ x }}{{ q }}{% endfor %}",
    "{% if q == labels[0] %} {% endif %}",
    "{% set z = q %}",
    "{{ z }}",
    "{% set labels = q %}",
    "{% if q is defined %}d{% endif %}",
    "d",
    "{{ labels[0] if q is undefined else 'a' }}",
)
templates = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)


@pytest.mark.slow
@given(templates, templates, st.sampled_from(["", " a", "Adult", "\nq"]))
@settings(max_examples=400, deadline=None)
def test_prompts_with_one_fingerprint_render_one_text(one, other, question):
    if shown(one, **LABELS) != shown(other, **LABELS):
        return
    row = Row("1", "s", "table", {}, columns={"q": question})
    texts = []
    for template in (one, other):
        try:
            texts.append(render_user(template, row, LABELS, where="t"))
        except Exception as error:  # an unknown name
            texts.append(type(error).__name__)
    assert texts[0] == texts[1]
