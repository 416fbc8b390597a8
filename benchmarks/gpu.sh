#!/usr/bin/env bash
# What only an accelerator can show, in under ten minutes: exactness in bfloat16, step times against the memory
# limit, kernels against their references. Needs jax, flax and numpy; nothing is installed.
#
#   benchmarks/gpu.sh [--out DIR] [--json] [--model qwen3-8b]
#   benchmarks/gpu.sh --dry-run        the same code on the CPU, with everything small
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for python in python3 python3.13 python3.12 python3.11 python; do
  if command -v "$python" >/dev/null && "$python" -c 'import sys, jax, flax; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/benchmarks/gpu.py" "$@"
  fi
done
echo "gpu.sh: no Python 3.11 or newer with jax and flax on PATH" >&2
exit 2
