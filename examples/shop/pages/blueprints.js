// Sends the page's forms, and shows the operations that they start. Whatever comes from the server is text.

import { drive } from "/api/recado.js";

const find = (id) => document.getElementById(id);
let stop = () => {};
let jobUrl = null;

document.addEventListener("submit", (event) => {
  if (!event.target.matches("form.operation")) return;
  event.preventDefault();
  start(event.target);
});

find("cancel").addEventListener("click", async () => {
  // Its answer comes the same way as every other change.
  await fetch(jobUrl + "/cancel", { method: "POST" });
});

async function start(form) {
  stop();
  show();
  try {
    const body = form.enctype === "multipart/form-data" ? new FormData(form) : null;
    const response = await fetch(form.action, { method: "POST", body });
    if (!response.ok) return show({ error: (await response.json()).error });
    jobUrl = response.headers.get("Location");
  } catch {
    return show({ error: "The shop cannot be reached. Please try again." });
  }
  find("cancel").hidden = false;
  stop = drive(find("progress"), jobUrl, {
    text: find("state"),
    onUpdate: (operation) => (find("kind").textContent = operation.kind),
    onEnd: end,
    onError: (error) => show({ error: error.message }),
  });
}

async function end(operation) {
  show(operation);
  const page = new DOMParser().parseFromString(await (await fetch("/blueprints")).text(), "text/html");
  const stock = page.getElementById("stock");
  if (stock) find("stock").replaceWith(document.adoptNode(stock));
}

function show({ status = "", error = null, result = null } = {}) {
  find("operation").hidden = false;
  find("operation").dataset.status = status;
  find("cancel").hidden = true;
  find("error").hidden = error === null;
  find("error").textContent = error ?? "";
  find("result").hidden = result === null;
  const entries = Object.entries(result ?? {});
  find("result").replaceChildren(
    ...entries.flatMap(([name, value]) => [element("dt", name), element("dd", words(value))]),
  );
  if (!status) {
    find("state").textContent = "";
    find("kind").textContent = "";
    find("progress").value = 0;
  }
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function words(value) {
  if (Array.isArray(value)) return value.map(words).join("\n") || "none";
  if (value !== null && typeof value === "object") return Object.values(value).map(words).join(", ");
  return String(value);
}
