"""`vlmrl data doctor`: check lengths, copies across splits, labels, and the score of guessing."""

from __future__ import annotations

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit


def doctor(
    dataset: options.Dataset,
    task: str | None = typer.Option(
        None, help="Task whose prompts are measured; default: the dataset's own task, unless that is a file."
    ),
    max_prompt_tokens: int | None = typer.Option(None, min=1, help="Count the rows with more tokens than this."),
    workers: int | None = typer.Option(None, min=1, help="Number of processes; default: one per core."),
    as_json: options.Json = False,
) -> None:
    """Check what a dataset is worth.

    It reports lengths, copies across splits, known individuals, labels, and what guessing earns.

    Example: vlmrl data doctor data/fungi --max-prompt-tokens 2048
    """
    from vlmrl.cli.show.doctor import show_doctor
    from vlmrl.cli.show.progress import PartCounter
    from vlmrl.data.doctor import visit
    from vlmrl.data.open_dataset import open_dataset
    from vlmrl.recipe.schema import Data
    from vlmrl.tasks import kind_of, task_of
    from vlmrl.tasks.dataset_assembly import prompt_texts, prompt_tokens

    opened = open_dataset(Data(path=dataset))
    chosen_task = task_of(opened, task)
    tokens, texts, part_counter = prompt_tokens(chosen_task), prompt_texts(chosen_task), PartCounter()
    report = visit(
        opened,
        tokens,
        labels_of=lambda row: (chosen_task.kind or kind_of(row.truth)).labels(row),
        texts=texts,
        max_prompt_tokens=max_prompt_tokens,
        workers=workers,
        progress=part_counter,
    )
    if not as_json:
        show_doctor(report)
    emit({"path": opened.path, "fingerprint": opened.fingerprint, "doctor": report}, as_json)
