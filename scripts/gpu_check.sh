#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command: tests, kernel and step benchmarks, idle gaps, a serving run, and
# the kernels under compute-sanitizer. It takes tens of minutes; QUICK=1 is for a first look.
#
#     scripts/gpu_check.sh [PART ...]
#
# PARTs, all of them by default:
#     tests kernels step gaps copies serve
#     classes      interactive requests and background work at 90 % load, and the simulation of the same
#     step_time    what streams wait for beside a long prompt, with the gap target and without
#     recovery     streams across the loss of gpu_runner, and what is left of a server that was killed
#     sanitize
#
# Settings, from the environment:
#     PYTHON       the interpreter (default: .venv/bin/python where there is one, else python3)
#     OUT          folder for logs, JSON and summary.md (default: a new temporary folder)
#     QUICK        1: one model, fewer batches and streams, one kernel benchmark, no long tests and none that need no GPU
#     MODELS       folders with a config.json; weights are random (default: the shapes in scripts/data)
#     SERVE_MODELS those to serve (default: the 0.6B shape); STREAMS, REQUESTS: streams at once and requests of each run
#     SERVE_ARGS   more flags for `asyncengine serve`, e.g. "--detokenizer-workers 2"
#     CLASS_MODEL  of classes, step_time and recovery, which share a server where they follow each other (default: the 8B
#                  shape); CLASS_SECONDS: how long each run of mixed requests is to take (default: 60, or 30)
#     RECOVERY_ARGS  more flags for scripts/check_recovery.py, e.g. "--require-equal" where SERVE_ARGS make batches change
#                  no bit
#     KERNELS      scripts of scripts/bench_kernels, by name
#     TEST_JOBS    tests at a time, where pytest-xdist is installed (default: half the cores, at most 8)
#     LIMIT        most seconds of a test run, a benchmark or a model's start (default: 300)
#     DEVICE       cuda, or cpu to see that all but gaps runs (with a small model in MODELS)
#
# Every part runs whatever became of those before it; the exit status is 1 if any failed.
set -uo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
PARTS="tests kernels step gaps copies serve classes step_time recovery sanitize"
OUT=${OUT:-$(mktemp -d)}
DEVICE=${DEVICE:-cuda}
LIMIT=${LIMIT:-300}
CORES=$(nproc)
TEST_JOBS=${TEST_JOBS:-$((CORES < 4 ? 1 : CORES < 16 ? CORES / 2 : 8))}
TEST_ARGS=(-o timeout="$LIMIT" --durations=10)
STEP_ARGS=(--device "$DEVICE")
if [ "${QUICK:-0}" = 1 ]; then
  default_models="scripts/data/qwen3-0.6b"
  default_kernels="norm_rope"
  default_streams="1 256" default_requests="4 500"
  TEST_ARGS+=(-k "not 30-seconds")
  STEP_ARGS+=(--batches 1,64,256 --steps 50)
  GAPS_ARGS=(--batches 1,64 --steps 50)
  COPIES_ARGS=(--batches 64 --steps 50)
  CLASS_SECONDS=${CLASS_SECONDS:-30}
  SANITIZE_ARGS=(memcheck)
else
  default_models="scripts/data/qwen3-0.6b scripts/data/llama-3.1-8b"
  default_kernels="attention attention_layer linear linear_heads norm_rope head sample"
  default_streams="1 256 512" default_requests="4 1000 2000"
  GAPS_ARGS=(--batches 1,64,256)
  COPIES_ARGS=()
  CLASS_SECONDS=${CLASS_SECONDS:-60}
  SANITIZE_ARGS=(memcheck graphs racecheck)
fi
read -ra MODELS <<<"${MODELS:-$default_models}"
read -ra SERVE_MODELS <<<"${SERVE_MODELS:-scripts/data/qwen3-0.6b}"
read -ra STREAMS <<<"${STREAMS:-$default_streams}"
read -ra REQUESTS <<<"${REQUESTS:-$default_requests}"
read -ra SERVE_ARGS <<<"${SERVE_ARGS:-}"
read -ra KERNELS <<<"${KERNELS:-$default_kernels}"
CLASS_MODEL=${CLASS_MODEL:-scripts/data/llama-3.1-8b}
KERNEL_ARGS=()
ENGINE_ARGS=(--max-num-seqs 256 --max-num-batched-tokens 2048 --max-model-len 40960)
CLASS_LENGTHS=conversation
GAP_ARGS=()
SAMPLING_ARGS=()
read -ra RECOVERY_ARGS <<<"${RECOVERY_ARGS:-}"
if [ "$DEVICE" != cuda ]; then
  KERNEL_ARGS=(--smoke)
  STEP_ARGS+=(--batches 1,4 --steps 20 --context 32 --max-num-batched-tokens 64 --kv-cache-tokens 16384)
  STEP_ARGS+=(--max-model-len 1024 --prefill 1x60,4x64,2x512)
  ENGINE_ARGS=(--max-num-seqs 8 --max-num-batched-tokens 64 --max-model-len 1024 --kv-cache-tokens 16384)
  CLASS_LENGTHS=60:20
  GAP_ARGS=(--streams 3 --stream-prompt 16 --stream-tokens 900 --prompt 600)
  RECOVERY_ARGS=(--streams 6 --prompt 30 --tokens 400 --require-equal --tolerance 1e-3 "${RECOVERY_ARGS[@]}")
  SAMPLING_ARGS=(--batch 4 --steps 20 --context 32 --max-model-len 1024 --kv-cache-tokens 16384)
  COPIES_ARGS=(--device cpu --batches 1,4 --steps 20 --pages 1,4 --kv-cache-tokens 8192 --host-gib 0.5)
fi
FAILED=()
SERVER= SERVED=
# of the latest run of requests: each takes the next, so that no server's prefix cache has seen any of its prompts
SEED=0
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

read -ra parts <<<"${*:-$PARTS}"
for part in "${parts[@]}"; do
  if [[ " $PARTS " != *" $part "* ]]; then
    echo "gpu_check.sh has no part $part; it has $PARTS" >&2
    exit 2
  fi
done
if [ "$DEVICE" = cuda ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check.sh needs an NVIDIA GPU, and torch sees none" >&2
  exit 1
fi
mkdir -p "$OUT"
: >"$OUT/parts.tsv"
trap '[ -z "$SERVER" ] || kill "$SERVER" 2>/dev/null' EXIT

# check NAME COMMAND...: runs it for LIMIT seconds at most, its output both here and in $OUT/NAME.log
check() {
  local name=$1 begin=$SECONDS status
  shift
  echo
  echo "==> $name"
  timeout -k 10 "$LIMIT" "$@" 2>&1 | tee "$OUT/$name.log"
  status=${PIPESTATUS[0]}
  case $status in
  0) ended "$name" passed "$begin" ;;
  77) ended "$name" skipped "$begin" ;;
  124) ended "$name" "FAILED: not done after $LIMIT s" "$begin" ;;
  *) ended "$name" "FAILED with $status" "$begin" ;;
  esac
}

# ended NAME HOW BEGIN: for the table at the end
ended() {
  local took=$((SECONDS - $3))
  echo "==> $1: $2, $took s"
  printf '%s\t%s\t%s\n' "$1" "$2" "$took" >>"$OUT/parts.tsv"
  case $2 in FAILED*) FAILED+=("$1") ;; esac
}

tests() {
  local alone=tests/device/test_build_executor.py # it looks at all that is in use of the GPU's memory
  local jobs=()
  if [ "$TEST_JOBS" -gt 1 ] && "$PYTHON" -c 'import xdist' 2>/dev/null; then
    jobs=(-n "$TEST_JOBS")
  fi
  local begin=$SECONDS missing
  missing=$("$PYTHON" -c 'import importlib.util as u
print(*(name for name in ("pytest", "pytest_timeout", "hypothesis") if u.find_spec(name) is None))')
  if [ -n "$missing" ]; then
    ended tests "FAILED: not installed: $missing" "$begin"
    return
  fi
  if ! "$PYTHON" -c 'import pytest_asyncio' 2>/dev/null; then
    echo "without pytest-asyncio, which these tests do not need and whose options are not known then"
    TEST_ARGS+=(-W "ignore:Unknown config option")
  fi
  check tests-gpu-alone "$PYTHON" -m pytest -m gpu "${TEST_ARGS[@]}" "$alone"
  # those that have such tests: others need packages that a GPU machine may lack
  check tests-gpu "$PYTHON" -m pytest -m gpu "${TEST_ARGS[@]}" "${jobs[@]}" --ignore "$alone" \
    tests/device tests/kernels tests/models tests/integration/test_server_on_devices.py
  [ "${QUICK:-0}" = 1 ] && return
  check tests-kernels "$PYTHON" -m pytest -m "not gpu" "${TEST_ARGS[@]}" "${jobs[@]}" tests/kernels
}

kernels() {
  for script in "${KERNELS[@]}"; do
    check "kernels-$script" "$PYTHON" "scripts/bench_kernels/$script.py" "${KERNEL_ARGS[@]}"
  done
}

# a process for each model, so that each finds the whole memory
step() {
  for model in "${MODELS[@]}"; do
    step_of "$model"
  done
  check sampling "$PYTHON" scripts/bench_sampling.py "${MODELS[0]}" --device "$DEVICE" "${SAMPLING_ARGS[@]}" \
    --json "$OUT/sampling.json"
}

step_of() {
  local name
  name=$(basename "$1")
  check "step-$name" "$PYTHON" scripts/bench_step.py "$1" "${STEP_ARGS[@]}" --json "$OUT/step-$name.json"
}

gaps() {
  if [ "$DEVICE" != cuda ]; then
    ended gaps skipped $SECONDS
    return
  fi
  for model in "${MODELS[@]}"; do
    local name
    name=$(basename "$model")
    check "gaps-$name" "$PYTHON" scripts/profile_gaps.py "$model" "${GAPS_ARGS[@]}" --json "$OUT/gaps-$name.json"
  done
}

# pages of KV to and from host memory, of the first model
copies() {
  local name
  name=$(basename "${MODELS[0]}")
  check "copies-$name" "$PYTHON" scripts/bench_kv_transfer.py "${MODELS[0]}" "${COPIES_ARGS[@]}" \
    --json "$OUT/copies-$name.json"
}

serve() {
  for model in "${SERVE_MODELS[@]}"; do
    local name
    name=$(basename "$model")
    served "$name" "$model" || continue
    for run in "${!STREAMS[@]}"; do
      local label="serve-$name-${STREAMS[$run]}"
      check "$label" "$PYTHON" -m asyncengine.cli bench --url "$URL" --quiet --vocab "256:$VOCAB" --seed $((SEED += 1)) \
        --concurrency "${STREAMS[$run]}" --requests "${REQUESTS[$run]}" --json "$OUT/$label.json"
      # of the run's last steps, from the rings of accounts
      check "host-${label#serve-}" "$PYTHON" scripts/profile_host.py --seconds 0 --out "$OUT/host-${label#serve-}"
    done
    stop_server
  done
}

classes() {
  local name file rate requests runs=()
  name=$(basename "$CLASS_MODEL")
  file=$OUT/model-$name.json
  [ -e "$OUT/step-$name.json" ] || { stop_server && step_of "$CLASS_MODEL"; }
  rm -f "$file"
  [ "$DEVICE" = cuda ] && cp "scripts/step_models/h200-$name.json" "$file" 2>/dev/null
  check "fit-$name" "$PYTHON" scripts/fit_step_model.py "$file" --bench-step "$OUT/step-$name.json"
  read -r rate requests < <(timeout "$LIMIT" "$PYTHON" scripts/rate_at_load.py "$file" --load 0.9 \
    --seconds "$CLASS_SECONDS" --lengths "$CLASS_LENGTHS" "${ENGINE_ARGS[@]}")
  if [ -z "${requests:-}" ]; then
    ended "classes-$name" "FAILED: no rate" $SECONDS
    return
  fi
  engine_server || return
  # half of the requests are background work; all are, which is plain first come, first served; and both at once
  class_run mixed 0.5 "$rate" "$requests"
  class_run plain 1 "$rate" "$requests"
  if [ "${QUICK:-0}" != 1 ]; then
    class_run mixed-rush 0.5 100000 "$requests"
    class_run plain-rush 1 100000 "$requests"
  fi
  check "compare-$name" "$PYTHON" scripts/compare_with_simulation.py "${runs[@]}" --model "$file" "${ENGINE_ARGS[@]}" \
    --json "$OUT/compare-$name.json" --png "$OUT/compare-$name.png"
}

# class_run LABEL SHARE RATE REQUESTS: of classes, whose `name` and `runs` it uses
class_run() {
  local out=$OUT/$name-$1.json
  check "classes-$name-$1" "$PYTHON" scripts/watch_step_time.py --url "$URL" --json "$OUT/steptime-$name-$1.json" -- \
    "$PYTHON" -m asyncengine.cli bench --url "$URL" --quiet --vocab "256:$VOCAB" --seed $((SEED += 1)) \
    --lengths "$CLASS_LENGTHS" --background "$2" --rate "$3" --requests "$4" --json "$out"
  [ -e "$out" ] && runs+=("$out")
}

step_time() {
  engine_server || return
  check "beside-$(basename "$CLASS_MODEL")" "$PYTHON" scripts/bench_gap.py --url "$URL" --vocab "256:$VOCAB" \
    --seed $((SEED += 1)) "${GAP_ARGS[@]}" --json "$OUT/beside-$(basename "$CLASS_MODEL").json"
}

recovery() {
  engine_server || return
  check "recovery-$(basename "$CLASS_MODEL")" "$PYTHON" scripts/check_recovery.py --url "$URL" --pid "$SERVER" \
    --vocab "256:$VOCAB" --seed $((SEED += 1)) "${RECOVERY_ARGS[@]}" --json "$OUT/recovery-$(basename "$CLASS_MODEL").json"
  kill -9 "$SERVER" 2>/dev/null # it is dead already unless the check failed
  wait "$SERVER" 2>/dev/null
  SERVER= SERVED=
}

# the server of classes, step_time and recovery, unless it runs
engine_server() {
  [ "$SERVED" = engine ] && kill -0 "$SERVER" 2>/dev/null && return
  stop_server
  served "engine-$(basename "$CLASS_MODEL")" "$CLASS_MODEL" "${ENGINE_ARGS[@]}" && SERVED=engine
}

# served LABEL MODEL FLAG...: start_server, and a line of the table
served() {
  local label=$1 begin=$SECONDS
  if start_server "$2" "$OUT/$label" "$OUT/server-$label.log" "${@:3}"; then
    ended "server-$label" ready "$begin"
  else
    ended "server-$label" "FAILED to become ready" "$begin"
    return 1
  fi
}

# lets the server end within a minute, if there is one
stop_server() {
  [ -n "$SERVER" ] || return 0
  local begin=$SECONDS
  kill "$SERVER"
  while kill -0 "$SERVER" 2>/dev/null && [ $((SECONDS - begin)) -lt 60 ]; do sleep 0.1; done
  kill -9 "$SERVER" 2>/dev/null
  if wait "$SERVER"; then
    ended stop-server passed "$begin"
  else
    ended stop-server "FAILED with $?" "$begin"
  fi
  SERVER= SERVED=
}

# start_server MODEL FOLDER LOG FLAG...: serves the model's shape from FOLDER, where a tokenizer is made for it; sets
# SERVER, URL and VOCAB
start_server() {
  local model=$1 folder=$2 log=$3 begin=$SECONDS
  mkdir -p "$folder"
  : >"$log"
  cp "$model/config.json" "$folder/"
  VOCAB=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["vocab_size"])' "$folder/config.json")
  "$PYTHON" scripts/make_toy_tokenizer.py "$folder" "$VOCAB" || return 1
  # port 0: the system picks a free one, and the line that says so comes when everything is ready
  "$PYTHON" -m asyncengine.cli serve "$folder" --load-format dummy --device "$DEVICE" --port 0 --max-num-seqs 512 \
    --max-model-len 8192 "${@:4}" "${SERVE_ARGS[@]}" >"$log" 2>&1 &
  SERVER=$!
  while URL=$(sed -n 's/^Ready: .* at \(http.*\)$/\1/p' "$log") && ! healthy "$URL"; do
    if ! kill -0 "$SERVER" 2>/dev/null || [ $((SECONDS - begin)) -gt "$LIMIT" ]; then
      echo "==> the server of $model did not become ready; its log:"
      cat "$log"
      kill "$SERVER" 2>/dev/null
      SERVER=
      return 1
    fi
    sleep 0.2
  done
  echo
  echo "==> serving $model at $URL, ready after $((SECONDS - begin)) s"
}

healthy() {
  [ -n "$1" ] &&
    "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/health", timeout=10)' "$1"
}

sanitize() {
  check sanitize env PYTHON="$PYTHON" DEVICE="$DEVICE" SECONDS_EACH=90 scripts/sanitize.sh "${SANITIZE_ARGS[@]}"
}

for part in "${parts[@]}"; do
  case $part in classes | step_time | recovery) ;; *) stop_server ;; esac
  "$part"
done
stop_server

echo
"$PYTHON" scripts/gpu_summary.py "$OUT" || FAILED+=(summary)
echo
echo "logs and numbers: $OUT"
if [ ${#FAILED[@]} -gt 0 ]; then
  echo "failed: ${FAILED[*]}"
  exit 1
fi
echo "all passed"
