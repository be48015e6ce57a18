// Watches a recado operation: by Server-Sent Events, or by polling where these do not get through.
//
//   import { drive, watch } from "/api/recado.js";
//   const stop = drive(document.querySelector("progress"), "/api/jobs/" + jobId, { text: document.querySelector("output") });
//
// or, after <script type="module" src="/api/recado.js"></script>, as recado.watch and recado.drive.

const POLL_INTERVAL = 2500; // ms from an answer to the next question
const PATIENCE = 5000; // ms for the first event, which is sent at once; a proxy that collects a stream keeps it longer

/**
 * Watch the operation at `url` ("/api/jobs/<id>") to its end.
 *
 * onUpdate(operation) is called with each new state, onEnd(operation) after the last one; onError(error) when there is
 * nothing to watch any more: error.status is 401, 403 or 404. With `headers`, such as {Authorization: "Bearer ..."},
 * which an EventSource cannot send, it polls. Returns a function that stops watching.
 */
export function watch(url, { onUpdate, onEnd, onError, headers } = {}) {
  const aborter = new AbortController();
  let source = null;
  let timer = null;
  let last = null;

  function stop() {
    aborter.abort();
    clearTimeout(timer);
    source?.close();
  }

  function update(text) {
    if (aborter.signal.aborted || text === last) return;
    last = text;
    const operation = JSON.parse(text);
    const ended = operation.status === "done" || operation.status === "error";
    if (ended) stop();
    onUpdate?.(operation);
    if (ended) onEnd?.(operation);
  }

  function stream() {
    source = new EventSource(url + "/events");
    source.addEventListener("update", (event) => {
      clearTimeout(timer);
      update(event.data);
    });
    source.addEventListener("error", () => {
      // Otherwise it comes back by itself, and says what it has seen.
      if (source.readyState === EventSource.CLOSED) fallBack();
    });
    timer = setTimeout(fallBack, PATIENCE);
  }

  function fallBack() {
    clearTimeout(timer);
    source.close();
    if (!aborter.signal.aborted) poll();
  }

  async function poll() {
    let status = 0;
    let text = "";
    try {
      const response = await fetch(url, { headers, cache: "no-store", signal: aborter.signal });
      text = await response.text();
      status = response.status;
    } catch {
      // The network: it will be back. Or we were stopped.
    }
    if (aborter.signal.aborted) return;
    if ([401, 403, 404].includes(status)) {
      stop();
      const error = new Error("cannot watch " + url + ": the server answered " + status);
      onError?.(Object.assign(error, { status }));
      return;
    }
    timer = setTimeout(poll, POLL_INTERVAL);
    if (status === 200) update(text);
  }

  if (headers || typeof EventSource === "undefined") poll();
  else stream();
  return stop;
}

/**
 * Show the operation at `url` in a <progress> element, and in the element `text`, if one is given, how it goes in words.
 *
 * The other options are those of `watch`, whose callbacks are called after the elements have changed. Before the work
 * begins the bar is indeterminate. Returns a function that stops watching.
 */
export function drive(progress, url, { text, onUpdate, onError, ...options } = {}) {
  const say = (words) => {
    if (text) text.textContent = words;
  };
  progress.max = 100;
  return watch(url, {
    ...options,
    onUpdate(operation) {
      if (operation.status === "pending") progress.removeAttribute("value");
      else progress.value = operation.progress;
      say(operation.error ?? (operation.status === "processing" ? operation.progress + " %" : operation.status));
      onUpdate?.(operation);
    },
    onError(error) {
      say(error.message);
      onError?.(error);
    },
  });
}

globalThis.recado = { drive, watch };
