"""Options of `vlmrl prep` of a task whose rows come from tables of others, or are drawn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared, check_name, drawn_counts, short_source
from vlmrl.tasks.options import Option, hints_of

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

    The other parameters of the function are the task's own options; `limits` and `force` are among them.

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
        def run(source: str | None = None, *, limits: Limits, force: bool = False, **options: Any) -> Prepared:
            shared = {name: options.pop(name) for name in hints.keys() & options.keys()}
            return prep(replace(usual, source=source, **shared), **options, limits=limits, force=force)

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
    return names
