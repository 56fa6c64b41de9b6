// The dialog in which a person chooses the model of a chat or loads another one. It knows what the server last said of
// models; which chat is on the screen, and what a choice means for it, is the page's.
"use strict";

window.keepwarmModels = (() => {
  let models = [], loads = [], dialog = null, problem = "", waiting = false, changed = () => {};

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // What the server says, every few seconds.
  function take(state) {
    models = state.models;
    loads = state.loads;
    if (dialog) drawProgress();
  }

  // The model of this id, or the default; null before the server has said.
  const find = (id) => models.find((model) => model.id === id) || models.find((model) => model.default) || null;

  // The id itself while there is such a model, else "".
  const known = (id) => (models.some((model) => model.id === id) ? id : "");

  async function post(path, body) {
    const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error?.message || answer.statusText);
    return told;
  }

  async function forget(model, line) {
    problem = "";
    try {
      await post("/page/models/forget", { model: model.id });
      models = models.filter((other) => other.id !== model.id);
      line.remove();
      if (line.querySelector("[aria-pressed=true]")) dialog?.querySelector(".kw-model-row")?.setAttribute("aria-pressed", "true");
      changed();
    } catch (error) {
      problem = error.message;
    }
    if (dialog) drawProgress();
  }

  function row(model, chosen, pick) {
    const where = model.adapter ? `${model.source} with ${model.adapter}` : model.source;
    const state = model.served ? "ready" : "is loaded when used";
    const button = element("button", { type: "button", class: "kw-model-row", "aria-pressed": String(model.id === chosen) },
      element("span", { class: "kw-model-name" }, model.name),
      element("span", { class: "kw-model-about", title: where }, model.default ? `the default · ${state}` : `${where} · ${state}`));
    button.addEventListener("click", () => pick(model.id));
    const line = element("div", { class: "kw-model-line" }, button);
    if (!model.default) {
      const away = element("button", { type: "button", class: "kw-forget", title: "Take it from this list", "aria-label": `Take ${model.name} from this list` }, "×");
      away.addEventListener("click", () => forget(model, line));
      line.append(away);
    }
    return line;
  }

  // Ask which model the chat is to be held with; `choose` gets its id, `look` has the server's state read again.
  function open(chosen, choose, look) {
    if (dialog) return;
    changed = look;
    problem = "";
    const pick = (id) => {
      dialog?.close();
      if (id !== chosen) choose(id);
    };
    const source = element("input", { type: "text", id: "kw-source", autocomplete: "off", spellcheck: "false", placeholder: "Folder, file or owner/name", "aria-describedby": "kw-load-about" });
    const adapter = element("input", { type: "text", id: "kw-adapter", autocomplete: "off", spellcheck: "false", placeholder: "None" });
    const load = element("button", { type: "submit", class: "kw-primary" }, "Load");
    const form = element("form", { class: "kw-load" },
      element("label", { for: "kw-source" }, "Load another model"), element("div", { class: "kw-load-line" }, source, load),
      element("details", {}, element("summary", {}, "With a LoRA adapter"), element("label", { for: "kw-adapter", class: "kw-hidden" }, "LoRA adapter"), adapter),
      element("div", { id: "kw-load-about", class: "kw-load-about", role: "status" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (waiting) return;
      problem = source.value.trim() ? "" : "Name a model first: its folder, its .gguf file, or owner/name on the hub.";
      problem ? drawProgress() : begin(source.value, adapter.value, pick);
    });
    const close = element("button", { type: "button", class: "kw-quiet" }, "Close");
    close.addEventListener("click", () => dialog.close());
    dialog = element("dialog", { class: "kw-dialog kw-models", "aria-labelledby": "kw-models-title" },
      element("h2", { id: "kw-models-title" }, "Model of this chat"),
      element("p", {}, "The next reply comes from the model chosen here, and so do new chats. A chat can change its model at any time."),
      element("div", { class: "kw-model-list" }, ...models.map((model) => row(model, chosen, pick))), form,
      element("div", { class: "kw-answers" }, close));
    document.body.append(dialog);
    dialog.addEventListener("close", () => {
      dialog.remove();
      dialog = null;
    });
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    drawProgress();
    dialog.showModal();
    (dialog.querySelector("[aria-pressed=true]") || source).focus();
  }

  // Loading goes on when the dialog is closed; the model is then in the list.
  async function begin(source, adapter, pick) {
    const mine = dialog;
    waiting = true;
    problem = "";
    drawProgress();
    changed();
    try {
      const model = await post("/page/models", { source, adapter });
      models = [...models.filter((other) => other.id !== model.id), model];
      if (mine === dialog) pick(model.id);
    } catch (error) {
      problem = error.message || "Keepwarm does not answer.";
    }
    waiting = false;
    if (dialog) drawProgress();
  }

  // One line with a bar for each model on its way.
  function progress() {
    return loads.map((load) => {
      const bar = element("progress", { "aria-label": "Loading" });
      if (load.total) {
        bar.max = load.total;
        bar.value = load.done;
      }
      const share = load.total ? ` (${Math.round((100 * load.done) / load.total)}%)` : "";
      const name = load.model.split(/[\\/]/).pop() || load.model;
      return element("div", { class: "kw-loading" }, element("span", { title: load.model }, `Getting ${name} ready: ${load.stage || "waiting"}${share}`), bar);
    });
  }

  function drawProgress() {
    const place = dialog.querySelector("#kw-load-about"), button = dialog.querySelector(".kw-primary");
    button.disabled = waiting;
    const parts = progress();
    if (!parts.length && waiting) parts.push(element("div", { class: "kw-loading" }, element("span", {}, "Loading"), element("progress")));
    if (problem) parts.push(element("p", { class: "kw-load-problem", role: "alert" }, problem));
    place.replaceChildren(...parts);
  }

  const choose = (chat, model) => post("/page/model", { chat, model });

  const busy = () => waiting || loads.length > 0;

  return { take, find, known, open, choose, progress, busy };
})();
