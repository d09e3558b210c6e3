// The lanes as somebody looks at them: live, held under the pointer, or paused and gone through.

import { byId } from "./elements.js";
import { Painter } from "./painter.js";
import { LEGEND, variable } from "./phases.js";
import { Feed, Slices } from "./slices.js";

const BEHIND_MS = 450; // what is drawn is so old, and as long as a step takes, so that it has arrived
const MOST_BEHIND_MS = 1500;
const MIN_FRAME_MS = 33;
const STILL_FRAME_MS = 250;
const SPANS = [[5000, "5 s"], [1000, "1 s"], [200, "200 ms"], [50, "50 ms"]];
const LEAST_SPAN_MS = 0.5;

export class Lanes {
  constructor() {
    this.canvas = byId("lanes");
    this.painter = new Painter(this.canvas, byId("stage"));
    this.feed = new Feed();
    this.span = SPANS[0][0];
    this.clock = -Infinity; // the engine's less this page's
    this.behind = BEHIND_MS;
    this.frozen = null; // the lanes as they were, and the time at the right edge
    this.pointer = null; // [x, y]
    this.picked = null; // [lane, slice], by keyboard
    this.paused = false;
    new ResizeObserver(() => this.resize()).observe(byId("stage"));
    this.fillLegend();
    this.listen();
    const still = matchMedia("(prefers-reduced-motion: reduce)");
    let last = 0;
    const frame = (time) => {
      if (time - last >= (still.matches ? STILL_FRAME_MS : MIN_FRAME_MS)) {
        last = time;
        this.behind += 0.1 * (Math.min(MOST_BEHIND_MS, BEHIND_MS + this.feed.longest) - this.behind);
        this.draw();
      }
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  take(news) {
    // the answer that was quickest tells the difference of the clocks best; they drift apart, so it is believed less and less
    const difference = news.now_ms - performance.now();
    this.clock = Math.abs(difference - this.clock) > 2000 ? difference : Math.max(difference, this.clock - 0.05);
    if (this.feed.take(news)) {
      byId("legend").querySelector("strong").textContent = news.device === "cuda" ? "GPU" : "device";
      this.resize();
    }
  }

  resize() {
    this.painter.resize(this.feed.lanes.length);
    this.draw();
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
        this.pan(((dragged - event.offsetX) / this.painter.plot.width) * this.span);
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
      else this.pan((event.deltaX / this.painter.plot.width) * this.span);
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
    this.frozen ??= { end: this.now, lanes: this.feed.copy() };
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

  get now() {
    return this.clock + performance.now() - this.behind;
  }

  get view() {
    const { end, lanes } = this.frozen ?? { end: this.now, lanes: this.feed.lanes };
    return { end, lanes, span: this.span, frozen: Boolean(this.frozen) };
  }

  timeAt(x) {
    return this.view.end - this.span + ((x - this.painter.plot.left) / this.painter.plot.width) * this.span;
  }

  draw() {
    if (!this.painter.plot || !this.canvas.offsetParent) return;
    const { view } = this;
    this.painter.draw(view);
    this.drawTip(view);
  }

  drawTip(view) {
    const tip = byId("tip");
    const found = this.picked ?? this.pointedAt(view.lanes);
    tip.hidden = !found;
    if (!found) return;
    const [place, at] = found;
    const lane = view.lanes[place];
    const [left, right, top, bottom] = this.painter.drawFrame(lane, at, place, view);
    const text = lane.describe(at);
    if (tip.textContent !== text) tip.textContent = text;
    const [width, height] = this.painter.size;
    const x = Math.min(width - tip.offsetWidth, (this.pointer?.[0] ?? (left + right) / 2) + 14);
    const y = bottom + 8 + tip.offsetHeight > height ? top - tip.offsetHeight - 8 : bottom + 8;
    tip.style.transform = `translate(${Math.max(0, x)}px, ${y}px)`;
  }

  /** [lane, slice] under the pointer, or the longest one of what is within a pixel of it. */
  pointedAt(lanes) {
    const { pointer } = this;
    const { plot } = this.painter;
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
