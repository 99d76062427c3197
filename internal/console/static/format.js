// Texts for numbers, times and the names of the contract.

const grouped = new Intl.NumberFormat('en-US');
const short = new Intl.NumberFormat('en-US', {notation: 'compact', maximumFractionDigits: 1});

export const number = n => grouped.format(n);
export const compact = n => (n < 10000 ? grouped.format(n) : short.format(n));
export const rate = n => (n < 10 ? n.toFixed(1) : grouped.format(Math.round(n)));
export const percent = share => (share > 0 && share < 0.0005 ? 'under 0.1 %' : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`);
export const plural = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

export function bytes(n) {
  for (const [unit, size] of [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]]) {
    if (n >= size) return `${(n / size).toFixed(1)} ${unit}`;
  }
  return `${n} B`;
}

// duration returns a time in nanoseconds in the unit that shows it best.
export function duration(nano) {
  const sign = nano < 0 ? '−' : '';
  const n = Math.abs(nano);
  if (n < 1e6) return `${sign}${(n / 1e3).toFixed(0)} µs`;
  if (n < 1e9) return `${sign}${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} ms`;
  if (n < 6e10) return `${sign}${(n / 1e9).toFixed(n < 1e10 ? 1 : 0)} s`;
  if (n < 3.6e12) return `${sign}${Math.floor(n / 6e10)} min ${Math.floor(n / 1e9) % 60} s`;
  return `${sign}${Math.floor(n / 3.6e12)} h ${Math.floor(n / 6e10) % 60} min`;
}

const two = n => String(n).padStart(2, '0');

// clock returns the time of day of a time in milliseconds since the Unix epoch.
export function clock(ms, withSeconds = true) {
  const d = new Date(ms);
  return `${two(d.getHours())}:${two(d.getMinutes())}${withSeconds ? `:${two(d.getSeconds())}` : ''}`;
}

// dateTime returns a local time in the form that input elements have: 2026-11-23T14:03.
export function dateTime(ms) {
  const d = new Date(ms);
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}T${clock(ms, false)}`;
}

export const millis = unixNano => Number(BigInt(unixNano) / 1000000n);

// hash returns a hash, which is a decimal number in JSON, in hexadecimal.
export const hash = decimal => BigInt(decimal).toString(16).padStart(16, '0');

export const tiers = [
  {name: 'TIER_DEVICE', text: 'device'},
  {name: 'TIER_HOST_PINNED', text: 'host'},
  {name: 'TIER_DISK', text: 'disk'},
  {name: 'TIER_EXTERNAL', text: 'external'},
];

// blocksOf returns the numbers of blocks in the order of tiers, of a list of TierBlocks or TierPrefix.
export const blocksOf = list => tiers.map(t => Number((list ?? []).find(b => b.tier === t.name)?.blocks ?? 0));

export const sum = all => all.reduce((a, b) => a + b, 0);

export const trusts = {
  TRUST_EXACT: {text: 'exact', mark: '✓', rank: 2, meaning: 'The known blocks are the engine’s, as of the last batch read.'},
  TRUST_UPPER_BOUND: {text: 'upper bound', mark: '≤', rank: 1, meaning: 'The engine also caches other attention groups: it reuses at most the known prefix.'},
  TRUST_DEGRADED: {text: 'degraded', mark: '!', rank: 0, meaning: 'The known blocks may differ from the engine’s.'},
  TRUST_UNSPECIFIED: {text: 'not read', mark: '·', rank: 3, meaning: 'No batch was read yet.'},
};

export const reasons = {
  DEGRADED_REASON_JOINED_LATE: ['joined late', 'The engine was running when kvcast first read it: blocks may be missing until its cache is cleared.'],
  DEGRADED_REASON_GAP: ['gap', 'Batches were lost and could not be replayed: blocks may be missing, and known ones may be gone.'],
  DEGRADED_REASON_POSSIBLE_RESTART: ['possible restart', 'The engine may have restarted unnoticed: all blocks may be gone. Give it a replay socket.'],
  DEGRADED_REASON_CONFLICT: ['conflict', 'Two publishers use the same topic and rank, and their blocks are mixed. Stop one of them.'],
  DEGRADED_REASON_SOURCE_DOWN: ['source down', 'There is no connection to a source: changes since then are unknown.'],
  DEGRADED_REASON_BLOCKS_OMITTED: ['blocks omitted', 'The engine has more blocks, adapters or salts than the server’s limits.'],
  DEGRADED_REASON_SHARED_TIER: ['shared tier', 'One of several sources was cleared in a tier that it shares.'],
  DEGRADED_REASON_EVENTS_SKIPPED: ['events skipped', 'Events were unknown, malformed or contradictory: blocks may be missing, and known ones may be gone.'],
  DEGRADED_REASON_BLOCK_SIZE_MISMATCH: ['block size mismatch', 'The engine’s blocks have another size than the worker’s, and are skipped. Set the worker’s block_size to the engine’s.'],
  DEGRADED_REASON_UNKNOWN_CONTENT: ['unknown content', 'The content of some blocks is unknown: no prompt matches them.'],
  DEGRADED_REASON_REPLAY_UNPROVED: ['replay unproved', 'The engine has published nothing since its replay was read: the replay socket may be another engine’s.'],
  DEGRADED_REASON_REPLAY_FOREIGN: ['replay foreign', 'The replay socket belongs to another engine: blocks are missing. Set the worker’s replay to that of its own engine.'],
  DEGRADED_REASON_COPIES_UNSURE: ['copies unsure', 'The engine announces blocks that it reuses, so that its copies cannot be counted: blocks may be missing.'],
  DEGRADED_REASON_CONNECTOR_TIER: ['connector tier', 'A connector keeps blocks in this tier, and may not tell all of their content, or which it removes: they may be gone, or of another salt or image.'],
  DEGRADED_REASON_RELAYED: ['relayed', 'A relay leaves events out without telling: blocks may be missing or gone. Read the engine’s own ZeroMQ publisher instead.'],
  DEGRADED_REASON_OVERPREDICTED: ['overpredicted', 'Routers report that the engine reuses less than its events tell.'],
  DEGRADED_REASON_STALE: ['stale', 'The server cannot tell whether the blocks are the engine’s now: it is cut off, the journal accepts no entries, or no server reads the worker.'],
  DEGRADED_REASON_TIER_NOT_CLEARED: ['tier not cleared', 'The engine cleared its device memory, and perhaps this tier: its blocks may be gone.'],
};

export const reasonText = r => reasons[r]?.[0] ?? plain(r);

// plain returns the name of a constant without its prefix, in words: REASON_REPLAY_FORGOTTEN is replay forgotten.
export const plain = name => String(name ?? '').replace(/^(DEGRADED_REASON|REASON|SOURCE_STATE|WORKER_STATE|INCIDENT_KIND|KIND|TIER|TRUST)_/, '').toLowerCase().replaceAll('_', ' ');

export const kinds = {
  INCIDENT_KIND_GAP: ['gap', 'bad'],
  INCIDENT_KIND_CONFLICT: ['conflict', 'bad'],
  INCIDENT_KIND_REPAIR_FAILED: ['repair failed', 'bad'],
  INCIDENT_KIND_SOURCE_DOWN: ['source down', 'bad'],
  INCIDENT_KIND_FENCED: ['fenced', 'bad'],
  INCIDENT_KIND_OVERPREDICTED: ['overpredicted', 'bad'],
  INCIDENT_KIND_ACCURATE: ['predictions right', 'good'],
  INCIDENT_KIND_SUBSCRIBER_ENDED: ['subscriber ended', 'bad'],
  INCIDENT_KIND_ENGINE_RESTARTED: ['engine restarted', 'change'],
  INCIDENT_KIND_CLEARED: ['cache cleared', 'change'],
  INCIDENT_KIND_TAKEOVER: ['takeover', 'change'],
  INCIDENT_KIND_RELEASE: ['release', 'change'],
  INCIDENT_KIND_WORKER_REMOVED: ['worker removed', 'change'],
  INCIDENT_KIND_WORKER_ADDED: ['worker added', 'good'],
  INCIDENT_KIND_REPAIRED: ['repaired', 'good'],
  INCIDENT_KIND_SOURCE_UP: ['source connected', 'good'],
  INCIDENT_KIND_SUBSCRIBER_LEFT: ['subscriber left', 'plain'],
};

// incidentText says in words what happened.
export function incidentText(i) {
  const parts = [];
  const batches = Number(i.batches ?? 0);
  switch (i.kind) {
    case 'INCIDENT_KIND_GAP':
    case 'INCIDENT_KIND_CONFLICT':
      parts.push(plain(i.reason));
      if (batches > 0) parts.push(`${plural(batches, 'batch', 'batches')} lost`);
      if (i.last_seq) parts.push(`engine seqs ${i.first_seq ?? 0} to ${i.last_seq}`);
      if (i.tiers?.length) parts.push(`in ${i.tiers.map(plain).join(', ')}`);
      if (i.detail) parts.push(i.detail);
      break;
    case 'INCIDENT_KIND_REPAIRED':
      parts.push(`${plural(batches, 'batch', 'batches')} replayed in ${duration(Number(i.duration_nano ?? 0))}, because of ${i.reason}`);
      break;
    case 'INCIDENT_KIND_REPAIR_FAILED':
      parts.push(`because of ${i.reason}, after ${duration(Number(i.duration_nano ?? 0))}; ${plural(batches, 'batch', 'batches')} replayed`);
      break;
    case 'INCIDENT_KIND_SOURCE_UP':
      parts.push(`after ${duration(Number(i.duration_nano ?? 0))}`);
      break;
    case 'INCIDENT_KIND_SUBSCRIBER_ENDED':
    case 'INCIDENT_KIND_SUBSCRIBER_LEFT':
      if (i.reason) parts.push(i.reason);
      parts.push(`open for ${duration(Number(i.duration_nano ?? 0))}`, `${plural(Number(i.behind ?? 0), 'entry', 'entries')} behind`);
      break;
    case 'INCIDENT_KIND_TAKEOVER':
    case 'INCIDENT_KIND_RELEASE':
      parts.push(plain(i.reason), `took ${duration(Number(i.duration_nano ?? 0))}`);
      break;
    default:
      if (i.reason) parts.push(plain(i.reason));
  }
  if (i.instance_id) parts.push(`instance ${i.instance_id.slice(0, 8)}`);
  return parts.join(', ');
}

export const workerLink = name => `#/worker/${encodeURIComponent(name)}`;
