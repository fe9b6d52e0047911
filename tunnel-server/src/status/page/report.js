// What the servers report, as the rows of the page's tables.
function scaled(count, units) {
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}
const bytes = (count) => scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const rate = (count) => (count === null ? "" : scaled(count, ["B/s", "kB/s", "MB/s", "GB/s"]));
export const ms = (time) => (time === null || time === undefined ? "" : `${time.toFixed(time < 10 ? 1 : 0)} ms`);
const percent = (share) => (share === null || share === undefined ? "" : `${Math.round(share * 100)} %`);
export function age(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

// The words of `tunnel-server status`.
export const STATES = {
  away: ["away", "bad"],
  never: ["never seen", "bad"],
  unlisted: ["not in inventory", "warn"],
  connected: ["connected", "good"],
};
// What needs attention comes first, as there.
export const ORDER = ["away", "never", "unlisted", "connected"];

function stateOf(row) {
  if (row.at.length > 0) return row.listed ? "connected" : "unlisted";
  return row.seen === null ? "never" : "away";
}

// One row for each node: what it shows, what it is found by and what it is sorted by.
export function rowsOf(reports, seconds, counted, servers) {
  const rows = new Map();
  for (const report of reports) {
    for (const node of report.nodes) {
      const row = rows.get(node.name) ?? { name: node.name, via: new Set(), list: [], listed: false, leaving: 0, nets: [], seen: null, end: "" };
      rows.set(node.name, row);
      row.listed ||= node.in_inventory;
      if (node.addresses.length > row.nets.length) row.nets = node.addresses;
      for (const server of node.via) row.via.add(server);
      for (const leaving of node.leaving ?? []) row.leaving += leaving.connections;
      if (node.last_seen_s !== null && (row.seen === null || node.last_seen_s < row.seen)) {
        [row.seen, row.end] = [node.last_seen_s, node.last_end || ""];
      }
      if (!node.session) continue;
      row.via.add(report.server_id);
      const session = { ...node.session, server: report.server_id, to: null, from: null };
      const last = counted.get(`${session.server} ${node.name}`);
      if (last && last.epoch === session.epoch && seconds > 0) {
        session.to = Math.max(0, session.bytes_to_node - last.bytes_to_node) / seconds;
        session.from = Math.max(0, session.bytes_from_node - last.bytes_from_node) / seconds;
      }
      row.list.push(session);
    }
  }
  for (const row of rows.values()) {
    const sum = (value) => row.list.reduce((total, session) => (value(session) === null ? total : total + value(session)), row.list.length > 0 ? 0 : null);
    const times = row.list.map((session) => session.rtt_ms).filter((time) => time !== null);
    row.at = [...row.via].sort();
    row.state = stateOf(row);
    row.addresses = row.nets.join(", ");
    row.tunnels = row.at.length;
    row.of = servers;
    row.servers = row.at.join(", ");
    row.rtt = times.length > 0 ? Math.min(...times) : null;
    row.links = sum((session) => session.links.length);
    row.connections = sum((session) => session.connections);
    row.stalled = sum((session) => session.stalled);
    row.to = seconds > 0 ? sum((session) => session.to) : null;
    row.from = seconds > 0 ? sum((session) => session.from) : null;
    row.agent = [...new Set(row.list.map((session) => session.agent_version))].join(", ");
    row.text = [row.name, row.addresses, row.servers, row.agent, row.end, ...row.list.map((session) => session.peer)].join(" ").toLowerCase();
  }
  return [...rows.values()];
}

export const COLUMNS = [
  ["name", "Node", "", (row) => row.name],
  ["state", "State", "", (row) => STATES[row.state]],
  ["tunnels", "Tunnels", "number", (row) => `${row.tunnels}/${row.of}`],
  ["addresses", "Addresses", "", (row) => row.addresses],
  ["rtt", "RTT", "number", (row) => ms(row.rtt)],
  ["links", "Links", "number", (row) => row.links],
  ["connections", "Connections", "number", (row) => row.connections],
  ["stalled", "Stalled", "number", (row) => (row.stalled ? [row.stalled, "warn"] : row.stalled)],
  ["to", "To node", "number", (row) => rate(row.to)],
  ["from", "From node", "number", (row) => rate(row.from)],
  ["agent", "Agent", "", (row) => row.agent],
  ["end", "Last end", "faint", (row) => (row.end ? `${age(row.seen)} ago: ${row.end}` : "")],
  ["servers", "Servers", "", (row) => row.servers],
];

// A listener with two addresses is there twice, with the same count. The agents' counts none.
export function openAt(report) {
  const counted = report.listeners.filter((listener) => listener.accepted !== null);
  const listeners = new Map(counted.map((listener) => [listener.name, listener.connections_active]));
  return [...listeners.values()].reduce((sum, count) => sum + count, 0);
}
export const failedAt = (report) => report.failures.reduce((sum, hop) => sum + hop.count, 0);
export const conflicts = (reports) => [...new Set(reports.flatMap((report) => report.inventory.conflicts.map((conflict) => conflict.message)))];

// Those of all servers, the newest first.
export function recent(reports, keep) {
  const all = reports.flatMap((report) => report.failures.flatMap((hop) => hop.recent.map((failure) => ({ ...failure, hop: hop.hop, server: report.server_id }))));
  return all.filter(keep).sort((a, b) => a.ago_s - b.ago_s);
}
export function failureRows(failures) {
  return failures.map((failure) => [
    `${age(failure.ago_s)} ago`,
    failure.server,
    failure.node || "",
    failure.destination,
    failure.listener,
    failure.client,
    failure.outcome,
    failure.detail,
  ]);
}
export const FAILURES = [["When", ""], ["Server", ""], ["Node", ""], ["Destination", ""], ["Listener", ""], ["Client", ""], ["Outcome", ""], ["Reason", ""]];

export function serverRows(reports, silent) {
  const linked = new Map(reports[0].peers.map((peer) => [peer.server_id, peer]));
  const rows = reports.map((report, index) => {
    const peer = linked.get(report.server_id);
    const state = report.ready ? ["ready", "good"] : ["not ready", "bad"];
    return [
      index === 0 ? `${report.server_id} (asked)` : report.server_id,
      peer?.draining ? ["draining", "warn"] : state,
      age(report.uptime_s),
      peer ? ms(peer.rtt_ms) : "",
      report.nodes.filter((node) => node.connected).length,
      openAt(report),
      peer ? peer.connections : "",
      [report.redirect.state, { degraded: "bad" }[report.redirect.state] || ""],
      failedAt(report),
      report.version,
      peer ? peer.address : "",
    ];
  });
  for (const { server_id } of silent) {
    const peer = linked.get(server_id);
    rows.push([server_id, ["no answer", "bad"], "", ms(peer?.rtt_ms), peer?.nodes, "", peer?.connections, "", "", peer?.version, peer?.address]);
  }
  return rows;
}

export const SESSIONS = [["Server", ""], ["Agent", ""], ["From", ""], ["Attached for", "number"], ["RTT", "number"], ["Connections", "number"], ["Stalled", "number"], ["To the node", "number"], ["From the node", "number"]];
export const LINKS = [["Server", ""], ["Link", "number"], ["Streams", "number"], ["RTT", "number"], ["Window of a stream", "number"], ["Receive window full", "number"], ["Send buffer full", "number"], ["Path takes", "number"], ["Sent again", "number"]];

export const sessionRows = (list) =>
  list.map((session) => [
    session.server,
    session.agent_version,
    session.peer,
    age(session.since_s),
    ms(session.rtt_ms),
    session.connections,
    [session.stalled, session.stalled > 0 ? "warn" : ""],
    `${rate(session.to)} (${bytes(session.bytes_to_node)})`,
    `${rate(session.from)} (${bytes(session.bytes_from_node)})`,
  ]);

export const linkRows = (list) =>
  list.flatMap((session) =>
    session.links.map((link) => [
      session.server,
      link.number,
      link.connections,
      ms(link.rtt_ms),
      bytes(link.window),
      percent(link.window_limited),
      percent(link.buffer_limited),
      rate(link.delivery_rate),
      link.retransmits,
    ]),
  );
