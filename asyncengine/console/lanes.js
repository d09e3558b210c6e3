// Lanes of time: what each process and the device did, drawn from the rings of accounts.
//
// A column of pixels is filled from below with the phases it holds, each as high as its share of that time. So a column
// that lies within one phase is that phase's block, and one that holds many steps shows how busy the process was.

const KEPT_MS = 7000;
const MAX_SLICES = 1 << 17;
const BEHIND_MS = 450; // what is drawn is so old, and as long as a step takes, so that it has arrived
const MOST_BEHIND_MS = 1500;
const MIN_FRAME_MS = 33;
const SPANS = [[5000, "5 s"], [1000, "1 s"], [200, "200 ms"], [50, "50 ms"]];
const LEAST_SPAN_MS = 0.5;
const GUTTER_PX = 132;
const NARROW_PX = 560;
const LEAST_LANES = 5;
const [LOWEST_PX, HIGHEST_PX] = [22, 120];
const LEAST_PX = 1; // of a phase in its column, so that it can be seen at all
const MOST_COLUMNS = 2000;

const PHASES = ["decode", "prefill", "drain", "plan", "launch", "report", "wait", "commit", "send", "encode", "pass on", "detokenize", "send deltas", "read", "write"];
const VARIABLE = { "pass on": "send", "send deltas": "send" };
const STEP_PHASES = ["drain", "plan", "launch", "report", "wait", "commit", "send"];
const TURN_PHASES = { tokenizer_proc: ["encode", "pass on"], detokenizer_proc: ["detokenize", "send deltas"], engine: ["read", "write"] };
const NAMES = { device: "GPU", gpu_runner: "gpu_runner", tokenizer_proc: "tokenizer", detokenizer_proc: "detokenizer", engine: "api" };
const LEGEND = [["GPU", ["decode", "prefill"]], ["gpu_runner", STEP_PHASES], ["tokenizer", TURN_PHASES.tokenizer_proc], ["detokenizer", TURN_PHASES.detokenizer_proc], ["api", TURN_PHASES.engine]];
const WAIT = PHASES.indexOf("wait");

const byId = (id) => document.getElementById(id);
const variable = (phase) => `--phase-${VARIABLE[phase] ?? phase}`;

/** The slices of one lane, in order: begin and end in ms, the phase, and two numbers to tell about it. */
class Slices {
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
    for (const name of ["begin", "end", "phase", "a", "b"]) this[name].copyWithin(0, count, this.length);
    this.length -= count;
  }

  copy() {
    const copy = new Slices(Math.max(1, this.length));
    copy.length = this.length;
    for (const name of ["begin", "end", "phase", "a", "b"]) copy[name].set(this[name].subarray(0, this.length));
    return copy;
  }
}

class Lane {
  constructor(role, name) {
    this.role = role;
    this.name = name;
    this.slices = new Slices();
  }

  describe(at) {
    const { phase, begin, end, a, b } = this.slices;
    const name = PHASES[phase[at]];
    const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
    const lines = { tokenizer_proc: "token", detokenizer_proc: "token", engine: "token" };
    const more =
      this.role === "device" ? `step ${a[at]}, ${plural(b[at], "row")}`
      : this.role === "gpu_runner" ? (a[at] ? `step ${a[at]}` : "")
      : `${plural(a[at], "message")}, ${plural(b[at], lines[this.role])}`;
    return `${name}  ${length(end[at] - begin[at])}${more && `\n${more}`}`;
  }
}

/** One lane as pixels: a column for each piece of time, whose phases stand on each other. */
class Picture {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
  }

  resize(width, height) {
    this.canvas.width = width;
    this.canvas.height = height;
    this.image = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.ground = new Float32Array(width);
  }

  draw(shares, colours) {
    const { width, height } = this.canvas;
    const { pixels, ground } = this;
    pixels.fill(0);
    ground.fill(0);
    // waiting is put on top, so that what is work stands on the ground
    for (const phase of [...shares.keys()].sort((a, b) => (a === WAIT) - (b === WAIT) || a - b)) {
      const share = shares.get(phase);
      const colour = colours[phase];
      for (let x = 0; x < width; x++) {
        if (!share[x]) continue;
        const low = ground[x];
        const high = (ground[x] = Math.min(height, low + Math.max(LEAST_PX, share[x] * height)));
        const [top, bottom] = [height - Math.round(high), height - Math.round(low)];
        for (let at = top * width + x; at < bottom * width; at += width) pixels[at] = colour;
      }
    }
    this.context.putImageData(this.image, 0, 0);
  }
}

export class Lanes {
  constructor() {
    this.canvas = byId("lanes");
    this.context = this.canvas.getContext("2d");
    this.picture = new Picture();
    this.lanes = [];
    this.names = "";
    this.launched = new Map(); // step -> [rows, prefill tokens]
    this.span = SPANS[0][0];
    this.clock = -Infinity; // the engine's less this page's
    this.longest = 0; // of the recent steps
    this.behind = BEHIND_MS;
    this.frozen = null; // the lanes as they were, and the time at the right edge
    this.pointer = null; // [x, y]
    this.picked = null; // [lane, slice], by keyboard
    this.paused = false;
    this.lastFrame = 0;
    this.colours = {};
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
    new ResizeObserver(() => this.resize()).observe(byId("stage"));
    this.fillLegend();
    this.listen();
    const frame = (time) => {
      if (time - this.lastFrame >= (this.still.matches ? 250 : MIN_FRAME_MS)) {
        this.lastFrame = time;
        this.behind += 0.1 * (Math.min(MOST_BEHIND_MS, BEHIND_MS + this.longest) - this.behind);
        this.draw();
      }
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  // ------------------------------------------------------------------------------------------------ what is heard

  take(news) {
    // the answer that was quickest tells the difference of the clocks best; they drift apart, so it is believed less and less
    this.clock = Math.max(news.now_ms - performance.now(), this.clock - 0.05);
    if (Math.abs(news.now_ms - performance.now() - this.clock) > 2000) this.clock = news.now_ms - performance.now();
    this.arrange(news);
    for (const lane of news.lanes) {
      if (!Object.keys(lane.columns).length) continue;
      if (lane.role === "gpu_runner") this.takeSteps(lane);
      else this.takeTurns(lane);
    }
    for (const { slices } of this.lanes) slices.forget(news.now_ms - KEPT_MS);
  }

  arrange(news) {
    const names = news.lanes.map(({ role, index }) => `${role}.${index}`).join();
    if (names === this.names) return;
    this.names = names;
    const count = (role) => news.lanes.filter((lane) => lane.role === role).length;
    this.lanes = news.lanes.map(({ role, index }) => new Lane(role, count(role) > 1 ? `${NAMES[role]} ${index}` : NAMES[role]));
    this.device = new Lane("device", news.device === "cuda" ? "GPU" : `device (${news.device})`);
    byId("legend").querySelector("strong").textContent = news.device === "cuda" ? "GPU" : "device";
    if (count("gpu_runner")) this.lanes.unshift(this.device);
    this.byName = Object.fromEntries(news.lanes.map(({ role, index }, place) => [`${role}.${index}`, this.lanes[place + (count("gpu_runner") ? 1 : 0)]]));
    this.resize();
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
        const about = ["wait", "commit", "send"].includes(phase) ? columns.collected[row] : step;
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

  // ------------------------------------------------------------------------------------------------ who looks

  listen() {
    const { canvas } = this;
    const spans = byId("spans");
    for (const [ms, label] of SPANS) {
      const choice = spans.appendChild(document.createElement("button"));
      choice.type = "button";
      choice.textContent = label;
      choice.setAttribute("role", "radio");
      choice.dataset.ms = ms;
      choice.addEventListener("click", () => this.setSpan(ms));
    }
    spans.addEventListener("keydown", (event) => {
      const to = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!to) return;
      event.preventDefault();
      const place = [...spans.children].indexOf(document.activeElement);
      const next = spans.children[(place + to + SPANS.length) % SPANS.length];
      next.click();
      next.focus();
    });
    this.setSpan(this.span);
    byId("pause").addEventListener("click", () => this.setPaused(!this.paused));
    let dragged = null;
    canvas.addEventListener("pointermove", (event) => {
      this.pointer = [event.offsetX, event.offsetY];
      this.picked = null;
      this.hold();
      if (dragged !== null && this.paused) {
        this.pan(((dragged - event.offsetX) / this.plot.width) * this.span);
        dragged = event.offsetX;
      }
      this.draw();
    });
    canvas.addEventListener("pointerdown", (event) => {
      this.pointer = [event.offsetX, event.offsetY];
      dragged = event.offsetX;
      this.hold();
      this.draw();
    });
    canvas.addEventListener("pointerup", () => (dragged = null));
    canvas.addEventListener("pointerleave", () => {
      this.pointer = dragged = null;
      this.release();
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !this.paused) return; // the page scrolls
      event.preventDefault();
      if (event.ctrlKey || Math.abs(event.deltaY) > Math.abs(event.deltaX)) this.zoom(Math.exp(event.deltaY / 300), this.timeAt(event.offsetX));
      else this.pan((event.deltaX / this.plot.width) * this.span);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => {
      this.picked = null;
      this.release();
    });
  }

  key(event) {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (event.key === " ") this.setPaused(!this.paused);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "Escape" || event.key === "End") this.setPaused(false);
    else if (step) this.pick(...step);
    else return;
    event.preventDefault();
    this.draw();
  }

  pick(down, right) {
    this.setPaused(true);
    const { lanes, end } = this.view;
    let [lane, at] = this.picked ?? [0, -1];
    if (this.picked && down) {
      const time = lanes[lane].slices.begin[at];
      lane = Math.min(lanes.length - 1, Math.max(0, lane + down));
      at = lanes[lane].slices.after(time);
    } else if (this.picked) at += right;
    else at = lanes[0]?.slices.after(end - this.span / 2) ?? -1;
    const { slices } = lanes[lane] ?? { slices: new Slices(1) };
    if (!slices.length) return;
    at = Math.min(slices.length - 1, Math.max(0, at));
    this.picked = [lane, at];
    this.pointer = null;
    const [left, edge] = [this.frozen.end - this.span, this.frozen.end];
    if (slices.begin[at] < left || slices.end[at] > edge) this.frozen.end = (slices.begin[at] + slices.end[at] + this.span) / 2;
    byId("said").textContent = `${lanes[lane].name}: ${lanes[lane].describe(at)}`;
  }

  setSpan(ms) {
    this.span = ms;
    for (const choice of byId("spans").children) {
      const chosen = Number(choice.dataset.ms) === ms;
      choice.setAttribute("aria-checked", String(chosen));
      choice.tabIndex = chosen ? 0 : -1;
    }
    if (![...byId("spans").children].some((choice) => choice.tabIndex === 0)) byId("spans").firstChild.tabIndex = 0;
  }

  setPaused(paused) {
    this.paused = paused;
    if (paused) this.hold();
    else {
      this.picked = null;
      this.release();
    }
    const shown = byId("pause");
    shown.setAttribute("aria-pressed", String(paused));
    shown.textContent = paused ? "Resume" : "Pause";
  }

  /** While somebody points at something it must not move; the engine's lanes go on meanwhile. */
  hold() {
    this.frozen ??= { end: this.now, lanes: this.lanes.map((lane) => Object.assign(new Lane(lane.role, lane.name), { slices: lane.slices.copy() })) };
    this.showHint();
  }

  release() {
    if (!this.paused && !this.pointer) this.frozen = null;
    this.showHint();
  }

  showHint() {
    byId("lanes-hint").textContent = this.paused ? "paused; drag to move, scroll to zoom" : this.frozen ? "held while you look" : "what each process does, now";
  }

  zoom(factor, about = this.view.end - this.span / 2) {
    const span = Math.min(SPANS[0][0], Math.max(LEAST_SPAN_MS, this.span * factor));
    if (this.frozen) this.frozen.end = about + ((this.view.end - about) * span) / this.span;
    this.setSpan(span);
  }

  pan(ms) {
    this.frozen.end = Math.min(this.now, Math.max(this.now - 60_000, this.frozen.end + ms));
  }

  // ------------------------------------------------------------------------------------------------ the picture

  get now() {
    return this.clock + performance.now() - this.behind;
  }

  get view() {
    return this.frozen ?? { end: this.now, lanes: this.lanes };
  }

  timeAt(x) {
    return this.view.end - this.span + ((x - this.plot.left) / this.plot.width) * this.span;
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    // as a pixel lies in memory: red first, which is the lowest byte of a number
    this.phaseColours = PHASES.map((phase) => {
      const [red, green, blue] = read(variable(phase)).match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16));
      return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
    });
    this.colours = Object.fromEntries(["ink", "soft", "line", "lane", "accent"].map((name) => [name, read(`--${name}`)]));
    this.sans = read("--sans");
  }

  fillLegend() {
    for (const [name, phases] of LEGEND) {
      const item = byId("legend").appendChild(document.createElement("li"));
      item.appendChild(document.createElement("strong")).textContent = name;
      for (const phase of phases) {
        const entry = item.appendChild(document.createElement("span"));
        entry.appendChild(document.createElement("i")).style.background = `var(${variable(phase)})`;
        entry.append(phase);
      }
    }
  }

  resize() {
    const width = byId("stage").clientWidth;
    if (width <= 0) return;
    this.em = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const scale = this.em / 16;
    const ratio = devicePixelRatio;
    const narrow = width < NARROW_PX;
    const count = Math.max(LEAST_LANES, this.lanes.length);
    const [top, bottom, between] = [narrow ? 20 : 6, 20, narrow ? 24 : 14].map((px) => px * scale);
    const room = (byId("stage").clientHeight - top - bottom) / count - between;
    const height = Math.floor(Math.min(HIGHEST_PX * scale, Math.max(LOWEST_PX * scale, room)));
    const row = height + between;
    const left = narrow ? 0 : GUTTER_PX * scale;
    this.plot = { left, width: width - left, row, height, narrow, top, parts: narrow ? 2 : 5, columns: Math.min(MOST_COLUMNS, Math.floor((width - left) * ratio)) };
    this.picture.resize(this.plot.columns + 1, height);
    this.size = [width, Math.floor(top + count * row + bottom)];
    this.canvas.width = Math.round(this.size[0] * ratio);
    this.canvas.height = Math.round(this.size[1] * ratio);
    this.canvas.style.height = `${this.size[1]}px`;
    const stage = byId("stage").style;
    [stage.minHeight, stage.maxHeight] = [LOWEST_PX, HIGHEST_PX].map((px) => `${top + count * (px * scale + between) + bottom}px`);
    this.draw();
  }

  draw() {
    if (!this.plot || !this.canvas.offsetParent) return;
    const { context, plot } = this;
    const { end, lanes } = this.view;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, ...this.size);
    this.drawAxis();
    lanes.forEach((lane, place) => {
      const y = plot.top + place * plot.row;
      context.fillStyle = this.colours.lane;
      context.fillRect(plot.left, y, plot.width, plot.height);
      this.drawGrid(y);
      const busy = this.drawLane(lane.slices, end, y);
      this.drawLabel(lane, busy, y);
    });
    if (!lanes.length) this.drawText("The engine's processes show here what they do.", plot.left + plot.width / 2, plot.top + 2 * plot.row, this.colours.soft, "center");
    this.drawTip(lanes);
  }

  drawText(text, x, y, colour, align, weight = 450) {
    const { context } = this;
    context.font = `${weight} ${0.78 * this.em}px ${this.sans}`;
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillStyle = colour;
    context.fillText(text, x, y);
  }

  drawLabel(lane, busy, y) {
    const { plot } = this;
    const middle = plot.narrow ? y - 0.62 * this.em : y + plot.height / 2;
    const right = plot.narrow ? plot.width : plot.left - 0.7 * this.em;
    this.drawText(lane.name, 0, middle, this.colours.ink, "left", 550);
    this.drawText(busy === null ? "–" : `${(busy * 100).toFixed(busy < 0.0995 ? 1 : 0)} %`, right, middle, this.colours.soft, "right");
  }

  drawGrid(y) {
    const { context, plot } = this;
    context.fillStyle = this.colours.line;
    for (let part = 1; part < plot.parts; part++) context.fillRect(Math.round(plot.left + (plot.width * part) / plot.parts), y, 1, plot.height);
  }

  drawAxis() {
    const { plot, span } = this;
    const { parts } = plot;
    const bottom = this.size[1] - 0.6 * this.em;
    for (let part = 0; part <= parts; part++) {
      const x = plot.left + (plot.width * part) / parts;
      const before = span * (1 - part / parts);
      const text = before ? `−${length(before)}` : this.frozen ? "0" : "now";
      this.drawText(text, part === parts ? this.size[0] : x, bottom, this.colours.soft, part === 0 ? "left" : part === parts ? "right" : "center");
    }
  }

  /** Returns the share of the time in which it did anything but wait; null where nothing is known. */
  drawLane(slices, end, y) {
    const { context, plot, span } = this;
    const pixel = plot.width / plot.columns;
    const column = span / plot.columns; // in ms
    // columns have their place in time, not on the screen, so that they move and do not flicker
    const begin = Math.floor((end - span) / column) * column;
    const { shares, busy } = this.shareOut(slices, begin, column);
    if (!shares.size) return null;
    this.picture.draw(shares, this.phaseColours);
    context.save();
    context.beginPath();
    context.rect(plot.left, y, plot.width, plot.height);
    context.clip();
    context.imageSmoothingEnabled = false;
    const x = plot.left - ((end - span - begin) / column) * pixel;
    context.drawImage(this.picture.canvas, x, y, (plot.columns + 1) * pixel, plot.height);
    context.restore();
    return Math.min(1, busy / plot.columns);
  }

  /** By phase, what it has of each column that begins at `begin` or later; and of how many columns all but waiting. */
  shareOut(slices, begin, column) {
    const count = this.plot.columns + 1;
    const shares = new Map();
    let busy = 0;
    for (let at = slices.after(begin); at < slices.length; at++) {
      const from = Math.max(0, (slices.begin[at] - begin) / column);
      if (from >= count) break;
      const to = Math.min(count, (slices.end[at] - begin) / column);
      const phase = slices.phase[at];
      if (phase !== WAIT) busy += to - from;
      let share = shares.get(phase);
      if (!share) shares.set(phase, (share = new Float32Array(count + 1)));
      const [first, last] = [from | 0, to | 0];
      if (first === last) share[first] += to - from;
      else {
        share[first] += first + 1 - from;
        for (let full = first + 1; full < last; full++) share[full] = 1;
        share[last] += to - last;
      }
    }
    return { shares, busy };
  }

  drawTip(lanes) {
    const tip = byId("tip");
    const found = this.picked ?? this.pointedAt(lanes);
    tip.hidden = !found;
    if (!found) return;
    const { context, plot } = this;
    const lane = lanes[found[0]];
    const { begin, end } = lane.slices;
    const toX = (time) => plot.left + ((time - this.view.end + this.span) / this.span) * plot.width;
    const [x0, x1] = [Math.max(plot.left, toX(begin[found[1]])), Math.min(plot.left + plot.width, toX(end[found[1]]))];
    const y = plot.top + found[0] * plot.row;
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x0 - 1, y - 1.5, Math.max(2, x1 - x0 + 2), plot.height + 3);
    const text = lane.describe(found[1]);
    if (tip.textContent !== text) tip.textContent = text;
    const left = Math.min(this.size[0] - tip.offsetWidth, Math.max(0, (this.pointer?.[0] ?? (x0 + x1) / 2) + 14));
    const below = y + plot.height + 8;
    tip.style.transform = `translate(${left}px, ${below + tip.offsetHeight > this.size[1] ? y - tip.offsetHeight - 8 : below}px)`;
  }

  /** [lane, slice] under the pointer, or the longest one of what is within a pixel of it. */
  pointedAt(lanes) {
    const { plot, pointer } = this;
    if (!pointer || pointer[0] < plot.left) return null;
    const place = Math.floor((pointer[1] - plot.top) / plot.row);
    const lane = lanes[place];
    if (!lane || pointer[1] > plot.top + place * plot.row + plot.height) return null;
    const { slices } = lane;
    const [from, to] = [this.timeAt(pointer[0] - 1), this.timeAt(pointer[0] + 1)];
    let best = -1;
    for (let at = slices.after(from); at < slices.length && slices.begin[at] < to; at++)
      if (best < 0 || slices.end[at] - slices.begin[at] > slices.end[best] - slices.begin[best]) best = at;
    return best < 0 ? null : [place, best];
  }
}

function length(ms) {
  if (ms >= 999.5) return `${trimmed(ms / 1000)} s`;
  return ms >= 0.9995 ? `${trimmed(ms)} ms` : `${trimmed(ms * 1000)} µs`;
}

function trimmed(value) {
  return String(Number(value.toPrecision(value >= 100 ? 3 : 2)));
}
