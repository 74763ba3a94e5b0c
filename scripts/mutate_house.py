#!/usr/bin/env python3
"""Does a lost check, a wrong edge or a swapped order turn a test red? As mutate_algo.py, for all around the algorithm.

The mutants are of the store, checkpoints, rewards, data, rollouts, environments and search.

Run: .venv/bin/python scripts/mutate_house.py [--only TEXT] [--json]
"""

from __future__ import annotations

from mutate_algo import Mutant, main

METRICS, SEALED, PRUNE, LOCK, PACK, RUNS, ROLLOUTS = (
    f"vlmrl/store/{n}.py" for n in ("metrics", "checkpoints", "prune", "lock", "pack", "runs", "rollouts")
)
IO, LOAD, FOLD = (f"vlmrl/checkpoint/{n}.py" for n in ("io", "load", "merge_weights"))
ATTEMPTS, SEVERAL, PARTS, TEXTS = (f"vlmrl/rewards/{n}.py" for n in ("attempts", "several", "base", "text_rewards"))
SPLITS, ENCODE, WRITER, SOURCE = (
    f"vlmrl/{n}.py" for n in ("data/splits", "data/encode", "data/dataset_writer", "tasks/source")
)
END, SAMPLE, ENGINE = (f"vlmrl/rollout/{n}.py" for n in ("response_end", "sample", "torch_engine"))
OF_RUNS, OF_LOCK, OF_PRUNE, OF_VERIFY = (
    [f"tests/unit/store/test_store_{n}.py"] for n in ("runs", "lock", "prune", "pack_verify")
)
OF_SCHEMAS = ["tests/unit/store/test_rollout_schemas.py"]
OF_IO, OF_ADAPTER, OF_STREAM = (
    [f"tests/unit/checkpoint/test_{n}.py"] for n in ("checkpoint_io", "adapter_checkpoint", "merge_stream")
)
OF_OUTAGES, OF_SEVERAL, OF_PARTS, OF_TEXTS, OF_ACCURACY = (
    [f"tests/unit/rewards/test_{n}.py"] for n in ("outages", "several", "reward_parts", "text_rewards", "accuracy_part")
)
OF_SPLITS, OF_SAMPLER = (["tests/property/test_pairs_property.py"], ["tests/property/test_sampler_property.py"])
OF_ENCODE, OF_WRITER = ["tests/unit/model/test_encode_prompt.py"], ["tests/unit/data/test_dataset_writer.py"]
OF_END, OF_SAMPLE, OF_ENGINE = (
    [f"tests/unit/rollout/test_{n}.py"] for n in ("response_end", "sample_step", "torch_engine")
)
CALLS, TOOLS, WORKER, ROWS, PROCESSES = (
    f"vlmrl/environments/{n}.py" for n in ("calls", "tools", "worker", "row_fields", "processes")
)
EPISODES, TURNS = "vlmrl/rollout/episodes.py", "vlmrl/data/turns.py"
OF_CALLS, OF_TOOLS, OF_PROCESSES = (
    [f"tests/unit/environments/test_{n}.py"] for n in ("calls", "tools", "environment_processes")
)
OF_EPISODES, OF_TURNS = ["tests/unit/rollout/test_episodes.py"], ["tests/unit/data/test_turns.py"]
INDEX, ENGINES, RESULTS = (f"vlmrl/search/{n}.py" for n in ("index", "engines", "cache"))
OF_INDEX, OF_ENGINES = ([f"tests/unit/search/test_search_{n}.py"] for n in ("index", "engines"))
OF_DEAL, OF_TRICKS = ["tests/unit/rollout/test_prompt_queue.py"], ["tests/unit/rewards/test_tricks.py"]

MUTANTS: list[Mutant] = [
    # file, text (once in the file), its replacement, the tests that must see it
    (METRICS, 'slack = 1 if kind == "validation" else 0', "slack = 0", OF_RUNS),
    (METRICS, "if number > attempt)", "if number >= attempt)", OF_RUNS),
    (METRICS, "attempt >= best[step][0]", "attempt < best[step][0]", OF_RUNS),
    (METRICS, 'if size and os.pread(self._handle, 1, size - 1) != b"\\n":', "if False:", OF_RUNS),
    (METRICS, 'raw != sealed(raw[: seal.start()] + b"}"):', "False:", OF_VERIFY),
    (METRICS, '"Infinity" if value > 0 else', '"Infinity" if value < 0 else', OF_RUNS),
    (METRICS, "lines[0] if lines else None)", "lines[-1] if lines else None)", OF_RUNS),
    (METRICS, "escaped or byte != 0x22", "byte != 0x22", OF_VERIFY),
    (SEALED, 'there and path.stat().st_size == facts["bytes"] and not', "there and not", OF_VERIFY),
    (SEALED, "if expected_sha256 and expected_sha256 !=", "if False and expected_sha256 !=", OF_IO),
    (SEALED, 'and ".." not in path.parts and', "and", OF_VERIFY),
    (SEALED, 'if named is not None and meta.get("step") != named:', "if False:", OF_VERIFY),
    (SEALED, "    if strays:", "    if False:", OF_VERIFY),
    (SEALED, 'step = best.step if which == "best" and best else which', "step = which", OF_RUNS),
    (SEALED, 'return checkpoints[-1], "the last;', 'return checkpoints[0], "the last;', OF_RUNS),
    (PRUNE, "ordered[: -self.keep]", "ordered[: -self.keep - 1]", OF_PRUNE),
    (PRUNE, "s % self.every == 0", "s % self.every != 0", OF_PRUNE),
    (PRUNE, "complete_checkpoints(run_dir)[:-keep_last]", "complete_checkpoints(run_dir)[keep_last:]", OF_PRUNE),
    (PRUNE, "not in kept_steps]", "in kept_steps]", OF_PRUNE),
    (PRUNE, "range(first, last + 1) for first", "range(first, last) for first", OF_PRUNE),
    (PRUNE, "steps.start <= joined[-1].stop", "steps.start < joined[-1].stop", OF_PRUNE),
    (PRUNE, "named |= _evaluated_images(", "_evaluated_images(", OF_PRUNE),
    (LOCK, "start is not None and start == owner.process_start", "start is not None", OF_LOCK),
    (LOCK, 'return None if after[0] in "ZXx" else after[19]', "return after[19]", OF_LOCK),
    (LOCK, "if is_current(self._handle, self.path):", "if True:", OF_LOCK),
    (LOCK, 'owner_state(owner) == "alive":', 'owner_state(owner) == "dead":', OF_LOCK),
    (PACK, '"last": complete[-1:]', '"last": complete[:1]', OF_VERIFY),
    (PACK, "if name != layout.LOCK and not", "if not", OF_VERIFY),
    (RUNS, "attempts[-1], end=end, status=status)", "attempts[-1], end=end)", OF_RUNS),
    (RUNS, "isinstance(error, SystemExit) and not error.code", "isinstance(error, SystemExit)", OF_RUNS),
    (ROLLOUTS, "if int(number) > SCHEMA:", "if False:", OF_SCHEMAS),
    (ROLLOUTS, "file_step is not None and file_step != name_step:", "False:", OF_VERIFY),
    (IO, "read=folder != _compared)", "read=False)", OF_IO),
    (IO, "own[name].copy_(tensor)", "pass", OF_IO),
    (IO, "if own.keys() != stored.keys():", "if False:", OF_IO),
    (IO, "torch.random.set_rng_state(states[_rng_name(world.rank)])", "pass", OF_IO),
    (IO, "if world.is_main and temp.exists():", "if False:", OF_IO),
    (IO, "t.to(dtypes.get(n, t.dtype)) for n, t in model_tensors", "t for n, t in model_tensors", OF_IO),
    (LOAD, 'if exact and fingerprint(model, world or ALONE) != base.get("fingerprint"):', "if False:", OF_ADAPTER),
    (LOAD, "int((piece * positions).sum()) + self._seen * plain", "int((piece * positions).sum())", OF_ADAPTER),
    (FOLD, "math.sqrt(lora.rank) if lora.rslora else lora.rank", "lora.rank", OF_ADAPTER),
    (FOLD, "(self.magnitude[start:end] / length)", "(self.magnitude[start:end])", OF_ADAPTER),
    (ATTEMPTS, "min(2 * self._pause, self._rule.most_seconds)", "2 * self._pause", OF_OUTAGES),
    (ATTEMPTS, "self._silent + 1 if is_down else 0", "self._silent + 1", OF_OUTAGES),
    (SEVERAL, "value is not None and value > 0", "value is not None and value >= 0", OF_SEVERAL),
    (SEVERAL, 'in ("failed", "unavailable"):', 'in ("unavailable", "failed"):', OF_SEVERAL),
    (SEVERAL, "math.fsum(weights.get(label, 0.0) * score.value", "math.fsum(score.value", OF_SEVERAL),
    (PARTS, "total / remaining if missing and remaining else 1.0", "1.0", OF_TRICKS),
    (PARTS, "low + min(ends), high + max(ends)", "low + max(ends), high + min(ends)", OF_PARTS),
    (PARTS, "<= {RIGHT, 0.0, -RIGHT}", "<= {RIGHT, 0.0}", OF_ACCURACY),
    (TEXTS, "(max_tokens - x.num_tokens) / (max_tokens - soft_tokens)", "1 - x.num_tokens / max_tokens", OF_TEXTS),
    (TEXTS, "abs(number - expected) <= tolerance", "abs(number - expected) < tolerance", OF_TEXTS),
    (SPLITS, "if numbers[name] == 1:", "if False:", OF_SPLITS),
    (SPLITS, "if len(classes) > 1:", "if False:", OF_SPLITS),
    (SOURCE, "min(due, key=", "max(due, key=", OF_SAMPLER),
    (SOURCE, "self.waiting.append((row, self.epoch))", "pass", OF_SAMPLER),
    (ENCODE, "int(g.prod()) // merge for g", "int(g.prod()) for g", OF_ENCODE),
    (WRITER, "if damage_of(target) is None and _facts", "if _facts", OF_WRITER),
    (END, "self._num_tokens >= self._params.max_new_tokens", "self._num_tokens > self._params.max_new_tokens", OF_END),
    (END, "len(fixed) - longest + 1)", "len(fixed) - 1)", OF_END),
    (SAMPLE, "    if stale:", "    if False:", OF_SAMPLE),
    (SAMPLE, "masked=score.error is not None", "masked=False", OF_SAMPLE),
    (SAMPLE, "range(rank, count, world.size)[first:]", "range(rank, count, world.size)", OF_DEAL),
    (ENGINE, "seed = request.seed + sample", "seed = request.seed", OF_ENGINE),
    (CALLS, "if in_thought and place == 0:", "if False:", OF_CALLS),
    (TOOLS, " and name not in NO_TOOLS", "", OF_TOOLS),
    (WORKER, '                answer["done"] = "done"', "                pass", OF_PROCESSES),
    (WORKER, "if scale < 1:", "if False:", OF_PROCESSES),
    (ROWS, "kept_back[name] = repeated", "fields[name] = value", OF_PROCESSES),
    (PROCESSES, "kill_all(lambda: [*descendants(pid), pid])", "pass", OF_PROCESSES),
    (EPISODES, '"length" if ending in EPISODE_LIMITS else "stop"', '"stop"', OF_EPISODES),
    (
        EPISODES,
        "hash64(first.seed, first.num_turns) >> 1 if first.num_turns else first.seed",
        "first.seed",
        OF_EPISODES,
    ),
    (EPISODES, "segment.num_tokens + e.params.max_new_tokens >", "segment.num_tokens >", OF_EPISODES),
    (EPISODES, "    if held + len(images) > limits.images:", "    if False:", OF_EPISODES),
    (TURNS, "if encoded.prompt_ids[:1] != (last_id,):", "if True:", OF_TURNS),
    (TURNS, "[self.control.guard(text) for text in", "[text for text in", OF_TURNS),
    (INDEX, "B * length / mean", "B", OF_INDEX),
    (INDEX, "and index.sha256 == sha256_of(table)", "and True", OF_INDEX),
    (INDEX, "        if rare:", "        if True:", OF_INDEX),
    (INDEX, "if one.text.strip() and key not in seen:", "if one.text.strip():", OF_INDEX),
    (ENGINES, 'if status == 402 or ("credit" in words.lower() and', "if status == 402 or (False and", OF_ENGINES),
    (ENGINES, 'and not answer.get("results") and silent', "and silent", OF_ENGINES),
    (ENGINES, "if len(last) >= ATTEMPTS:", "if True:", OF_ENGINES),
    (RESULTS, "place + self._interval", "place", OF_ENGINES),
]


if __name__ == "__main__":
    main(MUTANTS, __doc__)
