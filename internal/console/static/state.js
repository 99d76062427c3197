// The last answers of the server, and the rates that follow from two of them.

import {rpc} from './api.js';
import {blocksOf, sum, trusts} from './format.js';

const maxPoints = 180; // seconds of the live chart
const maxIncidents = 1000;

export const state = {
  status: undefined, // GetStatusResponse
  statusTime: 0,
  subscribers: [],
  workers: [],
  workersTime: 0,
  ranks: [], // one for each dp rank of each worker; see ranksOf
  entryRate: 0,
  points: [], // {time, rate}
  incidents: [], // the newest first
  errors: {}, // by the name of the frame
};

const changes = new EventTarget();
let rates = new Map(); // of workers: {seqs, time, perSecond}
let newestIncident = 0;
let fetching = false;

// onChange calls a function with the name of what has changed: status, subscribers, workers, incidents or connection. It
// returns a function that ends that.
export function onChange(listener) {
  const handler = event => listener(event.detail);
  changes.addEventListener('change', handler);
  return () => changes.removeEventListener('change', handler);
}

export const changed = name => changes.dispatchEvent(new CustomEvent('change', {detail: name}));

// apply takes an event of the stream.
export function apply(name, data) {
  if (data.error) {
    state.errors[name] = data.error;
    changed(name);
    return;
  }
  delete state.errors[name];
  if (name === 'status') applyStatus(data);
  if (name === 'subscribers') state.subscribers = data.answer.subscribers ?? [];
  if (name === 'workers') applyWorkers(data.answer.workers ?? [], data.time);
  changed(name);
}

function applyStatus({answer, time, polled}) {
  const before = state.status;
  const seconds = (time - state.statusTime) / 1000;
  if (before && before.epoch === answer.epoch && seconds > 0 && seconds < 10) {
    state.entryRate = Math.max(0, Number(answer.newest_seq ?? 0) - Number(before.newest_seq ?? 0)) / seconds;
    state.points.push({time, rate: state.entryRate});
    if (state.points.length > maxPoints) state.points.shift();
  }
  if (before && Number(answer.newest_incident_id ?? 0) < newestIncident) { // the server has restarted
    newestIncident = 0;
    state.incidents = [];
  }
  state.status = answer;
  state.statusTime = time;
  if (polled.workers > state.workersTime && state.workersTime > 0) {
    applyWorkers(state.workers, polled.workers); // they have not changed: nothing was read since
    changed('workers');
  }
  if (Number(answer.newest_incident_id ?? 0) > newestIncident) fetchIncidents();
}

// fetchIncidents adds what has happened since the last call.
async function fetchIncidents() {
  if (fetching) return;
  fetching = true;
  try {
    const answer = await rpc('InspectionService/ListIncidents', {after_id: String(newestIncident), limit: maxIncidents});
    newestIncident = Number(answer.newest_id ?? 0);
    state.incidents = [...(answer.incidents ?? []), ...state.incidents].slice(0, maxIncidents);
    delete state.errors.incidents;
  } catch (error) {
    state.errors.incidents = error;
  } finally {
    fetching = false;
  }
  changed('incidents');
}

function applyWorkers(workers, time) {
  const now = new Map();
  for (const w of workers) {
    const seqs = new Map((w.sources ?? []).map(s => [`${s.endpoint} ${s.dp_rank ?? 0}`, Number(s.last_seq ?? 0)]));
    const before = rates.get(w.name);
    let perSecond = before?.perSecond ?? 0;
    if (before && time > before.time) {
      let batches = 0;
      for (const [source, seq] of seqs) batches += Math.max(0, seq - (before.seqs.get(source) ?? seq)); // a restart begins at 0
      perSecond = batches / ((time - before.time) / 1000);
    }
    now.set(w.name, {seqs, time, perSecond});
  }
  rates = now;
  state.workers = workers;
  state.workersTime = time;
  state.ranks = workers.flatMap(ranksOf);
}

export const batchRate = name => rates.get(name)?.perSecond ?? 0;

// ranksOf returns what the fleet shows of each dp rank of a worker. A worker without entries has one that is not read.
function ranksOf(w) {
  const ranks = w.ranks?.length ? w.ranks : [{}];
  return ranks.map(r => {
    const sources = (w.sources ?? []).filter(s => (s.dp_rank ?? 0) === (r.dp_rank ?? 0));
    const delays = sources.filter(s => s.engine_delay_nano !== undefined).map(s => Number(s.engine_delay_nano));
    const blocks = blocksOf(r.blocks);
    const trust = r.trust in trusts ? r.trust : 'TRUST_UNSPECIFIED';
    return {
      key: `${w.name}\n${r.dp_rank ?? 0}`, worker: w.name, rank: r.dp_rank ?? 0, label: `${w.name}${ranks.length > 1 ? ` dp${r.dp_rank ?? 0}` : ''}${w.pool ? ' (pool)' : ''}`,
      model: w.model ?? '', state: w.state, trust, reasons: r.reasons ?? [], blocks, total: sum(blocks),
      rate: batchRate(w.name) / ranks.length, delay: delays.length ? Math.max(...delays) : undefined, downNano: Number(r.down_nano ?? 0),
    };
  });
}

// forget drops everything, before the state of another server or of one that has restarted is shown.
export function forget() {
  rates = new Map();
  newestIncident = 0;
  Object.assign(state, {points: [], incidents: [], status: undefined, workersTime: 0});
}
