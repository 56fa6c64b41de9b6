// Has the chat on the screen brought to the device before its next message is sent, and says how soon a reply to that
// would begin. Whoever looks at the chat asked for none of it, so that nothing of it is ever an error.
"use strict";

window.keepwarmWarmth = (() => {
  const BURST_MS = 30000; // that nothing was typed for, after which typing is a sign again
  let chat = "", asking = null, lastSign = 0;

  function show(seconds) {
    const place = document.querySelector("#kw-ready");
    if (!place) return;
    place.hidden = typeof seconds !== "number";
    place.textContent = place.hidden ? "" : `ready: ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  }

  async function look(mine) {
    const answer = await fetch(`/page/ready?chat=${encodeURIComponent(chat)}`, { signal: mine.signal, cache: "no-store" });
    const { seconds } = answer.ok ? await answer.json() : {};
    if (mine === asking) show(seconds);
  }

  // This chat was opened, or a reply in it has ended. Aborting the request ends the work on the server.
  async function warm(which) {
    if (which !== chat) show(null);
    asking?.abort();
    const mine = (asking = new AbortController());
    chat = which;
    lastSign = Date.now();
    try {
      await look(mine);
      const body = JSON.stringify({ chat });
      await fetch("/page/warm", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: mine.signal });
      if (mine === asking) await look(mine);
    } catch {
      if (mine === asking) show(null);
    }
  }

  // Somebody writes in this chat.
  function typed(which) {
    if (which !== chat || Date.now() - lastSign > BURST_MS) warm(which);
    lastSign = Date.now();
  }

  // The chat was left, or waits for no message.
  function leave() {
    asking?.abort();
    asking = null;
    chat = "";
    show(null);
  }

  return { warm, typed, leave };
})();
