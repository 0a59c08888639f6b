"use strict";
const COLORS = {preprocess: "preprocess", queue: "queue", "decode-queue": "queue", bootstrap: "bootstrap", storage: "storage",
  "prefill-queue": "queue", prefill: "prefill", communication: "communication", transfer: "transfer", delivery: "delivery",
  decode: "decode"};
const AXES = ["dp", "cp", "tp", "pp"];
const RATE_S = 10, LATENCY_S = 60, KEPT_S = 300;
const at = id => document.getElementById(id);
const number = (value, digits = 0) => value.toLocaleString("en", {maximumFractionDigits: digits});
const duration = seconds => seconds < 1 ? `${number(1000 * seconds)} ms` : seconds < 60 ? `${seconds.toFixed(1)} s` :
  seconds < 6000 ? `${number(seconds / 60)} min` : seconds < 172800 ? `${number(seconds / 3600)} h` : `${number(seconds / 86400)} days`;

function make(kind, cls, ...children) {
  const element = document.createElement(kind);
  if (cls) element.className = cls;
  element.append(...children);
  return element;
}

function bar(parts) {
  return make("div", "bar", ...parts.filter(part => part.share > 0).map(part => {
    const piece = make("i");
    piece.style.width = 100 * part.share + "%";
    piece.style.background = `var(--${part.color})`;
    piece.title = part.title;
    return piece;
  }));
}

/* What was read, the oldest first, from which rates and percentiles of the last seconds are computed. */
const history = [];

function remember(now) {
  const {totals, time, latencies} = now, last = history.at(-1);
  const values = {...totals, time, ttft: latencies.ttft.counts, itl: latencies.itl.counts, kv_read: totals.kv_bytes};
  if (last && (time <= last.time || totals.generation_tokens < last.generation_tokens)) {
    history.length = 0;  // a clock set back, or a new router
  } else if (last) {
    values.kv_bytes = last.kv_bytes + Math.max(0, values.kv_read - last.kv_read);  // restarted replicas count from 0
  }
  history.push(values);
  while (history[0].time < now.time - KEPT_S) history.shift();
}

function since(seconds, end) {
  return history.find(values => values.time >= end.time - seconds - 0.5);
}

function rate(name, end = history.at(-1)) {
  const begin = since(RATE_S, end);
  return begin === end ? 0 : (end[name] - begin[name]) / (end.time - begin.time);
}

/* Percentiles as Prometheus estimates them from buckets. */
function percentile(name, share, bounds) {
  const end = history.at(-1), begin = since(LATENCY_S, end);
  const counts = end[name].map((count, index) => count - begin[name][index]);
  const wanted = share * counts.reduce((sum, count) => sum + count, 0);
  if (!wanted) return null;
  let reached = 0;
  for (let index = 0; index < bounds.length; index++) {
    if (reached + counts[index] >= wanted) {
      const low = index ? bounds[index - 1] : 0;
      return low + (bounds[index] - low) * (wanted - reached) / counts[index];
    }
    reached += counts[index];
  }
  return bounds.at(-1);
}

function sparkline(name) {
  const values = history.map(end => rate(name, end)), most = Math.max(...values, 1e-9);
  const points = values.map((value, index) => `${100 * index / Math.max(1, values.length - 1)},${29 - 28 * value / most}`);
  const template = document.createElement("template");
  template.innerHTML = `<svg viewBox="0 0 100 30" preserveAspectRatio="none"><polyline points="${points.join(" ")}"/></svg>`;
  return template.content;
}

function tile(name, value, series) {
  const made = make("div", "card tile", make("b", "", value), make("span", "soft", name));
  if (series) made.append(sparkline(series));
  return made;
}

function latency(name, {bounds}) {
  const [half, most] = [0.5, 0.99].map(share => percentile(name, share, bounds));
  return tile(`${name.toUpperCase()}, p50 and p99`, half === null ? "–" : `${duration(half)} · ${duration(most)}`);
}

function tiles(now) {
  const {totals} = now;
  return [tile("open requests", number(now.router.open)), tile("waiting", number(now.router.waiting)),
    latency("ttft", now.latencies.ttft), latency("itl", now.latencies.itl),
    tile("answer tokens / s", number(rate("generation_tokens")), "generation_tokens"),
    tile("prompt tokens / s", number(rate("prompt_tokens")), "prompt_tokens"),
    tile("KV MiB / s", number(rate("kv_bytes") / 2 ** 20, 1), "kv_bytes"),
    tile("of prompts found in caches", number(100 * totals.cached_tokens / Math.max(1, totals.prompt_tokens)) + "%")];
}

/* Ranks in nested boxes, with one level for each axis that has more than one coordinate. */
function nest(ranks, axes) {
  if (!axes.length) return ranks.map(rank => {
    const cell = make("span", "rank", `rank ${rank.global_rank}`);
    cell.title = AXES.map(axis => `${axis} ${rank[axis]}`).join(", ") + `\n${rank.address}`;
    cell.append(make("span", "soft", ` ${rank.node} ${rank.device}`));
    if (rank.sent_bytes) cell.append(make("span", "soft", ` · ${number(rank.sent_bytes / 2 ** 20, 1)} MiB sent`));
    return cell;
  });
  const [axis, ...rest] = axes;
  const coordinates = [...new Set(ranks.map(rank => rank[axis]))];
  if (coordinates.length < 2) return nest(ranks, rest);
  return coordinates.map(coordinate =>
    make("div", "axis", make("span", "name", `${axis} ${coordinate}`), ...nest(ranks.filter(rank => rank[axis] === coordinate), rest)));
}

/* To whom a prefill replica handed the prompts of the finished requests on this page. */
function targets(name, recent) {
  const counts = new Map();
  for (const {phases} of recent) {
    if (!phases.some(phase => phase.name === "prefill" && phase.replica === name)) continue;
    const target = phases.find(phase => phase.name === "transfer")?.replica;
    if (target) counts.set(target, (counts.get(target) ?? 0) + 1);
  }
  return [...counts].sort().map(([target, count]) => `${target} (${count})`).join(", ");
}

function replica(entry, now) {
  const {load} = entry, pages = Math.max(1, load.total_pages);
  const held = load.total_pages - load.free_pages, idle = Math.min(load.free_pages, Math.max(0, load.cached_pages));
  const state = entry.ready ? (load.draining ? "draining" : "ready") : "not ready";
  const dot = make("span", "dot" + (entry.ready ? (load.draining ? " drain" : "") : " off"));
  const sendsTo = targets(entry.replica, now.recent);
  return make("div", "replica",
    make("header", "", make("span", "", dot, entry.replica, make("span", "soft", ` · ${state} · up ${duration(now.time - entry.started)}`)),
      make("span", "soft", `${load.num_running} running, ${load.num_waiting} waiting`)),
    bar([{share: held / pages, color: entry.role, title: `${held} pages held`},
      {share: idle / pages, color: "queue", title: `${idle} pages cached`}]),
    make("div", "soft", `${number(held)} of ${number(load.total_pages)} pages held, ${number(load.cached_pages)} cached`),
    ...(sendsTo ? [make("div", "soft", `sends to ${sendsTo}`)] : []),
    make("div", "ranks", ...nest(entry.ranks, AXES)));
}

function row(cells, ...more) {
  return make("tr", "", ...cells.map(([text, cls]) => {
    const cell = make("td", cls, String(text));
    if (cls === "left cut") cell.title = text;
    return cell;
  }), ...more);
}

function openRow(request) {
  const replicas = [request.prefill, request.decode].filter(Boolean).join(" → ");
  return row([[request.id, "left cut"], [request.key, "left cut"], [request.phase, "left"], [replicas, "left extra"],
    [duration(request.age)], [number(request.prompt_tokens), "extra"], [number(request.num_tokens)]]);
}

function finishedRow(record, longest) {
  const parts = record.phases.map(phase => ({
    share: phase.seconds / longest, color: COLORS[phase.name] || "queue",
    title: `${phase.name} ${number(1000 * phase.seconds, 1)} ms${phase.replica ? " · " + phase.replica : ""}`}));
  const cells = [[new Date(1000 * record.ended).toLocaleTimeString("en-GB")], [record.id, "left cut"], [record.key, "left cut"],
    [number(record.prompt_tokens), "extra"], [number(record.num_tokens), "extra"], [duration(record.seconds)],
    [record.outcome, record.outcome === "failed" ? "left bad" : "left"]];
  return row(cells, make("td", "wide", bar(parts)));
}

function fill(name, rows) {
  at(name).replaceChildren(...rows);
  at(name).closest(".card").classList.toggle("empty", !rows.length);
}

function show(now) {
  remember(now);
  document.title = `Baton · ${now.cluster}`;
  at("cluster").textContent = now.cluster;
  at("facts").textContent = `${now.model} · up ${duration(now.time - now.started)} · Baton ${now.version}` +
    (now.router.draining ? " · draining" : "");
  at("tiles").replaceChildren(...tiles(now));
  at("roles").replaceChildren(...["prefill", "decode"].map(role => make("div", "card", make("b", "", role),
    ...now.replicas.filter(entry => entry.role === role).map(entry => replica(entry, now)))));
  at("num-open").textContent = now.open.length < now.num_open ? `the oldest ${now.open.length} of ${now.num_open}` : "";
  fill("open", now.open.map(openRow));
  const longest = Math.max(...now.recent.map(record => record.seconds), 1e-3);
  at("longest").textContent = duration(longest);
  fill("requests", now.recent.map(record => finishedRow(record, longest)));
}

function setLoggedIn(isLoggedIn) {
  at("login").hidden = isLoggedIn;
  at("content").hidden = !isLoggedIn;
}

async function look() {
  const known = sessionStorage.getItem("key");
  try {
    const reply = await fetch("status", {headers: known ? {Authorization: `Bearer ${known}`} : {}});
    if (reply.status === 401) {
      sessionStorage.removeItem("key");
      setLoggedIn(false);
      at("problem").textContent = known ? "this key is not known" : "";
      at("key").focus();
      return;  // until a key is given
    }
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    const now = await reply.json();
    show(now);
    setLoggedIn(true);
    const mismatches = now.totals.parity_mismatches;
    at("problem").textContent = mismatches ? `mismatches found by parity probes: ${mismatches}` : "";
  } catch (error) {
    at("problem").textContent = error.message;
  }
  setTimeout(look, 1000);
}

at("login").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
  at("key").value = "";
  look();
});
at("legend").append(...[...new Set(Object.values(COLORS))].map(color => {
  const swatch = make("i");
  swatch.style.background = `var(--${color})`;
  return make("span", "", swatch, color);
}));
look();
