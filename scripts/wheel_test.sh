#!/usr/bin/env bash
# Installs the newest wheel of dist/ for .venv's Python into a new venv, and runs examples/quick_start.py with it in
# another folder: no source of bagua, no compiler, cargo or cmake can be found there.
#
# torch and numpy come from .venv, which already has them; the check of bagua.__file__ shows that bagua does not.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=$(.venv/bin/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheel=$(ls -t dist/bagua-*-"$tag-$tag"-manylinux_*.whl | head -n 1)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "$wheel"
paths='import sysconfig; print(sysconfig.get_path("platlib"))'
.venv/bin/python -c "$paths" >"$("$folder/venv/bin/python" -c "$paths")/torch_of_venv.pth"
cp examples/quick_start.py "$folder"

cd "$folder"
without_compilers=(env -i HOME="$folder" PATH="$folder/venv/bin")
"${without_compilers[@]}" python -c "import bagua; assert bagua.__file__.startswith('$folder/venv/'), bagua.__file__"
"${without_compilers[@]}" bagua run --nproc-per-node 2 quick_start.py
echo "wheel-test: $(basename "$wheel") ran quick_start.py on two ranks"
