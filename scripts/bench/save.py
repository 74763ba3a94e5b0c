"""How long a checkpoint holds the training up: written at once, and from copies while training goes on.

python scripts/bench/save.py [--hidden 1024] [--layers 12] [--saves 4] [--folder FOLDER] [--smoke]

A model of random weights with its moments, about 2 GB, on the CPU. Prints a JSON object for each kind (see `measure`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vlmrl.checkpoint import io
from vlmrl.dist.fsdp import HostCopies
from vlmrl.model.load import load_model, load_processor
from vlmrl.model.tiny import build_tiny
from vlmrl.recipe.schema import Model, Optim
from vlmrl.train.learner import Optimizer
from vlmrl.train.session import Saver, Written


def measure(place: Path, *, hidden: int, layers: int, saves: int, device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Seconds of saving a model with its moments, written at once and from copies.

    Args:
        place: an empty folder on the disk to measure.      hidden, layers: of the text model.
        saves: of each kind, at least 2.      device: "cpu" or "cuda"; copies of a GPU's tensors are pinned.
    Yields: a dict for each kind: `case`; `gigabytes` of a checkpoint; `held_first`, `held_best`: seconds for which the
        step loop is held, of the first save, which takes memory for the copies, and the best of the later ones;
        `whole_best`: seconds until the checkpoint is whole.
    """
    folder = build_tiny(place / "model", ["same or different?"], hidden=hidden, layers=layers)
    settings = Model.model_validate({"path": str(folder), "dtype": "float32", "device": device})
    model, processor = load_model(settings), load_processor(settings)
    optimizer = Optimizer(model, Optim(lr=1e-6))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.adamw.step()
    tensors = optimizer.state_tensors()
    size = sum(t.nbytes for t in (*io.model_tensors(model).values(), *tensors.values()))
    for case, saver in (("at once", Saver()), ("beside", Saver(copies=HostCopies(pinned=device == "cuda")))):
        held, whole = [], []
        for step in range(saves):
            start = time.perf_counter()
            what = io.CheckpointContent(step, {"dtype": "float32"}, {})
            staged = io.stage(place, what, model, processor, tensors, copies=saver.copies)
            saver.begin(lambda staged=staged, step=step: Written(step, io.write_staged(staged), ()))
            held.append(time.perf_counter() - start)
            shutil.rmtree(saver.result().folder)
            whole.append(time.perf_counter() - start)
        yield {
            "case": case,
            "gigabytes": size / 1e9,
            "held_first": held[0],
            "held_best": min(held[1:]),
            "whole_best": min(whole),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--saves", type=int, default=4, help="of each kind, at least 2")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    asked = parser.parse_args()
    if asked.smoke:
        asked.hidden, asked.layers, asked.saves = 64, 1, 2
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        for row in measure(Path(name), hidden=asked.hidden, layers=asked.layers, saves=asked.saves):
            print(json.dumps({key: round(x, 2) if isinstance(x, float) else x for key, x in row.items()}))


if __name__ == "__main__":
    main()
