// What was heard of each process, as slices of time.

import { NAMES, PHASES, STEP_PHASES, TURN_PHASES, length } from "./phases.js";

const KEPT_MS = 7000;
const MAX_SLICES = 1 << 17;
const COLUMNS = ["begin", "end", "phase", "a", "b"];
const OF_COLLECTED = ["wait", "commit", "send"];

/** The slices of one lane, in order: begin and end in ms, the phase, and two numbers to tell about it. */
export class Slices {
  constructor(size = 1024) {
    this.length = 0;
    this.allocate(size);
  }

  allocate(size) {
    const { length } = this;
    for (const [name, Kind] of [["begin", Float64Array], ["end", Float64Array], ["phase", Uint8Array], ["a", Int32Array], ["b", Int32Array]]) {
      const grown = new Kind(size);
      if (length) grown.set(this[name].subarray(0, length));
      this[name] = grown;
    }
  }

  push(begin, end, phase, a, b) {
    if (this.length === MAX_SLICES) this.drop(MAX_SLICES / 2);
    if (this.length === this.begin.length) this.allocate(2 * this.length);
    const at = this.length++;
    this.begin[at] = begin;
    this.end[at] = Math.max(begin, end);
    this.phase[at] = phase;
    this.a[at] = a;
    this.b[at] = b;
  }

  /** The first slice that ends after `time`. */
  after(time) {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  forget(time) {
    const old = this.after(time);
    if (old > this.length / 2) this.drop(old);
  }

  drop(count) {
    for (const name of COLUMNS) this[name].copyWithin(0, count, this.length);
    this.length -= count;
  }

  copy() {
    const copy = new Slices(Math.max(1, this.length));
    copy.length = this.length;
    for (const name of COLUMNS) copy[name].set(this[name].subarray(0, this.length));
    return copy;
  }
}

export class Lane {
  constructor(role, name) {
    this.role = role;
    this.name = name;
    this.slices = new Slices();
  }

  describe(at) {
    const { phase, begin, end, a, b } = this.slices;
    const name = PHASES[phase[at]];
    const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
    const more =
      this.role === "device" ? `step ${a[at]}, ${plural(b[at], "row")}`
      : this.role === "gpu_runner" ? (a[at] ? `step ${a[at]}` : "")
      : `${plural(a[at], "message")}, ${plural(b[at], "token")}`;
    return `${name}  ${length(end[at] - begin[at])}${more && `\n${more}`}`;
  }
}

/** The lanes of the engine, fed with the answers of /console/timeline. */
export class Feed {
  constructor() {
    this.lanes = [];
    this.names = "";
    this.longest = 0; // of the recent steps, in ms
    this.launched = new Map(); // step -> [rows, prefill tokens]
  }

  /** Returns whether the lanes are others than before. */
  take(news) {
    const others = this.arrange(news);
    for (const lane of news.lanes) {
      if (!Object.keys(lane.columns).length) continue;
      if (lane.role === "gpu_runner") this.takeSteps(lane);
      else this.takeTurns(lane);
    }
    for (const { slices } of this.lanes) slices.forget(news.now_ms - KEPT_MS);
    return others;
  }

  arrange(news) {
    const names = news.lanes.map(({ role, index }) => `${role}.${index}`).join();
    if (names === this.names) return false;
    this.names = names;
    const count = (role) => news.lanes.filter((lane) => lane.role === role).length;
    this.lanes = news.lanes.map(({ role, index }) => new Lane(role, count(role) > 1 ? `${NAMES[role]} ${index}` : NAMES[role]));
    this.device = new Lane("device", news.device === "cuda" ? "GPU" : `device (${news.device})`);
    if (count("gpu_runner")) this.lanes.unshift(this.device);
    this.byName = Object.fromEntries(news.lanes.map(({ role, index }, place) => [`${role}.${index}`, this.lanes[place + (count("gpu_runner") ? 1 : 0)]]));
    return true;
  }

  takeSteps({ role, index, origin_ms: origin, columns }) {
    const { slices } = this.byName[`${role}.${index}`];
    const ms = (ns) => origin + ns / 1e6;
    for (let row = 0; row < columns.end.length; row++) {
      const step = columns.step[row];
      if (step) this.launched.set(step, [columns.rows[row], columns.prefill_tokens[row]]);
      const entered = STEP_PHASES.filter((phase) => columns[phase][row] !== null);
      entered.forEach((phase, place) => {
        const end = place + 1 < entered.length ? columns[entered[place + 1]][row] : columns.end[row];
        const about = OF_COLLECTED.includes(phase) ? columns.collected[row] : step;
        slices.push(ms(columns[phase][row]), ms(end), PHASES.indexOf(phase), about, 0);
      });
      const collected = columns.collected[row];
      if (columns.device_begin[row] !== null) {
        const [rows, prefill] = this.launched.get(collected) ?? [0, 0];
        const begin = ms(columns.device_begin[row]);
        this.device.slices.push(begin, begin + columns.device_ns[row] / 1e6, PHASES.indexOf(prefill ? "prefill" : "decode"), collected, rows);
        this.launched.delete(collected);
        this.longest = Math.max(columns.device_ns[row] / 1e6, 0.98 * this.longest);
      }
    }
    if (this.launched.size > 64) this.launched.clear();
  }

  takeTurns({ role, index, origin_ms: origin, columns }) {
    const { slices } = this.byName[`${role}.${index}`];
    const [first, second] = TURN_PHASES[role].map((name) => PHASES.indexOf(name));
    for (let row = 0; row < columns.end.length; row++) {
      const [begin, middle, end] = ["begin", "middle", "end"].map((name) => origin + columns[name][row] / 1e6);
      slices.push(begin, middle, first, columns.messages[row], columns.items[row]);
      slices.push(middle, end, second, columns.messages[row], columns.items[row]);
    }
  }

  copy() {
    return this.lanes.map((lane) => Object.assign(new Lane(lane.role, lane.name), { slices: lane.slices.copy() }));
  }
}
