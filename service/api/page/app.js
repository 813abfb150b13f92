// The live page: follows the server's feed and shows it; the playground and the operator's panel are parts of their own.

import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { byId, number } from "./drawing.js";
import { Learning } from "./learning.js";
import { ask, events, keys } from "./server.js";

const LONGEST_WAIT_SECONDS = 10;
const SILENCE_SECONDS = 8;
const STATES = { loading: "loading the model", ready: "ready", draining: "shutting down", failed: "the engine has failed: see the log" };

const charts = new Charts();
const learning = new Learning();
let hurry = () => {};
let leave = () => {};
new Chat();

function showState(state, words) {
  byId("state").className = state;
  byId("state-text").textContent = words;
}

// Where models are asked for with a key, their name is a detail that can wait until there is one.
async function showModel() {
  const answer = await fetch("/v1/models", { headers: keys.api ? { authorization: `Bearer ${keys.api}` } : {} });
  const [model] = answer.ok ? (await answer.json()).data : [];
  byId("model").textContent = model ? ` · ${model.id} · drafter ${model.drafter} · numerics ${model.numerics}` : "";
}

// The whole time since the start, in which past answers pile up and learning goes on.
function showGain() {
  const { tokens, seconds, plain } = charts.sums();
  byId("gain").hidden = !seconds;
  if (!seconds) return;
  const speed = `${number(plain / seconds, 2)} times as fast as plain decoding over ${tokens.toLocaleString("en")} tokens`;
  byId("gain").textContent = `Since start: ${speed}. Dashed below: what plain decoding would have reached on the same requests, ` +
    "estimated from the measured time of its steps; the gap is what past answers and the drafter gained. Idle time is left out.";
}

// What is believed stays while nothing runs.
function showDrafting(now) {
  if (!now) return;
  const batch = now.sequences === 1 ? "one request" : `${now.sequences} requests or more`;
  const gain = `${number(now.gain, 2)} ± ${number(now.gain_sd, 2)} plain steps per step of ${batch}`;
  const ledger = `${number(now.lost_seconds, 2)} s lost so far, ${number(now.balance_seconds, 2)} s more allowed`;
  byId("drafting").textContent = `Expected now: drafting gains ${gain} (${ledger}).`;
}

// Texts go on without what keeps books; somebody should look at the log.
function showSwitchedOff(parts) {
  const words = Object.entries(parts).map(([part, since]) => `${part} (since ${new Date(1000 * since).toLocaleString()})`);
  byId("switched-off").hidden = !words.length;
  byId("switched-off").textContent = `Switched off after repeated errors, until a restart: ${words.join(", ")}. Texts are not affected; the log says why.`;
}

// Of accepted tokens those of the last minutes, of which the charts keep the points.
function showMemory(memory) {
  byId("memory").hidden = !memory;
  if (!memory) return;
  const accepted = charts.points.map((point) => point.accepted_by_source);
  const total = accepted.flatMap(Object.values).reduce((sum, count) => sum + count, 0);
  const own = accepted.reduce((sum, counts) => sum + (counts.memory ?? 0), 0);
  const share = total ? `${number((100 * own) / total, 0)} % of the tokens accepted lately were copied from them or from their own text` : "no token was accepted lately";
  const held = `${memory.remembered_tokens.toLocaleString("en")} tokens stored`;
  byId("memory").textContent = `Past answers: ${held}, ${number(100 * memory.used_share, 0)} % of their memory full; ${share}.`;
}

function take({ name, data }) {
  const news = JSON.parse(data);
  if (name === "past") {
    charts.restart(news.points, news.since_start);
    learning.restart(news.events);
    return;
  }
  if (news.state === "ready" && byId("state").className !== "ready") showModel();
  showState(news.state, STATES[news.state] ?? news.state);
  charts.add(news);
  showGain();
  showDrafting(news.drafting);
  showMemory(news.memory);
  showSwitchedOff(news.switched_off);
  learning.show(news);
}

// A dead connection may never say so: a feed that falls silent is given up.
async function readFeed() {
  const giveUp = new AbortController();
  leave = () => giveUp.abort();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => giveUp.abort(), SILENCE_SECONDS * 1000);
  };
  try {
    heard();
    for await (const event of events(await ask("GET", "/adaptree/feed", { signal: giveUp.signal }))) {
      heard();
      take(event);
    }
  } finally {
    clearTimeout(timer);
  }
}

async function follow() {
  for (let wait = 1; ; wait = Math.min(wait * 2, LONGEST_WAIT_SECONDS)) {
    const began = Date.now();
    try {
      await readFeed();
      showState("lost", "the server closed the feed; reconnecting");
    } catch (error) {
      showState("lost", error.status === 401 ? "the feed needs an API key: see Keys" : "no connection; retrying");
    }
    if (Date.now() - began > LONGEST_WAIT_SECONDS * 1000) wait = 1;
    await new Promise((done) => {
      hurry = done;
      setTimeout(done, wait * 1000);
    });
  }
}

byId("keys").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  keys.api = byId("api-key").value.trim();
  keys.operator = byId("operator-key").value.trim();
  byId("keys").open = false;
  byId("keys").querySelector("summary").focus();
  learning.keysChanged();
  showModel();
  hurry();
});

// A page that a browser keeps for going back to must not keep its connection.
addEventListener("pagehide", () => leave());

follow();
