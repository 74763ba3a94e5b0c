"""Rendering of messages with a model's chat template, in the text format that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmrl.errors import CheckpointError, DataError
from vlmrl.recipe.template_worker import (
    TemplateFailedError,
    TemplateInvalidError,
    TemplateLimitError,
    TemplateWorker,
)
from vlmrl.redaction.redact import first_line
from vlmrl.types import Message

if TYPE_CHECKING:
    from vlmrl.data.control_tokens import ControlTokens

IMAGE_SLOT = "<image>"
TEMPLATE_HINT = "use the chat template that came with the model (chat_template.jinja in its folder)"
WORKER = TemplateWorker(chat=True)
"""Process that renders chat templates with limits."""


def render_chat(
    processor: Any, messages: Sequence[Message], *, generation_prompt: bool, settings: Mapping[str, Any]
) -> str:
    """Return the text of a conversation; each `<image>` becomes an image entry for the template.

    Args:
        settings: further variables of the template, such as `enable_thinking`.
    Raises: CheckpointError when the model has no chat template, when the template is not valid, or when it exceeds the
        limits on time, memory or text; DataError when the template refuses this conversation.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    turns = [{"role": m.role, "content": _entries(m.content)} for m in messages]
    if not getattr(processor, "chat_template", None):
        raise CheckpointError(
            "the model has no chat template", hint="use an instruction-tuned model, or add chat_template.jinja"
        )
    _require_limits(processor, turns, {"add_generation_prompt": generation_prompt, **settings})
    try:
        return processor.apply_chat_template(turns, add_generation_prompt=generation_prompt, tokenize=False, **settings)
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
    names = {**special, "messages": turns, "tools": None, "documents": None, **settings}
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
