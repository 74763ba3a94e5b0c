"""Prompt templates cannot take more time, memory or text than a prompt needs, whatever they hold."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import lives

from vlmrl.errors import DataError, RecipeError
from vlmrl.recipe import template_worker
from vlmrl.recipe.template import MAX_TEMPLATE_BYTES, is_plain, parse_template, read_template
from vlmrl.recipe.template_worker import TemplateLimitError, TemplateWorker
from vlmrl.tasks import prompt
from vlmrl.tasks.prompt import compile_template, render_user
from vlmrl.types import Row

ROW = Row("r", "table", "t", {}, (), {"q": "what", "xs": [1, 2, 3], "n": 10**10, "no": None}, "rows.jsonl:7")


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    """One with less of everything."""
    made = TemplateWorker(cpu_seconds=1, memory_mb=256)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_limits(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prompt, "WORKER", worker)
    compile_template.cache_clear()
    yield
    compile_template.cache_clear()


def rendered(text: str, row: Row = ROW) -> str:
    return render_user(text, row, {"levels": ["order", "genus"]}, where="prompt.jinja")


BOMBS = {
    "{{ 'a' * 10000000000 }}": "memory",
    "{{ q * n }}": "memory",
    "{{ q.center(n) }}": "memory",
    "{{ '%9999999999d' % 3 }}": "memory",
    "{{ '{:>99999999999}'.format(q) }}": "memory",
    "{% set ns = namespace(x=q) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}": "memory",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "more than 1 seconds",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{% for i in range(99999) %}{{ q|center(50) }}{% endfor %}": "4,194,304 characters",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", BOMBS)
def test_a_bomb_is_an_error_of_the_recipe_and_the_next_row_is_served(text: str) -> None:
    with pytest.raises(RecipeError, match=BOMBS[text]) as caught:
        rendered(text)
    assert caught.value.where == "prompt.jinja, rows.jsonl:7 (r)"
    assert rendered("{{ q|center(8) }}!") == "what  !"


def test_a_plain_template_is_cut_off_too_when_it_makes_too_much_of_a_row() -> None:
    row = Row("r", "s", "t", {}, (), {"xs": list(range(200))})
    with pytest.raises(RecipeError, match="4,194,304 characters"):
        rendered("{% for x in xs %}" + "y" * 30_000 + "{% endfor %}", row)


PLAIN = [
    "{{ q }} {{ q | trim }}",
    "{% if q is defined and q %}{{ columns['q'][0] }}{% else %}-{% endif %}",
    "{% for k, v in columns.items() %}{{ k }}: {{ v | tojson }}\n{% endfor %}",
    "{{ levels | join(', ') }}",
    "{% for x in xs %}{{ loop.index0 + 1 }}. {{ x }}{% endfor %}",
    "{{ levels[-1] }}",
    "{{ q.split('h')[0] }}",
    "{% set a = q %}{{ a }}",
    "{{ q ~ '?' }}",
    "{{ q if q else 'nothing' }}",
    "{{ q | title | length }}",
    "{{ no | default('-', true) }}",
    "{# nothing #}<image>{{ q }}{% raw %}{{{% endraw %}",
]


@pytest.mark.parametrize("text", PLAIN)
def test_both_ways_of_rendering_give_the_same_text(text: str, worker: TemplateWorker) -> None:
    assert is_plain(parse_template(text, "x"))
    names = {**ROW.columns, "columns": ROW.columns, "levels": ["order", "genus"]}
    assert rendered(text) == worker.render(text, names).strip()


@pytest.mark.parametrize(
    "text",
    [
        *BOMBS,
        "{{ 2 ** 9 }}",
        "{{ q | indent }}",
        "{{ q | tojson | tojson }}",
        "{% set x = [q, q] %}",
        "{{ q | join(q) }}",
        "{% set x = q ~ q %}",
        "{% set x = q | upper %}",
        "{% for x in range(3) %}{% endfor %}",
        "{{ q | replace('a', 'b') }}",
        "{% for x in xs %}{% for y in xs %}{% endfor %}{% endfor %}",
        "{% for x in xs recursive %}{% endfor %}",
        "{% for x in xs %}{% if x in xs %}{% endif %}{% endfor %}",
        "{% for x in xs %}{{ q | upper }}{% endfor %}",
        "{% filter upper %}x{% endfilter %}",
        "{% for x in xs | tojson %}{% endfor %}",
        "{% include 'x' %}",
        "{{ cycler }}{{ q() }}",
        "{% for x in xs %}{% if q ~ q == x %}{% endif %}{% endfor %}",
        "{{ xs | join('" + "-" * 200 + "') }}",
    ],
)
def test_what_could_grow_is_not_plain(text: str) -> None:
    assert not is_plain(parse_template(text, "x"))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ qq }}", "'qq' is undefined"),
        ("{{ q.__class__ }}", "unsafe"),
        ("{{ q + 1 }}", "TypeError"),
        ("{{ xs['a'].b }}", "no attribute 'a'"),
    ],
)
def test_a_template_that_fails_says_the_same_in_both_ways(text: str, message: str, ours: bool) -> None:
    with pytest.raises(DataError, match=message) as caught:
        rendered(text if ours else text + "{{ q | center(9) }}")
    assert caught.value.where == "prompt.jinja, rows.jsonl:7 (r)"
    assert ("did you mean `q`" in (caught.value.hint or "")) == (text == "{{ qq }}")


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("one\n{{ q | nofilter }}", "No filter named 'nofilter'", "prompt.jinja:2"),
        ("one\n{% if %}", "not valid Jinja", "prompt.jinja:2"),
        ("{{" + "(" * 4000 + "1" + ")" * 4000 + "}}", "nested too deeply", "prompt.jinja"),
        ("{% if q %}" * 120 + "{% endif %}" * 120, "too deep", "prompt.jinja"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_an_error_before_any_row(text: str, message: str, where: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        compile_template(text, "prompt.jinja")
    assert caught.value.where == where


def test_a_file_that_is_no_template_is_refused(tmp_path) -> None:
    file = tmp_path / "prompt.jinja"
    for data, message in ((b" \n", "empty"), (b"\xff", "cannot be read"), (b"x" * (MAX_TEMPLATE_BYTES + 1), "bytes")):
        file.write_bytes(data)
        with pytest.raises(RecipeError, match=message):
            read_template(file)
    with pytest.raises(RecipeError, match="cannot be read"):
        read_template(tmp_path / "gone.jinja")


def test_a_worker_that_was_killed_is_started_again_and_one_of_a_parent_is_not_used(worker: TemplateWorker) -> None:
    assert rendered("{{ q | center(6) }}") == "what"
    ((first,), (process,)) = worker.pids(), worker._workers
    os.kill(first, signal.SIGKILL)
    assert process._keeper.wait(30) is not None  # the worker's end is known when its keeper has ended
    assert rendered("{{ q | center(6) }}") == "what"
    (process,) = worker._workers
    worker._owner = os.getpid() + 1  # as in a forked process
    assert rendered("{{ q | center(6) }}") == "what" and worker.pids() not in ([first], [process.pid])
    assert lives(process.pid)
    process.end()


def test_an_answer_for_another_row_is_an_error(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendered("{{ q | center(6) }}") == "what"
    (process,) = worker._workers
    assign = process.assign
    monkeypatch.setattr(process, "assign", lambda *given: (assign(*given), setattr(process, "request", 99_999)))
    with pytest.raises(TemplateLimitError, match="another row"):
        worker.render("{{ q | center(6) }}", {"q": "a"})
    assert rendered("{{ q | center(6) }}") == "what"


@pytest.mark.parametrize("most", [template_worker.MOST_MESSAGE_CHARS, template_worker.SENT_CHARS])
def test_no_piece_of_a_key_is_left_where_the_text_of_an_exception_is_cut(most: int) -> None:
    key = "hf_Zx9Qm2Lp8Rt4Kw7Nb3" + "Zx9Qm2Lp8Rt4Kw7Nb3"
    long = "token=" + "q7Zk2Lp9Rt4Kw7Nb3Xc5Vb8Nm1As6Df0" * 30 + " "  # becomes short: what is far behind it gets near
    for left in (12, 14, 26):
        before = (long * (most // len(long)) + "y " * 999)[: most - left - len("'dict object' has no attribute '")]
        row = Row("r", "s", "t", {}, (), {"before": before, "q": ""})
        with pytest.raises(DataError, match="<redacted>") as caught:
            rendered("{{ columns[before + '" + key + "'] }}{{ q | center(9) }}", row)
        assert key[3:11] not in str(caught.value)


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=6), st.lists, max_leaves=5)


@given(st.dictionaries(st.sampled_from(["q", "xs", "n"]), VALUES))
def test_any_row_gives_a_text_or_an_error_and_the_same_in_both_ways(
    worker: TemplateWorker, columns: dict[str, Any]
) -> None:
    names = {**columns, "columns": columns}
    text = "{% for x in xs %}{{ x | title }}{% endfor %}{{ q | upper }}{{ n + 1 }}{{ q.split() | length }}"
    ways = (compile_template(text, "x"), lambda names: worker.render(text, names))
    found = []
    for way in ways:
        try:
            found.append(way(names))
        except template_worker.TemplateFailedError as error:
            found.append(str(error))
    assert found[0] == found[1]
