#!/bin/sh
# Load an exported draft with mlx-dspark on the CPU and compare its accepted length with the verifier's.
#   examples/engines/mlx.sh DRAFT TARGET PROMPTS.jsonl [options of compare_mlx.py]
# Makes a throw-away environment (1.1 GB) in $MLX_ENVIRONMENT, or beside the system's temporary files.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
environment=${MLX_ENVIRONMENT:-${TMPDIR:-/tmp}/dspark-mlx}
if [ ! -x "$environment/bin/python" ]; then
    "${PYTHON:-python3.12}" -m venv "$environment"
    "$environment/bin/pip" install --quiet 'mlx-dspark==0.20.3' 'mlx[cpu]'
fi
draft=$1 target=$2 prompts=$3
shift 3
# No network: everything is in the folders.
HF_HUB_OFFLINE=1 exec "$environment/bin/python" "$here/compare_mlx.py" \
    --draft "$draft" --target "$target" --prompts "$prompts" "$@"
