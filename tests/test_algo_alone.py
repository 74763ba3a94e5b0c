"""algo/, model/ and model/packing.py run anywhere with torch and transformers alone: nothing of the rest is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALONE = """
import sys

ALLOWED = ("errors", "types", "untrusted", "key_facts", "redaction", "algo", "model")
OTHERS = ("typer", "pydantic", "pyarrow", "datasets", "peft", "jinja2", "cairosvg", "google", "sklearn", "vllm")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        first, _, rest = name.partition(".")
        if first == "vlmrl" and rest and rest.split(".")[0] not in ALLOWED and rest not in ("data", "data.packing"):
            raise ImportError(f"{name} was imported")
        if first in OTHERS:
            raise ImportError(f"{name} was imported")

import torch, torch.utils.checkpoint, transformers, transformers.masking_utils, transformers.integrations.sdpa_attention
from transformers import AttentionInterface, AutoModelForImageTextToText, DynamicCache
sys.meta_path.insert(0, Refuse())
import importlib, pkgutil
import vlmrl.algo, vlmrl.model
names = ["vlmrl.model.packing"]
for package in (vlmrl.algo, vlmrl.model):
    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)

from vlmrl.algo.losses import Denominator, aggregate
from vlmrl.algo.losses import clipped_surrogate, log_ratio
from vlmrl.model.packing import PromptTokens, TrainItem, make_row, pack
from vlmrl.model.policy import token_logprobs
from vlmrl.types import Segment
prompt = PromptTokens((1, 2, 3), (0, 0, 0), {}, 0)
items = [TrainItem(prompt, 0, (Segment("assistant", (4, 5), True),), k) for k in range(2)]
row = make_row(pack(items, 100)[0])
hidden = torch.zeros(len(row.target_K), 8, requires_grad=True)
logp, _ = token_logprobs(hidden, row.target_K, torch.nn.Linear(8, 10), temperature=0.7)
ratio = log_ratio(logp, logp.detach(), torch.tensor([0, 0, 1, 1]), "token")
loss = clipped_surrogate(ratio, torch.ones(4), clip_low=0.2, clip_high=0.2)
aggregate(loss, torch.full((4,), 2), Denominator.of("token_mean", [2, 2], 8)).backward()
print(len(names), bool(hidden.grad.any()))
"""


@pytest.mark.slow
def test_algo_model_and_batch_work_with_torch_and_transformers_alone():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    count, learns = done.stdout.split()
    assert int(count) >= 12 and learns == "True"
