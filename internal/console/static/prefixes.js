// The view of what ranks hold in common: which beginnings of prompts are held how often, and what a router could save.

import {el, heading, keyed, setAttr, setText, source, table} from './dom.js';
import {clock, compact, millis, number, percent, plural} from './format.js';
import {meter} from './charts.js';
import {rpc} from './api.js';
import {state} from './state.js';

const refreshEvery = 10_000;
const limit = 100;
const countColumns = [{title: 'Held by'}, {title: 'Share of distinct blocks'}, {title: 'Blocks', number: true}, {title: 'Share', number: true}];
const prefixColumns = [{title: 'Prefix'}, {title: 'Duplicates'}, {title: 'Blocks', number: true}, {title: 'Ranks', number: true}, {title: 'Copies', number: true}, {title: 'Duplicates', number: true}, {title: 'Match'}];
const maxRanksCounted = 32;

// inOrder returns prefixes as a tree: each before its children, those with more copies first, with its depth and the tokens
// hashes from the start of the prompt.
export function inOrder(prefixes) {
  const children = new Map();
  for (const p of prefixes) children.set(p.parent_id ?? '0', [...(children.get(p.parent_id ?? '0') ?? []), p]);
  const all = [];
  const stack = (children.get('0') ?? []).map(p => ({...p, depth: 0, chain: p.tokens_hashes ?? []})).reverse();
  while (stack.length) {
    const p = stack.pop();
    all.push(p);
    const next = (children.get(p.id) ?? []).toSorted((a, b) => Number(a.copies) - Number(b.copies));
    for (const c of next) {
      const whole = p.chain && Number(p.first_block ?? 0) + (p.tokens_hashes?.length ?? 0) === Number(c.first_block ?? 0);
      stack.push({...c, depth: p.depth + 1, chain: whole ? [...p.chain, ...(c.tokens_hashes ?? [])] : undefined});
    }
  }
  return all;
}

export function prefixes() {
  const facts = el('dl', {class: 'facts'});
  const words = el('p');
  const counts = table('Blocks by the number of ranks that hold them', countColumns);
  const tree = table('Shared prefixes', prefixColumns);
  const empty = el('p', {class: 'empty', text: 'Waiting for the server.'});
  const problem = el('p', {class: 'notice bad', role: 'alert'});
  const model = el('select', {id: 'of-model'});
  const abort = new AbortController();
  const timer = setInterval(refresh, refreshEvery);
  let isBusy = false;
  problem.hidden = true;
  model.addEventListener('change', () => refresh());

  async function refresh() {
    if (document.hidden || isBusy || abort.signal.aborted) return;
    isBusy = true;
    const asked = model.value;
    try {
      const answer = await rpc('InspectionService/ListSharedPrefixes', {model: asked, limit}, abort.signal);
      problem.hidden = true;
      show(answer);
    } catch (error) {
      if (!abort.signal.aborted) {
        problem.hidden = false;
        setText(problem, `The shared prefixes are not shown: ${error.message}`);
      }
    } finally {
      isBusy = false;
    }
    if (asked !== model.value) refresh();
  }

  function show(answer) {
    const blocks = Number(answer.blocks ?? 0);
    const copies = Number(answer.copies ?? 0);
    const byRanks = (answer.blocks_by_ranks ?? []).map(Number);
    const shared = blocks - (byRanks[0] ?? 0);
    const duplicates = copies - blocks;
    const all = [
      ['Distinct blocks', compact(blocks), 'by content'],
      ['Copies', compact(copies), 'once for each rank'],
      ['Duplicates', compact(duplicates), copies ? `${percent(duplicates / copies)} of all copies` : ''],
      ['Held once', blocks ? percent((byRanks[0] ?? 0) / blocks) : '–', `${compact(byRanks[0] ?? 0)} blocks`],
      ['Held twice or more', blocks ? percent(shared / blocks) : '–', `${compact(shared)} blocks`],
      ['Read at', clock(millis(answer.time_unix_nano ?? '0')), `every ${refreshEvery / 1000} s`],
    ];
    keyed(facts, all, f => f[0], () => el('div', {}, el('dt'), el('dd'), el('dd', {class: 'muted'})), (node, f) => f.forEach((text, i) => setText(node.children[i], text)));
    setText(words, duplicates
      ? `If prompts that begin alike went to the same rank, at most ${plural(duplicates, 'block')} would not be computed and held again: ${percent(duplicates / copies)} of what is held.`
      : copies ? 'No two ranks hold the same block: no router could save any.' : 'No rank holds blocks whose content is known from the start of the prompt.');
    keyed(counts.body, byRanks.map((n, i) => ({n, ranks: i + 1})).filter(c => c.n > 0), c => c.ranks, countRow, (tr, c) => tr.show(c, blocks));
    counts.node.hidden = blocks === 0;
    const listed = inOrder(answer.prefixes ?? []);
    const most = Math.max(0, ...listed.map(p => Number(p.copies) - Number(p.blocks)));
    tree.node.hidden = listed.length === 0;
    empty.hidden = listed.length > 0;
    setText(empty, 'No block is held by two ranks.');
    keyed(tree.body, listed, p => p.id, prefixRow, (tr, p) => tr.show(p, most));
  }

  function countRow() {
    const bar = meter('tier0');
    const tr = el('tr', {}, el('td'), el('td', {}, bar.node), el('td', {class: 'number'}), el('td', {class: 'number'}));
    tr.show = (c, blocks) => {
      setText(tr.children[0], `${plural(c.ranks, 'rank')}${c.ranks === maxRanksCounted ? ' or more' : ''}`);
      bar.update(c.n, blocks, percent(c.n / blocks));
      setText(tr.children[2], number(c.n));
      setText(tr.children[3], percent(c.n / blocks));
    };
    return tr;
  }

  function prefixRow() {
    const bar = meter('tier1');
    const link = el('a', {text: 'Match'});
    const tr = el('tr', {}, el('td', {class: 'node'}), el('td', {}, bar.node), [1, 2, 3, 4].map(() => el('td', {class: 'number'})), el('td', {}, link));
    tr.show = (p, most) => {
      const first = Number(p.first_block ?? 0);
      const blocks = Number(p.blocks ?? 0);
      const copies = Number(p.copies ?? 0);
      const text = `blocks ${number(first)} to ${number(first + blocks - 1)}${model.value || !p.model ? '' : ` of ${p.model}`}`;
      tr.children[0].style.setProperty('--depth', Math.min(p.depth, 24));
      setText(tr.children[0], `${p.depth ? '└ ' : ''}${text}`);
      setAttr(tr.children[0], 'aria-label', `level ${p.depth + 1}, ${text}`);
      bar.update(copies - blocks, most, `${number(copies - blocks)} duplicates`);
      [blocks, p.max_ranks ?? 0, copies, copies - blocks].forEach((n, i) => setText(tr.children[2 + i], number(n)));
      link.hidden = !p.chain;
      if (p.chain) setAttr(link, 'href', `#/match?${new URLSearchParams({tokens_hashes: p.chain.join(','), model: p.model ?? ''})}`);
    };
    return tr;
  }

  return {
    title: 'Shared prefixes',
    nodes: [facts, problem,
      el('section', {}, heading('How often blocks are held'), words, counts.node, source('InspectionService/ListSharedPrefixes', {limit: 1}, ['kvcast_index_blocks'])),
      el('section', {}, heading('Heaviest prefixes'), el('div', {class: 'controls'}, el('label', {for: 'of-model'}, 'Of ', model)), tree.node, empty,
        source('InspectionService/ListSharedPrefixes', {limit}, ['kvcast_index_blocks']))],
    update(name) {
      if (name === 'workers' || name === 'all') {
        const names = [...new Set(state.workers.map(w => w.model).filter(Boolean))].sort().slice(0, 100);
        keyed(model, ['', ...names], n => n, () => el('option'), (option, n) => {
          setAttr(option, 'value', n);
          setText(option, n || 'all models');
        });
      }
      if (name === 'all') refresh();
    },
    close() {
      clearInterval(timer);
      abort.abort();
    },
  };
}
