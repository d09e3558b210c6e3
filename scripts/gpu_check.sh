#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command: tests, kernel and step benchmarks, idle gaps, and a serving run.
#
#     scripts/gpu_check.sh [PART ...]        PARTs: tests kernels step gaps serve (default: all, in this order)
#
# Settings, from the environment:
#     PYTHON       the interpreter (default: .venv/bin/python where there is one, else python3)
#     OUT          folder for logs and JSON (default: a new temporary folder)
#     MODELS       folders with a config.json; weights are random (default: the shapes in scripts/data)
#     SERVE_MODELS those to serve (default: the 0.6B shape); STREAMS, REQUESTS: streams at once and requests of each run
#     SERVE_ARGS   more flags for `asyncengine serve`, e.g. "--detokenizer-workers 2"
#     DEVICE       cuda, or cpu to see that the parts step and serve run (with a small model in MODELS)
#
# Every part runs whatever became of those before it; the exit status is 1 if any failed.
set -uo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
OUT=${OUT:-$(mktemp -d)}
read -ra MODELS <<<"${MODELS:-scripts/data/qwen3-0.6b scripts/data/llama-3.1-8b}"
read -ra SERVE_MODELS <<<"${SERVE_MODELS:-scripts/data/qwen3-0.6b}"
read -ra STREAMS <<<"${STREAMS:-1 256 512}"
read -ra REQUESTS <<<"${REQUESTS:-4 1000 2000}"
read -ra SERVE_ARGS <<<"${SERVE_ARGS:-}"
DEVICE=${DEVICE:-cuda}
READY_SECONDS=300
FAILED=()
SERVER=

if [ "$DEVICE" = cuda ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check.sh needs an NVIDIA GPU, and torch sees none" >&2
  exit 1
fi
mkdir -p "$OUT"
trap '[ -z "$SERVER" ] || kill "$SERVER" 2>/dev/null' EXIT

# check NAME COMMAND...: runs it with its output both here and in $OUT/NAME.log
check() {
  local name=$1 begin=$SECONDS
  shift
  echo
  echo "==> $name"
  if "$@" 2>&1 | tee "$OUT/$name.log"; then
    echo "==> $name: passed in $((SECONDS - begin)) s"
  else
    echo "==> $name: FAILED after $((SECONDS - begin)) s"
    FAILED+=("$name")
  fi
}

tests() {
  check tests-gpu "$PYTHON" -m pytest -m gpu tests
  check tests-kernels "$PYTHON" -m pytest -m "not gpu" tests/kernels
}

kernels() {
  for script in scripts/bench_kernels/*.py; do
    check "kernels-$(basename "$script" .py)" "$PYTHON" "$script"
  done
}

# a process for each model, so that each finds the whole memory
step() {
  for model in "${MODELS[@]}"; do
    local name
    name=$(basename "$model")
    check "step-$name" "$PYTHON" scripts/bench_step.py "$model" --device "$DEVICE" --json "$OUT/step-$name.json"
  done
}

gaps() {
  for model in "${MODELS[@]}"; do
    local name
    name=$(basename "$model")
    check "gaps-$name" "$PYTHON" scripts/profile_gaps.py "$model" --json "$OUT/gaps-$name.json"
  done
}

serve() {
  for model in "${SERVE_MODELS[@]}"; do
    local name
    name=$(basename "$model")
    start_server "$model" "$OUT/$name" "$OUT/server-$name.log" || continue
    for run in "${!STREAMS[@]}"; do
      local label="serve-$name-${STREAMS[$run]}"
      check "$label" "$PYTHON" scripts/bench_serving.py --url "$URL" --quiet --vocab "256:$VOCAB" \
        --concurrency "${STREAMS[$run]}" --requests "${REQUESTS[$run]}" --json "$OUT/$label.json"
    done
    kill "$SERVER"
    wait "$SERVER" || FAILED+=("stop-$name")
    SERVER=
  done
}

# start_server MODEL FOLDER LOG: serves the model's shape from FOLDER, where a tokenizer is made for it; sets SERVER, URL
# and VOCAB
start_server() {
  local model=$1 folder=$2 log=$3 begin=$SECONDS
  mkdir -p "$folder"
  cp "$model/config.json" "$folder/"
  VOCAB=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["vocab_size"])' "$folder/config.json")
  "$PYTHON" scripts/make_toy_tokenizer.py "$folder" "$VOCAB"
  # port 0: the system picks a free one, and the line that says so comes when everything is ready
  "$PYTHON" -m asyncengine.cli serve "$folder" --load-format dummy --device "$DEVICE" --port 0 --max-num-seqs 512 \
    --max-model-len 8192 "${SERVE_ARGS[@]}" >"$log" 2>&1 &
  SERVER=$!
  while URL=$(sed -n 's/^Ready: .* at \(http.*\)$/\1/p' "$log") && ! healthy "$URL"; do
    if ! kill -0 "$SERVER" 2>/dev/null || [ $((SECONDS - begin)) -gt $READY_SECONDS ]; then
      echo "==> the server of $model did not become ready; its log:"
      cat "$log"
      kill "$SERVER" 2>/dev/null
      SERVER=
      FAILED+=("server-$(basename "$model")")
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

for part in "${@:-tests kernels step gaps serve}"; do
  for name in $part; do
    case $name in
    tests | kernels | step | gaps | serve) "$name" ;;
    *)
      echo "gpu_check.sh has no part $name; it has tests, kernels, step, gaps and serve" >&2
      exit 2
      ;;
    esac
  done
done

echo
echo "logs and numbers: $OUT"
if [ ${#FAILED[@]} -gt 0 ]; then
  echo "failed: ${FAILED[*]}"
  exit 1
fi
echo "all passed"
