// Keys: an element with data-key is clicked when its key is pressed outside of a field, which Escape leaves. Loading and
// sending of parts is done by htmx.
"use strict";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const target = event.target;
  const fields = "input:not([type=checkbox]), select, textarea, [contenteditable]";
  if (target instanceof HTMLElement && target.closest(fields)) {
    if (event.key === "Escape") target.blur();
    return;
  }
  // The arrow keys scroll a focused table or text.
  if (event.key.startsWith("Arrow") && target instanceof Element && target.closest("[tabindex]")) return;
  const match = [...document.querySelectorAll("[data-key]")].find((element) => element.dataset.key === event.key);
  if (match === undefined) return;
  event.preventDefault();
  match.click();
});
// htmx keeps the old part when a request fails; the page says so.
for (const failure of ["htmx:responseError", "htmx:sendError"]) {
  document.addEventListener(failure, (event) => {
    const status = event.detail.xhr ? event.detail.xhr.status : 0;
    const closed = "This page is no longer open: start assay view again.";
    const text = status === 401 ? closed : "assay view does not answer.";
    let line = document.getElementById("connection");
    if (line === null) {
      line = document.createElement("p");
      line.id = "connection";
      line.className = "failure";
      line.setAttribute("role", "alert");
      document.getElementById("content").prepend(line);
    }
    line.textContent = status >= 400 && status !== 401 ? `Not done: the server answered ${status}.` : text;
  });
}
// A part that is loaded again keeps open and closed what the reader opened and closed.
const unfolded = new Map();
const nameOf = (part, at) => part.id || `${at}:${part.querySelector("summary")?.textContent ?? ""}`;
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.target.id !== "live") return;
  unfolded.clear();
  event.target.querySelectorAll("details").forEach((part, at) => unfolded.set(nameOf(part, at), part.open));
});
document.addEventListener("htmx:afterSwap", () => {
  document.querySelectorAll("#live details").forEach((part, at) => {
    const before = unfolded.get(nameOf(part, at));
    if (before !== undefined) part.open = before;
  });
  unfolded.clear();
});
document.addEventListener("htmx:afterOnLoad", () => {
  const line = document.getElementById("connection");
  if (line !== null) line.remove();
});
