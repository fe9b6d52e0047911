// The status page. It shows what /cluster says; every text gets into the page as text, never as markup.
import { age, COLUMNS, conflicts, FAILURES, failedAt, failureRows, LINKS, linkRows, ms, openAt, ORDER, rate, recent, rowsOf, serverRows, SESSIONS, sessionRows, STATES } from "./report.js";

const ROW = 28; // Height of a row, as in page.css.
const SPARE = 12; // Rows beyond the visible ones.
const LEAST_PAUSE = 2000;
const LISTS = ["failures", "listeners", "nodes", "peers", "pending"];

const $ = (id) => document.getElementById(id);
const view = {
  reports: [], // Of the servers that answer, this one's first.
  silent: [], // The others, with the reasons.
  servers: 0, // How many may have tunnels.
  at: 0,
  counted: new Map(), // Of the last answer, by server and node: epoch and bytes.
  totals: null,
  rows: [],
  shown: [],
  chosen: null, // The row that the keyboard is at.
  open: null, // The node whose details are shown.
  sort: "state",
  down: false,
};

function element(tag, text, style) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = String(text);
  if (style) made.className = style;
  return made;
}

// What a screen reader announces is written only when it changes.
function say(id, text, style) {
  const at = $(id);
  if (at.textContent !== text) at.textContent = text;
  if (style !== undefined) at.className = style;
}

function fact(name, value, style) {
  const group = element("div");
  group.append(element("dt", name), element("dd", value, style));
  return group;
}

// Columns are [title, style]; cells are a text, or [text, style].
function table(columns, rows, style) {
  const made = element("table", null, style);
  const head = made.createTHead().insertRow();
  for (const [title, kind] of columns) {
    const cell = element("th", title, kind);
    cell.scope = "col";
    head.append(cell);
  }
  const body = made.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((cell, index) => {
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      row.append(element("td", text, `${columns[index][1] || ""} ${kind}`.trim()));
    });
  }
  return made;
}

function compare(a, b) {
  const key = view.sort;
  let order = 0;
  if (key === "state") {
    order = ORDER.indexOf(a.state) - ORDER.indexOf(b.state);
  } else if (typeof a[key] === "string") {
    order = a[key] < b[key] ? -1 : a[key] > b[key] ? 1 : 0;
  } else {
    // Those without a value come last in both directions.
    if ((a[key] === null) !== (b[key] === null)) return a[key] === null ? 1 : -1;
    order = a[key] - b[key];
  }
  if (order === 0) return a.name < b.name ? -1 : 1;
  return view.down ? -order : order;
}

function choose() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const show = $("show").value;
  const kept = view.rows.filter(
    (row) =>
      words.every((word) => row.text.includes(word)) &&
      (!show || (show === "stalled" ? row.stalled > 0 : row.state === show)),
  );
  view.shown = kept.sort(compare);
  say("count", `${view.shown.length} of ${view.rows.length} nodes`);
  $("nodes").setAttribute("aria-rowcount", String(view.shown.length + 1));
  draw();
}

function space(count) {
  const row = element("tr", null, "space");
  row.setAttribute("aria-hidden", "true");
  const cell = element("td");
  cell.colSpan = COLUMNS.length;
  cell.style.setProperty("height", `${count * ROW}px`);
  row.append(cell);
  return row;
}

// Makes the rows that can be seen, and no others.
function draw() {
  const box = $("scroll");
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE);
  const last = Math.min(view.shown.length, first + Math.ceil(box.clientHeight / ROW) + 2 * SPARE);
  const rows = [];
  if (first > 0) rows.push(space(first));
  for (let index = first; index < last; index += 1) {
    const row = view.shown[index];
    const made = element("tr");
    made.id = `row-${index}`;
    made.dataset.node = row.name;
    made.setAttribute("aria-rowindex", String(index + 2));
    made.setAttribute("aria-selected", String(row.name === view.chosen));
    for (const [, , style, content] of COLUMNS) {
      const value = content(row);
      const [text, kind] = Array.isArray(value) ? value : [value, ""];
      const cell = element("td", text, `${style} ${kind}`.trim());
      if (typeof text === "string" && text.length > 24) cell.title = text;
      made.append(cell);
    }
    rows.push(made);
  }
  if (last < view.shown.length) rows.push(space(view.shown.length - last));
  $("rows").replaceChildren(...rows);
}

function heads() {
  const cells = COLUMNS.map(([key, title, style]) => {
    const cell = element("th", null, style);
    cell.scope = "col";
    if (key === view.sort) cell.setAttribute("aria-sort", view.down ? "descending" : "ascending");
    const button = element("button", title);
    button.type = "button";
    button.dataset.key = key;
    cell.append(button);
    return cell;
  });
  $("columns").replaceChildren(...cells);
}

function facts(reports) {
  const count = (state) => view.rows.filter((row) => row.state === state).length;
  const sum = (value) => reports.reduce((total, report) => total + value(report), 0);
  const [away, never] = [count("away"), count("never")];
  const [to, from] = view.totals || [null, null];
  const redirects = new Set(reports.map((report) => report.redirect.state));
  const redirect = redirects.has("degraded") ? "degraded" : [...redirects].sort().reverse().join(", ");
  const [answer, all] = [reports.length, reports.length + view.silent.length];
  $("facts").replaceChildren(
    fact("Nodes connected", `${view.rows.length - away - never} of ${view.rows.length}`),
    fact("Away", away, away > 0 ? "bad" : ""),
    fact("Never seen", never, never > 0 ? "bad" : ""),
    fact("Servers that answer", `${answer} of ${all}`, answer < all ? "bad" : ""),
    fact("Connections", sum(openAt)),
    fact("To nodes now", rate(to)),
    fact("From nodes now", rate(from)),
    fact("Redirect", redirect, { on: "good", degraded: "bad" }[redirect]),
    fact("Conflicts", conflicts(reports).length, conflicts(reports).length > 0 ? "warn" : ""),
    fact("Failed since the start", sum(failedAt)),
  );
}

function problems(reports) {
  const found = view.silent.map((silent) => [silent, `no answer: ${silent.error}`]);
  for (const report of reports) {
    if (report.pending.length > 0) found.push([report, `not ready: waits for ${report.pending.join(", ")}`]);
    if (report.redirect.reason) found.push([report, `redirect degraded: ${report.redirect.reason}`]);
    const source = report.inventory;
    if (source.last_error) found.push([report, `the inventory is not up to date, the last good state is in effect: ${source.last_error}`]);
    if (typeof source.old_s === "number") found.push([report, `the inventory is as of ${age(source.old_s)} ago: the API server does not answer`]);
  }
  $("problems").replaceChildren(...found.map(([of, text]) => element("li", `${of.server_id}: ${text}`)));
}

function lists(reports) {
  $("servers").replaceChildren(
    table(
      [["Server", ""], ["State", ""], ["Up", "number"], ["RTT", "number"], ["Nodes", "number"], ["Connections", "number"], ["Forwarded to it", "number"], ["Redirect", ""], ["Failed", "number"], ["Version", ""], ["Address", ""]],
      serverRows(reports, view.silent),
    ),
  );
  $("listeners").replaceChildren(
    table(
      [["Server", ""], ["Listener", ""], ["Address", ""], ["Open now", "number"], ["Accepted", "number"]],
      reports.flatMap((report) =>
        report.listeners.map((listener) => [report.server_id, listener.name, listener.address, listener.connections_active, listener.accepted]),
      ),
    ),
  );
  $("redirect").replaceChildren(
    ...reports.map(({ server_id, redirect }) =>
      element("p", `${server_id}: ${redirect.state}; ${redirect.routes} routes, ${redirect.routes_down} of them down; ${redirect.excluded} ranges excluded; restored ${redirect.mended} times; pods ${redirect.pods === "route" ? "by route" : "at connect()"}${redirect.not_by_route ? `: ${redirect.not_by_route}` : ""}`),
    ),
    table(
      [["Server", ""], ["Hook and verdict", ""], ["Connects", "number"]],
      reports.flatMap((report) =>
        Object.entries(report.redirect.counters).filter(([, count]) => count > 0).map(([verdict, count]) => [report.server_id, verdict, count]),
      ),
    ),
  );
  const found = conflicts(reports);
  $("conflicts").replaceChildren(
    found.length === 0 ? element("p", "none", "faint") : table([["Conflict", ""]], found.slice(0, 200).map((message) => [message]), "wrap"),
    found.length > 200 ? element("p", `and ${found.length - 200} more`, "faint") : "",
  );
  const hops = new Map();
  for (const hop of reports.flatMap((report) => report.failures)) hops.set(hop.hop, (hops.get(hop.hop) || 0) + hop.count);
  const failures = [...hops].flatMap(([name, count]) => [
    element("h3", `${name}: ${count} since the start`),
    table(FAILURES, failureRows(recent(reports, (failure) => failure.hop === name)), "wrap"),
  ]);
  $("failures").replaceChildren(...(failures.length > 0 ? failures : [element("p", "none", "faint")]));
}

function detail() {
  const row = view.open === null ? undefined : view.rows.find((row) => row.name === view.open);
  $("detail").hidden = view.open === null;
  if (view.open === null) return;
  say("detail-name", view.open);
  const own = row?.list.some((session) => session.server === view.reports[0].server_id);
  $("measure").disabled = !own || view.measuring;
  if (!row) {
    $("detail-facts").replaceChildren(fact("State", "not in inventory, and no agent is attached", "bad"));
    for (const id of ["detail-sessions", "detail-links", "detail-failures"]) $(id).replaceChildren();
    return;
  }
  const rows = [fact("State", ...STATES[row.state]), fact("Addresses", row.addresses)];
  rows.push(fact("Tunnels", `${row.tunnels}/${view.servers}${row.servers ? `: ${row.servers}` : ""}`));
  if (row.leaving > 0) rows.push(fact("At agents that leave", `${row.leaving} connections`));
  if (row.seen !== null) rows.push(fact("Last session ended", `${age(row.seen)} ago${row.end ? `: ${row.end}` : ""}`));
  $("detail-facts").replaceChildren(...rows);
  $("detail-sessions").replaceChildren(row.list.length > 0 ? table(SESSIONS, sessionRows(row.list)) : "");
  $("detail-links").replaceChildren(row.list.length > 0 ? table(LINKS, linkRows(row.list)) : "");
  const failed = recent(view.reports, (failure) => failure.node === row.name);
  $("detail-failures").replaceChildren(
    failed.length === 0 ? "" : element("h3", "Recent failures"),
    failed.length === 0 ? "" : table(FAILURES, failureRows(failed), "wrap"),
  );
}

function take(answers) {
  const now = performance.now();
  const seconds = view.reports.length === 0 ? 0 : (now - view.at) / 1000;
  // A server of another version may report less than this page shows.
  const whole = (answer) => LISTS.every((list) => Array.isArray(answer[list])) && answer.redirect && answer.inventory;
  const judged = answers.map((answer) =>
    answer.error === undefined && !whole(answer) ? { server_id: answer.server_id, error: `version ${answer.version}` } : answer,
  );
  const reports = judged.filter((answer) => answer.error === undefined);
  view.silent = judged.filter((answer) => answer.error !== undefined);
  const servers = new Set(reports.flatMap((report) => report.peers.map((peer) => peer.server_id)));
  for (const report of reports) if (report.role === "server") servers.add(report.server_id);
  view.servers = servers.size;
  view.rows = rowsOf(reports, seconds, view.counted, view.servers);
  const sum = (key) => view.rows.reduce((total, row) => total + (row[key] || 0), 0);
  view.totals = seconds > 0 ? [sum("to"), sum("from")] : null;
  view.counted = new Map(view.rows.flatMap((row) => row.list.map((session) => [`${session.server} ${row.name}`, session])));
  [view.reports, view.at] = [reports, now];
  const [own] = reports;
  say("title", `tunnel-${own.role} ${own.version} on ${own.server_id}`);
  document.title = `${own.server_id}: tunnel-${own.role}`;
  const late = reports.filter((report) => !report.ready).map((report) => report.server_id);
  say("state", late.length === 0 ? "ready" : `not ready: ${late.join(", ")}`, late.length === 0 ? "good" : "bad");
  say("fresh", `up ${age(own.uptime_s)}, as of ${new Date().toLocaleTimeString()}`);
  facts(reports);
  problems(reports);
  lists(reports);
  choose();
  detail();
  document.documentElement.dataset.answers = String(Number(document.documentElement.dataset.answers || 0) + 1);
}

let timer = null;
async function poll() {
  clearTimeout(timer);
  const begun = performance.now();
  try {
    const answer = await fetch("../cluster", { cache: "no-store", signal: AbortSignal.timeout(30000) });
    if (!answer.ok) throw new Error(`/cluster answers ${answer.status}`);
    take(await answer.json());
  } catch (error) {
    say("state", `no answer: ${error.message}; what is shown is old`, "bad");
  }
  // A large installation is not asked more often than it can answer with ease.
  const pause = Math.max(LEAST_PAUSE, (performance.now() - begun) * 5);
  if (!document.hidden) timer = setTimeout(poll, pause);
}

async function measure() {
  const node = view.open;
  view.measuring = true;
  $("measure").disabled = true;
  $("measured").textContent = "measuring";
  try {
    const answer = await fetch(`../bench/${encodeURIComponent(node)}`, { method: "POST" });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text.trim() || `answer ${answer.status}`);
    const said = JSON.parse(text);
    const times = said.rtt_ms.slice().sort((a, b) => a - b);
    const middle = times[Math.floor(times.length / 2)];
    $("measured").textContent = `${node}: round trip ${ms(middle)}, to the node ${said.to_node_mb_s.toFixed(1)} MB/s, from it ${said.from_node_mb_s.toFixed(1)} MB/s`;
  } catch (error) {
    $("measured").textContent = `${node}: ${error.message}`;
  }
  view.measuring = false;
  detail();
}

// The address has what is searched, so that a view can be shared.
function remember() {
  const parts = new URLSearchParams();
  if ($("search").value) parts.set("q", $("search").value);
  if ($("show").value) parts.set("show", $("show").value);
  if (view.sort !== "state" || view.down) parts.set("sort", (view.down ? "-" : "") + view.sort);
  if (view.open !== null) parts.set("node", view.open);
  history.replaceState(null, "", `#${parts}`);
}

function recall() {
  const parts = new URLSearchParams(location.hash.slice(1));
  $("search").value = parts.get("q") || "";
  $("show").value = parts.get("show") || "";
  if ($("show").selectedIndex < 0) $("show").value = "";
  const sort = parts.get("sort") || "state";
  view.down = sort.startsWith("-");
  const key = sort.replace(/^-/, "");
  view.sort = COLUMNS.some((column) => column[0] === key) ? key : "state";
  view.open = parts.get("node");
  heads();
  choose();
  if (view.reports.length > 0) detail();
}

function open(name) {
  view.open = name;
  view.chosen = name ?? view.chosen;
  $("measured").textContent = "";
  remember();
  draw();
  detail();
  if (name !== null) $("detail-name").focus();
  else $("nodes").focus({ preventScroll: true });
}

// Moves the choice by so many rows.
function move(by) {
  if (view.shown.length === 0) return;
  const at = view.shown.findIndex((row) => row.name === view.chosen);
  const to = Math.min(view.shown.length - 1, Math.max(0, at + by));
  view.chosen = view.shown[to].name;
  const box = $("scroll");
  const head = $("columns").offsetHeight;
  const top = to * ROW;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + ROW + head > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW + head - box.clientHeight;
  draw();
  $("nodes").setAttribute("aria-activedescendant", `row-${to}`);
}

const MOVES = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity };

$("nodes").addEventListener("keydown", (event) => {
  if (event.target !== $("nodes") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in MOVES) {
    event.preventDefault();
    move(MOVES[event.key]);
  } else if (event.key === "Enter" && view.chosen !== null) {
    event.preventDefault();
    open(view.chosen);
  }
});
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("search").focus();
  } else if (event.key === "Escape" && view.open !== null) {
    open(null);
  }
});
$("rows").addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-node]");
  if (row) open(row.dataset.node);
});
$("columns").addEventListener("click", (event) => {
  const { key } = event.target.dataset;
  if (!key) return;
  view.down = key === view.sort ? !view.down : false;
  view.sort = key;
  heads();
  remember();
  choose();
  $("columns").querySelector(`[data-key="${key}"]`).focus();
});
let drawing = false;
$("scroll").addEventListener("scroll", () => {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
});
for (const id of ["search", "show"]) {
  $(id).addEventListener("input", () => {
    $("scroll").scrollTop = 0;
    remember();
    choose();
  });
}
$("filter").addEventListener("submit", (event) => {
  event.preventDefault();
  $("nodes").focus({ preventScroll: true });
  view.chosen = null;
  move(0);
});
$("close").addEventListener("click", () => open(null));
$("measure").addEventListener("click", measure);
addEventListener("hashchange", recall);
addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
recall();
poll();
