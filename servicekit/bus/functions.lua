#!lua name=penstock_@VERSION@
-- Every change of a request's or a session's state, each one atomic. The same operations in Python: memory_pool.py.
--
-- KEYS[1] is the pool's prefix, hash tag included, so that a call goes to the pool's slot; other names are made from it
-- as keys.py lists them. Session ids come in hexadecimal, request ids and routes as 16 bytes. Every function checks
-- before it writes, and may be called again. Words between @ signs are filled in from keys.py by library.py.

local FORGET_MS = 60000 -- how long a dead session is shown
local MARK_TTL_S = '60' -- how long a cancel waits for its request
local MEMORY_SHARE = 0.8 -- of maxmemory; submit refuses above it

local HEX = {}

local function hex(bytes)
  if not HEX.a then -- filled at the first call: a library has no standard functions while it loads
    for byte = 0, 255 do
      HEX[string.char(byte)] = string.format('%02x', byte)
    end
  end
  return (string.gsub(bytes, '.', HEX))
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

local function sorted_members(key)
  local members = redis.call('SMEMBERS', key)
  table.sort(members)
  return members
end

-- Sessions ------------------------------------------------------------------------------------------------------------

local function is_active(prefix, sid)
  return redis.call('HGET', prefix .. 'sess:' .. sid, 'state') == 'active'
end

local function lives(prefix, sid, now)
  if not sid then
    return false
  end
  local session = redis.call('HMGET', prefix .. 'sess:' .. sid, 'state', 'until')
  return session[1] == 'active' and tonumber(session[2]) > now
end

local function free(prefix, sid)
  local leases = redis.call('HGETALL', prefix .. 'shards')
  for i = 1, #leases, 2 do
    if leases[i + 1] == sid then
      redis.call('HDEL', prefix .. 'shards', leases[i])
    end
  end
  for _, worker in ipairs(redis.call('SMEMBERS', prefix .. 'workers')) do
    if redis.call('HGET', prefix .. 'worker:' .. worker, 'owner') == sid then
      redis.call('HDEL', prefix .. 'worker:' .. worker, 'owner')
    end
  end
end

local function forget_session(prefix, sid)
  free(prefix, sid)
  redis.call('DEL', prefix .. 'sess:' .. sid)
  redis.call('SREM', prefix .. 'sessions', sid)
end

local function suspend_all(prefix, now)
  redis.call('DEL', prefix .. 'shards')
  for _, sid in ipairs(redis.call('SMEMBERS', prefix .. 'sessions')) do
    local key = prefix .. 'sess:' .. sid
    local session = redis.call('HMGET', key, 'state', 'until', 'ttl')
    if session[1] ~= 'left' then
      local deadline = math.max(tonumber(session[2]), now + tonumber(session[3]))
      redis.call('HSET', key, 'state', 'suspended', 'until', whole(deadline))
    end
  end
end

local function hello(keys, args)
  local prefix, sid, kind, name, address, ttl, create = keys[1], unpack(args)
  local now = now_ms()
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local run_seen = redis.call('GET', prefix .. 'run')
  local is_new_run = run_seen and run_seen ~= run
  if run_seen ~= run then
    redis.call('SET', prefix .. 'run', run)
  end
  if is_new_run then
    suspend_all(prefix, now)
  end
  local key = prefix .. 'sess:' .. sid
  local state = redis.call('HGET', key, 'state')
  if not state and create == '1' then
    state = 'active'
    redis.call('SADD', prefix .. 'sessions', sid)
    redis.call('HSET', key, 'state', state, 'kind', kind)
  end
  if state == 'active' then
    redis.call('HSET', key, 'name', name, 'address', address, 'ttl', ttl, 'until', whole(now + ttl))
  end
  return { is_new_run and 1 or 0, state == 'active' and 1 or 0 }
end

local function revalidate(keys, args)
  local key, ttl = keys[1] .. 'sess:' .. args[1], args[2]
  local state = redis.call('HGET', key, 'state')
  if not state or state == 'left' then
    return 0
  end
  redis.call('HSET', key, 'state', 'active', 'until', whole(now_ms() + ttl))
  return 1
end

local function renew(keys, args)
  local prefix, sid, ttl, status = keys[1], unpack(args)
  if not is_active(prefix, sid) then
    return 0
  end
  redis.call('HSET', prefix .. 'sess:' .. sid, 'until', whole(now_ms() + ttl))
  if status ~= '' then
    redis.call('HSET', prefix .. 'sess:' .. sid, 'status', status)
  end
  return 1
end

local function leave(keys, args)
  local prefix, sid = keys[1], args[1]
  local key = prefix .. 'sess:' .. sid
  local deadline = redis.call('HGET', key, 'until')
  if deadline then
    redis.call('HSET', key, 'state', 'left', 'until', whole(math.min(tonumber(deadline), now_ms())))
    free(prefix, sid)
  end
  return 1
end

local function list_sessions(keys)
  local prefix, now, listed = keys[1], now_ms(), {}
  for _, sid in ipairs(sorted_members(prefix .. 'sessions')) do
    local key = prefix .. 'sess:' .. sid
    local session = redis.call('HMGET', key, 'kind', 'name', 'address', 'status', 'state', 'until')
    local num_owned = redis.call('SCARD', prefix .. 'own:' .. sid)
    local deadline = tonumber(session[6])
    if num_owned == 0 and deadline <= now - FORGET_MS then
      forget_session(prefix, sid)
      redis.call('DEL', prefix .. 'text:' .. sid)
    else
      local alive = session[5] == 'active' and deadline > now
      listed[#listed + 1] =
        { sid, session[1], session[2], session[3], alive and 1 or 0, num_owned, session[4] or '' }
    end
  end
  for _, worker in ipairs(redis.call('SMEMBERS', prefix .. 'workers')) do
    local incarnation = redis.call('HGET', prefix .. 'worker:' .. worker, 'incarnation')
    if redis.call('EXISTS', prefix .. 'sess:' .. incarnation) == 0 then
      redis.call('SREM', prefix .. 'workers', worker)
      redis.call('DEL', prefix .. 'worker:' .. worker, prefix .. 'steps:' .. worker, prefix .. 'results:' .. worker)
    end
  end
  return listed
end

-- A request's way -----------------------------------------------------------------------------------------------------

local function is_short_of_memory()
  local info = redis.call('INFO', 'memory')
  local limit = tonumber(string.match(info, 'maxmemory:(%d+)'))
  return limit > 0 and tonumber(string.match(info, 'used_memory:(%d+)')) > MEMORY_SHARE * limit
end

local function request_key(prefix, id)
  return prefix .. 'req:' .. hex(id)
end

local function stored(key, id)
  local request =
    redis.call('HMGET', key, 'tenant', 'state', 'header', 'body', 'meta', 'route', 'shard', 'owner', 'cancel', 'attempts')
  table.insert(request, 1, id)
  return request
end

local function acknowledge(stream, group, entry_id)
  redis.call('XACK', stream, group, entry_id)
  redis.call('XDEL', stream, entry_id)
end

local function delete_hint(prefix, entry_id)
  if entry_id ~= '' then
    acknowledge(prefix .. 'prompts', '@TOKENIZERS@', entry_id)
  end
end

local function open(prefix, key, id, shard)
  local request = redis.call('HMGET', key, 'route', 'header', 'body', 'meta')
  redis.call('HSET', key, 'state', 'RUNNING', 'shard', shard)
  redis.call('XADD', prefix .. 'tokens:' .. shard, '*', '@REQUEST@', id, '@ROUTE@', request[1],
    '@HEADER@', request[2], '@BODY@', request[3], '@META@', request[4] or '')
end

local function submit(keys, args)
  local prefix, id, tenant, header, body, digest, route, sent_ns, max_waiting = keys[1], unpack(args)
  local key = request_key(prefix, id)
  local known = redis.call('HMGET', key, 'digest', 'tenant')
  if known[1] then
    return (known[1] == digest and known[2] == tenant) and 1 or 2
  end
  local bound = tonumber(max_waiting)
  if bound > 0 and redis.call('XLEN', prefix .. 'prompts') + redis.call('XLEN', prefix .. 'requests') >= bound then
    return 3
  end
  if is_short_of_memory() then
    return 4
  end
  local reason = '0'
  local mark_key = prefix .. 'mark:' .. hex(id)
  local mark = redis.call('HMGET', mark_key, 'reason', 'tenant')
  if mark[1] then
    if not mark[2] or mark[2] == tenant then
      reason = mark[1]
    end
    redis.call('DEL', mark_key)
  end
  redis.call('HSET', key, 'tenant', tenant, 'state', 'PROMPT', 'header', header, 'body', body, 'digest', digest,
    'route', route, 'cancel', reason, 'attempts', '0')
  redis.call('XADD', prefix .. 'prompts', '*', '@REQUEST@', id, '@SENT_NS@', sent_ns)
  return 0
end

local function fetch(keys, args)
  local key = request_key(keys[1], args[1])
  return redis.call('EXISTS', key) == 1 and stored(key, args[1])
end

local function tokenized(keys, args)
  local prefix, id, entry_id, meta, sent_ns = keys[1], unpack(args)
  local key = request_key(prefix, id)
  delete_hint(prefix, entry_id)
  if redis.call('HGET', key, 'state') ~= 'PROMPT' then
    return 0
  end
  redis.call('HSET', key, 'state', 'READY', 'meta', meta)
  redis.call('XADD', prefix .. 'requests', '*', '@REQUEST@', id, '@SENT_NS@', sent_ns)
  return 1
end

local function reject(keys, args)
  local prefix, id, entry_id, shard, row = keys[1], unpack(args)
  local key = request_key(prefix, id)
  delete_hint(prefix, entry_id)
  local state = redis.call('HGET', key, 'state')
  if state ~= 'PROMPT' and state ~= 'READY' then
    return 0
  end
  open(prefix, key, id, shard)
  redis.call('XADD', prefix .. 'tokens:' .. shard, '*', '@PAYLOAD@', row)
  return 1
end

local function claim(keys, args)
  local prefix, sid, count, shard = keys[1], unpack(args)
  if not is_active(prefix, sid) then
    return false
  end
  local stream, wanted, claimed = prefix .. 'requests', tonumber(count), {}
  while #claimed < wanted do
    local head = redis.call('XRANGE', stream, '-', '+', 'COUNT', whole(wanted - #claimed))
    if #head == 0 then
      break
    end
    for _, entry in ipairs(head) do
      redis.call('XDEL', stream, entry[1])
      local id = entry[2][2]
      local key = request_key(prefix, id)
      if redis.call('HGET', key, 'state') == 'READY' then
        redis.call('HSET', key, 'owner', sid)
        redis.call('SADD', prefix .. 'own:' .. sid, hex(id))
        open(prefix, key, id, shard)
        claimed[#claimed + 1] = stored(key, id)
      end
    end
  end
  return claimed
end

local function take(keys, args)
  local prefix, sid, dead = keys[1], unpack(args)
  if sid == dead or not is_active(prefix, sid) then
    return false
  end
  local deadline = redis.call('HGET', prefix .. 'sess:' .. dead, 'until')
  if deadline then
    if tonumber(deadline) > now_ms() then
      return false
    end
    forget_session(prefix, dead)
  end
  local moved = sorted_members(prefix .. 'own:' .. dead)
  for _, id in ipairs(moved) do
    redis.call('HSET', prefix .. 'req:' .. id, 'owner', sid)
    redis.call('HINCRBY', prefix .. 'req:' .. id, 'attempts', 1)
    redis.call('SADD', prefix .. 'own:' .. sid, id)
  end
  redis.call('DEL', prefix .. 'own:' .. dead)
  return moved
end

local function owned(keys, args)
  local prefix, sid = keys[1], args[1]
  return is_active(prefix, sid) and sorted_members(prefix .. 'own:' .. sid)
end

local function load(keys, args)
  local prefix, sid = keys[1], args[1]
  if not is_active(prefix, sid) then
    return false
  end
  local requests, logs, seen = {}, {}, {}
  for i = 2, #args do
    local key = request_key(prefix, args[i])
    local request = redis.call('HMGET', key, 'owner', 'shard')
    local shard = request[2]
    if request[1] == sid then
      requests[#requests + 1] = stored(key, args[i])
      if not seen[shard] then
        seen[shard] = true
        logs[#logs + 1] = { shard, redis.call('XRANGE', prefix .. 'tokens:' .. shard, '-', '+') }
      end
    end
  end
  return { requests, logs }
end

-- The hot one: sid, worker, plan, then shard and row in turn.
local function commit(keys, args)
  local prefix = keys[1]
  if redis.call('HGET', prefix .. 'sess:' .. args[1], 'state') ~= 'active' then
    return 0
  end
  for i = 4, #args, 2 do
    redis.call('XADD', prefix .. 'tokens:' .. args[i], '*', '@PAYLOAD@', args[i + 1])
  end
  if args[3] ~= '' then
    redis.call('XADD', prefix .. 'steps:' .. args[2], 'MAXLEN', '~', '@STEPS_CAP@', '*', '@PAYLOAD@', args[3])
  end
  return 1
end

local function leases_shard(prefix, sid, shard)
  return redis.call('HGET', prefix .. 'shards', shard) == sid and is_active(prefix, sid)
end

local function retire(keys, args)
  local prefix, sid, shard, id, result, ttl, route, text = keys[1], unpack(args)
  local key = request_key(prefix, id)
  local request = redis.call('HMGET', key, 'state', 'shard', 'owner')
  if not leases_shard(prefix, sid, shard) or request[1] ~= 'RUNNING' or request[2] ~= shard then
    return 0
  end
  if tonumber(ttl) > 0 then
    redis.call('SET', prefix .. 'out:' .. hex(id), result, 'PX', ttl)
  end
  if request[3] then
    redis.call('SREM', prefix .. 'own:' .. request[3], hex(id))
  end
  redis.call('HDEL', key, 'owner', 'header', 'body', 'meta')
  redis.call('HSET', key, 'state', 'ENDED')
  redis.call('PEXPIRE', key, ttl)
  if route ~= '' then
    redis.call('XADD', prefix .. 'text:' .. hex(route), 'MAXLEN', '~', '@TEXT_CAP@', '*', '@PAYLOAD@', text)
  end
  return 1
end

local function attach(keys, args)
  local prefix, id, tenant, route, offsets = keys[1], unpack(args)
  local key = request_key(prefix, id)
  local request = redis.call('HMGET', key, 'tenant', 'state', 'shard')
  if request[1] ~= tenant then
    return false
  end
  if request[2] == 'ENDED' then
    return { request[2], redis.call('GET', prefix .. 'out:' .. hex(id)) }
  end
  redis.call('HSET', key, 'route', route)
  if request[3] then
    redis.call('XADD', prefix .. 'attach:' .. request[3], 'MAXLEN', '~', '@ATTACH_CAP@', '*', '@REQUEST@', id,
      '@ROUTE@', route, '@OFFSETS@', offsets)
  end
  return { request[2], false }
end

-- A fifth argument is the tenant.
local function cancel(keys, args)
  local prefix, id, reason, sent_ns, sequence, tenant = keys[1], unpack(args)
  local key = request_key(prefix, id)
  local request = redis.call('HMGET', key, 'tenant', 'state', 'cancel')
  local for_all = tonumber(sequence) < 0
  if not request[1] then
    if for_all then
      local mark_key = prefix .. 'mark:' .. hex(id)
      redis.call('DEL', mark_key)
      redis.call('HSET', mark_key, 'reason', reason)
      if tenant then
        redis.call('HSET', mark_key, 'tenant', tenant)
      end
      redis.call('EXPIRE', mark_key, MARK_TTL_S)
    end
    return 0
  end
  if tenant and request[1] ~= tenant then
    return 0
  end
  if request[2] == 'ENDED' then
    return 1
  end
  if for_all and request[3] == '0' then
    redis.call('HSET', key, 'cancel', reason)
  end
  redis.call('XADD', prefix .. 'cancels', 'MAXLEN', '~', '@CANCELS_CAP@', '*', '@REQUEST@', id, '@SEQUENCE@', sequence,
    '@REASON@', reason, '@SENT_NS@', sent_ns)
  return 1
end

-- Workers, shards, streams --------------------------------------------------------------------------------------------

local function last_id(stream)
  if redis.call('EXISTS', stream) == 0 then
    return '0-0'
  end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      return info[i + 1]
    end
  end
end

local function register_worker(keys, args)
  local prefix, sid, worker, info = keys[1], unpack(args)
  if not is_active(prefix, sid) then
    return ''
  end
  local key = prefix .. 'worker:' .. worker
  if redis.call('HGET', key, 'incarnation') ~= sid then
    redis.call('HDEL', key, 'owner')
  end
  redis.call('SADD', prefix .. 'workers', worker)
  redis.call('HSET', key, 'incarnation', sid, 'info', info)
  return last_id(prefix .. 'steps:' .. worker)
end

local function list_workers(keys)
  local prefix, now, listed = keys[1], now_ms(), {}
  for _, name in ipairs(redis.call('SMEMBERS', prefix .. 'workers')) do
    local worker = redis.call('HMGET', prefix .. 'worker:' .. name, 'incarnation', 'info', 'owner')
    local alive = lives(prefix, worker[1], now) and 1 or 0
    listed[#listed + 1] = { name, worker[1], alive, worker[2], lives(prefix, worker[3], now) and worker[3] }
  end
  return listed
end

local function pair(keys, args)
  local prefix, sid, name = keys[1], unpack(args)
  local key = prefix .. 'worker:' .. name
  local worker = redis.call('HMGET', key, 'incarnation', 'info', 'owner')
  local owner = worker[3]
  if not is_active(prefix, sid) or not lives(prefix, worker[1], now_ms()) then
    return false
  end
  if owner and owner ~= sid and redis.call('EXISTS', prefix .. 'sess:' .. owner) == 1 then
    return false
  end
  redis.call('HSET', key, 'owner', sid)
  return { worker[1], worker[2], last_id(prefix .. 'results:' .. name) }
end

local function lease_shard(keys, args)
  local prefix, sid, shard = keys[1], unpack(args)
  local holder = redis.call('HGET', prefix .. 'shards', shard)
  if not is_active(prefix, sid) or (holder ~= sid and lives(prefix, holder, now_ms())) then
    return 0
  end
  redis.call('HSET', prefix .. 'shards', shard, sid)
  return 1
end

local function release_shard(keys, args)
  local prefix, sid, shard = keys[1], unpack(args)
  if redis.call('HGET', prefix .. 'shards', shard) == sid then
    redis.call('HDEL', prefix .. 'shards', shard)
  end
  return 1
end

local function trim_log(keys, args)
  local prefix, sid, shard, min_id = keys[1], unpack(args)
  if not leases_shard(prefix, sid, shard) then
    return 0
  end
  redis.call('XTRIM', prefix .. 'tokens:' .. shard, 'MINID', min_id)
  return 1
end

-- All may go over `maxmemory`: they let requests end, and so make room. `submit` looks for itself.
local function register(name, callback, flag)
  redis.register_function { function_name = name .. '_@VERSION@', callback = callback, flags = { flag } }
end

register('hello', hello, 'allow-oom')
register('revalidate', revalidate, 'allow-oom')
register('renew', renew, 'allow-oom')
register('leave', leave, 'allow-oom')
register('list_sessions', list_sessions, 'allow-oom')
register('submit', submit, 'allow-oom')
register('fetch', fetch, 'no-writes')
register('tokenized', tokenized, 'allow-oom')
register('reject', reject, 'allow-oom')
register('claim', claim, 'allow-oom')
register('take', take, 'allow-oom')
register('owned', owned, 'no-writes')
register('load', load, 'no-writes')
register('commit', commit, 'allow-oom')
register('retire', retire, 'allow-oom')
register('attach', attach, 'allow-oom')
register('cancel', cancel, 'allow-oom')
register('acknowledge', function(_, args) return acknowledge(args[1], args[2], args[3]) end, 'allow-oom')
register('register_worker', register_worker, 'allow-oom')
register('list_workers', list_workers, 'no-writes')
register('pair', pair, 'allow-oom')
register('lease_shard', lease_shard, 'allow-oom')
register('release_shard', release_shard, 'allow-oom')
register('trim_log', trim_log, 'allow-oom')
register('last_id', function(_, args) return last_id(args[1]) end, 'no-writes')
