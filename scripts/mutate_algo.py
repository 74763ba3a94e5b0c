#!/usr/bin/env python3
"""Does a wrong sign, mask or denominator turn a test red? Changes the algorithm one place at a time and runs its tests.

Each mutant is a copy of the package with one text replaced, in a temporary folder; the working tree is not touched. A
mutant that all tests let pass is a hole in the tests: it is listed, and the exit code is 1.

Run: .venv/bin/python scripts/mutate_algo.py [--only TEXT] [--json]
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ["tests/golden"]
STEP = ["tests/property/test_update_property.py"]
PACK = ["tests/property/test_pack_property.py", *STEP]
UPDATE = [*STEP, "tests/unit/train"]
ADVANTAGES, LOSSES, KL, AGGREGATE = (f"vlmrl/algo/{n}.py" for n in ("advantages", "losses", "kl", "aggregate"))
STEP_FILE, BATCH, OPTIM = "vlmrl/train/update.py", "vlmrl/data/batch.py", "vlmrl/train/optim.py"
LOGPROBS, POLICY, ATTENTION = (f"vlmrl/model/{n}.py" for n in ("logprobs", "policy", "prefix_attention"))
SAMPLE, LOOP = "vlmrl/rollout/sample.py", "vlmrl/train/rl.py"

MUTANTS = [
    # file, text (once in the file), its replacement, the tests that must see it
    (ADVANTAGES, "return scores_G - scores_G.mean()", "return scores_G.mean() - scores_G", GOLDEN),
    (ADVANTAGES, "return scores_G - scores_G.mean()", "return scores_G - np.median(scores_G)", GOLDEN),
    (ADVANTAGES, "scores_G.std(ddof=1)", "scores_G.std(ddof=0)", GOLDEN),
    (ADVANTAGES, "+ STD_EPSILON)", ")", GOLDEN),
    (ADVANTAGES, "* n / (n - 1)", "", GOLDEN),
    (ADVANTAGES, "len(scores) < 2 or min(scores) == max(scores)", "len(scores) < 2", GOLDEN),
    (ADVANTAGES, "if use]", "]", GOLDEN),
    (ADVANTAGES, "if not all(np.isfinite(kept)):", "if False:", GOLDEN),
    (LOSSES, "return (logp_K - old_logp_K).clamp", "return (old_logp_K - logp_K).clamp", GOLDEN),
    (LOSSES, "index_add(0, sequence_K, logp_K - old_logp_K)", "index_add(0, sequence_K, old_logp_K - logp_K)", GOLDEN),
    (LOSSES, "(total_S / length_S)[sequence_K]", "total_S[sequence_K]", GOLDEN),
    (LOSSES, "return -advantage_K * ratio_K", "return advantage_K * ratio_K", GOLDEN),
    (LOSSES, "return -torch.minimum(", "return torch.minimum(", GOLDEN),
    (LOSSES, "return -torch.minimum(", "return -torch.maximum(", GOLDEN),
    (LOSSES, "low = 1.0 - clip_low", "low = 1.0 + clip_low", GOLDEN),
    (LOSSES, "high = 1.0 + clip_high", "high = 1.0 + clip_low", GOLDEN),
    (LOSSES, "(advantage_K > 0) & (ratio_K > 1.0", "(advantage_K < 0) & (ratio_K > 1.0", GOLDEN),
    (LOSSES, "return -logp_K", "return logp_K", GOLDEN),
    (LOSSES, "LOG_RATIO_LIMIT = 20.0", "LOG_RATIO_LIMIT = 200.0", GOLDEN),
    (KL, "d = (ref_logp_K - logp_K)", "d = (logp_K - ref_logp_K)", GOLDEN),
    (KL, "d.exp() - d - 1.0", "d.exp() - d", GOLDEN),
    (KL, "d.exp() - d - 1.0", "d.exp() + d - 1.0", GOLDEN),
    (AGGREGATE, "counted = [n for n in tokens_S if n > 0]", "counted = list(tokens_S)", GOLDEN),
    (AGGREGATE, "return loss_K.sum() / max(1, total.num_tokens)", "return loss_K.mean()", GOLDEN),
    (AGGREGATE, "(loss_K / sequence_tokens_K.to(loss_K.dtype)).sum()", "loss_K.sum()", GOLDEN),
    (AGGREGATE, "/ max(1, total.num_sequences * total.max_tokens)", "/ max(1, total.max_tokens)", GOLDEN),
    (OPTIM, "settings.lr * (step + 1) / settings.warmup_steps", "settings.lr * step / settings.warmup_steps", GOLDEN),
    (OPTIM, "total_steps - 1 - settings.warmup_steps", "total_steps - settings.warmup_steps", GOLDEN),
    (OPTIM, "0.5 * (1.0 + math.cos", "0.5 * (1.0 - math.cos", GOLDEN),
    (OPTIM, "if m.ndim >= 2]", "if m.ndim >= 0]", UPDATE),
    (OPTIM, "parameter.grad.float()", "parameter.grad", UPDATE),
    (OPTIM, "else master.grad.add_(gradient)", "else gradient", UPDATE),
    (OPTIM, "                p.copy_(self.masters[name])", "                pass", UPDATE),
    (STEP_FILE, "old = stats.logp.detach() if", "old = stats.logp if", GOLDEN),
    (STEP_FILE, "if data.old_logp is None else data.old_logp", "", GOLDEN),
    (STEP_FILE, "loss = loss - self.entropy_coef", "loss = loss + self.entropy_coef", GOLDEN),
    (STEP_FILE, "loss = loss + self.kl_coef * kl", "loss = loss - self.kl_coef * kl", GOLDEN),
    (STEP_FILE, "[batch.num_trained(i) for i in batch.items], max_tokens)", "[i.num_tokens for i in batch.items], max_tokens)", STEP),
    (STEP_FILE, "sum(len(s.ids) for s in item.segments if s.trained)", "sum(len(s.ids) for s in item.segments)", STEP),
    (STEP_FILE, "advantage=advantage[response]", "advantage=advantage[response].abs()", STEP),
    (STEP_FILE, "advantage=advantage[response]", "advantage=advantage[0].expand(len(response))", STEP),
    (STEP_FILE, "response_tokens=counts[response]", "response_tokens=counts.sum().expand(len(response))", STEP),
    (STEP_FILE, "        loss.backward()", "        policy.model.zero_grad(); loss.backward()", STEP),
    (STEP_FILE, "        if not bool(torch.isfinite(loss_K).all()):", "        if False:", UPDATE),
    (STEP_FILE, '    if not norm < float("inf"):', '    if norm == float("inf"):', UPDATE),
    (STEP_FILE, "        optimizer.clear()\n        raise", "        raise", UPDATE),
    (STEP_FILE, "join(batch.old_logp)", "join(batch.ref_logp)", STEP),
    (STEP_FILE, "gap = max(gap, _sampler_gap(stats, data))", "gap = _sampler_gap(stats, data)", STEP),
    (BATCH, "prompt_last if i == start else i - 1", "i - 1", PACK),
    (BATCH, "prompt_last if i == start else i - 1", "prompt_last if i == start else i", PACK),
    (BATCH, "prompt_last, response = len(ids) - 1, 0", "prompt_last, response = len(ids) - 2, 0", PACK),
    (BATCH, "size + item.num_tokens > tokens_per_row", "item.num_tokens > tokens_per_row", PACK),
    (BATCH, "        room[index] -= size", "        room[index] -= 0", PACK),
    (BATCH, "            positions += range(start, start + len(segment.ids))", "            positions += range(start, start + len(segment.ids))[::-1]", PACK),
    (ATTENTION, "(owner[:, None] == owner[None, :]).tril()", "(owner[:, None] == owner[None, :])", PACK),
    (ATTENTION, "(owner[:, None] == owner[None, :]).tril()", "(owner[:, None] >= owner[None, :]).tril()", PACK),
    (ATTENTION, "is_causal=True", "is_causal=False", PACK),
    (POLICY, "following = prompt.max() + 1", "following = prompt.max() + 2", STEP),
    (POLICY, "following = prompt.max() + 1", "following = torch.tensor(span.end)", STEP),
    (POLICY, "hidden_ND[row.predict_at_K]", "hidden_ND[row.predict_at_K - 1]", STEP),
    (LOGPROBS, "logits = logits / temperature", "logits = logits * temperature", STEP),
    (LOGPROBS, 'return logits if banned is None else logits.masked_fill(banned, float("-inf"))', "return logits", STEP),
    (LOGPROBS, "entropy = -(p", "entropy = (p", STEP),
    (LOGPROBS, "torch.is_grad_enabled() and entropy_gradient", "False", STEP),
    (SAMPLE, 'not (c and truncated == "drop")', 'not (c and truncated == "mask")', UPDATE),
    (SAMPLE, 'masked = [not use or (c and truncated != "keep")', 'masked = [not use or (c and truncated == "keep")', UPDATE),
    (SAMPLE, "included = [not f and", "included = [", UPDATE),
    (SAMPLE, "return all(s.advantage == 0.0", "return any(s.advantage == 0.0", UPDATE),
    (LOOP, "if use and not sample.masked:", "if use:", UPDATE),
    (LOOP, "use = keep_dead or not is_dead_group(group)", "use = True", UPDATE),
    (LOOP, "order[i::count]", "order[:count]", UPDATE),
    (LOOP, "if share > MAX_ERROR_SHARE:", "if share > 1:", UPDATE),
]  # fmt: skip


def make_copy(folder: Path, file: str, old: str, new: str) -> None:
    """The package and its tests with one change. Raises: SystemExit when the text is not there exactly once."""
    source = (ROOT / file).read_text("utf-8")
    if source.count(old) != 1:
        sys.exit(f"error: the mutant is out of date: {file} holds {old!r} {source.count(old)} times")
    for part in ("vlmrl", "tests", "recipes"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / file).write_text(source.replace(old, new), "utf-8")


def passes(folder: Path, tests: list[str]) -> bool:
    """Whether all tests pass in the copy. In a fork, so that torch is loaded once; the copy is first on the path."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", *tests])))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):  # 1 = a test failed; anything else says nothing about the tests
        sys.exit(f"error: pytest ended with {code} in {folder}")
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose file, text or replacement contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import hypothesis  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLForConditionalGeneration  # noqa: F401

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "vlmrl" for name in sys.modules), "vlmrl must be loaded in the forks alone"
    with tempfile.TemporaryDirectory() as place:
        make_copy(Path(place), ADVANTAGES, "STD_EPSILON = 1e-6", "STD_EPSILON = 1e-6")
        if not options.only and not passes(Path(place), sorted({t for m in MUTANTS for t in m[3]})):
            sys.exit("error: the tests do not pass without a mutation")
    survived, results, start = [], [], time.perf_counter()
    for file, old, new, tests in MUTANTS:
        if options.only not in f"{file} {old} {new}":
            continue
        with tempfile.TemporaryDirectory() as place:
            make_copy(Path(place), file, old, new)
            alive = passes(Path(place), tests)
        results.append({"file": file, "text": old, "mutant": new, "caught": not alive})
        survived += [results[-1]] if alive else []
        print(f"{'SURVIVED' if alive else 'caught  '}  {file}: {old!r} -> {new!r}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(results) - len(survived)} of {len(results)} mutants caught in {seconds:.0f} s", file=sys.stderr)
    if options.json:
        print(json.dumps({"mutants": results, "survived": survived, "seconds": round(seconds, 1)}))
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
