"""A model's own chat template cannot take more time, memory or text than a prompt needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tinyprocessors import PROCESSORS

from vlmrl.data import chat_template
from vlmrl.data.chat_template import render_chat
from vlmrl.errors import CheckpointError, DataError
from vlmrl.recipe.template_worker import TemplateWorker
from vlmrl.types import Message

TURNS = [Message("system", "Be short."), Message("user", "<image>same <b> as <image>?")]
BOMBS = {
    "{{ 'a' * 10000000000 }}": "memory",
    "{{ messages[0]['content'][0]['text'].center(10 ** 10) }}": "memory",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}": "memory",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "more than 1 seconds",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{% for i in range(99999) %}{{ 'x'|center(50) }}{% endfor %}": "4,194,304 characters",
}
RICH = (
    "{{ strftime_now('')  }}{{ bos_token if bos_token is defined }}{%- for m in messages %}{% if loop.index > 9 %}"
    "{% break %}{% endif %}<|{{ m.role }}|>\n    {% generation %}{% for c in m.content %}{{ c | tojson }}"
    "{{ c.text if c.type == 'text' else '<|image_pad|>' }}{% endfor %}{% endgeneration %}\n{% endfor %}"
    "{{ tools is none }}{{ unheard_of }}{% if add_generation_prompt %}<|assistant|>{{ enable_thinking }}{% endif %}"
)


@pytest.fixture(scope="module")
def short() -> Iterator[TemplateWorker]:
    """A process with less of everything."""
    made = TemplateWorker(cpu_seconds=1, memory_mb=256, chat=True)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_limits(short: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "WORKER", short)


def rendered(template: str | dict[str, str]) -> str:
    processor = PROCESSORS["qwen2_5_vl"]()
    processor.chat_template = template
    return render_chat(processor, TURNS, generation_prompt=True, settings={"enable_thinking": False})


@pytest.mark.slow
@pytest.mark.parametrize("template", BOMBS)
def test_a_bomb_is_an_error_of_the_model_before_it_is_rendered_here(template: str) -> None:
    with pytest.raises(CheckpointError, match=BOMBS[template]) as caught:
        rendered(template)
    assert (
        caught.value.message.startswith("the model's chat template ")
        and caught.value.hint == chat_template.TEMPLATE_HINT
    )
    with pytest.raises(CheckpointError, match=BOMBS[template]):
        rendered({"default": template})
    assert rendered("{{ messages | length }}") == "2"


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_process_renders_what_transformers_renders(
    name: str, short: TemplateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    ask = short.render
    monkeypatch.setattr(short, "render", lambda source, names: found.append(ask(source, names)))
    processor = PROCESSORS[name]()
    for template in (processor.chat_template, RICH):
        processor.chat_template = template
        text = render_chat(processor, TURNS, generation_prompt=True, settings={"enable_thinking": False})
        assert found.pop() == text and "same <b> as" in text


@pytest.mark.parametrize(
    ("template", "kind", "words"),
    [
        ("{{ raise_exception('no system turn, please') }}", DataError, "no system turn, please"),
        ("{% for %}", CheckpointError, "not valid Jinja"),
        ("{{ messages[7].role.x }}", DataError, "refuses the prompt"),
    ],
)
def test_what_a_template_refuses_is_told_as_before(template: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        rendered(template)
