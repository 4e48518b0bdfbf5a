// The chat page: settings, conversation, and the figures of each answer.

import { element, render } from "./markdown.js";
import { complete, errorOf, headers } from "./stream.js";

const $ = (id) => document.getElementById(id);
const KEPT = ["system", "temperature", "max-tokens", "colours"]; // in localStorage; the key only while the tab lives
const DEFAULTS = { system: "", temperature: "0.7", "max-tokens": "", colours: "light dark" };
const RETRY_MS = 2000;

let conversation = []; // {role, content} of what was said and answered; a new chat is a new list
let running = null; // AbortController of the answer being written

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

// Until the server is ready it says 503 or nothing; ask again.
async function connect() {
  try {
    const reply = await fetch("v1/models", { headers: headers($("key").value) });
    if (!reply.ok) throw await errorOf(reply);
    const models = (await reply.json()).data;
    $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
    $("model").disabled = models.length < 2;
    state("ready", "ready");
  } catch (error) {
    state(error.status === 503 ? "wait" : "lost", error.status ? error.message : "the server does not answer");
    if (error.status === 401) openSettings(true);
    setTimeout(connect, RETRY_MS);
  }
}

function state(name, title) {
  $("state").dataset.state = name;
  $("state").title = title;
  if (name !== "ready") $("model").replaceChildren(new Option(title));
  controls();
}

function controls() {
  const ready = $("state").dataset.state === "ready";
  $("send").disabled = !ready || !$("prompt").value.trim();
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
}

async function send(text) {
  if (conversation.at(-1)?.role === "user") conversation.pop(); // it was never answered
  conversation.push({ role: "user", content: text });
  $("hello").hidden = true;
  $("log").append(element("article", [text], "user"));
  await answer();
}

async function answer() {
  const view = answerView(), talk = conversation;
  const controller = (running = new AbortController());
  controls();
  const clock = { sent: performance.now(), first: 0, last: 0, chunks: 0 };
  let text = "", reason = "", usage = null;
  try {
    await complete(body(), {
      key: $("key").value,
      signal: controller.signal,
      onText(piece) {
        clock.last = performance.now();
        clock.first ||= clock.last;
        clock.chunks++;
        text += piece;
        view.write(text);
        view.figures(figures(clock, null, ""));
      },
      onFinish(why) { reason = why; },
      onUsage(counts) { usage = counts; },
    });
  } catch (error) {
    if (controller.signal.aborted) reason = "stopped";
    else view.fail(error, text === "" ? () => { view.remove(); answer(); } : null);
  }
  view.end(text, figures(clock, usage, reason));
  if (text) talk.push({ role: "assistant", content: text });
  if (running === controller) running = null;
  controls();
  $("prompt").focus();
}

function body() {
  const system = $("system").value.trim();
  const most = $("max-tokens");
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    temperature: Number($("temperature").value),
    ...(most.value && most.checkValidity() ? { max_tokens: Number(most.value) } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// Tokens a second counts from the first token on: prefill has its own figure.
function figures(clock, usage, reason) {
  if (!clock.first) return [reason];
  const seconds = (clock.last - clock.first) / 1000;
  const tokens = usage?.completion_tokens ?? clock.chunks;
  const rate = seconds > 0 && tokens > 1 ? `${usage ? "" : "~"}${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const ending = { stop: "", length: "token limit reached" }[reason] ?? reason;
  return [`first token ${Math.round(clock.first - clock.sent)} ms`, rate, usage ? `${usage.prompt_tokens} + ${tokens} tokens` : "", ending];
}

function answerView() {
  const content = element("div", [], "body");
  const footer = element("footer");
  const article = element("article", [content, footer], "assistant busy");
  $("log").append(article);
  let pending = null;
  const paint = (text) => {
    const log = $("log");
    const following = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    content.replaceChildren(...render(text));
    if (following) log.scrollTop = log.scrollHeight;
  };
  $("log").scrollTop = $("log").scrollHeight;
  return {
    write(text) { // at most once a frame, however fast tokens come
      if (pending === null) requestAnimationFrame(() => { if (pending !== null) paint(pending); pending = null; });
      pending = text;
    },
    figures(words) { footer.replaceChildren(...words.filter(Boolean).map((word) => element("span", [word]))); },
    fail(error, again) {
      const after = error.retryAfter ? ` (try again in ${error.retryAfter} s)` : "";
      const title = error.status ? `Error ${error.status}: ` : "";
      article.insertBefore(element("div", [`${title}${error.message}${after}`], "error"), footer);
      if (again) article.append(button("Try again", again));
    },
    end(text, words) {
      pending = null;
      article.classList.remove("busy");
      paint(text);
      this.figures(words);
      if (text) footer.append(copyButton(() => text));
      for (const caption of content.querySelectorAll("figcaption")) caption.append(copyButton(() => caption.nextSibling.textContent));
    },
    remove() { article.remove(); },
  };
}

function button(label, act) {
  const node = element("button", [label], "quiet");
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

function copyButton(text) {
  const node = button("Copy", async () => {
    await navigator.clipboard.writeText(text());
    node.textContent = "Copied";
    setTimeout(() => (node.textContent = "Copy"), 1200);
  });
  node.hidden = !navigator.clipboard; // absent on plain http from another host
  return node;
}

function openSettings(open) {
  $("settings").hidden = !open;
  $("toggle").ariaExpanded = String(open);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running || $("send").disabled) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("input", controls);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  conversation = [];
  $("log").replaceChildren($("hello"));
  $("hello").hidden = false;
  controls();
  $("prompt").focus();
});
$("toggle").addEventListener("click", () => openSettings($("settings").hidden));
$("settings").addEventListener("input", remember);
$("settings").addEventListener("submit", (event) => event.preventDefault());

recall();
connect();
