// Elements, made of text and attributes alone: names that engines chose are never parsed as HTML.

const svgNamespace = 'http://www.w3.org/2000/svg';

// visible replaces characters that are not seen, or that change the order in which text is shown: engines choose names.
export const visible = value => typeof value === 'string' ? value.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, '\uFFFD') : value;

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'text') node.textContent = visible(value);
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name.startsWith('--')) node.style.setProperty(name, value);
    else if (name === 'value') node.value = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat()) {
    if (child !== undefined && child !== null && child !== false) node.append(visible(child));
  }
  return node;
}

// el returns an element of HTML. A property that begins with "on" is a listener, one with "--" a variable of CSS, "text" the
// text; all others are attributes.
export const el = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);

// svg returns an element of SVG.
export const svg = (tag, props = {}, ...children) => fill(document.createElementNS(svgNamespace, tag), props, children);

// setText changes a text only if it differs, so that nothing is laid out again or announced in vain.
export function setText(node, text) {
  const shown = visible(text);
  if (node.textContent !== shown) node.textContent = shown;
}

export function setAttr(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// keyed makes the children of a node those of some items, in order. It reuses the child of an item with the same key.
export function keyed(parent, items, keyOf, create, update) {
  const old = parent.keyedChildren ?? new Map();
  const now = new Map();
  let at = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = old.get(key);
    if (child) old.delete(key);
    else child = create(item);
    update(child, item);
    now.set(key, child);
    if (child === at) at = at.nextSibling;
    else parent.insertBefore(child, at);
  }
  for (const child of old.values()) child.remove();
  parent.keyedChildren = now;
}

// table returns a table with a caption for screen readers, and its body.
export function table(caption, columns) {
  const body = el('tbody');
  const node = el('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption},
    el('table', {}, el('caption', {class: 'hidden', text: caption}),
      el('thead', {}, el('tr', {}, columns.map(c => el('th', {scope: 'col', class: c.number ? 'number' : undefined, text: c.title})))),
      body));
  return {node, body};
}

// rows fills a table with rows, of which each has a key and cells: texts, or nodes.
export function rows(body, columns, all) {
  keyed(body, all, r => r.key,
    () => el('tr', {}, columns.map(c => el('td', {class: c.number ? 'number' : undefined}))),
    (tr, r) => r.cells.forEach((cell, i) => {
      const td = tr.children[i];
      if (cell instanceof Node) {
        if (td.firstChild !== cell) td.replaceChildren(cell);
      } else setText(td, cell);
    }));
}

export const heading = text => el('h2', {text});

// source says which call and which metrics a picture shows.
export function source(method, request, metrics = []) {
  const code = el('code', {text: ''});
  return el('details', {class: 'source', ontoggle: () => setText(code, grpcurl(method, request))},
    el('summary', {text: 'Source'}),
    el('p', {}, `Call: ${method.replace('/', '.')}`), el('pre', {tabindex: '0'}, code),
    metrics.length > 0 && el('p', {}, 'Metrics: ', metrics.map((m, i) => [i > 0 && ', ', el('a', {href: '/metrics', text: m})])));
}

// about is what is known of the gRPC port, for commands.
let about = {grpc: 'localhost:50051', tls: false, token: false};
export const setAbout = a => { about = a; };

// address returns an address of the gRPC port that clients can use: a wildcard is replaced by the host of the page.
export function address() {
  const [, host, port] = /^(.*):(\d+)$/.exec(about.grpc) ?? [];
  return ['', '[::]', '0.0.0.0'].includes(host) ? `${location.hostname}:${port}` : about.grpc;
}

// grpcurl returns the command of a call, such as RouterEventService/GetStatus. The request may have names that engines chose.
export const grpcurl = (method, request) => `grpcurl ${flags()} -d '${JSON.stringify(request).replaceAll("'", "'\\''")}' ${address()} kvcast.v1.${method}`;

const flags = () => [about.tls ? '' : '-plaintext', about.token ? '-H "authorization: Bearer $KVCAST_TOKEN"' : ''].filter(Boolean).join(' ');
