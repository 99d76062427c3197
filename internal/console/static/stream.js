// The view of the stream: how fast it is, what is retained, who reads it and how far behind, and the servers that share it.

import {el, heading, keyed, rows, setText, source, table} from './dom.js';
import {bytes, clock, duration, incidentText, millis, number, percent, plain, plural, rate, workerLink} from './format.js';
import {areaChart, meter} from './charts.js';
import {rpc} from './api.js';
import {state} from './state.js';

const refreshEvery = 30_000; // of the history

const subscriberColumns = [{title: 'Address'}, {title: 'Behind'}, {title: 'Entries behind', number: true}, {title: 'Seq', number: true}, {title: 'For', number: true}, {title: 'Client'}, {title: 'Filter'}];
const endedColumns = [{title: 'Time'}, {title: 'Client'}, {title: 'Why'}];
const instanceColumns = [{title: 'Instance'}, {title: 'State'}, {title: 'Host'}, {title: 'gRPC'}, {title: 'Version'}, {title: 'For', number: true}, {title: 'Workers', number: true}, {title: 'Entries behind', number: true}];
const takeoverColumns = [{title: 'Time'}, {title: 'What'}, {title: 'Worker'}, {title: 'Details'}];

const filterText = f => {
  const parts = [...(f?.workers ?? []), ...(f?.models ?? []), ...(f?.tiers ?? []).map(plain)];
  return parts.length ? parts.join(', ') : 'everything';
};

const since = unixNano => Math.max(0, state.statusTime - millis(unixNano)) * 1e6;

export function stream() {
  const facts = el('dl', {class: 'facts'});
  const live = areaChart('Entries a second, now', ['tier0'], rate);
  const past = areaChart('Entries a second, last hour', ['tier0'], rate);
  const lag = areaChart('Entries that the subscriber furthest behind has not read, last hour', ['tier2']);
  const kept = meter('tier1');
  const keptText = el('p');
  const subscribers = table('Subscribers', subscriberColumns);
  const none = el('p', {class: 'empty', text: 'No router is subscribed.'});
  const ended = table('Ended subscriptions', endedColumns);
  const noneEnded = el('p', {class: 'empty', text: 'The server has ended no subscription.'});
  const instances = table('Servers that share the journal', instanceColumns);
  const takeovers = table('Takeovers', takeoverColumns);
  const noTakeover = el('p', {class: 'empty', text: 'This server has taken no worker, and handed none over.'});
  const cluster = el('section', {}, heading('Servers'), instances.node, heading('Leases'), takeovers.node, noTakeover,
    source('RouterEventService/GetStatus', {}, ['kvcast_cluster_instances', 'kvcast_cluster_takeovers_total']));
  const abort = new AbortController();
  const timer = setInterval(refresh, refreshEvery);

  async function refresh() {
    if (document.hidden || abort.signal.aborted) return;
    try {
      const {samples = []} = await rpc('InspectionService/GetHistory', {}, abort.signal);
      const all = samples.map(s => ({time: millis(s.time_unix_nano), seq: Number(s.newest_seq ?? 0), lag: Number(s.subscriber_lag ?? 0)}));
      past.update(all.slice(1).map((s, i) => ({time: s.time, values: [Math.max(0, s.seq - all[i].seq) / ((s.time - all[i].time) / 1000)]})));
      lag.update(all.map(s => ({time: s.time, values: [s.lag]})));
    } catch { /* the notice says that the server does not answer */ }
  }

  function updateStatus() {
    const s = state.status;
    if (!s) return;
    const oldest = Number(s.oldest_seq ?? 0);
    const newest = Number(s.newest_seq ?? 0);
    const size = Number(s.journal_bytes ?? 0);
    const most = Number(s.journal_max_bytes ?? 0);
    const all = [
      ['Entries/s', rate(state.entryRate), `newest seq ${number(newest)}`],
      ['Retained', number(Math.max(0, newest - oldest + 1)), 'entries'],
      ['Subscribers', number(Number(s.subscribers ?? 0)), `${number(Number(s.replays ?? 0))} replays`],
      ['Snapshots', number(Number(s.snapshots ?? 0)), `${number(Number(s.snapshots_waiting ?? 0))} waiting`],
      ['Evicted', bytes(Number(s.journal_evicted_bytes ?? 0)), 'read by slow subscribers'],
      ['Epoch', s.epoch ?? '', s.version ?? ''],
    ];
    keyed(facts, all, f => f[0], () => el('div', {}, el('dt'), el('dd'), el('dd', {class: 'muted'})), (node, f) => f.forEach((text, i) => setText(node.children[i], text)));
    const share = most > 0 ? size / most : 0;
    const text = `Seqs ${number(oldest)} to ${number(newest)} are retained: ${bytes(size)}${most ? ` of at most ${bytes(most)} (${percent(share)})` : ''}${s.journal_max_age_nano ? `, for at most ${duration(Number(s.journal_max_age_nano))}` : ''}.`;
    kept.node.hidden = most === 0;
    kept.update(size, most, text);
    setText(keptText, text);
    live.update(state.points.map(p => ({time: p.time, values: [p.rate]})));
    updateInstances(s, newest);
  }

  function updateInstances(s, newest) {
    const all = s.instances ?? [];
    cluster.hidden = all.length === 0;
    rows(instances.body, instanceColumns, all.map(i => ({
      key: i.id,
      cells: [`${i.id.slice(0, 8)}${i.id === s.instance_id ? ' (this)' : ''}`, i.live ? (i.draining ? 'draining' : 'live') : 'dead', `${i.host ?? ''} (${i.pid ?? 0})`, i.grpc_address ?? '', i.version ?? '',
        duration(since(i.start_time_unix_nano ?? '0')), i.ingests ? number(Number(i.workers ?? 0)) : 'reads none', number(Math.max(0, newest - Number(i.newest_seq ?? 0)))],
    })));
  }

  function subscriberRow() {
    const bar = meter('tier2');
    const tr = el('tr', {}, subscriberColumns.map((c, i) => el('td', {class: c.number ? 'number' : undefined}, i === 1 && bar.node)));
    tr.show = (s, most) => {
      const behind = Number(s.behind ?? 0);
      const text = s.in_snapshot ? 'snapshot' : number(behind);
      bar.update(s.in_snapshot ? most : behind, most, s.in_snapshot ? 'receives a snapshot' : `${number(behind)} entries behind`);
      [s.peer ?? '', undefined, text, number(Number(s.seq ?? 0)), duration(since(s.start_time_unix_nano ?? '0')), s.client_id || (s.user_agent ?? '').split(' ')[0], filterText(s.filter)]
        .forEach((cell, i) => { if (cell !== undefined) setText(tr.children[i], cell); });
    };
    return tr;
  }

  function updateSubscribers() {
    const all = state.subscribers;
    const most = Math.max(100, ...all.map(s => Number(s.behind ?? 0)));
    none.hidden = all.length > 0 || !state.status;
    subscribers.node.hidden = all.length === 0;
    keyed(subscribers.body, all.slice(0, 200), s => `${s.peer} ${s.start_time_unix_nano}`, subscriberRow, (tr, s) => tr.show(s, most));
  }

  function updateIncidents() {
    const endings = state.incidents.filter(i => i.kind === 'INCIDENT_KIND_SUBSCRIBER_ENDED').slice(0, 20);
    noneEnded.hidden = endings.length > 0;
    ended.node.hidden = endings.length === 0;
    rows(ended.body, endedColumns, endings.map(i => ({key: i.id, cells: [clock(millis(i.time_unix_nano)), i.peer ?? '', incidentText(i)]})));
    const moved = state.incidents.filter(i => ['INCIDENT_KIND_TAKEOVER', 'INCIDENT_KIND_RELEASE', 'INCIDENT_KIND_FENCED'].includes(i.kind)).slice(0, 20);
    noTakeover.hidden = moved.length > 0;
    takeovers.node.hidden = moved.length === 0;
    keyed(takeovers.body, moved, i => i.id,
      i => el('tr', {}, el('td', {text: clock(millis(i.time_unix_nano))}), el('td', {text: plain(i.kind)}), el('td', {}, el('a', {href: workerLink(i.worker), text: i.worker})), el('td', {text: incidentText(i)})),
      () => {});
  }

  function update(name) {
    if (name === 'status' || name === 'all') updateStatus();
    if (name === 'subscribers' || name === 'all') updateSubscribers();
    if (name === 'incidents' || name === 'all') updateIncidents();
    if (name === 'all') refresh();
  }

  return {
    title: 'Stream',
    nodes: [facts,
      el('section', {}, heading('Entries'), live.node,
        source('RouterEventService/GetStatus', {}, ['kvcast_server_journal_newest_seq', 'kvcast_pipeline_events_total']),
        past.node, source('InspectionService/GetHistory', {}, ['kvcast_server_journal_newest_seq'])),
      el('section', {}, heading('Journal'), kept.node, keptText, source('RouterEventService/GetStatus', {}, ['kvcast_server_journal_bytes', 'kvcast_server_journal_oldest_seq'])),
      el('section', {}, heading('Subscribers'), subscribers.node, none, source('RouterEventService/ListSubscribers', {}, ['kvcast_server_subscriber_lag_entries', 'kvcast_server_snapshots']),
        lag.node, source('InspectionService/GetHistory', {}, ['kvcast_server_subscriber_lag_entries'])),
      el('section', {}, heading('Ended by the server'), ended.node, noneEnded,
        source('InspectionService/ListIncidents', {kinds: ['INCIDENT_KIND_SUBSCRIBER_ENDED']}, ['kvcast_server_stalled_streams_total'])),
      cluster],
    update,
    close() {
      clearInterval(timer);
      abort.abort();
    },
  };
}
