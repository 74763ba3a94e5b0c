"""How long a checkpoint holds the training up: written at once, and from copies while training goes on.

python scripts/bench/save.py [--hidden 1024] [--layers 12] [--saves 4] [--folder FOLDER]

A model of random weights with its moments, about 2 GB, on the CPU. Prints one JSON object: seconds for which the step
loop is held (of the first save, which takes memory for the copies, and the best of the later ones), and until the
checkpoint is whole.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch

from vlmrl.checkpoint import io
from vlmrl.dist.fsdp import HostCopies
from vlmrl.model.load import load_model, load_processor
from vlmrl.model.tiny import build_tiny
from vlmrl.recipe.schema import Model, Optim
from vlmrl.train.optim import Optimizer
from vlmrl.train.saver import Saver, Written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--saves", type=int, default=4, help="of each kind, at least 2")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        place = Path(name)
        folder = build_tiny(place / "model", ["same or different?"], hidden=asked.hidden, layers=asked.layers)
        settings = Model(path=str(folder), dtype="float32", device="cpu")
        model, processor = load_model(settings), load_processor(settings)
        optimizer = Optimizer(model, Optim(lr=1e-6))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.adamw.step()
        tensors = optimizer.state_tensors()
        size = sum(t.nbytes for t in (*io.model_tensors(model).values(), *tensors.values()))
        told: dict[str, float] = {"gb": round(size / 1e9, 2)}
        for kind, saver in (("at once", Saver()), ("beside", Saver(copies=HostCopies()))):
            held, whole = [], []
            for step in range(asked.saves):
                start = time.perf_counter()
                what = io.Saved(step, {"dtype": "float32"}, {})
                staged = io.stage(place, what, model, processor, tensors, copies=saver.copies)
                saver.begin(lambda staged=staged, step=step: Written(step, io.write_staged(staged), ()))
                held.append(time.perf_counter() - start)
                shutil.rmtree(saver.result().folder)
                whole.append(time.perf_counter() - start)
            told[f"{kind}: held, first"] = round(held[0], 2)
            told[f"{kind}: held, best"] = round(min(held[1:]), 2)
            told[f"{kind}: whole, best"] = round(min(whole), 2)
        print(json.dumps(told))


if __name__ == "__main__":
    main()
