// The log of what has happened, filtered, and linked by time.

import {el, keyed, setText, source, table} from './dom.js';
import {clock, dateTime, incidentText, kinds, millis, plural, workerLink} from './format.js';
import {timeline} from './charts.js';
import {rpc} from './api.js';
import {state} from './state.js';

const columns = [{title: 'Time'}, {title: 'What'}, {title: 'Where'}, {title: 'Rank', number: true}, {title: 'Details'}, {title: 'Entry', number: true}];
const perPage = 200;
const minute = 60_000;
const around = 5 * minute; // before and after a time
const hour = 60 * minute;

export function log({parameters}) {
  const worker = el('input', {id: 'of', type: 'search', placeholder: 'all workers', autocomplete: 'off', spellcheck: 'false'});
  const at = el('input', {id: 'at', type: 'datetime-local'});
  const boxes = Object.entries(kinds).map(([value, [text]]) => el('label', {class: 'check'}, el('input', {type: 'checkbox', value}), text));
  const clear = el('button', {type: 'button', text: 'Clear'});
  const form = el('form', {class: 'controls'},
    el('label', {for: 'of'}, 'Worker ', worker), el('label', {for: 'at'}, 'Around ', at),
    el('fieldset', {class: 'checks'}, el('legend', {text: 'Kinds (none: all but leaving subscribers)'}), boxes), clear);
  const picture = timeline('What happened');
  const said = el('p', {class: 'muted', role: 'status'});
  const list = table('Incidents', columns);
  const empty = el('p', {class: 'empty'});
  const older = el('button', {type: 'button', text: 'Older'});
  const abort = new AbortController();
  let all = [];
  let newest = 0;
  let request = {};
  let turn = 0;

  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('change', navigate);
  clear.addEventListener('click', () => { location.hash = '#/log'; });
  older.addEventListener('click', () => load(true));

  // navigate puts the filter into the address, so that it can be passed on.
  function navigate() {
    const to = new URLSearchParams();
    if (worker.value) to.set('worker', worker.value);
    if (at.value) to.set('at', at.value);
    const chosen = boxes.map(b => b.firstChild).filter(b => b.checked).map(b => b.value.replace('INCIDENT_KIND_', '').toLowerCase());
    if (chosen.length) to.set('kinds', chosen.join(','));
    location.hash = `#/log${to.size ? `?${to}` : ''}`;
  }

  // go takes the filter from the address.
  function go(given) {
    worker.value = given.get('worker') ?? '';
    at.value = given.get('at') ?? '';
    const chosen = (given.get('kinds') ?? '').split(',').map(k => `INCIDENT_KIND_${k.toUpperCase()}`);
    for (const box of boxes) box.firstChild.checked = chosen.includes(box.firstChild.value);
    request = {limit: perPage, kinds: Object.keys(kinds).filter(k => chosen.includes(k))};
    if (!request.kinds.length) request.kinds = Object.keys(kinds).filter(k => k !== 'INCIDENT_KIND_SUBSCRIBER_LEFT');
    if (worker.value) request.worker = worker.value;
    const time = at.value ? new Date(at.value).getTime() : NaN;
    if (!Number.isNaN(time)) {
      request.from_unix_nano = `${BigInt(time - around) * 1000000n}`;
      request.until_unix_nano = `${BigInt(time + minute + around) * 1000000n}`;
    }
    all = [];
    load(false);
  }

  // load gets the newest incidents, or the next older ones.
  async function load(next) {
    const mine = ++turn;
    try {
      const asked = next && all.length ? {...request, before_id: all[all.length - 1].id} : request;
      const answer = await rpc('InspectionService/ListIncidents', asked, abort.signal);
      if (mine !== turn) return;
      newest = Number(answer.newest_id ?? 0);
      const got = (answer.incidents ?? []).map(i => ({...i, time: millis(i.time_unix_nano)}));
      all = next ? [...all, ...got] : got;
      older.hidden = !answer.more || all.length >= 2000;
      setText(empty, 'Nothing of that has happened since the server started.');
    } catch (error) {
      if (abort.signal.aborted || mine !== turn) return;
      setText(empty, `The log is not shown: ${error.message}`);
    }
    show();
  }

  function where(i) {
    if (i.worker) return el('a', {href: workerLink(i.worker), text: i.worker});
    return i.peer ?? '';
  }

  function row(i) {
    const link = el('a', {href: `#/log?at=${dateTime(i.time)}`, title: new Date(i.time).toString(), text: clock(i.time)});
    const [text, style] = kinds[i.kind] ?? [i.kind, 'plain'];
    return el('tr', {}, el('td', {}, link), el('td', {}, el('span', {class: `kind ${style}`, text})), el('td', {}, where(i)),
      el('td', {class: 'number', text: i.dp_rank === undefined ? '' : String(i.dp_rank)}), el('td', {text: incidentText(i)}), el('td', {class: 'number', text: i.seq ?? ''}));
  }

  function show() {
    empty.hidden = all.length > 0;
    list.node.hidden = all.length === 0;
    keyed(list.body, all, i => `${i.id} ${i.time_unix_nano}`, row, () => {});
    const now = state.statusTime || Date.now();
    const [from, until] = request.from_unix_nano ? [millis(request.from_unix_nano), millis(request.until_unix_nano)]
      : [Math.min(now - 10 * minute, Math.max(now - hour, all[all.length - 1]?.time ?? now)), now];
    picture.update(all, from, until);
    setText(said, `${plural(all.length, 'incident')}${request.from_unix_nano ? ` between ${clock(from)} and ${clock(until)}` : ''}`);
  }

  function update(name) {
    const has = Number(state.status?.newest_incident_id ?? 0);
    if (name === 'status' && has !== newest && all.length <= perPage) load(false);
    if (name === 'all') go(parameters);
  }

  return {
    title: 'Log',
    nodes: [form, picture.node, said, list.node, empty, el('p', {}, older),
      source('InspectionService/ListIncidents', {limit: perPage}, ['kvcast_ingest_gaps_total', 'kvcast_ingest_restarts_total', 'kvcast_server_stalled_streams_total', 'kvcast_cluster_takeovers_total'])],
    update,
    go,
    close: () => abort.abort(),
  };
}
