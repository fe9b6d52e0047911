// The status page. It shows what /status says; every text gets into the page as text, never as markup.
"use strict";
(() => {
  const ROW = 28; // Height of a row, as in page.css.
  const SPARE = 12; // Rows beyond the visible ones.
  const LEAST_PAUSE = 2000;

  const $ = (id) => document.getElementById(id);
  const view = {
    report: null,
    at: 0,
    counted: new Map(), // Of the last answer, by node: epoch and bytes.
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

  function scaled(count, units) {
    let unit = 0;
    while (count >= 1000 && unit < units.length - 1) {
      count /= 1000;
      unit += 1;
    }
    return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
  }
  const bytes = (count) => scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"]);
  const rate = (count) => (count === null ? "" : scaled(count, ["B/s", "kB/s", "MB/s", "GB/s"]));
  const ms = (time) => (time === null || time === undefined ? "" : `${time.toFixed(time < 10 ? 1 : 0)} ms`);
  const percent = (share) => (share === null || share === undefined ? "" : `${Math.round(share * 100)} %`);
  function age(seconds) {
    if (seconds === null || seconds === undefined) return "";
    if (seconds < 60) return `${seconds} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
    if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
    return `${Math.floor(seconds / 86400)} d`;
  }

  const STATES = {
    away: ["away", "bad"],
    unlisted: ["not in the inventory", "warn"],
    connected: ["connected", "good"],
    elsewhere: ["at another server", ""],
  };
  // What needs attention comes first, as `tunnel-server status` has it.
  const ORDER = ["away", "unlisted", "connected", "elsewhere"];

  function stateOf(node) {
    if (node.session) return node.in_inventory ? "connected" : "unlisted";
    return node.via.length > 0 ? "elsewhere" : "away";
  }

  // What a row shows, what it is found by and what it is sorted by.
  function rowOf(node, seconds) {
    const session = node.session;
    const row = {
      node,
      name: node.name,
      state: stateOf(node),
      addresses: node.addresses.join(", "),
      rtt: session ? session.rtt_ms : null,
      links: session ? session.links.length : null,
      connections: session ? session.connections : null,
      stalled: session ? session.stalled : null,
      to: null,
      from: null,
      agent: session ? session.agent_version : "",
      end: node.last_end || "",
    };
    const last = session && view.counted.get(node.name);
    if (last && last.epoch === session.epoch && seconds > 0) {
      row.to = Math.max(0, session.bytes_to_node - last.to) / seconds;
      row.from = Math.max(0, session.bytes_from_node - last.from) / seconds;
    }
    row.text = [row.name, row.addresses, session ? session.peer : "", row.agent, row.end, node.via.join(" ")]
      .join(" ")
      .toLowerCase();
    return row;
  }

  const COLUMNS = [
    ["name", "Node", "", (row) => row.name],
    ["state", "State", "", (row) => STATES[row.state]],
    ["addresses", "Addresses", "", (row) => row.addresses],
    ["rtt", "RTT", "number", (row) => ms(row.rtt)],
    ["links", "Links", "number", (row) => row.links],
    ["connections", "Connections", "number", (row) => row.connections],
    ["stalled", "Stalled", "number", (row) => (row.stalled ? [row.stalled, "warn"] : row.stalled)],
    ["to", "To node", "number", (row) => rate(row.to)],
    ["from", "From node", "number", (row) => rate(row.from)],
    ["agent", "Agent", "", (row) => row.agent],
    ["end", "Last end", "faint", (row) => (row.end ? `${age(row.node.last_seen_s)} ago: ${row.end}` : "")],
  ];

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
    $("count").textContent = `${view.shown.length} of ${view.rows.length} nodes`;
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

  function facts(report) {
    const connected = report.nodes.filter((node) => node.connected).length;
    const elsewhere = report.nodes.filter((node) => !node.connected && node.via.length > 0).length;
    const away = report.nodes.length - connected - elsewhere;
    // A listener with two addresses is there twice, with the same count. The agents' counts none.
    const listeners = new Map(report.listeners.filter((listener) => listener.accepted !== null).map((listener) => [listener.name, listener.connections_active]));
    const open = [...listeners.values()].reduce((sum, count) => sum + count, 0);
    const failed = report.failures.reduce((sum, hop) => sum + hop.count, 0);
    const [to, from] = view.totals || [null, null];
    const redirect = report.redirect.state;
    $("facts").replaceChildren(
      fact("Nodes connected", `${connected} of ${report.nodes.length}`),
      fact("At other servers", elsewhere),
      fact("Away", away, away > 0 ? "bad" : ""),
      fact("Connections", open),
      fact("To nodes now", rate(to)),
      fact("From nodes now", rate(from)),
      fact("Redirect", redirect, { on: "good", degraded: "bad" }[redirect]),
      fact("Conflicts", report.inventory.conflicts.length, report.inventory.conflicts.length > 0 ? "warn" : ""),
      fact("Failed since the start", failed),
    );
  }

  function problems(report) {
    const found = [];
    if (report.pending.length > 0) found.push(`Not ready: waits for ${report.pending.join(", ")}`);
    if (report.redirect.reason) found.push(`Redirect degraded: ${report.redirect.reason}`);
    const source = report.inventory;
    if (source.last_error) found.push(`The inventory is not up to date, the last good state is in effect: ${source.last_error}`);
    if (typeof source.old_s === "number") found.push(`The inventory is as of ${age(source.old_s)} ago: the API server does not answer`);
    $("problems").replaceChildren(...found.map((text) => element("li", text)));
  }

  function failureRows(failures) {
    return failures.map((failure) => [
      `${age(failure.ago_s)} ago`,
      failure.node || "",
      failure.destination,
      failure.listener,
      failure.client,
      failure.outcome,
      failure.detail,
    ]);
  }
  const FAILURES = [["When", ""], ["Node", ""], ["Destination", ""], ["Listener", ""], ["Client", ""], ["Outcome", ""], ["Reason", ""]];

  function lists(report) {
    $("listeners").replaceChildren(
      table(
        [["Listener", ""], ["Address", ""], ["Open now", "number"], ["Accepted", "number"]],
        report.listeners.map((listener) => [listener.name, listener.address, listener.connections_active, listener.accepted]),
      ),
    );
    $("servers").replaceChildren(
      report.peers.length === 0
        ? element("p", "none", "faint")
        : table(
            [["Server", ""], ["Address", ""], ["State", ""], ["RTT", "number"], ["Nodes", "number"], ["Connections", "number"], ["Version", ""]],
            report.peers.map((peer) => [
              peer.server_id,
              peer.address,
              peer.draining ? ["draining", "warn"] : [`up ${age(peer.since_s)}`, "good"],
              ms(peer.rtt_ms),
              peer.nodes,
              peer.connections,
              peer.version,
            ]),
          ),
    );
    const redirect = report.redirect;
    const verdicts = Object.entries(redirect.counters).filter(([, count]) => count > 0);
    $("redirect").replaceChildren(
      element("p", `${redirect.state}; ${redirect.routes} routes, ${redirect.routes_down} of them down; ${redirect.excluded} ranges excluded; restored ${redirect.mended} times; pods ${redirect.pods === "route" ? "by route" : "at connect()"}${redirect.not_by_route ? `: ${redirect.not_by_route}` : ""}`),
      table([["Hook and verdict", ""], ["Connects", "number"]], verdicts),
    );
    const conflicts = report.inventory.conflicts;
    $("conflicts").replaceChildren(
      conflicts.length === 0
        ? element("p", "none", "faint")
        : table([["Conflict", ""]], conflicts.slice(0, 200).map((conflict) => [conflict.message]), "wrap"),
      conflicts.length > 200 ? element("p", `and ${conflicts.length - 200} more`, "faint") : "",
    );
    const failures = report.failures.flatMap((hop) => [
      element("h3", `${hop.hop}: ${hop.count} since the start`),
      table(FAILURES, failureRows(hop.recent), "wrap"),
    ]);
    $("failures").replaceChildren(...(failures.length > 0 ? failures : [element("p", "none", "faint")]));
  }

  function detail() {
    const row = view.open === null ? undefined : view.rows.find((row) => row.name === view.open);
    $("detail").hidden = view.open === null;
    if (view.open === null) return;
    $("detail-name").textContent = view.open;
    $("measure").disabled = !row || !row.node.session || view.measuring;
    if (!row) {
      $("detail-facts").replaceChildren(fact("State", "not in the inventory, and no agent is attached", "bad"));
      $("detail-links").replaceChildren();
      $("detail-failures").replaceChildren();
      return;
    }
    const { node } = row;
    const session = node.session;
    const rows = [fact("State", ...STATES[row.state]), fact("Addresses", row.addresses)];
    if (node.via.length > 0) rows.push(fact("Attached to", node.via.join(", ")));
    if (session) {
      rows.push(
        fact("Agent", `${session.agent_version} from ${session.peer}`),
        fact("Attached for", age(session.since_s)),
        fact("Round trip", ms(session.rtt_ms)),
        fact("Connections", session.connections),
        fact("Stalled", session.stalled, session.stalled > 0 ? "warn" : ""),
        fact("To the node", `${rate(row.to)} (${bytes(session.bytes_to_node)})`),
        fact("From the node", `${rate(row.from)} (${bytes(session.bytes_from_node)})`),
      );
    }
    if (node.leaving.length > 0) {
      const connections = node.leaving.reduce((sum, leaving) => sum + leaving.connections, 0);
      rows.push(fact("At agents that leave", `${connections} connections`));
    }
    if (node.last_seen_s !== null) {
      rows.push(fact("Last session ended", `${age(node.last_seen_s)} ago${node.last_end ? `: ${node.last_end}` : ""}`));
    }
    $("detail-facts").replaceChildren(...rows);
    $("detail-links").replaceChildren(
      session
        ? table(
            [["Link", "number"], ["Streams", "number"], ["RTT", "number"], ["Window of a stream", "number"], ["Receive window full", "number"], ["Send buffer full", "number"], ["Path takes", "number"], ["Sent again", "number"]],
            session.links.map((link) => [
              link.number,
              link.connections,
              ms(link.rtt_ms),
              bytes(link.window),
              percent(link.window_limited),
              percent(link.buffer_limited),
              rate(link.delivery_rate),
              link.retransmits,
            ]),
          )
        : "",
    );
    const own = view.report.failures.flatMap((hop) => hop.recent.filter((failure) => failure.node === node.name));
    own.sort((a, b) => a.ago_s - b.ago_s);
    $("detail-failures").replaceChildren(
      own.length === 0 ? "" : element("h3", "Recent failures"),
      own.length === 0 ? "" : table(FAILURES, failureRows(own), "wrap"),
    );
  }

  function take(report) {
    const now = performance.now();
    const seconds = view.report === null ? 0 : (now - view.at) / 1000;
    report.failures ??= [];
    view.rows = report.nodes.map((node) => rowOf(node, seconds));
    const sum = (key) => view.rows.reduce((total, row) => total + (row[key] || 0), 0);
    view.totals = seconds > 0 ? [sum("to"), sum("from")] : null;
    view.counted = new Map(
      report.nodes
        .filter((node) => node.session)
        .map((node) => [node.name, { epoch: node.session.epoch, to: node.session.bytes_to_node, from: node.session.bytes_from_node }]),
    );
    [view.report, view.at] = [report, now];
    $("title").textContent = `tunnel-${report.role} ${report.version} on ${report.server_id}`;
    document.title = `${report.server_id}: tunnel-${report.role}`;
    $("state").textContent = report.ready ? "ready" : "not ready";
    $("state").className = report.ready ? "good" : "bad";
    $("fresh").textContent = `up ${age(report.uptime_s)}, as of ${new Date().toLocaleTimeString()}`;
    facts(report);
    problems(report);
    lists(report);
    choose();
    detail();
    document.documentElement.dataset.answers = String(Number(document.documentElement.dataset.answers || 0) + 1);
  }

  let timer = null;
  async function poll() {
    clearTimeout(timer);
    const begun = performance.now();
    try {
      const answer = await fetch("../status", { cache: "no-store", signal: AbortSignal.timeout(15000) });
      if (!answer.ok) throw new Error(`/status answers ${answer.status}`);
      take(await answer.json());
    } catch (error) {
      $("state").textContent = `no answer: ${error.message}; what is shown is old`;
      $("state").className = "bad";
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
    if (view.report) detail();
  }

  function open(name) {
    view.open = name;
    view.chosen = name ?? view.chosen;
    $("measured").textContent = "";
    remember();
    draw();
    detail();
    if (name !== null) $("detail-name").focus();
    else $("scroll").focus();
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
    box.setAttribute("aria-activedescendant", `row-${to}`);
  }

  const MOVES = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity };

  $("scroll").addEventListener("keydown", (event) => {
    if (event.target !== $("scroll") || event.ctrlKey || event.metaKey || event.altKey) return;
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
    $("scroll").focus();
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
})();
