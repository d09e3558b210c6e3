// The picture of the lanes.
//
// A column of pixels is filled from below with the phases it holds, each as high as its share of that time. So a column
// that lies within one phase is that phase's block, and one that holds many steps shows how busy the process was.

import { PHASES, WAIT, length, variable } from "./phases.js";

const GUTTER_PX = 132;
const NARROW_PX = 560;
const LEAST_LANES = 5;
const [LOWEST_PX, HIGHEST_PX] = [22, 120];
const LEAST_PX = 1; // of a phase in its column, so that it can be seen at all
const MOST_COLUMNS = 2000;

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

/** Draws on the canvas, which fills the stage. plot: where the lanes are on it, in CSS pixels; null while it is hidden. */
export class Painter {
  constructor(canvas, stage) {
    this.canvas = canvas;
    this.stage = stage;
    this.context = canvas.getContext("2d");
    this.picture = new Picture();
    this.plot = null;
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
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

  resize(lanes) {
    const width = this.stage.clientWidth;
    if (width <= 0) return;
    this.em = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const scale = this.em / 16;
    const ratio = devicePixelRatio;
    const narrow = width < NARROW_PX;
    const count = Math.max(LEAST_LANES, lanes);
    const [top, bottom, between] = [narrow ? 20 : 6, 20, narrow ? 24 : 14].map((px) => px * scale);
    const room = (this.stage.clientHeight - top - bottom) / count - between;
    const height = Math.floor(Math.min(HIGHEST_PX * scale, Math.max(LOWEST_PX * scale, room)));
    const row = height + between;
    const left = narrow ? 0 : GUTTER_PX * scale;
    this.plot = { left, width: width - left, row, height, narrow, top, parts: narrow ? 2 : 5, columns: Math.min(MOST_COLUMNS, Math.floor((width - left) * ratio)) };
    this.picture.resize(this.plot.columns + 1, height);
    this.size = [width, Math.floor(top + count * row + bottom)];
    this.canvas.width = Math.round(this.size[0] * ratio);
    this.canvas.height = Math.round(this.size[1] * ratio);
    this.canvas.style.height = `${this.size[1]}px`;
    const { style } = this.stage;
    [style.minHeight, style.maxHeight] = [LOWEST_PX, HIGHEST_PX].map((px) => `${top + count * (px * scale + between) + bottom}px`);
  }

  /** view: the lanes, the time at the right edge and how much is shown, in ms; frozen: whether that edge stands still. */
  draw({ lanes, end, span, frozen }) {
    const { context, plot } = this;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, ...this.size);
    this.drawAxis(span, frozen);
    lanes.forEach((lane, place) => {
      const y = plot.top + place * plot.row;
      context.fillStyle = this.colours.lane;
      context.fillRect(plot.left, y, plot.width, plot.height);
      this.drawGrid(y);
      this.drawLabel(lane, this.drawLane(lane.slices, end, span, y), y);
    });
    if (!lanes.length) this.drawText("The engine's processes show here what they do.", plot.left + plot.width / 2, plot.top + 2 * plot.row, this.colours.soft, "center");
  }

  /** A frame round a slice; returns its place: left, right, top, bottom. */
  drawFrame({ slices }, at, place, { end, span }) {
    const { context, plot } = this;
    const toX = (time) => plot.left + Math.min(1, Math.max(0, (time - end + span) / span)) * plot.width;
    const [left, right, top] = [toX(slices.begin[at]), toX(slices.end[at]), plot.top + place * plot.row];
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.5;
    context.strokeRect(left - 1, top - 1.5, Math.max(2, right - left + 2), plot.height + 3);
    return [left, right, top, top + plot.height];
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

  drawAxis(span, frozen) {
    const { plot } = this;
    const { parts } = plot;
    const bottom = this.size[1] - 0.6 * this.em;
    for (let part = 0; part <= parts; part++) {
      const x = plot.left + (plot.width * part) / parts;
      const before = span * (1 - part / parts);
      const text = before ? `−${length(before)}` : frozen ? "0" : "now";
      this.drawText(text, part === parts ? this.size[0] : x, bottom, this.colours.soft, part === 0 ? "left" : part === parts ? "right" : "center");
    }
  }

  /** Returns the share of the time in which it did anything but wait; null where nothing is known. */
  drawLane(slices, end, span, y) {
    const { context, plot } = this;
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
}
