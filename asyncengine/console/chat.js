// The playground: turns of a conversation, streamed from /v1/chat/completions. Text only ever becomes text nodes.

const STORED = "asyncengine.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const AT_THE_END_PX = 40;
const byId = (id) => document.getElementById(id);

function make(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function button(text, onclick) {
  const made = make("button", "", text);
  made.type = "button";
  made.addEventListener("click", onclick);
  return made;
}

/** Yields the data of each event; throws the server's own words where it refuses or fails. */
async function* events(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) {
    const text = await response.text();
    let message = `the server answered ${response.status}`;
    try {
      message = JSON.parse(text).error.message;
    } catch {
      // whatever stands between this page and the server has its own words
    }
    throw new Error(message);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream ended early");
    const found = (rest + value).split("\n\n");
    rest = found.pop();
    for (const event of found) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/** One answer: its element, filled while it streams, and the message that it is in the conversation. */
class Answer {
  constructor(log) {
    this.element = log.appendChild(make("article", "message assistant waiting"));
    this.element.append(make("span", "who", "Assistant"));
    this.text = make("div", "text");
    this.stats = make("footer", "stats");
    this.figures = make("span", "", "waiting for the first token");
    this.doing = make("span", "doing");
    this.stats.append(this.figures, this.doing);
    this.element.append(this.text, this.stats);
    this.calls = [];
    this.began = performance.now();
    this.first = this.last = 0;
    this.tokens = this.firstTokens = 0;
    this.finish = "";
  }

  take(chunk) {
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { reasoning_content: reasoning, content, tool_calls: calls } = choice.delta;
    if (reasoning || content || calls) this.mark();
    if (reasoning) this.addReasoning(reasoning);
    if (content) append(this.text, content);
    for (const call of calls ?? []) this.addCall(call);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    this.showFigures();
  }

  mark() {
    this.last = performance.now();
    if (this.first) return;
    this.first = this.last;
    this.firstTokens = this.tokens;
    this.element.classList.replace("waiting", "writing");
  }

  addReasoning(text) {
    if (!this.reasoning) {
      const folded = make("details", "reasoning");
      folded.append(make("summary", "", "Reasoning"));
      this.reasoning = folded.appendChild(make("div", ""));
      this.text.before(folded);
    }
    append(this.reasoning, text);
  }

  addCall({ index, id, function: { name, arguments: text } }) {
    if (!this.calls[index]) {
      const card = make("section", "call");
      card.append(make("code", "name", name));
      const shown = card.appendChild(make("pre", ""));
      this.stats.before(card);
      this.calls[index] = { id, name, text: "", shown, card };
    }
    this.calls[index].text += text;
    append(this.calls[index].shown, text);
  }

  showFigures() {
    const parts = [];
    const seconds = (this.last - this.first) / 1000;
    if (this.first) parts.push(["TTFT", duration(this.first - this.began)]);
    if (this.tokens) parts.push([this.tokens, this.tokens === 1 ? "token" : "tokens"]);
    if (seconds > 0 && this.tokens > this.firstTokens) parts.push([((this.tokens - this.firstTokens) / seconds).toFixed(1), "tokens/s"]);
    if (this.finish) parts.push(["finish", this.finish]);
    this.figures.replaceChildren(
      ...parts.flatMap(([a, b], place) => {
        const [plain, strong] = typeof a === "number" || /^\d/.test(a) ? [b, a] : [a, b];
        const bold = make("b", "", String(strong));
        const words = strong === a ? [bold, ` ${plain}`] : [`${plain} `, bold];
        return place ? [" · ", ...words] : words;
      }),
    );
  }

  fail(message) {
    const shown = make("p", "error", message);
    shown.setAttribute("role", "alert");
    this.stats.before(shown);
    this.failed = true;
  }

  end() {
    this.element.classList.remove("waiting", "writing");
    for (const call of this.calls) {
      try {
        call.shown.textContent = JSON.stringify(JSON.parse(call.text), null, 2);
      } catch {
        // cut off, so it stays as it came
      }
    }
    this.showFigures();
  }

  get message() {
    const message = { role: "assistant", content: this.text.textContent };
    if (this.calls.length)
      message.tool_calls = this.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return message;
  }

  get isEmpty() {
    return !this.text.textContent && !this.calls.length;
  }
}

export class Chat {
  constructor() {
    this.turns = []; // {messages, elements, answer}
    this.running = null;
    this.scroller = byId("scroller");
    this.log = byId("log");
    this.prompt = byId("prompt");
    this.settings = new Settings();
    this.follows = true;
    this.top = 0; // where the conversation is scrolled to
    this.listen();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.send(this.prompt.value);
      } else if (event.key === "Escape" && this.running) this.stop();
    });
    this.prompt.addEventListener("input", () => this.fitPrompt());
    for (const example of document.querySelectorAll(".example"))
      example.addEventListener("click", () => this.send(example.textContent));
    byId("clear").addEventListener("click", () => this.clear());
    byId("latest").addEventListener("click", () => this.toEnd());
    // Whoever scrolls up stays there, whatever comes meanwhile, until he is at the end again.
    this.scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroller;
      if (scrollHeight - scrollTop - clientHeight < AT_THE_END_PX) this.toEnd();
      else if (scrollTop < this.top) this.follows = false;
      this.top = scrollTop;
    }, { passive: true });
    const sizes = new ResizeObserver(() => this.grown());
    sizes.observe(this.log);
    sizes.observe(this.scroller);
    window.addEventListener("resize", () => this.fitPrompt());
  }

  send(text) {
    if (!text.trim() || this.running) return;
    this.prompt.value = "";
    this.fitPrompt();
    this.addTurn([{ role: "user", content: text }]);
  }

  addTurn(messages) {
    byId("empty").hidden = true;
    const elements = messages.map(({ role, content }) => {
      const element = this.log.appendChild(make("article", `message ${role}`));
      element.append(make("span", "who", role === "tool" ? "Result" : "You"), make("div", "text", content));
      return element;
    });
    this.turns.push({ messages, elements, answer: null });
    this.toEnd();
    this.run();
  }

  /** Has the last turn answered. */
  async run() {
    const turn = this.turns.at(-1);
    for (const { answer } of this.turns) answer?.doing.replaceChildren();
    const body = this.body();
    const answer = (turn.answer = new Answer(this.log));
    const running = (this.running = new AbortController());
    this.showRunning();
    try {
      if (body instanceof Error) throw body;
      for await (const chunk of events(body, running.signal)) answer.take(chunk);
    } catch (error) {
      if (running.signal.aborted) answer.finish = "stopped";
      else answer.fail(error instanceof TypeError ? "the server cannot be reached" : error.message);
    }
    if (this.turns.at(-1) !== turn) return; // cleared meanwhile
    answer.end();
    this.running = null;
    this.showRunning();
    this.offer(turn);
    byId("said").textContent = answer.failed ? "" : `Answer ended: ${answer.finish}, ${answer.tokens} tokens`;
  }

  stop() {
    this.running.abort(); // the server notices that nobody listens, and aborts the request
  }

  body() {
    const turns = this.turns.filter(({ answer }, place) => place === this.turns.length - 1 || !(answer.failed && answer.isEmpty));
    const messages = turns.flatMap(({ messages, answer }) => (answer && !answer.isEmpty ? [...messages, answer.message] : messages));
    try {
      return { ...this.settings.fields(messages), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    } catch (error) {
      return error;
    }
  }

  /** What can be done with an answer that has ended. */
  offer(turn) {
    const { answer } = turn;
    const again = button(answer.failed ? "Try again" : "Again", () => {
      answer.element.remove();
      turn.answer = null;
      this.run();
    });
    const copy = button("Copy", async () => {
      await navigator.clipboard.writeText(answer.text.textContent);
      copy.textContent = "Copied";
    });
    answer.doing.append(...(answer.text.textContent ? [copy] : []), again);
    if (answer.calls.length && answer.finish === "tool_calls") this.askForResults(answer);
  }

  askForResults(answer) {
    const fields = answer.calls.map((call) => {
      const field = make("textarea", "code");
      field.rows = 1;
      field.placeholder = `What ${call.name} returned`;
      field.setAttribute("aria-label", field.placeholder);
      call.card.append(field);
      return field;
    });
    const send = button("Send results", () => {
      if (this.running || this.turns.at(-1).answer !== answer) return;
      const results = answer.calls.map(({ id }, place) => ({ role: "tool", tool_call_id: id, content: fields[place].value }));
      for (const done of [...fields, send]) done.remove();
      this.addTurn(results);
    });
    send.className = "quiet results";
    answer.stats.before(send);
  }

  clear() {
    this.running?.abort();
    this.running = null;
    for (const { elements, answer } of this.turns) for (const element of [...elements, answer?.element]) element?.remove();
    this.turns = [];
    byId("empty").hidden = false;
    this.showRunning();
    this.prompt.focus();
  }

  showRunning() {
    const send = byId("send");
    send.textContent = this.running ? "Stop" : "Send";
    send.classList.toggle("stop", Boolean(this.running));
  }

  grown() {
    if (this.follows) {
      this.scroller.scrollTop = this.scroller.scrollHeight;
      this.top = this.scroller.scrollTop;
    } else byId("latest").hidden = false;
  }

  toEnd() {
    this.follows = true;
    byId("latest").hidden = true;
    this.grown();
  }

  fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
  }
}

/** The fields of a request beside its messages; an empty one leaves the server its default. */
class Settings {
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

function append(element, text) {
  if (element.lastChild) element.lastChild.appendData(text);
  else element.append(text);
}

function duration(ms) {
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
