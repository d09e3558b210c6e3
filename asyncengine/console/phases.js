// What the processes' time is divided into, and how it is called and shown.

export const PHASES = ["decode", "prefill", "drain", "plan", "launch", "report", "wait", "commit", "send", "encode", "pass on", "detokenize", "send deltas", "read", "write"];
const VARIABLE = { "pass on": "send", "send deltas": "send" };
export const STEP_PHASES = ["drain", "plan", "launch", "report", "wait", "commit", "send"];
export const TURN_PHASES = { tokenizer_proc: ["encode", "pass on"], detokenizer_proc: ["detokenize", "send deltas"], engine: ["read", "write"] };
export const NAMES = { device: "GPU", gpu_runner: "gpu_runner", tokenizer_proc: "tokenizer", detokenizer_proc: "detokenizer", engine: "api" };
export const LEGEND = [["GPU", ["decode", "prefill"]], ["gpu_runner", STEP_PHASES], ["tokenizer", TURN_PHASES.tokenizer_proc], ["detokenizer", TURN_PHASES.detokenizer_proc], ["api", TURN_PHASES.engine]];
export const WAIT = PHASES.indexOf("wait");

/** The style sheet's variable with a phase's colour. */
export const variable = (phase) => `--phase-${VARIABLE[phase] ?? phase}`;

/** A time in ms, in the unit that suits it. */
export function length(ms) {
  if (ms >= 999.5) return `${trimmed(ms / 1000)} s`;
  return ms >= 0.9995 ? `${trimmed(ms)} ms` : `${trimmed(ms * 1000)} µs`;
}

function trimmed(value) {
  return String(Number(value.toPrecision(value >= 100 ? 3 : 2)));
}
