#!/usr/bin/env bash
# Installs the libraries of examples/ecosystem in a separate virtual environment.
#
#   tools/ecosystem.sh VENV TARGET
#
# TARGET gets the libraries, and takes torch, Backplane and everything else that is installed there from VENV, which
# stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1 target=$2

[ -x "$target/bin/python" ] || "$venv/bin/python" -m venv "$target"
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# addsitedir, because VENV may have packages that are found by its .pth files.
echo "import site; site.addsitedir('$(packages "$venv")')" >"$(packages "$target")/torch-and-backplane.pth"
"$venv/bin/python" -m pip freeze | grep '^torch==' >"$target/constraints.txt"
"$target/bin/python" -m pip install -q --disable-pip-version-check --only-binary :all: -c "$target/constraints.txt" \
  -r examples/ecosystem/requirements.txt
"$target/bin/python" tools/cuda_placeholders.py "$target/cuda-placeholders"
