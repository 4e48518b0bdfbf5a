// What the conversation shows: messages, an answer while it is written, buttons.

import { element, render } from "./markdown.js";

const log = document.getElementById("log");

export function toEnd() {
  log.scrollTop = log.scrollHeight;
}

// A message of the person at the end of the log.
export function question(text) {
  const node = element("article", [text], "user");
  node.ariaLabel = "You";
  log.append(node);
  toEnd();
  return node;
}

// An answer below `above`.
export function answer(above) {
  const content = element("div", [], "body");
  const footer = element("footer");
  const node = element("article", [content, footer], "assistant busy");
  node.ariaLabel = "Answer";
  log.ariaBusy = "true"; // read aloud once it is complete, not at every token
  const following = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const follow = following();
  above.after(node);
  if (follow) toEnd();
  let pending = null;
  const paint = (text) => {
    const follow = following();
    content.replaceChildren(...render(text));
    if (follow) toEnd();
  };
  return {
    node,
    write(text) { // at most once a frame, however fast tokens come
      if (pending === null) requestAnimationFrame(() => { if (pending !== null) paint(pending); pending = null; });
      pending = text;
    },
    figures(words) { footer.replaceChildren(...words.filter(Boolean).map((word) => element("span", [word]))); },
    fail(error) {
      const after = error.retryAfter ? ` (try again in ${error.retryAfter} s)` : "";
      const title = error.status ? `Error ${error.status}: ` : "";
      node.insertBefore(element("div", [`${title}${error.message}${after}`], "error"), footer);
    },
    offer(label, act) {
      const offered = button(label, () => { node.remove(); act(); });
      offered.classList.add("offer");
      node.append(offered);
      offered.scrollIntoView({ block: "nearest" });
    },
    end(text, words) {
      pending = null;
      node.classList.remove("busy");
      log.ariaBusy = "false";
      paint(text);
      this.figures(words);
      if (text) footer.append(copyButton(() => text));
      for (const caption of content.querySelectorAll("figcaption")) caption.append(copyButton(() => caption.nextSibling.textContent));
    },
  };
}

// What could be tried again an answer ago cannot any more.
export function withdrawOffers() {
  for (const offered of log.querySelectorAll(".offer")) offered.remove();
}

// Tokens a second counts from the first token on: prefill has its own figure.
export function figures(clock, usage, reason) {
  if (!clock.first) return [reason];
  const seconds = (clock.last - clock.first) / 1000;
  const tokens = usage?.completion_tokens ?? clock.chunks;
  const speed = (tokens - 1) / seconds;
  const rate = seconds > 0 && tokens > 1 ? `${usage ? "" : "~"}${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s` : "";
  const ending = { stop: "", length: "token limit reached" }[reason] ?? reason;
  return [`first token ${Math.round(clock.first - clock.sent)} ms`, rate, usage ? `${usage.prompt_tokens} + ${tokens} tokens` : "", ending];
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
