// The browser's half of the chat page. It owns which chat is on the screen (the address says it), the drafts, the list
// of chats and the state line; everything else is the server's. Packets from the server name their chat, and only
// those of the chat on the screen are shown.
"use strict";

window.keepwarm = (() => {
  const NEW = "new-";
  const POLL_MS = 2500, BUSY_POLL_MS = 700, SEND_PATIENCE_MS = 20000;
  const $ = (selector, root = document) => root.querySelector(selector);
  const now = () => Date.now();

  let trigger = null; // set by Gradio when its events can be fired
  let newCount = 0;
  let current = fromAddress() || NEW + ++newCount;
  let shown = {}; // slot -> the last HTML that was accepted
  let header = null; // the current chat's title, prompt and whether that is fixed
  let running = false, stopping = false, sendingSince = 0, leavingPrompt = null;
  let engine = { phase: "loading", stage: "", done: 0, total: 0, message: "" }, warming = null;
  let server = null, offline = false, trouble = "", chats = [], more = false, version = "", limit = 100, pollTimer = 0, polling = false;
  let stick = true;
  let live = null, stream = null; // the slot of the reply in the making, and the events that feed it

  function fromAddress() {
    return new URL(location.href).searchParams.get("chat") || "";
  }

  // --- packets ---------------------------------------------------------------------------------------------------

  function belongs(packet) {
    if (!packet) return false;
    if (packet.was && packet.was === current) adopt(packet.chat);
    return packet.chat === current;
  }

  // A new chat got its id with its first message: same chat, new name.
  function adopt(chat) {
    if (chat === current) return;
    sessionStorage.removeItem(draftKey(current));
    current = chat;
    history.replaceState(null, "", addressOf(chat));
    poll();
  }

  // Called by a slot's template: the HTML it shows. What belongs to another chat changes nothing.
  function accept(slot, packet) {
    if (belongs(packet)) shown[slot] = packet.html;
    return withOpenThoughts(shown[slot] || "");
  }

  // What somebody opened stays open while the reply grows and once it is there.
  const openThoughts = new Set();

  function withOpenThoughts(html) {
    return html.replace(/<details class="kw-thought" data-thought="([^"]*)"/g, (tag, id) => (openThoughts.has(id) ? `${tag} open` : tag));
  }

  // Called once for each slot: what a packet means beyond its HTML.
  function slot(name, props, watch) {
    watch("value", () => {
      const packet = props.value;
      if (packet?.sent) [packet.was, packet.chat].forEach((chat) => sessionStorage.removeItem(draftKey(chat)));
      if (packet?.sent && packet.was.startsWith(NEW)) keepPrompt("");
      if (!belongs(packet)) return;
      if (name === "header") showHeader(packet);
      if (name === "live") showRunning(packet.running);
      if (name === "transcript") document.body.classList.remove("kw-opening");
      if (name === "notice") {
        if (packet.sent) afterSent();
        sendingSince = 0;
        refreshSend();
      }
      if (stick) toEnd();
      setTimeout(refreshRetry); // the HTML is drawn after this
    });
    if (name === "live") live = props;
    if (name === "header") showModel();
  }

  // Listen to the reply being written in the current chat; the server tells all of it again, so it can be joined late.
  function follow() {
    stream?.close();
    const chat = current, mine = new EventSource(`/page/turn?chat=${encodeURIComponent(chat)}`);
    stream = mine;
    mine.onmessage = (event) => {
      if (mine !== stream || chat !== current) return;
      live.value = { chat, html: JSON.parse(event.data), running: true };
      if (stick) toEnd();
    };
    mine.addEventListener("done", () => {
      if (mine === stream) (unfollow(), reopen());
      poll();
    });
    mine.onerror = () => {
      if (mine === stream) unfollow(); // the next look at the server's state joins again
      poll();
    };
  }

  function unfollow() {
    stream?.close();
    stream = null;
  }

  function showHeader(packet) {
    if (!header && !box().value) setValue(box(), sessionStorage.getItem(draftKey(current)) || ""); // after a reload
    if (!header && document.activeElement === document.body) focusBox();
    header = packet;
    document.title = packet.title ? `${packet.title} · Keepwarm` : "Keepwarm";
    const prompt = $("#kw-prompt textarea");
    if (prompt) {
      setValue(prompt, packet.prompt ?? keptPrompt());
      prompt.readOnly = packet.fixed;
      $("#kw-prompt-open").hidden = packet.fixed;
      $("#kw-prompt-fixed").hidden = !packet.fixed || !packet.prompt;
      $("#kw-prompt-default").hidden = !packet.fixed || Boolean(packet.prompt);
    }
    showModel();
    markCurrent();
  }

  function showRunning(value) {
    const changed = running !== value;
    if (changed) poll();
    running = value;
    if (changed) warm();
    if (running && !document.hidden) follow();
    else unfollow();
    if (!value && stopping) focusBox(); // the button that was pressed goes away
    if (!value) stopping = false;
    document.body.classList.toggle("kw-running", running);
    refreshSend();
  }

  // --- which chat ------------------------------------------------------------------------------------------------

  const addressOf = (chat) => (chat.startsWith(NEW) ? "/" : `/?chat=${encodeURIComponent(chat)}`);
  const draftKey = (chat) => "kw-draft:" + (chat.startsWith(NEW) ? "new" : chat);

  function open(chat, { push = true } = {}) {
    keepDraft();
    current = chat;
    if (push) history.pushState(null, "", addressOf(chat));
    unfollow();
    running = stopping = false;
    sendingSince = 0;
    if (live) live.value = { chat, html: "", running: false };
    document.body.classList.remove("kw-running", "kw-menu");
    document.body.classList.toggle("kw-opening", !chat.startsWith(NEW));
    markCurrent();
    stick = true;
    setValue(box(), sessionStorage.getItem(draftKey(chat)) || "");
    trigger("open", { chat });
    warm();
    focusBox();
  }

  // Is a message likely to come next in this chat? Then its cache is to be near.
  const awaitsMessage = () => !current.startsWith(NEW) && !running && !offline && engine.phase === "ready";
  const warm = () => (awaitsMessage() ? keepwarmWarmth.warm(current) : keepwarmWarmth.leave());

  // A new chat has the prompt that waited for it, unless it follows on one that was not used.
  function newChat(prompt = current.startsWith(NEW) ? "" : keptPrompt()) {
    keepPrompt(prompt);
    open(NEW + ++newCount);
    const field = $("#kw-prompt textarea");
    if (field) {
      field.readOnly = false;
      setValue(field, prompt);
    }
  }

  function reopen() {
    trigger?.("open", { chat: current });
  }

  function markCurrent() {
    for (const link of document.querySelectorAll("#kw-chats a"))
      link.dataset.chat === current ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }

  // --- the message box -------------------------------------------------------------------------------------------

  const box = () => $("#kw-box textarea");

  function setValue(field, value) {
    if (!field || field.value === value) return;
    field.value = value;
    field.dispatchEvent(new Event("input", { bubbles: true })); // Gradio listens to this
  }

  function keepDraft() {
    const text = box()?.value || "";
    text ? sessionStorage.setItem(draftKey(current), text) : sessionStorage.removeItem(draftKey(current));
  }

  function focusBox() {
    if (matchMedia("(hover: hover)").matches) box()?.focus(); // elsewhere it would bring up a keyboard
  }

  function whyNoReply() {
    if (offline) return "Keepwarm does not answer";
    if (engine.phase !== "ready") return engine.phase === "failed" ? "There is no model to answer" : "The model is not ready yet";
    return "";
  }

  function whyNotSend() {
    if (whyNoReply()) return whyNoReply();
    if (running) return "A reply is being written";
    if (sendingSince && now() - sendingSince < SEND_PATIENCE_MS) return "Sending";
    if (!box()?.value.trim()) return "Write a message first";
    return "";
  }

  function refreshRetry() {
    const reason = whyNoReply();
    for (const button of document.querySelectorAll(".kw-retry")) {
      button.setAttribute("aria-disabled", reason ? "true" : "false");
      button.title = reason;
    }
  }

  function refreshSend() {
    refreshRetry();
    const button = $("#kw-send");
    if (!button) return;
    const reason = whyNotSend();
    button.setAttribute("aria-disabled", reason ? "true" : "false");
    button.title = reason || "Send (Enter)";
    const stop = $("#kw-stop");
    if (stop) {
      stop.disabled = stopping;
      stop.textContent = stopping ? "Stopping" : "Stop";
    }
  }

  function afterSent() {
    sessionStorage.removeItem(draftKey(current));
    stick = true;
    setValue(box(), "");
  }

  function sent() {
    sendingSince = 0;
    refreshSend();
  }

  function onKey(event) {
    if (event.target.closest?.("#kw-box") && event.key === "Enter") {
      if (event.isComposing || event.keyCode === 229) return event.stopPropagation(); // the input method's Enter
      if (event.shiftKey) return event.stopPropagation(); // a new line
      event.preventDefault();
      event.stopPropagation();
      if (!event.repeat) $("#kw-send")?.click();
    } else if (event.key === "Escape" && !event.isComposing && !$("dialog[open]") && !event.target.closest?.(".kw-rename")) {
      const body = document.body.classList;
      if (body.contains("kw-menu")) body.remove("kw-menu");
      else if (body.contains("kw-settings-open")) toggleSettings();
    }
  }

  // --- settings ---------------------------------------------------------------------------------------------------

  const PROMPT_KEY = "kw-prompt:new", OPTIONS_KEY = "kw-options";
  const keptPrompt = () => sessionStorage.getItem(PROMPT_KEY) || "";
  const keepPrompt = (text) => (text ? sessionStorage.setItem(PROMPT_KEY, text) : sessionStorage.removeItem(PROMPT_KEY));
  let restored = false; // before that, what the settings show is not what a person chose

  function keepOptions(values) {
    if (restored) localStorage.setItem(OPTIONS_KEY, JSON.stringify(values.map((value) => value ?? "")));
  }

  // The settings as they were left in this browser; null when they were not touched, or cannot be read.
  function keptOptions() {
    try {
      const values = JSON.parse(localStorage.getItem(OPTIONS_KEY));
      const types = ["string", "number", "number", "string", "string"];
      return values?.length === types.length && types.every((type, at) => typeof values[at] === type) ? values : null;
    } catch {
      return null;
    }
  }

  // --- the list of chats -----------------------------------------------------------------------------------------

  const DAY_MS = 86400000;

  function groupOf(seconds) {
    const midnight = new Date().setHours(0, 0, 0, 0), at = seconds * 1000;
    if (at >= midnight) return "Today";
    if (at >= midnight - DAY_MS) return "Yesterday";
    if (at >= midnight - 7 * DAY_MS) return "Last 7 days";
    if (at >= midnight - 30 * DAY_MS) return "Last 30 days";
    return new Date(at).toLocaleDateString(undefined, { month: "long", year: "numeric" });
  }

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  const ICONS = {
    pencil: '<path d="m4 16 .7-3.2L13 4.5a1.6 1.6 0 0 1 2.3 0l.2.2a1.6 1.6 0 0 1 0 2.3l-8.3 8.3L4 16Z"/>',
    trash: '<path d="M4 6h12M8 6V4.2h4V6m-6.5 0 .7 10h7.6l.7-10M8.5 9v4.5m3-4.5v4.5"/>',
  };

  function iconButton(act, icon, label) {
    const button = element("button", { type: "button", class: "kw-icon kw-small", "data-act": act, "aria-label": label, title: label });
    button.innerHTML = `<svg class="kw-svg" viewBox="0 0 20 20" fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">${ICONS[icon]}</svg>`;
    return button;
  }

  function chatRow(chat) {
    const title = chat.title || "New chat";
    const link = element("a", { href: addressOf(chat.id), "data-act": "open", "data-chat": chat.id, title }, element("span", { class: "kw-name" }, title));
    if (chat.running) link.append(element("span", { class: "kw-typing", role: "img", "aria-label": "A reply is being written" }, element("i"), element("i"), element("i")));
    const tools = element("span", { class: "kw-tools" }, iconButton("rename", "pencil", `Rename ${title}`), iconButton("remove", "trash", `Delete ${title}`));
    return element("li", { "data-chat": chat.id }, link, tools);
  }

  function renderChats() {
    const nav = $("#kw-chats");
    if (!nav || $(".kw-rename", nav)) return; // not under a person's hands
    const focused = document.activeElement?.closest?.("#kw-chats li")?.dataset.chat;
    const parts = [];
    let group = "", list = null;
    for (const chat of chats) {
      const name = groupOf(chat.updated);
      if (name !== group) {
        list = element("ul");
        parts.push(element("h2", {}, name), list);
        group = name;
      }
      list.append(chatRow(chat));
    }
    if (!parts.length) parts.push(element("p", { class: "kw-none" }, "Chats appear here."));
    if (more) parts.push(element("button", { type: "button", class: "kw-quiet", "data-act": "more" }, "Show older chats"));
    const top = nav.scrollTop;
    nav.replaceChildren(...parts);
    nav.scrollTop = top;
    if (focused) $(`#kw-chats li[data-chat="${CSS.escape(focused)}"] a`)?.focus();
    markCurrent();
  }

  function rename(row) {
    const chat = row.dataset.chat, link = $("a", row), old = $(".kw-name", link).textContent;
    const field = element("input", { class: "kw-rename", "aria-label": "Name of the chat", maxlength: "120" });
    field.value = old;
    row.classList.add("kw-renaming");
    row.prepend(field);
    field.select();
    let done = false; // taking the field away blurs it
    const finish = (save) => {
      if (done) return;
      done = true;
      const title = field.value.trim();
      field.remove();
      row.classList.remove("kw-renaming");
      if (save && title && title !== old) {
        $(".kw-name", link).textContent = title;
        trigger("rename", { chat, title, current });
        setTimeout(poll, 150);
      }
      renderChats();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || event.keyCode === 229) return;
      if (event.key === "Enter" || event.key === "Escape") finish(event.key === "Enter");
    });
    field.addEventListener("blur", () => finish(true));
  }

  function remove(row) {
    const chat = row.dataset.chat, title = $(".kw-name", row).textContent;
    const yes = element("button", { type: "button", class: "kw-danger" }, "Delete");
    const no = element("button", { type: "button", class: "kw-quiet" }, "Keep");
    const dialog = element("dialog", { class: "kw-dialog", "aria-labelledby": "kw-ask" },
      element("h2", { id: "kw-ask" }, `Delete “${title}”?`), element("p", {}, "Its messages are erased from this machine for good."),
      element("div", { class: "kw-answers" }, no, yes));
    document.body.append(dialog);
    dialog.addEventListener("close", () => dialog.remove());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    no.addEventListener("click", () => dialog.close());
    yes.addEventListener("click", () => {
      dialog.close();
      sessionStorage.removeItem(draftKey(chat));
      trigger("remove", { chat, current });
      chats = chats.filter((other) => other.id !== chat);
      version = "";
      if (chat === current) newChat();
      renderChats();
      setTimeout(poll, 250);
    });
    dialog.showModal();
    no.focus();
  }

  // --- the state of the server -----------------------------------------------------------------------------------

  async function poll() {
    if (polling) return;
    polling = true;
    clearTimeout(pollTimer);
    try {
      const answer = await fetch(`/page/state?has=${version}&limit=${limit}`, { signal: AbortSignal.timeout(8000), cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const state = await answer.json();
      trouble = state.problem || ""; // then the state says nothing else
      if (!trouble) take(state);
      offline = false;
    } catch {
      offline = server !== null;
    }
    document.body.classList.toggle("kw-offline", offline);
    polling = false;
    showStatus();
    refreshSend();
    const busy = offline || trouble || engine.phase !== "ready" || warming || keepwarmModels.busy();
    pollTimer = setTimeout(poll, document.hidden ? 4 * POLL_MS : busy ? BUSY_POLL_MS : POLL_MS);
  }

  function take(state) {
    if (server && server !== state.server) {
      keepDraft();
      return location.reload(); // the server was restarted; the draft is kept
    }
    const awake = server && engine.phase !== "ready" && state.engine.phase === "ready";
    if ((offline && server) || awake) reopen(); // what the chat shows depends on both
    const was = engine.phase;
    server = state.server;
    engine = state.engine;
    warming = state.warming;
    if (was !== engine.phase) warm();
    keepwarmModels.take(state);
    if (state.chats) {
      chats = state.chats;
      more = state.more;
      version = state.version;
      renderChats();
    }
    const mine = chats.find((chat) => chat.id === current);
    const joined = running && (stream || document.hidden);
    if (mine && !sendingSince && trigger && (mine.running ? !joined : running && !stream)) reopen(); // elsewhere begun or ended
    showModel();
  }

  // --- the model of the chat ------------------------------------------------------------------------------------

  const MODEL_KEY = "kw-model:new";

  // Which model the next reply comes from; "" is the default.
  const model = () => (current.startsWith(NEW) ? keepwarmModels.known(sessionStorage.getItem(MODEL_KEY)) : header?.model || "");

  const THINKING = {
    preserve: "If it thinks before it answers, the reasoning of earlier replies stays in what it reads.",
    strip: "If it thinks before it answers, the reasoning of earlier replies is left out of what it reads.",
  };

  function tell(selector, text) {
    const place = $(selector);
    if (!place) return;
    place.textContent = text || "";
    place.hidden = !text;
  }

  function showModel() {
    const mine = keepwarmModels.find(model());
    for (const place of document.querySelectorAll(".kw-model")) {
      place.textContent = mine?.name || "";
      place.title = mine ? `Replies come from ${mine.name}; choose another` : "";
    }
    tell("#kw-model-note", mine?.notice);
    tell("#kw-thinking", THINKING[mine?.thinking]);
  }

  async function chooseModel(id) {
    const chat = current;
    try {
      sessionStorage.setItem(MODEL_KEY, id); // the next new chat begins with it too
      if (!chat.startsWith(NEW)) await keepwarmModels.choose(chat, id);
    } catch {
      return poll(); // gone, or out of reach: the state tells
    }
    if (chat === current && !chat.startsWith(NEW)) reopen();
    showModel();
    poll();
  }

  function showStatus() {
    const line = $("#kw-status");
    if (!line) return;
    const problem = offline || trouble || engine.phase === "failed" || engine.phase === "stopped";
    line.classList.toggle("kw-problem", Boolean(problem));
    const loading = keepwarmModels.progress();
    const well = !offline && !trouble && engine.phase === "ready";
    line.hidden = well && !loading.length && !warming;
    line.classList.toggle("kw-aside", well && !loading.length);
    if (line.hidden) return line.replaceChildren();
    if (well && !loading.length) return line.replaceChildren(`Bringing back recent chats: ${warming.done} of ${warming.total}`);
    if (well) return line.replaceChildren(...loading[0].childNodes);
    const parts = [element("span", {}, statusText())];
    if (!problem) {
      const bar = element("progress", { "aria-label": "Loading" });
      if (engine.total) {
        bar.max = engine.total;
        bar.value = engine.done;
      }
      parts.push(bar);
    }
    line.replaceChildren(...parts);
  }

  function statusText() {
    if (offline) return "Keepwarm does not answer. Is it still running? What you write here is kept.";
    if (trouble) return trouble;
    const share = engine.total ? ` (${Math.round((100 * engine.done) / engine.total)}%)` : "";
    const stage = engine.stage ? `: ${engine.stage}${share}` : "";
    if (engine.phase === "failed") return `There is no model to answer. ${engine.message}`;
    if (engine.phase === "stopped") return engine.message || "The engine has been stopped.";
    if (engine.phase === "restarting") return `The engine is starting again${stage || "…"}`;
    return `Getting the model ready${stage || "…"}`;
  }

  // --- scrolling -------------------------------------------------------------------------------------------------

  const scroller = () => $("#kw-scroll");

  function toEnd() {
    requestAnimationFrame(() => {
      const area = scroller();
      if (area) area.scrollTop = area.scrollHeight;
    });
  }

  function onScroll(event) {
    if (event.target.id !== "kw-scroll") return;
    const area = event.target;
    stick = area.scrollHeight - area.scrollTop - area.clientHeight < 60;
    const button = $("#kw-down");
    if (button) button.hidden = stick;
  }

  // --- clicks ----------------------------------------------------------------------------------------------------

  async function copy(button, text) {
    try {
      await navigator.clipboard.writeText(text);
      button.classList.add("kw-done");
      setTimeout(() => button.classList.remove("kw-done"), 1200);
    } catch {
      getSelection().selectAllChildren(button.closest("figure, article"));
    }
  }

  const ACTS = {
    new: () => newChat(),
    "new-with-prompt": () => newChat($("#kw-prompt textarea").value),
    open: (link) => open(link.dataset.chat),
    rename: (button) => rename(button.closest("li")),
    remove: (button) => remove(button.closest("li")),
    more: () => ((limit += 200), (version = ""), poll()),
    menu: () => document.body.classList.toggle("kw-menu"),
    settings: () => toggleSettings(),
    models: () => keepwarmModels.open(keepwarmModels.find(model())?.id, chooseModel, poll),
    example: (button) => (setValue(box(), button.dataset.text), $("#kw-send").click(), focusBox()),
    retry: () => whyNoReply() || (trigger("retry", { chat: current }), (stick = true)),
    stop: () => ((stopping = true), refreshSend(), trigger("stop", { chat: current })),
    down: () => ((stick = true), toEnd()),
    "copy-code": (button) => copy(button, $("code", button.closest("figure")).textContent),
    "copy-reply": (button) => copy(button, button.dataset.text),
  };

  function toggleSettings() {
    const isOpen = document.body.classList.toggle("kw-settings-open");
    $("#kw-header [data-act=settings]")?.setAttribute("aria-expanded", String(isOpen));
    (isOpen ? $("#kw-settings .kw-icon") : $("#kw-header [data-act=settings]"))?.focus();
  }

  function onClick(event) {
    const thought = event.target.closest?.("summary")?.closest(".kw-thought");
    if (thought) return thought.open ? openThoughts.delete(thought.dataset.thought) : openThoughts.add(thought.dataset.thought);
    const send = event.target.closest?.("#kw-send");
    if (send) {
      if (whyNotSend()) {
        event.preventDefault();
        event.stopImmediatePropagation();
        box()?.focus();
      } else {
        sendingSince = now();
        keepDraft();
        queueMicrotask(refreshSend);
      }
      return;
    }
    const target = event.target.closest?.("[data-act]");
    if (!target) {
      if (event.target.id === "kw-veil" || event.target.closest?.("#kw-main")) document.body.classList.remove("kw-menu");
      return;
    }
    if (target.href && (event.ctrlKey || event.metaKey || event.shiftKey || event.button)) return; // a new tab is fine
    event.preventDefault();
    if (!trigger) return;
    ACTS[target.dataset.act]?.(target);
  }

  // --- start -----------------------------------------------------------------------------------------------------

  // Called by Gradio's events component when it is there.
  function bind(fire) {
    trigger = fire;
    if (keptOptions()) trigger("restore", {});
    restored = true;
    reopen();
    poll();
  }

  document.addEventListener("click", onClick, true);
  document.addEventListener("keydown", onKey, true);
  document.addEventListener("scroll", onScroll, true);
  document.addEventListener("input", (event) => {
    if (event.target.closest?.("#kw-box")) (keepDraft(), refreshSend());
    if (event.target.closest?.("#kw-box") && event.isTrusted && awaitsMessage()) keepwarmWarmth.typed(current);
    if (event.target.closest?.("#kw-prompt") && current.startsWith(NEW)) keepPrompt(event.target.value);
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return unfollow(); // a browser allows a server six connections, for all tabs together
    if (running) reopen();
    poll();
  });
  addEventListener("popstate", () => trigger && open(fromAddress() || NEW + ++newCount, { push: false }));
  addEventListener("pagehide", keepDraft);

  return { accept, slot, bind, sent, keepOptions, keptOptions, chat: () => current, model };
})();
