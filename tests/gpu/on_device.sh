#!/bin/bash
# GPU tests, memory checks and kernel benchmarks on a machine that has only this checkout and a Python with torch.
#
#     OUT=folder tests/gpu/on_device.sh [PART...]
#
# Tests: tests (window kernels), prefill, readout, plans (the plugins' PTX as aot_impl returns it, and the runtime around
# it), sessions (whole generations, captured steps, attention), ranks (two GPUs), trtllm. Others: memcheck, racecheck, initcheck, bench
# (window kernels and peers), bench_prefill. $PYTEST are options of pytest (-n 8, which needs pytest-xdist; empty for one
# process), $BENCH of benchmarks; $LIMIT is the seconds of a part. Parts run one after the other, because tests side by side starve each other and disturb timings;
# each has its own log in $OUT, so that one failure hides nothing.
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
    # Checking our kernels alone saves most of the time; initcheck must see who else wrote what they read.
    if [ "$1" != initcheck ]; then SANITIZER="--kernel-regex kns=(mamba2|gdn|causal|attention|weight|route|sum_splits|dequantize|quantize|combine|copy_rows|norm|activation|argmax|step_|count_experts|place_pairs)"; fi
    if [ "$1" = memcheck ]; then SANITIZER="$SANITIZER --report-api-errors no"; fi
    part "$1" "${LIMIT:-100}" compute-sanitizer --tool "$1" $SANITIZER --error-exitcode 9 python3 tests/gpu/memcheck.py
    tail -n 4 "$OUT/$1.log"
}

run_tests() {  # name, files...
    local name=$1
    shift
    PYTHONPATH="$PYTHONPATH:tests/gpu" part "$name" "${LIMIT:-110}" python3 -m pytest "$@" -v --tb=short \
        -p no:cacheprovider -p instant_report --import-mode=importlib ${PYTEST--n 8}
    grep -E "FAILED|ERROR|passed|failed" "$OUT/$name.log" | tail -n 40
}

benchmark() {  # file without .py
    part "$1" "${LIMIT:-110}" python3 "benchmarks/$1.py" ${BENCH:-}
    cat "$OUT/$1.log"
}

for wanted in "$@"; do
    case $wanted in
    tests) run_tests tests tests/plugins/test_kernels_gpu.py ;;
    prefill) run_tests prefill tests/plugins/test_prefill_kernels_gpu.py ;;
    readout) run_tests readout tests/plugins/test_readout_kernels_gpu.py ;;
    plans) run_tests plans tests/plugins/test_tensorrt_ops_gpu.py tests/runtime/test_plans_gpu.py ;;
    sessions) run_tests sessions tests/runtime/test_{session,executor}_cuda.py tests/runtime/test_graph_memsets.py \
        tests/benchmarks/test_graph_gaps_gpu.py ;;
    ranks) run_tests ranks tests/runtime/test_parallel_session_gpu.py ;;
    trtllm) run_tests trtllm tests/integrations/test_trtllm_gpu.py ;;
    memcheck | racecheck | initcheck) memory_tool "$wanted" ;;
    bench) benchmark bench_mamba2_window && benchmark bench_gdn_window ;;
    bench_prefill) benchmark bench_prefill ;;
    *) echo "unknown part $wanted" ;;
    esac
done
