import { byId } from "./elements.js";

const STORED = "asyncengine.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** The fields of a request beside its messages; an empty one leaves the server its default. */
export class Settings {
  constructor() {
    this.inputs = Object.fromEntries([...NUMBERS, "system", "tools"].map((name) => [name, byId(name)]));
    this.inputs.temperature.value = "0.7";
    this.load();
    for (const range of document.querySelectorAll("input[type=range]")) {
      const number = byId(range.dataset.for);
      const follow = () => (range.value = number.value === "" ? range.dataset.default : number.value);
      range.addEventListener("input", () => {
        number.value = range.value;
        this.changed();
      });
      number.addEventListener("input", follow);
      follow();
    }
    for (const input of Object.values(this.inputs)) input.addEventListener("input", () => this.changed());
    this.showSummary();
  }

  /** Throws where the tools are no JSON; whether they are right is for the server to say. */
  fields(messages) {
    const { system, tools } = this.inputs;
    const body = { messages: system.value.trim() ? [{ role: "system", content: system.value }, ...messages] : messages };
    for (const name of NUMBERS) {
      const { value, valueAsNumber, validity } = this.inputs[name];
      if (validity.badInput) throw new Error(`${name} must be a number`);
      if (Math.abs(valueAsNumber) > Number.MAX_SAFE_INTEGER) throw new Error(`${name} is too large for this page`);
      if (value !== "") body[name] = valueAsNumber;
    }
    if (tools.value.trim()) {
      try {
        body.tools = JSON.parse(tools.value);
      } catch (error) {
        throw new Error(`tools must be JSON: ${error.message}`);
      }
    }
    return body;
  }

  changed() {
    this.showSummary();
    const values = Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.value]));
    try {
      localStorage.setItem(STORED, JSON.stringify(values));
    } catch {
      // a browser may refuse to keep anything
    }
  }

  load() {
    try {
      const values = JSON.parse(localStorage.getItem(STORED) ?? "{}");
      for (const [name, value] of Object.entries(values)) if (name in this.inputs) this.inputs[name].value = value;
    } catch {
      // likewise
    }
  }

  showSummary() {
    const set = NUMBERS.filter((name) => this.inputs[name].value !== "").map((name) => `${name} ${this.inputs[name].value}`);
    for (const name of ["system", "tools"]) if (this.inputs[name].value.trim()) set.push(name);
    byId("settings-summary").textContent = set.join(" · ") || "defaults";
  }
}
