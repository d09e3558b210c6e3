// The API key, where the server wants one: kept for this tab, as long as it is open, and only ever sent in a header.

import { byId } from "./elements.js";

const STORED = "asyncengine.key";
let key = load();
let asking = null; // for another one than the server has refused

/** A request of this server. Where the key is refused another one is asked for, and the request made again.
 * options: makes those of `fetch`, for each time. */
export async function request(path, options) {
  for (;;) {
    const shown = key;
    const { headers, ...others } = options();
    const response = await fetch(path, { ...others, headers: shown ? { ...headers, Authorization: `Bearer ${shown}` } : headers });
    if (response.status !== 401) return response;
    if (shown === key) await (asking ??= ask());
  }
}

/** Returns once somebody has entered a key. */
async function ask() {
  const [gate, input] = [byId("gate"), byId("key")];
  byId("key-refused").textContent = key ? "The server does not know this key." : "";
  store("");
  gate.hidden = false;
  byId("rooms").inert = true;
  input.focus();
  await new Promise((entered) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      entered();
    };
  });
  store(input.value.trim());
  input.value = "";
  gate.hidden = true;
  byId("rooms").inert = false;
  byId("prompt").focus();
  asking = null;
}

function store(entered) {
  key = entered;
  try {
    if (key) sessionStorage.setItem(STORED, key);
    else sessionStorage.removeItem(STORED);
  } catch {
    // a browser may refuse to keep anything
  }
}

function load() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return "";
  }
}
