"""Options of `vlmrl prep` from the parameters of a function, and those of tasks whose rows come from tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from vlmrl.errors import DataError, RecipeError, unknown
from vlmrl.tasks.dataset_assembly import Limits, Prepared, check_name, drawn_counts, short_source

PLAIN = (int, float, str, bool, Path)
"""Types of a value. An option whose type is a list of one of them may be given several times."""
TYPES = "give it one of the types int, float, str, bool and pathlib.Path, and a default"


@dataclass(frozen=True)
class Option:
    """Facts about a parameter: `Annotated[int, Option("Training rows.", min=2)]`.

    A text in place of the Option is used as the help.

    Args:
        help: a sentence for `--help`.
        flag: name on the command line; "" = the parameter's name, with `-` for `_`.
        min, max: bounds of a number, inclusive; None = no bound.
        positional: whether the value is given without the option's name.
    """

    help: str = ""
    flag: str = ""
    min: float | None = None
    max: float | None = None
    positional: bool = False


@dataclass(frozen=True)
class Parameter:
    """Parameter that is an option. If `default` is `inspect.Parameter.empty`, the option is required."""

    name: str
    kind: Any
    default: Any
    option: Option


@dataclass(frozen=True)
class PrepCommand:
    """Command `vlmrl prep` of a task.

    Args:
        run: makes the dataset, and returns a `Prepared`; its parameters are the options, and `limits` or `force`.
        help: help text: the first paragraph describes the dataset, the others the accepted sources, with an example.
        keeps: options -> whether an interrupted run with these options is continued.
    """

    run: Callable[..., Any]
    help: str
    keeps: Callable[[Mapping[str, Any]], bool] = lambda options: False


def parameters_of(function: Callable[..., Any], where: str = "") -> list[Parameter]:
    """Return the parameters of a function as options; `limits` and `force` are left out.

    Raises: RecipeError for a parameter that is no number, text, path or yes/no: no option can set it.
    """
    try:
        hints, parameters = hints_of(function), inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise RecipeError(f"the parameters of `prep` cannot be read: {error}", where=where, hint=TYPES) from error
    options = []
    for name, parameter in parameters.items():
        if name in ("limits", "force"):
            continue
        kind, option = _annotation(hints.get(name), parameter.default)
        plain = [one for one in get_args(kind) if one is not type(None)] or [kind]
        plain = [get_args(one)[0] if get_origin(one) is list else one for one in plain]
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if not named or len(plain) > 1 or plain[0] not in PLAIN:
            raise RecipeError(f"the parameter `{name}` of `prep` cannot be an option", where=where, hint=TYPES)
        options.append(Parameter(name, kind, parameter.default, option))
    return options


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters of a function or `functools.partial`. Raises: NameError or TypeError."""
    return get_type_hints(getattr(function, "func", function), include_extras=True)


def _annotation(hint: Any, default: Any) -> tuple[Any, Option]:
    """Return the type of a parameter, and its `Option`. Without an annotation, the type of the default is used."""
    option = Option()
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        option = next((note if isinstance(note, Option) else Option(str(note)) for note in notes), option)
    if hint is None:
        hint = type(default) if default not in (None, inspect.Parameter.empty) else str
    return hint, option


def listed_names(text: str, known: Collection[str], flag: str) -> list[str]:
    """Return the names in an option's value, separated by commas. Raises: DataError for none, or an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise DataError(f"{flag} names nothing", hint=f"some of: {', '.join(known)}")
    if strange := next((name for name in names if name not in known), None):
        raise unknown("name", strange, known, error=DataError, whose=f" in {flag}")
    return names


SOURCES = (
    "in Parquet, JSONL, JSON, CSV or a folder of the `datasets` library, or `hub:org/name`; each with `@split` if one "
    "split is wanted."
)
"""Places of rows, for the help texts of such commands."""
Prep = Callable[..., Prepared]


@dataclass(frozen=True)
class TableRequest:
    """Options that every such command has: all fields except `published`.

    Args:
        published: source if no option names one; None = there is none.
        source, test: as `locate_rows` takes them. Without `test`, the test split is that of the source, if it has one.
        synthetic: None = read tables.
        out, name: default data/<name>, and the task's name.
        images_root: None = the folder of the table.
        test_images_root: the same for the rows of `test`; None = `images_root`.
    """

    published: str | None
    source: Annotated[str | None, Option("Rows, as described above.", positional=True)] = None
    test: Annotated[str | None, Option("Other source whose rows become the test split.")] = None
    synthetic: Annotated[int | None, Option("Draw this many training rows instead of reading.", min=20)] = None
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None
    name: Annotated[str | None, Option("Name of the dataset; default: the task's.")] = None
    seed: Annotated[int, Option("Seed of drawings, and of rows cut off train.")] = 0
    validation_rows: Annotated[
        int, Option("Rows cut off train where the source has no validation split, at most a tenth; 0: none.", min=0)
    ] = 0
    max_bad: Annotated[float, Option("Largest share of wrong rows that are left out.", min=0, max=1)] = 0.0
    images_root: Annotated[Path | None, Option("Folder that image paths are relative to; default: the table's.")] = None
    test_images_root: Annotated[
        Path | None, Option("The same for the rows of --test; default: --images-root, else the folder of --test.")
    ] = None

    @property
    def table(self) -> str | None:
        """Source that is read; None = there is none."""
        return self.source or self.published

    def sources(self) -> list[tuple[str, Path | None]]:
        """Return the tables to read, each with the folder of its image paths (None = the table's): `table`, `test`."""
        both = [(self.table, self.images_root), (self.test, self.test_images_root or self.images_root)]
        return [(name, root) for name, root in both if name]

    def place(self, task: str) -> tuple[str, Path]:
        """Return the name of the dataset and its folder. Raises: DataError for a name that cannot be used."""
        name = check_name(self.name or task)
        return name, self.out or Path("data") / name

    def drawn(self) -> dict[str, int]:
        """Return split -> number of rows to draw; {} to read tables. Raises: DataError if a source is named, too."""
        if self.synthetic is None:
            return {}
        if other := self.source or self.test:
            raise DataError(f"--synthetic makes the rows, but {other} is a source of rows", hint="leave one out")
        return drawn_counts(self.synthetic)

    def args(self) -> dict[str, Any]:
        """Return the options as dataset.json has them: those that change the rows."""
        if self.synthetic is not None:
            return {"synthetic": self.synthetic, "seed": self.seed}
        return {
            "source": short_source(self.table) if self.table else None,
            "test": short_source(self.test) if self.test else None,
            "seed": self.seed,
            "validation_rows": self.validation_rows,
            "max_bad": self.max_bad,
        }


def table_options(published: str | None, *, validation_rows: int, **helps: str) -> Callable[[Prep], Prep]:
    """Return a decorator that gives a function the options of `TableRequest`, which is its first argument.

    The other parameters of the function are the task's own options, and `limits`.

    Args:
        published, validation_rows: defaults of these fields.
        helps: name of an option -> its help, where this task has another one.
    """
    usual = TableRequest(published, validation_rows=validation_rows)
    hints = get_type_hints(TableRequest, include_extras=True)
    for name, text in helps.items():
        kind, option = get_args(hints[name])
        hints[name] = Annotated[kind, replace(option, help=text)]
    del hints["published"]

    def decorate(prep: Prep) -> Prep:
        def run(source: str | None = None, *, limits: Limits, **options: Any) -> Prepared:
            shared = {name: options.pop(name) for name in hints.keys() & options.keys()}
            return prep(replace(usual, source=source, **shared), **options, limits=limits)

        _, *own = inspect.signature(prep).parameters.values()
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        shared = [inspect.Parameter(name, kind, default=getattr(usual, name)) for name in hints]
        run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        run.__annotations__ = {**hints_of(prep), **hints}
        return run

    return decorate


def chosen_names(option: str, text: str | None, known: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the names in the text of an option, which are separated by commas; () without a text.

    Args:
        option, what: name of the option, and a word for what it names, for the message.
    Raises: DataError for a name that is not known.
    """
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if wrong := [name for name in names if name not in known]:
        raise DataError(f"{option} names `{wrong[0]}`", hint=f"{what}: {', '.join(known)}")
    return tuple(dict.fromkeys(names))
