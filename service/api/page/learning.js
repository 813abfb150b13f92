// What learning is doing, and the operator's buttons.

import { byId, html, number } from "./drawing.js";
import { ask, keys } from "./server.js";

const MOST_EVENTS = 20;
const SURE_MILLISECONDS = 4000;
const GRAVE = new Set(["rolled_back", "failed", "not_stored"]);
const ARMS = ["head", "full"];
const ACTIONS = ["pause", "resume", "rollback"];

export class Learning {
  #events = [];
  #status = null;
  #learns = "";
  #sure = false;

  constructor() {
    byId("pause").addEventListener("click", () => this.#act("pause"));
    byId("resume").addEventListener("click", () => this.#act("resume"));
    byId("rollback").addEventListener("click", () => this.#rollback());
  }

  restart(events) {
    this.#events = [];
    this.#remember(events);
  }

  show(moment) {
    this.#remember(moment.events);
    this.#status = moment.learning;
    this.#learns = moment.learns;
    this.#draw(moment.state);
  }

  keysChanged() {
    byId("learning-answer").textContent = keys.operator ? "" : "Enter the operator key under Keys to use these buttons.";
    this.#enable();
  }

  #draw(serverState) {
    const status = this.#status;
    byId("learning-body").hidden = !status;
    if (!status) {
      const off = `Learning is ${this.#learns}; it is turned on by --adaptation.enabled true.`;
      byId("learning-state").textContent = serverState === "ready" ? off : "Not known yet";
      return;
    }
    byId("learning-state").textContent = sentence(status);
    byId("learning-facts").replaceChildren(...facts(status));
    byId("arms").replaceChildren(...ARMS.map((arm) => row(arm, status)));
    this.#enable();
  }

  #enable() {
    const may = Boolean(keys.operator && this.#status);
    byId("pause").disabled = !may || this.#status.paused;
    byId("resume").disabled = !may || !this.#status.paused;
    byId("rollback").disabled = !may;
  }

  #remember(events) {
    if (!events.length) return;
    this.#events = [...events].reverse().concat(this.#events).slice(0, MOST_EVENTS);
    byId("events").replaceChildren(...this.#events.map(line));
  }

  // What is taken back is never served again, so one press only arms the button.
  #rollback() {
    if (this.#sure) {
      this.#unsure();
      this.#act("rollback");
      return;
    }
    this.#sure = true;
    byId("rollback").textContent = "Press again to roll back";
    setTimeout(() => this.#unsure(), SURE_MILLISECONDS);
  }

  #unsure() {
    this.#sure = false;
    byId("rollback").textContent = "Roll back";
  }

  async #act(action) {
    const answer = byId("learning-answer");
    answer.textContent = "Waiting for the server; an update may have to end first.";
    for (const name of ACTIONS) byId(name).disabled = true;
    try {
      const response = await ask("POST", `/v1/adaptation/${action}`, { key: keys.operator });
      this.#status = await response.json();
      answer.textContent = `Done: ${sentence(this.#status)}`;
      this.#draw("ready");
    } catch (error) {
      answer.textContent = error.message;
      this.#enable();
    }
  }
}

function sentence(status) {
  const doing = status.paused ? "paused by an operator" : status.phase === "collecting" ? "making a drafter" : "learning";
  return `Policy ${status.policy}, ${doing}; drafter version ${status.version} serves. Learning is ${status.reason}.`;
}

function facts(status) {
  const values = {
    "Drafter version": status.origin === status.version ? `${status.version}` : `${status.version} (weights of ${status.origin})`,
    ...(status.wanted_positions
      ? { "Collected for a drafter": `${status.collected_positions} of ${status.wanted_positions} positions` }
      : {}),
    "Requests seen": status.queries_observed,
    "Requests kept for validation": status.validation_texts,
    "Published": status.publishes,
    "Refused by the gate": status.refusals,
    "Rolled back": status.rollbacks,
    ...(status.balance_seconds === null ? {} : { "Time it may still lose": `${number(status.balance_seconds)} s` }),
    "Time in training": `${number(status.training_seconds)} s`,
    "KL divergence from the start": number(status.kl_to_anchor, 4),
  };
  return Object.entries(values).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, String(value))]);
}

function row(arm, status) {
  const cells = [number(status.values[arm], 4), status.waiting[arm] ?? 0, status.updates[arm] ?? 0];
  return html("tr", {}, html("th", { scope: "row" }, arm), ...cells.map((cell) => html("td", {}, String(cell))));
}

function line(event) {
  const when = new Date(event.unix_seconds * 1000);
  const time = html("time", { datetime: when.toISOString() }, when.toLocaleTimeString());
  const words = `${event.kind.replaceAll("_", " ")} (${event.reason.replaceAll("_", " ")}), version ${event.version}`;
  return html("li", GRAVE.has(event.kind) ? { class: "grave" } : {}, time, words);
}
