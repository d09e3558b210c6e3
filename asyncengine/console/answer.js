import { append, make } from "./elements.js";

/** One answer: its element, filled while it streams, and the message that it is in the conversation. */
export class Answer {
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

function duration(ms) {
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
