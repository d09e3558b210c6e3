// The engine's figures: each a number, a note and the last minute of it as a line.

const KEPT_MS = 60_000;
const RATE_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";

const share = (part, whole) => (whole > 0 ? part / whole : null);
const integer = new Intl.NumberFormat("en");
const percent = (value) => (value * 100).toFixed(value > 0 && value < 0.0995 ? 1 : 0);

function rate(value) {
  return value >= 9995 ? integer.format(Math.round(value)) : value >= 99.5 ? value.toFixed(0) : value.toFixed(1);
}

// of(now, past, first): the value, null where there is none. past: a second ago. first: the oldest that is kept.
const KINDS = [
  {
    label: "Output",
    unit: "tokens/s",
    of: (now, past) => (now.at > past.at ? Math.max(0, now.generated - past.generated) / ((now.at - past.at) / 1000) : 0),
    text: rate,
    note: (now) => `${integer.format(now.generated)} generated, ${integer.format(now.prompted)} prompt tokens`,
  },
  {
    label: "Running",
    of: (now) => now.gauges.running ?? null,
    text: integer.format,
    note: (now) => `${integer.format(now.gauges.waiting ?? 0)} waiting`,
  },
  {
    label: "KV cache",
    unit: "%",
    top: 1,
    of: ({ gauges }) => share(gauges.total_pages - gauges.free_pages - gauges.cached_pages, gauges.total_pages),
    text: percent,
    note: ({ gauges }) => `${integer.format(gauges.cached_pages ?? 0)} pages cached`,
  },
  {
    label: "Prefix hits",
    unit: "%",
    top: 1,
    of: (now, past, first) => {
      const asked = (now.gauges.prefix_query_tokens ?? 0) - (first.gauges.prefix_query_tokens ?? 0);
      const since = asked > 0 ? first.gauges : { prefix_hit_tokens: 0, prefix_query_tokens: 0 };
      const { prefix_hit_tokens: hits, prefix_query_tokens: queries } = now.gauges;
      return share(hits - (since.prefix_hit_tokens ?? 0), queries - (since.prefix_query_tokens ?? 0));
    },
    text: percent,
    note: (now) => `${integer.format(now.gauges.prefix_hit_tokens ?? 0)} tokens spared`,
  },
  {
    label: "GPU busy",
    unit: "%",
    top: 1,
    of: ({ gauges }) => (gauges.gpu_busy_permille ? gauges.gpu_busy_permille / 1000 : null),
    text: percent,
    note: () => "of the time with work",
  },
  {
    label: "Host per step",
    unit: "µs",
    of: ({ gauges }) => gauges.host_us_per_step || null,
    text: integer.format,
    note: (now) => `${integer.format(now.gauges.steps ?? 0)} steps`,
  },
  {
    label: "Preemptions",
    of: (now) => now.gauges.preemptions ?? null,
    drawn: (now, past) => (now.gauges.preemptions ?? 0) - (past.gauges.preemptions ?? 0),
    text: integer.format,
    note: (now, first) => `${integer.format((now.gauges.preemptions ?? 0) - (first.gauges.preemptions ?? 0))} in the last minute`,
  },
];

export class Figures {
  constructor(list) {
    this.samples = [];
    this.tiles = KINDS.map((kind) => new Tile(kind, list));
  }

  take(news) {
    const now = { at: news.now_ms, gauges: news.gauges, generated: news.generated, prompted: news.prompted, cuda: news.device === "cuda" };
    const last = this.samples.at(-1);
    if (last && (now.at < last.at || now.generated < last.generated)) this.samples = []; // another engine
    this.samples.push(now);
    while (this.samples[0].at < now.at - KEPT_MS) this.samples.shift();
    const past = this.samples.findLast((sample) => sample.at <= now.at - RATE_MS) ?? this.samples[0];
    for (const tile of this.tiles) tile.show(now, past, this.samples[0]);
  }
}

class Tile {
  constructor(kind, list) {
    this.kind = kind;
    this.points = [];
    const item = list.appendChild(document.createElement("li"));
    item.className = "figure";
    this.label = child(item, "span", "label", kind.label);
    const value = child(item, "span", "value");
    this.number = child(value, "span", "", "–");
    this.unit = child(value, "span", "unit", "");
    this.note = child(item, "span", "note", "\u00a0");
    const svg = item.appendChild(document.createElementNS(SVG, "svg"));
    svg.setAttribute("viewBox", "0 0 100 24");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    this.area = svg.appendChild(document.createElementNS(SVG, "polygon"));
    this.line = svg.appendChild(document.createElementNS(SVG, "polyline"));
  }

  show(now, past, first) {
    const { kind } = this;
    const value = kind.of(now, past, first);
    if (kind.label === "GPU busy") this.label.textContent = now.cuda ? "GPU busy" : "Device busy";
    this.number.textContent = value === null || Number.isNaN(value) ? "–" : kind.text(value);
    this.unit.textContent = value === null || Number.isNaN(value) ? "" : (kind.unit ?? "");
    this.note.textContent = kind.note(now, first);
    this.points.push([now.at, (kind.drawn ? kind.drawn(now, past) : value) || 0]);
    while (this.points[0][0] < now.at - KEPT_MS) this.points.shift();
    this.draw(now.at);
  }

  draw(now) {
    const top = this.kind.top ?? (Math.max(...this.points.map(([, value]) => value)) || 1);
    const at = ([time, value]) => `${(100 - ((now - time) / KEPT_MS) * 100).toFixed(2)},${(22.5 - (value / top) * 20).toFixed(2)}`;
    const points = this.points.map(at);
    this.line.setAttribute("points", points.join(" "));
    const left = points[0].split(",")[0];
    this.area.setAttribute("points", [`${left},24`, ...points, "100,24"].join(" "));
  }
}

function child(parent, tag, className, text = "") {
  const made = parent.appendChild(document.createElement(tag));
  made.className = className;
  made.textContent = text;
  return made;
}
