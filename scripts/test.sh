#!/usr/bin/env bash
# Runs all tests; creates the environment first if it is missing. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
ensure_environment dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV/bin/python" -m pytest --numprocesses auto --dist loadfile "$@"
