// The playground: a conversation whose tokens are coloured by who came up with them, and the trees they come from.

import { byId, html, number } from "./drawing.js";
import { ask, events } from "./server.js";
import { drawTree, told, visible } from "./tree.js";

const NEAR_PIXELS = 60;

export class Chat {
  #messages = [];
  #steps = [];
  #running = null;
  #talk = byId("talk");
  #slider = byId("step");

  constructor() {
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.#running.abort();
      else this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running) this.#send();
    });
    byId("clear").addEventListener("click", () => this.#clear());
    this.#slider.addEventListener("input", () => this.#show(Number(this.#slider.value)));
    this.#talk.addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (token && token.closest(".turn") === this.answer) this.#show(Number(token.dataset.step));
    });
  }

  async #send() {
    const text = byId("prompt").value.trim();
    if (!text) return;
    byId("prompt").value = "";
    byId("talk-hint")?.remove();
    this.#messages.push({ role: "user", content: text });
    this.#talk.append(html("p", { class: "turn user" }, text));
    this.answer = html("p", { class: "turn assistant" });
    this.#talk.append(this.answer);
    this.#steps = [];
    this.#busy(new AbortController());
    const answer = { role: "assistant", content: "" };
    try {
      await this.#stream(answer);
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.#talk.append(html("p", { class: stopped ? "figures" : "figures problem" }, stopped ? "Stopped." : error.message));
    }
    // A conversation alternates: a question without an answer would be refused by many templates.
    if (answer.content) this.#messages.push(answer);
    else this.#messages.pop();
    this.#busy(null);
  }

  async #stream(answer) {
    const signal = this.#running.signal;
    const model = (await (await ask("GET", "/v1/models", { signal })).json()).data[0].id;
    const response = await ask("POST", "/v1/chat/completions", { body: this.#body(model), signal });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const [choice] = chunk.choices;
      answer.content += choice?.delta.content ?? "";
      if (choice?.speculation) this.#add(choice.speculation);
      if (chunk.usage) this.#sum(chunk);
    }
  }

  #body(model) {
    const body = {
      model,
      messages: this.#messages,
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(byId("temperature").value),
      max_tokens: Number(byId("max-tokens").value) || 1,
      speculation: { enabled: byId("speculation").checked, trace: true },
    };
    const seed = byId("seed").value;
    return seed === "" ? body : { ...body, seed: Number(seed) };
  }

  #add(step) {
    const near = this.#talk.scrollHeight - this.#talk.scrollTop - this.#talk.clientHeight < NEAR_PIXELS;
    const watching = Number(this.#slider.value) >= this.#steps.length;
    this.#steps.push({ ...step, root: this.#steps.at(-1)?.texts.at(-1) ?? "" });
    step.texts.forEach((text, place) => {
      const kind = place < step.accepted ? "accepted" : "bonus";
      this.answer.append(html("span", { class: `token ${kind}`, "data-step": this.#steps.length }, text));
    });
    if (near) this.#talk.scrollTop = this.#talk.scrollHeight;
    if (watching) this.#show(this.#steps.length);
    else this.#slider.max = this.#steps.length;
  }

  #sum({ usage, metrics }) {
    const { mean_acceptance_length: tau, num_spec_steps: steps, drafter_version: version } = metrics.speculative_decoding ?? {};
    const { total_seconds: seconds, first_token_seconds: first } = metrics.timings;
    const tokens = usage.completion_tokens;
    const facts = [`${tokens} tokens`, `${number(tokens / seconds)} per second`, `first after ${number(first, 2)} s`];
    if (steps) facts.push(`${number(tau, 2)} tokens per step (tau) over ${steps} steps`, `drafter version ${version}`);
    this.#talk.append(html("p", { class: "figures" }, facts.join(" · ")));
    this.#talk.scrollTop = this.#talk.scrollHeight;
  }

  #show(number_) {
    const step = this.#steps[number_ - 1];
    byId("tree").hidden = !step;
    if (!step) return;
    this.#slider.max = this.#steps.length;
    this.#slider.value = number_;
    byId("step-text").textContent = `${number_} of ${this.#steps.length}: ${told(step)}`;
    this.#slider.setAttribute("aria-valuetext", `step ${number_}, ${step.accepted} of ${step.drafted} accepted, ${visible(step.texts.join(""))}`);
    byId("tree-picture").replaceChildren(drawTree(step));
    for (const token of this.answer.querySelectorAll(".token")) {
      token.classList.toggle("chosen", !this.#running && Number(token.dataset.step) === number_);
    }
  }

  #busy(running) {
    this.#running = running;
    this.#talk.setAttribute("aria-busy", String(running !== null));
    byId("send").textContent = running ? "Stop" : "Send";
    byId("clear").disabled = running !== null;
    byId("ask-status").textContent = running ? "Answering" : "";
  }

  #clear() {
    this.#messages = [];
    this.#steps = [];
    this.#talk.replaceChildren();
    byId("tree").hidden = true;
    byId("prompt").focus();
  }
}
