"""One step of GRPO, from a table of one's own to the gradient, with the pieces that `vlmrl train` is made of.

    vlmrl init count && vlmrl demo --model-only tiny --data count/recipe.toml
    python scripts/one_step.py count/recipe.toml --set model.path=tiny

Read `main` from top to bottom: each paragraph takes what the one before it returned, and prints what it hands on. One
process, the built-in engine, an algorithm without critic and reference. `vlmrl train` adds to this: checkpoints,
validation, logs, several processes, other engines, and a second try when memory runs out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from vlmrl.algo.algorithms import algorithm_of
from vlmrl.algo.credit import add_advantages
from vlmrl.model.load import load_model, load_processor
from vlmrl.model.packing import PromptTokens, make_row
from vlmrl.recipe.load import load_recipe
from vlmrl.rollout.sample import encode_prompt, sample_rollouts, score_rollouts
from vlmrl.setup.auto_choice import fill_for_run
from vlmrl.setup.model import make_encoder, make_generator, make_policy, sampling_params
from vlmrl.setup.sources import make_scorer, open_training
from vlmrl.tasks.source import PromptStream
from vlmrl.train.learner import Optimizer
from vlmrl.train.step_batch import step_batch
from vlmrl.train.update import add_gradients, objective_of


def main() -> None:
    """Do the step and print what each part hands on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipe", help="TOML file of a run of reinforcement learning")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe key")
    parser.add_argument("--image", type=Path, help="write the first image, as the encoder gets it, to this file")
    parser.add_argument("--json", action="store_true", help="print the metrics of the update as one JSON object")
    options = parser.parse_args()

    # A recipe is a file of tables. Keys that it leaves open are chosen here, for this machine.
    loaded, _ = fill_for_run(load_recipe(options.recipe, overrides=options.set, kind="rl"), Path("runs"))
    recipe, algorithm = loaded.recipe, algorithm_of(loaded.recipe.algo)
    tell("recipe", f"{recipe.model.path}, {recipe.algo.name}, {recipe.rollout.prompts_per_step} prompts a step")
    assert not algorithm.needs_critic and not algorithm.kl_coef, "this script has no critic and no reference"

    # A model of transformers becomes a policy: it runs packed rows and returns log-probs of their trained tokens.
    torch.manual_seed(recipe.train.seed)
    sources = open_training(recipe)
    model, processor = load_model(recipe.model), load_processor(recipe.model)
    policy = make_policy(recipe.model, model, processor, recipe.rollout.temperature)
    parameters = sum(p.numel() for p in model.parameters())
    tell("policy", f"{type(model).__name__}, {parameters:,} parameters, {policy.device}, prompts {policy.sharing}")

    # The stream draws rows from all tables, in their shares: (source, row, how often the row was drawn before).
    stream = PromptStream([len(s.rows) for s in sources], [s.share for s in sources], recipe.train.seed)
    drawn = [(sources[s], sources[s].rows[r], n) for s, r, n in stream.next(recipe.rollout.prompts_per_step)]
    source, row, _ = drawn[0]
    tell("row", f"{row.prompt_id} of {source.name}: {dict(row.truth)}, {len(row.media)} image(s)")
    if options.image and row.media:
        source.dataset.image(row.media[0]).save(options.image)

    # The task's template makes messages of a row, the encoder makes token ids and pixels of the messages.
    encoder = make_encoder(recipe.model, processor)
    prompts = [encode_prompt(*row, encoder, recipe.rollout.max_prompt_tokens) for row in drawn]
    encoded = prompts[0].encoded
    tell("prompt", repr(encoded.text))
    tell("encoded", f"{len(encoded.prompt_ids)} tokens, {encoded.num_image_tokens} of them of images")
    tell("pixels", {name: list(tensor.shape) for name, tensor in encoded.images.items()})

    # The engine samples responses: token ids with their log-probs, and the text.
    rollouts = sample_rollouts(
        make_generator(recipe, policy, encoder, engine="torch"),
        prompts,
        sampling_params(recipe, policy, encoder.tokenizer),
        num_samples=recipe.rollout.samples_per_prompt,
        run_seed=recipe.train.seed,
        version=0,
    )
    sample = rollouts[0].samples[0]
    tell("response", f"{sample.num_sampled_tokens} tokens, ended by {sample.finish}: {sample.text!r}")

    # The reward, in its own process, gives each response named parts and a value. A group has one prompt's samples.
    scorers = {source.name: make_scorer(source, recipe) for source in sources}
    groups = score_rollouts(rollouts, scorers, strict=True)
    for scorer in scorers.values():
        scorer.close()
    tell("scores", [[round(s.score.value, 3) for s in group.samples] for group in groups])
    tell("parts", dict(groups[0].samples[0].score.parts))

    # Scores of a group -> advantages. A group with equal scores teaches nothing.
    weights = {source.name: source.part_weights for source in sources}
    groups = add_advantages(groups, algorithm, max_tokens=recipe.rollout.max_new_tokens, weights=weights)
    tell("advantages", [[round(s.advantage, 3) for s in group.samples] for group in groups])
    tell("dead groups", sum(g.is_dead for g in groups))

    # Trajectories -> packed rows -> log-probs -> loss -> gradient. The prompt of a group is run once.
    batch = step_batch(
        groups,
        lambda index: PromptTokens.of(prompts[index].encoded),
        keep_dead=bool(recipe.algo.entropy_coef) and algorithm.filter == "none",
        count_dead=algorithm.counts_dead,
    )
    optimizer = Optimizer(policy.model, recipe.optim, None, policy.saved_dtypes)
    budget = recipe.train.tokens_per_row
    rows = [make_row(items, policy.device) for items, _ in batch.rows(budget, policy.sharing)]
    tell("packed rows", [f"{len(r.input_ids_N)} tokens, {len(r.target_K)} trained" for r in rows])
    metrics = add_gradients(
        policy,
        optimizer,
        batch,
        objective_of(recipe, algorithm, kl_coef=0.0),
        tokens_per_row=budget,
        max_tokens=recipe.rollout.max_new_tokens,
    )
    metrics["optim/grad_norm"] = optimizer.clip()
    tell("loss", metrics["loss/total"])
    tell("gradient norm", metrics["optim/grad_norm"])
    if options.json:
        print(json.dumps(metrics))


def tell(name: str, value: object) -> None:
    """Print one line."""
    print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
