"""Secrets are hidden in every text that leaves the process, before the text is cut.

`redact.py` has the functions that other code calls (`redact_text`, `redact_said`, `excerpt`); `secrets.py` recognises
values of the environment, names of secrets and shapes of tokens. Begin with `redact.py`.
"""
