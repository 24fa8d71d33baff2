#!/usr/bin/env bash
# Installs everything that `make demo` and `make test` need, and builds Backplane in place.
#
#   tools/setup.sh PYTHON VENV WANTED DEFAULT [torch|gpu]
#
# PYTHON creates the virtual environment VENV if it does not exist. WANTED is the torch to install; if it is empty, an
# installed supported torch is kept, or else DEFAULT is installed. With `torch`, nothing is built (`make dist`). On Debian
# and derivatives, missing system packages are installed if this runs as root or sudo needs no password; otherwise the
# script names them.
#
# With `gpu` (`make gpu`), VENV also has the packages of PYTHON, its torch among them, and no torch is installed. Of the
# others, only those of gpu-requirements.txt that are missing are installed. If there are wheels in wheels/, they come
# from there, without a network, and system packages are not installed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1 venv=$2 wanted=$3 default=$4 last=${5:-build}

say() { printf '== %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

offline=()
if [ "$last" = gpu ] && compgen -G 'wheels/*.whl' >/dev/null; then
  offline=(--no-index --find-links wheels)
fi

# Prints the Debian names of missing packages.
missing_packages() {
  if ! command -v "$python" >/dev/null; then
    echo python3 python3-venv python3-dev
  else
    [ "$last" = gpu ] || "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    "$python" - <<'EOT' || echo python3-dev
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
EOT
  fi
  [ -n "${CXX:-}" ] || command -v g++ >/dev/null || echo g++
}

install_packages() {
  [ ${#offline[@]} -eq 0 ] || return 1
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || return 1
    as_root=(sudo -n)
  fi
  command -v apt-get >/dev/null || return 1
  say "installing with apt-get: $*"
  "${as_root[@]}" apt-get update -q &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
}

mapfile -t missing < <(missing_packages | tr ' ' '\n')
if [ ${#missing[@]} -gt 0 ]; then
  install_packages "${missing[@]}" ||
    die "missing: ${missing[*]}" "install them as root, then run this again:  apt-get install ${missing[*]}"
  mapfile -t missing < <(missing_packages | tr ' ' '\n')
  [ ${#missing[@]} -eq 0 ] || die "still missing for $(command -v "$python" || echo "$python"): ${missing[*]}" \
    "if this is not the system's Python, install its headers and venv module, or use another: make PYTHON=…"
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  die "Backplane needs Python 3.10 or later, and $python is $("$python" -V 2>&1); use another: make PYTHON=…"

if [ ! -x "$venv/bin/python" ]; then
  say "creating $venv"
  if [ "$last" = gpu ]; then # which can do without ensurepip
    "$python" -m venv --without-pip "$venv"
  else
    "$python" -m venv "$venv"
  fi
fi
if [ "$last" = gpu ]; then
  pip=("$python" -m pip --python "$venv/bin/python" --disable-pip-version-check)
  "${pip[@]}" --version >/dev/null || die "$python has no pip 22.3 or later: $python -m ensurepip, or use another Python"
  "$python" -c 'import sys; print(*(one for one in sys.path if one.endswith("-packages")), sep="\n")' \
    > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages-of-python.pth"
  say "installing what $python lacks"
  "${pip[@]}" install -q "${offline[@]}" -r tools/gpu-requirements.txt
  "$venv/bin/python" setup.py --name >/dev/null || die "$python needs a supported torch: install one, or make PYTHON=…"
  say "building Backplane (minutes)"
  PATH="$(realpath "$venv")/bin:$(dirname "$(command -v "$python")"):$PATH" # for ninja
  "${pip[@]}" install -q --no-index --no-build-isolation --no-deps -e .
  say "ready"
  exit 0
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# PoCL, OpenCL on the CPU, if there is no OpenCL platform. It is optional: without it, OpenCL tests are skipped.
if ! compgen -G "/etc/OpenCL/vendors/*.icd" >/dev/null; then
  install_packages pocl-opencl-icd || say "no OpenCL platform; to install one:  apt-get install pocl-opencl-icd"
fi

# CLBlast, a candidate for matrix products on OpenCL devices. It is optional: without it, its tests are skipped.
if ! /sbin/ldconfig -p | grep -q 'libclblast\.so\.1'; then
  install_packages libclblast1 || say "no CLBlast; to install it:  apt-get install libclblast1"
fi

"${pip[@]}" install -q "setuptools>=77" ninja wheel
if [ -n "$wanted" ]; then
  say "installing $wanted"
  "${pip[@]}" install "$wanted"
elif ! "$venv/bin/python" setup.py --name >/dev/null 2>&1; then # setup.py refuses a missing or unsupported torch
  say "installing $default"
  "${pip[@]}" install "$default"
fi

[ "$last" = build ] || exit 0
say "building Backplane (a few minutes the first time; later builds are incremental)"
"${pip[@]}" install -q --no-build-isolation -e ".[test]"
say "ready"
