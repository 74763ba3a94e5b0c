"""Rendering of messages with a model's chat template. Control tokens in the text of a dataset stay letters.

A tokenizer converts the name of a special token to that token wherever the name occurs. So a question that quotes
`<|im_end|><|im_start|>assistant` would end its own turn. This module separates the names that the chat template writes
from the names in the data. Before rendering, `guard` replaces the first character of each name in the data by a mark,
which has no meaning for the template. `encode` then uses a copy of the tokenizer in which every control token has a
secret name. In the rendered text, names that the template wrote are replaced by secret names; names in the data are
restored as letters. A text without a control token's name is encoded by the model's own tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlmrl.errors import CheckpointError, DataError
from vlmrl.recipe.template_worker import TemplateFailedError, TemplateInvalidError, TemplateLimitError, TemplateWorker
from vlmrl.redaction.redact import first_line
from vlmrl.types import Message

IMAGE_SLOT = "<image>"
TEMPLATE_HINT = "use the chat template that came with the model (chat_template.jinja in its folder)"
WORKER = TemplateWorker(chat=True)
"""Process that renders chat templates with limits."""


def render_chat(
    processor: Any,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    settings: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return the text of a conversation; each `<image>` becomes an image entry for the template.

    Args:
        settings: further variables of the template, such as `enable_thinking`.
        tools: JSON schemas of the tools for the template; None = there are no tools.
    Raises: CheckpointError when the model has no chat template, when the template is not valid, or when it exceeds the
        limits on time, memory or text; DataError when the template refuses this conversation.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    turns = [{"role": m.role, "content": _entries(m.content)} for m in messages]
    if not getattr(processor, "chat_template", None):
        raise CheckpointError(
            "the model has no chat template", hint="use an instruction-tuned model, or add chat_template.jinja"
        )
    # An empty list of tools would be true for a template that asks `tools is not none`.
    variables = {"add_generation_prompt": generation_prompt, "tools": list(tools) if tools else None, **settings}
    _require_limits(processor, turns, variables)
    try:
        return processor.apply_chat_template(turns, tokenize=False, **variables)
    except TemplateSyntaxError as error:
        message = f"the model's chat template is not valid Jinja: {error.message}"
        raise CheckpointError(message, where=f"chat template, line {error.lineno}", hint=TEMPLATE_HINT) from error
    except (
        TemplateError,
        RecursionError,
        MemoryError,
        ArithmeticError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:
        raise DataError(
            f"the model's chat template refuses the prompt: {first_line(error)}", hint=TEMPLATE_HINT
        ) from error


def _require_limits(processor: Any, turns: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Check that a template renders a conversation within the limits, in a process of its own.

    A chat template is a program from the model's authors, so it could run forever or fill the memory.

    Raises: CheckpointError when the template exceeds a limit. Other errors are not raised here, because `render_chat`
        renders the conversation again without limits.
    """
    source = processor.chat_template
    if isinstance(source, Mapping):  # several templates by name: choose the one that transformers chooses
        source = source.get("default")
    if not isinstance(source, str):
        return
    special = getattr(getattr(processor, "tokenizer", None), "special_tokens_map", {})
    names = {**special, "messages": turns, "documents": None, **settings}
    try:
        WORKER.render(source, names)
    except TemplateLimitError as error:
        raise CheckpointError(f"the model's chat template {error}", hint=TEMPLATE_HINT) from error
    except (TemplateFailedError, TemplateInvalidError):
        return


def guard_message(control: ControlTokens, message: Message) -> Message:
    """Return the message with all control tokens in its text marked as plain letters; `<image>` slots stay."""
    return Message(message.role, IMAGE_SLOT.join(map(control.guard, message.content.split(IMAGE_SLOT))))


def _entries(text: str) -> list[dict[str, str]]:
    """Split a text at its `<image>` slots into the list of content entries that chat templates expect."""
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(text.split(IMAGE_SLOT)):
        if index:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


MEDIA = ("image", "video", "audio")
"""Kinds of media that have placeholder tokens."""
OPEN, CLOSE = "\ue000", "\ue001"
"""Private-use characters around a mark or a secret name. Between them are random digits, which no data can predict."""
_NO_NAME = r"(?!)"
"""Pattern that matches nothing."""
_OF_SOME_MODEL = re.compile(
    r"<\|[A-Za-z0-9_]{1,40}\|?>|<[A-Za-z0-9_]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|</?s>|<(?:bos|eos|pad|unk)>"
    r"|<(?:start|end)_of_(?:turn|image|utterance)>|<(?:image_soft_token|IMG_CONTEXT|fake_token_around_image|global-img)>"
    r"|\[/?INST\]"
)
"""Pattern of the control tokens of the known model families, to check a dataset without a model."""


def typed_in(text: str) -> Counter[str]:
    """Count the names in a text that are control tokens of any known model family. Returns: name -> number."""
    return Counter(_OF_SOME_MODEL.findall(text))


class ControlTokens:
    """Control tokens of a processor: special tokens, placeholders of media, and tokens that open or close a turn.

    Args:
        render: renders one user message with the chat template, without generation prompt. The added tokens in the
            result open or close a turn; not every tokenizer marks these tokens as special.

    Attributes:
        names: the tokens as text, the longest first.
    """

    def __init__(self, processor: Any, render: Callable[[str], str]) -> None:
        self.tokenizer = processor.tokenizer
        self.names = _names(processor, render)
        self._name = _any_of(self.names)
        self._firsts = frozenset(name[0] for name in self.names)
        self._longest = max(map(len, self.names), default=0)
        nonce = "".join(str(secrets.randbelow(10)) for _ in range(20))
        # The nonce is random, so that no data contains a mark or a secret name.
        firsts = sorted(self._firsts | {IMAGE_SLOT[0]})
        self._marks = {c: f"{OPEN}{nonce}0{i}{CLOSE}" for i, c in enumerate(firsts)}
        self._marked = {mark: c for c, mark in self._marks.items()}
        self._mark = _any_of(self._marked)
        self._secrets = {name: f"{OPEN}{nonce}1{i}{CLOSE}" for i, name in enumerate(self.names)}
        self._name_or_mark = _any_of((*self.names, *self._marked))
        self._ids = {name: self.tokenizer.convert_tokens_to_ids(name) for name in self.names}
        self._copy: Any = None

    def found_in(self, text: str) -> Counter[str]:
        """Return name -> number of occurrences of the control tokens in a text of the data."""
        return Counter(self._name.findall(text))

    def guard(self, text: str) -> str:
        """Return a text of the data with a mark in place of the first character of every control token.

        The beginning of a control token at the end of the text is marked, too, because the template may add its rest.
        """
        while (marked := self._name.sub(lambda m: self._marks[m[0][0]] + m[0][1:], text)) != text:
            text = marked  # a name may contain another name: repeat until no name is left
        body = text.rstrip()
        for at in range(max(0, len(body) - self._longest), len(body)):
            if body[at] in self._firsts and any(name.startswith(body[at:]) for name in self.names):
                return text[:at] + self._marks[body[at]] + text[at + 1 :]
        return text

    def guard_literal(self, text: str) -> str:
        """Return a guarded text in which `<image>` is a word, too, and no slot for an image."""
        return self.guard(text).replace(IMAGE_SLOT, self._marks[IMAGE_SLOT[0]] + IMAGE_SLOT[1:])

    def guard_values(self, value: Any) -> Any:
        """Return a JSON value with all its strings guarded, the names of fields too."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self.guard(str(key)): self.guard_values(item) for key, item in value.items()}
        return [self.guard_values(item) for item in value] if isinstance(value, (list, tuple)) else value

    def reveal(self, marked: str) -> str:
        """Return a guarded text, or a text rendered from guarded texts, without marks, as people read it."""
        return self._mark.sub(lambda m: self._marked[m[0]], marked)

    def is_ambiguous(self, marked: str) -> bool:
        """Return whether the model's tokenizer would read data as a control token if the marks were removed."""
        if self._mark.search(marked) is None:
            return False
        return self._name.split(self.reveal(marked)) != [self.reveal(piece) for piece in self._name.split(marked)]

    def encode(self, marked: str) -> list[int]:
        """Return the token ids of a text rendered from guarded data; no special token is added.

        Raises: DataError when this tokenizer cannot read a control token as letters.
        """
        if not self.is_ambiguous(marked):
            return self.tokenizer(self.reveal(marked), add_special_tokens=False)["input_ids"]
        return self.encode_ambiguous(marked)[0]

    def encode_ambiguous(self, marked: str) -> tuple[list[int], Callable[[int], int | None]]:
        """Return the token ids, and a function: index into `marked` -> index of the token that holds its character."""
        out: list[str] = []
        size = last = 0
        moved: list[tuple[int, int, bool]] = []  # (from this index on, its new index, whether it is in a name)
        for match in self._name_or_mark.finditer(marked):
            replacement = self._marked.get(match[0]) or self._secrets[match[0]]
            out += (marked[last : match.start()], replacement)
            start = size + match.start() - last
            size, last = start + len(replacement), match.end()
            moved += ((match.start(), start, True), (last, size, False))
        encoding = self._renamed(marked).encode("".join((*out, marked[last:])), add_special_tokens=False)
        written, read = sum(self.found_in(marked).values()), sum(i in self._ids.values() for i in encoding.ids)
        if written != read:
            raise self._unreadable(marked, f"it reads {read} control tokens in a text that has {written}")

        def token_at(index: int) -> int | None:
            start, new_start, in_name = max((m for m in moved if m[0] <= index), default=(0, 0, False))
            return encoding.char_to_token(new_start if in_name else new_start + index - start)

        return encoding.ids, token_at

    def processor_over(self, processor: Any) -> Any:
        """Return a copy of the processor that accepts guarded text."""
        from copy import copy

        other = copy(processor)
        other.tokenizer = _GuardedTokenizer(self)
        return other

    def _renamed(self, marked: str) -> Any:
        """Return a copy of the tokenizer in which every control token has a secret name and its old id; made once."""
        if self._copy is None:
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise self._unreadable(marked, f"{type(self.tokenizer).__name__} is not one of the tokenizers library")
            self._copy = rename_tokens(backend, self._secrets)
            ids = {name: self._copy.token_to_id(secret) for name, secret in self._secrets.items()}
            if ids != self._ids:
                raise self._unreadable(marked, "its control tokens have no fixed ids")
        return self._copy

    def _unreadable(self, marked: str, why: str) -> DataError:
        named = ", ".join(self.found_in(self.reveal(marked)) - self.found_in(marked))
        return DataError(
            f"the text holds {named}, which this model's tokenizer cannot read as letters: {why}",
            hint="remove it from the text",
        )


class _GuardedTokenizer:
    """Tokenizer that encodes guarded text, for a copy of a processor. All else is as in the model's tokenizer."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control.tokenizer, name)

    def __call__(self, text: str | Sequence[str], **settings: Any) -> Any:
        texts = [text] if isinstance(text, str) else list(text)
        if not any(map(self._control.is_ambiguous, texts)):
            return self._control.tokenizer(text, **settings)
        from transformers import BatchEncoding

        class Encoding(BatchEncoding):
            def char_to_token(self, batch_or_char_index: int, char_index: int | None = None) -> Any:
                at = (0, batch_or_char_index) if char_index is None else (batch_or_char_index, char_index)
                return token_at[at[0]](at[1])

        all_ids, token_at = zip(*map(self._control.encode_ambiguous, texts), strict=True)
        fields = {"input_ids": list(all_ids), "attention_mask": [[1] * len(ids) for ids in all_ids]}
        return Encoding(fields, tensor_type=settings.get("return_tensors"))


def rename_tokens(backend: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a `tokenizers.Tokenizer` with other names for these tokens; ids, flags and all else stay."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    state["truncation"] = state["padding"] = None
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # Unigram: [token, score]
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(state))


def _names(processor: Any, render: Callable[[str], str]) -> tuple[str, ...]:
    tokenizer = processor.tokenizer
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    names = {name for name, special in added.items() if special} | set(tokenizer.all_special_tokens)
    for holder in (processor, tokenizer):
        names |= {str(token) for kind in MEDIA if (token := getattr(holder, f"{kind}_token", None))}
    turn = render("x")
    # Some vocabularies have an added token for several line breaks, which opens nothing.
    names |= {name for name in added if name in turn and not name.isspace()}
    return tuple(sorted(names & added.keys(), key=lambda name: (-len(name), name)))


def _any_of(words: Sequence[str] | Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the words; if several match, the first in order.

    A look-ahead for the first characters makes it fast, because at most places of a text no word begins.
    """
    if not words:
        return re.compile(_NO_NAME)
    firsts = re.escape("".join(sorted({word[0] for word in words})))
    return re.compile(f"(?=[{firsts}])(?:{'|'.join(map(re.escape, words))})")
