// Asks the server again and again what has happened since, and shows it. All text is put in as text, never as markup.

import { Chat } from "./chat.js";
import { Figures } from "./figures.js";
import { request } from "./key.js";
import { Lanes } from "./lanes.js";

const POLL_MS = 250;
const SLOWEST_POLL_MS = 4000;

const byId = (id) => document.getElementById(id);
const figures = new Figures(byId("figures"));
const lanes = new Lanes();
new Chat();

let cursor = {};
let pollMs = POLL_MS;
let resting = false; // while nobody sees the page

async function poll() {
  let wait = POLL_MS;
  try {
    const since = Object.entries(cursor).map(([lane, number]) => `${lane}:${number}`).join(",");
    const response = await request(`/console/timeline?since=${since}`, () => ({ signal: AbortSignal.timeout(5000) }));
    if (response.ok) {
      const news = await response.json();
      const more = takeIn(news);
      pollMs = Math.max(POLL_MS, pollMs * 0.9);
      wait = more ? POLL_MS / 8 : pollMs;
    } else {
      wait = pollMs = Math.min(SLOWEST_POLL_MS, pollMs * 2);
      if (response.status !== 503) showState("failed", `${response.status}`);
    }
  } catch {
    showState("unreachable", "no answer");
    wait = pollMs = Math.min(SLOWEST_POLL_MS, pollMs * 2);
  }
  resting = document.hidden;
  if (!resting) setTimeout(poll, wait);
}

function takeIn(news) {
  cursor = Object.fromEntries(news.lanes.map((lane) => [`${lane.role}.${lane.index}`, lane.next]));
  byId("model").textContent = `${news.model} · ${news.device}`;
  document.title = `${news.model} · asyncengine`;
  showState(news.state, news.detail || news.state);
  figures.take(news);
  lanes.take(news);
  return news.lanes.some((lane) => lane.more);
}

function showState(state, text) {
  const shown = byId("state");
  if (shown.dataset.state === state && byId("state-text").textContent === text) return;
  shown.dataset.state = state;
  byId("state-text").textContent = text;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden || !resting) return;
  resting = false;
  poll();
});

const tabs = [byId("tab-chat"), byId("tab-engine")];
for (const tab of tabs) {
  const other = tabs[tab === tabs[0] ? 1 : 0];
  const select = () => {
    document.body.dataset.view = tab.id.slice("tab-".length);
    tab.setAttribute("aria-selected", "true");
    other.setAttribute("aria-selected", "false");
    [tab.tabIndex, other.tabIndex] = [0, -1];
    tab.focus();
  };
  tab.addEventListener("click", select);
  tab.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") other.click();
  });
}

poll();
