// Brings the page of a run up to date: fetches it again and swaps the parts that have changed, so that scroll
// position, opened details and everything else stay as they are. Waits while nobody looks or text is selected.
"use strict";

const EVERY_MS = 3000;
const TIMEOUT_MS = 20000;
let shown = null;

function partsOf(root) {
  return new Map([...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
}

function isBusy() {
  const selection = document.getSelection();
  return document.hidden || (selection !== null && !selection.isCollapsed);
}

async function refresh() {
  const answer = await fetch(location.href, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = partsOf(page);
  const texts = new Map([...fresh].map(([name, part]) => [name, part.outerHTML]));
  for (const [name, part] of partsOf(document)) {
    const next = fresh.get(name);
    if (next === undefined || shown?.get(name) === texts.get(name)) continue;
    const open = [...part.querySelectorAll("details")].map((each) => each.open);
    next.querySelectorAll("details").forEach((each, at) => (each.open = open[at] ?? false));
    part.replaceWith(document.adoptNode(next));
  }
  shown = texts;
}

async function tick() {
  try {
    if (!isBusy()) await refresh();
    document.body.classList.remove("stale");
  } catch {
    document.body.classList.add("stale");
  }
  setTimeout(tick, EVERY_MS);
}

setTimeout(tick, EVERY_MS);
