"""Before a run: recipe, rows, prompts, machine and memory are checked, and open keys get their values.

`check.py` is `vlmrl check`, `auto_choice.py` fills the keys that a recipe leaves open, `model.py` makes model, encoder
and engine, `memory_plan.py` says what fits. Begin with `check.py`.
"""
