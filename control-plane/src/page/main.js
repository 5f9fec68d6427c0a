// The page: asks the control plane every two seconds and shows what it says. Text of others is only ever set as text.

import { ApiError, call, storedToken, storeToken } from "./api.js";
import { Chart } from "./charts.js";
import { Goals } from "./goals.js";
import { Heat } from "./heat.js";
import { Members } from "./members.js";
import { clock, compact, duration, editionsOf, health, heatmap, layerMap, micros, number, shortened, summary } from "./model.js";

const PERIOD_MS = 2000;
// The caller's roles may change while the page is open.
const REFRESHES_PER_CALLER = 10;
const MAX_EVENTS = 500;
const MAX_CHANGES = 200;
const MAX_TICKETS = 100;
const ALL_LAYERS = "all";

const $ = (id) => document.getElementById(id);
const state = {
  status: null,
  members: [],
  placement: null,
  // Fingerprints of the model that the viewer has chosen, and of the placement. Null while the fleet serves one model.
  chosenModel: null,
  shownModel: null,
  events: [],
  lastEvent: 0,
  hasEvents: true,
  changes: [],
  tickets: [],
  lastChange: 0,
  hasAudit: true,
  caller: null,
  hasCaller: true,
  hasGoals: true,
  answeredAt: null,
  numRefreshes: 0,
};

const heat = new Heat($("heat"), $("heat-cell"), $("scale"));
const charts = {
  tokens: new Chart($("chart-tokens"), ["tokens/s"], compact),
  balance: new Chart($("chart-balance"), ["ratio"], (value) => number(value, 2)),
  busy: new Chart($("chart-busy"), ["mean", "highest"], (value) => `${number(value * 100)} %`),
  phases: new Chart($("chart-phases"), ["queue", "compute", "combine"], micros),
};

const table = new Members(
  {
    head: $("member-head"),
    body: $("member-rows"),
    filter: $("filter"),
    count: $("member-count"),
    pages: $("pages"),
    back: $("page-back"),
    pageNumber: $("page-number"),
    next: $("page-next"),
  },
  changeMember,
);
const goalsForm = new Goals(
  {
    section: $("goals"),
    form: $("goals-form"),
    replicas: $("goal-replicas"),
    spare: $("goal-spare"),
    inForce: $("goals-in-force"),
    button: $("goals-change"),
  },
  async (goals, text) => (await confirm("Change the goals?", text, "Change")) && act(() => call("PUT", "/v1/goals", goals), "The goals have changed."),
);

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

async function optional(flag, path) {
  if (!state[flag]) return null;
  try {
    return await call("GET", path);
  } catch (error) {
    // Another version of the control plane, a fleet of fixed parts, or a caller without the right.
    if (error instanceof ApiError && [403, 404, 409].includes(error.status)) {
      state[flag] = false;
      return null;
    }
    throw error;
  }
}

async function refresh() {
  const status = await call("GET", "/v1/status");
  const editions = status.editions ?? [];
  const edition = editions.find((candidate) => candidate.fingerprint === state.chosenModel) ?? editions[0];
  const shownModel = edition?.fingerprint ?? null;
  const { epoch } = edition ?? status;
  const known = state.placement;
  const wantsPlacement = !known || known.epoch !== epoch || known.cluster_id !== status.cluster_id || state.shownModel !== shownModel;
  const wantsCaller = !state.caller || state.numRefreshes % REFRESHES_PER_CALLER === 0;
  state.numRefreshes += 1;
  const [members, placement, events, audit, caller, goals] = await Promise.all([
    call("GET", "/v1/members"),
    wantsPlacement ? call("GET", shownModel ? `/v1/placement?fingerprint=${encodeURIComponent(shownModel)}` : "/v1/placement") : known,
    optional("hasEvents", `/v1/events?after=${state.lastEvent}`),
    optional("hasAudit", `/v1/audit?after=${state.lastChange}`),
    wantsCaller ? optional("hasCaller", "/v1/whoami") : null,
    optional("hasGoals", "/v1/goals"),
  ]);
  Object.assign(state, { status, members: members.members, placement, shownModel, answeredAt: Date.now() });
  if (events) {
    // A control plane with a slow clock has taken over: its numbers may be lower.
    if (events.last_seq < state.lastEvent) state.events = [];
    state.lastEvent = events.last_seq;
    state.events = [...events.events.reverse(), ...state.events].slice(0, MAX_EVENTS);
  }
  if (audit) {
    if (audit.last_seq < state.lastChange) state.changes = state.tickets = [];
    state.lastChange = audit.last_seq;
    // A large fleet gets many tickets. They push no change out of the list.
    const newest = audit.entries.reverse();
    state.changes = [...newest.filter((entry) => !entry.tickets), ...state.changes].slice(0, MAX_CHANGES);
    state.tickets = [...newest.filter((entry) => entry.tickets), ...state.tickets].slice(0, MAX_TICKETS);
  }
  if (caller) showCaller(caller);
  if (goals) goalsForm.show(goals);
  const totals = summary(state.members);
  const now = state.answeredAt / 1000;
  charts.tokens.add(now, [totals.tokens]);
  charts.balance.add(now, [totals.balance]);
  charts.busy.add(now, [totals.busyMean, totals.busyMax]);
  charts.phases.add(now, [totals.phases.queue, totals.phases.compute, totals.phases.combine]);
  show(totals);
}

function show(totals) {
  showHealth();
  showTiles(totals);
  showEditions();
  showLayers();
  showHeat();
  table.show(state.members, mayChange());
  showEvents();
  showChanges();
}

function showHealth() {
  const { word, problems } = health(state.status);
  const badge = $("health");
  badge.textContent = word;
  const severity = { healthy: "good", down: "bad" }[word] ?? "warn";
  badge.className = `badge ${severity}`;
  document.title = word === "healthy" ? "Switchyard" : `${word} · Switchyard`;
  $("problems").replaceChildren(...problems.map((text) => make("li", text, severity)));
  const model = state.status.model;
  $("model").textContent = model
    ? `${model.architecture} · ${model.moe_layers.length} layers of ${model.num_experts} experts, top ${model.top_k}`
    : "no model yet";
}

function showTiles(totals) {
  const { status } = state;
  const tiles = [
    ["serving", number(status.members.serving)],
    ["loading", number(status.members.loading)],
    ["draining", number(status.members.draining)],
    ["expired", number(status.members.expired)],
    ["tokens/s", number(totals.tokens)],
    ["epoch", number(status.epoch)],
    ["watches", number(status.num_watchers)],
    ["up for", duration(status.uptime_ms)],
  ];
  $("tiles").replaceChildren(...figures(tiles));
}

function figures(pairs) {
  return pairs.map(([title, value]) => {
    const figure = make("div");
    figure.append(make("dt", title), make("dd", value));
    return figure;
  });
}

function showEditions() {
  const editions = editionsOf(state.status);
  $("models").hidden = editions.length === 0;
  $("editions").replaceChildren(...editions.map(editionCard));
  $("shown-model").hidden = editions.length === 0;
  const options = editions.map((edition) => [edition.fingerprint ?? "", `${shortened(edition.fingerprint)}, ${edition.state}`]);
  setOptions($("model-choice"), options, state.chosenModel ?? state.shownModel ?? "");
}

function editionCard(edition) {
  const card = make("article");
  const title = make("h3");
  title.append(make("span", edition.title), make("span", edition.state, `badge ${edition.severity}`));
  const placed = make("progress");
  placed.max = Math.max(edition.total, 1);
  placed.value = edition.placed;
  placed.setAttribute("aria-label", `Experts of ${edition.title} with a live replica`);
  const counts = make("dl");
  counts.append(...figures(edition.counts.map(([name, count]) => [name, number(count)])));
  card.append(title, placed, make("p", `${number(edition.placed)} of ${number(edition.total)} experts have a live replica`, "muted"), counts);
  card.append(...edition.notes.map((note) => make("p", note, "muted")));
  return card;
}

// Replaces the options of a box, if others are wanted: an open box would close.
function setOptions(box, options, chosen) {
  const texts = options.map((option) => option.join()).join();
  if (box.dataset.shown !== texts) {
    box.dataset.shown = texts;
    box.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  }
  if (options.some(([value]) => value === chosen)) box.value = chosen;
}

function showLayers() {
  const layers = [ALL_LAYERS, ...state.placement.layers.map((entry) => String(entry.layer))];
  setOptions($("layer"), layers.map((layer) => [layer, layer]), $("layer").value);
}

function showHeat() {
  if (!state.placement) return;
  const layer = $("layer").value;
  $("server-order").disabled = layer === ALL_LAYERS;
  const { placement, shownModel } = state;
  const members = state.members.filter((member) => !shownModel || member.fingerprint === shownModel);
  heat.show(layer === ALL_LAYERS ? layerMap(placement, members) : heatmap(placement, members, Number(layer), $("server-order").value));
}

function showEvents() {
  const shown = state.events.filter((event) => !$("only-problems").checked || event.severity !== "info").slice(0, 200);
  const items = shown.map((event) => {
    const item = make("li");
    const time = make("time", clock(event.unix_ms));
    time.dateTime = new Date(event.unix_ms).toISOString();
    const severity = { warn: "warn", error: "bad" }[event.severity] ?? "";
    item.append(time, make("span", event.text, severity));
    return item;
  });
  $("events").replaceChildren(...(items.length ? items : [make("li", "none", "muted")]));
}

function showChanges() {
  $("changes").hidden = !state.hasAudit;
  const entries = [...state.changes, ...state.tickets].sort((a, b) => b.seq - a.seq);
  const rows = entries.map((entry) => {
    const row = make("tr");
    const time = make("td");
    time.append(make("time", clock(entry.unix_ms)));
    const what = [entry.action, entry.target].filter(Boolean).join(" ");
    const who = entry.address ? `${entry.name} from ${entry.address}` : entry.name;
    const outcome = [entry.outcome, entry.detail].filter(Boolean).join(": ");
    row.append(time, make("td", what, "note"), make("td", who, "note"), make("td", outcome, entry.outcome === "ok" ? "note" : "note bad"));
    return row;
  });
  $("change-rows").replaceChildren(...rows);
  $("no-changes").hidden = rows.length > 0;
}

// Without roles the control plane is of an earlier version, and asks for none.
function mayChange() {
  return !state.caller || state.caller.roles.includes("operator");
}

function showCaller(caller) {
  const rights = (who) => who && `${who.name} ${who.roles.join()}`;
  if (rights(caller) !== rights(state.caller)) forgetRefusals();
  state.caller = caller;
  $("caller").textContent = mayChange() ? "" : `${caller.name} may look, and change nothing: that needs the role operator.`;
  goalsForm.allow(mayChange());
}

// What one caller was refused, another may see.
function forgetRefusals() {
  Object.assign(state, { hasCaller: true, hasAudit: true, hasEvents: true, hasGoals: true });
}

function toast(text) {
  const box = $("toast");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => {
    box.hidden = true;
  }, 6000);
}

function confirm(title, text, yes) {
  const dialog = $("confirm");
  $("confirm-title").textContent = title;
  $("confirm-text").textContent = text;
  $("confirm-yes").textContent = yes;
  // The event of an earlier closing may come late, so only the button says yes.
  confirm.answer?.(false);
  return new Promise((resolve) => {
    confirm.answer = resolve;
    $("confirm-yes").onclick = () => resolve(true);
    dialog.onclose = () => {
      if (!dialog.open) resolve(false);
    };
    dialog.showModal();
  });
}

async function changeMember(member, action) {
  const text = {
    drain: "It leaves the placement. It keeps running and can be resumed.",
    resume: "It returns to the placement.",
  }[action];
  const verb = action === "drain" ? "Drain" : "Resume";
  if (!(await confirm(`${verb} ${member.name}?`, text, verb))) return;
  await act(() => call("POST", `/v1/members/${encodeURIComponent(member.member_id)}/${action}`, action === "drain" ? {} : undefined), `${verb}: ${member.name}`);
}

// Returns true if the request was carried out.
async function act(request, done) {
  try {
    await request();
    toast(done);
    return true;
  } catch (error) {
    if (error.status === 401) askToken(error.message);
    else toast(error.message);
    // The caller may have lost a role.
    if (error.status === 403) state.numRefreshes = 0;
    return false;
  }
}

function askToken(reason) {
  const dialog = $("token-dialog");
  $("token-reason").textContent = reason;
  if (!dialog.open) dialog.showModal();
}

async function loop() {
  if (!$("token-dialog").open) {
    try {
      await refresh();
      $("freshness").textContent = "live";
      $("fleet").classList.remove("stale");
      $("use-token").hidden = Boolean(storedToken()) || state.caller?.credential !== "certificate";
    } catch (error) {
      if (!(error instanceof ApiError)) console.error(error);
      if (error.status === 401) askToken(storedToken() ? error.message : "The control plane asks for a token.");
      else showNoAnswer(error);
    }
    $("forget").hidden = !storedToken();
  }
  setTimeout(loop, PERIOD_MS);
}

// What the page shows is the last answer: it is dimmed, and the title does not say that all is well.
function showNoAnswer(error) {
  const word = { 0: "no contact", 403: "no access", 429: "too many requests", 503: "not ready" }[error.status] ?? "error";
  $("health").textContent = word;
  $("health").className = "badge bad";
  document.title = `${word} · Switchyard`;
  const age = state.answeredAt ? `, last answer ${duration(Date.now() - state.answeredAt)} ago` : "";
  $("freshness").textContent = `${error.message}${age}`;
  $("fleet").classList.add("stale");
  $("problems").replaceChildren();
  $("use-token").hidden = error.status !== 403 || Boolean(storedToken());
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeToken($("token").value.trim());
  state.caller = null;
  forgetRefusals();
  $("token").value = "";
  $("token-dialog").close();
});
$("use-token").addEventListener("click", () => askToken("The token's roles take the place of the certificate's."));
$("forget").addEventListener("click", () => {
  storeToken(null);
  location.reload();
});
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  for (const chart of Object.values(charts)) chart.build();
  heat.draw();
});
$("layer").addEventListener("change", showHeat);
$("model-choice").addEventListener("change", () => {
  // Its placement comes with the next answers.
  state.chosenModel = $("model-choice").value;
});
$("server-order").addEventListener("change", showHeat);
$("only-problems").addEventListener("change", showEvents);

loop();
