// Calls of the server, and the stream of its state. A token is kept for this tab, and sent in a header, never in a URL.

const tokenKey = 'kvcast.token';

export const setToken = token => sessionStorage.setItem(tokenKey, token);
export const hasToken = () => Boolean(sessionStorage.getItem(tokenKey));

export class CallError extends Error {
  constructor(status, problem) {
    super(problem.message);
    this.status = status;
    this.code = problem.code;
    this.reason = problem.reason;
  }
}

function post(path, body, signal) {
  const headers = {'Content-Type': 'application/json'};
  const token = sessionStorage.getItem(tokenKey);
  if (token) headers.Authorization = `Bearer ${token}`;
  return fetch(path, {method: 'POST', headers, body: JSON.stringify(body), signal, cache: 'no-store', credentials: 'same-origin', redirect: 'error'});
}

async function failure(response) {
  let problem = {code: 'unknown', message: `the server answered ${response.status}`};
  try {
    problem = await response.json();
  } catch { /* it is not the console's answer */ }
  return new CallError(response.status, problem);
}

// rpc calls a unary method of the contract, such as RouterEventService/GetStatus. Names of fields are those of the contract.
export async function rpc(method, request = {}, signal = undefined) {
  const response = await post(`/console/rpc/kvcast.v1.${method}`, request, signal);
  if (!response.ok) throw await failure(response);
  return response.json();
}

const maxBackoff = 8000;

// follow streams the server's state while the page is visible: onFrame gets the name and data of each event, onState one of
// connecting, live, away (with the error) and denied (with the error). It never ends.
export async function follow(onFrame, onState) {
  let backoff = 500;
  for (;;) {
    await visible();
    const abort = new AbortController();
    const hide = () => { if (document.hidden) abort.abort(); };
    document.addEventListener('visibilitychange', hide);
    try {
      const response = await post('/console/stream', {}, abort.signal);
      if (!response.ok) throw await failure(response);
      onState('live');
      backoff = 500;
      await read(response.body, onFrame);
      onState('away', new Error('the server has ended the stream'));
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        await onState('denied', error);
        backoff = 0;
      } else if (!abort.signal.aborted) onState('away', error);
    } finally {
      document.removeEventListener('visibilitychange', hide);
      abort.abort();
    }
    if (!document.hidden) await new Promise(done => { setTimeout(done, backoff); });
    backoff = Math.min(2 * backoff + 500, maxBackoff);
  }
}

// visible waits until somebody looks at the page.
function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise(done => {
    document.addEventListener('visibilitychange', function shown() {
      if (document.hidden) return;
      document.removeEventListener('visibilitychange', shown);
      done();
    });
  });
}

// read passes on the events of a stream until it ends.
async function read(body, onFrame) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const events = (rest + value).split('\n\n');
    rest = events.pop();
    for (const event of events) {
      const name = /^event: (.*)$/m.exec(event)?.[1];
      const data = /^data: (.*)$/m.exec(event)?.[1];
      if (name && data) onFrame(name, JSON.parse(data));
    }
  }
}
