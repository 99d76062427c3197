// The view of one worker: its sources, what has happened to it, its blocks over the last hour, and its last entries.

import {el, heading, keyed, rows, setText, source, table} from './dom.js';
import {blocksOf, clock, dateTime, duration, hash, incidentText, kinds, millis, number, plain, plural, rate, reasons, reasonText, tiers, trusts} from './format.js';
import {areaChart, tierBar, tierLegend, tiersText, timeline} from './charts.js';
import {rpc} from './api.js';
import {batchRate, state} from './state.js';
import {trustBadge, updateBadge} from './fleet.js';

const hour = 3600_000;
const entriesShown = 25;
const refreshEvery = 3000; // of the entries, while the page is visible; the history is refreshed ten times less often

const sourceColumns = [{title: 'Source'}, {title: 'Rank', number: true}, {title: 'State'}, {title: 'Engine seq', number: true}, {title: 'Delay', number: true}, {title: 'Restarts', number: true}, {title: 'Repairs', number: true}, {title: 'Endpoint'}, {title: 'Replay'}];
const incidentColumns = [{title: 'Time'}, {title: 'What'}, {title: 'Rank', number: true}, {title: 'Details'}];
const entryColumns = [{title: 'Seq', number: true}, {title: 'Engine time'}, {title: 'Rank', number: true}, {title: 'Events'}];

// eventText says what an event of an entry does.
export function eventText(e) {
  const tier = e.tier ? ` ${plain(e.tier)}` : '';
  if (e.stored) {
    const all = e.stored.block_hashes ?? [];
    const after = e.stored.parent_hash ? `, after ${hash(e.stored.parent_hash)}` : ', from the start of a prompt';
    const lora = e.stored.lora_name ? `, adapter ${e.stored.lora_name}` : '';
    return `stored ${plural(all.length, 'block')}${tier} ${range(all)}${after}${lora}`;
  }
  if (e.removed) {
    const all = e.removed.block_hashes ?? [];
    return `removed ${plural(all.length, 'block')}${tier} ${range(all)}`;
  }
  if (e.cleared) return `cleared (${plain(e.cleared.reason)})`;
  if (e.gap) return `gap (${plain(e.gap.reason)}), ${plural(Number(e.gap.missed_batches ?? 0), 'batch', 'batches')} lost${e.gap.detail ? `, ${e.gap.detail}` : ''}`;
  if (e.worker_added) return `worker added, model ${e.worker_added.model || 'unknown'}`;
  if (e.worker_removed) return `worker removed (${plain(e.worker_removed.reason)})`;
  if (e.groups_omitted) return 'there are other attention groups';
  if (e.groups) return `attention groups: ${groupsText(e.groups)}`;
  for (const [kind, g] of [['stored', e.group_stored], ['removed', e.group_removed]]) {
    if (g) return `${kind} ${plural((g.block_hashes ?? []).length, 'block')}${tier} of group ${g.group ?? 0}`;
  }
  return 'an event of a later version';
}

const range = all => (all.length > 1 ? `${hash(all[0])}…${hash(all[all.length - 1])}` : all.map(hash).join());

// groupsText describes the attention groups of a rank.
function groupsText(g) {
  const all = (g.groups ?? []).map(v => [`${v.index ?? 0} ${plain(v.kind)}`, `${v.block_size ?? 0} tokens`, v.window && `window ${v.window}`, v.chunk && `chunk ${v.chunk}`, v.drops && 'drafts', v.main && 'main'].filter(Boolean).join(', '));
  if (g.missing) all.push(`missing: ${g.missing}`);
  else if (!g.hashing) all.push('how the engine computes hashes is not known yet');
  return all.join('; ');
}

// accuracyText says how right predictions were, by what routers have reported.
function accuracyText(a) {
  if (!a) return '';
  const [exact, over, under] = [a.exact, a.over, a.under].map(n => Number(n ?? 0));
  const all = exact + over + under;
  return ` Of ${plural(all, 'reported prediction')}, ${number(exact)} were exact (${(100 * exact / all).toFixed(1)} %), ${number(over)} too long, ${number(under)} too short.`;
}

const replays = {REPLAY_STATE_NEVER_ANSWERED: 'never answered', REPLAY_STATE_ANSWERS: 'answers', REPLAY_STATE_UNANSWERED: 'does not answer'};
const withTime = i => ({...i, time: millis(i.time_unix_nano)});

export function worker({argument: name}) {
  const about = el('p', {class: 'muted'});
  const ranks = el('ul', {class: 'ranks'});
  const missing = el('p', {class: 'empty', text: 'The server does not know this worker (any more).'});
  const sources = table('Sources', sourceColumns);
  const picture = timeline('Up to the last hour');
  const incidents = table('What happened', incidentColumns);
  const quiet = el('p', {class: 'empty', text: 'Nothing has happened to this worker since the server started.'});
  const blocks = areaChart('Blocks by tier, last hour', tiers.map((_, i) => `tier${i}`));
  const entries = table('Last entries', entryColumns);
  const noEntries = el('p', {class: 'empty'});
  const abort = new AbortController();
  let history = [];
  let past = []; // incidents of this worker
  let refreshed = 0;
  let historyAt = 0;

  const timer = setInterval(refresh, refreshEvery);

  async function refresh() {
    if (document.hidden || abort.signal.aborted) return;
    try {
      const now = Date.now();
      if (now - historyAt > 10 * refreshEvery) {
        historyAt = now;
        const answer = await rpc('InspectionService/GetHistory', {worker: name}, abort.signal);
        history = (answer.samples ?? []).map(s => ({time: millis(s.time_unix_nano), values: blocksOf(s.blocks)}));
        updateHistory();
      }
      const answer = await rpc('InspectionService/ListEntries', {worker: name, limit: entriesShown}, abort.signal);
      updateEntries(answer);
    } catch (error) {
      if (!abort.signal.aborted) setText(noEntries, `The entries are not shown: ${error.message}`);
    }
  }

  async function refreshIncidents() {
    const newest = Number(state.status?.newest_incident_id ?? 0);
    if (newest === refreshed || abort.signal.aborted) return;
    refreshed = newest;
    try {
      const answer = await rpc('InspectionService/ListIncidents', {worker: name, limit: 500}, abort.signal);
      past = (answer.incidents ?? []).map(withTime);
    } catch {
      refreshed = 0; // the next status tries again
    }
    updateIncidents();
  }

  function updateIncidents() {
    const now = state.statusTime || Date.now();
    picture.update(past, Math.min(now - hour / 6, Math.max(now - hour, past[past.length - 1]?.time ?? now)), now);
    quiet.hidden = past.length > 0;
    incidents.node.hidden = past.length === 0;
    rows(incidents.body, incidentColumns, past.slice(0, 50).map(i => ({
      key: i.id,
      cells: [clock(i.time), (kinds[i.kind] ?? [plain(i.kind)])[0], i.dp_rank === undefined ? '' : String(i.dp_rank), incidentText(i)],
    })));
  }

  function updateHistory() {
    const w = state.workers.find(w => w.name === name);
    const now = w ? [{time: state.workersTime, values: tiers.map((_, t) => (w.ranks ?? []).reduce((n, r) => n + blocksOf(r.blocks)[t], 0))}] : [];
    blocks.update([...history.filter(p => p.time < (now[0]?.time ?? Infinity)), ...now]);
  }

  function updateEntries(answer) {
    const all = answer.entries ?? [];
    entries.node.hidden = all.length === 0;
    noEntries.hidden = all.length > 0;
    setText(noEntries, `No entry of this worker among those after seq ${number(Number(answer.searched_after ?? 0))}.`);
    rows(entries.body, entryColumns, all.map(e => {
      const events = e.events ?? [];
      return {
        key: e.seq,
        cells: [e.seq, e.engine_time_unix_nano ? clock(millis(e.engine_time_unix_nano)) : '–', [...new Set(events.map(v => v.dp_rank).filter(r => r !== undefined))].join(', '),
          events.length ? events.map(eventText).join('; ') : 'no events: the owner changed'],
      };
    }));
  }

  function rankPanel() {
    const badge = trustBadge();
    const bar = tierBar();
    const li = el('li', {}, el('h2'), badge, bar.node, el('p'), el('ul', {class: 'why'}));
    li.show = (r, most, several) => {
      setText(li.children[0], several ? `Rank ${r.dp_rank ?? 0}` : 'Cache');
      updateBadge(badge, r.trust in trusts ? r.trust : 'TRUST_UNSPECIFIED', r.reasons);
      bar.update(blocksOf(r.blocks), most);
      setText(li.children[3], `${tiersText(blocksOf(r.blocks))}. ${plural(Number(r.gaps ?? 0), 'gap')}, ${plural(Number(r.missed_batches ?? 0), 'batch', 'batches')} lost.${accuracyText(r.accuracy)}${r.groups ? ` Attention groups: ${groupsText(r.groups)}.` : ''}`);
      const why = r.reasons?.length ? r.reasons.map(x => `${reasonText(x)}: ${reasons[x]?.[1] ?? ''}`) : [(trusts[r.trust] ?? trusts.TRUST_UNSPECIFIED).meaning];
      keyed(li.children[4], why, x => x, () => el('li'), (item, text) => setText(item, text));
    };
    return li;
  }

  function updateWorker() {
    const w = state.workers.find(w => w.name === name);
    missing.hidden = Boolean(w) || !state.workersTime;
    if (!w) return;
    const labels = Object.entries(w.labels ?? {}).map(([k, v]) => `${k}=${v}`);
    setText(about, [w.pool && 'a pool, from which workers load blocks', w.model && `model ${w.model}`, plain(w.state) || 'state unknown', `${rate(batchRate(name))} batches/s`, w.block_size && `${w.block_size} tokens a block`,
      w.endpoint && `requests to ${w.endpoint}`, w.pools?.length && `loads from ${w.pools.join(', ')}`, w.owner && `read by ${w.owner.instance_id?.slice(0, 8) || 'no server'}`, ...labels].filter(Boolean).join(' · '));
    const most = Math.max(0, ...state.ranks.map(r => r.total));
    keyed(ranks, w.ranks ?? [], r => r.dp_rank ?? 0, rankPanel, (li, r) => li.show(r, most, w.ranks.length > 1));
    rows(sources.body, sourceColumns, (w.sources ?? []).map(s => ({
      key: `${s.endpoint} ${s.dp_rank ?? 0}`,
      cells: [s.engine, String(s.dp_rank ?? 0), `${plain(s.state)}${s.down_nano ? ` for ${duration(Number(s.down_nano))}` : ''}`, s.started ? number(Number(s.last_seq ?? 0)) : '–',
        s.engine_delay_nano === undefined ? 'no time' : duration(Number(s.engine_delay_nano)), String(s.restarts ?? 0), String(s.repairs ?? 0), s.endpoint, s.replay_endpoint ? `${s.replay_endpoint} (${replays[s.replay_state] ?? 'not known'})` : 'none'],
    })));
  }

  function update(what) {
    if (what === 'workers' || what === 'all') {
      updateWorker();
      updateHistory();
    }
    if (what === 'status' || what === 'all') refreshIncidents();
    if (what === 'all') refresh();
  }

  const linkToLog = el('a', {href: `#/log?worker=${encodeURIComponent(name)}`, text: 'All of it in the log'});
  return {
    title: name,
    nodes: [about, missing, ranks,
      el('section', {}, heading('Blocks'), tierLegend(), blocks.node, source('InspectionService/GetHistory', {worker: name}, ['kvcast_index_blocks'])),
      el('section', {}, heading('What happened'), picture.node, quiet, incidents.node, el('p', {}, linkToLog, ` · now ${dateTime(Date.now()).replace('T', ' ')}`),
        source('InspectionService/ListIncidents', {worker: name}, ['kvcast_ingest_gaps_total', 'kvcast_ingest_restarts_total', 'kvcast_ingest_replays_done_total'])),
      el('section', {}, heading('Sources'), sources.node,
        source('RouterEventService/ListWorkers', {filter: {workers: [name]}}, ['kvcast_ingest_last_seq', 'kvcast_ingest_engine_delay_seconds', 'kvcast_ingest_restarts_total'])),
      el('section', {}, heading('Last entries'), entries.node, noEntries, source('InspectionService/ListEntries', {worker: name, limit: entriesShown}))],
    update,
    close() {
      clearInterval(timer);
      abort.abort();
    },
  };
}
