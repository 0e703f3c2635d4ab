-- Sessions: who is alive, who is fenced, and what is freed when one goes.

local FORGET_MS = 60000 -- how long a dead session is shown

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
      redis.call('HDEL', prefix .. 'read', leases[i])
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
  redis.call('DEL', prefix .. 'shards', prefix .. 'read')
  for _, sid in ipairs(redis.call('SMEMBERS', prefix .. 'sessions')) do
    local key = prefix .. 'sess:' .. sid
    local session = redis.call('HMGET', key, 'state', 'until', 'ttl')
    if session[1] ~= 'left' then
      local deadline = math.max(tonumber(session[2]), now + tonumber(session[3]))
      redis.call('HSET', key, 'state', 'suspended', 'until', whole(deadline))
    end
  end
end

local function present_run(prefix)
  return redis.call('GET', prefix .. 'run') or ''
end

-- Whether every gateway has come back to a restarted server, or stayed away for longer than its lease; and, if that
-- was in question, since when it could be so.
local function is_settled(prefix)
  local earliest = redis.call('GET', prefix .. 'settle')
  if not earliest then
    return true
  end
  local now = now_ms()
  if tonumber(earliest) > now then
    return false
  end
  for _, sid in ipairs(redis.call('SMEMBERS', prefix .. 'sessions')) do
    local session = redis.call('HMGET', prefix .. 'sess:' .. sid, 'kind', 'state', 'until')
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
    redis.call('DEL', prefix .. 'settle')
  end
  return settled
end

local function hello(keys, args)
  local prefix, sid, kind, name, address, ttl, create = keys[1], unpack(args)
  -- From INFO, as managed servers have no CONFIG.
  local info = redis.call('INFO', 'server', 'memory')
  local policy = string.match(info, 'maxmemory_policy:(%S+)')
  if policy and policy ~= 'noeviction' then
    return redis.error_reply('EVICTS ' .. policy)
  end
  local now = now_ms()
  local run = string.match(info, 'run_id:(%w+)')
  local run_seen = redis.call('GET', prefix .. 'run')
  -- A session that comes back to a pool without memory: the server has lost everything.
  local is_new_run = run_seen ~= run and (run_seen or create ~= '1')
  if run_seen ~= run then
    redis.call('SET', prefix .. 'run', run)
  end
  if is_new_run then
    suspend_all(prefix, now)
    redis.call('SET', prefix .. 'settle', whole(now + @SETTLE_MS@))
  end
  local key = prefix .. 'sess:' .. sid
  local state = redis.call('HGET', key, 'state')
  if not state then
    if create == '1' then
      state = 'active'
    elseif kind == 'gateway' and redis.call('EXISTS', prefix .. 'settle') == 1 then
      state = 'suspended' -- it was lost with the last writes, and has clients: it is waited for
    end
    if state then
      redis.call('SADD', prefix .. 'sessions', sid)
      redis.call('HSET', key, 'state', state, 'kind', kind)
    end
  end
  if state == 'active' or state == 'suspended' then
    redis.call('HSET', key, 'name', name, 'address', address, 'ttl', ttl, 'until', whole(now + ttl),
      'heard', whole(now))
  end
  return { is_new_run and 1 or 0, state == 'active' and 1 or 0 }
end

local function revalidate(keys, args)
  local key, ttl = keys[1] .. 'sess:' .. args[1], args[2]
  local state = redis.call('HGET', key, 'state')
  if not state or state == 'left' then
    return 0
  end
  local now = now_ms()
  redis.call('HSET', key, 'state', 'active', 'until', whole(now + ttl), 'heard', whole(now))
  return 1
end

local function renew(keys, args)
  local prefix, sid, ttl, status = keys[1], unpack(args)
  if not is_active(prefix, sid) then
    return 0
  end
  local now = now_ms()
  redis.call('HSET', prefix .. 'sess:' .. sid, 'until', whole(now + ttl), 'heard', whole(now))
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
    local now = now_ms()
    redis.call('HSET', key, 'state', 'left', 'until', whole(math.min(tonumber(deadline), now)), 'heard', whole(now))
    free(prefix, sid)
  end
  return 1
end

local function list_sessions(keys)
  local prefix, now, listed = keys[1], now_ms(), {}
  for _, sid in ipairs(sorted_members(prefix .. 'sessions')) do
    local key = prefix .. 'sess:' .. sid
    local session = redis.call('HMGET', key, 'kind', 'name', 'address', 'status', 'state', 'until', 'heard')
    local num_owned = redis.call('SCARD', prefix .. 'own:' .. sid)
    local deadline = tonumber(session[6])
    if num_owned == 0 and deadline <= now - FORGET_MS then
      forget_session(prefix, sid)
      redis.call('DEL', prefix .. 'text:' .. sid)
    else
      local alive = session[5] == 'active' and deadline > now
      listed[#listed + 1] = { sid, session[1], session[2], session[3], alive and 1 or 0, num_owned, session[4] or '',
        session[5] == 'left' and 1 or 0, now - (session[7] or now) }
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
