"""Write what the built-in rewards make of the inputs in reward_cases.py: `python tests/golden/record_rewards.py`.

Refused where a recorded score would change under the same version: whoever changes the behaviour of a reward raises its
`version` where it is declared (`vlmrl/rewards/__init__.py`) and runs this again. New inputs and arguments are welcome.
"""

from __future__ import annotations

import sys

from reward_cases import CASES
from reward_scores import FOLDER, as_text, golden, path_of, recorded, scored

from vlmrl.tasks.builtin_rewards import REWARDS


def changed(name: str) -> bool:
    """Whether a reward scores what its file has otherwise, although the version is that of the file."""
    old = recorded(name)
    if old is None or old["version"] != REWARDS[name].version:
        return False
    return any(repr(scored(name, run["args"], old["inputs"])) != repr(run) for run in old["runs"])


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    refused = [name for name in CASES if changed(name)]
    for name, (all_args, inputs) in CASES.items():
        if name not in refused:
            path_of(name).write_text(as_text(golden(name, all_args, inputs)), "utf-8")
    for name in refused:
        print(f"`{name}` scores otherwise than version {REWARDS[name].version} did: raise its `version` first")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
