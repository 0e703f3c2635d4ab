-- Sessions: who is alive, who is fenced, and what is freed when one goes.

local FORGET_MS = 60000 -- how long a dead session is shown

-- Notes that something which surveys tell of has changed: 's' and a session, or 'w' and a worker's name.
local function touch(prefix, member)
  redis.call('ZADD', prefix .. '@changed@', redis.call('HINCRBY', prefix .. '@survey@', 'generation', 1), member)
end

-- The same of something that is there no more. The last ones are kept, for those who have not heard of them.
local function bury(prefix, member)
  touch(prefix, member)
  redis.call('ZADD', prefix .. '@gone@', redis.call('HGET', prefix .. '@survey@', 'generation'), member)
  if redis.call('HINCRBY', prefix .. '@survey@', 'gone', 1) > @GONE_CAP@ then
    local oldest = redis.call('ZRANGE', prefix .. '@gone@', 0, 0, 'WITHSCORES')
    redis.call('ZREM', prefix .. '@gone@', oldest[1])
    redis.call('ZREM', prefix .. '@changed@', oldest[1])
    redis.call('HINCRBY', prefix .. '@survey@', 'gone', -1)
    redis.call('HSET', prefix .. '@survey@', 'base', oldest[2])
  end
end

local function raise(prefix, member)
  if redis.call('ZREM', prefix .. '@gone@', member) == 1 then
    redis.call('HINCRBY', prefix .. '@survey@', 'gone', -1)
  end
  touch(prefix, member)
end

-- Whoever was told to be dead is alive again.
local function rise_if_late(prefix, sid)
  if redis.call('HDEL', prefix .. '@session@' .. sid, 'late') == 1 then
    touch(prefix, 's' .. sid)
  end
end

local function is_active(prefix, sid)
  return redis.call('HGET', prefix .. '@session@' .. sid, 'state') == 'active'
end

local function lives(prefix, sid, now)
  if not sid then
    return false
  end
  local session = redis.call('HMGET', prefix .. '@session@' .. sid, 'state', 'until')
  return session[1] == 'active' and tonumber(session[2]) > now
end

local function free(prefix, sid)
  local leases = redis.call('HGETALL', prefix .. '@shards@')
  for i = 1, #leases, 2 do
    if leases[i + 1] == sid then
      redis.call('HDEL', prefix .. '@shards@', leases[i])
      redis.call('HDEL', prefix .. '@read@', leases[i])
    end
  end
  for _, worker in ipairs(redis.call('SMEMBERS', prefix .. '@workers@')) do
    if redis.call('HGET', prefix .. '@worker@' .. worker, 'owner') == sid then
      redis.call('HDEL', prefix .. '@worker@' .. worker, 'owner')
      touch(prefix, 'w' .. worker)
    end
  end
end

local function forget_session(prefix, sid)
  free(prefix, sid)
  redis.call('DEL', prefix .. '@session@' .. sid)
  redis.call('SREM', prefix .. '@sessions@', sid)
  if redis.call('ZREM', prefix .. '@leases@', sid) == 1 then
    bury(prefix, 's' .. sid)
  end
end

-- A worker whose session is forgotten leaves nothing behind.
local function forget_workers(prefix)
  for _, worker in ipairs(redis.call('SMEMBERS', prefix .. '@workers@')) do
    local incarnation = redis.call('HGET', prefix .. '@worker@' .. worker, 'incarnation')
    if redis.call('EXISTS', prefix .. '@session@' .. incarnation) == 0 then
      redis.call('SREM', prefix .. '@workers@', worker)
      redis.call('DEL', prefix .. '@worker@' .. worker, prefix .. '@steps@' .. worker, prefix .. '@results@' .. worker)
      bury(prefix, 'w' .. worker)
    end
  end
end

local function suspend_all(prefix, now)
  redis.call('DEL', prefix .. '@shards@', prefix .. '@read@')
  for _, sid in ipairs(redis.call('SMEMBERS', prefix .. '@sessions@')) do
    local key = prefix .. '@session@' .. sid
    local session = redis.call('HMGET', key, 'state', 'until', 'ttl')
    if session[1] ~= 'left' then
      local deadline = math.max(tonumber(session[2]), now + tonumber(session[3]))
      redis.call('HSET', key, 'state', 'suspended', 'until', whole(deadline))
      redis.call('ZADD', prefix .. '@leases@', whole(deadline), sid)
      touch(prefix, 's' .. sid)
    end
  end
end

-- Counts the runs of the pool's server. Rises when a process has been with a copy that is ahead.
local function present_term(prefix)
  return redis.call('GET', prefix .. '@term@') or '0'
end

-- Whether every gateway has come back to a restarted server, or stayed away for longer than its lease; and, if that
-- was in question, since when it could be so.
local function is_settled(prefix)
  local earliest = redis.call('GET', prefix .. '@settle@')
  if not earliest then
    return true
  end
  local now = now_ms()
  if tonumber(earliest) > now then
    return false
  end
  for _, sid in ipairs(redis.call('SMEMBERS', prefix .. '@sessions@')) do
    local session = redis.call('HMGET', prefix .. '@session@' .. sid, 'kind', 'state', 'until')
    if session[1] == 'gateway' and session[2] == 'suspended' and tonumber(session[3]) > now then
      return false
    end
  end
  return true, earliest
end

-- The same, remembered: a pool that has settled stays so until the server's next run.
local function settle(prefix)
  local settled, was_open = is_settled(prefix)
  if settled and was_open then
    redis.call('DEL', prefix .. '@settle@')
  end
  return settled
end

-- Whether nobody is there any more, and no request that somebody could go on with.
local function is_deserted(prefix, now)
  if tonumber(redis.call('HGET', prefix .. '@waiting@', 'requests') or 0) > 0 then
    return false
  end
  for _, sid in ipairs(redis.call('SMEMBERS', prefix .. '@sessions@')) do
    local session = redis.call('HMGET', prefix .. '@session@' .. sid, 'state', 'until')
    local is_there = session[1] ~= 'left' and tonumber(session[2]) > now
    if is_there or redis.call('SCARD', prefix .. '@owned@' .. sid) > 0 then
      return false
    end
  end
  return true
end

-- The first part in which a process differs from what the pool's have agreed on, and what they have; what nobody has
-- said before is agreed on by that. Who comes to a deserted pool finds nothing agreed on: what it leaves open must not
-- hold whoever comes next to what those who are gone had said.
local function differing_part(prefix, now, parts, is_new)
  local key = prefix .. '@shape@'
  if is_new and redis.call('EXISTS', key) == 1 and is_deserted(prefix, now) then
    redis.call('DEL', key)
  end
  for i = 1, #parts, 2 do
    local agreed = redis.call('HGET', key, parts[i])
    if agreed and agreed ~= parts[i + 1] then
      if not is_deserted(prefix, now) then
        return parts[i], agreed, parts[i + 1]
      end
      redis.call('DEL', key)
    end
  end
  if #parts > 0 then
    redis.call('HSET', key, unpack(parts))
  end
end

local function hello(keys, args)
  local prefix, sid, kind, name, address, ttl, create, known_term = keys[1], unpack(args)
  -- From INFO, as managed servers have no CONFIG.
  local info = redis.call('INFO', 'server', 'memory')
  local policy = string.match(info, 'maxmemory_policy:(%S+)')
  if policy and policy ~= 'noeviction' then
    return redis.error_reply('EVICTS ' .. policy)
  end
  local now = now_ms()
  local key = prefix .. '@session@' .. sid
  local state = redis.call('HGET', key, 'state')
  local part, agreed, told = differing_part(prefix, now, { unpack(args, 8) }, not state)
  if part then
    return redis.error_reply('SHAPE ' .. part .. ' ' .. agreed .. ' ' .. told)
  end
  local run = string.match(info, 'run_id:(%w+)')
  local run_seen = redis.call('GET', prefix .. '@run@')
  -- A session that comes back to a pool without memory: the server has lost everything.
  -- One that has seen a later term was with another copy of the pool: a server that was a primary all the while and is
  -- one again, without what that copy had.
  local term = tonumber(present_term(prefix))
  local is_new_run = run_seen ~= run and (run_seen or create ~= '1') or tonumber(known_term) > term
  if run_seen ~= run then
    redis.call('SET', prefix .. '@run@', run)
  end
  if is_new_run then
    term = math.max(term, tonumber(known_term)) + 1
    redis.call('SET', prefix .. '@term@', whole(term))
    suspend_all(prefix, now)
    redis.call('SET', prefix .. '@settle@', whole(now + @SETTLE_MS@))
    state = redis.call('HGET', key, 'state')
  end
  if not state then
    if create == '1' then
      state = 'active'
    elseif kind == 'gateway' and redis.call('EXISTS', prefix .. '@settle@') == 1 then
      state = 'suspended' -- it was lost with the last writes, and has clients: it is waited for
    end
    if state then
      redis.call('SADD', prefix .. '@sessions@', sid)
      redis.call('HSET', key, 'state', state, 'kind', kind)
      raise(prefix, 's' .. sid)
    end
  end
  if state == 'active' or state == 'suspended' then
    local known = redis.call('HMGET', key, 'name', 'address')
    if known[1] and (known[1] ~= name or known[2] ~= address) then
      touch(prefix, 's' .. sid)
    end
    rise_if_late(prefix, sid)
    redis.call('ZADD', prefix .. '@leases@', whole(now + ttl), sid)
    redis.call('HSET', key, 'name', name, 'address', address, 'ttl', ttl, 'until', whole(now + ttl),
      'heard', whole(now))
  end
  return { is_new_run and 1 or 0, state == 'active' and 1 or 0, term, now }
end

local function revalidate(keys, args)
  local key, ttl = keys[1] .. '@session@' .. args[1], args[2]
  local state = redis.call('HGET', key, 'state')
  if not state or state == 'left' then
    return 0
  end
  local now = now_ms()
  redis.call('HSET', key, 'state', 'active', 'until', whole(now + ttl), 'heard', whole(now))
  redis.call('HDEL', key, 'late')
  redis.call('ZADD', keys[1] .. '@leases@', whole(now + ttl), args[1])
  touch(keys[1], 's' .. args[1])
  return 1
end

local function renew(keys, args)
  local prefix, sid, ttl, status, draining, models = keys[1], unpack(args)
  local key = prefix .. '@session@' .. sid
  local session = redis.call('HMGET', key, 'state', 'late', 'draining', 'until', 'unwanted')
  if session[1] ~= 'active' then
    return 0
  end
  local now = now_ms()
  local deadline = whole(now + ttl)
  if status == '' then
    redis.call('HSET', key, 'until', deadline, 'heard', whole(now))
  else
    redis.call('HSET', key, 'until', deadline, 'heard', whole(now), '@STATUS@', status, 'draining', draining)
  end
  if models then
    redis.call('HSET', key, 'models', models)
  end
  -- A lease that goes on as it did is looked at when the last one would have run out: most renewals write one key.
  if session[2] or tonumber(deadline) < tonumber(session[4]) then
    redis.call('ZADD', prefix .. '@leases@', deadline, sid)
  end
  if session[2] then
    redis.call('HDEL', key, 'late')
  end
  if session[2] or (status ~= '' and session[3] ~= draining) then
    touch(prefix, 's' .. sid)
  end
  return session[5] and 2 or 1
end

local function leave(keys, args)
  local prefix, sid = keys[1], args[1]
  local key = prefix .. '@session@' .. sid
  local deadline = redis.call('HGET', key, 'until')
  if deadline then
    local now = now_ms()
    deadline = math.min(tonumber(deadline), now)
    redis.call('HSET', key, 'state', 'left', 'until', whole(deadline), 'heard', whole(now))
    redis.call('ZADD', prefix .. '@leases@', whole(deadline + FORGET_MS), sid)
    touch(prefix, 's' .. sid)
    free(prefix, sid)
  end
  return 1
end

local function list_sessions(keys)
  local prefix, now, listed = keys[1], now_ms(), {}
  for _, sid in ipairs(sorted_members(prefix .. '@sessions@')) do
    local key = prefix .. '@session@' .. sid
    local session = redis.call('HMGET', key, 'kind', 'name', 'address', '@STATUS@', 'state', 'until', 'heard')
    local num_owned = redis.call('SCARD', prefix .. '@owned@' .. sid)
    local deadline = tonumber(session[6])
    if num_owned == 0 and deadline <= now - FORGET_MS then
      forget_session(prefix, sid)
      redis.call('DEL', prefix .. '@text@' .. sid)
    else
      local alive = session[5] == 'active' and deadline > now
      listed[#listed + 1] = { sid, session[1], session[2], session[3], alive and 1 or 0, num_owned, session[4] or '',
        session[5] == 'left' and 1 or 0, now - (session[7] or now) }
    end
  end
  forget_workers(prefix)
  return listed
end

-- Leases that have run out since somebody looked last: their sessions are told to be dead, or, a minute later, forgotten.
local function look_at_leases(prefix, now)
  local has_forgotten = false
  for _, sid in ipairs(redis.call('ZRANGEBYSCORE', prefix .. '@leases@', '-inf', whole(now), 'LIMIT', 0, 32)) do
    local key = prefix .. '@session@' .. sid
    local session = redis.call('HMGET', key, 'state', 'until', 'late')
    local forget_at = tonumber(session[2]) + FORGET_MS
    if session[1] ~= 'left' and tonumber(session[2]) > now then
      redis.call('ZADD', prefix .. '@leases@', session[2], sid)
    elseif forget_at <= now and redis.call('SCARD', prefix .. '@owned@' .. sid) == 0 then
      forget_session(prefix, sid)
      redis.call('DEL', prefix .. '@text@' .. sid)
      has_forgotten = true
    else
      redis.call('ZADD', prefix .. '@leases@', whole(forget_at), sid)
      if session[1] == 'active' and not session[3] then
        redis.call('HSET', key, 'late', '1')
        touch(prefix, 's' .. sid)
      end
    end
  end
  if has_forgotten then
    forget_workers(prefix)
  end
end

local function changed_session(prefix, sid, now, found)
  local session = redis.call('HMGET', prefix .. '@session@' .. sid,
    'kind', 'name', 'address', '@STATUS@', 'state', 'until', 'heard')
  if not session[1] then
    found[4][#found[4] + 1] = sid
    return
  end
  local alive = session[5] == 'active' and tonumber(session[6]) > now
  found[3][#found[3] + 1] = { sid, session[1], session[2], session[3], alive and 1 or 0, 0, session[4] or '',
    session[5] == 'left' and 1 or 0, now - (session[7] or now) }
end

local function changed_worker(prefix, name, found)
  local worker = redis.call('HMGET', prefix .. '@worker@' .. name, 'incarnation', 'info', 'owner')
  if worker[1] then
    found[5][#found[5] + 1] = { name, worker[1], worker[2], worker[3] }
  else
    found[6][#found[6] + 1] = name
  end
end

-- What has changed since a generation; nothing, at next to no cost, if nothing has.
local function survey(keys, args)
  local prefix, since, count = keys[1], tonumber(args[1]), args[2]
  local now = now_ms()
  look_at_leases(prefix, now)
  local known = redis.call('HMGET', prefix .. '@survey@', 'generation', 'base')
  local generation, base = tonumber(known[1] or 0), tonumber(known[2] or 0)
  if generation == since then
    return false
  end
  if since > generation or since < base then
    since = 0
  end
  local changes = redis.call('ZRANGEBYSCORE', prefix .. '@changed@', '(' .. whole(since), '+inf', 'WITHSCORES',
    'LIMIT', 0, count)
  local found = { generation, since == 0 and 1 or 0, {}, {}, {}, {} }
  for i = 1, #changes, 2 do
    local name = string.sub(changes[i], 2)
    if string.sub(changes[i], 1, 1) == 's' then
      changed_session(prefix, name, now, found)
    else
      changed_worker(prefix, name, found)
    end
  end
  if #changes == 2 * count then
    found[1] = tonumber(changes[#changes])
  end
  found[7] = found[1] == generation and 1 or 0
  return found
end
