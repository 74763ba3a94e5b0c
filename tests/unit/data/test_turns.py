"""Observations between the turns of a policy: their tokens are those of the template's own text of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyprocessors import PROCESSORS
from tinyworld import image

from vlmrl.data import chat_template
from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.data.turns import TurnEncoder, followed, without_first
from vlmrl.environments.calls import tools_text
from vlmrl.errors import DataError
from vlmrl.types import Media, Message, Row

IMAGE_TEXT = "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
CONTENT = "{% for c in m.content %}" + IMAGE_TEXT + "{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SHAPED = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


def chat(content: str = CONTENT, before: str = "", head: str = "") -> str:
    """A chat template in the manner of Qwen, with other code for a message, or before each."""
    turn = f"{before}<|im_start|>{{{{ m.role }}}}\n{content}<|im_end|>\n"
    return head + "{% for m in messages %}" + turn + "{% endfor %}" + ASK


def of_tool(content: str, rest: str = CONTENT) -> str:
    return "{% if m.role == 'tool' %}" + content + "{% else %}" + rest + "{% endif %}"


PLAIN = chat()
DROPS = "{% for m in messages %}{% if m.role != 'tool' %}" + chat().split("{% for m in messages %}")[1].replace(
    "<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}"
)
RAISES = "{% if m.role == 'tool' %}{{ raise_exception('only users and assistants') }}{% endif %}"
ALTERNATES = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
THINKING = chat(
    "{% if m.role == 'assistant' and not loop.last %}{% for c in m.content %}{{ c.text.split('</think>')[-1] }}"
    "{% endfor %}{% else %}" + CONTENT + "{% endif %}"
)
COUNTS = chat(
    CONTENT.replace("<|vision_start|>", "{% set n.x = n.x + 1 %}Picture {{ n.x }}: <|vision_start|>"),
    head="{% set n = namespace(x=0) %}",
)
FALL_BACK = {
    "drops": (DROPS, "its text is written 0 times"),
    "raises": (chat(before=RAISES), "only users and assistants"),
    "alternates": (chat(before=ALTERNATES), "roles must alternate"),
    "image as text": (chat(of_tool("{% for c in m.content %}{{ c.text or c }}{% endfor %}")), "wrote 0 placeholders"),
    "no image": (chat(of_tool("{% for c in m.content %}{{ c.text }}{% endfor %}")), "wrote 0 placeholders"),
    "twice": (chat(of_tool(CONTENT * 2)), "2 placeholders|2 times"),
    "escapes": (chat(of_tool(CONTENT.replace("c.text", "c.text | e"))), "not written as it is"),
    "as JSON": (chat(of_tool(CONTENT.replace("c.text", "c.text | tojson"))), "not written as it is"),
    "depends": (chat(of_tool("{{ loop.index }}" + CONTENT)), "depends on the turns before"),
}
"""Name -> (template in which role `user` works and `tool` does not, why)."""
NEITHER = {
    "lost answers": (chat("{% if m.role != 'assistant' %}" + CONTENT + "{% endif %}"), "assistant's text .* 0 times"),
    "counted pictures": (COUNTS, "depends on the turns before"),
    "no images": (chat("{% for c in m.content %}{{ c.text }}{% endfor %}"), "wrote 0 placeholders"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Zooms into an <image>; never writes <|im_end|> itself.",
        "parameters": {"type": "object", "properties": {"<|im_start|>": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def with_template(tiny_processor):
    def encoder(template: str, **settings: Any) -> Encoder:
        processor = copy(tiny_processor)
        processor.chat_template = template
        return Encoder(processor, **settings)

    return encoder


@pytest.fixture(scope="module")
def plain(with_template):
    return TurnEncoder(with_template(PLAIN))


def row_of(*media: Media) -> Row:
    return Row("r", "s", "t", {}, media)


def pictures(*sizes: tuple[int, int]) -> tuple[list[Media], list[Any]]:
    media = [Media(f"picture-{width}-{height}", width, height) for width, height in sizes]
    return media, [image(width * height, width, height) for width, height in sizes]


def observed(turns: TurnEncoder, *parts: str | tuple[int, int], images_before: int = 1) -> EncodedPrompt:
    """An observation of texts and of images of these sizes."""
    media, images = pictures(*(p for p in parts if not isinstance(p, str)))
    rest = iter(images)
    shown = [p if isinstance(p, str) else next(rest) for p in parts]
    return turns.encode(shown, media, "here", images_before=images_before)


def stream(
    turns: TurnEncoder, prompt: str, exchanges: Sequence[tuple[str, Sequence[Any], bool]], end: str
) -> tuple[EncodedPrompt, EncodedPrompt]:
    """An episode by its parts, and its messages as one text.

    Args: exchanges: (text of the policy, parts of the observation with sizes for images, whether `end` is sampled).
    """
    encoder = turns.encoder
    end_id = encoder.tokenizer.convert_tokens_to_ids(end)
    all_media, all_images = pictures((56, 84))
    own = Message("user", f"<image>{prompt}")
    now = encoder.encode(row_of(*all_media), [own], all_images)
    messages = [own]
    for said, parts, is_ended in exchanges:
        media, images = pictures(*(p for p in parts if not isinstance(p, str)))
        seen = observed(turns, *parts, images_before=len(all_media))
        assert seen.prompt_ids[0] == end_id
        sampled = encoder.encode_text(said) + ((end_id,) if is_ended else ())
        now = followed(now, sampled, without_first(seen, sampled[-1]))
        text = "".join(p if isinstance(p, str) else "<image>" for p in parts)
        messages += [Message("assistant", said), Message(turns.role, text)]
        all_media, all_images = [*all_media, *media], [*all_images, *images]
    return now, encoder.encode(row_of(*all_media), messages, all_images)


def assert_same(found: EncodedPrompt, whole: EncodedPrompt) -> None:
    assert found.prompt_ids == whole.prompt_ids
    assert found.kinds == whole.kinds
    assert found.unexpanded_ids == whole.unexpanded_ids
    assert (found.num_images, found.num_image_tokens) == (whole.num_images, whole.num_image_tokens)
    assert (found.image_sizes, found.seen_sizes) == (whole.image_sizes, whole.seen_sizes)
    assert found.row.media == whole.row.media and len(found.pictures) == len(whole.pictures)
    assert found.images.keys() == whole.images.keys()
    assert all(torch.equal(found.images[k], whole.images[k]) for k in whole.images)


EXCHANGES = [
    ("Let me see.", ["Here: ", (56, 56), "and", (112, 56), "."], True),
    ("And there?", ["Only text."], False),
    ("Once more.", [(84, 84)], True),
    ("So.", ["\n two \n\n lines \t", (56, 56)], False),
]


def test_the_tokens_of_an_observation_by_hand(plain):
    tokenizer = plain.encoder.tokenizer
    special = tokenizer.convert_tokens_to_ids

    def letters(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    found = observed(plain, "same? ", (56, 56), "3")
    opening = [special("<|im_end|>"), *letters("\n"), special("<|im_start|>"), *letters("tool\nsame? ")]
    closing = [*letters("3"), special("<|im_end|>"), *letters("\n"), special("<|im_start|>"), *letters("assistant\n")]
    pads = [special("<|vision_start|>"), *[special("<|image_pad|>")] * 4, special("<|vision_end|>")]
    assert plain.role == "tool" and plain.problems == {}
    assert list(found.prompt_ids) == opening + pads + closing
    assert list(found.kinds) == [0] * len(opening) + [0, 1, 1, 1, 1, 0] + [0] * len(closing)
    assert list(found.unexpanded_ids) == [*opening, pads[0], pads[1], pads[-1], *closing]
    assert found.text == (
        "<|im_end|>\n<|im_start|>tool\nsame? <|vision_start|><|image_pad|><|vision_end|>3<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert found.row.media == (Media("picture-56-56", 56, 56),) and found.seen_sizes == ((56, 56),)
    rest = without_first(found, special("<|im_end|>"))
    assert (rest.prompt_ids, rest.kinds) == (found.prompt_ids[1:], found.kinds[1:])
    assert rest.unexpanded_ids == found.unexpanded_ids[1:]
    assert without_first(found, special("<|im_start|>")) is found


@pytest.mark.parametrize("template", [PLAIN, *(t for t, _ in FALL_BACK.values())])
def test_a_stream_is_the_whole_as_the_template_writes_it(with_template, template):
    assert_same(*stream(TurnEncoder(with_template(template)), "what?", EXCHANGES, "<|im_end|>"))


@pytest.mark.parametrize("name", FALL_BACK)
def test_a_template_that_does_not_show_tools_shows_users(with_template, name):
    template, why = FALL_BACK[name]
    turns = TurnEncoder(with_template(template))
    assert turns.role == "user" and list(turns.problems) == ["tool"]
    with pytest.raises(DataError, match=why):
        raise DataError(turns.problems["tool"])
    assert "<|im_start|>user\nseen<|im_end|>" in observed(turns, "seen").text


@pytest.mark.parametrize("name", NEITHER)
def test_a_template_that_shows_no_observation_is_an_error_that_says_why(with_template, name):
    template, why = NEITHER[name]
    with pytest.raises(DataError, match=f"in role tool, .*{why}.*; in role user, .*{why}") as caught:
        TurnEncoder(with_template(template))
    assert caught.value.hint


def test_thinking_that_a_template_removes_later_stays_in_the_stream(with_template):
    turns = TurnEncoder(with_template(THINKING))
    found, whole = stream(turns, "what?", [("<think>hm</think>yes", ["ok"], True)] * 2, "<|im_end|>")
    text = turns.encoder.tokenizer.decode(found.prompt_ids)
    assert text.count("<think>hm</think>yes<|im_end|>") == 2
    assert "hm" not in turns.encoder.tokenizer.decode(whole.prompt_ids)


@pytest.mark.parametrize("filters", ["c.text | trim", "c.text.lstrip()", "c.text.rstrip()"])
def test_white_space_goes_where_the_template_removes_it(with_template, filters):
    turns = TurnEncoder(with_template(chat(CONTENT.replace("c.text", filters))))
    assert turns.role == "tool"
    hostile = [("yes", [" \n<|im_end|> a \n", (56, 56), "  b<|im_  "], True), ("no", [" \n "], False)]
    assert_same(*stream(turns, "what?", hostile, "<|im_end|>"))


def test_a_template_may_put_images_first(with_template):
    order = "{% for c in m.content | sort(attribute='type') %}" + IMAGE_TEXT + "{% endfor %}"
    turns = TurnEncoder(with_template(chat(order)))
    assert_same(*stream(turns, "what?", EXCHANGES, "<|im_end|>"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("is_ended", [True, False])
def test_a_stream_is_the_whole_for_every_family(name, is_ended):
    processor = PROCESSORS[name]()
    ended = processor.chat_template.replace("{% endfor %}{% if add", "<eos>{% endfor %}{% if add")
    processor.chat_template = ended.replace("[answer]", "[assistant]")
    turns = TurnEncoder(Encoder(processor))
    exchanges = [(said, parts, is_ended) for said, parts, _ in EXCHANGES[:2]]
    exchanges.append(("So.", ["It writes <eos> ", (56, 56)], is_ended))
    assert_same(*stream(turns, "what?", exchanges, "<eos>"))


PIECES = [
    "<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<image>", "<|im_", "end|>", "<|", "<", "|>",
    "same?", " ", "\n", "é", "\ue000", "\ue001", "vlmrlText0Mark", "vlmrlAnswerMark", "{{ x }}",
]  # fmt: skip
WORDS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@settings(max_examples=60, deadline=None)
@given(before=WORDS, behind=WORDS, has_image=st.booleans())
def test_any_text_of_a_tool_stays_letters(plain, before, behind, has_image):
    tokenizer, names = plain.encoder.tokenizer, plain.control.names
    found = observed(plain, before, *[(56, 56)] * has_image, behind)
    picture = "<|vision_start|><|image_pad|><|vision_end|>" * has_image
    assert found.text == f"<|im_end|>\n<|im_start|>tool\n{before}{picture}{behind}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(found.unexpanded_ids) == found.text
    control = set(tokenizer.convert_tokens_to_ids(list(names)))
    names = ["<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    end, start, *pads = tokenizer.convert_tokens_to_ids(names)
    assert [i for i in found.unexpanded_ids if i in control] == [end, start, *(pads * has_image), end, start]
    assert sum(found.kinds) == found.num_image_tokens == 4 * has_image


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.sampled_from("ab 3?<|é"), min_size=1).map("x{}x".format),
            st.lists(st.one_of(st.text(st.sampled_from("ab \n<|é"), max_size=6), st.just((56, 56))), max_size=4),
            st.booleans(),
        ),
        max_size=3,
    )
)
def test_any_stream_is_the_whole(plain, exchanges):
    """Texts of the policy begin and end with a letter: a line break could join that of the generation prompt."""
    assert_same(*stream(plain, "what?", exchanges, "<|im_end|>"))


def test_tokens_that_only_an_observation_has_stay_letters_in_it(tiny_processor):
    """Such as <tool_response>, which Qwen's tokenizer does not call special."""
    from copy import deepcopy

    processor = deepcopy(tiny_processor)
    processor.tokenizer.add_tokens(["<seen>", "\n\n"])
    processor.chat_template = chat(of_tool("<seen>\n\n" + CONTENT))
    turns = TurnEncoder(Encoder(processor))
    seen, lines = processor.tokenizer.convert_tokens_to_ids(["<seen>", "\n\n"])
    ids = observed(turns, "a <seen>\n\nb").prompt_ids
    assert ids.count(seen) == 1 and ids.count(lines) == 2  # line breaks open nothing
    assert "<seen>" not in turns.encoder.control.names


def test_frames_are_rendered_once(with_template, monkeypatch):
    turns = TurnEncoder(with_template(PLAIN))
    rendered: list[Any] = []
    right = chat_template.WORKER.render
    monkeypatch.setattr(chat_template.WORKER, "render", lambda *given: rendered.append(given) or right(*given))
    for parts in (["a"], ["b"], ["b", "c", ""], [(56, 56), "a"], [(84, 56), "b"]):
        observed(turns, *parts)
    assert not rendered
    for number in range(3):
        observed(turns, f"{number}", (56, 56), (84, 56), "x")
    assert len(rendered) == 2, "a frame, and its probe"


def test_an_empty_observation_is_a_turn(plain):
    empty = observed(plain)
    assert empty.text == "<|im_end|>\n<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n"
    assert empty.prompt_ids == observed(plain, "").prompt_ids


def begun(turns: TurnEncoder, *parts: str | tuple[int, int]) -> tuple[EncodedPrompt, EncodedPrompt]:
    """An open prompt with what an environment shows at its start, and the same as one message."""
    encoder, (media, images) = turns.encoder, pictures((56, 84), *(p for p in parts if not isinstance(p, str)))
    prompt = encoder.encode(row_of(*media[:1]), [Message("user", "<image>what?")], images[:1])
    rest = iter(images[1:])
    shown = [p if isinstance(p, str) else next(rest) for p in parts]
    seen = turns.encode(shown, media[1:], "here", images_before=1, is_first=True)
    text = "".join(p if isinstance(p, str) else "<image>" for p in parts)
    whole = Encoder(encoder.processor).encode(row_of(*media), [Message("user", f"<image>what?{text}")], images)
    return followed(prompt, (), seen), whole


@pytest.mark.parametrize("parts", [(), ("",), ((56, 56), " and a text"), ("\nhere ", (84, 56), (56, 56), "<|im_end|>")])
def test_what_is_shown_at_the_start_goes_on_with_an_open_prompt(with_template, parts):
    for template in (PLAIN, *(t for t, _ in FALL_BACK.values())):
        assert_same(*begun(TurnEncoder(with_template(template).with_tools((), is_open=True)), *parts))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_an_open_prompt_of_every_family(name):
    turns = TurnEncoder(Encoder(PROCESSORS[name]()).with_tools((), is_open=True))
    for parts in ((), ("\nhere <eos> ", (56, 56), "\nthere")):
        assert_same(*begun(turns, *parts))


def test_an_open_prompt_in_a_template_that_puts_images_first_shows_no_images(with_template):
    images, texts = (
        f"{{% for c in m.content if c.type {o} 'image' %}}{IMAGE_TEXT}{{% endfor %}}" for o in ("==", "!=")
    )
    turns = TurnEncoder(with_template(chat(images + texts)).with_tools((), is_open=True))
    assert_same(*begun(turns, "\nonly text"))
    with pytest.raises(DataError, match="wrote 0 placeholders"):
        begun(turns, (56, 56))


def test_an_unknown_size_leaves_none_known(plain):
    seen, (media, images) = observed(plain, (56, 56)), pictures((56, 56))
    prompt = plain.encoder.encode(row_of(*media), [Message("user", "<image>")], images)
    assert followed(prompt, (5,), seen).seen_sizes == ((56, 56), (56, 56))
    assert followed(replace(prompt, seen_sizes=()), (5,), seen).seen_sizes == ()


def shown(encoder: Encoder, *messages: Message) -> EncodedPrompt:
    return encoder.encode(row_of(), [*messages, Message("user", "go")], [])


def test_a_template_that_shows_tools_gets_the_schemas(with_template):
    encoder = with_template(chat(head=SHAPED)).with_tools([TOOL])
    found = shown(encoder)
    assert found.text.count("Zooms into an <image>; never writes <|im_end|> itself.") == 1
    assert "# Tools" not in found.text and '"<|im_start|>": {"type": "string"}' in found.text
    ends, starts = map(found.prompt_ids.count, encoder.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"]))
    assert (ends, starts) == (2, 3) and encoder.tokenizer.decode(found.prompt_ids) == found.text
    assert shown(with_template(chat(head=SHAPED))).text.startswith("<|im_start|>user")


@pytest.mark.parametrize(
    "head",
    [
        "",
        "{% if tools and messages[0].role != 'system' %}{{ tools | tojson }}{% endif %}",
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}",
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}",
        "{% if tools %}{{ tools | tojson(ensure_ascii=True) }}{% endif %}",
    ],
)
def test_a_template_that_hides_tools_gets_a_text(with_template, head):
    encoder = with_template(chat(head=head)).with_tools([TOOL])
    text = tools_text([TOOL], "hermes")
    assert shown(encoder).text.startswith(f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\ngo<")
    found = shown(encoder, Message("system", "Be short."))
    assert found.text.startswith(f"<|im_start|>system\n{text}\n\nBe short.<|im_end|>\n<|im_start|>user")
    assert found.prompt_ids.count(encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert encoder.count_prompt_tokens(row_of(), [Message("user", "go")]) == len(shown(encoder).prompt_ids)


def test_tools_that_cannot_be_shown_are_an_error_in_words(with_template):
    users = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    with pytest.raises(DataError, match="neither tools nor a system message"):
        shown(with_template(users).with_tools([TOOL]))


def test_the_limits_hold_for_tools(with_template, monkeypatch):
    given: list[Mapping[str, Any]] = []
    right = chat_template.WORKER.render
    monkeypatch.setattr(
        chat_template.WORKER, "render", lambda source, names: given.append(names) or right(source, names)
    )
    shown(with_template(chat(head=SHAPED)).with_tools([{**TOOL, "extra": 1}]))
    assert given[-1]["tools"][0]["extra"] == 1
    shown(with_template(PLAIN))
    assert given[-1]["tools"] is None


def test_observations_follow_a_prompt_with_tools(with_template):
    for head in (SHAPED, ""):
        turns = TurnEncoder(with_template(chat(head=head)).with_tools([TOOL]))
        assert_same(*stream(turns, "what?", EXCHANGES, "<|im_end|>"))
