// The frame of the page: which view is shown, and whether the server answers.

import {follow, hasToken, setToken} from './api.js';
import {el, setAbout, setText, visible} from './dom.js';
import {apply, changed, forget, onChange, state} from './state.js';
import {clock} from './format.js';
import {fleet} from './fleet.js';
import {worker} from './worker.js';
import {stream} from './stream.js';
import {match} from './match.js';
import {prefixes} from './prefixes.js';
import {log} from './log.js';

const views = {fleet, worker, stream, match, prefixes, log};
const main = document.getElementById('main');
const notice = document.getElementById('notice');
const connection = document.getElementById('connection');
let shown; // {name, argument, view}
let live = 'connecting';

// route returns the view that the address names: #/NAME/ARGUMENT?PARAMETERS.
function route() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const [name = 'fleet', ...rest] = path.split('/');
  let argument = rest.join('/');
  try {
    argument = decodeURIComponent(argument);
  } catch { /* the name has a percent sign */ }
  return {name: Object.hasOwn(views, name) ? name : 'fleet', argument, parameters: new URLSearchParams(query)};
}

function show() {
  const {name, argument, parameters} = route();
  for (const a of document.querySelectorAll('#nav a')) {
    if (a.getAttribute('href') === `#/${name}` || name === 'worker' && a.getAttribute('href') === '#/fleet') a.setAttribute('aria-current', 'page');
    else a.removeAttribute('aria-current');
  }
  if (shown?.name === name && shown.argument === argument && shown.view.go) {
    shown.view.go(parameters);
    return;
  }
  const first = !shown;
  shown?.view.close?.();
  const view = views[name]({argument, parameters});
  shown = {name, argument, view};
  main.replaceChildren(el('h1', {text: view.title}), ...view.nodes);
  document.title = `${visible(view.title)} – kvcast`;
  view.update('all');
  if (!first) {
    main.focus({preventScroll: true});
    window.scrollTo(0, 0);
  }
}

function showConnection(error) {
  const texts = {connecting: 'Connecting', live: 'Live', away: 'Server away', denied: 'Access denied'};
  connection.dataset.state = live;
  setText(connection, texts[live]);
  if (live === 'away') {
    const since = state.statusTime ? ` What is shown is of ${clock(state.statusTime)}.` : '';
    notice.replaceChildren(el('p', {class: 'notice bad', text: `The server does not answer (${error?.message ?? 'no connection'}). Trying again.${since}`}));
  } else if (live !== 'denied') notice.replaceChildren();
}

// login asks for a token, and waits for it.
function login(error) {
  return new Promise(done => {
    const input = el('input', {id: 'token', type: 'password', autocomplete: 'off', spellcheck: 'false', required: true});
    const form = el('form', {class: 'login'},
      el('h2', {text: 'Access denied'}),
      el('p', {text: error.message}),
      hasToken() && el('p', {class: 'bad', text: 'The server does not accept the token that was given.'}),
      el('label', {for: 'token', text: 'Token with the role router or operator'}), input,
      el('p', {class: 'muted', text: 'It is kept until this tab is closed, and sent to this server alone.'}),
      el('button', {type: 'submit', text: 'Continue'}));
    form.addEventListener('submit', event => {
      event.preventDefault();
      setToken(input.value.trim());
      notice.replaceChildren();
      main.hidden = false;
      done();
    });
    notice.replaceChildren(form);
    main.hidden = true;
    input.focus();
  });
}

function theme() {
  const select = document.getElementById('theme');
  const use = value => {
    if (value) document.documentElement.dataset.theme = value;
    else delete document.documentElement.dataset.theme;
  };
  select.value = localStorage.getItem('kvcast.theme') ?? '';
  use(select.value);
  select.addEventListener('change', () => {
    localStorage.setItem('kvcast.theme', select.value);
    use(select.value);
  });
}

theme();
window.addEventListener('hashchange', show);
onChange(name => shown?.view.update(name));
show();
showConnection();
follow((name, data) => {
  if (name === 'about') setAbout(data);
  else apply(name, data);
}, (now, error) => {
  if (now === 'live' && live === 'away') forget();
  live = now;
  showConnection(error);
  changed('connection');
  return now === 'denied' ? login(error) : undefined;
});
