// The playground: turns of a conversation, each answered by a stream.

import { Answer } from "./answer.js";
import { button, byId, make } from "./elements.js";
import { Settings } from "./settings.js";
import { events } from "./stream.js";

const AT_THE_END_PX = 40;

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
    const told = (text) => () => (copy.textContent = text);
    const copy = button("Copy", () => navigator.clipboard.writeText(answer.text.textContent).then(told("Copied"), told("Not allowed")));
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
