// The live page: reads the server's reports and shows them.
import { Charts, bytes, number } from "./charts.js";
import { Chat } from "./chat.js";
import { events, headers, key } from "./sse.js";

const RETRY_MS = 2000;
const SILENCE_MS = 10_000; // without a report: the server stands still, or the connection is gone without a word
const at = (id) => document.getElementById(id);
const charts = new Charts(at("charts"));
new Chat(at("chat"), askForKey);

function duration(seconds) {
  if (seconds == null) return "–";
  const units = [["d", 86400], ["h", 3600], ["min", 60]];
  const unit = units.find(([, size]) => seconds >= 2 * size);
  return unit ? `${Math.floor(seconds / unit[1])} ${unit[0]}` : `${Math.floor(seconds)} s`;
}

function show(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function showVerdict({ level, title, sentences }) {
  at("verdict").dataset.level = level;
  show("verdict-title", title);
  document.title = level === "ok" ? "Marathon" : `${title} – Marathon`;
  const text = sentences.join("\n");
  if (at("verdict-sentences").dataset.text === text) return;
  at("verdict-sentences").dataset.text = text;
  at("verdict-sentences").replaceChildren(...sentences.map((sentence) => element("li", sentence)));
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);

function figures({ status }) {
  const { engine, buffers, memory, queue } = status;
  const ends = Object.values(status.seconds_to_exhaustion).filter((seconds) => seconds != null);
  const unknown = engine.up && !buffers.limit ? "not counted here" : "–";
  const none = engine.up ? "none in sight" : "–";
  const live = buffers.count == null ? unknown : `${number(buffers.count)} of ${number(buffers.limit)}`;
  return [
    ["Tokens a second", number(status.tokens_per_second)],
    ["First token after", status.first_token_seconds == null ? "–" : `${status.first_token_seconds.toPrecision(2)} s`],
    ["Live buffers", live],
    ["Time to exhaustion", ends.length ? duration(Math.min(...ends)) : none],
    ["Memory in use", memory.limit ? `${bytes(memory.active)} of ${bytes(memory.limit)}` : bytes(memory.active)],
    ["Running, waiting", `${queue.running}, ${queue.waiting}`],
    ["Engines replaced", number(sum(engine.restarts))],
    ["Answers resumed", number(sum(engine.resumed))],
  ];
}

function showFigures(report) {
  const list = document.createElement("dl");
  list.style.display = "contents";
  for (const [name, value] of figures(report)) {
    const box = document.createElement("div");
    box.append(element("dt", name), element("dd", value));
    list.append(box);
  }
  at("figures").replaceChildren(list);
}

function state(row) {
  if (!row.to_read) return row.state;
  const done = `${row.state} ${number(row.read)} of ${number(row.to_read)}`;
  if (row.read_per_second == null) return done;
  return `${done}, ${number(row.read_per_second)}/s, ${duration(row.read_seconds_left)} left`;
}

function showLoading({ weights_read, weights_total }) {
  at("loading").hidden = !weights_total;
  if (weights_total) at("loading").value = weights_read / weights_total;
}

function showRows({ rows, more_rows }) {
  at("rows").replaceChildren(...rows.map((row) => {
    const line = document.createElement("tr");
    const rate = row.tokens_per_second == null ? "–" : number(row.tokens_per_second);
    const cells = [row.seq, row.endpoint, state(row), duration(row.age_seconds), number(row.prompt_tokens),
      number(row.tokens), rate, row.survived ? `${row.survived}×` : "–"];
    line.append(...cells.map((cell) => element("td", String(cell))));
    return line;
  }));
  const note = more_rows ? `and ${more_rows} more` : rows.length ? "" : "None at the moment.";
  show("rows-note", note);
}

let newest = 0;
function showEvents(list) {
  for (const event of list) {
    if (event.number <= newest) continue;
    newest = event.number;
    const line = document.createElement("li");
    line.dataset.kind = event.kind;
    const when = new Date(event.time * 1000);
    const time = element("time", when.toLocaleTimeString([], { hourCycle: "h23" }));
    time.dateTime = when.toISOString();
    line.append(time, event.text);
    at("events").prepend(line);
  }
  show("events-note", newest ? "" : "Nothing has happened yet.");
  while (at("events").childElementCount > 200) at("events").lastElementChild.remove();
}

function showReport(report) {
  const { status } = report;
  showVerdict(report.verdict);
  show("model", status.model);
  show("version", `Marathon ${status.version}`);
  show("uptime", `up ${duration(status.uptime_seconds)}`);
  show("log", status.log);
  showLoading(status.engine);
  showFigures(report);
  showRows(status);
  showEvents(report.events);
  const { buffers, memory, queue } = status;
  charts.add([status.time, status.tokens_per_second, buffers.count, buffers.pending, memory.active, memory.caches,
    queue.running, queue.waiting], report.events, buffers.limit);
}

// A server that answers and refuses is no silent one.
class Refusal extends Error {}

async function refusal(response) {
  const text = await response.text();
  try {
    return new Refusal(JSON.parse(text).error.message);
  } catch {
    return new Refusal(`The server answers ${response.status}.`);
  }
}

async function follow() {
  const given = key.get();
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  try {
    const response = await fetch("status/events", { headers: headers(), cache: "no-store", signal: silence.signal });
    if (response.status === 401) {
      clearTimeout(timer);
      await askForKey(given);
      return;
    }
    if (!response.ok) throw await refusal(response);
    newest = 0;
    at("events").replaceChildren();
    for await (const { event, data } of events(response)) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      if (event === "history") charts.load(JSON.parse(data));
      if (event === "report") {
        showReport(JSON.parse(data));
        delete document.body.dataset.stale;
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

let asked = null;
// `refused`: the key that the server didn't take, if there was one.
function askForKey(refused) {
  asked ??= new Promise((resolve) => {
    show("key-note", refused ? "The server doesn't take that key." : "");
    at("key").value = "";
    at("key-dialog").showModal();
    at("key-form").onsubmit = () => {
      key.set(at("key").value.trim());
      asked = null;
      resolve();
    };
    at("key-dialog").oncancel = (event) => event.preventDefault();
  });
  return asked;
}

function showLost(error) {
  document.body.dataset.stale = ""; // what is below is of the last report
  if (error instanceof Refusal) {
    showVerdict({ level: "critical", title: "Refused", sentences: [error.message] });
    return;
  }
  const silent = error.name === "AbortError" ? `has sent nothing for ${SILENCE_MS / 1000} seconds` : "doesn't answer";
  const sentence = `The server ${silent}; this page tries again every ${RETRY_MS / 1000} seconds.`;
  showVerdict({ level: "critical", title: "No answer", sentences: [sentence] });
}

for (;;) {
  try {
    await follow();
  } catch (error) {
    showLost(error);
  }
  await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
}
