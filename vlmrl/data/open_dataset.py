"""Function that opens any dataset: a prepared folder or a table."""

from __future__ import annotations

from pathlib import Path

from vlmrl.data.dataset import Dataset
from vlmrl.data.held_out import HeldOutDataset
from vlmrl.data.prepared_dataset import INFO_FILE, PreparedDataset
from vlmrl.data.table_dataset import TableDataset
from vlmrl.recipe.schema import Data


def open_dataset(data: Data) -> Dataset:
    """Open a `[[data]]` entry. No row is read and no image is decoded yet, unless a share of the rows is held out.

    Raises: DataError when nothing is at `path`, or the data there cannot be read.
    """
    if isinstance(data.validation, float):
        return HeldOutDataset(open_dataset(data.model_copy(update={"validation": None})), data)
    path = Path(data.path)
    if not data.path.startswith("hub:") and (path / INFO_FILE).is_file():
        # `table` is the default in the recipe, and wrong here: dataset.json of a prepared folder names the task.
        task = None if data.task == "table" else data.task
        return PreparedDataset(path, name=data.name, task=task)
    return TableDataset(data)
