# Sourced by the other scripts: makes the environment in ./.venv and keeps it current.
# Needs bash, git and Python >= 3.11: the first of python3, python3.13, … that is new enough, or PYTHON=….
#
#   setup_venv EXTRA…     .venv with bubblescope (editable), the extras and torch; quick when nothing changed
#   setup_frameworks      .venv-frameworks: bubblescope beside Megatron-Core, DeepSpeed and torchtitan
#   setup_tools           .venv-tools: bubblescope beside TensorBoard, torch-tb-profiler and traceinsight
#   setup_chromium        Debian's chromium for the browser tests, where it is missing and can be installed
#   setup_prometheus      the same for prometheus and promtool, which the dashboards' tests ask

set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$REPO/.venv"
FRAMEWORKS="$REPO/.venv-frameworks"
TOOLS="$REPO/.venv-tools"
TORCH_PIN="torch==2.13.0"
TOOL_PINS=("tensorboard==2.21.0" "torch-tb-profiler==0.4.3" "traceinsight==0.6.1" "setuptools<81")
FRAMEWORK_PINS=("megatron-core==0.16.1" "deepspeed==0.19.8" "torchtitan==0.3.0" "triton" "lightning" "transformers"
  "accelerate" "mlflow-skinny")
export PIP_DISABLE_PIP_VERSION_CHECK=1
cd "$REPO"

say() { printf '== %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: no Python >= 3.11 found" >&2
  echo "hint: install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
  return 2
}

has_nvidia_gpu() { nvidia-smi -L >/dev/null 2>&1; }

# What the environment depends on. A change of any of it, and only that, sets it up again.
fingerprint() {
  { cat pyproject.toml scripts/_setup.sh bubblescope/_version.py
    "$1" -VV
    echo "$REPO" "$2" "$(has_nvidia_gpu && echo gpu || echo cpu)"
  } | git hash-object --stdin
}

install_torch() {
  "$VENV/bin/python" -c 'import torch' 2>/dev/null && return
  if has_nvidia_gpu; then
    say "installing torch (CUDA build: this machine has an NVIDIA GPU)"
    "$VENV/bin/pip" install --quiet torch
    return
  fi
  say "installing $TORCH_PIN (CPU build)"
  if [[ $(uname -s) == Linux ]]; then
    # Only this index has CPU builds for Linux; where it is out of reach, the plain pin below still works.
    "$VENV/bin/pip" install --quiet --no-deps --retries 0 --timeout 15 \
      --index-url https://download.pytorch.org/whl/cpu "$TORCH_PIN" >/dev/null 2>&1 || true
  fi
  "$VENV/bin/pip" install --quiet "$TORCH_PIN"
}

setup_venv() {
  local extras python stamp want
  extras=$(IFS=,; echo "$*")
  python=$(find_python)
  stamp="$VENV/.setup-${extras:-none}"
  want=$(fingerprint "$python" "$extras")
  if [[ -x $VENV/bin/python && $(cat "$stamp" 2>/dev/null) == "$want" ]]; then
    return
  fi
  say "setting up .venv with $("$python" -V)${extras:+, extras: $extras}"
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$VENV" || {
      echo "hint: on Debian and Ubuntu the venv module is a package of its own: apt-get install python3-venv" >&2
      return 2
    }
  fi
  install_torch
  "$VENV/bin/pip" install --quiet --editable ".${extras:+[$extras]}"
  printf '%s\n' "$want" >"$stamp"
}

# An environment of its own: these frameworks pin packages that nothing else here should be held to.
setup_frameworks() {
  local python want stamp="$FRAMEWORKS/.setup"
  python=$(find_python)
  want=$(fingerprint "$python" "${FRAMEWORK_PINS[*]}")
  if [[ -x $FRAMEWORKS/bin/python && $(cat "$stamp" 2>/dev/null) == "$want" ]]; then
    return
  fi
  say "setting up .venv-frameworks: ${FRAMEWORK_PINS[*]}"
  if ! "$FRAMEWORKS/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$FRAMEWORKS"
  fi
  VENV="$FRAMEWORKS" install_torch
  # DeepSpeed comes as source, whose build asks for these.
  "$FRAMEWORKS/bin/pip" install --quiet setuptools wheel packaging ninja
  "$FRAMEWORKS/bin/pip" install --quiet "$TORCH_PIN" "${FRAMEWORK_PINS[@]}"
  "$FRAMEWORKS/bin/pip" install --quiet --editable .
  printf '%s\n' "$want" >"$stamp"
}

# The tools that others look at traces with, for comparison and for the test that TensorBoard opens our folders.
setup_tools() {
  local python want stamp="$TOOLS/.setup"
  python=$(find_python)
  want=$(fingerprint "$python" "${TOOL_PINS[*]}")
  if [[ -x $TOOLS/bin/python && $(cat "$stamp" 2>/dev/null) == "$want" ]]; then
    return
  fi
  say "setting up .venv-tools: ${TOOL_PINS[*]}"
  if ! "$TOOLS/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$TOOLS"
  fi
  "$TOOLS/bin/pip" install --quiet "${TOOL_PINS[@]}"
  "$TOOLS/bin/pip" install --quiet --editable .
  printf '%s\n' "$want" >"$stamp"
}

find_chromium() {
  local name
  for name in "${BUBBLESCOPE_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    [[ -n $name ]] && command -v "$name" && return
  done
  return 1
}

setup_chromium() {
  find_chromium >/dev/null && return
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing chromium for the browser tests"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
      </dev/null >/dev/null || true
  fi
  find_chromium >/dev/null && return
  echo "warning: no chromium, so the browser tests will fail" >&2
  echo "hint: install it, or name it: BUBBLESCOPE_CHROMIUM=/path/to/chrome $0" >&2
}

has_prometheus() { command -v prometheus >/dev/null && command -v promtool >/dev/null; }

setup_prometheus() {
  has_prometheus && return
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing prometheus for the dashboards' tests"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus; } \
      </dev/null >/dev/null || true
  fi
  has_prometheus && return
  echo "warning: no prometheus and promtool, so the dashboards' tests will fail" >&2
  echo "hint: install them: apt-get install prometheus, or https://prometheus.io/download" >&2
}
