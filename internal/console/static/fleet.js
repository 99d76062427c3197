// The view of all workers and their ranks: which are trusted, and what they hold.

import {el, heading, keyed, setAttr, setText, source, table} from './dom.js';
import {compact, duration, number, percent, plural, rate, reasons, reasonText, sum, tiers, trusts, workerLink} from './format.js';
import {tierBar, tierLegend, tiersText} from './charts.js';
import {state} from './state.js';

const cardsUpTo = 48; // ranks; beyond it, tiles
const perPage = 100; // rows of the table
const maxAttention = 12;

const columns = [{title: 'Worker'}, {title: 'Trust'}, {title: 'Blocks by tier'}, {title: 'Blocks', number: true}, {title: 'Batches/s', number: true}, {title: 'Delay', number: true}, {title: 'Model'}];

const orders = {
  name: ['Name', (a, b) => a.key.localeCompare(b.key, 'en', {numeric: true})],
  trust: ['Trust, worst first', (a, b) => trusts[a.trust].rank - trusts[b.trust].rank],
  blocks: ['Blocks', (a, b) => b.total - a.total],
  rate: ['Batches a second', (a, b) => b.rate - a.rate],
  delay: ['Delay', (a, b) => (b.delay ?? -1) - (a.delay ?? -1)],
};

const choice = (id, label, options) => el('label', {for: id}, label, el('select', {id}, options.map(([value, text]) => el('option', {value, text}))));

export const trustBadge = () => el('span', {class: 'badge'});

export function updateBadge(badge, trust, why = []) {
  const t = trusts[trust];
  setAttr(badge, 'class', `badge ${trust.toLowerCase()}`);
  setText(badge, `${t.mark} ${t.text}${why.length ? `: ${why.map(reasonText).join(', ')}` : ''}`);
}

export const delayText = r => (r.delay === undefined ? 'no time' : duration(r.delay));

export function fleet() {
  const facts = el('dl', {class: 'facts'});
  const attention = el('ul', {class: 'attention'});
  const search = el('input', {id: 'search', type: 'search', placeholder: 'name or model', autocomplete: 'off', spellcheck: 'false'});
  const trust = choice('trust', 'Trust ', [['', 'all'], ...Object.entries(trusts).map(([value, t]) => [value, t.text])]);
  const order = choice('order', 'Order ', Object.entries(orders).map(([value, [text]]) => [value, text]));
  const form = choice('form', 'Show as ', [['', 'cards or tiles'], ['cards', 'cards'], ['tiles', 'tiles'], ['table', 'table']]);
  const count = el('p', {class: 'muted', role: 'status'});
  const grid = el('ul', {class: 'cards', 'aria-label': 'Ranks'});
  const detail = el('p', {class: 'detail', 'aria-hidden': 'true', text: ' '});
  const list = table('Ranks', columns);
  const pager = el('p', {class: 'pager'});
  const empty = el('div', {class: 'empty'});
  let page = 0;

  for (const control of [search, ...[trust, order, form].map(label => label.lastChild)]) {
    control.addEventListener('input', () => { page = 0; update('workers'); });
  }
  grid.addEventListener('keydown', moveFocus);
  for (const name of ['focusin', 'pointerover']) {
    grid.addEventListener(name, event => { setText(detail, event.target.closest('a')?.dataset.detail ?? ' '); });
  }

  // moveFocus makes the grid one stop of the tab key, within which the arrow keys move.
  function moveFocus(event) {
    const links = [...grid.querySelectorAll('a')];
    const at = links.indexOf(document.activeElement);
    const perRow = Math.max(1, links.filter(a => a.parentNode.offsetTop === links[0].parentNode.offsetTop).length);
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + perRow, ArrowUp: at - perRow, Home: 0, End: links.length - 1}[event.key];
    if (at < 0 || to === undefined || !links[to]) return;
    event.preventDefault();
    focusOn(links[to]);
    links[to].focus();
  }

  function focusOn(link) {
    for (const a of grid.querySelectorAll('a[tabindex="0"]')) a.setAttribute('tabindex', '-1');
    link.setAttribute('tabindex', '0');
  }

  function selected() {
    const text = search.value.toLowerCase();
    const only = trust.lastChild.value;
    return state.ranks
      .filter(r => (!only || r.trust === only) && (!text || r.label.toLowerCase().includes(text) || r.model.toLowerCase().includes(text)))
      .toSorted(orders[order.lastChild.value][1]);
  }

  function updateFacts() {
    const all = state.ranks;
    const by = Object.fromEntries(Object.keys(trusts).map(t => [t, all.filter(r => r.trust === t).length]));
    const delays = all.filter(r => r.delay !== undefined).map(r => r.delay);
    const blocks = tiers.map((_, i) => sum(all.map(r => r.blocks[i])));
    const lag = Math.max(0, ...state.subscribers.map(s => Number(s.behind ?? 0)));
    const facts_ = [
      ['Workers', number(state.workers.length), plural(all.length, 'rank')],
      ['Exact', number(by.TRUST_EXACT), all.length ? percent(by.TRUST_EXACT / all.length) : ''],
      ['Upper bound', number(by.TRUST_UPPER_BOUND), ''],
      ['Degraded', number(by.TRUST_DEGRADED), by.TRUST_UNSPECIFIED ? `${number(by.TRUST_UNSPECIFIED)} not read` : ''],
      ['Blocks', compact(sum(blocks)), tiersText(blocks, compact).replace(/ blocks$/, '')],
      ['Batches/s', rate(sum(all.map(r => r.rate))), `${rate(state.entryRate)} entries/s`],
      ['Longest delay', delays.length ? duration(Math.max(...delays)) : '–', 'engine to kvcast'],
      ['Subscribers', number(state.subscribers.length), lag ? `up to ${number(lag)} behind` : 'none behind'],
    ];
    keyed(facts, facts_, f => f[0],
      () => el('div', {}, el('dt'), el('dd'), el('dd', {class: 'muted'})),
      (node, f) => f.forEach((text, i) => setText(node.children[i], text)));
  }

  function updateAttention() {
    const bad = state.ranks.filter(r => r.trust === 'TRUST_DEGRADED');
    const groups = new Map();
    for (const r of bad) {
      for (const why of r.reasons) groups.set(why, [...(groups.get(why) ?? []), r]);
    }
    keyed(attention, [...groups], g => g[0],
      () => el('li', {}, el('strong'), ' ', el('span'), el('ul', {class: 'names'})),
      (li, [why, ranks]) => {
        setText(li.children[0], `${reasonText(why)}: ${plural(ranks.length, 'rank')}.`);
        setText(li.children[1], reasons[why]?.[1] ?? '');
        const shown = ranks.slice(0, maxAttention);
        const names = shown.map(r => [r.key, r.label, workerLink(r.worker)]);
        if (ranks.length > maxAttention) names.push(['more', `and ${number(ranks.length - maxAttention)} more`, '']);
        keyed(li.children[2], names, n => n[0], n => el('li', {}, n[2] ? el('a', {href: n[2]}) : el('span')), (item, n) => setText(item.firstChild, n[1]));
      });
    attention.hidden = bad.length === 0;
  }

  function say(r) {
    const t = trusts[r.trust];
    return `${r.label}: ${t.text}${r.reasons.length ? ` (${r.reasons.map(reasonText).join(', ')})` : ''}, ${tiersText(r.blocks)}, ${rate(r.rate)} batches a second, delay ${delayText(r)}`;
  }

  function card() {
    const bar = tierBar();
    const link = el('a', {tabindex: '-1'}, el('span', {class: 'name'}), trustBadge(), bar.node,
      el('span', {class: 'numbers'}, el('span'), el('span'), el('span')));
    const li = el('li', {}, link);
    li.show = (r, most) => {
      setAttr(link, 'href', workerLink(r.worker));
      link.dataset.detail = say(r);
      setAttr(link, 'class', r.trust.toLowerCase());
      setText(link.children[0], r.label);
      updateBadge(link.children[1], r.trust, r.reasons);
      bar.update(r.blocks, most);
      const [blocks, batches, delay] = link.children[3].children;
      setText(blocks, `${compact(r.total)} blocks`);
      setText(batches, `${rate(r.rate)}/s`);
      setText(delay, delayText(r));
      let below = 0;
      r.blocks.forEach((blocks, tier) => { // of a tile
        below += blocks;
        link.style.setProperty(`--h${tier}`, `${most > 0 ? 100 * below / most : 0}%`);
      });
    };
    return li;
  }

  function row() {
    const link = el('a');
    const badge = trustBadge();
    const bar = tierBar();
    const tr = el('tr', {}, [link, badge, bar.node, '', '', '', ''].map((cell, i) => el('td', {class: columns[i].number ? 'number' : undefined}, cell)));
    tr.show = (r, most) => {
      setAttr(link, 'href', workerLink(r.worker));
      setText(link, r.label);
      updateBadge(badge, r.trust, r.reasons);
      bar.update(r.blocks, most);
      [number(r.total), rate(r.rate), delayText(r), r.model || '–'].forEach((text, i) => setText(tr.children[3 + i], text));
    };
    return tr;
  }

  function updateGrid(all, most, tiles) {
    setAttr(grid, 'class', tiles ? 'tiles' : 'cards');
    keyed(grid, all, r => r.key, card, (li, r) => li.show(r, most));
    if (all.length && !grid.querySelector('a[tabindex="0"]')) grid.querySelector('a').setAttribute('tabindex', '0');
  }

  function updateTable(all, most) {
    const pages = Math.max(1, Math.ceil(all.length / perPage));
    page = Math.min(page, pages - 1);
    keyed(list.body, all.slice(page * perPage, (page + 1) * perPage), r => r.key, row, (tr, r) => tr.show(r, most));
    pager.hidden = pages < 2;
    pager.replaceChildren(
      el('button', {type: 'button', text: 'Previous', disabled: page === 0, onclick: () => { page--; update('workers'); }}),
      ` page ${page + 1} of ${pages} `,
      el('button', {type: 'button', text: 'Next', disabled: page === pages - 1, onclick: () => { page++; update('workers'); }}));
  }

  function updateEmpty(all) {
    const error = state.errors.workers;
    let text = '';
    if (error) text = `The workers are not shown: ${error.message}`;
    else if (!state.workersTime) text = 'Waiting for the server.';
    else if (!state.workers.length) text = 'No workers yet. Configure engines with --worker, --bind or discovery, or call RegisterWorker.';
    else if (!all.length) text = 'No rank matches.';
    empty.hidden = !text;
    setText(empty, text);
  }

  function update(name) {
    if (!['all', 'workers', 'status', 'connection'].includes(name)) return;
    updateFacts();
    if (name === 'status') return;
    updateAttention();
    const all = selected();
    const most = Math.max(0, ...state.ranks.map(r => r.total));
    const shownAs = form.lastChild.value || (all.length > cardsUpTo ? 'tiles' : 'cards');
    const asTable = shownAs === 'table';
    grid.hidden = asTable;
    detail.hidden = shownAs !== 'tiles';
    list.node.hidden = !asTable;
    if (asTable) updateTable(all, most);
    else {
      pager.hidden = true;
      updateGrid(all, most, shownAs === 'tiles');
    }
    setText(count, all.length === state.ranks.length ? plural(all.length, 'rank') : `${number(all.length)} of ${plural(state.ranks.length, 'rank')}`);
    updateEmpty(all);
  }

  return {
    title: 'Fleet',
    nodes: [facts, attention,
      el('section', {}, heading('Ranks'),
        el('div', {class: 'controls'}, el('label', {for: 'search'}, 'Find ', search), trust, order, form, tierLegend()), count,
        grid, detail, list.node, pager, empty,
        source('RouterEventService/ListWorkers', {}, ['kvcast_index_blocks', 'kvcast_index_incomplete', 'kvcast_ingest_last_seq', 'kvcast_ingest_engine_delay_seconds']))],
    update,
  };
}
