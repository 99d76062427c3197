// The view of a prompt: which ranks hold how much of it, and the call that says so.

import {el, grpcurl, heading, keyed, setAttr, setText, table} from './dom.js';
import {blocksOf, clock, millis, number, plural, reasonText, tiers, workerLink} from './format.js';
import {tierLegend, tiersText} from './charts.js';
import {rpc} from './api.js';
import {state} from './state.js';
import {trustBadge, updateBadge} from './fleet.js';

const maxRows = 200;
const maxShown = 20_000; // characters of the answer
const columns = [{title: 'Worker'}, {title: 'Trust'}, {title: 'Prefix by tier'}, {title: 'Blocks', number: true}, {title: 'Tokens', number: true}, {title: 'In pools'}];

const inputs = {
  token_ids: 'Token ids',
  tokens_hashes: 'Tokens hashes, decimal or hexadecimal',
  block_hashes: 'Block hashes of one engine, decimal or hexadecimal',
};

// parseNumbers returns the numbers in a text as decimal texts. Hashes have 64 bits, so they are no numbers of JavaScript.
export function parseNumbers(text, isHash) {
  const words = text.split(/[\s,;[\]"']+/).filter(Boolean);
  return words.map(word => {
    const hex = isHash && (/^0x[0-9a-f]{1,16}$/i.test(word) ? word : /^(?=.*[a-f])[0-9a-f]{16}$/i.test(word) ? `0x${word}` : '');
    if (!hex && !/^\d{1,20}$/.test(word)) throw new Error(`“${word.slice(0, 40)}” is no ${isHash ? 'hash' : 'token id'}: want numbers, separated by spaces or commas`);
    const n = BigInt(hex || word);
    if (n >= (isHash ? 2n ** 64n : 2n ** 32n)) throw new Error(`${word} is too large: want less than 2^${isHash ? 64 : 32}`);
    return isHash ? n.toString() : Number(n);
  });
}

const field = (id, label, input) => el('p', {class: 'field'}, el('label', {for: id, text: label}), input);
const textInput = (id, props = {}) => el('input', {id, type: 'text', autocomplete: 'off', spellcheck: 'false', ...props});

export function match({parameters}) {
  const kind = el('select', {id: 'kind'}, Object.entries(inputs).map(([value, text]) => el('option', {value, text})));
  const prompt = el('textarea', {id: 'prompt', rows: 5, spellcheck: 'false', required: true, placeholder: '31505 10046 96086 …'});
  const recent = el('select', {id: 'recent'}, el('option', {value: '', text: 'Load recent chains'}));
  const models = el('datalist', {id: 'models'});
  const model = textInput('model', {list: 'models', placeholder: 'all'});
  const lora = textInput('lora', {placeholder: 'base model'});
  const salt = textInput('salt', {placeholder: 'none'});
  const limit = el('input', {id: 'limit', type: 'number', min: 1, max: 10000, value: 50});
  const form = el('form', {class: 'form'},
    field('kind', 'Given as', kind), field('recent', 'Or choose', recent), field('prompt', 'Prompt', prompt),
    el('div', {class: 'fields'}, field('model', 'Model', model), models, field('lora', 'LoRA adapter', lora), field('salt', 'Cache salt', salt), field('limit', 'Matches', limit)),
    el('button', {type: 'submit', text: 'Match'}));
  const problem = el('p', {class: 'notice bad', role: 'alert'});
  const outcome = el('p', {role: 'status'});
  const matches = table('Matches', columns);
  const answer = el('code');
  const command = el('code');
  const copied = el('span', {role: 'status'});
  const copy = el('button', {type: 'button', text: 'Copy', onclick: async () => {
    await navigator.clipboard.writeText(command.textContent);
    setText(copied, ' copied');
  }});
  const result = el('section', {'aria-label': 'Result'}, heading('Matches'), outcome, tierLegend(), matches.node,
    heading('The same call'), el('pre', {tabindex: '0'}, command), el('p', {}, copy, copied),
    heading('Answer of MatchPrefix'), el('pre', {tabindex: '0'}, answer));
  result.hidden = true;
  problem.hidden = true;
  let chains = [];

  recent.addEventListener('focus', loadChains);
  recent.addEventListener('change', () => {
    const chain = chains[Number(recent.value)];
    if (recent.value !== '' && chain) choose(chain);
  });
  form.addEventListener('submit', event => {
    event.preventDefault();
    run();
  });

  // choose takes the prompt that ends with the last block of a chain.
  async function choose(chain) {
    try {
      const got = await rpc('InspectionService/GetChain', {worker: chain.worker, dp_rank: chain.rank, block_hash: chain.last});
      if (!got.tokens_hashes?.length) throw new Error('The engine does not hold that chain any more, or its content is unknown: choose another.');
      kind.value = 'tokens_hashes';
      prompt.value = got.tokens_hashes.join(' ');
      model.value = got.model ?? '';
      run();
    } catch (error) {
      fail(error);
    }
  }

  // loadChains offers the chains that engines have stored lately.
  async function loadChains() {
    try {
      const {entries = []} = await rpc('InspectionService/ListEntries', {limit: 100});
      chains = entries.flatMap(e => (e.events ?? [])
        .filter(v => v.stored?.tokens_hashes?.length)
        .map(v => ({worker: e.worker, rank: v.dp_rank ?? 0, time: e.ingest_time_unix_nano, blocks: v.stored.block_hashes.length, last: v.stored.block_hashes.at(-1)}))).slice(0, 50);
      const at = recent.value;
      recent.replaceChildren(el('option', {value: '', text: chains.length ? 'Choose a recent chain' : 'No chain was stored lately'}),
        ...chains.map((c, i) => el('option', {value: String(i), text: `${clock(millis(c.time ?? '0'))} ${c.worker}: ${plural(c.blocks, 'block')}`})));
      recent.value = at;
    } catch (error) {
      fail(error);
    }
  }

  function fail(error) {
    problem.hidden = false;
    setText(problem, error.message);
  }

  function request() {
    const isHash = kind.value !== 'token_ids';
    const numbers = parseNumbers(prompt.value, isHash);
    if (numbers.length === 0) throw new Error('The prompt is empty.');
    const one = {[kind.value]: numbers};
    if (!isHash && lora.value) one.lora_name = lora.value;
    if (!isHash && salt.value) one.cache_salt = salt.value;
    const all = {prompts: [one], limit: Number(limit.value) || 50};
    if (model.value) all.model = model.value;
    return all;
  }

  async function run() {
    problem.hidden = true;
    setText(copied, '');
    try {
      const asked = request();
      setText(command, grpcurl('RouterEventService/MatchPrefix', asked));
      const got = await rpc('RouterEventService/MatchPrefix', asked);
      const text = JSON.stringify(got, null, 2);
      setText(answer, text.length > maxShown ? `${text.slice(0, maxShown)}\n… ${number(text.length - maxShown)} characters more` : text);
      showMatches(got, asked);
      result.hidden = false;
    } catch (error) {
      result.hidden = true;
      fail(error);
    }
  }

  function showMatches(got, asked) {
    const all = got.prompts?.[0]?.matches ?? [];
    const hashes = asked.prompts[0].tokens_hashes ?? asked.prompts[0].block_hashes;
    const most = hashes?.length ?? Math.max(1, ...all.map(m => m.blocks ?? 0));
    setText(outcome, all.length
      ? `${plural(all.length, 'rank')} ${all.length === 1 ? 'holds' : 'hold'} a prefix, the longest ${plural(all[0].blocks ?? 0, 'block')}${hashes ? ` of ${number(hashes.length)}` : ''}, at seq ${number(Number(got.position?.seq ?? 0))}.`
      : `No rank holds the first block, at seq ${number(Number(got.position?.seq ?? 0))}.`);
    matches.node.hidden = all.length === 0;
    keyed(matches.body, all.slice(0, maxRows), m => `${m.worker} ${m.dp_rank ?? 0}`, row, (tr, m) => tr.show(m, most));
  }

  // endedText says which attention group of the engine ends the prefix in each tier.
  function endedText(list) {
    return tiers.map(t => [t.text, (list ?? []).find(p => p.tier === t.name)?.ended_by_group]).filter(([, group]) => group !== undefined)
      .map(([text, group]) => `${text}: ended by group ${group}`).join(', ');
  }

  // poolsText says how many tokens each pool of the worker holds.
  function poolsText(list) {
    return (list ?? []).map(p => `${p.pool}: ${plural(p.tokens, 'token')}${p.reasons?.length ? ` (${p.reasons.map(reasonText).join(', ')})` : ''}`).join(', ') || '–';
  }

  function row() {
    const link = el('a');
    const badge = trustBadge();
    const bars = tiers.map((t, i) => el('span', {class: `bar thin`, 'aria-hidden': 'true'}, el('span', {class: `tier${i}`})));
    const said = el('span', {class: 'hidden'});
    const ended = el('span', {class: 'muted'});
    const tr = el('tr', {}, el('td', {}, link), el('td', {}, badge), el('td', {}, bars, said, ended), el('td', {class: 'number'}), el('td', {class: 'number'}), el('td'));
    tr.show = (m, most) => {
      setAttr(link, 'href', workerLink(m.worker));
      setText(link, m.dp_rank ? `${m.worker} dp${m.dp_rank}` : m.worker);
      updateBadge(badge, m.trust ?? 'TRUST_UNSPECIFIED', m.reasons);
      const blocks = blocksOf(m.tiers);
      bars.forEach((bar, i) => {
        bar.hidden = blocks[i] === 0;
        bar.firstChild.style.setProperty('--w', `${100 * blocks[i] / most}%`);
      });
      setText(said, tiersText(blocks));
      setText(ended, endedText(m.tiers));
      setText(tr.children[3], number(m.blocks ?? 0));
      setText(tr.children[4], m.tokens ? number(m.tokens) : '–');
      setText(tr.children[5], poolsText(m.pools));
    };
    return tr;
  }

  // go takes a prompt from the address: #/match?tokens_hashes=1,2&model=NAME.
  function go(given) {
    for (const name of Object.keys(inputs)) {
      if (!given.get(name)) continue;
      kind.value = name;
      prompt.value = given.get(name).replaceAll(',', ' ');
      model.value = given.get('model') ?? '';
      run();
    }
  }
  go(parameters);

  return {
    title: 'Match',
    nodes: [el('p', {class: 'muted', text: 'Which ranks hold the longest prefix of a prompt, as a router would ask.'}), form, problem, result],
    go,
    update(name) {
      if (name === 'workers' || name === 'all') {
        const names = [...new Set(state.workers.map(w => w.model).filter(Boolean))].slice(0, 100);
        keyed(models, names, n => n, () => el('option'), (option, n) => setAttr(option, 'value', n));
      }
      if (name === 'all') loadChains();
    },
  };
}
