#!/bin/bash
# GPU tests, memory checks and kernel benchmarks on a machine that has only this checkout and a Python with torch.
#
#     OUT=folder tests/gpu/on_device.sh [tests] [prefill] [plans] [memcheck] [racecheck] [bench]
#
# Every part has its own time limit and log in $OUT, so that one failure hides nothing.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-/tmp/replayssm-gpu}
site=$(mktemp -d)
mkdir -p "$OUT" "$site/replayssm" /tmp/replayssm-kernels
for package in plugins builders runtime scripts; do ln -s "$PWD/$package" "$site/replayssm/$package"; done
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 REPLAYSSM_RESULTS_DIR="$OUT"
export REPLAYSSM_CACHE_DIR=/tmp/replayssm-kernels

part() {  # name, seconds, command...
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "== $name: rc $? after $((SECONDS - begin)) s"
}

memory_tool() {  # cuda-bindings looks up driver symbols that may be absent, which is no error of ours
    local SANITIZER=
    if [ "$1" = memcheck ]; then SANITIZER="--report-api-errors no"; fi
    part "$1" "${LIMIT:-100}" compute-sanitizer --tool "$1" $SANITIZER --error-exitcode 9 python3 tests/gpu/memcheck.py
    tail -n 4 "$OUT/$1.log"
}

for wanted in "$@"; do
    case $wanted in
    tests)
        PYTHONPATH="$PYTHONPATH:tests/gpu" part tests "${LIMIT:-110}" python3 -m pytest tests/plugins/test_kernels_gpu.py \
            -v --tb=short -p no:cacheprovider -p instant_report ${PYTEST:-}
        grep -E "FAILED|ERROR|passed|failed" "$OUT/tests.log" | tail -n 40
        ;;
    plans) # the plugins' PTX as aot_impl returns it, and the runtime for plans around it
        PYTHONPATH="$PYTHONPATH:tests/gpu" part plans "${LIMIT:-110}" python3 -m pytest \
            tests/plugins/test_tensorrt_ops_gpu.py tests/runtime/test_plans_gpu.py \
            -v --tb=short -p no:cacheprovider -p instant_report ${PYTEST:-}
        grep -E "FAILED|ERROR|passed|failed" "$OUT/plans.log" | tail -n 40
        ;;
    prefill)
        PYTHONPATH="$PYTHONPATH:tests/gpu" part prefill "${LIMIT:-110}" python3 -m pytest \
            tests/plugins/test_prefill_kernels_gpu.py -v --tb=short -p no:cacheprovider -p instant_report ${PYTEST:-}
        grep -E "FAILED|ERROR|passed|failed" "$OUT/prefill.log" | tail -n 40
        part bench_prefill "${LIMIT:-110}" python3 benchmarks/bench_prefill.py ${BENCH:-}
        cat "$OUT/bench_prefill.log"
        ;;
    memcheck | racecheck | initcheck) memory_tool "$wanted" ;;
    bench)
        for operator in mamba2 gdn; do
            part "bench_$operator" "${LIMIT:-110}" python3 "benchmarks/bench_${operator}_window.py" ${BENCH:-}
            cat "$OUT/bench_$operator.log"
        done
        ;;
    *) echo "unknown part $wanted" ;;
    esac
done
