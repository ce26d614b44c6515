"use strict";

const $ = (id) => document.getElementById(id);
let model = null; // what /v1/models says
let tokens = []; // {text, probability, top, experts, given, span}
let read = 0; // number of tokens whose experts are known
let chosen = -1;
let running = null; // AbortController

const headers = () => {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").className = wrong ? "wrong" : "";
}

async function describe() {
  const answer = await fetch("/v1/models", { headers: headers() });
  if (answer.status === 401) {
    document.querySelector("details").open = true;
    return say("This server needs its API key: enter it under Options.", true);
  }
  model = (await answer.json()).data[0];
  say("");
  $("model").textContent = document.title = model.id;
  const choices = [["probability", "probability"]];
  for (const [i, layer] of model.blackmamba.routed_layers.entries()) choices.push([`${i}`, `expert in layer ${layer}`]);
  choices.push(["none", "none"]);
  $("colour").replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  paint();
}

// Expert e is one hue; a second ring of lighter colours starts after 16.
const hue = (expert) => Math.round((360 * (expert % 16)) / Math.min(16, model.blackmamba.experts));
const ofExpert = (expert) => `hsl(${hue(expert)} 70% calc(var(--light) + ${expert < 16 ? 0 : 8}%))`;
// Likely tokens have no colour, unlikely ones are orange.
const ofProbability = (p) => `hsl(28 90% 55% / ${(0.62 * (1 - Math.sqrt(p))).toFixed(3)})`;

function colourOf(token) {
  const what = $("colour").value;
  if (what === "probability") return token.probability === null ? "" : ofProbability(token.probability);
  if (what === "none" || !token.experts) return "";
  return ofExpert(token.experts[Number(what)][0]);
}

function paint() {
  const what = $("colour").value;
  for (const token of tokens) if (token.span) token.span.style.background = colourOf(token);
  const keys = [];
  if (what === "probability") {
    for (const p of [1, 0.5, 0.1, 0.01]) keys.push([`${100 * p}%`, ofProbability(p)]);
  } else if (what !== "none" && model) {
    for (let e = 0; e < model.blackmamba.experts; e++) keys.push([`${e}`, ofExpert(e)]);
  }
  $("legend").replaceChildren(...keys.map(([text, colour]) => {
    const key = document.createElement("span");
    key.className = "key";
    key.textContent = text;
    key.style.background = colour;
    return key;
  }));
}

function add(choice, given) {
  const told = choice.logprobs;
  told.tokens.forEach((text, i) => {
    const top = told.top_logprobs[i] || {};
    const logprob = told.token_logprobs[i];
    tokens.push({ text, probability: logprob === null ? null : Math.exp(logprob), top, experts: null, given, span: null });
  });
  for (const experts of choice.experts) {
    if (read < tokens.length) tokens[read].experts = experts;
    if (tokens[read] && tokens[read].span) tokens[read].span.style.background = colourOf(tokens[read]);
    read++;
  }
  if (given) {
    showWhole(choice.text);
  } else if (choice.text) {
    // A character may take several tokens: the last of them shows it.
    show(tokens[tokens.length - 1], choice.text);
  }
}

// Show given tokens. Where several make up one character, each is told in bytes; the last of them shows the character.
function showWhole(text) {
  let at = 0;
  let last = null;
  for (const token of tokens) {
    const found = token.text.startsWith("bytes:\\x") ? -1 : text.indexOf(token.text, at);
    if (found > at && last) show(last, text.slice(at, found));
    if (found >= 0) {
      show(token, token.text);
      at = found + token.text.length;
      last = null;
    } else {
      last = token;
    }
  }
  if (last) show(last, text.slice(at));
}

function show(token, text) {
  token.span = document.createElement("span");
  token.span.textContent = text;
  token.span.className = token.given ? "given" : "";
  token.span.style.background = colourOf(token);
  token.span.dataset.index = tokens.indexOf(token);
  $("output").append(token.span);
}

const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
const percent = (p) => (p >= 0.0001 ? `${(100 * p).toFixed(p < 0.1 ? 2 : 1)}%` : "<0.01%");

function element(name, content, className = "") {
  const made = document.createElement(name);
  made.className = className;
  made.append(...[content].flat());
  return made;
}

function choose(index) {
  const token = tokens[index];
  if (!token || !token.span) return;
  if (tokens[chosen] && tokens[chosen].span) tokens[chosen].span.classList.remove("chosen");
  chosen = index;
  token.span.classList.add("chosen");
  const probability = token.probability === null ? "the first token: not predicted" : percent(token.probability);
  const left = [element("h2", [element("code", visible(token.text)), ` ${probability}`])];
  for (const [text, logprob] of Object.entries(token.top)) {
    const bar = document.createElement("i");
    bar.style.width = `${100 * Math.exp(logprob)}%`;
    left.push(element("div", [element("code", visible(text)), element("span", bar),
      element("b", percent(Math.exp(logprob)))], "candidate"));
  }
  const parts = [element("div", left)];
  if (model.blackmamba.experts) {
    const chips = (token.experts || []).map((experts, i) => {
      const chip = element("span", `${model.blackmamba.routed_layers[i]}: ${experts.join("+")}`, "key");
      chip.style.background = ofExpert(experts[0]);
      return chip;
    });
    const title = token.experts ? "layer: expert that read this token" : "not read yet: the last token has no experts";
    parts.push(element("div", [element("h2", title), element("div", chips, "layers")]));
  }
  $("detail").replaceChildren(...parts);
  $("detail").hidden = false;
}

const gone = (error, written = 0) =>
  `The server has ended${written ? ` after ${written} tokens` : ""}: start blackmamba chat again (${error.message}).`;

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part !== "data: [DONE]") yield JSON.parse(part.slice("data: ".length));
  }
}

function asked() {
  const body = { model: model.id, prompt: $("prompt").value, stream: true, echo: true, logprobs: 5, experts: true };
  for (const id of ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"]) {
    if ($(id).value !== "") body[id] = Number($(id).value);
  }
  const stop = $("stop_text").value.replaceAll("\\n", "\n");
  return stop ? { ...body, stop } : body;
}

function busy(now) {
  $("run").disabled = now;
  $("stop").disabled = !now;
  $("keep").disabled = now || tokens.length === 0;
}

const ENDS = { stop: "the text ends here", length: "the number of new tokens is reached" };
const KEPT = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop_text"];

// Show what is wrong with a number, also in options that are closed.
function valid() {
  const wrong = document.querySelector("#form :invalid");
  if (!wrong) return true;
  if (wrong.closest("details")) wrong.closest("details").open = true;
  say(`${wrong.labels[0].textContent.trim()}: ${wrong.validationMessage}`, true);
  wrong.focus();
  return false;
}

// A reload keeps what was typed, but not the key.
function restore() {
  for (const id of KEPT) {
    const kept = sessionStorage.getItem(id);
    if (kept !== null) $(id).value = kept;
    $(id).addEventListener("input", () => sessionStorage.setItem(id, $(id).value));
  }
}

async function run() {
  if (!valid()) return;
  if (!model) await describe();
  if (!model) return;
  tokens = [];
  read = 0;
  chosen = -1;
  $("output").replaceChildren();
  $("detail").hidden = true;
  running = new AbortController();
  busy(true);
  say("Reading the text …");
  let seed, first = true, finished = null, begun = 0, written = 0;
  try {
    const request = { method: "POST", headers: headers(), body: JSON.stringify(asked()), signal: running.signal };
    const answer = await fetch("/v1/completions", request);
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      seed = event.seed;
      add(event.choices[0], first);
      if (first) begun = performance.now();
      else written += event.choices[0].logprobs.tokens.length;
      first = false;
      finished = event.choices[0].finish_reason;
      const rate = written > 1 ? `, ${(written / ((performance.now() - begun) / 1000)).toFixed(1)} per second` : "";
      say(`${written} tokens${rate}, seed ${seed}${finished ? `; ${ENDS[finished] || finished}` : ""}`);
    }
    if (!finished) throw new TypeError("the connection was closed");
  } catch (error) {
    if (error.name === "AbortError") say(`stopped after ${written} tokens, seed ${seed}`);
    else say(error instanceof TypeError ? gone(error, written) : error.message, true);
  }
  running = null;
  busy(false);
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
$("stop").addEventListener("click", () => running && running.abort());
$("keep").addEventListener("click", () => { 
  $("prompt").value = $("output").textContent;
  $("prompt").dispatchEvent(new Event("input"));
  $("prompt").focus();
});
$("colour").addEventListener("change", paint);
$("key").addEventListener("change", describe);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) { event.preventDefault(); run(); }
});
for (const kind of ["pointerover", "click"]) {
  $("output").addEventListener(kind, (event) => {
    if (event.target.dataset.index !== undefined) choose(Number(event.target.dataset.index));
  });
}
$("output").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  let index = chosen < 0 && step < 0 ? tokens.length - 1 : chosen + step;
  while (tokens[index] && !tokens[index].span) index += step;
  choose(index);
});
restore();
describe().catch((error) => say(gone(error), true));
