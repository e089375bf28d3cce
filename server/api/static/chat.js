// A chat to try the model with: streamed, with reasoning folded, safe markdown and tool calls shown.
import { events, headers, key } from "./sse.js";

const FRAME_MS = 100;
const SAFE = {
  FORBID_TAGS: ["img", "picture", "video", "audio", "svg", "math", "style", "form", "input", "button", "iframe"],
  FORBID_ATTR: ["style", "srcset", "src", "background"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
};

// HTML of the model's is shown as text, an image as its address: an answer may be read, but it loads and runs nothing.
const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
marked.use({ renderer: {
  html: ({ text }) => escaped(text),
  image: ({ href, text }) => `${escaped(text)} (${escaped(href)})`,
} });

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (name) made.className = name;
  return made;
}

// One answer on the page. Text comes in pieces; it is drawn a few times a second.
class Answer {
  constructor(place) {
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.box = element("article", "", "turn assistant");
    this.thoughts = document.createElement("details");
    this.thoughts.hidden = true;
    this.thoughts.append(element("summary", "Reasoning"), document.createElement("p"));
    this.body = element("div");
    this.tools = element("div");
    this.note = element("p", "", "note");
    this.box.append(element("p", "Model", "who"), this.thoughts, this.body, this.tools, this.note);
    place.append(this.box);
    this.timer = null;
  }

  take(delta) {
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) {
      this.calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } };
      this.calls[part.index].function.name += part.function?.name ?? "";
      this.calls[part.index].function.arguments += part.function?.arguments ?? "";
    }
    this.timer ??= setTimeout(() => this.draw(), FRAME_MS);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    this.thoughts.hidden = !this.reasoning;
    this.thoughts.lastElementChild.textContent = this.reasoning;
    this.body.innerHTML = DOMPurify.sanitize(marked.parse(this.text), SAFE);
    this.tools.replaceChildren(...this.calls.filter(Boolean).map((call) => {
      const shown = element("pre");
      shown.textContent = `${call.function.name}(${call.function.arguments})`;
      return shown;
    }));
  }

  say(text, isError = false) {
    this.note.textContent = text;
    this.note.classList.toggle("error", isError);
  }

  message() {
    const made = { role: "assistant", content: this.text };
    const calls = this.calls.filter(Boolean);
    if (calls.length) made.tool_calls = calls;
    return made;
  }
}

// How fast a prompt is read, from the second time on that there is news of it.
class Pace {
  words(done) {
    const now = performance.now();
    this.first ??= { done, now };
    const seconds = (now - this.first.now) / 1000;
    if (done <= this.first.done || seconds <= 0) return "";
    return `, ${Math.round((done - this.first.done) / seconds)} a second`;
  }
}

export class Chat {
  constructor(section, askForKey) {
    this.at = (id) => section.querySelector(`#${id}`);
    this.askForKey = askForKey;
    this.messages = [];
    this.running = null;
    this.at("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.at("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.at("stop").addEventListener("click", () => this.running?.abort());
    this.at("clear").addEventListener("click", () => this.clear());
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.at("talk").replaceChildren();
    this.at("message").focus();
  }

  async send() {
    const text = this.at("message").value.trim();
    if (!text || this.running) return;
    this.at("message").value = "";
    this.messages.push({ role: "user", content: text });
    this.at("talk").append(element("article", text, "turn user"));
    const answer = new Answer(this.at("talk"));
    this.at("talk").scrollTop = this.at("talk").scrollHeight;
    this.running = new AbortController();
    this.switch(true);
    try {
      await this.stream(answer, this.running.signal);
    } catch (error) {
      if (error.name === "AbortError") answer.say("stopped");
      else answer.say(error.message, true);
    } finally {
      answer.draw();
      if (answer.text || answer.calls.length) this.messages.push(answer.message());
      this.running = null;
      this.switch(false);
      this.scroll();
    }
  }

  switch(isRunning) {
    this.at("send").disabled = isRunning;
    this.at("stop").disabled = !isRunning;
  }

  body() {
    const body = { model: "default", stream: true, messages: [...this.messages] };
    const system = this.at("system").value.trim();
    if (system) body.messages.unshift({ role: "system", content: system });
    for (const name of ["temperature", "top_p", "max_tokens"]) {
      if (this.at(name).value !== "") body[name] = Number(this.at(name).value);
    }
    const thinking = this.at("thinking").value;
    if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "true" };
    const tools = this.at("tools").value.trim();
    if (tools) body.tools = JSON.parse(tools);
    return body;
  }

  async stream(answer, signal) {
    const request = { method: "POST", body: JSON.stringify(this.body()), signal };
    let response = await this.post(request);
    if (response.status === 401) {
      await this.askForKey(key.get());
      response = await this.post(request);
    }
    if (!response.ok) throw new Error((await response.json()).error.message);
    const pace = new Pace();
    for await (const { data, comment } of events(response)) {
      const [, done, total] = comment.match(/^prefill (\d+)\/(\d+)/) ?? [];
      if (total) answer.say(`reading the prompt: ${done} of ${total} tokens${pace.words(Number(done))}`);
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const [choice] = chunk.choices;
      if (!choice) continue;
      answer.take(choice.delta);
      answer.say(choice.finish_reason === "length" ? "cut at the longest answer" : "");
      this.scroll();
    }
  }

  post(request) {
    return fetch("v1/chat/completions", { ...request, headers: headers({ "content-type": "application/json" }) });
  }

  scroll() {
    const talk = this.at("talk");
    if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120) talk.scrollTop = talk.scrollHeight;
  }
}
