// What the page shows, computed from the bodies of the API. No document here, so that tests can run it anywhere.

// Server with the given load report, in tokens and shares per second.
export function rates(member) {
  const load = member.load;
  const seconds = (load?.window_ms ?? 0) / 1000;
  if (!load || seconds <= 0) return { tokens: 0, busy: 0, experts: [] };
  return {
    tokens: load.num_tokens / seconds,
    busy: load.busy_ms / load.window_ms,
    experts: load.experts.map((entry) => ({ layer: entry.layer, expert: entry.expert, tokens: entry.num_tokens / seconds })),
  };
}

// Mean times by phase in microseconds, over one or more members: of a frame in the queue, of a batch in the others. Null
// where no member has reported any.
export function phases(members) {
  const loads = members.map((member) => member.load).filter((load) => load?.phases);
  const total = (pick) => sum(loads.map((load) => pick(load)));
  const mean = (time, count) => (count > 0 ? time / count : null);
  const batches = total((load) => load.phases.num_batches);
  return {
    queue: mean(total((load) => load.phases.queue_us), total((load) => load.num_frames)),
    compute: mean(total((load) => load.phases.compute_us), batches),
    combine: mean(total((load) => load.phases.combine_us), batches),
  };
}

// Sums over the members that serve.
export function summary(members) {
  const servers = members.filter((member) => member.state === "serving");
  const serving = servers.map(rates);
  const tokens = serving.map((rate) => rate.tokens);
  const busy = serving.map((rate) => rate.busy);
  const total = sum(tokens);
  const mean = serving.length ? total / serving.length : 0;
  return {
    tokens: total,
    balance: mean > 0 ? Math.max(...tokens) / mean : null,
    busyMean: serving.length ? sum(busy) / serving.length : 0,
    busyMax: serving.length ? Math.max(...busy) : 0,
    phases: phases(servers),
  };
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

// The heat map of all layers: rows of layers, columns of experts. A cell has the tokens per second of an expert over all
// servers, or null where no server holds it.
export function layerMap(placement, members) {
  const numExperts = placement.model?.num_experts ?? placement.layers[0]?.replicas.length ?? 0;
  const rows = placement.layers.map((entry) => ({
    name: `layer ${entry.layer}`,
    cells: entry.replicas.map((servers) => (servers.length ? 0 : null)),
    holders: (expert) => (entry.replicas[expert] ?? []).map((server) => placement.servers[server]?.name ?? "?"),
  }));
  const byLayer = new Map(placement.layers.map((entry, nth) => [entry.layer, rows[nth]]));
  for (const member of members) {
    for (const load of rates(member).experts) {
      const row = byLayer.get(load.layer);
      if (row?.cells[load.expert] != null) row.cells[load.expert] += load.tokens;
    }
  }
  return { rows, numExperts, highest: highestOf(rows) };
}

function highestOf(rows) {
  return rows.reduce((highest, row) => row.cells.reduce((most, cell) => Math.max(most, cell ?? 0), highest), 0);
}

// The heat map of one layer: rows of servers, columns of experts. A cell is null where the server does not hold the
// expert, otherwise the tokens per second that this server computed for it.
export function heatmap(placement, members, layer, order) {
  const entry = placement.layers.find((candidate) => candidate.layer === layer);
  if (!entry) return { rows: [], numExperts: 0, highest: 0 };
  const byName = new Map(members.map((member) => [member.name, member]));
  const rows = placement.servers.map((server) => {
    const member = byName.get(server.name);
    const cells = new Array(entry.replicas.length).fill(null);
    const holders = (expert) => (entry.replicas[expert] ?? []).map((index) => placement.servers[index]?.name ?? "?");
    return { name: server.name, cells, member, load: 0, holders };
  });
  entry.replicas.forEach((servers, expert) => {
    for (const server of servers) if (rows[server]) rows[server].cells[expert] = 0;
  });
  for (const row of rows) {
    if (!row.member) continue;
    for (const load of rates(row.member).experts) {
      if (load.layer !== layer || row.cells[load.expert] == null) continue;
      row.cells[load.expert] = load.tokens;
      row.load += load.tokens;
    }
  }
  if (order === "load") rows.sort((a, b) => b.load - a.load || compareNames(a.name, b.name));
  else rows.sort((a, b) => compareNames(a.name, b.name));
  return { rows, numExperts: entry.replicas.length, highest: highestOf(rows) };
}

const collator = new Intl.Collator("en", { numeric: true });
export const compareNames = collator.compare;

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
}

export function compact(value) {
  return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
}

export function duration(ms) {
  const seconds = Math.floor(ms / 1000);
  const parts = [
    [Math.floor(seconds / 86400), "d"],
    [Math.floor(seconds / 3600) % 24, "h"],
    [Math.floor(seconds / 60) % 60, "min"],
    [seconds % 60, "s"],
  ];
  const first = parts.findIndex(([value]) => value > 0);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).map(([value, unit]) => `${value} ${unit}`).join(" ");
}

// The time of day of a moment, in 24 hours.
export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en", { hourCycle: "h23" });
}

export function micros(us) {
  if (us == null) return "–";
  const [value, unit] = us < 1000 ? [us, "µs"] : us < 1e6 ? [us / 1000, "ms"] : [us / 1e6, "s"];
  return `${number(value, value < 10 ? 1 : 0)} ${unit}`;
}

function phaseColumn(phase, title) {
  const of = (member) => phases([member])[phase];
  return { id: `${phase}_us`, title, text: (m) => micros(of(m)), sort: (m) => of(m) ?? -1, isNumber: true };
}

// One line per column of the table of members: title, text, and the value to sort by.
const COLUMNS = [
  { id: "name", title: "Name", text: (m) => m.name, sort: (m) => m.name },
  { id: "state", title: "State", text: stateText, sort: (m) => stateText(m) },
  { id: "data_addr", title: "Address", text: (m) => m.data_addr, sort: (m) => m.data_addr },
  { id: "links", title: "Clients", text: linksText, sort: (m) => (m.load?.links ?? []).reduce((n, l) => n + l.num_links, 0) },
  { id: "experts", title: "Experts", text: expertsText, sort: (m) => m.experts_held, isNumber: true },
  { id: "tokens", title: "Tokens/s", text: (m) => number(rates(m).tokens), sort: (m) => rates(m).tokens, isNumber: true },
  phaseColumn("queue", "Queue"),
  phaseColumn("compute", "Compute"),
  phaseColumn("combine", "Combine"),
  { id: "busy", title: "Busy", text: (m) => `${number(rates(m).busy * 100)} %`, sort: (m) => rates(m).busy, isNumber: true },
  { id: "lease", title: "Lease", text: (m) => `${number(m.lease_remaining_ms / 1000, 1)} s`, sort: (m) => m.lease_remaining_ms, isNumber: true },
  { id: "note", title: "Notes", text: notesText, sort: (m) => notesText(m), isNote: true },
];

// Members have a model of their own only while the fleet serves two.
const MODEL_COLUMN = { id: "model", title: "Model", text: (m) => shortened(m.fingerprint), sort: (m) => m.fingerprint ?? "" };

export function columnsOf(members) {
  const hasModels = members.some((member) => member.fingerprint);
  return hasModels ? [...COLUMNS.slice(0, 2), MODEL_COLUMN, ...COLUMNS.slice(2)] : COLUMNS;
}

export function shortened(fingerprint) {
  return (fingerprint ?? "?").slice(0, 12);
}

// The editions of the model as the page shows them: none while the fleet serves one model.
export function editionsOf(status) {
  return (status.editions ?? []).map((edition) => {
    const { members, experts_total: total, experts_without_replica: missing } = edition;
    const notes = [];
    if (total === 0) notes.push("No server of this model has registered.");
    else if (edition.experts_under_replicated > 0) notes.push(`${number(edition.experts_under_replicated)} experts have fewer replicas than planned.`);
    if (edition.switches_when_complete) notes.push("It becomes the current model as soon as it is complete.");
    if (edition.retires_within_ms != null) notes.push(`Its servers are drained once no client follows it, within ${duration(edition.retires_within_ms)}.`);
    if (edition.plan_error) notes.push(`It cannot be planned: ${edition.plan_error}`);
    return {
      fingerprint: edition.fingerprint,
      title: `${edition.model?.architecture ?? "model"} ${shortened(edition.fingerprint)}`,
      state: edition.state,
      severity: { current: "good", draining: "muted" }[edition.state] ?? "warn",
      placed: total - missing,
      total,
      counts: [
        ["serving", members.serving],
        ["loading", members.loading],
        ["draining", members.draining],
        ["expired", members.expired],
        ["clients", edition.num_clients],
        ["epoch", edition.epoch],
      ],
      notes,
    };
  });
}

function stateText(member) {
  return member.suspected ? `${member.state}, suspected` : member.state;
}

function linksText(member) {
  const links = member.load?.links ?? [];
  return links.length ? links.map((link) => `${link.num_links} ${link.transport}`).join(", ") : "–";
}

function expertsText(member) {
  const [held, assigned] = [member.experts_held, member.experts_assigned];
  return held === assigned ? number(held) : `${number(held)} of ${number(assigned)}`;
}

function notesText(member) {
  const notes = [];
  if (member.load?.device) notes.push(member.load.device);
  if (member.unreachable) notes.push(`unreachable: ${member.unreachable}`);
  if (member.insecure) notes.push(`INSECURE: ${member.insecure}`);
  for (const link of member.load?.links ?? []) {
    for (const reason of link.left_out ?? []) notes.push(`not used: ${reason}`);
  }
  return notes.join("; ");
}

export function severityOfState(member) {
  if (member.state === "expired" || member.unreachable) return "bad";
  return member.state === "serving" && !member.suspected ? "good" : "warn";
}

// The members that a filter leaves, in order.
export function select(members, filter, column, descending) {
  const columns = columnsOf(members);
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const kept = members.filter((member) => {
    const text = columns.map((entry) => entry.text(member)).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const { sort } = columns.find((entry) => entry.id === column) ?? columns[0];
  kept.sort((a, b) => {
    const [x, y] = [sort(a), sort(b)];
    const order = typeof x === "number" ? x - y : compareNames(x, y);
    return (descending ? -order : order) || compareNames(a.name, b.name);
  });
  return kept;
}

// The word for the condition of the fleet, and each deviation from the plan as a sentence: as the control plane says.
export function health(status) {
  return { word: status.health ?? "unknown", problems: status.problems ?? [] };
}
