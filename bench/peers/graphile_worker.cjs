// graphile-worker, with the settings its documentation gives for speed: a local queue, and completion in batches.
// For an idle worker the local queue is left out: it is made for throughput, and waits between two fetches.
//
// It speaks what __main__.py speaks, and says there what each role does.

"use strict";

const readline = require("node:readline");
const { Logger, makeWorkerUtils, run } = require("graphile-worker");

const CONCURRENCY = 100;
const POOL_SIZE = 25;
const LOCAL_QUEUE = { size: 500, refetchDelay: { durationMs: 10 } };
const PROGRESS_INTERVAL_MS = 10;

const logger = new Logger(() => (level, message) => {
  if (level === "error") console.error(message);
});

// CLOCK_MONOTONIC in seconds, as in Python.
const now = () => Number(process.hrtime.bigint()) / 1e9;
const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * Math.max(0, seconds)));
const send = (kind, value = null) => process.stdout.write(JSON.stringify([kind, value]) + "\n");

function fail(error) {
  // The last line is what the benchmark tells.
  console.error(`${error.stack}\n${error}`);
  process.exit(1);
}

async function ready(channel) {
  send("ready");
  await channel.next();
}

async function withProducer(task, produce) {
  const preset = { worker: { connectionString: task.dsn, maxPoolSize: 1 } };
  const utils = await makeWorkerUtils({ preset, logger });
  await produce(utils);
  await utils.release();
}

async function setup(task, channel) {
  await ready(channel);
  await withProducer(task, (utils) => utils.migrate());
  send("report");
}

async function one(task, channel) {
  await withProducer(task, async (utils) => {
    await ready(channel);
    const began = now();
    for (let n = 0; n < task.jobs; n++) await utils.addJob("bench", { n });
    send("report", [began, now()]);
  });
}

async function many(task, channel) {
  await withProducer(task, async (utils) => {
    await ready(channel);
    const began = now();
    for (let first = 0; first < task.jobs; first += task.call) {
      const length = Math.min(task.call, task.jobs - first);
      await utils.addJobs(Array.from({ length }, (_, i) => ({ identifier: "bench", payload: { n: first + i } })));
    }
    send("report", [began, now()]);
  });
}

async function pace(task, channel) {
  await withProducer(task, async (utils) => {
    await ready(channel);
    const sent = [];
    const began = now();
    for (let n = 0; n < task.jobs; n++) {
      await sleep(began + n / task.pace - now());
      sent.push(now());
      await utils.addJob("bench", { n });
    }
    send("report", sent);
  });
}

async function work(task, channel) {
  const begun = [];
  const bench = async ({ n }) => {
    begun.push([n, now()]);
  };
  let told = 0;
  await ready(channel);
  setInterval(() => {
    if (told !== begun.length) send("handled", (told = begun.length));
  }, PROGRESS_INTERVAL_MS);
  const preset = {
    worker: {
      connectionString: task.dsn,
      maxPoolSize: POOL_SIZE,
      concurrentJobs: task.concurrency ?? CONCURRENCY,
      completeJobBatchDelay: 0,
      failJobBatchDelay: 0,
      ...(task.idle ? {} : { localQueue: LOCAL_QUEUE }),
    },
  };
  const runner = await run({ preset, logger, noHandleSignals: true, taskList: { bench } });
  runner.promise.catch(fail);
  await channel.next();
  // How a worker stops is not measured.
  process.stdout.write(JSON.stringify(["report", begun]) + "\n", () => process.exit(0));
}

async function main() {
  const channel = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  const task = JSON.parse((await channel.next()).value);
  await { setup, one, many, pace, work }[task.role](task, channel);
  process.stdin.destroy();
}

main().catch(fail);
