"""Log-probs and entropies of trained tokens, with gradients: vlmrl's head beside plain autograd.

    python scripts/bench/head.py [--positions 256] [--hidden 512] [--vocabulary 151936] [--dtype float32|bfloat16]
                                 [--entropy-gradient] [--repeats 3] [--json] [--smoke]

    vlmrl     `token_logprobs`: in chunks, whose gradient is written over the logits by hand
    chunks    the same chunks by autograd (log_softmax, gather, -sum p log p), each computed again in the backward pass
    whole     autograd over all positions at once, as a training loop is first written

Seconds are the best of the repeats, in turns. Bytes are those of all live tensors at the peak, except the weights and
their gradient; with several chunks the gradient of a chunk is among them. `errors` are the largest differences of
log-probs and of entropies from those of the same logits in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import pytest
import torch
from tensor_bytes import TensorBytes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlmrl.model.device_memory import keep_freed_memory
from vlmrl.model.policy import chunks_for, token_logprobs

Head = Callable[[Tensor, Tensor, torch.nn.Linear], tuple[Tensor, Tensor]]
"""Function from hidden states [K, D] and targets [K] to log-probs and entropies [K]."""


def plain(hidden: Tensor, target: Tensor, head: torch.nn.Linear) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by autograd."""
    return of_logits(head(hidden).float(), target)


def of_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of logits [K, V]."""
    logp = logits.log_softmax(-1)
    return logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def in_chunks(hidden: Tensor, target: Tensor, head: torch.nn.Linear) -> tuple[Tensor, Tensor]:
    """`plain`, a chunk of positions at a time."""
    size = chunks_for(hidden.device).positions(head.out_features)
    run = partial(checkpoint, plain, use_reentrant=False)
    parts = [run(*pair, head) for pair in zip(hidden.split(size), target.split(size), strict=True)]
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def measure(settings: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds, bytes a logit and errors of each way."""
    torch.manual_seed(0)
    keep_freed_memory()  # as training on a CPU does
    dtype = getattr(torch, settings.dtype)
    head = torch.nn.Linear(settings.hidden, settings.vocabulary, bias=False).to(dtype)
    hidden = torch.randn(settings.positions, settings.hidden).to(dtype).requires_grad_()
    target = torch.randint(settings.vocabulary, (settings.positions,))
    own = partial(token_logprobs, temperature=1.0, entropy_gradient=settings.entropy_gradient)
    ways: dict[str, Head] = {"vlmrl": own, "chunks": in_chunks, "whole": plain}

    def run(way: Head) -> tuple[Tensor, Tensor]:
        logp, entropy = way(hidden, target, head)
        (logp.sum() + (0.01 * entropy.sum() if settings.entropy_gradient else 0.0)).backward()
        hidden.grad = head.weight.grad = None
        return logp.detach(), entropy.detach()

    with torch.no_grad():  # [2, positions], a few at a time: logits in float64
        pairs = zip(hidden.split(8), target.split(8), strict=True)
        exact = torch.cat([torch.stack(of_logits(head(x).double(), t)) for x, t in pairs], 1)
    results: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        with pytest.MonkeyPatch.context() as patch, TensorBytes(patch) as memory:
            found = run(way)
        errors = [float((a.double() - b).abs().max()) for a, b in zip(found, exact, strict=True)]
        spared = (memory.peak - head.weight.nbytes) / (settings.positions * settings.vocabulary)
        results[name] = {"seconds": float("inf"), "bytes_a_logit": spared, "errors": errors}
    for _ in range(settings.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            run(way)
            results[name]["seconds"] = min(results[name]["seconds"], time.perf_counter() - start)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--entropy-gradient", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.positions, args.hidden, args.vocabulary, args.repeats = 8, 16, 64, 1
    results = measure(args)
    if args.json:
        print(json.dumps(vars(args) | results))
        return
    for name, result in results.items():
        share, errors = results["vlmrl"]["seconds"] / result["seconds"], [f"{error:.0e}" for error in result["errors"]]
        print(f"{name:8}{result['seconds']:9.4f} s   vlmrl takes {share:.2f} of it", end="   ")
        print(f"{result['bytes_a_logit']:5.1f} bytes a logit   errors {', '.join(errors)}")


if __name__ == "__main__":
    main()
