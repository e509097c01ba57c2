#!/usr/bin/env bash
# From the example checkpoints to text: quantize to NVFP4, build engines, generate, compare. Results stay in .quickstart/.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
ensure_environment quantize
exec "$VENV/bin/python" -m replayssm.scripts.quickstart "$@"
