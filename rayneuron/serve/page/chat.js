// The chat page: settings, the server's state, and the conversation.

import { complete, errorOf, headers } from "./stream.js";
import * as view from "./view.js";

const $ = (id) => document.getElementById(id);
const KEPT = ["system", "temperature", "max-tokens", "colours"]; // in localStorage; the key only while the tab lives
const DEFAULTS = { system: "", temperature: "0.7", "max-tokens": "", colours: "light dark" };
const RETRY_MS = 2000, HEALTH_MS = 5000;

let conversation = []; // {role, content, node} of what was said and answered; a new chat is a new list
let waiting = []; // {role, content, node} of what was typed while an answer was written
let running = null; // AbortController of the answer being written
let chosen = read(localStorage, "model") ?? ""; // the model
let limits = {}; // tokens of prompt and answer together, by model

function recall() {
  for (const id of KEPT) $(id).value = read(localStorage, id) ?? DEFAULTS[id];
  $("key").value = read(sessionStorage, "key") ?? "";
  show();
}

function remember() {
  for (const id of KEPT) write(localStorage, id, $(id).value);
  write(sessionStorage, "key", $("key").value);
  show();
}

function show() {
  $("temperature-shown").value = Number($("temperature").value).toFixed(2);
  document.documentElement.style.colorScheme = $("colours").value;
}

// Storage may be forbidden; the page works without.
function read(storage, name) {
  try { return storage.getItem(`rayneuron.${name}`); } catch { return null; }
}
function write(storage, name, value) {
  try { storage.setItem(`rayneuron.${name}`, value); } catch { /* not kept */ }
}

async function ask(path, body = null) {
  const reply = await fetch(path, {
    method: body ? "POST" : "GET", headers: headers($("key").value), body: body && JSON.stringify(body), cache: "no-store",
  });
  if (!reply.ok) throw await errorOf(reply);
  return reply;
}

// The models, once the server answers; from then on its health, as long as anybody looks.
async function connect() {
  try {
    const models = (await (await ask("v1/models")).json()).data;
    limits = Object.fromEntries(models.map((model) => [model.id, model.max_model_len]));
    $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id, false, model.id === chosen)));
    $("model").disabled = models.length < 2;
    state("ready", "ready");
  } catch (error) {
    lost(error);
  }
}

async function watch() {
  if (!document.hidden) {
    if ($("state").dataset.state !== "ready") await connect();
    else await ask("health").catch(lost);
  }
  setTimeout(watch, $("state").dataset.state === "ready" ? HEALTH_MS : RETRY_MS);
}

function lost(error) {
  state(error.status === 503 ? "wait" : "lost", error.status ? error.message : "the server does not answer");
  if (error.status === 401) openSettings(true);
}

function state(name, title) {
  Object.assign($("state"), { title, ariaLabel: title }).dataset.state = name;
  if (name !== "ready") $("model").replaceChildren(new Option(title));
  else chosen = $("model").value;
  const most = limits[chosen] ?? "";
  $("max-tokens").max = most;
  $("max-tokens").placeholder = `As many as fit${most && ` in ${most}`}`;
  $("model").title = $("model").value;
  if (name === "ready" && waiting.length === 0) $("hint").textContent = "";
  controls();
}

function controls() {
  const ready = $("state").dataset.state === "ready", text = $("prompt").value.trim();
  $("send").disabled = !ready || !text;
  $("send").hidden = running !== null && !text;
  $("stop").hidden = running === null;
}

function submit() {
  const text = $("prompt").value.trim();
  if (!text) return;
  if ($("send").disabled) return void ($("hint").textContent = `Not sent: ${$("state").title}`);
  $("prompt").value = "";
  $("hello").hidden = true;
  const said = { role: "user", content: text, node: view.question(text) };
  if (running === null) return void send(said);
  said.node.classList.add("waiting");
  waiting.push(said);
  $("hint").textContent = "Sent when this answer is complete; Stop gives it back.";
  view.toEnd();
  controls();
}

async function send(said) {
  if (conversation.at(-1)?.role === "user") conversation.pop(); // it was never answered
  said.node.classList.remove("waiting");
  conversation.push(said);
  await answer(said.node);
}

async function answer(above) {
  view.withdrawOffers();
  const shown = view.answer(above), talk = conversation;
  const controller = (running = new AbortController());
  controls();
  const clock = { sent: performance.now(), first: 0, last: 0, chunks: 0 };
  let text = "", reason = "", usage = null, wrong = null;
  try {
    await complete(body(), {
      key: $("key").value,
      signal: controller.signal,
      onText(piece) {
        clock.last = performance.now();
        clock.first ||= clock.last;
        clock.chunks++;
        text += piece;
        shown.write(text);
        shown.figures(view.figures(clock, null, ""));
      },
      onFinish(why) { reason = why; },
      onUsage(counts) { usage = counts; },
    });
  } catch (error) {
    if (controller.signal.aborted) reason = "stopped";
    else wrong = error;
  }
  shown.end(text, view.figures(clock, usage, reason));
  if (text) talk.push({ role: "assistant", content: text, node: shown.node });
  if (running !== controller) return; // a new chat has begun
  running = null;
  if (wrong || reason === "stopped") giveBack();
  const next = waiting.shift();
  if (waiting.length === 0) $("hint").textContent = "";
  controls();
  $("prompt").focus();
  if (wrong) await failed(wrong, shown, text === "" ? above : null);
  else if (next) await send(next);
}

// What was typed meanwhile goes back to where it was typed.
function giveBack() {
  const back = waiting.splice(0);
  for (const { node } of back) node.remove();
  $("prompt").value = [...back.map((said) => said.content), $("prompt").value].filter(Boolean).join("\n");
}

// Say what went wrong and offer what may help; then see whether the server is still the same.
async function failed(error, shown, above) {
  shown.fail(error);
  if (above && error.status === 400 && conversation.length > 1 && (await tokensOver()) > 0) {
    shown.offer("Drop the oldest turns and try again", () => dropOldest().then(() => answer(above)));
  } else if (above) {
    shown.offer("Try again", () => answer(above));
  }
  if (error.status !== 400) await connect();
}

// By how many tokens the conversation is too long for the model; 0 where the server cannot say.
async function tokensOver(room = 1) {
  try {
    const { model, messages, max_tokens } = body();
    const told = await (await ask("tokenize", { model, messages })).json();
    return told.count + Math.max(max_tokens ?? 0, room) - told.max_model_len;
  } catch {
    return 0;
  }
}

// Leaves a quarter of the length for the answer, or else the last question alone.
async function dropOldest() {
  while (conversation.length > 1 && (await tokensOver(limits[chosen] >> 2)) > 0) {
    do Object.assign(conversation.shift().node, { title: "Not sent any more" }).classList.add("dropped");
    while (conversation[0].role !== "user");
  }
}

function body() {
  const system = $("system").value.trim();
  const most = $("max-tokens");
  const messages = conversation.map(({ role, content }) => ({ role, content }));
  return {
    model: chosen,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number($("temperature").value),
    ...(most.value && most.checkValidity() ? { max_tokens: Number(most.value) } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function openSettings(open) {
  $("settings").hidden = !open;
  $("toggle").ariaExpanded = String(open);
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("prompt").addEventListener("input", controls);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else openSettings(false);
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && $("state").dataset.state === "ready") ask("health").catch(lost); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  [conversation, waiting] = [[], []];
  $("log").replaceChildren($("hello"));
  $("hello").hidden = false;
  $("hint").textContent = "";
  controls();
  $("prompt").focus();
});
$("toggle").addEventListener("click", () => openSettings($("settings").hidden));
$("model").addEventListener("change", () => {
  state("ready", "ready");
  write(localStorage, "model", chosen);
});
$("settings").addEventListener("input", remember);
$("settings").addEventListener("submit", (event) => event.preventDefault());

recall();
watch();
