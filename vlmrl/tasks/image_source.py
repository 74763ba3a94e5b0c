"""Source of a user's own images: a task's prompt, or the user's question, for images that belong to no dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.data.dataset import INFO_FILE, read_info
from vlmrl.data.image_folders import SPLIT, ImageFiles
from vlmrl.errors import DataError, RecipeError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.recipe.template import parse_template
from vlmrl.tasks import DEFAULT, make_task
from vlmrl.tasks.base import Task
from vlmrl.tasks.prompt import IMAGE, render_user
from vlmrl.tasks.source import Source, make_source
from vlmrl.tasks.user_task import is_own
from vlmrl.types import Row
from vlmrl.untrusted import encodable, plural

ASK = 'ask with --prompt "TEXT", or with --template FILE'


@dataclass(frozen=True)
class Question:
    """Question of the user about images. A field that is None is taken from the recipe.

    Args:
        task: name of a task, whose prompt is used.
        prompt: text of the user message, used as it is. `<image>` in it marks the image, which else comes first.
        template: path of a Jinja template of the user message.
        source: name of the recipe's source to take the prompt from.
    """

    task: str | None = None
    prompt: str | None = None
    template: str | None = None
    source: str | None = None


def ask_about(images: ImageFiles, entries: Sequence[Data], question: Question) -> Source:
    """Return the images as a source, with the prompt of a recipe's source, of a task, or of the user.

    Args:
        entries: the `[[data]]` entries of the recipe. The rows of their datasets are not read.
    Raises: RecipeError when nothing says what to ask; DataError when the prompt needs columns of a row, or several
        images; also the errors of the task and the template.
    """
    if question.prompt is not None and question.template is not None:
        raise RecipeError("--prompt and --template both give the prompt", hint="leave one of them out")
    entry = _entry(entries, question)
    task = _task(entry, question, images)
    own_prompt = question.template or (None if question.task and question.task != _name_of(entry) else entry.prompt)
    data = Data(path=images.path, task=task.name, prompt=own_prompt, system=entry.system)
    template = None if question.prompt is None else (literal(question.prompt), "--prompt")
    rows = images.rows(SPLIT)
    if not (template or own_prompt or task.template):
        if task.name == DEFAULT:
            raise RecipeError("there is no question to ask about the images", hint=f"name a --task, or {ASK}")
        message = f"the prompts of task `{task.name}` are in the rows of its dataset, and an image alone has none"
        raise DataError(message, hint=ASK)
    source = make_source(data, Reward(), images, task, SPLIT, rows, scored=False, template=template)
    _require_image_alone(source, rows[0])
    return source


def literal(text: str) -> str:
    """Return the Jinja source of a template that renders to this text.

    Raises: RecipeError for a text without a word.
    """
    if not text.strip():
        raise RecipeError("the prompt is empty", where="--prompt")
    quoted = encodable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'{{{{ "{quoted}" }}}}'


def _entry(entries: Sequence[Data], question: Question) -> Data:
    """Return the recipe's source that the prompt is taken from."""
    names = [data.name or Path(data.path).name for data in entries]
    if question.source is not None:
        if question.source not in names:
            raise DataError(f"there is no source `{question.source}`", hint=f"sources: {', '.join(names)}")
        return entries[names.index(question.source)]
    prompts = {(_name_of(data), data.variant, data.prompt, data.system) for data in entries}
    if len(prompts) > 1 and question.task is None and question.prompt is None and question.template is None:
        raise RecipeError(
            f"the recipe has {len(entries)} sources with different prompts",
            hint=f"name one, such as --source {names[0]}, or --task NAME, or --prompt TEXT",
        )
    return entries[0]


def _name_of(data: Data) -> str:
    """Return the name of an entry's task; for a prepared dataset without one in the recipe, that of its dataset.json.

    A file that only a dataset names is no task: data runs no code.
    """
    folder = Path(data.path)
    if data.task != DEFAULT or not (folder / INFO_FILE).is_file():
        return data.task
    name = str(read_info(folder)["task"])
    return DEFAULT if is_own(name) else name


def _task(entry: Data, question: Question, images: ImageFiles) -> Task:
    own = _name_of(entry)
    name = question.task or own
    info: dict[str, Any] = {**images.info, "task": name}
    if name != own:
        return make_task(name, info)
    if (Path(entry.path) / INFO_FILE).is_file():  # some prompts have words of the dataset, such as names of levels
        info = {**read_info(Path(entry.path)), "task": name}
    return make_task(name, info, entry.variant)


def _require_image_alone(source: Source, row: Row) -> None:
    """Raise a DataError, with all missing columns, unless the prompt can be made for an image alone."""
    from jinja2.meta import find_undeclared_variables

    try:
        text = render_user(source.template, row, source.task.variables, where=source.template_path)
    except DataError as error:
        names = find_undeclared_variables(parse_template(source.template, source.template_path))
        missing = sorted(names - {"columns", *source.task.variables})
        if not missing:
            raise
        columns = f"column{plural(len(missing))} {', '.join(f'`{name}`' for name in missing)}"
        raise DataError(
            f"the prompt of task `{source.task.name}` needs the {columns} of a row, which an image alone does not have",
            where=source.template_path,
            hint=f"{ASK}, or make a table with an image and these columns per row: --data TABLE",
        ) from error
    if (marks := text.count(IMAGE)) > 1:
        raise DataError(
            f"the prompt of task `{source.task.name}` shows {marks} images together, and each image is asked about "
            "alone",
            where=source.template_path,
            hint=f"{ASK}, or make a table with {marks} images per row: --data TABLE",
        )
