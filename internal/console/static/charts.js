// Pictures, as SVG without a library. Each has a text that says the same.

import {el, keyed, setAttr, setText, svg} from './dom.js';
import {clock, kinds, number, sum, tiers} from './format.js';

// tierBar returns a bar of blocks by tier. update gets the blocks in the order of tiers, and the number that fills the bar.
export function tierBar() {
  const parts = tiers.map((t, i) => el('span', {class: `tier${i}`}));
  const node = el('span', {class: 'bar', role: 'img'}, parts);
  return {
    node,
    update(blocks, most) {
      parts.forEach((part, i) => part.style.setProperty('--w', `${most > 0 ? 100 * blocks[i] / most : 0}%`));
      setAttr(node, 'aria-label', tiersText(blocks));
    },
  };
}

// tiersText says how many blocks each tier has.
export function tiersText(blocks, format = number) {
  const texts = tiers.map((t, i) => (blocks[i] > 0 ? `${format(blocks[i])} ${t.text}` : '')).filter(Boolean);
  return texts.length ? `${texts.join(', ')} blocks` : 'no blocks';
}

export const tierLegend = () => el('ul', {class: 'legend', 'aria-label': 'Tiers'}, tiers.map((t, i) => el('li', {}, el('span', {class: `swatch tier${i}`}), t.text)));

const width = 600;
const height = 120;

// ceiling returns the next number above that an axis can end with: 1, 2, 2.5 or 5 times a power of ten.
function ceiling(n) {
  const power = 10 ** Math.floor(Math.log10(n));
  return power * [1, 2, 2.5, 5, 10].find(step => step * power >= n);
}

// areaChart returns a chart of values over time, stacked. classes are those of the layers, from the bottom.
export function areaChart(label, classes, format = number) {
  const paths = classes.map(c => svg('path', {class: `area ${c}`}));
  const picture = svg('svg', {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label},
    [0.25, 0.5, 0.75].map(y => svg('line', {class: 'gridline', x1: 0, x2: width, y1: height * y, y2: height * y})), paths);
  const top = el('span', {class: 'axis'});
  const from = el('span', {class: 'axis'});
  const until = el('span', {class: 'axis'});
  const empty = el('p', {class: 'empty', text: 'No samples yet.'});
  const node = el('figure', {class: 'chart'}, el('figcaption', {text: label}), top, el('div', {class: 'picture'}, picture, empty), el('div', {class: 'between'}, from, until));
  return {
    node,
    // update shows points: {time, values}, the values in the order of classes.
    update(points) {
      empty.hidden = points.length > 1;
      picture.style.visibility = points.length > 1 ? '' : 'hidden';
      if (points.length < 2) return;
      const first = points[0].time;
      const last = points[points.length - 1].time;
      const peak = Math.max(1, ...points.map(p => sum(p.values)));
      const most = ceiling(peak);
      const x = p => (width * (p.time - first) / Math.max(1, last - first)).toFixed(1);
      const below = points.map(() => 0);
      paths.forEach((path, layer) => {
        const bottom = points.map((p, i) => `L${x(p)} ${(height - height * below[i] / most).toFixed(1)}`).reverse().join('');
        points.forEach((p, i) => { below[i] += p.values[layer]; });
        const line = points.map((p, i) => `${i ? 'L' : 'M'}${x(p)} ${(height - height * below[i] / most).toFixed(1)}`).join('');
        path.setAttribute('d', `${line}${bottom}Z`);
      });
      setText(top, format(most));
      setText(from, clock(first));
      setText(until, clock(last));
      setAttr(picture, 'aria-label', `${label}: ${format(sum(points[points.length - 1].values))} now, at most ${format(peak)} since ${clock(first)}`);
    },
  };
}

const lanes = ['bad', 'change', 'good'];

// timeline returns a picture of incidents over a time: what was lost above, what changed in the middle, repairs below.
export function timeline(label) {
  const marks = svg('g');
  const picture = svg('svg', {viewBox: `0 0 ${width} 66`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label},
    lanes.map((_, i) => svg('line', {class: 'gridline', x1: 0, x2: width, y1: 11 + 22 * i, y2: 11 + 22 * i})), marks);
  const from = el('span', {class: 'axis'});
  const until = el('span', {class: 'axis'});
  const node = el('figure', {class: 'chart timeline'},
    el('figcaption', {text: label}),
    el('div', {class: 'lanes'}, el('div', {class: 'lanenames', 'aria-hidden': 'true'}, ['lost', 'changed', 'repaired'].map(text => el('span', {text}))), picture),
    el('div', {class: 'between'}, from, until));
  return {
    node,
    // update shows incidents between two times in milliseconds.
    update(incidents, first, last) {
      const counts = new Map();
      const visible = incidents.filter(i => i.time >= first && i.time <= last);
      for (const i of visible) {
        const text = (kinds[i.kind] ?? [i.kind])[0];
        counts.set(text, (counts.get(text) ?? 0) + 1);
      }
      keyed(marks, visible, i => i.id, () => svg('rect', {width: 3, height: 18, rx: 1}), (rect, i) => {
        const style = (kinds[i.kind] ?? ['', 'plain'])[1];
        const lane = Math.max(0, lanes.indexOf(style));
        setAttr(rect, 'class', `mark ${style}`);
        setAttr(rect, 'x', (width * (i.time - first) / Math.max(1, last - first) - 1.5).toFixed(1));
        setAttr(rect, 'y', 2 + 22 * lane);
      });
      setText(from, clock(first));
      setText(until, clock(last));
      const said = [...counts].map(([text, n]) => `${n} ${text}`).join(', ') || 'nothing';
      setAttr(picture, 'aria-label', `${label}: ${said}`);
    },
  };
}

// meter returns a bar for one number.
export function meter(style = '') {
  const part = el('span', {class: style || 'tier0'});
  const node = el('span', {class: 'bar', role: 'img'}, part);
  return {
    node,
    update(value, most, text) {
      part.style.setProperty('--w', `${most > 0 ? Math.min(100, 100 * value / most) : 0}%`);
      setAttr(node, 'aria-label', text);
    },
  };
}
