"""Recipes: TOML files, their keys, rules and origins.

`schema.py` declares every key with its text, `load.py` makes a valid recipe of files and `--set`, `rules/` has the
rules that join several keys, `imports/` reads the settings of other trainers. Begin with `schema.py`.
"""
