"""Who may import whom: the levels of the house, read from the source, and what may be loaded without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vlmrl"
LEVELS = {
    "errors": 0, "untrusted": 0, "key_facts": 0, "metric": 0, "owned_folder": 0, "process": 0, "redaction": 0,
    "types": 0,
    "__init__": 1, "algo": 1, "store": 1, "workers": 1,
    "rewards": 2, "svg": 2, "sandbox": 2,
    "recipe": 3, "environments": 3, "browser": 3,
    "model": 4, "dist": 4, "services": 4,
    "data": 5, "search": 5,
    "tasks": 6, "rollout": 6, "checkpoint": 6, "loggers": 6,
    "reward_check": 7, "setup": 7,
    "evaluate": 8, "diagnose": 8,
    "train": 9, "report": 9,
    "launch": 10, "demo": 10,
    "cli": 11,
    "__main__": 12,
}  # fmt: skip
"""Top-level name under vlmrl/ -> level. Imports go downward only; packages of one level do not import each other."""

LOWEST = "redaction"
"""Package that imports no other one, so that all, the rest of level 0 too, may hide secrets before they cut a text."""

FENCES = {
    "typer": ("cli/",),
    "rich": ("cli/",),
    "vllm": ("rollout/vllm/engine.py", "rollout/vllm/worker.py", "rollout/vllm/settings.py"),
    "torch": (
        "model/",
        "algo/losses.py",
        "algo/divergence.py",
        "data/encode.py",
        "dist/",
        "rollout/",
        "checkpoint/",
        "train/",
        "launch/ranks.py",
        "setup/",
        "evaluate/",
    ),
    "torch.distributed": ("dist/", "checkpoint/io.py", "rollout/weight_sync.py", "launch/ranks.py"),
    "peft": ("model/lora.py",),
    "google": ("services/providers.py",),
    "httpx": ("services/client.py",),
    "bitsandbytes": ("train/learner.py",),
    "wandb": ("loggers/builtin.py",),
    "trackio": ("loggers/builtin.py",),
    "tensorboard": ("loggers/builtin.py",),
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
}
"""Module -> files (or folders) that alone may import it, inside functions too."""

TYPES_FROM_ABOVE = {
    "vlmrl": "the package shows its public names to a type checker, and imports each when it is first used",
    "vlmrl.model.packing": "it packs encoded prompts, but model/ runs without data/",
}
"""Module -> reason why it imports from its own level or above for types alone. No circle is excused."""

FORBIDDEN_CALLS = ("eval", "exec")


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def package_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def imports(path: Path, for_types: bool = False) -> list[tuple[int, str]]:
    """(line, module) of every import, wherever it is; `for_types`: also those that only a type checker sees. `from a
    import b` gives both a and a.b.
    """
    found: list[tuple[int, str]] = []

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            is_typing = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            if isinstance(child, ast.If) and is_typing and not for_types:
                for other in child.orelse:
                    walk(other)
                continue
            if isinstance(child, ast.Import):
                found.extend((child.lineno, a.name) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name_of(path)}:{child.lineno}: relative import"
                found.append((child.lineno, child.module or ""))
                found.extend((child.lineno, f"{child.module}.{a.name}") for a in child.names)
            walk(child)

    walk(ast.parse(path.read_text("utf-8")))
    return found


def test_every_module_has_a_level():
    assert {package_of(p) for p in files()} <= LEVELS.keys()


def upward(for_types: bool) -> dict[str, list[str]]:
    """Module -> its imports that do not go downward."""
    wrong: dict[str, list[str]] = {}
    for path in files():
        here = package_of(path)
        for line, module in imports(path, for_types):
            parts = module.split(".")
            if parts[0] != "vlmrl" or len(parts) < 2 or parts[1] == "__version__":
                continue
            there = parts[1]
            assert there in LEVELS, f"{name_of(path)}:{line} imports {module}"
            below = LEVELS[there] < LEVELS[here] or there == LOWEST
            if there == here or (below and here != LOWEST):
                continue
            text = f"{name_of(path)}:{line} imports {module} (level {LEVELS[here]} -> {LEVELS[there]})"
            wrong.setdefault(module_of(path), []).append(text)
    return wrong


def test_imports_go_downward_only():
    assert upward(for_types=False) == {}


def test_imports_for_types_alone_go_downward_too_but_for_those_with_a_reason():
    assert upward(for_types=True).keys() == TYPES_FROM_ABOVE.keys(), upward(for_types=True)


def test_algo_and_model_import_only_each_other_and_what_has_no_level():
    """They run with torch and transformers alone; `test_algo_alone.py` runs them so."""
    alone = "algo/", "model/"
    within = re.compile(r"vlmrl(\.(algo|model)\b.*)?")
    lowest = {name for name, level in LEVELS.items() if level == 0}
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in files()
        if name_of(path).startswith(alone)
        for line, module in imports(path)
        if module.split(".")[0] == "vlmrl" and not within.fullmatch(module) and module.split(".")[1] not in lowest
    ]
    assert not wrong, "\n".join(wrong)


def module_of(path: Path) -> str:
    return ".".join(("vlmrl", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def import_graph(paths: list[Path], for_types: bool = False) -> dict[str, set[str]]:
    """Module -> modules of vlmrl that it imports, inside functions too; `for_types`: and for a type checker."""
    known = {module_of(path) for path in paths}
    graph: dict[str, set[str]] = {}
    for path in paths:
        lines: dict[int, list[str]] = {}
        for line, name in imports(path, for_types):
            lines.setdefault(line, []).append(name)
        targets: set[str] = set()
        # `from a import b, c` is found as a, a.b, a.c. Where all of these are modules, a itself is not meant.
        for first, *names in lines.values():
            targets |= {*names} if names and known.issuperset(names) else {first, *names}
        graph[module_of(path)] = targets & known
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or by way of others: the strong components."""

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for module in graph[waiting.pop()] - seen:
                seen.add(module)
                waiting.append(module)
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {frozenset(other for other in reach[m] if m in reach[other]) for m in graph if m in reach[m]}
    return sorted(sorted(group) for group in groups)


def test_no_modules_import_each_other_in_a_circle():
    """A type says too which file knows which: a circle that only a type checker sees is one."""
    assert circles(import_graph(files(), for_types=True)) == []


def test_a_circle_is_found_across_modules():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}) == [["b", "c"], ["e"]]


@pytest.mark.parametrize("module", FENCES)
def test_fenced_modules_are_imported_behind_their_fence_only(module: str):
    wrong = [
        f"{name_of(path)}:{line} imports {found}"
        for path in files()
        for line, found in imports(path)
        if (found == module or found.startswith(f"{module}."))
        and not name_of(path).startswith(FENCES[module] or ("\0",))
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_cli_modules_load_nothing_heavy_at_their_top():
    light = {"vlmrl.errors", "vlmrl.types", "vlmrl.untrusted", "vlmrl.process", "vlmrl.cli"}
    allowed = {"typer", "typer.core", "vlmrl", *light}
    wrong = []
    for path in sorted((PACKAGE / "cli").rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                if name not in allowed and top not in sys.stdlib_module_names and not name.startswith("vlmrl.cli."):
                    wrong.append(f"{name_of(path)}:{node.lineno} {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_evaluated_and_nothing_unpickled():
    wrong = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                wrong.append(f"{name_of(path)}:{node.lineno} calls {node.func.id}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save"):
                wrong.append(f"{name_of(path)}:{node.lineno} calls {ast.unparse(node.func)}")
    # A user's own reward file is code that the user asks for: compiled in its worker, nowhere else. Code that a model
    # wrote runs in the sandbox, after its process is confined.
    assert [w for w in wrong if not w.startswith(("rewards/", "sandbox/zygote.py"))] == []


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring, which the formatter and the arguments make long."""
    first = function.body[1:2] if ast.get_docstring(function) is not None else function.body[:1]
    return function.end_lineno - first[0].lineno + 1 if first and function.end_lineno else 0


def test_files_and_functions_stay_small():
    long_files = {name_of(p): n for p in files() if (n := len(p.read_text("utf-8").splitlines())) > 700}
    long_functions = [
        f"{name_of(p)}:{node.lineno} {node.name}: {body_lines(node)} lines"
        for p in files()
        for node in ast.walk(ast.parse(p.read_text("utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and body_lines(node) > 75
    ]
    assert not long_files and not long_functions, f"{long_files} {long_functions}"


def test_no_file_is_called_utils_common_or_helpers():
    bad = {"utils", "common", "helpers", "helper", "misc", "util"}
    everything = [*files(), *Path(__file__).parent.rglob("*.py")]
    assert not [str(p) for p in everything if p.stem in bad]


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "typer", "rich", "datasets", "vllm"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
import importlib, pkgutil
import vlmrl
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
"""

LIGHT = [
    "vlmrl.errors",
    "vlmrl.types",
    "vlmrl.untrusted",
    "vlmrl.algo.advantages",
    "vlmrl.algo.algorithms",
    "vlmrl.redaction",
    "vlmrl.store",
    "vlmrl.rewards",
    "vlmrl.environments",
    "vlmrl.recipe",
    "vlmrl.services",
    "vlmrl.tasks",
    "vlmrl.loggers",
    "vlmrl.reward_check",
    *(
        f"vlmrl.setup.{name}"
        for name in ("catalogs", "check", "rows", "prompts", "machine", "memory_plan", "memory_sizes")
    ),
    *(f"vlmrl.setup.{name}" for name in ("memory_fit", "auto_choice", "sources")),
    *(f"vlmrl.evaluate.{name}" for name in ("metrics", "estimates", "significance", "compare", "records")),
    "vlmrl.diagnose",
    "vlmrl.report",
]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def test_what_needs_no_torch_is_imported_without_it():
    done = run_python(WITHOUT_TORCH, *LIGHT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_check_above_can_fail():
    done = run_python(WITHOUT_TORCH, "vlmrl.algo.losses")
    assert done.returncode != 0 and "torch was imported" in done.stderr


def test_the_command_line_starts_without_anything_heavy():
    heavy = "torch", "transformers", "numpy", "pydantic", "rich", "datasets", "pyarrow", "jinja2", "PIL"
    done = run_python(f"import sys, vlmrl.cli.app; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]


def test_no_two_test_files_share_a_name():
    """pytest imports them by their names alone and refuses the second, which only a run of all of them would show."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
